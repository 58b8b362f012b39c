"""Unchanged transformers models on a GPU, rewritten to the kernels, against float64 eager code.

    python tests/gpu/check_models.py RESULT.json [--models llama,bert] [--impl eager,sdpa] [--seq 512]

Each model (two layers, random weights, bfloat16) runs inference and a training step under ``torch.compile`` with the
rewriting on.  Output and all gradients must be within the numerics contract of the user's own eager error: max error
at most 2 x and mean error at most 1.1 x that of eager bfloat16, both against eager float64, plus a floor of one
bfloat16 rounding of the largest value.  Exits with 1 when a block is not rewritten or a value is out of contract.
"""
from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
import warnings

import torch
import transformers as T

import fa_inductor

H = dict(hidden_size=512, num_hidden_layers=2, num_attention_heads=8, intermediate_size=256)
MODELS = {
    "llama": lambda: T.LlamaConfig(**H, num_key_value_heads=2, vocab_size=256),
    "mistral": lambda: T.MistralConfig(**H, num_key_value_heads=2, vocab_size=256, sliding_window=100),
    "qwen3": lambda: T.Qwen3Config(**H, num_key_value_heads=2, head_dim=128, vocab_size=256),
    "gemma": lambda: T.GemmaConfig(**H, num_key_value_heads=2, head_dim=256, vocab_size=256),
    "gpt2": lambda: T.GPT2Config(n_embd=512, n_layer=2, n_head=8, n_positions=2048, vocab_size=256, attn_pdrop=0,
                                 resid_pdrop=0, embd_pdrop=0),
    "bert": lambda: T.BertConfig(**H, vocab_size=256, max_position_embeddings=2048, attention_probs_dropout_prob=0,
                                 hidden_dropout_prob=0),
    "vit": lambda: T.ViTConfig(**H, image_size=224, patch_size=16, attention_probs_dropout_prob=0,
                               hidden_dropout_prob=0),
    "whisper": lambda: T.WhisperConfig(
        d_model=512, encoder_layers=2, decoder_layers=2, encoder_attention_heads=8, decoder_attention_heads=8,
        encoder_ffn_dim=256, decoder_ffn_dim=256, vocab_size=256, max_source_positions=400, num_mel_bins=80,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, dropout=0.0, attention_dropout=0.0,
        activation_dropout=0.0),
}


def inputs(name: str, seq: int) -> dict[str, torch.Tensor]:
    g = torch.Generator("cuda").manual_seed(1)
    ids = torch.randint(3, 256, (2, seq), device="cuda", generator=g)
    if name == "vit":
        return dict(pixel_values=torch.randn(2, 3, 224, 224, device="cuda", generator=g))
    if name == "whisper":
        return dict(input_features=torch.randn(2, 80, 800, device="cuda", generator=g), decoder_input_ids=ids[:, :300])
    if name == "bert":
        return dict(input_ids=ids, attention_mask=(
            torch.arange(seq, device="cuda")[None] < torch.tensor([[seq], [seq - seq // 3]], device="cuda")).long())
    return dict(input_ids=ids)


def step(model, fn, args, dtype, train):
    args = {k: v.to(dtype) if v.is_floating_point() else v for k, v in args.items()}
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(train):
        out = fn(**args).last_hidden_state
        if train:
            w = torch.linspace(-1, 1, out.numel(), device="cuda", dtype=torch.float64).view(out.shape)
            (out.double() * torch.sin(1000 * w)).sum().backward()
    grads = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach().double(), **grads}


def judge(got, eager, exact):
    """Worst ratios to eager's own error over all tensors: (max, mean, tensors out of contract)."""
    bad, worst_max, worst_mean = [], 0.0, 0.0
    largest = max(float(t.abs().max()) for n, t in exact.items() if n != "out") if len(exact) > 1 else 1.0
    for n, ref in exact.items():
        scale = float(ref.abs().max())
        floor = 2 ** -8 * max(scale, 1e-6 * largest)
        e, o = (eager[n] - ref).abs(), (got[n] - ref).abs()
        if scale < 1e-3 * float(e.max()):
            # exactly zero in theory (a key bias shifts all scores of a row): what is left is rounding, in both
            floor = 2 * float(e.max())
        rmax = (float(o.max()) - floor) / max(float(e.max()), 1e-30)
        rmean = (float(o.mean()) - floor / 8) / max(float(e.mean()), 1e-30)
        worst_max, worst_mean = max(worst_max, rmax), max(worst_mean, rmean)
        if rmax > 2 or rmean > 1.1 or not bool(torch.isfinite(got[n]).all()):
            bad.append(f"{n}: max {float(o.max()):.3g} / eager {float(e.max()):.3g}, "
                       f"mean {float(o.mean()):.3g} / {float(e.mean()):.3g}, scale {scale:.3g}")
    return worst_max, worst_mean, bad


def main() -> int:
    warnings.filterwarnings("ignore")
    T.logging.set_verbosity_error()
    p = argparse.ArgumentParser()
    p.add_argument("result")
    p.add_argument("--models", default=",".join(MODELS))
    p.add_argument("--impl", default="eager,sdpa")
    p.add_argument("--seq", type=int, default=512)
    a = p.parse_args()
    rows, failed = [], 0
    for name in a.models.split(","):
        for impl in a.impl.split(","):
            for train in (False, True):
                torch._dynamo.reset()
                torch.manual_seed(0)
                model = T.AutoModel.from_config(MODELS[name](), attn_implementation=impl).cuda()
                args = inputs(name, a.seq)
                kw = {} if name in ("vit", "bert") else dict(use_cache=False)
                call = lambda m=model, kw=kw, **i: m(**i, **kw)  # noqa: E731
                model.double().train(train)
                for module in model.modules():
                    if hasattr(module, "layerdrop"):
                        # Whisper up to transformers 5.17 draws a number per layer in training, which breaks the graph
                        # and makes the decoder's mask an input of the next one; with layerdrop 0 it does nothing else.
                        module.training = False
                exact = step(model, call, args, torch.float64, train)
                model.to(torch.bfloat16)
                eager = step(model, call, args, torch.bfloat16, train)
                fa_inductor.report(clear=True)
                t = time.time()
                try:
                    with fa_inductor.enabled():
                        got = step(model, torch.compile(call), args, torch.bfloat16, train)
                    rep = fa_inductor.report(clear=True)
                    worst_max, worst_mean, bad = judge(got, eager, exact)
                    row = dict(model=name, impl=impl, train=train, found=rep.found, rewritten=rep.rewritten,
                               backends=sorted({b.backend for b in rep.blocks}), worst_max=worst_max,
                               worst_mean=worst_mean, bad=bad, words=sorted({b.words for b in rep.blocks}),
                               reasons=sorted({str(b.reason) for b in rep.blocks if b.reason}),
                               first_call_s=round(time.time() - t, 1))
                except Exception as e:  # a crash is a row, so that the others still run
                    row = dict(model=name, impl=impl, train=train, error=f"{type(e).__name__}: {e}"[:1500])
                ok = not row.get("bad") and "error" not in row and row["found"] == row["rewritten"] > 0
                failed += not ok
                rows.append(row)
                json.dump(dict(device=torch.cuda.get_device_name(), torch=torch.__version__, transformers=T.__version__,
                               date=datetime.date.today().isoformat(), seq=a.seq, dtype="bfloat16", failed=failed,
                               rows=rows),
                          open(a.result, "w"), indent=1)
                print("ok  " if ok else "FAIL", json.dumps(row), flush=True)
    print(f"{len(rows) - failed} of {len(rows)} ok")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
