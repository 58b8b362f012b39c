"""Attention kernels: which records run where, and how to call them.

Importing this module imports torch but not the DSL; the DSL is loaded when a variant is first compiled.
"""
from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from importlib import metadata
from typing import Any

import torch

from .expr import SCORE
from .record import Attention, Band, Dense, Documents, KeyPadding, SInt, Sym
from .sm90.variant import Capture, Forward, padded

DSL = "nvidia-cutlass-dsl"
DSL_VERSIONS = ((4, 8), (5, 0))
"""First version that is known to work, and the first that is not."""

_FAR = 1 << 30
"""Band offsets are clamped to this: beyond every key, and q + offset still fits 32 bits."""
_L2_BYTES = 32 << 20
"""K and V that a section of heads may keep in the L2 cache (50 MB on H200, shared with Q and O)."""
_FLOATS = ("bfloat16", "float16", "float32")


def _version(text: str) -> tuple[int, int]:
    major, minor, *_ = text.split(".")
    return int(major), int(minor)


@lru_cache(maxsize=1)
def available() -> str | None:
    """None where the kernels can be compiled, else a sentence that says what is missing."""
    try:
        found = metadata.version(DSL)
        metadata.version("apache-tvm-ffi")
    except metadata.PackageNotFoundError as e:
        return f"{e.name or DSL} is not installed"
    low, high = DSL_VERSIONS
    try:
        known = low <= _version(found) < high
    except ValueError:
        known = False
    return None if known else f"{DSL} {found} is not known to work (need >={low[0]}.{low[1]},<{high[0]}.{high[1]})"


@lru_cache(maxsize=4096)
def supports(record: Attention, arch: str) -> str | None:
    """None when the kernels of `arch` (``sm_90``) run this record, else a sentence why not.

    Covers what the record alone decides; `attention` raises ValueError for tensors that do not match it.
    """
    if arch not in ("sm_90", "sm_90a"):
        return f"no kernels for {arch}"
    if record.dtype not in ("bfloat16", "float16"):
        return f"dtype {record.dtype}; the kernels take bfloat16 and float16"
    for dim in (record.head_dim, record.head_dim_v):
        if dim % 8 or not 8 <= dim <= 256:
            return f"head dim {dim}; the kernels take multiples of 8 up to 256"
    if padded(record.head_dim) < padded(record.head_dim_v) and record.head_dim_v > 128:
        return f"head dims {record.head_dim} and {record.head_dim_v}; V may be wider than K only up to 128"
    if record.scale != record.scale or record.scale in (float("inf"), float("-inf")):
        return f"scale {record.scale} is not finite"
    if record.score != SCORE and record.bias() is None:
        return f"score program {record.score}"
    once: list[type] = []
    for atom in record.mask:
        if not isinstance(atom, Band | KeyPadding | Dense | Documents):
            return f"mask atom {type(atom).__name__}"
        if not isinstance(atom, Band):
            if type(atom) in once:
                return f"more than one {type(atom).__name__} atom"
            once.append(type(atom))
    return None


def variant_of(record: Attention, captures: Sequence[torch.Tensor] = ()) -> Forward:
    """The specialisation that runs `record`; captures give dtypes and strides of bias and sink."""
    bands = [a for a in record.mask if isinstance(a, Band)]
    kinds = {type(a) for a in record.mask}
    i = record.bias()
    empty = record.empty_rows
    if empty == "never" or record.sink is not None:
        empty = "nan"  # no such row (a sink gives every row weight): the code without a special case
    return Forward(
        dtype=record.dtype,  # type: ignore[arg-type]
        dim=padded(record.head_dim),
        dim_v=padded(record.head_dim_v),
        band_lo=any(a.lo is not None for a in bands),
        band_hi=any(a.hi is not None for a in bands),
        padding=KeyPadding in kinds,
        documents=Documents in kinds,
        dense=Dense in kinds,
        bias=None if i is None else Capture(_name(captures[i])),
        sink=None if record.sink is None else _name(captures[record.sink]),
        positive_scale=record.scale > 0,
        empty=empty,
    )


