"""Loads and stores of the lanes: ld, st, ldmatrix, stmatrix, atom, red (PTX ISA 9.7.9 "Data Movement and
Conversion", 9.7.14 "Warp-Level Matrix", 9.7.13 "Parallel Synchronization": atom, red)."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .decode import DTYPES, Form, Get, Run, operation
from .errors import Fault
from .formats import bf16_bits, bf16_values, f16_bits, f16_values
from .lanes import LANES, first, lanes
from .memory import RANK_SHIFT, SHARED_WINDOW, Buffer, Memory, Shared
from .parser import WIDTHS, Address, Name, Vector
from .warp import Warp

_TYPES = ("b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")
_SPACES = ("global", "shared", "shared::cta", "shared::cluster", "param", "param::entry", "const", "local")
_CACHE = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "L1::evict_normal", "L1::evict_unchanged", "L1::evict_first",
          "L1::evict_last", "L1::no_allocate", "L2::64B", "L2::128B", "L2::256B", "L2::cache_hint")
_SCOPES = ("cta", "cluster", "gpu", "sys")


def bank_conflicts(addresses: np.ndarray, size: int) -> int:
    """Passes beyond one over the 32 banks, for groups of lanes that move 128 bytes together."""
    extra, per = 0, max(1, 128 // size)
    for k in range(0, len(addresses), per):
        words = np.unique((addresses[k:k + per, None] + np.arange(0, size, 4)) >> 2)
        extra += int(np.bincount(words & 31).max()) - 1
    return extra


def words_of(addresses: np.ndarray, size: int) -> np.ndarray:
    """Numbers of the 4-byte words that these accesses touch."""
    if size <= 4:
        return addresses >> 2
    return ((addresses[:, None] + np.arange(0, size, 4)) >> 2).reshape(-1)


class Access:
    """Reads and writes `size` bytes a lane in a state space."""

    def __init__(self, space: str, size: int):
        self.space, self.size, self.span = space, size, np.arange(size)

    def resolve(self, w: Warp, addresses: np.ndarray, what: str) -> tuple[Memory, np.ndarray]:
        """The memory that the active lanes address, and offsets in it; checks alignment and bounds."""
        space, size = self.space, self.size
        if (addresses % size).any():
            bad = int(addresses[np.argmax(addresses % size != 0)])
            raise Fault("misaligned", f"{what} of {size} bytes at {bad:#x}")
        if space == "generic":
            space = w.cta.space(int(addresses[0]))
            if any(w.cta.space(int(a)) != space for a in addresses):
                raise Fault("limit", "lanes of one generic access in different state spaces")
            if space == "shared":
                addresses, space = addresses - SHARED_WINDOW, "shared::cluster"
        if space.startswith("shared"):
            cta, offset = w.cta.local(int(addresses[0]))
            if any(w.cta.local(int(a))[0] is not cta for a in addresses[addresses >> RANK_SHIFT != addresses[0] >> RANK_SHIFT]):
                raise Fault("limit", "lanes of one access in shared memory of different CTAs")
            offsets = addresses - (int(addresses[0]) - offset)
            memory: Memory = cta.shared
        elif space == "global":
            memory, offset = w.cta.cluster.memory.find(int(addresses[0]), size, what)
            offsets = addresses - memory.base
        elif space.startswith("param"):
            memory, offsets = w.cta.params, addresses - w.cta.params.base
        elif space == "const":
            memory, offsets = w.cta.constants, addresses - w.cta.constants.base
        else:
            raise Fault("unknown", f"state space {space}")
        memory.check(int(offsets.min()), int(offsets.max()) + size, what)
        return memory, offsets

    def load(self, w: Warp, addresses: np.ndarray) -> np.ndarray:
        """Bytes [lanes, size]."""
        memory, at = self.resolve(w, addresses, "read")
        index = at[:, None] + self.span
        memory.need(index, "read")
        if isinstance(memory, Shared):
            memory.data_only(index, "read")
            memory.shadow.read(words_of(at, self.size), w.agent, w.now, w.clock)
            count(w, at, self.size)
        elif isinstance(memory, Buffer):
            ordered(w, memory, index, "read of")
        return memory.data[index]

    def store(self, w: Warp, addresses: np.ndarray, values: np.ndarray) -> None:
        """Write bytes [lanes, size]."""
        memory, at = self.resolve(w, addresses, "write")
        index = at[:, None] + self.span
        if len(at) > 1:
            unique(at, values, memory)
        if isinstance(memory, Shared):
            memory.data_only(index, "write")
            memory.shadow.write(words_of(at, self.size), w.agent, w.now, w.clock)
            count(w, at, self.size)
        elif isinstance(memory, Buffer):
            claim(w, memory, index)
        else:
            raise Fault("bounds", f"write to {memory.name}")
        memory.data[index] = values
        memory.known[index] = True
        w.unfenced |= w.active


def unique(at: np.ndarray, values: np.ndarray, memory: Memory) -> None:
    """Two lanes that write one place must write the same there."""
    order = np.argsort(at, kind="stable")
    same = at[order][1:] == at[order][:-1]
    if same.any():
        v = values[order]
        if (v[1:][same] != v[:-1][same]).any():
            raise Fault("race", f"lanes of one store write different values to one address of {memory.name}")


def count(w: Warp, at: np.ndarray, size: int) -> None:
    w.cta.cluster.stats.shared_accesses += 1
    w.cta.cluster.stats.bank_conflicts += bank_conflicts(at, size)


def ordered(w: Warp, b: Buffer, index: Any, what: str, asynchronous: bool = False) -> None:
    """Global bytes that another warp of this launch wrote need a barrier between, and the async proxy its fence."""
    owner = b.owner[index]
    mine = w.cta.serial * 64 + w.index + 1
    concern = owner != 0 if asynchronous else (owner != 0) & (owner != mine)
    if not concern.any():
        return
    warps = {x.cta.serial * 64 + x.index + 1: x for c in w.cta.cluster.ctas for x in c.warps}
    clock = b.clock[index]
    for o in np.unique(owner[concern]).tolist():
        name = warps[o].name if o in warps else f"CTA {(o - 1) // 64}"
        agent = warps[o].agent if o in warps else 0
        late = (owner == o) & (clock > w.clock.seen[agent] if o in warps else True)
        if o != mine and late.any():
            raise Fault("race", f"{what} {b.name}, byte {int(np.arange(b.size)[index][late].reshape(-1)[0]):#x}, is not "
                        f"ordered after its write by {name}")
        late = (owner == o) & b.generic[index] & (clock > w.clock.fenced[agent])
        if asynchronous and late.any():
            raise Fault("proxy", f"{what} {b.name}, byte {int(np.arange(b.size)[index][late].reshape(-1)[0]):#x}, by the async "
                        f"proxy after a write by {name} without fence.proxy.async between")


def claim(w: Warp, b: Buffer, index: Any, asynchronous: bool = False) -> None:
    """This warp writes global bytes."""
    ordered(w, b, index, "write to", asynchronous)
    b.owner[index] = w.cta.serial * 64 + w.index + 1
    b.clock[index] = w.now
    b.generic[index] = not asynchronous


def _attributes(form: Form, atomic: bool = False) -> str:
    """Take memory order, scope, cache hints and state space."""
    order = form.opt("weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "mmio")
    if order in ("relaxed", "acquire", "release", "acq_rel"):
        form.opt(*_SCOPES)
    elif atomic:
        form.opt(*_SCOPES)
    space = form.opt(*_SPACES) or "generic"
    if not atomic:
        while form.opt(*_CACHE):
            pass
    return space


def _symbolic(form: Form, n: int, space: str) -> str:
    """A parameter's name is an address in the parameter space whatever follows."""
    o = form.operands[n]
    if isinstance(o, Address) and isinstance(o.base, Name) and space == "generic":
        return "param" if any(v.name == o.base.name for v in form.kernel.params) else "shared"
    return space


