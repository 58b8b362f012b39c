"""IEEE arithmetic in exact fractions: the expected results of the instruction programs, by none of the emulator's code."""
from __future__ import annotations

import math
import struct
from fractions import Fraction

F16, BF16, F32, F64 = (5, 10), (8, 7), (8, 23), (11, 52)
NAN = {F16: 0x7FFF, BF16: 0x7FFF, F32: 0x7FFFFFFF, F64: 0x7FFFFFFFFFFFFFFF}
Format = tuple[int, int]


def value(bits: int, f: Format) -> float:
    """Bits as a Python float; every format here is a part of double precision."""
    e_bits, m_bits = f
    s, e, m = bits >> (e_bits + m_bits) & 1, bits >> m_bits & ((1 << e_bits) - 1), bits & ((1 << m_bits) - 1)
    bias = (1 << (e_bits - 1)) - 1
    if e == (1 << e_bits) - 1:
        x = math.nan if m else math.inf
    elif e == 0:
        x = math.ldexp(m, 1 - bias - m_bits)
    else:
        x = math.ldexp(m + (1 << m_bits), e - bias - m_bits)
    return -x if s else x


def power(x: Fraction) -> int:
    """floor(log2(x)) of a positive fraction."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if Fraction(2) ** e <= x else e - 1


def encode(x: Fraction | float, f: Format, mode: str = "rn", negative_zero: bool = False) -> int:
    """Round to a format: rn (to even), rz, rm (down), rp (up); floats stand for inf and NaN only."""
    e_bits, m_bits = f
    bias, top = (1 << (e_bits - 1)) - 1, (1 << e_bits) - 1
    sign_bit = 1 << (e_bits + m_bits)
    if isinstance(x, float):
        if math.isnan(x):
            return NAN[f]
        if math.isinf(x):
            return (sign_bit if x < 0 else 0) | top << m_bits
        negative_zero = math.copysign(1, x) < 0
        x = Fraction(x)
    if x == 0:
        return sign_bit if negative_zero else 0
    s, a = x < 0, abs(x)
    e = max(power(a), 1 - bias)
    q = a / Fraction(2) ** (e - m_bits)
    n, rest = q.numerator // q.denominator, q - q.numerator // q.denominator
    up = {"rn": rest > Fraction(1, 2) or rest == Fraction(1, 2) and n % 2 == 1, "rz": False, "rm": s and rest > 0,
          "rp": not s and rest > 0}[mode]
    n += up
    if n >> (m_bits + 1):
        n, e = n >> 1, e + 1
    if e > bias:
        to_inf = mode == "rn" or mode == "rp" and not s or mode == "rm" and s
        body = top << m_bits if to_inf else (top << m_bits) - 1
    else:
        body = n if n < 1 << m_bits else (e + bias - 1 << m_bits) + n
    return (sign_bit if s else 0) | body


def operate(op: str, x: list[float], f: Format, mode: str = "rn") -> int:
    """add, sub, mul, div or fma of floats of a format, rounded once."""
    if op == "sub":
        op, x = "add", [x[0], -x[1]]
    special = any(not math.isfinite(v) for v in x)
    if op == "add":
        if special:
            return encode(x[0] + x[1], f)
        total = Fraction(x[0]) + Fraction(x[1])
        both_negative = all(math.copysign(1, v) < 0 for v in x)
        differ = math.copysign(1, x[0]) != math.copysign(1, x[1]) or x[0] != 0
        return encode(total, f, mode, both_negative or mode == "rm" and differ)
    sign = math.copysign(1, x[0]) * math.copysign(1, x[1]) < 0
    if op == "mul":
        return encode(x[0] * x[1], f) if special else encode(Fraction(x[0]) * Fraction(x[1]), f, mode, sign)
    if op == "div":
        if math.isnan(x[0]) or math.isnan(x[1]) or x[0] == 0 == x[1] or math.isinf(x[0]) and math.isinf(x[1]):
            return NAN[f]
        if x[1] == 0 or math.isinf(x[0]):
            return encode(-math.inf if sign else math.inf, f)
        if math.isinf(x[1]):
            return encode(Fraction(0), f, mode, sign)
        return encode(Fraction(x[0]) / Fraction(x[1]), f, mode, sign)
    if special:
        a, b, c = x
        if math.isnan(a) or math.isnan(b) or math.isnan(c) or math.isinf(a) and b == 0 or a == 0 and math.isinf(b):
            return NAN[f]
        p = (-math.inf if sign else math.inf) if math.isinf(a) or math.isinf(b) else 0.0
        return encode(p + c, f)
    p = Fraction(x[0]) * Fraction(x[1])
    total = p + Fraction(x[2])
    p_negative, c_negative = sign, math.copysign(1, x[2]) < 0
    zero = p_negative and c_negative or mode == "rm" and (p_negative or c_negative or p != 0)
    return encode(total, f, mode, zero)


def f32(x: float) -> int:
    """Bits of a Python float rounded to float32."""
    return encode(float(x), F32)


def bits64(x: float) -> int:
    return struct.unpack("<Q", struct.pack("<d", x))[0]


def flushed(bits: int) -> int:
    """A subnormal float32 as a zero of its sign."""
    return bits & 0x80000000 if bits & 0x7F800000 == 0 else bits


def signed(x: int, n: int) -> int:
    x &= (1 << n) - 1
    return x - (1 << n) if x >> (n - 1) else x


def fp8(x: float, kind: str) -> int:
    """To e4m3 or e5m2, nearest even, saturating to the largest finite value."""
    if math.isnan(x):
        return 0x7F
    e, m, top = (4, 3, 448.0) if kind == "e4m3" else (5, 2, 57344.0)
    s = 0x80 if math.copysign(1, x) < 0 else 0
    a = min(abs(x), top)
    if a == 0:
        return s
    bias = (1 << (e - 1)) - 1
    p = max(power(Fraction(a)), 1 - bias)
    q = Fraction(a) / Fraction(2) ** (p - m)
    n, rest = q.numerator // q.denominator, q - q.numerator // q.denominator
    n += rest > Fraction(1, 2) or rest == Fraction(1, 2) and n % 2 == 1
    if n >> (m + 1):
        n, p = n >> 1, p + 1
    code = n if n < 1 << m else (p + bias - 1 << m) + n
    return s | min(code, 0x7E if kind == "e4m3" else 0x7B)


def fp8_value(code: int, kind: str) -> float:
    if kind == "e5m2":
        return value(code << 8, F16)
    if code & 0x7F == 0x7F:
        return math.nan
    e, m = code >> 3 & 15, code & 7
    x = math.ldexp(m, -9) if e == 0 else math.ldexp(8 + m, e - 10)
    return -x if code & 0x80 else x
