"""Attention of any record in plain torch: what everything else is checked against.

Works on every device and dtype, needs no kernel, and runs in blocks of query rows so that its memory does not grow
with Sq * Sk.  Scores, softmax and gradients are float32 (float64 for float64 inputs), the result is rounded once.
The backward recomputes the softmax from q and k, so it is the derivative of this forward whatever kernel made
``out`` and ``lse``.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fa_inductor.kernels.expr import SCORE, Expr, load
from fa_inductor.kernels.record import Attention
from fa_inductor.ops import layout

from .masks import mask_of
from .program import Scope, Value, evaluate, vjp

BLOCK_BYTES = 1 << 28
"""Upper bound of one [B, Hq, rows, Sk] temporary; rows are cut to fit."""


def fill_replaces(record: Attention) -> bool:
    """Whether the fill takes the place of the score (``where``, ``masked_fill``) instead of being added to it.

    Only the gradient of a row that is masked as a whole depends on it: an added fill passes gradients through to
    the scores.
    """
    return record.fill_mode == "replace"


def row_blocks(
    batch_heads: int, sq: int, sk: int, item_bytes: int, limit: int | None = None
) -> Iterator[tuple[int, int]]:
    """Ranges of query rows such that one score temporary stays below ``limit`` (default `BLOCK_BYTES`) bytes."""
    per_row = max(1, batch_heads * sk * item_bytes)
    rows = max(1, (limit or BLOCK_BYTES) // per_row)
    for start in range(0, sq, rows):
        yield start, min(sq, start + rows)


class _Rows:
    """Probabilities of the query rows [q0, q1) and what their derivative needs."""

    def __init__(
        self, record: Attention, q: Tensor, k_t: Tensor, captures: Sequence[Tensor], ints: Sequence[int],
        rows: tuple[int, int],
    ) -> None:
        b, hq, sq, _ = q.shape
        sk = k_t.shape[3]
        self.record, self.scope = record, Scope((b, hq, sq, sk), rows, captures, ints, q.device, k_t.dtype)
        self.q = q[:, :, rows[0] : rows[1]].to(k_t.dtype)
        raw = group_matmul(self.q, k_t) * record.scale
        value, self.memo = _run_score(record.score, self.scope, raw)
        score = value.to(k_t.dtype)
        self.mask = mask_of(record, self.scope)
        if self.mask is not None:
            score = score.masked_fill(~self.mask, -math.inf)
        self.empty = None
        if self.mask is not None and record.empty_rows != "never":
            self.empty = ~self.mask.any(-1, keepdim=True) if sk else None
        if self.empty is not None and record.sink is not None and record.empty_rows == "mean":
            score = score.masked_fill(self.empty, record.fill)  # shared between the keys and the sink
        self._softmax(score, sk)

    def _softmax(self, score: Tensor, sk: int) -> None:
        record = self.record
        sink = None
        if record.sink is not None:
            sink = self.scope.captures[record.sink].to(score.dtype).view(1, -1, 1, 1)
        top = score.amax(-1, keepdim=True) if sk else score.new_full((*score.shape[:3], 1), -math.inf)
        if sink is not None:
            top = torch.maximum(top, sink)
        top = torch.where(top == -math.inf, 0.0, top)
        weights = torch.exp(score - top)
        total = weights.sum(-1, keepdim=True)
        if sink is not None:
            sink_weight = torch.exp(sink - top)
            total = total + sink_weight
            self.sink_p = sink_weight / total
        self.lse = (top + torch.log(total)).squeeze(-1)
        self.p = weights / total
        if self.empty is not None and sink is None and record.empty_rows in ("mean", "zero"):
            uniform = 1.0 / max(sk, 1) if record.empty_rows == "mean" else 0.0
            self.p = torch.where(self.empty, uniform, self.p)

    def score_gradient(self, dp: Tensor) -> Tensor:
        """Gradient at the masked scores, [B, Hq, rows, Sk], from that at the probabilities."""
        self.delta = (self.p * dp).sum(-1, keepdim=True)
        ds = self.p * (dp - self.delta)
        if self.mask is None:
            return ds
        reaches = self.mask
        if self.empty is not None and self.record.empty_rows != "zero" and not fill_replaces(self.record):
            reaches = reaches | self.empty
        return torch.where(reaches, ds, 0.0)


def _run_score(program: Expr, scope: Scope, raw: Tensor) -> tuple[Tensor, dict[Expr, Value]]:
    value, memo = evaluate(program, scope, raw)
    if not isinstance(value, Tensor):
        value = scope.tensor(value)
    return value.expand(raw.shape), memo


def group_matmul(x: Tensor, y: Tensor) -> Tensor:
    """x [B, Hq, R, N] times y [B, Hkv, N, M] with each head of y shared by Hq / Hkv heads of x; y is not repeated."""
    b, hq, r, n = x.shape
    hkv = y.shape[1]
    return torch.matmul(x.reshape(b, hkv, hq // hkv * r, n), y).view(b, hq, r, y.shape[3])


def group_matmul_t(x: Tensor, y: Tensor, kv_heads: int) -> Tensor:
    """x^T y summed over the heads of a group: x [B, Hq, R, N], y [B, Hq, R, M] to [B, Hkv, N, M].

    Head by head, then summed: one product over all rows of a group would add up more terms and lose precision.
    """
    product = torch.matmul(x.transpose(2, 3), y)
    group = x.shape[1] // kv_heads
    return product if group == 1 else product.unflatten(1, (kv_heads, group)).sum(2)


def forward(
    record: Attention, q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor] = (), ints: Sequence[int] = (),
    block_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention as the record says.

    Args:
        record: any record.
        q: [B, Hq, Sq, D].  k: [B, Hkv, Sk, D].  v: [B, Hkv, Sk, Dv].  Any strides.
        captures: tensors the record names by number.
        ints: integers that `Sym` names by number.
        block_bytes: size limit of a score temporary, `BLOCK_BYTES` by default.

    Returns:
        out [B, Hq, Sq, Dv] in the record's dtype and layout, and lse [B, Hq, Sq] in float32 (float64 for float64
        inputs).  lse is -inf in a row with every key masked, whatever ``empty_rows`` is, unless there is a sink.
    """
    compute = layout.compute_dtype(q.dtype)
    out, lse = layout.empty_out(record, q, v), layout.empty_lse(q)
    k_t, vc = k.to(compute).transpose(2, 3), v.to(compute)
    b, hq, sq, _ = q.shape
    for rows in row_blocks(b * hq, sq, k.shape[2], compute.itemsize, block_bytes):
        part = _Rows(record, q, k_t, captures, ints, rows)
        out[:, :, rows[0] : rows[1]] = group_matmul(part.p, vc)
        lse[:, :, rows[0] : rows[1]] = part.lse
    return out, lse


