"""A program's joint graph without Dynamo and AOTAutograd: recorded, rewritten and run, many times as fast.

AOTAutograd makes the graph that Inductor sees in several passes over a program.  One pass, autograd inside
functionalisation with Inductor's decompositions, gives the same operators, and they are all that the recogniser reads.
"""
from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import sympy
import torch
from fuzz_cases import Case, Outcome, load, tangents
from fuzz_programs import DYNAMIC
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.functions import FloorDiv

from fa_inductor import options, pipeline
from fa_inductor.reasons import Code
from fa_inductor.recognise.recorder import Recorder


class Sized(Recorder):
    """Symbolic sizes are computed from the sizes of the inputs, so that the graph runs at other sizes."""

    def _attribute(self, value: Any) -> Node:
        if not isinstance(value, torch.SymInt):
            return super()._attribute(value)
        return self._computed(value.node.expr)

    def _computed(self, expr: sympy.Expr) -> Any:
        if isinstance(expr, sympy.Integer):
            return int(expr)
        if isinstance(expr, sympy.Symbol):
            return self._read(expr)
        call = {sympy.Add: operator.add, sympy.Mul: operator.mul, FloorDiv: operator.floordiv}[expr.func]
        total, *parts = [self._computed(a) for a in expr.args]
        for part in parts:
            node = self.graph.call_function(call, (total, part))
            node.meta["val"] = call(*(x.meta["val"] if isinstance(x, Node) else x for x in node.args))
            total = node
        return total

    def _read(self, symbol: sympy.Symbol) -> Node:
        for node in (n for n in self.graph.nodes if n.op == "placeholder"):
            for dim, size in enumerate(node.meta["val"].shape):
                if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                    found = self.graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
                    found.meta["val"] = size
                    return found
        raise NotImplementedError(f"no input has a dimension of size {symbol}")


@contextlib.contextmanager
def functional() -> Iterator[None]:
    """Functionalisation, as AOTAutograd has it."""
    torch._enable_functionalization(reapply_views=True)
    try:
        yield
    finally:
        torch._disable_functionalization()


def plain(t: Tensor | None) -> Tensor | None:
    if t is None or not torch._is_functional_tensor(t):
        return t
    torch._sync(t)
    return torch._from_functional_tensor(t)


def symbolic(case: Case, mode: FakeTensorMode) -> list[Tensor]:
    """The inputs of a dynamic program as fake tensors: batch and lengths are symbols, equal ones the same."""
    found = []
    for i, x in zip(case.program.inputs, case.inputs[0], strict=True):
        sizes = [DimDynamic.DYNAMIC if c in DYNAMIC and n > 1 else DimDynamic.STATIC
                 for c, n in zip(i.letters, x.shape, strict=True)]
        found.append(mode.from_tensor(x.detach(), source=ConstantSource(i.name),
                                      symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes)))
    return found


class Traced:
    """The joint graph of a case; ``graph`` gives outputs, the inputs as the program left them, and gradients."""

    def __init__(self, case: Case) -> None:
        self.case = case
        program = load(case.program.source())["program"]
        self.wanted = [i for i, x in enumerate(case.inputs[0]) if x.requires_grad and case.train]
        recorder = Sized()
        self.root, self.graph = recorder.root, recorder.graph
        mode = FakeTensorMode(shape_env=ShapeEnv()) if case.dynamic else None
        if mode is not None:
            mode.cache_enabled = False  # with symbolic sizes it costs more than it saves
        inputs = symbolic(case, mode) if mode is not None else [x.detach() for x in case.inputs[0]]
        for i, x in enumerate(inputs):
            recorder.placeholder(f"primals_{i + 1}", x)
        with mode or contextlib.nullcontext(), torch.set_grad_enabled(case.train):
            with functional(), recorder:
                leaves = [torch._to_functional_tensor(x).requires_grad_(i in self.wanted) for i, x in enumerate(inputs)]
                outs = list(program(*leaves))
            self.tops = [i for i, o in enumerate(outs) if o.requires_grad]
            self.grads = bool(self.wanted and self.tops)
            grads: list[Tensor | None] = []
            if self.grads:
                with torch.no_grad():
                    given = [torch.empty_like(plain(outs[i])) for i in self.tops] if mode is not None else self.tangents(0)
                for i, t in enumerate(given):
                    recorder.placeholder(f"tangents_{i + 1}", t)
                with functional(), recorder:
                    grads += torch.autograd.grad([outs[i] for i in self.tops], [leaves[i] for i in self.wanted],
                                                 [torch._to_functional_tensor(t) for t in given], allow_unused=True)
            with functional(), recorder, torch.no_grad():
                results = [plain(t) for t in (*outs, *leaves, *grads)]
        self.outputs = len(outs) + len(leaves)
        recorder.output(results)
        self.graph.eliminate_dead_code()

    def tangents(self, call: int) -> list[Tensor]:
        outs = self.case.eager[call][0][:]
        drawn = tangents([o.detach().requires_grad_(o.is_floating_point()) for o in outs])
        return [drawn[i] for i in self.tops]  # type: ignore[misc]

    def run(self, call: int) -> Outcome:
        gm = GraphModule(self.root, self.graph)
        inputs = [x.detach().clone() for x in self.case.inputs[call]]
        with torch.no_grad():
            found = gm(*inputs, *(self.tangents(call) if self.grads else ()))
        grads = found[self.outputs:] if self.grads else [None] * len(self.wanted)
        return found[: self.outputs], grads


def run_traced(case: Case, rewrite: bool = True) -> str:
    """What is wrong with a case after our pass; empty when nothing is.  Also fills in its report codes.

    Raises:
        Exception: whatever tracing the program or our pass raises.
    """
    traced = Traced(case)
    with options.patch(backend="reference", validate=False, max_rewrites=None if rewrite else 0):
        for block in pipeline.run(traced.graph).blocks:
            if block.outcome != "not attention":
                case.codes.append("rewritten" if block.reason is None else block.reason.code.code)
            if rewrite and block.reason is not None and block.reason.code is Code.INTERNAL:
                return str(block.reason)
        for call in range(len(case.inputs)):
            wrong = case.judge(traced.run(call), call)
            if wrong:
                return wrong
    return ""
