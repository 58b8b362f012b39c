"""When PyTorch SDPA beats Inductor's own lowering of eager attention on a CPU: the one place that says so."""
from __future__ import annotations

from fa_inductor.kernels.record import Attention

from .sdpa import sdpa_supports


def sdpa_pays(record: Attention, batch: int, sq: int, sk: int, training: bool) -> bool | None:
    """Whether the operator with SDPA is faster than leaving the block to Inductor; None when SDPA cannot run it."""
    if sdpa_supports(record, "cpu") is not None:
        return None
    return not (training and record.dtype in ("float32", "float64"))
