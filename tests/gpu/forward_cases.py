"""The list of cases for the forward kernel, most of them written for one feature each."""
from __future__ import annotations

import random
from typing import Any

import torch
from forward_case import NEG_INF, Case

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
    # 9. decoding: few rows over many keys, which are dealt out to several blocks; the heads of a group packed into rows
    for n, keys in enumerate((1, 700, 1023, 2048, 5000, 16384, 40000)):
        for m, heads in enumerate(((8, 2), (4, 4), (8, 1), (6, 2))):
            rows = 1 if m < 3 else 7
            add("decode", rows=rows, keys=keys, heads=heads, dims=DIMS[(n + m) % 3], hi=[None, keys - rows, keys - rows - 3][n % 3],
                lo=[None, None, -keys // 2][m % 3], symbolic=m % 2 == 0, dtype=["bfloat16", "float16"][(n + m) % 2],
                padding=["", "right", "", "left"][(n + m) % 4], empty="zero", batch=1 + m % 2)
    add("strides", rows=500, keys=500, strides="far", hi=0)
    for strides in ("packed", "expand", "odd"):
        for dims in ((64, 64), (128, 128), (80, 80)):
            for hi in (None, 0):
                add("strides", rows=300, keys=300, dims=dims, strides=strides, hi=hi, heads=(4, 2))
    for n in range(6 if quick else 30):
        rows, keys = rnd.choice([1, *LENGTHS[3:26]]), rnd.choice(LENGTHS[3:26])
        add("relative", dtype=rnd.choice(["bfloat16", "float16"]), rows=rows, keys=rows if n % 3 == 0 else keys, dims=DIMS[n % 5],
            score="relative", heads=rnd.choice(GROUPS), hi=rnd.choice([None, max(0, keys - rows)]),
            padding="right" if n % 4 == 1 else "", empty="zero" if n % 4 == 1 else "never")
    for n in range(6 if quick else 40):  # eight keys at a time are read, whole tiles or not
        rows, keys = rnd.choice(LENGTHS[3:26]), rnd.choice([8, 16, 40, 72, 104, 200, 328, 512, 1000, 1032, 2040])
        kind: dict[str, Any] = {"bias": rnd.choice(["bhqk", "hqk", "qk"]), "bias_dtype": ["bfloat16", "float16"][n // 2 % 2]}
        if n % 2:
            kind = {"dense": rnd.choice(["bhqk", "bqk", "qk"]), "dense_form": rnd.choice(["", "blocks"]), "empty": "zero"}
        add("eight keys", dtype=rnd.choice(["bfloat16", "float16"]), rows=rows, keys=keys, dims=DIMS[n % 5], heads=rnd.choice(GROUPS),
            hi=rnd.choice([None, max(0, keys - rows)]), padding="right" if n % 8 > 5 else "", **{"empty": "zero", **kind})
    return found
