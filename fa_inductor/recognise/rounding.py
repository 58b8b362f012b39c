"""Numbers so large that the rounding beside them decides the answer.

A record's scores are computed in one dtype from QK^T to the softmax, without the casts that the model has in between.
That is more exact, and no other answer, unless a number beside the scores is so large that rounding to it swallows
them: a row that a finite fill masks as a whole is uniform then in eager code, and in ours it is not, or the reverse.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from ..kernels.record import Attention, Predicate
from ..reasons import Code, Refusal

SWALLOWED = 2.0**-4
"""A rounding of a score by as much is more than the rounding of a score to 16 bits."""
_FLOAT32_MAX = torch.finfo(torch.float32).max


def swallows(reach: float, dtype: torch.dtype) -> bool:
    """Whether scores are lost beside a number of size ``reach`` in a dtype."""
    return reach * torch.finfo(dtype).eps >= SWALLOWED


def check_kept(reach: float, dtype: torch.dtype, kept: torch.dtype) -> None:
    """
    Args:
        reach: how large the constants beside the scores may make them.
        dtype: what the model rounds them to.
        kept: what the record computes them in.

    Raises:
        Refusal: that rounding must not be left out.
    """
    if torch.finfo(dtype).eps > torch.finfo(kept).eps and swallows(reach, dtype):
        raise Refusal(Code.EMPTY_ROWS, f"scores beside {reach:g} are rounded to {str(dtype).removeprefix('torch.')}")


def beyond_float32(record: Attention) -> bool:
    """Whether a number of the record is finite in float64 alone."""
    return any(isinstance(x, float) and math.isfinite(x) and abs(x) > _FLOAT32_MAX
               for x in (record.scale, *_constants(record)))


def _constants(record: Attention) -> Iterator[Any]:
    for program in (record.score, *(atom.expr for atom in record.mask if isinstance(atom, Predicate))):
        yield from (e.args[0] for e in program.walk() if e.op == "const")
