"""What is right for a case: float64 for the truth, plain eager code for how much error a user has anyway.

The numerics contract: with e the error against float64, max e <= 2 x and mean e <= 1.1 x that of eager code in the same
dtype, plus a floor of one rounding of the result, and where scores are so large that their own rounding to float32 shows
in the weights, of that, up to one rounding of the weights; NaN and Inf exactly where the oracle has them; lse within 1e-5 of
itself and 2e-6 of the largest score that the row could have.  Where eager code in 16 bits overflows (its sum of a score and
the dtype's lowest number) and the truth is finite, eager is what float32 scores and 16-bit weights give.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from forward_case import NEG_INF, Case, inputs, visible

from fa_inductor.kernels import api
from fa_inductor.kernels.expr import MARGIN
from fa_inductor.kernels.record import Attention

Run = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""A function of (case, q, k, v, record, captures, ints) that gives out and lse."""


def scores(
    c: Case, q: torch.Tensor, k: torch.Tensor, record: Attention, captures: Any, kind: torch.dtype, seen: torch.Tensor | None
) -> torch.Tensor:
    """Masked scores ``[B, Hq, Sq, Sk]`` computed in `kind`; q and k have as many heads."""
    s = q @ k.transpose(-1, -2) * record.scale
    i = record.bias()
    if i is not None:
        s = s + captures[i].to(kind)
    qs, ks = torch.arange(c.rows, device=q.device)[:, None], torch.arange(c.keys, device=q.device)[None, :]
    if c.score == "softcap":
        s = torch.tanh(s / 20.0) * 20.0
    elif c.score == "alibi":
        slope = 2.0 ** (-8.0 * torch.arange(1, record.q_heads + 1, device=q.device) / record.q_heads)
        s = s + (slope[:, None, None] * (ks - qs)).to(kind)
    elif c.score == "relative":
        table = captures[next(iter(record.score.relative()))][:, :, 0, MARGIN:]
        s = s + table[:, :, (ks - qs) + (c.rows - 1)].to(kind)
    elif c.score == "distance":
        s = s * torch.where((ks - qs) % 2 == 0, 0.5, 1.0).to(kind)
        s = s + (((qs - ks) // 16).clamp_max(3) * -0.25).to(kind)
    if seen is not None:
        fill = max(record.fill, torch.finfo(kind).min) if record.fill != NEG_INF else NEG_INF
        s = s.masked_fill(~seen, fill)
    return s


def oracle(
    c: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, record: Attention, captures: Any, kind: torch.dtype,
    late: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Eager attention computed in `kind`: float64 for the truth, the case's dtype for what a user's code gives.

    late: round unnormalised weights to this dtype and divide at the end, as the kernel does; see `stand_in`.
    """
    q, k, v = q.to(kind), k.to(kind).repeat_interleave(record.group, 1), v.to(kind).repeat_interleave(record.group, 1)
    seen = visible(c, record, captures, q.device)
    if c.nan_slots:  # the contract: what lies in padded slots does not reach the output
        k, v = k.nan_to_num(0.0), v.nan_to_num(0.0)
    s = scores(c, q, k, record, captures, kind, seen)
    work = torch.float64 if kind == torch.float64 else torch.float32
    columns = s
    if record.sink is not None:
        columns = torch.cat([s, captures[record.sink].to(kind)[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    lse = torch.logsumexp(columns.to(work), -1)
    if late is None:
        out = torch.softmax(columns.to(work), -1).to(kind)[..., : c.keys] @ v
    else:
        p = (columns - columns.amax(-1, keepdim=True)).exp()
        out = p[..., : c.keys].to(late).to(kind) @ v / p.sum(-1, keepdim=True)
    if seen is not None and record.sink is None:
        lse = lse.masked_fill(~seen.any(-1), NEG_INF)
        if record.empty_rows == "zero":
            out = out.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return out, lse


def stand_in(
    c: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, record: Attention, captures: Any, ints: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a sound kernel gives, without one: float32 scores, weights rounded to 16 bits, division last.

    For checks of the cases themselves on a CPU.
    """
    out, lse = oracle(c, q, k, v, record, captures, torch.float32, q.dtype)
    out = out.to(q.dtype)
    return (out.transpose(1, 2).contiguous().transpose(1, 2) if c.layout == "bshd" else out.contiguous()), lse


def kernel(
    c: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, record: Attention, captures: Any, ints: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return api.attention(q, k, v, record, captures, ints)


def judge(c: Case, device: str = "cuda", run: Run | None = None) -> dict[str, Any]:
    """Run one case; a dict with `ok`, errors and ratios.

    run: what is judged: the kernel on a GPU and `stand_in` on a CPU unless given.
    """
    run = run or (stand_in if device == "cpu" else kernel)
    q, k, v, record, captures, ints = inputs(c, device)
    dtype = q.dtype
    out, lse = run(c, q, k, v, record, captures, ints)
    if out.shape != (*q.shape[:3], v.shape[3]) or lse.shape != q.shape[:3]:
        return {"ok": False, "why": f"shapes {tuple(out.shape)} {tuple(lse.shape)}"}
    if not (out.transpose(1, 2) if c.layout == "bshd" else out).is_contiguous():
        return {"ok": False, "why": f"layout {out.stride()}"}
    again, _ = run(c, q, k, v, record, captures, ints)
    if not torch.equal(out.view(torch.int16), again.view(torch.int16)):
        return {"ok": False, "why": "two runs differ"}
    true, true_lse = oracle(c, q, k, v, record, captures, torch.float64)
    eager, _ = oracle(c, q, k, v, record, captures, dtype)
    bad = ~torch.isfinite(true)
    lost = ~torch.isfinite(eager) & ~bad
    if lost.any():
        eager = torch.where(lost, oracle(c, q, k, v, record, captures, torch.float32, dtype)[0].to(dtype), eager)
    if not torch.equal(bad, ~torch.isfinite(out)):
        where = (bad != ~torch.isfinite(out)).nonzero()
        return {"ok": False, "why": f"non-finite values differ at {len(where)} places, first {where[0].tolist()}"}
    e = (out.double() - true).masked_fill_(bad, 0.0).abs_()
    e0 = (eager.double() - true).masked_fill_(bad, 0.0).nan_to_num_(0.0, 0.0, 0.0).abs_()
    size = true.masked_fill(bad, 0.0).abs()
    eps = torch.finfo(dtype).eps
    e_max, e_mean, e0_max, e0_mean = (float(x) for x in (e.max(), e.mean(), e0.max(), e0.mean()))
    got = lse.double()
    empty = ~torch.isfinite(true_lse)
    # No score of a row is larger than this (Cauchy-Schwarz), nor are the partial sums that float32 rounds much larger.
    largest = abs(record.scale) * (q.double().norm(dim=-1) * float(k.double().nan_to_num(0.0).norm(dim=-1).max()))
    exponent = min(0.5 * eps, 2.0**-23 * float(largest.max()))
    floor_max, floor_mean = (0.5 * eps + exponent) * float(size.max()), (0.05 * eps + exponent) * float(size.mean())
    size_lse = true_lse.masked_fill(empty, 0.0).abs().clamp_min(1.0)
    off = (got - true_lse).masked_fill(empty, 0.0).abs()
    e_lse = off / size_lse
    lse_ok = bool(((got == NEG_INF) | torch.isnan(got))[empty].all()) and bool((off <= 1e-5 * size_lse + 2e-6 * largest).all())
    ok_max, ok_mean = e_max <= 2 * e0_max + floor_max, e_mean <= 1.1 * e0_mean + floor_mean
    why = "; ".join(w for w, bad_ in (
        (f"max error {e_max:.3e}, eager {e0_max:.3e}", not ok_max),
        (f"mean error {e_mean:.3e}, eager {e0_mean:.3e}", not ok_mean),
        (f"lse error {float(e_lse.max()):.3e}", not lse_ok)) if bad_)
    return {
        "ok": not why, "why": why, "max": e_max, "mean": e_mean, "eager_max": e0_max, "eager_mean": e0_mean,
        "ratio_max": e_max / (e0_max + floor_max + 1e-300), "ratio_mean": e_mean / (e0_mean + floor_mean + 1e-300),
        "lse": float(e_lse.max()),
    }
