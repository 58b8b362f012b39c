"""From the steps between QK^T and the softmax to a record: scale, score program, mask, what an empty row gives."""
from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..kernels import expr as ex
from ..kernels.expr import SCORE, Expr
from ..kernels.record import Attention
from ..prove import (
    AXES,
    MASK_THRESHOLD,
    Evaluator,
    MaskProof,
    Materialiser,
    Undecided,
    conjoin,
    prove_additive,
    prove_boolean,
    to_record,
)
from ..prove.values import Poly
from ..reasons import Code, Refusal
from .axes import AxesError, group_size, resolve
from .backward import Backward
from .block import Block
from .bounds import bounded, is_floor
from .captures import Arranged, Captures, only_inputs
from .exp_range import EXP_RANGE, of_program, of_proof, of_tree
from .masking import Masks, rounded
from .nodes import arg, aten, constant, is_tensor, val
from .rounding import beyond_float32, check_kept, swallows
from .scores import Step, is_row_max_of

_UNARY = {"tanh", "abs", "exp", "sigmoid", "relu", "sqrt", "reciprocal"}
_ABOVE_MASKS = 2.0**24
"""A tensor that scores are multiplied by is taken to stay below it."""

_CUDNN = aten._scaled_dot_product_cudnn_attention.default
_CUDNN_FILL = -65504.0
"""PyTorch writes a boolean mask for cuDNN with this value; for every other backend it writes -inf.  A row without keys
is zero in all of PyTorch's implementations but this one, and is made zero here too."""


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
        found: the backward, in training.  An operand whose gradient it has becomes a capture of its own, masks in it
            included.
    """

    def __init__(self, block: Block, ev: Evaluator, mat: Materialiser, tensors: bool, found: Backward | None = None
                 ) -> None:
        self.block, self.ev, self.mat, self.tensors = block, ev, mat, tensors
        self.trained = found is not None
        self.wanted: Collection[Node] = () if found is None else found.biases
        self.strict: Collection[Node] = () if found is None else found.strict
        self._start(exact=False)

    def _start(self, *, exact: bool) -> None:
        """Nothing read yet."""
        self.scale = self.block.scale
        self.expr = SCORE
        self.q_factor: Node | Arranged | None = None
        self.masks = Masks(self.ev, exact)
        self.captures = Captures(self.block, self.ev, self.mat, self.tensors)
        self.reach: dict[int, float] = {}
        """How large the constants in a captured bias may make it, by the capture's number."""

    def read(self) -> Program:
        """
        Raises:
            Refusal: a step has no place in a record.
        """
        self._steps()
        if self.masks.hazard and self.masks.finite_fill:
            self._start(exact=True)
            self._steps()
        return self._finish()

    def _steps(self) -> None:
        lost = False  # what eager code still tells apart after a row maximum, and the record does not
        for step in self.block.steps:
            if lost and step.name != "cast":
                raise Refusal(Code.EMPTY_ROWS, "a row maximum is subtracted from scores beside a large number")
            try:
                getattr(self, f"_{step.name}", self._unary)(step)
            except (Undecided, AxesError) as e:
                why = str(e) or "an operand has no form over batch, head, query and key"
                raise Refusal(Code.SCORE_OP, f"{step.node.name}: {why}") from e
            if self.block.chain is not None:
                lost |= self._rounded(self.block.chain.path.product, step)
        if not math.isfinite(self.scale):
            raise Refusal(Code.SCALE)

    def _rounded(self, product: Node, step: Step) -> bool:
        """Whether a row maximum is subtracted here from scores that the record's precision does not hold.

        Raises:
            Refusal: the model rounds them as well, to less than that.
        """
        kept = torch.float64 if val(self.block.v.node).dtype == torch.float64 else torch.float32
        reach, dtype = of_program(self.expr, self.reach), val(step.node).dtype
        if kept == torch.float64 or torch.finfo(dtype).eps > torch.finfo(val(product).dtype).eps:
            check_kept(reach, dtype, kept)
        return step.name == "sub" and is_row_max_of(step, self.block.k_axes) and swallows(reach, kept)

    # -- steps -----------------------------------------------------------------------------------------------------------

    def _no_mask_yet(self, step: Step) -> None:
        if self.masks:
            raise Refusal(Code.SCORE_OP, f"{step.name} after a mask")

    def _no_shift_yet(self, step: Step) -> None:
        if self.masks.shifted:
            raise Refusal(Code.SCORE_OP, f"{step.name} after the row maximum is subtracted")

    def _cast(self, step: Step) -> None:
        # Scores stay in float32 from QK^T to the softmax, so a rounding in between is left out; a fill is rounded.
        self.masks.round(val(step.node).dtype)

    def _mul(self, step: Step) -> None:
        other = self.captures.other(step)
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
        if not fits_q or self.expr != SCORE or any(keys & set(resolve(g)) for g in self.captures.dims(step, other)):
            self._no_shift_yet(step)
            self._overflows(_ABOVE_MASKS, val(step.node).dtype)
            if other in self.wanted:
                raise Refusal(Code.GRAD_CAPTURE, f"{other.name} multiplies the scores key by key")
            self.expr = Expr(op, (self.expr, self.captures.load(step, other)))
            return
        if other in self.wanted or isinstance(self.q_factor, Arranged):
            if op != "mul" or self.q_factor is not None:
                raise Refusal(Code.GRAD_CAPTURE, f"{other.name} divides the scores, or is one of several factors")
            self.q_factor = self.captures.arranged(step, other)
            return
        factor = self.captures.tensor(step, other)
        if op == "div":
            factor = self.mat.call(aten.reciprocal.default, factor)
        self.q_factor = factor if self.q_factor is None else self.mat.call(aten.mul.Tensor, self.q_factor, factor)

    def _overflows(self, factor: float, dtype: torch.dtype) -> None:
        """
        Raises:
            Refusal: a number that scores were replaced by becomes infinite.  A row of such scores is NaN, also in the
                gradient of the keys that a later mask hides, and the record cannot say this.
        """
        for e in self.expr.walk():
            if e.op == "const" and isinstance(e.args[0], float) and math.isinf(rounded(e.args[0] * factor, dtype)):
                raise Refusal(Code.MASK_FILL, f"{e.args[0]:g} times {factor:g}")

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
        self.masks.multiply(c, val(step.node).dtype)
        self._overflows(c, val(step.node).dtype)
        if self.expr == SCORE:
            self.scale *= c
        else:
            self.expr = Expr("mul", (self.expr, ex.const(c)))

    def _div(self, step: Step) -> None:
        other = self.captures.other(step)
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
        self._bound(step, "maximum")

    def _minimum(self, step: Step) -> None:
        self._bound(step, "minimum")

    def _bound(self, step: Step, op: str) -> None:
        """The score, or a number that it is no less or no more than."""
        c = constant(step.node.args[1 - step.position] if step.position == 0 else step.node.args[0])
        if c is None:
            raise Refusal(Code.SCORE_OP, f"{op} with a tensor")
        if op == "maximum" and is_floor(step.node, c):
            self.masks.raise_to(float(c))
            return
        self._no_mask_yet(step)
        self._no_shift_yet(step)
        self.expr = bounded(self.expr, op, float(c), step.node, trained=self.trained, strict=self.strict)

    def _added_product(self, step: Step) -> None:
        alpha, beta = step.node.kwargs.get("alpha", 1), step.node.kwargs.get("beta", 1)
        if not isinstance(alpha, (int, float)) or not isinstance(beta, (int, float)):
            raise Refusal(Code.SCALE, step.node.name)
        self._multiply(step, float(alpha))
        if beta != 0:
            self._add_operand(step, self.captures.other(step), float(beta))

    def _bias(self, step: Step) -> None:
        self._add_operand(step, self.captures.other(step), 1.0)

    def _add(self, step: Step) -> None:
        alpha = arg(step.node, 2, "alpha", 1)
        if step.position == 1:
            if alpha != 1:
                raise Refusal(Code.SCORE_OP, f"the scores are added with alpha={alpha}")
        self._add_operand(step, self.captures.other(step), float(alpha) if step.position == 0 else 1.0)

    def _sub(self, step: Step) -> None:
        alpha = float(arg(step.node, 2, "alpha", 1))
        if step.position == 1:
            if alpha != 1:
                raise Refusal(Code.SCORE_OP, f"the scores are subtracted with alpha={alpha}")
            self._neg(step)
            self._add_operand(step, self.captures.other(step), 1.0)
            return
        if is_row_max_of(step, self.block.k_axes):
            if self.block.sink is not None:
                raise Refusal(Code.SCORE_OP, "the row maximum is subtracted from the scores and not from the sink")
            self.masks.shift()
            return
        self._add_operand(step, self.captures.other(step), -alpha)

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
        dtype = val(step.node).dtype if step.name != "bias" else None
        self.masks.added(dtype or val(other).dtype)
        if other in self.wanted:
            if abs(factor) != 1.0:
                raise Refusal(Code.GRAD_CAPTURE, f"{other.name} is added with a factor")
            self.masks.differentiated()
            proof = prove_additive(self.ev, other, self.captures.index(step, other), dtype)
            self._plus(self.captures.differentiable(step, other), "add" if factor > 0 else "sub", of_proof(proof),
                       of_tree(proof.residual))
            return
        if factor != 1.0:
            other = self.mat.before(self.block.out).call(aten.mul.Tensor, other, factor)
        proof = prove_additive(self.ev, other, self.captures.index(step, other), dtype)
        if step.node.target is _CUDNN and proof.fills == (rounded(_CUDNN_FILL, val(other).dtype),):
            self.masks.append(proof, (float("-inf"),), "replace")
            if proof.residual is not None:
                self._plus(self.captures.residual(proof.residual), size=of_tree(proof.residual))
        elif not proof.always_true and self.masks.may_leave_out(proof, proof.fills, dtype or val(other).dtype):
            self.masks.append(proof, proof.fills, "add")
            if proof.residual is not None:
                self.masks.hazard |= only_inputs(other)
                self._plus(self.captures.residual(proof.residual), size=of_tree(proof.residual))
        elif not proof.always_true:
            self.masks.hazard = True
            self._plus(self.captures.load(step, other), size=of_proof(proof))  # exact, as a bias
        elif proof.residual is not None:
            self.masks.hazard |= only_inputs(other)
            self._plus(self.captures.residual(proof.residual), size=of_tree(proof.residual))

    def _plus(self, e: Expr, op: str = "add", size: float = 0.0, bias: float | None = None) -> None:
        """``size``: what the constants in it may make of it; ``bias``: without its mask's fills, if that differs."""
        self.masks.hazard |= (size if bias is None else bias) >= -MASK_THRESHOLD
        inner = e.args[0] if e.op == "cast" else e
        if isinstance(inner, Expr) and inner.op in ex.READS:  # the whole operand, and not a part of its program
            self.reach[inner.args[0]] = max(size, self.reach.get(inner.args[0], 0.0))  # type: ignore[index, arg-type]
        self.expr = Expr(op, (self.expr, e))

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
        if fill is None or not is_tensor(cond):
            raise Refusal(Code.SCORE_OP, "where between the scores and a tensor")
        fill = rounded(float(fill), val(step.node).dtype)
        proof = prove_boolean(self.ev, cond, self.captures.index(step, cond), attend)
        if self.masks.is_mask(fill):
            self.masks.append(proof, (fill,), "replace")
            return
        if math.isnan(fill) or math.isinf(fill):
            raise Refusal(Code.MASK_FILL, f"{fill}")
        self._no_mask_yet(step)
        self._no_shift_yet(step)
        if proof.always_true:
            return
        self.expr = Expr("where", (self.captures.raw(self.mat.pred(proof.pred)), self.expr, ex.const(fill)))

    def _causal(self, step: Step) -> None:
        q, k = (Poly.of(a) for a in AXES[2:])
        visible = conjoin(self.ev, [MaskProof((), self.ev.facts.cmp("ge", q - k), False)])
        self.masks.append(visible, (float("-inf"),), "replace")

    def _not_shifted(self) -> None:
        """``exp`` of the scores themselves.

        Raises:
            Refusal: a number that counts as a score is beyond the range of ``exp``.
        """
        reach = of_program(self.expr, self.reach)
        if reach > EXP_RANGE:
            raise Refusal(Code.MASK_FILL, f"exp of a score of size {reach:g}")
        self.masks.underflow()

    # -- the record --------------------------------------------------------------------------------------------------

    def _finish(self) -> Program:
        b = self.block
        fill, mode, empty = float("-inf"), "replace", "never"
        atoms: tuple[Any, ...] = ()
        sink = None if b.sink is None else self.captures.sink(b.sink.node in self.wanted)
        captures, ints = self.captures.items, self.captures.ints
        if b.chain is not None and not b.chain.softmax.shifted:
            self._not_shifted()
        if self.masks:
            proof = self.masks.together()
            if not proof.nonempty and b.lse is not None and self.masks.only_infinite():
                raise Refusal(Code.EMPTY_ROWS, "such a row is NaN times zero")
            if not proof.nonempty and (sink is None or not self.masks.only_infinite()):
                fill, mode, empty = self.masks.empty_rows(safe=b.safe, trained=self.trained)
            atoms, captures, ints = to_record(proof.atoms, self.mat, captures, ints)
        sizes = [group_size(resolve(g)) for g in (b.heads, b.kv_heads, b.d_axes, b.dv_axes)]
        record = Attention(
            q_heads=sizes[0], kv_heads=sizes[1], head_dim=sizes[2], head_dim_v=sizes[3],  # type: ignore[arg-type]
            dtype=str(val(b.v.node).dtype).removeprefix("torch."), scale=self.scale, score=self.expr, mask=atoms, fill=fill,
            fill_mode=mode, empty_rows=empty, sink=sink, grads=tuple(self.captures.grads))  # type: ignore[arg-type]
        if val(b.v.node).dtype != torch.float64 and beyond_float32(record):
            raise Refusal(Code.SCORE_OP, "a number in the scores is beyond the range of float32")
        return Program(record, captures, ints, self.q_factor)
