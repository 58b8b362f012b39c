"""Programs of floating-point arithmetic, comparisons, approximations and conversions."""
from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction

from .approx import BOUNDS
from .exact import BF16, F16, F32, F64, NAN, Format, bits64, encode, flushed, fp8, fp8_value, operate, signed, value
from .program import Program, simple

X32 = (0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000, 0x33800000, 0x33800001, 0x34000000,
       0x3F000000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0xBF800000, 0x40000000, 0xC0490FDB, 0x41000000, 0x42FE0000, 0xC2FC0000,
       0x477FE000, 0x477FF000, 0x4B000000, 0x4B7FFFFF, 0x4B800001, 0xCB800003, 0x4EFFFFFF, 0x4F000000, 0xCF000000, 0x5F000000,
       0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x3F808000, 0x3F818000, 0x3F801000, 0x3F803000, 0x7F800000, 0xFF800000, 0x7FC00000)
X16 = (0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x8400, 0x1400, 0x3800, 0x3BFF, 0x3C00, 0x3C01, 0xBC00, 0x4000, 0x7BFF,
       0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x3555, 0x6400, 0x2E66)
XB16 = (0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x3F00, 0x3F7F, 0x3F80, 0x3F81, 0xBF80, 0x4000, 0x4049, 0x7F7F, 0xFF7F,
        0x7F80, 0xFF80, 0x7FC0, 0x3380, 0x4B00, 0x0100, 0xC2C8)
X64 = tuple(bits64(x) for x in (0.0, -0.0, 1.0, -1.0, 1.5, 2.0, 1e-320, 5e-324, 1e308, 1.7976931348623157e308, 0.1, -0.3, 3.5,
                                math.inf, -math.inf, math.nan, 2.5, 0.5, -0.5, -1.5, 4294967296.5, 1 + 2**-24, 1 + 2**-52))
EDGES = {F32: X32, F16: X16, BF16: XB16, F64: X64}
WIDTH = {F32: 32, F16: 16, BF16: 16, F64: 64}
KIND = {F32: "f32", F16: "b16", BF16: "b16", F64: "f64"}


def columns(formats: Sequence[Format], seed: int, n: int = 160) -> list[list[int]]:
    rnd = random.Random(seed)

    def one(f: Format) -> int:
        if rnd.random() < 0.65:
            return rnd.choice(EDGES[f])
        if rnd.random() < 0.7:
            return encode(Fraction(rnd.gauss(0, 4)), f)
        return rnd.getrandbits(WIDTH[f])

    return [[one(f) for _ in range(n)] for f in formats]


def _nan(bits: int, f: Format) -> int:
    return NAN[f] if math.isnan(value(bits, f)) else bits


def arithmetic(form: str, op: str, f: Format, n: int, seed: int, mode: str = "rn", ftz: bool = False, sat: bool = False) -> Program:
    def result(*x: int) -> int:
        x = tuple(flushed(v) for v in x) if ftz else x
        y = operate(op, [value(v, f) for v in x], f, mode)
        y = flushed(y) if ftz else y
        if sat:
            v = value(y, f)
            y = encode(Fraction(0), f) if not v > 0 else encode(Fraction(min(v, 1.0)), f)
        return y

    body = f"{form} d, {', '.join('abc'[:n])};"
    return simple(form, form, body, [(KIND[f], c) for c in columns([f] * n, seed)], [KIND[f]], result)


def _extreme(x: float, y: float, largest: bool, nan: bool) -> float:
    if math.isnan(x) or math.isnan(y):
        return math.nan if nan or (math.isnan(x) and math.isnan(y)) else y if math.isnan(x) else x
    if x == y:
        return x if (math.copysign(1, x) > 0) == largest else y
    return max(x, y) if largest else min(x, y)


