"""Translation validation: a rewrite is run beside the code it replaces, on random data in float64, while compiling.

Both sides are read off the same graph.  Q, K, V and the output's gradient are drawn at random; what masks and biases
are computed from is computed, from random graph inputs.  Every float is float64, so a difference is an error of the
rewrite and not of rounding.  A cast to a narrower type only turns what it cannot hold into infinity.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from .backends import reference
from .kernels.expr import Expr
from .kernels.record import Attention, Predicate
from .recognise.axes import product
from .recognise.nodes import CASTS, VIEWS, aten, constant, is_random, is_tensor, target, val

MAX_NODES = 4000
MAX_ELEMENTS = 1 << 24
"""Of one tensor; larger blocks are not validated: compiling would take as long as running the model."""
TOLERANCE = 1e-7
"""Of the largest value."""


class CannotValidate(Exception):
    """The code cannot be run here: too large, or it draws random numbers."""


def difference(pairs: Iterable[tuple[Node, Node]], leaves: Iterable[Node], record: Attention) -> str | None:
    """What is different between each old node and the new one that took its place; None when nothing is.

    Args:
        leaves: nodes that get random values instead of being computed.
        record: of the rewrite; when it says what a row without keys gives, a second run has such rows.

    Raises:
        CannotValidate: see there.
    """
    pairs, leaves = list(pairs), list(leaves)
    for uniform in (False, True) if _has_empty_rows(record) else (False,):
        found = _differs(_Run(leaves, uniform), pairs)
        if found is not None:
            return found + " (rows without keys)" * uniform
    return None


def _has_empty_rows(record: Attention) -> bool:
    """Whether rows without keys can be compared: a fill that only a narrow dtype's rounding makes uniform is not one
    in float64."""
    return record.empty_rows != "never" and (record.empty_rows != "mean" or record.fill < -1e21)


def _differs(run: _Run, pairs: Iterable[tuple[Node, Node]]) -> str | None:
    for old, new in pairs:
        a, b = run.value(old), run.value(new)
        if a.shape != b.shape:
            return f"{old.name}: shape {tuple(b.shape)} for {tuple(a.shape)}"
        finite = a[a.isfinite()]
        scale = float(finite.abs().max()) if finite.numel() else 1.0
        if not torch.allclose(a, b, rtol=0.0, atol=TOLERANCE * max(scale, 1e-6), equal_nan=True):
            gap = float(torch.nan_to_num((a - b).abs(), nan=float("inf")).max())
            return f"{old.name}: differs by {gap:.3g} of {scale:.3g}"
    return None


class _Run:
    """Evaluates nodes of one graph, each once.

    Args:
        uniform: of what masks are made of, the first row along the last dimension is all zeros, the next all ones.
    """

    def __init__(self, leaves: Iterable[Node], uniform: bool) -> None:
        self.uniform = uniform
        self.generator = torch.Generator().manual_seed(0)
        self.values: dict[Node, Any] = {}
        for n in map(_root, leaves):
            if n not in self.values:
                self.values[n] = self._random(val(n))

    def value(self, node: Node) -> Any:
        todo = [node]
        while todo:
            n = todo[-1]
            if n in self.values:
                todo.pop()
                continue
            missing = [i for i in n.all_input_nodes if i not in self.values]
            if missing and not _integer(n):
                todo += missing
                continue
            todo.pop()
            self.values[n] = self._compute(n)
            if len(self.values) > MAX_NODES:
                raise CannotValidate("too many nodes")
        return self.values[node]

    def _random(self, t: torch.Tensor) -> torch.Tensor:
        shape = [_hint(s) for s in t.shape]
        if product(shape) > MAX_ELEMENTS:
            raise CannotValidate(f"a tensor of {tuple(shape)}")
        if t.dtype.is_floating_point:
            return torch.randn(shape, generator=self.generator, dtype=torch.float64)
        if t.dtype.is_complex:
            raise CannotValidate("complex numbers")
        drawn = (torch.rand(shape, generator=self.generator) < 0.7).to(t.dtype)
        if self.uniform and drawn.dim() > 0:
            rows = drawn.view(-1, shape[-1])
            rows[:1], rows[1:2] = 0, 1
        return drawn

    def _compute(self, n: Node) -> Any:
        v = n.meta.get("val")
        if _integer(n):
            return _hint(v)
        if isinstance(v, torch.Tensor) and product([_hint(s) for s in v.shape]) > MAX_ELEMENTS:
            raise CannotValidate(f"a tensor of {tuple(v.shape)}")
        if n.op == "placeholder":
            if isinstance(v, torch.Tensor):
                return self._random(v)
            if isinstance(v, torch.SymFloat) and v.node.hint is not None:
                return float(v.node.hint)
            raise CannotValidate(f"an input that is {type(v).__name__}")
        if n.op == "get_attr":
            t: Any = n.graph.owning_module
            for name in str(n.target).split("."):
                t = getattr(t, name)
            return _double(t.detach().cpu())
        if n.op != "call_function" or is_random(n):
            raise CannotValidate(f"{n.op} {n.target}")
        args: Any
        args, kwargs = torch.fx.map_arg((n.args, n.kwargs), lambda i: self.values[i])
        if n.target in CASTS:
            return _cast(args[0], val(n).dtype)
        name = getattr(n.target, "_schema", None) and n.target._schema.name  # type: ignore[union-attr]
        if name == "fa_inductor::attention":
            q, k, w, captures, ints, record, _ = args
            return reference.forward(_exact(record), q, k, w, captures, ints)
        if name == "fa_inductor::attention_backward":
            dout, q, k, w, _out, _lse, captures, ints, record, _ = args
            return reference.backward(_exact(record), dout, q, k, w, captures, ints)
        if n.target in (aten.view.default, aten._unsafe_view.default):
            return args[0].reshape(list(args[1]))  # the strides here are not those of the compiled graph
        literal = constant(n) if n.target in (aten.full.default, aten.scalar_tensor.default) else None
        if literal is not None:  # rounded as the user's dtype rounds it
            return torch.full([_hint(x) for x in v.shape], literal,
                              dtype=torch.float64 if v.dtype.is_floating_point else v.dtype)
        out = n.target(*_here(args), **_here(kwargs))  # type: ignore[operator]
        if isinstance(out, torch.Tensor) and out.dtype.is_floating_point and isinstance(v, torch.Tensor):
            return _cast(out, v.dtype)  # a fill may leave the range of the user's dtype
        return _double(out) if isinstance(out, torch.Tensor) else out


def _root(n: Node) -> Node:
    """The node that a leaf only rearranges: other code may read the same values from there."""
    while target(n) in VIEWS and is_tensor(n.args[0]) and val(n.args[0]).numel() == val(n).numel():
        n = n.args[0]  # type: ignore[assignment]
    return n


def _exact(record: str) -> Attention:
    a = Attention.from_string(record)
    return a.with_(dtype="float64", score=_widened(a.score), mask=tuple(
        Predicate(_widened(m.expr)) if isinstance(m, Predicate) else m for m in a.mask))


def _widened(e: Expr) -> Expr:
    """The program with float64 in the place of every narrower float."""
    args = tuple(_widened(x) if isinstance(x, Expr) else x for x in e.args)
    if e.op == "cast" and args[1] in ("float32", "bfloat16", "float16"):
        args = (args[0], "float64")
    return Expr(e.op, args)


def _integer(n: Node) -> bool:
    return isinstance(n.meta.get("val"), (int, torch.SymInt)) and not isinstance(n.meta.get("val"), bool)


def _hint(x: Any) -> int:
    if isinstance(x, int):
        return x
    if x.node.hint is None:
        raise CannotValidate("a size that depends on data")
    return int(x.node.hint)


def _double(t: torch.Tensor) -> torch.Tensor:
    return t.double() if t.dtype.is_floating_point else t


def _cast(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not dtype.is_floating_point:
        return t.to(dtype)
    t = t.double()
    limit = torch.finfo(dtype).max
    # halfway to the next step a value rounds to infinity; anything clearly above does
    return torch.where(t.abs() > limit * (1 + torch.finfo(dtype).eps), t.sign() * float("inf"), t)


def _here(x: Any) -> Any:
    """Arguments for a CPU in float64."""
    if isinstance(x, torch.dtype):
        return torch.float64 if x.is_floating_point else x
    if isinstance(x, torch.device):
        return torch.device("cpu")
    if isinstance(x, (list, tuple)):
        return type(x)(_here(i) for i in x)
    if isinstance(x, dict):
        return {k: _here(i) for k, i in x.items()}
    return x