def _name(x: torch.Tensor) -> str:
    name = str(x.dtype).removeprefix("torch.")
    if name not in _FLOATS:
        raise ValueError(f"capture of dtype {x.dtype}; bias and sink must be one of {_FLOATS}")
    return name


_compiled: dict[Forward, Any] = {}
_compile_lock = threading.Lock()


def compile_variant(variant: Forward, arch: str = "sm_90") -> Any:
    """Compile for `arch`, on any machine.  Thread-safe; not cached (see `attention`).

    Raises:
        ValueError: no kernels for this arch.
    """
    if arch not in ("sm_90", "sm_90a"):
        raise ValueError(f"no kernels for {arch}")
    from .sm90.compile import compile_forward

    return compile_forward(variant)


def _kernel(variant: Forward) -> Any:
    fn = _compiled.get(variant)
    if fn is None:
        with _compile_lock:
            fn = _compiled.get(variant)
            if fn is None:
                fn = _compiled[variant] = compile_variant(variant)
    return fn


def variants() -> list[Forward]:
    """Specialisations that are cross-compiled in CI: every tile, every feature, both dtypes."""
    found = [Forward("bfloat16", d, dv, empty="nan") for d, dv in
             ((32, 32), (64, 64), (96, 96), (128, 128), (160, 160), (192, 128), (192, 192), (224, 224), (256, 256))]
    for d, dv in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)):
        found += [
            Forward("bfloat16", d, dv, band_hi=True, empty="nan"),
            Forward("float16", d, dv, band_lo=True, band_hi=True, empty="zero"),
            Forward("bfloat16", d, dv, band_hi=True, padding=True, empty="mean"),
        ]
    found += [
        Forward("bfloat16", 128, 128, positive_scale=False, empty="nan"),
        Forward("bfloat16", 128, 128, bias=Capture("bfloat16"), empty="nan"),
        Forward("bfloat16", 64, 64, bias=Capture("float32"), padding=True, empty="mean"),
        Forward("bfloat16", 128, 128, dense=True, empty="zero"),
        Forward("bfloat16", 128, 128, documents=True, band_hi=True, empty="zero"),
        Forward("bfloat16", 64, 64, band_hi=True, band_lo=True, sink="bfloat16", empty="nan"),
    ]
    return found


def _ready(x: torch.Tensor) -> torch.Tensor:
    """x as the copy engine can read it: last dim contiguous, pointer and strides multiples of 16 bytes."""
    s0, s1, s2, s3 = x.stride()
    if s3 == 1 and not ((s0 | s1 | s2) & 7) and not x.data_ptr() & 15:
        return x
    if s3 == 1 and not x.data_ptr() & 15:
        # The stride of a dim of size 1 means nothing, and torch leaves anything in it.
        stride = [0 if n == 1 else s for n, s in zip(x.shape[:3], (s0, s1, s2), strict=True)]
        if not (stride[0] | stride[1] | stride[2]) & 7:
            return x.as_strided(x.shape, (*stride, 1))
    return x.clone(memory_format=torch.contiguous_format)


def _int(x: SInt, ints: Sequence[int]) -> int:
    value = ints[x.i] if isinstance(x, Sym) else x
    return max(-_FAR, min(_FAR, int(value)))


