"""One joint graph, start to end: recognise, prove, guard, rewrite, report."""
from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, Node

from . import ahead, guards
from .kernels.expr import SCORE
from .options import options
from .prove import Context, Evaluator, Materialiser, Undecided
from .reasons import Code, Reason, Refusal
from .recognise.axes import size_hint, spelled_alike
from .recognise.backward import Backward, Joint, find_backward, leftovers, region_of
from .recognise.block import Block, build_block, sizes
from .recognise.direction import backward_nodes, functional_backward
from .recognise.equal_sizes import equal_sizes
from .recognise.nodes import val
from .recognise.program import Program, Reader
from .recognise.sdpa import backward_calls, build_sdpa_block, find_sdpa, find_sdpa_backward
from .recognise.softmax import Softmax, find_softmaxes
from .recognise.source import source_of
from .report import Block as BlockReport
from .report import GraphReport, graph_id
from .rewrite.apply import Inputs, Rewriter
from .sizes import read_sizes_once

log = logging.getLogger(__name__)
_rewrites = 0


@dataclass
class _Plan:
    """One anchor and what became of it."""

    anchor: Node
    kind: Literal["softmax", "sdpa"]
    source: str
    block: Block | None = None
    backward: Backward | None = None
    program: Program | None = None
    backend: str = ""
    reason: Reason | None = None
    note: str = ""
    call: Node | None = None
    """The operator that stands for the block."""

    @property
    def accepted(self) -> bool:
        return self.program is not None and self.reason is None


