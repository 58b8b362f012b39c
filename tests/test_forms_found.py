"""Forms that once came out wrong, each with what made it so; in float64, where a difference is an error."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from forms_support import Compiled, check_close, compiling
from torch import Tensor

import fa_inductor
from fa_inductor.reasons import Code

INF = float("inf")
ROW = torch.zeros(8, 8, dtype=torch.bool).index_fill(0, torch.tensor([3]), True)
AFTER = torch.ones(8, 8, dtype=torch.bool).triu(1)
BEFORE = torch.ones(8, 8, dtype=torch.bool).tril(-1)
LAST = torch.arange(8) != 7


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * 0.3


def added(s: Tensor, keep: Tensor, fill: float) -> Tensor:
    return s + torch.where(keep, torch.zeros((), dtype=s.dtype), torch.full((), fill, dtype=s.dtype))


def one_tensor_is_keys_and_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The gradient of K was lost: both uses began at one node."""
    q, k = q[:, :, None], k[:, :, None]
    return torch.softmax(q @ k.mT, -1) @ k


def softmax_of_a_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1).softmax(-1) @ v


def row_maximum_then_exp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return torch.softmax((s - s.amax(-1, keepdim=True)).exp(), -1) @ v


def row_maximum_between_masks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k).masked_fill(ROW, -1e9)
    return torch.softmax((s - s.amax(-1, keepdim=True)).masked_fill(AFTER, -1e9), -1) @ v


