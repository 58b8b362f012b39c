"""Attention forward for Hopper (sm_90a) in the CuTe DSL.

Algorithm: FlashAttention-3 (Shah et al., arXiv 2407.08608): online softmax over tiles of keys, one producer
warp that feeds TMA, two or three consumer warpgroups of 64 query rows each that run wgmma, ping-pong between
the warpgroups and, inside a warpgroup, the softmax of one tile under the PV product of the tile before.

A block takes one work item after the other, 64 query rows a consumer warpgroup of one head; the first S of an item is
computed under the epilogue of the item before.

Roles (warpgroup 0 gives its registers to the others):
    load      warp 0: which item is next, for all others as well; TMA of Q, K and V, in the order in which they are consumed
    mask      warp 1, only with key padding: key bits to shared memory, zeroes V rows of padded keys
    consumer  warpgroups 1..n: S = Q K^T, softmax, O += P V with P in registers, epilogue

Key tiles are visited from the last to the first.  A tile that no row of the block can see is never loaded (mask tensors
and documents: `prepare.list_tiles`); only a tile that some row sees in part runs masking code.

Registers of an accumulator of wgmma m64nNk16 (PTX ISA, "D fragment"): element i of a thread is row
``16 * warp + lane // 4 + 8 * (i // 2 % 2)`` and column ``8 * (i // 4) + 2 * (lane % 4) + i % 2``; read in pairs of
8-column groups the same registers are the A operand of the next product, so P never leaves the registers.
"""
from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.cute.nvgpu.common import OperandMajorMode
from cutlass.cutlass_dsl import not_, select_
from cutlass.utils import SmemAllocator

from .prepare import COMBINE, SCAN, Prepare
from .program import TANH_SMALL, Emitter, as_bool, as_float, chunks, load, tanh_reach
from .variant import HEADS, ROWS, Forward

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
NEG_INF = -float("inf")
_DRAW = 2
"""The next item is drawn so many key tiles before the end of the loads of one."""
_ITEM = 8
"""Words of shared memory for what the load warp tells about a work item."""
LAZY = 8.0
"""A row's reference is replaced when its maximum rises by more than this, in base-2 units."""

# Named barriers; 0 is __syncthreads.
_BAR_TURN = 1  # + consumer warpgroup: it may issue products
_BAR_STORE = 4  # + consumer warpgroup: its O tile is complete in shared memory


def _swizzle_width(dim: int) -> int:
    """Elements of a 16-bit row that one swizzled block holds: 128 bytes where the dim allows it, else 64."""
    return 64 if dim % 64 == 0 else 32


