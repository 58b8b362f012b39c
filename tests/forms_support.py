"""Compiles a small attention form with fa_inductor and judges both the report and the numbers.

A form is a function of tensors.  `check` compiles it up to and including Inductor's joint passes, without code
generation, runs the rewritten graph on the plain-torch backend and compares outputs and gradients with the form's own
eager code in float64, by the contract of the design: the largest error at most twice, the mean error at most 1.1
times that of eager code in its own dtype.
"""
from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx

import fa_inductor
from fa_inductor.reasons import Code

SIZES = {"b": 3, "h": 4, "n": 2, "s": 10, "q": 6, "k": 14, "d": 8, "e": 16, "g": 2, "w": 5, "c": 32, "1": 1}
"""Sizes by letter: batch, heads, key heads, length, query and key length, head dims, group, windows, channels."""
OTHER_SIZES = {**SIZES, "b": 2, "s": 13, "q": 9, "k": 17}
"""A second call of the same dynamic graph."""
DYNAMIC = frozenset("bsqk")
MAX_RATIO, MEAN_RATIO = 2.0, 1.1
MODES = {
    "infer": dict(train=False, dynamic=False), "infer-dynamic": dict(train=False, dynamic=True),
    "train": dict(train=True, dynamic=False), "train-dynamic": dict(train=True, dynamic=True),
}

Expect = int | Code | tuple[int | Code, ...] | None
"""What the report must say: so many blocks, all rewritten; one block refused for a reason; one entry for each block
(1 for a rewritten one); None: no attention block."""

# The first call of such a function in a process may run in low precision, 1e-8 off in float64, when several threads make
# it at once (pytorch/pytorch#188792).  One element is one thread.
for _dtype in (torch.float32, torch.float64):
    for _name in ("sin", "cos", "tan", "tanh", "exp", "expm1", "log", "log1p", "log2", "sqrt", "erf"):
        getattr(torch, _name)(torch.ones(1, dtype=_dtype))


def up(t: Tensor) -> torch.dtype:
    """The dtype in which models compute a softmax: float32, and float64 when the oracle runs."""
    return torch.float64 if t.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Arg:
    """One input of a form: a shape in letters of `SIZES`, and how its values are drawn."""

    shape: str
    kind: str = "float"
    """``float`` follows the dtype under test and gets a gradient, ``const`` is the same without one, and ``float32``
    a constant that stays in float32.  Of bool: ``bool``, ``keep`` (true in the first column), ``hole`` (nothing true
    in the first row) and ``tril``.  Of int64: ``length`` (at least 1) and ``int`` (0 or 2)."""

    def make(self, sizes: dict[str, int], dtype: torch.dtype, g: torch.Generator, outliers: bool) -> Tensor:
        shape = [sizes[c] for c in self.shape]
        if self.kind in ("float", "const", "float32"):
            t = torch.randn(shape, generator=g, dtype=torch.float64)
            if outliers:
                t = t + 10 * torch.randn(shape, generator=g, dtype=torch.float64) * (
                    torch.rand(shape, generator=g) < 0.01)
            t = t.to(torch.float32 if self.kind == "float32" else dtype)
            return t.requires_grad_() if self.kind == "float" else t
        if self.kind == "tril":
            return torch.ones(shape, dtype=torch.bool).tril()
        if self.kind == "length":
            return torch.randint(1, sizes["s"], shape, generator=g)
        if self.kind == "int":
            return torch.randint(0, 2, shape, generator=g) * 2
        mask = torch.rand(shape, generator=g) < 0.7
        if self.kind == "keep":
            mask[..., 0] = True
        if self.kind == "hole":
            mask.view(-1, mask.shape[-1])[0] = False
        return mask


@dataclass(frozen=True)
class Form:
    """A function under test, its inputs, and what is expected of it."""

    fn: Callable[..., Any]
    spec: list[Arg]
    sizes: dict[str, int] | None = None
    dtypes: tuple[str, ...] = ("float32",)
    expect: Expect = 1
    train: Expect | str = "same"
    """What is expected in training, where that is something else."""
    modes: tuple[str, ...] = ("infer", "train")
    outliers: bool = True


def args(text: str, *more: Arg) -> list[Arg]:
    """``"bhsd bhsd bhsd"`` as float inputs, then ``more``."""
    return [Arg(shape) for shape in text.split()] + list(more)


