"""What a Hopper forward kernel is specialised for, and the tile each specialisation runs with.

A `Forward` holds everything that changes the generated code.  Batch, sequence lengths, true head dims, head
counts, strides, scale and band offsets are run-time values, so none of them costs a compile.  This module
imports neither torch nor the DSL.
"""
from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Literal

from ..expr import SCORE, Expr
from ..record import EmptyRows

MAX_CAPTURES = 4
"""Tensors that score program and predicates may read."""
MAX_INTS = 4
"""Run-time integers that they may read."""
_MODERATE = 1e4
"""Largest constant that counts as one of the size of scores."""
ALONE, ROWS, HEADS = range(3)
"""Who shares K and V: no one; the two blocks of a cluster, which take neighbouring row blocks of a head; or two query heads of a
group.  They walk the same key tiles, and each loads half of K and V for both.  That saves energy, and so time, since power is what
limits these kernels (tests/results/kernels_tuning_h200.json)."""
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
    under_pv: int = 8
    """Exponentials of a thread's first row before the wait for the PV product."""
    apart: bool = False
    """The second row's maximum is found after the first row's first exponentials, not before."""

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups."""
        return self.rows // 64


# First that fits: (head dim of QK^T at most, of V at most, what it is for) -> tile.  TFLOP/s: H200, bf16, 16k tokens; rows of
# 2026-11-30 are in tests/results/kernels_tuning_h200.json.
_TILES: tuple[tuple[int, int, str, Tile], ...] = (
    (128, 128, "several", Tile(128, 96, 2, 240, 24, True, True, "several tensors are read for each element; not tuned")),
    (256, 256, "several", Tile(128, 48, 2, 240, 24, True, False, "as above; not tuned")),
    (64, 64, "wide", Tile(192, 96, 2, 160, 32, True, True, "what is read ahead for 112 keys spills; 2026-11-30")),
    (64, 64, "padded", Tile(192, 96, 2, 160, 32, True, True, "112 keys spill with float32 and means of V; not tuned")),
    (64, 64, "one", Tile(192, 112, 2, 160, 32, True, True, "a tensor is read for each element; 2026-11-30")),
    (96, 96, "one", Tile(192, 80, 2, 160, 32, True, True, "as above; 96 keys spill with ids of 64 bits; not tuned")),
    (128, 128, "one", Tile(128, 128, 2, 240, 24, True, True, "as above; 160 keys spill with float32; 2026-11-30")),
    (192, 128, "one", Tile(128, 96, 2, 240, 24, True, True, "as above; not tuned")),
    (256, 256, "one", Tile(128, 64, 2, 240, 24, False, False, "as above; not tuned")),
    (64, 64, "score", Tile(192, 112, 2, 160, 32, True, True, "128 keys spill where a tanh is a polynomial; not tuned")),
    (96, 96, "score", Tile(192, 96, 2, 160, 32, True, True, "as above with 112 keys; not tuned")),
    (64, 64, "", Tile(192, 128, 2, 160, 32, True, True,
                        "s4096 507 and causal 453 with turns, 488 and 436 without; 128 rows 405 to 417; 144 keys spill; 2026-11-30", 1)),
    (96, 96, "", Tile(192, 112, 2, 160, 32, True, True,
                        "s4096 608 and causal 553, 128 rows and 128 keys 544 and 532; 2026-11-30")),
    (128, 128, "band", Tile(128, 128, 2, 240, 24, True, True,
                            "less waste on the diagonal; maxima apart 1 to 4 % slower, 160 keys and apart 6 % slower at 1024 and 2 % "
                            "faster at 16384; 2026-11-30", 16)),
    (128, 128, "", Tile(128, 160, 2, 240, 24, True, True,
                          "all that fits 227 KiB with O in its own memory; maxima apart 7 % faster; 176 keys 8 % slower; 2026-11-30", 8, True)),
    (192, 128, "", Tile(128, 112, 2, 240, 24, True, True, "all that fits 227 KiB with O in its own memory; not tuned")),
    (192, 192, "", Tile(128, 96, 2, 240, 24, False, False, "O 96 registers; not tuned")),
    (256, 256, "band", Tile(128, 80, 2, 240, 24, False, False, "as below; maxima apart 2 % slower; 2026-11-30")),
    (256, 256, "", Tile(128, 80, 2, 240, 24, False, False,
                          "s4096 698, s16384 735, causal 647 and 701; 64 keys with turns: causal 646 and 681, 80 with turns: 642 "
                          "and 652; 224 KiB of shared memory; maxima apart 2 % faster; 2026-11-30", 8, True)),
)


@dataclass(frozen=True, slots=True)
class Capture:
    """A tensor read by the kernel at its own strides (0 where it broadcasts)."""

    dtype: str
    axes: str = "bhqk"
    """Axes along which it changes; it is read once where it does not."""
    unit: bool = False
    """Neighbouring keys are neighbours in memory: one address a row, constant offsets from it."""
    pairs: bool = False
    """Pairs of keys are aligned and none is cut by the end of the keys: two a load."""
    wide: bool = False
    """Eight keys at a time are aligned in 16 bytes and none is cut by the end of the keys: the lanes that share a row load so
    and exchange."""
    relative: bool = False
    """A table by distance, read at ``k - q + Sq - 1``; it is `unit`."""


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
    documents: str | None = None
    """dtype of the ids."""
    dense: bool = False
    dense_wide: bool = False
    """Eight keys at a time of the mask tensor are aligned in 8 bytes, and none is cut by the end of the keys."""
    chunk: bool = False
    score: Expr | None = None
    """Score program, None for the score itself.  Its loads and syms, and those of `predicates`, index `captures` and
    the kernel's integers."""
    predicates: tuple[Expr, ...] = ()
    captures: tuple[Capture, ...] = ()
    sink: str | None = None
    """dtype of the sink logits."""
    positive_scale: bool = True
    """The scale is known to be above zero: the maximum may be taken before scaling."""
    empty: EmptyRows = "never"
    split: bool = False
    """The keys of an item are dealt out to several blocks, whose results a second kernel puts together."""
    team: int = ALONE
    """`ROWS` where all row blocks walk all key tiles, or `HEADS` where a group has an even number of query heads."""

    @property
    def tile(self) -> Tile:
        read = sum("k" in c.axes and not c.relative for c in self.captures) + self.dense + bool(self.documents)
        uses = {"": True, "several": read > 1, "one": read == 1, "wide": read == 1 and any(c.wide for c in self.captures),
                "padded": read == 1 and self.padding and self.empty == "mean",
                "score": self.score is not None and self.added is None, "band": self.band_lo or self.band_hi}
        for dim, dim_v, use, tile in _TILES:
            if self.dim <= dim and self.dim_v <= dim_v and uses[use]:
                return tile
        raise ValueError(f"no tile for head dims ({self.dim}, {self.dim_v})")

    @property
    def uneven(self) -> bool:
        """Row blocks walk different numbers of key tiles."""
        return self.band_lo or self.band_hi or self.chunk or self.padding or self.listed

    @property
    def listed(self) -> bool:
        """Which key tiles a row block walks is looked up: a list of those that mask or documents show to some row."""
        return self.dense or self.documents is not None

    @property
    def skips(self) -> bool:
        """A warpgroup may leave out a key tile that only later rows of its block see."""
        return self.band_hi and not self.listed and not self.split

    @property
    def blocks(self) -> int:
        """Thread blocks of a cluster."""
        return 2 if self.team else 1

    @property
    def counted(self) -> bool:
        """A counter deals the items out: their costs differ, and no two blocks have to take the same one."""
        return self.uneven and not self.team

    @property
    def may_team(self) -> bool:
        """Whether two blocks may walk the same key tiles; at small head dims sharing them gains nothing."""
        return max(self.dim, self.dim_v) > 64 and not (self.padding or self.listed or self.split)

    @property
    def rising(self) -> bool:
        """Later row blocks are likely to walk more key tiles."""
        return (self.band_hi or self.dense) and not self.split

    @property
    def added(self) -> Expr | None:
        """What the score program adds to the score, where it is that: scale * QK^T + f(everything else) is one fma."""
        if self.score is None or self.score.op != "add" or SCORE not in self.score.args:
            return None
        other = self.score.args[1] if self.score.args[0] == SCORE else self.score.args[0]
        return None if other.uses_score() else other

    @property
    def has_program(self) -> bool:
        """Code is emitted for every element of every tile."""
        return self.score is not None or bool(self.predicates)

    @property
    def batch_inner(self) -> bool:
        """Batch entries of one head follow each other: they read the same tensor over q and k."""
        return any({"q", "k"} <= set(c.axes) and "b" not in c.axes and not c.relative for c in self.captures)

    @property
    def whole_tiles(self) -> bool:
        """Captures are read from one address a row where the tile is whole, and one by one where it is not."""
        return any("k" in c.axes and c.unit and not (c.relative or c.wide) for c in self.captures)

    @property
    def premultiply(self) -> bool:
        """S is turned into scores before the maximum is taken: scaled, and through the score program."""
        return not self.positive_scale or self.score is not None

    @property
    def moderate(self) -> bool:
        """Nothing but QK^T and constants of its size is in the scores, so that a difference of two may be rounded once: a
        row of -3.4e38 would be infinite, or far from uniform."""
        return self.score is None or not any(
            e.op in ("load", "relative", "index", "sym") or e.op == "const" and abs(e.args[0]) > _MODERATE
            for e in self.score.walk())

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
                                  ("doc", bool(self.documents)), ("dense", self.dense and not self.dense_wide),
                                  ("mask", self.dense_wide),
                                  ("chunk", self.chunk), ("anyscale", not self.positive_scale)) if on]
        if self.score is not None or self.predicates:
            text = repr((self.score, self.predicates, self.captures)).encode()
            words.append(f"program{zlib.crc32(text):08x}")
        if self.sink is not None:
            words.append("sink")
        if self.empty != "never":
            words.append(self.empty)
        if self.split:
            words.append("split")
        if self.team:
            words.append("rows" if self.team == ROWS else "heads")
        return "_".join(words)


def padded(dim: int) -> int:
    """Head dim as it lies in shared memory; the copy engine fills the rest with zeros."""
    return max(32, -(-dim // 32) * 32)
