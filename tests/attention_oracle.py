"""An independent, straightforward float64 attention for tests: eager torch with autograd, no code of the package."""
from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def oracle(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, score: Callable[[Tensor], Tensor] = lambda s: s,
    mask: Tensor | None = None, fill: float = -math.inf, empty: str = "nan", sink: Tensor | None = None,
    replace: bool = False,
) -> Tensor:
    """softmax(score(scale q k^T)) v as a user writes it, in the dtype of its inputs; K and V heads are repeated."""
    g = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
    s = score(torch.einsum("bhqd,bhkd->bhqk", q, k) * scale)
    if mask is not None:
        mask = mask.expand(s.shape)
        s = s.masked_fill(~mask, fill) if replace or empty == "zero" else s + torch.zeros_like(s).masked_fill(~mask, fill)
    if sink is not None:
        s = torch.cat([s, sink.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    p = s.softmax(-1)
    if sink is not None:
        p = p[..., :-1]
    if mask is not None and empty == "zero":
        p = torch.where(mask.any(-1, keepdim=True), p, 0.0)
    return torch.einsum("bhqk,bhkd->bhqd", p, v)


def indices(b: int, h: int, sq: int, sk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Index tensors b, h, q, k of a score matrix."""
    return (
        torch.arange(b).view(b, 1, 1, 1), torch.arange(h).view(1, h, 1, 1), torch.arange(sq).view(1, 1, sq, 1),
        torch.arange(sk).view(1, 1, 1, sk),
    )