def row_maximum_before_a_sink(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    s = s - s.amax(-1, keepdim=True)
    sink = torch.linspace(-1, 1, s.shape[1], dtype=s.dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)
    return torch.softmax(torch.cat([s, sink], -1), -1)[..., :-1] @ v


def scores_in_float8(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(scores(q, k).to(torch.float8_e4m3fn).to(q.dtype), -1) @ v


def safe_test_along_the_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k).masked_fill(ROW, -INF)
    return torch.where((s == -INF).all(-2, keepdim=True), 0.0, torch.softmax(s, -1)) @ v


def two_masks_added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A proved mask of -1e9 hid keys that eager code lets compete with keys another -1e9 lies on."""
    s = added(scores(q, k), LAST.view(1, 1, 1, 8), -1e9)
    return torch.softmax(s - BEFORE.to(s.dtype) * 1e9, -1) @ v


def a_mask_added_and_one_filled_in(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(added(scores(q, k), LAST.view(1, 1, 1, 8), -1e9).masked_fill(BEFORE, -1e9), -1) @ v


def bias_along_a_part_of_the_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, h, n, d = q.shape
    grouped = q.view(b, h // 2, 2, n, d)
    bias = k[0, :, :1, :1].view(h, 1, 1)[: h // 2]
    s = grouped @ k[:, ::2, None].mT + bias.unsqueeze(1)
    return (torch.softmax(s, -1) @ v[:, ::2, None]).reshape(b, h, n, d)


def lowest_float64_then_a_factor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The choice between two constants of the score program was made in float32, where this one overflows."""
    after = torch.arange(8)[:, None] < torch.arange(8)
    s = scores(q, k) - after.to(q.dtype) * torch.finfo(q.dtype).min
    return torch.softmax(s * 0.5, -1) @ v


def choice_of_two_fractions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same, rounded to float32."""
    i = torch.arange(8)
    near = torch.where(i[:, None] // 2 == i // 2, torch.full((), 0.3, dtype=q.dtype), torch.full((), -0.1, dtype=q.dtype))
    return torch.softmax(scores(q, k) + near, -1) @ v


def a_fill_that_a_factor_makes_infinite(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """With a bias in between, the fill was read as a number; the gradient of keys hidden later was 0 and not NaN."""
    i = torch.arange(8)
    s = torch.where(i[:, None] > i, scores(q, k), torch.finfo(q.dtype).min) * 2.0
    s = added(s, i[:, None] % 2 == i % 2, -INF) + k.detach()
    return torch.softmax(s, -1) @ v


def naive(s: Tensor) -> Tensor:
    e = s.exp()
    return e / e.sum(-1, keepdim=True)


def naive_softmax_of_a_filled_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """exp underflows and the row is 0/0; ours was the mean."""
    return naive(scores(q, k).masked_fill(ROW, -1e4)) @ v


def naive_softmax_of_a_masked_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return naive(scores(q, k).masked_fill(ROW, -1e9)) @ v


def naive_softmax_of_a_row_beside_a_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The bias made the operator read the mask as a tensor, whose numbers nobody looked at."""
    return naive(added(scores(q, k) + v.detach(), ~ROW, torch.finfo(q.dtype).min)) @ v


def naive_softmax_of_a_row_in_a_trained_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return naive(scores(q, k) + added(k, ~ROW, -1e4)) @ v


def naive_softmax_of_a_scaled_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return naive(added(scores(q, k), ~ROW, -50.0) * 30.0) @ v


def naive_softmax_of_low_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return naive(scores(q, k) - 1e4) @ v


def view_of_a_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The operator's dV has other strides than the user's, and pointwise operators hand them on to the last view."""
    k, v = (x.unflatten(-1, (2, 4)).transpose(1, 2) for x in (k[0], v[0, :1]))
    v = torch.nn.functional.normalize(v, dim=-1)
    s = scores(q.view(4, 2, 2, 8, 4), k[:, :, None])
    return (v[:, :, None].mT @ torch.softmax(s, -1).mT).mT


def a_filled_row_rounded_to_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """float32 holds nothing of a score beside 1e9; the cast was left out."""
    return torch.softmax(added(scores(q, k), ~ROW, -1e9).float(), -1).to(v.dtype) @ v


def a_filled_row_negated_and_rounded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = added(scores(q, k), LAST.view(1, 1, 1, 8), -1e9).float().to(q.dtype)
    return torch.softmax(k.detach() - s, -1) @ v


def a_filled_row_in_float32_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(added(scores(q, k).float(), ~ROW, -1e9), -1).to(v.dtype) @ v


def a_filled_row_of_a_trained_bias_rounded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax((scores(q, k) + added(k, ~ROW, -1e9)).float(), -1).to(v.dtype) @ v


def a_filled_row_in_a_float32_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = (scores(q, k) + v.detach()).masked_fill(ROW, -1e9) + k.detach()
    return torch.softmax(s, -1, dtype=torch.float32).to(v.dtype) @ v


def a_bias_after_the_row_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The maximum takes the fill away, and the bias counts; without it the fill swallowed the bias."""
    s = added(scores(q, k), ~ROW, torch.finfo(q.dtype).min)
    return torch.softmax(s - s.amax(-1, keepdim=True) + k.detach(), -1) @ v


def a_factor_after_the_row_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The factor made the fill infinite, which the maximum had made 0."""
    s = scores(q, k).masked_fill(ROW, torch.finfo(q.dtype).min)
    return torch.softmax((s - s.amax(-1, keepdim=True)) * 2.0, -1) @ v


def a_cast_after_the_row_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k).masked_fill(ROW, torch.finfo(q.dtype).min)
    return torch.softmax((s - s.amax(-1, keepdim=True)).float(), -1).to(v.dtype) @ v


SWALLOWED = {
    a_filled_row_rounded_to_float32: Code.EMPTY_ROWS, a_filled_row_negated_and_rounded: Code.EMPTY_ROWS,
    a_filled_row_in_float32_scores: Code.EMPTY_ROWS, a_filled_row_of_a_trained_bias_rounded: Code.EMPTY_ROWS,
    a_filled_row_in_a_float32_softmax: Code.EMPTY_ROWS, a_bias_after_the_row_maximum: Code.EMPTY_ROWS,
    a_factor_after_the_row_maximum: Code.MASK_FILL, a_cast_after_the_row_maximum: Code.MASK_FILL,
}
FORMS = [*SWALLOWED, one_tensor_is_keys_and_values, softmax_of_a_softmax, row_maximum_then_exp, row_maximum_between_masks,
         row_maximum_before_a_sink, scores_in_float8, safe_test_along_the_queries, two_masks_added,
         a_mask_added_and_one_filled_in, bias_along_a_part_of_the_heads, lowest_float64_then_a_factor,
         choice_of_two_fractions, a_fill_that_a_factor_makes_infinite,
         naive_softmax_of_a_filled_row, naive_softmax_of_a_masked_row, naive_softmax_of_a_row_beside_a_bias,
         naive_softmax_of_a_row_in_a_trained_bias, naive_softmax_of_a_scaled_row, naive_softmax_of_low_scores,
         view_of_a_gradient]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_is_right(form: Callable[..., Tensor], train: bool) -> None:
    if train and form is scores_in_float8:
        train = False  # autograd has no float8
    g = torch.Generator().manual_seed(1)
    xs = [torch.randn(2, 4, 8, 8, generator=g, dtype=torch.float64).requires_grad_(train) for _ in range(3)]
    with compiling(validate=False):
        got, want = Compiled(form).fn(*xs), form(*xs)
        if train:
            got, want = ([o, *torch.autograd.grad(o.sin().sum(), xs, allow_unused=True)] for o in (got, want))
        refused = [b.reason and b.reason.code for b in fa_inductor.report().blocks]
    rounds = form in SWALLOWED  # to float32, in the form's own code
    torch.testing.assert_close(got, want, rtol=1e-5 if rounds else 1e-9, atol=1e-5 if rounds else 1e-10, equal_nan=True)
    if form in SWALLOWED:
        assert refused == [SWALLOWED[form]]


@pytest.mark.parametrize("fill", [-1e9, -3e38])
def test_a_row_maximum_is_left_out_where_nothing_follows(fill: float) -> None:
    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = added(scores(q, k), ~ROW, fill)
        return torch.softmax(s - s.amax(-1, keepdim=True), -1) @ v

    g = torch.Generator().manual_seed(1)
    xs = [torch.randn(2, 4, 8, 8, generator=g) for _ in range(3)]
    with torch.no_grad(), compiling(validate=False):
        got = Compiled(form).fn(*xs)
        assert [b.outcome for b in fa_inductor.report().blocks] == ["rewritten"]
    check_close("output", got, form(*xs), form(*(x.double() for x in xs)))


def test_sizes_of_two_static_axes_and_a_symbolic_one() -> None:
    """Their product was a node that multiplies two plain numbers, which the partitioner does not know."""
    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (x.unflatten(-1, (h, -1)).transpose(1, 2) for x, h in ((q, 4), (k, 2)))
        v = v.permute(1, 2, 0, 3)
        k, v = (x[:, None].expand(-1, 2, -1, -1, -1).reshape(x.shape[0], 4, *x.shape[2:]) for x in (k, v))
        p = torch.softmax((q @ k.mT).mT * 0.5, 2)
        return (p.mT @ v).flatten(1)

    g = torch.Generator().manual_seed(1)
    xs = [torch.randn(n, generator=g, dtype=torch.float64).requires_grad_()
          for n in ((3, 5, 8), (3, 5, 4), (5, 3, 2, 2))]
    for x, dims in zip(xs, ((0, 1), (0, 1), (1, 0)), strict=True):
        for d in dims:
            torch._dynamo.mark_dynamic(x, d)
    with compiling(validate=False):
        got, want = (torch.autograd.grad(f(*xs).sin().sum(), xs) for f in (Compiled(form).fn, form))
        assert [b.outcome for b in fa_inductor.report().blocks] == ["rewritten"]
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def test_windows_of_a_symbolic_image() -> None:
    """Batch, rows and columns of windows are one dimension; the size of none of them could be read off it."""
    def form(x: Tensor, bias: Tensor) -> Tensor:
        (b, h, w), c = x.shape[:3], 8
        rows, columns = (h + 3) // 4, (w + 3) // 4
        x = torch.nn.functional.pad(x, (0, 0, 0, 4 * columns - w, 0, 4 * rows - h))
        t = x.view(b, rows, 4, columns, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)
        q, k, v = (f(t).view(t.shape[0], 16, 2, -1).transpose(1, 2) for f in (torch.sin, torch.cos, torch.tanh))
        o = (torch.softmax(q @ k.mT + bias, -1) @ v).transpose(1, 2).reshape(t.shape)
        o = o.view(b, rows, columns, 4, 4, c).permute(0, 1, 3, 2, 4, 5)
        return o.reshape(b, 4 * rows, 4 * columns, c)

    g = torch.Generator().manual_seed(1)
    bias = torch.randn(2, 16, 16, generator=g, dtype=torch.float64)
    with torch.no_grad(), compiling(validate=False):
        compiled = Compiled(form, dynamic=True)
        for shape in ((3, 10, 14, 8), (2, 17, 9, 8)):
            x = torch.randn(shape, generator=g, dtype=torch.float64)
            torch.testing.assert_close(compiled.fn(x, bias), form(x, bias), rtol=1e-9, atol=1e-10)
        assert [b.outcome for b in fa_inductor.report().blocks] == ["rewritten"], fa_inductor.report()
        assert compiled.compiles == 1


def test_a_factor_that_does_not_fit_into_half_queries() -> None:
    def form(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
        return torch.softmax((q @ k.mT).float() * t, -1).to(v.dtype) @ v

    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 4, 8, 8, generator=g) for _ in range(3))
    xs = [(q * 60).half(), (k * 1e-3).half(), v.half(), torch.tensor(2000.0)]
    with torch.no_grad(), compiling():
        got, want = Compiled(form).fn(*xs), form(*xs)
    assert got.isfinite().all()
    torch.testing.assert_close(got, want, rtol=0.0, atol=0.05)


def _added(s: Tensor, big: Tensor) -> Tensor:
    i = torch.arange(8)
    return s + torch.where(i[:, None] >= i, torch.zeros((), dtype=s.dtype), big)


BEYOND_FLOAT32 = {
    "added": _added, "filled in": lambda s, big: torch.where(AFTER, big, s), "clamp": lambda s, big: s.clamp(max=1e300),
    "factor": lambda s, big: s * 1e300,
}


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("name", BEYOND_FLOAT32)
def test_numbers_beyond_float32_in_float64_scores(name: str, backend: str) -> None:
    """Scores are computed in float32 unless the inputs are float64; the compiled program raised at its first run."""
    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores(q, k).double()
        return torch.softmax(BEYOND_FLOAT32[name](s, torch.full((), 1e300, dtype=s.dtype)), -1).to(v.dtype) @ v

    g = torch.Generator().manual_seed(1)
    xs = [torch.randn(2, 4, 8, 8, generator=g) for _ in range(3)]
    with compiling(validate=False, backend=backend):
        got = Compiled(form).fn(*xs)
        blocks = fa_inductor.report().blocks
    assert [b.reason.code for b in blocks] == [Code.SCORE_OP], blocks
    torch.testing.assert_close(got, form(*xs), equal_nan=True)


def test_a_constant_bias_is_not_rounded_to_half() -> None:
    """It was, on the CPU: only biases with a tensor in them were kept in float32."""
    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(8)
        near = torch.where(i[:, None] // 2 == i // 2, torch.full((), 30.1), torch.full((), 29.9))
        return torch.softmax(scores(q, k).float() + near, -1).to(v.dtype) @ v

    g = torch.Generator().manual_seed(1)
    xs = [torch.randn(2, 4, 8, 8, generator=g).bfloat16() for _ in range(3)]
    with torch.no_grad(), compiling(validate=False, backend="sdpa"):
        got = Compiled(form).fn(*xs)
        assert [b.outcome for b in fa_inductor.report().blocks] == ["rewritten"]
    check_close("output", got, form(*xs), form(*(x.double() for x in xs)))


@pytest.mark.parametrize("lift", [torch.finfo(torch.float64).max, 1e9, 4e4])
def test_a_number_that_lifts_what_a_finite_fill_hid(lift: float) -> None:
    """The second step has the wrong sign for a mask: keys that the first one hid come back, others win."""
    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(8)
        s = scores(q, k).masked_fill(AFTER, -lift)
        return torch.softmax(s + ((i[:, None] - i) % 3 != 0).to(s.dtype) * lift, -1) @ v

    g = torch.Generator().manual_seed(1)
    xs = [torch.randn(2, 4, 8, 8, generator=g, dtype=torch.float64) for _ in range(3)]
    with torch.no_grad(), compiling(validate=False):
        got = Compiled(form).fn(*xs)
        assert [b.outcome for b in fa_inductor.report().blocks] == ["rewritten"]
    torch.testing.assert_close(got, form(*xs), rtol=1e-4, atol=1e-4)
