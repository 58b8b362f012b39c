"""Barrier objects: mbarriers (PTX ISA 9.7.13.15), named barriers of a CTA and the barrier of a cluster (9.7.13:
bar, barrier.cluster)."""
from __future__ import annotations

from collections import deque

from .clocks import Clock
from .errors import Fault

TX_LIMIT = (1 << 20) - 1
COUNT_LIMIT = (1 << 20) - 1


class MBarrier:
    """Phase, pending arrivals and pending bytes; knows what its completed phases have behind them."""

    def __init__(self, where: str, count: int, agent: int, owner: int, at: int):
        if not 1 <= count <= COUNT_LIMIT:
            raise Fault("barrier", f"mbarrier count {count}")
        self.where, self.count, self.agent = where, count, agent
        self.phase, self.pending, self.tx = 0, count, 0
        self.coming, self.complete = Clock(), Clock()
        self.owner, self.at = owner, at
        """The warp's agent that initialised it, and when."""
        self.fenced = False
        """Whether its initialisation is known to the async proxy."""
        self.arrived: dict[tuple[int, int], str] = {}
        self.dropped = 0

    def arrive(self, clock: Clock, who: tuple[int, int], name: str, n: int, drop: bool = False) -> int:
        """n arrivals of one thread; returns the phase they belong to.  A thread arrives once a phase."""
        if who in self.arrived:
            raise Fault("double arrive", f"{name} lane {who[1]} arrives twice in phase {self.phase} of {self.where} "
                        f"({self.pending} of {self.count} pending)")
        if n > self.pending:
            raise Fault("double arrive", f"{n} arrivals at {self.where}, phase {self.phase}, which has {self.pending} "
                        f"of {self.count} pending and {self.tx} bytes")
        self.arrived[who] = name
        self.coming.join(clock)
        self.pending -= n
        if drop:
            self.dropped += n
        phase = self.phase
        self.advance()
        return phase

    def expect(self, size: int) -> None:
        self.tx += size
        if abs(self.tx) > TX_LIMIT:
            raise Fault("barrier", f"{self.tx} bytes pending at {self.where}")

    def deliver(self, size: int) -> None:
        """complete_tx: bytes have arrived."""
        self.tx -= size
        if abs(self.tx) > TX_LIMIT:
            raise Fault("barrier", f"{self.tx} bytes pending at {self.where}")
        self.advance()

    def advance(self) -> None:
        if self.pending == 0 and self.tx == 0:
            self.coming.seen[self.agent] = self.phase + 1
            self.complete.join(self.coming)
            self.phase += 1
            self.count -= self.dropped
            self.dropped = 0
            self.pending = self.count
            self.arrived.clear()

    def describe(self) -> str:
        missing = f"{self.pending} of {self.count} arrivals" if self.pending else "no arrivals"
        came = ", ".join(sorted(set(self.arrived.values())))
        return (f"{self.where} in phase {self.phase}: {missing} and {self.tx} bytes missing"
                + (f"; arrived: {came}" if came else ""))


class NamedBarrier:
    """One of the sixteen barriers of a CTA, or the barrier of a cluster."""

    def __init__(self, where: str):
        self.where = where
        self.expected = 0
        self.arrived: list[str] = []
        self.threads = 0
        self.generation = 0
        self.coming = Clock()
        self.complete: deque[Clock] = deque(maxlen=8)
        self.value = True
        self.count = 0
        self.results: dict[int, tuple[bool, bool, int]] = {}
        self.every, self.some = True, False

    def arrive(self, clock: Clock, name: str, threads: int, expected: int) -> int:
        """One warp arrives; returns the generation that it completes or waits for."""
        if not self.arrived:
            self.expected = expected
        if expected != self.expected:
            raise Fault("barrier", f"{name} is at {self.where} for {expected} threads, {', '.join(self.arrived)} for "
                        f"{self.expected}")
        if name in self.arrived:
            raise Fault("double arrive", f"{name} arrives twice at {self.where} before it is complete "
                        f"({self.threads} of {self.expected} threads, from {', '.join(self.arrived)})")
        self.arrived.append(name)
        self.threads += threads
        self.coming.join(clock)
        mine = self.generation
        if self.threads > self.expected:
            raise Fault("barrier", f"{self.threads} threads at {self.where}, which is for {self.expected}")
        if self.threads == self.expected:
            self.complete.append(self.coming.copy())
            self.results[mine] = (self.every, self.some, self.count)
            self.results.pop(mine - 8, None)
            self.every, self.some, self.count = True, False, 0
            self.generation += 1
            self.arrived.clear()
            self.threads = 0
        return mine

    def contribute(self, yes: int, total: int) -> None:
        """Predicates of ``bar.red``."""
        self.every &= yes == total
        self.some |= yes > 0
        self.count += yes

    def describe(self) -> str:
        return f"{self.where}: {self.threads} of {self.expected} threads, from {', '.join(self.arrived) or 'nobody'}"
