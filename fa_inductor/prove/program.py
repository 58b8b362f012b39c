"""Predicates and float trees as score programs (`kernels/expr.py`).

A value that reads at most one of q and k through tensors is kept as a *load* of a small capture; what mixes q and k
must be arithmetic that the score language has.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch

from fa_inductor.kernels import expr as ex
from fa_inductor.kernels.expr import Expr

from .values import (
    AXIS_K,
    AXIS_Q,
    AXIS_SET,
    And,
    Apply,
    Bool,
    Cast,
    Cmp,
    Const,
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
)

_BOTH = frozenset((AXIS_Q, AXIS_K))
_COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
_FLOAT_OPS = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "div", "neg": "neg", "abs": "abs", "exp": "exp", "exp2": "exp2",
    "log": "log", "sqrt": "sqrt", "tanh": "tanh", "sigmoid": "sigmoid", "relu": "relu", "minimum": "minimum",
    "maximum": "maximum", "sin": "sin", "cos": "cos", "reciprocal": "reciprocal", "rsqrt": "rsqrt",
}
_DTYPE_NAMES = {
    torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16",
}


def programmable(pred: Pred) -> bool:
    """True when the predicate is a score program whose loads each read at most one of q and k."""
    builder = ProgramBuilder(lambda _: 0, lambda _: 0)
    try:
        builder.pred(pred)
    except Undecided:
        return False
    return True


class ProgramBuilder:
    """Translates values to `Expr`.

    Args:
        capture: registers a value that depends on at most one of q and k, returns its capture number.
        host: registers an axis-free integer, returns its number among the operator's ``ints``.
    """

    def __init__(self, capture: Callable[[Tree | Poly], int], host: Callable[[Poly], int]) -> None:
        self._capture = capture
        self._host = host

    def integer(self, p: Poly) -> Expr:
        """An integer value; axis-free parts become constants or run-time integers."""
        groups: dict[frozenset[Any], Poly] = {}
        for m, c in p.terms.items():
            own = frozenset((a, n) for a, n in m if not _is_host(a))
            other = frozenset(m) - own
            groups[own] = groups.get(own, Poly({})) + Poly({other: c})
        total: Expr | None = None
        for own, coefficient in groups.items():
            factors = [self._atom(a) for a, n in sorted(own, key=lambda x: str(x[0])) for _ in range(n)]
            c = coefficient.constant()
            negative = c is not None and c < 0 and bool(factors)
            if negative:
                coefficient, c = -coefficient, -c  # type: ignore[operator]
            if c != 1 or not factors:
                factors.append(ex.const(c) if c is not None else ex.sym(self._host(coefficient)))
            term = factors[0]
            for f in factors[1:]:
                term = Expr("mul", (term, f))
            if total is None:
                total = Expr("neg", (term,)) if negative else term
            else:
                total = Expr("sub" if negative else "add", (total, term))
        return total if total is not None else ex.const(0)

    def _atom(self, a: Any) -> Expr:
        match a:
            case sympy.Symbol():
                return ex.index(a.name)
            case FloorDiv(n=n, d=d):
                return Expr("floordiv", (self.integer(n), self.integer(d)))
            case Max(a=x, b=y):
                return Expr("maximum", (self.integer(x), self.integer(y)))
            case Indicator(pred=p):
                return Expr("where", (self.pred(p), ex.const(1), ex.const(0)))
            case Opaque(tree=t):
                return self.tree(t) if _BOTH <= axes_of(t) else ex.load(self._capture(Poly.of(a)))
        raise Undecided

    def pred(self, p: Pred) -> Expr:
        match p:
            case Bool(value=v):
                return ex.const(v)
            case Cmp(op=op, expr=e):
                # the two sides of the comparison read better, and overflow later, than a difference
                left = Poly({m: c for m, c in e.terms.items() if c > 0})
                return Expr(op, (self.integer(left), self.integer(left - e)))
            case Leaf(tree=t, positive=s):
                x = self.tree(t)
                return x if s else Expr("not", (x,))
            case And(args=xs) | Or(args=xs):
                total = self.pred(xs[0])
                for x in xs[1:]:
                    total = Expr("and" if isinstance(p, And) else "or", (total, self.pred(x)))
                return total
        raise Undecided

    def tree(self, t: Tree) -> Expr:
        """A tree of any dtype.

        Raises:
            Undecided: it mixes q and k in a way that the score language cannot say exactly.
        """
        if isinstance(t, Const):
            return ex.const(t.value)
        if isinstance(t, Cast) and t.dtype in _DTYPE_NAMES:
            return Expr("cast", (self.integer(t.expr), _DTYPE_NAMES[t.dtype]))
        if not _BOTH <= axes_of(t):
            return ex.load(self._capture(t))
        if isinstance(t, Select):
            return Expr("where", (self.pred(t.pred), self.tree(t.a), self.tree(t.b)))
        if isinstance(t, Load) or not isinstance(t, Apply) or t.kwargs:
            raise Undecided
        return self._apply(t)

    def _apply(self, t: Apply) -> Expr:
        name = getattr(t.target, "_opname", "")
        types = {a.dtype for a in t.args if isinstance(a, Tree)}
        if name == "convert_element_type" and t.dtype in _DTYPE_NAMES and types <= set(_DTYPE_NAMES):
            return Expr("cast", (self.tree(t.args[0]), _DTYPE_NAMES[t.dtype]))
        # float32 throughout: the language computes in float32 and rounds nowhere else
        if types != {torch.float32} or not all(isinstance(a, Tree | int | float) for a in t.args):
            raise Undecided
        op = name if name in _COMPARISONS else _FLOAT_OPS.get(name)
        if op is None or len(t.args) != ex.OPS[op]:
            raise Undecided
        args = (self.tree(a) if isinstance(a, Tree) else ex.const(float(a)) for a in t.args)
        return Expr(op, tuple(args))


def _is_host(a: Any) -> bool:
    """An integer atom that is known before the kernel starts."""
    if isinstance(a, sympy.Symbol):
        return a not in AXIS_SET
    if isinstance(a, FloorDiv):
        return all(_is_host(x) for p in (a.n, a.d) for x in p.atoms())
    if isinstance(a, Max):
        return all(_is_host(x) for p in (a.a, a.b) for x in p.atoms())
    return False
