"""Tensor maps as side data: what the host encodes into the 128 opaque bytes (PTX ISA 5.5 "Tensors"; the CUDA driver API's
cuTensorMapEncodeTiled states the limits checked here).

A box of a tensor lies in shared memory with its innermost dimension first; a swizzle exchanges 16-byte pieces by
address bits (PTX ISA 5.5 "Swizzling modes").  Under a swizzle each row takes as many bytes as the swizzle spans, also
when the box has fewer (CUDA Programming Guide, "Tensor memory swizzling": shared memory must hold the full width).
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .errors import Fault
from .memory import Buffer

SWIZZLES = {0: 0, 32: 1, 64: 3, 128: 7}
"""Span in bytes -> mask of the address bits from 7 on that are added to bits 4 to 6."""
ELEMENTS = {"u32": 4, "s32": 4, "u64": 8, "f16": 2, "f32": 4}
"""Types that a reduction can combine here, and their bytes."""


def swizzle(address: np.ndarray, span: int) -> np.ndarray:
    """Where the byte of an unswizzled address lies."""
    return address ^ (((address >> 7) & SWIZZLES[span]) << 4)


@dataclass(eq=False)
class TensorMap:
    """A tiled tensor map.

    array: where the tensor begins; shape and box innermost first, in elements; strides of the dimensions after the
    first, in bytes; swizzle: 0, 32, 64 or 128 bytes; element: type of an element, which only reductions need.
    """

    array: np.ndarray
    shape: Sequence[int]
    strides: Sequence[int]
    box: Sequence[int]
    swizzle: int = 0
    itemsize: int = 2
    element: str = ""
    unknown: bool = False
    """The kernel must not read what was there before the launch."""
    buffer: Buffer | None = field(default=None, repr=False)
    offset: int = 0

    def __post_init__(self) -> None:
        rank = len(self.shape)
        if not 1 <= rank <= 5 or len(self.box) != rank or len(self.strides) != rank - 1:
            raise ValueError(f"tensor map of shape {self.shape}, strides {self.strides}, box {self.box}")
        if any(not 1 <= n <= 1 << 32 for n in self.shape) or any(not 1 <= n <= 256 for n in self.box):
            raise ValueError(f"tensor map of shape {self.shape}, box {self.box}")
        if any(s % 16 or not 0 <= s < 1 << 40 for s in self.strides):
            raise ValueError(f"strides {self.strides} must be multiples of 16 bytes below 2^40")
        inner = self.box[0] * self.itemsize
        if inner % 16 or self.swizzle not in SWIZZLES or self.swizzle and inner > self.swizzle:
            raise ValueError(f"box of {inner} bytes a row with swizzle {self.swizzle}")
        if self.array.__array_interface__["data"][0] % 16:
            raise ValueError("the tensor must begin at a multiple of 16 bytes")
        if self.element and ELEMENTS.get(self.element) != self.itemsize:
            raise ValueError(f"elements of type {self.element!r} and {self.itemsize} bytes")

    def bind(self, buffer: Buffer, offset: int) -> TensorMap:
        """The same map in a launch's memory."""
        return TensorMap(self.array, self.shape, self.strides, self.box, self.swizzle, self.itemsize,
                         self.element, self.unknown, buffer, offset)

    @property
    def bytes(self) -> int:
        """Bytes of a box, which is what a copy counts."""
        return int(np.prod(self.box)) * self.itemsize

    @property
    def pitch(self) -> int:
        """Bytes from one row of a box to the next in shared memory."""
        return max(self.box[0] * self.itemsize, self.swizzle)

    @property
    def footprint(self) -> int:
        """Bytes of shared memory that a box takes: more than it has when its rows are shorter than the swizzle."""
        return int(np.prod(self.box[1:])) * self.pitch

    def elements(self, start: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Byte offsets in the buffer of the box's elements, innermost last, flat; which are inside the tensor."""
        if len(start) != len(self.shape):
            raise Fault("bounds", f"{len(start)} coordinates for a tensor map of {len(self.shape)} dimensions")
        at = np.full(1, self.offset, np.int64)
        inside = np.ones(1, bool)
        steps = (self.itemsize, *self.strides)
        for c, n, size, step in reversed(list(zip(start, self.box, self.shape, steps, strict=True))):
            i = c + np.arange(n, dtype=np.int64)
            at = (at[:, None] + i * step).reshape(-1)
            inside = (inside[:, None] & ((i >= 0) & (i < size))).reshape(-1)
        return at, inside

    def places(self, shared: int) -> np.ndarray:
        """Shared-memory addresses of the box's elements, in the same order."""
        rows = np.arange(int(np.prod(self.box[1:])), dtype=np.int64) * self.pitch
        linear = shared + (rows[:, None] + np.arange(self.box[0], dtype=np.int64) * self.itemsize).reshape(-1)
        return swizzle(linear, self.swizzle) if self.swizzle else linear
