"""Fuzzes the whole pass: random attention-like programs, compiled and held against their own eager code.

``python tests/fuzz_graphs.py --seeds A:B [--json PATH]`` runs one program a seed and adds the counts to the file;
``--merge FILE... --json PATH`` puts the counts of several machines together.  Every output and gradient is compared.
No code is generated: the rewritten graph runs on the plain-torch backend, without translation validation, so that what
is tested is the recogniser and the prover alone.  One batch of `FULL` goes through ``torch.compile`` up to and
including Inductor's joint passes; `BATCH` programs then share one compiled function.  The graphs of the others are
recorded in a cheaper way (`fuzz_trace`).  Most programs run in float64, where a wrong rewrite cannot hide in rounding.
A program that differs is reduced and printed as source that runs.
"""
from __future__ import annotations

import argparse
import copy
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from forms_support import Compiled, compiling
from fuzz_cases import RAISES, Case, case_of, derive, fresh, load, raised
from fuzz_choices import Recorded, Seeded, batches
from fuzz_programs import DYNAMIC, Builder, Input, Program
from fuzz_results import Counts, add_to, show, summary
from fuzz_trace import run_traced

import fa_inductor
from fa_inductor.reasons import Code

__all__ = ["Case", "Input", "Program", "differs"]

BATCH = 10
FULL = 11
"""One batch of so many is compiled.  A number without a common divisor with that of `MODES`."""
MODES = [(False, False), (True, False)] * 11 + [(False, True), (True, True)]
"""(train, dynamic), by batch.  Symbolic sizes cost ten times the compile time, so they are few."""
DYNAMIC_BATCH = 3
"""Programs compiled together when sizes are symbolic: there the cost of a batch grows faster than the batch."""
CHUNK = 1000
HEADER = """import torch
from torch.nn import functional as F
def up(t):
    return torch.float64 if t.dtype == torch.float64 else torch.float32
"""


# -- a batch, compiled -------------------------------------------------------------------------------------------------

def combined(cases: Sequence[Case]) -> Callable[..., Any]:
    text = "\n".join(c.program.source(f"program_{i}") for i, c in enumerate(cases))
    text += "\ndef batch(inputs):\n    return [" + ", ".join(
        f"program_{i}(*inputs[{i}])" for i in range(len(cases))) + "]\n"
    return load(text)["batch"]


def run_compiled(cases: Sequence[Case], rewrite: bool = True) -> list[str]:
    """What is wrong with each case when all are compiled as one function; also fills in their report codes.

    Raises:
        Exception: whatever compiling raises.
    """
    wrong = [""] * len(cases)
    with compiling(validate=False, max_rewrites=None if rewrite else 0):
        compiled = Compiled(combined(cases)).fn
        for call in range(len(cases[0].inputs)):
            xs = [fresh(c.inputs[call]) for c in cases]
            if cases[0].dynamic and call == 0:
                for case, inputs in zip(cases, xs, strict=True):
                    for i, x in zip(case.program.inputs, inputs, strict=True):
                        for dim, letter in enumerate(i.letters):
                            if letter in DYNAMIC and x.shape[dim] > 1:
                                torch._dynamo.maybe_mark_dynamic(x, dim)
            with torch.set_grad_enabled(cases[0].train):
                outs = compiled(xs)
            grads = derive(outs, xs) if cases[0].train else [[]] * len(cases)
            for i, (case, inputs, out, grad) in enumerate(zip(cases, xs, outs, grads, strict=True)):
                found = [o.detach() for o in out] + [x.detach() for x in inputs], grad
                wrong[i] = wrong[i] or case.judge(found, call)
        for block in fa_inductor.report(clear=True).blocks:
            match = re.search(r"program_(\d+)$", block.source)
            if match and block.outcome != "not attention":
                cases[int(match[1])].codes.append("rewritten" if block.reason is None else block.reason.code.code)
                if rewrite and block.reason is not None and block.reason.code is Code.INTERNAL:
                    wrong[int(match[1])] = wrong[int(match[1])] or str(block.reason)
    return wrong


