"""What happened to each attention block: plain frozen records, their text and JSON forms, and the process's list.

A `GraphReport` belongs to one compiled graph and is also stored on disk by its id (`store`): a graph that comes
from torch's cache in a new process runs no pass, but its operators carry the id, so its report is found again.
Nothing here imports torch at module level.
"""
from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from .reasons import Code, Reason

if TYPE_CHECKING:
    from torch.fx import Graph

Outcome = Literal["rewritten", "refused", "not attention"]
Kind = Literal["softmax", "sdpa"]
REPLAYED = "fa_inductor_graph_"
"""Prefix of a key in ``counters["inductor"]``: how often torch compiled a graph, or took it from its cache."""
_CODES = {c.code: c for c in Code}
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True)
class Block:
    """One softmax or SDPA operator of a graph, and what became of it."""

    source: str
    """``file:line function`` in the user's model."""
    kind: Kind
    words: str
    """The attention record in words, for example ``causal, window 4096, GQA 32/8, d128, bf16``."""
    outcome: Outcome
    backend: str = ""
    """What runs it, for example ``kernels sm_90``, ``sdpa``, ``reference``; empty when it was left alone."""
    reason: Reason | None = None
    """Why it was left alone; None exactly when it was rewritten."""
    training: bool = False
    """Whether the graph has a backward, which was rewritten with the forward."""
    note: str = ""


@dataclass(frozen=True)
class GraphReport:
    """The blocks of one compiled graph; operator ``i`` of the graph carries the string ``"<id>#<i>"``."""

    id: str
    blocks: tuple[Block, ...] = ()
    seconds: float = 0.0
    """Time spent in the pass, wall clock."""
    from_cache: bool = False
    """The graph came from torch's cache; no pass ran for it."""

    @property
    def rewritten(self) -> int:
        return sum(b.outcome == "rewritten" for b in self.blocks)

    @property
    def found(self) -> int:
        """Attention blocks, rewritten or refused; a softmax that is not attention does not count."""
        return sum(b.outcome != "not attention" for b in self.blocks)


def graph_id(graph: Graph) -> str:
    """An id for the report of ``graph``: equal for equal graphs, so that torch's caches still hit in a new process.

    32 hex digits over nodes, arguments, shapes, strides, dtypes and `fingerprint`; source lines do not count.
    """
    from .fingerprint import fingerprint

    digest = hashlib.sha256(fingerprint().encode())
    for node in graph.nodes:
        text = f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {_layout(node.meta.get('val'))}\n"
        digest.update(_ADDRESS.sub("", text).encode())
    return digest.hexdigest()[:32]


def _layout(val: Any) -> str:
    if not hasattr(val, "dtype") or not hasattr(val, "device"):
        return ""
    try:
        stride = val.stride()
    except (RuntimeError, NotImplementedError):  # sparse and nested tensors have none
        stride = val.layout
    return f"{val.dtype} {val.device} {tuple(val.shape)} {stride}"


class Report:
    """The blocks of one or more graphs.  ``print(report)`` shows counts, then one line for equal blocks."""

    def __init__(self, graphs: tuple[GraphReport, ...]) -> None:
        self.graphs = graphs

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(b for g in self.graphs for b in g.blocks)

    @property
    def rewritten(self) -> int:
        return sum(g.rewritten for g in self.graphs)

    @property
    def found(self) -> int:
        """Attention blocks, rewritten or refused."""
        return sum(g.found for g in self.graphs)

    def to_json(self) -> str:
        """``{"rewritten": n, "found": m, "graphs": [...]}``; a reason has ``code``, ``sentence`` and ``detail``."""
        graphs = [graph_to_dict(g) for g in self.graphs]
        return json.dumps({"rewritten": self.rewritten, "found": self.found, "graphs": graphs}, indent=2)

    def __str__(self) -> str:
        n = len(self.graphs)
        cached = sum(g.from_cache for g in self.graphs)
        where = f"{n} graph{'' if n == 1 else 's'}" + (f", {cached} from the compile cache" if cached else "")
        lines = [f"{self.rewritten} of {self.found} attention blocks rewritten ({where})"]
        if not self.graphs:
            lines.append("  no graph was compiled: call fa_inductor.enable() before torch.compile, then run the model")
        for block, count in Counter(self.blocks).items():
            lines += [f"  {line}" for line in block_lines(block, count)]
        return "\n".join(lines)

    __repr__ = __str__


def block_lines(block: Block, count: int = 1) -> list[str]:
    """Two or three lines of text for ``count`` equal blocks."""
    mode = "forward and backward" if block.training else "forward"
    head = f"{count:>3} x {block.outcome:<13} {_short(block.source)}"
    body = [block.words] if block.words else []
    if block.outcome == "rewritten":
        body.append(f"{block.kind} -> {block.backend}, {mode}")
    if block.reason is not None:
        body.append(str(block.reason))
    if block.note:
        body.append(block.note)
    return [head, *(f"      {line}" for line in body)]


