"""A score that a number bounds, with the gradient that the model's own operator has where the score is the number.

``clamp`` lets all of the gradient pass there, ``hardtanh`` nothing, and ``torch.maximum`` with a tensor of one number
half of it.
"""
from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Node

from ..kernels.expr import Expr, const
from .nodes import aten, target, val

_NEVER_REACHED = -1e30
_HALF = {aten.maximum.default, aten.minimum.default}


def is_floor(node: Node, number: float) -> bool:
    """Whether a lower bound is so low that it leaves every score alone that is not masked."""
    half = val(node).dtype == torch.float16 and number <= torch.finfo(torch.float16).min
    return number <= _NEVER_REACHED or half


def bounded(score: Expr, op: str, number: float, node: Node, *, trained: bool, strict: Collection[Node]) -> Expr:
    """
    Args:
        op: ``maximum`` or ``minimum``.
        node: the operation in the model.
        trained: a gradient passes through it.
        strict: the bounds that let none pass.
    """
    c = const(number)
    inside = Expr("where", (Expr("le" if op == "maximum" else "ge", (score, c)), c, score))  # a NaN stays one
    if node in strict:
        return inside
    closed = Expr(op, (score, c))
    if trained and target(node) in _HALF:
        return Expr("mul", (Expr("add", (closed, inside)), const(0.5)))
    return closed