def programs() -> list[Program]:
    seed = iter(range(50_000, 60_000))
    found = [arithmetic(f"{op}.f32", op, F32, 2, next(seed)) for op in ("add", "sub", "mul")]
    for mode in ("rn", "rz", "rm", "rp"):
        found += [arithmetic(f"{op}.{mode}.f32", op, F32, n, next(seed), mode)
                  for op, n in (("add", 2), ("sub", 2), ("mul", 2), ("fma", 3), ("div", 2))]
    found += [arithmetic(f"{op}.rn.ftz.f32", op, F32, n, next(seed), ftz=True) for op, n in (("add", 2), ("mul", 2), ("fma", 3))]
    found += [arithmetic(f"{op}.rn.sat.f32", op, F32, n, next(seed), sat=True) for op, n in (("add", 2), ("mul", 2), ("fma", 3))]
    found += [arithmetic(f"{op}.rn.f64", op, F64, n, next(seed)) for op, n in (("add", 2), ("mul", 2), ("fma", 3), ("div", 2))]
    for kind, f in (("f16", F16), ("bf16", BF16)):
        found += [arithmetic(f"{op}.rn.{kind}", op, f, n, next(seed)) for op, n in (("add", 2), ("sub", 2), ("mul", 2), ("fma", 3))]
        found += [_packed(op, kind, f, n, next(seed)) for op, n in (("add", 2), ("sub", 2), ("mul", 2), ("fma", 3))]
    for op, largest in (("min", False), ("max", True)):
        for nan in (False, True):
            form = f"{op}{'.NaN' if nan else ''}.f32"
            found.append(simple(form, form, f"{form} d, a, b;", [("f32", c) for c in columns([F32, F32], next(seed))], ["f32"],
                                lambda x, y, m=largest, n=nan: encode(_extreme(value(x, F32), value(y, F32), m, n), F32)))
        for kind, f in (("f16x2", F16), ("bf16x2", BF16)):
            form = f"{op}.{kind}"
            a, b = (_pairs(c, d) for c, d in (columns([f, f], next(seed)), columns([f, f], next(seed))))
            found.append(simple(form, form, f"{form} d, a, b;", [("b32", a), ("b32", b)], ["b32"],
                                lambda x, y, f=f, m=largest: _both(x, y, lambda p, q, f=f, m=m: encode(
                                    _extreme(value(p, f), value(q, f), m, False), f))))
    for op, g in (("neg", lambda x: x ^ 0x80000000), ("abs", lambda x: x & 0x7FFFFFFF)):
        found.append(simple(f"{op}.f32", f"{op}.f32", f"{op}.f32 d, a;", [("f32", columns([F32], next(seed))[0])], ["f32"], g))
    return found + _compare(seed) + _approximate(seed) + _convert(seed) + _convert_packed(seed)


def _pairs(low: Sequence[int], high: Sequence[int]) -> list[int]:
    return [h << 16 | x for x, h in zip(low, high, strict=True)]


def _both(*args) -> int:
    *x, f = args
    return f(*(v >> 16 for v in x)) << 16 | f(*(v & 0xFFFF for v in x))


def _packed(op: str, kind: str, f: Format, n: int, seed: int) -> Program:
    form = f"{op}.rn.{kind}x2"
    ins = [("b32", _pairs(*columns([f, f], seed * 7 + i))) for i in range(n)]
    return simple(form, form, f"{form} d, {', '.join('abc'[:n])};", ins, ["b32"],
                  lambda *x: _both(*x, lambda *h: operate(op, [value(v, f) for v in h], f)))


_ORDER: dict[str, Callable[[float, float], bool]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b}


def _compare(seed) -> list[Program]:
    found = []
    for name, g in _ORDER.items():
        for unordered in (False, True):
            form = f"setp.{name}{'u' if unordered else ''}.f32"
            a, b = columns([F32, F32], next(seed))
            b = [x if i % 3 == 0 else y for i, (x, y) in enumerate(zip(a, b, strict=True))]

            def result(x: int, y: int, g=g, unordered=unordered) -> int:
                p, q = value(x, F32), value(y, F32)
                return int(unordered) if math.isnan(p) or math.isnan(q) else int(g(p, q))

            found.append(simple(form, form, f".reg .pred z; {form} z, a, b; selp.b32 d, 1, 0, z;", [("f32", a), ("f32", b)],
                                ["b32"], result))
    for form, want in (("setp.num.f32", False), ("setp.nan.f32", True)):
        a, b = columns([F32, F32], next(seed))
        found.append(simple(form, form, f".reg .pred z; {form} z, a, b; selp.b32 d, 1, 0, z;", [("f32", a), ("f32", b)], ["b32"],
                            lambda x, y, w=want: int((math.isnan(value(x, F32)) or math.isnan(value(y, F32))) == w)))
    return found


def _through(f: Callable[[float], float], x: float) -> float:
    try:
        return f(x)
    except (ValueError, ZeroDivisionError):
        return math.nan
    except OverflowError:
        return math.inf


