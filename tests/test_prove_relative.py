"""Biases by distance: what is proven to be one, the table that is emitted, and how the kernels' call reads it."""
from __future__ import annotations

import pytest
import torch
from prove_support import SIZES, run, trace
from torch.nn import functional as F

from fa_inductor.backends.program import Scope, evaluate
from fa_inductor.kernels import one_row
from fa_inductor.kernels.expr import MARGIN, SCORE, Expr, relative
from fa_inductor.kernels.record import Attention, Band
from fa_inductor.prove import Materialiser, by_distance, distances
from fa_inductor.prove.values import AXIS_B, AXIS_H, AXIS_K, AXIS_Q, Apply, Cast, Load, Max, Opaque, Poly

B, H, ROWS, KEYS = SIZES
Q, K = Poly.of(AXIS_Q), Poly.of(AXIS_K)


def distance(s):
    return torch.arange(s.shape[3]) - torch.arange(s.shape[2])[:, None]


def by_head(x):
    return x.permute(2, 0, 1)[None]


def cast_to_half(s, w):
    return by_head(F.embedding(distance(s).abs(), w.half()))


FOUND = {
    "embedding": lambda s, w: by_head(F.embedding(distance(s) + 6, w)),
    "index": lambda s, w: by_head(w[distance(s) + s.shape[2]]),
    "index from the end": lambda s, w: by_head(w[distance(s)]),
    "one head": lambda s, w: w[:, 0][distance(s).clamp(-2, 2)],
    "of the batch": lambda s, w: by_head(F.embedding(distance(s).abs(), w)) * s[:, :1, :1, :1].sin(),
    "both sides": lambda s, w: by_head(torch.where((distance(s) < 0)[..., None], F.embedding(distance(s).abs(), w),
                                                   F.embedding(distance(s).abs() + 1, w.cos()))),
    "float16": cast_to_half,
    "logarithm": lambda s, w: by_head(F.embedding((distance(s).abs().float() + 1).log2().long(), w)),
}
OTHERS = {
    "sum": lambda s, w: by_head(F.embedding(torch.arange(s.shape[3]) + torch.arange(s.shape[2])[:, None], w)),
    "double": lambda s, w: by_head(F.embedding(distance(s) - torch.arange(s.shape[2])[:, None] + 9, w)),
    "keys alone": lambda s, w: by_head(F.embedding(torch.arange(s.shape[3])[None], w)),
    "queries alone": lambda s, w: by_head(F.embedding(torch.arange(s.shape[2])[:, None], w)),
    "no position": lambda s, w: w[3][None, :, None, None],
    "a tensor": lambda s, w: s.sin(),
    "product with a tensor": lambda s, w: by_head(F.embedding(distance(s).abs(), w)) * s,
    "position in the factor": lambda s, w: by_head(F.embedding(distance(s).abs(), w)) * torch.arange(s.shape[3]),
    "choice by position": lambda s, w: torch.where(torch.arange(s.shape[3]) < 2, by_head(F.embedding(distance(s).abs(), w)), 0.5),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("sizes", [SIZES, (2, 3, 7, 5), (1, 3, 4, 4)])
@pytest.mark.parametrize("name", FOUND)
def test_table(name, sizes, dynamic):
    fn, g = FOUND[name], torch.Generator().manual_seed(0)
    w = torch.randn(16, 3, generator=g)
    traced = trace(fn, [w], sizes, dynamic)
    index = [0 if str(n) == "1" else i for n, i in zip(traced.node.meta["val"].shape, (AXIS_B, AXIS_H, AXIS_Q, AXIS_K)[
        4 - traced.node.meta["val"].ndim:], strict=True)]
    found = by_distance(traced.ev, traced.ev.value(traced.node, index))
    assert found is not None
    (output,) = (n for n in traced.graph.nodes if n.op == "output")
    mat = Materialiser(traced.graph, output, traced.ev, torch.device("cpu"))
    table, = run(traced, [distances(mat, found, torch.float32)])
    assert distances(mat, found, torch.float32) is distances(mat, found, torch.float32)
    assert table.dtype == torch.float32 and table.shape[2:] == (1, sizes[2] + sizes[3] - 1 + 2 * MARGIN)
    value, _ = evaluate(relative(0), Scope(sizes, (0, sizes[2]), [table], [], torch.device("cpu")))
    want = fn(*traced.inputs).float().expand(sizes)
    assert torch.equal(value.expand(sizes), want)
    part, _ = evaluate(relative(0), Scope(sizes, (1, 3), [table], [], torch.device("cpu")))
    assert torch.equal(part.expand_as(want[:, :, 1:3]), want[:, :, 1:3])
    inner = table[..., MARGIN:-MARGIN]
    assert torch.equal(table[..., :MARGIN], inner[..., :1].expand_as(table[..., :MARGIN]))
    assert torch.equal(table[..., -MARGIN:], inner[..., -1:].expand_as(table[..., -MARGIN:]))


@pytest.mark.parametrize("name", OTHERS)
def test_none(name):
    traced = trace(OTHERS[name], [torch.randn(16, 3)])
    value = traced.ev.value(traced.node, traced.index)
    assert by_distance(traced.ev, value) is None


def test_values_that_the_next_query_and_key_leave_as_they_are():
    """Built by hand, because the evaluator would simplify some of them; only what is equal term by term counts."""
    traced = trace(lambda s, w: w[0, 0] + s, [torch.randn(16, 3)])
    node, dtype = next(n for n in traced.graph.nodes if n.op == "placeholder"), torch.float32

    def tree(p: Poly) -> Cast:
        return Cast(p, dtype)

    def load(*index: Poly) -> Load:
        return Load(node, index, dtype)

    zero, d = Poly({}), K - Q
    for kept in (tree(d), tree(d * d), tree(Poly.of(Max(d, zero)) + d * 3), load(zero, zero, zero, d * 2 + 5),
                 load(Poly.of(AXIS_B), Poly.of(AXIS_H), d, d), tree(Poly.of(Opaque(load(zero, zero, zero, d)))),
                 Apply(torch.ops.aten.mul.Tensor, (load(zero, zero, d, zero), 0.5), (), frozenset(), dtype)):
        assert by_distance(traced.ev, kept) == kept
    for other in (tree(Q + K), tree(d * d + Q), tree(Q * K), tree(Poly.of(Max(Q, K))), load(zero, zero, Q, K),
                  load(zero, zero, zero, K - Q * 2), tree(Poly.of(Opaque(load(zero, zero, Q, K))) + d), tree(Q), tree(zero),
                  Apply(torch.ops.aten.mul.Tensor, (tree(d), load(zero, zero, zero, K)), (), frozenset(), dtype)):
        assert by_distance(traced.ev, other) is None


@pytest.mark.parametrize("window", [False, True])
def test_one_row_reads_the_table_by_key(window):
    """With one query the table is one by key, the margins cut off and the heads of a group in its rows."""
    heads, kv, keys = 6, 2, 9
    record = Attention(q_heads=heads, kv_heads=kv, head_dim=8, head_dim_v=8, dtype="bfloat16", scale=1.0,
                       score=Expr("add", (SCORE, relative(0))), mask=(Band(2, 6),) if window else (), empty_rows="zero")
    packed = one_row.packed(record)
    assert packed is not None and packed.q_heads == kv and not packed.score.relative() and packed.score.loads() == {0}
    table = torch.randn(1, heads, 1, keys + 2 * MARGIN)
    first, last = one_row.key_range(record, [], keys)
    assert (first, last) == ((2, 7) if window else (0, keys))
    q = torch.randn(3, heads, 1, 8)
    rows, (capture,) = one_row.pack(record, q, [table], keys, first, last)
    scope = Scope((3, heads, 1, keys), (0, 1), [table], [], torch.device("cpu"))
    want, _ = evaluate(relative(0), scope)
    assert rows.shape == (3, kv, 3, 8) and capture.shape == (3, kv, 3, last - first)
    assert torch.equal(capture.flatten(1, 2), want.expand(3, heads, 1, keys)[:, :, 0, first:last])
