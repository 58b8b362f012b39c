"""Approximations (PTX ISA 9.7.3: rcp, sqrt, rsqrt, sin, cos, lg2, ex2, tanh).

The ISA states an error bound, not a result: here the result is the true one, rounded to float32, which lies inside
every bound.  `BOUNDS` has the ISA's bounds for comparisons with a GPU.
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .decode import Form, Run, operation
from .floating import ROUNDINGS, wrap32
from .formats import bf16_bits, bf16_values, f16_bits, f16_values

BOUNDS: dict[str, tuple[str, float]] = {
    "ex2": ("relative", 2.0**-22), "lg2": ("absolute", 2.0**-22), "rcp": ("relative", 2.0**-23),
    "rsqrt": ("relative", 2.0**-22.9), "sqrt": ("relative", 2.0**-22), "tanh": ("relative", 2.0**-11),
    "sin": ("absolute", 2.0**-20.5), "cos": ("absolute", 2.0**-20.5),
}
"""Kind of error and its bound; lg2 is relative outside (0.5, 2), sin and cos hold in [-pi, pi]."""


def _through64(f: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda a: f(a.astype(np.float64)).astype(np.float32)


def _reciprocal(x: np.ndarray) -> np.ndarray:
    return np.divide(1.0, x)


_FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "ex2": np.exp2, "lg2": np.log2, "rcp": _reciprocal, "sqrt": np.sqrt, "tanh": np.tanh, "sin": np.sin, "cos": np.cos,
    "rsqrt": lambda x: np.divide(1.0, np.sqrt(x)),
}


@operation("ex2", "lg2", "rcp", "sqrt", "rsqrt", "tanh", "sin", "cos")
def _approx(form: Form) -> Run:
    exact = form.op in ("rcp", "sqrt")
    t = form.type(*(("f32", "f64") if exact else ("f32", "f16", "bf16", "f16x2", "bf16x2") if form.op in ("ex2", "tanh")
                    else ("f32",)))
    f = _FUNCTIONS[form.op]
    if t == "f64":
        form.one("rn")
        form.done(2)
        return form.alu((t, t), f)
    mode = form.opt("approx", *(ROUNDINGS if exact else ()))
    if mode not in ("approx", "rn"):
        raise form.fail("needs .approx or .rn")
    if t != "f32":
        return _narrow(form, t, f)
    g = wrap32(form, _through64(f))
    form.done(2)
    return form.alu((t, t), g)


def _narrow(form: Form, t: str, f: Callable[[np.ndarray], np.ndarray]) -> Run:
    form.has("ftz")
    form.done(2)
    decode, encode = (f16_values, f16_bits) if t.startswith("f16") else (bf16_values, bf16_bits)

    def one(bits: np.ndarray) -> np.ndarray:
        return encode(f(decode(bits).astype(np.float64)).astype(np.float32))

    if not t.endswith("x2"):
        return form.alu(("b16", "b16"), one)
    return form.alu(("b32", "b32"), lambda a: one(a >> np.uint32(16)).astype(np.uint32) << np.uint32(16)
                    | one(a & np.uint32(0xFFFF)))
