"""Mask atoms as boolean tensors, each in the smallest shape that broadcasts to [B, Hq, rows, Sk]."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fa_inductor.kernels.record import Atom, Attention, Band, Chunk, Dense, Documents, KeyPadding, Predicate, SInt, Sym

from .program import Scope, evaluate


def integer(x: SInt, ints: Sequence[int]) -> int:
    """A record's integer: itself, or the run-time integer it names."""
    return ints[x.i] if isinstance(x, Sym) else x


def atom_mask(atom: Atom, scope: Scope) -> Tensor:
    """True where ``atom`` lets the key be attended to."""
    match atom:
        case Band(lo=lo, hi=hi):
            distance = scope.axis("k") - scope.axis("q")
            allowed = None if lo is None else distance >= integer(lo, scope.ints)
            if hi is not None:
                below = distance <= integer(hi, scope.ints)
                allowed = below if allowed is None else allowed & below
            return torch.ones_like(distance, dtype=torch.bool) if allowed is None else allowed
        case Chunk(size=size, offset=offset):
            n = integer(size, scope.ints)
            return scope.axis("k") // n == (scope.axis("q") + integer(offset, scope.ints)) // n
        case KeyPadding(capture=i):
            return _bool(scope.captures[i])[:, None, None, :]
        case Documents(q=i, k=j):
            ids_q = scope.row_slice(scope.captures[i][:, None, :, None])
            return ids_q == scope.captures[j][:, None, None, :]
        case Dense(capture=i):
            return _bool(scope.row_slice(_shrink(scope.captures[i])))
        case Predicate(expr=e):
            value, _ = evaluate(e, scope)
            if not isinstance(value, Tensor):
                value = torch.full((1, 1, 1, 1), bool(value), device=scope.device)
            return _bool(value)
    raise TypeError(f"unknown mask atom {atom!r}")


def _bool(t: Tensor) -> Tensor:
    return t if t.dtype == torch.bool else t != 0


def _shrink(t: Tensor) -> Tensor:
    """The same tensor with size 1 where it is expanded: what is the same everywhere is computed once."""
    for dim, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
        if stride == 0 and size > 1:
            t = t.narrow(dim, 0, 1)
    return t


def mask_of(record: Attention, scope: Scope) -> Tensor | None:
    """Conjunction of all atoms, 4-D, broadcastable to [B, Hq, rows, Sk]; None when there is no mask."""
    mask: Tensor | None = None
    for atom in record.mask:
        m = atom_mask(atom, scope)
        mask = m if mask is None else mask & m
    if mask is not None and mask.dim() < 4:
        mask = mask[(None,) * (4 - mask.dim())]
    return mask


def band_of(record: Attention, ints: Sequence[int]) -> tuple[int | None, int | None]:
    """(lo, hi) of the intersection of all bands: ``q + lo <= k <= q + hi``; None is unbounded."""
    lo = [integer(a.lo, ints) for a in record.mask if isinstance(a, Band) and a.lo is not None]
    hi = [integer(a.hi, ints) for a in record.mask if isinstance(a, Band) and a.hi is not None]
    return (max(lo) if lo else None), (min(hi) if hi else None)


def without_bands(record: Attention) -> Attention:
    """The record with only those atoms that are not bands."""
    return record.with_(mask=tuple(a for a in record.mask if not isinstance(a, Band)))


def empty_rows_of(record: Attention, scope: Scope) -> Tensor | None:
    """Query rows with every key masked, bool, broadcastable to [B, Hq, rows]; None when there is no mask.

    Bands and key padding cost O(Sq + Sk): a row's band is an interval of keys, and a running sum of the padding
    says how many of an interval are kept.  Other atoms are evaluated in full.
    """
    if not record.mask:
        return None
    sq, sk = scope.shape[2], scope.shape[3]
    pads = [a for a in record.mask if isinstance(a, KeyPadding)]
    if any(not isinstance(a, (Band, KeyPadding)) for a in record.mask):
        mask = mask_of(record, scope)
        assert mask is not None
        return ~mask.any(-1)
    lo, hi = band_of(record, scope.ints)
    rows = torch.arange(*scope.rows, device=scope.device)
    first = (rows + lo).clamp(0, sk) if lo is not None else torch.zeros_like(rows)
    stop = (rows + hi + 1).clamp(0, sk) if hi is not None else torch.full_like(rows, sk)
    if not pads:
        return (stop <= first).view(1, 1, -1)
    kept = _bool(scope.captures[pads[0].capture])
    for a in pads[1:]:
        kept = kept & _bool(scope.captures[a.capture])
    if lo is None and hi is None:
        return ~kept.any(-1)[:, None, None]
    count = torch.nn.functional.pad(kept.to(torch.int64).cumsum(-1), (1, 0))
    empty = count.index_select(-1, stop) <= count.index_select(-1, first)
    assert sq >= scope.rows[1]
    return (empty | (stop <= first))[:, None, :]
