"""The way up: from the softmax's input, through pointwise operations and views, to the product QK^T."""
from __future__ import annotations

import operator
from dataclasses import dataclass, field

from torch.fx import Node

from ..reasons import Code, Refusal
from .axes import AxesError, Axis, Dims, Group, broadcast_operand, product, resolve, shape_of
from .nodes import (
    CASTS,
    COPIES,
    VIEWS,
    aten,
    cast_dtypes,
    constant,
    is_full_slice,
    is_rounding,
    is_tensor,
    pull,
    target,
    val,
)
from .row_max import row_max_of, same

PRODUCTS = {aten.bmm.default, aten.mm.default}
ADDED_PRODUCTS = {aten.baddbmm.default, aten.addmm.default}
"""``beta * input + alpha * (A @ B)``."""
MAX_STEPS = 64

POINTWISE: dict[object, str] = {
    aten.add.Tensor: "add", aten.sub.Tensor: "sub", aten.mul.Tensor: "mul", aten.div.Tensor: "div",
    aten.add.Scalar: "add", aten.sub.Scalar: "sub", aten.mul.Scalar: "mul", aten.div.Scalar: "div",
    aten.where.self: "where", aten.neg.default: "neg", aten.tanh.default: "tanh", aten.abs.default: "abs",
    aten.exp.default: "exp", aten.sigmoid.default: "sigmoid", aten.relu.default: "relu",
    aten.minimum.default: "minimum", aten.maximum.default: "maximum",
    aten.clamp_min.default: "maximum", aten.clamp_max.default: "minimum",
    aten.sqrt.default: "sqrt", aten.reciprocal.default: "reciprocal",
    aten.masked_fill.Scalar: "masked_fill", aten.masked_fill.Tensor: "masked_fill",
}
"""ATen operations that may stand between QK^T and the softmax, by their name in a score program."""


@dataclass(frozen=True)
class Step:
    """One pointwise operation on the score; ``position`` is the operand that the score comes in by.

    An SDPA operator's own arguments are steps too: ``causal`` (top-left), and ``bias`` with ``operand`` added.
    """

    node: Node
    name: str
    position: int
    dims: Dims
    operand: Node | None = None

    def others(self) -> list[Node]:
        """Tensors that the step brings in beside the score; a subtracted row maximum is none of them."""
        if self.name == "sub" and self.position == 0 and is_row_max(self.node):
            return []
        if self.name == "added_product":
            return [a for a in self.node.args[:1] if is_tensor(a) and constant(a) is None]
        return [a for i, a in enumerate(self.node.args) if i != self.position and is_tensor(a) and constant(a) is None]


@dataclass
class ScorePath:
    """How the softmax input arises: ``steps`` from QK^T outwards, ``product`` the node that computes QK^T."""

    product: Node
    product_dims: Dims
    steps: list[Step] = field(default_factory=list)
    members: list[Node] = field(default_factory=list)
    """Nodes of score size between the product and the softmax, the product included."""


def factors(product: Node) -> tuple[Node, Node]:
    """The two matrices of a product node."""
    i = 1 if target(product) in ADDED_PRODUCTS else 0
    return product.args[i], product.args[i + 1]  # type: ignore[return-value]


def find_scores(x: Node, dims: Dims, k_axes: set[Axis]) -> ScorePath:
    """The path from QK^T to the softmax input ``x``.

    Raises:
        Refusal: there is no product, more than one, or a step that is not pointwise.
    """
    path = _find(x, dims, k_axes, 0)
    if path is None:
        blocking = _blocking(x)
        if blocking is None:
            raise Refusal(Code.NO_QK)
        dtypes = cast_dtypes(blocking)
        whole = dtypes is not None and not dtypes[0].is_floating_point
        raise Refusal(Code.INTEGER if whole else Code.SCORE_OP, f"{blocking.name} ({blocking.target})")
    path.steps.reverse()
    path.members.reverse()
    return path


def _all_axes(dims: Dims) -> set[Axis]:
    return {a for g in dims for a in resolve(g)}


def _is_mixed(node: Node) -> bool:
    """Whether a matrix with several axes beside the contraction is itself a batch of products: scores that a product over
    heads mixes, and no keys of a whole batch."""
    for _ in range(MAX_STEPS):
        t = target(node)
        if t is aten.bmm.default:
            return True
        if t not in VIEWS and t not in CASTS and t not in COPIES and t not in POINTWISE or not is_tensor(node.args[0]):
            return False
        node = node.args[0]  # type: ignore[assignment]
    return False


