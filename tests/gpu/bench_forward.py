"""Time the forward kernel beside what else is installed, in one process: rows of (workload, provider, TFLOP/s).

    python tests/gpu/bench_forward.py [--out FILE] [--dims 64,128,256] [--lengths 1024,4096,16384] [--peers cudnn,fa3]

16k tokens and a hidden size of 2048 in all; random data; medians.  The chip is at its limit of power, and what one provider draws,
the next one feels: they take turns in orders in which each follows each other one equally often, and each is timed after `WARM`
milliseconds of its own.
"""
from __future__ import annotations

import argparse
import datetime
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from fa_inductor.kernels import api
from fa_inductor.kernels.record import Attention, Band

WARM = 80


def peers() -> dict[str, Any]:
    """Providers by name: a function of (q, k, v in [B, S, H, D], causal)."""
    found: dict[str, Any] = {}

    def sdpa(backend: SDPBackend) -> Any:
        def call(q: Any, k: Any, v: Any, causal: bool) -> Any:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal)
        return call

    found["cudnn"] = sdpa(SDPBackend.CUDNN_ATTENTION)
    found["sdpa_fa2"] = sdpa(SDPBackend.FLASH_ATTENTION)
    try:
        import fa3_fwd_interface as fa3  # type: ignore[import-not-found]
        found["fa3"] = lambda q, k, v, c: fa3.flash_attn_func(q, k, v, causal=c)
    except Exception as e:
        print("absent: fa3", repr(e)[:100])
    try:
        from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found]
        found["fa4_cute"] = lambda q, k, v, c: flash_attn_func(q, k, v, causal=c)
    except Exception as e:
        print("absent: fa4_cute", repr(e)[:100])
    return found


def orders(n: int) -> list[list[int]]:
    """Orders of n providers in which each has each other one right before it equally often (a Williams design)."""
    first = [0, *(x for i in range(1, n // 2 + 1) for x in (i, n - i))][:n]
    square = [[(x + i) % n for x in first] for i in range(n)]
    return square if n % 2 == 0 else square + [row[::-1] for row in square]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=None)
    p.add_argument("--dims", default="64,128,256")
    p.add_argument("--lengths", default="1024,4096,16384")
    p.add_argument("--peers", default="cudnn,fa3,fa4_cute", help="which to run beside it, of those that import")
    p.add_argument("--rep", type=int, default=30, help="milliseconds of a turn")
    p.add_argument("--rounds", type=int, default=1, help="times that all orders of them are gone through")
    args = p.parse_args()
    others = {n: f for n, f in peers().items() if n in args.peers.split(",")} if args.peers else {}
    rows: list[dict[str, Any]] = []
    for d in map(int, args.dims.split(",")):
        heads = 2048 // d
        for s in map(int, args.lengths.split(",")):
            b = 16384 // s
            q, k, v = (torch.randn(b, s, heads, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            for causal in (False, True):
                record = Attention(q_heads=heads, kv_heads=heads, head_dim=d, head_dim_v=d, dtype="bfloat16",
                                   scale=d**-0.5, mask=(Band(None, 0),) if causal else ())

                def ours(q: Any, k: Any, v: Any, causal: bool, record: Attention = record) -> Any:
                    return api.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), record)

                work = f"d{d} s{s} b{b} h{heads} {'causal' if causal else 'full'}"
                line = f"{work:28s}"
                calls = {n: partial(f, q, k, v, causal) for n, f in {"fa_inductor": ours, **others}.items()}
                times: dict[str, list[float]] = {n: [] for n in calls}
                for name, call in list(calls.items()):
                    try:
                        call()
                    except Exception as e:
                        rows.append({"work": work, "provider": name, "error": repr(e)[:200]})
                        line += f" {name} {type(e).__name__} {str(e)[:80]}"
                        del calls[name]
                names = list(calls)
                for order in orders(len(names)) * args.rounds:
                    for name in (names[i] for i in order):
                        times[name].append(do_bench(calls[name], warmup=WARM, rep=args.rep, return_mode="median"))
                for name in calls:
                    ms = statistics.median(times[name])
                    tf = 4 * b * heads * s * s * d / (2 if causal else 1) / ms / 1e9
                    rows.append({"work": work, "provider": name, "ms": ms, "tflops": tf})
                    line += f" {name} {tf:4.0f}"
                print(line, flush=True)
    if args.out:
        import cutlass

        args.out.write_text(json.dumps({
            "what": "forward, bf16, TFLOP/s, medians of turns; each provider follows each other one equally often", "rounds": args.rounds, "date": datetime.date.today().isoformat(),
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(),
            "nvidia-cutlass-dsl": cutlass.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
