"""Kernels without a GPU: what is supported, how work is dealt out, and what ptxas makes of every kind of variant."""
from __future__ import annotations

import struct
import subprocess
import sys
import warnings
from dataclasses import replace
from importlib import metadata
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fa_inductor.kernels import api
from fa_inductor.kernels.expr import SCORE, Expr, const, index, load
from fa_inductor.kernels.record import Attention, Band, Chunk, Dense, Documents, KeyPadding, Predicate, Sym
from fa_inductor.kernels.sm90.variant import ALONE, HEADS, ROWS, SMEM_LIMIT, Capture, Forward, padded


def record(**kw) -> Attention:
    base = dict(q_heads=8, kv_heads=2, head_dim=128, head_dim_v=128, dtype="bfloat16", scale=0.1)
    return Attention(**{**base, **kw})


# ---------------------------------------------------------------------- support


def test_import_needs_no_dsl() -> None:
    code = ("import sys, fa_inductor.kernels.api as a; a.available(); a.variants();"
            "print([m for m in sys.modules if m.split('.')[0] in ('cutlass', 'tvm_ffi')])")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_available_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"nvidia-cutlass-dsl": "4.8.1", "apache-tvm-ffi": "0.1.15"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(api.metadata, "version", version)
    for installed, expected in (({}, None), ({"nvidia-cutlass-dsl": "4.7.9"}, "4.7.9"), ({"nvidia-cutlass-dsl": "5.0"}, "5.0"),
                                ({"nvidia-cutlass-dsl": "nightly"}, "nightly")):
        versions.update(installed)
        api.available.cache_clear()
        why = api.available()
        assert why is None if expected is None else expected in str(why)
    for name in ("apache-tvm-ffi", "nvidia-cutlass-dsl"):
        versions.pop(name)
        api.available.cache_clear()
        assert "not installed" in str(api.available())
    api.available.cache_clear()


@pytest.mark.parametrize("kw", [
    {}, {"dtype": "float16"}, {"scale": 0.0}, {"scale": -2.0}, {"head_dim": 192}, {"head_dim": 8, "head_dim_v": 8},
    {"head_dim": 256, "head_dim_v": 256}, {"sink": 0}, {"q_heads": 12, "kv_heads": 1},
    {"mask": (Band(None, Sym(0)), Band(-5, None), KeyPadding(0))}, {"mask": (Chunk(128), Documents(0, 1))},
    {"mask": (Dense(0),), "empty_rows": "zero"}, {"score": Expr("add", (SCORE, load(0)))},
    {"score": Expr("tanh", (SCORE,)), "mask": (Predicate(Expr("le", (index("k"), index("q")))),)},
])
def test_supported(kw: dict) -> None:
    assert api.supports(record(**kw), "sm_90") is None


@pytest.mark.parametrize(("kw", "word"), [
    ({"dtype": "float32"}, "float32"), ({"head_dim": 264}, "264"), ({"head_dim": 100}, "100"),
    ({"head_dim": 64, "head_dim_v": 256}, "wider"), ({"scale": float("nan")}, "finite"),
    ({"mask": (KeyPadding(0), KeyPadding(1))}, "KeyPadding"), ({"mask": (Dense(0), Dense(1))}, "Dense"),
    ({"mask": (Predicate(Expr("gt", (SCORE, const(0.0)))),)}, "score"),
    ({"score": Expr("add", (SCORE, const(1 << 40)))}, "32 bits"),
    ({"score": Expr("add", (SCORE, Expr("cast", (load(0), "complex64"))))}, "complex64"),
    ({"score": Expr("add", (load(4), Expr("add", (load(3), Expr("add", (load(2), Expr("add", (load(1), load(0)))))))))}, "5 tensors"),
])
def test_refused(kw: dict, word: str) -> None:
    assert word in str(api.supports(record(**kw), "sm_90"))


def test_refused_arch() -> None:
    assert "sm_80" in str(api.supports(record(), "sm_80"))
    with pytest.raises(ValueError, match="sm_100"):
        api.compile_variant(Forward("bfloat16", 64, 64), "sm_100")