@lru_cache(maxsize=64)
def _sm_count(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    record: Attention,
    captures: Sequence[torch.Tensor] = (),
    ints: Sequence[int] = (),
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention forward on the GPU of `q`, on torch's current stream of that device.

    q ``[B, Hq, Sq, D]``, k ``[B, Hkv, Sk, D]``, v ``[B, Hkv, Sk, Dv]``, bfloat16 or float16, any strides (copied when
    the last dim is not contiguous or not 16-byte aligned); captures and ints as the record says.  Returns out
    ``[B, Hq, Sq, Dv]`` in the record's memory layout (or in `out`) and lse ``[B, Hq, Sq]`` float32, natural log.

    With a `KeyPadding` mask, NaN or Inf in padded slots of K and V does not reach the output.  Under the other masks
    the same holds for K, and for V in tiles of keys that no row of a query tile can see.

    Raises:
        ValueError: the record is not supported, or a tensor does not fit it.
        whatever the DSL raises when the first call of a variant compiles it.
    """
    why = supports(record, "sm_90")
    if why is not None:
        raise ValueError(f"not supported on sm_90: {why}")
    batch, heads, rows, dim = q.shape
    _, kv_heads, keys, dim_v = v.shape
    dtype = q.dtype
    if (heads, kv_heads, dim, dim_v) != (record.q_heads, record.kv_heads, record.head_dim, record.head_dim_v):
        raise ValueError(f"q {tuple(q.shape)}, v {tuple(v.shape)} are not of a record {record.describe()}")
    if k.shape[:3] != v.shape[:3] or k.shape[0] != batch or k.shape[3] != dim:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not match")
    if str(dtype) != f"torch.{record.dtype}" or k.dtype != dtype or v.dtype != dtype:
        raise ValueError(f"q, k, v are {dtype}, {k.dtype}, {v.dtype}; the record says {record.dtype}")
    device = q.device
    if device.type != "cuda" or k.device != device or v.device != device:
        raise ValueError(f"q, k, v must be on one CUDA device, not {device}, {k.device}, {v.device}")
    if out is None:
        if record.layout == "bshd":
            out = torch.empty((batch, rows, heads, dim_v), dtype=dtype, device=device).transpose(1, 2)
        else:
            out = torch.empty((batch, heads, rows, dim_v), dtype=dtype, device=device)
    elif out.shape != (batch, heads, rows, dim_v) or out.dtype != dtype or out.device != device:
        raise ValueError(f"out is {tuple(out.shape)} {out.dtype}, not {(batch, heads, rows, dim_v)} {dtype}")
    lse = torch.empty((batch, heads, rows), dtype=torch.float32, device=device)
    if batch == 0 or rows == 0:
        return out, lse
    if keys == 0:
        return out.fill_(float("nan") if record.empty_rows in ("never", "nan", "mean") else 0.0), lse.fill_(float("-inf"))

    variant = variant_of(record, captures)
    lo, hi = -_FAR, _FAR
    pad = dense = doc_q = doc_k = bias = sink = vmean = None
    for atom in record.mask:
        if isinstance(atom, Band):
            if atom.lo is not None:
                lo = max(lo, _int(atom.lo, ints))
            if atom.hi is not None:
                hi = min(hi, _int(atom.hi, ints))
        elif isinstance(atom, KeyPadding):
            pad = captures[atom.capture].view(torch.uint8).expand(batch, keys)
        elif isinstance(atom, Dense):
            dense = captures[atom.capture].view(torch.uint8).expand(batch, heads, rows, keys)
        elif isinstance(atom, Documents):
            doc_q = captures[atom.q].to(torch.int32).expand(batch, rows)
            doc_k = captures[atom.k].to(torch.int32).expand(batch, keys)
    i = record.bias()
    if i is not None:
        bias = captures[i].expand(batch, heads, rows, keys)
    if record.sink is not None:
        sink = captures[record.sink]
    if variant.empty == "mean":
        vmean = v.mean(2, dtype=torch.float32)

    tile = variant.tile
    blocks = -(-rows // tile.rows) * heads * batch
    if blocks >= 1 << 31:
        raise ValueError(f"{blocks} tiles of queries are more than a grid can have")
    if persistent(variant):
        blocks = min(blocks, _sm_count(device.index))
    section = min(max(1, _L2_BYTES // (2 * keys * (dim + dim_v))) * record.group, heads * batch)
    q, k, v = _ready(q), _ready(k), _ready(v)
    target = _ready(out)
    args = (q, k, v, target, lse, pad, bias, dense, doc_q, doc_k, sink, vmean, record.scale, record.fill, lo, hi,
            section, blocks)
    if device.index == torch.cuda.current_device():
        _kernel(variant)(*args)
    else:
        with torch.cuda.device(device):
            _kernel(variant)(*args)
    if target is not out and target.data_ptr() != out.data_ptr():
        out.copy_(target)
    return out, lse


def persistent(variant: Forward) -> bool:
    """Whether a block works through several tiles."""
    return False
