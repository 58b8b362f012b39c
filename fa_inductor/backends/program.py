"""Score programs (`kernels/expr.py`) in plain torch: evaluation and the reverse-mode derivative.

The derivative is written out instead of left to autograd because the operators run below it: in a compiled
backward, and under inference mode, nothing is recorded.  The rules are those of the eager operations, so a
program's derivative is the one that autograd would have given the user's own code.
"""
from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fa_inductor.kernels.expr import AXES, LEAVES, MARGIN, Expr

Value = Tensor | int | float | bool


class Scope:
    """What the leaves of a program stand for, on the rows ``q0 <= q < q1`` of the score matrix.

    Args:
        shape: (B, Hq, Sq, Sk) of the whole score matrix.
        rows: (q0, q1).
        captures: tensors broadcastable to ``shape``, used at their own size, never expanded, or tables by distance.
        ints: run-time integers.
        device: where index tensors are made.
        dtype: in which constants are kept that meet no tensor, the choice between two of them for one.
    """

    def __init__(
        self, shape: Sequence[int], rows: tuple[int, int], captures: Sequence[Tensor], ints: Sequence[int],
        device: torch.device, dtype: torch.dtype = torch.float32,
    ) -> None:
        self.shape, self.rows, self.captures, self.ints, self.device = tuple(shape), rows, captures, ints, device
        self.dtype = dtype
        self._axes: dict[str, Tensor] = {}

    def axis(self, name: str) -> Tensor:
        """int64 index tensor of one axis, with size 1 in the other three."""
        if name not in self._axes:
            dim = AXES.index(name)
            start, stop = self.rows if name == "q" else (0, self.shape[dim])
            size = [1, 1, 1, 1]
            size[dim] = stop - start
            self._axes[name] = torch.arange(start, stop, device=self.device).view(size)
        return self._axes[name]

    def tensor(self, value: bool | int | float) -> Tensor:
        """A constant as a 0-dim tensor."""
        return torch.full((), value, dtype=self.dtype if isinstance(value, float) else None, device=self.device)

    def row_slice(self, t: Tensor) -> Tensor:
        """The part of a capture (trailing dims aligned with [B, Hq, Sq, Sk]) that belongs to these rows."""
        if t.dim() < 2 or t.shape[-2] == 1 or self.rows == (0, self.shape[2]):
            return t
        return t[..., self.rows[0] : self.rows[1], :]

    def by_distance(self, t: Tensor) -> Tensor:
        """A table ``[B or 1, Hq or 1, 1, Sq + Sk - 1 + 2 MARGIN]`` spread over these rows and all keys."""
        at = self.axis("k") - self.axis("q") + (self.shape[2] - 1 + MARGIN)
        return t[:, :, 0, at[0, 0]]


def _logical(f: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Value, Value], Value]:
    def run(a: Value, b: Value) -> Value:
        ta = a if isinstance(a, Tensor) else torch.tensor(bool(a))
        tb = b if isinstance(b, Tensor) else torch.tensor(bool(b))
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            return f(ta, tb)
        return bool(f(ta, tb))

    return run


def _extremum(f: Callable[[Tensor, Tensor], Tensor], scalar: Callable[..., Any]) -> Callable[[Value, Value], Value]:
    def run(a: Value, b: Value) -> Value:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return f(a, b)
        if isinstance(a, Tensor):
            return f(a, _scalar_like(a, b))
        if isinstance(b, Tensor):
            return f(_scalar_like(b, a), b)
        return scalar(a, b)

    return run


def _scalar_like(t: Tensor, scalar: int | float | bool) -> Tensor:
    """0-dim tensor of the dtype that torch gives an operation of ``t`` and a Python scalar."""
    return torch.full((), scalar, dtype=torch.result_type(t, scalar), device=t.device)


