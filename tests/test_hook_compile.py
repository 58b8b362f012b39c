"""The pass inside torch.compile: stock patterns, caches, failures, other passes, AOTInductor, the backend."""
import logging
import math

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.virtualized import V

import fa_inductor
from fa_inductor import hook, stock
from fa_inductor.reasons import Code
from fa_inductor.report import Block, GraphReport, graph_id
from fa_inductor.slots import passes_in


def attention(q, k, v, dim=-1):
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), dim) @ v


def over_queries(q, k, v):
    return attention(q, k, v, dim=-2)


def fresh(fn, **options):
    """Compile anew, past every cache."""
    torch._dynamo.reset()
    return torch.compile(fn, **options)


def inputs(length=16, **kwargs):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, length, length, generator=generator, **kwargs) for _ in range(3)]


def stock_fusions():
    return counters["inductor"]["fuse_attention"]


@pytest.fixture(autouse=True)
def no_cache():
    with config.patch(force_disable_caches=True):
        counters.clear()
        yield
        counters.clear()


@pytest.fixture
def leave_alone(pipeline):
    """A pipeline that finds nothing: only what is around it is at work."""
    graphs = []

    def run(graph):
        graphs.append(graph)
        return GraphReport(graph_id(graph))

    pipeline(run)
    return graphs


def test_stock_patterns_are_off_while_enabled_and_on_again_after_disable(leave_alone):
    args = inputs()
    fresh(attention)(*args)
    assert stock_fusions() == 1  # else this test proves nothing in this torch version
    fa_inductor.enable()
    fresh(attention)(*args)
    assert stock_fusions() == 1 and len(leave_alone) == 1
    fa_inductor.disable()
    assert not any(isinstance(e.extra_check, stock._Unless) for e in stock.entries())
    fresh(attention)(*args)
    assert stock_fusions() == 2 and len(leave_alone) == 1


def test_the_rest_of_inductors_matcher_stays_on(leave_alone):
    def add_product(a, b, c):
        return a + b @ c

    args = [torch.randn(8, 8) for _ in range(3)]
    fresh(add_product)(*args)
    plain = counters["inductor"]["pattern_matcher_count"]
    assert plain > 0
    fa_inductor.enable()
    counters.clear()
    fresh(add_product)(*args)
    assert counters["inductor"]["pattern_matcher_count"] == plain


def test_softmax_over_the_queries_is_eagers(leave_alone):
    """Stock torch.compile takes it for attention: https://github.com/pytorch/pytorch/issues/196468."""
    args = inputs()
    fa_inductor.enable()
    torch.testing.assert_close(fresh(over_queries)(*args), over_queries(*args))
    assert stock_fusions() == 0


def test_stock_patterns_are_off_in_training_too(leave_alone):
    def scaled(q, k, v):
        return torch.softmax((q @ k.transpose(-2, -1)) * 0.25, -1) @ v

    args = inputs(requires_grad=True)
    fresh(scaled)(*args).sum().backward()
    plain = stock_fusions()
    assert plain > 0
    fa_inductor.enable()
    fresh(scaled)(*args).sum().backward()
    assert stock_fusions() == plain and len(leave_alone) == 1


def test_all_stock_attention_patterns_are_told_apart_and_no_others(monkeypatch):
    from torch._inductor.fx_passes import fuse_attention, joint_graph, misc_patterns, pad_mm
    from torch._inductor.pattern_matcher import init_once_fakemode

    def registered(init):
        table = joint_graph.PatternMatcherPass()
        monkeypatch.setattr(joint_graph, "patterns", table)
        init_once_fakemode(lambda input_device=None: init.__wrapped__(input_device))()
        return [e for bucket in table.patterns.values() for e in bucket], list(stock.entries())

    every, found = registered(fuse_attention._sfdp_init)
    assert every and every == found
    for init in (pad_mm._pad_mm_init, misc_patterns._misc_patterns_init):
        every, found = registered(init)
        assert not found


def test_graphs_compiled_with_and_without_us_are_kept_apart_in_the_cache(leave_alone):
    """Same process, caches on: the key of our pass is part of the key of the graph."""
    args = inputs(24)
    with config.patch(force_disable_caches=False), torch._functorch.config.patch(enable_autograd_cache=True):
        fresh(attention)(*args)
        assert stock_fusions() == 1
        fa_inductor.enable()
        fresh(attention)(*args)
        assert len(leave_alone) == 1, "the graph compiled without us was taken from the cache"
        fresh(attention)(*args)
        assert len(leave_alone) == 1, "the graph compiled with us was not found in the cache"
        with fa_inductor.options.patch(backend="reference"):
            fresh(attention)(*args)
        assert len(leave_alone) == 2, "an option is not in the key"
        with fa_inductor.options.patch(max_rewrites=10):
            fresh(attention)(*args)
            fresh(attention)(*args)
        assert len(leave_alone) == 4, "with a limit, the outcome depends on what was rewritten before"
        fa_inductor.disable()
        hits = counters["aot_autograd"]["autograd_cache_hit"]
        fresh(attention)(*args)
        assert counters["aot_autograd"]["autograd_cache_hit"] == hits + 1


