"""Programs of wgmma: every shape and type that the kernels use, operands in every layout, small integers (exact sums)."""
from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from .exact import BF16, F16, F32, encode, fp8
from .program import Program

SIZE = {"f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1, "tf32": 4}
FIELD = {0: 0, 128: 1, 64: 2, 32: 3}
SHAPES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""N of the kernels' products."""
_ENCODE: dict[str, Callable[[float], int]] = {
    "f16": lambda x: encode(x, F16), "bf16": lambda x: encode(x, BF16), "tf32": lambda x: encode(x, F32),
    "e4m3": lambda x: fp8(x, "e4m3"), "e5m2": lambda x: fp8(x, "e5m2")}


def image(rows: list[list[int]], kind: str, span: int, mn_major: bool) -> tuple[bytes, int, int]:
    """Shared-memory image of a matrix [rows][K], and its leading and stride byte offsets.

    K-major: 8 rows of `span` bytes are an atom.  MN-major: 8 steps of K of `span` bytes are.  Without a swizzle an atom
    is 8 lines of 16 bytes.
    """
    size, n, depth = SIZE[kind], len(rows), len(rows[0])
    lines, length = (depth, n) if mn_major else (n, depth)
    out = bytearray(max(n * depth * size, lines * span * max(1, length * size // span) if span else 0))
    per = 16 // size
    for r in range(n):
        for k in range(depth):
            if not mn_major and span:
                leading, stride = 16, 8 * span
                at = r * span + k * size
            elif not mn_major:
                leading, stride = n * 16, 128
                at = r % 8 * 16 + k % per * size + k // per * leading + r // 8 * stride
            elif span:
                leading, stride, width = depth * span, 8 * span, span // size
                at = r % width * size + k % 8 * span + k // 8 * stride + r // width * leading
            else:
                leading, stride = 128, depth // 8 * 128
                at = r % 8 * size + k % 8 * 16 + k // 8 * leading + r // 8 * stride
            if span:
                at ^= (at >> 7 & span // 16 - 1) << 4
            out[at:at + size] = rows[r][k].to_bytes(size, "little")
    return bytes(out), leading, stride


def product(kind_a: str, kind_b: str, n: int, span: int, registers: bool = False, trans_a: bool = False, trans_b: bool = False,
            scale_a: int = 1, scale_b: int = 1, seed: int = 0) -> Program:
    """D [64, n] = sum over the steps of K of A B^T, with a first product that ignores D."""
    rnd = random.Random(repr((kind_a, kind_b, n, span, registers, trans_a, trans_b, seed)))
    step = 32 // SIZE[kind_a]
    depth = step * (span // 32 if span and not (trans_a or trans_b) else 2)
    # A K-major operand must hold its steps of K in one atom; beside an MN-major one it gets a wider atom than that.
    mixed = bool(span) and trans_a != trans_b
    span_a, span_b = (max(span, 64) if mixed and not t else span for t in (trans_a, trans_b))
    if registers:
        span_b = span
    a = [[float(rnd.randint(-3, 3)) for _ in range(depth)] for _ in range(64)]
    b = [[float(rnd.randint(-3, 3)) for _ in range(depth)] for _ in range(n)]
    codes = {k: {float(x): _ENCODE[k](float(x)) for x in range(-3, 4)} for k in (kind_a, kind_b)}
    raw_a, raw_b = ([[codes[k][x] for x in row] for row in m] for m, k in ((a, kind_a), (b, kind_b)))
    image_b, lead_b, stride_b = image(raw_b, kind_b, span_b, trans_b)
    if registers:
        image_a, lead_a, stride_a = b"".join(x.to_bytes(SIZE[kind_a], "little") for row in raw_a for x in row), 0, 0
    else:
        image_a, lead_a, stride_a = image(raw_a, kind_a, span_a, trans_a)
    at_b = -(-len(image_a) // 1024) * 1024
    operands = image_a + bytes(at_b - len(image_a)) + image_b
    operands += bytes(-len(operands) % 2048)
    want = np.array(a) @ np.array(b).T * (scale_a * scale_b) + 0.0
    result = want.astype("<f4").tobytes()

    def constant(lead: int, stride: int, span: int) -> int:
        return lead >> 4 << 16 | stride >> 4 << 32 | FIELD[span] << 62

    form = f"wgmma.mma_async.sync.aligned.m64n{n}k{step}.f32.{kind_a}.{kind_b}"
    d = "{" + ", ".join(f"acc{i}" for i in range(n // 2)) + "}"
    lines = [".reg .b32 m, s, t, u; .reg .b64 p, da, db, q; .reg .pred z, no, yes;", f".reg .f32 acc<{n // 2}>;",
             ".reg .b32 fa<4>;", "mov.b32 m, smem; shl.b32 t, %thread, 4;",
             "COPY: add.u32 s, m, t; cvt.u64.u32 p, t; add.u64 p, p, %buf; ld.global.v4.b32 {fa0, fa1, fa2, fa3}, [p];",
             f"st.shared.v4.b32 [s], {{fa0, fa1, fa2, fa3}}; add.u32 t, t, 2048; setp.lt.u32 z, t, {len(operands)}; @z bra COPY;",
             "fence.proxy.async.shared::cta; bar.sync 0; setp.ne.b32 no, 0, 0; setp.eq.b32 yes, 0, 0;".replace("0, 0;", "m, m;"),
             "wgmma.fence.sync.aligned;"]
    size = SIZE[kind_a]
    wide = size == 2
    for j in range(depth // step):
        advance_a = j * (step // 8 * stride_a if trans_a and span else step // 8 * lead_a if trans_a else 32 if span else 2 * lead_a)
        advance_b = j * (step // 8 * stride_b if trans_b and span else step // 8 * lead_b if trans_b else 32 if span else 2 * lead_b)
        if registers:
            # two rows, two halves of K; each register holds 4 bytes
            lines.append(f"shr.u32 s, %lane, 2; shl.b32 t, %warp, 4; add.u32 s, s, t; mul.lo.u32 s, s, {depth * size}; "
                         f"and.b32 t, %lane, 3; shl.b32 t, t, 2; add.u32 s, s, t; cvt.u64.u32 p, s; add.u64 p, p, %buf;")
            lines += [f"ld.global.b32 fa{i}, [p+{j * 32 + i % 2 * 8 * depth * size + i // 2 * 16}];" for i in range(4)]
            lines.append("wgmma.fence.sync.aligned;")
        for name, at, c in (("da", advance_a, constant(lead_a, stride_a, span_a)), ("db", at_b + advance_b, constant(lead_b, stride_b, span_b))):
            if name == "db" or not registers:
                lines.append(f"add.u32 s, m, {at}; shr.u32 s, s, 4; and.b32 s, s, 16383; cvt.u64.u32 {name}, s; mov.b64 q, {c}; "
                             f"or.b64 {name}, {name}, q;")
        first = "{fa0, fa1, fa2, fa3}" if registers else "da"
        trans = (f", {int(trans_b)}" if registers else f", {int(trans_a)}, {int(trans_b)}") if wide else ""
        lines.append(f"{form} {d}, {first}, db, {'no' if j == 0 else 'yes'}, {scale_a}, {scale_b}{trans};")
        lines.append("wgmma.commit_group.sync.aligned;")
        if registers:
            lines.append("wgmma.wait_group.sync.aligned 0;")
    lines += ["wgmma.wait_group.sync.aligned 0;", "shr.u32 s, %lane, 2; shl.b32 t, %warp, 4; add.u32 s, s, t; "
              f"mul.lo.u32 s, s, {4 * n}; and.b32 t, %lane, 3; shl.b32 t, t, 3; add.u32 s, s, t; cvt.u64.u32 p, s; "
              "add.u64 p, p, %buf;"]
    for i in range(n // 2):
        offset = len(operands) + 32 * (i // 4) + 4 * (i % 2) + 32 * n * (i // 2 % 2)
        lines.append(f"st.global.f32 [p+{offset}], acc{i};")
    where = "registers" if registers else "mn" if trans_a else "k"
    name = f"{form} span {span} A {where} B {'mn' if trans_b else 'k'} scales {scale_a} {scale_b}"
    return Program(name, form, "\n".join(lines), (), (), (), 128, len(operands), buffer=tuple(operands + bytes(len(result))),
                   want_buffer=tuple(operands + result))


def programs() -> list[Program]:
    found = []
    for n in SHAPES:
        for kind in ("bf16", "f16"):
            found.append(product(kind, kind, n, 128))
            if n % 64 == 0:
                found.append(product(kind, kind, n, 128, registers=True, trans_b=True))
            elif n % 32 == 0:
                found.append(product(kind, kind, n, 64, registers=True, trans_b=True))
    for span in (0, 32, 64, 128):
        if span != 128:
            found.append(product("f16", "f16", 64, span, seed=1))
        found.append(product("bf16", "bf16", 64, span, trans_b=True, seed=2))
        found.append(product("bf16", "bf16", 128, span, trans_a=True, seed=3))
        found.append(product("f16", "f16", 64, span, trans_a=True, trans_b=True, seed=4))
        found.append(product("e4m3", "e4m3", 64, span))
        found.append(product("tf32", "tf32", 64, span))
    found += [product("e4m3", "e5m2", 96, 128), product("e5m2", "e5m2", 128, 64), product("e5m2", "e4m3", 64, 128, registers=True),
              product("bf16", "bf16", 8, 128), product("f16", "f16", 24, 32, registers=True),
              product("f16", "f16", 64, 128, scale_a=-1), product("f16", "f16", 64, 128, scale_a=-1, scale_b=-1, seed=5),
              product("bf16", "bf16", 64, 128, registers=True, scale_b=-1)]
    return found
