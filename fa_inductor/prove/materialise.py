"""Captures and run-time integers of proven masks, as new nodes of the graph.

Everything provable is computed over one sequence axis, never over q and k together; only a `DenseDraft`, or a bias
that is a tensor over q and k in the user's graph, has both.
"""
from __future__ import annotations

import operator
from contextlib import nullcontext
from typing import Any

import sympy
import torch
from torch import fx
from torch._guards import detect_fake_mode

from fa_inductor.kernels import record
from fa_inductor.kernels.expr import Expr
from fa_inductor.sizes import size_node

from .atoms import BandDraft, ChunkDraft, DenseDraft, DocumentsDraft, Draft, KeyPaddingDraft, PredicateDraft
from .evaluate import Evaluator
from .program import ProgramBuilder
from .values import (
    AXES,
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
    trees_of,
)

aten, prims = torch.ops.aten, torch.ops.prims
Int = int | fx.Node


class Materialiser:
    """Emits aten nodes before ``insert_before``; equal values are emitted once.

    Every tensor it makes is 4-D, ``[B or 1, Hq or 1, Sq or 1, Sk or 1]``, with size 1 where the value does not vary,
    or 0-D.  ``meta["val"]`` is set by running the operator on the operands' fake tensors.

    Args:
        graph: the joint graph.
        insert_before: a node that comes after everything the drafts read.
        ev: the evaluator that made the drafts.
        device: of new constants and index tensors; default: that of ``insert_before``.
    """

    def __init__(
        self, graph: fx.Graph, insert_before: fx.Node, ev: Evaluator, device: torch.device | None = None
    ) -> None:
        self.graph = graph
        self.insert_before = insert_before
        self.ev = ev
        self.device = device or _device_of(insert_before)
        self._cache: dict[Any, Any] = {}
        self._mode: Any = detect_fake_mode([n.meta.get("val") for n in graph.nodes]) or nullcontext()

    # -- nodes -----------------------------------------------------------------------------------------------------

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.insert_before):
            node = self.graph.call_function(target, args, kwargs)
        fake_args, fake_kwargs = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self._mode:
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        return node

    def before(self, node: fx.Node) -> Materialiser:
        """Moves on to another block of the same shape; what was emitted for earlier ones is used again."""
        if node < self.insert_before:
            self._cache.clear()
        self.insert_before = node
        return self

    def _cached(self, key: Any, make: Any) -> Any:
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    # -- host integers -----------------------------------------------------------------------------------------------

    def integer(self, p: Poly) -> Int:
        """An axis-free integer as a python int or a SymInt node."""
        c = p.constant()
        return c if c is not None else self._cached(("int", p), lambda: self._host_sum(p))

    def _host_sum(self, p: Poly) -> Int:
        total: Int = 0
        for m, c in p.terms.items():
            term: Int = c
            for a, power in sorted(m, key=lambda x: str(x[0])):
                for _ in range(power):
                    term = self._host_op(operator.mul, self._host_atom(a), term)
            total = self._host_op(operator.add, total, term)
        return total

    def _host_op(self, op: Any, a: Int, b: Int) -> Int:
        if isinstance(a, int) and isinstance(b, int):
            return op(a, b)
        if (op is operator.mul and b == 1) or (op is operator.add and isinstance(b, int) and b == 0):
            return a
        if op is operator.add and isinstance(a, int) and a == 0:
            return b
        return self._cached((op, a, b), lambda: self.call(op, a, b))

    def _host_atom(self, a: Any) -> Int:
        if isinstance(a, FloorDiv):
            return self._host_op(operator.floordiv, self.integer(a.n), self.integer(a.d))
        if isinstance(a, Max):
            return self._cached((Max, a), lambda: self.call(torch.sym_max, self.integer(a.a), self.integer(a.b)))
        return self._cached(a, lambda: self._symbol(a))

    def _symbol(self, s: sympy.Symbol) -> fx.Node:
        """A node that holds this size symbol, or the size of a tensor that has it."""
        s = self.ev.opaque.get(s, s)
        found = size_node(self.graph, s, self.insert_before)
        if found is not None:
            return found
        for node in self.graph.nodes:
            if node is self.insert_before:
                break
            val = node.meta.get("val")
            if isinstance(val, torch.Tensor):
                for d, n in enumerate(val.shape):
                    if isinstance(n, torch.SymInt) and n.node.expr == s:
                        return self.call(aten.sym_size.int, node, d)
        raise Undecided(f"no node of the graph tells the size {s}")

    # -- tensors -----------------------------------------------------------------------------------------------------

    def tensor(self, p: Poly) -> fx.Node:
        """An integer over the axes it depends on, int64."""
        return self._cached(("tensor", p), lambda: self._tensor(p))

    def _tensor(self, p: Poly) -> fx.Node:
        inside, outside = Poly({}), Poly({})
        for m, c in p.terms.items():
            term = Poly({m: c})
            if axes_of(term) or next(trees_of(term), None) is not None:
                inside = inside + term
            else:
                outside = outside + term
        total: fx.Node | None = None
        for m, c in inside.terms.items():
            factor, term = Poly.of(c), None
            for a, power in sorted(m, key=lambda x: str(x[0])):
                for _ in range(power):
                    if axes_of(a) or next(trees_of(Poly.of(a)), None) is not None:
                        x = self._atom(a)
                        term = x if term is None else self.call(aten.mul.Tensor, term, x)
                    else:
                        factor = factor * Poly.of(a)
            assert term is not None
            n = self.integer(factor)
            if isinstance(n, fx.Node) or n not in (1, -1):
                term = self.call(aten.mul.Tensor, term, n)
            if n == -1:
                term = self.call(aten.neg.default, term) if total is None else self.call(aten.sub.Tensor, total, term)
                total = term
            else:
                total = term if total is None else self.call(aten.add.Tensor, total, term)
        rest = self.integer(outside)
        if total is None:
            return self.call(aten.full.default, [1, 1, 1, 1], rest, dtype=torch.int64, device=self.device)
        return total if isinstance(rest, int) and rest == 0 else self.call(aten.add.Tensor, total, rest)

    def _atom(self, a: Any) -> fx.Node:
        return self._cached(("atom", a), lambda: self._new_atom(a))

    def _new_atom(self, a: Any) -> fx.Node:
        match a:
            case sympy.Symbol():
                d, n = AXES.index(a), self.integer(self.ev.facts.sizes[a])
                iota = self.call(prims.iota.default, n, start=0, step=1, dtype=torch.int64, device=self.device,
                                 requires_grad=False)
                return self.call(aten.view.default, iota, [n if i == d else 1 for i in range(4)])
            case FloorDiv(n=n, d=d):
                by = self.integer(d) if not axes_of(d) and next(trees_of(d), None) is None else self.tensor(d)
                return self.call(aten.div.Tensor_mode, self.tensor(n), by, rounding_mode="floor")
            case Max(a=x, b=y):
                return self.call(aten.maximum.default, self.tensor(x), self.tensor(y))
            case Indicator(pred=p):
                return self.call(prims.convert_element_type.default, self.pred(p), torch.int64)
            case Opaque(tree=t):
                x = self._sized(self.tree(t))
                return x if t.dtype == torch.int64 else self.call(prims.convert_element_type.default, x, torch.int64)
        raise TypeError(f"not an atom: {a!r}")

    def pred(self, p: Pred) -> fx.Node:
        """A predicate over the axes it depends on, bool."""
        return self._cached(("pred", p), lambda: self._sized(self._pred(p)))

    def _pred(self, p: Pred) -> fx.Node:
        match p:
            case Bool(value=v):
                return self.call(aten.full.default, [1, 1, 1, 1], v, dtype=torch.bool, device=self.device)
            case Cmp(op=op, expr=e):
                return self.call(getattr(aten, op).Scalar, self.tensor(e), 0)
            case Leaf(tree=t, positive=s):
                return self.tree(t) if s else self.call(aten.logical_not.default, self.tree(t))
            case And(args=xs) | Or(args=xs):
                op = aten.bitwise_and.Tensor if isinstance(p, And) else aten.bitwise_or.Tensor
                total = self.pred(xs[0])
                for x in xs[1:]:
                    total = self.call(op, total, self.pred(x))
                return total
        raise TypeError(f"not a predicate: {p!r}")

    def tree(self, t: Tree, use_origin: bool = False) -> fx.Node:
        """A tree in its own dtype; 0-D when it is a constant or a 0-D tensor.

        With ``use_origin`` a node of the user's graph that holds the value is read through a view instead of being
        computed again: what a bias with a gradient needs.
        """
        origin = self.ev.origins.get(t) if use_origin else None
        if origin is not None and not isinstance(t, Load | Const):
            node, index = origin
            t = Load(node, index, t.dtype)
        return self._cached(("tree", t), lambda: self._tree(t))

    def _tree(self, t: Tree) -> fx.Node:
        match t:
            case Const(value=v, dtype=d):
                return self.call(aten.full.default, [], v, dtype=d, device=self.device)
            case Load():
                return self._load(t)
            case Select(pred=p, a=a, b=b):
                return self.call(aten.where.self, self.pred(p), self.tree(a), self.tree(b))
            case Cast(expr=e, dtype=d):
                return self.call(prims.convert_element_type.default, self.tensor(e), d)
            case Apply(target=target, args=args, kwargs=kwargs, scalars=scalars):
                emitted = []
                for i, a in enumerate(args):
                    if isinstance(a, Poly):
                        emitted.append(self.integer(a))
                    elif isinstance(a, Tree):
                        emitted.append(self._scalar(self.tree(a)) if i in scalars else self._sized(self.tree(a)))
                    else:
                        emitted.append(a)
                return self.call(target, *emitted, **dict(kwargs))
        raise TypeError(f"not a tree: {t!r}")

    def _sized(self, node: fx.Node) -> fx.Node:
        return node if node.meta["val"].ndim else self.call(aten.view.default, node, [1, 1, 1, 1])

    def _scalar(self, node: fx.Node) -> fx.Node:
        return self.call(aten.view.default, node, []) if node.meta["val"].ndim else node

    def _load(self, t: Load) -> fx.Node:
        """The tensor as a 4-D view where the index is made of axes, offsets and constants; a gather otherwise."""
        x = t.node
        if not t.index:
            return x
        shape = self.ev.shape(x)
        if not all(self.ev.facts.in_range(i, 0, n) for i, n in zip(t.index, shape, strict=True)):
            return self._gather(t)
        placed: list[Any] = []
        for i in t.index:
            axis = next((s for s in AXES if s in i.free), None)
            offset = i - Poly.of(axis) if axis is not None else i
            simple = not axes_of(offset) and next(trees_of(offset), None) is None
            if not simple or (axis is not None and axis in placed):
                return self._gather(t)
            placed.append(axis)
        d = 0
        for axis, i, n in zip(placed, t.index, shape, strict=True):
            if axis is None:
                x = self.call(aten.select.int, x, d, self.integer(i))
                continue
            offset, size = i - Poly.of(axis), self.ev.facts.sizes[axis]
            if offset != 0 or size != n:
                x = self.call(aten.slice.Tensor, x, d, self.integer(offset), self.integer(offset + size))
            d += 1
        axes = [a for a in placed if a is not None]
        order = sorted(range(len(axes)), key=lambda i: AXES.index(axes[i]))
        if order != list(range(len(order))):
            x = self.call(aten.permute.default, x, order)
        for position, axis in enumerate(AXES):
            if axis not in axes:
                x = self.call(aten.unsqueeze.default, x, position)
        return x

    def _gather(self, t: Load) -> fx.Node:
        """Reads at any index; one outside the tensor is clamped, since a selection discards what is read there."""
        facts = self.ev.facts
        index = []
        for i, n in zip(t.index, self.ev.shape(t.node), strict=True):
            inside = facts.in_range(i, 0, n)
            index.append(self.tensor(i if inside else facts.maximum(Poly({}), facts.minimum(i, n - 1))))
        return self.call(aten.index.Tensor, t.node, index)

    def per_token(self, node: fx.Node, axis: int) -> fx.Node:
        """``[B or 1, 1, .., S, ..]`` as ``[B or 1, S]``; axis 2 for queries, 3 for keys."""
        node = self.call(aten.select.int, node, 5 - axis, 0)
        return self.call(aten.select.int, node, 1, 0)


