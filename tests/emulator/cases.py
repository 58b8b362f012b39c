"""Forward cases with committed seeds: the same inputs under the emulator, on a GPU, and for the float64 reference."""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from fa_inductor.kernels.expr import MARGIN, SCORE, Expr, const, index, load, relative, sym
from fa_inductor.kernels.record import Attention, Band, Chunk, Dense, Documents, KeyPadding, Predicate, Sym

Q, K = index("q"), index("k")
PREFIX = 40


def call(op: str, *args: Any) -> Expr:
    return Expr(op, args)


@dataclass(frozen=True)
class Case:
    """One problem; everything follows from it."""

    name: str
    dtype: str = "bfloat16"
    rows: int = 128
    keys: int = 128
    dims: tuple[int, int] = (64, 64)
    heads: tuple[int, int] = (1, 1)
    batch: int = 1
    lo: int | None = None
    hi: int | None = None
    symbolic: bool = False
    padding: str = ""
    """"", "right", "left", "gaps", "all" (of the first batch entry), "none" (a mask that hides nothing)."""
    nan_slots: bool = False
    documents: bool = False
    dense: str = ""
    """Which of b h q k the mask has."""
    dense_form: str = ""
    """"" is random, "causal", "blocks": whole tiles are hidden, and others seen whole."""
    bias: str = ""
    bias_dtype: str = "bfloat16"
    bias_hidden: int = 0
    """Of so many rows the bias hides every key by the lowest number of its dtype: they are uniform."""
    nan_scores: bool = False
    """Some elements of the bias are NaN."""
    score: str = ""
    """"softcap", "softcap high" (a cap that no score comes near), "alibi", "distance", "relative" (a table by distance)."""
    predicate: bool = False
    chunk: tuple[int, int] | None = None
    sink: str = ""
    scale: float | None = None
    empty: str = "never"
    strides: str = "bhsd"
    """"bhsd", "bshd", "packed"."""
    layout: str = "bshd"
    data: str = "normal"
    """"normal", "outlier", "large"."""
    sms: int = 132
    """Multiprocessors that the emulated schedule is made for; a GPU has its own."""
    teams: int = 48
    """Row blocks or key tiles from which on the emulated schedule makes teams of two row blocks."""
    seed: int = 0


