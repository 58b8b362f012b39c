"""From the steps between QK^T and the softmax to a record: scale, score program, mask, what an empty row gives."""
from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node

from ..guards import NAMES
from ..kernels import expr as ex
from ..kernels.expr import SCORE, Expr
from ..kernels.record import Attention
from ..prove import (
    AXES,
    MASK_THRESHOLD,
    AdditiveProof,
    Evaluator,
    MaskProof,
    Materialiser,
    Undecided,
    conjoin,
    prove_additive,
    prove_boolean,
    to_program,
    to_record,
)
from ..prove.values import FALSE, Poly
from ..reasons import Code, Refusal
from .axes import AxesError, Dims, broadcast_operand, group_size, resolve, shape_of
from .block import Block
from .nodes import CASTS, VIEWS, arg, aten, constant, is_tensor, prims, target, val
from .scores import POINTWISE, Step

_UNARY = {"tanh", "abs", "exp", "sigmoid", "relu", "sqrt", "reciprocal"}
_POINTWISE_INPUTS = {*POINTWISE, aten.index.Tensor, aten.slice.Tensor, aten.select.int, aten.full.default,
                     aten.scalar_tensor.default, prims.iota.default, aten.rsub.Scalar, aten.eq.Scalar, aten.ne.Scalar,
                     aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor,
                     aten.logical_not.default, aten.logical_and.default, aten.logical_or.default,
                     aten.bitwise_not.default, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.expand.default,
                     aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar}
_NEVER_REACHED = -1e30
"""A lower clamp at or below it leaves every score alone that is not masked."""
_ABSORBS = 2.0**14
"""An added fill makes a whole row uniform only if rounding to the fill swallows scores up to this size."""

_CUDNN = aten._scaled_dot_product_cudnn_attention.default
_CUDNN_FILL = -65504.0
"""PyTorch writes a boolean mask for cuDNN with this value; for every other backend it writes -inf.  A row without keys
is zero in all of PyTorch's implementations but this one, and is made zero here too."""


@dataclass
class _Mask:
    proof: MaskProof
    fills: tuple[float, ...]
    mode: Literal["add", "replace"]
    eps: float = 0.0
    """Precision in which something else was added to the fills afterwards; 0 when nothing was."""


@dataclass(frozen=True)
class Arranged:
    """A capture that is a tensor of the graph with its dimensions put in the order b, h, q, k."""

    node: Node
    dims: Dims
    want: Dims


@dataclass
class Program:
    """What the steps of a block come to; captures and integers are graph nodes in the operator's order."""

    record: Attention
    captures: list[Node | Arranged]
    ints: list[Any]
    q_factor: Node | Arranged | None = None
    """Tensor ``[B or 1, Hq or 1, Sq or 1, 1]`` or 0-D that Q is multiplied by before it is given to the operator;
    arranged when its gradient is needed."""