def _device_of(node: fx.Node) -> torch.device:
    for n in (node, *node.all_input_nodes):
        val = n.meta.get("val")
        if isinstance(val, torch.Tensor):
            return val.device
    raise ValueError(f"node {node.name!r} has no device")


def to_record(
    drafts: tuple[Draft, ...], materialiser: Materialiser, captures: list[fx.Node] | None = None,
    ints: list[Int] | None = None,
) -> tuple[tuple[record.Atom, ...], list[fx.Node], list[Int]]:
    """Atoms of the record, with the captures and run-time integers they refer to.

    ``captures`` and ``ints`` are appended to when given, so that one block can number several things in one list;
    equal entries share a number.  Captures: key padding bool ``[B or 1, Sk]``; document ids int64 ``[B or 1, Sq]`` and
    ``[B or 1, Sk]``; dense masks bool 4-D; loads of predicates 4-D with size 1 where they do not vary.  Captures that
    are views of the user's tensors keep those strides.
    """
    captures = captures if captures is not None else []
    ints = ints if ints is not None else []
    builder = _Numbering(materialiser, captures, ints)
    return tuple(builder.atom(d) for d in drafts), captures, ints


def to_program(
    tree: Tree, materialiser: Materialiser, captures: list[fx.Node], ints: list[Int]
) -> Expr:
    """A bias (the residual of an additive proof) as a score program; loads are appended to ``captures``.

    Raises:
        Undecided: the bias must be read as a tensor, see `Materialiser.tree`.
    """
    return _Numbering(materialiser, captures, ints).builder.tree(tree)


