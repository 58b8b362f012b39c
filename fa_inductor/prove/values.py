"""Symbolic values of graph nodes: structured integer atoms, predicates and float trees.

An integer value is a `Poly`, a boolean one a `Pred`, a float one a `Tree`.  Everything here is immutable and
structural; simplification lives in `simplify`.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from .poly import AXES, AXIS_B, AXIS_H, AXIS_K, AXIS_Q, AXIS_SET, Poly, Term, axes_of, free

__all__ = [
    "AXES", "AXIS_B", "AXIS_H", "AXIS_K", "AXIS_Q", "AXIS_SET", "FALSE", "TRUE", "And", "Apply", "Bool", "Cast", "Cmp",
    "Const", "FloorDiv", "Indicator", "Leaf", "Load", "Max", "Opaque", "Or", "Poly", "Pred", "Select", "Term", "Tree",
    "Undecided", "Value", "axes_of", "free", "size_of", "trees_of",
]


class Undecided(Exception):
    """The value of a node could not be expressed; the caller keeps the node as an opaque load."""


# -- structured integer atoms -------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class FloorDiv(Term):
    """``n // d`` rounded down, d proven positive."""

    n: Poly
    d: Poly

    def to_sympy(self) -> sympy.Expr:
        return sympy.floor(self.n.to_sympy() / self.d.to_sympy())


@dataclass(frozen=True, eq=False, slots=True)
class Max(Term):
    """The larger of two integers; min and abs are written with it."""

    a: Poly
    b: Poly

    def to_sympy(self) -> sympy.Expr:
        return sympy.Max(self.a.to_sympy(), self.b.to_sympy())


@dataclass(frozen=True, eq=False, slots=True)
class Indicator(Term):
    """1 where the predicate holds, else 0."""

    pred: Pred


@dataclass(frozen=True, eq=False, slots=True)
class Opaque(Term):
    """An integer that only the run time knows: the value of a tree of integer dtype."""

    tree: Tree


# -- trees: float values, and opaque values of any dtype -------------------------------------------------------------


class Tree(Term):
    """A value of a known dtype at one position."""

    __slots__ = ()
    dtype: torch.dtype


@dataclass(frozen=True, eq=False, slots=True)
class Const(Tree):
    """A number that ``dtype`` represents exactly; -0.0 and 0.0 differ, NaN equals NaN."""

    value: float | int | bool
    dtype: torch.dtype

    def _parts(self) -> tuple[Any, ...]:
        return type(self.value).__name__, repr(self.value), self.dtype


@dataclass(frozen=True, eq=False, slots=True)
class Load(Tree):
    """The tensor computed by a graph node, read at an index."""

    node: fx.Node
    index: tuple[Poly, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.node.name}[{', '.join(map(str, self.index))}]"


@dataclass(frozen=True, eq=False, slots=True)
class Select(Tree):
    """``a`` where the predicate holds, else ``b``."""

    pred: Pred
    a: Tree
    b: Tree
    dtype: torch.dtype


@dataclass(frozen=True, eq=False, slots=True)
class Cast(Tree):
    """An integer as ``dtype`` (float or integer), rounded as torch rounds it."""

    expr: Poly
    dtype: torch.dtype


@dataclass(frozen=True, eq=False, slots=True)
class Apply(Tree):
    """A pointwise operator applied to values at the same position.

    Arguments are trees and predicates (tensors), a `Poly` (a symbolic python int), or plain python values.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    scalars: frozenset[int]
    """Positions of arguments that are 0-dimensional tensors: they do not take part in type promotion."""
    dtype: torch.dtype


# -- predicates -------------------------------------------------------------


class Pred(Term):
    """A boolean value."""

    __slots__ = ()


@dataclass(frozen=True, eq=False, slots=True)
class Bool(Pred):
    value: bool


TRUE, FALSE = Bool(True), Bool(False)


@dataclass(frozen=True, eq=False, slots=True)
class Cmp(Pred):
    """``expr >= 0``, ``expr == 0`` or ``expr != 0`` (op ``ge``, ``eq``, ``ne``)."""

    op: str
    expr: Poly

    def _parts(self) -> tuple[Any, ...]:
        return (self.op, self.expr) if self.op == "ge" else (self.op, frozenset((self.expr, -self.expr)))

    @property
    def free(self) -> frozenset[Any]:
        return self.expr.free


@dataclass(frozen=True, eq=False, slots=True)
class Leaf(Pred):
    """An opaque boolean tree, or its negation."""

    tree: Tree
    positive: bool = True


@dataclass(frozen=True, eq=False, slots=True)
class And(Pred):
    args: tuple[Pred, ...]
    key: frozenset[Pred] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", frozenset(self.args))

    def _parts(self) -> tuple[Any, ...]:
        return (self.key,)

    @property
    def free(self) -> frozenset[Any]:
        return free(self.args)


@dataclass(frozen=True, eq=False, slots=True)
class Or(Pred):
    args: tuple[Pred, ...]
    key: frozenset[Pred] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", frozenset(self.args))

    def _parts(self) -> tuple[Any, ...]:
        return (self.key,)

    @property
    def free(self) -> frozenset[Any]:
        return free(self.args)


Value = Poly | Pred | Tree


def trees_of(x: Any) -> Iterator[Tree]:
    """The opaque trees that a predicate or polynomial reads, outermost first, repeats included."""
    if isinstance(x, Poly):
        for a in x.atoms():
            yield from trees_of(a)
    elif isinstance(x, Opaque):
        yield x.tree
    elif isinstance(x, Leaf):
        yield x.tree
    elif isinstance(x, FloorDiv):
        yield from trees_of(x.n)
        yield from trees_of(x.d)
    elif isinstance(x, Max):
        yield from trees_of(x.a)
        yield from trees_of(x.b)
    elif isinstance(x, Indicator):
        yield from trees_of(x.pred)
    elif isinstance(x, Cmp):
        yield from trees_of(x.expr)
    elif isinstance(x, And | Or):
        for p in x.args:
            yield from trees_of(p)


def size_of(x: Any, limit: int = 10_000) -> int:
    """Number of terms of a predicate (a cheap measure that bounds case splits)."""
    if isinstance(x, And | Or):
        total = 1
        for p in x.args:
            total += size_of(p, limit)
            if total > limit:
                break
        return total
    return 1
