"""One random program with values: its inputs, what eager code makes of them, and whether other results are right."""
from __future__ import annotations

import contextlib
import linecache
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from forms_support import check_alike, check_close, up
from fuzz_programs import Builder, Input, Program
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = [torch.float64] * 8 + [torch.float32, torch.bfloat16]
RAISES = "compiling or running raises "
SAMPLES = 8
Outcome = tuple[list[Tensor], list[Tensor | None]]
"""Outputs and then the inputs as the program left them; gradients of the inputs that want one."""


@lru_cache(maxsize=64)
def load(text: str) -> dict[str, Any]:
    """The functions of a source text, which tracebacks and reports can quote."""
    file = f"<fuzz {zlib.crc32(text.encode()):08x}>"
    if len(linecache.cache) > 2000:
        linecache.clearcache()
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


def tangents(out: Sequence[Tensor]) -> list[Tensor | None]:
    """One for each output that can have one, the same each time; None where nothing is differentiated."""
    g = torch.Generator().manual_seed(1)
    drawn = [torch.randn(o.shape, generator=g, dtype=torch.float64).to(o.dtype) if o.is_floating_point() else None
             for o in out]
    return [t if o.requires_grad else None for o, t in zip(out, drawn, strict=True)]


def derive(outs: Sequence[Sequence[Tensor]], inputs: Sequence[Sequence[Tensor]]) -> list[list[Tensor | None]]:
    """Gradients of all programs' inputs that want one, in one backward."""
    pairs = [(o, t) for out in outs for o, t in zip(out, tangents(out), strict=True) if t is not None]
    wanted = [[x for x in xs if x.requires_grad] for xs in inputs]
    flat = [x for xs in wanted for x in xs]
    if not pairs or not flat:
        return [[None] * len(xs) for xs in wanted]
    grads = iter(torch.autograd.grad([o for o, _ in pairs], flat, [t for _, t in pairs], allow_unused=True))
    return [[next(grads) for _ in xs] for xs in wanted]


