"""Memory order of everything the operators return: the one place that says it.

The fakes allocate with these functions and so do the implementations, so that what the compiler planned with is
what it gets.  Logical shapes never change with the layout.

    out                   [B, Hq, Sq, Dv]; ``bshd``: a contiguous [B, Sq, Hq, Dv] with heads and rows swapped,
                          ``bhsd``: contiguous
    lse                   [B, Hq, Sq] contiguous
    dq, dk, dv            [B, H, S, D]; always a contiguous [B, S, H, D] with heads and rows swapped, which is what
                          the projection in front of the attention wants
    gradient of a capture contiguous, in the capture's shape and dtype
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fa_inductor.kernels.record import Attention

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of scores, softmax and lse: float32, or float64 when the inputs are float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_bshd(like: Tensor, b: int, h: int, s: int, d: int, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised [B, H, S, D] in the memory order B, S, H, D."""
    return like.new_empty((b, s, h, d), dtype=dtype or like.dtype).transpose(1, 2)


def empty_out(record: Attention, q: Tensor, v: Tensor) -> Tensor:
    """Uninitialised output for q [B, Hq, Sq, D] and v [B, Hkv, Sk, Dv]."""
    b, h, s, _ = q.shape
    dtype = DTYPES[record.dtype]
    if record.layout == "bshd":
        return empty_bshd(q, b, h, s, v.shape[3], dtype)
    return q.new_empty((b, h, s, v.shape[3]), dtype=dtype)


def out_stride(record: Attention, b: int, h: int, s: int, d: int) -> tuple[int, int, int, int]:
    """Strides of `empty_out` where nothing is empty."""
    return (h * s * d, d, h * d, 1) if record.layout == "bshd" else (h * s * d, s * d, d, 1)


def empty_lse(q: Tensor) -> Tensor:
    """Uninitialised log-sum-exp [B, Hq, Sq]."""
    return q.new_empty(q.shape[:3], dtype=compute_dtype(q.dtype))


def empty_grads(
    record: Attention, q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Uninitialised (dq, dk, dv, dcaptures)."""
    dq, dk, dv = (empty_bshd(x, x.shape[0], x.shape[1], x.shape[2], x.shape[3]) for x in (q, k, v))
    return dq, dk, dv, [captures[i].new_empty(captures[i].shape) for i in record.grads]


def match(result: Tensor, template: Tensor) -> Tensor:
    """``result`` itself if it has the strides and dtype of ``template``, else a copy that has."""
    if result.stride() == template.stride() and result.dtype == template.dtype:
        return result
    return template.copy_(result)
