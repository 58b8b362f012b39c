"""Training: the backward of a block, found in the joint graph by tracing the block's own derivative.

The forward region is run again under autograd with the tracing that AOTAutograd uses, after its softmax has been put
back together (a softmax's derivative is its own, not that of exp and sum).  The traced joint graph is then looked
up, value by value, in the real one.  A hit is right by construction; anything else leaves the block alone.
"""
from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from ..reasons import Code, Refusal
from .axes import product, spelt_shape
from .block import Block
from .derivative import Region, Variant, chain_of, clampings, find_clamps, runner, structure, trace, variants
from .nodes import CASTS, VIEWS, aten, is_tensor, target, val
from .numbering import Numbering
from .operands import Operand
from .scores import PRODUCTS

NAMES = ("q", "k", "v")
EMPTIES = {aten.new_empty_strided.default, aten.new_empty.default, aten.empty_like.default}
"""Take only the shape of their input; an in-place operation leaves such a node in the backward."""
CONSTANTS = {aten.full.default, aten.scalar_tensor.default}
"""Traced with the region, so that a literal is the same literal in both graphs."""


@dataclass
class Backward:
    """Where the gradients of one block are in the joint graph."""

    tangent: Node
    """Gradient of the PV product's output."""
    grads: dict[str, Node]
    """Gradient of the source of q, k and v; a name is missing when no gradient is needed."""
    members: set[Node]
    """Nodes of the joint graph that only serve this backward."""
    biases: dict[Node, Node] = field(default_factory=dict)
    """Operand added to the scores -> its gradient, where the graph needs one."""

    strict: frozenset[Node] = frozenset()
    """Bounds of the scores that let no gradient pass where a score is the bound exactly."""

    def replaced(self) -> set[Node]:
        return {*self.grads.values(), *self.biases.values()}


@dataclass
class Joint:
    """Everything of one joint graph that the search needs, made once per graph."""

    numbering: Numbering
    ids: dict[Node, int]
    position: dict[Node, int]
    backward: set[Node]
    traced: dict[Hashable, Graph | None]

    @staticmethod
    def of(graph: torch.fx.Graph, backward: set[Node]) -> Joint:
        numbering = Numbering()
        ids = numbering.number_graph(graph.nodes)
        return Joint(numbering, ids, {n: i for i, n in enumerate(graph.nodes)}, backward, {})


def region_of(block: Block, position: dict[Node, int], *, biases: bool = False) -> Region:
    """The nodes between the sources of q, k, v and the product PV; ``biases`` also differentiates added tensors."""
    sources = [block.q.node, block.k.node, block.v.node]
    inside: set[Node] = set()
    chain = chain_of(block)
    for part in (chain.path.members, chain.softmax.members, chain.values.members, chain.values.extra,
                 block.q.chain, block.k.chain, block.v.chain, block.tail, block.sink_members,
                 block.sink.chain if block.sink is not None else (), (block.out,)):
        inside |= {n for n in part if n not in sources}
    stop = {*sources, *inside, *([block.sink.node] if block.sink is not None else [])}
    for n in list(inside):
        for i in n.all_input_nodes:
            inside |= _between(i, stop, inside, 4)
    inside |= {i for n in inside for i in n.all_input_nodes
               if i not in sources and target(i) in CONSTANTS and not i.all_input_nodes}
    nodes = sorted(inside, key=position.__getitem__)
    others = dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in inside and i not in sources)
    added = [n for n in _added(block) if n in others] if biases else []
    return Region([*sources, *added, *(n for n in others if n not in added)], nodes, block.out, len(added))


def _between(node: Node, stop: set[Node], inside: set[Node], depth: int) -> set[Node]:
    """Nodes that are computed from the scores on the side, such as a row maximum that is subtracted."""
    if node in stop or depth == 0:
        return set()
    found: set[Node] = set()
    for i in node.all_input_nodes:
        if i in inside and i in stop:
            found.add(node)
        more = _between(i, stop, inside, depth - 1)
        if more:
            found |= more | {node}
    return found