class _Numbering:
    """Numbers captures and integers of one operator call."""

    def __init__(self, materialiser: Materialiser, captures: list[fx.Node], ints: list[Int]) -> None:
        self.m, self.captures, self.ints = materialiser, captures, ints
        self.builder = ProgramBuilder(self.load, self.host)

    def load(self, x: Tree | Poly) -> int:
        """A capture that is read inside a program; integers as int64, so that arithmetic on them does not wrap."""
        return self.capture(self.m.tensor(x) if isinstance(x, Poly) else self.m._sized(self.m.tree(x)))

    def capture(self, node: fx.Node) -> int:
        if node not in self.captures:
            self.captures.append(node)
        return self.captures.index(node)

    def host(self, p: Poly) -> int:
        n = self.m.integer(p)
        if n not in self.ints:
            self.ints.append(n)
        return self.ints.index(n)

    def sint(self, p: Poly) -> record.SInt:
        c = p.constant()
        return c if c is not None else record.Sym(self.host(p))

    def atom(self, draft: Draft) -> record.Atom:
        m = self.m
        match draft:
            case BandDraft(lo=lo, hi=hi):
                return record.Band(None if lo is None else self.sint(lo), None if hi is None else self.sint(hi))
            case ChunkDraft(size=size, offset=offset):
                return record.Chunk(self.sint(size), self.sint(offset))
            case KeyPaddingDraft(pred=p):
                return record.KeyPadding(self.capture(m.per_token(m.pred(p), 3)))
            case DocumentsDraft(q=q, k=k):
                return record.Documents(self.capture(m.per_token(m.tensor(q), 2)),
                                        self.capture(m.per_token(m.tensor(k), 3)))
            case DenseDraft(pred=p):
                return record.Dense(self.capture(m.pred(p)))
            case PredicateDraft(pred=p):
                return record.Predicate(self.builder.pred(p))


