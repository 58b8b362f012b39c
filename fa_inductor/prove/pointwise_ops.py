"""Evaluation rules of pointwise operators on integers and booleans.

A rule raises `Undecided` when it does not apply; the operator is then kept as it is (`Evaluator.pointwise`), with its
operands followed.  Floats need no rules but casts and selections: constants fold in `trees`.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .evaluate import Evaluator, rule
from .index_ops import Index, argument, choose, source
from .values import Bool, Poly, Pred, Undecided, Value

aten, prims = torch.ops.aten, torch.ops.prims
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_COMPARABLE = (torch.bool, torch.uint8, *_SIGNED)


def _val(x: Any) -> Any:
    return x.meta.get("val") if isinstance(x, fx.Node) else x


def _is_bool(x: Any) -> bool:
    val = _val(x)
    return isinstance(val, bool) or (isinstance(val, torch.Tensor) and val.dtype == torch.bool)


def _integer_operand(ev: Evaluator, arg: Any, node: fx.Node, index: Index, common: torch.dtype) -> Poly:
    """An operand of an integer operator whose computation type is ``common``, by mathematical value.

    Raises:
        Undecided: a float, or a number that changes when it is cast to ``common``.
    """
    val = _val(arg)
    if isinstance(val, torch.Tensor):
        if val.dtype not in _COMPARABLE:
            raise Undecided
        value = ev.operand(arg, node, index)
        p = ev.facts.indicator(value) if isinstance(value, Pred) else value
        if not isinstance(p, Poly):
            raise Undecided
        widens = torch.promote_types(val.dtype, common) == common
        if not widens and not ev.facts.in_range(p, torch.iinfo(common).min, torch.iinfo(common).max + 1):
            raise Undecided
        return p
    if isinstance(val, float):
        raise Undecided
    p = ev.integer(arg)
    c = p.constant()
    info = torch.iinfo(common)
    if (c is None and common not in (torch.int64, torch.int32)) or (c is not None and not info.min <= c <= info.max):
        raise Undecided
    return p


def _common_dtype(*args: Any) -> torch.dtype:
    """Type in which torch computes on these operands."""
    vals = [_val(a) for a in args]
    tensors = [v for v in vals if isinstance(v, torch.Tensor)]
    if any(v.dtype not in _COMPARABLE for v in tensors) or not tensors:
        raise Undecided
    # 0-d tensors and python numbers do not widen a tensor that has dimensions, unless it is bool
    sized = [v.dtype for v in tensors if v.ndim]
    unsized = [v.dtype for v in tensors if not v.ndim]
    numbers = [torch.bool if isinstance(v, bool) else torch.int64 for v in vals if not isinstance(v, torch.Tensor)]
    for group in (sized, unsized, numbers):
        wide = [d for d in group if d != torch.bool]
        if wide:
            dtype = wide[0]
            for d in wide[1:]:
                dtype = torch.promote_types(dtype, d)
            return dtype
    return torch.uint8  # all bool: values 0 and 1


def _bool_operand(ev: Evaluator, arg: Any, node: fx.Node, index: Index) -> Pred:
    """An operand by its truth value (logical operators)."""
    val = _val(arg)
    if isinstance(val, torch.Tensor):
        value = ev.operand(arg, node, index)
        if isinstance(value, Pred):
            return value
        if isinstance(value, Poly):
            return ev.facts.cmp("ne", value)
    elif isinstance(val, bool | int):
        return Bool(bool(val))
    raise Undecided


# -- comparisons -------------------------------------------------------------


def _comparison(name: str) -> Callable[[Evaluator, fx.Node, Index], Value]:
    def compare(ev: Evaluator, node: fx.Node, index: Index) -> Value:
        a, b = node.args[0], node.args[1]
        if name in ("eq", "ne") and _is_bool(a) and _is_bool(b):
            different = ev.facts.xor(_bool_operand(ev, a, node, index), _bool_operand(ev, b, node, index))
            return different if name == "ne" else ev.facts.not_(different)
        common = _common_dtype(a, b)
        x, y = (_integer_operand(ev, v, node, index, common) for v in (a, b))
        return ev.trees.compare(name, x, y)

    return compare


for _name in ("eq", "ne", "ge", "gt", "le", "lt"):
    rule(getattr(aten, _name))(_comparison(_name))


# -- logic -------------------------------------------------------------


def _logic(name: str, bitwise: bool) -> Callable[[Evaluator, fx.Node, Index], Value]:
    def logic(ev: Evaluator, node: fx.Node, index: Index) -> Value:
        if bitwise and node.meta["val"].dtype != torch.bool:
            raise Undecided
        args = [_bool_operand(ev, a, node, index) for a in node.args]
        match name:
            case "and":
                return ev.facts.and_(*args)
            case "or":
                return ev.facts.or_(*args)
            case "xor":
                return ev.facts.xor(*args)
        return ev.facts.not_(args[0])

    return logic


for _name in ("and", "or", "xor", "not"):
    rule(getattr(aten, f"bitwise_{_name}"))(_logic(_name, True))
    rule(getattr(aten, f"logical_{_name}"))(_logic(_name, False))
    if _name != "not":
        rule(getattr(aten, f"__{_name}__"))(_logic(_name, True))


# -- selection -------------------------------------------------------------


def _branch(ev: Evaluator, arg: Any, node: fx.Node, index: Index) -> Value:
    """A branch of ``where`` in the type of the result."""
    dtype = node.meta["val"].dtype
    val = _val(arg)
    if isinstance(val, torch.Tensor):
        return ev.trees.convert(ev.operand(arg, node, index), val.dtype, dtype)
    return ev.scalar(arg, dtype)


@rule(aten.where)
def _where(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    if len(node.args) != 3 or source(node.args[0]).meta["val"].dtype != torch.bool:
        raise Undecided
    p = _bool_operand(ev, node.args[0], node, index)
    if isinstance(p, Bool):
        return _branch(ev, node.args[1 if p.value else 2], node, index)
    return choose(ev, p, _branch(ev, node.args[1], node, index), _branch(ev, node.args[2], node, index))


@rule(aten.masked_fill)
def _masked_fill(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    if source(node.args[1]).meta["val"].dtype != torch.bool:
        raise Undecided
    p = _bool_operand(ev, node.args[1], node, index)
    return choose(ev, p, _branch(ev, node.args[2], node, index), _branch(ev, node.args[0], node, index))


def _triangle(ev: Evaluator, node: fx.Node, index: Index, lower: bool) -> Value:
    offset = index[-1] - index[-2] - ev.integer(argument(node, 1, "diagonal", 0))
    inside = ev.facts.cmp("ge", -offset if lower else offset)
    return choose(ev, inside, ev.value(source(node.args[0]), index), ev.scalar(0, node.meta["val"].dtype))


@rule(aten.tril)
def _tril(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    return _triangle(ev, node, index, True)


@rule(aten.triu)
def _triu(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    return _triangle(ev, node, index, False)


# -- casts -------------------------------------------------------------


@rule(prims.convert_element_type, aten._to_copy, aten.to, prims.device_put)
def _convert(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    src = source(node.args[0])
    return ev.trees.convert(ev.value(src, index), src.meta["val"].dtype, node.meta["val"].dtype)


# -- integer arithmetic -------------------------------------------------------------


def _arithmetic(op: Callable[[Evaluator, Poly, Poly], Poly]) -> Callable[[Evaluator, fx.Node, Index], Value]:
    def arithmetic(ev: Evaluator, node: fx.Node, index: Index) -> Value:
        dtype = node.meta["val"].dtype
        alpha = ev.integer(node.kwargs.get("alpha", 1))
        if dtype == torch.bool and op is _multiply:
            return ev.facts.and_(*(_bool_operand(ev, a, node, index) for a in node.args))
        if dtype == torch.bool and op is _add and alpha == 1:
            return ev.facts.or_(*(_bool_operand(ev, a, node, index) for a in node.args))
        if dtype not in _SIGNED:
            raise Undecided
        a, b = (_integer_operand(ev, x, node, index, dtype) for x in node.args[:2])
        if alpha != 1:
            b = b * alpha
        result = op(ev, a, b)
        if not ev.trees.fits(result, dtype):
            raise Undecided
        return result

    return arithmetic


def _add(ev: Evaluator, a: Poly, b: Poly) -> Poly:
    return a + b


def _multiply(ev: Evaluator, a: Poly, b: Poly) -> Poly:
    return a * b


rule(aten.add)(_arithmetic(_add))
rule(aten.mul)(_arithmetic(_multiply))
rule(aten.sub)(_arithmetic(lambda ev, a, b: a - b))
rule(aten.rsub)(_arithmetic(lambda ev, a, b: b - a))
rule(aten.minimum)(_arithmetic(lambda ev, a, b: ev.facts.minimum(a, b)))
rule(aten.maximum)(_arithmetic(lambda ev, a, b: ev.facts.maximum(a, b)))
rule(aten.floor_divide)(_arithmetic(lambda ev, a, b: ev.facts.floordiv(a, b)))
rule(aten.remainder)(_arithmetic(lambda ev, a, b: ev.facts.mod(a, b)))


def _truncated(ev: Evaluator, a: Poly, b: Poly) -> Poly:
    if not ev.facts.nonneg(a):
        raise Undecided
    return ev.facts.floordiv(a, b)


@rule(aten.div)
def _div(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    match node.kwargs.get("rounding_mode"):
        case "floor":
            return _arithmetic(lambda ev, a, b: ev.facts.floordiv(a, b))(ev, node, index)
        case "trunc":
            return _arithmetic(_truncated)(ev, node, index)
    raise Undecided


@rule(aten.fmod)
def _fmod(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    return _arithmetic(lambda ev, a, b: a - b * _truncated(ev, a, b))(ev, node, index)


def _unary(op: Callable[[Evaluator, Poly], Poly]) -> Callable[[Evaluator, fx.Node, Index], Value]:
    def unary(ev: Evaluator, node: fx.Node, index: Index) -> Value:
        dtype = node.meta["val"].dtype
        if dtype not in _SIGNED:
            raise Undecided
        result = op(ev, _integer_operand(ev, node.args[0], node, index, dtype))
        if not ev.trees.fits(result, dtype):
            raise Undecided
        return result

    return unary


rule(aten.neg)(_unary(lambda ev, a: -a))
rule(aten.abs)(_unary(lambda ev, a: ev.facts.abs(a)))


@rule(aten.clamp, aten.clamp_min, aten.clamp_max)
def _clamp(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    dtype = node.meta["val"].dtype
    if dtype not in _SIGNED:
        raise Undecided
    name = node.target._opname  # type: ignore[union-attr]
    low = argument(node, 1, "min") if name != "clamp_max" else None
    high = argument(node, 1 if name == "clamp_max" else 2, "max") if name != "clamp_min" else None
    p = _integer_operand(ev, node.args[0], node, index, dtype)
    if low is not None:
        p = ev.facts.maximum(p, _integer_operand(ev, low, node, index, dtype))
    if high is not None:
        p = ev.facts.minimum(p, _integer_operand(ev, high, node, index, dtype))
    if not ev.trees.fits(p, dtype):
        raise Undecided
    return p


del _name
