"""Anchors: PyTorch's own attention operators, forward and backward, in every spelling of the joint graph."""
from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Graph, Node

from ..reasons import Code, Refusal
from .axes import AxesError, Axis, Dims, fresh, quotient, resolve, shape_of
from .backward import Backward, Joint, gradient_through
from .block import Block, check
from .nodes import arg, aten, is_tensor, target, val
from .operands import trace_operand
from .scores import Step


@dataclass(frozen=True)
class _Form:
    """Where an SDPA operator keeps its arguments, and how its backward is called."""

    bias: str | None
    position: int
    """Position of the bias; -1 for a keyword only."""
    causal: int
    dropout: int
    backward: object
    grad_bias: bool
    """The backward's fourth result is the gradient of the bias."""
    square_causal: bool
    """Causal means top-left only when Sq == Sk."""


_FORMS: dict[object, _Form] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _Form(
        "attn_mask", -1, 4, 3, aten._scaled_dot_product_flash_attention_for_cpu_backward.default, False, False),
    aten._scaled_dot_product_flash_attention.default: _Form(
        None, -1, 4, 3, aten._scaled_dot_product_flash_attention_backward.default, False, True),
    aten._scaled_dot_product_efficient_attention.default: _Form(
        "attn_bias", 3, 6, 5, aten._scaled_dot_product_efficient_attention_backward.default, True, False),
    aten._scaled_dot_product_cudnn_attention.default: _Form(
        "attn_bias", 3, 6, 5, aten._scaled_dot_product_cudnn_attention_backward.default, False, True),
}


def find_sdpa(graph: Graph, backward: set[Node]) -> Iterator[Node]:
    """SDPA operators of the forward part, in graph order."""
    for n in graph.nodes:
        if target(n) in _FORMS and n not in backward:
            yield n


def backward_calls(node: Node) -> list[Node]:
    """Calls of the operator's own backward."""
    return list(dict.fromkeys(u for r in node.users for u in r.users if target(u) is _FORMS[target(node)].backward))


def build_sdpa_block(node: Node) -> Block:
    """The block of one SDPA operator.

    Raises:
        Refusal: dropout, unusual ranks, or an output other than the attention itself is used.
    """
    form = _FORMS[node.target]
    q, k, v = node.args[:3]
    if not all(is_tensor(t) and val(t).dim() == 4 for t in (q, k, v)):
        raise Refusal(Code.RANK)
    if arg(node, form.dropout, "dropout_p", 0.0) != 0.0:
        raise Refusal(Code.DROPOUT)
    out = _result(node, 0)
    if out is None:
        raise Refusal(Code.NO_PV)
    qd = fresh(shape_of(val(q)), "q")
    kshape, vshape = shape_of(val(k)), shape_of(val(v))
    heads, kv_heads = shape_of(val(q))[1], kshape[1]
    kd = _key_dims(qd, heads, kv_heads, kshape)
    keys = kd[2]
    if vshape[2] != kshape[2]:  # the operator needs them equal, but a graph may know each by a symbol of its own
        if 1 in (vshape[2], kshape[2]) or isinstance(vshape[2], int) and isinstance(kshape[2], int):
            raise Refusal(Code.RANK, "K and V differ in length")
        keys = (Axis(vshape[2], "v"),)
    vd: Dims = (kd[0], kd[1], keys, () if vshape[3] == 1 else (Axis(vshape[3], "e"),))
    out_dims: Dims = (qd[0], qd[1], qd[2], vd[3])

    operands = [trace_operand(n, d, scales=False, casts=False) for n, d in ((q, qd), (k, kd), (v, vd))]
    if keys != kd[2]:
        try:
            keys[0].become(kd[2][0])
        except AxesError as e:
            raise Refusal(Code.RANK, str(e)) from e
    shared = [a for a in resolve(qd[1]) if any(o.depends(a) for o in operands[1:])]
    group = tuple(a for a in resolve(qd[1]) if a not in shared)
    scale = node.kwargs.get("scale")
    if scale is None:
        head_dim = shape_of(val(q))[3]
        if not isinstance(head_dim, int):
            raise Refusal(Code.RANK, "the head dim is not static")
        scale = 1.0 / math.sqrt(head_dim)
    if not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise Refusal(Code.SCALE)
    steps: list[Step] = []
    bias = arg(node, form.position, form.bias) if form.bias and form.position >= 0 else (
        node.kwargs.get(form.bias) if form.bias else None)
    score_dims: Dims = (qd[0], qd[1], qd[2], kd[2])
    if arg(node, form.causal, "is_causal", False):
        if form.square_causal and shape_of(val(q))[2] != kshape[2]:
            raise Refusal(Code.SCORE_OP, "causal over unequal lengths")
        steps.append(Step(node, "causal", 0, score_dims))
    if bias is not None:
        steps.append(Step(node, "bias", -1, score_dims, bias))
    on_q, on_k, on_v = operands
    block = Block("sdpa", node, steps, float(scale), True, on_q, on_k, on_v, resolve(qd[0]), tuple(shared), group,
                  resolve(qd[2]), resolve(kd[2]), resolve(qd[3]), resolve(vd[3]), out, out_dims)
    check(block, score_dims)
    return block


def _key_dims(qd: Dims, heads: object, kv_heads: object, kshape: tuple) -> Dims:
    keys = () if kshape[2] == 1 else (Axis(kshape[2], "k"),)
    if heads == kv_heads or not qd[1]:
        return (qd[0], qd[1], keys, qd[3])
    group = quotient(heads, kv_heads)  # type: ignore[arg-type]
    if group is None:
        raise Refusal(Code.RANK, "query heads are no multiple of key heads")
    if kv_heads == 1:
        return (qd[0], (), keys, qd[3])
    outer, _ = qd[1][0].split(kv_heads, group)  # type: ignore[arg-type]
    return (qd[0], (outer,), keys, qd[3])


def _result(node: Node, i: int) -> Node | None:
    return next((u for u in node.users if u.target is operator.getitem and u.args[1] == i), None)


def find_sdpa_backward(block: Block, joint: Joint) -> Backward | None:
    """The operator's own backward; None when the graph has none (inference).

    Raises:
        Refusal: another result than ``out`` is used, or there are two backward passes.
    """
    node = block.anchor
    form = _FORMS[node.target]
    for result in node.users:
        if result.target is not operator.getitem:
            raise Refusal(Code.WEIGHTS_USED)
        for user in result.users:
            if target(user) is form.backward:
                continue
            if result.args[1] != 0 and user.op != "output":
                raise Refusal(Code.GRAD_LSE, f"by {user.name}")
            if result.args[1] != 0:
                raise Refusal(Code.GRAD_LSE, "it is returned")
    calls = backward_calls(node)
    if not calls:
        return None
    if len(calls) > 1:
        raise Refusal(Code.BACKWARD, "two backward passes")
    call = calls[0]
    grads: dict[str, Node] = {}
    for i, name in enumerate(("q", "k", "v")):
        g = _result(call, i)
        if g is not None:
            grads[name] = g
    biases: dict[Node, Node] = {}
    if form.grad_bias and (g := _result(call, 3)) is not None and g.users:
        operand = next((s.operand for s in block.steps if s.name == "bias"), None)
        if operand is None:
            raise Refusal(Code.GRAD_CAPTURE)
        biases[operand] = g
    for name, operand in (("q", block.q), ("k", block.k), ("v", block.v)):
        if name in grads and operand.chain:
            grads[name] = gradient_through(operand, grads[name], joint)
    return Backward(call.args[0], grads, {call, *call.users}, biases)