class _Pass:
    """The state of one pass over one graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.backward = backward_nodes(graph)
        self._softmaxes = list(find_softmaxes(graph, self.backward))
        self._operators = list(find_sdpa(graph, self.backward))
        if not self.backward:
            self.backward = functional_backward(
                graph, [s.out for s in self._softmaxes], {n: backward_calls(n) for n in self._operators})
        self.position = {n: i for i, n in enumerate(graph.nodes)}
        self.accepted = 0
        self._outputs: set[Node] = set()
        """The products PV of the blocks accepted so far."""
        self._joint: Joint | None = None
        self._evaluators: dict[tuple[str, ...], tuple[Evaluator, Materialiser]] = {}

    @property
    def joint(self) -> Joint:
        if self._joint is None:
            self._joint = Joint.of(self.graph, self.backward)
        return self._joint

    def anchors(self) -> Iterator[Softmax | Node]:
        found: list[tuple[int, Softmax | Node]] = [
            (self.position[s.out], s) for s in self._softmaxes if s.out not in self.backward]
        found += [(self.position[n], n) for n in self._operators]
        yield from (a for _, a in sorted(found, key=lambda x: x[0]))

    def prover(self, block: Block) -> tuple[Evaluator, Materialiser]:
        """One evaluator for all blocks with scores of this shape, so that a shared mask is proved once."""
        b, h, q, k = sizes(block)
        key = tuple(map(str, (b, h, q, k)))
        if key not in self._evaluators:
            try:
                ev = Evaluator(Context(b, h, q, k))
            except Undecided as e:
                raise Refusal(Code.RANK, f"a size of the scores, one of {', '.join(key)}, is not understood") from e
            self._evaluators[key] = ev, Materialiser(self.graph, block.out, ev)
        ev, mat = self._evaluators[key]
        return ev, mat.before(block.out)

    # -- one block -----------------------------------------------------------------------------------------------------

    def plan(self, anchor: Softmax | Node) -> _Plan | None:
        """None when the anchor is a softmax with no attention around it."""
        node = anchor.out if isinstance(anchor, Softmax) else anchor
        plan = _Plan(node, "softmax" if isinstance(anchor, Softmax) else "sdpa", source_of(node))
        try:
            if isinstance(anchor, Softmax):
                try:
                    plan.block = build_block(anchor, self.backward)
                except Refusal as r:
                    if anchor.altered and r.reason.code is Code.WEIGHTS_USED:  # by what alters it
                        raise Refusal(Code.NOT_ATTENTION, anchor.altered) from r
                    raise
                if plan.block is None:
                    return None
                if anchor.altered:
                    raise Refusal(Code.NOT_ATTENTION, anchor.altered)
                if plan.block.chain is not None and plan.block.chain.path.product in self._outputs:
                    raise Refusal(Code.NO_QK, "their product is the output of another block")
                self._pair(plan.block, plan)
            else:
                plan.block = build_sdpa_block(anchor)
                plan.backward = find_sdpa_backward(plan.block, self.joint) if self.backward else None
            self._record(plan)
        except Refusal as r:
            plan.reason = r.reason
        except Undecided as e:
            plan.reason = Reason(Code.RANK, str(e))
        except Exception as e:
            log.warning("an attention block could not be analysed and was left alone", exc_info=True)
            plan.reason = Reason(Code.INTERNAL, f"{type(e).__name__}: {e}")
        return plan

    def _pair(self, block: Block, plan: _Plan) -> None:
        """Find the backward of a written-out attention; nothing of score size may stay alive."""
        region = region_of(block, self.position)
        block.inner = frozenset(region.nodes)
        for step in block.steps:
            for other in step.others():
                if other in block.inner:
                    raise Refusal(Code.SCORE_OP, f"{other.name} is computed from the scores too")
        if self.backward and self._differentiated(region.nodes):
            plan.backward = find_backward(block, self.joint)
        left = leftovers(block, region, plan.backward, self.position)
        if left and plan.backward is not None and (left[0] in self.backward or block.lse is not None):
            plan.backward = find_backward(block, self.joint, biases=True)
            left = leftovers(block, region, plan.backward, self.position)
            plan.backward = _needed(plan.backward)
        if left:
            forward = [n for n in left if n not in self.backward]
            softmax = block.chain.softmax.members if block.chain is not None else ()
            if forward and any(u not in self.backward for n in (*forward, *softmax, *block.sink_members)
                               for u in n.users if u not in region.nodes):
                raise Refusal(Code.SCORE_USED, f"{forward[0].name}")
            raise Refusal(Code.BACKWARD, f"{left[0].name} stays in use")

    def _differentiated(self, nodes: list[Node]) -> bool:
        """Whether any gradient passes through the block (a frozen encoder in a trained model has none)."""
        return any(u in self.backward for n in nodes for u in n.users)

    def _record(self, plan: _Plan) -> None:
        """Read the score program, then ask the guards; a bias is tried as a program first, then as a tensor."""
        block = plan.block
        assert block is not None
        reason = guards.tensors(*(val(o.node) for o in (block.q, block.k, block.v)))
        if reason is not None:
            plan.reason = reason
            return
        for tensors in (False, True):
            ev, mat = self.prover(block)
            plan.program = Reader(block, ev, mat, tensors, plan.backward).read()
            plan.backend, plan.reason = guards.choose(plan.program.record, self._site(block, plan))
            score = plan.program.record.score
            if guards.wants_tensors(plan.program.record, plan.backend):
                continue
            if plan.reason is None or score == SCORE or plan.program.record.bias() is not None:
                break
        if plan.reason is None and options.max_rewrites is not None:
            if _rewrites + self.accepted >= options.max_rewrites:
                plan.reason = Reason(Code.LIMIT)
        if plan.reason is None:
            self.accepted += 1
            if block.chain is not None:
                self._outputs.add(block.chain.values.product)

    def _site(self, block: Block, plan: _Plan) -> guards.Site:
        device = val(block.q.node).device
        b, _, q, k = sizes(block)
        hints = [size_hint(x, val(block.q.node), val(block.k.node)) for x in (b, q, k)]
        return guards.Site(device, options.resolved_target(device), plan.backward is not None,
                           (hints[0], hints[1], hints[2]))


def run(graph: Graph) -> GraphReport:
    """Rewrite every attention block of a joint graph that may be rewritten.

    Edits ``graph`` in place.  Never raises for what it finds in the graph: a block that cannot be understood is
    left alone, with its reason in the report.
    """
    # The compiler may have its fake mode on; constants are looked at for real, new nodes turn it on themselves.
    with unset_fake_temporarily(), spelled_alike(equal_sizes(graph)):
        return _run(graph)


def _run(graph: Graph) -> GraphReport:
    global _rewrites
    key = graph_id(graph)
    state = _Pass(graph)
    anchors = list(state.anchors())
    if anchors:
        read_sizes_once(graph)
    plans = [p for p in map(state.plan, anchors) if p is not None]
    rewriter = Rewriter(graph)
    reports: list[BlockReport] = []
    for i, plan in enumerate(plans):
        if plan.accepted:
            _apply(plan, rewriter, f"{key}#{i}")
    for plan in plans:
        if plan.accepted:
            assert plan.block is not None
            rewriter.erase(plan.block, plan.backward)
            _rewrites += 1
        reports.append(_report(plan))
    if plans:
        graph.eliminate_dead_code()
    calls = [p.call for p in plans if p.accepted and p.call is not None and p.backend.startswith("kernels")]
    if calls:
        ahead.begin(calls)
    return GraphReport(key, tuple(reports))


def _apply(plan: _Plan, rewriter: Rewriter, block_id: str) -> None:
    """Rewrite one block, or leave it exactly as it was and say why."""
    block, program = plan.block, plan.program
    assert block is not None and program is not None
    rewriter.begin()
    try:
        inputs = Inputs(list(program.captures),
                        [rewriter.now(n) if isinstance(n, Node) else n for n in program.ints],
                        rewriter.now(program.q_factor) if isinstance(program.q_factor, Node) else program.q_factor)
        out, lse, qkv = rewriter.forward(block, program.record, inputs, block_id)
        if plan.backward is not None:
            rewriter.backward(block, program.record, inputs, block_id, plan.backward, out, lse, qkv)
        if options.validate:
            _validate(plan, rewriter)
        plan.call = out.args[0]  # type: ignore[assignment]
    except Exception as e:
        rewriter.undo()
        if isinstance(e, Refusal):
            plan.reason = e.reason
            return
        log.warning("an attention block could not be rewritten and was left alone", exc_info=True)
        plan.reason = Reason(Code.INTERNAL, f"{type(e).__name__}: {e}")


def _validate(plan: _Plan, rewriter: Rewriter) -> None:
    """
    Raises:
        Refusal: the rewrite computes something else than the code it replaces.
    """
    from .validate import CannotValidate, difference

    try:
        found = difference(rewriter.pairs, rewriter.leaves, plan.program.record)
    except CannotValidate as e:
        plan.note = f"not validated: {e}"
        return
    if found is not None:
        log.error("a rewrite of %s is wrong and was taken back; please report this: %s", plan.source, found)
        raise Refusal(Code.VALIDATION, found)
    plan.note = "validated"


def _needed(found: Backward) -> Backward:
    """Without the bias gradients that only this backward itself uses: they are a step on the way to dq and dk."""
    inside = found.members | found.replaced()
    biases = {n: g for n, g in found.biases.items() if any(u not in inside for u in g.users)}
    return replace(found, biases=biases)


def _report(plan: _Plan) -> BlockReport:
    words = plan.program.record.describe() if plan.program is not None else ""
    if plan.accepted:
        return BlockReport(plan.source, plan.kind, words, "rewritten", plan.backend,
                           training=plan.backward is not None, note=plan.note)
    return BlockReport(plan.source, plan.kind, words, "refused", "", plan.reason or Reason(Code.INTERNAL))
