"""A bias that only the distance of key and query decides, as a table over distances instead of a tensor over q and k.

T5 and its kin look a distance up in a small learned table: ``weight[bucket(k - q)]``.  Written out that is a tensor of
Sq x Sk for each head; what it can hold are the Sq + Sk - 1 values of one diagonal each.
"""
from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import fx

from fa_inductor.kernels.expr import MARGIN

from .evaluate import Evaluator
from .materialise import Materialiser
from .values import AXIS_K, AXIS_Q, Apply, Load, Poly, Select, Tree, axes_of

aten, prims = torch.ops.aten, torch.ops.prims
_POSITION = frozenset((AXIS_Q, AXIS_K))


def by_distance(ev: Evaluator, tree: Tree) -> Tree | None:
    """An equal value that depends on q and k by ``k - q`` alone, with look-ups in tables followed to their index.

    The proof: the value is the same, term by term, for the next query and the next key.  None where there is none, and
    where nothing changes along both.
    """
    if not axes_of(tree) >= _POSITION:
        return None
    followed = _followed(ev, tree)
    return followed if _next(followed) == followed else None


def _followed(ev: Evaluator, x: Any) -> Any:
    """`x` with every ``weight[index]`` in it, which is opaque elsewhere, read at the value of its index."""
    if isinstance(x, Load):
        return _looked_up(ev, x)
    if isinstance(x, Select):
        return ev.trees.select(x.pred, _followed(ev, x.a), _followed(ev, x.b))
    if isinstance(x, Apply):
        return Apply(x.target, tuple(_followed(ev, a) for a in x.args), x.kwargs, x.scalars, x.dtype)
    return x


def _looked_up(ev: Evaluator, tree: Load) -> Tree:
    found = _table(tree.node)
    if found is None:
        return tree
    weight, index = found
    rank = index.meta["val"].ndim
    value = ev.value(index, tree.index[:rank])
    if not isinstance(value, Poly) or not axes_of(value) >= _POSITION:
        return tree
    if tree.node.target is not aten.embedding.default and not ev.facts.nonneg(value):  # a negative one counts from the end
        value = value + ev.shape(weight)[0] * Poly.of(ev.facts.indicator(ev.facts.cmp("ge", -value - 1)))
    return Load(weight, (value, *tree.index[rank:]), tree.dtype)


def _table(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """``(weight, index)`` of a look-up along the first dimension of a tensor."""
    if node.target is aten.embedding.default:
        weight, index = node.args[:2]
    elif node.target is aten.index.Tensor and len(node.args[1]) == 1:  # type: ignore[arg-type]
        weight, (index,) = node.args[:2]  # type: ignore[misc]
    else:
        return None
    if not isinstance(weight, fx.Node) or not isinstance(index, fx.Node):
        return None
    return (weight, index) if index.meta["val"].dtype in (torch.int64, torch.int32) else None


def _next(x: Any) -> Any:
    """A value at the next query and the next key."""
    if isinstance(x, tuple):
        return tuple(map(_next, x))
    if not axes_of(x) & _POSITION:
        return x
    if isinstance(x, Poly):
        total = Poly({})
        for m, c in x.terms.items():
            term = Poly.of(c)
            for a, power in m:
                one = Poly.of(a) + 1 if a in _POSITION else Poly.of(_next(a))
                for _ in range(power):
                    term = term * one
            total = total + term
        return total
    return type(x)(**{f.name: _next(getattr(x, f.name)) for f in fields(x) if f.init})


class Distances(Materialiser):
    """Emits values along the diagonals: ``[B or 1, Hq or 1, 1, Sq + Sk - 1 + 2 MARGIN]``, at position d the value for ``k - q
    = d - (Sq - 1) - MARGIN``, read at the first query and key with this distance, and in the margins that at their end."""

    def _new_atom(self, a: Any) -> fx.Node:
        if a not in _POSITION:
            return super()._new_atom(a)
        behind = self._cached("behind", self._behind)
        x = behind if a == AXIS_Q else self.call(aten.neg.default, behind)
        last = self.integer(self.ev.facts.sizes[a] - 1)
        end = last if isinstance(last, int) else self.call(aten.scalar_tensor.default, last, dtype=torch.int64, device=self.device)
        x = self.call(aten.clamp_min.default, x, 0)
        return self.call(aten.clamp_max.default, x, end) if isinstance(end, int) else self.call(aten.minimum.default, x, end)

    def _behind(self) -> fx.Node:
        """By how much the query is behind the key: q - k on each diagonal."""
        rows, keys = (self.ev.facts.sizes[a] for a in (AXIS_Q, AXIS_K))
        size = self.integer(rows + keys - 1 + 2 * MARGIN)
        first = self.integer(rows - 1 + MARGIN)
        d = self.call(prims.iota.default, size, start=0, step=1, dtype=torch.int64, device=self.device, requires_grad=False)
        q = self.call(aten.add.Tensor, self.call(aten.neg.default, d), first)
        return self.call(aten.view.default, q, [1, 1, 1, size])

    def table(self, tree: Tree, dtype: torch.dtype) -> fx.Node:
        """``tree``, as `by_distance` gave it, in `dtype`."""
        x = self.tree(tree)
        return x if tree.dtype == dtype else self.call(prims.convert_element_type.default, x, dtype)


def distances(mat: Materialiser, tree: Tree, dtype: torch.dtype) -> fx.Node:
    """Emit the table of a `by_distance` value where `mat` emits; once for all blocks that share it."""
    return mat._cached(("distances", tree, dtype), lambda: Distances(mat.graph, mat.insert_before, mat.ev, mat.device).table(
        tree, dtype))
