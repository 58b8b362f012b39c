"""The forward kernel's PTX under the emulator against float64: a kernel's arithmetic, in CI, without a GPU.

`api.attention` runs as it is; only the launch goes to the emulator (see emulator/forward.py).
"""
from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from emulator.all_programs import form_of, forms
from emulator.cases import CASES, CI, build
from emulator.compare import GPU
from emulator.forward import Launcher, boxes, compiled, shared_bytes
from emulator.judge import run, verdict

from fa_inductor.kernels import api
from fa_inductor.kernels.sm90.variant import Forward


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


@pytest.mark.parametrize("name", ["causal", "causal d128", "causal one item", "persistent padding", "mask of tiles",
                                  "split beyond", "split causal"])
def test_launches_share_a_counter(name: str) -> None:
    """Each leaves the counter of work items as it found it, so that the next one draws the same items."""
    c = CASES[name]
    launcher = Launcher(seed=c.seed)
    first, second = run(c, launcher), run(c, launcher)
    assert int(launcher.counter) == 0 and not verdict(c, second[2], *second[:2])[0]
    assert all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(first[:2], second[:2], strict=True))
    assert launcher.stats[-1].instructions["atom.global.inc.u32"] > 0


@pytest.mark.parametrize("name", ["causal", "one row", "sink and padding"])
def test_lse_may_be_left_out(name: str) -> None:
    """The emulator refuses a store outside of a buffer, and this one has no byte."""
    c = CASES[name]
    outs = [run(c, Launcher(seed=c.seed, lse=lse))[0] for lse in (True, False)]
    assert torch.equal(outs[0], outs[1])


def test_products_and_copies_are_counted() -> None:
    """The plain case: one block of 192 rows, two tiles of 128 keys."""
    c = CASES["plain"]
    launcher = Launcher()
    run(c, launcher)
    stats = launcher.stats[-1]
    rows, keys, d = 192, 256, 64
    ahead = rows * 128 * d  # the product that is issued for an item after the last
    assert stats.flops == 2 * (2 * rows * keys * d + ahead)
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


DUMP = """
import re, sys, json
from pathlib import Path
from fa_inductor.kernels.sm90.compile import compile_forward
from fa_inductor.kernels.sm90.variant import Forward
found = []
for dims in json.loads(sys.argv[1]):
    compile_forward(Forward("bfloat16", *dims, empty="nan"))
    (path,) = Path(sys.argv[2]).glob("*.mlir")
    text = path.read_text()
    path.unlink()
    head = next(line for line in text.splitlines() if "cuda.kernel @" in line)
    boxes = re.findall(r'non_exec_tiled_tma_(?:load|store)<[^"]*"\\((\\d+),(\\d+),1,1\\)', head)
    swizzles = re.findall(r'smem, align<1024>, S<(\\d),4,3>', text)
    size = re.findall(r'memref<i8, smem, align<1024>, "(\\d+):1">', text)
    found.append([[[int(x) for x in b] for b in boxes], sorted(set(swizzles)), int(size[0])])
print("FOUND" + json.dumps(found))
"""


def test_side_data_is_the_compilers(python: Any, tmp_path: Path) -> None:
    """Boxes and swizzles of the tensor maps and the shared memory of a launch, which the emulator is told, against the
    compiler's own record of them."""
    dims = [(64, 64), (96, 96), (192, 128)]
    done = python(DUMP, json.dumps(dims), str(tmp_path), CUTE_DSL_KEEP="ir", CUTE_DSL_DUMP_DIR=str(tmp_path), CUTE_DSL_ARCH="sm_90a")
    found = json.loads(done.stdout.split("FOUND")[1])
    for (d, dv), (box, swizzle, size) in zip(dims, found, strict=True):
        v = Forward("bfloat16", d, dv, empty="nan")
        assert [tuple(b) for b in box] == boxes(v)
        # S<3,4,3> exchanges 8 pieces of 16 bytes, S<2,4,3> 4 of them.
        assert {16 << int(s) for s in swizzle} == {2 * wide for wide, _ in boxes(v)}
        assert size == shared_bytes(v)


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
    """Opcodes with their modifiers, apart from the products' shapes: what the CI cases execute is what programs check that
    a GPU has run."""
    known = forms(json.loads(GPU.read_text())["programs"])
    for name in CI:
        p = build(CASES[name])
        program = compiled(api.variant_of(p.record, p.captures))
        for part in (program.main, *program.before.values()):
            missing = {form_of(s.kind) for s in part.steps} - known - {"trap"} if part else set()
            assert not missing, (name, sorted(missing))
