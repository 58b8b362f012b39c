"""Bulk copies of boxes of tensors, and reductions with them (PTX ISA 9.7.9.27 "cp.async.bulk.tensor", tiled mode)."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .access import ordered
from .barriers import MBarrier
from .copies import SHARED, from_shared, into_shared, put_global, ready_barrier, shared_place
from .cta import Cta
from .decode import Form, Run
from .errors import Fault
from .lanes import lanes
from .memory import Buffer
from .parser import Address
from .tensormap import TensorMap
from .warp import Warp


def _map(w: Warp, address: int) -> TensorMap:
    found = w.cta.maps.get(address)
    if found is None:
        raise Fault("bounds", f"no tensor map at {address:#x}")
    return found


def _box(m: TensorMap, start: list[int]) -> tuple[Buffer, np.ndarray, np.ndarray]:
    """Buffer of a map, offsets of the bytes of the box's elements that are inside the tensor, which elements those are."""
    if start[0] * m.itemsize % 16:
        raise Fault("misaligned", f"tensor copy of a box that begins at {tuple(start)}: the first index is {start[0] * m.itemsize} "
                    "bytes, no multiple of 16 (a Hopper GPU reports an illegal instruction; the ISA's text says nothing)")
    at, inside = m.elements(start)
    b = m.buffer
    if b is None:
        raise ValueError("a tensor map that is not bound to a launch")
    index = at[inside][:, None] + np.arange(m.itemsize)
    if index.size:
        b.check(int(index.min()), int(index.max()) + 1, "tensor copy")
    return b, index, inside


def _read_tensor(w: Warp, m: TensorMap, start: list[int]) -> Callable[[], np.ndarray]:
    """Check a box when its copy is issued; the result reads it when the copy happens."""
    b, index, inside = _box(m, start)
    if index.size:
        b.need(index, "tensor copy")
        ordered(w, b, index, "tensor copy from", asynchronous=True)

    def read() -> np.ndarray:
        data = np.zeros((len(inside), m.itemsize), np.uint8)
        data[inside] = b.data[index]
        return data

    return read


def _write_tensor(w: Warp, m: TensorMap, start: list[int], data: np.ndarray, op: str, t: str) -> None:
    b, index, inside = _box(m, start)
    if index.size:
        put_global(w, b, index, data[inside], op, t)


def _from_corner(start: list[int]) -> None:
    """A copy to global memory may reach beyond the tensor's end, not before its beginning (CUDA Programming Guide,
    "Tensor memory access", negative indices); a Hopper GPU reports an illegal instruction."""
    if min(start) < 0:
        raise Fault("bounds", f"tensor copy to global memory of a box that begins at {tuple(start)}: an index below 0 is "
                    "for copies to shared memory only")


def tensor(form: Form, reduce: str) -> Run:
    """cp.async.bulk.tensor and cp.reduce.async.bulk.tensor of the tiled mode."""
    rank = int(form.one("1d", "2d", "3d", "4d", "5d")[0])
    form.has("tile")
    hint = form.has("L2::cache_hint")
    if form.has("mbarrier::complete_tx::bytes"):
        many = form.has("multicast::cluster")
        if form.mods and form.mods[0] in SHARED and form.mods[1:] == ["global"] and not reduce:
            form.mods.clear()
        form.done(3 + many + hint)
        return _load(form, rank, many, hint)
    form.one("bulk_group")
    if form.mods == ["global", "shared::cta"]:
        form.mods.clear()
    form.done(2 + hint)
    return _store(form, rank, hint, reduce)


def _coordinates(form: Form, n: int, rank: int) -> list[Callable]:
    o = form.operands[n]
    if not isinstance(o, Address) or o.coordinates is None or len(o.coordinates) != rank:
        raise form.fail(f"needs {rank} coordinates")
    return [form.value(c, "s32") for c in o.coordinates]


def _hint(form: Form, hint: bool) -> None:
    if hint:
        form.get(len(form.operands) - 1, "b64")


def _load(form: Form, rank: int, many: bool, hint: bool) -> Run:
    dst, src, bar = form.address(0)[0], form.address(1)[0], form.address(2)[0]
    coordinates = _coordinates(form, 1, rank)
    which = form.get(3, "u16") if many else None
    _hint(form, hint)

    def run(w: Warp, mask: int) -> None:
        for i in np.flatnonzero(lanes(mask)):
            m = _map(w, int(src(w)[i]))
            start = [int(c(w)[i]) for c in coordinates]
            cta, at = shared_place(w, int(dst(w)[i]), m.footprint, 128, "tensor copy")
            home, offset, b = ready_barrier(w, int(bar(w)[i]), "shared::cluster", "tensor copy completing on the barrier")
            if which is None:
                if home is not cta:
                    raise Fault("bounds", "a copy's destination and its mbarrier are in different CTAs")
                targets = [(cta, at, b)]
            else:
                ranks = [c for c in w.cta.cluster.ctas if int(which(w)[i]) >> c.rank & 1]
                targets = [(c, at, _peer(c, offset)) for c in ranks]

            def places(at: int, m: TensorMap = m) -> np.ndarray:
                return m.places(at)[:, None] + np.arange(m.itemsize)

            into_shared(w, targets, m.bytes, m.footprint, _read_tensor(w, m, start), places)

    return run


def _peer(cta: Cta, offset: int) -> MBarrier:
    b = cta.there().barriers.get(offset)
    if b is None:
        raise Fault("barrier", f"a multicast copy completes on {offset:#x} of {cta.name}, where no mbarrier was initialised")
    return b


def _store(form: Form, rank: int, hint: bool, reduce: str) -> Run:
    dst, src = form.address(0)[0], form.address(1)[0]
    coordinates = _coordinates(form, 0, rank)
    _hint(form, hint)

    def run(w: Warp, mask: int) -> None:
        before: set[tuple[int, ...]] = set()
        for i in np.flatnonzero(lanes(mask)):
            m = _map(w, int(dst(w)[i]))
            start = [int(c(w)[i]) for c in coordinates]
            _from_corner(start)
            cta, at = shared_place(w, int(src(w)[i]), m.footprint, 128, "tensor copy")
            index = m.places(at)[:, None] + np.arange(m.itemsize)
            cta.shared.need(index, "tensor copy")
            if reduce and not m.element:
                raise Fault("undefined", "a reduction, and its tensor map does not say of which type the elements are")

            def perform(cta=cta, m=m, start=start, index=index) -> None:
                _write_tensor(w, m, start, cta.shared.data[index], reduce, m.element)

            from_shared(w, 1 << int(i), cta, at, m.bytes, m.footprint, perform, (at, *start) in before)
            before.add((at, *start))

    return run
