"""Construction of `Tree` values: casts, constant folding, and pushing operators into two-valued selections.

A mask in float clothes is a `Select` whose leaves are constants.  Operators on such values are evaluated leaf by
leaf with torch itself, so ``finfo(float32).min`` cast to bfloat16 really becomes -inf and ``min + min`` overflows
exactly where torch overflows.
"""
from __future__ import annotations

import math
from typing import Any

import torch

from .simplify import Facts
from .values import (
    FALSE,
    TRUE,
    Apply,
    Bool,
    Cast,
    Const,
    FloorDiv,
    Indicator,
    Leaf,
    Max,
    Opaque,
    Poly,
    Pred,
    Select,
    Tree,
    Undecided,
    Value,
)

_MAX_LEAVES = 16
_EXACT_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_MODELLED_INTS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_COMPARE = ("eq", "ne", "ge", "gt", "le", "lt")


class Trees:
    """Builds trees that are as constant as possible."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    # -- between the three kinds of values -------------------------------------------------------------

    def const(self, value: bool | int | float, dtype: torch.dtype) -> Const:
        """A python number rounded to ``dtype``.

        Raises:
            Undecided: an integer that ``dtype`` cannot hold.
        """
        try:
            return Const(torch.tensor(value, dtype=dtype).item(), dtype)  # type: ignore[arg-type]
        except (RuntimeError, TypeError, OverflowError) as error:
            raise Undecided from error

    def typed(self, tree: Tree) -> Value:
        """The value that a tree of this dtype is: predicate, integer or the tree itself."""
        dtype = tree.dtype
        if dtype == torch.bool:
            match tree:
                case Const(value=v):
                    return Bool(bool(v))
                case Select(pred=p, a=a, b=b):
                    x, y = self.typed(a), self.typed(b)
                    assert isinstance(x, Pred) and isinstance(y, Pred)
                    return self.facts.where(p, x, y)
            return Leaf(tree)
        if dtype.is_floating_point or dtype.is_complex:
            return tree
        match tree:
            case Const(value=v):
                return Poly.of(int(v))
            case Cast(expr=e):
                return e
            case Select(pred=p, a=a, b=b):
                x, y = self.typed(a), self.typed(b)
                assert isinstance(x, Poly) and isinstance(y, Poly)
                return self.facts.select(p, x, y)
        return Poly.of(Opaque(tree))

    def lift(self, value: Value, dtype: torch.dtype) -> Tree:
        """A value of a tensor of this dtype as a tree."""
        match value:
            case Tree():
                return value
            case Leaf(tree=t, positive=True):
                return t
            case Pred():
                return self.select(value, Const(True, torch.bool), Const(False, torch.bool))
        return self._integer(value, dtype)

    def _integer(self, p: Poly, dtype: torch.dtype, splits: int = 3) -> Tree:
        """An integer as ``dtype``, indicators turned into selections."""
        c = p.constant()
        if c is not None:
            return self.const(c, dtype)
        for a in p.atoms():
            if not splits or not isinstance(a, Indicator):
                continue
            parts = p.split(a)
            if parts is not None:
                on, off = parts[0] + parts[1], parts[1]
                return self.select(a.pred, self._integer(on, dtype, splits - 1), self._integer(off, dtype, splits - 1))
        atoms = p.atoms()
        if len(atoms) == 1 and isinstance(atoms[0], Opaque) and p == Poly.of(atoms[0]) and atoms[0].tree.dtype == dtype:
            return atoms[0].tree
        return Cast(p, dtype)

    def convert(self, value: Value, source: torch.dtype, dtype: torch.dtype) -> Value:
        """A tensor's value after ``.to(dtype)``."""
        if source == dtype:
            return value
        if isinstance(value, Pred):
            if dtype.is_floating_point:
                return self.select(value, self.const(1, dtype), self.const(0, dtype))
            return self.facts.indicator(value)
        if isinstance(value, Poly):
            if dtype == torch.bool:
                return self.facts.cmp("ne", value)
            if dtype.is_floating_point:
                return self._integer(value, dtype)
            if self.fits(value, dtype):
                return value
        target = torch.ops.prims.convert_element_type.default
        return self.typed(self.apply(target, (self.lift(value, source), dtype), (), frozenset(), dtype))

    def fits(self, p: Poly, dtype: torch.dtype) -> bool:
        """True when integer arithmetic of this dtype gives this exact value (see `evaluate` for the assumptions)."""
        if dtype not in _MODELLED_INTS:
            return False
        loaded = any(isinstance(a, Opaque) for a in _deep_atoms(p))
        if dtype == torch.int64 or (dtype == torch.int32 and not loaded):
            end = 2 ** (torch.iinfo(dtype).bits - 1)
            return p.max_coefficient() < end // 4 and (_size(p) < end or self.facts.in_range(p, -end, end))
        if loaded:  # a widening cast of a narrow load keeps its value
            atoms = p.atoms()
            single = len(atoms) == 1 and isinstance(atoms[0], Opaque) and p == Poly.of(atoms[0])
            return single and torch.promote_types(atoms[0].tree.dtype, dtype) == dtype
        info = torch.iinfo(dtype) if dtype != torch.bool else None
        return info is not None and self.facts.in_range(p, info.min, info.max + 1)

    def select(self, p: Pred, a: Tree, b: Tree) -> Tree:
        if p == TRUE or a == b:
            return a
        if p == FALSE:
            return b
        return Select(p, a, b, a.dtype)

    # -- operators -------------------------------------------------------------

    def apply(
        self, target: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], scalars: frozenset[int],
        dtype: torch.dtype,
    ) -> Tree:
        """A pointwise operator on trees and python values; ``scalars`` are the positions of 0-d tensors."""
        tensors = [i for i, a in enumerate(args) if isinstance(a, Tree)]
        if all(isinstance(args[i], Const) for i in tensors) and not any(isinstance(a, Poly) for a in args):
            return _fold(target, args, kwargs, scalars, dtype)
        leaves = [_leaves(args[i]) for i in tensors]
        constant = [_piecewise(args[i]) for i in tensors]
        if math.prod(leaves) <= _MAX_LEAVES and math.prod(leaves) > 1 and (len(tensors) == 1 or all(constant)):
            return self._distribute(target, args, kwargs, scalars, dtype)
        exact = self._exact(target, args, kwargs, dtype)
        return exact if exact is not None else Apply(target, args, kwargs, scalars, dtype)

    def _distribute(self, target: Any, args: Any, kwargs: Any, scalars: frozenset[int], dtype: torch.dtype) -> Tree:
        first = next(a for a in args if isinstance(a, Select))
        on = tuple(_assume(a, first.pred, True) for a in args)
        off = tuple(_assume(a, first.pred, False) for a in args)
        return self.select(
            first.pred, self.apply(target, on, kwargs, scalars, dtype), self.apply(target, off, kwargs, scalars, dtype)
        )

    # -- floats that hold integers -------------------------------------------------------------

    def exact(self, p: Poly, dtype: torch.dtype) -> bool:
        """True when every value of p is proven to be representable in the float type."""
        limit = 2 ** _EXACT_BITS.get(dtype, 0)
        return self.facts.nonneg(p + limit) and self.facts.nonneg(-p + limit)

    def _as_integer(self, x: Any) -> Poly | None:
        if isinstance(x, Cast) and (not x.dtype.is_floating_point or self.exact(x.expr, x.dtype)):
            return x.expr
        value = x.value if isinstance(x, Const) else x
        if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
            return Poly.of(int(value)) if abs(value) <= 2**53 else None
        return None

    def _exact(self, target: Any, args: tuple[Any, ...], kwargs: Any, dtype: torch.dtype) -> Tree | None:
        """Integer arithmetic and comparisons that happen to run in a float type; None when not proven exact."""
        name = getattr(target, "_opname", "")
        if not any(isinstance(a, Cast) and a.dtype.is_floating_point for a in args):
            return None
        if name == "convert_element_type":
            p = self._as_integer(args[0])
            if p is None:
                return None
            if dtype == torch.bool:
                return self.lift(self.facts.cmp("ne", p), dtype)
            ok = self.exact(p, dtype) if dtype.is_floating_point else self.fits(p, dtype)
            return self._integer(p, dtype) if ok else None
        if kwargs or len(args) > 2:
            return None
        # torch computes in one of the operands' float types: every operand must survive in the coarsest of them
        coarsest = min((a.dtype for a in args if isinstance(a, Tree) and a.dtype.is_floating_point),
                       key=lambda d: _EXACT_BITS.get(d, 0))
        operands = [p for a in args if (p := self._as_integer(a)) is not None and self.exact(p, coarsest)]
        if len(operands) < len(args):
            return None
        if name in _COMPARE and len(args) == 2:
            return self.lift(self.compare(name, *operands), torch.bool)
        if not dtype.is_floating_point:
            return None
        result = self._arithmetic(name, operands)
        return self._integer(result, dtype) if result is not None and self.exact(result, dtype) else None

    def _arithmetic(self, name: str, xs: list[Poly]) -> Poly | None:
        if len(xs) == 1:
            return -xs[0] if name == "neg" else self.facts.abs(xs[0]) if name == "abs" else None
        a, b = xs
        match name:
            case "add":
                return a + b
            case "sub":
                return a - b
            case "mul":
                return a * b
            case "maximum":
                return self.facts.maximum(a, b)
            case "minimum":
                return self.facts.minimum(a, b)
        return None

    def compare(self, name: str, a: Poly, b: Poly) -> Pred:
        """``a OP b`` on integers."""
        match name:
            case "eq" | "ne":
                return self.facts.cmp(name, a - b)
            case "ge":
                return self.facts.cmp("ge", a - b)
            case "gt":
                return self.facts.cmp("ge", a - b - 1)
            case "le":
                return self.facts.cmp("ge", b - a)
            case "lt":
                return self.facts.cmp("ge", b - a - 1)
        raise Undecided


