"""Replace one understood block by our operators: the forward, and in training the backward that belongs to it."""
from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ..kernels.record import Attention
from ..recognise.axes import Dims, resolve_dims
from ..recognise.backward import Backward
from ..recognise.block import Block
from ..recognise.nodes import VIEWS, aten, prims, push, target, val
from ..recognise.operands import Operand, trace_operand
from ..recognise.program import Arranged
from .emit import Emitter
from .strides import refresh


@dataclass
class Inputs:
    """The operator's inputs besides Q, K and V."""

    captures: list[Node | Arranged]
    ints: list[Node | int]
    q_factor: Node | Arranged | None = None


class Rewriter:
    """Applies rewrites to one graph and remembers what replaced what."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._replaced: dict[Node, Node] = {}
        self._arranged: dict[Node, Arranged] = {}
        self._rows: dict[Node, Node] = {}
        self._factor: Arranged | None = None
        self._unscaled: Node | None = None
        self._position = {n: i for i, n in enumerate(graph.nodes)}
        self._journal: list[Callable[[], None]] = []
        self.pairs: list[tuple[Node, Node]] = []
        """What the current block replaced, and by what."""
        self.leaves: set[Node] = set()
        """What the operators of the current block, and the code they replace, are computed from: Q, K, V, gradient."""

    def begin(self) -> None:
        """A new block: `undo` goes back to here."""
        self._journal.clear()
        self.pairs.clear()
        self.leaves.clear()
        self._factor = self._unscaled = None

    def undo(self) -> None:
        """Give every node its users, and every view its strides, as they were at `begin`; what is new is dead code."""
        for step in reversed(self._journal):
            step()
        self._journal.clear()

    def now(self, node: Node) -> Node:
        """The node that stands for ``node`` after the rewrites so far."""
        while node in self._replaced:
            node = self._replaced[node]
        return node

    def forward(self, block: Block, record: Attention, inputs: Inputs, block_id: str) -> tuple[Node, Node, list[Node]]:
        """Insert the forward operator and replace the block's output.

        Returns:
            out, lse and [q, k, v] as given to the operator.
        """
        from ..ops import attention, pin_strides
        from ..ops.generated import install

        install()
        at = self.now(block.out) if block.out.graph is self.graph else block.out
        em = Emitter(self.graph, at, block.anchor)
        qkv = [self._operand(em, o, d) for o, d in
               ((block.q, block.q_dims()), (block.k, block.k_dims()), (block.v, block.v_dims()))]
        if isinstance(inputs.q_factor, Arranged):
            self._factor, self._unscaled = inputs.q_factor, qkv[0]
            inputs.q_factor = em.arrange(self.now(self._factor.node), self._factor.dims, self._factor.want)
        qkv[0] = self._scaled(em, qkv[0], inputs)
        for i, c in enumerate(inputs.captures):
            if isinstance(c, Arranged):
                made = em.arrange(self.now(c.node), c.dims, c.want)
                assert made is not None
                self._arranged[made] = c
                inputs.captures[i] = made
            else:
                inputs.captures[i] = self.now(c)
            inputs.captures[i] = self._by_rows(inputs.captures[i], block.anchor)
        first: tuple[str, ...] = ("bshd", "bhsd")
        if any(u.op == "output" for u in block.out.users):
            first = ("bhsd", "bshd")
        for layout, copy in ((first[0], False), (first[1], False), (first[0], True)):
            trial = Emitter(self.graph, at, block.anchor)
            laid = record.with_(layout=layout)
            op = trial.call(attention, *qkv, list(inputs.captures), list(inputs.ints), laid.to_string(), block_id)
            pin_strides(op)
            out = trial.call(operator.getitem, op, 0)
            lse = trial.call(operator.getitem, op, 1)
            placed = self._place(out, block.o_dims(), block.out, block.out_dims, copy, trial)
            if placed is not None:
                for old, new in placed:
                    self._replace(old, new)
                return out, lse, qkv
            trial.undo()
        raise AssertionError("a copy can always be placed")

    def _by_rows(self, capture: Node, like: Node) -> Node:
        """A capture over q and k with neighbouring keys side by side: one copy for all blocks, which the compiler makes where
        it makes the tensor.  A learned table looked up by distance comes with its heads side by side."""
        x = val(capture)
        if x.dim() != 4 or any(isinstance(n, int) and n == 1 for n in x.shape[2:]) or not isinstance(x.stride(3), int):
            return capture
        if x.stride(3) == 1:
            return capture
        if capture not in self._rows:
            at = capture.next  # blocks are not rewritten in the order of their outputs: the copy has to be before them all
            while at.op == "placeholder":
                at = at.next
            self._rows[capture] = Emitter(self.graph, at, like).call(
                aten.clone.default, capture, memory_format=torch.contiguous_format)
            self._journal.append(lambda: self._rows.pop(capture, None))
        copy = self._rows[capture]
        if capture in self._arranged:
            self._arranged[copy] = self._arranged[capture]
        return copy

    def backward(self, block: Block, record: Attention, inputs: Inputs, block_id: str, found: Backward,
                 out: Node, lse: Node, qkv: Sequence[Node]) -> None:
        """Insert the backward operator and replace the gradients that were found."""
        from ..ops import attention_backward, pin_strides

        grads = {name: self.now(g) for name, g in found.grads.items()}
        biases = {n: self.now(g) for n, g in found.biases.items()}
        at = min([*grads.values(), *biases.values()], key=lambda n: self._position.get(n, 0))
        em = Emitter(self.graph, at, found.tangent)
        tangent = trace_operand(self.now(found.tangent), block.out_dims, scales=False, casts=False)
        self.leaves.add(tangent.node)
        dout = em.arrange(tangent.node, tangent.dims, block.o_dims(), sizes=(qkv[0], block.q_dims()))
        op = em.call(attention_backward, dout, *qkv, out, lse, list(inputs.captures), list(inputs.ints),
                     record.with_(layout=_layout(out)).to_string(), block_id)
        pin_strides(op)
        for i, (name, operand, dims) in enumerate((("q", block.q, block.q_dims()), ("k", block.k, block.k_dims()),
                                                   ("v", block.v, block.v_dims()))):
            if name in grads:
                g = em.call(operator.getitem, op, i)
                if name == "q":
                    if self._factor is not None and self._factor.node in biases:
                        self._replace(biases.pop(self._factor.node), self._factor_gradient(em, g, block))
                    g = self._scaled(em, g, inputs)
                self._replace(grads[name], self._fit(em, g, dims, operand))
        if biases:
            given = em.call(operator.getitem, op, 3)
            for j, i in enumerate(record.grads):
                capture = self._arranged[inputs.captures[i]]  # type: ignore[index]
                new = em.arrange(em.call(operator.getitem, given, j), capture.want, capture.dims)
                assert new is not None
                self._replace(biases[capture.node], new)

    def _factor_gradient(self, em: Emitter, dq: Node, block: Block) -> Node:
        """Gradient of a tensor t with Q' = t Q given to the operator: sum over what t lacks of dQ' Q, in float32."""
        factor, q = self._factor, self._unscaled
        assert factor is not None and q is not None
        product = em.call(aten.mul.Tensor, *(em.call(prims.convert_element_type.default, x, torch.float32)
                                             if val(x).dtype != torch.float64 else x for x in (dq, q)))
        axes = [a for g in resolve_dims(block.q_dims()) for a in g]
        split = em.arrange(product, block.q_dims(), tuple((a,) for a in axes))
        have = {a for g in resolve_dims(factor.dims) for a in g}
        total = em.call(aten.sum.dim_IntList, split, [i for i, a in enumerate(axes) if a not in have])
        out = em.arrange(total, tuple((a,) for a in axes if a in have), factor.dims)
        assert out is not None
        dtype = val(factor.node).dtype
        return out if val(out).dtype == dtype else em.call(prims.convert_element_type.default, out, dtype)

    @staticmethod
    def erase(block: Block, found: Backward | None) -> None:
        """Take a replaced SDPA operator, and its backward, out of the graph.

        They are said to draw random numbers, so the removal of dead code leaves them alone.
        """
        if block.kind != "sdpa":
            return
        calls = [u for r in block.anchor.users for u in r.users] if found is not None else []
        for call in dict.fromkeys((*(c for c in calls if c in found.members), block.anchor)):  # type: ignore[union-attr]
            for result in list(call.users):
                if not result.users:
                    call.graph.erase_node(result)
            if not call.users:
                call.graph.erase_node(call)

    @staticmethod
    def _scaled(em: Emitter, node: Node, inputs: Inputs) -> Node:
        """Q, or its gradient, times the tensor factor of the scores, in its own dtype."""
        if inputs.q_factor is None:
            return node
        out = em.call(aten.mul.Tensor, node, inputs.q_factor)
        return out if val(out).dtype == val(node).dtype else em.call(
            prims.convert_element_type.default, out, val(node).dtype)

    @staticmethod
    def _fit(em: Emitter, grad: Node, dims: Dims, operand: Operand) -> Node:
        """The operator's gradient in the shape of the operand's source, summed over what had been broadcast."""
        have = [a for g in resolve_dims(dims) for a in g]
        want = {a for g in resolve_dims(operand.dims) for a in g}
        extra = [a for a in have if a not in want]
        if extra:
            split = em.arrange(grad, dims, tuple((a,) for a in have))
            grad = em.call(aten.sum.dim_IntList, split, [have.index(a) for a in extra])
            dims = tuple((a,) for a in have if a in want)
        out = em.arrange(grad, dims, operand.dims)
        assert out is not None
        return out

    def _operand(self, em: Emitter, operand: Operand, want: Dims) -> Node:
        self.leaves.add(self.now(operand.node))
        out = em.arrange(self.now(operand.node), operand.dims, want)
        assert out is not None
        return out

    def _place(self, out: Node, out_dims: Dims, node: Node, node_dims: Dims, copy: bool,
               trial: Emitter) -> list[tuple[Node, Node]] | None:
        """Replacements for ``node``, or for the views that use it, by views of ``out``; None when a copy is needed."""
        new = trial.arrange(out, out_dims, node_dims, copy=False)
        if new is not None:
            return [(node, new)]
        placed: list[tuple[Node, Node]] = []
        for user in list(node.users):
            dims = push(user, node_dims) if target(user) in VIEWS else None
            if dims is None:
                placed = []
                break
            inner = self._place(out, out_dims, user, dims, copy, trial)
            if inner is None:
                placed = []
                break
            placed += inner
        if placed:
            return placed
        if not copy:
            return None
        new = trial.arrange(out, out_dims, node_dims)
        assert new is not None
        return [(node, new)]

    def _replace(self, old: Node, new: Node) -> None:
        if old is new:
            return
        users = [u for u in old.users if u is not new]
        for u in users:
            u.replace_input_with(old, new)
        self._replaced[old] = new
        self.pairs.append((old, new))
        self._journal.append(lambda: self._restore(old, new, users))
        self._journal += refresh(new)

    def _restore(self, old: Node, new: Node, users: list[Node]) -> None:
        for u in users:
            u.replace_input_with(new, old)
        del self._replaced[old]


def _layout(out: Node) -> str:
    return Attention.from_string(out.args[0].args[5]).layout
