"""Run on a GPU what the emulator runs in CI, and write the outcome as JSON for CI to compare with.

    python tests/gpu/check_emulator.py --out tests/results/emulator_h200.json [--only TEXT] [--add] [--workers N]

--add runs what the file does not have yet, programs that have changed included, and adds it; what no longer exists
leaves the file.

Two parts: the instruction programs of tests/emulator (PTX, assembled by the driver) against their expected results,
and the forward cases of tests/emulator/cases.py against float64; of each the digest and, where outputs are large or the
ISA leaves a choice, a sample or the results.  Exit status 1 when a program's result is not the expected one or a case
is wrong.
"""
from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from check_forward import version  # noqa: E402
from emulator import driver  # noqa: E402
from emulator.all_programs import by_name  # noqa: E402
from emulator.cases import CASES, build  # noqa: E402
from emulator.compare import kernel_sources  # noqa: E402
from emulator.digest import definition, of_program, of_tensor  # noqa: E402
from emulator.judge import verdict  # noqa: E402

from fa_inductor.kernels import api  # noqa: E402

WHAT = "instruction programs and forward cases, for comparison with the emulator"


def programs(names: list[str], answer: Any) -> None:
    """Run programs in this process until one takes the context down."""
    every = by_name()
    for name in names:
        p = every[name]
        try:
            got, buffer = driver.run(p)
        except driver.DriverError as e:
            answer.send((name, {"error": str(e)[:500]}))
            if e.fatal:
                return
            continue
        found = of_program(p, got, buffer)
        wrong = p.differences(got, buffer)
        answer.send((name, found | ({"unexpected": wrong[:3]} if wrong else {})))


def cases(names: list[str], answer: Any) -> None:
    """The same for forward cases."""
    for name in names:
        c = CASES[name]
        p = build(c)
        try:
            q, k, v, *captures = (driver.moved(x, "cuda") for x in (p.q, p.k, p.v, *p.captures))
            out, lse = api.attention(q, k, v, p.record, captures, p.ints)
            torch.cuda.synchronize()
        except Exception as e:  # a case must not hide the others
            answer.send((name, {"error": f"{type(e).__name__}: {str(e)[:400]}"}))
            if isinstance(e, torch.AcceleratorError):
                return
            continue
        wrong, errors = verdict(c, p, out.cpu(), lse.cpu())
        answer.send((name, {"out": of_tensor(out), "lse": of_tensor(lse), "wrong": wrong, **errors}))


def finish(work: Any, names: list[str], patience: float = 120.0, start: float = 300.0) -> dict[str, Any]:
    """All names; in a new process after each one that lost its context or does not answer.

    patience: seconds for an answer; start: for the first of a process.
    """
    found: dict[str, Any] = {}
    spawn = get_context("spawn")
    while left := [n for n in names if n not in found]:
        mine, theirs = spawn.Pipe(duplex=False)
        process = spawn.Process(target=work, args=(left, theirs))
        process.start()
        theirs.close()
        ended, wait = False, start
        try:
            while mine.poll(wait):
                name, result = mine.recv()
                wait = patience
                found[name] = result
        except EOFError:
            ended = True
        if not ended:
            process.terminate()
        process.join()
        late = [n for n in names if n not in found]
        if late and not ended:
            found[late[0]] = {"error": f"no answer in {patience:.0f} s"}
        elif late and (process.exitcode or late == left):
            found[late[0]] = {"error": f"the process ended with {process.exitcode}"}
    return found


def shared_out(work: Any, names: list[str], workers: int) -> dict[str, Any]:
    """`finish` in several processes, each with a share of the names; kernels are compiled by whom they fall to."""
    with ThreadPoolExecutor(workers) as pool:
        shares = pool.map(finish, [work] * workers, [names[i::workers] for i in range(workers)])
        found = {n: r for share in shares for n, r in share.items()}
    return {n: found[n] for n in names}


def as_text(report: dict[str, Any]) -> str:
    """JSON with one line for each program and case."""
    parts = []
    for key, value in report.items():
        inner = ",\n".join(f"  {json.dumps(n)}: {json.dumps(r)}" for n, r in value.items()) if isinstance(value, dict) else ""
        parts.append(f" {json.dumps(key)}: " + (f"{{\n{inner}\n }}" if inner else json.dumps(value)))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def left_of(path: Path | None) -> dict[str, Any]:
    """What of an earlier file still holds: results of programs as they are now, and of cases that exist."""
    if path is None or not path.exists():
        return {"what": WHAT, "kernel": kernel_sources(), "runs": [], "programs": {}, "cases": {}}
    every, report = by_name(), json.loads(path.read_text())
    report["programs"] = {n: r for n, r in report["programs"].items() if n in every and r.get("of") == definition(every[n])}
    old, report["kernel"] = report.get("kernel"), kernel_sources()
    report["cases"] = {n: r for n, r in report["cases"].items()
                       if n in CASES and "error" not in r and old == report["kernel"]}
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="programs and cases whose name contains this")
    parser.add_argument("--add", action="store_true", help="only what the file does not have")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the cases")
    args = parser.parse_args()
    start = time.time()
    report = left_of(args.out if args.add else None)
    done_programs = finish(programs, [n for n in by_name() if args.only in n and n not in report["programs"]])
    print(f"{len(done_programs)} programs, {time.time() - start:.0f} s", flush=True)
    done_cases = shared_out(cases, [n for n in CASES if args.only in n and n not in report["cases"]], args.workers)
    bad = {n: r for n, r in done_programs.items() if "error" in r or "unexpected" in r}
    wrong = {n: r.get("error") or r["wrong"] for n, r in done_cases.items() if "error" in r or r["wrong"]}
    report["runs"].append({
        "date": datetime.date.today().isoformat(), "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "python": platform.python_version(), "nvidia-cutlass-dsl": version("nvidia-cutlass-dsl", "cutlass"),
        "seconds": round(time.time() - start, 1), "programs": len(done_programs), "unexpected_programs": len(bad),
        "cases": len(done_cases), "wrong_cases": len(wrong),
    })
    report["programs"] |= done_programs
    report["cases"] |= done_cases
    if args.out:
        args.out.write_text(as_text(report))
    for n, r in bad.items():
        print("PROGRAM", n, r.get("error") or r["unexpected"][0], flush=True)
    for n, w in wrong.items():
        print("CASE", n, w, flush=True)
    print(f"{len(done_programs)} programs, {len(bad)} unexpected; {len(done_cases)} cases, {len(wrong)} wrong")
    return 1 if bad or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