class ForwardKernel(Prepare):
    """Host and device code of one `Forward` variant; call it inside `cute.compile`."""

    def __init__(self, variant: Forward):
        self.v = variant
        self.t = variant.tile
        self.nwg = self.t.warpgroups
        self.dtype = cutlass.BFloat16 if variant.dtype == "bfloat16" else cutlass.Float16

    # ------------------------------------------------------------------ shared memory layouts

    def _atom(self, dim: int, key_major: bool) -> Any:
        kinds = warpgroup.SmemLayoutAtomKind
        wide = _swizzle_width(dim) == 64
        if key_major:
            kind = kinds.MN_SW128 if wide else kinds.MN_SW64
        else:
            kind = kinds.K_SW128 if wide else kinds.K_SW64
        return warpgroup.make_smem_layout_atom(kind, self.dtype)

    def _layouts(self) -> tuple[Any, Any, Any, Any]:
        v, t = self.v, self.t
        q = cute.tile_to_shape(self._atom(v.dim, False), (64, v.dim, self.nwg), order=(0, 1, 2))
        k = cute.tile_to_shape(self._atom(v.dim, False), (t.keys, v.dim, t.stages), order=(0, 1, 2))
        vv = cute.tile_to_shape(self._atom(v.dim_v, True), (v.dim_v, t.keys, t.stages), order=(1, 0, 2))
        # Where O shares the memory of Q, each warpgroup's O lies in its own Q: the others may still be read.
        one = cute.tile_to_shape(self._atom(v.dim_v, False), (64, v.dim_v), order=(0, 1))
        apart = 64 * (v.dim_v if t.own_o else v.dim)
        o = cute.make_composed_layout(one.inner, one.offset, cute.make_layout(
            (*one.outer.shape, self.nwg), stride=(*one.outer.stride, apart)))
        return q, k, vv, o

    def _mmas(self) -> tuple[Any, Any]:
        """S = Q K^T with both operands in shared memory, O += P V with P in registers; 64 rows each."""
        qk = warpgroup.MmaF16BF16Op(self.dtype, Float32, (64, self.t.keys, 16), warpgroup.OperandSource.SMEM,
                                    OperandMajorMode.K, OperandMajorMode.K)
        pv = warpgroup.MmaF16BF16Op(self.dtype, Float32, (64, self.v.dim_v, 16), warpgroup.OperandSource.RMEM,
                                    OperandMajorMode.K, OperandMajorMode.MN)
        return cute.make_tiled_mma(qk), cute.make_tiled_mma(pv)

    # ------------------------------------------------------------------ host

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        padding: cute.Tensor | None,
        seen: cute.Tensor | None,
        dense: cute.Tensor | None,
        doc_q: cute.Tensor | None,
        doc_k: cute.Tensor | None,
        sink: cute.Tensor | None,
        vmean: cute.Tensor | None,
        tiles: cute.Tensor | None,
        c0: cute.Tensor | None,
        c1: cute.Tensor | None,
        c2: cute.Tensor | None,
        c3: cute.Tensor | None,
        n0: Int32,
        n1: Int32,
        n2: Int32,
        n3: Int32,
        scale: Float32,
        fill: Float32,
        band_lo: Int32,
        band_hi: Int32,
        chunk: Int32,
        chunk_offset: Int32,
        section: Int32,
        tickets: cute.Tensor | None,
        parts: cute.Tensor | None,
        blocks: Int32,
        pack: Int32,
        stream: Any,
    ):
        """Launch.  q, out ``[B, Hq, Sq, D]``, k, v ``[B, Hkv, Sk, D]``, lse ``[B, Hq, Sq]`` float32, or of length 0 where it should be Sq: then it is not written; padding ``[B, Sk]``
        and dense ``[B, Hq, Sq, Sk]`` bool, doc_q ``[B, Sq]`` and doc_k ``[B, Sk]`` int32 or int64, sink ``[Hq]``, vmean
        ``[B, Hkv, Dv]`` float32 (scratch), c0 ... ``[B, Hq, Sq, Sk]`` or, by distance, ``[B, Hq, 1, Sq + Sk - 1 + 2 MARGIN]``; None where
        the variant does not use it.

        tiles: scratch for `list_tiles`.  seen: ``[B, 3]`` int32, scratch for the first key of each batch entry that is not padding, one past
        the last, and their number.
        section: heads whose K and V are walked together (they should fit in L2); with ``split`` the number of blocks that
        share the keys of an item; with a team heads, or pairs of them.  tickets: ``[1]`` int32, 0 before and after; of no other launch that may run meanwhile.
        parts: ``[section * B, Hq, Sq, Dv + 4]`` float32, scratch for what each of them finds for a row, its reference and its
        sum.
        blocks: thread blocks to launch; where they are fewer than the tiles of queries, each takes several.
        pack: so many query heads, of one row each, are taken for the rows of one head, in q, out and lse; else 1.
        """
        tile = self.t
        lq, lk, lv, lo = self._layouts()
        q, out, lse = self.packed(q, pack, 8), self.packed(out, pack, 8), self.packed(lse, pack, 1)

        def view(x, order):
            return cute.make_tensor(x.iterator, cute.select(x.layout, mode=order))

        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        shared_load, sharers = cpasync.CopyBulkTensorTileG2SMulticastOp() if self.v.team else load, self.v.blocks
        tma_q, mq = cpasync.make_tiled_tma_atom(load, view(q, [2, 3, 1, 0]), cute.select(lq, mode=[0, 1]), (64, self.v.dim))
        tma_k, mk = cpasync.make_tiled_tma_atom(
            shared_load, view(k, [2, 3, 1, 0]), cute.select(lk, mode=[0, 1]), (tile.keys, self.v.dim), sharers)
        tma_v, mv = cpasync.make_tiled_tma_atom(
            shared_load, view(v, [3, 2, 1, 0]), cute.select(lv, mode=[0, 1]), (self.v.dim_v, tile.keys), sharers)
        tma_o, mo = cpasync.make_tiled_tma_atom(
            store, view(out, [2, 3, 1, 0]), cute.select(lo, mode=[0, 1]), (64, self.v.dim_v))
        edges = (band_lo, band_hi, chunk, chunk_offset)
        padding, dense = _bytes(padding), _bytes(dense)
        if const_expr(padding is not None):
            self.seen_keys(padding, seen).launch(grid=[seen.shape[0], 1, 1], block=[SCAN, 1, 1], stream=stream)
        if const_expr(tiles is not None):
            self.list_tiles(tiles, seen, dense, doc_q, doc_k, q.shape[2], k.shape[2], edges).launch(
                grid=[tiles.shape[0] * tiles.shape[1] * tiles.shape[2], 1, 1], block=[SCAN, 1, 1], stream=stream)
        if const_expr(vmean is not None):
            self.mean_values(v, vmean, seen, q.shape[2], edges).launch(
                grid=[vmean.shape[1], vmean.shape[0], 1], block=[SCAN, 1, 1], stream=stream)
        captures, ints = tuple(_bytes(c) for c in (c0, c1, c2, c3)), (n0, n1, n2, n3)
        given = lse
        if const_expr(parts is not None):
            parts, given = self.halves(parts, out.shape[3])
            tma_o, mo = None, parts
        args = (seen, dense, doc_q, doc_k, sink, vmean, tiles, captures, ints, scale, fill, edges, section, tickets)
        self.kernel(
            tma_q, mq, tma_k, mk, tma_v, mv, tma_o, mo, given, padding, *args,
            lq, lk, lv, lo,
        ).launch(grid=[blocks, 1, 1], block=[self.v.threads, 1, 1], cluster=[sharers, 1, 1], stream=stream, min_blocks_per_mp=1)
        if const_expr(parts is not None):
            self.combine(parts, given, out, lse, section).launch(
                grid=[out.shape[2], out.shape[1], out.shape[0]], block=[COMBINE, 1, 1], stream=stream)

    def packed(self, x, pack, even):
        """``[B, H / pack, Sq * pack, ...]`` of ``[B, H, Sq, ...]``; all strides but a last one are multiples of `even`."""
        (b, h, s, *rest), (sb, sh, ss, *others) = x.shape, x.stride
        if const_expr(not others):
            # lse: heads of one row each follow each other
            return cute.make_tensor(x.iterator, cute.make_layout((b, h // pack, s * pack), stride=(sb, sh * pack, ss)))
        row = cute.assume(select_(pack == 1, ss, sh), divby=even)
        return cute.make_tensor(x.iterator, cute.make_layout(
            (b, h // pack, s * pack, *rest), stride=(sb, cute.assume(sh * pack, divby=even), row, *others)))

    def halves(self, parts, dim_v):
        """(``[section * B, Hq, Sq, Dv]``, ``[section * B, Hq, Sq, 2]``) of what is one tensor, so that it is one allocation."""
        n, heads, rows, _ = parts.shape
        layout = [cute.make_layout((n, heads, rows, Int32(each)), stride=parts.stride) for each in (dim_v, 2)]
        return cute.make_tensor(parts.iterator, layout[0]), cute.make_tensor(parts.iterator + dim_v, layout[1])

    # ------------------------------------------------------------------ which tile, which keys

    # A block begins with the item of its own number.  Where all items cost the same, the rest is dealt out in turn, else
    # by a counter: as late as its latency allows, or a block that is at a long item would keep the next one waiting.  The
    # load warp works out what the item is, and tells the other warps.

    def _decode(self, index, rows, heads, batch, section):
        """Work item -> (row block, query head, batch), of a team those of this block.

        Without a causal edge the row blocks of one head follow each other, so that its K and V stay in L2.  With one,
        the row blocks of a section of heads follow each other, long rows first.
        """
        m_blocks, heads = self._units(rows, heads)
        if self.v.split:
            index = index // section
        if not self.v.rising:
            bh = index // m_blocks
            m = index - bh * m_blocks
        else:
            first = index // (section * m_blocks)
            rest = index - first * (section * m_blocks)
            width = cutlass.min(section, heads * batch - first * section)
            step = rest // width
            m = m_blocks - 1 - step
            bh = first * section + (rest - step * width)
        if self.v.batch_inner:
            h = bh // batch
            b = bh - h * batch
        else:
            b = bh // heads
            h = bh - b * heads
        if self.v.team == ROWS:
            m = 2 * m + self._rank()
        if self.v.team == HEADS:
            h = 2 * h + self._rank()
        return m, h, b

    def _rank(self):
        """Of the block in its cluster of two."""
        return cute.arch.block_idx()[0] % 2

    def _units(self, rows, heads):
        """Row blocks and heads of a batch entry, or pairs of them for teams."""
        each = self.t.rows * (2 if self.v.team == ROWS else 1)
        return (rows + (each - 1)) // each, heads // 2 if self.v.team == HEADS else heads

    def _total(self, rows, heads, batch, section):
        """How many work items there are."""
        m_blocks, heads = self._units(rows, heads)
        items = m_blocks * heads * batch
        return items * section if self.v.split else items

    def _begin(self, index, total, rows, heads, batch, section, keys, seen, tiles, edges):
        """(index, row block, query head, batch entry, first key tile, one past the last); behind the last item it is the
        last one again but for the index."""
        m, h, b = self._decode(cutlass.min(index, total - 1), rows, heads, batch, section)
        if self.v.listed:
            count = cute.arch.make_warp_uniform(self._list(tiles, m, h, b)[0])
            return index, m, h, b, Int32(0), count
        first, last = self._key_tiles(m, b, rows, keys, seen, edges)
        if self.v.split:
            each = (last - first + (section - 1)) // section
            first = first + cutlass.min(index, total - 1) % section * each
            beyond = (keys + (self.t.keys - 1)) // self.t.keys
            none = first >= last  # then a tile of no keys: all is masked
            last = select_(none, beyond + 1, cutlass.min(first + each, last))
            first = select_(none, beyond, first)
        return index, m, h, b, first, last

    def _list(self, tiles, m, h, b):
        """How many key tiles row block m walks, and which."""
        return tiles[cutlass.min(b, tiles.shape[0] - 1), cutlass.min(h, tiles.shape[1] - 1), m, None]

    def _tile(self, tiles, m, h, b, i, last):
        """(i-th key tile of an item, whether no element of it needs a look at mask or documents)."""
        if not self.v.listed:
            return last - 1 - i, Boolean(True)
        word = cute.arch.make_warp_uniform(self._list(tiles, m, h, b)[1 + i])
        return word >> 1, (word & 1) != 0

    @cute.jit
    def _draw(self, index, tickets, total):
        """Index of the next item, in lane 0 of the load warp.

        By the counter each item is followed by one draw, the last of a block too, so a launch draws `total` times whatever its
        grid: the counter, which starts again at 0 after `total` steps, ends as it began, and the next launch needs no other one.
        """
        grid = cute.arch.grid_dim()[0] // self.v.blocks
        item = self._following(index, grid)
        if const_expr(self.v.counted):
            if cute.arch.lane_idx() == 0:
                item = grid + cute.arch.inline_ptx("atom.global.inc.u32 {$w0}, [{$r0}], {$r1};", write_only_types=[Int32],
                                                   read_only_args=[tickets.iterator, total - 1])
        return item

    def _following(self, index, grid):
        """The next item in a fixed order: every round of as many as there are clusters, where long ones come first the rounds
        forwards and backwards in turn, so that all have as many long ones."""
        return 2 * grid * (index // grid + 1) - 1 - index if self.v.rising else index + grid

    @cute.jit
    def _tell(self, item, shared, slot, phase):
        """Hand an item to the other warps."""
        cute.arch.mbarrier_wait(shared.item_empty.data_ptr() + slot, phase)
        if cute.arch.lane_idx() == 0:
            words = cute.make_tensor(shared.items.data_ptr() + slot * _ITEM, cute.make_layout(len(item)))
            for i in cutlass.range_constexpr(len(item)):
                words[i] = item[i]
            cute.arch.mbarrier_arrive(shared.item_full.data_ptr() + slot)

    @cute.jit
    def _hear(self, shared, slot, phase):
        """The next item, for a warp other than the load warp."""
        cute.arch.mbarrier_wait(shared.item_full.data_ptr() + slot, phase)
        words = cute.make_tensor(shared.items.data_ptr() + slot * _ITEM, cute.make_layout(_ITEM))
        item = [cute.arch.make_warp_uniform(words[i]) for i in range(6)]
        cute.arch.sync_warp()
        _arrive(shared.item_empty.data_ptr() + slot)
        return item[0], item[1], item[2], item[3], item[4], item[5]

    # ------------------------------------------------------------------ device

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        mq: cute.Tensor,
        tma_k: cute.CopyAtom,
        mk: cute.Tensor,
        tma_v: cute.CopyAtom,
        mv: cute.Tensor,
        tma_o: cute.CopyAtom | None,
        mo: cute.Tensor,
        lse: cute.Tensor,
        padding: cute.Tensor | None,
        seen: cute.Tensor | None,
        dense: cute.Tensor | None,
        doc_q: cute.Tensor | None,
        doc_k: cute.Tensor | None,
        sink: cute.Tensor | None,
        vmean: cute.Tensor | None,
        tiles: cute.Tensor | None,
        captures: tuple,
        ints: tuple,
        scale: Float32,
        fill: Float32,
        edges: tuple,
        section: Int32,
        tickets: cute.Tensor | None,
        lq: cute.ComposedLayout,
        lk: cute.ComposedLayout,
        lv: cute.ComposedLayout,
        lo: cute.ComposedLayout,
    ):
        stages, nwg = self.t.stages, self.nwg
        words = (self.t.keys + 31) // 32
        # O shares the memory of Q where there is no room for both.
        o_size = cute.cosize(lo) if self.t.own_o else 0
        q_size = cute.cosize(lq) if self.t.own_o else max(cute.cosize(lq), cute.cosize(lo))

        @cute.struct
        class Shared:
            q_full: cute.struct.MemRange[Int64, nwg]
            q_empty: cute.struct.MemRange[Int64, nwg]
            k_full: cute.struct.MemRange[Int64, stages]
            k_empty: cute.struct.MemRange[Int64, stages]
            v_full: cute.struct.MemRange[Int64, stages]
            v_empty: cute.struct.MemRange[Int64, stages]
            bits_full: cute.struct.MemRange[Int64, stages]
            v_clean: cute.struct.MemRange[Int64, stages]
            item_full: cute.struct.MemRange[Int64, 2]
            item_empty: cute.struct.MemRange[Int64, 2]
            items: cute.struct.MemRange[Int32, 2 * _ITEM]
            bits: cute.struct.MemRange[Int32, words * stages]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, q_size], 1024]
            o: cute.struct.Align[cute.struct.MemRange[self.dtype, o_size], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(lk)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(lv)], 1024]

        shared = SmemAllocator().allocate(Shared)
        sq = shared.q.get_tensor(lq.outer, swizzle=lq.inner)
        so = (shared.o if self.t.own_o else shared.q).get_tensor(lo.outer, swizzle=lo.inner)
        sk = shared.k.get_tensor(lk.outer, swizzle=lk.inner)
        sv = shared.v.get_tensor(lv.outer, swizzle=lv.inner)

        # Warps that are through with a stage say so to both blocks of a team: each writes to the other's.
        users = 4 * nwg * self.v.blocks
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(nwg):
                    cute.arch.mbarrier_init(shared.q_full.data_ptr() + i, 1)
                    cute.arch.mbarrier_init(shared.q_empty.data_ptr() + i, 4 if self.t.own_o else 1)
                for i in cutlass.range_constexpr(stages):
                    cute.arch.mbarrier_init(shared.k_full.data_ptr() + i, 1)
                    cute.arch.mbarrier_init(shared.v_full.data_ptr() + i, 1)
                    cute.arch.mbarrier_init(shared.k_empty.data_ptr() + i, users)
                    cute.arch.mbarrier_init(shared.v_empty.data_ptr() + i, users)
                    cute.arch.mbarrier_init(shared.bits_full.data_ptr() + i, 1)
                    cute.arch.mbarrier_init(shared.v_clean.data_ptr() + i, 1)
                for i in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(shared.item_full.data_ptr() + i, 1)
                    cute.arch.mbarrier_init(shared.item_empty.data_ptr() + i, 4 * nwg + (1 if self.v.padding else 0))
            cute.arch.mbarrier_init_fence()
        if const_expr(self.v.team):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

        if warp_index < 4:
            cute.arch.setmaxregister_decrease(self.t.producer_regs)
            if warp_index == 0:
                self.load(tma_q, mq, sq, tma_k, mk, sk, tma_v, mv, sv, shared, seen, tiles, edges, section, tickets)
            if const_expr(self.v.padding):
                if warp_index == 1:
                    self.mask(mq, mk, sv, shared, padding, tiles, section)
        else:
            cute.arch.setmaxregister_increase(self.t.consumer_regs)
            self.consume(mq, mk, mo, tma_o, sq, sk, sv, so, shared, lse, tiles, dense, doc_q, doc_k, sink, vmean,
                         captures, ints, scale, fill, edges, section)
        if const_expr(self.v.team):
            # The other block may still arrive at this one's barriers, or read what they guard.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def load(self, tma_q, mq, sq, tma_k, mk, sk, tma_v, mv, sv, shared, seen, tiles, edges, section, tickets):
        """Producer warp: Q once a tile, then K and V in the order in which the consumers need them."""
        v, t = self.v, self.t
        rows, heads, batch = mq.shape[0], mq.shape[2], mq.shape[3]
        keys, group = mk.shape[0], mq.shape[2] // mk.shape[2]
        q_bytes, k_bytes, v_bytes = 128 * v.dim, 2 * t.keys * v.dim, 2 * t.keys * v.dim_v
        cpasync.prefetch_descriptor(tma_q)
        cpasync.prefetch_descriptor(tma_k)
        cpasync.prefetch_descriptor(tma_v)

        gq = cute.local_tile(mq, (64, v.dim), (None, 0, None, None))
        gk = cute.local_tile(mk, (t.keys, v.dim), (None, 0, None, None))
        gv = cute.local_tile(mv, (v.dim_v, t.keys), (0, None, None, None))
        q_s, q_g = cpasync.tma_partition(
            tma_q, 0, cute.make_layout(1), cute.group_modes(sq, 0, 2), cute.group_modes(gq, 0, 2))
        k_s, k_g = self._shares(tma_k, sk, gk)
        v_s, v_g = self._shares(tma_v, sv, gv)

        total = self._total(rows, heads, batch, section)
        k_stage, k_phase, v_stage, v_phase, q_phase = Int32(0), Int32(1), Int32(0), Int32(1), Int32(1)
        slot, slot_phase = Int32(0), Int32(1)
        index, m, h, b, first, last = self._begin(
            cute.arch.block_idx()[0] // self.v.blocks, total, rows, heads, batch, section, keys, seen, tiles, edges)
        self._tell((index, m, h, b, first, last), shared, slot, slot_phase)
        slot ^= 1
        while index < total:
            hk = h // group
            # Before Q: the buffers of K are free while the tile before is still being written.
            n, _ = self._tile(tiles, m, h, b, Int32(0), last)
            k_stage, k_phase = self._fetch(tma_k, [g[None, n, hk, b] for g in k_g], k_s, shared.k_full, shared.k_empty,
                                           k_stage, k_phase, k_bytes)
            for w in cutlass.range_constexpr(self.nwg):
                cute.arch.mbarrier_wait(shared.q_empty.data_ptr() + w, q_phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(shared.q_full.data_ptr() + w, q_bytes)
                cute.copy(tma_q, q_g[None, m * self.nwg + w, h, b], q_s[None, w],
                          tma_bar_ptr=shared.q_full.data_ptr() + w)
            q_phase ^= 1
            drawn = Int32(0)
            for i in cutlass.range(last - first, unroll=1):
                before = n
                if i + 1 < last - first:
                    n, _ = self._tile(tiles, m, h, b, i + 1, last)
                    k_stage, k_phase = self._fetch(tma_k, [g[None, n, hk, b] for g in k_g], k_s, shared.k_full, shared.k_empty,
                                                   k_stage, k_phase, k_bytes)
                if i == cutlass.max(last - first - _DRAW, 0):
                    drawn = self._draw(index, tickets, total)
                v_stage, v_phase = self._fetch(tma_v, [g[None, before, hk, b] for g in v_g], v_s, shared.v_full, shared.v_empty,
                                               v_stage, v_phase, v_bytes)
            following = self._begin(
                cute.arch.shuffle_sync(drawn, 0), total, rows, heads, batch, section, keys, seen, tiles, edges)
            self._tell(following, shared, slot, slot_phase)
            slot, slot_phase = slot ^ 1, slot_phase ^ slot
            index, m, h, b, first, last = following

    def _shares(self, tma, target, source):
        """Memory and source of a tile of K or V, in as many pieces as blocks load it together."""
        n = self.v.blocks
        pieces = [cpasync.tma_partition(tma, i, cute.make_layout(n), cute.group_modes(target, 0, 2), cute.group_modes(source, 0, 2))
                  for i in range(n)]
        return [p[0] for p in pieces], [p[1] for p in pieces]

    @cute.jit
    def _fetch(self, tma, source, target, full, empty, stage, phase, size):
        """Fill one stage by TMA once it is free, in both blocks of a team; returns the next (stage, phase)."""
        barrier = full.data_ptr() + stage
        cute.arch.mbarrier_wait(empty.data_ptr() + stage, phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
        if const_expr(self.v.team):
            for i in cutlass.range_constexpr(2):
                if self._rank() == i:
                    cute.copy(tma, source[i], target[i][None, stage], tma_bar_ptr=barrier, mcast_mask=cutlass.Int16(3))
        else:
            cute.copy(tma, source[0], target[0][None, stage], tma_bar_ptr=barrier)
        return self._advance(stage, phase)

    def _advance(self, stage, phase):
        wrap = stage + 1 == self.t.stages
        return select_(wrap, Int32(0), stage + 1), phase ^ select_(wrap, Int32(1), Int32(0))

    @cute.jit
    def mask(self, mq, mk, sv, shared, padding, tiles, section):
        """Mask warp: one bit a key (set: may be attended to, and inside the keys), and V rows of cleared bits to
        zero, because 0 * NaN of a padded slot would reach the output."""
        v, t = self.v, self.t
        rows, heads, batch, keys = mq.shape[0], mq.shape[2], mq.shape[3], mk.shape[0]
        words = (t.keys + 31) // 32
        lane = cute.arch.lane_idx()
        bits = shared.bits.data_ptr()
        width = _swizzle_width(v.dim_v)
        total = self._total(rows, heads, batch, section)
        k_stage, k_phase, v_stage, v_phase, full_phase = Int32(0), Int32(1), Int32(0), Int32(1), Int32(0)
        index, m, h, b, first, last = self._hear(shared, Int32(0), Int32(0))
        slot, slot_phase = Int32(1), Int32(0)
        while index < total:
            for i in cutlass.range(last - first + 1, unroll=1):
                if i < last - first:
                    cute.arch.mbarrier_wait(shared.k_empty.data_ptr() + k_stage, k_phase)
                    n, _ = self._tile(tiles, m, h, b, i, last)
                    for w in cutlass.range_constexpr(words):
                        self._bits(padding, b, n * t.keys + 32 * w + lane, keys, 32 * w + lane,
                                   bits + (k_stage * words + w), lane)
                    cute.arch.sync_warp()
                    if lane == 0:
                        cute.arch.mbarrier_arrive(shared.bits_full.data_ptr() + k_stage)
                    k_stage, k_phase = self._advance(k_stage, k_phase)
                if i > 0:
                    cute.arch.mbarrier_wait(shared.v_empty.data_ptr() + v_stage, v_phase)
                    every = Boolean(True)
                    for w in cutlass.range_constexpr(words):
                        word = cute.make_tensor(bits + (v_stage * words + w), cute.make_layout(1))[0]
                        every = every & (word == _all_ones(t.keys - 32 * w))
                    if not every:
                        cute.arch.mbarrier_wait(shared.v_full.data_ptr() + v_stage, full_phase)
                        # A row of a swizzled block is `width` elements in one line; the swizzle moves 16-byte
                        # pieces inside the line only, so clearing a line needs no address arithmetic on it.
                        lines = cute.make_tensor(
                            cute.recast_ptr(shared.v.data_ptr(), dtype=Int32),
                            cute.make_layout((width // 2, t.keys, v.dim_v // width, t.stages),
                                             stride=(1, width // 2, t.keys * width // 2, t.keys * v.dim_v // 2)))
                        for key in cutlass.range(t.keys, unroll=4):
                            word = cute.make_tensor(bits + (v_stage * words + key // 32), cute.make_layout(1))[0]
                            if (word >> (key % 32)) & 1 == 0:
                                if lane < width // 2:
                                    for c in cutlass.range_constexpr(v.dim_v // width):
                                        lines[lane, key, c, v_stage] = Int32(0)
                        cute.arch.fence_proxy("async.shared", space="cta")
                    cute.arch.sync_warp()
                    if lane == 0:
                        cute.arch.mbarrier_arrive(shared.v_clean.data_ptr() + v_stage)
                    _, full_phase = self._advance(v_stage, full_phase)
                    v_stage, v_phase = self._advance(v_stage, v_phase)
            index, m, h, b, first, last = self._hear(shared, slot, slot_phase)
            slot, slot_phase = slot ^ 1, slot_phase ^ slot

    @cute.jit
    def _bits(self, padding, b, key, keys, column, where, lane):
        seen = Boolean(False)
        if key < keys:
            if column < self.t.keys:
                seen = padding[b, key] != Uint8(0)
        word = cute.arch.vote_ballot_sync(seen)
        if lane == 0:
            cute.make_tensor(where, cute.make_layout(1))[0] = word

    @cute.jit
    def consume(self, mq, mk, mo, tma_o, sq, sk, sv, so, shared, lse, tiles, dense, doc_q, doc_k, sink, vmean,
                captures, ints, scale, fill, edges, section):
        """Consumer warpgroup w: rows 64 w .. 64 w + 63 of the block."""
        v, t, nwg = self.v, self.t, self.nwg
        rows, heads, batch = mq.shape[0], mq.shape[2], mq.shape[3]
        keys, group = mk.shape[0], mq.shape[2] // mk.shape[2]
        scale_log2 = scale * LOG2E

        tid = cute.arch.thread_idx()[0] - 128
        w = cute.arch.make_warp_uniform(tid // 128)
        lane = cute.arch.lane_idx()
        row_in_block = (tid // 32) * 16 + lane // 4
        column = 2 * (lane % 4)

        qk, pv = self._mmas()
        thread_qk, thread_pv = qk.get_slice(0), pv.get_slice(0)
        f_q = thread_qk.make_fragment_A(thread_qk.partition_A(sq))[None, None, None, w]
        f_k = thread_qk.make_fragment_B(thread_qk.partition_B(sk))
        f_v = thread_pv.make_fragment_B(thread_pv.partition_B(sv))
        s_shape = thread_qk.partition_shape_C((64, t.keys))
        o = thread_pv.make_fragment_C(thread_pv.partition_shape_C((64, v.dim_v)))
        # P as whole registers: elements of 16 bits would be carried around the loop one by one.
        packed = cute.make_rmem_tensor(cute.make_layout(((1, 2, 2), 1, t.keys // 16)), Int32)
        p = cute.recast_tensor(packed, self.dtype)
        o16 = cute.make_rmem_tensor(o.layout, self.dtype)
        row_max = cute.make_rmem_tensor(2, Float32)
        row_sum = cute.make_rmem_tensor(2, Float32)

        store = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), pv)
        thread_store = store.get_slice(tid % 128)
        to_so = thread_store.partition_D(so)
        if const_expr(not v.split):
            go = cute.local_tile(mo, (64, v.dim_v), (None, 0, None, None))
            o_s, o_g = cpasync.tma_partition(tma_o, 0, cute.make_layout(1), cute.group_modes(so, 0, 2), cute.group_modes(go, 0, 2))

        if const_expr(t.ping_pong):
            if w == nwg - 1:
                cute.arch.barrier_arrive(barrier_id=_BAR_TURN, number_of_threads=256)

        away = None
        if const_expr(v.team):
            # From a shared memory address of this block to that of the one at whose barriers this lane arrives.
            rank = self._rank()
            away = cute.arch.inline_ptx(
                "{ .reg .b32 there; mapa.shared::cluster.u32 there, {$r0}, {$r1}; sub.s32 {$w0}, there, {$r0}; }",
                write_only_types=[Int32], read_only_args=[shared.k_empty.data_ptr(), select_(lane == 0, rank, 1 - rank)])
        total = self._total(rows, heads, batch, section)
        k_stage, k_phase, v_stage, v_phase, q_phase = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        slot, slot_phase = Int32(1), Int32(0)
        # The first product of an item is issued before the epilogue of the item before, where O has its own memory.
        s0 = thread_qk.make_fragment_C(s_shape)
        index, m, h, b, first, last = self._hear(shared, Int32(0), Int32(0))
        if const_expr(t.own_o):
            last, k_stage, k_phase, v_stage, v_phase = self.pass_over(
                shared, m, w, lane, away, first, last, index < total, k_stage, k_phase, v_stage, v_phase, edges)
            self.first_product(s0, f_q, f_k, shared, index < total, w, q_phase, k_stage, k_phase)
        while index < total:
            row0 = m * t.rows + row_in_block
            o.fill(0.0)
            row_max.fill(NEG_INF)
            if const_expr(not t.own_o):
                last, k_stage, k_phase, v_stage, v_phase = self.pass_over(
                    shared, m, w, lane, away, first, last, index < total, k_stage, k_phase, v_stage, v_phase, edges)
                self.first_product(s0, f_q, f_k, shared, index < total, w, q_phase, k_stage, k_phase)
            q_phase ^= 1

            n, full = self._tile(tiles, m, h, b, Int32(0), last)
            ahead = self.read_ahead(captures, n, row0, column, h, b, rows, keys)
            partial = self.partial(n, m, w, keys, edges)
            warpgroup.wait_group(0)
            if const_expr(t.own_o):
                if last - first == 1:
                    _arrive(shared.q_empty.data_ptr() + w)  # the next Q may come
            self.scores(s0, shared, k_stage, k_phase, n, full, partial, row0, column, h, b, rows, keys, dense,
                        doc_q, doc_k, captures, ahead, ints, scale, edges)
            self._release(shared.k_empty.data_ptr() + k_stage, lane, away)
            k_stage, k_phase = self._advance(k_stage, k_phase)
            row_sum.fill(0.0)
            for r in cutlass.range_constexpr(2):
                factor, _ = self.maximum(s0, row_max, scale_log2, r)
                self.exponentials(s0, row_max, row_sum, factor, scale_log2, r)
            self.pack(s0, packed)

            there = Boolean(False)  # the next K is known to be there
            for i in cutlass.range(last - first - 1, unroll=1):
                n, full = self._tile(tiles, m, h, b, i + 1, last)
                # A fresh S: the old values must not count as an input of the product.
                s = thread_qk.make_fragment_C(s_shape)
                if not_(there):
                    cute.arch.mbarrier_wait(shared.k_full.data_ptr() + k_stage, k_phase)
                if const_expr(t.ping_pong):
                    cute.arch.barrier(barrier_id=_BAR_TURN + w, number_of_threads=256)
                warpgroup.fence()
                _gemm(self._mmas()[0], s, f_q, f_k[None, None, None, k_stage], True)
                warpgroup.commit_group()
                partial = self.partial(n, m, w, keys, edges)
                self.wait_v(shared, v_stage, v_phase)
                warpgroup.fence()
                _gemm(self._mmas()[1], o, p, f_v[None, None, None, v_stage], False)
                warpgroup.commit_group()
                if const_expr(t.ping_pong):
                    peer = select_(w + 1 == nwg, Int32(0), w + 1)
                    cute.arch.barrier_arrive(barrier_id=_BAR_TURN + peer, number_of_threads=256)
                ahead = self.read_ahead(captures, n, row0, column, h, b, rows, keys)
                warpgroup.wait_group(1)
                self.scores(s, shared, k_stage, k_phase, n, full, partial, row0, column, h, b, rows, keys,
                            dense, doc_q, doc_k, captures, ahead, ints, scale, edges)
                # What bounds the loop is the time from S to P, and the power that the chip may draw.  The special function unit
                # takes one exponential in 8 cycles of a warp; all else is laid out so that ptxas can issue it in between: row 1's
                # maximum under row 0's exponentials, the packing of P under what is left of both.
                first_row = _row(cute.size(s), 0)
                factor0, rose0 = self.maximum(s, row_max, scale_log2, 0)
                sums0 = self.exponentials(s, row_max, row_sum, factor0, scale_log2, 0)
                factor1, rose1 = self.maximum(s, row_max, scale_log2, 1, s[first_row[3]] if t.apart else None)
                # ptxas moves a wait up over arithmetic, but not over an arrival: these need so many exponentials of row 0, by
                # when the PV product is done.
                enough = sums0[min(t.under_pv, len(first_row) - 1)]
                if const_expr(t.own_o):
                    _arrive_after(shared.q_empty.data_ptr() + w, (lane == 0) & (i == last - first - 2), enough)
                self._release(shared.k_empty.data_ptr() + k_stage, lane, away, enough)
                k_stage, k_phase = self._advance(k_stage, k_phase)
                warpgroup.wait_group(0)
                self._release(shared.v_empty.data_ptr() + v_stage, lane, away, factor0)
                v_stage, v_phase = self._advance(v_stage, v_phase)
                there = cute.arch.mbarrier_test_wait(shared.k_full.data_ptr() + k_stage, k_phase)
                # Seldom, after the first few tiles.  Skipped by a branch, all the products of O cost neither time nor energy.
                if cute.arch.vote_any_sync(rose0 | rose1):
                    for r, factor in enumerate((factor0, factor1)):
                        for e in _row(cute.size(o), r):
                            o[e] = o[e] * factor
                self.exponentials(s, row_max, row_sum, factor1, scale_log2, 1)
                self.pack(s, packed)

            self.wait_v(shared, v_stage, v_phase)
            warpgroup.fence()
            _gemm(self._mmas()[1], o, p, f_v[None, None, None, v_stage], False)
            warpgroup.commit_group()

            this_m, this_h, this_b = m, h, b
            if const_expr(v.split):
                this_b = index % section * batch + b
            index, m, h, b, first, last = self._hear(shared, slot, slot_phase)
            slot, slot_phase = slot ^ 1, slot_phase ^ slot
            last_v = v_stage
            v_stage, v_phase = self._advance(v_stage, v_phase)
            if const_expr(t.own_o):
                last, k_stage, k_phase, v_stage, v_phase = self.pass_over(
                    shared, m, w, lane, away, first, last, index < total, k_stage, k_phase, v_stage, v_phase, edges)
                self.first_product(s0, f_q, f_k, shared, index < total, w, q_phase, k_stage, k_phase)
                warpgroup.wait_group(1)
            else:
                warpgroup.wait_group(0)
            self._release(shared.v_empty.data_ptr() + last_v, lane, away)
            self.normalise(o, row_max, row_sum, scale, fill, keys, row0, column, this_h, this_b, group, lse, sink, vmean)

            if const_expr(v.split):
                self.store_part(o, mo, this_b, this_h, row0, column, rows)
                if const_expr(not t.own_o):
                    cute.arch.barrier(barrier_id=_BAR_STORE + w, number_of_threads=128)
                    if (tid // 32) % 4 == 0:
                        _arrive(shared.q_empty.data_ptr() + w)
            else:
                o16.store(o.load().to(self.dtype))
                # The memory of O is free when the store before has read it (own memory) and when every warp is through
                # with its products (memory of Q).
                if const_expr(t.own_o):
                    if (tid // 32) % 4 == 0:
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.barrier(barrier_id=_BAR_STORE + w, number_of_threads=128)
                cute.copy(store, thread_store.retile(o16), to_so[None, None, None, w])
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=_BAR_STORE + w, number_of_threads=128)
                if (tid // 32) % 4 == 0:
                    cute.copy(tma_o, o_s[None, w], o_g[None, this_m * nwg + w, this_h, this_b])
                    cute.arch.cp_async_bulk_commit_group()
                    if const_expr(not t.own_o):
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                        _arrive(shared.q_empty.data_ptr() + w)
        warpgroup.wait_group(0)
        if (tid // 32) % 4 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def store_part(self, o, parts, b, h, row0, column, rows):
        """What a block found for some of the keys of its rows, in float32."""
        for r in cutlass.range_constexpr(2):
            if row0 + 8 * r < rows:
                line = parts[b, h, row0 + 8 * r, None]
                for j in cutlass.range_constexpr(self.v.dim_v // 8):
                    for e in cutlass.range_constexpr(2):
                        if 8 * j + column + e < parts.shape[3]:
                            line[8 * j + column + e] = o[4 * j + 2 * r + e]

    @cute.jit
    def pass_over(self, shared, m, w, lane, away, first, last, there, k_stage, k_phase, v_stage, v_phase, edges):
        """Leave out an item's first key tile where none of this warpgroup's rows sees it, which a later row of the block does:
        the tile is released unused, the turn given away.  Returns one past the last tile that is left, and the stages.

        One tile at most: the V of the second would lie where that of the item before may still be in use.
        """
        if const_expr(self.v.skips):
            reach = m * self.t.rows + (64 * w + 63) + edges[1]
            if there & (last - first > 1) & ((last - 1) * self.t.keys > reach):
                cute.arch.mbarrier_wait(shared.k_full.data_ptr() + k_stage, k_phase)
                if const_expr(self.v.padding):
                    cute.arch.mbarrier_wait(shared.bits_full.data_ptr() + k_stage, k_phase)
                if const_expr(self.t.ping_pong):
                    cute.arch.barrier(barrier_id=_BAR_TURN + w, number_of_threads=256)
                    other = select_(w + 1 == self.nwg, Int32(0), w + 1)
                    cute.arch.barrier_arrive(barrier_id=_BAR_TURN + other, number_of_threads=256)
                self.wait_v(shared, v_stage, v_phase)
                self._release(shared.k_empty.data_ptr() + k_stage, lane, away)
                self._release(shared.v_empty.data_ptr() + v_stage, lane, away)
                k_stage, k_phase = self._advance(k_stage, k_phase)
                v_stage, v_phase = self._advance(v_stage, v_phase)
                last = last - 1
            # Known to be equal in a warp, they address shared memory from uniform registers.
            last, k_stage, k_phase, v_stage, v_phase = (
                cute.arch.make_warp_uniform(x) for x in (last, k_stage, k_phase, v_stage, v_phase))
        return last, k_stage, k_phase, v_stage, v_phase

    @cute.jit
    def first_product(self, s, f_q, f_k, shared, there, w, q_phase, k_stage, k_phase):
        """Issue S = Q K^T of an item's first key tile.

        Unconditional, or ptxas would run all products one by one: where no item is there, it multiplies what was loaded
        last, and nobody looks at the result.
        """
        stage = k_stage
        if there:
            cute.arch.mbarrier_wait(shared.q_full.data_ptr() + w, q_phase)
            cute.arch.mbarrier_wait(shared.k_full.data_ptr() + k_stage, k_phase)
        else:
            stage = select_(k_stage == 0, Int32(self.t.stages), k_stage) - 1
        warpgroup.fence()
        _gemm(self._mmas()[0], s, f_q, f_k[None, None, None, stage], True)
        warpgroup.commit_group()

    def _release(self, barrier, lane, away, value=None):
        """This warp is through with a stage: say so to the blocks that write to it, not before `value` is there."""
        if not self.v.team:
            _arrive(barrier) if value is None else _arrive_after(barrier, lane == 0, value)
            return
        nobody = select_(lane < 2, Int32(-1), Int32(0x7FFFFFFF))
        cute.arch.inline_ptx(
            "{ .reg .pred p; .reg .b32 at, bits; add.s32 at, {$r0}, {$r1}; mov.b32 bits, {$r2}; setp.gt.s32 p, bits, {$r3}; "
            "@p mbarrier.arrive.shared::cluster.b64 _, [at]; }",
            read_only_args=[barrier, away, Float32(0.0) if value is None else value, nobody])

    @cute.jit
    def wait_v(self, shared, stage, phase):
        cute.arch.mbarrier_wait(shared.v_full.data_ptr() + stage, phase)
        if const_expr(self.v.padding):
            cute.arch.mbarrier_wait(shared.v_clean.data_ptr() + stage, phase)

    def partial(self, n, m, w, keys, edges):
        """Whether bands, chunks or the end of the keys hide an element of a tile from this warpgroup."""
        v, t = self.v, self.t
        band_lo, band_hi, chunk, chunk_offset = edges
        key0, w_row = n * t.keys, m * t.rows + 64 * w
        partial = (key0 + t.keys) > keys
        if v.band_hi:
            partial = partial | (key0 + (t.keys - 1) > w_row + band_hi)
        if v.band_lo:
            partial = partial | (key0 < w_row + 63 + band_lo)
        if v.chunk:
            partial = partial | (key0 < (w_row + 63 + chunk_offset) // chunk * chunk)
            partial = partial | (key0 + t.keys > ((w_row + chunk_offset) // chunk + 1) * chunk)
        return cute.arch.vote_any_sync(partial)

    @cute.jit
    def scores(self, s, shared, stage, phase, n, full, partial, row0, column, h, b, rows, keys, dense, doc_q, doc_k, captures,
               ahead, ints, scale, edges):
        """Turn S into scores in place: score program, then -inf where a mask is false.

        Bands, chunks, the end of the keys and padding cost nothing on tiles that this warpgroup sees as a whole.
        """
        v, t = self.v, self.t
        key0 = n * t.keys
        if const_expr(v.has_program):
            where = (b, h, row0, key0 + column, rows, keys)
            if const_expr(not v.whole_tiles):
                self.program_of(s, captures, ahead, ints, scale, where, False)
            elif cute.arch.vote_all_sync(key0 + t.keys <= keys):
                self.program_of(s, captures, ahead, ints, scale, where, True)
            else:
                self.program(s, captures, ahead, ints, scale, where, False, False)
        elif const_expr(v.premultiply):
            _scale(s, scale, scale)
        if const_expr(v.listed):
            if not_(full):
                if const_expr(v.dense_wide):
                    self.mask_bits(s, dense, b, h, row0, key0, rows, keys)
                elif const_expr(v.dense):
                    self.mask_dense(s, dense, b, h, row0, key0 + column, rows, keys)
                if const_expr(v.documents is not None):
                    if cute.arch.vote_all_sync(key0 + t.keys <= keys):
                        self.mask_documents(s, doc_q, doc_k, b, row0, key0 + column, rows, keys, True)
                    else:
                        self.mask_documents(s, doc_q, doc_k, b, row0, key0 + column, rows, keys, False)

        if partial:
            self.mask_edges(s, row0, key0 + column, keys, edges)
        if const_expr(v.padding):
            self.mask_padding(s, shared, stage, phase, column)

    # The readers of captures clamp their indices.  Scores beyond the keys are masked afterwards, rows beyond Sq are not stored.

    @cute.jit
    def program_of(self, s, captures, ahead, ints, scale, where, whole: cutlass.Constexpr):
        """The score program, by the polynomial for tanh where it will do."""
        if const_expr(self.v.score is None or tanh_reach(self.v.score) == 0.0):
            self.program(s, captures, ahead, ints, scale, where, False, whole)
        elif cute.arch.vote_all_sync(self.small(s, scale)):
            self.program(s, captures, ahead, ints, scale, where, True, whole)
        else:
            self.program(s, captures, ahead, ints, scale, where, False, whole)

    def read_ahead(self, captures, n, row0, column, h, b, rows, keys):
        """Loads of captures that take long, issued while the product runs; a flat list, for `unpacked`."""
        if not any(c.wide for c in self.v.captures):
            return ()
        emit = Emitter(self.v.captures, captures, (), b, h, n * self.t.keys + column, keys, row0)
        return tuple(emit.read_ahead([cutlass.min(row0 + 8 * r, rows - 1) for r in range(2)], self.t.keys))

    def unpacked(self, ahead):
        return {c: ahead[4 * i : 4 * i + 4] for i, c in enumerate(chunks(self.v.captures, self.t.keys))}

    def small(self, s, scale):
        """Whether no argument of a tanh in a tile is above `TANH_SMALL`, by the squares of 8 of them at a time."""
        n = cute.size(s) // 8
        sums = [s[i] * s[i] for i in range(n)]
        for i in range(n, cute.size(s)):
            sums[i % n] = cute.math.fma(s[i], s[i], sums[i % n])
        top = sums[0]
        for x in sums[1:]:
            top = _max(top, x)
        x = scale * tanh_reach(self.v.score)
        return top * (x * x) <= TANH_SMALL**2

    def program(self, s, captures, ahead, ints, scale, where, small, whole):
        v = self.v
        b, h, row0, col0, rows, keys = where
        emit = Emitter(v.captures, captures, ints, b, h, col0, keys, row0, scale, small, whole, self.unpacked(ahead))
        other = v.added
        q = [cutlass.min(row0 + 8 * r, rows - 1) for r in range(2)]
        for j in range(self.t.keys // 8):
            for e in range(2):
                c = 8 * j + e
                column = (c, col0 + c)
                for r in range(2):
                    i, row = 4 * j + 2 * r + e, (r, q[r])
                    if other is not None:
                        x = cute.math.fma(s[i], scale, as_float(emit(other, row, column, None)))
                    elif v.score is not None:
                        x = as_float(emit(v.score, row, column, s[i]))
                    else:
                        x = s[i] * scale if v.premultiply else s[i]
                    for predicate in v.predicates:
                        x = select_(as_bool(emit(predicate, row, column, None)), x, Float32(NEG_INF))
                    s[i] = x

    def mask_edges(self, s, row0, col0, keys, edges):
        """-inf outside [left, right] of each row: end of the keys, bands, chunk."""
        v = self.v
        band_lo, band_hi, chunk, chunk_offset = edges
        for r in range(2):
            row = row0 + 8 * r
            right, left = keys - 1, None
            if v.band_hi:
                right = cutlass.min(right, row + band_hi)
            if v.band_lo:
                left = row + band_lo
            if v.chunk:
                start = (row + chunk_offset) // chunk * chunk
                right = cutlass.min(right, start + (chunk - 1))
                left = start if left is None else cutlass.max(left, start)
            right = right - col0
            for j in range(self.t.keys // 8):
                for e in range(2):
                    c = 8 * j + e
                    hidden = right < c
                    if left is not None:
                        hidden = hidden | (left - col0 > c)
                    i = 4 * j + 2 * r + e
                    s[i] = select_(hidden, Float32(NEG_INF), s[i])

    @cute.jit
    def mask_padding(self, s, shared, stage, phase, column):
        t = self.t
        n_words = (t.keys + 31) // 32
        cute.arch.mbarrier_wait(shared.bits_full.data_ptr() + stage, phase)
        words = cute.make_tensor(shared.bits.data_ptr() + stage * n_words, cute.make_layout(n_words))
        every = Boolean(True)
        for i in cutlass.range_constexpr(n_words):
            every = every & (words[i] == _all_ones(t.keys - 32 * i))
        if cute.arch.vote_any_sync(not every):
            for j in cutlass.range_constexpr(t.keys // 8):
                shifted = words[j // 4] >> column
                for e in cutlass.range_constexpr(2):
                    hidden = (shifted & (1 << (8 * (j % 4) + e))) == 0
                    for r in cutlass.range_constexpr(2):
                        i = 4 * j + 2 * r + e
                        s[i] = select_(hidden, Float32(NEG_INF), s[i])

    def mask_bits(self, s, dense, b, h, row0, key0, rows, keys):
        """`mask_dense` where 8 keys are always inside or always outside: the four lanes of a row load 8 bytes each for 32 keys
        and put their bits together."""
        lane = cute.arch.lane_idx() % 4
        for r in range(2):
            for chunk in range((self.t.keys + 31) // 32):
                first = cutlass.min(key0 + (32 * chunk + 8 * lane), keys - 8)
                start = cute.domain_offset((b, h, cutlass.min(row0 + 8 * r, rows - 1), first), dense).iterator
                low, high = cute.arch.inline_ptx("ld.global.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Int32, Int32],
                                                 read_only_args=[start])
                # A bool is 0 or 1: the lowest bits of four bytes, moved to bits 24 to 27.
                bits = ((low * 0x01020408) >> 24) & 15 | ((high * 0x01020408) >> 20) & 240
                bits = bits << (8 * lane)
                for step in (1, 2):
                    bits = bits | cute.arch.shuffle_sync_bfly(bits, step)
                bits = bits >> (2 * lane)
                for j in range(min(4, self.t.keys // 8 - 4 * chunk)):
                    for e in range(2):
                        i = 4 * (4 * chunk + j) + 2 * r + e
                        s[i] = select_((bits & (1 << (8 * j + e))) == 0, Float32(NEG_INF), s[i])

    def mask_dense(self, s, dense, b, h, row0, col0, rows, keys):
        for r in range(2):
            line = dense[b, h, cutlass.min(row0 + 8 * r, rows - 1), None]
            for j in range(self.t.keys // 8):
                for e in range(2):
                    i = 4 * j + 2 * r + e
                    seen = line[cutlass.min(col0 + (8 * j + e), keys - 1)] != Uint8(0)
                    s[i] = select_(seen, s[i], Float32(NEG_INF))

    def mask_documents(self, s, doc_q, doc_k, b, row0, col0, rows, keys, whole):
        start, kind = None, Int64 if self.v.documents == "int64" else Int32
        if whole:  # one address for all
            start = cute.domain_offset((b, col0), doc_k).iterator
        mine = [doc_q[b, cutlass.min(row0 + 8 * r, rows - 1)] for r in range(2)]
        for j in range(self.t.keys // 8):
            for e in range(2):
                if whole:
                    theirs = load(kind, f"b{kind.width}", start, (8 * j + e) * kind.width // 8)
                else:
                    theirs = doc_k[b, cutlass.min(col0 + (8 * j + e), keys - 1)]
                for r in range(2):
                    i = 4 * j + 2 * r + e
                    s[i] = select_(theirs == mine[r], s[i], Float32(NEG_INF))

    # Online softmax.  With a positive scale the maximum is taken over raw scores and the scale is folded into the
    # exponent's fma.  Otherwise S holds the scores themselves, in natural units.  A bias of -3.4e38 must stay finite, since
    # a row that has it everywhere is a uniform one: no fma where there may be one.

    def unit(self, scale_log2):
        """Base-2 units of a number in S."""
        return Float32(LOG2E) if self.v.premultiply else scale_log2

    def maximum(self, s, row_max, scale_log2, r, after=None):
        """Raise the reference of row r of a thread where S exceeds it by much.

        Returns what brings the row's sum and output from the old reference to the new one, and whether it is another one.
        With `after` the comparisons wait for that value.
        """
        idx = _row(cute.size(s), r)
        # Four chains: fmax has a latency of several cycles.  A NaN wins, and makes the whole row NaN.
        tops = [s[i] if after is None else _after(s[i], after) for i in idx[:4]]
        for n, i in enumerate(idx[4:]):
            tops[n % 4] = _max(tops[n % 4], s[i])
        top = _max(_max(tops[0], tops[1]), _max(tops[2], tops[3]))
        top = _max(top, cute.arch.shuffle_sync_bfly(top, 1))
        top = _max(top, cute.arch.shuffle_sync_bfly(top, 2))
        old = row_max[r]
        top = _max(old, top)
        # The reference need not be the maximum: up to 2^8 above it P loses nothing in 16 bits, and O stays as it
        # is (FlashAttention-4, arXiv 2603.05451).  -inf and NaN fail the comparison and take the new value.
        unit = self.unit(scale_log2)
        keep = (top - old) * unit <= LAZY
        row_max[r] = select_(keep, old, top)
        return cute.math.exp2((old - _finite(row_max[r])) * unit, fastmath=True), not_(keep)

    def exponentials(self, s, row_max, row_sum, factor, scale_log2, r):
        """Row r of S becomes exp(S - reference) in place, and its sum what it was times factor, plus these; returns sums on
        the way, one an exponential.

        All on the special function unit: with one in 8 as a polynomial on the fma units instead, as on Blackwell, every
        head dim runs 2 to 6 % slower here, with one in 4 up to 13 % (tests/results/kernels_tuning_h200.json).
        """
        unit = self.unit(scale_log2)
        top = _finite(row_max[r])
        shift = top * unit
        sums, found = [row_sum[r] * factor, Float32(0.0)], []
        for n, i in enumerate(_row(cute.size(s), r)):
            x = cute.math.fma(s[i], unit, -shift) if self.v.moderate else (s[i] - top) * unit
            s[i] = cute.math.exp2(x, fastmath=True)
            sums[n % 2] = sums[n % 2] + s[i]
            found.append(sums[n % 2])
        row_sum[r] = sums[0] + sums[1]
        return found

    def pack(self, s, packed):
        """S rounded to 16 bits: the A operand of the PV product, two elements a register."""
        kind = "bf16x2" if self.v.dtype == "bfloat16" else "f16x2"
        for e in range(cute.size(packed)):
            packed[e] = cute.arch.inline_ptx(
                f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Int32],
                read_only_args=[s[2 * e + 1], s[2 * e]])

    @cute.jit
    def normalise(self, o, row_max, row_sum, scale, fill, keys, row0, column, h, b, group, lse, sink, vmean):
        """Divide O by the row sums, add the sink, treat rows with every key masked, write the log-sum-exp."""
        v = self.v
        for r in cutlass.range_constexpr(2):
            row = row0 + 8 * r
            total = row_sum[r]
            total = total + cute.arch.shuffle_sync_bfly(total, 1)
            total = total + cute.arch.shuffle_sync_bfly(total, 2)
            top = row_max[r] if const_expr(v.premultiply) else row_max[r] * scale
            if const_expr(v.empty == "mean"):
                if total == 0.0:  # every key has the fill as its score
                    total = Float32(1.0)
                    top = Float32(NEG_INF)
                    if const_expr(sink is not None):
                        top = fill + cute.math.log2(Float32(keys), fastmath=True) * LN2
                    for j in cutlass.range_constexpr(v.dim_v // 8):
                        for e in cutlass.range_constexpr(2):
                            if column + (8 * j + e) < vmean.shape[2]:
                                o[4 * j + 2 * r + e] = vmean[b, h // group, column + (8 * j + e)]
            factor = Float32(1.0)
            if const_expr(sink is not None):
                factor, total, top = _add_sink(sink[h].to(Float32), total, top)
            inverse = factor * cute.arch.rcp_approx(total)
            log_sum = top + cute.math.log2(total, fastmath=True) * LN2
            if const_expr(v.empty == "zero" or v.split):
                inverse = select_(total == 0.0, Float32(0.0), inverse)
            for j in cutlass.range_constexpr(v.dim_v // 8):
                for e in cutlass.range_constexpr(2):
                    o[4 * j + 2 * r + e] = o[4 * j + 2 * r + e] * inverse
            if column == 0:
                if row < lse.shape[2]:
                    if const_expr(v.split):
                        lse[b, h, row, 0], lse[b, h, row, 1] = top, total
                    else:
                        lse[b, h, row] = log_sum


def _bytes(x: Any) -> Any:
    """A tensor of bools, which torch hands over as such, as the bytes that they are in memory; all others as they come."""
    if x is None or x.element_type is not Boolean:
        return x
    return cute.make_tensor(cute.recast_ptr(x.iterator, dtype=Uint8), x.layout)


def _row(size: int, r: int) -> list[int]:
    """Elements of an accumulator of `size` registers that are in row r of a thread's two."""
    return [4 * j + 2 * r + e for j in range(size // 4) for e in range(2)]


def _scale(o, factor0, factor1):
    for r, factor in enumerate((factor0, factor1)):
        for i in _row(cute.size(o), r):
            o[i] = o[i] * factor


def _max(a, b):
    return cute.arch.fmax(a, b, nan=True)


def _finite(top):
    """Reference of a row, 0 where every score so far was -inf: exp2(-inf - 0) is 0, exp2(-inf + inf) would be NaN.  A
    row that ends like this has the sum 0."""
    return select_(top == NEG_INF, Float32(0.0), top)


def _gemm(mma, acc, a, b, clear: bool):
    """acc (+)= a b over the k blocks of the fragments; asynchronous.

    `mma` is made where it is used: its accumulate flag is a traced value and must not cross a loop's border.
    """
    for k in range(cute.size(a, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, not (clear and k == 0))
        cute.gemm(mma, acc, a[None, None, k], b[None, None, k], acc)


def _add_sink(logit, total, top):
    """One more term exp(logit) in a row sum relative to exp(top): factor of O, new sum, new reference."""
    both = cute.arch.fmax(top, logit)
    factor = cute.math.exp2((top - both) * LOG2E, fastmath=True)
    return factor, total * factor + cute.math.exp2((logit - both) * LOG2E, fastmath=True), both


def _arrive(barrier):
    """One arrival a warp: all its reads are done."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


def _arrive_after(barrier, who, value):
    """Arrival of the threads `who`, not before `value` is there: the result of an exponential, whose sign bit is never set.
    No branch, and no `elect` that has to be waited for."""
    nobody = select_(who, Int32(-1), Int32(0x7FFFFFFF))
    cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .b64 state; .reg .b32 bits; mov.b32 bits, {$r1}; setp.gt.s32 p, bits, {$r2}; "
        "@p mbarrier.arrive.shared.b64 state, [{$r0}]; }", read_only_args=[barrier, value, nobody])


def _after(x, value):
    """x, but not before `value` is there, as far as ptxas knows: it is masked by the block's index in a grid of one plane."""
    return cute.arch.inline_ptx("lop3.b32 {$w0}, {$r0}, {$r1}, {$r2}, 0xF8;", write_only_types=[Float32],
                                read_only_args=[x, value, cute.arch.block_idx()[2]])


def _all_ones(bits: int) -> int:
    """Int32 value of a word with its lowest `bits` bits set."""
    return -1 if bits >= 32 else (1 << bits) - 1
