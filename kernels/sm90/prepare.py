"""Small kernels that run before the attention forward for Hopper, and which key tiles a block of query rows walks."""
from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint8, const_expr
from cutlass.cutlass_dsl import select_
from cutlass.utils import SmemAllocator

from .program import LOG2E
from .variant import Forward, Tile

SCAN = 256
"""Threads of a block of the kernels here."""
COMBINE = 64
"""Threads of a block of `Prepare.combine`."""


class Prepare:
    """What `ForwardKernel` works out before its main kernel."""

    v: Forward
    t: Tile

    def _key_tiles(self, m, b, rows, keys, seen, edges):
        """Key tiles [first, last) that some row of block m can see, or one that none can: an item without products would
        be a branch around them."""
        n = self.t.keys
        band_lo, band_hi, chunk, chunk_offset = edges
        q_min = m * self.t.rows
        q_max = cutlass.min(q_min + self.t.rows, rows) - 1
        low, high = Int32(0), keys
        if self.v.band_hi:
            high = cutlass.min(high, q_max + band_hi + 1)
        if self.v.band_lo:
            low = cutlass.max(low, q_min + band_lo)
        if self.v.chunk:
            low = cutlass.max(low, (q_min + chunk_offset) // chunk * chunk)
            high = cutlass.min(high, ((q_max + chunk_offset) // chunk + 1) * chunk)
        if self.v.padding:
            low = cutlass.max(low, seen[b, 0])
            high = cutlass.min(high, seen[b, 1])
        first, last = low // n, (cutlass.max(high, 0) + (n - 1)) // n
        last = cutlass.max(last, first + 1)
        # Known to be equal in a warp, the loop over them cannot be taken for divergent.
        return cute.arch.make_warp_uniform(first), cute.arch.make_warp_uniform(last)

    @cute.kernel
    def combine(self, parts: cute.Tensor, parts_lse: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, splits: Int32):
        """One row of the output from what each block found for its share of the keys, by the weights sum exp(top).

        Not by exp(lse): beside a score of -3.4e38, which a bias can make of a whole row, the logarithm of a sum is lost.
        """
        row, h, b = cute.arch.block_idx()
        batch = out.shape[0]
        top = Float32(-float("inf"))
        for i in cutlass.range(splits, unroll=4):
            top = cute.arch.fmax(top, parts_lse[i * batch + b, h, row, 0], nan=True)
        base = select_(top == -float("inf"), Float32(0.0), top)
        total = Float32(0.0)
        for i in cutlass.range(splits, unroll=4):
            total = total + self._weight(parts_lse[i * batch + b, h, row, None], base)
        inverse = 1.0 / total  # of a row without keys: NaN times zero, as eager code has it
        if const_expr(self.v.empty == "zero"):
            inverse = select_(total == 0.0, Float32(0.0), inverse)
        for turn in cutlass.range((out.shape[3] + (COMBINE - 1)) // COMBINE, unroll=1):
            column = turn * COMBINE + cute.arch.thread_idx()[0]
            if column < out.shape[3]:
                found = Float32(0.0)
                for i in cutlass.range(splits, unroll=4):
                    weight = self._weight(parts_lse[i * batch + b, h, row, None], base)
                    found = found + weight * parts[i * batch + b, h, row, column]
                out[b, h, row, column] = (found * inverse).to(out.element_type)
        if (cute.arch.thread_idx()[0] == 0) & (row < lse.shape[2]):
            lse[b, h, row] = base + cute.math.log2(total, fastmath=True) * (1.0 / LOG2E)

    def _weight(self, part: Any, base: Any) -> Any:
        """Weight of a share of the keys: its sum, relative to `base` instead of its own reference."""
        return part[1] * cute.math.exp2((part[0] - base) * LOG2E, fastmath=True)

    @cute.kernel
    def seen_keys(self, padding: cute.Tensor, seen: cute.Tensor):
        """[first key that is not padding, one past the last) of each batch entry, and how many there are: tiles outside are
        not walked."""
        smem = SmemAllocator()
        part = smem.allocate_tensor(Int32, cute.make_layout((3, SCAN // 32)))
        b, keys = cute.arch.block_idx()[0], padding.shape[1]
        tid = cute.arch.thread_idx()[0]
        first, last, count = keys, Int32(0), Int32(0)
        for i in cutlass.range((keys + (SCAN - 1)) // SCAN, unroll=4):
            key = i * SCAN + tid
            if padding[b, cutlass.min(key, keys - 1)] != Uint8(0):
                first = cutlass.min(first, key)
                last = cutlass.max(last, cutlass.min(key + 1, keys))
                count = count + select_(key < keys, Int32(1), Int32(0))
        count = cute.arch.warp_redux_sync(count, "add")
        first, last = cute.arch.warp_redux_sync(first, "min"), cute.arch.warp_redux_sync(last, "max")
        part[0, tid // 32] = first
        part[1, tid // 32] = last
        part[2, tid // 32] = count
        cute.arch.sync_threads()
        if tid == 0:
            count = Int32(0)
            for i in cutlass.range_constexpr(SCAN // 32):
                count = count + part[2, i]
                first = cutlass.min(first, part[0, i])
                last = cutlass.max(last, part[1, i])
            seen[b, 0] = first
            seen[b, 1] = last
            seen[b, 2] = count

    @cute.kernel
    def mean_values(self, v: cute.Tensor, vmean: cute.Tensor, seen: cute.Tensor | None, rows: Int32, edges: tuple):
        """vmean ``[B, Hkv, Dv]`` float32: the mean of V over all keys, which a row without keys gives.  V is not read where
        every row has a key; such a row then is NaN, as it is in eager code whose scores are all -inf."""
        sums = SmemAllocator().allocate_tensor(Float32, cute.make_layout((SCAN // 32, 256), stride=(256, 1)))
        h, b, _ = cute.arch.block_idx()
        tid, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        keys, dim = v.shape[2], vmean.shape[2]
        band_lo, band_hi, _, _ = edges
        first, last, empty = Int32(0), keys, Boolean(self.v.has_program or self.v.listed or self.v.chunk)
        if const_expr(seen is not None):
            first, last = seen[b, 0], seen[b, 1]
            empty = empty | (first >= last)
            if const_expr(self.v.band_lo):
                empty = empty | (seen[b, 2] != last - first)
        if const_expr(self.v.band_hi):
            empty = empty | (band_hi < first)
        if const_expr(self.v.band_lo):
            empty = empty | (rows + band_lo > last)
        if empty:
            for c in cutlass.range_constexpr(8):
                column = 32 * c + lane
                total = Float32(0.0)
                if column < dim:
                    for i in cutlass.range((keys - tid // 32 + (SCAN // 32 - 1)) // (SCAN // 32), unroll=8):
                        total = total + v[b, h, i * (SCAN // 32) + tid // 32, column].to(Float32)
                sums[tid // 32, column] = total
        cute.arch.sync_threads()
        if tid < dim:
            total = Float32(float("nan"))
            if empty:
                total = sums[0, tid]
                for i in cutlass.range_constexpr(1, SCAN // 32):
                    total = total + sums[i, tid]
                total = total / Float32(keys)
            vmean[b, h, tid] = total

    @cute.kernel
    def list_tiles(
        self,
        tiles: cute.Tensor,
        seen: cute.Tensor | None,
        dense: cute.Tensor | None,
        doc_q: cute.Tensor | None,
        doc_k: cute.Tensor | None,
        rows: Int32,
        keys: Int32,
        edges: tuple,
    ):
        """tiles ``[B or 1, H or 1, row blocks, 1 + key tiles]`` int32: how many key tiles a row block walks, and which, from
        the last to the first: twice the number of the tile, plus one where every row sees every key of it.

        A tile that mask and documents hide from all rows is left out; documents are compared as intervals of their ids.
        A row block that sees nothing walks one tile, in which all is masked.
        """
        t = self.t
        states = SmemAllocator().allocate_tensor(Int32, cute.make_layout(SCAN))
        tid, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        own = tid // 32
        index = cute.arch.block_idx()[0]
        bh = index // tiles.shape[2]
        m = index - bh * tiles.shape[2]
        b = bh // tiles.shape[1]
        h = bh - b * tiles.shape[1]
        line = tiles[b, h, m, None]
        first, last = self._key_tiles(m, b, rows, keys, seen, edges)
        here = cutlass.min(rows - m * t.rows, t.rows)
        low, high = Int32(0), Int32(0)
        if const_expr(doc_q is not None):
            low, high = self._interval(doc_q, b, m * t.rows, here, rows, t.rows)
        count = Int32(0)
        for part in cutlass.range((last - first + (SCAN - 1)) // SCAN, unroll=1):
            top = last - part * SCAN
            width = cutlass.min(top - first, SCAN)
            for turn in cutlass.range((width + (SCAN // 32 - 1)) // (SCAN // 32), unroll=1):
                j = turn * (SCAN // 32) + own
                n = cutlass.max(top - 1 - j, 0)
                some, every = Boolean(True), Boolean(True)
                if const_expr(dense is not None):
                    some, every = self._look(dense, b, h, m * t.rows, here, n * t.keys, keys)
                if const_expr(doc_k is not None):
                    k_low, k_high = self._interval(doc_k, b, n * t.keys, cutlass.min(keys - n * t.keys, t.keys), keys, t.keys)
                    some = some & (k_low <= high) & (k_high >= low)
                    # The lower halves of longer ids say nothing for certain when they agree.
                    every = every & (self.v.documents == "int32") & (low == high) & (k_low == k_high) & (low == k_low)
                if lane == 0:
                    states[j] = select_(some & (j < width), select_(every, Int32(3), Int32(1)), Int32(0))
            cute.arch.sync_threads()
            if own == 0:
                for c in cutlass.range_constexpr(SCAN // 32):
                    state = Int32(0)
                    if c * 32 + lane < width:
                        state = states[c * 32 + lane]
                    found = cute.arch.vote_ballot_sync((state & 1) != 0)
                    place = count + cute.arch.popc(found & ((1 << lane) - 1))
                    if (state & 1) != 0:
                        line[1 + place] = 2 * (top - 1 - c * 32 - lane) + (state >> 1)
                    count = count + cute.arch.popc(found)
            cute.arch.sync_threads()
        if tid == 0:
            line[0] = cutlass.max(count, 1)
            if count == 0:
                line[1] = 2 * first

    @cute.jit
    def _look(self, dense: Any, b: Any, h: Any, row0: Any, here: Any, key0: Any, keys: Any):
        """Whether the mask lets some row see some key of a tile, and every row every key; by one warp."""
        lane = cute.arch.lane_idx()
        some, hidden = Int32(0), Int32(0)
        if const_expr(self.v.dense_wide):
            pieces = self.t.keys // 8
            per = 32 // pieces
            piece = lane % pieces
            for turn in cutlass.range((here + (per - 1)) // per, unroll=4):
                r = turn * per + lane // pieces
                first = key0 + 8 * piece
                start = cute.domain_offset(
                    (b, h, row0 + cutlass.min(r, here - 1), cutlass.min(first, keys - 8)), dense).iterator
                low, high = cute.arch.inline_ptx("ld.global.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Int32, Int32],
                                                 read_only_args=[start])
                inside = (first < keys) & (lane < per * pieces) & (r < here)
                some = some | select_(inside, low | high, Int32(0))
                hidden = hidden | select_(inside, (low & high) ^ 0x01010101, Int32(0))
            here = Int32(0)
        for r in cutlass.range(here, unroll=4):
            line = dense[b, h, row0 + r, None]
            for c in cutlass.range_constexpr((self.t.keys + 31) // 32):
                column = 32 * c + lane
                inside = (key0 + column < keys) & (column < self.t.keys)
                value = line[cutlass.min(key0 + column, keys - 1)] != Uint8(0)
                some = some | select_(inside & value, Int32(1), Int32(0))
                hidden = hidden | select_(inside & (value == Boolean(False)), Int32(1), Int32(0))
        return cute.arch.vote_any_sync(some != 0), cute.arch.vote_any_sync(hidden != 0) == Boolean(False)

    @cute.jit
    def _interval(self, ids: Any, b: Any, begin: Any, n: Any, end: Any, most: cutlass.Constexpr):
        """Least and greatest of n ids from `begin` on, by one warp; of ids of 64 bits, their lower halves: where two ids
        are equal, so are those."""
        lane = cute.arch.lane_idx()
        low, high = Int32(2**31 - 1), Int32(-(2**31))
        for c in cutlass.range_constexpr((most + 31) // 32):
            x = ids[b, cutlass.min(begin + cutlass.min(32 * c + lane, n - 1), end - 1)].to(Int32)
            low, high = cutlass.min(low, x), cutlass.max(high, x)
        return cute.arch.warp_redux_sync(low, "min"), cute.arch.warp_redux_sync(high, "max")
