"""The plain-torch backend against an independent float64 composition: every atom, score operation, sink, GQA ratio
and rule for rows that are masked as a whole, forward and backward."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from attention_oracle import indices, oracle
from torch import Tensor

from fa_inductor.backends import reference
from fa_inductor.backends.program import Scope, evaluate, vjp
from fa_inductor.kernels.expr import OPS, SCORE, Expr, const, index, load, sym
from fa_inductor.kernels.record import (
    Atom,
    Attention,
    Band,
    Chunk,
    Dense,
    Documents,
    EmptyRows,
    KeyPadding,
    Predicate,
    Sym,
)

B, SQ, SK, D, DV = 2, 7, 9, 8, 6


def e(op: str, *args: object) -> Expr:
    return Expr(op, tuple(args))


@dataclass
class MaskCase:
    atoms: tuple[Atom, ...]
    mask: Callable[[Tensor, Tensor, Tensor, Tensor, Sequence[Tensor]], Tensor]
    captures: list[Tensor] = field(default_factory=list)
    ints: tuple[int, ...] = ()


def _captures(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    pad = torch.rand(B, SK, generator=g) > 0.4
    docs_q = torch.randint(0, 3, (B, SQ), generator=g)
    docs_k = torch.randint(0, 3, (1, SK), generator=g)
    dense = torch.rand(B, 1, SQ, SK, generator=g) > 0.4
    return pad, docs_q, docs_k, dense


PAD, DOCS_Q, DOCS_K, DENSE = _captures()
MASKS = {
    "none": MaskCase((), lambda b, h, q, k, c: torch.ones(1, 1, 1, 1, dtype=torch.bool)),
    "unbounded": MaskCase((Band(None, None),), lambda b, h, q, k, c: torch.ones(1, 1, 1, 1, dtype=torch.bool)),
    "causal": MaskCase((Band(None, 0),), lambda b, h, q, k, c: k <= q),
    "causal-sym": MaskCase((Band(None, Sym(0)),), lambda b, h, q, k, c: k <= q + 2, ints=(SK - SQ,)),
    "causal-negative": MaskCase((Band(None, -3),), lambda b, h, q, k, c: k <= q - 3),
    "window": MaskCase((Band(-2, 0),), lambda b, h, q, k, c: (k <= q) & (k > q - 3)),
    "window-both": MaskCase((Band(-2, Sym(1)),), lambda b, h, q, k, c: (k - q).abs() <= 2, ints=(5, 2)),
    "lower": MaskCase((Band(1, None),), lambda b, h, q, k, c: k > q),
    "chunk": MaskCase((Chunk(3),), lambda b, h, q, k, c: k // 3 == q // 3),
    "chunk-sym": MaskCase((Chunk(Sym(0), Sym(1)), Band(None, Sym(1))),
                          lambda b, h, q, k, c: (k // 4 == (q + 2) // 4) & (k <= q + 2), ints=(4, 2)),
    "padding": MaskCase((KeyPadding(0),), lambda b, h, q, k, c: c[0].view(B, 1, 1, SK), [PAD]),
    "padding-one": MaskCase((KeyPadding(0), Band(None, 0)), lambda b, h, q, k, c: c[0].view(1, 1, 1, SK) & (k <= q),
                            [PAD[1:]]),
    "documents": MaskCase((Documents(0, 1),), lambda b, h, q, k, c: c[0].view(B, 1, SQ, 1) == c[1].view(1, 1, 1, SK),
                          [DOCS_Q, DOCS_K]),
    "dense": MaskCase((Dense(0),), lambda b, h, q, k, c: c[0], [DENSE]),
    "dense-2d": MaskCase((Dense(0),), lambda b, h, q, k, c: c[0].view(1, 1, SQ, SK), [DENSE[0, 0]]),
    "dense-expanded": MaskCase((Dense(0),), lambda b, h, q, k, c: c[0], [DENSE[:1].expand(B, 4, SQ, SK)]),
    "dense-row": MaskCase((Dense(0),), lambda b, h, q, k, c: c[0], [DENSE[:, :, :1]]),
    "prefix-lm": MaskCase(
        (Predicate(e("or", e("lt", index("k"), load(0)), e("le", index("k"), index("q")))),),
        lambda b, h, q, k, c: (k < c[0].view(B, 1, 1, 1)) | (k <= q), [torch.tensor([3, 5]).view(B, 1, 1, 1)]),
    "predicate-heads": MaskCase(
        (Predicate(e("not", e("eq", e("mod", e("add", index("h"), index("k")), const(3)), sym(0)))),),
        lambda b, h, q, k, c: (h + k) % 3 != 1, ints=(1,)),
    "predicate-const": MaskCase((Predicate(e("xor", const(True), const(False))),),
                                lambda b, h, q, k, c: torch.ones(1, 1, 1, 1, dtype=torch.bool)),
    "three": MaskCase((Band(-4, 1), KeyPadding(0), Dense(1)),
                      lambda b, h, q, k, c: (k <= q + 1) & (k >= q - 4) & c[0].view(B, 1, 1, SK) & c[1], [PAD, DENSE]),
}
ROWS: dict[EmptyRows, float] = {"nan": -math.inf, "mean": -1e30, "zero": -math.inf}
RULES: list[tuple[EmptyRows, float, str]] = [(e, f, "add") for e, f in ROWS.items()] + [
    ("mean", -1e30, "replace"), ("nan", -math.inf, "replace")]
"""Rules for rows masked as a whole: ``empty_rows``, ``fill``, ``fill_mode``."""


def tensors(hq: int, hkv: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = ((B, hq, SQ, D), (B, hkv, SK, D), (B, hkv, SK, DV), (B, hq, SQ, DV))
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]


def check(
    record: Attention, case: MaskCase, *, captures: Sequence[Tensor] = (), leaves: Sequence[int] = (),
    score: Callable[[Tensor, Sequence[Tensor]], Tensor] = lambda s, c: s, ints: tuple[int, ...] | None = None,
    block_bytes: int | None = None, seed: int = 0,
) -> None:
    """Forward and backward of ``record`` against the oracle; ``captures`` follow those of the mask."""
    q, k, v, dout = tensors(record.q_heads, record.kv_heads, seed)
    all_captures = [*case.captures, *captures]
    ints = case.ints if ints is None else ints
    out, lse = reference.forward(record, q, k, v, all_captures, ints, block_bytes)
    dq, dk, dv, dcaptures = reference.backward(record, dout, q, k, v, all_captures, ints, block_bytes)
    q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
    caps = [c.clone().requires_grad_(i in leaves) for i, c in enumerate(all_captures)]
    mask = case.mask(*indices(B, record.q_heads, SQ, SK), caps) if case.atoms else None
    sink = caps[record.sink] if record.sink is not None else None
    want = oracle(q, k, v, scale=record.scale, score=lambda s: score(s, caps), mask=mask, fill=record.fill,
                  replace=record.fill_mode == "replace", empty=record.empty_rows, sink=sink)
    grads = torch.autograd.grad(want, (q, k, v, *(caps[i] for i in leaves)), dout, allow_unused=True)
    torch.testing.assert_close(out, want, equal_nan=True, rtol=1e-10, atol=1e-10)
    for name, got, ref in zip(("dq", "dk", "dv", *leaves), (dq, dk, dv, *dcaptures), grads, strict=True):
        ref = torch.zeros_like(got) if ref is None else ref
        torch.testing.assert_close(got, ref, equal_nan=True, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
    assert lse.shape == (B, record.q_heads, SQ) and lse.is_contiguous()
    if mask is not None and record.sink is None:
        empty = ~mask.expand(B, record.q_heads, SQ, SK).any(-1)
        assert torch.equal(lse == -math.inf, empty)


def record(hq: int, hkv: int, case: MaskCase, **kw: object) -> Attention:
    return Attention(hq, hkv, D, DV, "float64", 0.3, mask=case.atoms, **kw)  # type: ignore[arg-type]


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, rule: tuple[EmptyRows, float, str], heads: tuple[int, int]) -> None:
    case = MASKS[name]
    empty, fill, mode = rule
    check(record(*heads, case, fill=fill, fill_mode=mode, empty_rows=empty), case)


@pytest.mark.parametrize("name", MASKS)
def test_row_blocks_change_nothing(name: str) -> None:
    """Blocks of 1 to 3 rows give what one block gives."""
    case = MASKS[name]
    r = record(4, 2, case, fill=-1e30, empty_rows="mean")
    for rows in (1, 2, 3):
        check(r, case, block_bytes=rows * B * 4 * SK * 8)


SINKS = {
    "logits": (RULES, [0.5, -1.0, 2.0, 40.0]),
    "absent": ([("mean", -1e30, "add"), ("mean", -1e30, "replace")], [-math.inf] * 4),
    "near the fill": ([("mean", -1e5, "replace")], [-1e5, -1e5 + 3, -1e5 - 2, 0.0]),
}
"""Rules for rows without keys, and sinks: one near the fill shares such a row with the keys, -inf leaves it to them."""


@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("name", ["none", "causal-negative", "padding", "three"])
def test_sink(name: str, sinks: str) -> None:
    case, (rules, values) = MASKS[name], SINKS[sinks]
    i = len(case.captures)
    for empty, fill, mode in rules:
        r = record(4, 2, case, fill=fill, fill_mode=mode, empty_rows=empty, sink=i, grads=(i,))
        check(r, case, captures=[torch.tensor(values, dtype=torch.float64)], leaves=(i,))


BIASES = {
    "full": (B, 4, SQ, SK), "heads": (1, 4, SQ, SK), "shared": (SQ, SK), "keys": (B, 1, 1, SK), "alibi": (4, 1, 1),
    "row": (SQ, 1), "scalar": (),
}


@pytest.mark.parametrize("shape", BIASES)
@pytest.mark.parametrize("name", ["none", "causal", "padding", "causal-negative"])
def test_bias(name: str, shape: str) -> None:
    case = MASKS[name]
    i = len(case.captures)
    bias = torch.randn(BIASES[shape], dtype=torch.float64)
    r = record(4, 2, case, score=e("add", SCORE, load(i)), fill=-1e30, empty_rows="mean", grads=(i,))
    for block_bytes in (None, 2 * B * 4 * SK * 8):
        check(r, case, captures=[bias], leaves=(i,), score=lambda s, c: s + c[i], block_bytes=block_bytes)


def test_bias_that_is_expanded_gets_a_full_gradient() -> None:
    """An expanded capture is a capture of its full shape: nothing is summed over its zero strides."""
    case = MASKS["causal"]
    bias = torch.randn(1, 1, SQ, SK, dtype=torch.float64).expand(B, 4, SQ, SK)
    r = record(4, 2, case, score=e("add", SCORE, load(0)), grads=(0,))
    q, k, v, dout = tensors(4, 2)
    *_, (got,) = reference.backward(r, dout, q, k, v, [bias])
    assert got.shape == bias.shape and got.is_contiguous()
    *_, (full,) = reference.backward(r, dout, q, k, v, [bias.contiguous()])
    assert torch.equal(got, full) and not torch.equal(full[0], full[1])


SCORES: dict[str, tuple[Expr, Callable[[Tensor, Sequence[Tensor]], Tensor], int]] = {
    "softcap": (e("mul", e("tanh", e("div", SCORE, const(2.0))), const(2.0)), lambda s, c: 2 * torch.tanh(s / 2), 0),
    "alibi": (e("add", SCORE, e("mul", load(0), e("sub", index("k"), index("q")))),
              lambda s, c: s + c[0] * (indices(B, 4, SQ, SK)[3] - indices(B, 4, SQ, SK)[2]), 1),
    "two-biases": (e("add", e("mul", SCORE, load(0)), e("tanh", load(1))), lambda s, c: s * c[0] + torch.tanh(c[1]), 2),
    "shared-node": (e("mul", e("sigmoid", e("add", SCORE, load(0))), e("add", SCORE, load(0))),
                    lambda s, c: torch.sigmoid(s + c[0]) * (s + c[0]), 1),
    "no-score": (e("mul", load(0), const(2)), lambda s, c: (c[0] * 2).expand_as(s), 1),
    "swish": (e("div", SCORE, e("add", const(1.0), e("exp", e("neg", SCORE)))),
              lambda s, c: s / (1 + torch.exp(-s)), 0),
}


@pytest.mark.parametrize("name", SCORES)
def test_score_programs(name: str) -> None:
    program, f, n = SCORES[name]
    captures = [torch.randn(4, 1, 1, dtype=torch.float64), torch.randn(B, 1, SQ, SK, dtype=torch.float64)][:n]
    case = MASKS["causal"]
    check(record(4, 2, case, score=program, grads=tuple(range(n))), case, captures=captures, leaves=range(n), score=f)


@pytest.mark.parametrize("scale", [-0.7, 0.0, 3.0])
def test_any_scale(scale: float) -> None:
    check(record(4, 2, MASKS["causal"]).with_(scale=scale), MASKS["causal"])


POSITIVE = {"log", "log2", "sqrt", "rsqrt", "reciprocal", "log1p"}
TORCH_OPS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "floordiv": torch.floor_divide,
    "mod": torch.remainder, "pow": torch.pow, "minimum": torch.minimum, "maximum": torch.maximum, "eq": torch.eq,
    "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "and": torch.logical_and,
    "or": torch.logical_or, "not": torch.logical_not, "xor": torch.logical_xor, "where": torch.where,
}


@pytest.mark.parametrize("op", [o for o in OPS if o != "cast"])
def test_operator_values_and_derivatives(op: str) -> None:
    """Each operator of the language against the torch function of that name and its autograd."""
    f = TORCH_OPS.get(op) or getattr(torch, op)
    g = torch.Generator().manual_seed(1)
    xs = [torch.randn(s, generator=g, dtype=torch.float64) for s in ((2, 3, 4, 5), (3, 1, 5), (4, 1))]
    if op in POSITIVE or op == "pow":
        xs = [x.abs() + 0.1 for x in xs]
    if op in ("minimum", "maximum", "abs", "relu", "sign"):
        xs[0][..., 0] = xs[1][..., 0]  # ties
        xs[0][0, 0, 0, 1] = 0.0
    arity = OPS[op]
    args = [e("lt", load(0), load(2)), load(0), load(1)] if op == "where" else [load(i) for i in range(arity)]
    scope = Scope((2, 3, 4, 5), (0, 4), xs, (), torch.device("cpu"))
    got, memo = evaluate(Expr(op, tuple(args)), scope)
    leaves = [x.clone().requires_grad_(op != "floordiv") for x in xs]  # torch has no derivative of it
    real = (leaves[0] < leaves[2], leaves[0], leaves[1]) if op == "where" else leaves[:arity]
    want = f(*real)
    assert isinstance(got, Tensor)
    torch.testing.assert_close(got, want)
    if not want.is_floating_point() or not want.requires_grad:
        return
    cotangent = torch.randn(want.shape, generator=g, dtype=torch.float64)
    grads = torch.autograd.grad(want, leaves, cotangent, allow_unused=True)
    ours = vjp(Expr(op, tuple(args)), memo, cotangent)
    for i, ref in enumerate(grads):
        mine = ours.get(load(i))
        if ref is None or not ref.any():
            assert mine is None or not mine.any()
        else:
            assert mine is not None and mine.shape == ref.shape
            torch.testing.assert_close(mine, ref)


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "pow", "minimum", "maximum", "mod", "where"])
@pytest.mark.parametrize("side", [0, 1])
def test_operators_with_a_constant(op: str, side: int) -> None:
    x = torch.rand(2, 3, 4, 5, dtype=torch.float64) + 0.5
    pair = [load(0), const(1.5)]
    real: list[object] = [x.clone().requires_grad_(), 1.5]
    if side:
        pair.reverse()
        real.reverse()
    program = e("where", e("gt", load(0), const(1.0)), *pair) if op == "where" else e(op, *pair)
    leaf = real[side]
    assert isinstance(leaf, Tensor)
    as_tensors = [r if isinstance(r, Tensor) else torch.tensor(r, dtype=torch.float64) for r in real]
    want = torch.where(leaf > 1, *as_tensors) if op == "where" else TORCH_OPS[op](*as_tensors)
    scope = Scope((2, 3, 4, 5), (0, 4), [x], (), torch.device("cpu"))
    got, memo = evaluate(program, scope)
    torch.testing.assert_close(got, want)
    cotangent = torch.randn(x.shape, dtype=torch.float64)
    (ref,) = torch.autograd.grad(want, leaf, cotangent)
    torch.testing.assert_close(vjp(program, memo, cotangent)[load(0)], ref)


def test_cast_rounds_values_and_gradients_like_torch() -> None:
    x = torch.randn(2, 3, 4, 5)
    program = e("mul", e("cast", e("mul", e("cast", load(0), "bfloat16"), const(1.7)), "float32"), const(3.0))
    leaf = x.clone().requires_grad_()
    want = (leaf.bfloat16() * 1.7).float() * 3.0
    scope = Scope((2, 3, 4, 5), (0, 4), [x], (), torch.device("cpu"))
    got, memo = evaluate(program, scope)
    assert isinstance(got, Tensor) and torch.equal(got, want)
    cotangent = torch.randn(x.shape)
    (ref,) = torch.autograd.grad(want, leaf, cotangent)
    assert torch.equal(vjp(program, memo, cotangent)[load(0)], ref)


def test_integer_programs_follow_python() -> None:
    """floordiv rounds down, mod has the divisor's sign, also on negative numbers and between two constants."""
    scope = Scope((1, 1, 3, 5), (0, 3), (), (-2,), torch.device("cpu"))
    shifted = e("sub", index("k"), const(3))
    for op, f in (("floordiv", lambda a, b: a // b), ("mod", lambda a, b: a % b)):
        got, _ = evaluate(e(op, shifted, sym(0)), scope)
        assert isinstance(got, Tensor) and got.flatten().tolist() == [f(i - 3, -2) for i in range(5)]
        assert evaluate(e(op, const(-7), sym(0)), scope)[0] == f(-7, -2)
    assert float(evaluate(e("exp", const(0.0)), scope)[0]) == 1.0
    assert evaluate(e("and", const(True), const(False)), scope)[0] is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_rounds_once(dtype: torch.dtype) -> None:
    """Within one rounding of float64, and in the record's dtype and layout."""
    q, k, v, dout = tensors(4, 2, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    for kind, order in (("bshd", (0, 2, 1, 3)), ("bhsd", (0, 1, 2, 3))):
        r = Attention(4, 2, D, DV, name, 0.3, mask=(Band(None, 0),), layout=kind)  # type: ignore[arg-type]
        out, lse = reference.forward(r, q, k, v)
        assert out.dtype == dtype and lse.dtype == torch.float32 and out.permute(order).is_contiguous()
        leaves = [t.double().requires_grad_() for t in (q, k, v)]
        want = oracle(*leaves, scale=0.3, mask=MASKS["causal"].mask(*indices(B, 4, SQ, SK), []))
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(out.double(), want, rtol=eps, atol=2e-6)
        refs = torch.autograd.grad(want, leaves, dout.double())
        for got, ref in zip(reference.backward(r, dout, q, k, v), refs, strict=False):
            assert isinstance(got, Tensor) and got.dtype == dtype and got.transpose(1, 2).is_contiguous()
            torch.testing.assert_close(got.double(), ref, rtol=eps, atol=4e-6)


@pytest.mark.parametrize("b, sq, sk", [(0, 3, 3), (2, 0, 3), (2, 3, 0)])
def test_sizes_of_zero(b: int, sq: int, sk: int) -> None:
    r = Attention(2, 1, D, DV, "float32", 1.0, mask=(Band(None, 0),), fill=-1e30, empty_rows="mean")
    q, k, v = torch.randn(b, 2, sq, D), torch.randn(b, 1, sk, D), torch.randn(b, 1, sk, DV)
    out, lse = reference.forward(r, q, k, v)
    assert out.shape == (b, 2, sq, DV) and not out.isnan().any() and bool((lse == -math.inf).all())
    dq, dk, dv, _ = reference.backward(r, torch.randn(b, 2, sq, DV), q, k, v)
    assert not dq.any() and not dk.any() and not dv.any()


def test_nan_in_a_masked_key_does_not_reach_the_scores() -> None:
    q, k, v, _ = tensors(2, 2)
    k[:, :, -1] = math.nan
    r = Attention(2, 2, D, DV, "float64", 1.0, mask=(Band(None, 0),))
    assert reference.forward(r, q, k, v)[0].isfinite().all()
    assert reference.forward(r.with_(mask=()), q, k, v)[0].isnan().all()


def test_a_row_of_minus_infinite_bias_is_nan_as_in_eager_code() -> None:
    q, k, v, _ = tensors(2, 2)
    bias = torch.zeros(SQ, SK, dtype=torch.float64)
    bias[2] = -math.inf
    r = Attention(2, 2, D, DV, "float64", 1.0, score=e("add", SCORE, load(0)))
    out = reference.forward(r, q, k, v, [bias])[0]
    assert out[:, :, 2].isnan().all() and out[:, :, [0, 1, 3]].isfinite().all()
