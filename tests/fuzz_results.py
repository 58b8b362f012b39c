"""Counts of fuzzing runs, and the file that collects them from several runs and machines."""
from __future__ import annotations

import datetime
import json
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import fa_inductor
from fa_inductor.fingerprint import source_hash

Run = dict[str, Any]
SUMS = ("programs", "compiled", "drawn_but_invalid", "torch_itself_differs", "wrong", "cpu_seconds")
SAME = ("torch", "python", "fa_inductor", "sources", "tests")
"""What two neighbouring runs must share to be one."""


class Counts:
    """Counts of one run."""

    def __init__(self) -> None:
        self.programs = 0
        self.compiled = 0
        """Programs that went through torch.compile."""
        self.invalid = 0
        """Drawn, but eager does not run them; not among ``programs``."""
        self.codes: Counter[str] = Counter()
        """Programs by outcome: ``rewritten`` (a block of it), the code of the first refusal, or ``no attention
        found``."""
        self.kinds: Counter[str] = Counter()
        self.stop = 0
        """One past the last seed."""

    def add(self, train: bool, dynamic: bool, dtype: str, codes: Sequence[str]) -> None:
        self.programs += 1
        self.kinds["training" if train else "inference"] += 1
        self.kinds["dynamic" if dynamic else "static"] += 1
        self.kinds[dtype.removeprefix("torch.")] += 1
        self.codes["rewritten" if "rewritten" in codes else codes[0] if codes else "no attention found"] += 1


def tests_hash() -> str:
    """Of the code that draws and judges the programs."""
    from hashlib import sha256

    digest = sha256()
    for file in sorted([*Path(__file__).parent.glob("fuzz_*.py"), Path(__file__).parent / "forms_support.py"]):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def summary(counts: Counts, first: int, seconds: float, cpu: float) -> Run:
    return {
        "date": datetime.date.today().isoformat(), "torch": torch.__version__, "python": platform.python_version(),
        "fa_inductor": fa_inductor.__version__, "sources": source_hash()[:16], "tests": tests_hash()[:16],
        "seeds": [first, max(counts.stop, first)], "seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1),
        "programs": counts.programs, "compiled": counts.compiled, "outcomes": dict(counts.codes),
        "kinds": dict(counts.kinds), "drawn_but_invalid": counts.invalid,
    }


def joined(runs: Sequence[Run]) -> list[Run]:
    """The runs by seed, neighbours of the same code as one.

    Raises:
        ValueError: a seed is in two of them, and its program would be counted twice.
    """
    found: list[Run] = []
    for run in sorted(runs, key=lambda r: tuple(r["seeds"])):
        if found and run["seeds"][0] < found[-1]["seeds"][1]:
            raise ValueError(f"seeds {found[-1]['seeds']} and {run['seeds']} overlap")
        if found and run["seeds"][0] == found[-1]["seeds"][1] and all(run[k] == found[-1][k] for k in SAME):
            last = found[-1]
            found[-1] = {**last, **_sum([last, run]), "seeds": [last["seeds"][0], run["seeds"][1]],
                         "date": max(last["date"], run["date"]), "seconds": round(last["seconds"] + run["seconds"], 1)}
        else:
            found.append(run)
    return found


def _sum(runs: Sequence[Run]) -> Run:
    total: Run = {k: round(sum(r[k] for r in runs), 1) for k in SUMS}
    for k in ("outcomes", "kinds"):
        total[k] = dict(sum((Counter(r[k]) for r in runs), Counter()).most_common())
    return total


def add_to(file: Path | None, *more: Run | Path) -> Run:
    """The content of ``file``, if it exists, with more runs, or those of other files; written back."""
    runs: list[Run] = []
    for part in ([file] if file is not None and file.exists() else []) + list(more):
        runs += json.loads(part.read_text())["runs"] if isinstance(part, Path) else [part]
    runs = joined(runs)
    total = _sum(runs)
    total |= {"rewritten_share": round(total["outcomes"].get("rewritten", 0) / max(total["programs"], 1), 3),
              "programs_per_cpu_second": round(total["programs"] / max(total["cpu_seconds"], 1e-9), 2)}
    result = {"total": total, "runs": runs}
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n")
    return result


def show(result: Run) -> str:
    return json.dumps(result, indent=1)
