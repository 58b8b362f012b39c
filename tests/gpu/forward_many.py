"""Thousands of cases on the kernels of a few: for each variant of `forward_cases` more shapes, layouts and data.  Only few
rows over many keys take another kernel (`forward_case.launched`).

Each is drawn from its name, which holds the place in `all_cases` of the case that it varies:
``causal.0041.07`` is the eighth that runs on the kernel of case 41.  What decides the variant stays: dtype, padded head
dims, which atoms there are, what rows without keys give, the sign of the scale, and along which axes captures change.
"""
from __future__ import annotations

import random
import zlib
from collections import defaultdict
from dataclasses import replace

from forward_case import Case, variant
from forward_cases import DIMS, all_cases

from fa_inductor.kernels.sm90.variant import Forward, padded

EACH = 20
"""Cases a variant; the plain ones, which most models run on, get `OFTEN` times as many."""
OFTEN = 2
MOST = 1 << 24
"""Scores of a case, and elements of its K once expanded to the query heads: what the oracle holds in float64."""
EDGES = tuple(sorted({n for m in (16, 48, 64, 80, 96, 112, 128, 160, 192, 256) for n in (m - 1, m, m + 1)}))
"""Lengths around the ends of tiles."""
HEADS = ((1, 1), (2, 2), (4, 4), (7, 7), (2, 1), (4, 1), (8, 2), (5, 1), (12, 1), (6, 2), (24, 4), (32, 8))
KINDS = ("normal", "heavy", "equal", "heavy", "k mean", "small", "huge scale", "heavy", "subnormal", "v offset", "rows",
         "tiny scale", "normal", "heavy", "first key", "subnormal v")
"""What is special about the numbers; cases take turns."""
STRIDES = ("bhsd", "bhsd", "bshd", "bshd", "sbhd", "packed", "expand", "odd", "gap", "step", "dim first")


def by_variant(cases: list[Case]) -> dict[Forward, list[int]]:
    """Places in a list of cases by the variant that runs them."""
    found: dict[Forward, list[int]] = defaultdict(list)
    for i, c in enumerate(cases):
        found[variant(c)].append(i)
    return dict(found)


def many(bases: list[Case], groups: dict[Forward, list[int]], each: int = EACH) -> dict[Forward, list[Case]]:
    """The cases of each variant; deterministic."""
    found: dict[Forward, list[Case]] = {}
    for v, places in groups.items():
        # Alternating between the cases of a variant varies what they differ in: kinds of padding and masks, empty rows.
        plain = not (v.has_program or v.listed or v.sink or v.chunk) and (v.dim, v.dim_v) in DIMS
        count = each * OFTEN if plain else each
        found[v] = [derive(bases[i], f"{bases[i].name}.{i:04d}.{n:02d}")
                    for n in range(count) for i in (places[n % len(places)],)]
    return found


def named(name: str) -> Case:
    """The case of this name.

    Raises:
        ValueError: no case has this name.
    """
    family, place, n = name.rsplit(".", 2)
    bases = all_cases()
    if not (place.isdigit() and n.isdigit() and int(place) < len(bases) and bases[int(place)].name == family):
        raise ValueError(f"no case {name!r}")
    return derive(bases[int(place)], name)


def _length(rnd: random.Random) -> int:
    x = rnd.random()
    if x < 0.1:
        return rnd.choice((1, 2, 3, 7))
    if x < 0.6:
        return rnd.choice(EDGES)
    return rnd.randint(1, 700) if x < 0.87 else rnd.randint(1000, 5000)


