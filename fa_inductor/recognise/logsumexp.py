"""The logsumexp of a row of scores, put back together."""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from .nodes import COPIES, VIEWS, arg, aten, constant, target, val
from .row_max import row_max_of, same


@dataclass(frozen=True)
class LogSumExp:
    """``out = logsumexp(x, dim)``, put back together."""

    x: Node
    out: Node
    dim: int
    keepdim: bool
    members: tuple[Node, ...]
    """The nodes that compute it from ``x``, ``out`` included."""


def match_logsumexp(node: Any) -> LogSumExp | None:
    """The logsumexp over one dimension that ends at this node, whole or decomposed."""
    t = target(node)
    if t is aten.logsumexp.default:
        dims = node.args[1]
        if len(dims) != 1:
            return None
        return LogSumExp(node.args[0], node, dims[0] % val(node.args[0]).dim(), bool(arg(node, 2, "keepdim", False)), (node,))
    if t is not aten.add.Tensor or node.kwargs:
        return None
    log: Any
    shift: Any
    log, shift = node.args
    if target(log) is not aten.log.default or target(log.args[0]) is not aten.sum.dim_IntList:
        return None
    total: Any = log.args[0]
    e: Any = total.args[0]
    if target(e) is not aten.exp.default or target(e.args[0]) is not aten.sub.Tensor or e.args[0].kwargs:
        return None
    x, top = e.args[0].args
    members = [e.args[0], e, total, log, node]
    found = _finite_maximum(top)
    if found is None or not same(found[0], x):
        return None
    keepdim = bool(arg(total, 2, "keepdim", False))
    dims = total.args[1]
    if len(dims) != 1 or dims[0] % val(x).dim() != found[1]:
        return None
    while shift is not top:
        if target(shift) not in VIEWS or val(shift).numel() != val(top).numel():
            return None
        members.append(shift)
        shift = shift.args[0]
    return LogSumExp(x, node, found[1], keepdim, tuple(dict.fromkeys((*found[2], *members))))


def _finite_maximum(node: Any) -> tuple[Node, int, list[Node]] | None:
    """(x, dim, members) of ``where(abs(max) == inf, 0, max)``, the maximum that logsumexp subtracts."""
    if target(node) is not aten.where.self:
        return None
    cond, zero, top = node.args
    m = row_max_of(top)
    if m is None or target(cond) is not aten.eq.Scalar or cond.args[1] != math.inf:
        return None
    size = cond.args[0]
    if target(size) is not aten.abs.default or size.args[0] is not top:
        return None
    if target(zero) not in (aten.scalar_tensor.default, aten.full.default):
        return None
    if constant(zero) != 0:
        return None
    members, n = [node, cond, size, zero], top
    while n is not m[0]:
        if target(n) not in COPIES and target(n) is not aten.amax.default:
            return None
        members.append(n)
        n = n.args[0]
    return m[0], m[1], members