def test_bad_tensors_are_refused() -> None:
    q = torch.zeros(1, 8, 4, 128, dtype=torch.bfloat16)
    k = torch.zeros(1, 2, 4, 128, dtype=torch.bfloat16)
    for args, word in (((q, k, k), "CUDA"), ((q[:, :4], k, k), "record"), ((q, k[:, :, :3], k), "match"),
                       ((q.half(), k, k), "float16")):
        with pytest.raises(ValueError, match=word):
            api.attention(*args, record())


def test_one_variant_for_all_lengths_and_offsets() -> None:
    causal = record(mask=(Band(None, 0),))
    for other in (record(mask=(Band(None, Sym(0)),)), record(mask=(Band(None, -7),), scale=3.0),
                  record(mask=(Band(None, 0),), q_heads=5, kv_heads=5, layout="bhsd", head_dim=104)):
        assert api.variant_of(other) == api.variant_of(causal)
    assert api.variant_of(record(scale=-1.0)) != api.variant_of(record())


def test_captures_are_read_where_they_change() -> None:
    r = record(score=Expr("add", (SCORE, load(2))), sink=0)
    sink = torch.zeros(8, dtype=torch.bfloat16)
    for bias, expected in (
        (torch.zeros(8, 1, 1), Capture("float32", "h")),
        (torch.zeros(1, 8, 6, 6).expand(4, 8, 6, 6), Capture("float32", "hqk", True, True)),
        (torch.zeros(6, 7, dtype=torch.half), Capture("float16", "qk", True)),
        (torch.zeros(7, 6).T, Capture("float32", "qk")),
        (torch.zeros(6, 6, dtype=torch.bfloat16)[:, 1:5], Capture("bfloat16", "qk", True)),
    ):
        v = api.variant_of(r, (sink, sink, bias))
        assert v.captures == (expected,) and v.sink == "bfloat16" and v.score == Expr("add", (SCORE, load(0)))


# ---------------------------------------------------------------------- how work is dealt out


@pytest.fixture
def plain_ints(monkeypatch: pytest.MonkeyPatch):
    """The kernel's index arithmetic on Python integers."""
    from fa_inductor.kernels.sm90 import forward, prepare

    for module in (forward, prepare):
        monkeypatch.setattr(module, "select_", lambda c, a, b: a if c else b)
        monkeypatch.setattr(module, "cutlass", SimpleNamespace(min=min, max=max))
        monkeypatch.setattr(module, "Int32", int)
        monkeypatch.setattr(module, "cute", SimpleNamespace(arch=SimpleNamespace(make_warp_uniform=lambda x: x)))
    return object.__new__(forward.ForwardKernel)


@pytest.mark.parametrize(("band", "team", "sms"), [
    (band, team, sms) for band, team, sms in product((False, True), (ALONE, ROWS, HEADS), (1, 7, 132)) if not (band and team == ROWS)])
