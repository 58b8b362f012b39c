"""Which backend runs a record, and that a failing one is replaced and named once."""
from __future__ import annotations

import logging
import sys
import types
from collections.abc import Iterator

import pytest
import torch

from fa_inductor.backends import dispatch, reference, sdpa
from fa_inductor.kernels.expr import SCORE, Expr
from fa_inductor.kernels.record import Attention, Band
from fa_inductor.options import options
from fa_inductor.reasons import Code, Reason

RECORD = Attention(2, 1, 8, 8, "float32", 0.5, mask=(Band(None, 0),))
SOFTCAP = RECORD.with_(score=Expr("tanh", (SCORE,)))


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    dispatch.forget_failures()
    dispatch._choose.cache_clear()
    yield
    dispatch.forget_failures()
    dispatch._choose.cache_clear()


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(2, 2, 5, 8), torch.randn(2, 1, 5, 8), torch.randn(2, 1, 5, 8)


class Api(types.ModuleType):
    """A stand-in for the kernels: says it supports one record, and does what the test wants when it is called."""

    def __init__(self, missing: str | None = None) -> None:
        super().__init__("fa_inductor.kernels.api")
        self.missing, self.calls = missing, 0
        self.error: Exception | None = None

    def available(self) -> str | None:
        return self.missing

    def supports(self, record: Attention, arch: str) -> str | None:
        return None if record == RECORD and arch == "sm_90" else "no"

    def attention(self, q, k, v, record, captures=(), ints=()):
        self.calls += 1
        if self.error is not None:
            raise self.error
        out, lse = reference.forward(record, q, k, v, captures, ints)
        return out.contiguous(), lse


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    import fa_inductor.kernels as package

    fake = Api()
    monkeypatch.setitem(sys.modules, "fa_inductor.kernels.api", fake)
    monkeypatch.setattr(package, "api", fake, raising=False)
    return fake


@pytest.fixture
def on_hopper(api: Api, monkeypatch: pytest.MonkeyPatch) -> Api:
    """CPU tensors that dispatch takes for tensors on an sm_90."""
    monkeypatch.setattr(dispatch, "_kernels_reason", lambda record, kind, arch: (
        None if (why := api.supports(record, "sm_90")) is None else Reason(Code.FEATURE, why)))
    return api


@pytest.mark.parametrize("backend, record, device, arch, name, code", [
    ("auto", RECORD, "cuda", "sm_90", "kernels", None), ("kernels", RECORD, "cuda", "sm_90", "kernels", None),
    ("auto", RECORD, "cuda", "sm_80", "sdpa", Code.FEATURE),
    ("auto", SOFTCAP, "cuda", "sm_90", "reference", Code.FEATURE),
    ("auto", RECORD, "cpu", None, "sdpa", Code.DEVICE), ("auto", SOFTCAP, "cpu", None, "reference", Code.FEATURE),
    ("auto", RECORD, "mps", None, "reference", Code.DEVICE), ("sdpa", RECORD, "cuda", "sm_90", "sdpa", None),
    ("sdpa", RECORD, "cpu", None, "sdpa", None), ("sdpa", SOFTCAP, "cpu", None, "reference", Code.FEATURE),
    ("reference", RECORD, "cuda", "sm_90", "reference", None),
])  # fmt: skip
def test_choose(backend: str, record: Attention, device: str, arch: str | None, name: str, code: Code | None,
                api: Api) -> None:
    with options.patch(backend=backend):
        chosen, reason = dispatch.choose(record, device, arch)
    assert chosen == name
    assert (reason.code if reason is not None else None) is code


def test_choose_without_the_dsl(api: Api) -> None:
    api.missing = "nvidia-cutlass-dsl is not installed"
    name, reason = dispatch.choose(RECORD, "cuda", "sm_90")
    assert name == "sdpa" and reason is not None and reason.code is Code.DSL_MISSING


def test_kernels_run_and_their_layout_is_put_right(on_hopper: Api) -> None:
    q, k, v = tensors()
    out, _ = dispatch.run_forward(RECORD, q, k, v, [], [])
    assert on_hopper.calls == 1 and out.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(out, reference.forward(RECORD, q, k, v)[0])


