"""PyTorch's flash attention for CPUs: out and lse, and the backward from them.

The operator wants equal head counts and head dims, a last dimension of stride 1 (it reads wrong data otherwise and
does not say so), and float masks of its own dtype (float32 too, for half inputs).  It gives 0 and lse 0 in a row
without keys, and where every score of a row is NaN; NaN for a causal mask with a scale that is not positive.  Its
``is_causal`` is ``k <= q`` also for Sq != Sk, and may be combined with a mask.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fa_inductor.kernels.expr import SCORE
from fa_inductor.kernels.record import Attention
from fa_inductor.ops import layout

from . import empty_rows, reference
from .additive import additive_mask
from .heads import pad_last, positive_scale, repeat_heads, sum_heads, unit_stride
from .masks import band_of, empty_rows_of, mask_of, without_bands
from .program import Scope
from .sinks import apply_sink, sink_gradient

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

ABSORBED = -1e38
"""No lse of a row with keys is below this; that of a row whose every score is the lowest float is."""


class Inputs:
    """q, k, v, mask as the operator wants them.

    ``uniform``: rows without keys come out of the forward as the mean of V by themselves, because a finite mask value
    absorbs the scores as it does in eager code; their lse is then below `ABSORBED`.  Not for the backward, where lse
    has absorbed ``log Sk`` too.
    """

    def __init__(
        self, record: Attention, q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor], ints: Sequence[int],
        forward_only: bool = False,
    ) -> None:
        self.record = record
        self.width = max(q.shape[3], v.shape[3])
        self.factor, self.scale = positive_scale(record.scale)
        self.q = pad_last(unit_stride(q if self.factor == 1.0 else q * self.factor), self.width)
        self.k = pad_last(unit_stride(repeat_heads(k, record.group)), self.width)
        self.v = pad_last(unit_stride(repeat_heads(v, record.group)), self.width)
        compute = layout.compute_dtype(q.dtype)
        scope = Scope((*q.shape[:3], k.shape[2]), (0, q.shape[2]), captures, ints, q.device, compute)
        self.causal = band_of(record, ints) == (None, 0)
        rest = without_bands(record) if self.causal else record
        mask_dtype = q.dtype if record.score == SCORE else compute  # a score bias is not rounded
        needs_care = empty_rows.matters(record) or (record.sink is not None and bool(record.mask))
        self.uniform = (
            forward_only and needs_care and record.empty_rows == "mean" and record.sink is None
            and record.score == SCORE and not self.causal
        )
        if self.uniform:
            mask, self.dead = mask_of(rest, scope), None
            low = torch.finfo(compute).min
            zero = torch.zeros((), dtype=compute, device=q.device)
            self.mask = None if mask is None else torch.where(mask, zero, low)
        else:
            self.mask, self.dead = additive_mask(rest, scope, mask_dtype)
        self.empty = empty_rows_of(record, scope) if needs_care and not self.uniform else None


def forward(
    record: Attention, q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor], ints: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """out and lse as `reference.forward` gives them; the record must be one that `sdpa.sdpa_supports`."""
    x = Inputs(record, q, k, v, captures, ints, forward_only=True)
    out, lse = _forward(x.q, x.k, x.v, 0.0, x.causal, attn_mask=x.mask, scale=x.scale)
    out = out[..., : v.shape[3]]
    if _may_hide_nan(out, lse, x.empty):
        return reference.forward(record, q, k, v, captures, ints)
    if x.uniform:
        lse = lse.masked_fill(lse < ABSORBED, -math.inf)
    if x.empty is not None:
        if empty_rows.matters(record):
            out, lse = empty_rows.finish_forward(record, out, lse, v, x.empty)
        else:
            lse = torch.where(x.empty, -math.inf, lse)
    if x.dead is not None:
        out, lse = empty_rows.finish_forward(record.with_(empty_rows="nan"), out, lse, v, x.dead)
    if record.sink is not None:
        out, lse = apply_sink(out, lse, captures[record.sink])
    return layout.match(out, layout.empty_out(record, q, v)), layout.match(lse, layout.empty_lse(q))


def _may_hide_nan(out: Tensor, lse: Tensor, empty: Tensor | None) -> bool:
    """Whether a row that has keys looks as the operator leaves one whose scores are all NaN; hardly any other does."""
    found = (lse == 0) if empty is None else (lse == 0) & ~empty
    return bool(found.any()) and bool((found & (out == 0).all(-1)).any())


def backward(
    record: Attention, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    captures: Sequence[Tensor], ints: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients as `reference.backward` gives them, from the out and lse of any backend.

    Half inputs are widened: in bfloat16 the operator is no faster and its largest error in dv was 2.3 times eager's.
    In float32 its errors are up to 16 times eager's (2.7 times in the mean; N(0, 1) data with outliers), because
    ``exp(s - lse)`` carries the rounding of a large lse: see `sdpa.backward`.
    """
    if q.dtype in (torch.bfloat16, torch.float16):
        *grads, dcaptures = backward(
            record.with_(dtype="float32"), dout.float(), q.float(), k.float(), v.float(), out.float(), lse, captures,
            ints,
        )
        templates = layout.empty_grads(record, q, k, v, captures)[:3]
        dq, dk, dv = (layout.match(g, t) for g, t in zip(grads, templates, strict=True))
        return dq, dk, dv, dcaptures
    x = Inputs(record, q, k, v, captures, ints)
    dq, dk, dv, dcaptures = layout.empty_grads(record, q, k, v, captures)
    ignore = [e for e in (x.empty if empty_rows.matters(record) else None, x.dead) if e is not None]
    do, o = dout, out
    for e in ignore:  # those rows are put right below; here they give nothing, and no NaN of theirs spreads
        do, o = empty_rows.zero_rows(do, e), empty_rows.zero_rows(o, e)
    full_lse = lse
    if x.empty is not None or x.dead is not None:
        lse = torch.where(lse == -math.inf, 0.0, lse)
    grads = _backward(
        pad_last(unit_stride(do), x.width), x.q, x.k, x.v, pad_last(unit_stride(o), x.width), lse, 0.0, x.causal,
        attn_mask=x.mask, scale=x.scale,
    )
    gq, gk, gv = grads
    gk, gv = sum_heads(gk, record.kv_heads), sum_heads(gv, record.kv_heads)
    gq = gq if x.factor == 1.0 else gq * x.factor
    gq, gk, gv = gq[..., : q.shape[3]], gk[..., : k.shape[3]], gv[..., : v.shape[3]]
    if x.empty is not None and empty_rows.matters(record):
        gq, gk, gv = empty_rows.finish_backward(record, (gq, gk, gv), dout, q, k, v, x.empty, lse=full_lse)
    if x.dead is not None:
        gq, gk, gv = empty_rows.finish_backward(
            record.with_(empty_rows="nan"), (gq, gk, gv), dout, q, k, v, x.dead, replaced=False
        )
    for i, d in zip(record.grads, dcaptures, strict=True):
        assert i == record.sink
        d.copy_(sink_gradient(record, dout, out, lse, captures[i]))
    return layout.match(gq, dq), layout.match(gk, dk), layout.match(gv, dv), dcaptures
