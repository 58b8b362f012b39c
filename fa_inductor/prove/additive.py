"""Entry points: what a boolean or an additive operand of the scores masks."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from .atoms import Draft, PredicateDraft, classify, proves_nonempty
from .evaluate import Evaluator
from .values import FALSE, TRUE, And, Apply, Const, Pred, Select, Tree, Undecided, Value

MASK_THRESHOLD = -3e4
"""A constant at or below it, added to a score, is a mask; above it is a bias."""

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True)
class MaskProof:
    """What a mask attends to.

    ``pred`` is the exact predicate over (b, h, q, k), true = attend, and the conjunction of ``atoms`` is equal to it.
    """

    atoms: tuple[Draft, ...]
    pred: Pred
    nonempty: bool
    """Proven: every (b, h, q) attends to at least one key."""

    @property
    def always_true(self) -> bool:
        return self.pred == TRUE

    @property
    def always_false(self) -> bool:
        """Proven: nothing is attended to anywhere."""
        return self.pred == FALSE


@dataclass(frozen=True)
class AdditiveProof(MaskProof):
    """A float operand M that is added to the scores: ``M = residual`` where attended, a mask constant elsewhere.

    Where masked, M is one of ``fills`` plus possibly a bias that the fill is taken to dominate, as it dominates the
    score itself.
    """

    fills: tuple[float, ...]
    """The distinct constants that masked positions may hold, as rounded by the user's dtypes; empty without a mask."""
    residual: Tree | None
    """The bias that remains; None when it is zero.  `Materialiser.tree` (``use_origin=True`` for a gradient) makes
    it a tensor, `to_program` a score program."""
    fill_mode: Literal["add", "replace"] = "add"
    """``add``: a masked score is s + fill and keeps its gradient; ``replace``: it is the fill."""

    @property
    def fill(self) -> float | None:
        """The one fill; None when there is none, or when positions differ (harmless only if ``nonempty``)."""
        return self.fills[0] if len(self.fills) == 1 else None


def prove_boolean(ev: Evaluator, node: fx.Node, index: Sequence[Any], attend: bool = True) -> MaskProof:
    """What a boolean mask attends to; integer and float masks count by ``!= 0``.

    Args:
        node: the mask tensor, any rank.
        index: per dimension of the mask an integer expression of the axes ``b h q k`` (`values.AXES`, sympy symbols),
            or 0 for a dimension that is broadcast.
        attend: the truth value that means "attend"; False for ``masked_fill`` conditions.
    """
    try:
        pred = _truth(ev, ev.value(node, index), node)
        return _proof(ev, pred if attend else ev.facts.not_(pred))
    except Undecided:  # too large to simplify: the tensor itself
        pred = _truth(ev, ev.load(node, tuple(map(ev.integer, index))), node)
        return _proof(ev, pred if attend else ev.facts.not_(pred))


def _truth(ev: Evaluator, value: Value, node: fx.Node) -> Pred:
    truth = ev.trees.convert(value, node.meta["val"].dtype, torch.bool)
    if not isinstance(truth, Pred):
        raise TypeError(f"node {node.name!r} gives no truth value")
    return truth


def prove_additive(
    ev: Evaluator, node: fx.Node, index: Sequence[Any], dtype: torch.dtype | None = None
) -> AdditiveProof:
    """Splits a tensor that is added to the scores into a mask and a bias.

    Args:
        node, index: as in `prove_boolean`.
        dtype: type in which the sum with the scores is computed; default: the node's own, float32 for integers.
    """
    val = node.meta["val"]
    if dtype is None:
        dtype = val.dtype if val.dtype.is_floating_point else torch.float32
    try:
        value = ev.trees.convert(ev.value(node, index), val.dtype, dtype)
    except Undecided:
        value = ev.trees.convert(ev.load(node, tuple(map(ev.integer, index))), val.dtype, dtype)
    if not isinstance(value, Tree):
        raise TypeError(f"node {node.name!r} cannot be added to a score")
    if value not in ev.origins and val.dtype == dtype:
        ev.origins[value] = node, tuple(map(ev.integer, index))
    try:
        part = _split(ev, value)
        mask = _proof(ev, part.attend)
    except Undecided:
        part, mask = _Part(TRUE, (), value), _proof(ev, TRUE)
    return AdditiveProof(mask.atoms, mask.pred, mask.nonempty, tuple(dict.fromkeys(part.fills)), part.residual)


