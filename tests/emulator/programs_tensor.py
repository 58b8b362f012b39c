"""Programs of copies with tensor maps: boxes over the edges of tensors, in every swizzle."""
from __future__ import annotations

import random
import struct
from itertools import product
from typing import Any

from .exact import signed
from .program import OUTPUTS, Program
from .programs_memory import BARRIER, random_bytes, word

LOAD = "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group"
SHAPE, STRIDES = (72, 40, 3), (160, 6400 + 160)
START = tuple[int, int, int]


def _data() -> tuple[int, ...]:
    """A tensor of 16-bit values with SHAPE and STRIDES, the padding between its rows included."""
    rnd = random.Random(6)
    return tuple(rnd.getrandbits(16) for _ in range((STRIDES[1] * 3) // 2))


def _moved(at: int, span: int) -> int:
    """Where a byte lies in a swizzle: bits 7 and up choose, 16-byte pieces move."""
    return at ^ (at >> 7 & span // 16 - 1) << 4 if span else at


def _barrier(size: int, load: str) -> str:
    body = BARRIER.replace("BYTES", str(size)).replace("COPY", load)
    return body.replace(".reg .b32 m, s, t;", ".reg .b32 m, s;")


def _load(start: START, at: int) -> str:
    return (f".reg .b64 map; mov.b64 map, map0; cvta.param.u64 map, map; prefetch.tensormap [map]; add.u32 s, m, {at}; "
            f"{LOAD} [s], [map, {{{start[0]}, {start[1]}, {start[2]}}}], [m];")


def _value(data: tuple[int, ...], x: int, y: int, z: int) -> int:
    inside = 0 <= x < SHAPE[0] and 0 <= y < SHAPE[1] and 0 <= z < SHAPE[2]
    return data[x + y * STRIDES[0] // 2 + z * STRIDES[1] // 2] if inside else 0


def _images(data: tuple[int, ...]) -> list[Program]:
    """Boxes whose rows are as long as the swizzle: shared memory as it is."""
    found = []
    for span, width in ((0, 16), (32, 16), (64, 32), (128, 64)):
        for start in ((0, 0, 0), (8, 37, 1), (56, -3, 2), (0, 4, -1)):
            size = 2 * width * 16
            flat = [0] * (size // 2)
            for r, c in product(range(16), range(width)):
                flat[_moved(2 * (r * width + c), span) // 2] = _value(data, start[0] + c, start[1] + r, start[2])
            raw = [b for v in flat for b in v.to_bytes(2, "little")]
            count = size // 128
            read = "shl.b32 s, %thread, 2; add.u32 s, m, s; " + " ".join(
                f"ld.shared.b32 {n}, [s+{1024 + 128 * j}];" for j, n in enumerate(OUTPUTS[:count]))
            want = [tuple(word(raw, 128 * j + 4 * i, 4) for i in range(32)) for j in range(count)]
            tensor = {"shape": SHAPE, "strides": STRIDES, "box": (width, 16, 1), "swizzle": span, "data": data}
            found.append(Program(f"tensor swizzle {span} width {width} at {start}", LOAD, _barrier(size, _load(start, 1024)) + read,
                                 (), ("b32",) * count, tuple(want), 32, 4096, maps=(tensor,)))
    return found


def rows_of_box(name: str, span: int, box: START, start: START, at: int = 1024, skip: int = 0) -> Program:
    """A box in a swizzle that may be wider than its rows: its elements, each read from where the swizzle puts it.

    at: bytes into shared memory; skip: elements before the tensor's first in its buffer.
    """
    data = _data()
    width, pitch = box[0], max(2 * box[0], span)
    words = width // 2
    flat = [_value(data[skip:], start[0] + x, start[1] + y, start[2] + z)
            for z, y, x in product(range(box[2]), range(box[1]), range(width))]
    raw = [b for v in flat for b in v.to_bytes(2, "little")]
    count = len(raw) // 128
    read = f".reg .b32 t, base; add.u32 base, m, {at};"
    for j, n in enumerate(OUTPUTS[:count]):
        # Word 32 j + thread of the box, at its row and column; then the exchange by bits of the whole address.
        read += (f" add.u32 t, %thread, {32 * j}; shr.u32 s, t, {words.bit_length() - 1}; mad.lo.u32 s, s, {pitch}, base; "
                 f"and.b32 t, t, {words - 1}; shl.b32 t, t, 2; add.u32 s, s, t; shr.u32 t, s, 7; "
                 f"and.b32 t, t, {max(span // 16 - 1, 0)}; shl.b32 t, t, 4; xor.b32 s, s, t; ld.shared.b32 {n}, [s];")
    want = tuple(tuple(word(raw, 128 * j + 4 * i, 4) for i in range(32)) for j in range(count))
    tensor: dict[str, Any] = {"shape": SHAPE, "strides": STRIDES, "box": box, "swizzle": span, "data": data}
    if skip:  # the buffer goes on for 88 values after the last row, so the tensor still ends inside it
        tensor["skip"] = skip
    return Program(name, LOAD, _barrier(len(raw), _load(start, at)) + read, (), ("b32",) * count, want, 32, 4096, maps=(tensor,))


def _rows() -> list[Program]:
    found = []
    for span, width in ((128, 32), (128, 16), (128, 8), (64, 16), (64, 8), (32, 8)):
        found += [rows_of_box(f"tensor rows of {2 * width} bytes in swizzle {span} at {start}", span, (width, 16, 1), start)
                  for start in ((0, 0, 0), (8, 37, 1), (56, -3, 2))]
    found += [rows_of_box(f"tensor rows of {2 * width} bytes in swizzle {span} to {at}", span, (width, 16, 1), (8, 0, 1), at)
              for span, width, at in ((128, 64, 1024 + 384), (64, 32, 1024 + 128), (32, 16, 1024 + 128), (128, 32, 1024 + 640),
                                      (64, 16, 1024 + 128), (32, 8, 1024 + 128))]
    found += [rows_of_box(f"tensor box of {y} by {z} rows of {2 * x} bytes in swizzle {span}", span, (x, y, z), (48, 37, 1))
              for span, x, y, z in ((128, 32, 4, 2), (64, 16, 8, 2), (128, 64, 4, 3))]
    found += [rows_of_box(f"tensor {2 * skip} bytes into memory in swizzle {span}", span, (span // 2, 16, 1), (8, 3, 1), skip=skip)
              for span, skip in ((128, 8), (64, 8), (32, 24))]
    return found


def store_of_box(name: str, span: int, width: int, start: START, at: int = 0) -> Program:
    """A box of shared memory, from byte `at` of it, to a [2, 20, 72] tensor: elements beyond its end are dropped."""
    shape, strides = (72, 20, 2), (160, 3200)
    pitch = max(2 * width, span)
    size = 16 * pitch + at
    before, given = random_bytes(8, strides[1] * 2), tuple(word(random_bytes(7, 128), 4 * i, 4) for i in range(32))
    # word 32 j + lane of shared memory is the lane's input, times 2 j + 1
    image = b"".join((v * (2 * j + 1) & 0xFFFFFFFF).to_bytes(4, "little") for j in range(size // 128) for v in given)
    after = list(before)
    for r, c in product(range(16), range(width)):
        x, y, z = start[0] + c, start[1] + r, start[2]
        # shared memory begins at a multiple of 1024
        place = _moved(at + pitch * r + 2 * c, span)
        if 0 <= x < shape[0] and 0 <= y < shape[1] and 0 <= z < shape[2]:
            to = 2 * x + strides[0] * y + strides[1] * z
            after[to:to + 2] = image[place:place + 2]
    put = ".reg .b32 s, t; .reg .b64 map; .reg .pred z; shl.b32 t, %thread, 2; mov.b32 s, smem; add.u32 s, s, t; "
    put += " ".join(f"mul.lo.u32 t, a, {2 * j + 1}; st.shared.b32 [s+{128 * j}], t;" for j in range(size // 128))
    source = f"mov.b32 s, smem; add.u32 s, s, {at};" if at else "mov.b32 s, smem;"
    body = (put + " fence.proxy.async.shared::cta; bar.sync 0; setp.eq.u32 z, %thread, 0; mov.b32 d, 0; @!z bra DONE; "
            f"mov.b64 map, map0; cvta.param.u64 map, map; {source} {STORE} [map, {{{start[0]}, {start[1]}, {start[2]}}}], [s]; "
            "cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0; cp.async.bulk.wait_group 0; DONE:")
    tensor = {"shape": shape, "strides": strides, "box": (width, 16, 1), "swizzle": span, "data": None}
    return Program(name, STORE, body, (("b32", given),), ("b32",), ((0,) * 32,), 32, size, maps=(tensor,), buffer=before,
                   want_buffer=tuple(after))


def _stores() -> list[Program]:
    whole = ((128, 64, (0, 0, 0)), (128, 64, (16, 10, 1)), (64, 32, (48, 4, 0)), (32, 16, (64, 0, 1)), (0, 16, (64, 12, 1)))
    found = [store_of_box(f"tensor store swizzle {span} at {start}", span, width, start) for span, width, start in whole]
    found += [store_of_box(f"tensor store of rows of {2 * width} bytes in swizzle {span} at {start}", span, width, start)
              for span, width, start in ((128, 32, (8, 3, 1)), (128, 16, (64, 12, 0)), (64, 16, (16, 10, 1)), (32, 8, (64, 4, 1)))]
    found += [store_of_box(f"tensor store swizzle {span} from {at}", span, width, (8, 6, 1), at)
              for span, width, at in ((128, 64, 384), (128, 32, 640))]
    return found


def reduction(op: str, element: str) -> Program:
    """A box of shared memory combined with a [2, 20, 36] tensor of 4-byte elements, over its end; exact in f32 too."""
    shape, strides, box, start, span = (36, 20, 2), (160, 3200), (16, 16, 1), (28, 10, 1), 64
    real = element == "f32"
    given = tuple(word(random_bytes(9, 128), 4 * i, 4) for i in range(32))
    old = [word(random_bytes(10, strides[1] * 2), 4 * i, 4) for i in range(strides[1] // 2)]
    new = [(v & 0xFFFF if real else v) * (2 * j + 1) & 0xFFFFFFFF for j in range(8) for v in given]

    def bits(v: int) -> bytes:
        return struct.pack("<f", v) if real else v.to_bytes(4, "little")

    if real:
        old = [v & 0xFFFFF for v in old]
    after = list(old)
    for r, c in product(range(box[1]), range(box[0])):
        x, y, z = start[0] + c, start[1] + r, start[2]
        if x < shape[0] and y < shape[1]:
            to = (4 * x + strides[0] * y + strides[1] * z) // 4
            a, b = after[to], new[_moved(64 * r + 4 * c, span) // 4]
            after[to] = {"add": (a + b) & 0xFFFFFFFF, "min": min(a, b, key=lambda v: signed(v, 32)), "xor": a ^ b}[op]
    form = STORE.replace("cp.async", "cp.reduce.async").replace("cta.", f"cta.{op}.")
    convert = "and.b32 t, a, 65535; mul.lo.u32 t, t, {k}; cvt.rn.f32.u32 f, t; mov.b32 t, f;" if real else "mul.lo.u32 t, a, {k};"
    put = ".reg .f32 f; .reg .b32 s, t; .reg .b64 map; .reg .pred z; mov.b32 s, smem; shl.b32 t, %thread, 2; add.u32 s, s, t; "
    put += " ".join(convert.format(k=2 * j + 1) + f" st.shared.b32 [s+{128 * j}], t;" for j in range(8))
    body = (put + " fence.proxy.async.shared::cta; bar.sync 0; setp.eq.u32 z, %thread, 0; mov.b32 d, 0; @!z bra DONE; "
            f"mov.b64 map, map0; cvta.param.u64 map, map; mov.b32 s, smem; {form} [map, {{{start[0]}, {start[1]}, {start[2]}}}], [s]; "
            "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; DONE:")
    tensor = {"shape": shape, "strides": strides, "box": box, "swizzle": span, "data": None, "element": element}
    return Program(f"tensor reduction {op} {element}", form, body, (("b32", given),), ("b32",), ((0,) * 32,), 32, 1024,
                   maps=(tensor,), buffer=tuple(b for v in old for b in bits(v)), want_buffer=tuple(b for v in after for b in bits(v)))


def programs() -> list[Program]:
    reductions = [reduction(*x) for x in (("add", "u32"), ("min", "s32"), ("xor", "u32"), ("add", "f32"))]
    return _images(_data()) + _rows() + _stores() + reductions
