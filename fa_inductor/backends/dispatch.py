"""Which backend runs a record, and what happens when it fails.

``kernels`` where this library has kernels for the device and the record, else ``sdpa`` where PyTorch's fused
operators can compute it, else ``reference``, which can compute everything.  All of them agree on what out and lse
mean, so the backward of one may follow the forward of another.  A backend that raises is replaced by the next one,
once said why.
"""
from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fa_inductor.kernels.record import Attention
from fa_inductor.reasons import Code, Reason

from . import reference, sdpa

log = logging.getLogger(__name__)

Forward = tuple[Tensor, Tensor]
Backward = tuple[Tensor, Tensor, Tensor, list[Tensor]]
FallbackCallback = Callable[[Attention, str, Reason], None]
"""Called with the record, the backend that failed and why, once for each such triple."""

_lock = threading.Lock()
_callbacks: list[FallbackCallback] = []
_broken: set[tuple[Attention, str, str]] = set()
_said: set[tuple[Attention, str, str]] = set()


def on_fallback(callback: FallbackCallback) -> Callable[[], None]:
    """Call ``callback`` when a backend fails at run time; returns a function that ends this."""
    with _lock:
        _callbacks.append(callback)

    def remove() -> None:
        with _lock:
            if callback in _callbacks:
                _callbacks.remove(callback)

    return remove


def forget_failures() -> None:
    """Try every backend again."""
    with _lock:
        _broken.clear()
        _said.clear()


@lru_cache(maxsize=64)
def _arch_of(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return "sm_100" if major == 10 else f"sm_{major}{minor}"


def arch_of(device: torch.device) -> str | None:
    """``sm_90`` and the like for a CUDA device, None for any other."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return _arch_of(torch.cuda.current_device() if device.index is None else device.index)


def _kernels_reason(record: Attention, device_type: str, arch: str | None) -> Reason | None:
    if device_type != "cuda" or arch is None:
        return Reason(Code.DEVICE, device_type)
    try:
        from fa_inductor.kernels import api
    except ImportError as e:
        return Reason(Code.DSL_MISSING, str(e))
    why = api.available()
    if why is not None:
        return Reason(Code.DSL_MISSING, why)
    why = api.supports(record, arch)
    return None if why is None else Reason(Code.FEATURE, why)


@lru_cache(maxsize=4096)
def _choose(record: Attention, device_type: str, arch: str | None, wanted: str) -> tuple[str, Reason | None]:
    reason: Reason | None = None
    if wanted == "reference":
        return "reference", None
    if wanted in ("auto", "kernels"):
        reason = _kernels_reason(record, device_type, arch)
        if reason is None:
            return "kernels", None
    missing = sdpa.sdpa_supports(record, device_type)
    if missing is None:
        return "sdpa", reason
    return "reference", reason if device_type == "cuda" and reason is not None else missing


def choose(record: Attention, device_type: str, arch: str | None = None) -> tuple[str, Reason | None]:
    """Backend that would run ``record``: ``kernels``, ``sdpa`` or ``reference``; needs no tensor.

    Args:
        record: any record.
        device_type: ``cpu``, ``cuda`` ...
        arch: ``sm_90``, ``sm_100`` ... for CUDA.

    Returns:
        The name, and why it is not one that comes first (None when it is the first choice of ``options.backend``).
    """
    from fa_inductor.options import options

    return _choose(record, device_type, arch, options.backend)


def _failed(record: Attention, backend: str, step: str, error: Exception) -> None:
    reason = Reason(Code.JIT, f"{backend} {step}: {type(error).__name__}: {error}")
    # these say that the tensors do not fit, not that the kernel is broken
    unfit = isinstance(error, (ValueError, NotImplementedError, torch.OutOfMemoryError))
    key = (record, backend, f"{step} {type(error).__name__}" if unfit else step)
    with _lock:
        if not unfit:
            _broken.add((record, backend, step))
        first = key not in _said
        _said.add(key)
        callbacks = list(_callbacks)
    if first:
        log.warning("%s; falling back [%s]", reason, record.describe())
        for callback in callbacks:
            callback(record, backend, reason)


def _try(record: Attention, backend: str, step: str, run: Callable[[], Any]) -> Any:
    """Result of ``run``, or None when it fails or has failed before."""
    if _broken and (record, backend, step) in _broken:
        return None
    try:
        return run()
    except Exception as e:
        _failed(record, backend, step, e)
        return None


def _backend_for(record: Attention, q: Tensor, k: Tensor, v: Tensor) -> str:
    if not (q.numel() and k.numel() and v.numel()):
        return "reference"
    return choose(record, q.device.type, arch_of(q.device))[0]


def run_forward(
    record: Attention, q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor], ints: Sequence[int]
) -> Forward:
    """out and lse by the first backend that can; shapes and memory order as in `fa_inductor.ops.library`."""
    backend = _backend_for(record, q, k, v)
    if backend == "kernels":
        done = _try(record, "kernels", "forward", lambda: _kernels_forward(record, q, k, v, captures, ints))
        if done is not None:
            return done
        backend = "sdpa" if sdpa.sdpa_supports(record, q.device.type) is None else "reference"
    if backend == "sdpa":
        done = _try(record, "sdpa", "forward", lambda: sdpa.forward(record, q, k, v, captures, ints))
        if done is not None:
            return done
    return reference.forward(record, q, k, v, captures, ints)


def _kernels_forward(
    record: Attention, q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor], ints: Sequence[int]
) -> Forward:
    from fa_inductor.kernels import api
    from fa_inductor.ops import layout

    out, lse = api.attention(q, k, v, record, captures, ints)
    if out.stride() != layout.out_stride(record, *out.shape) or not lse.is_contiguous():
        return layout.match(out, layout.empty_out(record, q, v)), layout.match(lse, layout.empty_lse(q))
    return out, lse


def held(record: Attention, device: torch.device) -> Any | None:
    """What ``kernels`` hold of earlier calls of ``record`` (`kernels.launch.Memo`); None where another backend runs it."""
    if choose(record, device.type, arch_of(device))[0] != "kernels":
        return None
    from fa_inductor.kernels import api

    return api.memo_of(record)


def run_backward(
    record: Attention, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    captures: Sequence[Tensor], ints: Sequence[int],
) -> Backward:
    """Gradients by the first backend that can: PyTorch's fused backward (also of our kernels), else the reference."""
    if _backend_for(record, q, k, v) != "reference" and sdpa.sdpa_supports(record, q.device.type) is None:
        done = _try(
            record, "sdpa", "backward", lambda: sdpa.backward(record, dout, q, k, v, out, lse, captures, ints)
        )
        if done is not None:
            return done
    return reference.backward(record, dout, q, k, v, captures, ints)
