"""Symbolic values of graph nodes: integer polynomials, predicates and float trees.

An integer value is a `Poly`: a polynomial with integer coefficients over *atoms*.  An atom is a sympy symbol (one
of the axes ``b h q k``, or a size symbol of the ShapeEnv) or one of the structured atoms below.  sympy expressions
come in and go out at the border (`from_sympy`, `to_sympy`); inside, a plain dict is the normal form, because equality
and hashing are all the prover asks of the algebra and sympy's own ``expand`` is 20 to 50 times slower at it.

Everything here is immutable and structural; simplification lives in `simplify`.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import sympy
import torch
from torch import fx

AXIS_B, AXIS_H, AXIS_Q, AXIS_K = AXES = sympy.symbols("b h q k", integer=True)
"""Canonical 0-based position in the score matrix: batch, query head, query, key."""
AXIS_SET: frozenset[Any] = frozenset(AXES)
_NO_SYMBOLS: frozenset[Any] = frozenset()


class Undecided(Exception):
    """The value of a node could not be expressed; the caller keeps the node as an opaque load."""


class Term:
    """Base of all structured terms: structural equality with a hash and a free-symbol set computed once."""

    __slots__ = ("_free", "_hash")

    def _parts(self) -> tuple[Any, ...]:
        return tuple(getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]

    def __hash__(self) -> int:
        try:
            return self._hash  # type: ignore[attr-defined]
        except AttributeError:
            value = hash((type(self).__name__, self._parts()))
            object.__setattr__(self, "_hash", value)
            return value

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return type(self) is type(other) and hash(self) == hash(other) and self._parts() == other._parts()  # type: ignore[attr-defined]

    @property
    def free(self) -> frozenset[Any]:
        """Axes and size symbols that the value depends on."""
        try:
            return self._free  # type: ignore[attr-defined]
        except AttributeError:
            value = _NO_SYMBOLS.union(*map(free, self._parts()))
            object.__setattr__(self, "_free", value)
            return value


def free(x: Any) -> frozenset[Any]:
    """Axes and size symbols of any value, atom or tuple of them."""
    if isinstance(x, sympy.Symbol):
        return frozenset((x,))
    if isinstance(x, Term | Poly):
        return x.free
    if isinstance(x, tuple):
        return _NO_SYMBOLS.union(*map(free, x)) if x else _NO_SYMBOLS
    return _NO_SYMBOLS


def axes_of(x: Any) -> frozenset[Any]:
    return free(x) & AXIS_SET


Mono = frozenset  # of (atom, power) pairs; the empty one is the constant term
_ONE: frozenset[Any] = frozenset()


class Poly:
    """Integer polynomial ``sum coefficient * prod atom**power`` in normal form."""

    __slots__ = ("_free", "_hash", "terms")

    def __init__(self, terms: Mapping[frozenset[Any], int]) -> None:
        self.terms: dict[frozenset[Any], int] = {m: c for m, c in terms.items() if c}

    @staticmethod
    def of(x: int | Any) -> Poly:
        """An integer or an atom as a polynomial."""
        if isinstance(x, Poly):
            return x
        if isinstance(x, int):
            return Poly({_ONE: int(x)})
        return Poly({frozenset(((x, 1),)): 1})

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            self._hash = hash(frozenset(self.terms.items()))
            return self._hash

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            other = Poly.of(other)
        return isinstance(other, Poly) and self.terms == other.terms

    def __repr__(self) -> str:
        return str(self.to_sympy())

    @property
    def free(self) -> frozenset[Any]:
        try:
            return self._free
        except AttributeError:
            self._free = _NO_SYMBOLS.union(*(free(a) for m in self.terms for a, _ in m))
            return self._free

    def constant(self) -> int | None:
        """The value when it is a number, else None."""
        if not self.terms:
            return 0
        return self.terms.get(_ONE) if len(self.terms) == 1 else None

    @property
    def const_term(self) -> int:
        return self.terms.get(_ONE, 0)

    def atoms(self) -> list[Any]:
        """Distinct atoms in order of appearance."""
        return list(dict.fromkeys(a for m in self.terms for a, _ in m))

    def __add__(self, other: Poly | int) -> Poly:
        terms = dict(self.terms)
        for m, c in Poly.of(other).terms.items():
            terms[m] = terms.get(m, 0) + c
        return Poly(terms)

    def __neg__(self) -> Poly:
        return Poly({m: -c for m, c in self.terms.items()})

    def __sub__(self, other: Poly | int) -> Poly:
        return self + (-Poly.of(other))

    def __mul__(self, other: Poly | int) -> Poly:
        if isinstance(other, int):
            return Poly({m: c * other for m, c in self.terms.items()})
        terms: dict[frozenset[Any], int] = {}
        for m1, c1 in self.terms.items():
            for m2, c2 in other.terms.items():
                m = _mul_mono(m1, m2)
                terms[m] = terms.get(m, 0) + c1 * c2
        return Poly(terms)

    def split(self, atom: Any) -> tuple[Poly, Poly] | None:
        """``(coefficient, rest)`` with ``self == coefficient * atom + rest``; None when not linear in atom."""
        coefficient: dict[frozenset[Any], int] = {}
        rest: dict[frozenset[Any], int] = {}
        for m, c in self.terms.items():
            power = next((p for a, p in m if a == atom), 0)
            if power == 0:
                rest[m] = c
            elif power == 1:
                coefficient[frozenset(x for x in m if x[0] != atom)] = c
            else:
                return None
        return Poly(coefficient), Poly(rest)

    def partition(self, keep: frozenset[Any]) -> tuple[Poly, Poly]:
        """``(terms that depend on a symbol of keep, the other terms)``."""
        inside = {m: c for m, c in self.terms.items() if any(free(a) & keep for a, _ in m)}
        return Poly(inside), Poly({m: c for m, c in self.terms.items() if m not in inside})

    def max_coefficient(self) -> int:
        return max((abs(c) for c in self.terms.values()), default=0)

    def to_sympy(self) -> sympy.Expr:
        """For readers and tests; structured atoms become functions or dummy symbols named after them."""
        return sympy.Add(*(sympy.Mul(c, *(_atom_sympy(a) ** p for a, p in m)) for m, c in self.terms.items()))


def _mul_mono(m1: frozenset[Any], m2: frozenset[Any]) -> frozenset[Any]:
    if not m1 or not m2:
        return m1 or m2
    powers = dict(m1)
    for a, p in m2:
        powers[a] = powers.get(a, 0) + p
    return frozenset(powers.items())


def _atom_sympy(a: Any) -> sympy.Expr:
    if isinstance(a, FloorDiv):
        return sympy.Function("FloorDiv")(a.n.to_sympy(), a.d.to_sympy())
    if isinstance(a, Max):
        return sympy.Function("Max")(a.a.to_sympy(), a.b.to_sympy())
    return a if isinstance(a, sympy.Basic) else sympy.Symbol(str(a), integer=True)



# -- structured integer atoms -------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class FloorDiv(Term):
    """``n // d`` rounded down, d proven positive."""

    n: Poly
    d: Poly


@dataclass(frozen=True, eq=False, slots=True)
class Max(Term):
    """The larger of two integers; min and abs are written with it."""

    a: Poly
    b: Poly


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


def sum_of(xs: Iterable[Poly]) -> Poly:
    total = Poly({})
    for x in xs:
        total = total + x
    return total
