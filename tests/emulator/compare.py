"""All forward cases and programs under the emulator, against float64 and, where its file is there, against a GPU.

    python -m emulator.compare [--out FILE] [--gpu FILE] [--only TEXT]      (in tests/)

Exit status 1 when a case is wrong, or differs from the GPU by more than rounding.
"""
from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fa_inductor.kernels import sm90

from .all_programs import by_name
from .cases import CASES, Case, Problem
from .digest import compare, definition, of_program, raw_of
from .errors import Fault
from .forward import Launcher
from .judge import TOLERANCE, run, verdict
from .program import Program

GPU = Path(__file__).resolve().parent.parent / "results" / "emulator_h200.json"


def devices(gpu: dict[str, Any]) -> str:
    """What the runs of a file of check_emulator.py were made on."""
    return ", ".join(dict.fromkeys(r["device"] for r in gpu["runs"]))


def kernel_sources(folder: Path = Path(sm90.__file__).parent) -> str:
    """Digest of the Hopper kernel's source: which state of it a GPU ran."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def beside_gpu(
    c: Case, p: Problem, out: torch.Tensor, lse: torch.Tensor, entry: dict[str, Any], same: bool = True
) -> dict[str, Any]:
    """A case's outputs beside the GPU's: `ok` when they are equal to rounding.

    same: the GPU ran the kernel as it is now.  Else it may have rounded elsewhere, and the two are only held to what
    float64 allows each of them.

    The sums of a product and the exponentials of a GPU are not correctly rounded ones, so a few elements of P fall to the
    other side of a rounding to 16 bits, and then some of the result do: at most one in ten here, by far less than what
    float64 allows.
    """
    size = float(p.v.double().nan_to_num(0.0).abs().max())
    a, b = compare(entry["out"], out), compare(entry["lse"], lse)
    scores = float(p.q.double().abs().amax() * p.k.double().nan_to_num(0.0).abs().amax() * abs(p.record.scale) * p.q.shape[-1])
    allowed = TOLERANCE[c.dtype] * size * (1 / 8 if same else 2)
    near = a["max_difference"] <= allowed and b["max_difference"] <= 1e-5 + 2e-6 * scores
    return {"ok": near and (a["bit_equal"] >= 0.9 * a["sample"] > 0 or not same), "out": a, "lse": b}


def program_beside_gpu(p: Program, entry: dict[str, Any]) -> str:
    """What differs between the emulator and the GPU ("" when nothing does)."""
    if "error" in entry:
        return f"the GPU run failed: {entry['error']}"
    if entry["of"] != definition(p):
        return f"{p.name}: the GPU ran another program of this name; run tests/gpu/check_emulator.py --add again"
    got, buffer = p.emulated()
    if p.close is not None:
        from dataclasses import replace

        differences = replace(p, want=tuple(got)).differences(raw_of(p, entry))
        return differences[0] if differences else ""
    return "" if of_program(p, got, buffer)["sha256"] == entry["sha256"] else f"{p.name}: other results than the GPU's"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--gpu", type=Path, default=GPU)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    gpu = json.loads(args.gpu.read_text()) if args.gpu.exists() else None
    same = gpu is not None and gpu.get("kernel") == kernel_sources()
    found: dict[str, Any] = {}
    bad = 0
    different: list[str] = []
    """Cases whose results are right, but not the GPU's to rounding: it may have run another kernel than today's."""
    for name, c in CASES.items():
        if args.only not in name:
            continue
        launcher = Launcher(seed=c.seed)
        start = time.time()
        try:
            out, lse, p = run(c, launcher)
        except Fault as e:
            found[name], wrong = {"wrong": str(e)}, str(e)
        else:
            wrong, errors = verdict(c, p, out, lse)
            stats = launcher.stats[-1]
            found[name] = {"wrong": wrong, **errors, "instructions": stats.total, "bank_conflicts": stats.bank_conflicts,
                           "tma_load_bytes": stats.tma_load_bytes, "flops": stats.flops}
            if gpu and name in gpu["cases"] and "out" in gpu["cases"][name]:
                found[name]["gpu"] = beside_gpu(c, p, out, lse, gpu["cases"][name], same)
                if not found[name]["gpu"]["ok"]:
                    different.append(name)
        found[name]["seconds"] = round(time.time() - start, 2)
        bad += bool(wrong)
        far = "differs from the GPU" if name in different else ""
        print("BAD " if wrong or far else "ok  ", name, found[name]["seconds"], wrong or far, flush=True)
    report: dict[str, Any] = {
        "what": "forward cases under the emulator, against float64" + (f" and {devices(gpu)}" if gpu else ""),
        "date": datetime.date.today().isoformat(), "cases": len(found), "wrong": bad}
    if gpu:
        report["same_kernel"] = same
        beside = [r["gpu"] for r in found.values() if "gpu" in r]
        report["beside_gpu"], report["different_cases"] = len(beside), different
        report["bit_equal"] = sum(g["out"]["equal"] and g["lse"]["equal"] for g in beside)
        report["bit_equal_outputs"] = sum(g["out"]["equal"] for g in beside)
        report["bit_equal_elements"] = [sum(g["out"]["bit_equal"] for g in beside), sum(g["out"]["sample"] for g in beside)]
        programs = {n: program_beside_gpu(p, gpu["programs"][n]) for n, p in by_name().items()
                    if n in gpu["programs"] and args.only in n}
        report["programs"] = len(programs)
        report["different_programs"] = {n: w for n, w in programs.items() if w}
        bad += len(report["different_programs"]) + len(different)
    report["results"] = found
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{len(found)} cases, {bad} bad")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
