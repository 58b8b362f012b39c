"""May this record run on this target, and on which backend?  Guards return a reason or nothing, never a bare bool."""
from __future__ import annotations

from dataclasses import dataclass

import torch

from .backends.cpu_rule import sdpa_pays
from .backends.sdpa import sdpa_supports
from .kernels import api
from .kernels.expr import SCORE
from .kernels.record import Attention, Band
from .options import options
from .reasons import Code, Reason

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
KERNEL_TARGETS = ("sm_90", "sm_100")


@dataclass(frozen=True)
class Site:
    """What a guard knows about a block besides its record: the tensors' facts at compile time."""

    device: torch.device
    target: str
    """``cpu``, ``sm_90``, ``sm_100`` or another device's own name (`Options.resolved_target`)."""
    training: bool
    sizes: tuple[int, int, int]
    """B, Sq, Sk; of a symbolic size the value that it has in this compile, good for a choice of speed only."""


def tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Reason | None:
    """Facts about Q, K and V that no record can express."""
    if not (q.dtype == k.dtype == v.dtype):
        return Reason(Code.DTYPE_MIX, f"{q.dtype}, {k.dtype}, {v.dtype}")
    if q.dtype not in _DTYPES.values():
        return Reason(Code.DTYPE, str(q.dtype))
    if not (q.device == k.device == v.device):
        return Reason(Code.DEVICE, f"{q.device}, {k.device}, {v.device}")
    for t in (q, k, v):
        if t.layout != torch.strided:
            return Reason(Code.TENSOR_SUBCLASS, str(t.layout))
        if any(isinstance(s, int) and s == 0 for s in t.shape):
            return Reason(Code.SIZE, "a dimension is empty")
    return None


def choose(record: Attention, site: Site) -> tuple[str, Reason | None]:
    """Which backend will run the record, or why the graph is left alone.

    Returns:
        (name for the report, None), or ("", reason).
    """
    wanted = options.backend
    family = _kernel_family(record, site)
    if wanted == "reference":
        # an explicit target asks whether that GPU's kernels would take the block, also on a machine without it
        return _answer("reference", family if options.target in KERNEL_TARGETS else None)
    if wanted == "sdpa":
        return _answer("sdpa", sdpa_supports(record, site.device.type))
    if site.target in KERNEL_TARGETS:
        if family is None and site.device.type == "cuda":
            return _answer(f"kernels {site.target}", _backward(record, site))
        if family is None:
            family = Reason(Code.DEVICE, f"the tensors are on {site.device.type}")
    if wanted == "kernels":
        return "", family
    if site.device.type == "cpu":
        return _answer("sdpa", sdpa_supports(record, "cpu") or _pays_on_cpu(record, site))
    if site.device.type == "cuda" and record.score == SCORE and all(isinstance(a, Band) for a in record.mask):
        return _answer("sdpa", sdpa_supports(record, "cuda"))  # PyTorch's flash kernel takes it without a mask tensor
    return "", family


def wants_tensors(record: Attention, backend: str) -> bool:
    """Whether a backend does better with biases as the tensors of the user's graph: PyTorch's operators read them so, and a
    table by distance would be spread out in every block."""
    return backend == "sdpa" and bool(record.score.relative())


def _answer(name: str, reason: Reason | None) -> tuple[str, Reason | None]:
    return ("", reason) if reason is not None else (name, None)


def _kernel_family(record: Attention, site: Site) -> Reason | None:
    """Why the kernels of the target do not take the record; None when they do."""
    if site.target not in KERNEL_TARGETS:
        return Reason(Code.DEVICE, site.target)
    if site.device.type == "cuda" and (missing := api.available()) is not None:
        return Reason(Code.DSL_VERSION if "not known" in missing else Code.DSL_MISSING, missing)
    why = api.supports(record, site.target)
    if why is None:
        return None
    for word, code in (("dtype", Code.DTYPE), ("head dim", Code.HEAD_DIM), ("scale", Code.SCALE)):
        if why.startswith(word):
            return Reason(code, why)
    return Reason(Code.FEATURE, why)


def _backward(record: Attention, site: Site) -> Reason | None:
    """The backward runs on PyTorch's fused operators, fed with our out and log-sum-exp."""
    return sdpa_supports(record, "cuda") if site.training else None


def _pays_on_cpu(record: Attention, site: Site) -> Reason | None:
    b, q, k = site.sizes
    if sdpa_pays(record, b, q, k, site.training):
        return None
    return Reason(Code.SLOWER, f"B {b}, Sq {q}, Sk {k}")
