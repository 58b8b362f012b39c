"""Symbolic sizes that share a dimension, are derived from each other, or are equal when the graph is traced.

Each form is compiled once or twice, the first time where its two batches and its two lengths are equal, and called
with other sizes: a size that was taken for another gives an error or wrong numbers then.
"""
from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import sympy
import torch
from forms_support import Compiled, compare, compiling
from torch import Tensor
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F

import fa_inductor
from fa_inductor.reasons import Code
from fa_inductor.recognise.equal_sizes import equal_sizes

CALLS = [((2, 6, 8), (2, 6, 8)), ((3, 10, 8), (4, 5, 8)), ((5, 4, 8), (2, 7, 8))]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``[B, S, 8]`` each, two heads."""
    q, k, v = (t.view(t.shape[0], t.shape[1], 2, 4).transpose(1, 2) for t in (q.sin(), k.cos(), v.tanh()))
    return (torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).reshape(q.shape[0], q.shape[2], 8)


def one_more(x: Tensor, y: Tensor) -> Tensor:
    t = torch.cat([x, x[:, :1]], 1)
    return attend(t, t, t)


def half_and_whole(x: Tensor, y: Tensor) -> Tensor:
    return attend(x[:, : x.shape[1] // 2], x, x)


def windows(x: Tensor, y: Tensor) -> Tensor:
    n = (x.shape[1] + 2) // 3
    t = F.pad(x, (0, 0, 0, 3 * n - x.shape[1])).reshape(x.shape[0] * n, 3, 8)
    return attend(t, t, t).view(x.shape[0], 3 * n, 8)


def windows_of_an_image(x: Tensor, y: Tensor) -> Tensor:
    """The batch and the number of windows, equal at first, are axes of their own: K is expanded over the windows."""
    n = (x.shape[1] + 2) // 3
    t = F.pad(x, (0, 0, 0, 3 * n - x.shape[1])).view(x.shape[0], n, 3, 8)
    q = t.transpose(1, 2).reshape(x.shape[0] * 3, n, 8)
    q = attend(q, q, q).view(x.shape[0], 3, n, 8).transpose(1, 2).reshape(x.shape[0] * n, 3, 8)
    kv = t[:, :1].expand(-1, n, -1, -1).reshape(x.shape[0] * n, 3, 8)
    return attend(q, kv, kv)


def rows_then_columns(x: Tensor, y: Tensor) -> Tensor:
    t = x[:, :, None] + y[:1, None]
    b, r, c = t.shape[:3]
    t = t.reshape(b * r, c, 8)
    t = attend(t, t, t).view(b, r, c, 8).transpose(1, 2).reshape(b * c, r, 8)
    return attend(t, t, t).view(b, c, r, 8)


def batches_and_heads_folded(x: Tensor, y: Tensor) -> Tensor:
    t = x[:, None] + y[None, :, :1]
    b, c, s = t.shape[:3]
    q, k, v = (f(t).view(b, c, s, 2, 4).transpose(2, 3).reshape(b * c * 2, s, 4) for f in (torch.sin, torch.cos, torch.tanh))
    return torch.bmm(torch.softmax(torch.bmm(q, k.mT), -1), v).view(b, c, 2, s, 4)


def folded_in_two_orders(x: Tensor, y: Tensor) -> Tensor:
    """The keys are folded as (b, c) and taken apart as (c, b), which agrees where the batches are equal."""
    t = x[:, None] + y[None, :, :1]
    b, c, s = t.shape[:3]
    t = t.reshape(b * c, s, 8)
    return attend(t, t.view(c, b, s, 8).transpose(0, 1).reshape(b * c, s, 8), t)


def keys_repeated(x: Tensor, y: Tensor) -> Tensor:
    t = (x[:, None] + y[None, :, :1]).flatten(0, 1)
    kv = x[:, None].expand(-1, y.shape[0], -1, -1).flatten(0, 1)
    return attend(t, kv, kv)


def keys_tiled(x: Tensor, y: Tensor) -> Tensor:
    t = (x[:, None] + y[None, :, :1]).flatten(0, 1)
    kv = x[None].expand(y.shape[0], -1, -1, -1).flatten(0, 1)
    return attend(t, kv, kv)


def keys_of_two_sizes(x: Tensor, y: Tensor) -> Tensor:
    kv = (x[:, :, None] + y[:1, None]).flatten(1, 2)
    return attend(x, kv, kv)


def mask_of_another_length(x: Tensor, y: Tensor) -> Tensor:
    q, k, v = (f(x).view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2) for f in (torch.sin, torch.cos, torch.tanh))
    i = torch.arange(x.shape[1])
    return torch.softmax((q @ k.mT).masked_fill((i > 0) & (i >= y.shape[1] - 2), -torch.inf), -1) @ v


FORMS = [one_more, half_and_whole, windows, windows_of_an_image, rows_then_columns, batches_and_heads_folded,
         folded_in_two_orders, keys_repeated, keys_tiled, keys_of_two_sizes, mask_of_another_length]


@pytest.mark.parametrize("train", [False, True], ids=["infer", "train"])
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_called_with_other_sizes(form: Callable[[Tensor, Tensor], Tensor], train: bool) -> None:
    g = torch.Generator().manual_seed(1)
    with compiling(validate=False), torch.set_grad_enabled(train):
        compiled = Compiled(form, dynamic=True)
        for shapes in CALLS:
            xs = [torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in shapes]
            for x in xs:
                torch._dynamo.mark_static(x, 2)
            got, want = [compiled.fn(*xs)], [form(*xs)]
            if train:
                tangent = torch.randn(want[0].shape, generator=g, dtype=torch.float64)
                got += torch.autograd.grad(got[0], xs, tangent, allow_unused=True)
                want += torch.autograd.grad(want[0], xs, tangent, allow_unused=True)
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
        assert "rewritten" in [b.outcome for b in fa_inductor.report().blocks], fa_inductor.report()


def windows_of_half_the_rows(x: Tensor, *weights: Tensor) -> Tensor:
    b, rows, columns, c = x.shape
    side = rows // 2
    t = x.view(b, rows // side, side, columns, c).reshape(-1, side * columns, c)
    q, k, v = ((t @ w).view(*t.shape[:-1], -1, 8).transpose(1, 2) for w in weights)
    o = torch.softmax(q @ k.mT, -1) @ v
    return o.transpose(1, 2).reshape(*t.shape[:-1], -1).view(b, rows, columns, c)


def test_the_backward_spells_a_size_in_another_way() -> None:
    """Its number of queries is a quotient of element counts; it reads a size off the probabilities, too."""
    g = torch.Generator().manual_seed(0)
    weights = [torch.randn(16, 16, generator=g).mul_(0.3).requires_grad_() for _ in range(3)]
    compiled = Compiled(windows_of_half_the_rows)
    with compiling():
        for shape in ((2, 8, 6, 16), (3, 4, 5, 16)):
            x = torch.randn(shape, generator=g, requires_grad=True)
            for d in range(3):
                torch._dynamo.mark_dynamic(x, d)
            compare(windows_of_half_the_rows, compiled.fn, [x, *weights], True)
        report = fa_inductor.report()
        assert (report.found, report.rewritten, compiled.compiles) == (1, 1, 1), report


def _symint(expr: sympy.Expr) -> torch.SymInt:
    env = ShapeEnv()
    return torch.SymInt(SymNode(expr, env, int, 8))


def test_a_view_proves_spellings_equal_and_the_first_one_is_used() -> None:
    a, b, c = sympy.symbols("a b c", integer=True, positive=True)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    sizes = {n: graph.placeholder(f"s{n}") for n in (a, b, c)}
    for n, node in sizes.items():
        node.meta["val"] = _symint(n)

    def view(given: list[Any], shown: list[Any]) -> None:
        node = graph.call_function(torch.ops.aten.view.default, (x, given))
        node.meta["val"] = SimpleNamespace(shape=[s if isinstance(s, int) else _symint(s) for s in shown])

    with mock.patch("fa_inductor.recognise.equal_sizes.is_tensor", lambda n: hasattr(n.meta["val"], "shape")):
        view([sizes[a], -1, 4], [a, b * 7, 4])
        assert equal_sizes(graph) == {}, "nothing is known of a size that the view works out"
        view([sizes[a], 4], [b * c, 4])
        assert equal_sizes(graph) == {b * c: a}
        view([sizes[c], 4], [b * c, 4])
        assert equal_sizes(graph) == {b * c: a, c: a}
        view([16, 4], [c, 4])
        assert equal_sizes(graph) == {b * c: 16, c: 16, a: 16}


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * 0.5, -1) @ v


def with_a_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=0.5)


@pytest.mark.parametrize("train", [False, True], ids=["infer", "train"])
@pytest.mark.parametrize("dims", [(3,), (1, 3), (1,)], ids=["head dim", "heads and head dim", "heads"])
@pytest.mark.parametrize("form", [F.scaled_dot_product_attention, with_a_scale, written_out], ids=lambda f: f.__name__)
def test_symbolic_heads_are_a_reason(form: Callable[..., Tensor], dims: tuple[int, ...], train: bool) -> None:
    g = torch.Generator().manual_seed(2)
    compiled = Compiled(form)
    with compiling():
        for n in (8, 16):
            sizes = [n if d in dims else s for d, s in enumerate((2, 4, 6, 8))]
            xs = [torch.randn(sizes, generator=g, requires_grad=True) for _ in range(3)]
            for x in xs:
                for d in dims:
                    torch._dynamo.mark_dynamic(x, d)
            compare(form, compiled.fn, xs, train)
        # in an attention that is written out, the dimension that is static may be the heads just as well
        reason = None if form is written_out and dims == (1,) else Code.RANK
        assert [b.reason and b.reason.code for b in fa_inductor.report().blocks] == [reason], fa_inductor.report()
        assert compiled.compiles == 1
