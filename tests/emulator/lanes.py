"""Masks of the 32 lanes of a warp: an integer for bookkeeping, a bool array for numpy."""
from __future__ import annotations

from functools import lru_cache

import numpy as np

LANES = 32
FULL = (1 << LANES) - 1
INDEX = np.arange(LANES)
INDEX.setflags(write=False)


@lru_cache(maxsize=4096)
def lanes(mask: int) -> np.ndarray:
    """The lanes of a mask as a bool array; not to be written to."""
    array = np.array([mask >> i & 1 for i in range(LANES)], bool)
    array.setflags(write=False)
    return array


def bits(array: np.ndarray) -> int:
    """A bool array of 32 lanes as a mask."""
    return int.from_bytes(np.packbits(array, bitorder="little").tobytes(), "little")


def first(mask: int) -> int:
    """The lowest lane of a mask."""
    return (mask & -mask).bit_length() - 1


def describe(mask: int) -> str:
    """``lanes 0-3,8`` or ``all lanes``."""
    if mask == FULL:
        return "all lanes"
    parts, i = [], 0
    while i < LANES:
        if mask >> i & 1:
            j = i
            while j + 1 < LANES and mask >> (j + 1) & 1:
                j += 1
            parts.append(str(i) if i == j else f"{i}-{j}")
            i = j
        i += 1
    return "lanes " + ",".join(parts)