def test_an_error_inside_us_leaves_the_model_working(pipeline, caplog):
    def broken(graph):
        raise RuntimeError("a bug of ours")

    pipeline(broken)
    fa_inductor.enable()
    args = inputs()
    with caplog.at_level(logging.WARNING, logger="fa_inductor"):
        torch.testing.assert_close(fresh(attention)(*args), attention(*args))
    assert "a bug of ours" in caplog.text


def test_the_pass_of_somebody_else_runs_before_ours(leave_alone):
    ran = []

    class Other(CustomGraphPass):
        def __call__(self, graph):
            ran.append(len(leave_alone))

        def uuid(self):
            return "other"

    config.joint_custom_pre_pass = other = Other()
    try:
        fa_inductor.enable()
        fresh(attention)(*inputs())
        assert ran == [0] and len(leave_alone) == 1
        fa_inductor.disable()
        assert config.joint_custom_pre_pass is other
    finally:
        config.joint_custom_pre_pass = None


def test_report_counters_and_log(pipeline, caplog):
    block = Block("model.py:7 forward", "softmax", "no mask, MHA 3, d16, fp32", "rewritten", "reference")
    pipeline(lambda graph: GraphReport(graph_id(graph), (block,)))
    fa_inductor.enable()
    with caplog.at_level(logging.DEBUG, logger="fa_inductor"):
        fresh(attention)(*inputs())
    assert fa_inductor.report().blocks == (block,)
    assert counters["inductor"]["fa_inductor_rewritten"] == counters["inductor"]["fa_inductor_found"] == 1
    levels = [r.levelno for r in caplog.records if r.name == "fa_inductor.hook"]
    assert levels == [logging.INFO, logging.DEBUG]
    assert "1 of 1" in caplog.text and "model.py:7" in caplog.text


def test_under_aotinductor_nothing_is_rewritten_unless_asked(pipeline):
    def run(graph):
        for node in [n for n in graph.nodes if n.op == "output"]:
            node.args = ((),)  # a rewrite: visible in the graph it was given
        block = Block("model.py:7 forward", "softmax", "", "rewritten", "reference")
        return GraphReport("0" * 32, (block, Block("model.py:9 forward", "softmax", "", "not attention")))

    pipeline(run)
    graph = torch.fx.symbolic_trace(torch.nn.ReLU()).graph
    with V.set_aot_compilation(True):
        report = hook._run(graph)
        assert [(b.outcome, b.reason and b.reason.code) for b in report.blocks] == [
            ("refused", Code.AOT), ("not attention", None)]
        assert graph.output_node().args != ((),)
        with fa_inductor.options.patch(aot=True):
            assert hook._run(graph).rewritten == 1
        assert graph.output_node().args == ((),)


def test_the_backend_of_one_compile(leave_alone):
    args = inputs()
    torch.testing.assert_close(fresh(over_queries, backend="fa_inductor")(*args), over_queries(*args))
    assert len(leave_alone) == 1 and stock_fusions() == 0
    assert config.joint_custom_pre_pass is None and not hook.is_enabled()
    fresh(attention)(*args)
    assert len(leave_alone) == 1 and stock_fusions() == 1


def test_the_backend_while_enabled_runs_the_pass_once(leave_alone):
    fa_inductor.enable()
    fresh(attention, backend="fa_inductor")(*inputs())
    assert len(leave_alone) == 1


def test_the_backend_passes_mode_options_and_dynamic_on(leave_alone, monkeypatch):
    from torch._inductor import compile_fx

    seen = []
    inner = compile_fx.compile_fx
    monkeypatch.setattr(compile_fx, "compile_fx",
                        lambda *a, **k: seen.append(k.get("config_patches")) or inner(*a, **k))
    args = inputs()
    fresh(attention, backend="fa_inductor", options={"max_fusion_size": 7})(*args)
    assert seen[0]["max_fusion_size"] == 7 and hook.COMPILE_PASS in passes_in(seen[0][hook.JOINT])
    seen.clear()
    fresh(attention, backend="fa_inductor", mode="max-autotune-no-cudagraphs")(*args)
    assert seen[0]["max_autotune"] is True
    compiled = fresh(attention, backend="fa_inductor", dynamic=True)
    before = len(leave_alone)
    for length in (16, 24, 40):
        args = inputs(length)
        torch.testing.assert_close(compiled(*args), attention(*args))
    assert len(leave_alone) == before + 1
    with pytest.raises(Exception, match="no_such_option"):
        fresh(attention, backend="fa_inductor", options={"no_such_option": 1})(*args)


def test_the_backend_keeps_a_pass_given_as_an_option(leave_alone):
    ran = []

    class Other(CustomGraphPass):
        def __call__(self, graph):
            ran.append(1)

        def uuid(self):
            return "other"

    fresh(attention, backend="fa_inductor", options={"joint_custom_pre_pass": Other()})(*inputs())
    assert len(leave_alone) == len(ran) == 1


def test_torch_lists_the_backend_without_our_import(python):
    done = python("import sys, torch; print('fa_inductor' in torch.compiler.list_backends(), "
                  "'fa_inductor' in sys.modules)")
    assert done.stdout.split() == ["True", "False"]
