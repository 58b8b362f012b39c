"""One attention block: the axes of softmax(QK^T)V resolved to batch, heads, queries, keys and head dims."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import sympy
import torch
from torch.fx import Node

from ..prove.values import AXES
from ..reasons import Code, Refusal
from .axes import Axis, Dims, Group, Size, fresh, group_size, product, resolve, resolve_dims, shape_of
from .logsumexp import LogSumExp
from .nodes import cast_dtypes, push, val
from .operands import Operand, trace_operand
from .postscale import find_postscale
from .scores import ScorePath, Step, factors, find_scores
from .sink import find_sink, without_column
from .softmax import Softmax
from .values import ValuePath, find_values

B, H, Q, K = AXES


@dataclass
class Chain:
    """A softmax between two matrix products."""

    softmax: Softmax
    path: ScorePath
    values: ValuePath


@dataclass
class Block:
    """An attention whose axes are known and whose score program and masks are not understood yet."""

    kind: Literal["softmax", "sdpa"]
    anchor: Node
    """The softmax's result or the SDPA operator: where the report points to."""
    steps: list[Step]
    """What happens to the score between QK^T and the softmax, innermost first."""
    scale: float
    """Factor of QK^T that is known before ``steps``: from Q, from K, or the SDPA operator's argument."""
    safe: bool
    """Rows whose scores are all -inf give zero, as PyTorch SDPA does, and not NaN."""
    q: Operand
    k: Operand
    v: Operand
    batch: Group
    kv_heads: Group
    group: Group
    q_axes: Group
    k_axes: Group
    d_axes: Group
    dv_axes: Group
    out: Node
    out_dims: Dims
    chain: Chain | None = None
    """The nodes of an attention that is written out; None for an SDPA operator."""
    tail: tuple[Node, ...] = ()
    """Nodes between the product PV and ``out``, when ``out`` is PV cast back to the dtype of V."""
    sink: Operand | None = None
    """Learned logit of each head that stands beside the scores."""
    sink_members: tuple[Node, ...] = ()
    lse: LogSumExp | None = None
    """Of the scores, where the sink is a factor on the output; a row of -inf alone is NaN then."""
    inner: frozenset[Node] = frozenset()
    """Nodes that the rewrite makes dead: no operand of a step may be one of them."""

    @property
    def heads(self) -> Group:
        return resolve((*self.kv_heads, *self.group))

    def q_dims(self) -> Dims:
        return (self.batch, self.heads, self.q_axes, self.d_axes)

    def k_dims(self) -> Dims:
        return (self.batch, self.kv_heads, self.k_axes, self.d_axes)

    def v_dims(self) -> Dims:
        return (self.batch, self.kv_heads, self.k_axes, self.dv_axes)

    def o_dims(self) -> Dims:
        return (self.batch, self.heads, self.q_axes, self.dv_axes)

    def s_dims(self) -> Dims:
        return (self.batch, self.heads, self.q_axes, self.k_axes)

    def index(self, group: Group) -> sympy.Expr:
        """Index expression in b, h, q, k of a dimension that enumerates ``group``."""
        leaves = list(resolve(group))
        whole = [(resolve(g), s) for g, s in zip(self.s_dims(), (B, H, Q, K), strict=True)]
        out: sympy.Expr = sympy.Integer(0)
        while leaves:
            for axes, symbol in whole:
                if axes and tuple(leaves[:len(axes)]) == tuple(axes):
                    out = out * group_size(axes) + symbol
                    leaves = leaves[len(axes):]
                    break
            else:
                out = out * leaves[0].size + self._digit(leaves[0], whole)
                leaves = leaves[1:]
        return out

    @staticmethod
    def _digit(axis: Axis, whole: list[tuple[Group, sympy.Symbol]]) -> sympy.Expr:
        for axes, symbol in whole:
            if axis in axes:
                i = axes.index(axis)
                inner = product(a.size for a in axes[i + 1:])
                digit = symbol if inner == 1 else sympy.floor(symbol / inner)
                return digit if i == 0 else sympy.Mod(digit, axis.size)
        raise Refusal(Code.RANK, f"{axis!r} is no axis of the scores")


