"""From a proven predicate to mask atoms.

Drafts mirror the atoms of ``kernels/record.py`` but still speak of graph values: offsets are `Poly` over size symbols
(``draft.hi == 0`` works), predicates and document ids are `Pred` and `Poly` over ``b h q k``.  `materialise` turns
them into captures and run-time integers.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .program import programmable
from .simplify import Facts
from .values import (
    AXIS_B,
    AXIS_K,
    AXIS_Q,
    FALSE,
    TRUE,
    And,
    Cmp,
    FloorDiv,
    Poly,
    Pred,
    Undecided,
    axes_of,
    trees_of,
)

_KEY_AXES = frozenset((AXIS_B, AXIS_K))
_QUERY_AXES = frozenset((AXIS_B, AXIS_Q))


@dataclass(frozen=True)
class BandDraft:
    """``q + lo <= k <= q + hi``; None is unbounded."""

    lo: Poly | None
    hi: Poly | None


@dataclass(frozen=True)
class ChunkDraft:
    """``k // size == (q + offset) // size``."""

    size: Poly
    offset: Poly


@dataclass(frozen=True)
class KeyPaddingDraft:
    """A predicate of (b, k) alone."""

    pred: Pred


@dataclass(frozen=True)
class DocumentsDraft:
    """Ids that must be equal: ``q`` depends on (b, q), ``k`` on (b, k)."""

    q: Poly
    k: Poly


@dataclass(frozen=True)
class PredicateDraft:
    """A predicate whose loads each read at most one of q and k; may be constant false."""

    pred: Pred


@dataclass(frozen=True)
class DenseDraft:
    """A predicate that can only be read from a tensor over q and k."""

    pred: Pred


Draft = BandDraft | ChunkDraft | KeyPaddingDraft | DocumentsDraft | PredicateDraft | DenseDraft


def classify(facts: Facts, pred: Pred) -> tuple[Draft, ...]:
    """The conjunction ``pred`` as atoms: their conjunction is equal to it.

    Bands are merged where one bound is proven tighter, key predicates into one.  True gives no atom, false gives one
    constant `PredicateDraft`.
    """
    if pred == TRUE:
        return ()
    if pred == FALSE:
        return (PredicateDraft(FALSE),)
    members = pred.args if isinstance(pred, And) else (pred,)
    lows: list[Poly] = []
    highs: list[Poly] = []
    keys: list[Pred] = []
    others: list[Draft] = []
    for m in members:
        band = _band(m)
        if band is not None:
            lo, hi = band
            lows += [lo] if lo is not None else []
            highs += [hi] if hi is not None else []
        elif axes_of(m) <= _KEY_AXES and AXIS_K in m.free:
            keys.append(m)
        else:
            others.append(_chunk(facts, m) or _documents(m) or _general(m))
    drafts: list[Draft] = []
    lows, highs = _tightest(facts, lows, -1), _tightest(facts, highs, 1)
    for i in range(max(len(lows), len(highs))):
        drafts.append(BandDraft(lows[i] if i < len(lows) else None, highs[i] if i < len(highs) else None))
    if keys:
        drafts.append(KeyPaddingDraft(And(tuple(keys)) if len(keys) > 1 else keys[0]))
    return (*drafts, *others)


def _general(m: Pred) -> Draft:
    return PredicateDraft(m) if programmable(m) else DenseDraft(m)


def _tightest(facts: Facts, bounds: list[Poly], sign: int) -> list[Poly]:
    kept: list[Poly] = []
    for i, x in enumerate(bounds):
        implied = any(
            facts.nonneg((x - y) * sign) and (j < i or not facts.nonneg((y - x) * sign))
            for j, y in enumerate(bounds) if j != i
        )
        if not implied:
            kept.append(x)
    return kept


def _host_integer(p: Poly) -> bool:
    """Known before the kernel starts: no axis and no tensor element in it."""
    return not axes_of(p) and next(trees_of(p), None) is None


def _band(m: Pred) -> tuple[Poly | None, Poly | None] | None:
    """``(lo, hi)`` of ``q - k + hi >= 0``, ``k - q - lo >= 0`` or ``k == q + c``."""
    if not isinstance(m, Cmp) or m.op == "ne":
        return None
    by_q = m.expr.split(AXIS_Q)
    by_k = by_q[1].split(AXIS_K) if by_q is not None else None
    if by_q is None or by_k is None:
        return None
    cq, ck, rest = by_q[0].constant(), by_k[0].constant(), by_k[1]
    if (cq, ck) not in ((1, -1), (-1, 1)) or not _host_integer(rest):
        return None
    if m.op == "eq":
        c = rest if cq == 1 else -rest
        return c, c
    return (None, rest) if cq == 1 else (-rest, None)


def _chunk(facts: Facts, m: Pred) -> ChunkDraft | None:
    """``k // n == (q + a) // n + c`` with host integers n, a, c."""
    if not isinstance(m, Cmp) or m.op != "eq":
        return None
    divisions = [a for a in m.expr.atoms() if isinstance(a, FloorDiv) and axes_of(a)]
    of_k = next((a for a in divisions if a.n == Poly.of(AXIS_K)), None)
    of_q = next((a for a in divisions if a is not of_k), None)
    if of_k is None or of_q is None or of_k.d != of_q.d or not _host_integer(of_k.d):
        return None
    shift = of_q.n - Poly.of(AXIS_Q)
    difference = Poly.of(of_q) - Poly.of(of_k)
    for e in (m.expr, -m.expr):
        rest = e - difference
        if _host_integer(rest) and _host_integer(shift):
            return ChunkDraft(of_k.d, shift + rest * of_k.d)
    return None


def _documents(m: Pred) -> DocumentsDraft | None:
    if not isinstance(m, Cmp) or m.op != "eq":
        return None
    key_side, rest = m.expr.partition(frozenset((AXIS_K,)))
    if not (axes_of(key_side) <= _KEY_AXES and axes_of(rest) <= _QUERY_AXES and AXIS_K in key_side.free):
        return None
    if AXIS_Q not in rest.free:
        return None
    first = next(iter(key_side.terms.values()))
    return DocumentsDraft(rest, -key_side) if first < 0 else DocumentsDraft(-rest, key_side)


def proves_nonempty(facts: Facts, pred: Pred) -> bool:
    """True when every (b, h, q) is proven to have a key k with ``pred``: a witness k(q) is tried at each candidate."""
    if pred == TRUE:
        return True
    if pred == FALSE:
        return False
    size = facts.sizes[AXIS_K]
    for k in _witnesses(facts, pred):
        try:
            if facts.in_range(k, 0, size) and facts.substitute(pred, {AXIS_K: k}) == TRUE:
                return True
        except Undecided:
            continue
    return False


def _witnesses(facts: Facts, pred: Pred) -> Iterator[Poly]:
    q, last = Poly.of(AXIS_Q), facts.sizes[AXIS_K] - 1
    yield q
    yield Poly({})
    yield last
    members = pred.args if isinstance(pred, And) else (pred,)
    for m in members:
        band = _band(m)
        if band is not None:
            for c in band:
                if c is not None:
                    yield q + c
    yield q + facts.sizes[AXIS_K] - facts.sizes[AXIS_Q]


