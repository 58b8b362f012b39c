"""Rows in which every score has a large number in it: their log-sum-exp says nothing of the weights.

Where a bias of -1e9 lies on all keys of a row (a mask by an added number, of a batch entry that has no token), the lse
is -1e9 + log Sk, which float32 rounds to -1e9: a backward that computes ``p = exp(s - lse)`` finds 1 for every weight
and not 1/Sk.  A constant on the whole row changes no weight, so the lse is taken of scores without it.  A number so large that
float64 does not see the scores beside it either, as the lowest one of a dtype, does change the weights: all keys that have
it weigh the same.
"""
from __future__ import annotations

import torch
from torch import Tensor

from fa_inductor.kernels.expr import SCORE
from fa_inductor.kernels.record import Attention

from .additive import grads_of_bias

LARGE = 1e4
"""Half a unit in the last place of a float32 of this size, 5e-4, is the relative error of a weight from it."""
EQUAL = 2.0**58
"""From here on an added number leaves nothing of a score in float64 (for scores below 16), let alone in float32."""
HIGHEST = 1e30
"""What a number beyond it is taken for: PyTorch's operators multiply scores by log2(e), and float32 ends at 3.4e38."""


def possible(record: Attention) -> bool:
    """Whether an added number can be that large: one that the model learns is taken not to be a mask."""
    return record.score != SCORE and not grads_of_bias(record)


def is_large(x: Tensor) -> Tensor:
    return (x.abs() > LARGE) & x.isfinite()


def narrow(x: Tensor) -> Tensor:
    """``x`` with one index of each dimension that it is expanded over."""
    for i, (n, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if stride == 0 and n > 1:
            x = x.narrow(i, 0, 1)
    return x


def bounded(bias: Tensor) -> Tensor:
    """``bias`` with finite numbers no farther from 0 than `HIGHEST`."""
    return torch.where(bias.isinf(), bias, bias.clamp(-HIGHEST, HIGHEST))


def row_shift(bias: Tensor) -> tuple[Tensor, Tensor]:
    """(largest bias of each row where that is a large number, else 0; how many keys weigh the same because of it, else 0);
    [..., 1] for a ``bias`` of [..., Sk]."""
    top = bias.amax(-1, keepdim=True)
    large = is_large(top)
    equal = large & (top.abs() >= EQUAL)
    return torch.where(large, top, 0.0), torch.where(equal, (bias == top).sum(-1, keepdim=True), 0)
