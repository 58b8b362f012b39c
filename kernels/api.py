"""Attention kernels: which records run where, and how to call them.

Importing this module imports torch but not the DSL; the DSL is loaded when a variant is first compiled.
"""
from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import metadata
from typing import Any

import torch

from . import ahead, cache, launch, one_row
from .expr import MARGIN, READS, SCORE, Expr
from .record import Attention, Band, Chunk, Dense, Documents, KeyPadding, Predicate, SInt, Sym
from .sm90.variant import ALONE, HEADS, MAX_CAPTURES, MAX_INTS, ROWS, Capture, Forward, padded

DSL = "nvidia-cutlass-dsl"
DSL_VERSIONS = ((4, 8), (5, 0))
"""First version that is known to work, and the first that is not."""

DEVICE = "cuda"
"""Type of the device that the kernels run on."""
_FAR = 1 << 29
"""Offsets are clamped to this: beyond every key, and sums of a few of them still fit 32 bits."""
_L2_BYTES = 32 << 20
"""K and V that a section of heads walks together."""
_SHARE = 4
"""Key tiles that a share of a split row has at least."""
_FLOATS = ("bfloat16", "float16", "float32")
_CAPTURES = (*_FLOATS, "bool", "int64", "int32", "int16", "int8", "uint8")
_CASTS = ("float32", "float64", "bfloat16", "float16", "int32", "int64", "bool")
_MAX_NODES = 64
"""Nodes of a program that is unrolled over a tile."""


def _version(text: str) -> tuple[int, int]:
    major, minor, *_ = text.split(".")
    return int(major), int(minor)


