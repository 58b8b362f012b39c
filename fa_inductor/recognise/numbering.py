"""Value numbers: equal numbers mean equal values, whatever views, copies and spellings lie between.

Used to find, in a joint graph, the nodes that compute what a separately traced graph computes.
"""
from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.fx import Node

from .axes import spelling, spelt_shape
from .nodes import (
    CASTS,
    COPIES,
    PERMUTES,
    RESHAPES,
    aten,
    constant,
    is_full_slice,
    is_random,
    is_tensor,
    permutation,
    target,
    val,
)

Key = Hashable
_COMMUTATIVE = {aten.add.Tensor, aten.mul.Tensor}
_SAME = {aten.mul.Scalar: aten.mul.Tensor, aten.add.Scalar: aten.add.Tensor, aten.div.Scalar: aten.div.Tensor,
         aten.sub.Scalar: aten.sub.Tensor,
         # what autograd does in place in the derivative of clamp, and a functional graph as a value
         aten.logical_and_.default: aten.logical_and.default}
_REDUCTIONS = {aten.amax.default, aten.sum.dim_IntList, aten.amin.default, aten.mean.dim, aten.any.dim, aten.any.dims,
               aten.all.dim, aten.all.dims}


def _is_lifted(n: Node) -> bool:
    """A tensor made of a number outside the graph; a graph traced from a part of this one has it as an input."""
    while target(n) in CASTS or target(n) in COPIES or target(n) in RESHAPES:
        if target(n) is aten.lift_fresh_copy.default:
            return True
        n = n.args[0]  # type: ignore[assignment]
    return False


class Numbering:
    """Numbers nodes of one graph, and of other graphs in terms of it."""

    def __init__(self) -> None:
        self._table: dict[Key, int] = {}
        self._key: list[Key] = []
        self.first: dict[int, Node] = {}
        """The earliest node of the numbered graph that holds a value."""
        self.all: dict[int, list[Node]] = {}
        self._by_target: dict[Any, list[Node]] = {}

    def number_graph(self, nodes: Any) -> dict[Node, int]:
        ids: dict[Node, int] = {}
        for n in nodes:
            i = self._intern(self._value(n, ids.get))
            ids[n] = i
            self.first.setdefault(i, n)
            self.all.setdefault(i, []).append(n)
            self._by_target.setdefault(n.target, []).append(n)
        return ids

    def nodes_with_target(self, t: Any) -> list[Node]:
        return self._by_target.get(t, [])

    def lookup(self, node: Node, ids: Callable[[Node], int | None]) -> int | None:
        """The number of a node of another graph whose inputs have numbers; None when this value is not here."""
        if any(ids(i) is None for i in node.all_input_nodes if is_tensor(i)):
            return None
        key = self._value(node, ids)
        return key if isinstance(key, int) else self._table.get(key)

    def _intern(self, key: Key | int) -> int:
        if isinstance(key, int):
            return key
        i = self._table.get(key)
        if i is None:
            i = self._table[key] = len(self._key)
            self._key.append(key)
        return i

    def _value(self, n: Node, ids: Callable[[Node], int | None]) -> Key | int:
        """An existing number when the node only passes a value on, else the key of its value."""
        t = target(n)
        v = n.meta.get("val")
        if t is None or not isinstance(v, torch.Tensor):
            if isinstance(v, (torch.SymInt, int)) and not isinstance(v, bool):
                return ("int", str(spelling(v)))
            if t is None or v is None:
                return ("node", id(n))
        if is_random(n):
            return ("node", id(n))
        if not isinstance(v, torch.Tensor):
            return self._generic(n, t, ids, None)
        src = n.args[0] if n.args and is_tensor(n.args[0]) else None
        shape, dtype = spelt_shape(v), v.dtype
        if src is not None and len(n.args) > 1 and t in _REDUCTIONS:
            dims = n.args[1] if isinstance(n.args[1], (list, tuple)) else [n.args[1]]
            rank = max(val(src).dim(), 1)
            return ("reduce", str(t), ids(src), tuple(sorted(d % rank for d in dims)), n.args[2:], shape, dtype)
        if src is not None:
            i = ids(src)
            if t in COPIES or (t in CASTS and val(src).dtype == dtype) or (
                    t is aten.slice.Tensor and is_full_slice(n)):
                return i if i is not None else ("node", id(n))
            if t in RESHAPES or t is aten.expand.default:
                if spelt_shape(val(src)) == shape:
                    return i if i is not None else ("node", id(n))
                if t in RESHAPES:
                    return self._reshape(i, shape, dtype)
                return ("expand", i, shape, dtype)
            if t is aten.copy.default and spelt_shape(val(n.args[1])) == shape and val(n.args[1]).dtype == dtype:
                i = ids(n.args[1])
                return i if i is not None else ("node", id(n))
            if t in PERMUTES:
                return self._permute(i, permutation(n), shape, dtype)
            if t in CASTS:
                return ("cast", i, dtype, val(src).dtype)
        if t in (aten.full.default, aten.scalar_tensor.default):
            c = constant(n)
            if c is not None:
                return ("const", c, type(c) is bool, shape, dtype)
        return self._generic(n, t, ids, (shape, dtype))

    def _reshape(self, i: int | None, shape: tuple, dtype: torch.dtype) -> Key | int:
        """A reshape of a reshape is one reshape; back to the original shape it is the original."""
        key = self._key[i] if i is not None else None
        if isinstance(key, tuple) and key[0] == "reshape":
            base, base_shape = key[1], key[4]
            return base if base_shape == shape else ("reshape", base, shape, dtype, base_shape)
        return ("reshape", i, shape, dtype, self._shape(i))

    def _shape(self, i: int | None) -> tuple | None:
        n = self.first.get(i) if i is not None else None
        return spelt_shape(val(n)) if n is not None and is_tensor(n) else None

    def _permute(self, i: int | None, perm: tuple[int, ...], shape: tuple, dtype: torch.dtype) -> Key | int:
        key = self._key[i] if i is not None else None
        if isinstance(key, tuple) and key[0] == "permute":
            perm = tuple(key[2][d] for d in perm)
            i = key[1]
        if perm == tuple(range(len(perm))):
            return i if i is not None else ("permute", i, perm, shape, dtype)
        return ("permute", i, perm, shape, dtype)

    def _generic(self, n: Node, t: Any, ids: Callable[[Node], int | None], meta: Any) -> Key:
        args = [self._arg(a, ids) for a in n.args]
        t = _SAME.get(t, t)
        if t in _COMMUTATIVE and not n.kwargs:
            args.sort(key=repr)
        return ("op", str(t), tuple(args), tuple(sorted((k, self._arg(v, ids)) for k, v in n.kwargs.items())), meta)

    def _arg(self, a: Any, ids: Callable[[Node], int | None]) -> Key:
        if isinstance(a, Node):
            v = a.meta.get("val")
            if isinstance(v, (torch.SymInt, int)) and not isinstance(v, bool):
                return ("int", str(spelling(v)))
            c = constant(a)
            if c is not None and val(a).dim() == 0 and not _is_lifted(a):
                return ("number", float(c))
            return ("v", ids(a))
        if isinstance(a, (list, tuple)):
            return ("list", tuple(self._arg(x, ids) for x in a))
        if isinstance(a, bool) or a is None:
            return ("lit", str(a))
        if isinstance(a, (int, float)):
            return ("number", float(a))
        if isinstance(a, torch.SymInt):
            return ("int", str(spelling(a)))
        return ("lit", str(a))
