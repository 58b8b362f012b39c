"""The way down: from the probabilities to the product PV."""
from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Node

from ..reasons import Code, Refusal
from .axes import Axis, Dims, Group, resolve, shape_of
from .nodes import CASTS, COPIES, VIEWS, aten, constant, is_rounding, is_tensor, push, target, val
from .operands import is_dropout_mask
from .scores import POINTWISE, PRODUCTS
from .sink import cuts_column, without_column
from .softmax import Softmax, safe_row_test


@dataclass
class ValuePath:
    """How the probabilities meet the values."""

    product: Node
    position: int
    """Which operand of ``product`` the probabilities are."""
    p_dims: Dims
    """Axes of that operand."""
    safe: bool = False
    """Rows with every score -inf are set to zero, as PyTorch SDPA does."""
    members: list[Node] = field(default_factory=list)
    """Nodes of score size between the softmax and the product."""
    extra: list[Node] = field(default_factory=list)
    """Nodes of the fully-masked-row test."""


def find_values(sm: Softmax, dims: Dims, k_axes: set[Axis], backward: set[Node],
                cut: Group | None = None) -> ValuePath | None:
    """The single product PV that the softmax feeds; None when it feeds no matrix product at all.

    ``cut`` is given when the softmax's last column is a sink: the keys alone, as they are after it is sliced off.

    Raises:
        Refusal: the probabilities are changed on the way, used elsewhere, or contracted over another axis.
    """
    found: list[ValuePath] = []
    others: list[Node] = []
    blocked: list[Refusal] = []
    start, members = sm.out, []
    if cut is not None:
        start, members = _cut(sm, backward)
        dims = without_column(dims, sm.dim, cut)
    _down(sm, start, dims, k_axes, backward, members, [], False, found, others, blocked)
    if not found:
        if blocked:
            raise blocked[0]
        return None
    if blocked:
        raise blocked[0]
    if len(found) > 1:
        raise Refusal(Code.WEIGHTS_USED, f"{len(found)} products use them")
    if others:
        raise Refusal(Code.WEIGHTS_USED, f"by {others[0].name}")
    return found[0]


def _cut(sm: Softmax, backward: set[Node]) -> tuple[Node, list[Node]]:
    """The probabilities without the sink's column, which must be their only use."""
    node, members = sm.out, [sm.out]
    while True:
        users = [u for u in node.users if u not in backward]
        if len(users) != 1:
            raise Refusal(Code.WEIGHTS_USED, "the sink's weight is used")
        node = users[0]
        if cuts_column(node, sm.dim):
            return node, members
        if not is_rounding(node) and target(node) not in COPIES:
            raise Refusal(Code.PROB_OP, f"{node.name} ({node.target})")
        members.append(node)


def _down(sm: Softmax, node: Node, dims: Dims, k_axes: set[Axis], backward: set[Node], members: list[Node],
          extra: list[Node], safe: bool, found: list[ValuePath], others: list[Node], blocked: list[Refusal]) -> None:
    for user in node.users:
        if user in backward:
            continue
        t = target(user)
        if t in PRODUCTS:
            sides = [i for i in (0, 1) if user.args[i] is node]
            if len(sides) == 2:
                others.append(user)
                continue
            contracted = dims[-1] if sides[0] == 0 else dims[-2]
            keys = set(resolve(k_axes))
            if set(resolve(contracted)) == keys and len(resolve(contracted)) == len(keys):
                found.append(ValuePath(user, sides[0], dims, safe, list(members), list(extra)))
            else:
                blocked.append(Refusal(Code.SOFTMAX_DIM))
            continue
        if t in VIEWS:
            out = push(user, dims)
            if out is None:
                if t is aten.expand.default or _leads_to_product(user, backward):
                    blocked.append(Refusal(Code.PROB_OP, f"{user.name} ({user.target})"))
                else:
                    others.append(user)
                continue
            _down(sm, user, out, k_axes, backward, [*members, user], extra, safe, found, others, blocked)
            continue
        if is_rounding(user):
            _down(sm, user, dims, k_axes, backward, [*members, user], extra, safe, found, others, blocked)
            continue
        if t is aten.where.self and user.args[2] is node and constant(user.args[1]) == 0.0:
            test = safe_row_test(user.args[0], sm.x, sm.dim)
            if test is not None:
                _down(sm, user, dims, k_axes, backward, [*members, user], [*extra, *test], True, found, others, blocked)
                continue
        if t in (aten.mul.Tensor, aten.native_dropout.default, aten.where.self, aten.div.Tensor):
            if is_dropout_mask(user):
                blocked.append(Refusal(Code.DROPOUT))
                continue
            if _leads_to_product(user, backward):
                blocked.append(Refusal(Code.PROB_OP, f"{user.name} ({user.target})"))
                continue
        elif user.op != "output" and _leads_to_product(user, backward):
            blocked.append(Refusal(Code.PROB_OP, f"{user.name} ({user.target})"))
            continue
        others.append(user)


def _leads_to_product(node: Node, backward: set[Node], depth: int = 8) -> bool:
    """A matrix product lies a few pointwise or view steps below: this was meant as attention."""
    if depth == 0 or node in backward:
        return False
    for u in node.users:
        if u in backward:
            continue
        if target(u) in PRODUCTS:
            return True
        if not is_tensor(u) or not is_tensor(node):
            continue
        passes = target(u) in VIEWS or target(u) in CASTS or (
            target(u) in POINTWISE and shape_of(val(u)) == shape_of(val(node)))
        if passes and _leads_to_product(u, backward, depth - 1):
            return True
    return False
