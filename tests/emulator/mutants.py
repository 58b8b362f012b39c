"""Mutants of the forward kernel's PTX, and the command that runs them all.

    python -m emulator.mutants [--out FILE] [--only TEXT] [--seeds N]      (in tests/)

An edit names lines of PTX by pattern, by the kernel's source line and by the mbarrier that they work on, and how many there
are; when the kernel changes, some need another one, and say so (`Stale`).  A mutant is caught when the emulator refuses it
or its answer is wrong, in one of the first seeds, in the way that its name makes one expect (`shows`).  Exit status 1 when
one is not.
"""
from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fa_inductor.kernels.sm90.variant import Forward

from .errors import Fault
from .forward import Compiled, Launcher, ptx_of
from .judge import run, verdict
from .mutants_order import order
from .mutants_values import values
from .mutate import Mutant, Stale, Text

MUTANTS: dict[str, Mutant] = {m.name: m for m in (*order(), *values())}


def tampered(m: Mutant) -> Any:
    """What the launcher runs instead of the compiled variant."""
    def make(variant: Forward) -> Compiled:
        t = Text(ptx_of(variant))
        try:
            m.edit(t)
        except (Stale, IndexError, ValueError, StopIteration) as e:
            raise Stale(f"mutant {m.name!r} no longer applies to the kernel's PTX; adapt its edit: {e}") from e
        return Compiled.from_text(t.text)

    return make


def full(how: str, message: str) -> str:
    """The text that a mutant's `shows` is about."""
    return message if message.startswith(f"{how}: ") else f"{how}: {message}"


def hunt(m: Mutant, seeds: Sequence[int]) -> dict[str, Any]:
    """Run a mutant with each seed until it is caught by what it must show; `instead` says what was seen otherwise."""
    start = time.time()
    found: dict[str, Any] = {"caught": False, "how": "", "message": "", "seed": None}
    instead = ""
    for seed in seeds:
        try:
            out, lse, p = run(m.case, Launcher(seed=seed, tamper=tampered(m), limit=m.limit))
        except Fault as e:
            how, message = e.kind, str(e)
        else:
            how, message = "wrong answer", verdict(m.case, p, out, lse)[0]
        if message:
            text = full(how, message)
            if re.search(m.shows, text, re.DOTALL):
                found = {"caught": True, "how": how, "message": message, "seed": seed}
                break
            instead = text
    if not found["caught"] and instead:
        found["instead"] = instead
    return {**found, "seconds": round(time.time() - start, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", type=int, default=4)
    args = parser.parse_args()
    found = {}
    for name, m in MUTANTS.items():
        if args.only in name:
            try:
                r = hunt(m, range(args.seeds))
            except Stale as e:
                r = {"caught": False, "how": "stale", "message": str(e), "seed": None, "seconds": 0.0, "instead": str(e)}
            found[name] = r
            print(f"{'ok  ' if r['caught'] else 'LIVE'} {name}: {r['how']} ({r['seconds']} s)", flush=True)
            if "instead" in r:
                print(f"     seen instead of {m.shows!r}: {r['instead']}", flush=True)
    caught = sum(r["caught"] for r in found.values())
    report = {"what": "mutants of the forward kernel's PTX under the emulator", "date": datetime.date.today().isoformat(),
              "mutants": len(found), "caught": caught, "seeds": args.seeds, "results": found}
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{caught} of {len(found)} caught")
    return 0 if caught == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
