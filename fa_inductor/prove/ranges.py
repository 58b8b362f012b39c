"""What is known about the sizes of integers: `Ranges` decides whether a polynomial is >= 0 everywhere.

Symbols have ranges (``0 <= q < Sq`` and so on, size symbols at least the lower bound that the ShapeEnv gives them,
axis sizes at least 1 because an empty score matrix has nothing to prove).  The method is interval elimination: a
polynomial that is affine in a bounded symbol is smallest at an end of the symbol's range.  "No answer" is False, so
everything built on `Ranges.nonneg` errs on the side of keeping a predicate.
"""
from __future__ import annotations

from typing import Any

import sympy

from .values import AXIS_B, AXIS_H, AXIS_K, AXIS_Q, FloorDiv, Indicator, Max, Opaque, Poly

_MAX_DEPTH = 14


class Ranges:
    """Ranges of the symbols of one score matrix, and what follows from them."""

    def __init__(self) -> None:
        self.sizes: dict[Any, Poly] = {}
        self._upper: dict[Any, Poly] = {}
        self._nonneg: dict[Poly, bool] = {}
        self._ranges: dict[Any, tuple[int | None, int | None]] = {}
        self._guards: list[Poly] = []
        self._loops = 0

    def set_sizes(self, batch: Poly, heads: Poly, q_len: Poly, k_len: Poly) -> None:
        """Bounds the axes ``b h q k``; each has at least one position."""
        self.sizes = dict(zip((AXIS_B, AXIS_H, AXIS_Q, AXIS_K), (batch, heads, q_len, k_len), strict=True))
        self._upper |= {a: n - 1 for a, n in self.sizes.items()}
        for n in self.sizes.values():
            for a in n.atoms():
                if n == Poly.of(a) and isinstance(a, sympy.Symbol):
                    lo, hi = self._ranges.get(a, (None, None))
                    self._ranges[a] = (max(1, lo or 1), hi)
        self._nonneg.clear()

    def learn(self, symbol: Any, lo: int | None, hi: int | None) -> None:
        """Note the range ``lo <= symbol <= hi`` of a size symbol, None where unbounded."""
        if symbol not in self._ranges:
            self._ranges[symbol] = (lo, hi)
            self._nonneg.clear()

    def loop_symbol(self, upper: Poly) -> sympy.Symbol:
        """A fresh symbol that runs over ``0 .. upper`` (for reductions and scans)."""
        self._loops += 1
        s = sympy.Symbol(f"_j{self._loops}", integer=True)
        self._upper[s] = upper
        return s

    # -- decisions -------------------------------------------------------------------------------------------------

    def nonneg(self, p: Poly) -> bool:
        """True when ``p >= 0`` is proven for every value of the symbols."""
        c = p.constant()
        if c is not None:
            return c >= 0
        known = self._nonneg.get(p)
        if known is None:
            known = self._nonneg[p] = self._prove(p, _MAX_DEPTH)
        return known

    def in_range(self, p: Poly, lo: int | Poly, hi: int | Poly) -> bool:
        """True when ``lo <= p < hi`` is proven."""
        return self.nonneg(p - lo) and self.nonneg(Poly.of(hi) - 1 - p)

    def _prove(self, p: Poly, depth: int) -> bool:
        c = p.constant()
        if c is not None:
            return c >= 0
        if depth == 0:
            return False
        atoms = p.atoms()
        structured = [a for a in atoms if not isinstance(a, sympy.Symbol)]
        if any(isinstance(a, Opaque) for a in structured):
            return False
        for a in structured:
            parts = p.split(a)
            return parts is not None and self._prove_structured(a, *parts, depth - 1)
        for a in atoms:
            if a in self._upper:
                parts = p.split(a)
                if parts is None:
                    return self._shifted(p)
                coefficient, rest = parts
                at_upper = coefficient * self._upper[a] + rest
                # smallest at one of the two ends; look at the likelier one first
                return self._prove(at_upper, depth - 1) and self._prove(rest, depth - 1)
        return self._shifted(p)

    def _prove_structured(self, a: Any, coefficient: Poly, rest: Poly, depth: int) -> bool:
        positive = self._prove(coefficient, depth)
        if not positive and not self._prove(-coefficient, depth):
            return False
        if isinstance(a, Indicator):
            return self._prove(rest if positive else coefficient + rest, depth)
        if isinstance(a, Max):
            bounds = (coefficient * a.a + rest, coefficient * a.b + rest)
            return (any if positive else all)(self._prove(x, depth) for x in bounds)
        if isinstance(a, FloorDiv):
            if positive:
                if self._prove(a.n, depth) and self._prove(rest, depth):
                    return True
                return self._prove(coefficient * (a.n - a.d + 1) + a.d * rest, depth)  # d*t >= n-d+1
            return self._prove(coefficient * a.n + a.d * rest, depth)  # d*t <= n
        return False

    def _shifted(self, p: Poly) -> bool:
        return self._bounded_below(p) or self._guarded(p)

    def _bounded_below(self, p: Poly) -> bool:
        """Size symbols replaced by ``lower bound + nonnegative``; then no negative coefficient means p >= 0."""
        shifted = p
        for a in p.atoms():
            if a in self._upper:  # an axis in a nonlinear position: at least 0
                continue
            lo, hi = self._ranges.get(a, (None, None))
            parts = shifted.split(a)
            if parts is not None and hi is not None and (c := parts[0].constant()) is not None and c < 0:
                shifted = parts[0] * hi + parts[1]
            elif lo is None:
                return False
            else:
                shifted = _shift(shifted, a, lo)
        return all(c >= 0 for c in shifted.terms.values())

    def assume(self, p: Poly) -> None:
        """Note that ``p >= 0`` holds: a guard of the compiled graph says so."""
        if p not in self._guards:
            self._guards.append(p)
            self._nonneg.clear()

    def _guarded(self, p: Poly) -> bool:
        """Whether one guard implies ``p >= 0``: guards relate different sizes, ranges bound each alone."""
        return len(p.atoms()) > 1 and any(self._bounded_below(p - g) for g in self._guards)


def _shift(p: Poly, atom: Any, by: int) -> Poly:
    if by == 0:
        return p
    base = Poly.of(atom) + by
    total = Poly({})
    for m, c in p.terms.items():
        power = next((n for a, n in m if a == atom), 0)
        term = Poly({frozenset(x for x in m if x[0] != atom): c})
        for _ in range(power):
            term = term * base
        total = total + term
    return total