def draw(spec: Sequence[Arg], sizes: dict[str, int], dtype: torch.dtype, seed: str, outliers: bool) -> list[Tensor]:
    g = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    return [a.make(sizes, dtype, g, outliers) for a in spec]


class Compiled:
    """A form behind ``torch.compile`` without code generation; counts its graphs."""

    def __init__(self, fn: Callable[..., Any], **compile_args: Any) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.compiles = 0

        def backend(gm: torch.fx.GraphModule, example: list[Any]) -> Any:
            self.compiles += 1
            return compile_fx(gm, example, inner_compile=self._inner)

        self.fn = torch.compile(fn, backend=backend, **compile_args)

    def _inner(self, gm: torch.fx.GraphModule, example: list[Any], **_: Any) -> Any:
        self.graphs.append(gm)
        return make_boxed_func(gm.forward)

    def targets(self) -> list[str]:
        """Names of all operators in the compiled graphs, forward and backward."""
        return [str(n.target) for gm in self.graphs for n in gm.graph.nodes if n.op == "call_function"]


@contextlib.contextmanager
def compiling(**options: Any) -> Iterator[None]:
    """Our pass on, torch's compile caches off, and an empty report to begin with."""
    torch._dynamo.reset()
    fa_inductor.report(clear=True)
    with (fa_inductor.enabled(), fa_inductor.options.patch(**{"backend": "reference", "validate": True, **options}),
          torch._inductor.config.patch(fx_graph_cache=False),
          torch._functorch.config.patch(enable_autograd_cache=False)):
        yield


def results(fn: Callable[..., Any], inputs: Sequence[Tensor], train: bool) -> tuple[list[Tensor], list[Tensor | None]]:
    """Outputs, and in training the gradients of all inputs that want one, at a fixed tangent."""
    with torch.set_grad_enabled(train):
        out = fn(*inputs)
    outs = [o for o in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(o, Tensor)]
    if not train:
        return [o.detach() for o in outs], []
    wanted = [x for x in inputs if x.requires_grad]
    tops = [o for o in outs if o.requires_grad]
    g = torch.Generator().manual_seed(1)
    tangents = [torch.randn(o.shape, generator=g, dtype=torch.float64).to(o.dtype) for o in tops]
    return [o.detach() for o in outs], list(torch.autograd.grad(tops, wanted, tangents, allow_unused=True))


def check_form(form: Form, mode: str, dtype: str, refused: Code | None = None) -> Compiled:
    """`check` with what is expected of ``form`` in a mode of `MODES`, or with the reason of a refusal."""
    expect = form.train if mode.startswith("train") and form.train != "same" else form.expect
    expect = refused or expect
    return check(form.fn, form.spec, **MODES[mode], expect=expect,  # type: ignore[arg-type]
                 dtype=getattr(torch, dtype), sizes=form.sizes, outliers=form.outliers)


def check_report(expect: Expect) -> None:
    report = fa_inductor.report(clear=True)
    got = [1 if b.outcome == "rewritten" else b.reason.code for b in report.blocks if b.outcome != "not attention"]
    want = [] if expect is None else [1] * expect if isinstance(expect, int) else (
        [expect] if isinstance(expect, Code) else list(expect))
    assert got == want, f"expected {want}\n{report}"


def check_alike(name: str, ours: Tensor, eager: Tensor) -> None:
    """Shape and dtype, integers, and where floating-point numbers are not finite: all equal."""
    assert ours.shape == eager.shape and ours.dtype == eager.dtype, f"{name}: {ours.shape} {ours.dtype}"
    if ours.dtype.is_floating_point:
        assert torch.equal(ours.isnan(), eager.isnan()), f"{name}: NaN at other places than eager"
        assert torch.equal(ours.isinf(), eager.isinf()), f"{name}: Inf at other places than eager"
    else:
        assert torch.equal(ours, eager), name


