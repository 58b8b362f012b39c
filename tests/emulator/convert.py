"""cvt between integers and floats of all widths, packed and 8-bit forms (PTX ISA 9.7.9 "cvt", 9.7.9 "cvt.pack")."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .decode import DTYPES, INTS, Form, Run, operation
from .floating import canonical, flush, saturate, to32
from .formats import bf16_bits, bf16_values, f16_bits, f16_values, fp8_bits, fp8_values, odd32
from .parser import WIDTHS
from .warp import Warp

_INTEGERS = ("u8", "s8", *INTS)
_FLOATS = ("f16", "bf16", "f32", "f64")
_PAIRS = ("f16x2", "bf16x2", "e4m3x2", "e5m2x2")
_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _limits(t: str) -> tuple[int, int]:
    n = WIDTHS[t]
    return (-(1 << (n - 1)), (1 << (n - 1)) - 1) if t[0] == "s" else (0, (1 << n) - 1)


def to_integer(x: np.ndarray, t: str) -> np.ndarray:
    """An integral float64 clamped to an integer type; NaN gives 0, as the ISA says for 32 bits and fewer sources."""
    lo, hi = _limits(t)
    out = np.where(np.isnan(x), 0.0, x)
    whole = [max(lo, min(hi, int(v))) if np.isfinite(v) else (hi if v > 0 else lo) for v in out]
    return np.array(whole, dtype=object).astype(DTYPES[t])


def _integers(d: str, s: str, sat: bool) -> Callable[[np.ndarray], np.ndarray]:
    if not sat:
        return lambda a: a.astype(DTYPES[d])
    lo, hi = _limits(d)
    return lambda a: np.array([max(lo, min(hi, int(v))) for v in a], dtype=object).astype(DTYPES[d])


def from_integer(a: np.ndarray, mode: str) -> np.ndarray:
    """An integer as float32 with one rounding."""
    if a.dtype.itemsize <= 4:
        return to32(a.astype(np.float64), mode)
    y = a.astype(np.float32)
    if mode == "rn":
        return y
    exact = [int(v) for v in a]
    back = [int(v) for v in y.astype(np.float64)]
    step = {"rz": lambda e, b: -1 if abs(b) > abs(e) else 0, "rm": lambda e, b: -1 if b > e else 0,
            "rp": lambda e, b: 1 if b < e else 0}[mode]
    out = []
    for e, b, v in zip(exact, back, y, strict=True):
        k = step(e, b)
        toward = np.float32(0) if mode == "rz" else np.float32(np.inf if k > 0 else -np.inf)
        out.append(np.nextafter(v, toward) if k else v)
    return np.array(out, np.float32)


def _values(form: Form, n: int, t: str) -> Callable:
    """A float source as float64."""
    if t == "bf16":
        get = form.get(n, "b16")
        return lambda w: bf16_values(get(w)).astype(np.float64)
    get = form.get(n, t)
    return lambda w: get(w).astype(np.float64)


@operation("cvt")
def _cvt(form: Form) -> Run:
    mods = list(form.mods)
    if len(mods) >= 2 and (mods[-2] in _PAIRS or mods[-1] in _PAIRS):
        return _packed(form)
    if mods[-2:] == ["tf32", "f32"]:
        return _tf32(form)
    s = form.type(*_INTEGERS, *_FLOATS)
    d = form.type(*_INTEGERS, *_FLOATS)
    if d in _INTEGERS and s in _INTEGERS:
        sat = form.has("sat")
        form.done(2)
        put, get, f = form.target(form.operands[0], d, loose=True), form.get(1, s, loose=True), _integers(d, s, sat)
        return lambda w, mask: put(w, f(get(w)), mask)
    if s in _INTEGERS:
        return _int_to_float(form, d, s)
    if d in _INTEGERS:
        name, ftz = form.one(*_INTEGRAL), form.has("ftz")
        form.has("sat")  # always on from float to integer
        form.done(2)
        put, get, f = form.target(form.operands[0], d, loose=True), _values(form, 1, s), _INTEGRAL[name]

        def run(w: Warp, mask: int) -> None:
            x = get(w)
            if ftz:
                x = np.where(np.abs(x) < 2.0**-126, 0.0, x)
            put(w, to_integer(f(x), d), mask)

        return run
    return _float_to_float(form, d, s)


def _int_to_float(form: Form, d: str, s: str) -> Run:
    mode = form.one("rn", "rz", "rm", "rp")
    sat = form.has("sat")
    form.done(2)
    get = form.get(1, s, loose=True)
    if d == "f32":
        put = form.put(0, "f32")
        return lambda w, mask: put(w, saturate(from_integer(get(w), mode)) if sat else from_integer(get(w), mode), mask)
    if d == "f64" and mode == "rn":
        put = form.put(0, "f64")
        return lambda w, mask: put(w, get(w).astype(np.float64), mask)
    if d in ("f16", "bf16") and mode == "rn" and WIDTHS[s] <= 32:
        put = form.put(0, "b16")
        encode = f16_bits if d == "f16" else lambda x: bf16_bits(odd32(x))
        return lambda w, mask: put(w, encode(get(w).astype(np.float64)), mask)
    raise form.fail("conversion is not known")


def _float_to_float(form: Form, d: str, s: str) -> Run:
    integral = form.opt(*_INTEGRAL)
    mode = form.opt("rn", "rz", "rm", "rp", "rna")
    ftz, sat, relu = form.has("ftz"), form.has("sat"), form.has("relu")
    satfinite = form.has("satfinite")
    form.done(2)
    get = _values(form, 1, s)
    narrower = WIDTHS[d] < WIDTHS[s] or {d, s} == {"f16", "bf16"}
    if narrower and mode is None and integral is None:
        raise form.fail("a narrowing conversion needs a rounding")
    if mode not in (None, "rn") and not (d == "f32" or d in ("f16", "bf16") and mode == "rz"):
        raise form.fail("rounding is not known here")
    put = form.put(0, "b16" if d in ("f16", "bf16") else d)

    def run(w: Warp, mask: int) -> None:
        x = get(w)
        if integral:
            x = _INTEGRAL[integral](x)
        if ftz:
            x = np.where(np.abs(x) < 2.0**-126, np.copysign(0.0, x), x)
        if relu:
            x = np.where(x > 0, x, np.where(np.isnan(x), x, 0.0))
        if d == "f64":
            put(w, x, mask)
        elif d == "f32":
            y = canonical(to32(x, mode or "rn"))
            y = flush(y) if ftz else y
            put(w, saturate(y) if sat else y, mask)
        elif d == "f16":
            y = np.where(x > 0, np.minimum(x, 1.0), 0.0) if sat else x
            put(w, f16_bits(_clamp(y, 65504.0) if satfinite else y, mode or "rn"), mask)
        else:
            put(w, bf16_bits(odd32(_clamp(x, float.fromhex("0x1.fep127")) if satfinite else x), mode or "rn"), mask)

    return run


def _clamp(x: np.ndarray, top: float) -> np.ndarray:
    return np.where(np.isnan(x), x, np.clip(x, -top, top))


def _tf32(form: Form) -> Run:
    form.mods = form.mods[:-2]
    mode = form.one("rna", "rn", "rz")
    form.done(2)

    def f(u: np.ndarray) -> np.ndarray:
        if mode == "rna":
            r = u + np.uint32(0x1000)
        elif mode == "rn":
            r = u + np.uint32(0xFFF) + ((u >> np.uint32(13)) & np.uint32(1))
        else:
            r = u
        return np.where((u & 0x7F800000) == 0x7F800000, u, r & np.uint32(0xFFFFE000)).astype(np.uint32)

    return form.alu(("b32", "b32"), f)


def _packed(form: Form) -> Run:
    """The first source goes to the upper half."""
    s, d = form.mods.pop(), form.mods.pop()
    mode = form.opt("rn", "rz", "rna") or "rn"
    satfinite, relu = form.has("satfinite"), form.has("relu")
    if d in ("f16x2", "bf16x2") and s == "f32":
        form.done(3)
        put, a, b = form.put(0, "b32"), form.get(1, "f32"), form.get(2, "f32")
        encode = f16_bits if d == "f16x2" else bf16_bits
        top = 65504.0 if d == "f16x2" else float.fromhex("0x1.fep127")

        def half(x: np.ndarray) -> np.ndarray:
            if relu:
                x = np.where(x > 0, x, np.where(np.isnan(x), x, np.float32(0)))
            return encode(_clamp(x, top).astype(np.float32) if satfinite else x, mode)

        return lambda w, mask: put(w, half(a(w)).astype(np.uint32) << np.uint32(16) | half(b(w)), mask)
    if d in ("e4m3x2", "e5m2x2") and s in ("f32", "f16x2"):
        if not satfinite or mode != "rn":
            raise form.fail("needs .rn.satfinite")
        kind = d[:4]
        form.done(3 if s == "f32" else 2)
        put = form.put(0, "b16")
        a = form.get(1, "f32" if s == "f32" else "b32")
        b = form.get(2, "f32") if s == "f32" else a

        def run(w: Warp, mask: int) -> None:
            if s == "f32":
                hi, lo = a(w), b(w)
            else:
                x = a(w)
                hi, lo = f16_values(x >> np.uint32(16)), f16_values(x & np.uint32(0xFFFF))
            if relu:
                hi, lo = (np.where(v > 0, v, np.where(np.isnan(v), v, np.float32(0))) for v in (hi, lo))
            put(w, fp8_bits(hi, kind).astype(np.uint16) << np.uint16(8) | fp8_bits(lo, kind), mask)

        return run
    if d == "f16x2" and s in ("e4m3x2", "e5m2x2"):
        form.done(2)
        put, get, kind = form.put(0, "b32"), form.get(1, "b16"), s[:4]

        def widen(x: np.ndarray) -> np.ndarray:
            y = f16_bits(fp8_values(x, kind))
            return np.where(y & 0x8000, 0, y).astype(np.uint16) if relu else y

        return lambda w, mask: put(w, widen(get(w) >> np.uint16(8)).astype(np.uint32) << np.uint32(16)
                                   | widen(get(w) & np.uint16(255)), mask)
    raise form.fail("conversion is not known")
