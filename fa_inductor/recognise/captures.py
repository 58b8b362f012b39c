"""The operands that a block's steps bring in: tensors and integers that become the operator's captures."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..kernels import expr as ex
from ..kernels.expr import Expr
from ..prove import Evaluator, Materialiser, Undecided, by_distance, distances, to_program
from ..prove.values import Poly
from ..reasons import Code, Refusal
from .axes import Dims, broadcast_operand, group_size, resolve, shape_of
from .block import Block
from .nodes import CASTS, VIEWS, aten, constant, is_tensor, prims, target, val
from .scores import POINTWISE, Step

_POINTWISE_INPUTS = {*POINTWISE, aten.index.Tensor, aten.slice.Tensor, aten.select.int, aten.full.default,
                     aten.scalar_tensor.default, prims.iota.default, aten.rsub.Scalar, aten.eq.Scalar, aten.ne.Scalar,
                     aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor,
                     aten.logical_not.default, aten.logical_and.default, aten.logical_or.default,
                     aten.bitwise_not.default, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.expand.default,
                     aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar}


_FEW = 12
_SIMPLE = {"add", "sub", "mul", "neg", "abs", "minimum", "maximum", "cast"}
"""Programs of so many nodes, all of these, are computed for each score rather than read."""


@dataclass(frozen=True)
class Arranged:
    """A capture that is a tensor of the graph with its dimensions put in the order b, h, q, k."""

    node: Node
    dims: Dims
    want: Dims


class Captures:
    """Captures of one block in the operator's order; ``ints`` are its integers, ``grads`` those with a gradient.

    Args:
        tensors: keep a bias as the tensor that the user's graph has, even where a score program could compute it.
    """

    def __init__(self, block: Block, ev: Evaluator, mat: Materialiser, tensors: bool) -> None:
        self.block, self.ev, self.mat, self.tensors = block, ev, mat, tensors
        self.items: list[Any] = []
        self.ints: list[Any] = []
        self.grads: list[int] = []

    def dims(self, step: Step, node: Node) -> Dims:
        return broadcast_operand(step.dims, shape_of(val(node)), _full(step))

    def index(self, step: Step, node: Node) -> tuple[Any, ...]:
        """What indexes each dimension of an operand, in b, h, q, k."""
        return tuple(self.block.index(resolve(g)) if g else 0 for g in self.dims(step, node))

    def other(self, step: Step) -> Any:
        """The operand of a step that is not the score."""
        other = step.operand if step.operand is not None else step.node.args[1 - step.position]
        if other in self.block.inner and constant(other) is None:
            # its derivative runs through the scores, which the operator's own derivative does not know
            raise Refusal(Code.SCORE_OP, f"{other.name} is computed from the scores too")
        return other

    def tensor(self, step: Step, node: Node) -> Node:
        """The operand as a 4-D tensor that broadcasts to the scores, or a 0-D one."""
        value = self.ev.trees.convert(self.ev.value(node, self.index(step, node)), val(node).dtype, val(node).dtype)
        return self.mat.tensor(value) if isinstance(value, Poly) else self.mat.tree(value, True)

    def load(self, step: Step, node: Node) -> Expr:
        """The operand as a capture, broadcast to the scores, in their precision."""
        return self.in_score_dtype(self.raw(self.tensor(step, node)))

    def raw(self, node: Node) -> Expr:
        if node not in self.items:
            self.items.append(node)
        return ex.load(self.items.index(node))

    def in_score_dtype(self, e: Expr) -> Expr:
        return Expr("cast", (e, str(self._score_dtype).removeprefix("torch.")))

    @property
    def _score_dtype(self) -> torch.dtype:
        return torch.float64 if val(self.block.v.node).dtype == torch.float64 else torch.float32

    def arranged(self, step: Step, node: Node) -> Arranged:
        """A tensor whose gradient is needed, by b, h, q, k as far as it has them."""
        dims = self.dims(step, node)
        axes = {a for g in dims for a in resolve(g)}
        own = tuple(tuple(a for a in resolve(g) if a in axes) for g in self.block.s_dims())
        if any(o and o != resolve(g) for o, g in zip(own, self.block.s_dims(), strict=True)):
            raise Refusal(Code.GRAD_CAPTURE, "it varies along a part of the batch or the heads")
        return Arranged(node, dims, own)

    def differentiable(self, step: Step, other: Node) -> Expr:
        """An added operand whose gradient is needed, as a capture of its own."""
        if any(a.node is other for a in self.items if isinstance(a, Arranged)):
            raise Refusal(Code.GRAD_CAPTURE, f"{other.name} is added twice")
        self.grads.append(len(self.items))
        self.items.append(self.arranged(step, other))
        return self.in_score_dtype(ex.load(self.grads[-1]))

    def sink(self, wanted: bool) -> int:
        """Number of the capture that holds the block's sink."""
        sink = self.block.sink
        assert sink is not None
        if wanted:
            self.grads.append(len(self.items))
        self.items.append(Arranged(sink.node, sink.dims, (self.block.heads,)))
        return len(self.items) - 1

    def _program(self, tree: Any) -> tuple[Expr, list[Any], list[Any]] | None:
        """A bias as a score program, and what captures and integers are with those it reads; None where it is none."""
        items, ints = list(self.items), list(self.ints)
        try:
            program = to_program(tree, self.mat, items, ints)
        except Undecided:
            return None
        return self.in_score_dtype(program) if program.op == "load" else program, items, ints

    def residual(self, tree: Any) -> Expr:
        """What is added beside a mask: computed in the score program where that is cheap, else a table by distance or a
        tensor."""
        found = None if self.tensors else self._program(tree)
        if not self.tensors and (found is None or not _cheap(found[0])):
            # A number beyond float32 would be infinite in a table of float32; a program is asked for such numbers.
            narrow = tree.dtype != torch.float64 or self._score_dtype == torch.float64
            table = by_distance(self.ev, tree) if narrow else None
            if table is not None:
                return ex.relative(self.raw(distances(self.mat, table, self._score_dtype)).args[0])
        if found is not None:
            program, self.items, self.ints = found
            return program
        return self.in_score_dtype(self.raw(self.mat.tree(tree, True)))


def _cheap(program: Expr) -> bool:
    """Whether to compute a bias costs no more than to read it from a table."""
    nodes = list(program.walk())
    return len(nodes) <= _FEW and all(e.op in _SIMPLE or e.op in ex.LEAVES for e in nodes)


def only_inputs(node: Node) -> bool:
    """Whether a bias is made of graph inputs and constants alone, as a user's own mask tensor is.

    Anything else on the way (an embedding, a product) makes it a learned bias, which is taken to be small beside a
    mask's fill.
    """
    todo, seen = [node], 0
    while todo and seen < 64:
        n = todo.pop()
        seen += 1
        if n.op == "placeholder" or n.op == "get_attr" or not is_tensor(n):
            continue
        if target(n) not in VIEWS and target(n) not in CASTS and target(n) not in _POINTWISE_INPUTS:
            return False
        todo += n.all_input_nodes
    return True


def _full(step: Step) -> Any:
    if step.name == "bias":
        return tuple(group_size(resolve(g)) for g in step.dims)
    return shape_of(val(step.node))
