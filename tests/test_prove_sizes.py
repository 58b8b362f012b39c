"""Sizes outside the prover's normal form: symbols of their own, about which nothing is assumed."""
from __future__ import annotations

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv

from fa_inductor.prove import AXES, Context, Evaluator, Undecided
from fa_inductor.prove.values import Poly

S, T = sympy.symbols("s0 s1", integer=True, positive=True)


def test_a_part_that_is_no_polynomial_is_a_symbol() -> None:
    odd = FloorDiv(S**2 + T, S + T)
    ev = Evaluator(Context(2, odd, 4, odd * 3))
    size = ev.from_sympy(odd)
    (symbol,) = size.atoms()
    if not isinstance(symbol, sympy.Symbol):
        pytest.fail(f"{symbol} is in the normal form: take another expression")
    assert ev.opaque[symbol] == odd
    assert ev.from_sympy(odd * 3) == size * 3 == ev.facts.sizes[AXES[3]]
    assert ev.from_sympy(FloorDiv(S**2 + T, S + 2 * T)) != size
    assert ev.facts.nonneg(size) and not ev.facts.nonneg(Poly.of(S) - size)


def test_an_axis_is_never_hidden_in_a_symbol() -> None:
    ev = Evaluator(Context(2, 3, S, S))
    with pytest.raises(Undecided):
        ev.from_sympy(FloorDiv(AXES[2], T - S))
    assert ev.from_sympy(FloorDiv(S, T - S)).atoms()
