"""Translation validation takes back a rewrite that computes something else, and passes one that does not."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from forms_support import Compiled, compiling
from torch import Tensor

import fa_inductor
from fa_inductor import validate
from fa_inductor.kernels.record import Attention, Band
from fa_inductor.reasons import Code
from fa_inductor.recognise import program


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.transpose(-1, -2) * 0.3
    s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).tril().logical_not(), float("-inf"))
    return torch.softmax(s, -1) @ v


def run(train: bool, dynamic: bool = False, **options: Any) -> Any:
    """The one block of the report, after a check that the result is eager's."""
    g = torch.Generator().manual_seed(0)
    xs = [torch.randn(2, 4, 10, 8, generator=g).requires_grad_(train) for _ in range(3)]
    if dynamic:
        for x in xs:
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(x, 2)
    with compiling(validate=True, **options):
        got = Compiled(attend).fn(*xs)
        want = attend(*xs)
        if train:
            got, want = ((o, *torch.autograd.grad(o.sin().sum(), xs)) for o in (got, want))
    torch.testing.assert_close(got, want)
    (block,) = fa_inductor.report(clear=True).blocks
    return block


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("train", [False, True])
def test_a_right_rewrite_passes(train: bool, dynamic: bool) -> None:
    block = run(train, dynamic)
    assert (block.outcome, block.note) == ("rewritten", "validated")


WRONG = {
    "scale": lambda r: r.with_(scale=r.scale * 1.01),
    "mask dropped": lambda r: r.with_(mask=()),
    "mask off by one": lambda r: r.with_(mask=(Band(None, 1),)),
    "window": lambda r: r.with_(mask=(*r.mask, Band(-6, None))),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("error", WRONG)
def test_a_wrong_record_is_taken_back(error: str, train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = program.Reader._finish

    def wrong(self: program.Reader) -> program.Program:
        found = finish(self)
        found.record = WRONG[error](found.record)
        assert isinstance(found.record, Attention)
        return found

    monkeypatch.setattr(program.Reader, "_finish", wrong)
    block = run(train)
    assert block.reason.code is Code.VALIDATION


def test_a_wrong_gradient_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of Q and K change places."""
    from fa_inductor import pipeline

    def swapped(*a: Any, **k: Any) -> Any:
        found = pipeline_find(*a, **k)
        found.grads["q"], found.grads["k"] = found.grads["k"], found.grads["q"]
        return found

    pipeline_find = pipeline.find_backward
    monkeypatch.setattr(pipeline, "find_backward", swapped)
    assert run(True).reason.code is Code.VALIDATION


def test_what_is_too_large_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "MAX_ELEMENTS", 100)
    block = run(False)
    assert block.outcome == "rewritten" and block.note.startswith("not validated")
