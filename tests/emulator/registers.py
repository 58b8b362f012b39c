"""The registers of a warp (PTX ISA 5.1.1, 5.2): 32 lanes each, typed views, and who has written what.

A lane that was never written may not be read.  The result of an instruction that a guard has switched off is
undefined but may pass through arithmetic, as in a load under a guard whose value is then masked; it may not reach a
branch, an address, a store, another lane or a product.  Registers of a product in flight are unwritten until it is waited for
(PTX ISA 9.7.15 "Asynchronous wgmma").
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .errors import Fault
from .lanes import FULL, LANES, describe, lanes
from .parser import Reg

_UNSIGNED = {16: np.uint16, 32: np.uint32, 64: np.uint64, 8: np.uint8}
_SIGNED = {16: np.int16, 32: np.int32, 64: np.int64, 8: np.int8}
_FLOAT = {16: np.float16, 32: np.float32, 64: np.float64}


class Registers:
    """`u`, `s` and `f` are the same registers seen as unsigned, signed and floating; a predicate is bool in all."""

    __slots__ = ("busy", "epoch", "f", "init", "names", "s", "taint", "u", "wrote")

    def __init__(self, declared: Sequence[Reg]):
        n = len(declared)
        self.u: list[np.ndarray] = [np.empty(0)] * n
        self.s: list[np.ndarray] = [np.empty(0)] * n
        self.f: list[np.ndarray] = [np.empty(0)] * n
        for width in (1, 8, 16, 32, 64):
            ids = [r.id for r in declared if r.width == width]
            if width == 1:
                block = np.zeros((len(ids), LANES), bool)
                for row, i in zip(block, ids, strict=True):
                    self.u[i] = self.s[i] = self.f[i] = row
                continue
            block = np.zeros((len(ids), LANES), _UNSIGNED[width])
            signed = block.view(_SIGNED[width])
            floats = block.view(_FLOAT[width]) if width in _FLOAT else block
            for k, i in enumerate(ids):
                self.u[i], self.s[i], self.f[i] = block[k], signed[k], floats[k]
        self.init = [0] * n
        self.wrote = [0] * n
        """Value of `epoch` at the last write; wgmma.fence advances it."""
        self.epoch = 1
        self.busy: dict[int, str] = {}
        """Registers of products in flight, and what they are there."""
        self.taint: dict[int, int] = {}
        """Lanes of a register that are undefined because a guard was false."""
        self.names = [r.name for r in declared]

    def put(self, target: np.ndarray, i: int, value: np.ndarray, mask: int) -> None:
        """Write the lanes of a mask through a typed view of register i."""
        if self.busy and i in self.busy:
            raise Fault("wgmma", f"write to {self.names[i]}, {self.busy[i]}, before wgmma.wait_group")
        if mask == FULL:
            target[:] = value
            self.init[i] = FULL
        else:
            np.copyto(target, value, where=lanes(mask), casting="unsafe")
            self.init[i] |= mask
        self.wrote[i] = self.epoch

    def missing(self, i: int, mask: int) -> Fault:
        """Why register i cannot be read by these lanes."""
        if i in self.busy:
            return Fault("wgmma", f"read of {self.names[i]}, {self.busy[i]}, before wgmma.wait_group")
        if mask & ~self.init[i] & ~self.taint.get(i, 0) == 0:
            return Fault("undefined", f"{self.names[i]} is undefined in {describe(mask & ~self.init[i])}, where the guard of "
                         "its producer was false")
        return Fault("uninitialised", f"read of register {self.names[i]} in {describe(mask & ~self.init[i])}, "
                     "which nothing has written")