def build_block(sm: Softmax, backward: set[Node]) -> Block | None:
    """The block around a softmax; None when it feeds no matrix product (it is no attention).

    Raises:
        Refusal: it looks like attention and is not the standard form.
    """
    x = sm.x
    shape = shape_of(val(x))
    if 0 in shape:
        raise Refusal(Code.SIZE, "a dimension of the scores is empty")
    dims = fresh(shape, "s")
    k_top = dims[sm.dim]
    if not k_top:
        return None
    column = find_sink(sm)
    if column is None:
        try:
            values = find_values(sm, dims, set(k_top), backward)
        except Refusal as r:
            if r.reason.code in (Code.PROB_OP, Code.NOT_ATTENTION):  # without a product of queries and keys, that is the reason
                find_scores(x, dims, set(k_top))
            raise
        if values is None:
            return None
        return _scaled(_assemble(sm, dims, find_scores(x, dims, set(k_top)), values, backward), sm, dims, backward)
    if shape_of(val(column.scores))[sm.dim] == 1:
        raise Refusal(Code.SIZE, "one key beside a sink")
    keys: Group = (Axis(shape_of(val(column.scores))[sm.dim], "k"),)
    values = find_values(sm, dims, set(keys), backward, keys)
    if values is None:
        return None
    inner = without_column(dims, sm.dim, keys)
    block = _assemble(sm, inner, find_scores(column.scores, inner, set(keys)), values, backward)
    block.sink = _sink(block, column.column, without_column(dims, sm.dim, ()))
    block.sink_members = column.members
    return block


def _sink(block: Block, node: Node, dims: Dims) -> Operand:
    sink = trace_operand(node, dims, scales=False, casts=False)
    if {a for g in resolve_dims(sink.dims) for a in g} != set(block.heads):
        raise Refusal(Code.FEATURE, "a sink that is not one number a head")
    return sink


def _scaled(block: Block, sm: Softmax, dims: Dims, backward: set[Node]) -> Block:
    """With the factor on the output, if it is that of a sink."""
    found = find_postscale(sm.x, sm.dim, dims, block.out, block.out_dims, backward)
    if found is not None:
        try:
            block.sink = _sink(block, found.sink, found.sink_dims)
        except Refusal:  # a factor of something else
            return block
        block.sink_members, block.lse = found.members, found.lse
        block.tail, block.out, block.out_dims = (*block.tail, *found.tail), found.out, found.out_dims
    return block


def _product_dims(node: Node, dims: Dims) -> tuple[Dims, Dims, Group]:
    """Dims of both operands of a bmm or mm whose result has ``dims``, and the contracted group."""
    a = shape_of(val(factors(node)[0]))
    inner: Group = () if a[-1] == 1 else (Axis(a[-1], "d"),)
    n, r, c = dims[:-2], dims[-2], dims[-1]
    return (*n, r, inner), (*n, inner, c), inner


def _assemble(sm: Softmax, dims: Dims, path: ScorePath, values: ValuePath, backward: set[Node]) -> Block:
    k_top = dims[sm.dim]
    left, right, d_top = _product_dims(path.product, path.product_dims)
    keys_last = set(resolve(path.product_dims[-1])) >= set(resolve(k_top))
    a, b = factors(path.product)
    q_node, q_dims, k_node, k_dims = (a, left, b, right) if keys_last else (b, right, a, left)
    rows = path.product_dims[-2] if keys_last else path.product_dims[-1]

    pv = values.product
    p_shape = shape_of(val(pv))
    dv_size = p_shape[-1] if values.position == 0 else p_shape[-2]
    dv_top: Group = () if dv_size == 1 else (Axis(dv_size, "e"),)
    n = values.p_dims[:-2]
    if values.position == 0:
        out_rows = values.p_dims[-2]
        v_node, v_dims = pv.args[1], (*n, values.p_dims[-1], dv_top)
        out_dims: Dims = (*n, out_rows, dv_top)
    else:
        out_rows = values.p_dims[-1]
        v_node, v_dims = pv.args[0], (*n, dv_top, values.p_dims[-2])
        out_dims = (*n, dv_top, out_rows)
    v = trace_operand(v_node, v_dims, scales=False, casts=False)
    out, tail = pv, ()
    narrow = trace_operand(v_node, v_dims, scales=False)
    if val(narrow.node).dtype != val(v.node).dtype:
        back = _cast_back(pv, out_dims, val(narrow.node).dtype, backward)
        if back is not None:
            v, (out, out_dims, tail) = narrow, back

    q, k = (trace_operand(n_, d_, scales=True) for n_, d_ in ((q_node, q_dims), (k_node, k_dims)))
    if not val(q.node).dtype == val(k.node).dtype == val(v.node).dtype:
        q, k = (trace_operand(n_, d_, scales=True, casts=False) for n_, d_ in ((q_node, q_dims), (k_node, k_dims)))

    if backward:
        q, k, v = _distinct((q, q_node, q_dims), (k, k_node, k_dims), (v, v_node, v_dims))

    order = [a for i, g in enumerate(dims) if i != sm.dim for a in resolve(g)]
    row_axes = [a for a in order if a in set(resolve(rows)) and a in set(resolve(out_rows))]
    q_axes = _query_axes(dims, sm.dim, row_axes, k, v)
    rest = [a for a in order if a not in q_axes]
    shared = [a for a in rest if k.depends(a) or v.depends(a)]
    # what keys and values do not see is heads that share them, or a batch that does: the number of heads is static
    group = tuple(a for a in rest if a not in shared and isinstance(a.size, int))
    among, kv = _split_heads(shared, q)
    batch = [a for a in rest if a in among or a not in shared and a not in group]
    block = Block("softmax", sm.out, path.steps, q.scale * k.scale, values.safe, q, k, v, tuple(batch), tuple(kv),
                  group, q_axes, resolve(k_top), resolve(d_top), resolve(dv_top), out, out_dims,
                  Chain(sm, path, values), tail)
    if not set(_leaves(dims)) <= set(_leaves(path.product_dims)):
        raise Refusal(Code.CONTRACTION, "what is done to the scores gives them a dimension that QK^T does not have")
    check(block, dims)
    if set(_leaves(path.product_dims)) != set(_leaves(dims)):
        raise Refusal(Code.CONTRACTION)
    return block


