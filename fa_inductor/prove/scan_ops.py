"""Evaluation rules of running sums and of reductions whose result does not depend on data."""
from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .evaluate import Evaluator, rule
from .index_ops import Index, argument, dimension, dtype_of, replace_at, source
from .simplify import solve
from .values import Bool, Poly, Pred, Undecided, Value

aten = torch.ops.aten


@rule(aten.cumsum)
def _cumsum(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    """Running sums of a constant, of an arithmetic sequence, and of the indicator of one position."""
    src = source(node.args[0])
    if not index or dtype_of(node) not in (torch.int64, torch.int32):
        raise Undecided
    d = dimension(argument(node, 1, "dim"), len(index))
    j, last = ev.facts.loop_symbol(ev.shape(src)[d] - 1), index[d]
    element = ev.value(src, replace_at(index, d, Poly.of(j)))
    if isinstance(element, Pred):
        if not isinstance(element, Bool):
            return _step(ev, element, j, last)
        element = Poly.of(int(element.value))
    if not isinstance(element, Poly):
        raise Undecided
    parts = element.split(j)
    if parts is None or j in parts[0].free or j in parts[1].free:
        raise Undecided
    slope, start = parts
    triangle = ev.facts.floordiv(last * (last + 1), Poly.of(2)) if slope.terms else Poly({})
    total = slope * triangle + start * (last + 1)
    if not ev.trees.fits(total, dtype_of(node)):
        raise Undecided
    return total


def _step(ev: Evaluator, p: Pred, j: Any, last: Poly) -> Poly:
    """``sum_{j <= last} [j == position]`` is 1 from the position on."""
    if getattr(p, "op", None) != "eq":
        raise Undecided
    solution = solve(p.expr, j)  # type: ignore[attr-defined]
    if solution is None:
        raise Undecided
    return ev.facts.indicator(ev.facts.and_(ev.facts.cmp("ge", solution), ev.facts.cmp("ge", last - solution)))


@rule(aten.any, aten.all)
def _any_all(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    """Decided only when every element has the same constant value."""
    src = source(node.args[0])
    shape = ev.shape(src)
    dim = argument(node, 1, "dim")
    keep = bool(argument(node, 2, "keepdim", False))
    listed = range(len(shape)) if dim is None else dim if isinstance(dim, list | tuple) else [dim]
    dims = {dimension(d, len(shape)) for d in listed}
    rest = iter(index)
    at: list[Poly] = []
    for d, n in enumerate(shape):
        if d in dims:
            if not ev.facts.nonneg(n - 1):
                raise Undecided
            at.append(Poly.of(ev.facts.loop_symbol(n - 1)))
            if keep:
                next(rest)
        else:
            at.append(next(rest))
    value = ev.value(src, at)
    if isinstance(value, Poly):
        value = ev.facts.cmp("ne", value)
    if not isinstance(value, Bool):
        raise Undecided
    return value