def _installed(*names: str) -> str:
    """Version of the first of these distributions that is there; the libraries also come without the umbrella."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise metadata.PackageNotFoundError(names[0])


@lru_cache(maxsize=1)
def available() -> str | None:
    """None where the kernels can be compiled, else a sentence that says what is missing."""
    try:
        found = _installed(DSL, f"{DSL}-libs-base")
        _installed("apache-tvm-ffi")
    except metadata.PackageNotFoundError as e:
        return f"{e.name or DSL} is not installed"
    low, high = DSL_VERSIONS
    try:
        known = low <= _version(found) < high
    except ValueError:
        known = False
    return None if known else f"{DSL} {found} is not known to work (need >={low[0]}.{low[1]},<{high[0]}.{high[1]})"


@lru_cache(maxsize=4096)
def supports(record: Attention, arch: str) -> str | None:
    """None when the kernels of `arch` (``sm_90``) run this record, else a sentence why not.

    Covers what the record alone decides; `attention` raises ValueError for tensors that do not match it.
    """
    if arch not in ("sm_90", "sm_90a"):
        return f"no kernels for {arch}"
    if record.dtype not in ("bfloat16", "float16"):
        return f"dtype {record.dtype}; the kernels take bfloat16 and float16"
    for dim in (record.head_dim, record.head_dim_v):
        if dim % 8 or not 8 <= dim <= 256:
            return f"head dim {dim}; the kernels take multiples of 8 up to 256"
    if padded(record.head_dim) < padded(record.head_dim_v) and record.head_dim_v > 128:
        return f"head dims {record.head_dim} and {record.head_dim_v}; V may be wider than K only up to 128"
    if not abs(record.scale) < 3.4e38:
        return f"scale {record.scale} is not finite in float32"
    once: list[type] = []
    for atom in record.mask:
        if not isinstance(atom, Band | Predicate):
            if type(atom) in once:
                return f"more than one {type(atom).__name__} atom"
            once.append(type(atom))
    programs = _programs(record)
    nodes = {e for p in programs for e in p.walk()}
    if len(nodes) > _MAX_NODES:
        return f"score programs of {len(nodes)} nodes; the kernels take {_MAX_NODES}"
    for e in nodes:
        if e.op == "const" and isinstance(e.args[0], int) and not -(1 << 31) <= e.args[0] < 1 << 31:
            return f"constant {e.args[0]} does not fit 32 bits"
        if e.op == "cast" and e.args[1] not in _CASTS:
            return f"cast to {e.args[1]} in a score program"
    if any(e.op == "score" for p in programs[1:] for e in p.walk()):
        return "a mask that depends on the score"
    loads, syms = _leaves(programs)
    if any(e.op == "load" and e.args[0] in p.relative() for p in programs for q in programs for e in q.walk()):
        return "a tensor read by position and by distance"
    if len(loads) > MAX_CAPTURES or len(syms) > MAX_INTS:
        return f"score programs read {len(loads)} tensors and {len(syms)} integers; {MAX_CAPTURES} and {MAX_INTS} are possible"
    return None


def _programs(record: Attention) -> tuple[Expr, ...]:
    """The score program, then the predicates."""
    return (record.score, *(a.expr for a in record.mask if isinstance(a, Predicate)))


def _leaves(programs: Sequence[Expr]) -> tuple[list[int], list[int]]:
    """Captures and syms that the programs read, in the order in which the kernel gets them."""
    nodes = [e for p in programs for e in p.walk()]
    return (sorted({e.args[0] for e in nodes if e.op in READS}), sorted({e.args[0] for e in nodes if e.op == "sym"}))


def _renumber(e: Expr, loads: list[int], syms: list[int]) -> Expr:
    if e.op in READS:
        return Expr(e.op, (loads.index(e.args[0]),))
    if e.op == "sym":
        return Expr("sym", (syms.index(e.args[0]),))
    return Expr(e.op, tuple(_renumber(a, loads, syms) if isinstance(a, Expr) else a for a in e.args))


@lru_cache(maxsize=1024)
def _template(record: Attention) -> tuple[Forward, list[int], list[int]]:
    """Variant of a record without what its captures decide; captures and syms of its programs."""
    bands = [a for a in record.mask if isinstance(a, Band)]
    kinds = {type(a) for a in record.mask}
    programs = _programs(record)
    loads, syms = _leaves(programs)
    score, *predicates = (_renumber(p, loads, syms) for p in programs)
    empty = record.empty_rows
    if empty == "never" or (record.sink is not None and empty != "mean"):
        empty = "nan"  # no such row (a sink gives every row weight): the code without a special case
    variant = Forward(
        dtype=record.dtype,  # type: ignore[arg-type]
        dim=padded(record.head_dim),
        dim_v=padded(record.head_dim_v),
        band_lo=any(a.lo is not None for a in bands),
        band_hi=any(a.hi is not None for a in bands),
        padding=KeyPadding in kinds,
        dense=Dense in kinds,
        chunk=Chunk in kinds,
        score=None if score == SCORE else score,
        predicates=tuple(predicates),
        positive_scale=record.scale > 0,
        empty=empty,
    )
    return variant, loads, syms


def _capture(x: torch.Tensor, relative: bool) -> Capture:
    """How the kernel reads a capture; torch aligns shapes on the right."""
    name = _name(x, _CAPTURES)
    if relative:
        return Capture(name, "bhqk", True, relative=True)
    axes = "".join(a for a, n, s in zip("bhqk"[4 - x.dim():], x.shape, x.stride(), strict=True) if n > 1 and s)
    unit = axes.endswith("k") and x.stride(-1) == 1 and name in ("bool", *_FLOATS)
    halves = unit and name in ("bfloat16", "float16")
    return Capture(name, axes, unit, unit and name != "bool" and _grouped(x, 2), halves and _grouped(x, 8))


def _grouped(x: torch.Tensor, of: int) -> bool:
    """Whether so many neighbours in a row at a time are aligned and none is cut by its end."""
    rows = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    return x.shape[-1] % of == 0 and x.data_ptr() % (of * x.element_size()) == 0 and not any(s % of for n, s in rows if n > 1)


@lru_cache(maxsize=1024)
def _relative(record: Attention) -> frozenset[int]:
    """Captures that are tables by distance."""
    return frozenset().union(*(p.relative() for p in _programs(record)))


def variant_of(record: Attention, captures: Sequence[torch.Tensor] = ()) -> Forward:
    """The specialisation that runs `record`; captures give dtypes and, for programs, the axes they change along.

    Raises:
        ValueError: a capture has a dtype that the kernels do not read.
    """
    variant, loads, _ = _template(record)
    if not captures:
        return variant
    changes: dict[str, Any] = {}
    if loads:
        relative = _relative(record)
        changes["captures"] = tuple(_capture(captures[i], i in relative) for i in loads)
    if record.sink is not None:
        changes["sink"] = _name(captures[record.sink], _FLOATS)
    for atom in record.mask:
        if isinstance(atom, Dense):
            x = captures[atom.capture]
            # Of a mask that is broadcast over keys there is one byte a row.
            changes["dense_wide"] = x.stride(-1) == 1 and _grouped(x, 8)
        if isinstance(atom, Documents):
            ids = (_name(captures[atom.q], _CAPTURES), _name(captures[atom.k], _CAPTURES))
            changes["documents"] = "int64" if "int64" in ids else "int32"
    return replace(variant, **changes) if changes else variant


def _name(x: torch.Tensor, allowed: tuple[str, ...]) -> str:
    name = str(x.dtype).removeprefix("torch.")
    if name not in allowed:
        raise ValueError(f"capture of dtype {x.dtype}; it must be one of {allowed}")
    return name


def expected(
    record: Attention, q: torch.Tensor, keys: int, captures: Sequence[torch.Tensor], ints: Sequence[int], sms: int
) -> Forward:
    """The specialisation that a GPU of so many multiprocessors launches for tensors like these, of the device meta too: heads
    of one row packed, few rows split."""
    packed = one_row.packed(record) if q.shape[2] == 1 else None
    if packed is not None:
        first, last = one_row.key_range(record, ints, keys)
        if first < last:
            q, captures = one_row.pack(record, q, captures, keys, first, last)
            record, keys = packed, last - first
    batch, heads, rows, _ = q.shape
    return launched(variant_of(record, captures), batch, heads, rows, record.group, keys, sms)[0]


def launched(
    variant: Forward, batch: int, heads: int, rows: int, group: int, keys: int, sms: int
) -> tuple[Forward, int]:
    """What of a variant a problem of this size is launched with, and how many blocks share the keys of an item."""
    shares = splits(variant, batch, heads, rows, keys, sms)
    if shares > 1:
        return replace(variant, split=True), shares
    m_blocks = -(-rows // variant.tile.rows)
    if variant.may_team and variant.dim != _SPILLS:
        if group % 2 == 0:
            return replace(variant, team=HEADS), 1
        if not variant.uneven and (m_blocks % 2 == 0 or m_blocks >= _TEAM):
            return replace(variant, team=ROWS), 1
    return variant, 1


_compiled: dict[Forward, Any] = {}
_compile_lock = threading.Lock()


def compile_variant(variant: Forward, arch: str = "sm_90") -> Any:
    """Compile for `arch`, on any machine.  Thread-safe; not cached (see `attention`).

    Raises:
        ValueError: no kernels for this arch.
    """
    if arch not in ("sm_90", "sm_90a"):
        raise ValueError(f"no kernels for {arch}")
    from .sm90.compile import compile_forward

    return compile_forward(variant)


def _kernel(variant: Forward) -> Any:
    fn = _compiled.get(variant)
    if fn is None:
        with _compile_lock:
            fn = _compiled.get(variant)
            if fn is None:
                fn = _compiled[variant] = cache.load_or_compile(
                    ahead.words_of(variant), lambda: compile_variant(variant))
    return fn


def _at_hand(variant: Forward) -> Forward:
    """The variant, or the one that does the same with or without a team of row blocks where only that one is compiled: another
    length is no new compile."""
    if variant.team != HEADS and variant not in _compiled:
        other = replace(variant, team=ALONE if variant.team else ROWS)
        if other in _compiled:
            return other
    return variant


def variants() -> list[Forward]:
    """Specialisations that are cross-compiled in CI: every tile, every feature, both dtypes."""
    found = [Forward("bfloat16", d, dv, empty="nan") for d, dv in
             ((32, 32), (64, 64), (96, 96), (128, 128), (160, 160), (192, 128), (192, 192), (224, 224), (256, 256))]
    score = Expr("score")

    def call(op: str, *args: object) -> Expr:
        return Expr(op, args)

    bias = call("add", score, call("load", 0))
    softcap = call("mul", call("tanh", call("div", score, call("const", 50.0))), call("const", 50.0))
    q, k = call("index", "q"), call("index", "k")
    alibi = call("add", score, call("mul", call("load", 0), call("sub", k, q)))
    prefix = call("or", call("le", k, q), call("lt", k, call("sym", 0)))
    for d, dv in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)):
        found += [
            Forward("bfloat16", d, dv, band_hi=True, empty="nan"),
            Forward("float16", d, dv, band_lo=True, band_hi=True, empty="zero"),
            Forward("bfloat16", d, dv, band_hi=True, padding=True, empty="mean"),
        ]
    found += [Forward("bfloat16", d, d, split=True, empty="nan") for d in (64, 128, 256)]
    found += [replace(v, team=team) for v in found if v.may_team and v.dim != _SPILLS for team in ((HEADS,) if v.uneven else (ROWS, HEADS))]
    found += [
        Forward("bfloat16", 128, 128, padding=True, split=True, empty="zero"),
        Forward("bfloat16", 128, 128, positive_scale=False, empty="nan"),
        Forward("bfloat16", 128, 128, score=bias, captures=(Capture("bfloat16", unit=True, pairs=True),), empty="nan"),
        Forward("bfloat16", 128, 128, score=bias, captures=(Capture("float32"),), empty="nan"),
        Forward("bfloat16", 64, 64, score=bias, captures=(Capture("float32", "hqk", True, True),), padding=True, empty="mean"),
        *(Forward("bfloat16", d, dv, score=call("add", score, call("relative", 0)),
                  captures=(Capture("float32", "bhqk", True, relative=True),), empty="nan")
          for d, dv in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))),
        *(Forward("bfloat16", d, dv, score=bias, captures=(Capture("bfloat16", "hqk", True, True, True),), empty="nan")
          for d, dv in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))),
        *(Forward("bfloat16", d, d, dense=True, dense_wide=True, empty="zero") for d in (64, 96, 128, 256)),
        *(Forward("bfloat16", d, d, dense=True, dense_wide=True, padding=True, band_hi=True, empty="zero") for d in (64, 128, 256)),
        *(Forward("bfloat16", d, d, dense=True, dense_wide=True, score=bias, captures=(Capture("bfloat16", "hqk", True, True, True),),
                  empty="nan") for d in (64, 128, 256)),
        *(Forward("bfloat16", d, dv, score=bias, captures=(Capture("float32", "hqk", True, True),), empty="nan")
          for d, dv in ((96, 96), (128, 128), (192, 128), (256, 256))),
        *(Forward("bfloat16", d, d, score=bias, captures=(Capture("bfloat16", unit=True, pairs=True),), padding=True, empty="nan")
          for d in (64, 128)),
        *(Forward("bfloat16", d, d, dense=True, score=bias, captures=(Capture("bfloat16", unit=True, pairs=True),), empty="nan")
          for d in (64, 128, 256)),
        *(Forward("bfloat16", d, dv, dense=True, padding=True, empty="zero")
          for d, dv in ((64, 64), (96, 96), (192, 128), (256, 256))),
        *(Forward("bfloat16", d, dv, documents="int64", band_hi=True, empty="zero")
          for d, dv in ((64, 64), (96, 96), (192, 128), (256, 256))),
        *(Forward("bfloat16", d, d, band_hi=True, score=softcap, empty="nan") for d in (64, 96, 128, 256)),
        Forward("float16", 64, 64, band_hi=True, score=alibi, captures=(Capture("float32", "h"),), empty="nan"),
        Forward("bfloat16", 128, 128, predicates=(prefix,), empty="nan"),
        Forward("bfloat16", 128, 128, band_hi=True, chunk=True, empty="nan"),
        Forward("bfloat16", 128, 128, dense=True, empty="zero"),
        Forward("bfloat16", 128, 128, documents="int32", band_hi=True, empty="zero"),
        Forward("bfloat16", 64, 64, band_hi=True, band_lo=True, sink="bfloat16", empty="nan"),
        Forward("bfloat16", 64, 64, band_hi=True, padding=True, sink="bfloat16", empty="mean"),
    ]
    return found


def _ready(x: torch.Tensor) -> torch.Tensor:
    """x as the copy engine can read it: last dim contiguous, pointer and strides multiples of 16 bytes."""
    s0, s1, s2, s3 = x.stride()
    if s3 == 1 and not ((s0 | s1 | s2) & 7) and not x.data_ptr() & 15:
        return x
    if s3 == 1 and not x.data_ptr() & 15:
        # The stride of a dim of size 1 means nothing, and torch leaves anything in it.
        stride = [0 if n == 1 else s for n, s in zip(x.shape[:3], (s0, s1, s2), strict=True)]
        if not (stride[0] | stride[1] | stride[2]) & 7:
            return x.as_strided(x.shape, (*stride, 1))
    return x.clone(memory_format=torch.contiguous_format)


def _even(x: torch.Tensor) -> torch.Tensor:
    """Strides of dims of size 1 as 0: they mean nothing, but the kernel may have been promised even ones."""
    if 1 not in x.shape[:3]:
        return x
    return x.as_strided(x.shape, [0 if n == 1 and i < 3 else s for i, (n, s) in enumerate(zip(x.shape, x.stride(), strict=True))])


def _int(x: SInt, ints: Sequence[int]) -> int:
    value = ints[x.i] if isinstance(x, Sym) else x
    return max(-_FAR, min(_FAR, int(value)))


@lru_cache(maxsize=64)
def _sm_count(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    record: Attention,
    captures: Sequence[torch.Tensor] = (),
    ints: Sequence[int] = (),
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention forward on the GPU of `q`, on torch's current stream of that device.

    q ``[B, Hq, Sq, D]``, k ``[B, Hkv, Sk, D]``, v ``[B, Hkv, Sk, Dv]``, bfloat16 or float16, any strides (copied when
    the last dim is not contiguous or not 16-byte aligned); captures and ints as the record says.  Returns out
    ``[B, Hq, Sq, Dv]`` in the record's memory layout (or in `out`) and lse ``[B, Hq, Sq]`` float32, natural log.

    With a `KeyPadding` mask, NaN or Inf in padded slots of K and V does not reach the output.  Under the other masks
    the same holds for K, and for V in tiles of keys that no row of a query tile can see.

    Raises:
        ValueError: the record is not supported, or a tensor does not fit it.
        whatever the DSL raises when the first call of a variant compiles it.
    """
    plan = _plans.get(id(record)) or _plan(record)
    if out is None:
        again = plan.memo.call(q, k, v, captures, ints)
        if again is not None:
            return again  # type: ignore[return-value]
    batch, heads, rows, dim = shape = q.shape
    _, kv_heads, keys, dim_v = v.shape
    dtype, device = q.dtype, q.device
    if (heads, kv_heads, dim, dim_v) != plan.sizes:
        raise ValueError(f"q {tuple(shape)}, v {tuple(v.shape)} are not of a record {record.describe()}")
    if k.shape != (batch, kv_heads, keys, dim) or v.shape[0] != batch:
        raise ValueError(f"q {tuple(shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not match")
    if dtype != plan.dtype or k.dtype != dtype or v.dtype != dtype:
        raise ValueError(f"q, k, v are {dtype}, {k.dtype}, {v.dtype}; the record says {record.dtype}")
    if device.type != DEVICE or k.device != device or v.device != device or any(x.device != device for x in captures):
        raise ValueError(f"q, k, v and captures must be on one CUDA device: {device}, {k.device}, {v.device}, "
                         f"{[str(x.device) for x in captures]}")
    fresh = False
    if out is None:
        stride = (heads * rows * dim_v, dim_v, heads * dim_v, 1) if plan.bshd else (heads * rows * dim_v, rows * dim_v, dim_v, 1)
        out = target = torch.empty_strided((batch, heads, rows, dim_v), stride, dtype=dtype, device=device)
        fresh = True
    elif out.shape != (batch, heads, rows, dim_v) or out.dtype != dtype or out.device != device:
        raise ValueError(f"out is {tuple(out.shape)} {out.dtype}, not {(batch, heads, rows, dim_v)} {dtype}")
    else:
        target = _ready(out)
    lse = torch.empty((batch, heads, rows), dtype=torch.float32, device=device)
    known = (plan.memo, q, k, v, out, lse, captures) if fresh else None
    if batch == 0 or rows == 0:
        return out, lse
    if keys == 0:
        return _no_keys(record, captures, out, lse)
    if rows == 1 and plan.packed is not None:
        first, last = one_row.key_range(record, ints, keys)
        if first == last:
            return _no_keys(record, captures, out, lse)
        whole = (q, out, lse) if fresh else None
        q, captures = one_row.pack(record, q, captures, keys, first, last)
        k, v = k[:, :, first:last], v[:, :, first:last]
        if out.is_contiguous():
            target = _ready(out.view(batch, kv_heads, record.group, dim_v))
        else:
            target = torch.empty((batch, kv_heads, record.group, dim_v), dtype=dtype, device=device)
            known = None
        _run(_plans.get(id(plan.packed)) or _plan(plan.packed), q, k, v, captures, ints, target,
             lse.view(batch, kv_heads, record.group), known, whole)
        target = target.view(out.shape)
    else:
        _run(plan, q, k, v, captures, ints, target, lse, known)
    if target is not out and target.data_ptr() != out.data_ptr():
        out.copy_(target)
    return out, lse


