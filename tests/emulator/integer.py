"""Integer arithmetic, logic, shifts, comparison and selection (PTX ISA 9.7.1 "Integer Arithmetic",
9.7.6 "Comparison and Selection", 9.7.8 "Logic and Shift")."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .decode import BITS, DTYPES, INTS, Form, Run, operation
from .errors import Fault
from .lanes import lanes
from .parser import WIDTHS, Pair
from .warp import Warp

_WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


def _saturate(f: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def g(*x: np.ndarray) -> np.ndarray:
        return np.clip(f(*(v.astype(np.int64) for v in x)), -(1 << 31), (1 << 31) - 1).astype(np.int32)

    return g


def high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Upper half of the full product."""
    n = a.dtype.itemsize * 8
    if n == 64:
        return np.array([(int(x) * int(y)) >> 64 for x, y in zip(a, b, strict=True)]).astype(a.dtype)
    wide = np.int64 if a.dtype.kind == "i" else np.uint64
    return ((a.astype(wide) * b.astype(wide)) >> wide(n)).astype(a.dtype)


def quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Division that rounds towards zero; the ISA leaves a zero divisor to the machine (9.7.1.8)."""
    if a.dtype.kind == "u":
        return a // np.where(b == 0, 1, b).astype(a.dtype)
    safe = np.where(b == 0, 1, b).astype(a.dtype)
    q = a // safe
    return (q + ((a % safe != 0) & ((a < 0) != (safe < 0)))).astype(a.dtype)


def remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a - quotient(a, b) * b


@operation("add", "sub")
def _add(form: Form) -> Run:
    if form.mods and form.mods[-1] not in INTS:
        from .floating import add

        return add(form)
    t = form.type(*INTS)
    f = np.add if form.op == "add" else np.subtract
    if t == "s32" and form.has("sat"):
        f = _saturate(f)
    form.done(3)
    return form.alu((t, t, t), f)


@operation("mul")
def _mul(form: Form) -> Run:
    if form.mods and form.mods[-1] not in INTS:
        from .floating import mul

        return mul(form)
    t, part = form.type(*INTS), form.one("lo", "hi", "wide")
    form.done(3)
    if part == "wide":
        wide = _WIDER.get(t)
        if wide is None:
            raise form.fail("no wider type")
        d = DTYPES[wide]
        return form.alu((wide, t, t), lambda a, b: a.astype(d) * b.astype(d))
    return form.alu((t, t, t), np.multiply if part == "lo" else high)


@operation("mad")
def _mad(form: Form) -> Run:
    if form.mods and form.mods[-1] in ("f32", "f64"):
        from .floating import fma

        return fma(form)
    t, part = form.type(*INTS), form.one("lo", "hi", "wide")
    form.done(4)
    if part == "wide":
        wide = _WIDER[t]
        d = DTYPES[wide]
        return form.alu((wide, t, t, wide), lambda a, b, c: a.astype(d) * b.astype(d) + c)
    f = np.multiply if part == "lo" else high
    return form.alu((t, t, t, t), lambda a, b, c: f(a, b) + c)


@operation("div", "rem")
def _div(form: Form) -> Run:
    if form.mods and form.mods[-1] in ("f32", "f64"):
        from .floating import divide

        return divide(form)
    t = form.type(*INTS)
    form.done(3)
    put, a, b = form.put(0, t), form.get(1, t), form.get(2, t)
    f = quotient if form.op == "div" else remainder

    def run(w: Warp, mask: int) -> None:
        x, y = a(w), b(w)
        if (y == 0)[lanes(mask)].any():
            raise Fault("undefined", "integer division by zero, whose result the ISA leaves to the machine")
        put(w, f(x, y), mask)

    return run


@operation("abs", "neg")
def _abs(form: Form) -> Run:
    if form.mods and form.mods[-1] not in INTS:
        from .floating import sign

        return sign(form)
    t = form.type("s16", "s32", "s64")
    form.done(2)
    return form.alu((t, t), np.abs if form.op == "abs" else np.negative)


@operation("min", "max")
def _min(form: Form) -> Run:
    if form.mods and form.mods[-1] not in INTS:
        from .floating import extreme

        return extreme(form)
    t = form.type(*INTS)
    f = np.minimum if form.op == "min" else np.maximum
    if t == "s32" and form.has("relu"):
        form.done(3)
        return form.alu((t, t, t), lambda a, b: np.maximum(f(a, b), 0))
    form.done(3)
    return form.alu((t, t, t), f)


@operation("and", "or", "xor")
def _logic(form: Form) -> Run:
    t = form.type("pred", *BITS)
    form.done(3)
    return form.alu((t, t, t), {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[form.op])


@operation("not", "cnot")
def _not(form: Form) -> Run:
    t = form.type(*(("pred", *BITS) if form.op == "not" else BITS))
    form.done(2)
    return form.alu((t, t), np.invert if form.op == "not" else lambda a: (a == 0).astype(a.dtype))


@operation("shl", "shr")
def _shift(form: Form) -> Run:
    """Amounts beyond the width count as the width (9.7.8.8)."""
    t = form.type(*(BITS if form.op == "shl" else (*BITS, *INTS)))
    form.done(3)
    width, left = WIDTHS[t], form.op == "shl"

    def f(a: np.ndarray, n: np.ndarray) -> np.ndarray:
        far = n >= width
        k = np.where(far, width - 1, n).astype(a.dtype)
        if left:
            return np.where(far, 0, a << k).astype(a.dtype)
        return (a >> k if a.dtype.kind == "i" else np.where(far, 0, a >> k)).astype(a.dtype)

    return form.alu((t, t, "u32"), f)


@operation("shf")
def _funnel(form: Form) -> Run:
    left, wrap = form.one("l", "r") == "l", form.one("wrap", "clamp") == "wrap"
    form.type("b32")
    form.done(4)

    def f(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        n = (c & 31 if wrap else np.minimum(c, 32)).astype(np.uint64)
        both = b.astype(np.uint64) << np.uint64(32) | a
        return ((both << n) >> np.uint64(32) if left else both >> n).astype(np.uint32)

    return form.alu(("b32", "b32", "b32", "u32"), f)


@operation("popc", "clz", "brev", "bfind")
def _count(form: Form) -> Run:
    if form.op == "bfind":
        shift = form.has("shiftamt")
        t = form.type("u32", "s32", "u64", "s64")
    else:
        shift, t = False, form.type("b32", "b64")
    form.done(2)
    n = WIDTHS[t]

    def one(x: int) -> int:
        u = x & ((1 << n) - 1)
        if form.op == "popc":
            return u.bit_count()
        if form.op == "clz":
            return n - u.bit_length()
        if form.op == "brev":
            return int(format(u, f"0{n}b")[::-1], 2)
        if x < 0:
            u = ~x & ((1 << n) - 1)
        top = u.bit_length() - 1
        return 0xFFFFFFFF if top < 0 else n - 1 - top if shift else top

    out = t if form.op == "brev" else "u32"
    return form.alu((out, t), lambda a: np.array([one(int(x)) for x in a], DTYPES[out]))


@operation("bfe")
def _extract(form: Form) -> Run:
    t = form.type("u32", "s32", "u64", "s64")
    form.done(4)
    n = WIDTHS[t]

    def one(a: int, pos: int, length: int) -> int:
        pos, length = pos & 255, length & 255
        u = a & ((1 << n) - 1)
        if length == 0:
            return 0
        signed = t[0] == "s" and u >> min(pos + length - 1, n - 1) & 1
        field = u >> pos & ((1 << length) - 1) if pos < n else 0
        have = max(0, min(length, n - pos))
        return (field | -1 << have) & ((1 << n) - 1) if signed else field & ((1 << n) - 1)

    def f(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        found = [one(int(x), int(y), int(z)) for x, y, z in zip(a, b, c, strict=True)]
        return np.array(found, f"u{n // 8}").view(DTYPES[t])

    return form.alu((t, t, "u32", "u32"), f)


@operation("bfi")
def _insert(form: Form) -> Run:
    t = form.type("b32", "b64")
    form.done(5)
    n = WIDTHS[t]

    def one(a: int, b: int, pos: int, length: int) -> int:
        mask = ((1 << (length & 255)) - 1) << (pos & 255) & ((1 << n) - 1)
        return b & ~mask | a << (pos & 255) & mask

    return form.alu((t, t, t, "u32", "u32"), lambda *x: np.array(
        [one(*(int(v) for v in row)) for row in zip(*x, strict=True)], DTYPES[t]))


@operation("lop3")
def _lop3(form: Form) -> Run:
    form.type("b32")
    form.done(5)
    table = form.integer(4)

    def f(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        out = np.zeros_like(a)
        for i in range(8):
            if table >> i & 1:
                out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return out

    put, a, b, c = form.put(0, "b32"), *(form.get(n, "b32") for n in (1, 2, 3))
    return lambda w, mask: put(w, f(a(w), b(w), c(w)), mask)


@operation("prmt")
def _permute(form: Form) -> Run:
    form.type("b32")
    form.done(4)

    def one(a: int, b: int, c: int) -> int:
        source = (b << 32 | a).to_bytes(8, "little")
        out = 0
        for i in range(4):
            s = c >> 4 * i & 15
            byte = source[s & 7]
            if s & 8:
                byte = 255 if byte & 128 else 0
            out |= byte << 8 * i
        return out

    return form.alu(("b32", "b32", "b32", "b32"), lambda *x: np.array(
        [one(*(int(v) for v in row)) for row in zip(*x, strict=True)], np.uint32))


@operation("sad")
def _sad(form: Form) -> Run:
    t = form.type(*INTS)
    form.done(4)
    return form.alu((t, t, t, t), lambda a, b, c: c + np.where(a < b, b - a, a - b).astype(a.dtype))


# ---------------------------------------------------------------------- comparison and selection

_INT_COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
                "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}


def comparison(form: Form, t: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Take the comparison operator of an instruction."""
    if t in ("f32", "f64", "f16", "bf16"):
        from .floating import compare

        return compare(form, t)
    name = form.one(*(("eq", "ne") if t[0] == "b" else _INT_COMPARE))
    return _INT_COMPARE[name]


