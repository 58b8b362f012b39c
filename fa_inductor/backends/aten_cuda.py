"""PyTorch's flash and memory-efficient attention on CUDA: the forward, and how a record maps onto either.

Flash (`_flash_attention_forward`): half dtypes, no bias, and a band ``q + off - left <= k <= q + off + right`` whose
diagonal is the bottom right one, ``off = Sk - Sq``.  `flash_band` turns any band into that form by leaving out keys
that no row attends to.  Efficient (`_efficient_attention_forward`): any bias in the dtype of q, equal head counts;
causal without a bias tensor.  Its built-in window is not used: the backward gives wrong
gradients with one (torch 2.11 on H200).
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fa_inductor.kernels.expr import SCORE
from fa_inductor.kernels.record import Attention, Band, KeyPadding
from fa_inductor.ops import layout
from fa_inductor.reasons import Code, Reason

from . import absorbed, empty_rows
from .additive import additive_mask, additive_part, grads_of_bias
from .heads import pad_last, positive_scale, repeat_heads, unit_stride
from .masks import band_of, empty_rows_of, without_bands
from .program import Scope
from .reference import row_blocks
from .sinks import apply_sink

_flash_forward = torch.ops.aten._flash_attention_forward.default
_efficient_forward = torch.ops.aten._efficient_attention_forward.default

FLASH_MAX_DIM = 256
BIAS_BYTES = 1 << 28
"""Upper bound of a bias tensor that depends on the query row; rows are cut to fit."""
ALIGN = 8
"""Elements to which the efficient kernels want head dims and bias rows aligned (16 bytes of a half dtype)."""


def supports(record: Attention) -> Reason | None:
    """Why neither operator can run ``record``, forward and backward; None when one can."""
    if record.dtype == "float64":
        return Reason(Code.DTYPE, "float64")
    if additive_part(record.score) is None:
        return Reason(Code.FEATURE, f"score program {record.score}")
    bias_grads = grads_of_bias(record)
    if bias_grads and bias_grads != [record.bias()]:
        return Reason(Code.GRAD_CAPTURE, "the score program is not score + bias")
    if not empty_rows.has_closed_form(record):
        return Reason(Code.EMPTY_ROWS)
    return None


@dataclass(frozen=True)
class FlashBand:
    """Keys [start, stop) and window sizes relative to the bottom right diagonal; -1 is unbounded."""

    start: int
    stop: int
    left: int
    right: int


def flash_band(lo: int | None, hi: int | None, sq: int, sk: int) -> FlashBand | None:
    """``q + lo <= k <= q + hi`` as a window around the diagonal of the keys in use; None when it has no such form."""
    stop = sk if hi is None else min(sk, sq + hi)
    start = 0 if lo is None else max(0, lo)
    if stop <= start:
        return None
    offset = (stop - start) - sq
    right = -1 if hi is None or hi >= sk - 1 else hi - start - offset
    left = -1 if lo is None or lo <= 1 - sq else offset - (lo - start)
    if (right < 0 and right != -1) or (left < 0 and left != -1):
        return None
    if max(left, right) >= stop - start:  # the kernel takes a side that is as long as the keys for unbounded
        return None
    if (hi is not None and right == -1 and hi < sk - 1) or (lo is not None and left == -1 and lo > 1 - sq):
        return None
    return FlashBand(start, stop, left, right)


def find_flash(record: Attention, ints: Sequence[int], sq: int, sk: int) -> FlashBand | None:
    """The flash form of ``record`` at these lengths, or None."""
    if record.dtype not in ("bfloat16", "float16") or max(record.head_dim, record.head_dim_v) > FLASH_MAX_DIM:
        return None
    if record.score != SCORE or any(not isinstance(a, Band) for a in record.mask):
        return None
    return flash_band(*band_of(record, ints), sq, sk)


def align(n: int) -> int:
    return (n + ALIGN - 1) // ALIGN * ALIGN


def to_kernel(x: Tensor, width: int) -> Tensor:
    """[B, H, S, D] as the kernels take it: [B, S, H, width], stride 1 last, other strides 16-byte aligned."""
    x = pad_last(unit_stride(x), width)
    if any(s % ALIGN for s in x.stride()[:-1]) or x.data_ptr() % 16:
        x = x.contiguous() if x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)
    return x.transpose(1, 2)


def flash_width(record: Attention) -> int:
    """Head dim of q, k and v for the flash kernels: they must be equal and a multiple of 8."""
    return align(max(record.head_dim, record.head_dim_v))


def flash_forward(record: Attention, q: Tensor, k: Tensor, v: Tensor, band: FlashBand) -> tuple[Tensor, Tensor]:
    """out [B, Hq, Sq, Dv] and lse [B, Hq, Sq]; 0 and +inf in rows without keys."""
    width, (factor, scale) = flash_width(record), positive_scale(record.scale)
    keys = slice(band.start, band.stop)
    out, lse, *_ = _flash_forward(
        to_kernel(q if factor == 1.0 else q * factor, width), to_kernel(k[:, :, keys], width),
        to_kernel(v[:, :, keys], width), None, None, q.shape[2], band.stop - band.start, 0.0, False, False,
        scale=scale, window_size_left=band.left, window_size_right=band.right,
    )
    return out.transpose(1, 2)[..., : record.head_dim_v], lse[..., : q.shape[2]]


@dataclass(frozen=True)
class EfficientBlock:
    """One call of an efficient kernel: rows, keys, additive bias and built-in mask."""

    rows: tuple[int, int]
    keys: int
    bias: Tensor | None
    dead: Tensor | None
    mask_type: int


class EfficientPlan:
    """How the efficient operators run ``record`` on these tensors.

    A band is built in (type 2, the bottom right diagonal) when the rest of the mask does not depend on the query
    row.  Otherwise mask and bias become one tensor, made for some rows at a time.
    """

    def __init__(
        self, record: Attention, q: Tensor, k: Tensor, captures: Sequence[Tensor], ints: Sequence[int]
    ) -> None:
        self.record, self.captures, self.ints, self.device = record, captures, ints, q.device
        self.shape = (*q.shape[:3], k.shape[2])
        loads = record.score.loads()
        rounded = additive_part(record.score) is not None and record.score != SCORE and (
            not loads or record.bias() is None or any(captures[i].dtype != q.dtype for i in loads)
        )
        self.dtype = torch.float32 if rounded else q.dtype
        """Bias and inputs must have one dtype; a bias that is not of q's is not rounded, q, k and v are widened."""

    def _built_in(self) -> EfficientBlock | None:
        sq, sk = self.shape[2:]
        lo, hi = band_of(self.record, self.ints)
        rest = without_bands(self.record)
        if rest.score != SCORE or any(not isinstance(a, KeyPadding) for a in rest.mask):
            return None
        if lo is None and (hi is None or hi >= sk - 1):
            keys, mask_type = sk, 0
        elif lo is not None or hi is None or sq + hi > sk or sq + hi < sq:
            return None
        else:
            keys, mask_type = sq + hi, 2
        scope = Scope(self.shape, (0, sq), self.captures, self.ints, self.device)
        bias, _ = additive_mask(rest, scope, self.dtype)
        return EfficientBlock((0, sq), keys, self.aligned(bias, sq, keys), None, mask_type)

    def aligned(self, bias: Tensor | None, rows: int, keys: int) -> Tensor | None:
        if bias is None:
            return None
        bias = bias[..., :keys] if bias.shape[-1] > keys else bias.expand(*bias.shape[:3], keys)
        bias = torch.nn.functional.pad(bias, (0, align(keys) - keys)).contiguous()[..., :keys]
        return bias.expand(*self.shape[:2], rows, keys)

    def blocks(self) -> Iterator[EfficientBlock]:
        whole = self._built_in()
        if whole is not None:
            yield whole
            return
        b, h, sq, sk = self.shape
        if not grads_of_bias(self.record):  # else the operator makes a gradient for each batch and head
            first = Scope(self.shape, (0, 1), self.captures, self.ints, self.device)
            probe, _ = additive_mask(self.record, first, self.dtype)
            b, h = (1, 1) if probe is None else probe.shape[:2]
        for rows in row_blocks(b * h, sq, align(sk), self.dtype.itemsize, BIAS_BYTES):
            scope = Scope(self.shape, rows, self.captures, self.ints, self.device)
            bias, dead = additive_mask(self.record, scope, self.dtype)
            if bias is not None and absorbed.possible(self.record) and self.dtype != torch.float16:
                bias = absorbed.bounded(bias)
            yield EfficientBlock(rows, sk, self.aligned(bias, rows[1] - rows[0], sk), dead, 0)


