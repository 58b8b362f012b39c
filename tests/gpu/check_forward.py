"""Check the forward kernel of this GPU against float64 on several hundred cases, and write the outcome as JSON.

    python tests/gpu/check_forward.py [--out FILE] [--workers N] [--only TEXT] [--quick]

Judged by the numerics contract: with e the error against float64, max e <= 2 x and mean e <= 1.1 x that of plain
eager code in the same dtype, plus a floor of one rounding of the result; NaN and Inf exactly where the oracle has
them; lse within 1e-5 of the largest score.  Exit status 1 when a case fails.
"""
from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import random
import sys
import time
import traceback
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module, metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from fa_inductor.kernels import api
from fa_inductor.kernels.expr import SCORE, Expr, const, index, load, sym
from fa_inductor.kernels.record import Attention, Band, Chunk, Dense, Documents, KeyPadding, Predicate, Sym

NEG_INF = -math.inf
FAR = (1 << 31) + (1 << 20)
PREFIX = 70
Q, K = index("q"), index("k")


def call(op: str, *args: Any) -> Expr:
    return Expr(op, args)


@dataclass(frozen=True)
class Case:
    """One problem; everything is derived from it and from `seed`."""

    name: str
    dtype: str = "bfloat16"
    batch: int = 2
    heads: tuple[int, int] = (4, 4)
    rows: int = 128
    keys: int = 128
    dims: tuple[int, int] = (128, 128)
    lo: int | None = None
    hi: int | None = None
    symbolic: bool = False
    padding: str = ""
    """"", "right", "left", "gaps", "all" (one batch entry wholly masked), "shared" (one row for all batch entries)."""
    nan_slots: bool = False
    """NaN in K and V of padded slots."""
    documents: bool = False
    dense: str = ""
    dense_form: str = ""
    """"" is random, "causal", "blocks": whole tiles are hidden, and others seen whole."""
    """Which of b h q k the mask tensor has; "" is none."""
    bias: str = ""
    bias_dtype: str = "bfloat16"
    bias_mask: str = ""
    """"inf" or "min": the bias is a causal mask with holes that adds -inf or the dtype's lowest value; "" is random."""
    score: str = ""
    """"softcap", "alibi", "distance" (a program of where, cast, floordiv, mod) or "" for none."""
    predicate: str = ""
    """"prefix" (causal or inside a prefix), "load" (a bool capture of [Sq, Sk] or not a later key) or "" for none."""
    chunk: tuple[int, int] | None = None
    """Size and offset."""
    sink: str = ""
    scale: float | None = None
    fill: float = NEG_INF
    empty: str = "never"
    layout: str = "bshd"
    strides: str = "bhsd"
    """"bhsd", "bshd", "packed" (slices of one qkv tensor), "expand" (K and V of one head and batch), "odd" (unaligned),
    "far" (batch entries more than 2^31 elements apart)."""
    data: str = "normal"
    """"normal", "outlier", "large", "constant"."""
    seed: int = 0
    tags: tuple[str, ...] = field(default=())


