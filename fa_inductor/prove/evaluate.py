"""Symbolic evaluation of graph nodes as functions of their output index.

``Evaluator.value(node, index)`` answers: what does this tensor hold at ``index``?  Views, slices, gathers with
provable indices and pointwise operators are followed; a node that is not understood becomes an opaque load of that
node at that index, so an answer always exists and is always exact.

Assumptions on integer arithmetic: int64 and int32 arithmetic on positions and sizes, and int64 arithmetic on loaded
values, does not overflow where it would not with values below 2**20.  What might, int32 arithmetic on loaded values and
all arithmetic in narrower types stay opaque unless their range is proven.  Floats that hold integers are followed only
where every value is proven to be representable (float32: up to 2**24).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import CleanDiv, Mod, ModularIndexing, PythonMod
from torch.utils._sympy.functions import FloorDiv as TorchFloorDiv
from torch.utils._sympy.functions import Max as TorchMax
from torch.utils._sympy.functions import Min as TorchMin

from .simplify import Facts
from .trees import Trees
from .values import AXIS_SET, Apply, Cast, Leaf, Load, Opaque, Poly, Tree, Undecided, Value

Handler = Callable[["Evaluator", fx.Node, tuple[Poly, ...]], Value]
HANDLERS: dict[Any, Handler] = {}
"""Overload packet (or plain function) -> evaluation rule; filled by `index_ops` and `pointwise_ops`."""

_MAX_WEIGHT = 64
"""Operators in one opaque tree; a larger one is read from the graph's own node."""
_MAX_DEPTH = 64
"""Nodes followed in a row: no mask producer is deeper, a residual stream of a whole model is."""


def rule(*targets: Any) -> Callable[[Handler], Handler]:
    """Register an evaluation rule for operators (overload packets, or functions such as ``operator.getitem``)."""

    def register(handler: Handler) -> Handler:
        for t in targets:
            HANDLERS[t] = handler
        return handler

    return register


@dataclass(frozen=True)
class Context:
    """Sizes of the score matrix ``S[b, h, q, k]``: ints, SymInts or sympy expressions."""

    batch: Any
    heads: Any
    q_len: Any
    k_len: Any