@operation("ld", "ldu")
def _ld(form: Form) -> Run:
    t = form.type(*_TYPES)
    space = _symbolic(form, 1, _attributes(form))
    vector = form.opt("v2", "v4", "v8")
    form.done(2)
    d = form.operands[0]
    n = int(vector[1]) if vector else 1
    items = d.items if isinstance(d, Vector) else (d,)
    if len(items) != n:
        raise form.fail("vector length")
    puts = [form.target(o, t, loose=True) for o in items]
    get, _ = form.address(1)
    access = Access(space, n * WIDTHS[t] // 8)
    dtype = DTYPES[t]

    def run(w: Warp, mask: int) -> None:
        active = lanes(mask)
        raw = np.ascontiguousarray(access.load(w, get(w)[active])).view(dtype)
        for k, put in enumerate(puts):
            full = np.zeros(LANES, dtype)
            full[active] = raw[:, k]
            put(w, full, mask)

    return run


@operation("st")
def _st(form: Form) -> Run:
    t = form.type(*_TYPES)
    space = _symbolic(form, 0, _attributes(form))
    vector = form.opt("v2", "v4", "v8")
    form.done(2)
    s = form.operands[1]
    n = int(vector[1]) if vector else 1
    items = s.items if isinstance(s, Vector) else (s,)
    if len(items) != n:
        raise form.fail("vector length")
    get, _ = form.address(0)
    gets = [form.value(o, t, loose=True) for o in items]
    access = Access(space, n * WIDTHS[t] // 8)

    def run(w: Warp, mask: int) -> None:
        active = lanes(mask)
        values = np.stack([g(w)[active] for g in gets], axis=1)
        access.store(w, get(w)[active], np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1))

    return run


# ---------------------------------------------------------------------- 8x8 matrices

def _matrix(form: Form, n: int) -> tuple[int, bool, Get, tuple[Any, ...]]:
    if not (form.has("sync") and form.has("aligned") and form.has("m8n8")):
        raise form.fail("needs .sync.aligned.m8n8")
    form.converged = True
    count = int(form.one("x1", "x2", "x4")[1])
    trans = form.has("trans")
    form.opt("shared", "shared::cta")
    form.type("b16")
    form.done(2)
    o = form.operands[n]
    items = o.items if isinstance(o, Vector) else (o,)
    if len(items) != count:
        raise form.fail("vector length")
    get, _ = form.address(1 - n)
    return count, trans, get, items


@operation("ldmatrix")
def _ldmatrix(form: Form) -> Run:
    """Lane i < 8 n has the address of row i % 8 of matrix i / 8; lane l gets elements 2 (l % 4) and + 1 of row l / 4."""
    n, trans, get, items = _matrix(form, 0)
    puts = [form.target(o, "b32") for o in items]
    access = Access("shared", 16)

    def run(w: Warp, mask: int) -> None:
        rows = np.ascontiguousarray(access.load(w, get(w)[: 8 * n])).view(np.uint16).reshape(n, 8, 8)
        if trans:
            rows = np.ascontiguousarray(rows.transpose(0, 2, 1))
        for k, put in enumerate(puts):
            put(w, rows[k].reshape(-1).view(np.uint32), mask)

    return run


@operation("stmatrix")
def _stmatrix(form: Form) -> Run:
    n, trans, get, items = _matrix(form, 1)
    gets = [form.value(o, "b32") for o in items]
    access = Access("shared", 16)

    def run(w: Warp, mask: int) -> None:
        rows = np.stack([np.ascontiguousarray(g(w)).view(np.uint16).reshape(8, 8) for g in gets])
        if trans:
            rows = rows.transpose(0, 2, 1)
        access.store(w, get(w)[: 8 * n], np.ascontiguousarray(rows).view(np.uint8).reshape(8 * n, 16))

    return run


# ---------------------------------------------------------------------- atomics

def combine(op: str, t: str) -> Callable[[Any, Any], Any]:
    """The two-operand reductions, on numpy scalars or arrays of one type."""
    if op == "inc":
        return lambda old, b: np.where(old >= b, 0, old + 1).astype(old.dtype)
    if op == "dec":
        return lambda old, b: np.where((old == 0) | (old > b), b, old - 1).astype(old.dtype)
    functions: dict[str, Any] = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
                                 "or": np.bitwise_or, "xor": np.bitwise_xor, "exch": lambda old, b: b}
    if t in ("f16x2", "bf16x2"):
        value, encode = (f16_values, f16_bits) if t == "f16x2" else (bf16_values, bf16_bits)

        def pairs(old: Any, b: Any) -> Any:
            x, y = (np.ascontiguousarray(v, np.uint32).reshape(-1).view(np.uint16) for v in (old, b))
            out = encode(value(x) + value(y)) if op == "add" else encode(functions[op](value(x), value(y)))
            return out.view(np.uint32).reshape(np.shape(old))

        return pairs
    return functions[op]


