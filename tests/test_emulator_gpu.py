"""The emulator beside a GPU: the outcome of tests/gpu/check_emulator.py, committed as JSON, against emulated runs."""
from __future__ import annotations

import base64
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulator import compare as compare_module
from emulator.all_programs import OF_CLUSTERS, by_name, form_of, forms
from emulator.cases import CASES, CI, build
from emulator.compare import GPU, beside_gpu, devices, kernel_sources, program_beside_gpu
from emulator.digest import SAMPLE, compare, of_program, of_tensor, raw_of
from emulator.driver import moved
from emulator.forward import Launcher, attention
from emulator.judge import run

KEPT: dict[str, Any] = json.loads(GPU.read_text())
SAME = KEPT["kernel"] == kernel_sources()
"""Whether the GPU ran the kernel as it is now."""


def test_enough_is_compared(record_property: Any) -> None:
    """How much the tests below compare."""
    every = by_name()
    waiting = sorted(set(every) - set(KEPT["programs"]))
    names = f" ({'; '.join(waiting[:3])}{' ...' if len(waiting) > 3 else ''})" if waiting else ""
    record_property("summary", f"emulator beside {devices(KEPT)}: {len(KEPT['programs'])} programs and {len(KEPT['cases'])} forward "
                    f"cases compared{'' if SAME else ', of an earlier state of the kernel'}; {len(waiting)} programs and "
                    f"{len(set(CASES) - set(KEPT['cases']))} cases not yet run there{names}")
    assert len(KEPT["programs"]) >= 150 and len(KEPT["cases"]) >= 60
    assert set(KEPT["programs"]) <= set(every) and set(KEPT["cases"]) <= set(CASES)


def test_the_gpu_gave_what_was_expected() -> None:
    assert not {n: r for n, r in KEPT["programs"].items() if "error" in r or "unexpected" in r}
    assert not {n: r for n, r in KEPT["cases"].items() if "error" in r or r["wrong"]}
    for r in KEPT["cases"].values():
        assert 0 <= r["max_error"] <= r["limit"] and r["lse_error"] >= 0


