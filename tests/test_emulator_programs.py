"""Single-instruction PTX programs under the emulator: expected results from exact arithmetic and by-hand layouts."""
from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from emulator.all_programs import by_name
from emulator.program import HEADER

PROGRAMS = by_name()


def test_names_are_unique() -> None:
    assert len(PROGRAMS) >= 150
    assert len({p.entry for p in PROGRAMS.values()}) == len(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_result(name: str) -> None:
    p = PROGRAMS[name]
    assert not p.differences(*p.emulated(seed=len(name)))


@pytest.mark.parametrize("name", ["add.s32", "fma.rn.f32", "vote.sync.ballot some", "ld.global.b32 into b32"])
def test_a_wrong_result_is_seen(name: str) -> None:
    p = PROGRAMS[name]
    got, buffer = p.emulated()
    spoilt = [(row[0] ^ 0x100, *row[1:]) for row in got]
    assert "thread 0" in p.differences(spoilt, buffer)[0]


def test_a_wrong_buffer_is_seen() -> None:
    p = PROGRAMS["cp.async.bulk to global"]
    got, buffer = p.emulated()
    assert not p.differences(got, buffer) and "bytes [3]" in p.differences(got, (*buffer[:3], buffer[3] ^ 1, *buffer[4:]))[0]


def test_bounds_of_approximations_are_bounds() -> None:
    p = PROGRAMS["ex2.approx.ftz.f32"]
    got, _ = p.emulated()
    one = p.want[0].index(0x40000000) if 0x40000000 in p.want[0] else next(i for i, x in enumerate(p.want[0]) if 0x3F800000 < x < 0x7F000000)
    for off, ok in ((1, True), (64, False)):
        spoilt = [tuple(x + off if i == one else x for i, x in enumerate(got[0]))]
        assert bool(p.differences(spoilt)) != ok


def ptxas() -> str | None:
    """An assembler, of a toolkit or of the triton wheel."""
    spec = find_spec("triton")
    inside = Path(spec.origin).parent / "backends/nvidia/bin/ptxas" if spec and spec.origin else None
    return shutil.which("ptxas") or (str(inside) if inside and inside.exists() else None)


@pytest.mark.skipif(ptxas() is None, reason="no ptxas here, neither of a toolkit nor of triton's wheel")
def test_programs_assemble(tmp_path: Path) -> None:
    """What the programs say is PTX to NVIDIA's assembler too, so they can run on a GPU as they are."""
    tool = ptxas()
    assert tool is not None
    source = tmp_path / "programs.ptx"
    source.write_text(HEADER + "\n".join(p.text(header=False) for p in PROGRAMS.values()))
    done = subprocess.run([tool, "-arch=sm_90a", str(source), "-o", str(tmp_path / "programs.cubin")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    source.write_text(replace(PROGRAMS["add.s32"], body="add.s33 d, a, b;").text())
    assert subprocess.run([tool, "-arch=sm_90a", str(source), "-o", str(tmp_path / "x.cubin")], capture_output=True).returncode