def fresh(inputs: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Leaves of the same values, since a program may write to its inputs."""
    return [x.detach().clone().to(dtype if dtype and x.is_floating_point() else x.dtype).requires_grad_(x.requires_grad)
            for x in inputs]


ROUNDED = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor}
"""Operators whose rounding shows in a softmax: products, and sums with a fill beside which a score is small."""


class InfinitySeen(TorchDispatchMode):
    """Whether some operation gave +inf, or a factor made NaN of -inf."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        factor = func.overloadpacket in (torch.ops.aten.mul, torch.ops.aten.mul_)
        before = [bool(a.isnan().any()) for a in args if isinstance(a, Tensor)] if factor else []
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point():
            self.seen |= bool((out == float("inf")).any())
            self.seen |= factor and not any(before) and bool(out.isnan().any())
        return out


class Rounding(TorchDispatchMode):
    """Every matrix product and every sum is off by one rounding of a dtype, at random."""

    def __init__(self, eps: float, seed: int) -> None:
        super().__init__()
        self.eps, self.g = eps, torch.Generator().manual_seed(seed)

    def off(self, x: Tensor) -> Tensor:
        sign = torch.randint(0, 2, x.shape, generator=self.g, dtype=x.dtype) * 2 - 1
        return x * (1 + self.eps * sign)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return self.off(out) if func in ROUNDED and out.is_floating_point() else out


@dataclass
class Case:
    """A program with values."""

    program: Program
    dtype: torch.dtype
    train: bool
    dynamic: bool
    choices: list[int] = field(default_factory=list)
    traced: bool = False
    """Run without Dynamo and AOTAutograd."""
    inputs: list[list[Tensor]] = field(default_factory=list)
    """One list for each call."""
    eager: list[Outcome] = field(default_factory=list)
    """What the program's own code gives for each call; ``exact`` in float64."""
    exact: list[Outcome] = field(default_factory=list)
    codes: list[str] = field(default_factory=list)
    """Filled in by a run: what the report says of each block of the program."""
    error: str = ""

    def run_eager(self, inputs: Sequence[Tensor], dtype: torch.dtype | None = None, rounding: Rounding | None = None
                  ) -> Outcome:
        xs = fresh(inputs, dtype)
        if rounding is not None:
            xs = [rounding.off(x.detach()).requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in xs]
        # written out: the gradient of the CPU's own SDPA operator is wrong, by a factor of the number of keys, in a row
        # that is masked as a whole with the lowest float (2.13)
        with torch.set_grad_enabled(self.train), sdpa_kernel(SDPBackend.MATH), rounding or contextlib.nullcontext():
            outs = list(load(self.program.source())["program"](*xs))
            return [o.detach() for o in outs] + [x.detach() for x in xs], derive([outs], [xs])[0] if self.train else []

    def noise(self, call: int) -> Outcome:
        """How far off each result is when the inputs and all matrix products of the exact program are off by one
        rounding of the case's dtype: root mean square of `SAMPLES` runs.  A sum of terms that cancel, or a softmax of
        large scores, is as far off in any code."""
        exact, eps = self.exact[call], torch.finfo(self.dtype).eps
        total: Outcome = ([torch.zeros_like(x, dtype=torch.float64) for x in exact[0]],
                          [None if x is None else torch.zeros_like(x, dtype=torch.float64) for x in exact[1]])
        for seed in range(SAMPLES):
            found = self.run_eager(self.inputs[call], torch.float64, Rounding(eps, seed))
            for sums, some, all_ in zip(total, found, exact, strict=True):
                for t, f, x in zip(sums, some, all_, strict=True):
                    if t is not None and f is not None and x is not None and x.is_floating_point():
                        t += (f - x).double().square() / SAMPLES
        return [t.sqrt() for t in total[0]], [None if t is None else t.sqrt() for t in total[1]]

    def valid(self) -> bool:
        """Draws the inputs; whether the program runs on them at all, and computes something worth comparing: an
        additive mask that the program turns into +inf is not, since another mask may hide it (README, semantics)."""
        sizes = [self.program.sizes] + [other_sizes(self.program.sizes)] * self.dynamic
        g = torch.Generator().manual_seed(zlib.crc32(self.program.source().encode()))
        self.inputs = [[make(i, s, self.dtype, self.train, g) for i in self.program.inputs] for s in sizes]
        try:
            if any(i.kind == "additive" for i in self.program.inputs):
                with InfinitySeen() as infinity, torch.no_grad():
                    load(self.program.source())["program"](*fresh(self.inputs[0]))
                if infinity.seen:
                    return False
            self.eager = [self.run_eager(xs) for xs in self.inputs]
            self.exact = self.eager if self.dtype == torch.float64 else [
                self.run_eager(xs, torch.float64) for xs in self.inputs]
        except (RuntimeError, IndexError, ValueError, AttributeError, TypeError):
            return False
        return True

    def judge(self, ours: Outcome, call: int) -> str:
        """What is wrong with the results of the compiled program; empty when nothing is."""
        eager, exact = self.eager[call], self.exact[call]
        finite = [float(x[x.isfinite()].abs().max()) for x in exact[1] if x is not None and x.isfinite().any()]
        size = max(finite, default=0.0)
        # a tensor of the caller's may hide what a mask leaves of a row (README, semantics)
        lost = any(i.kind == "additive" for i in self.program.inputs) and any(bool(x.isnan().any()) for x in eager[0])
        noise: Outcome | None = None
        for part, kind in enumerate(("output", "gradient")):
            for i, (o, e, x) in enumerate(zip(ours[part], eager[part], exact[part], strict=True)):
                if kind == "gradient" and lost and o is not None and e is not None:
                    o = torch.where(e.isnan(), e, o)
                for retry in (False, True):
                    try:
                        self._close(f"{kind} {i}", o, e, x, size if kind == "gradient" else None,
                                    noise[part][i] if noise is not None else None)
                    except AssertionError as error:
                        if retry or self.dtype == torch.float64:
                            return str(error)
                        noise = noise or self.noise(call)
                    else:
                        break
        return ""

    def _close(self, name: str, ours: Tensor | None, eager: Tensor | None, exact: Tensor | None,
               size: float | None, noise: Tensor | None) -> None:
        if ours is None or eager is None or exact is None:
            # a gradient of zeros may stand for none
            rest = [t for t in (ours, eager) if t is not None]
            assert not any(bool(t.ne(0).any()) for t in rest), f"{name}: missing, or should be"
            return
        if self.dtype != torch.float64:
            return check_close(name, ours, eager, exact, size, noise)
        check_alike(name, ours, eager)
        ok = eager.isfinite()
        if ours.dtype.is_floating_point and ok.any():
            error = float((ours - eager)[ok].abs().max())
            top = max(float(eager[ok].abs().max()), size or 0.0, 1.0)
            # what float32 rounds off a score beside a fill of 1e4 is 5e-4
            assert error <= (1e-3 if self.program.loose else 1e-8) * top, f"{name}: error {error:.2e}, values to {top:.2e}"


def case_of(build: Builder, train: bool, dynamic: bool, dtype: torch.dtype | None = None) -> Case:
    return Case(build.build(), dtype or build.c.pick(DTYPES), train, dynamic, getattr(build.c, "taken", []))


def raised(e: Exception) -> str:
    """An exception as what is wrong with a case."""
    return f"{RAISES}{type(e).__name__}: {str(e)[:300]}"
