"""Sizes that a graph says are equal, though its shapes spell them differently.

A backward may reach a size by another way than its forward: an element count divided by other dimensions, where the
forward has a product of window sides.  A view that is called with the one size and whose shape shows the other proves
them equal: its result has the sizes that it was called with.
"""
from __future__ import annotations

import sympy
import torch
from torch.fx import Graph

from .axes import Size
from .nodes import aten, is_tensor, target

_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_copy.default,
          aten.view_copy.default, aten.expand.default}


def equal_sizes(graph: Graph) -> dict[sympy.Expr, Size]:
    """For each size that has another spelling, the number it is, or the spelling that the graph uses first."""
    parent: dict[sympy.Expr, sympy.Expr] = {}
    order: dict[sympy.Expr, int] = {}

    def root(e: sympy.Expr) -> sympy.Expr:
        while e in parent:
            e = parent[e]
        return e

    for n in graph.nodes:
        if target(n) not in _VIEWS or len(n.args) < 2 or not is_tensor(n):
            continue
        for given, shown in zip(n.args[1], n.meta["val"].shape, strict=True):
            a, b = _spelling(given), _spelling(shown)
            if a is None or b is None or a == -1:
                continue
            for e in (a, b):
                order.setdefault(e, -1 if e.is_number else len(order))
            a, b = sorted((root(a), root(b)), key=order.__getitem__)
            if a != b and not b.is_number:
                parent[b] = a
    return {e: _size(root(e)) for e in parent}


def _spelling(x: object) -> sympy.Expr | None:
    if isinstance(x, torch.fx.Node):
        x = x.meta.get("val")
    if isinstance(x, torch.SymInt):
        return x.node.expr
    return sympy.Integer(x) if isinstance(x, int) and not isinstance(x, bool) else None


def _size(e: sympy.Expr) -> Size:
    return int(e) if e.is_number else e
