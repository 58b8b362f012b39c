"""explain: the report without running the model, and nothing else changed."""
import copy
import json

import pytest
import torch
from torch._dynamo.utils import counters

import fa_inductor
from fa_inductor import hook
from fa_inductor.report import Block, GraphReport, graph_id


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)
        self.norm = torch.nn.BatchNorm1d(32)

    def forward(self, x, broken=False):
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        if broken:
            torch._dynamo.graph_break()
        return self.attend(x)

    def attend(self, x):
        q, k, v = (t.view(x.shape[0], -1, 4, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return torch.softmax(q @ k.transpose(-2, -1) * 8 ** -0.5, -1) @ v


@pytest.fixture
def graphs(pipeline):
    """The pipeline's place taken by a note of what it was given: (has a backward, input shape)."""
    seen = []

    def run(graph):
        seen.append(any(n.op == "placeholder" and "tangents" in n.name for n in graph.nodes))
        return GraphReport(graph_id(graph), (Block("model.py:1 f", "softmax", "", "rewritten", "sdpa"),))

    pipeline(run)
    return seen


def test_the_training_graph_or_the_inference_graph(graphs):
    model, x = Model(), torch.randn(2, 6, 32)
    assert fa_inductor.explain(model, x).rewritten == 1
    with torch.no_grad():
        fa_inductor.explain(model, x)
    fa_inductor.explain(model.requires_grad_(False), x)
    fa_inductor.explain(model, x.clone().requires_grad_())
    assert graphs == [True, False, False, True]


def entries():
    """What Dynamo keeps for the model's own forward and serves to a plain torch.compile."""
    frames = torch._dynamo.eval_frame
    if hasattr(frames, "_get_cache_entries_for_region"):
        return frames._get_cache_entries_for_region(Model.forward.__code__, -1)
    return frames._debug_get_cache_entry_list(Model.forward.__code__)


def test_nothing_runs_and_nothing_changes(graphs, monkeypatch):
    from torch._inductor import compile_fx

    monkeypatch.setattr(compile_fx, "compile_fx_inner", lambda *a, **k: pytest.fail("code was generated"))
    model, x = Model(), torch.randn(2, 6, 32)
    compiles = []
    compiled = torch.compile(model, backend=lambda gm, inputs: compiles.append(1) or gm.forward)
    compiled(x)
    kept = entries()
    state, stats = copy.deepcopy(model.state_dict()), copy.deepcopy(dict(counters))
    rng, config = torch.get_rng_state(), torch._inductor.config.joint_custom_pre_pass
    backends = dict(torch._dynamo.eval_frame.cached_backends)

    for shape in ((2, 6, 32), (5, 9, 32)):
        assert len(fa_inductor.explain(model, torch.randn(*shape, generator=torch.Generator())).graphs) == 1
        if hasattr(torch._dynamo.eval_frame, "_get_cache_entries_for_region"):  # torch 2.13: frames can be kept apart
            fa_inductor.explain(model, torch.randn(*shape, generator=torch.Generator()), broken=True)

    assert dict(counters) == stats
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch._inductor.config.joint_custom_pre_pass is config and not hook.is_enabled()
    assert torch._dynamo.eval_frame.cached_backends == backends
    assert fa_inductor.report().graphs == ()
    assert kept and entries() == kept
    compiled(x)
    assert len(compiles) == 1, "explain made the user's model compile again"


def test_shapes_of_an_earlier_explain_do_not_become_dynamic(pipeline):
    shapes = []

    def run(graph):
        shapes.append([str(s) for n in graph.nodes if n.op == "placeholder" for s in getattr(n.meta["val"], "shape", ())])
        return GraphReport("0" * 32)

    pipeline(run)
    for length in (6, 7, 8):
        fa_inductor.explain(torch.nn.Linear(4, 4), torch.randn(length, 4))
    assert all(s.isdigit() for found in shapes for s in found) and len(shapes) == 3


def test_graphs_after_a_break_are_explained_too(graphs):
    report = fa_inductor.explain(Model(), torch.randn(2, 6, 32), broken=True)
    assert len(report.graphs) == len(graphs) == 2


def test_a_compiled_model_and_a_function(graphs):
    x = torch.randn(2, 6, 32)
    compiled = torch.compile(Model(), backend=lambda gm, inputs: pytest.fail("compiled"))
    assert len(fa_inductor.explain(compiled, x).graphs) == 1
    assert len(fa_inductor.explain(torch.compile(lambda a: a.sin()), x).graphs) == 1


def test_while_enabled_the_pass_runs_once_and_other_passes_run_too(graphs):
    class Other(torch._inductor.custom_graph_pass.CustomGraphPass):
        ran = 0

        def __call__(self, graph):
            self.ran += 1

        def uuid(self):
            return "other"

    torch._inductor.config.joint_custom_pre_pass = other = Other()
    try:
        fa_inductor.enable()
        fa_inductor.explain(Model(), torch.randn(2, 6, 32))
        assert len(graphs) == other.ran == 1
        assert hook.is_enabled() and fa_inductor.report().graphs == ()
    finally:
        fa_inductor.disable()
        torch._inductor.config.joint_custom_pre_pass = None


def test_an_error_of_the_model_comes_out_and_leaves_no_trace(graphs):
    stats = copy.deepcopy(dict(counters))
    with pytest.raises(Exception, match="running_mean"):
        fa_inductor.explain(Model(), torch.randn(2, 6, 31))
    assert dict(counters) == stats


def test_explain_and_the_real_report_agree():
    model, x = Model().eval(), torch.randn(2, 6, 32)
    with fa_inductor.options.patch(backend="reference"):
        explained = fa_inductor.explain(model, x)
        fa_inductor.enable()
        torch.compile(model)(x).sum().backward()
    assert explained.found == 1
    one, two = (json.loads(r.to_json()) for r in (explained, fa_inductor.report()))
    for graph in one["graphs"] + two["graphs"]:
        del graph["seconds"]
    assert one == two
