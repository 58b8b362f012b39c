"""The derivative of a block, traced from its own forward after softmax and logsumexp have been put back together."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from .block import Block, Chain
from .logsumexp import LogSumExp
from .nodes import CASTS, aten, target, val
from .recorder import Recorder
from .scores import is_row_max
from .softmax import Softmax


@dataclass
class Region:
    """The forward of a block as a function: ``inputs`` (q, k, v sources first, then biases) to ``out``."""

    inputs: list[Node]
    nodes: list[Node]
    out: Node
    biases: int = 0


def chain_of(block: Block) -> Chain:
    if block.chain is None:
        raise ValueError("an SDPA operator has no written-out chain")
    return block.chain


Variant = tuple[str, Node | None, Node | None]
"""(name, node to take the softmax of, node that holds its result); ``raw`` keeps the decomposed form, ``detached`` takes
a row maximum that is subtracted from the scores for a constant, which changes no gradient but the way to it."""


def variants(block: Block) -> Iterable[Variant]:
    sm, values = chain_of(block).softmax, chain_of(block).values
    x, out = sm.x, sm.out
    if sm.shifted:
        if values.safe:
            yield ("safe", x, next((m for m in values.members if target(m) is aten.where.self), None))
        yield ("softmax", x, out)
        if any(step.name == "sub" and is_row_max(step.node) for step in block.steps):
            yield ("detached", x, out)
        if target(out) is aten.exp.default:
            yield ("log_softmax", x, out)
        if target(x) in CASTS:
            low = val(x.args[0]).dtype
            for user in out.users:
                if target(user) in CASTS and val(user).dtype == low and user in values.members:
                    yield ("softmax", x.args[0], user)
            if val(x).dtype == torch.float32 and low.is_floating_point:
                yield ("half_to_float", x.args[0], out)
    yield ("raw", None, None)
    if any(target(n) is aten.sub.Tensor for n in sm.members):
        yield ("detached", None, None)


@dataclass(frozen=True)
class Clamp:
    """``result`` is ``source`` between one or two bounds, once put back together: compilers take it apart.

    In 16 bits the bounds are applied in float32, between two casts; the derivative may be in either dtype.
    """

    source: Node
    result: Node
    low: Node | None
    high: Node | None

    def run(self, x: Any, op: Any) -> torch.Tensor:
        low, high = (None if n is None else n.args[1] for n in (self.low, self.high))
        if op is aten.hardtanh.default and (low is None or high is None):
            return aten.clamp_max.default(x, high) if low is None else aten.clamp_min.default(x, low)
        return op(x, low, high)


Clamping = tuple[Any, bool]
"""(``clamp``, or ``hardtanh`` with ``clamp_min`` and ``clamp_max``; whether the casts around the bounds belong to it)."""


def find_clamps(region: Region, narrow: bool) -> list[Clamp]:
    inside = set(region.nodes)
    found = []
    for n in region.nodes:
        if target(n) is aten.clamp_max.default:
            low = n.args[0] if target(n.args[0]) is aten.clamp_min.default and n.args[0] in inside else None
            high: Node | None = n
        elif target(n) is aten.clamp_min.default and not any(target(u) is aten.clamp_max.default for u in n.users):
            low, high = n, None
        else:
            continue
        source, result = (low or n).args[0], n  # type: ignore[union-attr]
        outer = next((u for u in n.users if target(u) in CASTS and u in inside), None)
        if narrow and outer is not None and target(source) in CASTS and val(source.args[0]).dtype == val(outer).dtype:
            source, result = source.args[0], outer
        found.append(Clamp(source, result, low, high))  # type: ignore[arg-type]
    return found


def clampings(region: Region) -> list[Clamping | None]:
    """The ways to put the bounds of a region back together; None leaves them apart.

    ``clamp`` and ``hardtanh`` differ in their derivative where a score is a bound exactly: the first lets it pass.
    """
    wide, narrow = find_clamps(region, False), find_clamps(region, True)
    ways: list[Clamping | None] = []
    for found, casts in ((narrow, True), (wide, False)):
        two = any(c.low is not None and c.high is not None for c in found)
        if casts and narrow == wide or not (two or casts):
            continue
        ways += [(aten.clamp.default, casts), (aten.hardtanh.default, casts)]
    return [*ways, None]


def structure(region: Region, variant: Variant) -> Hashable:
    """Equal for regions that trace to the same graph: one trace serves all layers of a model."""
    local = {n: f"i{j}" for j, n in enumerate(region.inputs)}
    for j, n in enumerate(region.nodes):
        local[n] = f"n{j}"

    def enc(a: Any) -> Any:
        if isinstance(a, Node):
            return local.get(a, "?")
        if isinstance(a, (list, tuple)):
            return tuple(enc(x) for x in a)
        return (type(a).__name__, str(a))

    def meta(n: Node) -> Any:
        v = n.meta.get("val")
        if not isinstance(v, torch.Tensor):
            return str(v)
        return (tuple(map(str, v.shape)), tuple(map(str, v.stride())), v.dtype, str(v.device))

    return (variant[0], local.get(variant[1]), local.get(variant[2]), region.biases,
            tuple(meta(n) for n in region.inputs),
            tuple((str(n.target), enc(n.args), tuple((k, enc(v)) for k, v in n.kwargs.items())) for n in region.nodes))


def trace(region: Region, run: Callable[[list[Any]], torch.Tensor], wanted: int) -> Graph | None:
    """Joint graph ``(inputs, tangent) -> (out, gradients of the first inputs)``; None when it has no derivative."""
    out_val = val(region.out)
    fake_mode = getattr(out_val, "fake_mode", None)
    recorder = Recorder()
    try:
        with torch._guards.tracing(None), _entered(fake_mode, out_val), torch.enable_grad():
            inputs = [n.meta["val"] for n in region.inputs]
            leaves = [x.detach().requires_grad_(i < wanted) if isinstance(x, torch.Tensor) else x
                      for i, x in enumerate(inputs)]
            for i, leaf in enumerate(leaves):
                recorder.placeholder(f"input_{i}", leaf)
            tangent = torch.empty_like(out_val)
            recorder.placeholder("tangent", tangent)
            with recorder:
                out = run(leaves)
                grads = torch.autograd.grad(out, leaves[:wanted], tangent, allow_unused=True)
            recorder.output((out, *grads))
    except Exception:  # a form autograd cannot differentiate is a miss, not an error of the user
        return None
    return recorder.graph


@contextlib.contextmanager
def _entered(mode: Any, like: torch.Tensor) -> Iterator[None]:
    """The fake mode of a tensor, if any; with symbolic sizes its cache costs twice what it saves."""
    if mode is None:
        yield
        return
    cached = getattr(mode, "cache_enabled", False)
    if any(isinstance(n, torch.SymInt) for n in like.shape):
        mode.cache_enabled = False
    try:
        with mode:
            yield
    finally:
        mode.cache_enabled = cached


def runner(region: Region, variant: Variant, softmax: Softmax | None, lse: LogSumExp | None = None,
           clamping: Clamping | None = None) -> Callable[[list[Any]], torch.Tensor]:
    kind, x, result = variant
    clamped = {c.result: c for c in find_clamps(region, clamping[1])} if clamping is not None else {}

    def run(inputs: list[Any]) -> torch.Tensor:
        env: dict[Node, Any] = dict(zip(region.inputs, inputs, strict=True))

        def get(a: Any) -> Any:
            if isinstance(a, Node):
                return env[a]
            if isinstance(a, (list, tuple)):
                return type(a)(get(b) for b in a) if isinstance(a, tuple) else [get(b) for b in a]
            return a

        constants = {m for n in region.nodes if kind == "detached" and target(n) is aten.sub.Tensor and is_row_max(n)
                     and isinstance(m := n.args[1], Node)}
        skipped = set(softmax.members) - {result} if softmax is not None and x is not None else set()
        whole = {found.out: found for found in (lse, softmax.lse if softmax is not None else None) if found is not None}
        for found in whole.values():
            skipped |= set(found.members) - {found.out}
        for n in region.nodes:
            if n in skipped:
                continue
            if n in whole:
                env[n] = aten.logsumexp.default(env[whole[n].x], [whole[n].dim], whole[n].keepdim)
                continue
            if softmax is not None and n is result and x is not None:
                if kind == "half_to_float":
                    env[n] = aten._softmax.default(env[x], softmax.dim, True)
                elif kind == "log_softmax":
                    env[n] = aten.exp.default(aten._log_softmax.default(env[x], softmax.dim, False))
                elif kind == "safe":
                    env[n] = aten._safe_softmax.default(env[x], softmax.dim)
                else:
                    env[n] = aten._softmax.default(env[x], softmax.dim, False)
            elif n in clamped and clamping is not None:
                env[n] = clamped[n].run(get(clamped[n].source), clamping[0])
            elif n.target in CASTS:
                env[n] = aten._to_copy.default(get(n.args[0]), dtype=val(n).dtype)
            else:
                env[n] = n.target(*get(n.args), **{k: get(v) for k, v in n.kwargs.items()})  # type: ignore[operator]
            if n in constants:
                env[n] = env[n].detach()
        return env[region.out]

    return run
