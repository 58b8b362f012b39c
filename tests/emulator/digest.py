"""What is kept of a run, to be compared elsewhere: digests, samples of large outputs, raw results of small ones."""
from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .program import Program

SAMPLE = 256
"""Bytes kept of an output: the whole of it was judged against float64 where it was made, and its digest is of all."""
DIGITS = 16
"""Hexadecimal digits of a digest: differences are accidents here, never forgeries."""


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _digest(raw: bytes, digits: int = DIGITS) -> str:
    return hashlib.sha256(raw).hexdigest()[:digits]


def _indices(n: int, itemsize: int) -> torch.Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(n))[:SAMPLE // itemsize]


def of_tensor(x: torch.Tensor) -> dict[str, Any]:
    """Digest and sample of an output; NaN counts as one value."""
    x = x.detach().cpu().contiguous()
    x = torch.where(torch.isnan(x), torch.full_like(x, float("nan")), x)
    raw = x.view(torch.int16 if x.element_size() == 2 else torch.int32).flatten()
    some = raw[_indices(raw.numel(), raw.element_size())]
    return {"sha256": _digest(raw.numpy().tobytes()), "count": raw.numel(),
            "sample": _text(some.numpy().tobytes())}


def sample_of(entry: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """The sample that `of_tensor` kept."""
    raw = np.frombuffer(base64.b64decode(entry["sample"]), np.int16 if dtype.itemsize == 2 else np.int32).copy()
    return torch.from_numpy(raw).view(dtype)


def compare(entry: dict[str, Any], x: torch.Tensor) -> dict[str, Any]:
    """An output beside a kept one: equal as a whole, bit-equal elements of the sample, the largest difference."""
    mine = of_tensor(x)
    if mine["count"] != entry["count"]:
        return {"equal": False, "bit_equal": 0, "sample": 0, "max_difference": float("inf")}
    a, b = sample_of(mine, x.dtype), sample_of(entry, x.dtype)
    both = torch.isfinite(a) & torch.isfinite(b)
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    odd = int((~both & ~same).sum())
    difference = float((a.double() - b.double()).abs()[both].max()) if both.any() else 0.0
    return {"equal": mine["sha256"] == entry["sha256"], "bit_equal": int(same.sum()), "sample": len(a),
            "max_difference": float("inf") if odd else difference}


def canonical(p: Program, got: Sequence[Sequence[int]]) -> bytes:
    """Results of a program with every NaN of a float result the same."""
    raw = b""
    for kind, row in zip(p.outs, got, strict=True):
        size = {"b16": 2, "b32": 4, "b64": 8, "f32": 4, "f64": 8}[kind]
        x = np.array(row, f"u{size}")
        if kind[0] == "f":
            v = x.view(f"f{size}")
            x = np.where(np.isnan(v), np.array(np.nan, v.dtype), v).view(x.dtype)
        raw += x.tobytes()
    return raw


def definition(p: Program) -> str:
    """Digest of what a program is: a result belongs to the text and the inputs that it came from."""
    return _digest(repr((p.text(), p.ins, [sorted(m.items()) for m in p.maps], p.buffer)).encode(), 8)


def of_program(p: Program, got: Sequence[Sequence[int]], buffer: Sequence[int]) -> dict[str, Any]:
    """What is kept of a program's run: the digest, and the results themselves where the ISA leaves a choice."""
    raw = canonical(p, got) + (bytes(buffer) if p.want_buffer else b"")
    kept: dict[str, Any] = {"of": definition(p), "sha256": _digest(raw)}
    if p.close is not None:
        kept["raw"] = _text(canonical(p, got))
    return kept


def raw_of(p: Program, entry: dict[str, Any]) -> list[tuple[int, ...]]:
    return p.split(base64.b64decode(entry["raw"]))