@operation("setp", "set")
def _setp(form: Form) -> Run:
    t = form.type(*INTS, *BITS, "f16", "bf16", "f32", "f64")
    out = form.type("u32", "s32", "f32") if form.op == "set" else "pred"
    combine = form.opt("and", "or", "xor")
    f = comparison(form, t)
    form.done(4 if combine else 3)
    a, b = form.get(1, t), form.get(2, t)
    c = form.get(3, "pred") if combine else None
    join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, None: None}[combine]
    first = form.operands[0]
    if out != "pred":
        put = form.put(0, out)
        true = 1.0 if out == "f32" else -1

        def run_set(w: Warp, mask: int) -> None:
            x = f(a(w), b(w))
            if join is not None and c is not None:
                x = join(x, c(w))
            put(w, np.where(x, true, 0).astype(DTYPES["s32" if out != "f32" else "f32"]).view(DTYPES[out]), mask)

        return run_set
    puts = [form.target(o, "pred") for o in ((first.first, first.second) if isinstance(first, Pair) else (first,))]
    if len(puts) == 1 and join is None:
        p = puts[0]
        return lambda w, mask: p(w, f(a(w), b(w)), mask)

    def run(w: Warp, mask: int) -> None:
        x = f(a(w), b(w))
        both = (x, ~x)
        for p, v in zip(puts, both, strict=False):
            p(w, join(v, c(w)) if join is not None and c is not None else v, mask)

    return run


@operation("selp")
def _selp(form: Form) -> Run:
    t = form.type(*INTS, *BITS, "f32", "f64", "f16", "bf16")
    form.done(4)
    t = {"f16": "b16", "bf16": "b16"}.get(t, t)
    return form.alu((t, t, t, "pred"), lambda a, b, p: np.where(p, a, b))


@operation("slct")
def _slct(form: Form) -> Run:
    selector = form.type("s32", "f32")
    t = form.type(*INTS, *BITS, "f32", "f64")
    form.has("ftz")
    form.done(4)
    return form.alu((t, t, t, selector), lambda a, b, c: np.where(c >= 0, a, b))
