"""Reports: counts, text, JSON, storage, and the graph's id."""
import collections
import json
import os
import stat

import pytest
import torch

import fa_inductor
from fa_inductor import store
from fa_inductor.kernels.record import Attention, Band
from fa_inductor.reasons import Code, Reason
from fa_inductor.report import (
    Block,
    GraphReport,
    Registry,
    Report,
    graph_from_dict,
    graph_id,
    graph_to_dict,
    torch_counts,
)

REWRITTEN = Block("/a/site-packages/lib/llama.py:12 forward", "softmax", "causal, GQA 8/2, d64, bf16", "rewritten",
                  "kernels sm_90", training=True, note="backward on PyTorch flash")
REFUSED = Block("/home/me/model.py:3 attend", "sdpa", "no mask, MHA 4, d64, fp32", "refused",
                reason=Reason(Code.WEIGHTS_USED, "returned"))
OTHER = Block("/home/me/router.py:9 route", "softmax", "", "not attention", reason=Reason(Code.NO_QK))
ID = "0123456789abcdef" * 2


def test_counts_leave_out_what_is_not_attention():
    report = Report((GraphReport(ID, (REWRITTEN,) * 3 + (REFUSED, OTHER)), GraphReport("b" * 32, (REWRITTEN,))))
    assert (report.rewritten, report.found, len(report.blocks)) == (4, 5, 6)


def test_text_groups_equal_layers_and_says_why():
    text = str(Report((GraphReport(ID, (REWRITTEN,) * 32 + (REFUSED, OTHER)),)))
    first, *lines = text.splitlines()
    assert first.startswith("32 of 33 attention blocks rewritten")
    assert sum("lib/llama.py:12 forward" in line for line in lines) == 1
    assert "32 x rewritten" in text and "kernels sm_90" in text and "forward and backward" in text
    assert "backward on PyTorch flash" in text and "/site-packages/" not in text
    assert "FA108" in text and Code.WEIGHTS_USED.sentence in text and "[returned]" in text
    assert "FA101" in text


def test_an_empty_report_says_what_to_do():
    assert "enable()" in str(Report(()))


def test_json_round_trip():
    graph = GraphReport(ID, (REWRITTEN, REFUSED, OTHER), seconds=0.25)
    data = json.loads(Report((graph,)).to_json())
    assert (data["rewritten"], data["found"]) == (1, 2)
    assert data["graphs"][0]["blocks"][1]["reason"] == {
        "code": "FA108", "sentence": Code.WEIGHTS_USED.sentence, "detail": "returned"}
    assert graph_from_dict(data["graphs"][0]) == graph == graph_from_dict(graph_to_dict(graph))


def test_store_round_trip_is_private_to_the_user():
    graph = GraphReport(ID, (REWRITTEN, REFUSED))
    store.save(graph)
    path = store.directory() / f"{ID}.json"
    assert store.load(ID) == graph
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not list(path.parent.glob("*.tmp"))


@pytest.mark.parametrize("damage", [
    b"", b"{", b"[]", b"null", b'{"id": 1}', b"\xff\xfe", json.dumps(graph_to_dict(GraphReport("c" * 32))).encode(),
    json.dumps(graph_to_dict(GraphReport(ID, (REFUSED,)))).replace("FA108", "FA999").encode(),
    json.dumps(graph_to_dict(GraphReport(ID, (REFUSED,)))).replace("refused", "deleted").encode(),
    json.dumps(graph_to_dict(GraphReport(ID, (REFUSED,)))).replace('"note"', '"novel"').encode(),
])
def test_a_damaged_file_is_a_miss(damage):
    store.save(GraphReport(ID))
    (store.directory() / f"{ID}.json").write_bytes(damage)
    assert store.load(ID) is None


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "x" * 32, ID + "\n", ID.upper() + "G"])
def test_only_an_id_is_looked_up(name):
    assert store.load(name) is None


