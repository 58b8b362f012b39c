"""The report of a model without running it: compile up to the pass, then stop.

Dynamo sees the model through a function made for this one call, so what it caches goes away with that function.
In place of compiled code it gets zeros of the right shapes, so no kernel of the model runs or is generated.
"""
from __future__ import annotations

import copy
import inspect
import itertools
from types import CodeType, FunctionType
from typing import Any

from .report import GraphReport, Report

_calls = itertools.count()


def explain(model: Any, *args: Any, **kwargs: Any) -> Report:
    """What `enable` and ``torch.compile(model)(*args, **kwargs)`` would do with each attention block.

    The model is traced but not run, and nothing is compiled to code: compiled models, torch's counters and
    `report` stay as they are.  Under ``torch.no_grad()``, or when nothing requires a gradient, the inference graph
    is explained, otherwise the training graph, forward and backward.  Where the model breaks into several graphs,
    later ones are reached with zeros as data.

    Args:
        model: a module or a function, not yet compiled (of a compiled module, the original is explained).
        args, kwargs: an input of the model; only shapes, strides, dtypes and devices matter.

    Raises:
        Whatever tracing the model raises, for example for an input that does not fit.
    """
    import torch
    from torch._dynamo import eval_frame
    from torch._dynamo.utils import counters

    model = getattr(model, "_orig_mod", model)
    model = getattr(model, "_torchdynamo_orig_callable", model)
    graphs: list[GraphReport] = []
    backend = _backend(graphs)
    before = copy.deepcopy(dict(counters))
    try:
        # From torch 2.13 on, frames after a graph break can be kept apart, too.
        compiler: Any = torch.compile
        isolated = {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(compiler).parameters else {}
        compiler(_call_once(), backend=backend, **isolated)(model, args, kwargs)
    finally:
        for key, kept in list(eval_frame.cached_backends.items()):
            if getattr(kept, "compiler_fn", None) is backend:
                del eval_frame.cached_backends[key]
        counters.clear()
        counters.update(before)
    return Report(tuple(graphs))


def _call_once() -> FunctionType:
    """A function of its own code object: Dynamo keeps guards by code object, and shapes seen by its name."""

    def call(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return model(*args, **kwargs)

    code: CodeType = call.__code__
    name = f"explain_{next(_calls)}"
    return FunctionType(code.replace(co_name=name, co_qualname=name), call.__globals__, name)


def _backend(graphs: list[GraphReport]) -> Any:
    def backend(gm: Any, example_inputs: Any) -> Any:
        import torch
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx

        from .hook import JOINT, AttentionPass
        from .slots import holding, passes_in

        def stop(graph: Any, inputs: Any, **_: Any) -> Any:
            def never_called(args: list[Any]) -> Any:
                raise AssertionError("explain() ran a graph that it had not compiled")

            never_called._boxed_call = True  # type: ignore[attr-defined]
            return never_called

        outputs = _output_values(gm)
        value = getattr(config, JOINT)
        others = tuple(p for p in passes_in(value) if not isinstance(p, AttentionPass))
        patches = {JOINT: holding((*others, AttentionPass(graphs.append)), value)}
        with torch._functorch.config.patch(enable_autograd_cache=False):
            compile_fx(gm, example_inputs, inner_compile=stop, config_patches=patches)
        return lambda *_: [_zeros(v) for v in outputs]

    return backend


def _output_values(gm: Any) -> list[Any]:
    (outputs,) = gm.graph.output_node().args
    return [getattr(o, "meta", {}).get("example_value", o) for o in outputs]


def _zeros(value: Any) -> Any:
    """A real value in place of a traced one: zeros for a tensor, the number seen while tracing for a symbol."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value
    size, stride = ([_zeros(n) for n in ns] for ns in (value.shape, value.stride()))
    real = torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
    return real.zero_().requires_grad_(value.requires_grad)