def test_every_tile_is_done_once(plain_ints, monkeypatch: pytest.MonkeyPatch, band: bool, team: int, sms: int) -> None:
    kernel = plain_ints
    monkeypatch.setattr(api, "_sm_count", lambda _: sms)
    for rows, heads, batch, keys in product((1, 128, 129, 500, 1024, 1500, 2300), (1, 6), (1, 3), (1, 900, 5000, 100_000)):
        if team == HEADS and heads % 2:
            continue
        v = kernel.v = Forward("bfloat16", 128, 128, band_hi=band, team=team)
        kernel.t = v.tile
        section, blocks = api.schedule(v, batch, heads, heads if team == HEADS else 1, rows, keys, 0)
        m_blocks = -(-rows // v.tile.rows) + (-(-rows // v.tile.rows) % 2 if team == ROWS else 0)
        total = kernel._total(rows, heads, batch, section)
        assert total * v.blocks == m_blocks * heads * batch
        assert blocks == min(m_blocks * heads * batch, max(v.blocks, sms - sms % v.blocks)) and blocks % v.blocks == 0
        by_rank = []
        for rank in range(v.blocks):
            monkeypatch.setattr(kernel, "_rank", lambda rank=rank: rank)
            by_rank.append([kernel._decode(i, rows, heads, batch, section) for i in range(total)])
        assert sorted(x for done in by_rank for x in done) == sorted(product(range(m_blocks), range(heads), range(batch)))
        for items in zip(*by_rank, strict=True):  # a team is in one head, or in neighbouring ones at the same rows
            assert len({(m // 2 if team == ROWS else m, h // 2 if team == HEADS else h, b) for m, h, b in items}) == 1
        if band:  # long ones first in each section of heads, and no head in two of them
            for at in range(0, total, section * m_blocks):
                part = by_rank[0][at:at + section * m_blocks]
                assert [m for m, _, _ in part] == sorted((m for m, _, _ in part), reverse=True)
        if not v.counted:
            clusters = blocks // v.blocks
            taken: list[int] = []
            for index in range(clusters):
                while index < total:
                    taken.append(index)
                    index = kernel._following(index, clusters)
            assert sorted(taken) == list(range(total))


class Traced:
    """A tensor as the kernel's host code sees it: where it begins, in elements, lengths and strides."""

    def __init__(self, iterator: int, shape: tuple[int, ...], stride: tuple[int, ...]):
        self.iterator, self.shape, self.stride = iterator, shape, stride

    @staticmethod
    def of(x: torch.Tensor) -> Traced:
        return Traced(x.storage_offset(), tuple(x.shape), x.stride())

    def same(self, x: torch.Tensor) -> bool:
        # The stride of a dim of size 1 means nothing.
        strides = [(a, b) for a, b, n in zip(self.stride, x.stride(), x.shape, strict=True) if n > 1]
        return (self.iterator, self.shape) == (x.storage_offset(), tuple(x.shape)) and all(a == b for a, b in strides)


def test_views_made_by_the_host_code_are_torchs(plain_ints, monkeypatch: pytest.MonkeyPatch) -> None:
    from fa_inductor.kernels.sm90 import forward

    monkeypatch.setattr(forward, "cute", SimpleNamespace(
        make_layout=lambda shape, stride: (shape, stride), assume=lambda x, divby: (x, pytest.fail(f"{x}") if x % divby else x)[1],
        make_tensor=lambda iterator, layout: Traced(iterator, *layout)))
    for batch, kv, group, d in product((1, 3), (1, 2), (1, 4), (64, 96)):
        heads = kv * group
        base = torch.empty(batch, 3, heads, d)
        many, rows = base.transpose(1, 2), base[:, 1:2].transpose(1, 2)
        assert plain_ints.packed(Traced.of(many), 1, 8).same(many)
        for x, even in ((rows, 8), (torch.empty(batch, heads, 1, d), 8), (torch.empty(batch, heads, 1), 1)):
            want = x.squeeze(2).unflatten(1, (kv, group))
            assert plain_ints.packed(Traced.of(x), group, even).same(want if group > 1 else x)
        nothing = plain_ints.packed(Traced.of(torch.empty(1, 1, 0)), group, 1)
        assert nothing.shape[2] == 0
        parts = torch.empty(5 * batch, heads, 7, d + 4)
        found, sums = plain_ints.halves(Traced.of(parts), d)
        assert found.same(parts[..., :d]) and sums.same(parts[..., d:d + 2])


def test_shares_of_a_split_row_cover_its_keys(plain_ints) -> None:
    kernel = plain_ints
    for rows, keys, batch, sms in product((1, 200), (1, 1000, 4097, 70_000), (1, 3), (5, 132)):
        v = kernel.v = Forward("bfloat16", 128, 128, split=True)
        kernel.t = v.tile
        shares = api.splits(replace(v, split=False), batch, 2, rows, keys, sms)
        items = -(-rows // v.tile.rows) * 2 * batch
        assert shares == 1 or items * shares <= sms and keys >= 4 * v.tile.keys * (shares - 1)
        total = kernel._total(rows, 2, batch, shares)
        assert total == items * shares
        seen: dict[Any, list[int]] = {}
        for i in range(total):
            _, m, h, b, first, last = kernel._begin(i, total, rows, 2, batch, shares, keys, None, None, (0, 0, 1, 0))
            assert last > first
            seen.setdefault((m, h, b), []).extend(range(first, last))
        tiles = -(-keys // v.tile.keys)
        for walked in seen.values():  # a share without keys walks a tile behind them
            assert sorted(x for x in walked if x < tiles) == list(range(tiles))


def test_a_check_knows_which_kernel_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tests/gpu/check_forward.py expects to be compiled is what the front door asks for."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "gpu"))
    from emulator.forward import Launcher, attention
    from forward_case import inputs, launched
    from forward_cases import all_cases

    kinds = set()
    for c in all_cases():
        if c.name != "decode" or c.keys > 6000:
            continue
        asked: list[Forward] = []
        launcher = Launcher()
        launcher.kernel = lambda v, asked=asked: lambda *_: asked.append(v)  # type: ignore[method-assign]
        attention(*inputs(c, "cpu"), launcher=launcher)
        assert asked == [launched(c)], c
        kinds.add((asked[0].split, c.rows == 1, asked[0].band_hi))
    assert {(True, True, False), (False, True, False), (True, False, True)} <= kinds


def test_few_rows_are_split_and_others_are_not() -> None:
    v = Forward("bfloat16", 128, 128)
    assert api.splits(v, 1, 8, 4, 32768, 132) == 16
    assert api.splits(v, 16, 8, 4, 32768, 132) == 1
    assert api.splits(v, 1, 8, 4, 600, 132) == 1
    assert all(api.splits(x, 1, 8, 4, 32768, 132) == 1 for x in
               (replace(v, dense=True), replace(v, sink="float32"), replace(v, empty="mean"), replace(v, documents="int32")))


def test_key_tiles_cover_what_is_seen(plain_ints) -> None:
    kernel = plain_ints
    for rows, keys, lo, hi, chunk in product((1, 130, 300), (1, 128, 390), (None, -200, -3, 50), (None, -150, 0, 5, 400),
                                             (None, (100, 37))):
        v = kernel.v = Forward("bfloat16", 128, 128, band_lo=lo is not None, band_hi=hi is not None, chunk=chunk is not None)
        kernel.t = v.tile
        size, offset = chunk or (1, 0)
        for m in range(-(-rows // v.tile.rows)):
            q = range(m * v.tile.rows, min(rows, (m + 1) * v.tile.rows))
            tiles = {j // v.tile.keys for i in q for j in range(keys)
                     if (lo is None or j >= i + lo) and (hi is None or j <= i + hi)
                     and (chunk is None or j // size == (i + offset) // size)}
            first, last = kernel._key_tiles(m, 0, rows, keys, None, (lo or 0, hi or 0, size, offset))
            assert tiles <= set(range(first, last)) and 0 <= first < last
            if tiles and chunk is None:
                assert set(range(first, last)) == tiles


# ---------------------------------------------------------------------- the online softmax, on numpy scalars


@pytest.fixture
def numpy_softmax(monkeypatch: pytest.MonkeyPatch):
    """softmax(variant, scale, scores [tiles, n], values [tiles, n]) -> (out, lse) of one row, by the kernel's own code."""
    from fa_inductor.kernels.sm90 import forward

    f32 = np.float32
    ops = SimpleNamespace(exp2=lambda x, fastmath: np.exp2(x, dtype=f32), fma=lambda a, b, c: f32(float(a) * float(b) + float(c)))
    arch = SimpleNamespace(fmax=lambda a, b, nan=False: np.maximum(a, b) if nan else np.fmax(a, b), vote_any_sync=bool,
                           shuffle_sync_bfly=lambda x, _: x)
    monkeypatch.setattr(forward, "not_", lambda x: not x)
    monkeypatch.setattr(forward, "select_", lambda c, a, b: a if c else b)
    monkeypatch.setattr(forward, "Float32", f32)
    monkeypatch.setattr(forward, "cute", SimpleNamespace(math=ops, arch=arch, size=len))

    def run(variant: Forward, scale: float, scores: np.ndarray, values: np.ndarray, sink: float | None = None):
        kernel = object.__new__(forward.ForwardKernel)
        kernel.v = variant
        tops, sums, out = [f32(-np.inf)] * 2, [f32(0)] * 2, f32(0)
        for s, v in zip(scores.astype(f32), values.astype(f32), strict=True):
            if variant.premultiply:
                s = s * f32(scale)
            both = [s[4 * (i // 4) // 2 + i % 2] for i in range(2 * len(s))]  # the second row is a copy of the first
            unit, factors = f32(scale * forward.LOG2E), [f32(1)] * 2
            for r in range(2):
                factors[r], rose = kernel.maximum(both, tops, unit, r)
                assert rose or factors[r] == 1
                kernel.exponentials(both, tops, sums, factors[r], unit, r)
            p = np.array([both[4 * j + e] for j in range(len(s) // 2) for e in range(2)], f32)
            assert not np.any(p > 2.0 ** forward.LAZY)
            out = out * factors[0] + np.sum(p * v, dtype=f32)
        top, total, factor = tops[0] if variant.premultiply else tops[0] * f32(scale), sums[0], f32(1)
        if sink is not None:
            factor, total, top = forward._add_sink(f32(sink), total, top)
        return out * factor / total, top + np.log(total)

    return run


INF, LOWEST = np.inf, -3.4028234663852886e38


@pytest.mark.parametrize("positive", (True, False))
@pytest.mark.parametrize("sink", (None, -3.0, 100.0))
@pytest.mark.parametrize("kind", ("normal", "rising", "falling", "far", "hidden first", "hidden last", "hidden all", "lowest",
                                  "lowest first", "nan", "inf", "minus inf"))
@np.errstate(all="ignore")
def test_online_softmax(numpy_softmax, kind: str, positive: bool, sink: float | None) -> None:
    rng = np.random.default_rng(7)
    x, values, scale = rng.standard_normal((6, 16)) * 4, rng.standard_normal((6, 16)), 0.5 if positive else -0.5
    if kind in ("rising", "falling"):
        x += np.arange(6)[:: 1 if kind == "rising" else -1, None] * 9
    elif kind == "far":
        x *= 200
    x = x * (1 if positive else -1)
    low = {"lowest": LOWEST, "lowest first": LOWEST}.get(kind, -INF) / scale
    if abs(low) < INF:
        low = np.sign(low) * 3e38  # what a bias of finfo.min leaves: finite, and out of reach in base-2 units
    where = {"hidden first": slice(0, 3), "lowest first": slice(0, 3), "hidden last": slice(4, 6), "hidden all": slice(0, 6),
             "lowest": slice(0, 6)}.get(kind)
    if where:
        x[where] = low
    if kind in ("nan", "inf", "minus inf"):
        x[2, 5] = {"nan": np.nan, "inf": INF / scale, "minus inf": -INF / scale}[kind]
    true = x.astype(np.float32).astype(np.float64).ravel() * scale
    if sink is not None:
        true = np.append(true, sink)
    top = true.max()
    p = np.exp(true - top)
    want, want_lse = (p[:96] * values.ravel()).sum() / p.sum(), top + np.log(p.sum())
    # Scores that low come from a bias, never from Q and K alone.
    score = Expr("add", (SCORE, load(0))) if kind.startswith("lowest") else None
    out, lse = numpy_softmax(Forward("bfloat16", 64, 64, positive_scale=positive, score=score), scale, x, values, sink)
    np.testing.assert_allclose(out, want, rtol=2e-4, atol=2e-5)
    if np.isfinite(want_lse) and abs(want_lse) < 1e30:
        np.testing.assert_allclose(lse, want_lse, rtol=1e-5)
    else:
        assert not np.isfinite(lse) or lse < -1e30


# ---------------------------------------------------------------------- ptxas

PRODUCTS, WARPGROUP, LOCAL_STORE, LOCAL_LOAD = (0x9F0, 0xDF0), 0x9C5, 0x387, 0x983
"""Low 12 bits of sm_90 instructions: tensor core products (first operand in shared memory, in registers), a wait for or a
fence of products, register spills."""


def resources(cubin: bytes) -> list[dict[str, int]]:
    """Registers, stack bytes and instruction counts of each kernel in an ELF image (``.nv.info`` attributes 0x2f, 0x11
    and 0x12, as ``cuobjdump -res-usage`` prints them; the symbol index in a section's info ties them together)."""
    offset = struct.unpack_from("<Q", cubin, 0x28)[0]
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, offset + i * size) for i in range(count)]
    base = headers[names][4]
    found, registers, stack = {}, {}, {}
    for name, _, _, _, at, length, _, info, _, _ in headers:
        text = cubin[base + name:cubin.index(b"\0", base + name)].decode()
        if text.startswith(".text."):
            codes = [w & 0xFFF for (w, _) in struct.iter_unpack("<QQ", cubin[at:at + length])]
            found[info & 0xFFFFFF] = {"products": sum(codes.count(c) for c in PRODUCTS), "waits": codes.count(WARPGROUP),
                          "spills": codes.count(LOCAL_STORE) + codes.count(LOCAL_LOAD), "code": length}
        elif text == ".nv.info":
            end = at + length
            while at < end:
                form, kind, value = struct.unpack_from("<BBH", cubin, at)
                at += 4
                if form == 4:
                    symbol, number = struct.unpack_from("<II", cubin, at) if value == 8 else (0, 0)
                    if kind == 0x2F:
                        registers[symbol] = number
                    elif kind in (0x11, 0x12):
                        stack[symbol] = stack.get(symbol, 0) + number
                    at += value
    return [{**kernel, "registers": registers[s], "stack": stack[s]} for s, kernel in found.items()]


BY_NAME = {v.name: v for v in api.variants()}


def test_all_variants_fit() -> None:
    assert len(BY_NAME) == len(api.variants())
    for v in BY_NAME.values():
        t = v.tile
        assert v.smem_bytes + 1024 <= SMEM_LIMIT, v.name
        assert t.keys % 16 == 0 and t.rows % 64 == 0 and t.stages >= 2
        assert (t.warpgroups * t.consumer_regs + t.producer_regs) * 128 <= 65536, v.name
    for d in range(8, 257, 8):
        assert padded(d) >= d and padded(d) % 32 == 0 and Forward("float16", padded(d), padded(d)).tile


@pytest.mark.parametrize("name", BY_NAME)
def test_compiles_without_spills(name: str, tmp_path: Path) -> None:
    from fa_inductor.kernels.sm90.compile import compile_forward

    v = BY_NAME[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a user would see them
        warnings.simplefilter("ignore", DeprecationWarning)
        compile_forward(v, f"--keep-cubin --dump-dir={tmp_path}")
    (image,) = tmp_path.glob("*.cubin")
    main = [k for k in resources(image.read_bytes()) if k["products"]]
    assert len(main) == 1
    k = main[0]
    assert k["spills"] == 0 and k["stack"] == 0, k
    # Registers at launch; setmaxnreg deals them out afterwards.
    assert k["registers"] == 65536 // v.threads // 8 * 8, k
    # One k block of 16 a product: S of a block's first item, of the loop and, ahead, of the next item; PV of the loop and
    # of the last tile.
    assert k["products"] == ((3 if v.tile.own_o else 2) * v.dim + 2 * v.tile.keys) // 16, k
    # Were the products run one by one, each would have its own wait.
    assert k["waits"] < k["products"], k
    assert k["code"] < 200_000
