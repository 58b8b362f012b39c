"""SDPA operators as a GPU's joint graph has them, without a GPU: traced on fake CUDA tensors, rewritten, run on CPU."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from forms_support import check_close
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fa_inductor
from fa_inductor import pipeline
from fa_inductor.reasons import Code
from fa_inductor.report import GraphReport

aten = torch.ops.aten
B, H, S, D = 2, 4, 64, 64
SCALE = 0.2


def flash(q, k, v, t, bias=None, *, causal=False, p=0.0, extra=False):
    o, lse, cq, ck, mq, mk, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        q, k, v, p, causal, False, scale=SCALE)
    if t is None:
        return o
    return (o, *aten._scaled_dot_product_flash_attention_backward(
        t, q, k, v, o, lse, cq, ck, mq, mk, p, causal, seed, offset, scale=SCALE), *([lse] if extra else []))


def efficient(q, k, v, t, bias=None, *, causal=False, p=0.0, extra=False):
    o, lse, seed, offset = aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, t is not None, p, causal, scale=SCALE)
    if t is None:
        return o
    grads = aten._scaled_dot_product_efficient_attention_backward(
        t, q, k, v, bias, o, lse, seed, offset, p, [True, True, True, False], causal, scale=SCALE)
    return (o, *grads[:3], *([lse] if extra else []))


def cudnn(q, k, v, t, bias=None, *, causal=False, p=0.0, extra=False):
    o, lse, cq, ck, mq, mk, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, bias, t is not None, p, causal, False, scale=SCALE)
    if t is None:
        return o
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        t, q, k, v, o, lse, seed, offset, bias, cq, ck, mq, mk, p, causal, scale=SCALE)
    return (o, *grads, *([lse] if extra else []))


OPERATORS = {"flash": flash, "efficient": efficient, "cudnn": cudnn}


def rewritten(operator: Any, train: bool, bias: tuple[int, ...] | None = None, **keywords: Any
              ) -> tuple[Graph, GraphReport]:
    """The graph of one operator, and in training its backward, on bfloat16 CUDA tensors, after our pass."""
    def call(q: Tensor, k: Tensor, v: Tensor, tangent: Tensor, *more: Tensor) -> Any:
        return operator(q, k, v, tangent if train else None, *more, **keywords)

    with FakeTensorMode():
        shapes = [(B, H, S, D)] * 4 + ([bias] if bias else [])
        graph = make_fx(call)(*(torch.empty(s, device="cuda", dtype=torch.bfloat16) for s in shapes)).graph
    if train:
        tangent = [n for n in graph.nodes if n.op == "placeholder"][3]
        tangent.name = tangent.target = "tangents_1"
    with fa_inductor.options.patch(backend="reference", target="sm_90"):
        return graph, pipeline.run(graph)


def exact(q: Tensor, k: Tensor, v: Tensor, t: Tensor, bias: Tensor | None, causal: bool) -> list[Tensor]:
    """Output and gradients, written out, in the dtype of the inputs."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    s = q @ k.mT * SCALE
    s = s if bias is None else s + bias
    s = s.masked_fill(~torch.ones(S, S, dtype=torch.bool).tril(), float("-inf")) if causal else s
    o = s.softmax(-1) @ v
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), t)]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(("name", "causal", "bias"), [
    ("flash", False, None), ("flash", True, None), ("efficient", False, None), ("efficient", True, None),
    ("efficient", False, (B, H, S, S)), ("cudnn", True, None), ("cudnn", False, (B, H, S, S))])