class Evaluator:
    """Evaluates nodes for one score matrix shape; share it over all layers of a graph that have this shape.

    Raises:
        Undecided: a size is no integer.
    """

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.facts = Facts()
        self.trees = Trees(self.facts)
        self.opaque: dict[Any, Any] = {}
        """Symbols that stand for an expression of the ShapeEnv, of which nothing else is known."""
        self._guards_read = 0
        self.facts.set_sizes(*(self.integer(n) for n in (ctx.batch, ctx.heads, ctx.q_len, ctx.k_len)))
        self.origins: dict[Tree, tuple[fx.Node, tuple[Poly, ...]]] = {}
        self._memo: dict[tuple[fx.Node, tuple[Poly, ...]], Value] = {}
        self._depth = 0
        self._weights: dict[Tree, int] = {}

    # -- border -------------------------------------------------------------

    def integer(self, x: Any) -> Poly:
        """An int, SymInt, sympy expression, or the graph node of a SymInt, as a polynomial.

        Raises:
            Undecided: not an integer, or an expression outside polynomials, floor division, remainder, min and max.
        """
        if isinstance(x, fx.Node):
            x = x.meta.get("val")
        if isinstance(x, Poly):
            return x
        if isinstance(x, int):
            return Poly.of(int(x))
        if isinstance(x, torch.SymInt):
            if x.node.is_constant():
                return Poly.of(int(x))
            env = x.node.shape_env
            if env is not None:
                self._read_guards(env)
                for s in x.node.expr.free_symbols:
                    r = env.var_to_range.get(s)
                    if r is not None:
                        self.facts.learn(s, _bound(r.lower), _bound(r.upper))
            return self.from_sympy(x.node.expr)
        if isinstance(x, sympy.Expr):
            return self.from_sympy(x)
        raise Undecided

    def _read_guards(self, env: Any) -> None:
        """Inequalities between sizes that the compiled graph is guarded by, as facts."""
        if self._guards_read == len(env.guards):
            return
        start, self._guards_read = self._guards_read, len(env.guards)
        for guard in env.guards[start:]:
            e = guard.expr
            if not isinstance(e, sympy.Gt | sympy.Ge | sympy.Lt | sympy.Le) or len(e.free_symbols) < 2:
                continue
            try:
                a, b = self.from_sympy(e.args[0]), self.from_sympy(e.args[1])
            except Undecided:
                continue
            larger = a - b if isinstance(e, sympy.Gt | sympy.Ge) else b - a
            self.facts.assume(larger - int(isinstance(e, sympy.Gt | sympy.Lt)))

    def from_sympy(self, e: Any) -> Poly:
        """A sympy expression over size symbols; a part outside the normal form is a symbol of its own (`opaque`)."""
        try:
            return self._polynomial(e)
        except Undecided:
            if e.is_integer is not True or e.free_symbols & AXIS_SET:
                raise
        symbol = sympy.Symbol(f"<{e}>", integer=True)
        self.opaque[symbol] = e
        self.facts.learn(symbol, 1 if e.is_positive else 0 if e.is_nonnegative else None, None)
        return Poly.of(symbol)

    def _polynomial(self, e: Any) -> Poly:
        facts = self.facts
        if isinstance(e, sympy.Symbol):
            return Poly.of(e)
        if isinstance(e, sympy.Integer):
            return Poly.of(int(e))
        if isinstance(e, sympy.floor) and isinstance(e.args[0], sympy.Mul | sympy.Add):
            n, d = sympy.together(e.args[0]).as_numer_denom()
            return facts.floordiv(self.from_sympy(n), self.from_sympy(d))
        args = [self.from_sympy(a) for a in e.args] if not isinstance(e, sympy.Pow | sympy.Rational) else []
        if isinstance(e, sympy.Add):
            total = Poly({})
            for a in args:
                total = total + a
            return total
        if isinstance(e, sympy.Mul):
            product = Poly.of(1)
            for a in args:
                product = product * a
            return product
        if isinstance(e, sympy.Pow) and isinstance(e.exp, sympy.Integer) and 0 < int(e.exp) <= 8:
            base = product = self.from_sympy(e.base)
            for _ in range(int(e.exp) - 1):
                product = product * base
            return product
        if isinstance(e, TorchFloorDiv | CleanDiv):
            return facts.floordiv(args[0], args[1])
        if isinstance(e, sympy.Mod | PythonMod) or (isinstance(e, Mod) and facts.nonneg(args[0])):
            return facts.mod(args[0], args[1])
        if isinstance(e, ModularIndexing):
            return facts.mod(facts.floordiv(args[0], args[1]), args[2])
        if isinstance(e, TorchMax | sympy.Max | TorchMin | sympy.Min):
            pick = facts.maximum if isinstance(e, TorchMax | sympy.Max) else facts.minimum
            result = args[0]
            for a in args[1:]:
                result = pick(result, a)
            return result
        raise Undecided

    def shape(self, node: fx.Node) -> tuple[Poly, ...]:
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor):
            raise Undecided
        return tuple(self.integer(n) for n in val.shape)

    # -- evaluation -------------------------------------------------------------

    def value(self, node: fx.Node, index: Sequence[Any]) -> Value:
        """The element of ``node`` at ``index``, one integer expression per dimension.

        Returns:
            `Poly` for integer tensors, `Pred` for bool tensors, `Tree` for float tensors.
        """
        at = tuple(map(self.integer, index))
        key = (node, at)
        found = self._memo.get(key)
        if found is None:
            self._depth += 1
            try:
                at = tuple(Poly({}) if n == 1 else i for i, n in zip(at, self.shape(node), strict=True))
                found = self._evaluate(node, at) if self._depth < _MAX_DEPTH else self.load(node, at)
            except Undecided:
                found = self.load(node, at)
            finally:
                self._depth -= 1
            if isinstance(found, Tree):
                self.origins.setdefault(found, (node, at))
            self._memo[key] = found
        return found

    def _evaluate(self, node: fx.Node, index: tuple[Poly, ...]) -> Value:
        if node.op == "get_attr":
            return self._constant(node, index)
        if node.op != "call_function":
            raise Undecided
        target = getattr(node.target, "overloadpacket", node.target)
        handler = HANDLERS.get(target)
        if handler is not None:
            try:
                return handler(self, node, index)
            except (Undecided, IndexError):  # IndexError: an argument was given by keyword
                pass
        return self.pointwise(node, index)

    def _constant(self, node: fx.Node, index: tuple[Poly, ...]) -> Value:
        """A lifted constant, when its tensor is at hand and tells a single number."""
        tensor: Any = node.graph.owning_module
        for name in str(node.target).split("."):
            tensor = getattr(tensor, name, None)
        real = isinstance(tensor, torch.Tensor) and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if not real or tensor.requires_grad or tensor.numel() != 1 or tensor.device.type == "meta":
            raise Undecided
        return self.scalar(tensor.item(), tensor.dtype)

    def load(self, node: fx.Node, index: tuple[Poly, ...]) -> Value:
        """The opaque element of ``node`` at ``index``."""
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor):
            raise TypeError(f"node {node.name!r} holds no tensor: {type(val).__name__}")
        return self.trees.typed(Load(node, index, val.dtype))

    def scalar(self, value: Any, dtype: torch.dtype) -> Value:
        """A number as torch stores it in ``dtype``."""
        if isinstance(value, fx.Node | torch.SymInt):
            return self.trees.convert(self.integer(value), torch.int64, dtype)
        if not isinstance(value, bool | int | float):
            raise Undecided
        return self.trees.typed(self.trees.const(value, dtype))

    def operand(self, arg: Any, node: fx.Node, index: tuple[Poly, ...]) -> Value:
        """The value that a pointwise operator reads from a tensor argument, with broadcasting.

        Raises:
            Undecided: ``arg`` is no tensor node, or its shape cannot be lined up with that of ``node``.
        """
        if not isinstance(arg, fx.Node):
            raise Undecided
        shape, out = self.shape(arg), self.shape(node)
        if len(shape) > len(out):
            raise Undecided
        at = index[len(index) - len(shape):]
        for n, o in zip(shape, out[len(out) - len(shape):], strict=True):
            if n != 1 and n != o:
                raise Undecided
        return self.value(arg, at)

    def pointwise(self, node: fx.Node, index: tuple[Poly, ...]) -> Value:
        """Any operator that is tagged pointwise: its operands are followed, the operator itself is kept."""
        tags = getattr(node.target, "tags", ())
        if torch.Tag.pointwise not in tags or torch.Tag.nondeterministic_seeded in tags:
            raise Undecided
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor) or any(isinstance(v, fx.Node) for v in node.kwargs.values()):
            raise Undecided
        args: list[Any] = []
        scalars = set()
        for i, a in enumerate(node.args):
            if isinstance(a, fx.Node):
                source = a.meta.get("val")
                if not isinstance(source, torch.Tensor):
                    args.append(self.integer(a))
                    continue
                if source.ndim == 0:
                    scalars.add(i)
                args.append(self.trees.lift(self.operand(a, node, index), source.dtype))
            elif isinstance(a, list | tuple):
                raise Undecided
            else:
                args.append(a)
        kwargs = tuple(sorted((k, v) for k, v in node.kwargs.items() if v is not None))
        result = self.trees.apply(node.target, tuple(args), kwargs, frozenset(scalars), val.dtype)
        if self._weight(result) > _MAX_WEIGHT:
            raise Undecided
        return self.trees.typed(result)

    def _weight(self, tree: Tree) -> int:
        known = self._weights.get(tree)
        if known is None:
            known = 1
            if isinstance(tree, Apply):
                known += sum(self._weight(_inner(a)) for a in tree.args if isinstance(_inner(a), Tree))
            elif hasattr(tree, "a") and hasattr(tree, "b"):
                known += self._weight(tree.a) + self._weight(tree.b)  # type: ignore[attr-defined]
            self._weights[tree] = known
        return known


def _inner(x: Any) -> Any:
    if isinstance(x, Leaf):
        return x.tree
    if isinstance(x, Cast):
        opaque = [a for a in x.expr.atoms() if isinstance(a, Opaque)]
        return opaque[0].tree if opaque else x
    return x


def _bound(x: Any) -> int | None:
    return int(x) if isinstance(x, sympy.Integer) else None


