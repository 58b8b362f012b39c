"""One warp: its registers, its lanes' program counters, its clock (PTX ISA 3.1 "A Set of SIMT Multiprocessors").

Lanes that branch apart become paths.  The path at the lowest instruction runs first and paths that meet join, which
brings structured code back together; a path that waits lets the others go on.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .clocks import Clock
from .decode import BLOCK, Step
from .errors import Fault
from .lanes import FULL, LANES, bits, describe
from .registers import Registers

if TYPE_CHECKING:
    from .cta import Cta


@dataclass(slots=True)
class Wait:
    """Why a path does not go on, and how to see that it can."""

    kind: str
    reason: Callable[[], str]
    ready: Callable[[], bool]


class Issuer:
    """The instruction that a warp is at: faults of what it started, raised later, are located there."""

    def __init__(self, w: Warp):
        self.name, self.step = w.name, w.cta.steps[w.path.pc]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Fault):
            error.locate(f"{self.name} (asynchronously)", self.step.line, self.step.text, self.step.source)


class Path:
    """Lanes at one instruction."""

    __slots__ = ("mask", "pc", "token", "wait")

    def __init__(self, pc: int, mask: int):
        self.pc, self.mask = pc, mask
        self.wait: Wait | None = None
        self.token: Any = None
        """What an instruction has to remember between blocking and coming back."""


class Warp:
    """State of one warp; `run` executes instructions until it has to wait."""

    def __init__(self, cta: Cta, index: int, threads: int):
        self.cta, self.index = cta, index
        self.name = f"{cta.name} warp {index}"
        self.r = Registers(cta.kernel.registers)
        linear = 32 * index + np.arange(LANES)
        x, y, _ = cta.threads
        self.tid = (linear % x, linear // x % y, linear // (x * y))
        self.live = FULL if threads >= 32 else (1 << threads) - 1
        self.paths = [Path(0, self.live)]
        self.path = self.paths[0]
        agents = cta.cluster.agents
        self.agent = agents.new(self.name)
        self.products = agents.new(f"products of {self.name}")
        self.clock = Clock()
        self.clock.seen[self.agent] = 1
        self.register_count = cta.launch_registers
        self.active = 0
        """Lanes of the instruction that is running."""
        self.unfenced = 0
        """Lanes that have written memory since they last executed a proxy fence."""
        self.last_line: Step | None = None
        self.units: dict[str, Any] = {}
        """State of asynchronous units, made on first use: products, bulk groups."""

    # ------------------------------------------------------------------ time

    @property
    def now(self) -> int:
        return int(self.clock.seen[self.agent])

    def tick(self) -> None:
        """What this warp does from here on is later than what it has published."""
        self.clock.seen[self.agent] += 1

    def proxy_fence(self, mask: int) -> None:
        """What the fencing lanes have behind them is visible to the async proxy; other lanes' own writes are not."""
        own = int(self.clock.fenced[self.agent])
        self.clock.fence()
        self.unfenced &= ~mask
        if self.unfenced:
            self.clock.fenced[self.agent] = own
        self.tick()

    def block(self, kind: str, reason: Callable[[], str], ready: Callable[[], bool]) -> Any:
        """The current path waits; its instruction runs again afterwards."""
        self.path.wait = Wait(kind, reason, ready)
        self.cta.cluster.stats.barrier_waits[kind] += 1
        return BLOCK

    def together(self, mask: int, members: int) -> bool:
        """Whether all live lanes of a member mask are here; blocks the path otherwise."""
        members &= self.live
        if mask & ~members:
            raise Fault("divergence", f"{describe(mask & ~members)} execute an instruction whose member mask lacks them")
        if members & ~mask == 0:
            return True
        path = self.path
        self.block("warp", lambda: f"{describe(members & ~path.mask)} to come to the same instruction",
                   lambda: members & ~path.mask & self.live == 0)
        return False

    # ------------------------------------------------------------------ running

    @property
    def done(self) -> bool:
        return not self.paths

    def ready(self) -> bool:
        return any(p.wait is None or p.wait.ready() for p in self.paths) or self._can_join()

    def _can_join(self) -> bool:
        free = [p.pc for p in self.paths if p.token is None]
        return len(set(free)) < len(free)

    def _pick(self) -> Path | None:
        paths: list[Path] = []
        for p in sorted(self.paths, key=lambda p: p.pc):
            if paths and paths[-1].pc == p.pc and p.token is None and paths[-1].token is None:
                paths[-1].mask |= p.mask
                if paths[-1].wait is not None and paths[-1].wait.kind != "warp":
                    paths[-1].wait = None
            else:
                paths.append(p)
        self.paths = paths
        for p in paths:
            if p.wait is None or p.wait.ready():
                return p
        return None

    def run(self, budget: int) -> int:
        """Execute up to `budget` instructions; returns how many."""
        steps, counts = self.cta.steps, self.cta.counts
        r = self.r
        init, busy = r.init, r.busy
        step: Step | None = None
        n = 0
        try:
            while n < budget:
                if len(self.paths) == 1:
                    path = self.paths[0]
                    if path.wait is not None and not path.wait.ready():
                        return n
                else:
                    path = self._pick()
                    if path is None:
                        return n
                path.wait = None
                self.path = path
                if path.pc >= len(steps):
                    raise Fault("control", "execution ran past the last instruction")
                step = steps[path.pc]
                mask = active = path.mask
                n += 1
                if step.guard is not None:
                    g = step.guard
                    if init[g.id] & mask != mask:
                        raise r.missing(g.id, mask)
                    value = bits(r.u[g.id])
                    active &= ~value if g.negated else value
                    if active != mask:
                        for i in step.writes:
                            if mask & ~active & ~init[i]:
                                r.taint[i] = r.taint.get(i, 0) | mask & ~active & ~init[i]
                if step.target >= 0:
                    counts[path.pc] += 1
                    self._branch(path, step.target, active)
                    continue
                if active == 0:
                    path.pc += 1
                    continue
                if step.stops:
                    counts[path.pc] += 1
                    self._stop(path, active)
                    if not self.paths:
                        return n
                    continue
                if step.converged and active != self.live:
                    if active != mask or not self.together(mask, self.live):
                        if active != mask:
                            raise Fault("divergence", f"only {describe(active)} of {describe(self.live)} execute an "
                                        "instruction that the whole warp must execute")
                        continue
                undefined = False
                for i in step.reads:
                    if active & ~init[i]:
                        if not step.pure or i in busy:
                            raise r.missing(i, active)
                        undefined = True
                    if busy and i in busy:
                        raise r.missing(i, active)
                self.active = active
                if undefined:
                    self._pass_on(step, active)
                elif step.run(self, active) is BLOCK:
                    continue
                counts[path.pc] += 1
                path.pc += 1
        except Fault as e:
            if step is None:
                raise e.locate(self.name, 0, "", None) from None
            raise e.locate(self.name, step.line, step.text, step.source) from None
        finally:
            self.last_line = step or self.last_line
        return n

    def _pass_on(self, step: Step, active: int) -> None:
        """Arithmetic on a value that a false guard left undefined: the result is undefined too."""
        r = self.r
        lost = {}
        for i in step.reads:
            lost[i] = active & ~r.init[i]
            if lost[i] & ~r.taint.get(i, 0):
                raise r.missing(i, active)
        bad = 0
        for m in lost.values():
            bad |= m
        if step.select is not None:
            a, b, p, negated = step.select
            chosen = bits(r.u[p]) ^ (FULL if negated else 0)
            bad = lost.get(p, 0) | lost.get(a, 0) & chosen | lost.get(b, 0) & ~chosen  # type: ignore[arg-type]
        step.run(self, active)
        for d in step.writes:
            r.init[d] &= ~bad
            r.taint[d] = r.taint.get(d, 0) & ~active | bad

    def _branch(self, path: Path, target: int, active: int) -> None:
        if active == path.mask:
            path.pc = target
        elif active == 0:
            path.pc += 1
        else:
            self.paths.append(Path(target, active))
            path.mask &= ~active
            path.pc += 1

    def _stop(self, path: Path, active: int) -> None:
        self.live &= ~active
        path.mask &= ~active
        if path.mask:
            path.pc += 1
        else:
            self.paths.remove(path)
        if not self.paths:
            for unit in self.units.values():
                unit.at_exit(self)
