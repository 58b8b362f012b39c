"""One case under the emulator, judged against float64."""
from __future__ import annotations

from typing import Any

import torch

from .cases import Case, Problem, build, reference
from .forward import Launcher, attention

TOLERANCE = {"bfloat16": 2.0**-7, "float16": 2.0**-9}


def run(c: Case, launcher: Launcher) -> tuple[torch.Tensor, torch.Tensor, Problem]:
    """(out, lse, problem) of a case."""
    launcher.sms, launcher.teams = c.sms, c.teams
    p = build(c)
    out, lse = attention(p.q, p.k, p.v, p.record, p.captures, p.ints, launcher=launcher)
    return out, lse, p


def verdict(c: Case, p: Problem, out: torch.Tensor, lse: torch.Tensor) -> tuple[str, dict[str, Any]]:
    """What is wrong with a result ("" when nothing is), and its errors.

    P is rounded to 16 bits before the second product and the result after it, so an element may be off by a few
    roundings of the largest value that it was summed from; lse is a float32 sum.
    """
    want, want_lse = reference(c, p)
    bad, odd = ~torch.isfinite(want), ~torch.isfinite(out)
    e = (out.double() - want).abs().masked_fill(bad | odd, 0.0)
    size = float(p.v.double().nan_to_num(0.0).abs().max())
    limit = TOLERANCE[c.dtype] * size
    empty = ~torch.isfinite(want_lse)
    if p.seen is not None and p.sink is None:
        # The lse of a row without keys belongs to no sum; the kernel is free to call it -inf whatever the fill is.
        hidden = ~p.seen.any(-1).expand(want_lse.shape)
        empty = empty | hidden & (torch.isnan(lse) | (lse == -torch.inf))
    scores = float((p.q.double().abs().amax() * p.k.double().nan_to_num(0.0).abs().amax()) * abs(p.record.scale) * p.q.shape[-1])
    e_lse = (lse.double() - want_lse).abs().masked_fill(empty, 0.0)
    errors = {"max_error": float(e.max()), "limit": limit, "lse_error": float(e_lse.nan_to_num(9e9).max())}
    if not torch.equal(bad, odd):
        return f"non-finite values differ at {(bad != odd).nonzero()[0].tolist()} (b, h, q, d)", errors
    if (torch.isnan(want_lse) & torch.isfinite(lse)).any():
        at = (torch.isnan(want_lse) & torch.isfinite(lse)).nonzero()[0]
        return f"lse is a number where it should be NaN, at {at.tolist()} (b, h, q)", errors
    if errors["max_error"] > limit:
        at = torch.unravel_index(e.argmax(), e.shape)
        return (f"out is off by {errors['max_error']:.3g} at {[int(i) for i in at]} (b, h, q, d), {int((e > limit).sum())} of "
                f"{e.numel()} elements are off by more than {limit:.2g}"), errors
    if errors["lse_error"] > 1e-5 + 2e-6 * scores:
        return f"lse is off by {errors['lse_error']:.3g} at {[int(i) for i in (e_lse.nan_to_num(9e9) > 1e-5).nonzero()[0]]} (b, h, q)", errors
    return "", errors
