"""Where we enter torch.compile: a pass on the joint graph, and a note for graphs that come from torch's cache."""
from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from . import ops, stock
from .fingerprint import fingerprint
from .options import options
from .reasons import Code, Reason
from .report import REPLAYED, GraphReport, block_lines, graph_id, graph_to_dict, registry
from .slots import Slot
from .store import save

log = logging.getLogger(__name__)
JOINT = "joint_custom_pre_pass"
POST_GRAD = "post_grad_custom_pre_pass"
_lock = threading.RLock()


class AttentionPass(CustomGraphPass):
    """Runs the pipeline on each joint graph, keeps Inductor's attention patterns away and hands over the report.

    A pass that is not ``active`` does nothing: after `disable` one may be left inside somebody's own composite.
    """

    def __init__(self, sink: Callable[[GraphReport], None], active: bool = True) -> None:
        self.sink = sink
        self.active = active

    def __call__(self, graph: torch.fx.Graph) -> None:
        if not self.active:
            return
        stock.keep_off(graph)
        start = time.perf_counter()
        found = _run(graph)
        self.sink(replace(found, seconds=time.perf_counter() - start))

    def uuid(self) -> tuple[str, str] | None:
        """Our part of the compile cache key; None, no caching, while the outcome depends on what ran before."""
        if not self.active:
            return ("fa_inductor", "off")
        return ("fa_inductor", fingerprint()) if options.max_rewrites is None else None

    def __copy__(self) -> AttentionPass:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionPass:
        return self  # torch copies the values of its config; there must be one of us


class NotePass(CustomGraphPass):
    """Counts the reports of a compile in torch's counters, one key each, and changes nothing.

    Torch's cache keeps what was counted from here on and counts it again when it hands out the compiled graph, so
    a process in which no pass ran knows which reports to load, those without any rewritten block included.
    """

    def __init__(self) -> None:
        self._pending = threading.local()

    def expect(self, report: GraphReport) -> None:
        """The report of a joint graph whose compile goes on in this thread."""
        pending = self._pending.__dict__.setdefault("reports", [])
        pending.append((torch._guards.CompileContext.current_compile_id(), report.id))

    def __call__(self, graph: torch.fx.Graph) -> None:
        from torch._dynamo.utils import counters

        now = torch._guards.CompileContext.current_compile_id()
        for compile_id, report in self._pending.__dict__.pop("reports", ()):
            if compile_id == now:  # else that compile failed before it came here
                counters["inductor"][REPLAYED + report] += 1

    def uuid(self) -> tuple[str, str]:
        return ("fa_inductor", "note 1")

    __copy__ = AttentionPass.__copy__
    __deepcopy__ = AttentionPass.__deepcopy__


def _run(graph: torch.fx.Graph) -> GraphReport:
    try:
        from . import pipeline

        if _ahead_of_time():
            return _as_refused(pipeline.run(_copy(graph)))
        return pipeline.run(graph)
    except Exception:  # the user's model must compile whatever happens to us
        log.warning("fa_inductor failed on a graph and left it alone; please report this", exc_info=True)
        return GraphReport(graph_id(graph))


def _ahead_of_time() -> bool:
    from torch._inductor.virtualized import V

    return bool(V.aot_compilation) and not options.aot


def _copy(graph: torch.fx.Graph) -> torch.fx.Graph:
    copy, nodes = torch.fx.Graph(), {}
    for node in graph.nodes:
        nodes[node] = copy.node_copy(node, nodes.__getitem__)
    return torch.fx.GraphModule(graph.owning_module or {}, copy).graph


def _as_refused(report: GraphReport) -> GraphReport:
    blocks = tuple(replace(b, outcome="refused", backend="", reason=Reason(Code.AOT)) if b.outcome == "rewritten" else b
                   for b in report.blocks)
    return replace(report, blocks=blocks)


def deliver(report: GraphReport) -> None:
    """The sink of every compile of the user: list, disk, log, torch's counters and its structured trace."""
    from torch._dynamo.utils import counters
    from torch._logging._internal import trace_structured

    registry.add(report)
    save(report)
    NOTE.expect(report)
    counters["inductor"]["fa_inductor_rewritten"] += report.rewritten
    counters["inductor"]["fa_inductor_found"] += report.found
    trace_structured("artifact", metadata_fn=lambda: {"name": "fa_inductor_report", "encoding": "json"},
                     payload_fn=lambda: graph_to_dict(report))
    log.info("graph %s: %d of %d attention blocks rewritten, %.3f s",
             report.id[:8], report.rewritten, report.found, report.seconds)
    if log.isEnabledFor(logging.DEBUG):
        for block in report.blocks:
            log.debug("graph %s: %s", report.id[:8], "; ".join(line.strip() for line in block_lines(block)))


PASS = AttentionPass(deliver, active=False)
"""The pass of `enable`."""
COMPILE_PASS = AttentionPass(deliver)
"""The pass of ``torch.compile(model, backend="fa_inductor")``, put into the config of that compile only."""
NOTE = NotePass()
SLOTS = (Slot(JOINT, PASS), Slot(POST_GRAD, NOTE))

# The other way to the report of a cached graph, which also works when torch's counters were cleared: its operators
# carry the id.
ops.subscribe(registry.seen)


def is_enabled() -> bool:
    """Whether a compile in this thread, now, would run our pass."""
    return PASS.active and SLOTS[0].holds()


def enable() -> None:
    """Put our passes into Inductor's slots, after the passes that are there.  Calling it again changes nothing."""
    with _lock:
        PASS.active = True
        for slot in SLOTS:
            slot.insert()


def disable() -> None:
    """Take our passes out again; what others put there, before or after `enable`, stays.

    Code that is compiled already keeps running as it was compiled.
    """
    with _lock:
        PASS.active = False
        for slot in SLOTS:
            slot.remove()
        stock.restore()


_scopes = 0
_scopes_restore = False


@contextmanager
def enabled() -> Iterator[None]:
    """``enable()`` inside the block, and afterwards what was before; blocks may be nested or overlap in threads.

    The model must be compiled, that is called for the first time, inside the block.
    """
    global _scopes, _scopes_restore
    with _lock:
        if _scopes == 0:
            _scopes_restore = not PASS.active
        _scopes += 1
        enable()
    try:
        yield
    finally:
        with _lock:
            _scopes -= 1
            if _scopes == 0 and _scopes_restore:
                disable()
