"""Small changes of q, k and v that make them fit an operator and change nothing in the result."""
from __future__ import annotations

import torch
from torch import Tensor

from fa_inductor.ops import layout


def repeat_heads(x: Tensor, group: int) -> Tensor:
    """[B, Hkv, S, D] to [B, Hkv * group, S, D]; no copy for one key head."""
    if group == 1:
        return x
    b, h, s, d = x.shape
    x = x.unsqueeze(2).expand(b, h, group, s, d)
    return x.squeeze(1) if h == 1 else x.reshape(b, h * group, s, d)


def sum_heads(x: Tensor, heads: int) -> Tensor:
    """[B, heads * group, S, D] summed over each group, in float32 (float64 for float64)."""
    b, h, s, d = x.shape
    if h == heads:
        return x
    return x.reshape(b, heads, h // heads, s, d).sum(2, dtype=layout.compute_dtype(x.dtype))


def unit_stride(x: Tensor) -> Tensor:
    """``x`` with stride 1 in the head dimension; a copy only if it has not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def pad_last(x: Tensor, width: int) -> Tensor:
    """Zeros appended to the head dimension; they change neither scores nor the wanted columns of the output."""
    return x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1]))


def positive_scale(scale: float) -> tuple[float, float]:
    """(f, s) with s > 0 and ``scale * q == s * (f * q)``.

    A kernel that takes the row maximum before it scales overflows for a negative scale and gives NaN for zero.
    """
    if scale == 0.0:
        return 0.0, 1.0
    return (1.0, scale) if scale > 0 else (-1.0, -scale)
