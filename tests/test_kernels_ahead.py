"""Kernels that are compiled in other processes before they are called."""
from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from fa_inductor import ahead as graph_ahead
from fa_inductor.kernels import ahead, api, cache
from fa_inductor.kernels.record import Attention, Band
from fa_inductor.kernels.sm90.variant import Forward

RECORD = Attention(q_heads=4, kv_heads=2, head_dim=64, head_dim_v=64, dtype="bfloat16", scale=0.125, mask=(Band(None, 0),))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own, and cores enough."""
    monkeypatch.setenv("FA_INDUCTOR_KERNEL_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.delenv("FA_INDUCTOR_KERNEL_CACHE", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr(ahead, "_started", {})
    return tmp_path


def test_a_kernel_compiled_elsewhere_is_found_here(place: Path) -> None:
    pytest.importorskip("cutlass")
    variant = Forward("bfloat16", 32, 32, empty="nan")
    assert not cache.has(ahead.words_of(variant))
    assert ahead.start(variant)
    assert not ahead.start(variant)  # it is at work
    assert ahead._started[variant].wait(timeout=120) == 0
    assert cache.has(ahead.words_of(variant))

    def again() -> None:
        raise AssertionError("compiled again")

    begun = time.perf_counter()
    assert cache.load_or_compile(ahead.words_of(variant), again) is not None
    assert time.perf_counter() - begun < 10
    ahead._started.clear()
    assert not ahead.start(variant)  # the file is there


@pytest.mark.parametrize("off", ["option", "cache", "cores", "interpreter"])
def test_where_nothing_is_started(place: Path, monkeypatch: pytest.MonkeyPatch, off: str) -> None:
    match off:
        case "option":
            monkeypatch.setenv("FA_INDUCTOR_COMPILE_AHEAD", "0")
        case "cache":
            monkeypatch.setenv("FA_INDUCTOR_KERNEL_CACHE", "0")
        case "cores":
            monkeypatch.setattr("os.cpu_count", lambda: 2)
        case "interpreter":
            monkeypatch.setattr("sys.executable", "/usr/bin/app")
    assert not ahead.start(Forward("bfloat16", 32, 32))
    assert not ahead._started


def test_a_process_that_cannot_be_started_is_left_to_the_first_call(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(place / "python-that-is-not-there"))
    assert not ahead.start(Forward("bfloat16", 32, 32))


def test_what_a_graph_will_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """By sizes that the graph is traced with; a graph in which they are not known begins nothing and raises nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx import Graph

    from fa_inductor.ops import attention

    class Sms:
        multi_processor_count = 132

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Sms)
    monkeypatch.setattr(api, "available", lambda: None)
    monkeypatch.setattr(ahead, "wanted", lambda: True)
    started: list[Forward] = []
    monkeypatch.setattr(ahead, "start", started.append)
    graph, mode = Graph(), FakeTensorMode()

    def tensor(rows: int, heads: int) -> object:
        node = graph.placeholder(f"x{rows}_{heads}_{len(graph.nodes)}")
        with mode:
            node.meta["val"] = torch.empty(2, heads, rows, 64, dtype=torch.bfloat16)
        return node

    def call(record: Attention, rows: int, keys: int) -> object:
        return graph.call_function(attention, (tensor(rows, 4), tensor(keys, 2), tensor(keys, 2), [], [], record.to_string(), "b"))

    graph_ahead.begin([call(RECORD, 512, 512), call(RECORD, 512, 512), call(RECORD.with_(mask=(Band(None, 32767),)), 1, 32768)])  # type: ignore[list-item]
    want = api.variant_of(RECORD)
    assert started[0] == want and len(started) == 2
    assert started[1].split and not started[1].band_hi  # decoding: heads packed, keys shared out
    broken = call(RECORD, 8, 8)
    broken.args[0].meta.clear()  # type: ignore[attr-defined]
    graph_ahead.begin([broken])  # type: ignore[list-item]
    assert len(started) == 2