def test_a_kernel_that_fails_is_named_once_and_not_tried_again(
    on_hopper: Api, caplog: pytest.LogCaptureFixture
) -> None:
    q, k, v = tensors()
    heard: list[tuple[str, Code]] = []
    stop = dispatch.on_fallback(lambda record, backend, reason: heard.append((backend, reason.code)))
    on_hopper.error = RuntimeError("ptxas died")
    with caplog.at_level(logging.WARNING, logger="fa_inductor.backends.dispatch"):
        for _ in range(3):
            out, _ = dispatch.run_forward(RECORD, q, k, v, [], [])
            torch.testing.assert_close(out, reference.forward(RECORD, q, k, v)[0])
    assert on_hopper.calls == 1 and heard == [("kernels", Code.JIT)]
    assert len(caplog.records) == 1 and "ptxas died" in caplog.text and "causal" in caplog.text
    dispatch.forget_failures()
    stop()
    dispatch.run_forward(RECORD, q, k, v, [], [])
    assert on_hopper.calls == 2 and len(heard) == 1


def test_tensors_that_do_not_fit_do_not_condemn_the_kernel(on_hopper: Api) -> None:
    q, k, v = tensors()
    on_hopper.error = ValueError("last dim is strided")
    dispatch.run_forward(RECORD, q, k, v, [], [])
    on_hopper.error = None
    dispatch.run_forward(RECORD, q, k, v, [], [])
    assert on_hopper.calls == 2


def test_everything_fails_but_the_reference(on_hopper: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("no")

    on_hopper.error = RuntimeError("no")
    monkeypatch.setattr(sdpa, "forward", broken)
    monkeypatch.setattr(sdpa, "backward", broken)
    q, k, v = tensors()
    out, lse = dispatch.run_forward(RECORD, q, k, v, [], [])
    torch.testing.assert_close(out, reference.forward(RECORD, q, k, v)[0])
    dout = torch.randn_like(out)
    got = dispatch.run_backward(RECORD, dout, q, k, v, out, lse, [], [])
    for a, b in zip(got[:3], reference.backward(RECORD, dout, q, k, v)[:3], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("record", [RECORD, SOFTCAP])
@pytest.mark.parametrize("backend", ["auto", "kernels", "sdpa", "reference"])
def test_every_option_gives_the_answer(backend: str, record: Attention) -> None:
    q, k, v = tensors()
    with options.patch(backend=backend):
        out, lse = dispatch.run_forward(record, q, k, v, [], [])
        grads = dispatch.run_backward(record, torch.ones_like(out), q, k, v, out, lse, [], [])
    torch.testing.assert_close(out, reference.forward(record, q, k, v)[0])
    for a, b in zip(grads[:3], reference.backward(record, torch.ones_like(out), q, k, v)[:3], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("b, sq, sk", [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_sizes_of_zero_go_to_the_reference(b: int, sq: int, sk: int, on_hopper: Api) -> None:
    q, k, v = torch.randn(b, 2, sq, 8), torch.randn(b, 1, sk, 8), torch.randn(b, 1, sk, 8)
    out, lse = dispatch.run_forward(RECORD, q, k, v, [], [])
    assert on_hopper.calls == 0 and out.shape == (b, 2, sq, 8)
    dq, dk, _, _ = dispatch.run_backward(RECORD, out, q, k, v, out, lse, [], [])
    assert dq.shape == q.shape and dk.shape == k.shape


def test_no_dsl_is_imported_to_choose() -> None:
    assert dispatch.choose(RECORD, "cuda", "sm_90")[0] in ("kernels", "sdpa")
    import subprocess

    code = (
        "import sys, fa_inductor.ops; from fa_inductor.backends import dispatch;"
        "from fa_inductor.kernels.record import Attention;"
        "dispatch.choose(Attention(2, 1, 64, 64, 'bfloat16', 0.5), 'cuda', 'sm_90');"
        "assert not {'cutlass', 'tvm_ffi'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
