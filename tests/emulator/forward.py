"""Run the Hopper forward kernel through its own front door, `kernels.api.attention`, with the emulator in the GPU's place.

The tensors lie in host memory but say that they are on a device; the front door makes its plan, picks the variant, the
schedule and the arguments as ever, and the "compiled kernel" that it calls is the emulated PTX of that variant.
"""
from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from fa_inductor.kernels import api
from fa_inductor.kernels.sm90.variant import MAX_CAPTURES, Forward

from .errors import Fault
from .launch import Out, Program, Struct, emulate
from .parser import parse
from .stats import Stats
from .tensormap import TensorMap


@lru_cache(maxsize=64)
def ptx_of(variant: Forward) -> str:
    """PTX of a variant with line info, by cross-compiling it."""
    from fa_inductor.kernels.sm90.compile import compile_forward

    with tempfile.TemporaryDirectory() as folder:
        compile_forward(variant, f"--keep-ptx --generate-line-info --dump-dir={folder}")
        (path,) = Path(folder).glob("*.ptx")
        return path.read_text()


@dataclass(frozen=True)
class Compiled:
    """The kernels of one variant."""

    main: Program
    before: dict[str, Program]
    """What runs first, by name, in this order: `seen_keys` looks for the keys that are no padding, `list_tiles` for the tiles
    that a mask shows, `mean_values` makes what a row without keys gives."""
    after: Program | None = None
    """`combine` puts together what several blocks found for one row."""

    @staticmethod
    def from_text(text: str) -> Compiled:
        """From PTX, possibly one that was tampered with."""
        names = list(parse(text))
        before = {kind: n for kind in ("seen_keys", "list_tiles", "mean_values") for n in names if f"_{kind}_" in n}
        after = [n for n in names if "_combine_" in n]
        (main,) = (n for n in names if n not in before.values() and n not in after)
        return Compiled(Program(text, main), {kind: Program(text, n) for kind, n in before.items()},
                        Program(text, after[0]) if after else None)


@lru_cache(maxsize=64)
def compiled(variant: Forward) -> Compiled:
    return Compiled.from_text(ptx_of(variant))


class _Device:
    """What the front door asks of a tensor's device."""

    type, index = "cuda", 0

    def __repr__(self) -> str:
        return "emulated"


DEVICE = _Device()


class OnDevice(torch.Tensor):
    """A tensor in host memory that says it is on the emulated device."""

    @property
    def device(self) -> Any:  # type: ignore[override]
        return DEVICE


def on_device(x: torch.Tensor) -> torch.Tensor:
    return x.as_subclass(OnDevice)


