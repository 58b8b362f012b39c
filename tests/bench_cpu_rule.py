"""Measures on a CPU when PyTorch SDPA beats Inductor's own lowering of eager attention.

    python tests/bench_cpu_rule.py [result.json] [--quick]

Writes the figures behind `fa_inductor/backends/cpu_rule.py`: for each case the time of the compiled eager chain and
of the compiled operator, in milliseconds, best of interleaved repeats.  Both are compiled with dynamic shapes, so
that one compilation serves all lengths; rows with ``static`` say what that costs the eager chain.
"""
from __future__ import annotations

import argparse
import datetime
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fa_inductor.ops  # noqa: F401  (registers the operators)
from fa_inductor.kernels.expr import SCORE, Expr, load
from fa_inductor.kernels.record import Attention, Band, KeyPadding
from fa_inductor.options import options

HEADS = 8
MASKS = ("none", "causal", "padding", "bias", "gqa")
SHAPES = ((1, 16), (8, 16), (8, 64), (4, 128), (2, 256), (1, 512), (1, 1024))


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The shared eager function of transformers: additive mask, float32 softmax, heads repeated."""
    b, hk, s, d = k.shape
    g = q.shape[1] // hk
    if g > 1:
        k = k[:, :, None].expand(b, hk, g, s, d).reshape(b, hk * g, s, d)
        v = v[:, :, None].expand(b, hk, g, s, d).reshape(b, hk * g, s, d)
    w = torch.matmul(q, k.transpose(2, 3)) * scale
    if mask is not None:
        w = w + mask
    w = torch.softmax(w, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(w, v).transpose(1, 2).contiguous()


def case(mask: str, dtype: torch.dtype, d: int) -> tuple[Attention, Callable[..., Any]]:
    """The record, and a function (b, s) -> (q, k, v, eager mask, captures)."""
    kv = HEADS // 4 if mask == "gqa" else HEADS
    r = Attention(HEADS, kv, d, d, str(dtype).removeprefix("torch."), d**-0.5)
    low = torch.finfo(dtype).min
    if mask in ("causal", "gqa"):
        r = r.with_(mask=(Band(None, 0),))
    elif mask == "padding":
        r = r.with_(mask=(KeyPadding(0),), fill=low, empty_rows="mean")
    elif mask == "bias":
        r = r.with_(score=Expr("add", (SCORE, load(0))))

    def make(b: int, s: int) -> tuple[Any, ...]:
        q, k, v = (torch.randn(b, s, h, d).to(dtype).transpose(1, 2) for h in (HEADS, kv, kv))
        dense: Tensor | None = None
        captures: list[Tensor] = []
        if mask in ("causal", "gqa"):
            dense = torch.full((s, s), low, dtype=dtype).triu(1)[None, None]
        elif mask == "padding":
            keep = torch.ones(b, s, dtype=torch.bool)
            keep[0, s - s // 4 :] = False
            captures = [keep]
            dense = torch.where(keep, 0.0, low).to(dtype)[:, None, None, :].expand(b, 1, s, s)
        elif mask == "bias":
            dense = torch.randn(1, HEADS, s, s).to(dtype)
            captures = [dense]
        return q, k, v, dense, captures

    return r, make


def best(fs: list[Callable[[], Any]], budget_s: float) -> list[float]:
    """Best time of each function in milliseconds, interleaved so that a busy machine hits all alike."""
    for f in fs:
        f()
    result = [float("inf")] * len(fs)
    end = time.perf_counter() + budget_s
    rounds = 0
    while rounds < 8 or (time.perf_counter() < end and rounds < 300):
        for i, f in enumerate(fs):
            start = time.perf_counter()
            f()
            result[i] = min(result[i], (time.perf_counter() - start) * 1e3)
        rounds += 1
    return [round(t, 4) for t in result]


def step(f: Callable[..., Tensor], leaves: list[Tensor], training: bool) -> Callable[[], Any]:
    def run() -> Any:
        if not training:
            with torch.no_grad():
                return f(*leaves)
        out = f(*leaves)
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    return run


def measure(mask: str, dtype: torch.dtype, d: int, training: bool, shapes: Any, dynamic: bool) -> list[dict[str, Any]]:
    torch._dynamo.reset()
    r, make = case(mask, dtype, d)
    text, scale = r.to_string(), r.scale
    plain = torch.compile(lambda q, k, v, m: eager(q, k, v, m, scale), dynamic=dynamic)

    def fused(q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor]) -> Tensor:
        out, _ = torch.ops.fa_inductor.attention(q, k, v, captures, [], text, "bench")
        return out.transpose(1, 2)

    ours = torch.compile(fused, dynamic=dynamic)
    rows = []
    for b, s in shapes:
        q, k, v, dense, captures = make(b, s)
        leaves = [x.detach().requires_grad_(training) for x in (q, k, v)]
        a = step(lambda q, k, v, m=dense: plain(q, k, v, m), leaves, training)
        o = step(lambda q, k, v, c=captures: ours(q, k, v, c), leaves, training)
        inductor_ms, op_ms = best([a, o], 0.6)
        rows.append({
            "mask": mask, "dtype": r.dtype, "head_dim": d, "training": training, "batch": b, "heads": HEADS,
            "kv_heads": r.kv_heads, "seq": s, "static": not dynamic, "inductor_ms": inductor_ms, "op_ms": op_ms,
            "speedup": round(inductor_ms / op_ms, 2),
        })  # fmt: skip
        print(*rows[-1].values(), flush=True)
    return rows


KEY = ("mask", "dtype", "head_dim", "training", "batch", "seq")


def plan() -> list[tuple[str, torch.dtype, int, bool, Any, bool]]:
    """Arguments of `measure`, in the order of the result."""
    found: list[tuple[str, torch.dtype, int, bool, Any, bool]] = []
    for training in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            # in float32 the operator's backward is the reference, whatever the mask: one mask says it all
            kinds = MASKS if not training or dtype != torch.float32 else MASKS[:1]
            found += [(mask, dtype, 64, training, SHAPES, True) for mask in kinds]
            if not training:
                found += [("causal", dtype, d, training, SHAPES[1::2], True) for d in (32, 128)]
                found.append(("causal", dtype, 64, training, [(2, 256)], False))
    return found


def save(path: Path, rows: list[dict[str, Any]], threads: int) -> None:
    """Write ``rows`` into the result, replacing older rows of the same cases."""
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    merged = {tuple(r[k] for k in (*KEY, "static")): r for r in (*old, *rows)}
    data = {
        "date": datetime.date.today().isoformat(), "torch": torch.__version__, "threads": threads,
        "device": platform.processor() or platform.machine(), "cpu": torch.backends.cpu.get_cpu_capability(),
        "unit": "ms, best of interleaved repeats", "rows": list(merged.values()),
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", nargs="?", type=Path)
    parser.add_argument("--quick", action="store_true", help="one case, to see that it runs")
    parser.add_argument("--training", choices=("only", "no"), help="leave out the other half")
    parser.add_argument("--threads", type=int, default=1, help="more than one only on an idle machine")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch._dynamo.config.cache_size_limit = 64
    with options.patch(backend="sdpa"):
        for step_ in plan():
            if args.training and (args.training == "only") != step_[3]:
                continue
            if args.quick:
                step_ = (*step_[:4], SHAPES[:2], step_[5])
            rows = measure(*step_)
            if args.result:
                save(args.result, rows, args.threads)
            if args.quick:
                return


if __name__ == "__main__":
    main()