def test_operator_is_rewritten(name, causal, bias, train):
    graph, report = rewritten(OPERATORS[name], train, bias, causal=causal)
    assert (report.found, report.rewritten) == (1, 1), report
    (block,) = report.blocks
    assert block.kind == "sdpa" and block.training == train
    assert block.words == f"{'causal' if causal else 'no mask'}{', bias' if bias else ''}, MHA 4, d64, bf16"
    targets = [str(n.target) for n in graph.nodes]
    assert not any("scaled_dot_product" in t for t in targets)
    assert targets.count("fa_inductor.attention_backward.default") == train

    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(B, H, S, D, generator=g).bfloat16() for _ in range(4)]
    mask = torch.randn(bias, generator=g).bfloat16() if bias else None
    with fa_inductor.options.patch(backend="reference"):
        got = GraphModule(torch.nn.Module(), graph)(*tensors, *([mask] if bias else []))
    got = list(got) if train else [got]
    want = exact(*(x.double() for x in tensors), None if mask is None else mask.double(), causal)
    eager = exact(*tensors, mask, causal)
    for i, ours in enumerate(got):
        check_close(f"result {i}", ours, eager[i], want[i], float(want[i].abs().max()) if i else None)


@pytest.mark.parametrize("name", OPERATORS)
def test_dropout_is_refused(name):
    for train in (False, True):
        _, report = rewritten(OPERATORS[name], train, p=0.1)
        assert [b.reason.code for b in report.blocks] == [Code.DROPOUT]


@pytest.mark.parametrize("name", OPERATORS)
def test_log_sum_exp_in_use_is_refused(name):
    graph, report = rewritten(OPERATORS[name], True, extra=True)
    assert [b.reason.code for b in report.blocks] == [Code.GRAD_LSE]
    assert not any("fa_inductor" in str(n.target) for n in graph.nodes)


def test_gradient_of_a_bias_is_given_or_refused():
    def with_bias_gradient(q, k, v, t, bias):
        o, lse, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, scale=SCALE)
        return (o, *aten._scaled_dot_product_efficient_attention_backward(
            t, q, k, v, bias, o, lse, seed, offset, 0.0, [True, True, True, True], scale=SCALE))

    graph, report = rewritten(with_bias_gradient, True, (B, H, S, S))
    (block,) = report.blocks
    if block.outcome == "refused":
        assert block.reason.code is Code.GRAD_CAPTURE
        assert not any("fa_inductor" in str(n.target) for n in graph.nodes)
        return
    g = torch.Generator().manual_seed(0)
    q, k, v, t = (torch.randn(B, H, S, D, generator=g).bfloat16() for _ in range(4))
    bias = torch.randn(B, H, S, S, generator=g).bfloat16()
    with fa_inductor.options.patch(backend="reference"):
        got = GraphModule(torch.nn.Module(), graph)(q, k, v, t, bias)[4]

    def gradient(*x: Tensor) -> Tensor:
        *x, b = (y.detach() for y in x)
        b.requires_grad_()
        return torch.autograd.grad(((x[0] @ x[1].mT * SCALE + b).softmax(-1) @ x[2]), b, x[3])[0]

    want = gradient(*(x.double() for x in (q, k, v, t, bias)))
    check_close("bias", got, gradient(q, k, v, t, bias), want, float(want.abs().max()))


def test_a_boolean_mask_as_it_is_written_for_cudnn() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        keep = pad.view(B, 1, 1, S).expand(B, 1, S, S)
        zero, masked = (aten.full.default([], x, dtype=q.dtype, device=q.device) for x in (0.0, -65504.0))
        bias = torch.where(keep, zero, masked)
        return cudnn(q, k, v, None, bias)

    with FakeTensorMode():
        qkv = [torch.empty(B, H, S, D, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        graph = make_fx(call)(*qkv, torch.empty(B, S, device="cuda", dtype=torch.bool)).graph
    with fa_inductor.options.patch(backend="reference", target="sm_90"):
        (block,) = pipeline.run(graph).blocks
    assert block.outcome == "rewritten" and "key padding" in block.words and "bias" not in block.words
    (op,) = (n for n in graph.nodes if n.target is torch.ops.fa_inductor.attention.default)
    assert '"empty":"zero"' in op.args[5]