def check_close(name: str, ours: Tensor, eager: Tensor, exact: Tensor, gradients: float | None = None,
                noise: Tensor | None = None) -> None:
    """The numerics contract for one tensor.

    The absolute floor is four roundings of the largest value.  A gradient is a sum of terms that cancel (with outliers
    far larger than itself), in which eager's error and ours differ by luck: over 30 seeds of float32 data by up to 25
    roundings, with a median ratio of 1.00.  Its floor therefore has 32 roundings of the dtype that sums up.

    Args:
        gradients: the largest value of any gradient, when this is one.
        noise: how far off the result is when what it is computed from is off by one rounding, where that is known; the
            floor is then at least four times as much.
    """
    check_alike(name, ours, eager)
    if not ours.dtype.is_floating_point:
        return
    ok = eager.isfinite() & exact.isfinite()
    if not ok.any():
        return
    o, e, x = (t.double()[ok] for t in (ours, eager, exact))
    eps = torch.finfo(ours.dtype).eps
    size = float(x.abs().max()) if gradients is None else gradients
    floor = 4 * eps + (0 if gradients is None else 32 * torch.finfo(up(ours)).eps)
    mine, theirs = (o - x).abs(), (e - x).abs()
    rest = torch.zeros(1, dtype=torch.float64) if noise is None else 4 * noise[ok]
    assert mine.max() <= MAX_RATIO * theirs.max() + max(floor * size, float(rest.max())), (
        f"{name}: max error {mine.max():.2e}, eager {theirs.max():.2e}, values up to {size:.2e}")
    # the mean of a few errors is as much a matter of luck as the largest one
    assert mine.mean() <= MEAN_RATIO * theirs.mean() + max(floor * size / min(16, ok.sum()), float(rest.mean())), (
        f"{name}: mean error {mine.mean():.2e}, eager {theirs.mean():.2e}")


def compare(fn: Callable[..., Any], compiled: Callable[..., Any], inputs: Sequence[Tensor], train: bool) -> None:
    """Outputs and gradients of ``compiled`` against ``fn`` run eagerly, in its own dtype and in float64."""
    exact_in = [x.detach().double().requires_grad_(x.requires_grad) if x.dtype in (
        torch.float32, torch.bfloat16, torch.float16) else x for x in inputs]
    outs, grads = results(compiled, inputs, train)
    eager, eager_grads = results(fn, inputs, train)
    exact, exact_grads = results(fn, exact_in, train)
    assert len(outs) == len(eager)
    for i, parts in enumerate(zip(outs, eager, exact, strict=True)):
        check_close(f"output {i}", *parts)
    finite = [float(x[x.isfinite()].abs().max()) for x in exact_grads if x is not None and x.isfinite().any()]
    size = max(finite, default=0.0)
    for i, (o, e, x) in enumerate(zip(grads, eager_grads, exact_grads, strict=True)):
        assert (o is None) == (e is None), f"gradient {i} is missing or should be"
        if o is not None:
            check_close(f"gradient {i}", o, e, x, size)


def check(fn: Callable[..., Any], spec: Sequence[Arg], *, train: bool, dynamic: bool, expect: Expect,
          dtype: torch.dtype = torch.float32, sizes: dict[str, int] | None = None, outliers: bool = True,
          **options: Any) -> Compiled:
    """Compile ``fn`` and hold its report and its numbers, also on data with outliers, against what is expected.

    Args:
        spec: the inputs.
        train: also differentiate.
        dynamic: batch and lengths are symbolic, and the graph is called with a second set of sizes.
        sizes: replaces entries of `SIZES`.
        options: options of fa_inductor for the compile.
    """
    sizes = {**SIZES, **(sizes or {})}
    inputs = draw(spec, sizes, dtype, "normal", False)
    if dynamic:
        for a, t in zip(spec, inputs, strict=True):
            for i, c in enumerate(a.shape):
                if c in DYNAMIC and t.shape[i] > 1:
                    torch._dynamo.mark_dynamic(t, i)
    compiled = Compiled(fn)
    with compiling(**options):
        compare(fn, compiled.fn, inputs, train)
        check_report(expect)
        if outliers:
            compare(fn, compiled.fn, draw(spec, sizes, dtype, "outliers", True), train)
        if dynamic:
            other = {**sizes, **{c: OTHER_SIZES[c] for c in DYNAMIC if sizes[c] == SIZES[c]}}
            compare(fn, compiled.fn, draw(spec, other, dtype, "other", False), train)
        assert compiled.compiles == 1, f"{compiled.compiles} compiles"
    return compiled