def inputs(c: Case) -> tuple[Any, ...]:
    """q, k, v, record, captures, ints on the current CUDA device."""
    g = torch.Generator("cuda").manual_seed(c.seed)
    dtype = getattr(torch, c.dtype)
    hq, hk = c.heads
    d, dv = c.dims

    def draw(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=g, device="cuda", dtype=torch.float32)
        if c.data == "outlier":
            x += torch.randn(shape, generator=g, device="cuda") * 10 * (torch.rand(shape, generator=g, device="cuda") < 1e-3)
        elif c.data == "large":
            x *= 20
        elif c.data == "constant":
            x = x[..., :1, :1].expand(shape).clone()
        return x.to(dtype)

    def lay(x: torch.Tensor) -> torch.Tensor:
        if c.strides == "bshd":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if c.strides == "odd":
            flat = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape)
            return flat.copy_(x)
        return x

    if c.strides == "packed":
        qkv = draw(c.batch, c.keys, hq + 2 * hk, d).transpose(1, 2)
        q, k, v = qkv[:, :hq, : c.rows], qkv[:, hq : hq + hk], qkv[:, hq + hk :]
    elif c.strides == "far":
        base = torch.empty((c.batch - 1) * FAR + (1 << 24), dtype=dtype, device="cuda")
        parts, start = [], 0
        for h, n, e in ((hq, c.rows, d), (hk, c.keys, d), (hk, c.keys, dv)):
            parts.append(base[start:].as_strided((c.batch, h, n, e), (FAR, n * e, e, 1)).copy_(draw(c.batch, h, n, e)))
            start += h * n * e
        q, k, v = parts
    elif c.strides == "expand":
        q = draw(c.batch, hq, c.rows, d)
        k = draw(1, 1, c.keys, d).expand(c.batch, hk, c.keys, d)
        v = draw(1, 1, c.keys, dv).expand(c.batch, hk, c.keys, dv)
    else:
        q, k, v = lay(draw(c.batch, hq, c.rows, d)), lay(draw(c.batch, hk, c.keys, d)), lay(draw(c.batch, hk, c.keys, dv))

    atoms: list[Any] = []
    captures: list[torch.Tensor] = []
    ints: list[int] = []

    def capture(x: torch.Tensor) -> int:
        captures.append(x)
        return len(captures) - 1

    if c.lo is not None or c.hi is not None:
        if c.symbolic:
            ends = []
            for x in (c.lo, c.hi):
                if x is not None:
                    ints.append(x)
                ends.append(None if x is None else Sym(len(ints) - 1))
            atoms.append(Band(*ends))
        elif c.lo is not None and c.hi is not None:
            atoms += [Band(c.lo, None), Band(None, c.hi)]
        else:
            atoms.append(Band(c.lo, c.hi))
    if c.chunk:
        if c.symbolic:
            ints += c.chunk
            atoms.append(Chunk(Sym(len(ints) - 2), Sym(len(ints) - 1)))
        else:
            atoms.append(Chunk(*c.chunk))
    if c.predicate == "prefix":
        ints.append(PREFIX)
        atoms.append(Predicate(call("or", call("le", K, Q), call("lt", K, sym(len(ints) - 1)))))
    elif c.predicate == "load":
        seen = torch.rand(c.rows, c.keys, generator=g, device="cuda") < 0.5
        atoms.append(Predicate(call("or", load(capture(seen)), call("le", K, Q))))
    if c.padding:
        n = 1 if c.padding == "shared" else c.batch
        pos = torch.arange(c.keys, device="cuda")
        length = torch.randint(1, c.keys + 1, (n, 1), generator=g, device="cuda")
        if c.padding == "left":
            mask = pos >= c.keys - length
        elif c.padding == "gaps":
            mask = torch.rand(n, c.keys, generator=g, device="cuda") < 0.7
            mask[:, c.keys // 2] = True
        else:
            mask = pos < length
        if c.padding == "all":
            mask = mask.clone()
            mask[0] = False
        atoms.append(KeyPadding(capture(mask)))
        if c.nan_slots:
            k, v = k.clone(), v.clone()
            hidden = ~mask.expand(c.batch, c.keys)[:, None, :, None]
            k.masked_fill_(hidden, math.nan)
            v.masked_fill_(hidden, math.nan)
    if c.documents:
        ids = torch.randint(0, 3, (c.batch, max(c.rows, c.keys)), generator=g, device="cuda").sort(-1).values
        atoms.append(Documents(capture(ids[:, : c.rows]), capture(ids[:, : c.keys].to(torch.int32))))

    def shaped(which: str) -> tuple[int, ...]:
        return tuple(n if a in which else 1 for a, n in zip("bhqk", (c.batch, hq, c.rows, c.keys), strict=True))

    if c.dense:
        mask = torch.rand(shaped(c.dense), generator=g, device="cuda") < 0.6
        if c.dense_form == "causal":
            mask = mask.new_ones(shaped(c.dense)).tril()
        elif c.dense_form == "blocks":
            coarse = torch.rand(*shaped(c.dense)[:2], c.rows // 150 + 1, c.keys // 130 + 1, generator=g, device="cuda") < 0.5
            mask = coarse.repeat_interleave(150, 2).repeat_interleave(130, 3)[..., : c.rows, : c.keys].contiguous()
        if c.empty == "never":
            mask[..., :1] = True
        atoms.append(Dense(capture(mask)))
    score: Expr = SCORE
    if c.bias:
        b = torch.randn(shaped(c.bias), generator=g, device="cuda").to(getattr(torch, c.bias_dtype))
        if c.bias_mask:
            hidden = torch.ones(c.rows, c.keys, dtype=torch.bool, device="cuda").triu(1)
            hidden = hidden | (torch.rand(c.keys, generator=g, device="cuda") < 0.3)
            hidden[:, 0] = False
            if c.bias_mask == "min":
                hidden[:3] = True  # rows that are hidden as a whole are uniform then
            low = NEG_INF if c.bias_mask == "inf" else torch.finfo(b.dtype).min
            b = torch.zeros_like(b).masked_fill(hidden, low)
        score = Expr("add", (SCORE, load(capture(b))))
    if c.score == "softcap":
        score = call("mul", call("tanh", call("div", SCORE, const(20.0))), const(20.0))
    elif c.score == "alibi":
        slope = 2.0 ** (-8.0 * torch.arange(1, hq + 1, device="cuda") / hq)
        score = call("add", SCORE, call("mul", load(capture(slope[:, None, None])), call("sub", K, Q)))
    elif c.score == "distance":
        far = call("floordiv", call("sub", Q, K), const(16))
        even = call("eq", call("mod", call("sub", K, Q), const(2)), const(0))
        score = call("add", call("mul", SCORE, call("where", even, const(0.5), const(1.0))),
                     call("mul", call("cast", call("minimum", far, const(3)), "float32"), const(-0.25)))
    sink = None
    if c.sink:
        sink = capture((torch.randn(hq, generator=g, device="cuda") * 3).to(getattr(torch, c.sink)))
    record = Attention(
        q_heads=hq, kv_heads=hk, head_dim=d, head_dim_v=dv, dtype=c.dtype,
        scale=d**-0.5 if c.scale is None else c.scale, score=score, mask=tuple(atoms), fill=c.fill,
        empty_rows=c.empty, sink=sink, layout=c.layout,  # type: ignore[arg-type]
    )
    return q, k, v, record, captures, ints


def visible(c: Case, record: Attention, captures: list[torch.Tensor]) -> torch.Tensor | None:
    """The mask of a case as a bool tensor broadcastable to [B, Hq, Sq, Sk]; None when there is none."""
    seen: torch.Tensor | None = None
    i = torch.arange(c.rows, device="cuda")[:, None]
    j = torch.arange(c.keys, device="cuda")[None, :]

    def both(x: torch.Tensor) -> None:
        nonlocal seen
        seen = x if seen is None else seen & x

    if c.lo is not None:
        both((j >= i + c.lo)[None, None])
    if c.hi is not None:
        both((j <= i + c.hi)[None, None])
    if c.chunk:
        both((j // c.chunk[0] == (i + c.chunk[1]) // c.chunk[0])[None, None])
    for atom in record.mask:
        if isinstance(atom, Predicate):
            both((j <= i) | (j < PREFIX if c.predicate == "prefix" else captures[0]))
        elif isinstance(atom, KeyPadding):
            both(captures[atom.capture][:, None, None, :])
        elif isinstance(atom, Documents):
            both(captures[atom.q][:, None, :, None] == captures[atom.k][:, None, None, :])
        elif isinstance(atom, Dense):
            both(captures[atom.capture])
    return seen


def oracle(c: Case, q: Any, k: Any, v: Any, record: Attention, captures: Any, kind: torch.dtype) -> tuple[Any, Any]:
    """Eager attention computed in `kind`: float64 for the truth, the case's dtype for what a user's code gives."""
    group = record.group
    q, k, v = q.to(kind), k.to(kind).repeat_interleave(group, 1), v.to(kind).repeat_interleave(group, 1)
    seen = visible(c, record, captures)
    if c.nan_slots:  # the contract: what lies in padded slots does not reach the output
        k, v = k.nan_to_num(0.0), v.nan_to_num(0.0)
    s = q @ k.transpose(-1, -2) * record.scale
    i = record.bias()
    if i is not None:
        s = s + captures[i].to(kind)
    qs, ks = torch.arange(c.rows, device="cuda")[:, None], torch.arange(c.keys, device="cuda")[None, :]
    if c.score == "softcap":
        s = torch.tanh(s / 20.0) * 20.0
    elif c.score == "alibi":
        slope = 2.0 ** (-8.0 * torch.arange(1, record.q_heads + 1, device="cuda") / record.q_heads)
        s = s + (slope[:, None, None] * (ks - qs)).to(kind)
    elif c.score == "distance":
        s = s * torch.where((ks - qs) % 2 == 0, 0.5, 1.0).to(kind)
        s = s + (((qs - ks) // 16).clamp_max(3) * -0.25).to(kind)
    if seen is not None:
        fill = max(record.fill, torch.finfo(kind).min) if record.fill != NEG_INF else NEG_INF
        s = s.masked_fill(~seen, fill)
    work = torch.float64 if kind == torch.float64 else torch.float32
    if record.sink is not None:
        column = captures[record.sink].to(kind)[None, :, None, None].expand(*s.shape[:3], 1)
        p = torch.softmax(torch.cat([s, column], -1).to(work), -1).to(kind)[..., :-1]
        lse = torch.logsumexp(torch.cat([s, column], -1).to(work), -1)
    else:
        p = torch.softmax(s.to(work), -1).to(kind)
        lse = torch.logsumexp(s.to(work), -1)
    out = p @ v
    if seen is not None and record.sink is None:
        lse = lse.masked_fill(~seen.any(-1), NEG_INF)
        if record.empty_rows == "zero":
            out = out.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return out, lse


def judge(c: Case) -> dict[str, Any]:
    """Run one case; a dict with `ok`, errors and ratios."""
    q, k, v, record, captures, ints = inputs(c)
    dtype = q.dtype
    out, lse = api.attention(q, k, v, record, captures, ints)
    if out.shape != (*q.shape[:3], v.shape[3]) or lse.shape != q.shape[:3]:
        return {"ok": False, "why": f"shapes {tuple(out.shape)} {tuple(lse.shape)}"}
    if not (out.transpose(1, 2) if c.layout == "bshd" else out).is_contiguous():
        return {"ok": False, "why": f"layout {out.stride()}"}
    again, _ = api.attention(q, k, v, record, captures, ints)
    if not torch.equal(out.view(torch.int16), again.view(torch.int16)):
        return {"ok": False, "why": "two runs differ"}
    true, true_lse = oracle(c, q, k, v, record, captures, torch.float64)
    eager, _ = oracle(c, q, k, v, record, captures, dtype)
    bad = ~torch.isfinite(true)
    if not torch.equal(bad, ~torch.isfinite(out)):
        where = (bad != ~torch.isfinite(out)).nonzero()
        return {"ok": False, "why": f"non-finite values differ at {len(where)} places, first {where[0].tolist()}"}
    e = (out.double() - true).masked_fill_(bad, 0.0).abs_()
    e0 = (eager.double() - true).masked_fill_(bad, 0.0).nan_to_num_(0.0, 0.0, 0.0).abs_()
    size = true.masked_fill(bad, 0.0).abs()
    eps = torch.finfo(dtype).eps
    e_max, e_mean, e0_max, e0_mean = (float(x) for x in (e.max(), e.mean(), e0.max(), e0.mean()))
    floor_max, floor_mean = 0.5 * eps * float(size.max()), 0.05 * eps * float(size.mean())
    got = lse.double()
    empty = ~torch.isfinite(true_lse)
    scores = float(q.double().abs().amax() * k.double().nan_to_num(0.0).abs().amax() * abs(record.scale) * q.shape[-1])
    e_lse = (got - true_lse).masked_fill(empty, 0.0).abs() / true_lse.masked_fill(empty, 0.0).abs().clamp_min(1.0)
    lse_ok = bool(((got == NEG_INF) | torch.isnan(got))[empty].all()) and float(e_lse.max()) <= 2e-6 * max(1.0, scores) + 1e-5
    ok_max, ok_mean = e_max <= 2 * e0_max + floor_max, e_mean <= 1.1 * e0_mean + floor_mean
    why = "; ".join(w for w, bad_ in (
        (f"max error {e_max:.3e}, eager {e0_max:.3e}", not ok_max),
        (f"mean error {e_mean:.3e}, eager {e0_mean:.3e}", not ok_mean),
        (f"lse error {float(e_lse.max()):.3e}", not lse_ok)) if bad_)
    return {
        "ok": not why, "why": why, "max": e_max, "mean": e_mean, "eager_max": e0_max, "eager_mean": e0_mean,
        "ratio_max": e_max / (e0_max + floor_max + 1e-300), "ratio_mean": e_mean / (e0_mean + floor_mean + 1e-300),
        "lse": float(e_lse.max()),
    }


# ---------------------------------------------------------------------- cases

DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]
LENGTHS = [1, 2, 3, 7, 16, 31, 63, 64, 65, 80, 112, 127, 128, 129, 191, 192, 193, 255, 257, 333, 500, 512, 777, 1000, 1024,
           1025, 1531, 2048, 2047, 4096, 4097, 8192, 8191]
GROUPS = [(4, 4), (4, 1), (8, 2), (5, 1), (12, 1), (6, 2), (24, 4)]


def all_cases(quick: bool = False) -> list[Case]:
    """The list of cases; deterministic."""
    rnd = random.Random(20261129)
    found: list[Case] = []

    def add(name: str, **kw: Any) -> None:
        rows, keys = kw.get("rows", 128), kw.get("keys", 128)
        if rows * keys > 1 << 22:
            kw.setdefault("batch", 1)
            kw.setdefault("heads", rnd.choice([(2, 2), (2, 1), (3, 1)]))
        found.append(Case(name=name, seed=len(found), **kw))

    # 1. lengths x head dims, full and causal
    for dims in DIMS:
        for n in (LENGTHS if not quick else LENGTHS[::6]):
            dtype = rnd.choice(["bfloat16", "float16"])
            add("full", dtype=dtype, rows=n, keys=n, dims=dims, heads=rnd.choice(GROUPS) if n <= 2048 else (2, 1),
                strides=rnd.choice(["bhsd", "bshd"]), layout=rnd.choice(["bhsd", "bshd"]))
            add("causal", dtype=dtype, rows=n, keys=n, dims=dims, heads=rnd.choice(GROUPS) if n <= 2048 else (2, 1), hi=0,
                strides=rnd.choice(["bhsd", "bshd"]), layout=rnd.choice(["bhsd", "bshd"]))
    # 2. rows and keys of different length, causal with any offset (decoding, chunked prefill, rows without keys)
    for n in range(10 if quick else 70):
        rows, keys = rnd.choice(LENGTHS[:26]), rnd.choice(LENGTHS[:26])
        hi = rnd.choice([0, keys - rows, rnd.randint(-rows, keys), 1000])
        empty = "never" if hi >= 0 else rnd.choice(["nan", "zero", "mean"])
        add("offset", dtype=rnd.choice(["bfloat16", "float16"]), rows=rows, keys=keys, dims=rnd.choice(DIMS), hi=hi,
            heads=rnd.choice(GROUPS), symbolic=n % 2 == 0, empty=empty, fill=-1e9 if empty == "mean" else NEG_INF)
    # 3. windows
    for n in range(10 if quick else 60):
        rows = rnd.choice(LENGTHS[5:])
        keys = rows if n % 3 else rnd.choice(LENGTHS[5:26])
        width = rnd.choice([1, 2, 31, 64, 127, 128, 129, 256, 1024])
        lo, hi = rnd.choice([(1 - width, 0), (-width, width), (1 - width, None), (1 - width + keys - rows, keys - rows)])
        empty = "never" if rows == keys else rnd.choice(["nan", "zero", "mean"])
        add("window", dtype=rnd.choice(["bfloat16", "float16"]), rows=rows, keys=keys, dims=rnd.choice(DIMS), lo=lo, hi=hi,
            heads=rnd.choice(GROUPS) if rows * keys <= 1 << 20 else (2, 1), symbolic=n % 2 == 1, empty=empty,
            fill=-1e9 if empty == "mean" else NEG_INF)
    # 4. key padding
    for n in range(12 if quick else 80):
        rows = rnd.choice(LENGTHS[3:26])
        keys = rows if n % 2 else rnd.choice(LENGTHS[3:26])
        padding = rnd.choice(["right", "left", "gaps", "all", "shared"])
        hi = rnd.choice([None, 0]) if rows == keys else None
        empty = rnd.choice(["nan", "zero", "mean"]) if padding in ("all", "left") else "never"
        if hi == 0 and padding == "gaps":
            empty = "zero"
        nan = empty in ("never", "zero") and padding != "shared"
        add("padding", dtype=rnd.choice(["bfloat16", "float16"]), rows=rows, keys=keys, dims=rnd.choice(DIMS), hi=hi,
            padding=padding, nan_slots=nan, heads=rnd.choice(GROUPS), batch=3, empty=empty,
            fill=torch.finfo(torch.float32).min if empty == "mean" else NEG_INF)
    # 5. bias, mask tensor, documents, sink
    for _ in range(8 if quick else 50):
        rows, keys = rnd.choice(LENGTHS[3:26]), rnd.choice(LENGTHS[3:26])
        add("bias", dtype=rnd.choice(["bfloat16", "float16"]), rows=rows, keys=keys, dims=rnd.choice(DIMS),
            bias=rnd.choice(["bhqk", "hqk", "qk", "bk", "k", "h"]), bias_dtype=rnd.choice(["bfloat16", "float16", "float32"]),
            heads=rnd.choice(GROUPS), hi=rnd.choice([None, None, max(0, keys - rows)]))
    for n in range(6 if quick else 24):
        rows = rnd.choice(LENGTHS[3:26])
        add("additive mask", rows=rows, keys=rows, dims=rnd.choice(DIMS), bias=rnd.choice(["bqk", "qk"]),
            bias_mask=["inf", "min"][n % 2], bias_dtype=rnd.choice(["bfloat16", "float32"]), heads=rnd.choice(GROUPS))
    for _ in range(8 if quick else 40):
        rows, keys = rnd.choice(LENGTHS[3:26]), rnd.choice(LENGTHS[3:26])
        add("dense", rows=rows, keys=keys, dims=rnd.choice(DIMS[:3]), dense=rnd.choice(["bhqk", "bqk", "qk", "hqk"]),
            heads=rnd.choice(GROUPS), empty=rnd.choice(["zero", "never"]))
    for n in range(6 if quick else 24):
        add("mask of tiles", rows=700 + 31 * n, keys=900 + 17 * n, dims=DIMS[n % 3], dense=["qk", "hqk", "bhqk"][n % 3],
            dense_form=["causal", "blocks"][n % 2], heads=(4, 2), batch=[2, 40][n % 2], empty=["never", "zero"][n // 2 % 2],
            padding="right" if n % 4 == 3 else "", hi=[None, 100][n // 4 % 2])
    for _ in range(6 if quick else 30):
        rows = rnd.choice(LENGTHS[5:26])
        add("documents", rows=rows, keys=rows, dims=rnd.choice(DIMS[:3]), documents=True, heads=rnd.choice(GROUPS),
            hi=rnd.choice([0, None]), empty="zero")
    for _ in range(6 if quick else 30):
        rows = rnd.choice(LENGTHS[3:26])
        add("sink", rows=rows, keys=rows, dims=rnd.choice(DIMS[:3]), hi=0, lo=rnd.choice([None, -127]),
            sink=rnd.choice(["bfloat16", "float32"]), heads=rnd.choice(GROUPS))
    for n in range(6 if quick else 36):
        rows, keys = rnd.choice(LENGTHS[3:26]), rnd.choice(LENGTHS[3:26])
        add("score", dtype=rnd.choice(["bfloat16", "float16"]), rows=rows, keys=keys, dims=rnd.choice(DIMS),
            score=["softcap", "alibi", "distance"][n % 3], heads=rnd.choice(GROUPS), hi=rnd.choice([None, max(0, keys - rows)]),
            data=rnd.choice(["normal", "outlier"]), scale=rnd.choice([None, None, -0.1]))
    for n in range(6 if quick else 24):
        rows = rnd.choice(LENGTHS[3:26])
        add("predicate", rows=rows, keys=rows if n % 3 else rnd.choice(LENGTHS[3:26]), dims=rnd.choice(DIMS[:3]),
            predicate=["prefix", "load"][n % 2], heads=rnd.choice(GROUPS), dtype=rnd.choice(["bfloat16", "float16"]))
    for n in range(6 if quick else 24):
        rows = rnd.choice(LENGTHS[6:])
        offset = rnd.choice([0, 0, 37])
        add("chunk", rows=rows, keys=rows + offset, dims=rnd.choice(DIMS), chunk=(rnd.choice([1, 16, 100, 128, 1024]), offset),
            hi=rnd.choice([offset, None]), symbolic=n % 2 == 0, heads=rnd.choice(GROUPS) if rows <= 1024 else (2, 1), empty="zero")
    # 6. scales, data, head dims, strides
    for scale in (1.0, 0.5, 1e-3, 2.0, 0.0, -0.125, -1.0, 1e-30):
        for hi in (None, 0):
            for dtype in ("bfloat16", "float16"):
                add("scale", dtype=dtype, rows=333, keys=333, scale=scale, hi=hi, heads=(4, 2))
    for data in ("outlier", "large", "constant"):
        for dims in DIMS:
            for hi in (None, 0):
                add("data", dtype="float16" if data == "outlier" else "bfloat16", rows=1000, keys=1000, dims=dims, hi=hi,
                    data=data, scale=None if data != "large" else 0.01)
    for d in range(32, 257, 8):
        add("dim", rows=200, keys=201, dims=(d, d), hi=1, dtype=rnd.choice(["bfloat16", "float16"]), heads=(4, 2),
            strides=rnd.choice(["bhsd", "bshd"]), layout=rnd.choice(["bhsd", "bshd"]))
    for dims in ((8, 8), (16, 16), (24, 24), (64, 128), (128, 64), (192, 128), (160, 96), (40, 72)):
        add("dim", rows=130, keys=257, dims=dims, heads=(4, 2))
    add("strides", rows=500, keys=500, strides="far", hi=0)
    for strides in ("packed", "expand", "odd"):
        for dims in ((64, 64), (128, 128), (80, 80)):
            for hi in (None, 0):
                add("strides", rows=300, keys=300, dims=dims, strides=strides, hi=hi, heads=(4, 2))
    return found


def _work(cases: list[Case]) -> list[tuple[Case, dict[str, Any]]]:
    done = []
    for c in cases:
        try:
            done.append((c, judge(c)))
        except Exception as e:  # a case must not hide the others
            done.append((c, {"ok": False, "why": f"{type(e).__name__}: {str(e)[:300]}",
                             "trace": traceback.format_exc()[-1500:]}))
            if isinstance(e, torch.AcceleratorError):
                break  # this process's context is gone
    torch.cuda.empty_cache()
    return done


def _group(c: Case) -> tuple[Any, ...]:
    """Cases of about one specialisation go to one process: each is compiled once."""
    return (c.dtype, -(-c.dims[0] // 32), -(-c.dims[1] // 32), c.lo is None, c.hi is None, bool(c.padding), c.documents,
            bool(c.dense), c.chunk is None, c.bias and (c.bias, c.bias_dtype), c.score, c.predicate, c.sink,
            c.scale is None or c.scale > 0, "nan" if c.sink or c.empty == "never" else c.empty)


def behaviour() -> list[tuple[Case, dict[str, Any]]]:
    """What is no matter of numbers: streams, CUDA graphs, one compile for many lengths, cost of a call."""
    found = []

    def check(name: str, ok: bool, why: str) -> None:
        found.append((Case(name=name), {"ok": ok, "why": why, "ratio_max": 0.0, "ratio_mean": 0.0}))

    c = Case(name="behaviour", rows=300, keys=300, hi=0)
    q, k, v, record, captures, ints = inputs(c)
    want, want_lse = api.attention(q, k, v, record, captures, ints)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late = q * 1.0  # only right if the kernel runs behind it on this stream
        out, _ = api.attention(late, k, v, record, captures, ints)
    side.synchronize()
    check("stream", torch.equal(out, want), "the kernel did not run on the current stream")
    graph = torch.cuda.CUDAGraph()
    static = torch.zeros_like(q)
    with torch.cuda.graph(graph):
        out, lse = api.attention(static, k, v, record, captures, ints)
    static.copy_(q)
    graph.replay()
    torch.cuda.synchronize()
    check("graph", torch.equal(out, want) and torch.equal(lse, want_lse), "a replayed graph gives another answer")
    for dims, kw in (((64, 64), {"hi": 0}), ((128, 128), {"hi": 0}), ((128, 128), {"padding": "right"}), ((256, 256), {})):
        # More tiles than multiprocessors, so that each takes several.
        c = Case(name="behaviour", rows=1000, keys=1000, heads=(16, 4), batch=4, dims=dims, **kw)
        many = inputs(c)
        want, want_lse = api.attention(*many[:6])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed, _ = api.attention(*many[:6])
        equal = torch.ones((), dtype=torch.bool, device="cuda")
        sides = [torch.cuda.Stream(), torch.cuda.Stream()]
        for _ in range(250):
            graph.replay()
            here = api.attention(*many[:6])
            there = []
            for side in sides:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    there.append(api.attention(*many[:6]))
            for side in sides:
                torch.cuda.current_stream().wait_stream(side)
            equal &= (replayed == want).all()
            for out, lse in (here, *there):
                equal &= (out == want).all() & (lse == want_lse).all()
        check("repeats", bool(equal), f"1000 calls, replays and calls side by side: not all equal, {dims} {kw}")
    before = len(api._compiled)
    for rows, keys, batch in ((1, 5, 1), (77, 300, 3), (300, 77, 2)):
        x = inputs(replace(c, rows=rows, keys=keys, batch=batch, seed=rows, scale=0.3))
        api.attention(x[0], x[1], x[2], x[3], x[4], x[5])
    check("compiles", len(api._compiled) == before, f"{len(api._compiled) - before} compiles for new lengths and scales")
    torch.cuda.synchronize()
    t = time.perf_counter()
    for _ in range(200):
        api.attention(q, k, v, record, captures, ints)
    us = (time.perf_counter() - t) / 200 * 1e6
    torch.cuda.synchronize()
    check("call", us < 200, f"{us:.0f} us a call")
    print(f"call {us:.1f} us on the host", flush=True)
    return found


def version(distribution: str, module: str) -> str:
    """Version of an installed package, also where it was unpacked without its metadata."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return str(getattr(import_module(module), "__version__", "unknown"))


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=None)
    p.add_argument("--workers", type=int, default=8)
    p.add_argument("--only", default="", help="run cases whose name contains this")
    p.add_argument("--quick", action="store_true")
    p.add_argument("--small", action="store_true", help="one small case of each name, in this process: for compute-sanitizer")
    args = p.parse_args()
    cases = [c for c in all_cases(args.quick) if args.only in c.name]
    if args.small:
        small = sorted((c for c in cases if c.strides != "far"), key=lambda c: abs(c.rows * c.keys * c.heads[0] * c.batch - 500_000))
        cases = list({c.name: c for c in reversed(small)}.values())
    groups: dict[Any, list[Case]] = defaultdict(list)
    for c in cases:
        groups[_group(c)].append(c)
    # Long groups first, in pieces, so that the processes end together.
    start = time.time()
    done: list[tuple[Case, dict[str, Any]]] = []
    if args.small:
        done = _work(cases)
    else:
        with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
            for part in pool.map(_work, sorted(groups.values(), key=len, reverse=True)):
                done += part
    if not args.only and not args.small:
        extra = behaviour()
        done += extra
        cases += [c for c, _ in extra]
    failed = [(c, r) for c, r in done if not r["ok"]]
    passed = [(c, r) for c, r in done if r["ok"]]
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for c, r in done:
        counts[c.name][0 if r["ok"] else 1] += 1

    def row(c: Case, r: dict[str, Any]) -> dict[str, Any]:
        plain = asdict(replace(c, fill=0.0 if c.fill == NEG_INF else c.fill))
        default = asdict(Case(name=""))
        return {"case": {k: v for k, v in plain.items() if v != default.get(k)}, **r}

    worst = sorted(passed, key=lambda x: -x[1]["ratio_max"])[:10] + sorted(passed, key=lambda x: -x[1]["ratio_mean"])[:10]
    report = {
        "what": "forward kernel against float64", "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
        "nvidia-cutlass-dsl": version("nvidia-cutlass-dsl", "cutlass"), "apache-tvm-ffi": version("apache-tvm-ffi", "tvm_ffi"),
        "cases": len(cases), "run": len(done), "passed": len(passed), "failed": len(failed), "variants": len(groups),
        "seconds": round(time.time() - start, 1),
        "by_name": {n: {"passed": a, "failed": b} for n, (a, b) in sorted(counts.items())},
        "worst": [row(c, r) for c, r in worst], "failures": [row(c, r) for c, r in failed],
    }
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    for c, r in failed[:60]:
        print("FAIL", row(c, {})["case"], r["why"], flush=True)
    print(json.dumps({k: report[k] for k in ("device", "cases", "run", "passed", "failed", "seconds", "by_name")}))
    return 0 if len(passed) == len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