def _added(block: Block) -> list[Node]:
    """Float tensors that the steps add to the scores, subtract from them or multiply them by; the sink."""
    found: list[Node] = []
    for step in block.steps:
        if step.name in ("add", "sub", "mul", "added_product"):
            other = step.operand if step.operand is not None else step.node.args[1 - step.position]
            if is_tensor(other) and val(other).dtype.is_floating_point:
                found.append(other)
    if block.sink is not None:
        found.append(block.sink.node)
    return list(dict.fromkeys(found))


def find_backward(block: Block, joint: Joint, *, biases: bool = False) -> Backward:
    """The backward of ``block``; ``biases`` also looks for the gradients of tensors added to the scores.

    Raises:
        Refusal: it is not in the graph in a form that the block's derivative gives, or something else uses its
            large intermediate tensors.
    """
    region = region_of(block, joint.position, biases=biases)
    best: Backward | None = None
    for clamping, variant in itertools.product(clampings(region), variants(block)):
        key = structure(region, variant), clamping
        if key not in joint.traced:
            run = runner(region, variant, chain_of(block).softmax, block.lse, clamping)
            joint.traced[key] = trace(region, run, 3 + region.biases)
        traced = joint.traced[key]
        if traced is None:
            continue
        found = _match(traced, region, joint)
        if found is not None and (best is None or len(found.grads) > len(best.grads)):
            best = found
            if clamping is not None and clamping[0] is aten.hardtanh.default:
                both = [c for c in find_clamps(region, clamping[1]) if c.low is not None and c.high is not None]
                best.strict = frozenset(n for c in both for n in (c.low, c.high) if n is not None)
            if len(found.grads) == 3 or found.grads.keys() & {"q", "k"}:
                break  # these two come through the softmax: this is its form, what is missing the graph does not need
    if best is None:
        raise Refusal(Code.BACKWARD)
    return best


def gradient_through(operand: Operand, grad: Node, joint: Joint) -> Node:
    """The gradient of an operand's source, given that of the operand itself.

    Raises:
        Refusal: it is not in the graph.
    """
    nodes = list(reversed(operand.chain))
    others = dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in nodes and i is not operand.node)
    region = Region([operand.node, *others], nodes, operand.chain[0])
    raw: Variant = ("raw", None, None)
    key = structure(region, raw)
    if key not in joint.traced:
        joint.traced[key] = trace(region, runner(region, raw, None), 1)
    traced = joint.traced[key]
    if traced is not None:
        ids, output = _number(traced, region, grad, joint)[:2]
        real = _real(output[1], ids, joint)
        if real is not None:
            return real
    raise Refusal(Code.BACKWARD, "gradient of an expanded operand")


def leftovers(block: Block, region: Region, found: Backward | None, position: dict[Node, int]) -> list[Node]:
    """Score-sized nodes that something else than the block still needs once its results are replaced."""
    replaced = {block.out}
    members = set(region.nodes)
    if found is not None:
        replaced |= found.replaced()
        members |= found.members
    members |= {u for n in members for u in n.users if target(u) in EMPTIES}
    # a size or stride that only these read
    members |= {u for n in members for u in n.users
                if isinstance(u.meta.get("val"), torch.SymInt) and all(w in members for w in u.users)}
    dead = set(members)
    todo = sorted(members - replaced, key=position.__getitem__, reverse=True)
    changed = True
    while changed:
        changed = False
        for n in todo:
            if n in dead and any(u not in dead and u not in replaced for u in n.users):
                dead.discard(n)
                changed = True
    sizes = {product(spelt_shape(val(n))) for n in (chain_of(block).path.product, chain_of(block).softmax.x)}
    return [n for n in todo if n not in dead and is_tensor(n) and product(spelt_shape(val(n))) in sizes
            and target(n) not in CONSTANTS
            and not _is_source_view(n, block) and not _is_view_of(n, replaced)]


def _is_source_view(n: Node, block: Block) -> bool:
    return n in block.q.chain or n in block.k.chain or n in block.v.chain


def _is_view_of(n: Any, replaced: set[Node]) -> bool:
    """A view of a result that is replaced is a view of what replaces it."""
    while target(n) in VIEWS:
        n = n.args[0]
        if n in replaced:
            return True
    return False


