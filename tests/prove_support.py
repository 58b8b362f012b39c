"""Shared by the prover's tests: trace a mask producer, prove it, and evaluate the atoms by brute force."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from fa_inductor.kernels import record
from fa_inductor.kernels.expr import Expr
from fa_inductor.prove import (
    AXES,
    Context,
    Evaluator,
    MaskProof,
    Materialiser,
    prove_additive,
    prove_boolean,
    to_record,
)

SIZES = (2, 3, 5, 7)
"""Default B, Hq, Sq, Sk."""


@dataclass
class Traced:
    """One producer in a graph: ``node`` is its result, an output of ``graph``."""

    graph: fx.Graph
    node: fx.Node
    inputs: tuple[Any, ...]
    ev: Evaluator
    sizes: tuple[int, int, int, int]

    @property
    def index(self) -> list[Any]:
        shape = self.node.meta["val"].shape
        return [0 if isinstance(n, int) and n == 1 else a
                for n, a in zip(shape, AXES[len(AXES) - len(shape):], strict=True)]


def trace(
    fn: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor] = (), sizes: tuple[int, int, int, int] = SIZES,
    dynamic: bool = False,
) -> Traced:
    """Traces ``fn(scores, *inputs)`` as Inductor does; ``scores`` is float32 [B, Hq, Sq, Sk] and tells the sizes."""
    args = (torch.zeros(sizes), *inputs)

    def both(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = fn(*xs)
        return result, xs[0] + 0

    mode = "symbolic" if dynamic else "fake"
    gm = make_fx(both, decomposition_table=select_decomp_table(), tracing_mode=mode)(*args)
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    shape = placeholders[0].meta["val"].shape
    ev = Evaluator(Context(*shape))
    out = next(n for n in gm.graph.nodes if n.op == "output").args[0][0]
    return Traced(gm.graph, out, args, ev, sizes)


def run(traced: Traced, nodes: Sequence[Any]) -> list[Any]:
    """Values of graph nodes (ints stay ints) on the traced inputs."""
    (output,) = (n for n in traced.graph.nodes if n.op == "output")
    saved = output.args
    output.args = ((*nodes,),)
    try:
        module = fx.GraphModule(traced.graph.owning_module or torch.nn.Module(), traced.graph)
        return list(fx.Interpreter(module).run(*traced.inputs))
    finally:
        output.args = saved


def materialise(traced: Traced, proof: MaskProof) -> tuple[tuple[record.Atom, ...], list[Any], list[Any]]:
    """Atoms with the values of their captures and ints."""
    (output,) = (n for n in traced.graph.nodes if n.op == "output")
    atoms, captures, ints = to_record(
        proof.atoms, Materialiser(traced.graph, output, traced.ev, torch.device("cpu"))
    )
    traced.graph.lint()
    dense = {a.capture for a in atoms if isinstance(a, record.Dense)}
    for i, c in enumerate(captures):
        shape = c.meta["val"].shape
        if i not in dense and len(shape) == 4:
            assert shape[2] == 1 or shape[3] == 1, f"capture {i} is quadratic: {shape}"
    values = run(traced, [*captures, *ints])
    for c, v in zip(captures, values, strict=False):
        assert c.meta["val"].dtype == v.dtype and len(c.meta["val"].shape) == v.ndim
    return atoms, values[: len(captures)], values[len(captures):]


def evaluate(
    atoms: Sequence[record.Atom], captures: Sequence[torch.Tensor], ints: Sequence[int], sizes: tuple[int, ...]
) -> torch.Tensor:
    """The conjunction of the atoms as a bool tensor [B, Hq, Sq, Sk], by the definitions of `kernels.record`."""
    b, h, q, k = torch.meshgrid(*(torch.arange(n) for n in sizes), indexing="ij")
    keep = torch.ones(sizes, dtype=torch.bool)

    def sint(x: Any) -> int:
        return ints[x.i] if isinstance(x, record.Sym) else x

    for a in atoms:
        match a:
            case record.Band(lo=lo, hi=hi):
                if lo is not None:
                    keep &= k >= q + sint(lo)
                if hi is not None:
                    keep &= k <= q + sint(hi)
            case record.Chunk(size=size, offset=offset):
                keep &= torch.div(k, sint(size), rounding_mode="floor") == torch.div(
                    q + sint(offset), sint(size), rounding_mode="floor"
                )
            case record.KeyPadding(capture=c):
                assert captures[c].shape in ((1, sizes[3]), (sizes[0], sizes[3])), captures[c].shape
                assert captures[c].dtype == torch.bool
                keep &= captures[c][:, None, None, :]
            case record.Documents(q=cq, k=ck):
                assert captures[cq].shape in ((1, sizes[2]), (sizes[0], sizes[2]))
                assert captures[ck].shape in ((1, sizes[3]), (sizes[0], sizes[3]))
                keep &= captures[cq][:, None, :, None] == captures[ck][:, None, None, :]
            case record.Dense(capture=c):
                assert captures[c].dtype == torch.bool
                keep &= captures[c]
            case record.Predicate(expr=e):
                keep &= program(e, (b, h, q, k), captures, ints)
    return keep


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "neg": torch.neg, "abs": torch.abs,
    "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
    "and": torch.logical_and, "or": torch.logical_or, "not": torch.logical_not, "xor": torch.logical_xor,
    "where": torch.where, "maximum": torch.maximum, "minimum": torch.minimum, "exp": torch.exp, "log": torch.log,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"), "mod": torch.remainder,
}


def program(e: Expr, position: Any, captures: Sequence[torch.Tensor], ints: Sequence[int]) -> Any:
    """A score program over the whole score matrix."""
    if e.op == "const":
        return torch.tensor(e.args[0])
    if e.op == "index":
        return position["bhqk".index(e.args[0])]
    if e.op == "sym":
        return torch.tensor(ints[e.args[0]])
    if e.op == "load":
        return captures[e.args[0]]
    if e.op == "cast":
        return program(e.args[0], position, captures, ints).to(getattr(torch, e.args[1]))
    return _FUNCTIONS[e.op](*(program(a, position, captures, ints) for a in e.args))


def check_boolean(
    fn: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor] = (), sizes: tuple[int, int, int, int] = SIZES,
    dynamic: bool = False,
) -> tuple[MaskProof, tuple[record.Atom, ...]]:
    """Proves ``fn``'s mask, compares the atoms with eager at every position, and checks ``nonempty``."""
    traced = trace(fn, inputs, sizes, dynamic)
    proof = prove_boolean(traced.ev, traced.node, traced.index)
    eager = fn(*traced.inputs).to(torch.bool).expand(sizes)
    atoms, captures, ints = materialise(traced, proof)
    assert torch.equal(evaluate(atoms, captures, ints, sizes), eager), (atoms, proof.pred)
    if proof.nonempty:
        assert eager.any(-1).all()
    if proof.always_false:
        assert not eager.any()
    return proof, atoms


