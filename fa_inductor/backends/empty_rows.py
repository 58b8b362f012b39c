"""Rows with every key masked: what eager code gives for them, put right around kernels that give something else.

A row that is masked as a whole is 0/0 for a kernel that skips masked keys.  Eager code gives NaN there (fill -inf)
or, with a finite fill that absorbs the scores, weights every key with 1/Sk.  The latter has a closed form: for the
set E of such rows, with g_e = dO_e, m = mean of V and delta_e = g_e . m,

    out_e  = m
    dV_j  += 1/Sk  sum_e g_e
    dS_ej  = 1/Sk (g_e . V_j - delta_e)               (0 when the fill replaces the score)
    dQ_e   = scale/Sk (g_e (V^T K) - delta_e sum_j K_j)
    dK_j  += scale/Sk (V_j (sum_e g_e^T Q_e) - sum_e delta_e Q_e)

so it costs O((Sq + Sk) D^2) and no score matrix.  A sink takes a part of such a row: the keys keep the weight
w_e = sigmoid(fill + log Sk - sink), out_e = w_e m, and with g_e replaced by w_e g_e above, dS_ej also gets
1/Sk w_e (1 - w_e) g_e . m.  For any sink that is not itself a mask's fill, w_e is 0.  The main kernel runs with dO = 0
in those rows.  Nothing is read back from the device, so the correction runs whether or not there is such a row.
"""
from __future__ import annotations

import math

import torch
from torch import Tensor

from fa_inductor.kernels.record import Attention

from .additive import additive_part, grads_of_bias
from .reference import fill_replaces, group_matmul, group_matmul_t


def matters(record: Attention) -> bool:
    """Whether rows without keys need putting right (beside a sink, a fill of -inf gives such a row weight 0)."""
    return bool(record.mask) and record.empty_rows != "never" and (record.sink is None or record.empty_rows == "mean")


def has_closed_form(record: Attention) -> bool:
    """Whether `finish_backward` is the whole gradient of such rows.

    Not when the score program has a derivative other than 1, or an added bias needs the gradient of its rows.
    """
    if not matters(record) or record.empty_rows == "zero" or fill_replaces(record):
        return True
    if record.empty_rows == "nan":  # the NaN of such a row reaches the bias too
        return not grads_of_bias(record)
    return additive_part(record.score) is not None and not grads_of_bias(record)


def finish_forward(record: Attention, out: Tensor, lse: Tensor, v: Tensor, empty: Tensor) -> tuple[Tensor, Tensor]:
    """Output and lse with the rows ``empty`` (bool, broadcastable to [B, Hq, Sq]) as eager code gives them.

    Before the sink, if there is one: their lse is then that of keys which all have the fill as score, else -inf.
    """
    lse = torch.where(empty, -math.inf if record.sink is None else keys_lse(record, v.shape[2]), lse)
    value: Tensor | float = math.nan if record.empty_rows == "nan" else 0.0
    if record.empty_rows == "mean" and v.shape[2]:
        value = v.mean(2, keepdim=True, dtype=lse.dtype).to(out.dtype).repeat_interleave(record.group, 1)
    return torch.where(empty.unsqueeze(-1), value, out), lse


def keys_lse(record: Attention, keys: int) -> float:
    """log-sum-exp over the keys of a row that is masked as a whole."""
    return record.fill + math.log(keys) if keys else -math.inf


def zero_rows(x: Tensor, empty: Tensor) -> Tensor:
    """``x`` [B, Hq, Sq, N] with 0 in the rows ``empty``, a NaN there included."""
    return torch.where(empty.unsqueeze(-1), 0.0, x)


def finish_backward(
    record: Attention, grads: tuple[Tensor, Tensor, Tensor], dout: Tensor, q: Tensor, k: Tensor, v: Tensor,
    empty: Tensor, replaced: bool | None = None, lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Adds what the rows ``empty`` give to (dq, dk, dv) that were computed with `zero_rows` of ``dout``.

    Args:
        grads: (dq, dk, dv) of the other rows, in any float dtype; the result has these dtypes.
        dout: the full output gradient [B, Hq, Sq, Dv].
        empty: bool, broadcastable to [B, Hq, Sq].
        lse: [B, Hq, Sq] with the sink; needed when there is one.
        replaced: whether those scores were replaced and get no gradient; by default what the record says.
    """
    dq, dk, dv = grads
    replaced = fill_replaces(record) if replaced is None else replaced
    rows = empty.expand(q.shape[:3]).unsqueeze(-1)
    if record.empty_rows == "zero":
        return torch.where(rows, 0.0, dq), dk, dv
    if record.empty_rows == "nan":
        b, h, sq, _ = q.shape
        hit = rows.reshape(b, record.kv_heads, h // record.kv_heads * sq, 1).any(2, keepdim=True)
        poison = torch.where(hit, math.nan, 0.0).to(dk.dtype)
        dv = dv + poison.to(dv.dtype)
        return (torch.where(rows, 0.0, dq), dk, dv) if replaced else (torch.where(rows, math.nan, dq), dk + poison, dv)
    compute = torch.promote_types(q.dtype, torch.float32)
    sk = max(k.shape[2], 1)
    g = torch.where(rows, dout, 0.0).to(compute)
    vc = v.to(compute)
    keep: Tensor | None = None
    if record.sink is not None:
        assert lse is not None
        keep = torch.where(rows, torch.exp(keys_lse(record, k.shape[2]) - lse.unsqueeze(-1)), 0.0).to(compute)
        g = g * keep
    ones = g.new_ones(*g.shape[:3], 1)
    dv = dv + (group_matmul_t(ones, g, record.kv_heads) / sk).to(dv.dtype)
    if replaced:
        return torch.where(rows, 0.0, dq), dk, dv
    qc, kc = q.to(compute), k.to(compute)
    mean = vc.sum(2, keepdim=True) / sk
    centred = vc - mean
    dq_rows = group_matmul(g, centred.transpose(2, 3) @ kc) * (record.scale / sk)
    dk_rows = centred @ group_matmul_t(g, qc, record.kv_heads) * (record.scale / sk)
    if keep is not None:
        shared = group_matmul(g, mean.transpose(2, 3)) * (1 - keep) * (record.scale / sk)
        dq_rows = dq_rows + group_matmul(shared, kc.sum(2, keepdim=True))
        dk_rows = dk_rows + group_matmul_t(shared, qc, record.kv_heads)
    return torch.where(rows, dq_rows.to(dq.dtype), dq), dk + dk_rows.to(dk.dtype), dv