# -- matching --------------------------------------------------------------------------------------------------------

def _match(traced: Graph, region: Region, joint: Joint) -> Backward | None:
    nodes = list(traced.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    tangent = inputs[-1]
    start: dict[Node, int | None] = {p: joint.ids[r] for p, r in zip(inputs, region.inputs, strict=False)}
    start.pop(tangent, None)
    best: Backward | None = None
    for candidate in _tangents(nodes, tangent, start, joint):
        ids, output, members = _number(traced, region, candidate, joint)
        found = [_real(g, ids, joint) for g in output[1:]]
        grads = {name: g for name, g in zip(NAMES, found[:3], strict=True) if g is not None}
        biases = {n: g for n, g in zip(region.inputs[3:], found[3:], strict=False) if g is not None}
        if grads and (best is None or len(grads) > len(best.grads)):
            members.discard(candidate)
            members -= {m for m in joint.numbering.all[joint.ids[candidate]]}
            best = Backward(candidate, grads, members, biases)
    return best


def _real(g: Any, ids: dict[Node, int | None], joint: Joint) -> Node | None:
    """The node of the joint graph's backward that holds a traced gradient."""
    i = ids.get(g) if isinstance(g, Node) else None
    real = None if i is None else joint.numbering.first[i]
    return real if real in joint.backward else None


def _number(traced: Graph, region: Region, candidate: Node, joint: Joint
            ) -> tuple[dict[Node, int | None], tuple[Any, ...], set[Node]]:
    """Numbers of the traced nodes when the tangent is ``candidate``; the traced outputs; the real nodes met."""
    nodes = list(traced.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    ids: dict[Node, int | None] = {p: joint.ids[r] for p, r in zip(inputs, region.inputs, strict=False)}
    ids[inputs[-1]] = joint.ids[candidate]
    members: set[Node] = set()
    for n in nodes:
        if n.target is aten.copy_.default and n.args[0].meta["val"].dtype == n.args[1].meta["val"].dtype:
            ids[n] = ids.get(n.args[1])  # what autograd did in place, the joint graph has as a value
        elif n.op == "call_function":
            i = ids[n] = joint.numbering.lookup(n, ids.get)
            if i is not None:
                members.update(m for m in joint.numbering.all[i] if m in joint.backward)
    return ids, tuple(nodes[-1].args[0]), members


def _tangents(nodes: list[Node], tangent: Node, start: dict[Node, int | None], joint: Joint) -> Iterable[Node]:
    """Nodes of the joint graph that could be the gradient of PV: they stand where the traced tangent stands."""
    ids = dict(start)
    pairs: list[tuple[Any, int, int]] = []
    carries = {tangent}  # the tangent itself, rearranged or cast
    for n in nodes:
        if n.op != "call_function":
            continue
        if (target(n) in PRODUCTS or target(n) is aten.mul.Tensor) and sum(a in carries for a in n.args) == 1:
            pos = 0 if n.args[0] in carries else 1
            other = ids.get(n.args[1 - pos])
            if other is not None:
                pairs.append((n.target, pos, other))
                if target(n) is aten.mul.Tensor:
                    pairs.append((n.target, 1 - pos, other))
        if any(i in carries for i in n.all_input_nodes):
            if target(n) in VIEWS or target(n) in CASTS:
                carries.add(n)
            continue
        ids[n] = joint.numbering.lookup(n, ids.get)
    like = tangent.meta["val"]
    seen: set[int] = set()
    for t, pos, other in pairs:
        for real in joint.numbering.nodes_with_target(t):
            if real not in joint.backward or joint.ids.get(real.args[1 - pos]) != other:
                continue
            cand = real.args[pos]
            while is_tensor(cand):
                if spelt_shape(val(cand)) == spelt_shape(like) and val(cand).dtype == like.dtype:
                    if joint.ids[cand] not in seen:
                        seen.add(joint.ids[cand])
                        yield cand
                if target(cand) not in VIEWS and target(cand) not in CASTS:
                    break
                cand = cand.args[0]
