"""The operators ``fa_inductor::attention`` and ``fa_inductor::attention_backward``.

``define``/``impl`` instead of ``custom_op``: about half the cost of a call.  The record travels as a string, so a
graph that holds these operators can be cached, exported and loaded in another process.

Contract (memory order of results: `layout`):

    attention(q [B,Hq,Sq,D], k [B,Hkv,Sk,D], v [B,Hkv,Sk,Dv], captures, ints, record, block) -> (out, lse)
        lse carries no gradient.  It is -inf in a row with every key masked (unless there is a sink), whatever the
        record says such a row's output is.
    attention_backward(dout [B,Hq,Sq,Dv], q, k, v, out, lse, captures, ints, record, block)
        -> (dq, dk, dv, dcaptures); dcaptures in the order of ``record.grads``.

``block`` is the block's id in the report.  Neither operator reads a value back from the device, so both can be
captured in a CUDA graph.
"""
from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fa_inductor.kernels.record import Attention
from fa_inductor.reasons import Code, Reason

from . import layout
from .hooks import seen

NAMESPACE = "fa_inductor"
_SCHEMAS = (
    "attention(Tensor q, Tensor k, Tensor v, Tensor[] captures, SymInt[] ints, str record, str block)"
    " -> (Tensor out, Tensor lse)",
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor[] captures,"
    " SymInt[] ints, str record, str block) -> (Tensor dq, Tensor dk, Tensor dv, Tensor[] dcaptures)",
)

lib = torch.library.Library(NAMESPACE, "DEF")
for _schema in _SCHEMAS:
    # Inductor may otherwise hand over q, k or v in an order of its own choice.
    lib.define(_schema, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))

attention: torch._ops.OpOverload = torch.ops.fa_inductor.attention.default
attention_backward: torch._ops.OpOverload = torch.ops.fa_inductor.attention_backward.default


def _parse(record: str, q: Tensor, k: Tensor, v: Tensor) -> Attention:
    """The record, after a check that the tensors are what it speaks of.

    Raises:
        ValueError: a shape or dtype contradicts the record.
    """
    a = Attention.from_string(record)
    for name, t, heads, dim in (
        ("q", q, a.q_heads, a.head_dim), ("k", k, a.kv_heads, a.head_dim), ("v", v, a.kv_heads, a.head_dim_v),
    ):
        if t.dim() != 4 or t.shape[1] != heads or t.shape[3] != dim:
            raise ValueError(f"{name} is {tuple(t.shape)}, the record says [B, {heads}, S, {dim}]")
        if t.dtype != layout.DTYPES[a.dtype]:
            raise ValueError(f"{name} is {t.dtype}, the record says {a.dtype}")
    keys, values = k.shape[2], v.shape[2]
    if isinstance(keys, int) and isinstance(values, int) and keys != values:  # no guard of a symbol
        raise ValueError(f"k has {keys} positions and v has {values}")
    return a


@contextlib.contextmanager
def _without_autocast(device_type: str) -> Any:
    with torch.autocast(device_type, enabled=False):
        yield


def _guard(q: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes q's device the current one and switches autocast off, each only where it is not so already.

    Operators implemented in Python get no device guard from the dispatcher.
    """
    stack = contextlib.ExitStack()
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        stack.enter_context(torch.cuda.device(q.device))
    if torch.is_autocast_enabled(q.device.type):
        stack.enter_context(_without_autocast(q.device.type))
    return stack


def _attention(
    q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor], ints: Sequence[int], record: str, block: str
) -> tuple[Tensor, Tensor]:
    from fa_inductor.backends import dispatch

    a = _parse(record, q, k, v)
    seen(block, record)
    with _guard(q):
        out, lse = dispatch.run_forward(a, q, k, v, captures, ints)
    return out, lse


def _attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, captures: Sequence[Tensor],
    ints: Sequence[int], record: str, block: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    from fa_inductor.backends import dispatch

    a = _parse(record, q, k, v)
    seen(block, record)
    with _guard(q):
        return dispatch.run_backward(a, dout, q, k, v, out, lse, captures, ints)


def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor], ints: Sequence[int], record: str, block: str
) -> tuple[Tensor, Tensor]:
    a = _parse(record, q, k, v)
    return layout.empty_out(a, q, v), layout.empty_lse(q)


def _attention_backward_fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, captures: Sequence[Tensor],
    ints: Sequence[int], record: str, block: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    return layout.empty_grads(_parse(record, q, k, v), q, k, v, captures)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, captures, ints, record, block = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, *captures)
    ctx.ints, ctx.record, ctx.block = ints, record, block


def _differentiate(ctx: Any, dout: Tensor | None, _dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, *captures = ctx.saved_tensors
    dcaptures: list[Tensor | None] = [None] * len(captures)
    dints: list[Tensor] | None = None if ctx.ints else []  # torch takes an empty list for a list of tensors
    if dout is None:
        return None, None, None, dcaptures, dints, None, None
    grads = Attention.from_string(ctx.record).grads
    dq, dk, dv, given = attention_backward(dout, q, k, v, out, lse, captures, ctx.ints, ctx.record, ctx.block)
    for i, g in zip(grads, given, strict=True):
        dcaptures[i] = g
    return dq, dk, dv, dcaptures, dints, None, None


def _no_second_derivative(ctx: Any, *_grads: Any) -> tuple[Any, ...]:
    raise NotImplementedError(str(Reason(Code.DOUBLE_BACKWARD)))


for _op, _kernel, _fake in (
    ("attention", _attention, _attention_fake),
    ("attention_backward", _attention_backward, _attention_backward_fake),
):
    lib.impl(_op, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_op}", _fake, lib=lib)
torch.library.register_autograd(f"{NAMESPACE}::attention", _differentiate, setup_context=_setup_context, lib=lib)
torch.library.register_autograd(f"{NAMESPACE}::attention_backward", _no_second_derivative, lib=lib)


def pin_strides(node: torch.fx.Node) -> None:
    """Have Inductor pass the tensors of a node made by a graph pass in the strides they were traced with.

    Tracing stores these values itself; for a node that a pass inserts Inductor otherwise chooses freely.
    """

    def value(x: Any) -> Any:
        return x.meta.get("val") if isinstance(x, torch.fx.Node) else None

    node.meta["eager_input_vals"] = torch.fx.node.map_aggregate((node.args, node.kwargs), value)