class Reader:
    """Reads the steps of one block.

    Args:
        tensors: keep a bias as the tensor that the user's graph has, even where a score program could compute it.
        wanted: operands whose gradient the graph needs; each becomes a capture of its own, masks in it included.
    """

    def __init__(self, block: Block, ev: Evaluator, mat: Materialiser, tensors: bool, *, trained: bool = False,
                 wanted: Collection[Node] = ()) -> None:
        self.block, self.ev, self.mat, self.tensors = block, ev, mat, tensors
        self.trained, self.wanted = trained, wanted
        self._start(exact=False)

    def _start(self, *, exact: bool) -> None:
        """Nothing read yet.  ``exact`` reads a finite fill as the number it is, and not as a mask."""
        self.exact = exact
        self.hazard = False
        """A bias that may be as low as a mask's fill is in the program: it could lift masked keys over visible ones."""
        self.scale = self.block.scale
        self.expr = SCORE
        self.q_factor: Node | Arranged | None = None
        self.shifted = False
        """A row constant was left out; only what keeps it a row constant may follow."""
        self.masks: list[_Mask] = []
        self.finite_fill = False
        self.masks_before_shift = 0
        self.changed_after_shift = False
        """Something was masked or added after a row maximum was subtracted, which makes 0 of a finite fill."""
        self.grads: list[int] = []
        self.captures: list[Any] = []
        self.ints: list[Any] = []

    def read(self) -> Program:
        """
        Raises:
            Refusal: a step has no place in a record.
        """
        self._steps()
        if self.hazard and self.finite_fill:
            self._start(exact=True)
            self._steps()
        return self._finish()

    def _steps(self) -> None:
        for step in self.block.steps:
            try:
                getattr(self, f"_{step.name}", self._unary)(step)
            except (Undecided, AxesError) as e:
                why = str(e) or "an operand has no form over batch, head, query and key"
                raise Refusal(Code.SCORE_OP, f"{step.node.name}: {why}") from e
        if not math.isfinite(self.scale):
            raise Refusal(Code.SCALE)

    # -- operands ------------------------------------------------------------------------------------------------------

    def _dims(self, step: Step, node: Node) -> Dims:
        return broadcast_operand(step.dims, shape_of(val(node)), _full(step))

    def _index(self, step: Step, node: Node) -> tuple[Any, ...]:
        return tuple(self.block.index(resolve(g)) if g else 0 for g in self._dims(step, node))

    def _other(self, step: Step) -> Any:
        other = step.operand if step.operand is not None else step.node.args[1 - step.position]
        if other in self.block.inner and constant(other) is None:
            # its derivative runs through the scores, which the operator's own derivative does not know
            raise Refusal(Code.SCORE_USED, f"{other.name} is computed from them")
        return other

    def _load(self, step: Step, node: Node) -> Expr:
        """The operand as a capture, broadcast to the scores, in float32."""
        return self._capture(self._tensor(step, node))

    def _tensor(self, step: Step, node: Node) -> Node:
        """The operand as a 4-D tensor that broadcasts to the scores, or a 0-D one."""
        value = self.ev.trees.convert(self.ev.value(node, self._index(step, node)), val(node).dtype, val(node).dtype)
        return self.mat.tensor(value) if isinstance(value, Poly) else self.mat.tree(value, True)

    def _own_axes(self, dims: Dims) -> Dims:
        """b, h, q, k of the scores as far as a tensor with these dimensions has them."""
        axes = {a for g in dims for a in resolve(g)}
        own = tuple(tuple(a for a in resolve(g) if a in axes) for g in self.block.s_dims())
        if any(o and o != resolve(g) for o, g in zip(own, self.block.s_dims(), strict=True)):
            raise Refusal(Code.GRAD_CAPTURE, "it varies along a part of the batch or the heads")
        return own

    def _capture(self, node: Node) -> Expr:
        if node not in self.captures:
            self.captures.append(node)
        return self._float(ex.load(self.captures.index(node)))

    def _float(self, e: Expr) -> Expr:
        """A loaded value in the precision of the scores."""
        return Expr("cast", (e, "float64" if val(self.block.v.node).dtype == torch.float64 else "float32"))

    def _no_mask_yet(self, step: Step) -> None:
        if self.masks:
            raise Refusal(Code.SCORE_OP, f"{step.name} after a mask")

    def _no_shift_yet(self, step: Step) -> None:
        if self.shifted:
            raise Refusal(Code.SCORE_OP, f"{step.name} after the row maximum is subtracted")

    # -- steps -----------------------------------------------------------------------------------------------------------

    def _cast(self, step: Step) -> None:
        # Scores stay in float32 from QK^T to the softmax, so a rounding in between is left out; a fill is rounded.
        self._map_fills(lambda f: _round(f, val(step.node).dtype))

    def _map_fills(self, f: Any) -> None:
        for m in self.masks:
            m.fills = tuple(dict.fromkeys(f(x) for x in m.fills))

    def _mul(self, step: Step) -> None:
        other = self._other(step)
        c = constant(other)
        if c is None:
            if not is_tensor(other) or not val(other).dtype.is_floating_point:
                raise Refusal(Code.INTEGER if is_tensor(other) else Code.SCALE, f"{step.node.name}")
            self._times(step, other, "mul")
            return
        self._multiply(step, float(c))

    def _times(self, step: Step, other: Node, op: str) -> None:
        """The score times or over a tensor; one that no key sees is moved to Q, where it costs nothing."""
        self._no_mask_yet(step)
        keys = set(resolve(self.block.k_axes))
        fits_q = self._rounds_like_q()
        if not fits_q or self.expr != SCORE or any(keys & set(resolve(g)) for g in self._dims(step, other)):
            self._no_shift_yet(step)
            if other in self.wanted:
                raise Refusal(Code.GRAD_CAPTURE, f"{other.name} multiplies the scores key by key")
            self.expr = Expr(op, (self.expr, self._load(step, other)))
            return
        if other in self.wanted or isinstance(self.q_factor, Arranged):
            if op != "mul" or self.q_factor is not None:
                raise Refusal(Code.GRAD_CAPTURE, f"{other.name} divides the scores, or is one of several factors")
            dims = self._dims(step, other)
            self.q_factor = Arranged(other, dims, self._own_axes(dims))
            return
        factor = self._tensor(step, other)
        if op == "div":
            factor = self.mat.call(aten.reciprocal.default, factor)
        self.q_factor = factor if self.q_factor is None else self.mat.call(aten.mul.Tensor, self.q_factor, factor)

    def _rounds_like_q(self) -> bool:
        """Whether Q times a factor, rounded to Q's dtype, loses no more than the user's own scores do.

        float16 does not: the product may leave its range.
        """
        chain = self.block.chain
        if val(self.block.q.node).dtype in (torch.float32, torch.float64):
            return True
        return chain is not None and val(chain.path.product).dtype == torch.bfloat16

    def _multiply(self, step: Step, c: float) -> None:
        if not math.isfinite(c):
            raise Refusal(Code.SCALE, f"{c}")
        if self.masks and c <= 0:
            raise Refusal(Code.MASK_FILL, "a mask is multiplied by a factor that is not positive")
        dtype = val(step.node).dtype
        self._map_fills(lambda f: _round(f * c, dtype))
        if any(f > MASK_THRESHOLD for m in self.masks for f in m.fills):
            raise Refusal(Code.MASK_FILL, "a mask is scaled to a small value")
        if self.expr == SCORE:
            self.scale *= c
        else:
            self.expr = Expr("mul", (self.expr, ex.const(c)))

    def _div(self, step: Step) -> None:
        other = self._other(step)
        c = constant(other)
        if step.node.kwargs.get("rounding_mode") or step.position != 0:
            raise Refusal(Code.SCORE_OP, "division")
        if c is None:
            if not is_tensor(other) or not val(other).dtype.is_floating_point:
                raise Refusal(Code.SCALE, step.node.name)
            self._times(step, other, "div")
            return
        if c == 0:
            raise Refusal(Code.SCALE, "division by zero")
        self._multiply(step, 1.0 / float(c))

    def _neg(self, step: Step) -> None:
        self._no_mask_yet(step)
        if self.expr == SCORE:
            self.scale = -self.scale
        else:
            self.expr = Expr("neg", (self.expr,))

    def _unary(self, step: Step) -> None:
        if step.name not in _UNARY:
            raise Refusal(Code.SCORE_OP, step.name)
        self._no_mask_yet(step)
        self._no_shift_yet(step)
        self.expr = Expr(step.name, (self.expr,))

    def _maximum(self, step: Step) -> None:
        c = constant(step.node.args[1 - step.position] if step.position == 0 else step.node.args[0])
        if c is None:
            raise Refusal(Code.SCORE_OP, "maximum with a tensor")
        if c <= _NEVER_REACHED or (val(step.node).dtype == torch.float16 and c <= torch.finfo(torch.float16).min):
            self._map_fills(lambda f: max(f, float(c)))
            return
        self._no_mask_yet(step)
        self._no_shift_yet(step)
        self.expr = Expr("maximum", (self.expr, ex.const(float(c))))

    def _minimum(self, step: Step) -> None:
        c = constant(step.node.args[1 - step.position] if step.position == 0 else step.node.args[0])
        if c is None:
            raise Refusal(Code.SCORE_OP, "minimum with a tensor")
        self._no_mask_yet(step)
        self._no_shift_yet(step)
        self.expr = Expr("minimum", (self.expr, ex.const(float(c))))

    def _added_product(self, step: Step) -> None:
        alpha, beta = step.node.kwargs.get("alpha", 1), step.node.kwargs.get("beta", 1)
        if not isinstance(alpha, (int, float)) or not isinstance(beta, (int, float)):
            raise Refusal(Code.SCALE, step.node.name)
        self._multiply(step, float(alpha))
        if beta != 0:
            self._add_operand(step, self._other(step), float(beta))

    def _bias(self, step: Step) -> None:
        self._add_operand(step, self._other(step), 1.0)

    def _add(self, step: Step) -> None:
        alpha = arg(step.node, 2, "alpha", 1)
        if step.position == 1:
            if alpha != 1:
                raise Refusal(Code.SCORE_OP, f"the scores are added with alpha={alpha}")
        self._add_operand(step, self._other(step), float(alpha) if step.position == 0 else 1.0)

    def _sub(self, step: Step) -> None:
        alpha = float(arg(step.node, 2, "alpha", 1))
        if step.position == 1:
            if alpha != 1:
                raise Refusal(Code.SCORE_OP, f"the scores are subtracted with alpha={alpha}")
            self._neg(step)
            self._add_operand(step, self._other(step), 1.0)
            return
        if _is_row_max_of_keys(step, self.block):
            if self.block.sink is not None:
                raise Refusal(Code.SCORE_OP, "the row maximum is subtracted from the scores and not from the sink")
            self.shifted = True
            self.masks_before_shift = len(self.masks)
            return
        self._add_operand(step, self._other(step), -alpha)

    def _add_operand(self, step: Step, other: Any, factor: float) -> None:
        c = constant(other)
        if c is not None:
            c = float(c) * factor
            if not math.isfinite(c):
                raise Refusal(Code.MASK_FILL, f"{c} is added to every score")
            if c != 0.0:
                self.expr = Expr("add", (self.expr, ex.const(c)))
            return
        if not is_tensor(other):
            raise Refusal(Code.SCORE_OP, f"{step.node.name} adds a value that is not known")
        if other in self.wanted:
            self._differentiable(step, other, factor)
            return
        if factor != 1.0:
            other = self.mat.before(self.block.out).call(aten.mul.Tensor, other, factor)
        dtype = val(step.node).dtype if step.name != "bias" else None
        self._shift_fills(step)
        proof = prove_additive(self.ev, other, self._index(step, other), dtype)
        if step.node.target is _CUDNN and proof.fills == (_round(_CUDNN_FILL, val(other).dtype),):
            self.masks.append(_Mask(proof, (float("-inf"),), "replace"))
            if proof.residual is not None:
                self._add_residual(proof.residual)
        elif not proof.always_true and self._is_mask(proof, dtype or val(other).dtype):
            self._mask(proof, proof.fills, "add")
            if proof.residual is not None:
                self.hazard |= _only_inputs(other)
                self._add_residual(proof.residual)
        elif not proof.always_true:
            self.hazard = True
            self.expr = Expr("add", (self.expr, self._load(step, other)))  # exact, as a bias
        elif proof.residual is not None:
            self.hazard |= _only_inputs(other)
            self._add_residual(proof.residual)

    def _mask(self, proof: MaskProof, fills: tuple[float, ...], mode: Literal["add", "replace"]) -> None:
        self.finite_fill |= any(not math.isinf(f) for f in fills)
        self.masks.append(_Mask(proof, fills, mode))

    def _shift_fills(self, step: Step) -> None:
        self.changed_after_shift |= self.shifted
        for m in self.masks:
            m.eps = max(m.eps, torch.finfo(val(step.node).dtype).eps)

    def _differentiable(self, step: Step, other: Node, factor: float) -> None:
        if abs(factor) != 1.0 or any(a.node is other for a in self.captures if isinstance(a, Arranged)):
            raise Refusal(Code.GRAD_CAPTURE, f"{other.name} is added with a factor, or twice")
        self._shift_fills(step)
        dims = self._dims(step, other)
        self.grads.append(len(self.captures))
        self.captures.append(Arranged(other, dims, self._own_axes(dims)))
        bias = self._float(ex.load(self.grads[-1]))
        self.expr = Expr("add" if factor > 0 else "sub", (self.expr, bias))

    def _is_mask(self, proof: AdditiveProof, dtype: torch.dtype) -> bool:
        """Whether the masked positions may be left out of the softmax with nothing changed."""
        if self.exact and any(not math.isinf(f) for f in proof.fills):
            return False
        if conjoin(self.ev, [m.proof for m in self.masks] + [proof]).nonempty:
            return True
        eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        return all(_absorbs(f, eps) for f in proof.fills)

    def _add_residual(self, tree: Any) -> None:
        if not self.tensors:
            captures, ints = list(self.captures), list(self.ints)
            try:
                program = to_program(tree, self.mat, captures, ints)
            except Undecided:
                pass
            else:
                self.captures, self.ints = captures, ints
                if program.op == "load":
                    program = self._float(program)
                self.expr = Expr("add", (self.expr, program))
                return
        self.expr = Expr("add", (self.expr, self._capture(self.mat.tree(tree, True))))

    def _where(self, step: Step) -> None:
        cond = step.node.args[0]
        if step.position == 0:
            raise Refusal(Code.SCORE_OP, "the scores decide a where")
        self._select(step, cond, step.node.args[3 - step.position], attend=step.position == 1)

    def _masked_fill(self, step: Step) -> None:
        self._select(step, step.node.args[1], step.node.args[2], attend=False)

    def _select(self, step: Step, cond: Any, other: Any, *, attend: bool) -> None:
        """The score where ``cond`` is ``attend``, the constant ``other`` elsewhere."""
        fill = constant(other)
        if cond in self.block.inner:
            raise Refusal(Code.SCORE_USED, f"{cond.name} is computed from them")
        if fill is None or not is_tensor(cond):
            raise Refusal(Code.SCORE_OP, "where between the scores and a tensor")
        fill = _round(float(fill), val(step.node).dtype)
        proof = prove_boolean(self.ev, cond, self._index(step, cond), attend)
        if fill <= MASK_THRESHOLD and not (self.exact and not math.isinf(fill)):
            self.changed_after_shift |= self.shifted
            if not proof.always_true:
                self._mask(proof, (fill,), "replace")
            return
        if math.isnan(fill) or math.isinf(fill):
            raise Refusal(Code.MASK_FILL, f"{fill}")
        self._no_mask_yet(step)
        self._no_shift_yet(step)
        if proof.always_true:
            return
        node = self.mat.pred(proof.pred)
        if node not in self.captures:
            self.captures.append(node)
        self.expr = Expr("where", (ex.load(self.captures.index(node)), self.expr, ex.const(fill)))

    def _causal(self, step: Step) -> None:
        q, k = (Poly.of(a) for a in AXES[2:])
        self.masks.append(_Mask(self._proof(self.ev.facts.cmp("ge", q - k)), (float("-inf"),), "replace"))

    def _proof(self, pred: Any) -> MaskProof:
        return conjoin(self.ev, [MaskProof((), pred, False)])

    # -- the record --------------------------------------------------------------------------------------------------

    def _finish(self) -> Program:
        b = self.block
        fill, mode, empty = float("-inf"), "replace", "never"
        atoms: tuple[Any, ...] = ()
        sink: int | None = None
        if b.sink is not None:
            sink = len(self.captures)
            if b.sink.node in self.wanted:
                self.grads.append(sink)
            self.captures.append(Arranged(b.sink.node, b.sink.dims, (b.heads,)))
        if self.masks:
            proof = conjoin(self.ev, [m.proof for m in self.masks])
            if proof.pred == FALSE:
                raise Refusal(Code.EMPTY_ROWS, "every key is masked")
            fills = {f for m in self.masks for f in m.fills}
            if not proof.nonempty and sink is not None and fills != {float("-inf")}:
                # eager code shares such a row between the keys and the sink; which gets it depends on the sink's value
                raise Refusal(Code.EMPTY_ROWS, "a row may have no key but the sink, and the mask's fill is finite")
            if not proof.nonempty and sink is None:
                fill, mode, empty = self._empty(fills)
            atoms, self.captures, self.ints = to_record(proof.atoms, self.mat, self.captures, self.ints)
        sizes = [group_size(resolve(g)) for g in (b.heads, b.kv_heads, b.d_axes, b.dv_axes)]
        record = Attention(
            q_heads=sizes[0], kv_heads=sizes[1], head_dim=sizes[2], head_dim_v=sizes[3],  # type: ignore[arg-type]
            dtype=NAMES[val(b.v.node).dtype], scale=self.scale, score=self.expr, mask=atoms, fill=fill,
            fill_mode=mode, empty_rows=empty, sink=sink, grads=tuple(self.grads))  # type: ignore[arg-type]
        return Program(record, self.captures, self.ints, self.q_factor)

    def _empty(self, fills: set[float]) -> tuple[float, str, str]:
        """(fill, fill mode, empty rows) when a row may be masked as a whole."""
        modes = {m.mode for m in self.masks}
        if self.masks_before_shift and self.changed_after_shift:
            raise Refusal(Code.MASK_FILL, "a row maximum is subtracted between two masks")
        if fills == {float("-inf")}:
            if self.block.safe:
                return float("-inf"), "replace", "zero"
            if len(modes) > 1 and self.trained:  # where the NaN of such a row goes depends on which mask hides it
                raise Refusal(Code.MASK_FILL, "-inf is both added and filled in")
            return float("-inf"), modes.pop(), "nan"
        one = len(fills) == 1 and (modes == {"replace"} or len(self.masks) == 1)
        if not one or not all(m.eps == 0.0 or _absorbs(f, m.eps) for m in self.masks for f in m.fills):
            raise Refusal(Code.MASK_FILL, ", ".join(f"{f:g}" for f in sorted(fills)))
        return fills.pop(), modes.pop(), "mean"


