"""Clamped scores in training: all operators agree except where a score is the bound exactly, so many are here."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from forms_support import Arg, Compiled, args, check, compiling
from torch import Tensor
from torch.nn import functional as F

import fa_inductor
from fa_inductor.reasons import Code


def two_bounds(s: Tensor) -> Tensor:
    return s.clamp(-1, 1)


def two_bounds_in_place(s: Tensor) -> Tensor:
    return s.mul(2.0).clamp_(-2.0, 2.0)


def two_bounds_one_after_another(s: Tensor) -> Tensor:
    return s.clamp(min=-1).clamp(max=1)


def the_upper_bound_first(s: Tensor) -> Tensor:
    return s.clamp(max=1).clamp(min=-1)


def lower_bound(s: Tensor) -> Tensor:
    return s.clamp(min=-1)


def upper_bound(s: Tensor) -> Tensor:
    return s.clamp_max(1)


def bounds_that_meet(s: Tensor) -> Tensor:
    return s.clamp(1, 1)


def bounds_that_cross(s: Tensor) -> Tensor:
    return s.clamp(1, -1)


def relu(s: Tensor) -> Tensor:
    return s.relu()


def relu6(s: Tensor) -> Tensor:
    return F.relu6(s * 3)


def hardtanh(s: Tensor) -> Tensor:
    return F.hardtanh(s, -2, 1)


def maximum(s: Tensor) -> Tensor:
    """Half of the gradient passes at the number; all of it did."""
    return torch.maximum(s, torch.full((), 1.0, dtype=s.dtype))


def minimum(s: Tensor) -> Tensor:
    return torch.minimum(torch.full((), 1.0, dtype=s.dtype), s)


def two_kinds(s: Tensor) -> Tensor:
    return F.hardtanh(s.clamp(-2, 2) * 0.5)


class WiderGradient(torch.autograd.Function):
    """The forward of a clamp, and the gradient of one with other bounds."""

    @staticmethod
    def forward(ctx: Any, s: Tensor) -> Tensor:
        ctx.save_for_backward(s)
        return s.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (s,) = ctx.saved_tensors
        return torch.where((s >= -2) & (s <= 2), g, 0.0)


class OpenGradient(WiderGradient):
    """That of a clamp, except at the upper bound."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (s,) = ctx.saved_tensors
        return torch.where((s >= -1) & (s < 1), g, 0.0)


def wider_gradient(s: Tensor) -> Tensor:
    return WiderGradient.apply(s)


def open_gradient(s: Tensor) -> Tensor:
    return OpenGradient.apply(s)


def straight_through(s: Tensor) -> Tensor:
    return s + (s.clamp(-1, 1) - s).detach()


REWRITTEN = [two_bounds, two_bounds_in_place, two_bounds_one_after_another, the_upper_bound_first, lower_bound, upper_bound,
             bounds_that_meet, bounds_that_cross, relu, relu6, hardtanh, maximum, minimum]
REFUSED = {two_kinds: Code.BACKWARD, wider_gradient: Code.BACKWARD, open_gradient: Code.BACKWARD,
           straight_through: Code.SCORE_OP}


def whole(*shape: int) -> Tensor:
    """Small integers: the scores are integers, and equal to a bound in many places."""
    g = torch.Generator().manual_seed(1)
    return torch.randint(-1, 2, shape, generator=g).double().requires_grad_()


@pytest.mark.parametrize("clamped", [*REWRITTEN, *REFUSED], ids=lambda f: f.__name__)
def test_gradient_at_the_bounds(clamped: Callable[[Tensor], Tensor]) -> None:
    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(clamped(q @ k.mT), -1) @ v

    xs = [whole(2, 4, 8, 4), whole(2, 4, 8, 4), whole(2, 4, 8, 4)]
    tangent = torch.randn(2, 4, 8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with compiling(validate=False):
        out = Compiled(form).fn(*xs)
        got = [out, *torch.autograd.grad(out, xs, tangent)]
        blocks = fa_inductor.report().blocks
    want = [form(*xs), *torch.autograd.grad(form(*xs), xs, tangent)]
    assert [b.reason and b.reason.code for b in blocks] == [REFUSED.get(clamped)]
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("clamped", [two_bounds, relu, hardtanh, maximum], ids=lambda f: f.__name__)
@pytest.mark.parametrize("at", [0, 1], ids=["q", "k"])
def test_nan_stays_where_it_is(clamped: Callable[[Tensor], Tensor], at: int) -> None:
    """In outputs and gradients, as in the same graph without the rewrite (eager hardtanh on a CPU stops a NaN)."""
    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(clamped(q @ k.mT), -1) @ v

    xs = [whole(2, 4, 8, 4), whole(2, 4, 8, 4), whole(2, 4, 8, 4)]
    with torch.no_grad():
        xs[at][0, 1, 3, 2] = torch.nan
    tangent = torch.randn(2, 4, 8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def results(fn: Callable[..., Tensor]) -> list[Tensor]:
        out = fn(*xs)
        return [out, *torch.autograd.grad(out, xs, tangent)]

    with compiling(validate=False):
        got = results(Compiled(form).fn)
        assert [b.outcome for b in fa_inductor.report().blocks] == ["rewritten"]
    want = results(torch.compile(form, backend="aot_eager_decomp_partition"))
    assert want[0].isnan().any() and not want[0].isnan().all()
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize(("dtype", "dynamic"), [(torch.float32, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("clamped", [two_bounds, lower_bound, upper_bound, hardtanh, relu], ids=lambda f: f.__name__)
def test_clamped_beside_a_trained_bias(clamped: Callable[[Tensor], Tensor], dtype: torch.dtype, dynamic: bool) -> None:
    def form(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        s = clamped(q @ k.mT * 0.3 + bias) + 0.5 * torch.arange(k.shape[2]).to(q.dtype) / k.shape[2]
        return torch.softmax(s, -1) @ v

    check(form, args("bhqd bhkd bhkd", Arg("1hqk")), train=True, dynamic=dynamic, expect=1, dtype=dtype,
          outliers=dtype == torch.float32)
