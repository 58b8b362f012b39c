"""Attention under the other transformations of PyTorch: checkpointing, functional gradients, vmap, dropout, ..."""
from __future__ import annotations

import pytest
import torch
from forms_support import Compiled, args, check, check_close, check_report, compare, compiling, draw, results
from forms_written import S, X, qk
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fa_inductor
from fa_inductor.reasons import Code

SIZES = {"b": 2, "h": 4, "s": 10, "q": 6, "k": 14, "d": 8, "e": 16}


def attend(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1) @ v


def inputs(spec: str = X, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return draw(args(spec), SIZES, dtype, "features", False)


@pytest.mark.parametrize("dynamic", [False, True])
def test_checkpointing_recomputes_the_rewritten_block(dynamic):
    def layer(q, k, v):
        return checkpoint(lambda a, b, c: attend(a, b, c) * 2.0, q, k, v, use_reentrant=False)

    compiled = check(layer, args(X), train=True, dynamic=dynamic, expect=1)
    calls = [t for t in compiled.targets() if t.startswith("fa_inductor.attention")]
    assert calls == ["fa_inductor.attention.default", "fa_inductor.attention.default",
                     "fa_inductor.attention_backward.default"]


def test_two_checkpointed_layers():
    def model(q, k, v):
        for _ in range(2):
            q = q + checkpoint(attend, q, k, v, use_reentrant=False)
        return q

    check(model, args(S), train=True, dynamic=False, expect=2)


def causal_loss(q, k, v):
    hidden = ~torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return ((qk(q, k) * 0.3).masked_fill(hidden, float("-inf")).softmax(-1) @ v).square().mean()


def of_an_operator(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).cos().sum()


def twice(q, k, v):
    return attend(attend(q, k, k), k, v).cos().sum()


def pulled_back(q, k, v):
    out, pull = torch.func.vjp(attend, q, k, v)
    return out, *pull(out * 0.3 + 1)


ALL = (0, 1, 2)


@pytest.mark.parametrize("blocks, gradient", [
    (1, torch.func.grad(lambda *a: attend(*a).square().sum(), argnums=ALL)),
    (1, lambda q, k, v: torch.func.grad(lambda x: attend(x, k, v).square().sum())(q)),
    (1, lambda q, k, v: torch.func.grad(lambda x: attend(q, x, v).square().sum())(k)),
    (1, torch.func.grad_and_value(causal_loss, argnums=ALL)),
    (1, torch.func.grad_and_value(of_an_operator, argnums=ALL)),
    (2, torch.func.grad(twice, argnums=ALL)),
    (1, pulled_back),
], ids=["all", "q", "k", "causal", "sdpa", "twice", "vjp"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_functional_gradient(gradient, blocks, dynamic):
    compiled, given = Compiled(lambda *a: gradient(*a)), inputs()
    for x in given if dynamic else ():
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 2)
    with compiling():
        compare(lambda *a: gradient(*a), compiled.fn, given, train=False)
        check_report(blocks)
    assert sum(t.startswith("fa_inductor.attention_backward") for t in compiled.targets()) == blocks


@pytest.mark.parametrize("code, function", [
    # weights that meet another tensor and are summed, but in no derivative
    (Code.WEIGHTS_USED, lambda q, k, v: ((p := (qk(q, k) * 0.3).softmax(-1)) @ v, (p * qk(q, k)).sum(-1, keepdim=True))),
    (Code.WEIGHTS_USED, lambda q, k, v: ((p := (qk(q, k) * 0.3).softmax(-1)) @ v,
                                         (n := p * qk(q, k)) - 2 * p * n.sum(-1, keepdim=True))),
    # the derivative by itself is of no other attention than the one that is there
    (Code.BACKWARD, lambda q, k, v: ((p := (qk(q, k) * 0.3).softmax(-1)) @ v,
                                     (n := p * qk(q, k)) - p * n.sum(-1, keepdim=True))),
    (Code.BACKWARD, lambda q, k, v: torch.func.grad(lambda x: torch.func.grad(
        lambda y: attend(y, k, v).square().sum())(x).square().sum())(q)),
], ids=["sum", "twice the sum", "no product", "second"])
def test_what_looks_like_a_functional_gradient(code, function):
    compiled = Compiled(lambda *a: function(*a))
    with compiling():
        compare(lambda *a: function(*a), compiled.fn, inputs(), train=False)
        check_report(code)


def test_vmap():
    def mapped(q, k, v):
        return torch.func.vmap(attend)(q, k, v)

    check(mapped, args(X), train=False, dynamic=False, expect=1)


def test_double_backward_through_a_compiled_function_raises_as_without_us():
    def message(rewrites: int | None) -> str:
        compiled = Compiled(attend)
        q, k, v = inputs()
        with compiling(max_rewrites=rewrites):
            out = compiled.fn(q, k, v)
            (g,) = torch.autograd.grad(out, q, torch.ones_like(out), create_graph=True)
            with pytest.raises(RuntimeError, match="double backward|does not require grad") as error:
                g.sum().backward()
            check_report(1 if rewrites is None else Code.LIMIT)
        return str(error.value)

    assert message(None) == message(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_around_the_compiled_function(dtype):
    compiled = Compiled(attend)

    def under_autocast(fn):
        def run(*a):
            with torch.autocast("cpu", dtype):
                return fn(*a)
        return run

    with compiling():
        compare(under_autocast(attend), under_autocast(compiled.fn), inputs(), train=True)
        check_report(1)


@pytest.mark.parametrize("train", [False, True])
def test_active_dropout_is_left_alone(train):
    def dropping(q, k, v):
        return F.dropout((qk(q, k) * 0.3).softmax(-1), 0.5, training=True) @ v

    compiled = Compiled(dropping)
    v = torch.eye(14).expand(2, 4, 14, 14).clone().requires_grad_()
    q, k, _ = inputs()
    with compiling(), torch.set_grad_enabled(train):
        out = compiled.fn(q, k, v)
        check_report(Code.DROPOUT)
    p = (qk(q, k) * 0.3).softmax(-1)
    kept = out != 0
    assert 0.3 < kept.float().mean() < 0.7
    torch.testing.assert_close(out, torch.where(kept, 2 * p, 0.0))


def test_sdpa_with_active_dropout_is_left_alone():
    def dropping(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    compiled = Compiled(dropping)
    with compiling(), torch.no_grad():
        compiled.fn(*inputs())
        report = fa_inductor.report()
    assert report.rewritten == 0 and [b.reason.code for b in report.blocks] == [Code.DROPOUT] * len(report.blocks)


def test_multihead_attention_module():
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True)

    def run(x):
        return module(x, x, x, need_weights=False)[0]

    compiled = Compiled(run)
    x = torch.randn(2, 10, 32, requires_grad=True)
    with compiling():
        out = compiled.fn(x)
        check_report(1)
        (g,) = torch.autograd.grad(out.square().sum(), x)
    eager = run(x)
    (eager_g,) = torch.autograd.grad(eager.square().sum(), x)
    torch.testing.assert_close(out, eager)
    torch.testing.assert_close(g, eager_g, atol=1e-5, rtol=1e-4)


def test_multihead_attention_that_returns_its_weights():
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    compiled = Compiled(lambda x: module(x, x, x, need_weights=True))
    x = torch.randn(2, 10, 32, requires_grad=True)
    with compiling():
        out, weights = compiled.fn(x)
        check_report(Code.WEIGHTS_USED)
    torch.testing.assert_close((out, weights), module(x, x, x, need_weights=True))


def test_a_frozen_part_of_a_trained_model():
    def model(q, k, v):
        with torch.no_grad():
            frozen = attend(q, k, v)
        return attend(frozen, frozen, frozen) + q.mean()

    check(model, args(S), train=True, dynamic=False, expect=2)


def test_a_block_on_both_sides_of_a_graph_break():
    def model(q, k, v):
        o = attend(q, k, v)
        torch._dynamo.graph_break()
        return attend(o, k, v)

    compiled = Compiled(model)
    with compiling():
        compare(model, compiled.fn, inputs(S), train=True)
        report = fa_inductor.report()
    assert (report.found, report.rewritten, len(report.graphs)) == (2, 2, 2)


def test_the_judge_sees_a_wrong_rewrite(monkeypatch):
    """The tests of this folder can fail: a backend that is off by a thousandth is caught, forward and backward."""
    from fa_inductor.backends import reference

    forward, backward = reference.forward, reference.backward
    monkeypatch.setattr(reference, "forward", lambda *a, **k: tuple(x * 1.001 for x in forward(*a, **k)))
    with pytest.raises(AssertionError, match="output 0: max error"):
        check(attend, args(X), train=False, dynamic=False, expect=1, validate=False)
    monkeypatch.setattr(reference, "forward", forward)

    def off(*a, **k):
        dq, dk, dv, more = backward(*a, **k)
        return dq * 1.001, dk, dv, more

    monkeypatch.setattr(reference, "backward", off)
    with pytest.raises(AssertionError, match="gradient 0: m"):
        check(attend, args(X), train=True, dynamic=False, expect=1, validate=False)


def test_the_judge_sees_a_mean_error():
    exact = torch.randn(64, 64, dtype=torch.float64)
    eager = exact.float()
    with pytest.raises(AssertionError, match="mean error"):
        check_close("x", eager + 3e-7, eager, exact)
    with pytest.raises(AssertionError, match="NaN"):
        check_close("x", eager.masked_fill(eager > 3, float("nan")), eager, exact)


def test_gradient_accumulation():
    """Two backward passes of one compiled graph add up in the leaves."""
    compiled = Compiled(attend)
    leaves = [inputs(), inputs()]
    with compiling():
        for fn, xs in zip((compiled.fn, attend), leaves, strict=True):
            for factor in (1.0, 0.5):
                (fn(*xs).sin().sum() * factor).backward()
        check_report(1)
    for x, eager in zip(*leaves, strict=True):
        torch.testing.assert_close(x.grad, eager.grad, atol=1e-5, rtol=1e-4)


def test_compiled_autograd():
    """The backward graphs are compiled a second time, as one; what was rewritten in them stays so."""
    compiled = Compiled(attend)
    leaves = [inputs(), inputs()]
    targets: list[str] = []

    def backend(gm, _):
        targets.extend(str(n.target) for n in gm.graph.nodes)
        return gm.forward

    with compiling():
        out = compiled.fn(*leaves[0])
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
            out.sin().sum().backward()
        check_report(1)
    attend(*leaves[1]).sin().sum().backward()
    for x, eager in zip(*leaves, strict=True):
        torch.testing.assert_close(x.grad, eager.grad, atol=1e-5, rtol=1e-4)
    assert sum(t.startswith("fa_inductor.attention_backward") for t in targets) == 1, targets


@pytest.mark.parametrize("written", [False, True], ids=["sdpa", "eager"])
@pytest.mark.parametrize("broken", [False, True], ids=["one graph", "graph break"])
def test_a_causal_mask_is_proved_in_the_graph_that_makes_it(broken, written):
    """Whisper's training code up to transformers 5.17 draws a number in each layer, whether or not layers are dropped.

    Dynamo breaks the graph there, and the mask comes into the layers' graph as an input: a tensor like any other,
    nothing of which is known when that graph is compiled.
    """
    def layer(x, mask):
        if broken and torch.rand([]) < 0.0:
            return x
        if written:
            return x + (qk(x, x) * 0.3 + mask).softmax(-1) @ x
        return x + F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    def model(x):
        keep = torch.arange(x.shape[2])[:, None] >= torch.arange(x.shape[2])
        mask = torch.where(keep, 0.0, torch.finfo(x.dtype).min) if written else keep
        return layer(layer(x, mask), mask)

    (x, *_), compiled = inputs(), Compiled(model)
    y = x.detach().clone().requires_grad_()
    with compiling():
        for fn, leaf in ((compiled.fn, x), (model, y)):
            fn(leaf).sin().sum().backward()
        blocks = fa_inductor.report(clear=True).blocks
    torch.testing.assert_close(x.grad, y.grad, atol=1e-5, rtol=1e-4)
    kind = "causal" if not broken else "no mask, bias" if written else "mask tensor"
    assert blocks and {b.words for b in blocks} == {f"{kind}, MHA 4, d8, fp32"}, blocks


NOISE = {"exponential": lambda s: -torch.empty_like(s).exponential_().log(), "uniform": lambda s: torch.empty_like(s).uniform_(),
         "poisson": lambda s: torch.poisson(torch.ones_like(s))}


@pytest.mark.parametrize("name", NOISE)
def test_noise_is_drawn_anew_each_time(name):
    """Two blocks on the same queries and keys, whose scores have the same noise but for what is drawn."""
    def noisy(q, k, v):
        return [(qk(q, k) + NOISE[name](qk(q, k).detach())).softmax(-1) @ v for _ in range(2)]

    inputs = draw(args(X), SIZES, torch.float64, "noise", False)
    compiled = Compiled(noisy)
    got = []
    with compiling(), torch._inductor.config.patch(fallback_random=True):
        for fn in (compiled.fn, noisy):
            torch.manual_seed(7)
            outs, grads = results(fn, inputs, True)
            got.append([*outs, *grads])
        assert not torch.equal(*got[1][:2])
        torch.testing.assert_close(*got, rtol=1e-12, atol=1e-12)
        check_report(2)


def test_a_bias_with_a_batch_of_its_own_is_named():
    def batched_by_the_bias(q, k, v, bias):
        return (qk(q, k) + bias).softmax(-1) @ v

    inputs = [torch.randn(1, 4, 6, 8) for _ in range(3)]
    with compiling():
        Compiled(batched_by_the_bias).fn(*inputs, torch.randn(3, 1, 6, 6))
        (block,) = fa_inductor.report().blocks
    assert block.reason.code == Code.CONTRACTION and "a dimension that QK^T does not have" in block.reason.detail
