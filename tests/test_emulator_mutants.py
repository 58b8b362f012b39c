"""Mutants of the forward kernel's PTX: a fast part is run here, the whole by `python -m emulator.mutants` (in tests/),
whose result is committed."""
from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from emulator.forward import Launcher
from emulator.judge import run, verdict
from emulator.mutants import MUTANTS, full, hunt
from emulator.mutants_order import order
from emulator.mutants_values import values
from emulator.mutate import Stale

RESULT = Path(__file__).parent / "results" / "emulator_mutants.json"


@pytest.mark.parametrize("name", [n for n, m in MUTANTS.items() if m.fast])
def test_mutant_is_caught(name: str) -> None:
    found = hunt(MUTANTS[name], range(3))
    assert found["caught"]
    _useful(found)


def test_an_edit_that_finds_nothing_says_so() -> None:
    m = replace(MUTANTS["negated product"], edit=lambda t: t.sub("no such instruction", "nothing"))
    with pytest.raises(Stale, match="'negated product' no longer applies"):
        hunt(m, [0])
    m = replace(m, edit=lambda t: t.sub(r"wgmma\.fence", "wgmma.fence", of=5))
    with pytest.raises(Stale, match="changes nothing"):
        hunt(m, [0])
    for of, edit in ((6, lambda t: t.drop(r"wgmma\.fence", of=6)), (4, lambda t: t.cut(t.wait("k_full", 1, of=4)))):
        with pytest.raises(Stale, match=f"there were {of} when the edit was written"):
            hunt(replace(m, edit=edit), [0])
    with pytest.raises(Stale, match="no mbarrier 'x_full'"):
        hunt(replace(m, edit=lambda t: t.cut(t.wait("x_full"))), [0])


def test_another_fault_does_not_count() -> None:
    found = hunt(replace(MUTANTS["no fence after mbarrier initialisation"], shows="^race: "), [0])
    assert not found["caught"] and found["instead"].startswith("proxy: ")


def test_a_right_kernel_is_not_caught() -> None:
    found = hunt(replace(MUTANTS["no fence after mbarrier initialisation"], shows=".", edit=lambda t: None), [0])
    assert not found["caught"] and "instead" not in found


@pytest.mark.parametrize("case", sorted({m.case.name for m in MUTANTS.values()}))
def test_the_kernel_itself_passes(case: str) -> None:
    """What catches a mutant is its fault, not the case."""
    c = next(m.case for m in MUTANTS.values() if m.case.name == case)
    for seed in range(2):
        out, lse, p = run(c, Launcher(seed=seed))
        assert not verdict(c, p, out, lse)[0]


def _useful(found: dict) -> None:
    message = found["message"]
    if found["how"] == "wrong answer":
        assert "(b, h, q" in message
    elif found["how"] in ("deadlock", "limit"):
        assert "waits for" in message and "PTX line" in message and "forward.py:" in message
    elif found["how"] != "counter":  # that is seen behind a launch
        assert " warp " in message and "PTX line" in message and "source " in message


def test_committed_result_covers_all_mutants() -> None:
    report = json.loads(RESULT.read_text())
    assert len(MUTANTS) == len([*order(), *values()])
    assert set(report["results"]) == set(MUTANTS) and report["caught"] == report["mutants"] == len(MUTANTS) >= 120
    for name, found in report["results"].items():
        assert found["caught"] and re.search(MUTANTS[name].shows, full(found["how"], found["message"]), re.DOTALL)
        _useful(found)