def efficient_call(
    block: EfficientBlock, q: Tensor, k: Tensor, v: Tensor, scale: float, head_dim_v: int
) -> tuple[Tensor, Tensor]:
    """out [B, Hq, rows, Dv] and lse [B, Hq, rows] of one block, from its rows of q and all keys as `to_kernel` gives them."""
    out, lse, *_ = _efficient_forward(
        q, k[:, : block.keys], v[:, : block.keys], block.bias, None, None, None, None, 0.0, block.mask_type, True,
        scale=scale,
    )
    return out.transpose(1, 2)[..., :head_dim_v], lse[..., : block.rows[1] - block.rows[0]]


def efficient_forward(
    record: Attention, q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor], ints: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """out [B, Hq, Sq, Dv] and lse [B, Hq, Sq]; undefined in rows without keys, NaN where a bias alone is -inf."""
    plan = EfficientPlan(record, q, k, captures, ints)
    factor, scale = positive_scale(record.scale)
    qk = (q if factor == 1.0 else q * factor).to(plan.dtype)
    kk = to_kernel(repeat_heads(k, record.group).to(plan.dtype), align(record.head_dim))
    vk = to_kernel(repeat_heads(v, record.group).to(plan.dtype), align(record.head_dim_v))
    outs, lses = [], []
    for block in plan.blocks():
        rows = slice(*block.rows)
        out, lse = efficient_call(block, to_kernel(qk[:, :, rows], align(record.head_dim)), kk, vk, scale, record.head_dim_v)
        if block.dead is not None:
            out, lse = empty_rows.finish_forward(record.with_(empty_rows="nan"), out, lse, v, block.dead)
        outs.append(out)
        lses.append(lse)
    return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs, 2), torch.cat(lses, 2))


def forward(
    record: Attention, q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor], ints: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """out and lse as `reference.forward` gives them; the record must be one that `supports` accepts."""
    band = find_flash(record, ints, q.shape[2], k.shape[2])
    if band is not None:
        out, lse = flash_forward(record, q, k, v, band)
    else:
        out, lse = efficient_forward(record, q, k, v, captures, ints)
    if empty_rows.matters(record) or (record.sink is not None and record.mask):
        scope = Scope((*q.shape[:3], k.shape[2]), (0, q.shape[2]), captures, ints, q.device)
        empty = empty_rows_of(record, scope)
        assert empty is not None
        if empty_rows.matters(record):
            out, lse = empty_rows.finish_forward(record, out, lse, v, empty)
        else:
            out, lse = empty_rows.zero_rows(out, empty), torch.where(empty, -math.inf, lse)
    if record.sink is not None:
        out, lse = apply_sink(out, lse, captures[record.sink])
    return layout.match(out, layout.empty_out(record, q, v)), layout.match(lse, layout.empty_lse(q))
