"""Sharing a slot of Inductor's config that holds graph passes with whoever else puts passes there.

torch 2.11 holds one callable in a slot, for the whole process; from 2.13 on it may be a list, and a value that is
set belongs to the thread that set it.  A pass of ours therefore also goes into the process-wide default, so that a
model compiled in a worker thread is served too; a thread that keeps a value of its own keeps it.
"""
from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

_LISTS = hasattr(custom_graph_pass, "get_custom_graph_passes")


class Chain(CustomGraphPass):
    """Several passes in a slot that holds one."""

    def __init__(self, passes: tuple[Callable[[torch.fx.Graph], None], ...]) -> None:
        self.passes = passes

    def __call__(self, graph: torch.fx.Graph) -> None:
        for one in self.passes:
            one(graph)

    def uuid(self) -> tuple[Any, ...] | None:
        """The uuids of all passes; None, which turns torch's cache off, when one of them has none."""
        ids = tuple(p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.passes)
        return ids if all(ids) else None


def passes_in(value: Any) -> tuple[Any, ...]:
    """The passes in a value of a slot, ours included."""
    if value is None:
        return ()
    if isinstance(value, Chain):
        return value.passes
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def holding(passes: tuple[Any, ...], like: Any) -> Any:
    """A value of a slot with these passes, of the same kind as the value ``like`` where torch allows it."""
    if len(passes) < 2 and not isinstance(like, (list, tuple)):
        return passes[0] if passes else None
    if not _LISTS:
        return Chain(passes)
    return passes if isinstance(like, tuple) else list(passes)


def appended(value: Any, ours: CustomGraphPass) -> Any:
    """``value`` with ``ours`` last; ``value`` itself is not changed, and is returned when ``ours`` is in it."""
    passes = passes_in(value)
    return value if ours in passes else holding((*passes, ours), value)


class Slot:
    """One slot and the pass of ours that `insert` puts into it.  Not thread-safe by itself."""

    def __init__(self, name: str, ours: CustomGraphPass) -> None:
        self.name = name
        self.ours = ours
        self._found: tuple[Any, tuple[Any, ...]] = (None, ())  # the value that `insert` found, and its passes then

    @property
    def value(self) -> Any:
        """What this thread finds in the slot."""
        return getattr(config, self.name)

    def holds(self) -> bool:
        return self.ours in passes_in(self.value)

    def insert(self) -> None:
        value = self.value
        if not self.holds():
            self._found = (value, passes_in(value))
        if (entry := self._default()) is not None:
            entry.default = appended(entry.default, self.ours)
        setattr(config, self.name, appended(value, self.ours))

    def remove(self) -> None:
        """Take our pass out; if nothing else changed since `insert`, the very object that it found is back."""
        if (entry := self._default()) is not None:
            entry.default = self._without(entry.default)
        setattr(config, self.name, self._without(self.value))
        self._found = (None, ())

    def _without(self, value: Any) -> Any:
        passes = passes_in(value)
        if self.ours not in passes:
            return value
        rest = tuple(p for p in passes if p is not self.ours)
        found, found_passes = self._found
        return found if rest == found_passes else holding(rest, value)

    def _default(self) -> Any:
        """The slot's entry in torch's config if its values belong to threads, else None."""
        entry = config._config[self.name]  # type: ignore[attr-defined]
        return entry if isinstance(entry.user_override, ContextVar) else None
