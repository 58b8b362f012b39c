"""The operators as operators: schema, fakes, autograd, layouts, compilation, announcements."""
from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fa_inductor.ops as ops
from fa_inductor.backends import reference
from fa_inductor.kernels.expr import SCORE, Expr, load
from fa_inductor.kernels.record import Attention, Band, Dense, KeyPadding, Sym
from fa_inductor.ops import layout
from fa_inductor.options import options

B, SQ, SK, D = 2, 5, 7, 8


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    ops.forget()
    yield
    ops.forget()


def contiguous(b: int, h: int, s: int, d: int) -> Tensor:
    return torch.randn(b, h, s, d)


LAYOUTS = {
    "contiguous": contiguous,
    "permuted": lambda b, h, s, d: torch.randn(b, s, h, d).transpose(1, 2),
    "expanded": lambda b, h, s, d: torch.randn(1, h, s, d).expand(b, h, s, d),
    "sliced": lambda b, h, s, d: torch.randn(b, s, h, 3 * d)[..., d : 2 * d].transpose(1, 2),
    "offset": lambda b, h, s, d: torch.randn(b * h * s * d + 3)[3:].view(b, h, s, d),
    "strided-head-dim": lambda b, h, s, d: torch.randn(b, h, d, s).transpose(2, 3),
}
BIAS = Expr("add", (SCORE, load(0)))


def case(name: str, dtype: str) -> tuple[Attention, list[Tensor], list[int]]:
    r = Attention(4, 2, D, D, dtype, 0.3)
    to = getattr(torch, dtype)
    match name:
        case "plain":
            return r.with_(layout="bhsd"), [], []
        case "causal":
            return r.with_(mask=(Band(None, Sym(0)),)), [], [SK - SQ]
        case "padding":
            r = r.with_(mask=(KeyPadding(0), Band(Sym(1), Sym(0))), fill=-1e30, empty_rows="mean")
            return r, [torch.arange(SK).expand(B, SK) > 2], [0, -4]
        case "dense":
            return r.with_(mask=(Dense(0),)), [torch.rand(B, 1, SQ, SK).gt(0.5).logical_or_(torch.eye(SQ, SK) > 0)], []
        case _:
            bias = torch.randn(4, SQ, SK).to(to).requires_grad_()
            sink = torch.randn(4).to(to).requires_grad_()
            return r.with_(score=BIAS, sink=1, grads=(1, 0), mask=(Band(None, 2),)), [bias, sink], []


CASES = ("plain", "causal", "padding", "dense", "bias-sink")


def qkv(name: str, dtype: str, dim: int = D) -> list[Tensor]:
    make = LAYOUTS[name]
    shapes = ((4, SQ), (2, SK), (2, SK))
    return [make(B, h, s, dim).to(getattr(torch, dtype)).detach().requires_grad_() for h, s in shapes]


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("order", LAYOUTS)
def test_opcheck(order: str, name: str, dtype: str, backend: str) -> None:
    """120 combinations; .to() of a view keeps its strides, so the layouts survive the cast."""
    if dtype == "bfloat16" and backend == "sdpa" and order not in ("permuted", "expanded"):
        dtype = "float64"
    r, captures, ints = case(name, dtype)
    q, k, v = qkv(order, dtype)
    with options.patch(backend=backend):
        args = (q, k, v, captures, ints, r.to_string(), "b")
        torch.library.opcheck(ops.attention, args, rtol=2e-2, atol=2e-2)
        if order in ("permuted", "expanded"):
            out, lse = (t.detach() for t in ops.attention(*args))
            tensors = [t.detach() for t in (torch.randn_like(out), q, k, v, out, lse)]
            backward = (*tensors, [c.detach() for c in captures], ints, r.to_string(), "b")
            torch.library.opcheck(ops.attention_backward, backward, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("memory", ["bshd", "bhsd"])
@pytest.mark.parametrize("order", LAYOUTS)
def test_results_have_the_layout_that_the_fakes_promise(order: str, memory: str) -> None:
    r, captures, ints = case("bias-sink", "float32")
    r = r.with_(layout=memory, head_dim_v=6)  # type: ignore[arg-type]
    q, k, _ = qkv(order, "float32")
    v = LAYOUTS[order](B, 2, SK, 6)
    args = (q.detach(), k.detach(), v, [c.detach() for c in captures], ints, r.to_string(), "b")
    for backend in ("reference", "sdpa"):
        with options.patch(backend=backend):
            out, lse = ops.attention(*args)
            dq, dk, dv, dcaptures = ops.attention_backward(torch.randn_like(out), *args[:3], out, lse, *args[3:])
        assert (out.transpose(1, 2) if memory == "bshd" else out).is_contiguous() and lse.is_contiguous()
        assert all(t.transpose(1, 2).is_contiguous() for t in (dq, dk, dv))
        assert [tuple(t.shape) for t in dcaptures] == [(4,), (4, SQ, SK)]
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(t) for t in args[:3]]
            fake_captures = [mode.from_tensor(t) for t in args[3]]
            f_out, f_lse = ops.attention(*fakes, fake_captures, *args[4:])
            f_grads = ops.attention_backward(f_out, *fakes, f_out, f_lse, fake_captures, *args[4:])
        real, fake = (out, lse, dq, dk, dv, *dcaptures), (f_out, f_lse, *f_grads[:3], *f_grads[3])
        for a, b in zip(real, fake, strict=True):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_meta_tensors() -> None:
    r, _, _ = case("plain", "float32")
    q, k, v = (torch.empty(B, h, s, D, device="meta") for h, s in ((4, SQ), (2, SK), (2, SK)))
    out, lse = ops.attention(q, k, v, [], [], r.to_string(), "b")
    assert out.device.type == "meta" and out.shape == (B, 4, SQ, D) and lse.shape == (B, 4, SQ)
    assert ops.seen_blocks() == {}


