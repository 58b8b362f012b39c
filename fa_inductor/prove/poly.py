"""Integer polynomials over symbols and structured atoms: the prover's normal form of integers.

An atom is a sympy symbol (one of the axes ``b h q k``, or a size symbol of the ShapeEnv) or a structured term of
`values`.  sympy expressions come in and go out at the border; inside, a plain dict is the normal form, because equality
and hashing are all the prover asks of the algebra: subtracting two flattened indices takes 21 us here and 1.1 ms with
``sympy.expand`` (uncached, one Xeon core).
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import sympy

AXIS_B, AXIS_H, AXIS_Q, AXIS_K = AXES = sympy.symbols("b h q k", integer=True)
"""Canonical 0-based position in the score matrix: batch, query head, query, key."""
AXIS_SET: frozenset[Any] = frozenset(AXES)
_NO_SYMBOLS: frozenset[Any] = frozenset()


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


# a monomial is a frozenset of (atom, power) pairs; the empty one is the constant term
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
    if isinstance(a, sympy.Basic):
        return a  # type: ignore[return-value]
    convert = getattr(a, "to_sympy", None)
    return convert() if convert is not None else sympy.Symbol(str(a), integer=True)
