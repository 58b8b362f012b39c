"""What PyTorch's CUDA attention operators require and compute, on CPU tensors, for tests without a GPU.

Strict: a call that the real kernels would refuse, or that they are known to answer wrongly, raises here.
"""
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def _need(ok: bool, what: str) -> None:
    if not ok:
        raise AssertionError(f"the CUDA operator would refuse this: {what}")


def _layout(*tensors: Tensor) -> None:
    for t in tensors:
        _need(t.dim() == 4 and t.stride(-1) == 1, f"last stride {t.stride()}")
        _need(all(s % 8 == 0 for s in t.stride()[:-1]) and t.data_ptr() % 16 == 0, f"alignment {t.stride()}")
        _need(t.shape[-1] % 8 == 0, f"head dim {t.shape[-1]}")


def _heads(q: Tensor, k: Tensor) -> Tensor:
    """[B, S, Hkv, D] as [B, Hq, S, D] in float32."""
    return k.transpose(1, 2).float().repeat_interleave(q.shape[2] // k.shape[2], 1)


def _scores(q: Tensor, k: Tensor, scale: float, allowed: Tensor, bias: Tensor | None = None) -> Tensor:
    _need(scale > 0, f"scale {scale}: maximum before scaling")
    highest = torch.finfo(torch.float32).max * math.log(2)
    _need(bias is None or not ((bias.abs() > highest) & bias.isfinite()).any(), "a bias that overflows in units of base 2")
    s = q.transpose(1, 2).float() @ _heads(q, k).transpose(2, 3) * scale
    return (s if bias is None else s + bias.float()).masked_fill(~allowed, -math.inf)


def _window(sq: int, sk: int, left: int, right: int) -> Tensor:
    distance = torch.arange(sk)[None] - torch.arange(sq)[:, None] - (sk - sq)
    ok = torch.ones(sq, sk, dtype=torch.bool)
    left, right = (-1 if side >= sk else side for side in (left, right))  # as the flash kernels do
    if left >= 0:
        ok &= distance >= -left
    if right >= 0:
        ok &= distance <= right
    return ok


def _forward(s: Tensor, v: Tensor, empty: float) -> tuple[Tensor, Tensor]:
    lse = s.logsumexp(-1)
    none = lse == -math.inf
    out = torch.where(none[..., None], empty, s.softmax(-1) @ v)
    return out, torch.where(none, math.inf, lse)


def _backward(s: Tensor, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor, scale: float) -> Any:
    """(dq, dk, dv, ds), all [B, Hq, ...] in float32, from the given out and lse."""
    p = torch.exp(s - lse[..., None])
    do = dout.transpose(1, 2).float()
    delta = (do * out.transpose(1, 2).float()).sum(-1, keepdim=True)
    ds = p * (do @ v.transpose(2, 3) - delta)
    return ds @ k * scale, ds.transpose(2, 3) @ q.transpose(1, 2).float() * scale, p.transpose(2, 3) @ do, ds


def flash_forward(
    q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale, window_size_left, window_size_right
):
    _need(q.dtype in (torch.bfloat16, torch.float16), "dtype")
    _need(q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256 and q.shape[2] % k.shape[2] == 0, "shapes")
    _need(max_q == q.shape[1] and max_k == k.shape[1] and dropout == 0.0, "lengths")
    _layout(q, k, v)
    ok = _window(max_q, max_k, window_size_left, 0 if causal else window_size_right)
    out, lse = _forward(_scores(q, k, scale, ok), _heads(q, v), 0.0)
    return out.transpose(1, 2).to(q.dtype), lse, None, None, None


def flash_backward(
    dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng, unused, *, scale, window_size_left,
    window_size_right,
):
    _need(q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] == v.shape[-1] <= 256, "dtype or dims")
    _need(out.shape == dout.shape == q.shape and lse.is_contiguous() and lse.dtype == torch.float32, "out, lse")
    _need(not lse.isnan().any() and not (lse == -math.inf).any(), "lse of a row without keys is +inf")
    _layout(q, k, v, dout, out)
    s = _scores(q, k, scale, _window(max_q, max_k, window_size_left, 0 if causal else window_size_right))
    dq, dk, dv, _ = _backward(s, q, _heads(q, k), _heads(q, v), dout, out, lse, scale)
    hk, g = k.shape[2], q.shape[2] // k.shape[2]
    dk, dv = (x.unflatten(1, (hk, g)).sum(2).transpose(1, 2).to(q.dtype) for x in (dk, dv))
    return dq.transpose(1, 2).to(q.dtype), dk, dv


def _efficient_scores(q, k, v, bias, mask_type, scale, window_size):
    _need(q.shape[2] == k.shape[2] == v.shape[2] and q.shape[-1] == k.shape[-1], "heads or dims")
    _need(q.dtype == k.dtype == v.dtype and q.dtype != torch.float64, "dtype")
    _layout(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    if bias is not None:
        _need(bias.dtype == q.dtype and tuple(bias.shape) == (q.shape[0], q.shape[2], sq, sk), "bias dtype or shape")
        _need(bias.stride(-1) == 1 or sk == 1, "bias last stride")
        _need(all(x % 8 == 0 for x in bias.stride()[:-1]), f"bias alignment {bias.stride()}")
    _need(mask_type in (0, 2) and (window_size is None or (window_size > 0 and mask_type != 0)), "mask type")
    _need(mask_type != 2 or sk >= sq, "bottom right diagonal above the keys")
    left = -1 if window_size is None else window_size - 1
    ok = _window(sq, sk, left, 0) if mask_type == 2 else torch.ones(sq, sk, dtype=torch.bool)
    return _scores(q, k, scale, ok, bias)


def efficient_forward(
    q, k, v, bias, cu_q, cu_k, max_q, max_k, dropout, mask_type, with_lse, *, scale, window_size=None
):
    s = _efficient_scores(q, k, v, bias, mask_type, scale, window_size)
    out, lse = _forward(s, _heads(q, v), math.nan)
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
    return out.transpose(1, 2).to(q.dtype), lse, None, None, q.shape[1], k.shape[1]


def efficient_backward(
    dout, q, k, v, bias, out, cu_q, cu_k, max_q, max_k, lse, dropout, seed, offset, mask_type, bias_grad, *, scale,
    num_splits_key=None, window_size=None,
):
    _need(max_q == q.shape[1] and max_k == k.shape[1], "lengths")
    _need(lse.shape[-1] % 32 == 0 and lse.shape[-1] >= max_q and lse.is_contiguous(), f"lse {tuple(lse.shape)}")
    _need(out.is_contiguous(), f"out is read as contiguous, its strides are {out.stride()}")
    _need(window_size is None, "the backward is wrong with a window")
    lse = lse[..., :max_q]
    _need(not lse.isnan().any() and not (lse == -math.inf).any(), "lse of a row without keys is +inf")
    _layout(dout, out)
    s = _efficient_scores(q, k, v, bias, mask_type, scale, window_size)
    dq, dk, dv, ds = _backward(s, q, _heads(q, k), _heads(q, v), dout, out, lse, scale)
    dq, dk, dv = (x.transpose(1, 2).to(q.dtype) for x in (dq, dk, dv))
    return dq, dk, dv, ds.to(q.dtype) if bias_grad else None
