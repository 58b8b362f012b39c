"""With transformers' default masks nothing of size Sq x Sk is left in the compiled graph, forward or backward."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from forms_support import Compiled, compiling
from torch.fx import GraphModule

import fa_inductor

transformers = pytest.importorskip("transformers")

LENGTH = 37
"""No other size of these models, nor a multiple of one."""
TINY: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, vocab_size=64)
GROUPED = TINY | {"num_key_value_heads": 2}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "causal": ("Llama", GROUPED, ""), "window": ("Mistral", GROUPED | {"sliding_window": 5}, ""),
    "causal and padding": ("Llama", GROUPED, "padding"), "window and padding": (
        "Mistral", GROUPED | {"sliding_window": 5}, "padding"),
    "documents": ("Llama", GROUPED, "documents"), "padding": (
        "Bert", TINY | {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}, "padding"),
}


def squares(graph: GraphModule) -> list[str]:
    """Tensors of a graph with two dimensions of the length, or as many elements."""
    found = []
    for node in graph.graph.nodes:
        v = node.meta.get("val")
        for t in v if isinstance(v, (tuple, list)) else (v,):
            if isinstance(t, torch.Tensor) and (list(t.shape).count(LENGTH) >= 2 or LENGTH**2 in t.shape):
                found.append(f"{node.name} {node.target} {list(t.shape)}")
    return found


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("case", CASES)
def test_no_square_tensor(case: str, attention: str, train: bool) -> None:
    name, options, extra = CASES[case]
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(
        getattr(transformers, f"{name}Config")(**options), attn_implementation=attention).train(train)
    ids = torch.randint(3, 64, (2, LENGTH))
    more: dict[str, Any] = {} if name == "Bert" else {"use_cache": False}
    if extra == "padding":
        more["attention_mask"] = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [9]])).long()
    if extra == "documents":
        more["position_ids"] = torch.cat([torch.arange(20), torch.arange(LENGTH - 20)]).expand(2, -1)

    def call(ids: torch.Tensor, more: dict[str, Any]) -> torch.Tensor:
        return model(ids, **more).last_hidden_state

    def run(rewrite: bool) -> tuple[list[str], int]:
        with compiling(validate=False, max_rewrites=None if rewrite else 0):
            compiled = Compiled(call)
            with torch.set_grad_enabled(train):
                out = compiled.fn(ids, more)
            if train:
                out.sum().backward()
            report = fa_inductor.report(clear=True)
        assert report.found == 2 and len(compiled.graphs) == 1 + train, str(report)
        return [s for g in compiled.graphs for s in squares(g)], report.rewritten

    assert run(True) == ([], 2)
    if not train:
        assert len(run(False)[0]) > 1, "a length that this test does not see"
