"""A two-layer llama of real width under torch.compile, with the rewriting and without: time and peak memory.

    python tests/gpu/bench_llama.py RESULT.json [--lengths 1024,2048,4096,8192] [--batch 4]

hidden 4096, 32 query and 8 key heads, head dim 128, bfloat16, ``attn_implementation="eager"``; median of
``triton.testing.do_bench``, on and off for the same model in the same process; peak memory of one step above the
model's own.
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
from triton.testing import do_bench

import fa_inductor


def measure(model, seq: int, batch: int, train: bool, on: bool) -> dict:
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    fa_inductor.report(clear=True)
    fa_inductor.enable() if on else fa_inductor.disable()
    model.zero_grad(set_to_none=True)
    ids = torch.randint(3, 1000, (batch, seq), device="cuda", generator=torch.Generator("cuda").manual_seed(seq))
    compiled = torch.compile(model, dynamic=False)

    def step():
        with torch.set_grad_enabled(train):
            out = compiled(ids, use_cache=False).last_hidden_state
            if train:
                model.zero_grad(set_to_none=True)
                out.float().square().mean().backward()
        return out

    row = dict(seq=seq, batch=batch, train=train, fa_inductor=on)
    try:
        t = time.time()
        out = step()
        torch.cuda.synchronize()
        row["first_call_s"] = round(time.time() - t, 1)
        del out
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        row["ms"] = do_bench(step, warmup=20, rep=200, return_mode="median")
        row["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    except torch.OutOfMemoryError:
        row["error"] = "out of memory"
    rep = fa_inductor.report(clear=True)
    row.update(rewritten=rep.rewritten, found=rep.found, backends=sorted({b.backend for b in rep.blocks}))
    fa_inductor.disable()
    return row


def main() -> int:
    warnings.filterwarnings("ignore")
    T.logging.set_verbosity_error()
    p = argparse.ArgumentParser()
    p.add_argument("result")
    p.add_argument("--lengths", default="1024,2048,4096,8192")
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--modes", default="infer,train")
    a = p.parse_args()
    config = T.LlamaConfig(hidden_size=4096, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=32,
                           num_key_value_heads=8, vocab_size=1024, max_position_embeddings=32768)
    torch.manual_seed(0)
    model = T.AutoModel.from_config(config, attn_implementation="eager").to("cuda", torch.bfloat16)
    rows = []
    for seq in map(int, a.lengths.split(",")):
        for train in (m == "train" for m in a.modes.split(",")):
            model.train(train)
            for on in (False, True):
                rows.append(measure(model, seq, a.batch, train, on))
                print(json.dumps(rows[-1]), flush=True)
                json.dump(dict(device=torch.cuda.get_device_name(), torch=torch.__version__,
                               transformers=T.__version__, date=datetime.date.today().isoformat(), dtype="bfloat16",
                               model="llama, 2 layers, hidden 4096, 32/8 heads, d128, eager", rows=rows),
                          open(a.result, "w"), indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