def _deep_atoms(p: Poly) -> list[Any]:
    found: list[Any] = []
    for a in p.atoms():
        found.append(a)
        for inner in ("n", "d", "a", "b"):
            if isinstance(x := getattr(a, inner, None), Poly):
                found += _deep_atoms(x)
    return found


_POSITIONS = 2**20


def _size(x: Any) -> int:
    """How large an integer is where every position, size and loaded value in it is below a million."""
    match x:
        case Poly():
            return sum(abs(c) * math.prod(_size(a) ** n for a, n in m) for m, c in x.terms.items())
        case FloorDiv(n=n):
            return _size(n)
        case Max(a=a, b=b):
            return max(_size(a), _size(b))
        case Indicator():
            return 1
    return _POSITIONS


def _leaves(t: Tree) -> int:
    return _leaves(t.a) + _leaves(t.b) if isinstance(t, Select) else 1


def _piecewise(t: Tree) -> bool:
    return isinstance(t, Const) or (isinstance(t, Select) and _piecewise(t.a) and _piecewise(t.b))


def _assume(x: Any, p: Pred, holds: bool) -> Any:
    """``x`` where the predicate is known."""
    if isinstance(x, Select):
        if x.pred == p:
            return _assume(x.a if holds else x.b, p, holds)
        a, b = _assume(x.a, p, holds), _assume(x.b, p, holds)
        return x if a is x.a and b is x.b else Select(x.pred, a, b, x.dtype)
    return x


def _fold(target: Any, args: Any, kwargs: Any, scalars: frozenset[int], dtype: torch.dtype) -> Tree:
    """The operator run by torch on one element."""
    if not dtype.is_floating_point and any(isinstance(a, Const) and not math.isfinite(a.value) for a in args) \
            and dtype != torch.bool:
        raise Undecided  # what an infinity becomes as an integer depends on the device
    tensors = [
        torch.tensor(a.value if i in scalars else [a.value], dtype=a.dtype) if isinstance(a, Const) else a
        for i, a in enumerate(args)
    ]
    try:
        result = target(*tensors, **{k: v for k, v in kwargs if k not in ("device", "layout", "pin_memory")})
        if not isinstance(result, torch.Tensor) or result.numel() != 1 or result.dtype != dtype:
            raise Undecided
        return Const(result.item(), dtype)  # type: ignore[arg-type]
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        raise Undecided from error


