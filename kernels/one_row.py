"""One query position, as in decoding: the query heads that share a key head become the rows of one block.

K and V are then read once for all of them.  A band or a chunk is the same range of keys for every row, so it is cut out
of K and V and no longer masked.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch

from .expr import MARGIN, READS, SCORE, Expr
from .record import Attention, Band, Chunk, Dense, Documents, KeyPadding, Predicate, SInt, Sym


def packed(record: Attention) -> Attention | None:
    """The record of the packed call, None where it cannot be written: a sink, and programs that read the number of a
    head or of a query, are not the same for all rows."""
    programs = [record.score, *(a.expr for a in record.mask if isinstance(a, Predicate))]
    axes = frozenset().union(*(p.axes() for p in programs))
    ranged = any(isinstance(a, Band | Chunk) for a in record.mask)
    if record.group == 1 or record.sink is not None or axes & {"q", "h"}:
        return None
    if ranged and ("k" in axes or record.empty_rows == "mean"):
        return None
    return record.with_(q_heads=record.kv_heads, grads=(), score=_by_key(record.score), mask=tuple(
        Predicate(_by_key(a.expr)) if isinstance(a, Predicate) else a
        for a in record.mask if not isinstance(a, Band | Chunk)))


def _by_key(e: Expr) -> Expr:
    """The program at query 0, where a table by distance is one by key."""
    if e.op == "relative":
        return Expr("load", e.args)  # `pack` cuts its margins off
    return Expr(e.op, tuple(_by_key(a) if isinstance(a, Expr) else a for a in e.args))


def key_range(record: Attention, ints: Sequence[int], keys: int) -> tuple[int, int]:
    """[first, past the last) key that bands and chunks leave to query 0; equal when there is none."""
    def value(x: SInt) -> int:
        return int(ints[x.i] if isinstance(x, Sym) else x)

    first, last = 0, keys
    for atom in record.mask:
        if isinstance(atom, Band):
            first = first if atom.lo is None else max(first, value(atom.lo))
            last = last if atom.hi is None else min(last, value(atom.hi) + 1)
        elif isinstance(atom, Chunk):
            size = max(1, value(atom.size))
            start = value(atom.offset) // size * size
            first, last = max(first, start), min(last, start + size)
    return first, max(first, last)


def pack(
    record: Attention, q: torch.Tensor, captures: Sequence[torch.Tensor], keys: int, first: int, last: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Views of q as ``[B, Hkv, group, D]`` and of the captures that fit it and keys ``[first, last)``."""
    batch, heads = q.shape[:2]

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x.squeeze(2).unflatten(1, (record.kv_heads, record.group))

    found = list(captures)
    for atom in record.mask:
        if isinstance(atom, KeyPadding):
            found[atom.capture] = captures[atom.capture].expand(batch, keys)[:, first:last]
        elif isinstance(atom, Documents):
            found[atom.k] = captures[atom.k].expand(batch, keys)[:, first:last]
        elif isinstance(atom, Dense):
            found[atom.capture] = rows(captures[atom.capture].expand(batch, heads, 1, keys)[..., first:last])
    programs = [record.score, *(a.expr for a in record.mask if isinstance(a, Predicate))]
    for i, op in {(e.args[0], e.op) for p in programs if p != SCORE for e in p.walk() if e.op in READS}:
        x = captures[i] if op == "load" else captures[i][..., MARGIN : MARGIN + keys]
        found[i] = rows(x.expand(batch, heads, 1, keys)[..., first:last])
    return rows(q), found
