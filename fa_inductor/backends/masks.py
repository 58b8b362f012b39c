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