def _only_inputs(node: Node) -> bool:
    """Whether a bias is made of graph inputs and constants alone, as a user's own mask tensor is.

    Anything else on the way (an embedding, a product) makes it a learned bias, which is taken to be small beside a
    mask's fill.
    """
    todo, seen = [node], 0
    while todo and seen < 64:
        n = todo.pop()
        seen += 1
        if n.op == "placeholder" or n.op == "get_attr" or not is_tensor(n):
            continue
        if target(n) not in VIEWS and target(n) not in CASTS and target(n) not in _POINTWISE_INPUTS:
            return False
        todo += n.all_input_nodes
    return True


def _absorbs(fill: float, eps: float) -> bool:
    """Whether adding a score to the fill gives the fill again."""
    return math.isinf(fill) or abs(fill) * eps / 2 >= _ABSORBS


def _full(step: Step) -> Any:
    if step.name == "bias":
        return tuple(group_size(resolve(g)) for g in step.dims)
    return shape_of(val(step.node))


def _round(x: float, dtype: torch.dtype) -> float:
    with unset_fake_temporarily():
        return float(torch.tensor(x, dtype=torch.float64).to(dtype).item())


def _is_row_max_of_keys(step: Step, block: Block) -> bool:
    from .softmax import row_max_of

    m = row_max_of(step.node.args[1])
    if m is None:
        return False
    dims = step.dims if val(m[0]).dim() == len(step.dims) else None
    return dims is not None and set(resolve(dims[m[1]])) == set(resolve(block.k_axes)) and m[0] is step.node.args[0]