def _approximate(seed) -> list[Program]:
    def lg2(x: float) -> float:
        return -math.inf if x == 0 else math.inf if x == math.inf else math.log2(x)

    def rcp(x: float) -> float:
        return math.copysign(math.inf, x) if x == 0 else 1 / x

    def rsqrt(x: float) -> float:
        return math.copysign(math.inf, x) if x == 0 else 0.0 if x == math.inf else 1 / math.sqrt(x)

    def ex2(x: float) -> float:
        return x if x == math.inf or x != x else 0.0 if x == -math.inf else 2.0**x if abs(x) < 1000 else math.inf if x > 0 else 0.0

    functions: dict[str, Callable[[float], float]] = {
        "ex2": ex2, "lg2": lg2, "rcp": rcp, "rsqrt": rsqrt, "sqrt": lambda x: x if x == 0 else math.sqrt(x) if x != math.inf else x,
        "tanh": math.tanh, "sin": math.sin, "cos": math.cos}
    found = []
    for op, f in functions.items():
        for ftz in ((True, False) if op != "tanh" else (False,)):
            form = f"{op}.approx{'.ftz' if ftz else ''}.f32"
            (a,) = columns([F32], next(seed))
            if op in ("sin", "cos"):
                a = [x for x in a if abs(value(x, F32)) <= math.pi]
            if op == "lg2":  # the bound is a relative one outside (0.5, 2)
                a = [x for x in a if not 0.5 < value(x, F32) < 2] + [0x3F800000]

            def result(x: int, f=f, ftz=ftz) -> int:
                y = encode(_through(f, value(flushed(x) if ftz else x, F32)), F32)
                return flushed(y) if ftz else y

            found.append(simple(form, form, f"{form} d, a;", [("f32", a)], ["f32"], result,
                                close=("relative", 2.0**-22) if op == "lg2" else BOUNDS[op]))
    found.append(simple("sqrt.rn.f32", "sqrt.rn.f32", "sqrt.rn.f32 d, a;", [("f32", columns([F32], next(seed))[0])], ["f32"],
                        lambda x: encode(_through(functions["sqrt"], value(x, F32)), F32)))
    found.append(simple("rcp.rn.f32", "rcp.rn.f32", "rcp.rn.f32 d, a;", [("f32", columns([F32], next(seed))[0])], ["f32"],
                        lambda x: operate("div", [1.0, value(x, F32)], F32)))
    return found


def _integral(x: float, mode: str) -> float:
    if not math.isfinite(x):
        return x
    n = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode](Fraction(x))
    return math.copysign(float(n), x)


def _to_int(x: float, bits: int, is_signed: bool) -> int:
    lo, hi = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if is_signed else (0, (1 << bits) - 1)
    if math.isnan(x):
        return 0
    return lo if x == -math.inf else hi if x == math.inf else max(lo, min(hi, int(x)))