class Tally(Counts):
    """Counts of one run, and what was wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.torch_differs: list[str] = []
        """Programs for which torch.compile differs from eager without any rewrite."""
        self.failures: list[tuple[Case, str]] = []

    def run(self, cases: list[Case]) -> None:
        """Compile a batch; when it fails as a whole, each program alone."""
        if not cases:
            return
        try:
            wrong = run_compiled(cases)
        except Exception as e:
            if len(cases) > 1:
                for case in cases:
                    case.codes.clear()
                    self.run([case])
                return
            wrong = [raised(e)]
        for case, error in zip(cases, wrong, strict=True):
            self.compiled += 1
            self.count(case, error)

    def run_traced(self, case: Case) -> None:
        case.traced = True
        error = differs(case)
        if error and differs(copy.copy(case), rewrite=False).startswith(RAISES):
            case.traced = False  # the cheaper way does not know this program
            self.run([case])
        else:
            self.count(case, error)

    def count(self, case: Case, error: str) -> None:
        case.error = error
        self.add(case.train, case.dynamic, str(case.dtype), case.codes)
        if not error:
            return
        without = differs(copy.copy(case), rewrite=False)
        # that an output has lost its gradient is found by autograd, as an exception
        raises = error.startswith(RAISES) and "does not require grad" not in error
        if without and (without.startswith(RAISES) or not raises):
            self.torch_differs.append(f"{error}\n{case.program.source()}")
        else:
            self.failures.append((case, error))
            print(f"# wrong: {error}\n{case.program.source()}", file=sys.stderr, flush=True)


def differs(case: Case, rewrite: bool = True) -> str:
    """What is wrong with one case compiled, or traced, alone."""
    case.codes = []
    try:
        return run_traced(case, rewrite) if case.traced else run_compiled([case], rewrite)[0]
    except Exception as e:
        return raised(e)


def reduce(case: Case, limit: int = 150) -> Case:
    """A smaller case that still differs: choices are deleted, zeroed and halved one after another."""
    best, tries = case, 0
    improved = True
    while improved and tries < limit:
        improved = False
        for width, edit in ((8, "cut"), (3, "cut"), (1, "cut"), (1, "zero"), (1, "halve")):
            at = 0
            while at < len(best.choices) and tries < limit:
                old = best.choices[at:at + width]
                new = [] if edit == "cut" else [0] if edit == "zero" else [old[0] // 2]
                choices = best.choices[:at] + new + best.choices[at + width:]
                smaller = case_of(Builder(Recorded(choices), case.dynamic), case.train, case.dynamic, case.dtype)
                smaller.choices, smaller.traced = choices, case.traced
                if old != new and len(smaller.program.source()) <= len(best.program.source()) and (
                        smaller.program != best.program or edit == "cut") and smaller.valid():
                    tries += smaller.program != best.program
                    if smaller.program == best.program or (differs(smaller) and not differs(smaller, False)):
                        best, improved = smaller, improved or smaller.program != best.program
                        continue
                at += 1
    best.error = differs(best)
    return best


def runnable(case: Case) -> str:
    """The program with its inputs, ready to be pasted into a file beside this one."""
    p = case.program
    return (f"# {case.error}\n# train {case.train}, dynamic {case.dynamic}, {case.dtype}\n{HEADER}{p.source()}"
            f"# inputs: " + ", ".join(f"{i.name} {[p.sizes[c] for c in i.letters]} {i.kind}{' grad' * i.grad}"
                                      for i in p.inputs) + "\n"
            f"if __name__ == '__main__':\n    from fuzz_graphs import Case, Input, Program, differs\n"
            f"    case = Case({p!r}, {case.dtype}, {case.train}, {case.dynamic}, traced={case.traced})\n"
            f"    assert case.valid()\n    print(differs(case) or 'equal')\n")


def seeded_batches(first: int, last: int, tally: Counts) -> list[list[Case]]:
    """The programs of some seeds, `BATCH` to a list; a seed whose program does not run is drawn again."""
    found = []
    for seeds in batches(first, last, BATCH):
        train, dynamic = MODES[seeds.start // BATCH % len(MODES)]
        cases = []
        for seed in seeds:
            for attempt in range(20):
                case = case_of(Builder(Seeded(seed * 1000 + attempt), dynamic), train, dynamic)
                if case.valid():
                    cases.append(case)
                    break
                tally.invalid += 1
        size = DYNAMIC_BATCH if dynamic else BATCH
        found += [cases[i:i + size] for i in range(0, len(cases), size)]
    return found


def fuzz(first: int, last: int, seconds: float = float("inf")) -> Tally:
    """Run the seeds of ``range(first, last)``, or as many whole batches as fit into the time."""
    tally, start = Tally(), time.monotonic()
    for seeds in batches(first, last, BATCH):
        if time.monotonic() - start > seconds:
            break
        for cases in seeded_batches(seeds.start, seeds.stop, tally):
            if seeds.start // BATCH % FULL == 0:
                tally.run(cases)
            else:
                for case in cases:
                    tally.run_traced(case)
        tally.stop = seeds.stop
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:1000", help="A:B")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--json", type=Path, help="add the counts to this file, every CHUNK seeds")
    parser.add_argument("--merge", type=Path, nargs="+", help="run nothing; put these files together")
    parser.add_argument("--no-reduce", action="store_true", help="print failing programs as they were drawn")
    options = parser.parse_args(argv)
    if options.merge:
        print(show(add_to(options.json, *options.merge)))
        return 0
    first, last = map(int, options.seeds.split(":"))
    torch.set_num_threads(1)
    start, wrong, runs = time.monotonic(), 0, []
    for part in batches(first, last, CHUNK):
        begun, cpu = time.monotonic(), time.process_time()
        left = options.seconds - (begun - start)
        if left <= 0:
            break
        tally = fuzz(part.start, part.stop, left)
        wrong += len(tally.failures)
        runs.append(summary(tally, part.start, time.monotonic() - begun, time.process_time() - cpu))
        runs[-1] |= {"torch_itself_differs": len(tally.torch_differs), "wrong": len(tally.failures)}
        if options.json:
            add_to(options.json, runs[-1])
        for text in tally.torch_differs:
            print(f"\n# torch.compile itself differs: {text}")
        for case, error in tally.failures:
            case.error = error
            print("\n" + runnable(case if options.no_reduce else reduce(case)), flush=True)
    print(show(add_to(None, *runs)))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
