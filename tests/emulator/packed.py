"""Arithmetic on f16, bf16, their pairs, and pairs of f32 (PTX ISA 9.7.4 "Half Precision Floating-Point", 9.7.3 for
``.f32x2``)."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .decode import Form, Run
from .floating import ROUNDINGS, canonical, flush, fma64, larger, odd_sum, smaller, to32
from .formats import bf16_bits, bf16_values, f16_bits, f16_values, odd32
from .warp import Warp

Arith = Callable[..., np.ndarray]


def _halves(form: Form, t: str, n: int, f: Arith, relu: bool = False, sat: bool = False, ftz: bool = False) -> Run:
    """`f` maps float64 values to float64 values (exact or rounded to odd) for each half of n sources."""
    kind, pair = t.removesuffix("x2"), t.endswith("x2")
    b = "b32" if pair else "b16"
    form.done(n + 1)
    put = form.put(0, b)
    gets = [form.get(i + 1, b) for i in range(n)]
    decode = f16_values if kind == "f16" else bf16_values

    def one(bits: list[np.ndarray]) -> np.ndarray:
        x = [decode(v).astype(np.float64) for v in bits]
        if ftz:
            x = [np.where(np.abs(v) < 2.0**-14, np.copysign(0.0, v), v) for v in x]
        y = f(*x)
        if relu:
            y = np.where(y > 0, y, np.where(np.isnan(y), y, 0.0))
        if sat:
            y = np.where(y > 0, np.minimum(y, 1.0), 0.0)
        out = f16_bits(y) if kind == "f16" else bf16_bits(odd32(y))
        if ftz:
            small = (out & 0x7C00) == 0
            out = np.where(small, out & np.uint16(0x8000), out)
        return out

    def run(w: Warp, mask: int) -> None:
        x = [g(w) for g in gets]
        if not pair:
            put(w, one(x), mask)
            return
        lo = one([v.astype(np.uint16) for v in x])
        hi = one([(v >> np.uint32(16)).astype(np.uint16) for v in x])
        put(w, hi.astype(np.uint32) << np.uint32(16) | lo, mask)

    return run


def _pairs32(form: Form, n: int, f: Arith) -> Run:
    """Two f32 in a 64-bit register (sm_100 on)."""
    mode, ftz = form.opt(*ROUNDINGS) or "rn", form.has("ftz")
    form.done(n + 1)
    put = form.put(0, "b64")
    gets = [form.get(i + 1, "b64") for i in range(n)]

    def run(w: Warp, mask: int) -> None:
        x = [np.ascontiguousarray(g(w)).view(np.float32) for g in gets]
        if ftz:
            x = [flush(v) for v in x]
        y = canonical(to32(f(*x), mode))
        put(w, np.ascontiguousarray(flush(y) if ftz else y, np.float32).view(np.uint64), mask)

    return run


def _flags(form: Form) -> dict[str, bool]:
    form.opt("rn")
    return {"ftz": form.has("ftz"), "sat": form.has("sat"), "relu": form.has("relu")}


def add(form: Form, t: str) -> Run:
    s = -1.0 if form.op == "sub" else 1.0
    if t == "f32x2":
        return _pairs32(form, 2, lambda a, b: odd_sum(a.astype(np.float64), s * b.astype(np.float64)))
    return _halves(form, t, 2, lambda a, b: odd_sum(a, s * b), **_flags(form))


def mul(form: Form, t: str) -> Run:
    if t == "f32x2":
        return _pairs32(form, 2, lambda a, b: a.astype(np.float64) * b)
    return _halves(form, t, 2, np.multiply, **_flags(form))


def fma(form: Form, t: str) -> Run:
    if t == "f32x2":
        return _pairs32(form, 3, fma64)
    return _halves(form, t, 3, lambda a, b, c: odd_sum(a * b, c), **_flags(form))


def extreme(form: Form, t: str) -> Run:
    nan, f = form.has("NaN"), larger if form.op == "max" else smaller
    ftz = form.has("ftz")
    return _halves(form, t, 2, lambda a, b: f(a, b, nan), ftz=ftz)
