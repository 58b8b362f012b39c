"""Simplifying constructors for integers and predicates.

`Facts` builds every value of the prover, so that equal values are equal terms as far as `Ranges.nonneg` can tell:
quotients and remainders of mixed-radix sums fold, comparisons have one normal form, conjunctions have no redundant
or contradictory members.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import gcd
from typing import Any

import sympy

from .ranges import Ranges
from .values import (
    FALSE,
    TRUE,
    And,
    Apply,
    Bool,
    Cast,
    Cmp,
    FloorDiv,
    Indicator,
    Leaf,
    Load,
    Max,
    Opaque,
    Or,
    Poly,
    Pred,
    Select,
    Tree,
    Undecided,
    axes_of,
    size_of,
)

_MAX_SPLIT = 4
_MAX_PREDICATE = 64


class Facts(Ranges):
    """Simplifier under the ranges of one score matrix."""

    # -- integer constructors -------------------------------------------------------------

    def floordiv(self, n: Poly, d: Poly) -> Poly:
        """``n // d`` rounded down.

        Raises:
            Undecided: d is not proven positive.
        """
        if d == 1:
            return n
        if not self.nonneg(d - 1):
            raise Undecided
        quotient, rest = _divide(n, d)
        if self.in_range(rest, 0, d):
            return quotient
        if self.in_range(rest, -d, 0):
            return quotient - 1
        atoms = rest.atoms()
        if len(atoms) == 1 and isinstance(atoms[0], FloorDiv) and rest == Poly.of(atoms[0]):
            return quotient + self.floordiv(atoms[0].n, atoms[0].d * d)
        return quotient + Poly.of(FloorDiv(rest, d))

    def mod(self, n: Poly, d: Poly) -> Poly:
        """Remainder with the sign of d, as ``n - d * (n // d)``: one normal form for both."""
        return n - d * self.floordiv(n, d)

    def maximum(self, a: Poly, b: Poly) -> Poly:
        if self.nonneg(a - b):
            return a
        if self.nonneg(b - a):
            return b
        return Poly.of(Max(a, b)) if str(a) <= str(b) else Poly.of(Max(b, a))

    def minimum(self, a: Poly, b: Poly) -> Poly:
        return -self.maximum(-a, -b)

    def abs(self, a: Poly) -> Poly:
        return self.maximum(a, -a)

    def indicator(self, p: Pred) -> Poly:
        if isinstance(p, Bool):
            return Poly.of(int(p.value))
        return Poly.of(Indicator(p))

    def select(self, p: Pred, a: Poly, b: Poly) -> Poly:
        """``a`` where p holds, else ``b``."""
        if p == TRUE or a == b:
            return a
        if p == FALSE:
            return b
        if isinstance(p, Cmp) and p.op in ("eq", "ne"):
            at_equality, elsewhere = (a, b) if p.op == "eq" else (b, a)
            for s in p.expr.free:
                solution = solve(p.expr, s)
                if solution is not None and self.substitute(at_equality - elsewhere, {s: solution}) == 0:
                    return elsewhere
        return b + Poly.of(Indicator(p)) * (a - b)

    # -- predicate constructors -------------------------------------------------------------

    def cmp(self, op: str, p: Poly, splits: int = _MAX_SPLIT) -> Pred:
        """``p >= 0`` (``ge``), ``p == 0`` (``eq``) or ``p != 0`` (``ne``) in normal form."""
        if op == "ne":
            return self.not_(self.cmp("eq", p, splits))
        p = _primitive(op, p)
        c = p.constant()
        if c is not None:
            return Bool(c >= 0 if op == "ge" else c == 0)
        if op == "ge":
            if self.nonneg(p):
                return TRUE
            if self.nonneg(-p - 1):
                return FALSE
        else:
            if p.const_term % _content(p):
                return FALSE
            if self.nonneg(p - 1) or self.nonneg(-p - 1):
                return FALSE
            if self.nonneg(p) and self.nonneg(-p):
                return TRUE
        if splits:
            split = self._case_split(op, p, splits - 1)
            if split is not None:
                return split
        if op == "ge" and self.nonneg(-p):
            return self.cmp("eq", p, 0)
        return Cmp(op, p)

    def _case_split(self, op: str, p: Poly, splits: int) -> Pred | None:
        for a in p.atoms():
            if not isinstance(a, Indicator | Max):
                continue
            parts = p.split(a)
            if parts is None:
                continue
            coefficient, rest = parts
            if isinstance(a, Indicator):
                return self.where(a.pred, self.cmp(op, coefficient + rest, splits), self.cmp(op, rest, splits))
            sign = coefficient.constant()
            if sign is None:
                continue
            if op == "eq":
                return self.and_(self.cmp("ge", p, splits), self.cmp("ge", -p, splits))
            branches = (self.cmp(op, coefficient * x + rest, splits) for x in (a.a, a.b))
            return self.or_(*branches) if sign > 0 else self.and_(*branches)
        return None

    def not_(self, p: Pred) -> Pred:
        match p:
            case Bool(value=v):
                return Bool(not v)
            case Cmp(op="ge", expr=e):
                return self.cmp("ge", -e - 1)
            case Cmp(op=op, expr=e):
                return Cmp("ne" if op == "eq" else "eq", e)
            case Leaf(tree=t, positive=s):
                return Leaf(t, not s)
            case And(args=xs):
                return self.or_(*(self.not_(x) for x in xs))
            case Or(args=xs):
                return self.and_(*(self.not_(x) for x in xs))
        raise Undecided

    def and_(self, *preds: Pred) -> Pred:
        """Conjunction without redundant or contradictory members."""
        members: list[Pred] = []
        for p in _flatten(And, preds):
            if p == FALSE:
                return FALSE
            if p != TRUE and p not in members:
                members.append(p)
        for m in members:
            if not isinstance(m, Or) and self.not_(m) in members:
                return FALSE
        for i, m in enumerate(members):
            if isinstance(m, Or):
                others = members[:i] + members[i + 1:]
                if any(x in others for x in m.args):  # absorption
                    return self.and_(*others)
                kept = [x for x in m.args if self.not_(x) not in others]
                if len(kept) < len(m.args):  # a & (!a | b) = a & b
                    return self.and_(*members[:i], self.or_(*kept), *members[i + 1:])
        reduced = self._reduce(members)
        if reduced is None:
            return FALSE
        return TRUE if not reduced else reduced[0] if len(reduced) == 1 else self._bounded(And(tuple(reduced)))

    def or_(self, *preds: Pred) -> Pred:
        """Disjunction, by duality; members that all alternatives share are taken out."""
        members: list[Pred] = []
        for p in _flatten(Or, preds):
            if p == TRUE:
                return TRUE
            if p != FALSE and p not in members:
                members.append(p)
        if len(members) > 1 and all(isinstance(m, And) for m in members):
            first, *rest = (m.args for m in members if isinstance(m, And))
            common = [x for x in first if all(x in r for r in rest)]
            if common:
                return self.and_(*common, self.or_(*(self.and_(*(x for x in m.args if x not in common))
                                                     for m in members if isinstance(m, And))))
        for i, m in enumerate(members):
            others = members[:i] + members[i + 1:]
            negation = self.not_(m) if not isinstance(m, And) else None
            if negation is not None and negation in others:
                return TRUE
            if isinstance(m, And):
                if any(x in others for x in m.args):
                    return self.or_(*others)
                kept = [x for x in m.args if isinstance(x, And | Or) or self.not_(x) not in others]
                if len(kept) < len(m.args):
                    return self.or_(*members[:i], self.and_(*kept), *members[i + 1:])
        negations = [(n, m) for m in members if isinstance(m, Cmp) and isinstance(n := self.not_(m), Cmp)]
        reduced = self._reduce([n for n, _ in negations])
        if reduced is None:
            return TRUE
        implied = [m for n, m in negations if not any(n is r for r in reduced)]
        members = [m for m in members if not any(m is x for x in implied)]
        return FALSE if not members else members[0] if len(members) == 1 else self._bounded(Or(tuple(members)))

    def xor(self, a: Pred, b: Pred) -> Pred:
        return self.or_(self.and_(a, self.not_(b)), self.and_(self.not_(a), b))

    def where(self, p: Pred, a: Pred, b: Pred) -> Pred:
        if a == b:
            return a
        return self.or_(self.and_(p, a), self.and_(self.not_(p), b))

    def _reduce(self, members: list[Any]) -> list[Any] | None:
        """Drop comparisons that another one implies; None when two of them exclude each other."""
        bounds = [m for m in members if isinstance(m, Cmp) and m.op != "ne"]
        dropped: set[int] = set()
        for i, x in enumerate(bounds):
            for j, y in enumerate(bounds):
                if i == j or i in dropped or j in dropped or not (x.expr.free & y.expr.free):
                    continue
                if i < j and self._exclude(x, y):
                    return None
                if y.op == "ge" and self._implies(x, y):
                    dropped.add(j)
        gone = {id(bounds[j]) for j in dropped}
        return [m for m in members if id(m) not in gone]

    def _implies(self, x: Cmp, y: Cmp) -> bool:
        return self.nonneg(y.expr - x.expr) or (x.op == "eq" and self.nonneg(y.expr + x.expr))

    def _exclude(self, x: Cmp, y: Cmp) -> bool:
        signs = (((1, 1),) if x.op == y.op == "ge" else ((1, 1), (1, -1)) if y.op == "eq" and x.op == "ge"
                 else ((1, 1), (-1, 1)) if y.op == "ge" else ((1, 1), (1, -1), (-1, 1), (-1, -1)))
        return any(self.nonneg(-(x.expr * i + y.expr * j) - 1) for i, j in signs)

    def _bounded(self, p: Pred) -> Pred:
        if size_of(p, _MAX_PREDICATE) > _MAX_PREDICATE:
            raise Undecided
        return p

    # -- substitution -------------------------------------------------------------

    def substitute(self, x: Any, at: Mapping[Any, Poly]) -> Any:
        """``x`` with symbols replaced, simplified again."""
        if not isinstance(x, Poly | Pred | Tree) or not any(s in x.free for s in at):
            return x
        sub = self.substitute
        match x:
            case Poly():
                total = Poly({})
                for m, c in x.terms.items():
                    product = Poly.of(c)
                    for a, power in m:
                        value = self._substitute_atom(a, at)
                        for _ in range(power):
                            product = product * value
                    total = total + product
                return total
            case Cmp(op=op, expr=e):
                return self.cmp(op, sub(e, at))
            case Leaf(tree=t, positive=s):
                return Leaf(sub(t, at), s)
            case And(args=xs):
                return self.and_(*(sub(p, at) for p in xs))
            case Or(args=xs):
                return self.or_(*(sub(p, at) for p in xs))
            case Load(node=n, index=i, dtype=d):
                return Load(n, tuple(sub(p, at) for p in i), d)
            case Select(pred=p, a=a, b=b, dtype=d):
                return Select(sub(p, at), sub(a, at), sub(b, at), d)
            case Cast(expr=e, dtype=d):
                return Cast(sub(e, at), d)
            case Apply(target=t, args=args, kwargs=kw, scalars=sc, dtype=d):
                return Apply(t, tuple(sub(a, at) for a in args), kw, sc, d)
        return x

    def _substitute_atom(self, a: Any, at: Mapping[Any, Poly]) -> Poly:
        match a:
            case FloorDiv(n=n, d=d):
                return self.floordiv(self.substitute(n, at), self.substitute(d, at))
            case Max(a=x, b=y):
                return self.maximum(self.substitute(x, at), self.substitute(y, at))
            case Indicator(pred=p):
                return self.indicator(self.substitute(p, at))
            case Opaque(tree=t):
                return Poly.of(Opaque(self.substitute(t, at)))
        return at.get(a, Poly.of(a))


def _flatten(kind: type, preds: Iterable[Pred]) -> Iterable[Pred]:
    for p in preds:
        if isinstance(p, kind):
            yield from p.args  # type: ignore[attr-defined]
        else:
            yield p


def _content(p: Poly) -> int:
    """Greatest common divisor of the coefficients of the non-constant terms."""
    return gcd(*(c for m, c in p.terms.items() if m))


def _primitive(op: str, p: Poly) -> Poly:
    """``p`` divided by its content; for ``ge`` the constant rounds down, which loses no integer point."""
    g = _content(p)
    if g <= 1 or (op == "eq" and p.const_term % g):
        return p
    return Poly({m: c // g for m, c in p.terms.items()})


def _divide(n: Poly, d: Poly) -> tuple[Poly, Poly]:
    """``(quotient, rest)`` with ``n == quotient * d + rest``, as much in the quotient as divides without a case."""
    quotient, rest = Poly({}), n
    if len(d.terms) == 1:
        ((d_mono, d_coefficient),) = d.terms.items()
        need = dict(d_mono)
        moved: dict[frozenset[Any], int] = {}
        left: dict[frozenset[Any], int] = {}
        for m, c in n.terms.items():
            have = dict(m)
            if all(have.get(a, 0) >= p for a, p in need.items()):
                q, r = divmod(c, d_coefficient)
                if r and m and d_mono != m:  # only a plain number, or a multiple of d itself, is split
                    left[m] = c
                    continue
                powers = {a: p - need.get(a, 0) for a, p in have.items()}
                key = frozenset((a, p) for a, p in powers.items() if p)
                moved[key] = moved.get(key, 0) + q
                if r:
                    left[m] = r
            else:
                left[m] = c
        return Poly(moved), Poly(left)
    for a in n.atoms():
        if not axes_of(a) and isinstance(a, sympy.Symbol):
            continue
        parts = rest.split(a)
        if parts is not None and (q := _ratio(parts[0], d)) is not None:
            quotient, rest = quotient + Poly.of(a) * q, parts[1]
    if (q := _ratio(rest, d)) is not None:
        quotient, rest = quotient + q, Poly({})
    return quotient, rest


def _ratio(n: Poly, d: Poly) -> int | None:
    """The integer m with ``n == m * d``, else None."""
    if not n.terms:
        return 0
    m, c = next(iter(n.terms.items()))
    if m not in d.terms or c % d.terms[m]:
        return None
    ratio = c // d.terms[m]
    return ratio if d * ratio == n else None


def solve(p: Poly, symbol: Any) -> Poly | None:
    """``p == 0`` solved for a symbol with coefficient +-1 that occurs nowhere else in p."""
    parts = p.split(symbol)
    if parts is None or symbol in parts[1].free or (sign := parts[0].constant()) not in (1, -1):
        return None
    return parts[1] * -sign