@operation("atom", "red")
def _atomic(form: Form) -> Run:
    """Lanes one after another, in an order that the ISA leaves open."""
    t = form.type("b32", "b64", "u32", "s32", "u64", "s64", "f32", "f64", "f16x2", "bf16x2", "b16")
    fetch = form.op == "atom"
    form.has("noftz")
    op = form.one("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
    vector = form.opt("v2", "v4")
    space = _attributes(form, atomic=True)
    if fetch and vector:
        raise form.fail("vector forms only without a result")
    form.done((3 if fetch else 2) + (op == "cas"))
    k = 1 if fetch else 0
    get, _ = form.address(k)
    o = form.operands[k + 1]
    items = o.items if isinstance(o, Vector) else (o,)
    if len(items) != (int(vector[1]) if vector else 1):
        raise form.fail("vector length")
    register = {"f16x2": "b32", "bf16x2": "b32"}.get(t, t)
    operands = [form.value(x, register) for x in items]
    swap = form.get(k + 2, register) if op == "cas" else None
    put = form.put(0, register) if fetch else None
    f = combine(op, t) if op != "cas" else None
    size = WIDTHS[t] // 8
    access = Access(space, size * len(items))
    dtype = DTYPES[register]

    def run(w: Warp, mask: int) -> None:
        active = np.flatnonzero(lanes(mask))
        memory, at = access.resolve(w, get(w)[active], "atomic access")
        index = at[:, None] + access.span
        memory.need(index, "atomic access")
        if isinstance(memory, Shared):
            memory.data_only(index, "atomic access")
            memory.shadow._written(words_of(at, access.size), w.clock, "atomic access to", False)
        values = [g(w) for g in operands]
        old_values = np.zeros(LANES, dtype)
        for lane, a in zip(active, at, strict=True):
            place = memory.data[a:a + access.size].view(dtype)
            old_values[lane] = place[0]
            if f is None:
                if swap is not None and place[0] == values[0][lane]:
                    place[0] = swap(w)[lane]
            else:
                for j, v in enumerate(values):
                    place[j:j + 1] = f(place[j:j + 1], v[lane:lane + 1])
        memory.known[index] = True
        if put is not None:
            put(w, old_values, mask)

    return run


def one_lane(mask: int) -> int:
    """The lane that executes an instruction meant for one."""
    return first(mask)
