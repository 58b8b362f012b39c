"""Fuzzes the whole pass: random attention-like programs, compiled and held against their own eager code.

``python tests/fuzz_graphs.py --seeds A:B [--json PATH]`` runs one program a seed.  `BATCH` programs share one compiled
function, which pays Dynamo once; every output and gradient is compared on its own.  No code is generated: the graph
that Inductor's joint passes leave behind runs on the plain-torch backend, without translation validation, so that what
is tested is the recogniser and the prover alone.  Most programs run in float64, where a wrong rewrite cannot hide in
rounding.  A program that differs is reduced and printed as source that runs.
"""
from __future__ import annotations

import argparse
import datetime
import json
import linecache
import platform
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from forms_support import Compiled, check_close, compiling, up
from fuzz_choices import Recorded, Seeded, batches
from fuzz_programs import DYNAMIC, Builder, Input, Program
from torch import Tensor

import fa_inductor
from fa_inductor.fingerprint import source_hash
from fa_inductor.reasons import Code

BATCH = 10
MODES = [(False, False), (True, False)] * 11 + [(False, True), (True, True)]
"""(train, dynamic), by batch.  Symbolic sizes cost ten times the compile time, so they are few."""
DYNAMIC_BATCH = 3
"""Programs compiled together when sizes are symbolic: there the cost of a batch grows faster than the batch."""
DTYPES = [torch.float64] * 8 + [torch.float32, torch.bfloat16]
HEADER = """import torch
from torch.nn import functional as F
def up(t):
    return torch.float64 if t.dtype == torch.float64 else torch.float32
"""
Outcome = tuple[list[Tensor], list[Tensor | None]]


# -- one program in eager mode -----------------------------------------------------------------------------------------

def load(text: str) -> dict[str, Any]:
    """The functions of a source text, which tracebacks and reports can quote."""
    file = f"<fuzz {zlib.crc32(text.encode()):08x}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    space: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "up": up}
    exec(compile(text, file, "exec"), space)
    return space


def make(i: Input, sizes: dict[str, int], dtype: torch.dtype, train: bool, g: torch.Generator) -> Tensor:
    shape = [sizes[c] for c in i.letters]
    if i.kind == "float":
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_(i.grad and train)
    if i.kind == "int":
        return torch.randint(0, 2, shape, generator=g) * 2
    if i.kind == "length":
        return torch.randint(1, sizes["k"] + 1, shape, generator=g)
    mask = torch.rand(shape, generator=g) < 0.7
    if i.kind == "hole":
        mask.view(-1, mask.shape[-1])[0] = False
    else:
        mask[..., 0] = True
    return torch.zeros(shape, dtype=dtype).masked_fill(~mask, float("-inf")) if i.kind == "additive" else mask


def other_sizes(sizes: dict[str, int]) -> dict[str, int]:
    """For a second call of a dynamic graph: other batch and lengths, equal where they were."""
    b, q, k = sizes["b"] * 3, sizes["q"] + 6, sizes["k"] + 6
    return {**sizes, "b": b, "q": q, "k": k, "n": b * sizes["h"]}


def derive(outs: Sequence[Sequence[Tensor]], inputs: Sequence[Sequence[Tensor]]) -> list[list[Tensor | None]]:
    """Gradients of all programs' inputs that want one, in one backward, at tangents that are the same each time."""
    tops: list[Tensor] = []
    tangents: list[Tensor] = []
    for out in outs:
        g = torch.Generator().manual_seed(1)
        for o in out:
            if o.is_floating_point():
                tangent = torch.randn(o.shape, generator=g, dtype=torch.float64).to(o.dtype)
                if o.requires_grad:
                    tops.append(o)
                    tangents.append(tangent)
    wanted = [[x for x in xs if x.requires_grad] for xs in inputs]
    flat = [x for xs in wanted for x in xs]
    if not tops or not flat:
        return [[None] * len(xs) for xs in wanted]
    grads = iter(torch.autograd.grad(tops, flat, tangents, allow_unused=True))
    return [[next(grads) for _ in xs] for xs in wanted]


