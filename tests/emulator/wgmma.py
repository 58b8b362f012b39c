"""wgmma: asynchronous products of a warpgroup (PTX ISA 9.7.15 "Asynchronous Warpgroup Level Matrix Multiply-Accumulate").

Each of the four warps computes its 16 rows of D when its product happens, which is at a random time between the issue
and the wait.  Until wgmma.wait_group the accumulators are unwritten and the registers of A may not be touched.
Products are summed in float32; the order of the sum along K is the machine's, and not that of the tensor core.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from .decode import Form, Run, operation
from .errors import Fault
from .lanes import FULL, lanes
from .matrix import ITEM, Descriptor, Tile, decode
from .parser import Reg, Vector
from .warp import Issuer, Warp


@lru_cache(maxsize=8)
def _fragment(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of D [16, n] for each register and lane (9.7.15, figure of the D fragment)."""
    i, lane = np.arange(n // 2)[:, None], np.arange(32)[None, :]
    return lane // 4 + 8 * (i // 2 % 2) + 0 * i, 8 * (i // 4) + 2 * (lane % 4) + i % 2


def fragment_a(words: np.ndarray, kind: str) -> np.ndarray:
    """The A fragment of a warp, four 32-bit registers [4, 32], as float32 [16, K]."""
    per = 4 // ITEM[kind]
    x = decode(np.ascontiguousarray(words).view(np.uint8).reshape(4 * 32, 4), kind).reshape(4, 8, 4, per)
    out = np.empty((16, 8 * per), np.float32)
    for i in range(4):
        rows, cols = slice(8 * (i % 2), 8 * (i % 2) + 8), slice(4 * per * (i // 2), 4 * per * (i // 2) + 4 * per)
        out[rows, cols] = x[i].reshape(8, 4 * per)
    return out


@dataclass(slots=True)
class Product:
    """One wgmma.mma_async of one warp."""

    d: tuple[int, ...]
    a: Tile | tuple[int, ...]
    b: Tile
    kind_a: str
    accumulate: bool
    signs: tuple[int, int]
    line: int
    issuer: Issuer
    group: int | None = None
    done: bool = False


@dataclass
class Products:
    """The products of one warp in the order of their issue."""

    w: Warp
    queue: list[Product] = field(default_factory=list)
    groups: int = 0
    sums: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict)
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    next: int = 0
    """Products of the queue that have happened."""
    issued: int = 0

    def waiting(self) -> bool:
        return self.next < len(self.queue)

    def step(self) -> None:
        """The next product happens."""
        p = self.queue[self.next]
        self.next += 1
        with p.issuer:
            self._compute(p)

    def _compute(self, p: Product) -> None:
        r = self.w.r
        a = p.a.values() if isinstance(p.a, Tile) else fragment_a(np.stack([r.u[i] for i in p.a]), p.kind_a)
        y = a @ p.b.values().T
        if p.signs[0] * p.signs[1] < 0:
            y = -y
        if p.accumulate:
            if p.d not in self.sums:
                row, col = _fragment(2 * len(p.d))
                old = np.empty((16, 2 * len(p.d)), np.float32)
                old[row, col] = np.stack([r.f[i] for i in p.d])
                self.sums[p.d] = old
            y = self.sums[p.d] + y
        self.sums[p.d] = y

    def issue(self, p: Product) -> None:
        r = self.w.r
        for i in p.d:
            r.busy[i] = f"accumulator of the product at PTX line {p.line}"
            r.init[i] = 0
            r.taint.pop(i, None)
        if not isinstance(p.a, Tile):
            for i in p.a:
                r.busy[i] = f"operand A of the product at PTX line {p.line}"
        self.queue.append(p)

    def commit(self) -> None:
        for p in self.queue:
            if p.group is None:
                p.group = self.groups
        self.groups += 1

    def wait(self, allowed: int) -> None:
        """All but the newest `allowed` groups are complete."""
        limit = self.groups - allowed
        retired = []
        while self.queue and self.queue[0].group is not None and self.queue[0].group < limit:
            if self.next == 0:
                self.step()
            retired.append(self.queue.pop(0))
            self.next -= 1
        r = self.w.r
        still = {i for p in self.queue for i in (*p.d, *(p.a if not isinstance(p.a, Tile) else ()))}
        for p in retired:
            if p.d in self.sums and not still.intersection(p.d):
                row, col = _fragment(2 * len(p.d))
                for i, values in zip(p.d, self.sums.pop(p.d)[row, col], strict=True):
                    r.f[i][:] = values
                    r.init[i] = FULL
            for i in (*p.d, *(p.a if not isinstance(p.a, Tile) else ())):
                if i not in still:
                    r.busy.pop(i, None)
        seen = self.w.clock.seen
        seen[self.w.products] = max(int(seen[self.w.products]), limit)

    def at_exit(self, w: Warp) -> None:
        if self.queue:
            raise Fault("exit", f"{w.name} ends with {len(self.queue)} products that nothing waits for")


def _products(w: Any) -> Products:
    if "products" not in w.units:
        w.units["products"] = Products(w)
        w.cta.cluster.queues.append(w.units["products"])
    return w.units["products"]


@operation("wgmma")
def _wgmma(form: Form) -> Run:
    kind = form.one("mma_async", "fence", "commit_group", "wait_group")
    if not (form.has("sync") and form.has("aligned")):
        raise form.fail("needs .sync.aligned")
    form.converged = True
    if kind == "mma_async":
        return _mma(form)
    if kind == "wait_group":
        form.done(1)
        n = form.integer(0)
        return lambda w, mask: _products(w).wait(n)
    form.done(0)
    if kind == "commit_group":
        return lambda w, mask: _products(w).commit()

    def fence(w: Warp, mask: int) -> None:
        w.r.epoch += 1

    return fence


def _registers(form: Form, o: Any) -> tuple[int, ...]:
    items = o.items if isinstance(o, Vector) else ()
    ids = tuple(x.id for x in items if isinstance(x, Reg) and x.width == 32)
    if len(ids) != len(items) or len(set(ids)) != len(ids):
        raise form.fail("needs a vector of different 32-bit registers")
    return ids


def _mma(form: Form) -> Run:
    kind_b, kind_a = form.type(*ITEM), form.type(*ITEM)
    if kind_a != kind_b and ITEM[kind_a] != 1:
        raise form.fail("A and B of different types")
    form.type("f32")
    m, rest = form.mods.pop(0).removeprefix("m").split("n")
    n, k = (int(x) for x in rest.split("k"))
    if m != "64" or n % 8 or not 8 <= n <= 256 or k * ITEM[kind_a] != 32:
        raise form.fail("shape")
    d = _registers(form, form.operands[0])
    if len(d) != n // 2:
        raise form.fail(f"{len(d)} accumulators")
    in_registers = isinstance(form.operands[1], Vector)
    wide = ITEM[kind_a] == 2
    form.done(6 + (wide and (1 if in_registers else 2)))
    a_registers = _registers(form, form.operands[1]) if in_registers else ()
    a_get = None if in_registers else form.get(1, "b64")
    b_get, scale_d = form.get(2, "b64"), form.get(3, "pred")
    signs = (form.integer(4), form.integer(5))
    if any(s not in (1, -1) for s in signs):
        raise form.fail("imm-scale must be 1 or -1")
    transposed = [form.integer(i) for i in range(6, len(form.operands))]
    major_a = "mn" if wide and not in_registers and transposed[0] else "k"
    major_b = "mn" if wide and transposed[-1] else "k"
    line = form.i.line

    def run(w: Warp, mask: int) -> None:
        r, unit = w.r, _products(w)
        accumulate = _one(scale_d(w), mask, "scale-d")
        b_value = _one(b_get(w), mask, "the descriptor of B")
        a_value = _one(a_get(w), mask, "the descriptor of A") if a_get is not None else 0
        _agree(w, (line, accumulate, b_value, a_value))
        _check_registers(w, d, a_registers, bool(accumulate))
        shared = w.cta.shared
        b = Tile(shared, Descriptor.decode(b_value), n, k, kind_b, major_b)
        b.claim(w.products, unit.groups + 1, w.clock)
        a: Tile | tuple[int, ...] = a_registers
        if a_get is not None:
            a = Tile(shared, Descriptor.decode(a_value), 16, k, kind_a, major_a, 16 * (w.index % 4), 64)
            a.claim(w.products, unit.groups + 1, w.clock)
        for i in a_registers:
            if r.init[i] != FULL:
                raise r.missing(i, FULL)
        unit.issue(Product(d, a, b, kind_a, bool(accumulate), (signs[0], signs[1]), line, Issuer(w)))
        w.cta.cluster.stats.flops += 2 * 16 * n * k

    return run


def _one(x: np.ndarray, mask: int, what: str) -> int:
    v = x[lanes(mask)]
    if (v != v[0]).any():
        raise Fault("divergence", f"{what} differs between lanes")
    return int(v[0])


def _agree(w: Warp, call: tuple[Any, ...]) -> None:
    """The four warps of a warpgroup execute the same products with the same operands (9.7.15, ``.aligned``)."""
    log = w.cta.group_log.setdefault(w.index // 4, [])
    unit = w.units["products"]
    if unit.issued == len(log):
        log.append(call)
    elif log[unit.issued] != call:
        raise Fault("divergence", f"product {unit.issued} of {w.name} is {call}, of another warp of its warpgroup "
                    f"{log[unit.issued]} (PTX line, scale-d, descriptors of B and A)")
    unit.issued += 1


def _check_registers(w: Warp, d: tuple[int, ...], a: tuple[int, ...], accumulate: bool) -> None:
    """wgmma.fence orders ordinary writes of the product's registers before it; the first product always needs one.

    A mov between registers passes on the time of the write that it copies: the compiler packs fragments of A behind the
    fence, and its assembler turns that into a choice of registers.
    """
    r, queue = w.r, w.units["products"].queue
    if r.epoch == 1:
        raise Fault("wgmma", "the first wgmma.mma_async without wgmma.fence before it")
    for i in (*d, *a):
        if r.wrote[i] == r.epoch:
            raise Fault("wgmma", f"{r.names[i]} was written after the last wgmma.fence")
    chained = any(p.d == d for p in queue)
    for i in d:
        if i in r.busy:
            if not chained:
                raise r.missing(i, FULL)
        elif accumulate and r.init[i] != FULL:
            raise r.missing(i, FULL)
    for i in a:
        if i in r.busy and not r.busy[i].startswith("operand A"):
            raise r.missing(i, FULL)
