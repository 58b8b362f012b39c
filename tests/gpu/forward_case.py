"""One problem for the forward kernel: a frozen `Case`, the tensors it stands for, and which keys each row sees.

Everything is derived from the case and its seed.  On the device ``meta`` no number is drawn, which is enough for the
record and for the variant of the kernel that runs it.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from forward_data import operands

from fa_inductor.kernels import api
from fa_inductor.kernels.expr import MARGIN, SCORE, Expr, const, index, load, relative, sym
from fa_inductor.kernels.record import Attention, Band, Chunk, Dense, Documents, KeyPadding, Predicate, Sym
from fa_inductor.kernels.sm90.variant import Forward

NEG_INF = -math.inf
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
    """Which of b h q k the mask tensor has; "" is none."""
    dense_form: str = ""
    """"" is random, "causal", "blocks": whole tiles are hidden, and others seen whole."""
    bias: str = ""
    bias_dtype: str = "bfloat16"
    bias_mask: str = ""
    """"inf" or "min": the bias is a causal mask with holes that adds -inf or the dtype's lowest value; "" is random."""
    score: str = ""
    """"softcap", "alibi", "distance" (a program of where, cast, floordiv, mod), "relative" (a table by distance) or "" for
    none."""
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
    """"bhsd", "bshd", "sbhd", "packed" (slices of one qkv tensor), "expand" (K and V of one head and batch), "odd"
    (unaligned), "gap" (between rows), "step" (every other row), "dim first" (last dim not contiguous), "far" (batch
    entries more than 2^31 elements apart)."""
    data: str = "normal"
    """A kind of `forward_data.PLAIN` or `forward_data.SHAPED`."""
    seed: int = 0
    kind: str = ""
    """What is special about the numbers, for cases that are drawn: the data, or the scale."""


def inputs(c: Case, device: str = "cuda") -> tuple[Any, ...]:
    """q, k, v, record, captures, ints on a device."""
    g = None if device == "meta" else torch.Generator(device).manual_seed(c.seed)
    hq, hk = c.heads
    d, dv = c.dims
    q, k, v = operands(c, g, device)
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
        seen = torch.rand(c.rows, c.keys, generator=g, device=device) < 0.5
        atoms.append(Predicate(call("or", load(capture(seen)), call("le", K, Q))))
    if c.padding:
        n = 1 if c.padding == "shared" else c.batch
        pos = torch.arange(c.keys, device=device)
        length = torch.randint(1, c.keys + 1, (n, 1), generator=g, device=device)
        if c.padding == "left":
            mask = pos >= c.keys - length
        elif c.padding == "gaps":
            mask = torch.rand(n, c.keys, generator=g, device=device) < 0.7
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
        ids = torch.randint(0, 3, (c.batch, max(c.rows, c.keys)), generator=g, device=device).sort(-1).values
        atoms.append(Documents(capture(ids[:, : c.rows]), capture(ids[:, : c.keys].to(torch.int32))))

    def shaped(which: str) -> tuple[int, ...]:
        return tuple(n if a in which else 1 for a, n in zip("bhqk", (c.batch, hq, c.rows, c.keys), strict=True))

    if c.dense:
        mask = torch.rand(shaped(c.dense), generator=g, device=device) < 0.6
        if c.dense_form == "causal":
            mask = mask.new_ones(shaped(c.dense)).tril()
        elif c.dense_form == "blocks":
            coarse = torch.rand(*shaped(c.dense)[:2], c.rows // 150 + 1, c.keys // 130 + 1, generator=g, device=device) < 0.5
            mask = coarse.repeat_interleave(150, 2).repeat_interleave(130, 3)[..., : c.rows, : c.keys].contiguous()
        if c.empty == "never":
            mask[..., :1] = True
        atoms.append(Dense(capture(mask)))
    score: Expr = SCORE
    if c.bias:
        b = torch.randn(shaped(c.bias), generator=g, device=device).to(getattr(torch, c.bias_dtype))
        if c.bias_mask:
            hidden = torch.ones(c.rows, c.keys, dtype=torch.bool, device=device).triu(1)
            hidden = hidden | (torch.rand(c.keys, generator=g, device=device) < 0.3)
            hidden[:, 0] = False
            if c.bias_mask == "min":
                hidden[:3] = True  # rows that are hidden as a whole are uniform then
            low = NEG_INF if c.bias_mask == "inf" else torch.finfo(b.dtype).min
            b = torch.zeros_like(b).masked_fill(hidden, low)
        score = Expr("add", (SCORE, load(capture(b))))
    if c.score == "softcap":
        score = call("mul", call("tanh", call("div", SCORE, const(20.0))), const(20.0))
    elif c.score == "alibi":
        slope = 2.0 ** (-8.0 * torch.arange(1, hq + 1, device=device) / hq)
        score = call("add", SCORE, call("mul", load(capture(slope[:, None, None])), call("sub", K, Q)))
    elif c.score == "distance":
        far = call("floordiv", call("sub", Q, K), const(16))
        even = call("eq", call("mod", call("sub", K, Q), const(2)), const(0))
        score = call("add", call("mul", SCORE, call("where", even, const(0.5), const(1.0))),
                     call("mul", call("cast", call("minimum", far, const(3)), "float32"), const(-0.25)))
    elif c.score == "relative":
        table = torch.randn(1, hq, 1, c.rows + c.keys - 1 + 2 * MARGIN, generator=g, device=device)
        score = call("add", SCORE, relative(capture(table)))
    sink = None
    if c.sink:
        sink = capture((torch.randn(hq, generator=g, device=device) * 3).to(getattr(torch, c.sink)))
    record = Attention(
        q_heads=hq, kv_heads=hk, head_dim=d, head_dim_v=dv, dtype=c.dtype,
        scale=d**-0.5 if c.scale is None else c.scale, score=score, mask=tuple(atoms), fill=c.fill,
        empty_rows=c.empty, sink=sink, layout=c.layout,  # type: ignore[arg-type]
    )
    return q, k, v, record, captures, ints


def visible(c: Case, record: Attention, captures: list[torch.Tensor], device: Any) -> torch.Tensor | None:
    """The mask of a case as a bool tensor broadcastable to [B, Hq, Sq, Sk]; None when there is none."""
    seen: torch.Tensor | None = None
    i = torch.arange(c.rows, device=device)[:, None]
    j = torch.arange(c.keys, device=device)[None, :]

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


def variant(c: Case) -> Forward:
    """The specialisation that runs a case of several rows, not split; needs no GPU."""
    _, _, _, record, captures, _ = inputs(c, "meta")
    return api.variant_of(record, captures)


def launched(c: Case, sms: int = 132) -> Forward:
    """The specialisation that a GPU of so many multiprocessors launches: heads of one row packed, few rows split."""
    q, _, _, record, captures, ints = inputs(c, "meta")
    return api.expected(record, q, c.keys, captures, ints, sms)
