"""Attention sinks: one more column beside the scores, that takes part in the softmax and is cut off after it."""
from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from .axes import Dims, shape_of
from .nodes import COPIES, arg, aten, is_rounding, is_tensor, target, val
from .row_max import row_max_of
from .softmax import Softmax


@dataclass(frozen=True)
class SinkColumn:
    """``softmax(cat(scores, column))[..., :-1]``."""

    scores: Node
    column: Node
    members: tuple[Node, ...]
    """Nodes from the concatenation to the softmax's input, the row maximum that is subtracted included."""


def find_sink(sm: Softmax) -> SinkColumn | None:
    """The sink of a softmax whose input is a concatenation with one column, up to casts and a subtracted maximum."""
    node = sm.x
    members: list[Node] = []
    while is_tensor(node):
        t = target(node)
        members.append(node)
        if t is aten.cat.default:
            return _column(node, sm.dim, members)
        if t in COPIES or is_rounding(node):
            node = node.args[0]
        elif t is aten.sub.Tensor and not node.kwargs and (m := row_max_of(node.args[1])) is not None \
                and m[0] is node.args[0] and m[1] == sm.dim:
            top = node.args[1]
            while top is not m[0]:
                members.append(top)
                top = top.args[0]
            node = node.args[0]
        else:
            return None
    return None


def _column(node: Node, dim: int, members: list[Node]) -> SinkColumn | None:
    parts = node.args[0]
    if len(parts) != 2 or arg(node, 1, "dim", 0) % val(node).dim() != dim:
        return None
    scores, column = parts
    if shape_of(val(column))[dim] != 1 or not val(scores).dtype.is_floating_point:
        return None
    return SinkColumn(scores, column, tuple(members))


def cuts_column(node: Node, dim: int) -> bool:
    """A slice that takes away the last entry of ``dim`` and nothing else."""
    if target(node) is not aten.slice.Tensor or node.args[1] % val(node).dim() != dim:
        return False
    before, after = shape_of(val(node.args[0])), shape_of(val(node))
    return (arg(node, 2, "start") in (0, None) and arg(node, 4, "step", 1) == 1
            and before[dim] - after[dim] == 1)


def without_column(dims: Dims, dim: int, keys: tuple) -> Dims:
    """``dims`` with the keys alone where keys and sink were."""
    return (*dims[:dim], keys, *dims[dim + 1:])