_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs, "exp": torch.exp, "exp2": torch.exp2, "log": torch.log, "log2": torch.log2,
    "log1p": torch.log1p, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal,
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu": torch.relu, "erf": torch.erf, "sin": torch.sin,
    "cos": torch.cos, "floor": torch.floor, "ceil": torch.ceil, "sign": torch.sign, "not": torch.logical_not,
    "neg": torch.neg,
}
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "floordiv": operator.floordiv, "mod": operator.mod, "pow": operator.pow,
    "minimum": _extremum(torch.minimum, min), "maximum": _extremum(torch.maximum, max),
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "and": _logical(torch.logical_and), "or": _logical(torch.logical_or), "xor": _logical(torch.logical_xor),
}


def _apply(op: str, args: Sequence[Any], scope: Scope) -> Value:
    if op == "cast":
        x, dtype = args
        target = getattr(torch, dtype)
        return x.to(target) if isinstance(x, Tensor) else torch.full((), x, dtype=target, device=scope.device)
    if op == "where":
        cond, a, b = args
        if not isinstance(cond, Tensor):
            cond = scope.tensor(bool(cond))
        if not isinstance(a, Tensor) and not isinstance(b, Tensor):
            a, b = scope.tensor(a), scope.tensor(b)
        return torch.where(cond, a, b)
    if op in _BINARY:
        return _BINARY[op](*args)
    (x,) = args
    if not isinstance(x, Tensor):
        if op == "neg":
            return -x
        if op == "not":
            return not x
        x = scope.tensor(x)
    return _UNARY[op](x)


def evaluate(program: Expr, scope: Scope, score: Tensor | None = None) -> tuple[Value, dict[Expr, Value]]:
    """Value of ``program`` and of each of its nodes.

    Args:
        program: any score program.
        scope: meaning of its leaves.
        score: [B, Hq, rows, Sk], required when the program reads the score.

    Returns:
        The value (a tensor broadcastable to the rows of the score matrix, or a Python scalar) and the memo of
        node values that `vjp` reads.
    """
    memo: dict[Expr, Value] = {}

    def go(e: Expr) -> Value:
        if e in memo:
            return memo[e]
        value: Value
        if e.op == "score":
            if score is None:
                raise ValueError("a mask program reads the score")
            value = score
        elif e.op == "const":
            value = e.args[0]
        elif e.op == "index":
            value = scope.axis(e.args[0])
        elif e.op == "sym":
            value = scope.ints[e.args[0]]
        elif e.op == "load":
            value = scope.row_slice(scope.captures[e.args[0]])
        elif e.op == "relative":
            value = scope.by_distance(scope.captures[e.args[0]])
        else:
            value = _apply(e.op, [go(a) if isinstance(a, Expr) else a for a in e.args], scope)
        memo[e] = value
        return value

    return go(program), memo


