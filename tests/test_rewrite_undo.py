"""A rewrite that fails half way leaves the graph as it was, and the other blocks rewritten."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from forms_support import compiling
from torch import Tensor
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx

import fa_inductor
from fa_inductor.reasons import Code
from fa_inductor.rewrite.apply import Rewriter
from fa_inductor.rewrite.emit import Emitter


def two_layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    for _ in range(2):
        q = torch.softmax(q @ k.transpose(-1, -2) * 0.3, -1) @ v
    return q.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)


def without_codegen(gm: torch.fx.GraphModule, example: list[Any]) -> Any:
    return compile_fx(gm, example, inner_compile=lambda graph, _, **__: make_boxed_func(graph.forward))


def run(fn: Any, train: bool) -> tuple[list[Tensor], list[Code | None]]:
    g = torch.Generator().manual_seed(0)
    xs = [torch.randn(2, 4, 10, 8, generator=g, dtype=torch.float64).requires_grad_(train) for _ in range(3)]
    out = fn(*xs)
    grads = list(torch.autograd.grad(out.sin().sum(), xs)) if train else []
    reasons = [b.reason.code if b.reason else None for b in fa_inductor.report(clear=True).blocks]
    return [out.detach(), *grads], reasons


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("where", [1, 2, 3, 5, 8, 12])
def test_a_failure_at_any_step(train: bool, where: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ``where``-th tensor that the rewriting of the first block arranges fails."""
    want, _ = run(two_layers, train)
    calls = {"n": 0, "first": True}
    begin, arrange = Rewriter.begin, Emitter.arrange

    def counted(self: Emitter, *a: Any, **k: Any) -> Any:
        calls["n"] += 1
        if calls["first"] and calls["n"] == where:
            raise RuntimeError("planted")
        return arrange(self, *a, **k)

    def started(self: Rewriter) -> None:
        calls["first"] = calls["n"] == 0
        begin(self)

    monkeypatch.setattr(Emitter, "arrange", counted)
    monkeypatch.setattr(Rewriter, "begin", started)
    with compiling():
        got, reasons = run(torch.compile(two_layers, backend=without_codegen), train)
    # the first block has fewer steps than that
    assert reasons == [Code.INTERNAL, None] or (reasons == [None, None] and where > (8 if train else 4))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