def test_autograd_is_the_backward_operator() -> None:
    r, captures, ints = case("bias-sink", "float64")
    q, k, v = qkv("permuted", "float64")
    inputs = (q, k, v, *captures)
    assert torch.autograd.gradcheck(
        lambda q, k, v, *c: ops.attention(q, k, v, list(c), ints, r.to_string(), "b")[0], inputs
    )
    out, lse = ops.attention(q, k, v, captures, ints, r.to_string(), "b")
    assert out.requires_grad and not lse.requires_grad
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="FA304"):
        dq.sum().backward()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_compiled(name: str, dynamic: bool) -> None:
    """Inductor, training and inference; with ``dynamic`` one graph for all lengths, the offset is a SymInt."""
    torch._dynamo.reset()
    r, captures, ints = case(name, "float32")
    text = r.to_string()

    def f(q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor]) -> Tensor:
        offset = [k.shape[2] - q.shape[2], *ints[1:]] if ints else []
        out, _ = torch.ops.fa_inductor.attention(q * 1.5, k.relu(), v, captures, offset, text, "b")
        return out.transpose(1, 2).flatten(2).sin()

    compiled = torch.compile(f, fullgraph=True, dynamic=dynamic)
    q, k, v = qkv("permuted", "float32")
    leaves = [q, k, v, *(c for c in captures if c.requires_grad)]
    got = torch.autograd.grad(compiled(q, k, v, captures).sum(), leaves)
    want = torch.autograd.grad(f(q, k, v, captures).sum(), leaves)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(q, k, v, captures), f(q, k, v, captures))
    if dynamic and name in ("plain", "causal"):
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for sq, sk in ((6, 6), (3, 11)):
            q, k, v = torch.randn(B, 4, sq, D), torch.randn(B, 2, sk, D), torch.randn(B, 2, sk, D)
            q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in (q, k, v))
            torch.testing.assert_close(compiled(q, k, v, captures), f(q, k, v, captures))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_inductor_passes_strides_as_traced() -> None:
    """The producer of q is free to choose a layout; what arrives is what was traced."""
    seen: list[tuple[int, ...]] = []
    r, _, _ = case("plain", "float32")
    original = reference.forward

    def spy(record: Attention, q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        seen.append(q.stride())
        return original(record, q, *rest)  # type: ignore[arg-type]

    def f(x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = (x.view(B, SQ, 4, D).cos() + 1).transpose(1, 2)
        return torch.ops.fa_inductor.attention(q, k, v, [], [], text, "b")[0]

    text = r.to_string()
    torch._dynamo.reset()
    args = (torch.randn(B, SQ, 4 * D), torch.randn(B, 2, SK, D), torch.randn(B, 2, SK, D))
    with pytest.MonkeyPatch.context() as patch, options.patch(backend="reference"):
        patch.setattr(reference, "forward", spy)
        f(*args)
        torch.compile(f, fullgraph=True)(*args)
    assert len(seen) == 2 and seen[0] == seen[1]


def test_pin_strides_sets_what_tracing_sets() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    r, _, _ = case("plain", "float32")
    text = r.to_string()
    q, k, v = (t.detach() for t in qkv("permuted", "float32"))
    gm = make_fx(lambda q, k, v: ops.attention(q, k, v, [], [], text, "b")[0], tracing_mode="fake")(q, k, v)
    (node,) = gm.graph.find_nodes(op="call_function", target=ops.attention)
    traced = node.meta.pop("eager_input_vals")
    ops.pin_strides(node)
    pinned = node.meta["eager_input_vals"]
    assert len(pinned) == 2 and [t.stride() for t in pinned[0][:3]] == [t.stride() for t in traced[0][:3]]
    assert pinned[0][3:] == tuple(traced[0][3:])


def test_exact_strides_tag() -> None:
    for op in (ops.attention, ops.attention_backward):
        assert torch.Tag.needs_exact_strides in op.tags


def test_wrong_shapes_and_dtypes_say_so() -> None:
    r, _, _ = case("plain", "float32")
    q, k, v = (t.detach() for t in qkv("contiguous", "float32"))
    for bad in ((q[:, :3], k, v), (q, k[..., :4], v), (q, k, v.half()), (q, k, v[0])):
        with pytest.raises(ValueError, match="the record says"):
            ops.attention(*bad, [], [], r.to_string(), "b")
    with pytest.raises(ValueError, match="not an attention record"):
        ops.attention(q, k, v, [], [], "{}", "b")


def test_autocast_does_not_reach_inside() -> None:
    r, _, _ = case("plain", "float32")
    q, k, v = (t.detach() for t in qkv("contiguous", "float32"))
    args = (q, k, v, [], [], r.to_string(), "b")
    want, _ = ops.attention(*args)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, _ = ops.attention(*args)
    assert got.dtype == torch.float32 and torch.equal(got, want)


def test_announcements() -> None:
    """Once a block, also for a late subscriber; again after forget()."""
    r, _, _ = case("plain", "float32")
    text, heard, late = r.to_string(), [], []
    q, k, v = (t.detach() for t in qkv("contiguous", "float32"))
    stop = ops.subscribe(lambda block, record: heard.append((block, record)))
    for block in ("a", "a", "b"):
        out, lse = ops.attention(q, k, v, [], [], text, block)
    ops.attention_backward(out, q, k, v, out, lse, [], [], text, "c")
    assert heard == [("a", text), ("b", text), ("c", text)]
    ops.subscribe(lambda block, record: late.append(block))()
    assert late == ["a", "b", "c"] and list(ops.seen_blocks()) == late
    ops.forget()
    ops.attention(q, k, v, [], [], text, "a")
    stop()
    stop()
    ops.attention(q, k, v, [], [], text, "d")
    assert [b for b, _ in heard] == ["a", "b", "c", "a"]


def test_lse_of_rows_without_keys() -> None:
    r, _, _ = case("plain", "float32")
    q, k, v = (t.detach() for t in qkv("contiguous", "float32"))
    for backend in ("reference", "sdpa"):
        for rule, fill in (("nan", -math.inf), ("mean", -1e30), ("zero", -math.inf)):
            a = r.with_(mask=(Band(None, -1),), empty_rows=rule, fill=fill)  # type: ignore[arg-type]
            with options.patch(backend=backend):
                out, lse = ops.attention(q, k, v, [], [], a.to_string(), "b")
            assert (lse[:, :, 0] == -math.inf).all() and lse[:, :, 1:].isfinite().all()
            row = v.mean(2).repeat_interleave(2, 1)
            want = {"nan": torch.full_like(row, math.nan), "mean": row, "zero": torch.zeros_like(row)}[rule]
            torch.testing.assert_close(out[:, :, 0], want, equal_nan=True)


def test_layout_match_copies_only_when_it_must() -> None:
    template = layout.empty_bshd(torch.empty(0), 2, 3, 4, 5)
    same = layout.empty_bshd(torch.empty(0), 2, 3, 4, 5)
    assert layout.match(same, template) is same
    other = torch.randn(2, 3, 4, 5)
    assert layout.match(other, template) is template and torch.equal(template, other)


def test_record_string_is_copied_not_pickled() -> None:
    """A graph module with the operators survives deepcopy and code generation."""
    r, _, _ = case("causal", "float32")
    q, k, v = (t.detach() for t in qkv("contiguous", "float32"))
    from torch.fx.experimental.proxy_tensor import make_fx

    text = r.to_string()
    gm = make_fx(lambda q, k, v: ops.attention(q, k, v, [], [2], text, "b")[0])(q, k, v)
    assert torch.equal(copy.deepcopy(gm)(q, k, v), ops.attention(q, k, v, [], [2], text, "b")[0])
