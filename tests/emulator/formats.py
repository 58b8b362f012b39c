"""Number formats narrower than 32 bits: bfloat16, float16, e4m3, e5m2, tf32 (PTX ISA 5.2.3 "Alternate Floating-Point").

Encoders take float64 values (exact, or rounded to odd) and round once, to nearest even.
"""
from __future__ import annotations

from functools import lru_cache

import numpy as np


def odd32(x: np.ndarray) -> np.ndarray:
    """float64 to float32 rounded to odd, so that a later rounding to 16 bits is the only one."""
    y = x.astype(np.float32)
    back = y.astype(np.float64)
    bits = y.view(np.int32)
    finite = np.isfinite(x) & np.isfinite(y)
    fix = finite & (back != x) & (bits & 1 == 0)
    if fix.any():
        grow = np.abs(back) < np.abs(x)
        y = np.where(fix, np.where(grow, bits + 1, bits - 1), bits).view(np.float32)
    return y


def bf16_bits(x: np.ndarray, mode: str = "rn") -> np.ndarray:
    """float32 to bfloat16 bits; NaN becomes 0x7fff."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    if mode == "rn":
        out = ((u + (np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)
    else:
        out = (u >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), out)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits to float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f16_bits(x: np.ndarray, mode: str = "rn") -> np.ndarray:
    """float32 or float64 to float16 bits; NaN becomes 0x7fff."""
    y = x.astype(np.float16)
    if mode == "rz":
        over = np.abs(y.astype(np.float64)) > np.abs(x.astype(np.float64))
        y = np.where(over, np.nextafter(y, np.float16(0)), y)
    return np.where(np.isnan(x), np.uint16(0x7FFF), y.view(np.uint16))


def f16_values(bits: np.ndarray) -> np.ndarray:
    """float16 bits to float32."""
    return bits.astype(np.uint16).view(np.float16).astype(np.float32)


@lru_cache(maxsize=2)
def _fp8_table(kind: str) -> np.ndarray:
    exponent, mantissa, bias = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15)}[kind]
    out = np.zeros(256)
    for code in range(256):
        e, m = code >> mantissa & ((1 << exponent) - 1), code & ((1 << mantissa) - 1)
        value = m * 2.0 ** (1 - bias - mantissa) if e == 0 else (1 + m / (1 << mantissa)) * 2.0 ** (e - bias)
        if kind == "e5m2" and e == 31:
            value = np.inf if m == 0 else np.nan
        if kind == "e4m3" and code & 127 == 127:
            value = np.nan
        out[code] = -value if code & 128 else value
    return out.astype(np.float32)


def fp8_values(bits: np.ndarray, kind: str) -> np.ndarray:
    """8-bit codes to float32."""
    return _fp8_table(kind)[bits]


def fp8_bits(x: np.ndarray, kind: str) -> np.ndarray:
    """float32 to 8-bit codes, to nearest even, finite values beyond the range to the largest (``.satfinite``)."""
    top = 0x7E if kind == "e4m3" else 0x7B
    grid = _fp8_table(kind)[: top + 1].astype(np.float64)
    a = np.minimum(np.abs(x.astype(np.float64)), grid[-1])
    code = np.clip(np.searchsorted(grid, a, side="left"), 1, top)
    low, high = grid[code - 1], grid[code]
    middle = (low + high) / 2
    down = (a < middle) | ((a == middle) & ((code - 1) % 2 == 0))
    code = np.where(down, code - 1, code)
    code = np.where(np.isnan(x), 0x7F, code | np.where(np.signbit(x), 0x80, 0))
    return code.astype(np.uint8)


def tf32_values(bits: np.ndarray) -> np.ndarray:
    """The tensor cores read the upper 19 bits of a 32-bit register."""
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)
