"""Checks the PyTorch backends on a CUDA device against float64: forward and backward, every way a record maps to them.

    python tests/gpu/check_backward.py result.json [--kernels] [--only TEXT]

Each case runs `aten_cuda.forward` (with ``--kernels`` also our kernels where they support the record) and
`torch_backward.backward`, or the reference where that is refused, and compares out and all gradients with eager code
in float64.  ``ok`` is the numerics contract, relative to eager code in the case's own dtype: maximum error <= 2x, mean
error <= 1.1x (plus one unit in the last place of the largest value).  ``wrong`` is an error that no rounding explains.
float32 gradients are expected to miss the contract, never to be wrong: `sdpa.backward` does not use these kernels for
them.  No device value may be read back by the host while they run.
"""
from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from attention_oracle import oracle  # noqa: E402

import fa_inductor.ops as ops  # noqa: E402
from fa_inductor.backends import aten_cuda, reference, torch_backward  # noqa: E402
from fa_inductor.kernels.expr import SCORE, Expr, index, load  # noqa: E402
from fa_inductor.kernels.record import (  # noqa: E402
    Attention,
    Band,
    Dense,
    Documents,
    KeyPadding,
    Sym,
)
from fa_inductor.options import options  # noqa: E402

BIAS = Expr("add", (SCORE, load(0)))
HEADS = ((8, 8), (8, 2), (4, 1))
DIMS = ((64, 64), (128, 128), (96, 96), (192, 128), (256, 256), (40, 40), (64, 128))
LENGTHS = ((128, 128), (257, 257), (100, 300), (300, 100), (1, 513), (17, 17), (512, 512))
RULES = (("mean", "add"), ("mean", "replace"), ("nan", "add"), ("zero", "add"))


@dataclass
class Case:
    """A record on tensors, and how the user would have written its mask and score."""

    name: str
    record: Attention
    shape: tuple[int, int, int]
    captures: list[Tensor] = field(default_factory=list)
    ints: list[int] = field(default_factory=list)
    mask: Tensor | None = None
    score: Callable[[Tensor, list[Tensor]], Tensor] = lambda s, c: s
    outliers: bool = False


def positions(sq: int, sk: int) -> tuple[Tensor, Tensor]:
    return torch.arange(sq, device="cuda").view(1, 1, sq, 1), torch.arange(sk, device="cuda").view(1, 1, 1, sk)


