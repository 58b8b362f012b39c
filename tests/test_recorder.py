"""The recorder against ``make_fx``: the same operators on the same shapes, on real, fake and symbolic tensors."""
from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fa_inductor.recognise.recorder import Recorder

MODES = ["real", "fake", "symbolic", *["cuda"] * torch.cuda.is_available()]
"""Fake CUDA tensors are differentiated in a thread of their own, and only by a PyTorch that knows CUDA."""
VIEWS = ("detach", "alias", "lift_fresh")


def softmax(q: Tensor, k: Tensor) -> Tensor:
    s = q @ k.transpose(-1, -2) * 0.3
    return (s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -1e9).softmax(-1) @ k).flatten(1)


def normalised(q: Tensor, k: Tensor) -> Tensor:
    return torch.tanh(torch.nn.functional.layer_norm(q, q.shape[-1:]) @ k.mT).amax(-1)


def listed(q: Tensor, k: Tensor) -> Tensor:
    a, b = torch.split(q, 2, -1)
    return torch.cat([a.relu(), b * k[..., :2].sum((0, 1), keepdim=True)], -1)


def joint(fn: Any, q: Tensor, k: Tensor, tangent: Tensor) -> tuple[Tensor, ...]:
    out = fn(q, k)
    return (out, *torch.autograd.grad(out, (q, k), tangent, allow_unused=True))


def recorded(fn: Any, q: Tensor, k: Tensor, tangent: Tensor) -> GraphModule:
    recorder = Recorder()
    leaves = [x.detach().requires_grad_() for x in (q, k)]
    for i, x in enumerate((*leaves, tangent)):
        recorder.placeholder(f"x{i}", x)
    with recorder:
        found = joint(fn, *leaves, tangent)
    recorder.output(found)
    return GraphModule(recorder.root, recorder.graph)


def traced(fn: Any, q: Tensor, k: Tensor, tangent: Tensor) -> Graph:
    def call(q: Tensor, k: Tensor, tangent: Tensor) -> tuple[Tensor, ...]:
        return joint(fn, q.detach().requires_grad_(), k.detach().requires_grad_(), tangent)

    return make_fx(call, decomposition_table=select_decomp_table(), tracing_mode="real")(q, k, tangent).graph


def operators(graph: Graph) -> list[tuple[str, tuple[str, ...]]]:
    return [(str(n.target), tuple(map(str, n.meta["val"].shape))) for n in graph.nodes
            if n.op == "call_function" and isinstance(n.meta["val"], Tensor) and getattr(
                n.target, "_opname", "") not in VIEWS]


def tensors(mode: str) -> tuple[Any, list[Tensor]]:
    real = [torch.randn(2, 3, 8, 4, dtype=torch.float64) for _ in range(2)]
    if mode == "real":
        return contextlib.nullcontext(), real
    fake = FakeTensorMode(shape_env=ShapeEnv())
    if mode == "cuda":
        with fake:
            return fake, [torch.empty(2, 3, 8, 4, device="cuda") for _ in real]
    sizes = [DimDynamic.DYNAMIC if mode == "symbolic" and i in (0, 2) else DimDynamic.STATIC for i in range(4)]
    return fake, [fake.from_tensor(x, source=torch._dynamo.source.ConstantSource("x"), symbolic_context=(
        StatelessSymbolicContext(dynamic_sizes=sizes))) for x in real]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fn", [softmax, normalised, listed], ids=lambda f: f.__name__)
def test_records_what_make_fx_traces(fn: Any, mode: str) -> None:
    entered, (q, k) = tensors(mode)
    with entered, torch.enable_grad():
        tangent = torch.randn_like(fn(q, k))
        ours, theirs = recorded(fn, q, k, tangent), traced(fn, q, k, tangent)
    assert operators(ours.graph) == operators(theirs)
    if mode == "real":
        got = ours(q, k, tangent)
        want = joint(fn, q.requires_grad_(), k.requires_grad_(), tangent)
        torch.testing.assert_close(got, want)


def test_a_foreign_tensor_is_a_constant() -> None:
    table, x, recorder = torch.arange(3.0), torch.ones(3), Recorder()
    recorder.placeholder("x", x)
    with recorder:
        out = x + table
    recorder.output(out)
    graph = GraphModule(recorder.root, recorder.graph)
    assert [n.op for n in graph.graph.nodes] == ["placeholder", "get_attr", "call_function", "output"]
    assert graph(torch.zeros(3)).tolist() == [0.0, 1.0, 2.0]


def test_inputs_stand_first_also_when_they_come_late() -> None:
    x, y, recorder = torch.ones(3), torch.ones(3), Recorder()
    recorder.placeholder("x", x)
    with recorder:
        z = x.sin()
    recorder.placeholder("y", y)
    with recorder:
        z = z + y
    recorder.output(z)
    assert [n.op for n in recorder.graph.nodes] == ["placeholder"] * 2 + ["call_function"] * 2 + ["output"]
