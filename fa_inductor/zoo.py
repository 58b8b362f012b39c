"""``zoo``: tiny random models of transformers, compiled with this library and judged against float64.

Each model is compiled with Inductor's passes but without code generation, so a line takes seconds and needs no
compiler: what is shown is what the recogniser makes of the model, and whether the rewritten graph computes the same.
The same compiled graph runs on two backends, ``reference`` (plain torch) and ``sdpa`` (PyTorch's fused operators,
where the record allows).
"""
from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .zoo_models import BATCH, CORE, LENGTH, MODELS, VOCABULARY, Inhabitant

ATTENTION = ("eager", "sdpa")
MODES = ("inference", "training")
SHAPES = ("static", "dynamic")
BACKENDS = ("reference", "sdpa")
MAX_RATIO, MEAN_RATIO = 2.0, 1.1
FLOOR, GRADIENT_FLOOR = 4, 16
"""The numerics contract: the largest error at most twice and the mean error at most 1.1 times that of the model's own
eager code in its own dtype, plus so many roundings of the largest value.  Gradients get more: many parameters' sum up
over all positions, and Inductor's order alone (without this library) makes 0.99 of the contract with a floor of 4."""
DRAWS = 4
"""Inputs whose errors are taken together: that of one small vector is chance."""
GAIN = 10.0
"""Factor on the weights of a fresh model.  As they come, all scores are nearly equal, and a wrong gradient of Q or K
would drown in the roundings of the others."""


@dataclass
class Row:
    """One line of the table."""

    model: str
    attention: str
    mode: str
    shapes: str
    found: int
    """Attention blocks of the graph."""
    rewritten: int
    records: list[str]
    """The different blocks in words."""
    reasons: list[str]
    """Why blocks were left alone."""
    draws: int
    """Inputs that the errors are taken over."""
    sdpa: int
    """Rewritten blocks that PyTorch's fused operators can run."""
    excess: dict[str, float] = field(default_factory=dict)
    """By backend: the worst error of outputs and gradients as a part of what the contract allows; at most 1."""

    @property
    def ok(self) -> bool:
        return self.found == self.rewritten > 0 and all(x <= 1 for x in self.excess.values())


def main(argv: list[str]) -> int:
    """Print the table.

    Returns:
        0 when every attention block was rewritten and every result keeps the numerics contract, else 1.
    """
    parser = argparse.ArgumentParser(prog="python -m fa_inductor zoo", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(CORE), metavar="MODEL",
                        help=f"of {' '.join(MODELS)}; default: {' '.join(CORE)}")
    parser.add_argument("--all", action="store_true", help="every model of the zoo")
    parser.add_argument("--attention", nargs="+", choices=ATTENTION, default=list(ATTENTION),
                        help="attn_implementation of the model (both)")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, metavar="SHAPES",
                        help="static, or dynamic: torch.compile(dynamic=True), run at two batch sizes and lengths "
                             "(static; with --all both)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--json", metavar="PATH", type=Path, help="also write the table as JSON")
    parsed = parser.parse_args(argv)
    rows: list[Row] = []
    print(_line("model", "attention", "mode", "shapes", "blocks", "rewritten", "reference", "sdpa", "record"), flush=True)
    shapes = parsed.shapes or (SHAPES if parsed.all else SHAPES[:1])
    for row in survey(list(MODELS) if parsed.all else parsed.models, parsed.attention, parsed.dtype, shapes):
        rows.append(row)
        for line in _lines(row):
            print(line, flush=True)
        if parsed.json:
            parsed.json.write_text(json.dumps(_result(rows, parsed.dtype), indent=2) + "\n")
    found, rewritten = sum(r.found for r in rows), sum(r.rewritten for r in rows)
    print(f"{rewritten} of {found} attention blocks rewritten, {parsed.dtype}; error as a part of what is allowed "
          f"against float64: {max(x for r in rows for x in r.excess.values()):.2f}")
    return 0 if all(r.ok for r in rows) else 1


def _result(rows: list[Row], dtype: str) -> dict[str, Any]:
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__, "dtype": dtype,
            "date": datetime.date.today().isoformat(), "rows": [asdict(r) for r in rows]}


