"""Floating-point arithmetic with the ISA's rounding (PTX ISA 9.7.3 "Floating-Point", 9.7.6 "Comparison and
Selection").

One rounding everywhere: sums and products are formed in float64 with rounding to odd, which keeps a second rounding
to fewer bits exact.  A NaN result is the canonical one (0x7fffffff).
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .decode import Form, Run, operation

TINY = np.float32(2.0**-126)
NAN32 = np.uint32(0x7FFFFFFF)
ROUNDINGS = ("rn", "rz", "rm", "rp")


def odd_sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b of float64, rounded to odd: exact in what a later rounding to 32 bits or fewer can see."""
    s = a + b
    back = s - a
    error = (a - (s - back)) + (b - back)
    inexact = (error != 0) & np.isfinite(s) & np.isfinite(error)
    if inexact.any():
        bits = s.view(np.int64)
        up = (error > 0) == (s > 0)
        fix = inexact & (bits & 1 == 0)
        s = np.where(fix, np.where(up, bits + 1, bits - 1), bits).view(np.float64)
    return s


def to32(x: np.ndarray, mode: str = "rn") -> np.ndarray:
    """float64 to float32 with one of the four roundings."""
    y = x.astype(np.float32)
    if mode == "rn":
        return y
    back = y.astype(np.float64)
    down = {"rz": np.abs(back) > np.abs(x), "rm": back > x, "rp": np.zeros(x.shape, bool)}[mode]
    up = back < x if mode == "rp" else np.zeros(x.shape, bool)
    if mode == "rz":
        y = np.where(down, np.nextafter(y, np.float32(0)), y)
    elif mode == "rm":
        y = np.where(down, np.nextafter(y, np.float32(-np.inf)), y)
    else:
        y = np.where(up, np.nextafter(y, np.float32(np.inf)), y)
    return y.astype(np.float32)