def check_additive(
    fn: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor] = (), sizes: tuple[int, int, int, int] = SIZES,
    dynamic: bool = False,
) -> tuple[Any, tuple[record.Atom, ...]]:
    """As `check_boolean`, for a tensor that is added: attended positions hold the residual, the others a fill."""
    traced = trace(fn, inputs, sizes, dynamic)
    proof = prove_additive(traced.ev, traced.node, traced.index)
    eager = fn(*traced.inputs).expand(sizes)
    atoms, captures, ints = materialise(traced, proof)
    keep = evaluate(atoms, captures, ints, sizes)
    (output,) = (n for n in traced.graph.nodes if n.op == "output")
    residual = torch.zeros(())
    if proof.residual is not None:
        m = Materialiser(traced.graph, output, traced.ev, torch.device("cpu"))
        recomputed, (residual,) = run(traced, [m.tree(proof.residual)]), run(traced, [m.tree(proof.residual, True)])
        assert torch.equal(recomputed[0].expand(sizes), residual.expand(sizes))
    attended = eager[keep]
    assert torch.equal(attended, residual.to(eager.dtype).expand(sizes)[keep]), (atoms, proof)
    masked = eager[~keep]
    if proof.residual is None:
        assert set(masked.unique().tolist()) <= set(proof.fills), (masked.unique(), proof.fills)
    assert bool((masked <= -3e4).all()) or proof.residual is not None
    if proof.nonempty:
        assert keep.any(-1).all()
    return proof, atoms
