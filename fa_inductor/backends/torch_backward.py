"""Backward on CUDA by PyTorch's flash or memory-efficient kernels, fed with the out and lse of any forward.

Both kernels recompute p = exp(s - lse) and delta = dO . out, so they do not care who made out and lse.  With a sink
these two include it, which gives the gradients with the sink (`sinks`).  A row without keys goes in with dO = 0 and
lse = +inf, which is 0 everywhere, and is put right by `empty_rows`.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fa_inductor.kernels.expr import SCORE
from fa_inductor.kernels.record import Attention
from fa_inductor.ops import layout
from fa_inductor.reasons import Reason

from . import absorbed, aten_cuda, empty_rows
from .additive import grads_of_bias
from .aten_cuda import EfficientBlock, EfficientPlan, FlashBand, align, efficient_call, flash_width, to_kernel
from .heads import positive_scale, repeat_heads, sum_heads
from .masks import empty_rows_of
from .program import Scope
from .sinks import sink_gradient

_flash_backward = torch.ops.aten._flash_attention_backward.default
_efficient_backward = torch.ops.aten._efficient_attention_backward.default

LSE_ALIGN = 32
"""The efficient backward reads lse in rows of a multiple of this many entries."""


def supports(record: Attention) -> Reason | None:
    """Why no PyTorch kernel can differentiate ``record`` on CUDA; None when one can."""
    return aten_cuda.supports(record)


def _rows_without_keys(
    record: Attention, lse: Tensor, keys: int, captures: Sequence[Tensor], ints: Sequence[int]
) -> Tensor | None:
    """Rows, broadcastable to [B, Hq, Sq], with no weight on any key or only a fill's; None when there is none.

    Without a sink, lse is -inf there in every forward of ours, which costs nothing of size Sq x Sk.
    """
    if record.sink is not None and empty_rows.matters(record):
        return empty_rows_of(record, Scope((*lse.shape, keys), (0, lse.shape[2]), captures, ints, lse.device))
    if record.sink is not None or (record.empty_rows == "never" and record.score == SCORE):
        return None
    return lse == -math.inf


def _flash(
    record: Attention, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: FlashBand
) -> tuple[Tensor, Tensor, Tensor]:
    width, (factor, scale) = flash_width(record), positive_scale(record.scale)
    keys = slice(band.start, band.stop)
    unused = q.new_empty(0, dtype=torch.int64)  # state of the dropout generator
    dq, dk, dv = _flash_backward(
        to_kernel(dout, width), to_kernel(q if factor == 1.0 else q * factor, width), to_kernel(k[:, :, keys], width),
        to_kernel(v[:, :, keys], width), to_kernel(out, width), lse, None, None, q.shape[2], band.stop - band.start,
        0.0, False, unused, unused, scale=scale, window_size_left=band.left, window_size_right=band.right,
    )
    dq, dk, dv = (x.transpose(1, 2) for x in (dq, dk, dv))
    dq = dq[..., : record.head_dim]
    around = (0, 0, band.start, k.shape[2] - band.stop)
    dk, dv = dk[..., : record.head_dim], dv[..., : record.head_dim_v]
    if any(around):
        dk, dv = torch.nn.functional.pad(dk, around), torch.nn.functional.pad(dv, around)
    return (dq if factor == 1.0 else dq * factor), dk, dv


def _without_shift(
    plan: EfficientPlan, block: EfficientBlock, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor, lse: Tensor,
) -> tuple[EfficientBlock, Tensor, Tensor, Tensor]:
    """The block without the large number that all scores of a row have in them, what its forward gives then, and a factor for
    dout.

    Nothing is read back from the device, so the forward runs once more whether or not there is such a row (`absorbed`).
    Where n keys weigh the same, the number stays: exp(s - number) is 1 for them, and all gradients of the row are linear in
    dout, which is divided by n.
    """
    assert block.bias is not None
    bias = absorbed.narrow(block.bias)
    shift, equal = absorbed.row_shift(bias)
    top = shift.squeeze(-1)
    shift = torch.where(equal > 0, 0.0, shift)
    free = replace(block, bias=plan.aligned(bias - shift, block.rows[1] - block.rows[0], block.keys))
    again, again_lse = efficient_call(free, q, k, v, scale, out.shape[3])
    shift, equal = shift.squeeze(-1), equal.squeeze(-1)
    large = absorbed.is_large(lse)
    lost, same = large & (shift != 0), large & (equal > 0)
    lse = torch.where(same, top, torch.where(lost, again_lse, lse - shift))
    return (free, torch.where(lost.unsqueeze(-1), again.to(out.dtype), out), lse,
            torch.where(same, 1 / equal.clamp(min=1), 1.0).unsqueeze(-1))


def _efficient(
    record: Attention, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    captures: Sequence[Tensor], ints: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    plan = EfficientPlan(record, q, k, captures, ints)
    factor, scale = positive_scale(record.scale)
    width, width_v = align(record.head_dim), align(record.head_dim_v)
    qk = (q if factor == 1.0 else q * factor).to(plan.dtype)
    kk = to_kernel(repeat_heads(k, record.group).to(plan.dtype), width)
    vk = to_kernel(repeat_heads(v, record.group).to(plan.dtype), width_v)
    dk_sum = torch.zeros(kk.shape, dtype=torch.float32, device=q.device)
    dv_sum = torch.zeros(vk.shape, dtype=torch.float32, device=q.device)
    bias_at = record.bias() if grads_of_bias(record) else None
    dbias = None if bias_at is None else torch.zeros(captures[bias_at].shape, dtype=torch.float32, device=q.device)
    none = torch.zeros((), dtype=torch.int64)  # state of the dropout generator
    splits = 1 if torch.are_deterministic_algorithms_enabled() else None
    dqs = []
    for block in plan.blocks():
        rows, n = slice(*block.rows), block.rows[1] - block.rows[0]
        q_rows, part_lse = to_kernel(qk[:, :, rows], width), lse[..., rows]
        o_rows, do_rows = out[:, :, rows].to(plan.dtype), dout[:, :, rows].to(plan.dtype)
        if block.bias is not None and absorbed.possible(record):
            block, o_rows, part_lse, factor_rows = _without_shift(plan, block, q_rows, kk, vk, scale, o_rows, part_lse)
            do_rows = (do_rows * factor_rows).to(plan.dtype)
        part_lse = torch.nn.functional.pad(part_lse, (0, -n % LSE_ALIGN), value=math.inf).contiguous()
        dq, dk, dv, db = _efficient_backward(
            to_kernel(do_rows, width_v), q_rows,
            kk[:, : block.keys], vk[:, : block.keys], block.bias,
            # out alone is read as contiguous [B, S, H, Dv], whatever its strides say
            to_kernel(o_rows, width_v).contiguous(),
            None, None, n, block.keys, part_lse, 0.0, none, none, block.mask_type, dbias is not None, scale=scale,
            num_splits_key=splits,
        )
        dqs.append(dq.transpose(1, 2)[..., : record.head_dim])
        dk_sum[:, : block.keys] += dk
        dv_sum[:, : block.keys] += dv
        if dbias is not None:
            target = dbias
            if target.dim() >= 2 and target.shape[-2] != 1:
                target = target[..., rows, :]
            target += db.to(torch.float32).sum_to_size(target.shape)
    dq = dqs[0] if len(dqs) == 1 else torch.cat(dqs, 2)
    dk = sum_heads(dk_sum.transpose(1, 2)[..., : record.head_dim], record.kv_heads)
    dv = sum_heads(dv_sum.transpose(1, 2)[..., : record.head_dim_v], record.kv_heads)
    return (dq if factor == 1.0 else dq * factor), dk, dv, dbias


def backward(
    record: Attention, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    captures: Sequence[Tensor], ints: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients as `reference.backward` gives them; the record must be one that `supports` accepts.

    Args:
        dout: [B, Hq, Sq, Dv].
        out, lse: what the forward returned; lse -inf (or finite and below any score) in rows without keys.
    """
    templates = layout.empty_grads(record, q, k, v, captures)
    empty = _rows_without_keys(record, lse, k.shape[2], captures, ints)
    do, o, finite_lse = dout, out, lse.contiguous()
    if empty is not None:
        do, o = empty_rows.zero_rows(dout, empty), empty_rows.zero_rows(out, empty)
        finite_lse = torch.where(empty, math.inf, lse)
    band = aten_cuda.find_flash(record, ints, q.shape[2], k.shape[2])
    dbias: Tensor | None = None
    if band is not None:
        grads = _flash(record, do, q, k, v, o, finite_lse, band)
    else:
        *some, dbias = _efficient(record, do, q, k, v, o, finite_lse, captures, ints)
        grads = (some[0], some[1], some[2])
    if empty is not None:
        rule, replaced = record, None
        if not empty_rows.matters(record):  # a bias of -inf: NaN, as in eager code
            rule, replaced = record.with_(empty_rows="nan"), False
        grads = empty_rows.finish_backward(rule, grads, dout, q, k, v, empty, replaced, lse)
    dcaptures = []
    for i, template in zip(record.grads, templates[3], strict=True):
        if i == record.sink:
            dcaptures.append(template.copy_(sink_gradient(record, dout, out, lse, captures[i])))
        else:
            assert dbias is not None
            dcaptures.append(template.copy_(dbias))
    dq, dk, dv = (layout.match(g, t) for g, t in zip(grads, templates[:3], strict=True))
    return dq, dk, dv, dcaptures
