"""Time what the forward kernel does beyond plain attention, against its own plain speed: rows as JSON.

    python tests/gpu/bench_features.py [--out FILE] [--dims 64,128] [--seq 4096]

16k tokens, hidden size 2048, bfloat16, random data; `triton.testing.do_bench`, median.  `per_tile` is the speed for each
key tile that some row of a query tile sees, as a part of plain attention's (of causal attention's where a band makes
work uneven).
"""
from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

import torch
from triton.testing import do_bench

from fa_inductor.kernels import api
from fa_inductor.kernels.expr import MARGIN, SCORE, Expr, const, index, load, relative
from fa_inductor.kernels.record import Attention, Band, Dense, Documents, KeyPadding
from fa_inductor.kernels.sm90.variant import Tile

Q, K = index("q"), index("k")


def call(op: str, *args: Any) -> Expr:
    return Expr(op, args)


def tiles(record: Attention, captures: list[torch.Tensor], seq: int, batch: int, tile: Tile) -> int:
    """Key tiles that a launch walks, summed over row blocks, heads and batch entries; four documents, where there are any."""
    lo = max((a.lo for a in record.mask if isinstance(a, Band) and isinstance(a.lo, int)), default=-seq)
    hi = min((a.hi for a in record.mask if isinstance(a, Band) and isinstance(a.hi, int)), default=seq)
    lengths, length = [seq] * batch, seq // 4 if any(isinstance(a, Documents) for a in record.mask) else seq
    if any(isinstance(a, KeyPadding) for a in record.mask):
        lengths = captures[0].sum(1).tolist()
    total = 0
    for keys in lengths:
        for start in range(0, seq, tile.rows):
            end = min(seq, start + tile.rows)
            first, last = max(start // length * length, start + lo), min(keys, -(-end // length) * length, end + hi)
            total += max(1, -(-last // tile.keys) - first // tile.keys)
    return total * record.q_heads


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path)
    p.add_argument("--dims", default="64,128")
    p.add_argument("--seq", type=int, default=4096)
    args = p.parse_args()
    rows: list[dict[str, Any]] = []
    for d in map(int, args.dims.split(",")):
        heads = 2048 // d

        def run(name: str, seq: int, record: Attention, captures: list[torch.Tensor], base: str | None, d: int = d,
                walked: Attention | None = None) -> None:
            batch = 16384 // seq
            q, k, v = (torch.randn(batch, seq, record.q_heads, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
                       for _ in range(3))
            ms = do_bench(lambda: api.attention(q, k, v, record, captures), warmup=20, rep=60, return_mode="median")
            tile = api.variant_of(record, captures).tile
            n = tiles(walked or record, captures, seq, batch, tile)
            row = {"dim": d, "seq": seq, "what": name, "ms": ms, "tiles": n, "tile": [tile.rows, tile.keys],
                   "tflops_of_tiles": 4 * n * tile.rows * tile.keys * d / ms / 1e9}
            if base:
                plain = next(r for r in rows if r["what"] == base and r["dim"] == d and r["seq"] == seq)
                row |= {"beside": base, "per_tile": row["tflops_of_tiles"] / plain["tflops_of_tiles"],
                        "times_as_fast": plain["ms"] / ms}
            rows.append(row)
            print({a: round(b, 3) if isinstance(b, float) else b for a, b in row.items()}, flush=True)

        def record(heads: int = heads, d: int = d, **kw: Any) -> Attention:
            return Attention(q_heads=heads, kv_heads=heads, head_dim=d, head_dim_v=d, dtype="bfloat16", scale=d**-0.5, **kw)

        causal = (Band(None, 0),)
        s, b = args.seq, 16384 // args.seq
        run("plain", s, record(), [], None)
        run("causal", s, record(mask=causal), [], "plain")
        run("softcap", s, record(score=call("mul", call("tanh", call("div", SCORE, const(50.0))), const(50.0))), [], "plain")
        slopes = torch.rand(1, heads, 1, 1, device="cuda") * 0.1
        alibi = call("add", SCORE, call("mul", load(0), call("sub", K, Q)))
        run("ALiBi, causal", s, record(mask=causal, score=alibi), [slopes], "causal")
        bias = torch.randn(1, heads, s, s, device="cuda", dtype=torch.bfloat16)
        run("bias [1, H, S, S]", s, record(score=call("add", SCORE, load(0))), [bias], "plain")
        table = torch.randn(1, heads, 1, 2 * s - 1 + 2 * MARGIN, device="cuda")
        run("bias by distance", s, record(score=call("add", SCORE, relative(0))), [table], "plain")
        seen = torch.ones(1, 1, s, s, device="cuda", dtype=torch.bool).tril()
        run("mask tensor [S, S], causal", s, record(mask=(Dense(0),), empty_rows="never"), [seen], "causal",
            walked=record(mask=causal))
        ids = (torch.arange(s, device="cuda") // (s // 4)).int()[None].expand(b, s).contiguous()
        run("documents, causal", s, record(mask=(*causal, Documents(0, 1)), empty_rows="never"), [ids, ids], "causal")
        lengths = torch.linspace(s // 2, s, b, device="cuda").long()
        padding = torch.arange(s, device="cuda")[None] < lengths[:, None]
        run("key padding", s, record(mask=(KeyPadding(0),)), [padding], "plain")
        run("causal", 16384, record(mask=causal), [], None)
        run("causal, window 1024", 16384, record(mask=(Band(-1023, 0),)), [], "causal")
    if args.out:
        args.out.write_text(json.dumps({
            "what": "features of the forward kernel beside its plain speed, bf16", "date": datetime.date.today().isoformat(),
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