def _find(node: Node, dims: Dims, k_axes: set[Axis], depth: int) -> ScorePath | None:
    if depth > MAX_STEPS or not is_tensor(node):
        return None
    if not set(resolve(k_axes)) <= _all_axes(dims):
        return None  # no axis of the keys left: a row constant or a partial bias, not the scores
    t = target(node)
    if t in PRODUCTS or t in ADDED_PRODUCTS:
        r, c = dims[-2], dims[-1]
        keys = set(resolve(k_axes))
        a, b = factors(node)
        if any(keys == set(resolve(here)) or keys < set(resolve(here)) and resolve(there) and not _is_mixed(m)
               for here, there, m in ((c, r, b), (r, c, a))):  # with the batch beside them, where all share the queries
            steps = [] if t in PRODUCTS else [Step(node, "added_product", 1, dims, node.args[0])]
            return ScorePath(node, dims, steps, [node])
        return None
    try:
        pulled = pull(node, dims)
    except AxesError:
        return None
    if pulled is not None:
        path = _find(*pulled, k_axes, depth + 1)
        if path is not None:
            path.members.insert(0, node)
        return path
    if t in CASTS:
        if not is_rounding(node):
            return None
        path = _find(node.args[0], dims, k_axes, depth + 1)
        if path is not None:
            path.steps.insert(0, Step(node, "cast", 0, dims))
            path.members.insert(0, node)
        return path
    name = POINTWISE.get(t)
    if name is None:
        return None
    found: list[tuple[int, ScorePath]] = []
    full = shape_of(val(node))
    for i, a in enumerate(node.args):
        if not is_tensor(a) or not val(a).dtype.is_floating_point:
            continue
        if name == "sub" and i == 1 and is_row_max(node):
            continue
        path = _find(a, broadcast_operand(dims, shape_of(val(a)), full), k_axes, depth + 1)
        if path is not None:
            found.append((i, path))
    if not found:
        return None
    if len(found) > 1:
        one = len({path.product for _, path in found}) == 1
        raise Refusal(Code.SCORE_OP, f"{'the scores meet themselves' if one else 'two products meet'} in {node.name}")
    i, path = found[0]
    path.steps.insert(0, Step(node, name, i, dims))
    path.members.insert(0, node)
    return path


def _blocking(x: Node) -> Node | None:
    """The first operation on the way up that is not pointwise, when a product of score size lies behind it.

    A product is one such operation: it mixes the heads of scores, or their keys.
    """
    seen: set[Node] = set()
    todo: list[tuple[Node, Node | None]] = [(x, None)]
    least, size = val(x).dim() - 1, product(shape_of(val(x)))
    while todo and len(seen) < MAX_STEPS:
        node, first = todo.pop(0)
        t = target(node)
        if node in seen or t is None:
            continue
        seen.add(node)
        if is_tensor(node) and 0 in shape_of(val(node)):
            continue
        if t in PRODUCTS or t in ADDED_PRODUCTS:
            if first is not None and (target(first) not in PRODUCTS or product(shape_of(val(node))) == size):
                return first
            todo += [(a, first or node) for a in factors(node) if is_tensor(a)]
            continue
        if first is None and t is not operator.getitem and not is_rounding(node) and t not in POINTWISE and (
                t not in VIEWS or t is aten.slice.Tensor and not is_full_slice(node)):
            first = node
        todo += [(a, first) for a in node.all_input_nodes
                 if (val(a).dim() >= least or target(a) in PRODUCTS or product(shape_of(val(a))) == size
                     if is_tensor(a) else t is operator.getitem)]
    return None


def is_row_max(node: Node) -> bool:
    """``x - max(x, keys)``: adds a row constant, which a softmax does not see."""
    m = row_max_of(node.args[1])
    src = node.args[0]
    while target(src) in VIEWS:
        src = src.args[0]
    return m is not None and (same(m[0], node.args[0]) or m[0] is src)  # type: ignore[arg-type]


def is_row_max_of(step: Step, keys: Group) -> bool:
    """Whether the step subtracts from the scores their maximum over all keys."""
    m = row_max_of(step.node.args[1])
    dims = step.dims if m is not None and val(m[0]).dim() == len(step.dims) else None
    return m is not None and dims is not None and set(resolve(dims[m[1]])) == set(resolve(keys)) and same(
        m[0], step.node.args[0])  # type: ignore[arg-type]
