"""Small random models of transformers: every attention block rewritten, outputs and all gradients by the contract."""
from __future__ import annotations

import json

import pytest

from fa_inductor import zoo

CAUSAL = {"llama": "causal, GQA 4/2, d8, fp32", "mistral": "causal, window 4, GQA 4/2, d8, fp32",
          "qwen3": "causal, GQA 4/2, d8, fp32", "gemma": "causal, GQA 4/2, d8, fp32",
          "bert": "key padding, MHA 4, d8, fp32", "vit": "no mask, MHA 4, d8, fp32", "gpt2": "causal, MHA 4, d8, fp32"}
BLOCKS = {"whisper": 3}


@pytest.mark.parametrize("mode", zoo.MODES)
@pytest.mark.parametrize("attention", zoo.ATTENTION)
@pytest.mark.parametrize("name", zoo.CORE)
def test_every_block_is_rewritten(name, attention, mode):
    row = zoo.examine(name, attention, mode)
    assert (row.found, row.rewritten) == (BLOCKS.get(name, 2),) * 2, row
    assert row.reasons == []
    assert row.sdpa == row.rewritten, "PyTorch's fused operators can run all of these"
    assert set(row.excess) == set(zoo.BACKENDS) and row.ok, row
    if name in CAUSAL:
        assert row.records == [CAUSAL[name]]
    else:
        assert any(r.startswith("causal") for r in row.records) and any("no mask" in r for r in row.records)


@pytest.mark.parametrize("shapes", zoo.SHAPES)
def test_large_scores_keep_the_contract(shapes):
    """Scores in the hundreds: every rounding before the softmax counts, those of Inductor's layer norm as well."""
    row = zoo.examine("clip_vision_model", "eager", "training", shapes=shapes)
    assert row.ok and row.records == ["no mask, MHA 4, d8, fp32"], row


def test_half_precision_keeps_the_contract():
    row = zoo.examine("llama", "eager", "training", "bfloat16")
    assert row.ok and row.records == ["causal, GQA 4/2, d8, bf16"], row


def test_table_and_json(capsys, tmp_path):
    path = tmp_path / "zoo.json"
    assert zoo.main(["--models", "bert", "--attention", "eager", "--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["model", "attention", "mode", "shapes", "blocks", "rewritten",
                                "reference", "sdpa", "record"]
    assert lines[1].split()[:6] == ["bert", "eager", "inference", "static", "2", "2"] and "key padding" in lines[1]
    assert lines[2].split()[:6] == ["bert", "eager", "training", "static", "2", "2"]
    assert lines[3].startswith("4 of 4 attention blocks rewritten, float32")
    rows = json.loads(path.read_text())["rows"]
    assert [(r["model"], r["mode"], r["found"], r["rewritten"], r["reasons"]) for r in rows] == [
        ("bert", "inference", 2, 2, []), ("bert", "training", 2, 2, [])]
    assert all(0 < x <= 1 for r in rows for x in r["excess"].values())


def test_a_block_left_alone_is_listed_and_fails(capsys):
    import fa_inductor

    with fa_inductor.options.patch(max_rewrites=0):
        assert zoo.main(["--models", "bert", "--attention", "eager"]) == 1
    out = capsys.readouterr().out
    assert "modeling_bert.py" in out and "FA501" in out and "0 of 4 attention blocks rewritten" in out


def test_a_wrong_gradient_fails(monkeypatch):
    from fa_inductor.backends import reference

    backward = reference.backward

    def off(*a, **k):
        dq, *rest = backward(*a, **k)
        return dq * 1.001, *rest

    monkeypatch.setattr(reference, "backward", off)
    row = zoo.examine("bert", "eager", "training")
    assert row.rewritten == row.found and row.excess["reference"] > 1 and not row.ok
