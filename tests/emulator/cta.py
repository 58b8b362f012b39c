"""CTAs, clusters and the cooperative scheduler (PTX ISA 2.2 "Thread Hierarchy").

Warps run in random turns of random length; asynchronous copies and products happen at random times between their
issue and their wait.  One seed, one run.
"""
from __future__ import annotations

import random
from typing import Any, Protocol

import numpy as np

from .barriers import MBarrier, NamedBarrier
from .clocks import Agents
from .decode import Step
from .errors import Fault, place
from .matrix import Unit
from .memory import CONST_BASE, GLOBAL_BASE, PARAM_BASE, RANK_SHIFT, RESERVED, SHARED_WINDOW, Global, Memory, Shared
from .parser import Kernel
from .stats import Stats
from .warp import Warp

REGISTER_FILE = 65536


class Pending(Protocol):
    """An asynchronous operation that has been issued and may happen at any time."""

    def perform(self) -> None: ...


class Cluster:
    """CTAs that run together, and what they share."""

    def __init__(self, shape: tuple[int, int, int], memory: Global, stats: Stats, seed: int):
        self.shape, self.memory, self.stats = shape, memory, stats
        self.agents = Agents()
        self.ctas: list[Cta] = []
        self.pending: list[Pending] = []
        self.queues: list[Unit] = []
        """Units whose operations happen in order."""
        self.random = random.Random(seed)
        self.steps = 0
        self.barrier = NamedBarrier("the cluster barrier")

    def run(self, limit: int) -> None:
        """Until every warp has ended."""
        rnd = self.random
        warps = [w for c in self.ctas for w in c.warps]
        while True:
            ready = [w for w in warps if w.paths and w.ready()]
            queues = [q for q in self.queues if q.waiting()]
            if (self.pending or queues) and (not ready or rnd.random() < 0.3):
                self._asynchronous(queues)
                continue
            if not ready:
                break
            w = ready[rnd.randrange(len(ready))]
            self.stats.switches += 1
            self.steps += w.run(rnd.choice((1, 5, 20, 80, 300)))
            if self.steps > limit:
                raise Fault("limit", f"more than {limit} instructions" + _waiting(warps))
        stuck = [w for w in warps if w.paths]
        if stuck:
            raise Fault("deadlock", "nothing can go on" + _waiting(stuck))
        for c in self.ctas:
            for b in c.barriers.values():
                if b.tx:
                    raise Fault("barrier", f"{c.name} ends with {b.tx} bytes pending at {b.where}")

    def _asynchronous(self, queues: list[Unit]) -> None:
        k = self.random.randrange(len(self.pending) + len(queues))
        if k < len(self.pending):
            self.pending.pop(k).perform()
        else:
            queues[k - len(self.pending)].step()


def _waiting(warps: list[Warp]) -> str:
    parts = []
    for w in warps:
        for p in w.paths:
            step = w.cta.steps[min(p.pc, len(w.cta.steps) - 1)]
            why = p.wait.reason() if p.wait is not None else "its turn"
            parts.append(f"\n    {w.name} at PTX line {step.line} ({place(step.source)}) waits for {why}")
    return "".join(parts)


class Cta:
    """One thread block."""

    def __init__(self, cluster: Cluster, kernel: Kernel, steps: list[Step], index: tuple[int, int, int], serial: int,
                 rank: int, grid: tuple[int, int, int], threads: tuple[int, int, int], dynamic_size: int,
                 params: Memory, maps: dict[int, Any], constants: Memory, names: dict[str, int],
                 launch_registers: int | None):
        self.cluster, self.kernel, self.steps = cluster, kernel, steps
        self.index, self.serial, self.rank, self.grid, self.threads = index, serial, rank, grid, threads
        self.name = f"CTA {index[0]}" if index[1:] == (0, 0) else f"CTA {index}"
        self.dynamic_size, self.params, self.maps, self.constants, self.names = dynamic_size, params, maps, constants, names
        self.static_size = max((v.offset + v.size for v in kernel.shared), default=0)
        start = -(-self.static_size // 1024) * 1024
        self.dynamic_offset = RESERVED + start
        self.shared = Shared(start + dynamic_size if dynamic_size else self.static_size, cluster.agents, self.name)
        self.barriers: dict[int, MBarrier] = {}
        self.named = [NamedBarrier(f"barrier {i} of {self.name}") for i in range(16)]
        self.counts = np.zeros(len(steps), np.int64)
        total = threads[0] * threads[1] * threads[2]
        self.launch_registers = launch_registers or kernel.registers_limit or min(255, REGISTER_FILE // total // 8 * 8)
        self.register_pool = 0
        """Registers that setmaxnreg.dec has given back; the pool is the CTA's own (PTX ISA 9.7.19.5)."""
        self.group_log: dict[int, list[tuple[Any, ...]]] = {}
        self.warps = [Warp(self, i, total - 32 * i) for i in range(-(-total // 32))]

    def address(self, name: str) -> int:
        """Address of a variable: in shared memory, or in the windows of parameters and constants."""
        if name == self.kernel.dynamic:
            return self.dynamic_offset
        for v in self.kernel.shared:
            if v.name == name:
                return RESERVED + v.offset
        return self.names[name]

    def barrier(self, address: int, w: Warp, what: str) -> MBarrier:
        """The mbarrier at a shared::cta address, which must be initialised, and seen to be."""
        b = self.barriers.get(address)
        if b is None:
            raise Fault("barrier", f"{what} at {address:#x} of shared memory of {self.name}, where no mbarrier was initialised")
        if max(w.clock.seen[b.owner], w.clock.barriers[b.owner]) < b.at:
            raise Fault("race", f"{what} of {b.where} is not ordered after its initialisation by "
                        f"{self.cluster.agents.names[b.owner]}")
        return b

    def local(self, address: int) -> tuple[Cta, int]:
        """CTA and offset of a shared::cluster address."""
        rank = address >> RANK_SHIFT
        if rank == 0:
            return self, address
        if rank > len(self.cluster.ctas):
            raise Fault("bounds", f"shared::cluster address {address:#x} of CTA rank {rank - 1}")
        return self.cluster.ctas[rank - 1].there(), address & ((1 << RANK_SHIFT) - 1)

    def there(self) -> Cta:
        """Itself, whose shared memory somebody wants: it must not have ended."""
        if not any(w.paths for w in self.warps):
            raise Fault("ended", f"shared memory of {self.name}, which has ended")
        return self

    def space(self, address: int) -> str:
        """State space of a generic address."""
        if address >= GLOBAL_BASE:
            return "global"
        if address >= CONST_BASE:
            return "const"
        if address >= PARAM_BASE:
            return "param"
        if address >= SHARED_WINDOW:
            return "shared"
        raise Fault("bounds", f"generic address {address:#x} is in no window")
