"""The part of a record that a kernel with one additive bias can compute: score + bias where the mask holds."""
from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fa_inductor.kernels.expr import SCORE, Expr, const
from fa_inductor.kernels.record import Attention

from .masks import mask_of
from .program import Scope, evaluate

ZERO = const(0)


def additive_part(program: Expr) -> Expr | None:
    """The program ``r``, free of the score, with ``program == score + r``; None when there is no such program."""
    if program == SCORE:
        return ZERO
    if program.op == "cast" and program.args[1] in ("float32", "float64"):
        return additive_part(program.args[0])
    if program.op not in ("add", "sub"):
        return None
    left, right = program.args
    if not right.uses_score():
        rest = additive_part(left)
        if rest is None:
            return None
        if rest == ZERO:
            return right if program.op == "add" else Expr("neg", (right,))
        return Expr(program.op, (rest, right))
    if program.op == "add" and not left.uses_score():
        rest = additive_part(right)
        return None if rest is None else left if rest == ZERO else Expr("add", (left, rest))
    return None


def additive_mask(record: Attention, scope: Scope, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Score bias and mask of ``record`` as one additive tensor.

    Returns:
        The tensor, 4-D, of ``dtype``, broadcastable to [B, Hq, rows, Sk] and -inf where masked, or None when nothing
        is added; and the rows (bool, [B|1, Hq|1, rows]) that the score program itself, not the mask, makes -inf at
        every key (eager code gives NaN there), or None when there is no score bias.
    """
    rest = additive_part(record.score)
    if rest is None:
        raise ValueError(f"score program {record.score} is not score + bias")
    mask = mask_of(record, scope)
    if rest == ZERO:
        if mask is None:
            return None, None
        zero = torch.zeros((), dtype=dtype, device=scope.device)
        return torch.where(mask, zero, -math.inf), None
    value, _ = evaluate(rest, scope)
    bias = value if isinstance(value, Tensor) else scope.tensor(value)
    bias = bias.to(dtype)[(None,) * (4 - bias.dim())]
    if mask is not None:
        dead = torch.where(mask, bias, -math.inf).amax(-1) == -math.inf
        return torch.where(mask, bias, -math.inf), dead & mask.any(-1)
    return bias, (bias == -math.inf).all(-1)


def grads_of_bias(record: Attention) -> Sequence[int]:
    """Captures other than the sink whose gradient is wanted."""
    return [i for i in record.grads if i != record.sink]
