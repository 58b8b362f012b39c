"""What a matrix unit needs from shared memory: descriptors and tiles (PTX ISA 9.7.15 "Shared memory matrix layout",
9.7.15 "Matrix-descriptor format").

`Unit` is the interface between a warp and an asynchronous matrix unit.  wgmma is one; tcgen05 has other descriptors and
another home for accumulators, but the same needs: tiles of shared memory, work that happens between issue and wait,
and a check when a warp ends.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from .clocks import Clock
from .errors import Fault
from .formats import bf16_values, f16_values, fp8_values, tf32_values
from .memory import RESERVED, Shared
from .tensormap import swizzle

SPANS = {0: 0, 1: 128, 2: 64, 3: 32}
"""Swizzle field of a descriptor -> bytes."""
ITEM = {"f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1, "tf32": 4}


class Unit(Protocol):
    """Asynchronous work of one warp; `Cluster.queues` steps it, `Warp` checks it at the end."""

    def waiting(self) -> bool: ...

    def step(self) -> None: ...

    def at_exit(self, w: object) -> None: ...


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A 64-bit matrix descriptor, in bytes."""

    start: int
    leading: int
    stride: int
    span: int

    @staticmethod
    def decode(value: int) -> Descriptor:
        """Bits 0-13 start, 16-29 leading and 32-45 stride byte offset (each / 16), 49-51 base offset, 62-63 swizzle."""
        if value >> 49 & 7:
            raise Fault("unknown", f"matrix descriptor {value:#x} with a base offset of {value >> 49 & 7}")
        if value >> 14 & 3 or value >> 30 & 3 or value >> 46 & 7 or value >> 52 & 0x3FF:
            raise Fault("descriptor", f"matrix descriptor {value:#x} has bits set outside its fields")
        return Descriptor((value & 0x3FFF) << 4, (value >> 16 & 0x3FFF) << 4, (value >> 32 & 0x3FFF) << 4,
                          SPANS[value >> 62])


@lru_cache(maxsize=512)
def pieces(rows: int, depth: int, item: int, major: str, span: int, leading: int, stride: int) -> np.ndarray:
    """Byte offsets of a tile's 16-byte pieces before the swizzle.

    rows: along M or N; depth: along K.  Result [rows, pieces of a row] when K is contiguous ("k"), else [depth,
    pieces of a column].  A swizzle atom is 8 lines of `span` bytes (16 without one).
    """
    per = 16 // item
    if major == "k":
        r, c = np.arange(rows)[:, None], np.arange(depth // per)[None, :]
        if span == 0:
            return r % 8 * 16 + r // 8 * stride + c * leading
        if depth * item > span:
            raise Fault("descriptor", f"{depth} elements of {item} bytes along K do not fit a swizzle of {span} bytes")
        return r % 8 * span + r // 8 * stride + c * 16
    k, c = np.arange(depth)[:, None], np.arange(rows // per)[None, :]
    if span == 0:
        return k % 8 * 16 + k // 8 * leading + c * stride
    wide = span // 16
    return k % 8 * span + k // 8 * stride + c % wide * 16 + c // wide * leading


class Tile:
    """An operand in shared memory: where its pieces are, who may read them, its values."""

    def __init__(self, shared: Shared, descriptor: Descriptor, rows: int, depth: int, kind: str, major: str, first: int = 0,
                 of: int = 0):
        """first, of: the first row and all rows, for a warp that computes a part of D.  It needs its own rows of A; the
        product is the whole warpgroup's, and nothing says which warp reads what, so all rows count as read."""
        d, item = descriptor, ITEM[kind]
        self.shared, self.kind, self.major, self.rows, self.depth = shared, kind, major, rows, depth
        whole = swizzle(d.start + pieces(max(of, rows), depth, item, major, d.span, d.leading, d.stride), d.span)
        self.whole = whole
        self.at = whole[first:first + rows] if major == "k" else whole[:, first * item // 16:(first + rows) * item // 16]
        lo, hi = int(whole.min()), int(whole.max()) + 16
        if lo < RESERVED or hi > shared.size:
            raise Fault("bounds", f"matrix operand in bytes {lo:#x} to {hi:#x} of {shared.name}, which has {shared.size:#x}")

    def claim(self, agent: int, epoch: int, clock: Clock) -> None:
        """The read is ordered after the writes; stamp it."""
        words = ((self.whole >> 2)[..., None] + np.arange(4)).reshape(-1)
        self.shared.data_only(words * 4, "matrix product")
        self.shared.shadow.read(words, agent, epoch, clock, asynchronous=True)

    def values(self) -> np.ndarray:
        """float32 [rows, depth]."""
        s = self.shared
        lines = self.at >> 4
        n = s.size // 16 * 16
        known = s.known[:n].reshape(-1, 16)[lines]
        if not known.all():
            i = int(self.at.reshape(-1)[int(np.argmin(known.all(-1).reshape(-1)))])
            raise Fault("uninitialised", f"matrix product reads byte {i:#x} of {s.name}, which nothing has written")
        raw = np.ascontiguousarray(s.data[:n].reshape(-1, 16)[lines].reshape(lines.shape[0], -1))
        x = decode(raw, self.kind)
        return x if self.major == "k" else x.T


def decode(raw: np.ndarray, kind: str) -> np.ndarray:
    """Bytes [n, bytes] to float32 [n, elements]."""
    if kind == "f16":
        return f16_values(raw.view(np.uint16))
    if kind == "bf16":
        return bf16_values(raw.view(np.uint16))
    if kind == "tf32":
        return tf32_values(raw.view(np.uint32))
    return fp8_values(raw, kind)