def _short(source: str) -> str:
    """The part of a source path a reader needs: installed packages without their site-packages folder."""
    return source.rsplit("/site-packages/", 1)[-1]


def graph_to_dict(graph: GraphReport) -> dict[str, Any]:
    return {"id": graph.id, "seconds": round(graph.seconds, 4), "from_cache": graph.from_cache,
            "blocks": [_block_to_dict(b) for b in graph.blocks]}


def graph_from_dict(data: Any) -> GraphReport:
    """Inverse of `graph_to_dict`.

    Raises:
        ValueError: anything is missing, of another type, or unknown to this version.
    """
    try:
        blocks = tuple(_block_from_dict(b) for b in data["blocks"])
        return GraphReport(id=str(data["id"]), blocks=blocks, seconds=float(data["seconds"]),
                           from_cache=bool(data["from_cache"]))
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"not a graph report: {e!r}") from e


def _block_to_dict(block: Block) -> dict[str, Any]:
    data: dict[str, Any] = dict(vars(block))
    if block.reason is not None:
        code = block.reason.code
        data["reason"] = {"code": code.code, "sentence": code.sentence, "detail": block.reason.detail}
    return data


def _block_from_dict(data: dict[str, Any]) -> Block:
    fields = dict(data)
    if fields["outcome"] not in ("rewritten", "refused", "not attention") or fields["kind"] not in ("softmax", "sdpa"):
        raise ValueError(f"unknown block {fields['outcome']!r} {fields['kind']!r}")
    if fields["reason"] is not None:
        fields["reason"] = Reason(_CODES[fields["reason"]["code"]], str(fields["reason"]["detail"]))
    return Block(**fields)


class Registry:
    """The graphs of this process, newest last; a graph that is compiled again replaces its older report.

    Thread-safe.  ``load`` finds the stored report of a graph that came from torch's cache; such a graph is noticed by
    torch's counters (``counts``), which the cache counts up again, and by its operators (`seen`).
    """

    def __init__(self, load: Callable[[str], GraphReport | None], counts: Callable[[], dict[str, int]]) -> None:
        self._load, self._now = load, counts
        self._graphs: dict[str, GraphReport] = {}
        self._known: set[str] = set()
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, graph: GraphReport) -> None:
        with self._lock:
            self._graphs.pop(graph.id, None)
            self._graphs[graph.id] = graph
            self._known.add(graph.id)

    def seen(self, block: str, record: str) -> None:
        """An operator ran.  Called on every call of every rewritten block, so the usual path is one set look-up.

        Args:
            block: ``"<graph id>#<index>"`` as the rewrite wrote it; any other string is ignored.
            record: the attention record, used when the stored report is gone.
        """
        graph = block.partition("#")[0]
        if graph in self._known or not graph:
            return
        with self._lock:
            if graph in self._known:
                return
            self._known.add(graph)
        self._from_cache(self._load(graph) or GraphReport(graph, (_unknown_block(record),)))

    def _from_cache(self, found: GraphReport) -> None:
        with self._lock:
            self._graphs.setdefault(found.id, replace(found, from_cache=True))

    def snapshot(self) -> tuple[GraphReport, ...]:
        for graph in self._handed_out():
            if graph not in self._graphs and (found := self._load(graph)) is not None:
                self._from_cache(found)
        with self._lock:
            return tuple(self._graphs.values())

    def _handed_out(self) -> list[str]:
        """Graphs that torch compiled or took from its cache since this was last asked, by its counters."""
        counts = self._now()
        with self._lock:
            before, self._counts = self._counts, counts
        return [graph for graph, n in counts.items() if n != before.get(graph)]

    def clear(self) -> None:
        self._handed_out()
        with self._lock:
            self._graphs.clear()
            self._known.clear()


def _unknown_block(record: str) -> Block:
    try:
        from .kernels.record import Attention

        words = Attention.from_string(record).describe()
    except ValueError:
        words = ""
    return Block("unknown source", "softmax", words, "rewritten", "unknown backend",
                 note="from the compile cache; its stored report is gone, so other blocks of this graph are not listed")


def _load(graph: str) -> GraphReport | None:
    from .store import load

    return load(graph)


def torch_counts() -> dict[str, int]:
    """How often torch compiled each rewritten graph or took it from its cache, by graph id."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return {}
    return {k.removeprefix(REPLAYED): n for k, n in utils.counters["inductor"].items() if k.startswith(REPLAYED)}


registry = Registry(_load, torch_counts)


def report(*, clear: bool = False) -> Report:
    """The attention blocks of every graph compiled in this process, or loaded from torch's cache and run.

    Args:
        clear: forget them after this report, so that the next one starts empty.
    """
    result = Report(registry.snapshot())
    if clear:
        registry.clear()
    return result
