"""Generation with transformers' caches: prefill, a chunk of a longer prompt, and single tokens, each compiled."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from forms_support import Compiled, compiling

import fa_inductor

transformers = pytest.importorskip("transformers")

CHUNKS = (6, 3, 1, 1, 1)
LENGTH = sum(CHUNKS)
TINY: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
                            intermediate_size=32, vocab_size=64, head_dim=8)
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": TINY, "Mistral": TINY | {"sliding_window": 4},
    "Gemma2": TINY | {"sliding_window": 4, "num_hidden_layers": 2},  # one layer with a window, one without
}
CASES = [
    ("Llama", "eager", "static", None, False), ("Llama", "sdpa", "static", True, True),
    ("Llama", "sdpa", "dynamic", None, False), ("Mistral", "eager", "static", None, True),
    ("Mistral", "sdpa", "dynamic", True, False), ("Gemma2", "eager", "static", None, False),
]


@pytest.mark.parametrize(("name", "attention", "kind", "dynamic", "padded"), CASES)
def test_prefill_and_decoding(name: str, attention: str, kind: str, dynamic: bool | None, padded: bool) -> None:
    """A key is visible by its position in the cache, which a tensor or a symbolic size says."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**CONFIGS[name])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    ids = torch.randint(3, 64, (2, LENGTH))
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :2] = 0

    def step(tokens: torch.Tensor, cache: Any, at: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(input_ids=tokens, past_key_values=cache, position_ids=at[None], use_cache=True, **more).logits

    def generate(call: Any) -> torch.Tensor:
        cache = (transformers.StaticCache(config=config, max_cache_len=LENGTH + 4) if kind == "static" else
                 transformers.DynamicCache(config=config))
        outs, start = [], 0
        for n in CHUNKS:
            stop = start + n
            more = {"attention_mask": mask[:, :stop]} if padded else {}
            outs.append(call(ids[:, start:stop], cache, torch.arange(start, stop), more))
            start = stop
        return torch.cat(outs, 1)

    with torch.no_grad():
        want = generate(step)
        with compiling(validate=False):
            compiled = Compiled(step, dynamic=dynamic)
            got = generate(compiled.fn)
            report = fa_inductor.report(clear=True)
    assert report.rewritten == report.found >= 3 * config.num_hidden_layers, str(report)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