def _line(*cells: Any) -> str:
    widths = (19, 9, 9, 7, 6, 9, 9, 12)
    return "  ".join([*(f"{c!s:<{w}}" for c, w in zip(cells, widths, strict=False)), str(cells[-1])]).rstrip()


def _lines(row: Row) -> Iterator[str]:
    runs = {b: f"{x:.2f}" if x <= 1 else f"{x:.2f} !" for b, x in row.excess.items()}
    yield _line(row.model, row.attention, row.mode, row.shapes, row.found, row.rewritten, runs["reference"],
                f"{runs['sdpa']} ({row.sdpa}/{row.rewritten})", "; ".join(row.records))
    for reason in row.reasons:
        yield f"  {reason}"


def survey(models: list[str], attention: list[str] | None = None, dtype: str = "float32",
           shapes: Iterable[str] = SHAPES[:1]) -> Iterator[Row]:
    """One `Row` for each model, attention implementation, mode and kind of shapes, as it is computed.

    Args:
        models: names in `MODELS`.
        attention: of `ATTENTION`; both by default.
        dtype: of the weights: ``float32``, ``bfloat16`` or ``float16``.
        shapes: of `SHAPES`.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in models:
        for implementation in attention or ATTENTION:
            for mode, kind in itertools.product(MODES, shapes):
                if implementation in MODELS[name].attention:
                    yield examine(name, implementation, mode, dtype, kind)


def examine(name: str, attention: str, mode: str, dtype: str = "float32", shapes: str = "static") -> Row:
    """Compile one model, run it on each backend and compare with its own eager code."""
    import torch

    import fa_inductor

    model = _build(name, attention, getattr(torch, dtype)).train(mode == "training")
    sizes = [(BATCH, LENGTH)] if shapes == "static" else [(BATCH, LENGTH), (BATCH + 1, LENGTH - 5)]
    cases = []
    for (batch, length), draw in itertools.product(sizes, range(DRAWS // len(sizes))):
        inputs = _inputs(MODELS[name], getattr(torch, dtype), batch, length, draw)
        with _softmax_in_float64():
            exact = _results(model=copy.deepcopy(model).double(), inputs=_as_double(inputs), call=_call, mode=mode)
        cases.append((inputs, _results(model, inputs, _call, mode), exact))
    records: list[str] = []
    compiled = torch.compile(_call, backend=_without_codegen(records), dynamic=shapes == "dynamic")
    excess: dict[str, float] = {}
    torch._dynamo.reset()
    fa_inductor.report(clear=True)
    with (fa_inductor.enabled(), fa_inductor.options.patch(backend="reference"),
          torch._inductor.config.patch(fx_graph_cache=False),
          torch._functorch.config.patch(enable_autograd_cache=False)):
        for backend in BACKENDS:  # the operators choose their backend when they run
            with fa_inductor.options.patch(backend=backend):
                excess[backend] = _excess([(_results(model, inputs, compiled, mode), eager, exact)
                                           for inputs, eager, exact in cases])
            if backend == "reference":
                report = fa_inductor.report(clear=True)
    return Row(name, attention, mode, shapes, report.found, report.rewritten,
               list(dict.fromkeys(b.words for b in report.blocks if b.words)),
               list(dict.fromkeys(f"{b.source}: {b.reason}" for b in report.blocks if b.reason is not None)),
               len(cases), _fused(records), excess)


def _build(name: str, attention: str, dtype: Any) -> Any:
    import torch
    import transformers

    spec = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, spec.config)(**spec.options)
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"  # the grouped product of experts has no float64
    model = transformers.AutoModel.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(GAIN)
    return model.to(dtype)


def _inputs(spec: Inhabitant, dtype: Any, batch: int = BATCH, length: int = LENGTH, draw: int = 0) -> dict[str, Any]:
    import torch

    g = torch.Generator().manual_seed(1 + draw)
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=g)
    if spec.inputs == "pixels":
        return {"pixel_values": torch.randn(batch, 3, spec.side, spec.side, generator=g).to(dtype)}
    if spec.inputs == "wave":
        return {"input_values": torch.randn(batch, 50 * length, generator=g).to(dtype)}
    if spec.inputs == "audio":
        audio = torch.randn(batch, 8, 2 * LENGTH, generator=g).to(dtype)
        return {"input_features": audio, "decoder_input_ids": ids, "use_cache": False}
    more: dict[str, Any] = {}
    if spec.inputs == "pair":
        more["decoder_input_ids"] = ids[:, : length - 4]
    if spec.inputs in ("padded", "pair"):
        stop = torch.full((batch, 1), length)
        stop[1] = 9
        more["attention_mask"] = (torch.arange(length) < stop).long()
    return {"input_ids": ids, **more, **({"use_cache": False} if spec.cache else {})}


def _as_double(inputs: dict[str, Any]) -> dict[str, Any]:
    return {k: v.double() if hasattr(v, "is_floating_point") and v.is_floating_point() else v
            for k, v in inputs.items()}


def _call(model: Any, inputs: dict[str, Any]) -> Any:
    return model(**inputs).last_hidden_state


def _results(model: Any, inputs: dict[str, Any], call: Callable[..., Any], mode: str) -> dict[str, Any]:
    """The last hidden state and, in training, the gradient of every parameter that gets one."""
    import torch

    training = mode == "training"
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(training):
        out = call(model, inputs)
    if training:
        tangent = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
        out.backward(tangent.to(out.dtype))
    grads = {n: p.grad for n, p in model.named_parameters() if training and p.grad is not None}
    return {"": out.detach(), **grads}


def _excess(cases: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]) -> float:
    """The worst error as a part of what the contract allows; infinite when something is missing or not finite.

    Args:
        cases: (ours, eager, exact) for each of several inputs.  Outputs and gradients are judged one by one, each over
            all inputs.

    The floor of a gradient is taken from the largest gradient: some are zero but for rounding.
    """
    import torch

    if any(ours.keys() != eager.keys() for ours, eager, _ in cases):
        return float("inf")
    largest = max((float(x.abs().max()) for _, _, exact in cases for n, x in exact.items() if n), default=0.0)
    worst = 0.0
    for name in cases[0][2]:
        mine, theirs, size = [], [], 0.0
        for ours, eager, exact in cases:
            x = exact[name]
            mine.append((ours[name].double() - x).abs().flatten())
            theirs.append((eager[name].double() - x).abs().flatten())
            size = max(size, float(x.abs().max()))
        m, t = torch.cat(mine), torch.cat(theirs)
        if not m.isfinite().all():
            return float("inf")
        floor = (GRADIENT_FLOOR * largest if name else FLOOR * size) * torch.finfo(cases[0][0][name].dtype).eps
        worst = max(worst, float(m.max()) / (MAX_RATIO * float(t.max()) + floor),
                    float(m.mean()) / (MEAN_RATIO * float(t.mean()) + floor / 4))
    return worst


@contextlib.contextmanager
def _softmax_in_float64() -> Iterator[None]:
    """Models ask for their softmax in float32, where the smallest float64 is -inf and a row of it NaN."""
    import torch

    original = torch.nn.functional.softmax

    def softmax(x: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
        return original(x, dim, dtype=None if x.dtype == torch.float64 else dtype)

    torch.nn.functional.softmax = softmax  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.nn.functional.softmax = original


def _decompositions() -> dict[Any, Any]:
    """Inductor's, without that of layer norm, which stays the operator that eager code calls.

    What is judged here is this library.  Written out by Inductor, layer norms round otherwise, and before scores in the
    hundreds (``clip_vision_model``) that alone can exceed the contract, with nothing rewritten.
    """
    from torch._inductor.decomposition import select_decomp_table

    return {op: f for op, f in select_decomp_table().items() if "layer_norm" not in str(op)}


def _without_codegen(records: list[str]) -> Callable[..., Any]:
    """A torch.compile backend: all of Inductor up to its joint passes; notes the records of the rewritten blocks."""
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    from .ops import attention

    def inner(gm: Any, _example: Any, **_: Any) -> Any:
        records.extend(n.args[5] for n in gm.graph.nodes if n.target is attention)
        return make_boxed_func(gm.forward)

    return lambda gm, example: compile_fx(gm, example, inner_compile=inner, decompositions=_decompositions())


def _fused(records: list[str]) -> int:
    from .backends.sdpa import sdpa_supports
    from .kernels.record import Attention

    return sum(sdpa_supports(Attention.from_string(r), "cpu") is None for r in records)