def masks(b: int, sq: int, sk: int) -> dict[str, tuple[tuple[Any, ...], Tensor | None, list[Tensor], list[int]]]:
    """Name to (atoms, explicit mask, captures, ints); no row is without keys."""
    q, k = positions(sq, sk)
    off = sk - sq
    lengths = torch.randint(1, sk + 1, (b, 1), device="cuda")
    pad = torch.arange(sk, device="cuda") < lengths
    docs_q, docs_k = (torch.arange(n, device="cuda")[None] * 3 // (sk + 1) for n in (sq, sk))
    docs = docs_q.view(1, 1, sq, 1) == docs_k.view(1, 1, 1, sk)
    dense = (torch.rand(b, 1, sq, sk, device="cuda") > 0.5) | (k == 0)
    keys = pad.view(b, 1, 1, sk)
    found: dict[str, tuple[tuple[Any, ...], Tensor | None, list[Tensor], list[int]]] = {
        "none": ((), None, [], []),
        "causal": ((Band(None, 0),), k <= q, [], []),
        "window": ((Band(-31, 0),), (k <= q) & (k > q - 32), [], []),
        "padding": ((KeyPadding(0),), keys, [pad], []),
        "padding-causal": ((KeyPadding(0), Band(None, 0)), keys & (k <= q), [pad], []),
        "dense": ((Dense(0),), dense, [dense], []),
        "documents": ((Documents(0, 1),), docs, [docs_q, docs_k], []),
        "far": ((Band(None, sk + 5),), None, [], []),
    }
    if off >= 0:
        found |= {
            "causal-end": ((Band(None, Sym(0)),), k <= q + off, [], [off]),
            "window-end": ((Band(Sym(1), Sym(0)),), (k <= q + off) & (k > q + off - 16), [], [off, off - 15]),
            "both-sides": ((Band(off - 9, off + 9),), (k - q - off).abs() <= 9, [], []),
            "lower": ((Band(off, None),), k >= q + off, [], []),
            "padding-window": ((Band(off - 15, off), KeyPadding(0)), (k <= q + off) & (k > q + off - 16) & keys,
                               [pad | (torch.arange(sk, device="cuda") % 2 == 0)], []),
        }
        keys = found["padding-window"][2][0].view(b, 1, 1, sk)
        found["padding-window"] = (
            found["padding-window"][0], (k <= q + off) & (k > q + off - 16) & keys, found["padding-window"][2], [])
    return {n: x for n, x in found.items() if x[1] is None or bool(x[1].any(-1).all())}


def cases() -> list[Case]:
    torch.manual_seed(0)
    found: list[Case] = []
    rotate = itertools.cycle(itertools.product(HEADS, DIMS, LENGTHS))
    for dtype in ("bfloat16", "float16", "float32"):
        for _ in range(24):
            (hq, hk), (d, dv), (sq, sk) = (next(itertools.islice(rotate, 17, None)))
            base = Attention(hq, hk, d, dv, dtype, d**-0.5)
            for name, (atoms, mask, captures, ints) in masks(2, sq, sk).items():
                where = f"{dtype} {hq}/{hk} d{d}/{dv} {sq}x{sk}"
                found.append(Case(f"{name} {where}", base.with_(mask=atoms), (2, sq, sk), captures, ints, mask))
    found += [*empty_cases(), *score_cases(), *scale_cases()]
    return found


def empty_cases() -> list[Case]:
    found = []
    for dtype, (rule, mode), (sq, sk) in itertools.product(("bfloat16", "float32"), RULES, ((96, 96), (200, 130))):
        fill = torch.finfo(getattr(torch, dtype)).min if rule == "mean" else -math.inf
        r = Attention(8, 2, 64, 64, dtype, 0.125, fill=fill, fill_mode=mode, empty_rows=rule)  # type: ignore[arg-type]
        q, k = positions(sq, sk)
        left = torch.arange(sk, device="cuda") >= torch.tensor([[40], [0]], device="cuda")
        for name, atoms, mask, captures in (
            ("causal-20", (Band(None, -20),), k <= q - 20, []),
            ("left-padding", (Band(None, 0), KeyPadding(0)), (k <= q) & left.view(2, 1, 1, sk), [left]),
            ("dense", (Dense(0),), ((k + q) % 7 == 3) & (q > 5), [((k + q) % 7 == 3) & (q > 5)]),
        ):
            found.append(Case(f"empty {rule} {mode} {name} {dtype} {sq}x{sk}", r.with_(mask=atoms), (2, sq, sk),
                              captures, [], mask))
    return found


def score_cases() -> list[Case]:
    found = []
    for dtype, (sq, sk) in itertools.product(("bfloat16", "float16", "float32"), ((96, 96), (130, 201), (1, 65))):
        r = Attention(8, 2, 64, 64, dtype, 0.125)
        q, k = positions(sq, sk)
        to = getattr(torch, dtype)
        shapes = {"full": (2, 8, sq, sk), "heads": (8, sq, sk), "shared": (sq, sk), "keys": (2, 1, 1, sk)}
        for (name, shape), kind, causal in itertools.product(shapes.items(), (to, torch.float32), (False, True)):
            bias = torch.randn(shape, device="cuda").to(kind)
            found.append(Case(
                f"bias {name} {str(kind)[6:]} {'causal ' if causal else ''}{dtype} {sq}x{sk}",
                r.with_(score=BIAS, grads=(0,), mask=(Band(None, 0),) if causal else ()), (2, sq, sk), [bias], [],
                k <= q if causal else None, lambda s, c: s + c[0]))
        slopes = 2.0 ** -torch.arange(1, 9, device="cuda").float().view(8, 1, 1)
        alibi = Expr("add", (SCORE, Expr("mul", (load(0), Expr("sub", (index("k"), index("q")))))))
        found.append(Case(f"alibi {dtype} {sq}x{sk}", r.with_(score=alibi, mask=(Band(None, 0),)), (2, sq, sk),
                          [slopes], [], k <= q, lambda s, c, d=(k - q): s + (c[0] * d).to(s.dtype)))
        for name, atoms, mask in (("causal", (Band(None, 0),), k <= q),
                                  ("window", (Band(-15, 0),), (k <= q) & (k > q - 16)),
                                  ("empty", (Band(None, -3),), k <= q - 3)):
            sink = torch.randn(8, device="cuda").to(to)
            found.append(Case(f"sink {name} {dtype} {sq}x{sk}", r.with_(mask=atoms, sink=0, grads=(0,)), (2, sq, sk),
                              [sink], [], mask))
        cap = Expr("mul", (Expr("tanh", (Expr("div", (SCORE, Expr("const", (2.0,)))),)), Expr("const", (2.0,))))
        found.append(Case(f"softcap {dtype} {sq}x{sk}", r.with_(score=cap), (2, sq, sk), [], [], None,
                          lambda s, c: 2 * torch.tanh(s / 2)))
    return found


def scale_cases() -> list[Case]:
    found = []
    for dtype, scale in itertools.product(("bfloat16", "float32"), (-0.2, 0.0, 0.7)):
        q, k = positions(160, 160)
        for name, atoms, mask in (("none", (), None), ("causal", (Band(None, 0),), k <= q)):
            r = Attention(8, 8, 64, 64, dtype, scale, mask=atoms)
            found.append(Case(f"scale {scale} {name} {dtype}", r, (2, 160, 160), [], [], mask, outliers=scale > 0))
    return found


def inputs(case: Case) -> list[Tensor]:
    """q, k, v, dout as a projection leaves them: [B, S, H, D] in memory."""
    r, (b, sq, sk) = case.record, case.shape
    shapes = ((sq, r.q_heads, r.head_dim), (sk, r.kv_heads, r.head_dim), (sk, r.kv_heads, r.head_dim_v),
              (sq, r.q_heads, r.head_dim_v))
    xs = [torch.randn(b, *s, device="cuda") for s in shapes]
    if case.outliers:
        xs = [torch.where(torch.rand_like(x) < 0.002, 8 * x, x) if i < 2 else x for i, x in enumerate(xs)]
    return [x.to(getattr(torch, r.dtype)).transpose(1, 2) for x in xs]


def eager(case: Case, xs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """out, dq, dk, dv, captures' gradients by autograd of the user's code, in ``dtype``."""
    r = case.record
    leaves = [x.to(dtype).requires_grad_() for x in xs[:3]]
    caps = [c.to(dtype) if c.is_floating_point() else c for c in case.captures]
    wanted = [caps[i].requires_grad_() for i in r.grads]
    fill = r.fill if math.isinf(r.fill) else torch.finfo(dtype).min
    out = oracle(*leaves, scale=r.scale, score=lambda s: case.score(s, caps), mask=case.mask, fill=fill,
                 replace=r.fill_mode == "replace", empty=r.empty_rows, sink=None if r.sink is None else caps[r.sink])
    return [out, *torch.autograd.grad(out, [*leaves, *wanted], xs[3].to(dtype))]


def errors(got: Tensor, ref: Tensor) -> tuple[float, float]:
    gap = (got.double() - ref).abs()
    return gap.max().item(), gap.mean().item()


def path(case: Case) -> str:
    _, sq, sk = case.shape
    if torch_backward.supports(case.record) is not None:
        return "reference"
    return "efficient" if aten_cuda.find_flash(case.record, case.ints, sq, sk) is None else "flash"


def no_sync(f: Callable[..., Any], *args: Any) -> Any:
    torch.cuda.set_sync_debug_mode("error")
    try:
        return f(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run(case: Case, xs: list[Tensor], forward: Callable[..., Any]) -> list[Tensor]:
    r = case.record
    q, k, v, dout = xs
    out, lse = no_sync(forward, r, q, k, v, case.captures, case.ints)
    if torch_backward.supports(r) is None:
        grads = no_sync(torch_backward.backward, r, dout, q, k, v, out, lse, case.captures, case.ints)
    else:
        grads = no_sync(reference.backward, r, dout, q, k, v, case.captures, case.ints)
    return [out, *grads[:3], *grads[3]]


def judge(case: Case, got: list[Tensor], exact: list[Tensor], plain: list[Tensor]) -> dict[str, Any]:
    names = ["out", "dq", "dk", "dv", *(f"d{i}" for i in case.record.grads)]
    eps = torch.finfo(getattr(torch, case.record.dtype)).eps
    verdict: dict[str, Any] = {"ok": True, "wrong": False, "max_ratio": {}, "mean_ratio": {}}
    # where a gradient vanishes exactly (one key), eager code has no error at all: one unit of the largest of them
    top = max(torch.nan_to_num(ref.abs(), nan=0.0).max().item() for ref in exact)
    for name, x, ref, p in zip(names, got, exact, plain, strict=True):
        lost = ref.isnan() != x.isnan()
        verdict["wrong"] |= bool(lost.any()) or x.shape != ref.shape
        x, ref, p = (torch.nan_to_num(t.double(), nan=0.0) for t in (x, ref, p))
        (worst, mean), (p_worst, p_mean) = errors(x, ref), errors(p, ref)
        verdict["max_ratio"][name] = round(worst / (p_worst + eps * top + 1e-30), 3)
        verdict["mean_ratio"][name] = round(mean / (p_mean + 0.05 * eps * top + 1e-30), 3)
        verdict["ok"] &= worst <= 2 * p_worst + eps * top and mean <= 1.1 * p_mean + 0.05 * eps * top
        verdict["wrong"] |= worst > 100 * p_worst + 40 * eps * (top + 1.0)
    verdict["ok"] &= not verdict["wrong"]
    return verdict


def check_cases(only: str, kernels: bool) -> list[dict[str, Any]]:
    rows = []
    for case in cases():
        if only not in case.name:
            continue
        xs = inputs(case)
        exact, plain = eager(case, xs, torch.float64), eager(case, xs, xs[0].dtype)
        runs: dict[str, Callable[..., Any]] = {}
        if aten_cuda.supports(case.record) is None:
            runs["sdpa"] = aten_cuda.forward
        else:
            runs["reference"] = reference.forward
        if kernels:
            from fa_inductor.backends.dispatch import _kernels_forward, choose

            if choose(case.record, "cuda", "sm_90")[0] == "kernels":
                runs["kernels"] = _kernels_forward
        for name, forward in runs.items():
            row: dict[str, Any] = {
                "case": case.name, "dtype": case.record.dtype, "forward": name, "backward": path(case)}
            try:
                if name == "kernels":  # compile first: that may wait for the device
                    forward(case.record, *xs[:3], case.captures, case.ints)
                row |= judge(case, run(case, xs, forward), exact, plain)
            except Exception as e:
                row |= {"ok": False, "wrong": True, "error": f"{type(e).__name__}: {e}",
                        "trace": traceback.format_exc(limit=-3)}
            rows.append(row)
            if not row["ok"]:
                print({k: v for k, v in row.items() if k != "trace"}, flush=True)
    return rows


def check_operators() -> dict[str, Any]:
    """CUDA graph capture, determinism, opcheck and a second device, through the operators."""
    result: dict[str, Any] = {}
    r = Attention(8, 2, 64, 64, "bfloat16", 0.125, mask=(Band(None, 0), KeyPadding(0)), fill=-1e30, empty_rows="mean")
    pad = torch.arange(256, device="cuda").expand(2, 256) > 9
    q, k, v, dout = (torch.randn(2, 256, h, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
                     for h in (8, 2, 2, 8))

    def both(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, pad: Tensor) -> list[Tensor]:
        out, lse = ops.attention(q, k, v, [pad], [], r.to_string(), "check")
        return [out, *ops.attention_backward(dout, q, k, v, out, lse, [pad], [], r.to_string(), "check")[:3]]

    def attempt(name: str, f: Callable[[], Any]) -> None:
        try:
            result[name] = f()
        except Exception as e:
            result[name] = f"{type(e).__name__}: {e}"

    def graphs() -> bool:
        want = both(q, k, v, dout, pad)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            both(q, k, v, dout, pad)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = both(q, k, v, dout, pad)
        graph.replay()
        torch.cuda.synchronize()
        return all(torch.allclose(a.float(), b.float(), atol=2e-2) for a, b in zip(got, want, strict=True))

    def deterministic() -> bool:
        torch.use_deterministic_algorithms(True)
        try:
            first = both(q, k, v, dout, pad)
            return all(torch.equal(a, b) for _ in range(20)
                       for a, b in zip(first, both(q, k, v, dout, pad), strict=True))
        finally:
            torch.use_deterministic_algorithms(False)

    def checked() -> str:
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        return str(torch.library.opcheck(ops.attention, (*leaves, [pad], [], r.to_string(), "check"), atol=2e-2, rtol=2e-2))

    for backend in ("sdpa", "reference", "auto"):
        with options.patch(backend=backend):
            attempt(f"cuda_graph_{backend}", graphs)
            attempt(f"deterministic_{backend}", deterministic)
            attempt(f"opcheck_{backend}", checked)
    if torch.cuda.device_count() > 1:
        there = [t.to("cuda:1") for t in (q, k, v, dout, pad)]
        attempt("second_device", lambda: [t.device.index for t in both(*there)] == [1] * 4)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--kernels", action="store_true", help="also feed the backward with our own forward kernels")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    args = parser.parse_args()
    rows = check_cases(args.only, args.kernels)
    summary = {
        "cases": len(rows), "ok": sum(r["ok"] for r in rows), "wrong": sum(r["wrong"] for r in rows),
        "ok_of_cases": {
            f"{p} {d}": [sum(r["ok"] for r in rows if (r["backward"], r["dtype"]) == (p, d)),
                         sum((r["backward"], r["dtype"]) == (p, d) for r in rows)]
            for p in ("flash", "efficient", "reference") for d in ("bfloat16", "float16", "float32")
        },
    }  # fmt: skip
    data = {
        "date": datetime.date.today().isoformat(), "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "summary": summary, "operators": check_operators(), "failed": [r for r in rows if not r["ok"]], "rows": rows,
    }  # fmt: skip
    args.result.parent.mkdir(parents=True, exist_ok=True)
    args.result.write_text(json.dumps(data, indent=1) + "\n")
    print(json.dumps(summary), json.dumps(data["operators"]))
    half = [r for r in rows if r["dtype"] != "float32"]
    return 0 if not summary["wrong"] and all(r["ok"] for r in half) else 1


if __name__ == "__main__":
    sys.exit(main())