class _CaptureGradients:
    """Sums of the gradients of ``record.grads`` over the blocks of rows, in the compute dtype."""

    def __init__(self, record: Attention, captures: Sequence[Tensor], compute: torch.dtype) -> None:
        self.sums = {i: captures[i].new_zeros(captures[i].shape, dtype=compute) for i in record.grads}

    def add(self, i: int, g: Tensor, scope: Scope) -> None:
        if i in self.sums:
            target = scope.row_slice(self.sums[i])
            target += g.sum_to_size(target.shape)


def backward(
    record: Attention, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor] = (),
    ints: Sequence[int] = (), block_bytes: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients of `forward` at ``dout`` [B, Hq, Sq, Dv].

    Returns:
        dq, dk, dv in the shapes and dtypes of q, k, v, and the gradients of the captures in ``record.grads``, all in
        the memory order of `fa_inductor.ops.layout`.
    """
    compute = layout.compute_dtype(q.dtype)
    dq, dk, dv, dcaptures = layout.empty_grads(record, q, k, v, captures)
    kc, vc = k.to(compute), v.to(compute)
    k_t, v_t = kc.transpose(2, 3), vc.transpose(2, 3)
    dk_sum, dv_sum = torch.zeros_like(kc), torch.zeros_like(vc)
    sums = _CaptureGradients(record, captures, compute)
    b, hq, sq, _ = q.shape
    for rows in row_blocks(b * hq, sq, k.shape[2], compute.itemsize, block_bytes):
        part = _Rows(record, q, k_t, captures, ints, rows)
        do = dout[:, :, rows[0] : rows[1]].to(compute)
        dv_sum += group_matmul_t(part.p, do, record.kv_heads)
        leaves = vjp(record.score, part.memo, part.score_gradient(group_matmul(do, v_t)))
        ds = leaves.get(SCORE)
        if ds is None:
            dq[:, :, rows[0] : rows[1]] = 0
        else:
            ds = ds.to(compute) * record.scale
            dq[:, :, rows[0] : rows[1]] = group_matmul(ds, kc)
            dk_sum += group_matmul_t(ds, part.q, record.kv_heads)
        for i in record.grads:
            if load(i) in leaves:
                sums.add(i, leaves[load(i)].to(compute), part.scope)
        if record.sink is not None and record.sink in record.grads:
            dsink = -(part.sink_p * part.delta).sum((0, 2, 3))
            sums.sums[record.sink] += dsink.view(sums.sums[record.sink].shape)
    dk.copy_(dk_sum)
    dv.copy_(dv_sum)
    for i, d in zip(record.grads, dcaptures, strict=True):
        d.copy_(sums.sums[i])
    return dq, dk, dv, dcaptures