def conjoin(ev: Evaluator, proofs: Sequence[MaskProof]) -> MaskProof:
    """Several masks of one block as one: atoms merged, ``nonempty`` proven for all of them together."""
    try:
        return _proof(ev, ev.facts.and_(*(p.pred for p in proofs)))
    except Undecided:  # too large to simplify together: the atoms of each
        atoms = tuple(dict.fromkeys(a for p in proofs for a in classify(ev.facts, p.pred)))
        return MaskProof(atoms, And(tuple(p.pred for p in proofs)), False)


def _proof(ev: Evaluator, pred: Pred) -> MaskProof:
    if pred == FALSE:
        return MaskProof((PredicateDraft(FALSE),), pred, False)
    return MaskProof(classify(ev.facts, pred), pred, proves_nonempty(ev.facts, pred))


@dataclass(frozen=True)
class _Part:
    attend: Pred
    fills: tuple[float, ...]
    residual: Tree | None


def _split(ev: Evaluator, t: Tree, under: Pred = TRUE) -> _Part:
    """A float tree as mask and bias, outermost operators first; ``under`` is known to hold where it is read."""
    facts = ev.facts
    match t:
        case Const(value=v):
            if v <= MASK_THRESHOLD:
                return _Part(FALSE, (float(v),), None)
            return _Part(TRUE, (), t if v != 0 else None)
        case Select(pred=p, a=a, b=b, dtype=dtype):
            on, off = facts.and_(under, p), facts.and_(under, facts.not_(p))
            if on == FALSE or off == FALSE:
                return _split(ev, b if on == FALSE else a, under)
            x, y = _split(ev, a, on), _split(ev, b, off)
            attend = facts.or_(facts.and_(p, x.attend), facts.and_(facts.not_(p), y.attend))
            if x.attend == FALSE or y.attend == FALSE or x.residual == y.residual:
                residual = y.residual if x.attend == FALSE else x.residual
            elif not x.fills and not y.fills:
                residual = t
            else:
                zero = Const(0.0, dtype)
                residual = ev.trees.select(p, x.residual or zero, y.residual or zero)
            return _Part(attend, x.fills + y.fills, residual)
        case Apply(target=target, args=args, kwargs=kwargs, dtype=dtype):
            packet = getattr(target, "overloadpacket", None)
            if packet in (aten.add, aten.sub) and not kwargs and len(args) == 2:
                return _split_sum(ev, t, packet is aten.sub)
            if packet is prims.convert_element_type and isinstance(args[0], Tree) and args[0].dtype.is_floating_point:
                part = _split(ev, args[0])
                if not part.fills:
                    return _Part(TRUE, (), t)
                fills = tuple(float(ev.trees.const(f, dtype).value) for f in part.fills)
                residual = part.residual
                if residual is not None:
                    residual = ev.trees.apply(target, (residual, dtype), (), frozenset(), dtype)
                return _Part(part.attend, fills, residual)
    return _Part(TRUE, (), t)


def _split_sum(ev: Evaluator, t: Apply, negate: bool) -> _Part:
    """``x + y`` or ``x - y`` in t's dtype: masks meet, biases add."""
    dtype = t.dtype
    operands: list[Tree] = []
    for a in t.args:
        if isinstance(a, int | float) and not isinstance(a, bool):
            operands.append(ev.trees.const(a, dtype))
        elif isinstance(a, Tree) and a.dtype.is_floating_point:
            operands.append(a)
        else:
            return _Part(TRUE, (), t)
    x_tree, y_tree = operands
    if negate:
        y_tree = ev.trees.apply(aten.neg.default, (y_tree,), (), frozenset(), y_tree.dtype)
    x, y = _split(ev, x_tree), _split(ev, y_tree)
    if not x.fills and not y.fills:
        return _Part(TRUE, (), t)
    fills = [float(ev.trees.const(f, dtype).value) for f in x.fills + y.fills]
    if x.fills and y.fills and ev.facts.and_(ev.facts.not_(x.attend), ev.facts.not_(y.attend)) != FALSE:
        for f in x.fills:
            for g in y.fills:
                fills.append(float((torch.tensor(f, dtype=dtype) + torch.tensor(g, dtype=dtype)).item()))
    residual = x.residual if y.residual is None else y.residual
    if x.residual is not None and y.residual is not None:
        if x.residual == x_tree and y.residual == y_tree and not negate:
            residual = t
        else:
            residual = ev.trees.apply(aten.add.Tensor, (x.residual, y.residual), (), frozenset(), dtype)
    elif residual is not None and residual.dtype != dtype:
        residual = ev.trees.apply(
            prims.convert_element_type.default, (residual, dtype), (), frozenset(), dtype
        )
    return _Part(ev.facts.and_(x.attend, y.attend), tuple(fills), residual)


