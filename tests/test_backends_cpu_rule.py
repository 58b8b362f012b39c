"""The CPU rule against the figures that it was made from."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bench_cpu_rule import MASKS, case

from fa_inductor.backends.cpu_rule import sdpa_pays
from fa_inductor.kernels.expr import SCORE, Expr
from fa_inductor.kernels.record import Attention, Band

ROWS = json.loads((Path(__file__).parent / "results" / "cpu_sdpa_rule.json").read_text())["rows"]


def says(row: dict[str, object]) -> bool | None:
    record, _ = case(row["mask"], getattr(torch, row["dtype"]), row["head_dim"])  # type: ignore[arg-type]
    return sdpa_pays(record, row["batch"], row["seq"], row["seq"], row["training"])  # type: ignore[arg-type]


def test_where_the_rule_says_yes_the_operator_was_faster() -> None:
    yes = [r for r in ROWS if says(r)]
    assert len(yes) >= 20 and not [r for r in yes if r["speedup"] < 1.0]


def test_where_the_rule_says_no_little_was_lost() -> None:
    """At most one case in ten could have been faster by half or more."""
    no = [r for r in ROWS if not says(r)]
    assert len(no) >= 40 and sum(r["speedup"] > 1.5 for r in no) <= len(no) // 10


def test_every_kind_of_row_was_measured() -> None:
    for training in (False, True):
        for dtype in ("float32", "bfloat16"):
            found = {r["mask"] for r in ROWS if r["training"] is training and r["dtype"] == dtype}
            assert found >= (set(MASKS) if not training else {"none", "causal"})


@pytest.mark.parametrize("record, training, expected", [
    (Attention(8, 8, 64, 64, "float32", 0.1), False, True), (Attention(8, 8, 64, 64, "float32", 0.1), True, False),
    (Attention(8, 8, 64, 64, "float32", 0.1, mask=(Band(-3, 0),)), False, False),
    (Attention(8, 8, 64, 64, "float32", 0.1, score=Expr("tanh", (SCORE,))), False, None),
])  # fmt: skip
def test_answers(record: Attention, training: bool, expected: bool | None) -> None:
    assert sdpa_pays(record, 1, 512, 512, training) is expected
    assert sdpa_pays(record, 1, 16, 16, training) is (None if expected is None else False)
