"""PyTorch SDPA backends against the reference: CPU for real, CUDA against a strict model of its operators."""
from __future__ import annotations

import math
from collections.abc import Sequence

import aten_cuda_model as model
import pytest
import torch
from attention_oracle import oracle
from test_reference import BIASES, MASKS, ROWS, RULES, SINKS, SK, SQ, B, e, record, tensors
from torch import Tensor

from fa_inductor.backends import absorbed, aten_cpu, aten_cuda, empty_rows, reference, sdpa, torch_backward
from fa_inductor.backends.additive import ZERO, additive_part
from fa_inductor.backends.masks import empty_rows_of, mask_of
from fa_inductor.backends.program import Scope
from fa_inductor.kernels.expr import SCORE, Expr, const, index, load
from fa_inductor.kernels.record import Attention, Band, EmptyRows
from fa_inductor.reasons import Code


def compare(
    r: Attention, run: tuple[object, object], captures: Sequence[Tensor], ints: Sequence[int], *, tol: float,
    inputs: Sequence[Tensor],
) -> None:
    """Forward and backward of a backend (a pair of functions) against the reference, strides included."""
    q, k, v, dout = inputs
    forward, backward = run
    out, lse = forward(r, q, k, v, captures, ints)  # type: ignore[operator]
    want, want_lse = reference.forward(r, q, k, v, captures, ints)
    grads = backward(r, dout, q, k, v, out, lse, captures, ints)  # type: ignore[operator]
    refs = reference.backward(r, dout, q, k, v, captures, ints)
    names = ("out", "lse", "dq", "dk", "dv", *(f"capture {i}" for i in r.grads))
    got_all, want_all = (out, lse, *grads[:3], *grads[3]), (want, want_lse, *refs[:3], *refs[3])
    for name, got, ref in zip(names, got_all, want_all, strict=True):
        assert got.stride() == ref.stride() and got.dtype == ref.dtype, name
        size = ref[ref.isfinite()].abs().max().item() if ref.isfinite().any() else 1.0
        atol = (2 if name.startswith("capture") else 1) * tol * max(1.0, size)
        torch.testing.assert_close(got, ref, rtol=tol, atol=atol, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")


CPU = (sdpa.forward, aten_cpu.backward)


@pytest.mark.parametrize("sinks", [None, *SINKS])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_cpu_masks(name: str, heads: tuple[int, int], sinks: str | None) -> None:
    for empty, fill, mode in SINKS[sinks][0] if sinks else RULES:
        case = MASKS[name]
        r, captures = record(*heads, case, fill=fill, fill_mode=mode, empty_rows=empty), list(case.captures)
        if sinks:
            i = len(captures)
            r = r.with_(sink=i, grads=(i,))
            captures.append(torch.tensor(SINKS[sinks][1], dtype=torch.float64))
        assert sdpa.sdpa_supports(r, "cpu") is None
        compare(r, CPU, captures, case.ints, tol=1e-10, inputs=tensors(*heads))


@pytest.mark.parametrize("shape", BIASES)
@pytest.mark.parametrize("name", ["none", "causal", "causal-negative", "padding", "dense"])
def test_cpu_bias(name: str, shape: str) -> None:
    case = MASKS[name]
    bias = torch.randn(BIASES[shape], dtype=torch.float64)
    for empty, fill in ROWS.items():
        r = record(4, 2, case, score=e("add", SCORE, load(len(case.captures))), fill=fill, empty_rows=empty)
        compare(r, CPU, [*case.captures, bias], case.ints, tol=1e-10, inputs=tensors(4, 2))


@pytest.mark.parametrize("heads, dim, dim_v", [((3, 3), 8, 8), ((6, 2), 5, 9), ((4, 1), 9, 3)])
@pytest.mark.parametrize("scale", [0.4, -0.4, 0.0])
def test_cpu_head_dims_scales_and_strides(heads: tuple[int, int], dim: int, dim_v: int, scale: float) -> None:
    """K with its head dimension strided: the operator itself would read wrong data."""
    hq, hk = heads
    q = torch.randn(2, 5, hq, dim, dtype=torch.float64).transpose(1, 2)
    k = torch.randn(2, hk, dim, 7, dtype=torch.float64).transpose(2, 3)
    v = torch.randn(1, hk, 7, dim_v + 3, dtype=torch.float64)[..., 3:].expand(2, hk, 7, dim_v)
    dout = torch.randn(1, 1, 1, dim_v, dtype=torch.float64).expand(2, hq, 5, dim_v)
    for layout in ("bshd", "bhsd"):
        r = Attention(hq, hk, dim, dim_v, "float64", scale, mask=(Band(None, 0),), layout=layout)  # type: ignore[arg-type]
        compare(r, CPU, [], [], tol=1e-10, inputs=(q, k, v, dout))


def test_a_bias_row_of_minus_infinity_is_nan_as_in_eager_code() -> None:
    bias = torch.zeros(SQ, SK, dtype=torch.float64)
    bias[2] = -math.inf
    r = record(4, 2, MASKS["none"], score=e("add", SCORE, load(0)))
    compare(r, CPU, [bias], [], tol=1e-10, inputs=tensors(4, 2))
    q, k, v, _ = tensors(4, 2)
    for case in (MASKS["none"], MASKS["causal"]):
        out, _ = sdpa.forward(r.with_(mask=case.atoms), q, k, v, [bias])
        assert out[:, :, 2].isnan().all() and out[:, :, [0, 1, *range(3, SQ)]].isfinite().all()


@pytest.mark.parametrize("name", ["none", "causal", "padding"])
@pytest.mark.parametrize("where", ["a query", "an infinite query", "a key", "every key"])
def test_cpu_scores_that_are_not_numbers(where: str, name: str) -> None:
    """PyTorch's operator gives 0 to a row whose scores are all NaN."""
    case, (q, k, v, _) = MASKS[name], tensors(4, 2, dtype=torch.float32)
    q, k = q.clone(), k.clone()
    if "query" in where:
        q[0, 1, 2] = math.inf if "infinite" in where else math.nan
    else:
        k[0, 1, slice(1, 2) if where == "a key" else slice(None), 0] = math.nan
    r = record(4, 2, case).with_(dtype="float32")
    out, want = (f(r, q, k, v, case.captures, case.ints)[0] for f in (sdpa.forward, reference.forward))
    assert want.isnan().any() and torch.equal(out.isnan(), want.isnan())


def test_cpu_a_row_that_is_zero_is_no_nan() -> None:
    q, k, v = (torch.zeros(1, 2, n, 8) for n in (3, 1, 1))
    out, lse = sdpa.forward(Attention(2, 2, 8, 8, "float32", 1.0), q, k, v)
    assert torch.equal(out, q) and torch.equal(lse, q[..., 0])


@pytest.mark.parametrize("name", MASKS)
def test_empty_rows_by_interval_or_by_mask(name: str) -> None:
    case = MASKS[name]
    r = record(4, 2, case)
    scope = Scope((B, 4, SQ, SK), (0, SQ), case.captures, case.ints, torch.device("cpu"))
    mask, empty = mask_of(r, scope), empty_rows_of(r, scope)
    if mask is None:
        assert empty is None
    else:
        assert empty is not None
        assert torch.equal(empty.expand(B, 4, SQ), ~mask.expand(B, 4, SQ, SK).any(-1))


def test_every_band_interval() -> None:
    """All bands on small shapes: rows without keys, and the flash form where there is one."""
    forms = 0
    for sq in (1, 3, 5):
        for sk in (1, 3, 6):
            for lo in (None, *range(-6, 7)):
                for hi in (None, *range(-6, 7)):
                    r = Attention(1, 1, 8, 8, "float16", 1.0, mask=(Band(lo, hi),))
                    scope = Scope((1, 1, sq, sk), (0, sq), [], [], torch.device("cpu"))
                    mask, empty = mask_of(r, scope), empty_rows_of(r, scope)
                    assert mask is not None and empty is not None
                    mask = mask.expand(1, 1, sq, sk)
                    assert torch.equal(empty, ~mask.any(-1))
                    band = aten_cuda.flash_band(lo, hi, sq, sk)
                    if band is None:
                        continue
                    forms += 1
                    kept = torch.zeros(sq, sk, dtype=torch.bool)
                    kept[:, band.start : band.stop] = model._window(sq, band.stop - band.start, band.left, band.right)
                    assert torch.equal(kept, mask[0, 0]), (sq, sk, lo, hi, band)
    assert forms > 500
    # what matters most has a form: causal and windows at both diagonals, prefill, decode
    for sq, sk in ((4, 4), (3, 6), (6, 3), (1, 6)):
        for hi in (0, sk - sq):
            if hi > -sq and sk >= sq:  # else the distance to the diagonal is as long as the keys
                assert aten_cuda.flash_band(None, hi, sq, sk) is not None
                assert aten_cuda.flash_band(hi - 2, hi, sq, sk) is not None or sk - sq + 2 >= sk


@pytest.fixture
def cuda_model(monkeypatch: pytest.MonkeyPatch) -> tuple[object, object]:
    monkeypatch.setattr(aten_cuda, "_flash_forward", model.flash_forward)
    monkeypatch.setattr(aten_cuda, "_efficient_forward", model.efficient_forward)
    monkeypatch.setattr(torch_backward, "_flash_backward", model.flash_backward)
    monkeypatch.setattr(torch_backward, "_efficient_backward", model.efficient_backward)
    return aten_cuda.forward, torch_backward.backward


@pytest.mark.parametrize("sinks", [None, "logits", "absent"])  # a float32 lse has no digits left near a fill
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_cuda_masks(name: str, heads: tuple[int, int], sinks: str | None, cuda_model: tuple[object, object]) -> None:
    case = MASKS[name]
    for dtype, tol in (("float16", 4e-3), ("float32", 2e-5)):
        for empty, fill, mode in SINKS[sinks][0] if sinks else RULES:
            r, captures = record(*heads, case, fill=fill, fill_mode=mode, empty_rows=empty), list(case.captures)
            r = r.with_(dtype=dtype)
            if sinks:
                i = len(captures)
                r = r.with_(sink=i, grads=(i,))
                captures.append(torch.tensor(SINKS[sinks][1]))
            assert sdpa.sdpa_supports(r, "cuda") is None
            compare(r, cuda_model, captures, case.ints, tol=tol,
                    inputs=tensors(*heads, dtype=getattr(torch, dtype)))


@pytest.mark.parametrize("rows", [1, 3, None])
@pytest.mark.parametrize("capture_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("shape", BIASES)
@pytest.mark.parametrize("name", ["none", "causal", "padding", "causal-negative"])
def test_cuda_bias(
    name: str, shape: str, capture_dtype: torch.dtype, rows: int | None, cuda_model: tuple[object, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bias gradients in every broadcast shape, rows in blocks, and a float32 bias that is not rounded to float16."""
    if rows is not None:
        monkeypatch.setattr(aten_cuda, "BIAS_BYTES", rows * B * 4 * 16 * 4)
    case = MASKS[name]
    i = len(case.captures)
    bias = (torch.randn(BIASES[shape]) + 100).to(capture_dtype)
    r = record(4, 2, case, score=e("add", SCORE, load(i)), grads=(i,), empty_rows="nan").with_(
        dtype="float16", fill_mode="replace")
    compare(r, cuda_model, [*case.captures, bias], case.ints, tol=4e-3, inputs=tensors(4, 2, dtype=torch.float16))


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
@pytest.mark.parametrize("dims", [(8, 8), (5, 9), (16, 8)], ids=str)
def test_cuda_scales_and_dims(scale: float, dims: tuple[int, int], cuda_model: tuple[object, object]) -> None:
    """Head dims that need padding, and scales for which a maximum before scaling is wrong."""
    for dtype, tol in ((torch.float16, 4e-3), (torch.float32, 2e-5)):
        q, k, v, dout = (torch.randn(2, h, s, d).to(dtype) for h, s, d in (
            (4, SQ, dims[0]), (2, SK, dims[0]), (2, SK, dims[1]), (4, SQ, dims[1])))
        for mask in ((), (Band(None, 0),), (Band(-2, 2),)):
            r = Attention(4, 2, *dims, str(dtype).removeprefix("torch."), scale, mask=mask)
            compare(r, cuda_model, [], [], tol=tol, inputs=(q, k, v, dout))


def test_cuda_alibi_and_dead_rows(cuda_model: tuple[object, object]) -> None:
    alibi = e("add", SCORE, e("mul", load(0), e("sub", index("k"), index("q"))))
    r = record(4, 2, MASKS["causal"], score=alibi).with_(dtype="float16")
    compare(r, cuda_model, [torch.rand(4, 1, 1)], [], tol=4e-3, inputs=tensors(4, 2, dtype=torch.float16))
    bias = torch.zeros(SQ, SK, dtype=torch.float16)
    bias[2] = -math.inf
    r = record(4, 2, MASKS["none"], score=e("add", SCORE, load(0))).with_(dtype="float16")
    compare(r, cuda_model, [bias], [], tol=4e-3, inputs=tensors(4, 2, dtype=torch.float16))


SHIFTS = {"a batch entry": (B, 1, 1, SK), "a row": (SQ, SK), "a row of a head": (4, SQ, SK)}
"""Shapes of a bias with one large number on all keys of its first batch entry, row, or head and row."""


def shifted(shape: tuple[int, ...], number: float) -> tuple[Tensor, Tensor]:
    """A float32 bias, a mask among it, without and with ``number`` added where it changes no weight.

    What the number absorbs of the others is missing in both."""
    plain = torch.randn(shape).masked_fill(torch.rand(shape) < 0.2, -1e9)
    plain[..., 0] = 0.5
    bias = plain.clone()
    row = (0,) * (len(shape) - 1)
    bias[row] += number
    plain[row] = bias[row] - number
    return plain, bias


@pytest.mark.parametrize(("number", "sink"), [
    (-1e9, False), (torch.finfo(torch.bfloat16).min, False), (1e9, False), (-1e9, True)])
@pytest.mark.parametrize("shape", SHIFTS)
@pytest.mark.parametrize("name", ["none", "causal", "padding"])
def test_cuda_backward_of_a_row_with_a_large_number_on_every_key(
    name: str, shape: str, number: float, sink: bool, cuda_model: tuple[object, object]
) -> None:
    """The lse has absorbed the scores there: the weights do not come from it.  Float64 absorbs them in the lowest number too."""
    torch.manual_seed(0)
    case, (q, k, v, dout) = MASKS[name], tensors(4, 2, dtype=torch.float16)
    i = len(case.captures)
    r = record(4, 2, case, score=e("add", SCORE, load(i)), empty_rows="nan").with_(dtype="float16", fill_mode="replace")
    plain, bias = shifted(SHIFTS[shape], number)
    captures = [*case.captures, bias]
    wanted = [*case.captures, plain if abs(number) < absorbed.EQUAL else bias]
    if sink:  # it takes all weight of such a row: the number does change the answer
        r = r.with_(sink=i + 1)
        captures = wanted = [*captures, torch.randn(4)]
    out, lse = aten_cuda.forward(r, q, k, v, captures, case.ints)
    got = torch_backward.backward(r, dout, q, k, v, out, lse, captures, case.ints)
    want = reference.backward(r, dout, q, k, v, wanted, case.ints)
    for name_, x, y in zip(("dq", "dk", "dv"), got, want, strict=False):
        torch.testing.assert_close(x, y, rtol=4e-3, atol=4e-3 * float(y[y.isfinite()].abs().max()), equal_nan=True,
                                   msg=lambda m, n=name_: f"{n}: {m}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("number", [-1e9, 1e9])
@pytest.mark.parametrize("shape", SHIFTS)
def test_cpu_backward_of_a_row_with_a_large_number_on_every_key(shape: str, number: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    r = record(4, 2, MASKS["none"], score=e("add", SCORE, load(0))).with_(dtype=str(dtype).removeprefix("torch."))
    bias = shifted(SHIFTS[shape], number)[1]
    compare(r, (sdpa.forward, sdpa.backward), [bias], [], tol=4e-3 if dtype == torch.float16 else 3e-2,
            inputs=tensors(4, 2, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_closed_form_of_empty_rows(
    rule: tuple[EmptyRows, float, str], dtype: torch.dtype, cuda_model: tuple[object, object]
) -> None:
    """Large means (cancellation), garbage of a kernel in those rows."""
    case = MASKS["causal-negative"]
    q, k, v, dout = tensors(4, 2)
    # a large mean of V is in delta = dO . out with the rounding of out, which half dtypes show in any flash backward
    inputs = [x.to(dtype) for x in (q, k + 3, v + (1 if dtype == torch.float16 else 10), dout)]
    empty, fill, mode = rule
    r = record(4, 2, case, fill=fill, fill_mode=mode, empty_rows=empty)
    r = r.with_(dtype=str(dtype).removeprefix("torch."))
    assert empty_rows.matters(r)
    compare(r, cuda_model, [], [], tol=4e-3 if dtype == torch.float16 else 1e-4, inputs=inputs)


@pytest.mark.parametrize("program, rest", [
    (SCORE, ZERO), (e("add", SCORE, load(0)), load(0)), (e("add", load(0), SCORE), load(0)),
    (e("sub", SCORE, load(0)), e("neg", load(0))), (e("cast", e("add", SCORE, load(0)), "float32"), load(0)),
    (e("add", e("add", SCORE, load(0)), load(1)), e("add", load(0), load(1))),
    (e("add", load(1), e("sub", SCORE, load(0))), e("add", load(1), e("neg", load(0)))),
    (e("mul", SCORE, const(2.0)), None), (e("sub", load(0), SCORE), None), (e("add", SCORE, SCORE), None),
    (e("cast", SCORE, "bfloat16"), None), (e("tanh", SCORE), None), (load(0), None),
])  # fmt: skip
def test_additive_part(program: Expr, rest: Expr | None) -> None:
    assert additive_part(program) == rest


@pytest.mark.parametrize("device, changes, code", [
    ("mps", {}, Code.DEVICE), ("cpu", {"score": e("tanh", SCORE)}, Code.FEATURE),
    ("cuda", {"score": e("tanh", SCORE)}, Code.FEATURE), ("cuda", {"dtype": "float64"}, Code.DTYPE),
    ("cpu", {"score": e("add", SCORE, load(0)), "grads": (0,)}, Code.GRAD_CAPTURE),
    ("cuda", {"score": e("add", SCORE, e("mul", load(0), index("k"))), "grads": (0,)}, Code.GRAD_CAPTURE),
    ("cuda", {"score": e("add", SCORE, load(0)), "grads": (0,), "mask": (Band(None, -1),), "fill": -1e30,
              "empty_rows": "mean"}, Code.EMPTY_ROWS),
])  # fmt: skip
def test_refusals(device: str, changes: dict[str, object], code: Code) -> None:
    reason = sdpa.sdpa_supports(Attention(2, 2, 8, 8, "float32", 1.0).with_(**changes), device)
    assert reason is not None and reason.code is code


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_error_against_eager_code(backend: str, dtype: torch.dtype, outliers: bool) -> None:
    """Numerics contract: maximum error <= 2x and mean error <= 1.1x that of eager code in the same dtype."""
    g = torch.Generator().manual_seed(3)
    q, k, v, dout = (torch.randn(2, h, 160, 32, generator=g) for h in (4, 2, 2, 4))
    if outliers:
        q, k = (torch.where(torch.rand(x.shape, generator=g) < 0.01, 8 * x, x) for x in (q, k))
    q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
    mask = torch.ones(160, 160, dtype=torch.bool).tril()[None, None]
    r = Attention(4, 2, 32, 32, str(dtype).removeprefix("torch."), 32**-0.5, mask=(Band(None, 0),))

    def eager(to: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.to(to).requires_grad_() for x in (q, k, v)]
        out = oracle(*leaves, scale=r.scale, mask=mask)
        return (out, *torch.autograd.grad(out, leaves, dout.to(to)))

    exact, plain = eager(torch.float64), eager(dtype)
    if backend == "sdpa":
        out, lse = sdpa.forward(r, q, k, v)
        ours = (out, *sdpa.backward(r, dout, q, k, v, out, lse)[:3])
    else:
        ours = (reference.forward(r, q, k, v)[0], *reference.backward(r, dout, q, k, v)[:3])
    for name, x, p, want in zip(("out", "dq", "dk", "dv"), ours, plain, exact, strict=True):
        mine, theirs = (x.double() - want).abs(), (p.double() - want).abs()
        assert mine.max() <= 2 * theirs.max(), (name, mine.max().item(), theirs.max().item())
        assert mine.mean() <= 1.1 * theirs.mean(), (name, mine.mean().item(), theirs.mean().item())
