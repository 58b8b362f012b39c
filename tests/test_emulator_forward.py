"""The forward kernel's PTX under the emulator against float64: a kernel's arithmetic, in CI, without a GPU.

`api.attention` runs as it is; only the launch goes to the emulator (see emulator/forward.py).
"""
from __future__ import annotations

import time

import pytest
import torch
from emulator.cases import CASES, CI
from emulator.forward import Launcher, compiled
from emulator.judge import run, verdict

from fa_inductor.kernels import api


@pytest.mark.parametrize("name", CI)
def test_forward(name: str) -> None:
    c = CASES[name]
    launcher = Launcher(seed=c.seed)
    out, lse, p = run(c, launcher)
    wrong, errors = verdict(c, p, out, lse)
    assert not wrong, (wrong, errors)
    stats = launcher.stats[-1]
    # Every key tile that some row sees is loaded once for each block, and no other: what K and V moves are counted.
    assert stats.tma_load_bytes > 0 and stats.tma_store_bytes > 0 and stats.flops > 0
    assert stats.instructions["wgmma.fence.sync.aligned"] > 0


def test_products_and_copies_are_counted() -> None:
    """The plain case: one block of 192 rows, two tiles of 128 keys."""
    c = CASES["plain"]
    launcher = Launcher()
    run(c, launcher)
    stats = launcher.stats[-1]
    rows, keys, d = 192, 256, 64
    assert stats.flops == 2 * 2 * rows * keys * d
    assert stats.tma_load_bytes == 2 * (rows * d + 2 * keys * d)
    assert stats.tma_store_bytes == 2 * rows * d
    assert stats.instructions["stmatrix.sync.aligned.m8n8.x4.shared.b16"] == rows // 16 * d // 16
    # A tile in a 128-byte swizzle is written without a conflict.
    assert stats.bank_conflicts == 0
    assert stats.barrier_waits["mbarrier"] > 0


def test_a_case_is_fast() -> None:
    """128 queries x 256 keys x 64 in at most 60 s on one core; it takes under one."""
    c = CASES["plain"]
    assert (c.rows, c.keys, c.dims) == (128, 256, (64, 64))
    run(c, Launcher())
    start = time.process_time()
    run(c, Launcher())
    assert time.process_time() - start < 20


def test_the_same_seed_is_the_same_run() -> None:
    c = CASES["causal"]
    seen = []
    for seed in (3, 3, 4):
        launcher = Launcher(seed=seed)
        out, lse, _ = run(c, launcher)
        seen.append((launcher.stats[-1].summary(), launcher.stats[-1].switches, out, lse))
    assert seen[0][:2] == seen[1][:2] and seen[0][1] != seen[2][1]
    # Another interleaving changes who waits for whom, never the answer.
    for a in seen[1:]:
        assert torch.equal(a[2], seen[0][2]) and torch.equal(a[3], seen[0][3])


def test_every_form_of_the_kernels_has_a_program() -> None:
    """Opcodes with their modifiers: what the CI cases execute is what the programs check, apart from the products' shapes."""
    from test_emulator_programs import PROGRAMS

    forms: set[str] = set()
    for p in PROGRAMS.values():
        from emulator.launch import Program

        forms |= {_form(s.kind) for s in Program(p.text()).steps}
    for name in CI:
        from emulator.cases import build

        p = build(CASES[name])
        program = compiled(api.variant_of(p.record, p.captures))
        for part in (program.main, program.seen):
            missing = {_form(s.kind) for s in part.steps} - forms - {"trap"} if part else set()
            assert not missing, (name, sorted(missing))


def _form(kind: str) -> str:
    """Without cache hints, the uniformity of a branch, and spellings of one state space."""
    drop = ("uni", "L2::cache_hint", "tile")
    words = [{"shared::cta": "shared", "shared::cluster": "shared", "2d": "3d", "4d": "3d"}.get(w, w) for w in kind.split(".")]
    return ".".join(w for w in words if w not in drop)