def _d_extremum(v: tuple[Any, ...], g: Tensor, first_wins: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """Chosen and never multiplied by 0 or 1: in a row with a NaN the gradient is NaN, except where a bound stops it."""
    a, b = v
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        half = torch.where(a == b, g / 2, g)
        return torch.where(first_wins(b, a), 0.0, half), torch.where(first_wins(a, b), 0.0, half)
    if isinstance(a, Tensor):  # against a constant: clamp's rule, the bound itself still passes the gradient
        return torch.where(first_wins(a, b) | (a == b), g, 0.0), None
    return None, torch.where(first_wins(b, a) | (a == b), g, 0.0)


def _d_pow(v: tuple[Any, ...], y: Tensor, g: Tensor) -> tuple[Any, Any]:
    a, b = v
    ga = gb = None
    if isinstance(a, Tensor):
        zero = (b == 0) if isinstance(b, Tensor) else torch.full((), b == 0, device=g.device)
        ga = torch.where(zero, 0.0, g * (b * a ** (b - 1)))
    if isinstance(b, Tensor):
        log_a = torch.log(a) if isinstance(a, Tensor) else (math.log(a) if a > 0 else -math.inf)
        base_zero = (a == 0) if isinstance(a, Tensor) else torch.full((), a == 0, device=g.device)
        gb = torch.where(base_zero & (b >= 0), 0.0, g * (y * log_a))
    return ga, gb


def _partials(op: str, v: tuple[Any, ...], y: Tensor, g: Tensor) -> tuple[Any, ...]:
    """Cotangents of the arguments ``v`` of one node with value ``y`` and cotangent ``g``; None is zero."""
    match op:
        case "add":
            return g, g
        case "sub":
            return g, -g
        case "mul":
            return g * v[1], g * v[0]
        case "div":
            return g / v[1], -g * (y / v[1])
        case "mod":
            return g, -g * torch.div(v[0], v[1], rounding_mode="floor") if isinstance(v[1], Tensor) else None
        case "pow":
            return _d_pow(v, y, g)
        case "minimum":
            return _d_extremum(v, g, operator.lt)
        case "maximum":
            return _d_extremum(v, g, operator.gt)
        case "where":
            return None, torch.where(v[0], g, 0.0), torch.where(v[0], 0.0, g)
        case "cast":
            return (g, None)
        case "neg":
            return (-g,)
        case "abs":
            return (g * torch.sign(v[0]),)
        case "exp":
            return (g * y,)
        case "exp2":
            return (g * y * math.log(2),)
        case "log":
            return (g / v[0],)
        case "log2":
            return (g / (v[0] * math.log(2)),)
        case "log1p":
            return (g / (v[0] + 1),)
        case "sqrt":
            return (g / (2 * y),)
        case "rsqrt":
            return (-0.5 * g * y**3,)
        case "reciprocal":
            return (-g * y * y,)
        case "tanh":
            return (g * (1 - y * y),)
        case "sigmoid":
            return (g * (1 - y) * y,)
        case "relu":
            return (torch.where(y <= 0, 0.0, g),)  # a NaN passes it, as in eager code
        case "erf":
            return (g * (2 / math.sqrt(math.pi)) * torch.exp(-v[0] * v[0]),)
        case "sin":
            return (g * torch.cos(v[0]),)
        case "cos":
            return (-g * torch.sin(v[0]),)
        case _:  # comparisons, logic, rounding: constant almost everywhere
            return tuple(None for _ in v)


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _order(program: Expr) -> list[Expr]:
    """Distinct nodes, children before parents."""
    done: dict[Expr, None] = {}

    def go(e: Expr) -> None:
        if e not in done:
            for c in e.children():
                go(c)
            done[e] = None

    go(program)
    return list(done)


def vjp(program: Expr, memo: Mapping[Expr, Value], cotangent: Tensor) -> dict[Expr, Tensor]:
    """Reverse-mode derivative of ``program`` at the values of ``memo``.

    Args:
        program: the program that `evaluate` ran.
        memo: its node values.
        cotangent: gradient with respect to the program's value, [B, Hq, rows, Sk].

    Returns:
        Cotangents of the leaves ``score`` and ``load`` that the value depends on, each in the shape and dtype of
        the leaf's value (summed over broadcast dimensions).
    """
    acc: dict[Expr, Tensor] = {}

    def add(e: Expr, g: Tensor) -> None:
        value = memo[e]
        assert isinstance(value, Tensor)
        g = g.sum_to_size(value.shape).to(value.dtype)
        acc[e] = acc[e] + g if e in acc else g

    if not _differentiable(memo[program]):
        return {}
    add(program, cotangent)
    for e in reversed(_order(program)):
        if e not in acc or e.op in LEAVES:
            continue
        values = tuple(memo[a] if isinstance(a, Expr) else a for a in e.args)
        y = memo[e]
        assert isinstance(y, Tensor)
        grads = _partials(e.op, values, y, acc.pop(e))
        for a, value, g in zip(e.args, values, grads, strict=True):
            if g is not None and isinstance(a, Expr) and _differentiable(value):
                add(a, g)
    return {e: g for e, g in acc.items() if e.op in ("score", "load")}
