"""Anchors: every softmax of a graph, put back together from whatever it was decomposed into."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Graph, Node

from .axes import shape_of
from .logsumexp import LogSumExp, match_logsumexp
from .nodes import COPIES, RESHAPES, VIEWS, aten, target, val
from .row_max import kept_dim, row_max_of, same, through


@dataclass(frozen=True)
class Softmax:
    """``out = softmax(x, dim)``.

    ``members`` are the nodes that compute it from ``x``, ``out`` included; ``fused`` tells whether the user called
    a softmax (its backward is the softmax's own) or wrote exp and sum by hand without subtracting the maximum.
    """

    x: Node
    out: Node
    dim: int
    members: tuple[Node, ...]
    shifted: bool
    lse: LogSumExp | None = None
    """That of ``x``, where ``out`` is ``exp(x - logsumexp(x))``."""
    altered: str = ""
    """What it does to the sum of the exponentials before it divides by it: a softmax it is not, but one looks for it."""


def _exp_of(e: Node) -> tuple[Node, int | None, list[Node]] | None:
    """(x, dim of the subtracted maximum or None, members) when e is exp(x - max(x)) or exp(x)."""
    if target(e) is not aten.exp.default:
        return None
    y = e.args[0]
    if target(y) is aten.sub.Tensor and not y.kwargs:
        m = row_max_of(y.args[1])
        if m is not None and same(m[0], y.args[0]):
            return y.args[0], m[1], [y, e, *_chain(y.args[1], m[0])]
    return y, None, [e]


def _chain(node: Node, stop: Node) -> list[Node]:
    out = []
    while isinstance(node, Node) and node is not stop:
        out.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return out


_ALTERED = (aten.add.Tensor, aten.clamp_min.default, aten.clamp.default, aten.maximum.default)


def match_softmax(node: Node) -> Softmax | None:
    """The softmax that ends at this node, if one does."""
    t = target(node)
    if t is aten._softmax.default or t is aten.softmax.int:
        x = node.args[0]
        return Softmax(x, node, node.args[1] % val(x).dim(), (node,), True)
    if t is aten.exp.default:  # log_softmax(x).exp()
        y = node.args[0]
        if target(y) is aten._log_softmax.default:
            return Softmax(y.args[0], node, y.args[1] % val(y).dim(), (y, node), True)
        return _log_form(node) or _lse_form(node)
    if t is aten.div.Tensor:
        e, den = node.args
        s = through(den, COPIES | {aten.expand.default})
    elif t is aten.mul.Tensor and target(node.args[1]) is aten.reciprocal.default:
        e, den = node.args[0], node.args[1]
        s = through(den.args[0], COPIES | {aten.expand.default})
    else:
        return None
    altered = ""
    if isinstance(e, Node) and target(s) in _ALTERED:
        altered = f"the sum of the exponentials goes through {s.name}"
        s = next((i for i in s.all_input_nodes if target(i) is aten.sum.dim_IntList and same(i.args[0], e)), None)
    if not isinstance(e, Node) or target(s) is not aten.sum.dim_IntList:
        return None
    if not same(s.args[0], e):
        return _late_form(e, s)
    d = kept_dim(s)
    e0 = through(e, COPIES)
    found = _exp_of(e0) if e0 is not None else None
    if d is None or found is None or found[1] not in (d, None):
        return None
    members = (*found[2], *(() if altered else _chain(den, s)), s, *_chain(e, e0), node)
    return Softmax(found[0], node, d, tuple(dict.fromkeys(members)), found[1] is not None, altered=altered)


def _late_form(numerator: Node, s: Node) -> Softmax | None:
    """(exp(x) @ v) / sum(exp(x)), to say why it is left alone."""
    product = through(numerator, VIEWS)
    e = through(s.args[0], COPIES)
    found, d = (None if e is None else _exp_of(e)), kept_dim(s)
    if product is None or found is None or d is None or target(product) not in (aten.bmm.default, aten.mm.default):
        return None
    if not any(isinstance(a, Node) and through(a, VIEWS) is e for a in product.args):
        return None
    return Softmax(found[0], e, d, (*found[2], s), found[1] is not None, altered="it divides by the sum behind the product with V")


def _log_form(node: Node) -> Softmax | None:
    """exp((x - max) - log(sum(exp(x - max))))."""
    y = node.args[0]
    if target(y) is not aten.sub.Tensor or y.kwargs:
        return None
    shifted, lg = y.args
    if target(lg) is not aten.log.default or target(lg.args[0]) is not aten.sum.dim_IntList:
        return None
    s = lg.args[0]
    e, d = s.args[0], kept_dim(s)
    if d is None or target(e) is not aten.exp.default or e.args[0] is not shifted:
        return None
    found = _exp_of(e)
    if found is None or found[1] != d:
        return None
    return Softmax(found[0], node, d, tuple(dict.fromkeys((*found[2], s, lg, y, node))), True)


def _lse_form(node: Node) -> Softmax | None:
    """exp(x - logsumexp(x)), the logsumexp along the rows of x."""
    y = node.args[0]
    if target(y) is not aten.sub.Tensor or y.kwargs:
        return None
    x, top = y.args
    between: list[Node] = []
    while isinstance(top, Node) and (target(top) in COPIES or target(top) in RESHAPES or target(top) is aten.expand.default):
        between.append(top)
        top = top.args[0]
    lse = match_logsumexp(top)
    if lse is None or not same(lse.x, x):
        return None
    full = shape_of(val(x))
    column = (*full[:lse.dim], 1, *full[lse.dim + 1:])
    given = shape_of(val(lse.out))
    for n in reversed(between):
        if target(n) in RESHAPES:  # the numbers stay in their order
            given = shape_of(val(n))
        elif target(n) is aten.expand.default and given != column:
            return None
    if given != column or shape_of(val(y)) != full:
        return None
    return Softmax(x, node, lse.dim, tuple(dict.fromkeys((*lse.members, *reversed(between), y, node))), True, lse)


def find_softmaxes(graph: Graph, backward: set[Node]) -> Iterator[Softmax]:
    """Softmaxes of the forward part, in graph order."""
    for node in graph.nodes:
        if node.op == "call_function" and node not in backward:
            m = match_softmax(node)
            if m is not None:
                yield m


_REDUCTIONS = (aten.any.dim, aten.any.dims, aten.all.dim, aten.all.dims)


def safe_row_test(cond: object, x: Node, dim: int) -> list[Node] | None:
    """Members of ``all(x == -inf, dim, keepdim=True)``, the test by which SDPA zeroes fully masked rows; else None."""
    members: list[Node] = []
    n = cond
    negations = 0
    while target(n) in (aten.logical_not.default, aten.any.dim, aten.all.dim, aten.eq.Scalar, aten.bitwise_not.default,
                        aten.any.dims, aten.all.dims, aten.ne.Scalar) or target(n) in VIEWS:
        members.append(n)  # type: ignore[arg-type]
        t = target(n)
        if t in _REDUCTIONS and kept_dim(n) != dim:  # type: ignore[arg-type]
            return None
        if t in VIEWS and t not in COPIES:
            return None
        if t in (aten.logical_not.default, aten.bitwise_not.default):
            negations += 1
        if t in (aten.eq.Scalar, aten.ne.Scalar):
            if n.args[1] != float("-inf") or not same(n.args[0], x):  # type: ignore[attr-defined]
                return None
            kinds = [target(m) for m in members]
            has_any = aten.any.dim in kinds or aten.any.dims in kinds
            has_all = aten.all.dim in kinds or aten.all.dims in kinds
            if has_all and not has_any and negations == 0 and t is aten.eq.Scalar:
                return members
            if has_any and not has_all and _is_not_any_not(kinds, t):
                return members
            return None
        n = n.args[0]  # type: ignore[attr-defined]
    return None


def _is_not_any_not(kinds: list, last: object) -> bool:
    """not(any(not(x == -inf))) or not(any(x != -inf)), outermost first."""
    nots = (aten.logical_not.default, aten.bitwise_not.default)
    ops = [k for k in kinds if k in nots or k in (aten.any.dim, aten.any.dims, aten.eq.Scalar, aten.ne.Scalar)]
    anys = (aten.any.dim, aten.any.dims)
    if len(ops) == 4:
        return ops[0] in nots and ops[1] in anys and ops[2] in nots and last is aten.eq.Scalar
    return len(ops) == 3 and ops[0] in nots and ops[1] in anys and last is aten.ne.Scalar
