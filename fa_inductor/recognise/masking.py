"""The masks among a block's steps: which keys they leave out, with which fills, and what an empty row gives."""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ..prove import MASK_THRESHOLD, Evaluator, MaskProof, conjoin
from ..prove.values import FALSE
from ..reasons import Code, Refusal

Mode = Literal["add", "replace"]

_ABSORBS = 2.0**14
"""An added fill makes a whole row uniform only if rounding to the fill swallows scores up to this size."""


@dataclass
class _Mask:
    proof: MaskProof
    fills: tuple[float, ...]
    mode: Mode
    eps: float = 0.0
    """Precision in which something else was added to the fills afterwards; 0 when nothing was."""


class Masks:
    """Masks of one block, innermost first, as later steps change their fills.

    Args:
        exact: read a finite fill as the number it is, and not as a mask.
    """

    def __init__(self, ev: Evaluator, exact: bool) -> None:
        self.ev, self.exact = ev, exact
        self.items: list[_Mask] = []
        self.finite_fill = False
        self.hazard = False
        """A bias that may be as low as a mask's fill is in the program: it could lift masked keys over visible ones."""
        self._trained_after_fill = False
        """A tensor whose gradient is needed was added to what a mask had filled in."""
        self._raised = False
        self._shifted_after: int | None = None
        self._changed_after_shift = False
        """After a row maximum was subtracted, which makes 0 of a finite fill, something was masked or added, or a
        fill became infinite."""

    def __bool__(self) -> bool:
        return bool(self.items)

    @property
    def shifted(self) -> bool:
        """A row constant was left out; only what keeps it a row constant may follow."""
        return self._shifted_after is not None

    def append(self, proof: MaskProof, fills: tuple[float, ...], mode: Mode) -> None:
        self._changed_after_shift |= self.shifted
        if proof.always_true:
            return
        self.finite_fill |= any(not math.isinf(f) for f in fills)
        self.items.append(_Mask(proof, fills, mode))

    def is_mask(self, fill: float) -> bool:
        """Whether a fill leaves a key out of the softmax."""
        return fill <= MASK_THRESHOLD and not (self.exact and not math.isinf(fill))

    def may_leave_out(self, proof: MaskProof, fills: tuple[float, ...], dtype: torch.dtype) -> bool:
        """Whether positions where ``fills`` are added may be left out of the softmax with nothing changed."""
        if self.exact and any(not math.isinf(f) for f in fills):
            return False
        if conjoin(self.ev, [m.proof for m in self.items] + [proof]).nonempty:
            return True
        eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        return all(_absorbs(f, eps) for f in fills)

    # -- what later steps do to the fills --------------------------------------------------------------------------------

    def round(self, dtype: torch.dtype) -> None:
        self._map(lambda f: rounded(f, dtype))

    def raise_to(self, low: float) -> None:
        """Scores are clamped from below, at a value that no visible one reaches."""
        self._raised |= bool(self.items)
        self._map(lambda f: max(f, low))

    def multiply(self, c: float, dtype: torch.dtype) -> None:
        if self.items and c <= 0:
            raise Refusal(Code.MASK_FILL, "a mask is multiplied by a factor that is not positive")
        self._map(lambda f: rounded(f * c, dtype))
        if any(f > MASK_THRESHOLD for m in self.items for f in m.fills):
            raise Refusal(Code.MASK_FILL, "a mask is scaled to a small value")

    def added(self, dtype: torch.dtype) -> None:
        """Something is added to every score, in ``dtype``."""
        self._changed_after_shift |= self.shifted
        for m in self.items:
            m.eps = max(m.eps, torch.finfo(dtype).eps)

    def differentiated(self) -> None:
        """What is added has a gradient, which the positions filled in before pass on."""
        self._trained_after_fill |= any(m.mode == "replace" for m in self.items)

    def shift(self) -> None:
        """A row's maximum over the keys is subtracted from it."""
        self._shifted_after = len(self.items)

    def underflow(self) -> None:
        """No row maximum is subtracted: ``exp`` makes 0 of every fill, as of -inf."""
        self._map(lambda f: float("-inf"))

    def _map(self, f: Callable[[float], float]) -> None:
        for m in self.items:
            new = [f(x) for x in m.fills]
            self._changed_after_shift |= self.shifted and any(
                math.isinf(x) and not math.isinf(old) for old, x in zip(m.fills, new, strict=True))
            m.fills = tuple(dict.fromkeys(new))

    # -- all of them together ------------------------------------------------------------------------------------------

    def together(self) -> MaskProof:
        """
        Raises:
            Refusal: no key is ever visible.
        """
        proof = conjoin(self.ev, [m.proof for m in self.items])
        if proof.pred == FALSE:
            raise Refusal(Code.EMPTY_ROWS, "every key is masked")
        return proof

    def only_infinite(self) -> bool:
        return all(f == float("-inf") for m in self.items for f in m.fills)

    def empty_rows(self, *, safe: bool, trained: bool) -> tuple[float, Mode, str]:
        """(fill, fill mode, what a row gives) when a row may be masked as a whole.

        Raises:
            Refusal: the answer depends on which mask hides the row.
        """
        if self._raised and trained:
            raise Refusal(Code.EMPTY_ROWS, "a clamp passes a part of the gradient of such a row")
        modes = {m.mode for m in self.items}
        fills = {f for m in self.items for f in m.fills}
        if self._trained_after_fill:  # the operator gives such a row no gradient
            raise Refusal(Code.GRAD_CAPTURE, "it is added to rows that a mask may have filled as a whole")
        if self._shifted_after and self._changed_after_shift:
            raise Refusal(Code.MASK_FILL, "a row maximum is subtracted, and then the scores are changed")
        if fills == {float("-inf")}:
            if safe:
                return float("-inf"), "replace", "zero"
            if len(modes) > 1 and trained:  # where the NaN of such a row goes depends on which mask hides it
                raise Refusal(Code.MASK_FILL, "-inf is both added and filled in")
            return float("-inf"), modes.pop(), "nan"
        one = len(fills) == 1 and (modes == {"replace"} or len(self.items) == 1)
        if not one or not all(m.eps == 0.0 or _absorbs(f, m.eps) for m in self.items for f in m.fills):
            raise Refusal(Code.MASK_FILL, ", ".join(f"{f:g}" for f in sorted(fills)))
        return fills.pop(), modes.pop(), "mean"


def rounded(x: float, dtype: torch.dtype) -> float:
    with unset_fake_temporarily():
        return float(torch.tensor(x, dtype=torch.float64).to(dtype).item())


def _absorbs(fill: float, eps: float) -> bool:
    """Whether adding a score to the fill gives the fill again."""
    return math.isinf(fill) or abs(fill) * eps / 2 >= _ABSORBS
