"""Whatever does not fit: the model still runs, gives eager's answer, and the report names the reason."""
from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

import pytest
import torch
from torch import Tensor
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx

import fa_inductor
from fa_inductor import guards
from fa_inductor.kernels import api
from fa_inductor.kernels.record import Attention, Band
from fa_inductor.reasons import Code

HOPPER = dict(target="sm_90", backend="reference")
"""The guards of the Hopper kernels decide, the plain-torch backend runs what they let through."""


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.25, dim=-1) @ v


def run(fn: Callable[..., Tensor], *args: Tensor, **options: str) -> Code | None:
    """Compile and run ``fn``; it must give eager's answer.  The reason of its one block, None when rewritten."""
    torch._dynamo.reset()
    fa_inductor.report(clear=True)
    compiled = torch.compile(fn, backend=lambda g, x: compile_fx(
        g, x, inner_compile=lambda graph, _, **__: make_boxed_func(graph.forward)))
    with (torch.no_grad(), fa_inductor.enabled(), fa_inductor.options.patch(**options),
          torch._inductor.config.patch(fx_graph_cache=False),
          torch._functorch.config.patch(enable_autograd_cache=False)):
        got = compiled(*args)
    eager, exact = fn(*args), fn(*(t.double() for t in args))
    assert got.dtype == eager.dtype
    allowed = 2 * (eager - exact).abs().max() + 4 * torch.finfo(eager.dtype).eps * exact.abs().max()
    assert (got - exact).abs().max() <= allowed
    (block,) = fa_inductor.report(clear=True).blocks
    assert (block.outcome == "rewritten") == (block.reason is None)
    return block.reason.code if block.reason else None


def qkv(dim: int = 64, dtype: torch.dtype = torch.bfloat16, n: int = 24) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, n, dim, generator=g).to(dtype) for _ in range(3)]


def test_what_fits_is_rewritten() -> None:
    assert run(attend, *qkv(), **HOPPER) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_dtype_without_kernels(dtype: torch.dtype) -> None:
    assert run(attend, *qkv(dtype=dtype), **HOPPER) is Code.DTYPE


@pytest.mark.parametrize("dim", [12, 20, 260])
def test_a_head_dim_without_kernels(dim: int) -> None:
    assert run(attend, *qkv(dim), **HOPPER) is Code.HEAD_DIM


def test_a_device_without_kernels() -> None:
    assert run(attend, *qkv(), target="auto", backend="kernels") is Code.DEVICE


def test_a_target_whose_gpu_is_not_here() -> None:
    assert run(attend, *qkv(), target="sm_90", backend="kernels") is Code.DEVICE


def test_a_target_without_kernels_yet() -> None:
    assert run(attend, *qkv(), target="sm_100", backend="reference") is Code.FEATURE


def test_a_shape_too_small_to_pay_on_cpu() -> None:
    assert run(attend, *qkv(dtype=torch.float32, n=8), target="auto", backend="auto") is Code.SLOWER


def test_last_dimension_not_contiguous() -> None:
    q, k, v = qkv()
    strided = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in (q, k, v)]
    assert strided[0].stride(-1) != 1
    assert run(attend, *strided, **HOPPER) is None


def test_different_dtypes() -> None:
    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.softmax(q @ k.transpose(-1, -2) * 0.25, dim=-1)
        return weights.to(v.dtype) @ v

    q, k, _ = qkv(dtype=torch.float32)
    assert run(mixed, q, k, qkv()[2], backend="reference") is Code.DTYPE_MIX


def test_no_dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    assert _on_hopper(monkeypatch, missing) is Code.DSL_MISSING


def test_an_unknown_dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _on_hopper(monkeypatch, lambda name: "99.0.0") is Code.DSL_VERSION


def _on_hopper(monkeypatch: pytest.MonkeyPatch, version: Callable[[str], str]) -> Code | None:
    """The guard's answer for a block on a Hopper GPU when the DSL's version is read by ``version``."""
    monkeypatch.setattr(api.metadata, "version", version)
    api.available.cache_clear()
    record = Attention(8, 8, 64, 64, "bfloat16", 0.125, mask=(Band(None, 0),), empty_rows="nan")
    dense = record.with_(score=fa_inductor.kernels.expr.Expr("tanh", (fa_inductor.kernels.expr.SCORE,)))
    try:
        site = guards.Site(torch.device("cuda"), "sm_90", False, (1, 64, 64))
        # a causal record still runs on PyTorch's flash kernel, anything else is left to the compiler
        assert guards.choose(record, site) == ("sdpa", None)
        reason = guards.choose(dense, site)[1]
        return reason.code if reason else None
    finally:
        api.available.cache_clear()


@pytest.mark.parametrize(("n", "code"), [(16, Code.SLOWER), (300, None)])
def test_the_cpu_rule_with_symbolic_lengths(n: int, code: Code | None) -> None:
    q, k, v = qkv(dtype=torch.float32, n=n)
    for t in (q, k, v):
        torch._dynamo.mark_dynamic(t, 0)
        torch._dynamo.mark_dynamic(t, 2)
    assert run(attend, q, k, v, target="auto", backend="auto") is code
