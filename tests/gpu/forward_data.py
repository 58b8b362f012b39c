"""Q, K and V of a case: what numbers they hold and how they lie in memory."""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from forward_case import Case

FAR = (1 << 31) + (1 << 20)
"""Elements from one batch entry to the next in the layout "far"."""
PLAIN = ("normal", "outlier", "large", "constant")
"""Data that is drawn without regard to which operand it is."""
SHAPED = ("heavy", "equal", "k mean", "small", "subnormal", "subnormal v", "v offset", "rows", "first key")
"""Data that `shaped` makes from normal numbers, each operand in its own way."""


def shaped(x: torch.Tensor, role: str, kind: str, dtype: torch.dtype, g: torch.Generator | None) -> torch.Tensor:
    """Normal float32 ``x [B, H, S, D]`` turned into data of a kind of `SHAPED`.

    role: "q", "k" or "v".
    """
    heads, length, dim = x.shape[1:]
    # Products of two large elements stay finite in float16, so that eager code has an answer to compare with.
    most = 60.0 if dtype == torch.float16 else 100.0
    if kind == "heavy":  # one element in a thousand is 20 to `most` times as large
        size = 20.0 * (most / 20.0) ** torch.rand(x.shape, generator=g, device=x.device)
        return torch.where(torch.rand(x.shape, generator=g, device=x.device) < 1e-3, x * size, x)
    if kind == "equal" and role == "k":  # all scores of a row are equal
        return x[:, :, :1].expand(x.shape)
    if kind == "k mean" and role == "k":  # scores share a large part that softmax takes out again
        return x + 8.0 * torch.randn((1, heads, 1, dim), generator=g, device=x.device)
    if kind == "small" and role != "v":
        return x * 1e-3
    if (kind == "subnormal" and (role != "v" or dtype == torch.float16)) or (kind == "subnormal v" and role == "v"):
        return x * (0.5 * torch.finfo(dtype).tiny)
    if kind == "v offset" and role == "v":
        return x + 100.0
    if kind == "rows" and role != "v":  # rows from nearly uniform to nearly one-hot
        return x * 2.0 ** (6.0 * torch.rand((1, heads, length, 1), generator=g, device=x.device) - 4.0)
    if kind == "first key" and role != "q":  # as language models have it: the first key takes much of all weight
        x = x.clone()
        x[:, :, 0] *= 12.0 if role == "k" else 0.1
        return x
    return x


def operands(c: Case, g: torch.Generator | None, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q ``[B, Hq, Sq, D]``, k ``[B, Hkv, Sk, D]`` and v ``[B, Hkv, Sk, Dv]`` of a case, in its dtype and strides."""
    dtype = getattr(torch, c.dtype)
    hq, hk = c.heads
    d, dv = c.dims

    def draw(role: str, *shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=g, device=device, dtype=torch.float32)
        if c.data == "outlier":
            x += torch.randn(shape, generator=g, device=device) * 10 * (torch.rand(shape, generator=g, device=device) < 1e-3)
        elif c.data == "large":
            x *= 20
        elif c.data == "constant":
            x = x[..., :1, :1].expand(shape).clone()
        elif c.data in SHAPED and role == "qkv":
            parts = zip("qkv", x.transpose(1, 2).split([hq, hk, hk], 1), strict=True)
            x = torch.cat([shaped(part, r, c.data, dtype, g) for r, part in parts], 1).transpose(1, 2).contiguous()
        elif c.data in SHAPED:
            x = shaped(x, role, c.data, dtype, g)
        return x.to(dtype)

    def lay(x: torch.Tensor) -> torch.Tensor:
        if c.strides == "bshd":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if c.strides == "sbhd":
            return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
        if c.strides == "odd":
            flat = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape)
            return flat.copy_(x)
        if c.strides == "gap":
            return x.new_empty((*x.shape[:-1], x.shape[-1] + 8))[..., : x.shape[-1]].copy_(x)
        if c.strides == "step":
            return x.new_empty((*x.shape[:2], 2 * x.shape[2], x.shape[3]))[:, :, ::2].copy_(x)
        if c.strides == "dim first":
            return x.transpose(2, 3).contiguous().transpose(2, 3)
        return x.contiguous()

    if c.strides == "packed":
        qkv = draw("qkv", c.batch, c.keys, hq + 2 * hk, d).transpose(1, 2)
        return qkv[:, :hq, : c.rows], qkv[:, hq : hq + hk], qkv[:, hq + hk :]
    if c.strides == "far":
        base = torch.empty((c.batch - 1) * FAR + (1 << 24), dtype=dtype, device=device)
        parts, start = [], 0
        for role, h, n, e in (("q", hq, c.rows, d), ("k", hk, c.keys, d), ("v", hk, c.keys, dv)):
            view = base[start:].as_strided((c.batch, h, n, e), (FAR, n * e, e, 1))
            parts.append(view.copy_(draw(role, c.batch, h, n, e)))
            start += h * n * e
        return parts[0], parts[1], parts[2]
    if c.strides == "expand":
        return (draw("q", c.batch, hq, c.rows, d), draw("k", 1, 1, c.keys, d).expand(c.batch, hk, c.keys, d),
                draw("v", 1, 1, c.keys, dv).expand(c.batch, hk, c.keys, dv))
    return (lay(draw("q", c.batch, hq, c.rows, d)), lay(draw("k", c.batch, hk, c.keys, d)),
            lay(draw("v", c.batch, hk, c.keys, dv)))