class _Torch:
    """The torch that the front door sees: allocations on the emulated device come from host memory."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def __init__(self) -> None:
        def on_host(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            """What a kernel leaves out must not look like the result of the run before."""
            def allocate(*a: Any, device: Any, **kw: Any) -> torch.Tensor:
                x = f(*a, **kw)
                return on_device(x.fill_(math.nan if x.is_floating_point() else 90))

            return allocate

        self.empty, self.empty_strided = on_host(torch.empty), on_host(torch.empty_strided)


@dataclass
class Launcher:
    """Stands in for the compiled kernel of a variant; keeps what the last launch counted."""

    seed: int = 0
    tamper: Callable[[Forward], Compiled] = compiled
    stats: list[Stats] = field(default_factory=list)
    limit: int = 50_000_000
    sms: int = 132
    """Multiprocessors that the schedule is made for."""
    teams: int = 48
    """Row blocks or key tiles from which on it makes teams of two row blocks."""
    counter: torch.Tensor = field(default_factory=lambda: on_device(torch.zeros(1, dtype=torch.int32)))
    """The counter of work items of all its launches; must be 0 after each."""
    lse: bool = True
    """Whether the kernels get memory for lse."""

    def kernel(self, variant: Forward) -> Callable[..., None]:
        return lambda *args: self.launch(variant, self.tamper(variant), args)

    def launch(self, variant: Forward, programs: Compiled, args: Sequence[Any]) -> None:
        q, k, v, out, lse, padding, seen, *others = args
        optional, numbers = others[:6 + MAX_CAPTURES], others[6 + MAX_CAPTURES:]
        *ints, scale, fill, lo, hi, chunk, offset, section, tickets, parts, blocks, pack = numbers
        q, out, lse = (_packed(x, pack) for x in (q, out, lse if self.lse else torch.empty(1, pack, 0)))
        parts, parts_lse = (None, None) if parts is None else (parts[..., :v.shape[3]], parts[..., v.shape[3]:v.shape[3] + 2])
        memory = _Storage()
        dense, doc_q, doc_k, _, vmean, tiles, *_ = optional
        documents = [memory.tensor(x, unit) for x, unit in ((doc_q, ()), (doc_k, (1,))) if x is not None]
        # Scratch is unknown until a kernel writes it.
        fresh = lambda x, unit: memory.tensor(x, (unit,), unknown=True)  # noqa: E731
        for kind, program in programs.before.items():
            if kind == "seen_keys":
                grid, words, params = seen.shape[0], 3 * 8, [memory.tensor(padding), fresh(seen, 1)]
            elif kind == "list_tiles":
                grid, words = tiles.shape[0] * tiles.shape[1] * tiles.shape[2], 32 * 8
                params = [fresh(tiles, 3), *([] if seen is None else [fresh(seen, 1)]),
                          *([] if dense is None else [memory.tensor(dense, (3,) if variant.dense_wide else ())]), *documents,
                          q.shape[2], k.shape[2], lo, hi, chunk, offset]
            else:
                grid, words = (vmean.shape[1], vmean.shape[0], 1), 8 * 256
                params = [memory.tensor(v, (3,)), fresh(vmean, 2), *([] if seen is None else [fresh(seen, 1)]), q.shape[2], lo, hi,
                          chunk, offset]
            _, stats = emulate(program, grid, params, seed=self.seed, limit=self.limit, shared_bytes=4 * words)
            self.stats.append(stats)
        maps = []
        for x, box in zip((q, k, v, out), boxes(variant), strict=True):
            if parts is None or x is not out:
                maps += [memory.map(x, box, unknown=x is out), memory.shape(x, transposed=x is v)]
        if parts is not None:
            maps.append(fresh(parts, 3))
        # dense, doc_q, doc_k, sink, vmean, tiles, captures: whose last stride is 1 at compile time.
        unit = [variant.dense_wide, False, True, False, True, True, *(c.unit for c in variant.captures)]
        tensors = [memory.tensor(x, (x.dim() - 1,) if u else (), unknown=x is tiles)
                   for x, u in zip(optional, unit, strict=False) if x is not None]
        both = [] if padding is None else [memory.tensor(padding), memory.tensor(seen, (1,), unknown=True)]
        params = [*maps, (fresh(lse, 2) if parts is None else fresh(parts_lse, 3)), *both, *tensors, *ints, float(scale), float(fill), lo, hi,
                  chunk, offset, section, *(() if tickets is None else [memory.tensor(tickets, (0,))])]
        _, stats = emulate(programs.main, blocks, params, cluster=(variant.blocks, 1, 1), seed=self.seed,
                           limit=self.limit, shared_bytes=shared_bytes(variant))
        if int(self.counter) != 0:
            raise Fault("counter", f"the counter of work items is {int(self.counter)} after a launch")
        self.stats.append(stats)
        if programs.after is not None:
            finish = [fresh(parts, 3), fresh(parts_lse, 3), fresh(out, 3), fresh(lse, 2), section]
            _, stats = emulate(programs.after, (out.shape[2], out.shape[1], out.shape[0]), finish, seed=self.seed)
            self.stats.insert(-1, stats)


def _packed(x: torch.Tensor, pack: int) -> torch.Tensor:
    """What the kernel's host code makes of q, out and lse."""
    return x if pack == 1 else x.unflatten(1, (-1, pack)).movedim(2, 3).flatten(2, 3)


