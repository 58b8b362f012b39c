"""The maximum of a row of scores, and what else is read alike by all that takes a softmax apart."""
from __future__ import annotations

from torch.fx import Node

from .nodes import COPIES, arg, aten, target, val


def through(node: object, ops: set) -> Node | None:
    while target(node) in ops:
        node = node.args[0]  # type: ignore[attr-defined]
    return node if isinstance(node, Node) else None


def kept_dim(node: Node) -> int | None:
    """The single reduced dimension of a keepdim reduction, counted from 0."""
    dims, keep = arg(node, 1, "dim"), arg(node, 2, "keepdim", False)
    dims = [dims] if isinstance(dims, int) else dims
    if not dims or len(dims) != 1 or not keep:
        return None
    return dims[0] % val(node.args[0]).dim()


def row_max_of(node: object) -> tuple[Node, int] | None:
    """(x, dim) when the node is ``max(x, dim, keepdim=True)`` in any spelling."""
    n = through(node, COPIES | {aten.expand.default})
    if target(n) is aten.amax.default:
        d = kept_dim(n)
        return None if d is None else (n.args[0], d)
    if n is not None and getattr(n.target, "__name__", "") == "getitem" and n.args[1] == 0:
        m = n.args[0]
        if target(m) is aten.max.dim and arg(m, 2, "keepdim", False):
            return m.args[0], m.args[1] % val(m.args[0]).dim()
    return None


def same(a: Node, b: Node) -> bool:
    """Whether two nodes differ by copies alone; ``detach`` is one."""
    return through(a, COPIES) is through(b, COPIES)