def _sizes(base: Case, rnd: random.Random, dims: tuple[int, int]) -> tuple[int, tuple[int, int], int, int]:
    """(batch, heads, rows, keys) that keep the way in which captures are read, and stay below `MOST`."""
    rows = _length(rnd)
    keys = rows if rnd.random() < 0.4 else _length(rnd)
    if base.bias_mask == "min":  # three rows are hidden as a whole, of which eager code in 16 bits makes NaN: no measure
        rows, keys = max(rows, 7), max(keys, 7)
    batch, heads = rnd.choice((1, 1, 2, 2, 3, 5)), rnd.choice(HEADS)
    if base.strides == "packed":
        keys = max(keys, rows)
    program = base.bias or base.score == "alibi" or base.predicate == "load"
    if program:  # an axis of size 1 is none along which a capture changes
        batch, rows, keys = (1 if old == 1 else max(2, new) for old, new in
                             ((base.batch, batch), (base.rows, rows), (base.keys, keys)))
        if base.heads[0] == 1 or heads[0] == 1:
            heads = (1, 1) if base.heads[0] == 1 else (2, 1)
    # The mean of an error over a handful of rows is chance.
    if not program:
        batch = max(batch, min(32, -(-64 // (heads[0] * rows))))

    def least(old: int, n: int) -> int:
        return max(1, n) if not program else 1 if old == 1 else max(2, n)

    while batch * heads[0] * max(rows * keys, max(rows, keys) * max(dims)) > MOST:
        smaller = least(base.batch, batch // 2), (least(base.heads[0], 1), 1)
        if (batch, heads) != smaller:
            batch, heads = smaller
        else:
            rows, keys = max(2, rows * 3 // 4), max(2, keys * 3 // 4)
    if base.bias and keys > 1 and keys % 2 != base.keys % 2:  # pairs of elements are read where rows are even
        keys += 1
    if base.bias or base.dense:  # and eight where rows are multiples of that
        if base.keys % 8 == 0:
            keys = -(-keys // 8) * 8
        elif keys % 8 == 0:
            keys += 2
    return batch, heads, rows, keys


def derive(base: Case, name: str) -> Case:
    """A case that runs on the variant of `base`, drawn from its name alone."""
    rnd = random.Random(name)
    kind = KINDS[sum(map(int, name.rsplit(".", 2)[1:])) % len(KINDS)]
    small = [[d for d in (top - 24, top - 16, top - 8) if d >= 8] + [top] * 5 for top in map(padded, base.dims)]
    dims = rnd.choice(small[0]), rnd.choice(small[1])
    strides = rnd.choice(STRIDES)
    if strides == "packed" and padded(dims[0]) != padded(dims[1]):
        strides = "bshd"
    if strides == "packed":
        dims = (dims[0], dims[0])
    batch, heads, rows, keys = _sizes(replace(base, strides=strides), rnd, dims)
    if strides == "packed" and rows > keys:
        rows = keys
    c = replace(base, name=name, kind=kind, batch=batch, heads=heads, rows=rows, keys=keys, dims=dims, strides=strides,
                layout=rnd.choice(("bhsd", "bshd")), seed=zlib.crc32(name.encode()),
                data=kind if not kind.endswith("scale") else "normal", scale=_scale(base, kind, dims[0], rnd))
    return _masked(c, rnd)


def _scale(base: Case, kind: str, dim: int, rnd: random.Random) -> float | None:
    """A scale of the same sign as that of `base`, which a variant may rely on."""
    size = {"huge scale": rnd.choice((5.0, 50.0, 150.0 if base.dtype == "float16" else 5000.0)),
            "tiny scale": rnd.choice((1e-3, 1e-6, 1e-30))}.get(kind, dim**-0.5 * rnd.choice((0.3, 1.0, 1.0, 3.0)))
    if base.scale is None or base.scale > 0:
        return None if size == dim**-0.5 else size
    return rnd.choice((0.0, -size, -size, -size))


def _masked(c: Case, rnd: random.Random) -> Case:
    """`c` with other numbers in its mask; where `c` promises a key for every row there is one."""
    never = c.empty == "never"
    shift = c.keys - c.rows
    lo, hi, chunk, padding, dense, form = c.lo, c.hi, c.chunk, c.padding, c.dense, c.dense_form
    if hi is not None:
        hi = rnd.choice((0, shift, rnd.randint(-c.rows, c.keys), rnd.randint(0, 64), 1000))
        hi = max(hi, 0) if never else hi
    if lo is not None:
        width = rnd.choice((1, 2, 31, 64, 127, 128, 129, 256, 1024))
        lo = rnd.choice((1 - width, -width, 1 - width + shift))
        lo = min(lo, shift) if never else lo
        lo = lo if hi is None else min(lo, hi)
    if chunk is not None:
        offset = rnd.choice((0, 37, max(0, shift)))
        chunk = (rnd.choice((1, 16, 100, 128, 333, 1024)), offset)
        hi = hi if hi is None else offset
    if padding:
        alone = lo is None and hi is None and not dense
        padding = rnd.choice(("right", "shared", *(("left", "gaps") if alone or not never else ()), *(() if never else ("all",))))
    if dense:
        dense = rnd.choice(("bhqk", "bqk", "qk", "hqk"))
        form = rnd.choice(("", "causal", "blocks"))
    return replace(c, lo=lo, hi=hi, chunk=chunk, padding=padding, dense=dense, dense_form=form,
                   nan_slots=bool(padding) and padding != "shared" and c.empty in ("never", "zero") and rnd.random() < 0.7)
