"""Asynchronous copies in flight, their groups, and what they need of memory (PTX ISA 9.7.9.25
"Asynchronous copy").

A copy is issued by a thread and happens later, at a random time before its completion is waited for.  Its accesses
belong to the async proxy and are stamped with its completion mechanism: an mbarrier's phase, or the thread's bulk group.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .access import claim, combine, one_lane
from .barriers import MBarrier
from .cta import Cta
from .decode import DTYPES
from .errors import Fault
from .lanes import lanes
from .memory import Buffer
from .sync import barrier_place
from .warp import Issuer, Warp

SHARED = ("shared::cta", "shared::cluster")


@dataclass
class Copy:
    """One copy in flight; a fault in it is one of the instruction that issued it."""

    issuer: Issuer
    action: Callable[[], None]
    lane: int = 0
    group: int | None = None
    """Of its thread; None before commit."""
    serial: int = 0
    done: bool = False

    def perform(self) -> None:
        if not self.done:
            self.done = True
            with self.issuer:
                self.action()


@dataclass
class Groups:
    """Bulk groups, or cp.async groups, of the threads of a warp (9.7.9.25)."""

    agent: int
    what: str
    copies: list[Copy] = field(default_factory=list)
    committed: dict[int, int] = field(default_factory=dict)
    """Groups that a lane has committed."""
    issued: int = 0

    def add(self, w: Warp, action: Callable[[], None], lane: int) -> None:
        """A copy that was just issued; its accesses are stamped `issued`."""
        copy = Copy(Issuer(w), action, lane, serial=self.issued)
        self.copies.append(copy)
        w.cta.cluster.pending.append(copy)

    def commit(self, mask: int) -> None:
        for lane in np.flatnonzero(lanes(mask)).tolist():
            number = self.committed.get(lane, 0)
            for c in self.copies:
                if c.lane == lane and c.group is None:
                    c.group = number
            self.committed[lane] = number + 1

    def wait(self, w: Warp, mask: int, allowed: int) -> None:
        """Complete all but the newest `allowed` groups of these lanes."""
        left = []
        for c in self.copies:
            old = c.group is not None and mask >> c.lane & 1 and c.group < self.committed.get(c.lane, 0) - allowed
            if old:
                c.perform()
                if c in w.cta.cluster.pending:
                    w.cta.cluster.pending.remove(c)
            else:
                left.append(c)
        self.copies = left
        w.clock.seen[self.agent] = min((c.serial - 1 for c in left), default=self.issued)

    def at_exit(self, w: Warp) -> None:
        if self.copies:
            raise Fault("exit", f"{w.name} ends with {len(self.copies)} {self.what} that nothing waits for")


def groups_of(w: Warp, kind: str = "bulk") -> Groups:
    if kind not in w.units:
        what = "bulk copies from shared memory" if kind == "bulk" else "cp.async copies"
        w.units[kind] = Groups(w.cta.cluster.agents.new(f"{what} of {w.name}"), what)
    return w.units[kind]


def shared_place(w: Warp, address: int, size: int, align: int, what: str) -> tuple[Cta, int]:
    cta, at = w.cta.local(address)
    if at % align:
        raise Fault("misaligned", f"{what} at {at:#x} of shared memory: must be a multiple of {align}")
    cta.shared.check(at, at + size, what)
    cta.shared.data_only(slice(at, at + size), what)
    return cta, at


def words_of(at: int, size: int) -> slice:
    return slice(at // 4, (at + size + 3) // 4)


def ready_barrier(w: Warp, address: int, space: str | None, what: str) -> tuple[Cta, int, MBarrier]:
    """An mbarrier that a copy will complete on: the async proxy must know it."""
    cta, offset = barrier_place(w, address, space)
    b = cta.barrier(offset, w, what)
    if not b.fenced:
        raise Fault("proxy", f"{what} of {b.where}, whose initialisation no fence.mbarrier_init or fence.proxy.async follows")
    return cta, offset, b


def into_shared(w: Warp, targets: list[tuple[Cta, int, MBarrier]], size: int, extent: int, source: Callable[[], np.ndarray],
                places: Callable[[int], np.ndarray]) -> None:
    """A copy of `size` bytes to the same offset of one or several CTAs, completing on their mbarriers.

    source gives the bytes, places(offset) where each of them goes, within `extent` bytes.  What lies between them
    belongs to the copy too, and nothing says what it holds afterwards.
    """
    for cta, at, b in targets:
        cta.shared.shadow.write(words_of(at, extent), b.agent, b.phase + 1, w.clock, asynchronous=True)

    def perform() -> None:
        data = source()
        for cta, at, b in targets:
            index = places(at)
            cta.shared.known[at:at + extent] = False
            cta.shared.data[index] = data
            cta.shared.known[index] = True
            b.deliver(size)

    w.cta.cluster.pending.append(Copy(Issuer(w), perform))
    w.cta.cluster.stats.tma_load_bytes += size * len(targets)
    w.cta.cluster.stats.tma_copies += 1


def from_shared(w: Warp, mask: int, cta: Cta, at: int, size: int, extent: int, perform: Callable[[], None],
                again: bool = False) -> None:
    """A copy of `size` bytes that lie within `extent` of shared memory, in a bulk group of the executing thread.

    again: another lane of this instruction does the same; it is not counted, since the machine issues one.
    """
    groups = groups_of(w)
    groups.issued += 1
    cta.shared.shadow.read(words_of(at, extent), groups.agent, groups.issued, w.clock, asynchronous=True)
    groups.add(w, perform, one_lane(mask))
    if again:
        return
    w.cta.cluster.stats.tma_store_bytes += size
    w.cta.cluster.stats.tma_copies += 1


def put_global(w: Warp, b: Buffer, index: np.ndarray, data: np.ndarray, op: str, t: str) -> None:
    if op:
        b.need(index, "bulk reduction")
        dtype = DTYPES[t]
        old = np.ascontiguousarray(b.data[index]).reshape(-1).view(dtype)
        data = np.ascontiguousarray(combine(op, t)(old, np.ascontiguousarray(data).reshape(-1).view(dtype))).view(
            np.uint8).reshape(index.shape)
    else:
        claim(w, b, index, asynchronous=True)
    b.data[index] = data
    b.known[index] = True