def boxes(v: Forward) -> list[tuple[int, int]]:
    """(elements of a row, rows) that one tensor copy of Q, K, V and O moves; a row is as long as the swizzle spans."""
    qk, vo = (64 if dim % 64 == 0 else 32 for dim in (v.dim, v.dim_v))
    keys = v.tile.keys // 2 if v.team else v.tile.keys  # in two halves, since each block of a team loads one
    return [(qk, 64), (qk, keys), (vo, keys), (vo, 64)]


def shared_bytes(v: Forward) -> int:
    """Dynamic shared memory of a variant: barriers, work items and key bits, then the tiles, each at a multiple of 1 KiB."""
    t = v.tile
    head = 8 * (2 * t.warpgroups + 6 * t.stages + 4) + 4 * 2 * 8 + 4 * ((t.keys + 31) // 32) * t.stages
    sizes = [t.rows * v.dim, t.rows * v.dim_v] if t.own_o else [t.rows * max(v.dim, v.dim_v), 0]
    sizes += [t.keys * v.dim * t.stages, t.keys * v.dim_v * t.stages]
    end = head
    for s in sizes:
        end = -(-end // 1024) * 1024 + 2 * s
    return end


class _Storage:
    """Tensors as arrays over their storages, so that views of one storage stay views of one buffer."""

    def __init__(self) -> None:
        self.roots: dict[int, np.ndarray] = {}
        self.known: dict[int, np.ndarray] = {}
        """Bytes that kernels have written, of storages that began unknown."""

    def array(self, x: torch.Tensor) -> np.ndarray:
        storage = x.untyped_storage()
        root = self.roots.get(storage.data_ptr())
        if root is None:
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
            root = self.roots[storage.data_ptr()] = flat.numpy()
        return root[x.storage_offset() * x.element_size():]

    def tensor(self, x: torch.Tensor, static: Sequence[int] = (), unknown: bool = False) -> Struct:
        """Address, lengths and those strides that are not known when the kernel is compiled."""
        array = self.array(x)
        known = self.known.setdefault(x.untyped_storage().data_ptr(), np.zeros(x.untyped_storage().nbytes(), bool)) if unknown else None
        strides = [("q", s) for i, s in enumerate(x.stride()) if i not in static]
        return Struct((Out(array, known) if unknown else array, *(("i", n) for n in x.shape), *strides))

    def shape(self, x: torch.Tensor, transposed: bool) -> Struct:
        """Lengths of the tensor behind a tensor map, in the kernel's order of modes."""
        b, h, n, d = x.shape
        return Struct(tuple(("i", s) for s in ((d, n) if transposed else (n, d)) + (h, b)))

    def map(self, x: torch.Tensor, box: tuple[int, int], unknown: bool) -> TensorMap:
        b, h, n, d = x.shape
        strides = [s * x.element_size() if size > 1 else 16 for s, size in zip(x.stride()[2::-1], (n, h, b), strict=True)]
        return TensorMap(self.array(x), (d, n, h, b), strides, (*box, 1, 1), 2 * box[0], unknown=unknown)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, record: Any, captures: Sequence[torch.Tensor] = (),
    ints: Sequence[int] = (), *, launcher: Launcher | None = None, out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`api.attention` on host tensors: (out, lse) as plain tensors."""
    launcher = launcher or Launcher()
    with mock.patch.object(api, "torch", _Torch()), mock.patch.object(api, "_kernel", launcher.kernel), \
            mock.patch.object(api.launch, "current_device", lambda: 0), \
            mock.patch.object(api.launch, "counter", lambda _: launcher.counter), mock.patch.object(api, "_keep", lambda *_: None), \
            mock.patch.object(api, "_sm_count", lambda _: launcher.sms), mock.patch.object(api, "_TEAM", launcher.teams), \
            mock.patch.dict(api._plans, clear=True):
        got, lse = api.attention(*(on_device(x) for x in (q, k, v)), record, [on_device(x) for x in captures], ints,
                                 None if out is None else on_device(out))
    return got.as_subclass(torch.Tensor), lse.as_subclass(torch.Tensor)