def sum32(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """a + b of float64 values as float32 with one rounding; a sum that cancels is -0 when rounding down."""
    y = to32(odd_sum(a, b), mode)
    if mode == "rm":
        positive = (a == 0) & (b == 0) & ~np.signbit(a) & ~np.signbit(b)
        y = np.where((a == -b) & ~positive, np.float32(-0.0), y)
    return y


def canonical(x: np.ndarray) -> np.ndarray:
    """float32 with every NaN the canonical one."""
    bad = x != x
    if bad.any():
        x = x.copy()
        x.view(np.uint32)[bad] = NAN32
    return x


def flush(x: np.ndarray) -> np.ndarray:
    """Subnormal float32 values become zeros of their sign (``.ftz``)."""
    small = np.abs(x) < TINY
    if small.any():
        return np.where(small, np.copysign(np.float32(0), x), x)
    return x


def saturate(x: np.ndarray) -> np.ndarray:
    """[0, 1], NaN to +0 (``.sat``)."""
    return np.where(x > 0, np.minimum(x, np.float32(1)), np.float32(0)).astype(np.float32)


def wrap32(form: Form, f: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Take ``.ftz`` and ``.sat`` of an f32 instruction and apply them around `f`."""
    ftz, sat = form.has("ftz"), form.has("sat")

    def g(*x: np.ndarray) -> np.ndarray:
        y = canonical(f(*(flush(v) for v in x)) if ftz else f(*x))
        y = flush(y) if ftz else y
        return saturate(y) if sat else y

    return g if ftz or sat else lambda *x: canonical(f(*x))


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float32 values, in float64, rounded to odd."""
    return odd_sum(a.astype(np.float64) * b, c.astype(np.float64))


def _narrow(form: Form, t: str) -> bool:
    return t in ("f16", "bf16", "f16x2", "bf16x2")


def _f64(form: Form, f: Callable[..., np.ndarray], n: int) -> Run:
    form.opt("rn")
    form.done(n + 1)
    return form.alu(("f64",) * (n + 1), f)


@operation("fma")
def fma(form: Form) -> Run:
    t = form.type("f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "f32x2")
    if t == "f32x2" or _narrow(form, t):
        from .packed import fma as narrow

        return narrow(form, t)
    if t == "f64":
        from fractions import Fraction

        def one(a: float, b: float, c: float) -> float:
            if not all(np.isfinite(v) for v in (a, b, c)) or a == 0 or b == 0:
                return a * b + c
            exact = Fraction(a) * Fraction(b) + Fraction(c)
            try:
                return float(exact)
            except OverflowError:
                return np.inf if exact > 0 else -np.inf

        return _f64(form, lambda *x: np.array([one(*map(float, r)) for r in zip(*x, strict=True)]), 3)
    mode = form.opt(*ROUNDINGS)
    if mode is None:
        raise form.fail("fma needs a rounding")
    f = wrap32(form, (lambda a, b, c: fma64(a, b, c).astype(np.float32)) if mode == "rn"
               else lambda a, b, c: sum32(a.astype(np.float64) * b, c.astype(np.float64), mode))
    form.done(4)
    return form.alu((t,) * 4, f)


def add(form: Form) -> Run:
    t = form.type("f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "f32x2")
    minus = form.op == "sub"
    if t == "f32x2" or _narrow(form, t):
        from .packed import add as narrow

        return narrow(form, t)
    plain: Callable[..., np.ndarray] = np.subtract if minus else np.add
    if t == "f64":
        return _f64(form, plain, 2)
    mode = form.opt(*ROUNDINGS) or "rn"

    def directed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return sum32(a.astype(np.float64), (-b if minus else b).astype(np.float64), mode)

    f = wrap32(form, plain if mode == "rn" else directed)
    form.done(3)
    return form.alu((t,) * 3, f)


def mul(form: Form) -> Run:
    t = form.type("f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "f32x2")
    if t == "f32x2" or _narrow(form, t):
        from .packed import mul as narrow

        return narrow(form, t)
    if t == "f64":
        return _f64(form, np.multiply, 2)
    mode = form.opt(*ROUNDINGS) or "rn"
    f = wrap32(form, np.multiply if mode == "rn" else lambda a, b: to32(a.astype(np.float64) * b, mode))
    form.done(3)
    return form.alu((t,) * 3, f)


def divide(form: Form) -> Run:
    t = form.type("f32", "f64")
    if form.op != "div":
        raise form.fail("no floating remainder")
    if t == "f64":
        return _f64(form, np.divide, 2)
    mode = form.one("rn", "rz", "rm", "rp", "full", "approx")

    def f(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if mode in ("rn", "full", "approx"):
            return np.divide(a, b)
        q = a.astype(np.float64) / b
        # float64 has more than twice the bits: the quotient of two float32 is never within its error of a float32
        # unless it is one, so that a directed rounding of it is the directed rounding of the true quotient.
        return to32(q, mode)

    g = wrap32(form, f)
    form.done(3)
    return form.alu((t,) * 3, g)


def sign(form: Form) -> Run:
    """abs and neg: the sign bit only; a NaN's result is unspecified (9.7.3.9), here the canonical one."""
    t = form.type("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")
    negate = form.op == "neg"
    if _narrow(form, t):
        bit = {"f16": 0x8000, "bf16": 0x8000, "f16x2": 0x80008000, "bf16x2": 0x80008000}[t]
        form.has("ftz")
        form.done(2)
        b = "b32" if t.endswith("x2") else "b16"
        return form.alu((b, b), (lambda a: a ^ a.dtype.type(bit)) if negate else (lambda a: a & ~a.dtype.type(bit)))
    f = np.negative if negate else np.abs
    if t == "f64":
        form.done(2)
        return form.alu((t, t), f)
    g = wrap32(form, f)
    form.done(2)
    return form.alu((t, t), g)


def larger(a: np.ndarray, b: np.ndarray, nan: bool) -> np.ndarray:
    """PTX max: +0 over -0; one NaN gives the other operand, or NaN with ``.NaN``."""
    y = np.where((a == b) & (a == 0), np.where(np.signbit(a), b, a), np.maximum(a, b) if nan else np.fmax(a, b))
    return y.astype(a.dtype)


def smaller(a: np.ndarray, b: np.ndarray, nan: bool) -> np.ndarray:
    y = np.where((a == b) & (a == 0), np.where(np.signbit(a), a, b), np.minimum(a, b) if nan else np.fmin(a, b))
    return y.astype(a.dtype)


def extreme(form: Form) -> Run:
    t = form.type("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")
    if _narrow(form, t):
        from .packed import extreme as narrow

        return narrow(form, t)
    nan, xorsign = form.has("NaN"), form.has("xorsign")
    absolute = form.has("abs")
    f = larger if form.op == "max" else smaller
    if t == "f64":
        form.done(3)
        return form.alu((t,) * 3, lambda a, b: f(a, b, False))

    def g(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if not xorsign:
            return f(np.abs(a), np.abs(b), nan) if absolute else f(a, b, nan)
        s = np.signbit(a) ^ np.signbit(b)
        return np.copysign(f(np.abs(a), np.abs(b), nan), np.where(s, np.float32(-1), np.float32(1)))

    h = wrap32(form, g)
    form.done(3)
    return form.alu((t,) * 3, h)


_ORDERED = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}


def compare(form: Form, t: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Ordered comparisons are false with a NaN, those with a final u true (9.3.1)."""
    name = form.one(*_ORDERED, *(n + "u" for n in _ORDERED), "num", "nan")
    ftz = form.has("ftz")

    def f(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if t == "bf16":
            a, b = ((x.astype(np.uint32) << np.uint32(16)).view(np.float32) for x in (a, b))
        if ftz and t == "f32":
            a, b = flush(a), flush(b)
        if name == "eq" or name in ("lt", "le", "gt", "ge"):
            return _ORDERED[name](a, b)
        bad = np.isnan(a) | np.isnan(b)
        if name == "nan":
            return bad
        if name == "num":
            return ~bad
        if name == "ne":
            return np.not_equal(a, b) & ~bad
        return _ORDERED[name[:-1]](a, b) | bad

    return f


@operation("copysign")
def _copysign(form: Form) -> Run:
    t = form.type("f32", "f64")
    form.done(3)
    return form.alu((t,) * 3, lambda a, b: np.copysign(b, a))


@operation("testp")
def _testp(form: Form) -> Run:
    t, name = form.type("f32", "f64"), form.one("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    form.done(2)
    tiny = np.finfo(np.float32 if t == "f32" else np.float64).tiny
    tests: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "finite": np.isfinite, "infinite": np.isinf, "number": lambda a: ~np.isnan(a), "notanumber": np.isnan,
        "normal": lambda a: np.isfinite(a) & (np.abs(a) >= tiny), "subnormal": lambda a: (a != 0) & (np.abs(a) < tiny)}
    return form.alu(("pred", t), tests[name])