_Known = tuple[launch.Memo, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]
"""Where to hold the launch of a call, and the call's q, k, v, out, lse and captures as they came."""


def _run(
    plan: _Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, captures: Sequence[torch.Tensor], ints: Sequence[int],
    target: torch.Tensor, lse: torch.Tensor, known: _Known | None,
    whole: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Launch a kernel that writes `target` and `lse`; the tensors fit the plan's record, and there are rows and keys.

    whole: q, out and lse before heads were packed into rows, where the kernel may get those: it can do that by itself.
    """
    record, device = plan.record, q.device
    batch, heads, rows, _ = q.shape
    keys, dim_v = v.shape[2:]
    read: list[Any] = [None] * _OPTIONAL
    source: dict[int, int] = {}  # argument -> the capture that it is a view of
    lo, hi, chunk, offset = plan.lo, plan.hi, 1, 0
    if plan.plain:
        variant, values = plan.variant, _ZEROS
    else:
        variant = variant_of(record, captures) if captures else plan.variant
        for atom in record.mask:
            if isinstance(atom, Band):
                if atom.lo is not None:
                    lo = max(lo, _int(atom.lo, ints))
                if atom.hi is not None:
                    hi = min(hi, _int(atom.hi, ints))
            elif isinstance(atom, Chunk):
                chunk, offset = max(1, _int(atom.size, ints)), _int(atom.offset, ints)
            elif isinstance(atom, KeyPadding):
                source[0] = atom.capture
                read[0] = _bool(captures[atom.capture]).expand(batch, keys)
                read[1] = torch.empty((batch, 3), dtype=torch.int32, device=device)
            elif isinstance(atom, Dense):
                source[2] = atom.capture
                read[2] = _even(_bool(captures[atom.capture]).expand(batch, heads, rows, keys))
            elif isinstance(atom, Documents):
                source[3], source[4] = atom.q, atom.k
                ids = torch.int64 if variant.documents == "int64" else torch.int32
                read[3] = captures[atom.q].to(ids).expand(batch, rows)
                theirs = captures[atom.k].to(ids)
                read[4] = (theirs if theirs.stride(-1) == 1 else theirs.contiguous()).expand(batch, keys)
        if record.sink is not None:
            source[5] = record.sink
            read[5] = captures[record.sink]
        if variant.empty == "mean":
            read[6] = torch.empty((batch, v.shape[1], dim_v), dtype=torch.float32, device=device)
        if variant.listed:
            each = variant.padding or variant.documents is not None or read[2].stride(0) != 0
            sizes = (batch if each else 1, heads if variant.dense and read[2].stride(1) != 0 else 1)
            tile = variant.tile
            read[7] = torch.empty((*sizes, -(-rows // tile.rows), 1 - keys // -tile.keys), dtype=torch.int32, device=device)
        relative = _relative(record) if plan.loads else ()
        for n, i in enumerate(plan.loads):
            source[8 + n] = i
            x = captures[i]
            if i in relative:
                x = x if x.stride(3) == 1 else x.contiguous()
                read[8 + n] = x.expand(batch, heads, 1, rows + keys - 1 + 2 * MARGIN)
                continue
            read[8 + n] = _even(x.expand(batch, heads, rows, keys))
        values = [_narrow(ints[i]) for i in plan.syms] + [0] * (MAX_INTS - len(plan.syms))

    size = (variant, batch, rows, keys, device.index)
    chosen = plan.launches.get(size)
    if chosen is None:
        variant, shares = launched(variant, batch, heads, rows, record.group, keys, _sm_count(device.index))
        variant = _at_hand(variant)
        section, blocks = schedule(variant, batch, heads, record.group, rows, keys, device.index)
        if shares > 1:
            section, blocks = shares, blocks * shares
        if len(plan.launches) > 1000:
            plan.launches.clear()
        chosen = plan.launches[size] = (_kernel(variant), section, blocks, shares, variant.counted)
    fn, section, blocks, shares, counted = chosen
    tickets = launch.counter(device) if counted else None
    parts = None
    if shares > 1:
        parts = torch.empty((shares * batch, heads, rows, dim_v + 4), dtype=torch.float32, device=device)
    pack = 1
    if whole is not None:
        pack, (q, target, lse) = rows, whole
    args = (_ready(q), _ready(k), _ready(v), target, lse, *read, *values, plan.scale, plan.fill, lo, hi, chunk, offset,
            section, tickets, parts, blocks, pack)
    if device.index == launch.current_device():
        fn(*args)
    else:
        with torch.cuda.device(device):
            fn(*args)
    if known is not None:
        _keep(known, ints, fn, args, source)


def _keep(known: _Known, ints: Sequence[int], fn: Any, args: Sequence[Any], source: dict[int, int]) -> None:
    """Hold what `_run` worked out, unless an argument was computed from the inputs: by a copy, a conversion, a mean."""
    memo, q, k, v, out, lse, captures = known
    given = (q, k, v, out, lse, *captures)
    made: list[launch.View] = []
    rest: list[Any] = list(args)
    scratch: list[tuple[int, launch.Allocation]] = []
    counter: int | None = None
    for place, x in enumerate(args):
        if not isinstance(x, torch.Tensor):
            continue
        rest[place] = None  # or the memory of this call would be held
        i = place - launch.CAPTURES
        if i == _TICKETS:
            counter = place
            continue
        if i in _SCRATCH:
            scratch.append((place, (tuple(x.shape), x.stride(), x.dtype)))
            continue
        from_ = place if place < launch.CAPTURES else launch.CAPTURES + source[i] if i in source else None
        view = None if from_ is None else launch.view_of(place, x, from_, given[from_])
        if view is None:
            return
        if place >= launch.CAPTURES or view[2] is not None:
            made.append(view)
    no_lse = lse.new_empty((1, 1, 0))
    if type(no_lse) is torch.Tensor:  # no mode made something else of it
        memo.keep(q, k, v, captures, ints, launch.Launch(
            fn, q.device.index, (tuple(out.shape), out.stride(), out.dtype), (tuple(lse.shape), lse.stride(), lse.dtype), no_lse,
            rest, scratch, made, counter))


def memo_of(record: Attention) -> launch.Memo | None:
    """The launches held for a record that `attention` was called with, None when it was not."""
    plan = _plans.get(id(record))
    return None if plan is None else plan.memo


_OPTIONAL = 8 + MAX_CAPTURES
"""Tensor arguments of the kernel after q, k, v, out and lse: padding, seen, dense, doc_q, doc_k, sink, vmean, tiles,
captures."""
_TICKETS = _OPTIONAL + MAX_INTS + 7
"""The counter of work items, counted from the first after lse."""
_SCRATCH = (1, 6, 7, _TICKETS + 1)
"""Those that a kernel gets as memory to write to, counted from the first after lse: seen, vmean, tiles, parts."""
_ZEROS = [0] * MAX_INTS


class _Plan:
    """What every call of one record shares; keeps the record alive, so that its id stays its own."""

    __slots__ = ("bshd", "dtype", "fill", "hi", "launches", "lo", "loads", "memo", "packed", "plain", "record", "scale", "sizes",
                 "syms", "variant")

    def __init__(self, record: Attention):
        self.record = record
        self.memo = launch.Memo()
        self.packed = one_row.packed(record)
        self.variant, self.loads, self.syms = _template(record)
        self.sizes = (record.q_heads, record.kv_heads, record.head_dim, record.head_dim_v)
        self.dtype = getattr(torch, record.dtype)
        self.bshd = record.layout == "bshd"
        self.scale, self.fill = record.scale, record.fill
        self.lo, self.hi = -_FAR, _FAR
        self.launches: dict[Any, tuple[Any, int, int, int, bool]] = {}
        # Nothing but bands with constant offsets: no per-call work.
        self.plain = record.sink is None and self.variant.empty != "mean" and not self.loads and not self.syms and all(
            isinstance(a, Predicate) or isinstance(a, Band) and isinstance(a.lo, int | None) and isinstance(a.hi, int | None)
            for a in record.mask)
        if self.plain:
            for a in record.mask:
                if isinstance(a, Band):
                    self.lo = self.lo if a.lo is None else max(self.lo, _int(a.lo, ()))
                    self.hi = self.hi if a.hi is None else min(self.hi, _int(a.hi, ()))


_plans: dict[int, _Plan] = {}


def _plan(record: Attention) -> _Plan:
    why = supports(record, "sm_90")
    if why is not None:
        raise ValueError(f"not supported on sm_90: {why}")
    if len(_plans) > 4096:
        _plans.clear()
    plan = _plans[id(record)] = _Plan(record)
    return plan


def _no_keys(
    record: Attention, captures: Sequence[torch.Tensor], out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A softmax over nothing: NaN, as eager code gives it, or 0; with a sink all weight goes there."""
    if record.sink is not None:
        lse.copy_(captures[record.sink][None, :, None].expand_as(lse))
        return out.zero_(), lse
    return out.fill_(0.0 if record.empty_rows == "zero" else float("nan")), lse.fill_(float("-inf"))


def _bool(x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.bool:
        raise ValueError(f"a mask of dtype {x.dtype}; it must be bool")
    return x


def _narrow(x: int) -> int:
    if not -(1 << 31) <= x < 1 << 31:
        raise ValueError(f"integer {x} does not fit 32 bits")
    return int(x)


_SPILLS = 224
"""Head dim at which a team's kernel has no registers left."""
_TEAM = 48
"""Row blocks from which on there are teams though one of two blocks idles at the end where they are odd; not tuned."""


def schedule(
    variant: Forward, batch: int, heads: int, group: int, rows: int, keys: int, device: int
) -> tuple[int, int]:
    """(section, blocks) of a launch: one block a multiprocessor at most, which fetches the next tile's Q and K while it
    writes O.  What a section is: `ForwardKernel.__call__`.

    Raises:
        ValueError: more tiles of queries than a counter of 32 bits can deal out.
    """
    m_blocks = -(-rows // variant.tile.rows)
    if variant.team == ROWS:
        m_blocks += m_blocks % 2
    tiles = m_blocks * heads * batch
    if tiles >= 1 << 30:
        raise ValueError(f"{tiles} tiles of queries are more than a counter of 32 bits can deal out")
    per_head = 2 * keys * (variant.dim + variant.dim_v)
    section = min(max(1, _L2_BYTES // per_head) * group, heads * batch)
    each = variant.blocks
    return max(1, section // 2 if variant.team == HEADS else section), min(tiles, max(each, _sm_count(device) // each * each))


def splits(variant: Forward, batch: int, heads: int, rows: int, keys: int, sms: int) -> int:
    """How many blocks share the keys of one tile of queries, so that few queries over many keys, as in decoding, keep
    every multiprocessor reading; 1 where there are tiles enough.  Each share is some key tiles, or its fixed cost shows."""
    if variant.listed or variant.sink is not None or variant.empty == "mean":
        return 1
    tile = variant.tile
    items = -(-rows // tile.rows) * heads * batch
    return max(1, min(sms // items, -(-keys // tile.keys) // _SHARE))
