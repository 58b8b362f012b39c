"""The ways up from QK^T and PV to Q, K and V: past views, expands, copies, widening casts and constant scales."""
from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from .axes import AxesError, Axis, Dims, broadcast_operand, resolve, resolve_dims, shape_of
from .nodes import COPIES, aten, constant, is_random, is_tensor, is_widening, pull, target, val


@dataclass
class Operand:
    """A matrix operand traced to its source; ``value = scale * source``, rearranged by ``dims``."""

    node: Node
    dims: Dims
    scale: float
    chain: tuple[Node, ...] = ()
    """Nodes between the matrix product and the source, the operand itself first."""

    def depends(self, axis: Axis) -> bool:
        return bool(set(resolve([axis])) & {a for g in resolve_dims(self.dims) for a in g})


def _scaled(node: Node) -> tuple[Node, float] | None:
    """(x, c) when the node is x * c or x / c for a finite constant c."""
    t = target(node)
    if t in (aten.mul.Tensor, aten.mul.Scalar):
        for i in (0, 1):
            c = constant(node.args[1 - i])
            if c is not None and is_tensor(node.args[i]) and abs(c) != float("inf"):
                return node.args[i], float(c)
    if t in (aten.div.Tensor, aten.div.Scalar) and not node.kwargs.get("rounding_mode"):
        c = constant(node.args[1])
        if c and is_tensor(node.args[0]) and abs(c) != float("inf"):
            return node.args[0], 1.0 / float(c)
    return None


def trace_operand(node: Node, dims: Dims, *, scales: bool, casts: bool = True) -> Operand:
    """Walk up from a matrix operand as far as only rearrangement, widening and (for Q and K) scaling happens.

    The node returned is the shallowest one from which everything below is a free view, preferring one whose
    dimensions are single axes; ``scales`` allows constant factors, which belong to the score's scale,
    ``casts`` casts that keep every value.
    """
    scale = 1.0
    stretch: list[tuple[Node, Dims, float]] = [(node, dims, scale)]
    passed = [node]
    while True:
        step = None
        costs = False
        try:
            step = pull(node, dims)
        except AxesError:
            break
        if step is not None:
            costs = target(node) in COPIES or (target(node) is aten.expand.default and step[1] != dims)
            if target(node) is aten.expand.default and resolve_dims(step[1]) != resolve_dims(dims):
                costs = True
        elif casts and is_widening(node):
            step, costs = (node.args[0], dims), True
        elif scales and (s := _scaled(node)) is not None:
            if shape_of(val(s[0])) != shape_of(val(node)):
                step = (s[0], broadcast_operand(dims, shape_of(val(s[0])), shape_of(val(node))))
            else:
                step = (s[0], dims)
            scale *= s[1]
            costs = True
        if step is None:
            break
        node, dims = step
        passed.append(node)
        if costs:
            stretch = []
        stretch.append((node, dims, scale))
    tidy = [c for c in stretch if all(len(resolve(g)) <= 1 for g in c[1])]
    n, d, s = min(tidy, key=lambda c: abs(len(c[1]) - 4)) if tidy else stretch[0]
    return Operand(n, d, s, tuple(passed[:passed.index(n)]))


def is_dropout_mask(node: object) -> bool:
    """True when a random number decides this tensor's value."""
    seen: set[Node] = set()
    todo = [node]
    while todo and len(seen) < 32:
        n = todo.pop()
        if not isinstance(n, Node) or n in seen:
            continue
        seen.add(n)
        if is_random(n):
            return True
        todo.extend(n.all_input_nodes)
    return False