def test_a_missing_or_read_only_folder_is_no_error(monkeypatch, tmp_path):
    assert store.load("f" * 32) is None
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setattr(store, "directory", lambda: blocked / "sub")
    store.save(GraphReport(ID))
    assert store.load(ID) is None


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no user ids on this system")
def test_a_file_of_another_user_is_a_miss(monkeypatch):
    store.save(GraphReport(ID))
    monkeypatch.setattr(os, "getuid", lambda: 123456)
    assert store.load(ID) is None


def test_the_registry_loads_a_graph_that_came_from_the_cache_once():
    loads = []

    def load(graph):
        loads.append(graph)
        return GraphReport(graph, (REWRITTEN,), seconds=1.0)

    registry = Registry(load, dict)
    for _ in range(3):
        registry.seen(f"{ID}#0", "record")
        registry.seen(f"{ID}#1", "record")
    assert loads == [ID]
    assert registry.snapshot() == (GraphReport(ID, (REWRITTEN,), 1.0, from_cache=True),)


def test_a_graph_compiled_here_is_not_loaded():
    registry = Registry(lambda graph: pytest.fail("loaded"), dict)
    registry.add(GraphReport(ID, (REFUSED,)))
    registry.add(GraphReport(ID, (REWRITTEN,)))
    registry.seen(f"{ID}#0", "record")
    registry.seen("", "record")
    assert registry.snapshot() == (GraphReport(ID, (REWRITTEN,)),)


def test_what_torch_counts_up_again_is_in_the_report(monkeypatch):
    """The cache repeats what was counted while a graph was compiled; no operator of the graph need run."""
    from torch._dynamo.utils import counters

    monkeypatch.setitem(counters, "inductor", collections.Counter())
    registry = Registry(lambda graph: GraphReport(graph, (REFUSED,)) if graph == ID else None, torch_counts)
    assert registry.snapshot() == ()
    counters["inductor"][f"fa_inductor_graph_{ID}"] += 1
    counters["inductor"]["fa_inductor_graph_" + "e" * 32] += 1  # its stored report is gone
    assert registry.snapshot() == (GraphReport(ID, (REFUSED,), from_cache=True),)
    registry.clear()
    assert registry.snapshot() == ()
    counters["inductor"][f"fa_inductor_graph_{ID}"] += 1
    assert len(registry.snapshot()) == 1


def test_a_lost_report_still_names_the_block():
    record = Attention(8, 2, 64, 64, "bfloat16", 0.125, mask=(Band(None, 0),))
    registry = Registry(lambda graph: None, dict)
    registry.seen(f"{ID}#0", record.to_string())
    registry.seen("d" * 32 + "#0", "no record")
    known, unknown = (g.blocks[0] for g in registry.snapshot())
    assert known.outcome == "rewritten" and known.words == record.describe() and "compile cache" in known.note
    assert unknown.words == ""


def graph_of(fn, *args):
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(fn, tracing_mode="fake")(*args).graph


def test_equal_graphs_have_equal_ids_and_others_do_not():
    x, y = torch.randn(4, 4), torch.randn(5, 5)
    one = graph_id(graph_of(lambda a: a.sin() * 2, x))
    assert one == graph_id(graph_of(lambda a: a.sin() * 2, x)) and store._ID.fullmatch(one)
    others = [graph_id(graph_of(f, z)) for f, z in (
        (lambda a: a.sin() * 3, x), (lambda a: a.cos() * 2, x), (lambda a: a.sin() * 2, y),
        (lambda a: a.sin() * 2, x.half()), (lambda a: a.sin() * 2, torch.randn(4, 4).t()))]
    with fa_inductor.options.patch(backend="reference"):
        others.append(graph_id(graph_of(lambda a: a.sin() * 2, x)))
    assert len({one, *others}) == 7


def test_the_id_survives_values_without_strides():
    graph = graph_of(lambda a: a + 1, torch.randn(3, 3))
    next(iter(graph.nodes)).meta["val"] = torch.eye(3).to_sparse()
    assert graph_id(graph)
