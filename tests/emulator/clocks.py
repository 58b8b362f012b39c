"""Vector clocks and the race detector (PTX ISA 8 "Memory Consistency Model": causality order, proxies).

An agent is anything whose accesses have an order of their own: a warp, the products of a warp, the bulk stores of a
warp, the bulk copies that complete on one mbarrier.  Agent a's accesses carry its epoch; agent b has them behind it
when ``clock_b[a] >= epoch``.  A second clock says which generic-proxy writes a proxy fence has made visible to the
async proxy.

Accesses are kept for words of four bytes: two warps that share a word by bytes are reported.
"""
from __future__ import annotations

import numpy as np

from .errors import Fault

CAPACITY = 320
"""Agents of one cluster of CTAs."""
Where = np.ndarray | slice


class Clock:
    """What one agent, or one barrier, has behind it."""

    __slots__ = ("barriers", "fenced", "seen")

    def __init__(self) -> None:
        self.seen = np.zeros(CAPACITY, np.int64)
        self.fenced = np.zeros(CAPACITY, np.int64)
        self.barriers = np.zeros(CAPACITY, np.int64)
        """Of others, but initialisations of mbarriers only: what fence.mbarrier_init releases."""

    def join(self, other: Clock) -> None:
        np.maximum(self.seen, other.seen, out=self.seen)
        np.maximum(self.fenced, other.fenced, out=self.fenced)
        np.maximum(self.barriers, other.barriers, out=self.barriers)

    def copy(self) -> Clock:
        new = Clock()
        new.seen[:], new.fenced[:], new.barriers[:] = self.seen, self.fenced, self.barriers
        return new

    def released(self) -> Clock:
        """What a relaxed arrival hands on: what a fence before it has released."""
        new = Clock()
        new.barriers[:] = self.barriers
        return new

    def fence(self) -> None:
        """Everything behind this agent is now visible to the async proxy."""
        np.maximum(self.fenced, self.seen, out=self.fenced)


class Agents:
    """Names and numbers of the agents of a cluster."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def new(self, name: str) -> int:
        if len(self.names) == CAPACITY:
            raise Fault("limit", f"more than {CAPACITY} warps, barriers and asynchronous units")
        self.names.append(name)
        return len(self.names) - 1


class Shadow:
    """Last write and last reads of each word of one memory."""

    def __init__(self, words: int, agents: Agents, what: str):
        self.agents, self.what, self.words = agents, what, words
        self.writer = np.zeros(words, np.int32)
        self.epoch = np.zeros(words, np.int64)  # 0: never written, which everybody has behind him
        self.generic = np.zeros(words, bool)
        self.reads: dict[int, np.ndarray] = {}

    def _name(self, where: Where, bad: np.ndarray) -> tuple[int, str]:
        i = int(np.argmax(bad))
        word = where.start + i if isinstance(where, slice) else int(where.reshape(-1)[i])
        return i, f"{self.what} at {4 * word:#x}"

    def _written(self, where: Where, clock: Clock, doing: str, asynchronous: bool) -> None:
        writer, epoch = self.writer[where].reshape(-1), self.epoch[where].reshape(-1)
        late = clock.seen[writer] < epoch
        if late.any():
            i, place = self._name(where, late)
            raise Fault("race", f"{doing} {place} is not ordered after its write by {self.agents.names[writer[i]]}")
        if asynchronous:
            generic = self.generic[where].reshape(-1)
            if generic.any():
                late = generic & (clock.fenced[writer] < epoch)
                if late.any():
                    i, place = self._name(where, late)
                    raise Fault("proxy", f"{doing} {place} by the async proxy after a write by "
                                f"{self.agents.names[writer[i]]} without fence.proxy.async between")

    def read(self, where: Where, agent: int, at: int, clock: Clock, asynchronous: bool = False) -> None:
        """Agent reads words at its epoch `at`, having `clock` behind it."""
        self._written(where, clock, "read of", asynchronous)
        row = self.reads.get(agent)
        if row is None:
            row = self.reads[agent] = np.zeros(self.words, np.int64)
        row[where] = at

    def write(self, where: Where, agent: int, at: int, clock: Clock, asynchronous: bool = False) -> None:
        """Agent writes words at its epoch `at`, having `clock` behind it."""
        self._written(where, clock, "write to", asynchronous)
        for reader, row in self.reads.items():
            late = row[where] > clock.seen[reader]
            if late.any():
                _, place = self._name(where, late.reshape(-1))
                raise Fault("race", f"write to {place} is not ordered after its read by {self.agents.names[reader]}")
        self.writer[where], self.epoch[where], self.generic[where] = agent, at, not asynchronous