def fresh(inputs: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Leaves of the same values, since a program may write to its inputs."""
    return [x.detach().clone().to(dtype if dtype and x.is_floating_point() else x.dtype).requires_grad_(x.requires_grad)
            for x in inputs]


@dataclass
class Case:
    """A program with values."""

    program: Program
    dtype: torch.dtype
    train: bool
    dynamic: bool
    choices: list[int] = field(default_factory=list)
    inputs: list[list[Tensor]] = field(default_factory=list)
    """One list for each call."""
    codes: list[str] = field(default_factory=list)
    """Filled in by `run`: what the report says of each block of the program."""
    error: str = ""

    def run_eager(self, inputs: Sequence[Tensor], dtype: torch.dtype | None = None) -> Outcome:
        xs = fresh(inputs, dtype)
        with torch.set_grad_enabled(self.train):
            outs = list(load(self.program.source())["program"](*xs))
        return [o.detach() for o in outs] + [x.detach() for x in xs], derive([outs], [xs])[0] if self.train else []

    def valid(self) -> bool:
        """Draws the inputs; whether the program runs on them at all, and computes something worth comparing."""
        sizes = [self.program.sizes] + [other_sizes(self.program.sizes)] * self.dynamic
        g = torch.Generator().manual_seed(zlib.crc32(self.program.source().encode()))
        self.inputs = [[make(i, s, self.dtype, self.train, g) for i in self.program.inputs] for s in sizes]
        try:
            for xs in self.inputs:
                self.run_eager(xs)
                self.run_eager(xs, torch.float64)
        except (RuntimeError, IndexError, ValueError, AttributeError, TypeError):
            return False
        return True

    def judge(self, ours: Outcome, call: int) -> str:
        """What is wrong with the results of the compiled program; empty when nothing is."""
        eager, exact = self.run_eager(self.inputs[call]), self.run_eager(self.inputs[call], torch.float64)
        finite = [float(x[x.isfinite()].abs().max()) for x in exact[1] if x is not None and x.isfinite().any()]
        size = max(finite, default=0.0)
        try:
            for kind, *parts in (("output", ours[0], eager[0], exact[0]), ("gradient", ours[1], eager[1], exact[1])):
                for i, (o, e, x) in enumerate(zip(*parts, strict=True)):
                    self._close(f"{kind} {i}", o, e, x, size if kind == "gradient" else None)
        except AssertionError as e:
            return str(e)
        return ""

    def _close(self, name: str, ours: Tensor | None, eager: Tensor | None, exact: Tensor | None,
               size: float | None) -> None:
        if ours is None or eager is None or exact is None:
            # a gradient of zeros may stand for none
            rest = [t for t in (ours, eager) if t is not None]
            assert not any(bool(t.ne(0).any()) for t in rest), f"{name}: missing, or should be"
            return
        if self.dtype != torch.float64:
            return check_close(name, ours, eager, exact, size)
        assert ours.shape == eager.shape and ours.dtype == eager.dtype, f"{name}: {ours.shape} {ours.dtype}"
        if not ours.dtype.is_floating_point:
            assert torch.equal(ours, eager), name
            return
        assert torch.equal(ours.isnan(), eager.isnan()), f"{name}: NaN at other places than eager"
        assert torch.equal(ours.isinf(), eager.isinf()), f"{name}: Inf at other places than eager"
        ok = eager.isfinite()
        if ok.any():
            error = float((ours - eager)[ok].abs().max())
            top = max(float(eager[ok].abs().max()), size or 0.0, 1.0)
            assert error <= (1e-4 if self.program.loose else 1e-8) * top, f"{name}: error {error:.2e}, values to {top:.2e}"


def case_of(build: Builder, train: bool, dynamic: bool, dtype: torch.dtype | None = None) -> Case:
    return Case(build.build(), dtype or build.c.pick(DTYPES), train, dynamic, getattr(build.c, "taken", []))


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


@dataclass
class Tally:
    """Counts of one run."""

    programs: int = 0
    invalid: int = 0
    """Drawn, but eager does not run them; not among ``programs``."""
    codes: Counter[str] = field(default_factory=Counter)
    """Programs by outcome: ``rewritten`` (a block of it), the code of the first refusal, or ``no attention found``."""
    kinds: Counter[str] = field(default_factory=Counter)
    torch_differs: list[str] = field(default_factory=list)
    """Programs for which torch.compile differs from eager without any rewrite."""
    failures: list[tuple[Case, str]] = field(default_factory=list)

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
            wrong = [f"compiling raises {type(e).__name__}: {str(e)[:300]}"]
        for case, error in zip(cases, wrong, strict=True):
            case.error = error
            self.programs += 1
            self.kinds["training" if case.train else "inference"] += 1
            self.kinds["dynamic" if case.dynamic else "static"] += 1
            self.kinds[str(case.dtype).removeprefix("torch.")] += 1
            codes = case.codes
            self.codes["rewritten" if "rewritten" in codes else codes[0] if codes else "no attention found"] += 1
            if error:
                self._blame(case, error)

    def _blame(self, case: Case, error: str) -> None:
        if differs(case, rewrite=False):
            self.torch_differs.append(f"{error}\n{case.program.source()}")
        else:
            self.failures.append((case, error))
            print(f"# wrong: {error}\n{case.program.source()}", file=sys.stderr, flush=True)


def differs(case: Case, rewrite: bool = True) -> str:
    """What is wrong with one case compiled alone."""
    case.codes = []
    try:
        return run_compiled([case], rewrite)[0]
    except Exception as e:
        return f"compiling raises {type(e).__name__}: {str(e)[:300]}"


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
                smaller.choices = choices
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
            f"    case = Case({p!r}, {case.dtype}, {case.train}, {case.dynamic})\n"
            f"    assert case.valid()\n    print(differs(case) or 'equal')\n")


def seeded_batches(first: int, last: int, tally: Tally) -> list[list[Case]]:
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
            tally.run(cases)
    return tally


def summary(tally: Tally, seeds: str, seconds: float) -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(), "torch": torch.__version__, "python": platform.python_version(),
        "fa_inductor": fa_inductor.__version__, "sources": source_hash()[:16], "seeds": seeds,
        "cpu_seconds": round(time.process_time(), 1), "seconds": round(seconds, 1),
        "programs_per_second": round(tally.programs / seconds, 2), "programs": tally.programs,
        "rewritten_share": round(tally.codes["rewritten"] / max(tally.programs, 1), 3),
        "outcomes": dict(tally.codes.most_common()), "kinds": dict(sorted(tally.kinds.items())),
        "drawn_but_invalid": tally.invalid, "torch_itself_differs": len(tally.torch_differs),
        "wrong": len(tally.failures),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:500", help="A:B")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    parser.add_argument("--no-reduce", action="store_true", help="print failing programs as they were drawn")
    options = parser.parse_args(argv)
    first, last = map(int, options.seeds.split(":"))
    torch.set_num_threads(1)
    start = time.monotonic()
    tally = fuzz(first, last, options.seconds)
    result = summary(tally, f"{first}:{first + tally.programs}", time.monotonic() - start)
    print(json.dumps(result, indent=1))
    for text in tally.torch_differs:
        print(f"\n# torch.compile itself differs: {text}")
    for case, error in tally.failures:
        case.error = error
        print("\n" + runnable(case if options.no_reduce else reduce(case)), flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