@dataclass
class Problem:
    """The inputs of a case, on the CPU."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    record: Attention
    captures: list[torch.Tensor]
    ints: list[int]
    bias: torch.Tensor | None = None
    table: torch.Tensor | None = None
    """Bias by distance."""
    sink: torch.Tensor | None = None
    seen: torch.Tensor | None = None
    """Mask as bool, broadcastable to [B, H, Sq, Sk]."""


_CAPS = {"softcap": 5.0, "softcap high": 50.0}


def build(c: Case) -> Problem:
    """Draw the inputs of a case; deterministic."""
    g = torch.Generator().manual_seed(1000 + c.seed)
    dtype = getattr(torch, c.dtype)
    (hq, hk), (d, dv) = c.heads, c.dims

    def draw(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=g)
        if c.data == "outlier":
            x = x + torch.randn(shape, generator=g) * 10 * (torch.rand(shape, generator=g) < 1e-2)
        return (x * (8 if c.data == "large" else 1)).to(dtype)

    if c.strides == "packed":
        qkv = draw(c.batch, c.keys, hq + 2 * hk, d).transpose(1, 2)
        q, k, v = qkv[:, :hq, : c.rows], qkv[:, hq:hq + hk], qkv[:, hq + hk:]
    else:
        q, k, v = draw(c.batch, hq, c.rows, d), draw(c.batch, hk, c.keys, d), draw(c.batch, hk, c.keys, dv)
        if c.strides == "bshd":
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    p = Problem(q, k, v, None, [], [])  # type: ignore[arg-type]
    atoms: list[Any] = []
    i, j = torch.arange(c.rows)[:, None], torch.arange(c.keys)[None, :]

    def both(x: torch.Tensor) -> None:
        p.seen = x if p.seen is None else p.seen & x

    def capture(x: torch.Tensor) -> int:
        p.captures.append(x)
        return len(p.captures) - 1

    if c.lo is not None or c.hi is not None:
        ends: list[Any] = [c.lo, c.hi]
        if c.symbolic:
            for n, x in enumerate(ends):
                if x is not None:
                    p.ints.append(x)
                    ends[n] = Sym(len(p.ints) - 1)
        atoms.append(Band(*ends))
        if c.lo is not None:
            both((j >= i + c.lo)[None, None])
        if c.hi is not None:
            both((j <= i + c.hi)[None, None])
    if c.chunk:
        atoms.append(Chunk(*c.chunk))
        both((j // c.chunk[0] == (i + c.chunk[1]) // c.chunk[0])[None, None])
    if c.predicate:
        p.ints.append(PREFIX)
        atoms.append(Predicate(call("or", call("le", K, Q), call("lt", K, sym(len(p.ints) - 1)))))
        both(((j <= i) | (j < PREFIX))[None, None])
    if c.padding:
        pos = torch.arange(c.keys)
        length = torch.randint(1, c.keys + 1, (c.batch, 1), generator=g)
        mask = {"right": pos < length, "left": pos >= c.keys - length, "all": (pos < length).clone(),
                "gaps": torch.rand(c.batch, c.keys, generator=g) < 0.7,
                "none": torch.ones(c.batch, c.keys, dtype=torch.bool)}[c.padding]
        if c.padding == "gaps":
            mask[:, 0] = True
        if c.padding == "all":
            mask[0] = False
        atoms.append(KeyPadding(capture(mask)))
        both(mask[:, None, None, :])
        if c.nan_slots:
            p.k, p.v = (x.masked_fill(~mask[:, None, :, None], math.nan) for x in (p.k, p.v))
    if c.documents:
        ids = torch.randint(0, 3, (c.batch, max(c.rows, c.keys)), generator=g).sort(-1).values
        rows, keys = ids[:, : c.rows].contiguous(), ids[:, : c.keys].to(torch.int32)
        atoms.append(Documents(capture(rows), capture(keys)))
        both(rows[:, None, :, None] == keys[:, None, None, :])

    def shaped(which: str) -> tuple[int, ...]:
        return tuple(n if a in which else 1 for a, n in zip("bhqk", (c.batch, hq, c.rows, c.keys), strict=True))

    if c.dense:
        mask = torch.rand(shaped(c.dense), generator=g) < 0.6
        if c.dense_form == "causal":
            mask = mask.new_ones(shaped(c.dense)).tril()
        elif c.dense_form == "blocks":
            coarse = torch.rand(*shaped(c.dense)[:2], c.rows // 150 + 1, c.keys // 130 + 1, generator=g) < 0.5
            mask = coarse.repeat_interleave(150, 2).repeat_interleave(130, 3)[..., : c.rows, : c.keys].contiguous()
        mask[..., :1] = True
        atoms.append(Dense(capture(mask)))
        both(mask)
    score: Expr = SCORE
    if c.bias:
        p.bias = torch.randn(shaped(c.bias), generator=g).to(getattr(torch, c.bias_dtype))
        p.bias[..., : c.bias_hidden, :] = torch.finfo(p.bias.dtype).min
        if c.nan_scores:
            p.bias = p.bias.masked_fill(torch.rand(p.bias.shape, generator=g) < 0.4 / p.bias.shape[-1], math.nan)
        score = call("add", SCORE, load(capture(p.bias)))
    if c.score in _CAPS:
        cap = const(_CAPS[c.score])
        score = call("mul", call("tanh", call("div", SCORE, cap)), cap)
    elif c.score == "alibi":
        slope = 2.0 ** (-8.0 * torch.arange(1, hq + 1) / hq)
        score = call("add", SCORE, call("mul", load(capture(slope[:, None, None])), call("sub", K, Q)))
    elif c.score == "distance":
        far = call("floordiv", call("sub", Q, K), const(16))
        even = call("eq", call("mod", call("sub", K, Q), const(2)), const(0))
        score = call("add", call("mul", SCORE, call("where", even, const(0.5), const(1.0))),
                     call("mul", call("cast", call("minimum", far, const(3)), "float32"), const(-0.25)))
    elif c.score == "relative":
        p.table = torch.randn(1, hq, 1, c.rows + c.keys - 1 + 2 * MARGIN, generator=g)
        score = call("add", SCORE, relative(capture(p.table)))
    sink = None
    if c.sink:
        p.sink = (torch.randn(hq, generator=g) * 2).to(getattr(torch, c.sink))
        sink = capture(p.sink)
    p.record = Attention(
        q_heads=hq, kv_heads=hk, head_dim=d, head_dim_v=dv, dtype=c.dtype, scale=d**-0.5 if c.scale is None else c.scale,
        score=score, mask=tuple(atoms), fill=-1e9 if c.empty == "mean" else -math.inf,
        empty_rows=c.empty, sink=sink, layout=c.layout)  # type: ignore[arg-type]
    return p


def reference(c: Case, p: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse in float64, by the book."""
    group = c.heads[0] // c.heads[1]
    q, k, v = p.q.double(), p.k.double().nan_to_num(0.0), p.v.double().nan_to_num(0.0)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.transpose(-1, -2) * p.record.scale
    i, j = torch.arange(c.rows)[:, None], torch.arange(c.keys)[None, :]
    if p.bias is not None:
        s = s + p.bias.double()
    if c.score in _CAPS:
        s = torch.tanh(s / _CAPS[c.score]) * _CAPS[c.score]
    elif c.score == "alibi":
        slope = 2.0 ** (-8.0 * torch.arange(1, c.heads[0] + 1) / c.heads[0])
        s = s + (slope[:, None, None] * (j - i)).double()
    elif c.score == "distance":
        s = s * torch.where((j - i) % 2 == 0, 0.5, 1.0).double() + ((i - j) // 16).clamp_max(3).double() * -0.25
    if p.table is not None:
        s = s + p.table[:, :, 0, (j - i) + (c.rows - 1 + MARGIN)].double()
    if p.seen is not None:
        s = s.masked_fill(~p.seen, p.record.fill)
    if p.sink is not None:
        column = p.sink.double()[None, :, None, None].expand(*s.shape[:3], 1)
        s = torch.cat([s, column], -1)
    weights, lse = torch.softmax(s, -1), torch.logsumexp(s, -1)
    out = (weights[..., :-1] if p.sink is not None else weights) @ v
    if c.empty == "zero" and p.seen is not None:
        out = out.masked_fill(~p.seen.any(-1, keepdim=True), 0.0)
    return out, lse


def _numbered(cases: list[Case]) -> dict[str, Case]:
    from dataclasses import replace

    found = {c.name: replace(c, seed=n) for n, c in enumerate(cases)}
    if len(found) != len(cases):
        raise ValueError("two cases of one name")
    return found


CASES: dict[str, Case] = _numbered([
    # The first dozen, and what `CI` names, runs in CI against float64; all run on a GPU and under the emulator.
    Case("plain", rows=128, keys=256),
    Case("causal", rows=200, keys=200, hi=0, dtype="float16"),
    Case("causal d128", rows=130, keys=257, dims=(128, 128), hi=127),
    Case("grouped heads", rows=64, keys=100, heads=(4, 2), batch=2, dtype="float16", strides="bshd"),
    Case("window", rows=150, keys=150, lo=-20, hi=3, dtype="float16", symbolic=True),
    Case("padding", rows=100, keys=260, padding="right", nan_slots=True, batch=2, empty="zero"),
    Case("padding gaps causal", rows=140, keys=140, padding="gaps", nan_slots=True, hi=0, empty="mean"),
    Case("bias", rows=100, keys=120, bias="hqk", heads=(2, 1)),
    Case("sink", rows=96, keys=96, hi=0, lo=-40, sink="bfloat16", heads=(2, 2)),
    Case("dense", rows=70, keys=130, dense="qk", dims=(128, 128), empty="zero"),
    Case("chunk", rows=200, keys=200, chunk=(48, 0), hi=0, dims=(128, 128)),
    Case("softcap", rows=65, keys=129, score="softcap", dims=(96, 96), dtype="float16"),
    # Head dims.
    *(Case(f"dim {d}", rows=70, keys=150, dims=(d, d), hi=80, dtype="float16" if d % 64 else "bfloat16")
      for d in (8, 32, 40, 72, 80, 96, 112, 160, 192, 224, 256)),
    Case("dims 192 128", rows=70, keys=150, dims=(192, 128)),
    Case("dims 64 128", rows=70, keys=150, dims=(64, 128), dtype="float16"),
    Case("dims 128 64", rows=70, keys=150, dims=(128, 64), hi=80),
    # Lengths.
    *(Case(f"length {r} {k}", rows=r, keys=k, dims=(64, 64) if (r + k) % 2 else (128, 128))
      for r, k in ((1, 1), (1, 300), (63, 65), (64, 64), (127, 129), (193, 31), (256, 256), (300, 17), (385, 130))),
    *(Case(f"causal length {r} {k}", rows=r, keys=k, hi=k - r, dims=(64, 64) if (r + k) % 2 else (128, 128),
           dtype="float16") for r, k in ((1, 77), (65, 65), (129, 200), (257, 257), (20, 300))),
    Case("rows without keys", rows=130, keys=70, hi=-60, empty="zero"),
    Case("rows without keys nan", rows=130, keys=70, hi=-60, empty="nan", dims=(128, 128)),
    Case("rows without keys mean", rows=130, keys=70, hi=-60, empty="mean"),
    # Windows and chunks.
    Case("window d128", rows=260, keys=260, lo=-63, hi=0, dims=(128, 128)),
    Case("window both", rows=140, keys=200, lo=-30, hi=30, dims=(96, 96)),
    Case("window low", rows=140, keys=140, lo=-10, dims=(64, 64), dtype="float16"),
    Case("window d256", rows=130, keys=130, lo=-40, hi=10, dims=(256, 256)),
    Case("chunk offset", rows=90, keys=120, chunk=(32, 30), hi=30, dims=(128, 128), dtype="float16"),
    # Key padding.
    Case("padding left", rows=90, keys=200, padding="left", batch=2, empty="mean", dims=(128, 128)),
    Case("padding all", rows=64, keys=100, padding="all", batch=2, empty="zero"),
    Case("padding all nan", rows=64, keys=100, padding="all", batch=2, empty="nan", dims=(96, 96)),
    Case("padding d128", rows=130, keys=300, padding="gaps", nan_slots=True, dims=(128, 128), dtype="float16"),
    Case("padding d256", rows=70, keys=170, padding="right", nan_slots=True, dims=(256, 256)),
    Case("padding grouped", rows=70, keys=140, padding="right", nan_slots=True, heads=(4, 1), batch=2),
    # Bias, scores, predicates, documents, sinks.
    Case("bias float32", rows=70, keys=130, bias="bhqk", bias_dtype="float32", heads=(2, 2), dims=(128, 128)),
    Case("bias float16 odd", rows=70, keys=131, bias="qk", bias_dtype="float16", dtype="float16"),
    Case("bias key", rows=70, keys=130, bias="bk", batch=2, hi=60),
    Case("bias head", rows=70, keys=130, bias="h", heads=(2, 1), dims=(96, 96)),
    Case("bias and padding", rows=70, keys=140, bias="hqk", bias_dtype="float32", padding="right", empty="mean"),
    Case("alibi", rows=100, keys=100, score="alibi", hi=0, heads=(2, 2), dtype="float16"),
    Case("distance", rows=80, keys=120, score="distance", dims=(128, 128)),
    Case("softcap d256", rows=70, keys=130, score="softcap", hi=60, dims=(256, 256)),
    Case("prefix", rows=120, keys=120, predicate=True, dims=(128, 128)),
    Case("documents", rows=150, keys=150, documents=True, hi=0, empty="zero", dims=(128, 128)),
    Case("documents d64", rows=100, keys=120, documents=True, empty="zero", batch=2),
    Case("dense batch", rows=70, keys=100, dense="bhqk", heads=(2, 2), batch=2, empty="zero"),
    Case("sink float32", rows=70, keys=90, sink="float32", heads=(2, 1), dims=(128, 128)),
    Case("sink and padding", rows=64, keys=100, padding="all", batch=2, sink="bfloat16", empty="mean", heads=(2, 1)),
    # Scales, data, strides, layouts.
    Case("negative scale", rows=70, keys=130, scale=-0.125, dims=(128, 128)),
    Case("zero scale", rows=70, keys=130, scale=0.0),
    Case("large scores", rows=100, keys=260, data="large", dims=(128, 128)),
    Case("outliers", rows=100, keys=260, data="outlier", dtype="float16", hi=160),
    Case("packed", rows=120, keys=120, strides="packed", heads=(2, 1), hi=0),
    Case("bhsd out", rows=70, keys=130, layout="bhsd", heads=(2, 2), strides="bshd", dims=(128, 128)),
    Case("many heads", rows=40, keys=50, heads=(12, 1), dims=(32, 32)),
    Case("persistent", rows=128, keys=64, heads=(4, 2), batch=2, dims=(32, 32), dtype="float16", sms=3),
    Case("persistent causal", rows=256, keys=256, heads=(2, 1), hi=0, dims=(128, 128), sms=2),
    # The place of a case is its seed: new ones come last.
    Case("mask of tiles", rows=200, keys=500, dense="qk", dense_form="causal", sms=2, heads=(2, 1)),
    Case("mask of blocks", rows=300, keys=400, dense="hqk", dense_form="blocks", heads=(2, 2), dims=(128, 128), empty="zero",
         padding="right", sms=2),
    Case("wide keys bias", rows=200, keys=150, dims=(192, 128), bias="qk", sms=1, heads=(2, 1)),
    Case("wide keys", rows=200, keys=150, dims=(256, 64), hi=0, sms=1, heads=(2, 1)),
    Case("nan scores", rows=70, keys=150, bias="hqk", bias_dtype="float32", nan_scores=True, dims=(96, 96)),
    Case("persistent padding", rows=70, keys=150, padding="gaps", nan_slots=True, batch=2, heads=(2, 1), empty="zero", sms=1),
    Case("persistent d192", rows=128, keys=100, heads=(3, 3), dims=(192, 192), sms=1, dtype="float16"),
    # Few queries over many keys: keys dealt out to several blocks, and query heads packed into rows.
    Case("split", rows=70, keys=1500),
    Case("split causal", rows=40, keys=1300, hi=1260, dims=(128, 128), dtype="float16", heads=(2, 1)),
    Case("split beyond", rows=30, keys=2100, hi=-5, empty="zero", sms=9),
    Case("split padding d256", rows=20, keys=1000, dims=(256, 256), padding="right", nan_slots=True, empty="nan", batch=2),
    Case("one row", rows=1, keys=1400, heads=(8, 2), dims=(128, 128), batch=2),
    Case("one row window", rows=1, keys=1500, heads=(4, 1), lo=100, hi=1300, symbolic=True, dtype="float16"),
    Case("one row padding", rows=1, keys=300, heads=(6, 2), padding="left", nan_slots=True, batch=2, empty="zero"),
    Case("one row dense", rows=1, keys=200, heads=(4, 2), dense="bhk", empty="zero"),
    Case("one row bias", rows=1, keys=200, heads=(4, 2), bias="hk"),
    Case("one row alibi", rows=1, keys=200, heads=(4, 2), score="alibi"),
    Case("one row logit", rows=1, keys=1300, heads=(4, 2), sink="float32"),
    Case("softcap high", rows=200, keys=250, score="softcap high", hi=60),
    Case("eight keys bias", rows=100, keys=248, bias="hqk", heads=(2, 1), batch=2),
    Case("eight keys bias d128", rows=70, keys=280, bias="bqk", bias_dtype="float16", dims=(128, 128), hi=215, batch=2, sms=1),
    Case("eight keys mask", rows=200, keys=264, dense="bqk", dense_form="blocks", heads=(2, 1), batch=2, empty="zero", sms=2),
    Case("mean of a window", rows=90, keys=200, lo=-40, hi=10, padding="right", empty="mean", batch=2),
    # Captures read without a test of their addresses: by distance beyond both ends, and tiles that are not whole.
    Case("relative", rows=200, keys=256, score="relative", heads=(2, 1)),
    Case("relative causal", rows=150, keys=237, score="relative", hi=87, heads=(2, 2), dims=(128, 128), dtype="float16"),
    Case("relative padding", rows=237, keys=150, score="relative", padding="right", nan_slots=True, batch=2, empty="zero"),
    Case("relative d96", rows=70, keys=131, score="relative", dims=(96, 96), hi=61),
    Case("relative d256", rows=65, keys=131, score="relative", dims=(256, 256)),
    Case("relative long", rows=40, keys=1333, score="relative", dims=(128, 128), heads=(2, 1)),
    Case("relative one row", rows=1, keys=203, score="relative", heads=(4, 2)),
    Case("bias of tiles", rows=200, keys=330, bias="hqk", heads=(2, 1)),
    Case("bias of tiles float32", rows=140, keys=300, bias="qk", bias_dtype="float32", dims=(128, 128), hi=160),
    Case("bias of tiles odd", rows=70, keys=301, bias="hqk", bias_dtype="float16", dtype="float16", heads=(2, 2), dims=(96, 96)),
    Case("bias and dense", rows=70, keys=300, bias="qk", dense="qk", empty="zero", dims=(128, 128)),
    Case("split bias hidden", rows=7, keys=2257, bias="bqk", bias_hidden=3, heads=(2, 1), batch=2),
    Case("causal one item", rows=30, keys=70, hi=40, heads=(1, 1)),
    # Clusters: two row blocks, of which one may be missing, two heads of a group, and blocks without a team.
    Case("team of rows", rows=250, keys=500, dims=(128, 128), heads=(3, 3), sms=4),
    Case("team of rows odd", rows=300, keys=200, dims=(256, 256), heads=(2, 2), sms=2, teams=3),
    Case("team of rows causal", rows=700, keys=720, hi=20, dims=(128, 128), heads=(3, 3), sms=4, teams=2),
    Case("team of rows causal d256", rows=390, keys=390, hi=-30, dims=(256, 256), sms=2, teams=2, empty="zero", dtype="float16"),
    Case("team of heads", rows=200, keys=330, dims=(128, 128), heads=(4, 2), batch=2, sms=4, score="softcap"),
    Case("team of heads causal", rows=300, keys=310, hi=10, dims=(128, 128), heads=(8, 2), sms=4, sink="float32"),
    Case("team of heads window", rows=300, keys=300, lo=-130, hi=0, dims=(96, 96), heads=(4, 2), batch=2, sms=4),
    Case("no team", rows=150, keys=200, dims=(256, 256), heads=(3, 3), hi=50, sms=4),
    Case("no team odd", rows=70, keys=200, dims=(192, 128), heads=(3, 3), sms=132),
])
CI = [*list(CASES)[:12], "relative causal", "bias of tiles"]
