"""Keeps Inductor's own attention patterns away from graphs that we look at.

Those patterns rewrite some look-alikes into wrong results (softmax over the query axis between two products,
``torch.add(scores, mask, alpha=2)``, soft masks), and torch has no switch for them alone.  Each of their entries in
the joint graph's pattern table gets its check wrapped: no match on a graph of ours, the old check on any other.
The decision is made graph by graph, so code compiled with and without us can be mixed, and the compile cache keeps
them apart by the ``uuid`` of our pass.
"""
from __future__ import annotations

import inspect
import logging
import threading
import weakref
from collections.abc import Iterator
from typing import Any

log = logging.getLogger(__name__)
_ours: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.Lock()
_MODULE = "torch._inductor.fx_passes.fuse_attention"


class _Unless:
    """The check of a stock attention pattern, switched off for graphs of ours."""

    def __init__(self, check: Any) -> None:
        self.check = check

    def __call__(self, match: Any) -> bool:
        return match.ctx.graph not in _ours and self.check(match)


def entries() -> Iterator[Any]:
    """The stock attention patterns in Inductor's table; they are registered before the first joint pass runs.

    An entry's check closes over the function that its pattern was traced from, which is all that tells it apart.
    """
    from torch._inductor.fx_passes import joint_graph

    for bucket in joint_graph.patterns.patterns.values():
        for entry in bucket:
            check = getattr(entry, "extra_check", None)
            check = check.check if isinstance(check, _Unless) else check
            cells = inspect.getclosurevars(check).nonlocals if inspect.isfunction(check) else {}
            if getattr(cells.get("search_fn"), "__module__", None) == _MODULE:
                yield entry


def keep_off(graph: Any) -> None:
    """No stock attention pattern will match in ``graph`` (a ``torch.fx.Graph``)."""
    _ours.add(graph)
    with _lock:
        known = list(entries())
        for entry in known:
            if not isinstance(entry.extra_check, _Unless):
                entry.extra_check = _Unless(entry.extra_check)
    if not known:
        log.warning("Inductor's own attention patterns were not found in this torch version; they stay on")


def restore() -> None:
    """Take our checks out of Inductor's table again."""
    with _lock:
        for entry in entries():
            if isinstance(entry.extra_check, _Unless):
                entry.extra_check = entry.extra_check.check
