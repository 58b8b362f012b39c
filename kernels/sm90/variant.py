"""What a Hopper forward kernel is specialised for, and the tile each specialisation runs with.

A `Forward` holds everything that changes the generated code.  Batch, sequence lengths, true head dims, head
counts, strides, scale and band offsets are run-time values, so none of them costs a compile.  This module
imports neither torch nor the DSL.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..expr import Expr
from ..record import EmptyRows

SMEM_LIMIT = 232448
"""Bytes of shared memory one block can have on sm_90 (227 KiB)."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One row of the tile table."""

    rows: int
    """Query rows a block: 64 a consumer warpgroup."""
    keys: int
    """Keys a step of the main loop; a multiple of 16, the depth of one wgmma."""
    stages: int
    """Buffers for K and for V."""
    consumer_regs: int
    producer_regs: int
    ping_pong: bool
    """Consumer warpgroups take turns on the tensor cores."""
    own_o: bool
    """The output tile has its own shared memory, so the next Q loads while it is written."""
    why: str

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups."""
        return self.rows // 64


# Largest first that fits: (head dim of QK^T at most, of V at most) -> tile.
_TILES: tuple[tuple[int, int, Tile], ...] = (
    (64, 64, Tile(192, 128, 2, 160, 32, True, True, "three warpgroups share one K/V stream; 2026-11-29")),
    (96, 96, Tile(128, 128, 2, 240, 24, True, True, "192 rows spill at 160 registers with P in registers; 2026-11-29")),
    (128, 128, Tile(128, 128, 2, 240, 24, True, True, "S 64, P 32 and O 64 registers; 2026-11-29")),
    (192, 128, Tile(128, 112, 2, 240, 24, True, True, "K of 192 and V of 128 in 227 KiB; 2026-11-29")),
    (192, 192, Tile(128, 96, 2, 240, 24, False, False, "O 96 registers; 2026-11-29")),
    (256, 256, Tile(128, 80, 2, 240, 24, False, False, "224 KiB of shared memory, O 128 registers; 2026-11-29")),
)


@dataclass(frozen=True, slots=True)
class Capture:
    """A tensor read by the kernel at its own strides (0 where it broadcasts)."""

    dtype: str
    unit: bool = False
    """Neighbouring keys are neighbours in memory and pairs of them are aligned."""


@dataclass(frozen=True, slots=True)
class Forward:
    """One specialisation of the forward kernel."""

    dtype: Literal["bfloat16", "float16"]
    dim: int
    """Head dim of Q and K in shared memory: the true one rounded up to a multiple of 32."""
    dim_v: int
    band_lo: bool = False
    band_hi: bool = False
    padding: bool = False
    documents: bool = False
    dense: bool = False
    bias: Capture | None = None
    score: Expr | None = None
    """Score program other than the identity and a plain bias; its captures are `captures`."""
    captures: tuple[Capture, ...] = ()
    sink: str | None = None
    """dtype of the sink logits."""
    positive_scale: bool = True
    """The scale is known to be above zero: the maximum may be taken before scaling."""
    empty: EmptyRows = "never"

    @property
    def tile(self) -> Tile:
        for dim, dim_v, tile in _TILES:
            if self.dim <= dim and self.dim_v <= dim_v:
                return tile
        raise ValueError(f"no tile for head dims ({self.dim}, {self.dim_v})")

    @property
    def masked(self) -> bool:
        """A row may have keys that are masked for another reason than the end of the keys."""
        return self.band_lo or self.band_hi or self.padding or self.documents or self.dense

    @property
    def elementwise(self) -> bool:
        """Every score tile needs per-element work before the softmax."""
        return self.documents or self.dense or self.bias is not None or self.score is not None

    @property
    def premultiply(self) -> bool:
        """Scores are brought to base-2 units before the maximum is taken."""
        return not self.positive_scale or self.bias is not None or self.score is not None

    @property
    def threads(self) -> int:
        return 128 * (self.tile.warpgroups + 1)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of the tiles; barriers and mask words come on top (under 1 KiB)."""
        t = self.tile
        qo = self.dim + self.dim_v if t.own_o else max(self.dim, self.dim_v)
        return 2 * (t.rows * qo + t.stages * t.keys * (self.dim + self.dim_v))

    @property
    def name(self) -> str:
        words = [f"sm90_fwd_{'bf16' if self.dtype == 'bfloat16' else 'fp16'}_d{self.dim}"]
        if self.dim_v != self.dim:
            words.append(f"dv{self.dim_v}")
        words += [w for w, on in (("lo", self.band_lo), ("hi", self.band_hi), ("pad", self.padding),
                                  ("doc", self.documents), ("dense", self.dense), ("anyscale", not self.positive_scale)) if on]
        if self.bias is not None:
            words.append(f"bias_{self.bias.dtype}{'_unit' if self.bias.unit else ''}")
        if self.score is not None:
            words.append(f"score{abs(hash(self.score)) % 10**6}")
        if self.sink is not None:
            words.append("sink")
        if self.empty != "never":
            words.append(self.empty)
        return "_".join(words)


def padded(dim: int) -> int:
    """Head dim as it lies in shared memory; the copy engine fills the rest with zeros."""
    return max(32, -(-dim // 32) * 32)
