"""The way down: from the probabilities to the product PV."""
from __future__ import annotations

import operator
from dataclasses import dataclass, field

from torch.fx import Node

from ..reasons import Code, Refusal
from .axes import Axis, Dims, Group, Size, fresh, resolve, shape_of
from .nodes import CASTS, COPIES, VIEWS, aten, constant, is_rounding, is_tensor, push, target, val
from .operands import is_dropout_mask
from .scores import ADDED_PRODUCTS, PRODUCTS
from .sink import cuts_column, without_column
from .softmax import Softmax, safe_row_test

_PICKS = {operator.getitem, aten.topk.default, aten.sort.default, aten.argmax.default}
"""Choose among the probabilities, and change the shape."""


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
        dropped = [r for r in blocked if r.reason.code == Code.DROPOUT]
        raise dropped[0] if dropped else Refusal(Code.WEIGHTS_USED, blocked[0].reason.detail)
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
        if target(node) in PRODUCTS or target(node) in VIEWS - COPIES - {aten.slice.Tensor}:
            raise Refusal(Code.SCORE_OP, "the column beside the scores is not cut off: it has a value, as keys have")
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
            elif _meets_values_later(user, (*dims[:-2], *_product_rows(dims, sides[0])), keys, backward):
                blocked.append(Refusal(Code.PROB_OP, f"{user.name} ({user.target})"))
            else:
                blocked.append(Refusal(Code.SOFTMAX_DIM))
            continue
        if t in ADDED_PRODUCTS and node in user.args[1:3]:
            blocked.append(Refusal(Code.NOT_ATTENTION, f"{user.name} adds a tensor to the product with the values"))
            continue
        if t in VIEWS:
            out = push(user, dims)
            if out is None:
                if t is aten.expand.default or _leads_to_product(user, backward, shape_of(val(node))):
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
            if _leads_to_product(user, backward, shape_of(val(node))):
                blocked.append(Refusal(Code.PROB_OP, f"{user.name} ({user.target})"))
                continue
        elif user.op != "output" and _leads_to_product(user, backward, shape_of(val(node))):
            blocked.append(Refusal(Code.PROB_OP, f"{user.name} ({user.target})"))
            continue
        others.append(user)


def _product_rows(dims: Dims, side: int) -> Dims:
    """The last two dims of a product with the probabilities on ``side``; what the other operand brings has no axes."""
    return (dims[-2], ()) if side == 0 else ((), dims[-1])


def _meets_values_later(node: Node, dims: Dims, keys: set[Axis], backward: set[Node], depth: int = 8) -> bool:
    """Whether a product that leaves the keys alone, as one over the heads does, is followed by one that sums over them.

    ``dims`` are the axes of ``node`` as far as they come from the probabilities.
    """
    shape = shape_of(val(node))
    if depth == 0 or not keys <= {a for g in dims for a in resolve(g)}:
        return False
    whole = tuple(g or fresh((n,), "p")[0] for g, n in zip(dims, shape, strict=True))
    for user in node.users:
        if user in backward:
            continue
        if target(user) in PRODUCTS:
            if set(resolve(whole[-1] if user.args[0] is node else whole[-2])) == keys:
                return True
            continue
        out = whole if is_rounding(user) else push(user, whole)
        if out is not None and _meets_values_later(user, out, keys, backward, depth - 1):
            return True
    return False


def _leads_to_product(node: Node, backward: set[Node], full: tuple[Size, ...], picked: bool = False,
                      depth: int = 8) -> bool:
    """A matrix product lies a few steps below that keep the shape, or pick and put back: this was meant as attention.

    Args:
        full: shape of the probabilities.
        picked: what arrives at ``node`` is a choice among them (a router's) and no matrix of weights.
    """
    picked |= target(node) in _PICKS
    if depth == 0 or node in backward:
        return False
    shape = shape_of(val(node)) if is_tensor(node) else None
    for u in node.users:
        t = target(u)
        if u in backward:
            continue
        if (t in PRODUCTS or t in ADDED_PRODUCTS) and not picked:
            return True
        now = shape_of(val(u)) if is_tensor(u) else None
        if (t in _PICKS or now is not None and (t in VIEWS or t in CASTS or t is aten.cat.default or now in (shape, full))) \
                and _leads_to_product(u, backward, full, picked and now != full, depth - 1):
            return True
    return False
