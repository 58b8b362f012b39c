"""Attention sinks as a factor on the output: ``softmax(S) V * sigmoid(logsumexp(S) - sink)``.

The factor is exp(lse) / (exp(lse) + exp(sink)): the same as one more column beside the scores that is cut off again.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from .axes import Dims, broadcast_operand, resolve, resolve_dims, shape_of
from .logsumexp import LogSumExp, match_logsumexp
from .nodes import CASTS, VIEWS, aten, is_rounding, is_tensor, push, target, val
from .row_max import same


@dataclass(frozen=True)
class PostScale:
    """The factor of one attention's output."""

    lse: LogSumExp
    out: Node
    """The scaled output."""
    out_dims: Dims
    tail: tuple[Node, ...]
    """Nodes from PV to ``out``, PV included."""
    sink: Node
    sink_dims: Dims
    members: tuple[Node, ...]
    """Nodes from the scores to the factor."""


def find_postscale(x: Node, k_dim: int, dims: Dims, out: Node, out_dims: Dims, backward: set[Node]) -> PostScale | None:
    """The factor on an attention's output, if that is all that the output is used for.

    Args:
        x: input of the softmax, with axes ``dims``; ``k_dim`` is the dimension of the keys.
        out: the product PV, with axes ``out_dims``.
    """
    node: Any = out
    tail: list[Node] = [out]
    while True:
        users = [u for u in node.users if u not in backward]
        if len(users) != 1:
            return None
        user = users[0]
        if target(user) is aten.mul.Tensor:
            break
        pushed = out_dims if is_rounding(user) else push(user, out_dims)
        if pushed is None:
            return None
        node, out_dims = user, pushed
        tail.append(node)
    factor = user.args[1] if user.args[0] is node else user.args[0]
    if factor is node or not is_tensor(factor) or val(user).shape != val(node).shape or val(user).dtype != val(out).dtype:
        return None
    return _factor(user, factor, x, k_dim, dims, out_dims, tail)


def _factor(out: Node, factor: Node, x: Node, k_dim: int, dims: Dims, out_dims: Dims, tail: list[Node]
            ) -> PostScale | None:
    down: list[Node] = []
    node: Any = factor
    while target(node) in VIEWS or (target(node) in CASTS and is_rounding(node)):
        down.append(node)
        node = node.args[0]
    if target(node) is not aten.sigmoid.default or target(node.args[0]) is not aten.sub.Tensor:
        return None
    difference: Node = node.args[0]
    top: Any
    sink: Any
    top, sink = difference.args
    if difference.kwargs or not is_tensor(top) or not is_tensor(sink):
        return None
    up: list[Node] = []
    while target(top) in VIEWS or (target(top) in CASTS and is_rounding(top)):
        up.append(top)
        top = top.args[0]
    lse = match_logsumexp(top)
    if lse is None or lse.dim != k_dim or not same(lse.x, x):
        return None
    at: Dims | None = tuple(() if i == k_dim else g for i, g in enumerate(dims) if lse.keepdim or i != k_dim)
    for n in reversed(up):
        at = _through(n, at)
    if at is None or val(difference).shape != val(up[0] if up else top).shape:
        return None
    sink_dims = broadcast_operand(at, shape_of(val(sink)), shape_of(val(difference)))
    for n in reversed(down):
        at = _through(n, at)
    if at is None:
        return None
    wanted = resolve_dims(out_dims[len(out_dims) - len(at):])
    rows = {a for i, g in enumerate(dims) if i != k_dim for a in resolve(g)}
    have = resolve_dims(at)
    if any(g and g != w for g, w in zip(have, wanted, strict=True)) or {a for g in have for a in g} != rows:
        return None
    members = (*lse.members, *up, difference, node, *down)
    return PostScale(lse, out, out_dims, tuple(tail), sink, sink_dims, members)


def _through(node: Node, dims: Dims | None) -> Dims | None:
    if dims is None:
        return None
    return dims if target(node) in CASTS else push(node, dims)