def test_programs_equal_the_gpu() -> None:
    every = by_name()
    different = {n: w for n, entry in KEPT["programs"].items() if (w := program_beside_gpu(every[n], entry))}
    assert not different


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Forms of the instructions in programs that a GPU has run, and those of clusters."""
    return forms(KEPT["programs"]) | OF_CLUSTERS


@pytest.mark.parametrize("name", KEPT["cases"])
def test_forward_equals_the_gpu(name: str, known: set[str]) -> None:
    c = CASES[name]
    launcher = Launcher(seed=c.seed + 1)
    out, lse, p = run(c, launcher)
    found = beside_gpu(c, p, out, lse, KEPT["cases"][name], SAME)
    assert found["ok"], found
    assert not {form_of(kind) for stats in launcher.stats for kind in stats.instructions} - known


# ---------------------------------------------------------------------- the comparison itself, without a GPU


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 60 and len(CI) >= 12


def test_a_kept_output_is_compared() -> None:
    c = CASES["sink"]
    p = build(c)
    x = torch.randn(1, 2, 96, 64).mul(0.1).bfloat16()
    lse = torch.randn(1, 2, 96)
    entry = {"out": of_tensor(x), "lse": of_tensor(lse)}
    same = beside_gpu(c, p, x, lse, entry)
    assert same["ok"] and same["out"]["equal"] and same["out"]["bit_equal"] == same["out"]["sample"] == SAMPLE // 2
    for step, ok in ((64, True), (2, False)):
        y = x.clone()
        y.view(torch.int16)[..., ::step] += 1  # a unit in the last place: a rounding in some elements, a fault in half of them
        found = beside_gpu(c, p, y, lse, entry)
        assert found["ok"] == ok and not found["out"]["equal"] and 0 < found["out"]["max_difference"] < 2e-3
    y = x.clone()
    y[..., ::64] += 0.02  # what float64 would let pass
    assert not beside_gpu(c, p, y, lse, entry)["ok"]
    assert not beside_gpu(c, p, x + 1, lse, entry)["ok"] and not beside_gpu(c, p, x + 1, lse, entry, False)["ok"]
    assert beside_gpu(c, p, x + 0.003, lse, entry, False)["ok"]  # another state of the kernel
    assert not beside_gpu(c, p, x, lse + 1e-2, entry)["ok"]
    assert not beside_gpu(c, p, x.masked_fill(x > 0.1, float("nan")), lse, entry)["ok"]
    assert compare(of_tensor(x[:, :1]), x)["max_difference"] == float("inf")
    hole = x.masked_fill(x > 0.1, float("nan"))
    assert compare(of_tensor(hole), hole)["equal"]


def test_a_kept_program_is_compared() -> None:
    every = by_name()
    for name in ("add.s32", "ex2.approx.ftz.f32", "cp.async.bulk to global", "max.NaN.f32"):
        p = every[name]
        got, buffer = p.emulated()
        entry = of_program(p, got, buffer)
        assert not program_beside_gpu(p, entry)
        if p.close is not None:
            assert len(raw_of(p, entry)[0]) == p.threads
            got = [tuple(x ^ 0x4000 for x in row) for row in got]
        elif p.want_buffer:
            buffer = (buffer[0] ^ 1, *buffer[1:])
        else:
            got = [(row[0] ^ 1, *row[1:]) for row in got]
        assert program_beside_gpu(p, of_program(p, got, buffer))
    p = every["add.s32"]
    assert "failed" in program_beside_gpu(p, {"error": "x"})
    entry = of_program(p, *p.emulated())
    for other in (replace(p, body="sub.s32 d, a, b;"), replace(p, ins=(p.ins[0], (p.ins[1][0], p.ins[1][1][::-1]))), replace(p, buffer=(1,))):
        assert "another program" in program_beside_gpu(other, entry)


def test_tensors_keep_their_strides_on_the_way() -> None:
    x = torch.randn(2, 10, 3, 16).transpose(1, 2)[:, 1:2, 2:]
    y = moved(x, "cpu")
    assert torch.equal(x, y) and x.stride() == y.stride() and x.data_ptr() != y.data_ptr()


class _Answers(dict):
    """A pipe that keeps what is sent."""

    def send(self, item: tuple[str, Any]) -> None:
        self[item[0]] = item[1]


def test_from_a_run_to_its_comparison(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """check_emulator.py and emulator.compare end to end, with the emulator in the GPU's place, and with a wrong GPU."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "gpu"))
    import check_emulator

    def finish(work: Any, names: list[str]) -> dict[str, Any]:
        answers = _Answers()
        work(names, answers)
        return answers

    monkeypatch.setattr(check_emulator, "finish", finish)
    monkeypatch.setattr(check_emulator.driver, "run", lambda p: p.emulated())
    monkeypatch.setattr(check_emulator.driver, "moved", lambda x, device: x)
    monkeypatch.setattr(check_emulator, "api", SimpleNamespace(attention=attention))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "no GPU")
    monkeypatch.setattr(check_emulator, "version", lambda *_: "none")
    kept, result = tmp_path / "gpu.json", tmp_path / "compare.json"
    monkeypatch.setattr("sys.argv", ["check_emulator.py", "--only", "sink", "--out", str(kept)])
    assert check_emulator.main() == 0
    monkeypatch.setattr("sys.argv", ["compare", "--only", "sink", "--gpu", str(kept), "--out", str(result)])
    assert compare_module.main() == 0
    report = json.loads(result.read_text())
    assert report["cases"] == report["bit_equal"] == 3 and not report["different_programs"]

    # --add runs what is new or has changed, and lets go of what is no more.
    report = json.loads(kept.read_text())
    spoilt = json.loads(kept.read_text())
    del spoilt["cases"]["sink"]
    spoilt["cases"]["gone"] = spoilt["cases"]["sink float32"]
    kept.write_text(json.dumps(spoilt))
    monkeypatch.setattr("sys.argv", ["check_emulator.py", "--only", "sink", "--add", "--out", str(kept)])
    assert check_emulator.main() == 0
    again = json.loads(kept.read_text())
    assert again["cases"] == report["cases"] and [r["cases"] for r in again["runs"]] == [3, 1]
    first = next(n for n in by_name() if "popc" in n)
    kept.write_text(json.dumps({**report, "programs": {"popc.b32": {"of": "0", "sha256": "0"}, "gone": {}}}))
    monkeypatch.setattr("sys.argv", ["check_emulator.py", "--only", first, "--add", "--out", str(kept)])
    assert check_emulator.main() == 0 and json.loads(kept.read_text())["programs"]["popc.b32"]["sha256"] != "0"
    kept.write_text(json.dumps(report))
    monkeypatch.setattr("sys.argv", ["compare", "--only", "sink", "--gpu", str(kept), "--out", str(result)])

    wrong = json.loads(kept.read_text())
    entry = wrong["cases"]["sink"]["lse"]
    entry["sample"] = base64.b64encode(bytes(len(base64.b64decode(entry["sample"])))).decode()
    kept.write_text(json.dumps(wrong))
    assert compare_module.main() == 1

    monkeypatch.setattr(check_emulator.driver, "run", lambda p: ([tuple(x ^ 1 for x in row) for row in p.emulated()[0]], ()))
    monkeypatch.setattr("sys.argv", ["check_emulator.py", "--only", "popc.b32", "--out", str(kept)])
    assert check_emulator.main() == 1
    assert "unexpected" in json.loads(kept.read_text())["programs"]["popc.b32"]


def _answers(names: list[str], answer: Any) -> None:
    """A worker that loses its context at "bad" and hangs at "slow"."""
    for n in names:
        if n == "bad":
            os._exit(3)
        if n == "slow":
            time.sleep(60)
        answer.send((n, {"ok": True}))


def test_a_lost_context_costs_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "gpu"))
    from check_emulator import finish

    found = finish(_answers, ["a", "slow", "b", "bad", "c"], patience=2.0)
    assert {n for n, r in found.items() if "ok" in r} == {"a", "b", "c"}
    assert "ended with 3" in found["bad"]["error"] and "no answer" in found["slow"]["error"]
