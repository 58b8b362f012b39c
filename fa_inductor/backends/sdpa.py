"""A record by PyTorch's own fused attention operators."""
from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from fa_inductor.kernels.record import Attention
from fa_inductor.reasons import Code, Reason

from . import absorbed, empty_rows, reference
from .additive import additive_part, grads_of_bias

CPU_BLOCK_BYTES = 1 << 22
"""Score temporaries of the reference backward on a CPU stay in its caches."""


@lru_cache(maxsize=4096)
def sdpa_supports(record: Attention, device_type: str) -> Reason | None:
    """Why ``record`` cannot run on the fused operators of ``device_type``, forward and backward; None when it can."""
    if device_type not in ("cpu", "cuda"):
        return Reason(Code.DEVICE, f"no fused attention with a log-sum-exp on {device_type!r}")
    if additive_part(record.score) is None:
        return Reason(Code.FEATURE, f"score program {record.score}")
    if device_type == "cuda":
        from . import aten_cuda

        return aten_cuda.supports(record)
    if grads_of_bias(record):
        return Reason(Code.GRAD_CAPTURE, "the CPU operator gives no gradient of its mask")
    if not empty_rows.has_closed_form(record):
        return Reason(Code.EMPTY_ROWS)
    return None


def forward(
    record: Attention, q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor] = (), ints: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """out and lse as `reference.forward` gives them, for a record that `sdpa_supports`."""
    if q.is_cuda:
        from . import aten_cuda

        return aten_cuda.forward(record, q, k, v, captures, ints)
    from . import aten_cpu

    return aten_cpu.forward(record, q, k, v, captures, ints)


def backward(
    record: Attention, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    captures: Sequence[Tensor] = (), ints: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients as `reference.backward` gives them, for a record that `sdpa_supports`."""
    if q.dtype in (torch.float32, torch.float64):
        # exp(s - lse) carries the rounding of a large lse: outside the numerics contract in these dtypes
        return reference.backward(record, dout, q, k, v, captures, ints, None if q.is_cuda else CPU_BLOCK_BYTES)
    if q.is_cuda:
        from . import torch_backward

        return torch_backward.backward(record, dout, q, k, v, out, lse, captures, ints)
    if absorbed.possible(record) and bool(absorbed.is_large(lse).any()):
        return reference.backward(record, dout, q, k, v, captures, ints, CPU_BLOCK_BYTES)
    from . import aten_cpu

    return aten_cpu.backward(record, dout, q, k, v, out, lse, captures, ints)
