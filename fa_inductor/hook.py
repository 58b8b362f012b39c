"""Where we enter torch.compile: one pass in Inductor's ``joint_custom_pre_pass``, beside what others put there.

torch 2.11 holds one callable there, for the whole process; from 2.13 on it may be a list, and a value that is set
belongs to the thread that set it.  `enable` therefore also changes the process-wide default, so that a model
compiled in a worker thread is served too; a thread that keeps a value of its own keeps it.
"""
from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

from . import ops, stock
from .fingerprint import fingerprint
from .options import options
from .reasons import Code, Reason
from .report import GraphReport, block_lines, graph_id, graph_to_dict, registry
from .store import save

log = logging.getLogger(__name__)
HOOK = "joint_custom_pre_pass"
_LISTS = hasattr(custom_graph_pass, "get_custom_graph_passes")
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


class Chain(CustomGraphPass):
    """Several passes in a hook that holds one."""

    def __init__(self, passes: tuple[Callable[[torch.fx.Graph], None], ...]) -> None:
        self.passes = passes

    def __call__(self, graph: torch.fx.Graph) -> None:
        for one in self.passes:
            one(graph)

    def uuid(self) -> tuple[Any, ...] | None:
        """The uuids of all passes; None, which turns torch's cache off, when one of them has none."""
        ids = tuple(p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.passes)
        return ids if all(ids) else None


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
_before: tuple[Any, tuple[Any, ...]] = (None, ())  # what enable() found, and the passes in it

# A graph that torch took from its cache ran no pass here, but its operators name the report that was stored.
ops.subscribe(registry.seen)


def passes_in(value: Any) -> tuple[Any, ...]:
    """The passes in a value of the hook, ours included."""
    if value is None:
        return ()
    if isinstance(value, Chain):
        return value.passes
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def holding(passes: tuple[Any, ...], like: Any) -> Any:
    """A value of the hook with these passes, of the same kind as the value ``like`` where torch allows it."""
    if len(passes) < 2 and not isinstance(like, (list, tuple)):
        return passes[0] if passes else None
    if not _LISTS:
        return Chain(passes)
    return passes if isinstance(like, tuple) else list(passes)


def appended(value: Any, ours: AttentionPass) -> Any:
    """``value`` with ``ours`` last; ``value`` itself is not changed, and is returned when ``ours`` is in it."""
    passes = passes_in(value)
    return value if ours in passes else holding((*passes, ours), value)


def _without(value: Any) -> Any:
    passes = passes_in(value)
    if PASS not in passes:
        return value
    rest = tuple(p for p in passes if p is not PASS)
    found, found_passes = _before
    return found if rest == found_passes else holding(rest, value)


def _default() -> Any:
    """The hook's entry in torch's config if its values belong to threads, else None."""
    entry = config._config[HOOK]  # type: ignore[attr-defined]
    return entry if isinstance(entry.user_override, ContextVar) else None


def is_enabled() -> bool:
    """Whether a compile in this thread, now, would run our pass."""
    return PASS.active and PASS in passes_in(getattr(config, HOOK))


def enable() -> None:
    """Put the pass into Inductor's hook, after the passes that are there.  Calling it again changes nothing."""
    global _before
    with _lock:
        value = getattr(config, HOOK)
        if not PASS.active:
            found = _without(value)
            _before = (found, passes_in(found))
        PASS.active = True
        if (entry := _default()) is not None:
            entry.default = appended(entry.default, PASS)
        setattr(config, HOOK, appended(value, PASS))


def disable() -> None:
    """Take the pass out again; what others put into the hook, before or after `enable`, stays.

    Code that is compiled already keeps running as it was compiled.
    """
    global _before
    with _lock:
        PASS.active = False
        if (entry := _default()) is not None:
            entry.default = _without(entry.default)
        setattr(config, HOOK, _without(getattr(config, HOOK)))
        _before = (None, ())
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
