"""Mutants of the forward kernel's PTX: a fast part is run here, the whole by `python -m emulator.mutants` (in tests/),
whose result is committed."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
from emulator.mutants import MUTANTS, hunt

RESULT = Path(__file__).parent / "results" / "emulator_mutants.json"


@pytest.mark.parametrize("name", [n for n, m in MUTANTS.items() if m.fast])
def test_mutant_is_caught(name: str) -> None:
    found = hunt(MUTANTS[name], range(3))
    assert found["caught"]
    _useful(found)


def _useful(found: dict) -> None:
    message = found["message"]
    if found["how"] == "wrong answer":
        assert "(b, h, q" in message
    elif found["how"] == "deadlock":
        assert "waits for" in message and "PTX line" in message and "forward.py:" in message
    else:
        assert " warp " in message and "PTX line" in message and "source " in message


def test_committed_result_covers_all_mutants() -> None:
    report = json.loads(RESULT.read_text())
    assert set(report["results"]) == set(MUTANTS) and report["caught"] == report["mutants"] == len(MUTANTS) >= 30
    for found in report["results"].values():
        assert found["caught"]
        _useful(found)
