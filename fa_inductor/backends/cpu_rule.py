"""When PyTorch SDPA beats Inductor's own lowering of eager attention on a CPU: the one place that says so.

Measured by ``tests/bench_cpu_rule.py``; the figures are in ``tests/results/cpu_sdpa_rule.json`` (one thread, 8 heads,
head dims 32 to 128, float32 and bfloat16).  Speed-ups over the compiled eager chain in inference, S = Sq = Sk:

    no mask, causal (GQA too)   0.5 to 1.3 up to S = 64, 1.0 to 1.9 at 128, 1.0 to 8 at 256, 1.1 to 11 from 512 on
    key padding                 0.5 to 0.9 up to S = 64, 0.8 to 1.2 at 128 and 256, 1.9 to 2.8 from 512 on
    bias                        0.4 to 1.2 up to S = 512, 1.2 at 1024 (other masks that become a tensor: as a bias)

In training the operator loses: float32 gradients come from the reference (0.4 to 0.7), half ones from the fused
backward in float32 (0.3 to 1.0; causal at 1024 alone 2.1), because the fused backward in the input dtype is outside
the numerics contract.
"""
from __future__ import annotations

from fa_inductor.kernels.expr import SCORE
from fa_inductor.kernels.record import Attention, Band, KeyPadding

from .sdpa import sdpa_supports

CAUSAL_SCORES, PADDING_SCORES, TENSOR_SCORES = 256 * 256, 512 * 512, 1024 * 1024
"""Scores of one head (Sq * Sk) from which the operator pays."""


def sdpa_pays(record: Attention, batch: int, sq: int, sk: int, training: bool) -> bool | None:
    """Whether the operator with SDPA is faster than leaving the block to Inductor; None when SDPA cannot run it.

    Args:
        record: any record.
        batch: B.  Batch and head counts do not move the crossing: both sides work head by head.
        sq, sk: lengths of queries and keys.
        training: whether a backward follows.
    """
    if sdpa_supports(record, "cpu") is not None:
        return None
    if training:
        return False
    rest = [a for a in record.mask if a != Band(None, 0)]
    if record.score != SCORE or any(not isinstance(a, KeyPadding) for a in rest):
        least = TENSOR_SCORES
    else:
        least = PADDING_SCORES if rest else CAUSAL_SCORES
    return sq * sk >= least
