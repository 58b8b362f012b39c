"""Random programs through the whole pass: no wrong rewrite, enough rewrites to mean something, and a planted error."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuzz_choices import Chooser
from fuzz_graphs import Case, case_of, differs, fuzz, load, reduce, runnable
from fuzz_programs import Builder
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fa_inductor.kernels.record import Band
from fa_inductor.recognise import program

SECONDS = 60
FIRST_SEED = 1_000_000
"""Away from the seeds of the committed result."""


class Drawn(Chooser):
    """Choices of hypothesis, which shrinks them."""

    def __init__(self, draw: Callable[[st.SearchStrategy[int]], int]) -> None:
        self.draw = draw

    def integer(self, n: int) -> int:
        return self.draw(st.integers(0, n - 1))


@st.composite
def cases(draw: Any) -> Case:
    choose = Drawn(draw)
    return case_of(Builder(choose), choose.chance(50), False)


def test_no_seed_is_rewritten_wrongly() -> None:
    """As many programs as fit into `SECONDS`; about 45 % of them are rewritten, and a sample this small has 30 %."""
    tally = fuzz(FIRST_SEED, FIRST_SEED + 10_000, SECONDS)
    assert not tally.failures, "\n".join(runnable(reduce(case)) for case, _ in tally.failures[:3])
    assert tally.programs >= 20
    assert tally.codes["rewritten"] >= 0.3 * tally.programs, tally.codes


@settings(max_examples=25, derandomize=True, deadline=None, database=None,
          suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large])
@given(cases())
def test_no_program_is_rewritten_wrongly(case: Case) -> None:
    """Hypothesis minimises a failure, and prints it as source."""
    assume(case.valid())
    error = differs(case)
    if error and not differs(case, rewrite=False):
        case.error = error
        raise AssertionError(runnable(case))


PLANTED = {
    "scale": lambda r: r.with_(scale=r.scale * 1.01),
    "masks dropped": lambda r: r.with_(mask=()),
    "window": lambda r: r.with_(mask=(*r.mask, Band(-2, None))),
}


@pytest.mark.parametrize("error", PLANTED)
def test_a_planted_error_is_found_and_reduced(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = program.Reader._finish

    def wrong(self: program.Reader) -> program.Program:
        found = finish(self)
        found.record = PLANTED[error](found.record)
        return found

    monkeypatch.setattr(program.Reader, "_finish", wrong)
    tally = fuzz(0, 20)
    assert tally.failures
    case, _ = tally.failures[0]
    small = reduce(case, limit=12)
    assert small.error and len(small.program.source()) <= len(case.program.source())
    text = runnable(small)
    load(text.split("if __name__")[0])
    assert small.program.source() in text


def test_an_untouched_graph_differs_from_nothing() -> None:
    """The judge itself: with rewriting off, the compiled programs equal eager."""
    tally = fuzz(0, 0)
    assert tally.programs == 0
    for case in (case_of(Builder(_Zeros()), train, False, torch.float64) for train in (False, True)):
        assert case.valid() and not differs(case, rewrite=False)


class _Zeros(Chooser):
    def integer(self, n: int) -> int:
        return 0
