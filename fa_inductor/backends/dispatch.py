"""Which backend runs a record, and what happens when it fails."""
from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fa_inductor.kernels.record import Attention

from . import reference


def run_forward(
    record: Attention, q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor], ints: Sequence[int]
) -> tuple[Tensor, Tensor]:
    return reference.forward(record, q, k, v, captures, ints)


def run_backward(
    record: Attention, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    captures: Sequence[Tensor], ints: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    return reference.backward(record, dout, q, k, v, captures, ints)