def _convert(seed) -> list[Program]:
    from .programs_integer import columns as integers

    found = []

    def add(form: str, source: str, values: Sequence[int], target: str, f: Callable[[int], int]) -> None:
        found.append(simple(form, form, f"{form} d, a;", [(source, values)], [target], f))

    for mode in ("rni", "rzi", "rmi", "rpi"):
        add(f"cvt.{mode}.s32.f32", "f32", columns([F32], next(seed))[0], "b32",
            lambda x, m=mode: _to_int(_integral(value(x, F32), m), 32, True))
        add(f"cvt.{mode}.f32.f32", "f32", columns([F32], next(seed))[0], "f32",
            lambda x, m=mode: encode(_integral(value(x, F32), m), F32))
    add("cvt.rzi.u32.f32", "f32", columns([F32], next(seed))[0], "b32", lambda x: _to_int(_integral(value(x, F32), "rzi"), 32, False))
    for mode in ("rn", "rz", "rm", "rp"):
        for t in ("s32", "u32"):
            add(f"cvt.{mode}.f32.{t}", "b32", integers((32,), next(seed))[0], "f32",
                lambda x, m=mode, t=t: encode(Fraction(signed(x, 32) if t == "s32" else x), F32, m))
    add("cvt.rn.f32.s64", "b64", integers((64,), next(seed))[0], "f32", lambda x: encode(Fraction(signed(x, 64)), F32))
    add("cvt.f64.f32", "f32", columns([F32], next(seed))[0], "f64", lambda x: encode(value(x, F32), F64))
    for mode in ("rn", "rz", "rm", "rp"):
        add(f"cvt.{mode}.f32.f64", "f64", columns([F64], next(seed))[0], "f32", lambda x, m=mode: encode_float(value(x, F64), F32, m))
    add("cvt.f32.f16", "b16", columns([F16], next(seed))[0], "f32", lambda x: encode(value(x, F16), F32))
    add("cvt.f32.bf16", "b16", columns([BF16], next(seed))[0], "f32", lambda x: encode(value(x, BF16), F32))
    for mode in ("rn", "rz"):
        add(f"cvt.{mode}.f16.f32", "f32", columns([F32], next(seed))[0], "b16", lambda x, m=mode: encode_float(value(x, F32), F16, m))
        add(f"cvt.{mode}.bf16.f32", "f32", columns([F32], next(seed))[0], "b16",
            lambda x, m=mode: encode_float(value(x, F32), BF16, m))
    add("cvt.sat.f32.f32", "f32", columns([F32], next(seed))[0], "f32",
        lambda x: encode(Fraction(min(value(x, F32), 1.0)) if value(x, F32) > 0 else Fraction(0), F32))
    for d, s in (("s64", "s32"), ("u64", "u32"), ("s32", "s16"), ("u16", "u32"), ("u32", "u64"), ("s64", "u32"), ("u32", "u16")):
        dw, sw = int(d[1:]), int(s[1:])
        add(f"cvt.{d}.{s}", f"b{sw}", integers((sw,), next(seed))[0], f"b{dw}", lambda x, s=s, sw=sw: signed(x, sw) if s[0] == "s" else x)
    add("cvt.s16.s8", "b16", integers((16,), next(seed))[0], "b16", lambda x: signed(x, 8))
    add("cvt.u16.u8", "b16", integers((16,), next(seed))[0], "b16", lambda x: x & 255)
    add("cvt.sat.s16.s32", "b32", integers((32,), next(seed))[0], "b16", lambda x: max(-32768, min(32767, signed(x, 32))))
    add("cvt.sat.u16.s32", "b32", integers((32,), next(seed))[0], "b16", lambda x: max(0, min(65535, signed(x, 32))))
    add("cvt.rna.tf32.f32", "f32", [x for x in columns([F32], next(seed))[0] if x & 0x7F800000 != 0x7F800000], "b32",
        lambda x: (x + 0x1000) & 0xFFFFE000)
    return found


def encode_float(x: float, f: Format, mode: str) -> int:
    """encode, keeping the sign of a zero and of specials."""
    if math.isfinite(x):
        return encode(Fraction(x), f, mode, math.copysign(1, x) < 0)
    return encode(x, f)


def _convert_packed(seed) -> list[Program]:
    found = []
    for kind, f in (("f16x2", F16), ("bf16x2", BF16)):
        for mode, relu in (("rn", False), ("rz", False), ("rn", True)):
            form = f"cvt.{mode}{'.relu' if relu else ''}.{kind}.f32"
            a, b = columns([F32, F32], next(seed))

            def one(x: int, f=f, m=mode, relu=relu) -> int:
                v = value(x, F32)
                if relu and v <= 0:
                    v = 0.0
                return encode_float(v, f, m)

            found.append(simple(form, form, f"{form} d, a, b;", [("f32", a), ("f32", b)], ["b32"],
                                lambda x, y, one=one: one(x) << 16 | one(y)))
    for kind in ("e4m3", "e5m2"):
        form = f"cvt.rn.satfinite.{kind}x2.f32"
        a, b = columns([F32, F32], next(seed))
        found.append(simple(form, form, f"{form} d, a, b;", [("f32", a), ("f32", b)], ["b16"],
                            lambda x, y, k=kind: fp8(value(x, F32), k) << 8 | fp8(value(y, F32), k)))
        form = f"cvt.rn.satfinite.{kind}x2.f16x2"
        h = _pairs(*columns([F16, F16], next(seed)))
        found.append(simple(form, form, f"{form} d, a;", [("b32", h)], ["b16"],
                            lambda x, k=kind: fp8(value(x >> 16, F16), k) << 8 | fp8(value(x & 0xFFFF, F16), k)))
        form = f"cvt.rn.f16x2.{kind}x2"
        codes = [(i * 37 + 11 & 255) << 8 | i for i in range(256)]
        found.append(simple(form, form, f"{form} d, a;", [("b16", codes)], ["b32"],
                            lambda x, k=kind: _both_codes(x, k)))
    return found


def _both_codes(x: int, kind: str) -> int:
    def one(code: int) -> int:
        v = fp8_value(code, kind)
        return encode_float(v, F16, "rn")

    return one(x >> 8) << 16 | one(x & 255)