def _distinct(*operands: tuple[Operand, Node, Dims]) -> list[Operand]:
    """Operands with different sources, so that each has a gradient of its own.

    Raises:
        Refusal: two of the matrices are one and the same node.
    """
    sources = [o.node for o, _, _ in operands]
    found = [o if sources.count(o.node) == 1 else Operand(node, dims, 1.0) for o, node, dims in operands]
    if len({o.node for o in found}) < len(found):
        raise Refusal(Code.BACKWARD, "two of Q, K and V are the same tensor")
    return found


def _cast_back(pv: Node, dims: Dims, dtype: torch.dtype, backward: set[Node]
               ) -> tuple[Node, Dims, tuple[Node, ...]] | None:
    """The node where PV, computed in float32 from inputs of ``dtype``, is rounded to it, if nothing else reads PV."""
    node, tail = pv, [pv]
    while True:
        users = [u for u in node.users if u not in backward]
        if len(users) != 1:
            return None
        node = users[0]
        if cast_dtypes(node) is not None:
            return (node, dims, tuple(tail)) if val(node).dtype == dtype else None
        pushed = push(node, dims)
        if pushed is None:
            return None
        dims = pushed
        tail.append(node)


def _query_axes(dims: Dims, k_dim: int, rows: list[Axis], k: Operand, v: Operand) -> Group:
    """The query positions: the rows' axes that come from the last dimension they touch and no key or value sees."""
    free = [a for a in rows if not k.depends(a) and not v.depends(a)]
    for i in range(len(dims) - 1, -1, -1):
        if i == k_dim:
            continue
        mine = tuple(a for a in resolve(dims[i]) if a in free)
        if mine:
            return mine
    return ()


def _split_heads(shared: list[Axis], q: Operand) -> tuple[list[Axis], list[Axis]]:
    """Which of the axes that keys and values have are the batch and which is the heads."""
    static = [a for a in shared if isinstance(a.size, int)]
    if not static:
        return shared, []
    head = static[-1]
    if len(shared) == 1 and not _is_head_dim(head, q):
        return shared, []
    return [a for a in shared if a is not head], [head]


def _is_head_dim(axis: Axis, q: Operand) -> bool:
    """With a batch of one, or none: is this lone axis a dimension behind a batch dimension of size one?"""
    for i, g in enumerate(resolve_dims(q.dims)):
        if axis in g:
            return any(resolve(h) == () and s == 1 for h, s in zip(q.dims[:i], shape_of(val(q.node))[:i], strict=True))
    return False


def _leaves(dims: Dims) -> list[Axis]:
    return [a for g in resolve_dims(dims) for a in g]


def check(b: Block, dims: Dims) -> None:
    """Each axis is where softmax(QK^T)V needs it, once; sizes of heads and head dims are static."""
    batch, heads = set(resolve(b.batch)), set(b.heads)
    qs, ks, ds, es = set(resolve(b.q_axes)), set(resolve(b.k_axes)), set(resolve(b.d_axes)), set(resolve(b.dv_axes))
    everything = batch | heads | qs | ks
    if everything != set(_leaves(dims)) or len(_leaves(dims)) != len(everything):
        raise Refusal(Code.RANK)
    for op, need, may in ((b.q, qs | ds, batch | heads | qs | ds),
                          (b.k, ks | ds, batch | set(resolve(b.kv_heads)) | ks | ds),
                          (b.v, ks | es, batch | set(resolve(b.kv_heads)) | ks | es)):
        have = _leaves(op.dims)
        if len(have) != len(set(have)) or not need <= set(have) <= may:
            raise Refusal(Code.CONTRACTION)
    got = _leaves(b.out_dims)
    if len(got) != len(set(got)) or set(got) != batch | heads | qs | es:
        raise Refusal(Code.CONTRACTION)
    for name, g in (("heads", b.heads), ("head dim", b.d_axes), ("value dim", b.dv_axes)):
        if not isinstance(group_size(resolve(g)), int):
            raise Refusal(Code.RANK, f"the {name} is not static")


def sizes(b: Block) -> tuple[Size, Size, Size, Size]:
    """(B, Hq, Sq, Sk)"""
    return tuple(group_size(resolve(g)) for g in b.s_dims())  # type: ignore[return-value]
