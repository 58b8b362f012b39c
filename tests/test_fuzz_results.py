"""The file that collects fuzzing runs: sums, neighbours, and no seed twice."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fuzz_results import Counts, add_to, joined, summary


def run(first: int, stop: int, **more: Any) -> dict[str, Any]:
    counts = Counts()
    counts.stop = stop
    for i in range(first, stop):
        counts.add(i % 2 == 1, False, "torch.float64", ["FA106", "rewritten"] if i % 2 else [])
    return {**summary(counts, first, 1.5, 1.0), "torch_itself_differs": 0, "wrong": 0, **more}


def test_runs_of_two_machines_are_put_together(tmp_path: Path) -> None:
    a, b, out = (tmp_path / name for name in ("a.json", "b.json", "out.json"))
    add_to(a, run(0, 10))
    add_to(a, run(10, 20))
    add_to(b, run(20, 25, torch="another", wrong=2))
    total = add_to(out, a, b)
    assert total == add_to(out), "the file holds what was returned"
    assert [r["seeds"] for r in total["runs"]] == [[0, 20], [20, 25]]
    assert total["runs"][0]["programs"] == 20 and total["runs"][0]["seconds"] == 3.0
    assert total["total"]["programs"] == 25 and total["total"]["wrong"] == 2
    assert total["total"]["outcomes"] == {"no attention found": 13, "rewritten": 12}
    assert total["total"]["kinds"]["training"] == 12


def test_a_seed_counts_once() -> None:
    with pytest.raises(ValueError, match="overlap"):
        joined([run(0, 10), run(9, 12)])
    assert len(joined([run(0, 10), run(10, 12, sources="x")])) == 2
