"""Asynchronous copies: cp.async, bulk and bulk-tensor copies and reductions (PTX ISA 9.7.9.25 "Data Movement and
Conversion Instructions: Asynchronous copy", 9.7.9.27 for tensors).

A copy is issued by a thread and happens later, at a random time before its completion is waited for.  Its accesses
belong to the async proxy and are stamped with its completion mechanism: an mbarrier's phase, or the thread's bulk group.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .access import combine, one_lane, ordered
from .barriers import MBarrier
from .cta import Cta
from .decode import DTYPES, Form, Run, operation
from .errors import Fault
from .exchange import literal
from .lanes import INDEX, lanes
from .memory import SHARED_WINDOW, Buffer
from .parser import Address
from .sync import barrier_place
from .tensormap import TensorMap
from .warp import Issuer

_SHARED = ("shared::cta", "shared::cluster")


@dataclass
class Copy:
    """One copy in flight; a fault in it is one of the instruction that issued it."""

    issuer: Issuer
    action: Callable[[], None]
    lane: int = 0
    group: int | None = None
    """Of its thread; None before commit."""
    serial: int = 0
    done: bool = False

    def perform(self) -> None:
        if not self.done:
            self.done = True
            with self.issuer:
                self.action()


@dataclass
class Groups:
    """Bulk groups, or cp.async groups, of the threads of a warp (9.7.9.25.3)."""

    agent: int
    what: str
    copies: list[Copy] = field(default_factory=list)
    committed: dict[int, int] = field(default_factory=dict)
    """Groups that a lane has committed."""
    issued: int = 0

    def add(self, w, action: Callable[[], None], lane: int) -> None:
        """A copy that was just issued; its accesses are stamped `issued`."""
        copy = Copy(Issuer(w), action, lane, serial=self.issued)
        self.copies.append(copy)
        w.cta.cluster.pending.append(copy)

    def commit(self, mask: int) -> None:
        for lane in np.flatnonzero(lanes(mask)).tolist():
            number = self.committed.get(lane, 0)
            for c in self.copies:
                if c.lane == lane and c.group is None:
                    c.group = number
            self.committed[lane] = number + 1

    def wait(self, w, mask: int, allowed: int) -> None:
        """Complete all but the newest `allowed` groups of these lanes."""
        left = []
        for c in self.copies:
            old = c.group is not None and mask >> c.lane & 1 and c.group < self.committed.get(c.lane, 0) - allowed
            if old:
                c.perform()
                if c in w.cta.cluster.pending:
                    w.cta.cluster.pending.remove(c)
            else:
                left.append(c)
        self.copies = left
        w.clock.seen[self.agent] = min((c.serial - 1 for c in left), default=self.issued)

    def at_exit(self, w) -> None:
        if self.copies:
            raise Fault("exit", f"{w.name} ends with {len(self.copies)} {self.what} that nothing waits for")


def _groups(w, kind: str = "bulk") -> Groups:
    if kind not in w.units:
        what = "bulk copies from shared memory" if kind == "bulk" else "cp.async copies"
        w.units[kind] = Groups(w.cta.cluster.agents.new(f"{what} of {w.name}"), what)
    return w.units[kind]


def _shared(w, address: int, size: int, align: int, what: str) -> tuple[Cta, int]:
    cta, at = w.cta.local(address)
    if at % align:
        raise Fault("misaligned", f"{what} at {at:#x} of shared memory: must be a multiple of {align}")
    cta.shared.check(at, at + size, what)
    cta.shared.data_only(slice(at, at + size), what)
    return cta, at


def _words(at: int, size: int) -> slice:
    return slice(at // 4, (at + size + 3) // 4)


def _ready(w, address: int, space: str | None, what: str) -> tuple[Cta, int, MBarrier]:
    """An mbarrier that a copy will complete on: the async proxy must know it."""
    cta, offset = barrier_place(w, address, space)
    b = cta.barrier(offset, w, what)
    if not b.fenced:
        raise Fault("proxy", f"{what} of {b.where}, whose initialisation no fence.mbarrier_init or fence.proxy.async follows")
    return cta, offset, b


def into_shared(w, targets: list[tuple[Cta, int, MBarrier]], size: int, source: Callable[[], np.ndarray],
                places: Callable[[int], np.ndarray]) -> None:
    """A copy of `size` bytes to the same offset of one or several CTAs, completing on their mbarriers.

    source gives the bytes, places(offset) where each of them goes.
    """
    for cta, at, b in targets:
        cta.shared.shadow.write(_words(at, size), b.agent, b.phase + 1, w.clock, asynchronous=True)

    def perform() -> None:
        data = source()
        for cta, at, b in targets:
            index = places(at)
            cta.shared.data[index] = data
            cta.shared.known[index] = True
            b.deliver(size)

    w.cta.cluster.pending.append(Copy(Issuer(w), perform))
    w.cta.cluster.stats.tma_load_bytes += size * len(targets)
    w.cta.cluster.stats.tma_copies += 1


def from_shared(w, mask: int, cta: Cta, at: int, size: int, perform: Callable[[], None], again: bool = False) -> None:
    """A copy that reads shared memory and belongs to a bulk group of the executing thread.

    again: another lane of this instruction does the same; it is not counted, since the machine issues one.
    """
    groups = _groups(w)
    groups.issued += 1
    cta.shared.shadow.read(_words(at, size), groups.agent, groups.issued, w.clock, asynchronous=True)
    groups.add(w, perform, one_lane(mask))
    if again:
        return
    w.cta.cluster.stats.tma_store_bytes += size
    w.cta.cluster.stats.tma_copies += 1


# ---------------------------------------------------------------------- tensors

def _map(w, address: int) -> TensorMap:
    found = w.cta.maps.get(address)
    if found is None:
        raise Fault("bounds", f"no tensor map at {address:#x}")
    return found


def _read_tensor(w, m: TensorMap, start: list[int]) -> np.ndarray:
    at, inside = m.elements(start)
    b = m.buffer
    assert b is not None
    index = at[inside][:, None] + np.arange(m.itemsize)
    if index.size:
        b.check(int(index.min()), int(index.max()) + 1, "tensor copy")
        b.need(index, "tensor copy")
        ordered(w, b, index, "tensor copy from")
    data = np.zeros((len(at), m.itemsize), np.uint8)
    data[inside] = b.data[index]
    return data


def _write_tensor(w, m: TensorMap, start: list[int], data: np.ndarray, op: str, t: str) -> None:
    at, inside = m.elements(start)
    b = m.buffer
    assert b is not None
    index = at[inside][:, None] + np.arange(m.itemsize)
    if index.size:
        b.check(int(index.min()), int(index.max()) + 1, "tensor copy")
        _put(w, b, index, data[inside], op, t)


def _put(w, b: Buffer, index: np.ndarray, data: np.ndarray, op: str, t: str) -> None:
    from .access import claim

    if op:
        b.need(index, "bulk reduction")
        dtype = DTYPES[t]
        old = np.ascontiguousarray(b.data[index]).reshape(-1).view(dtype)
        data = np.ascontiguousarray(combine(op, t)(old, np.ascontiguousarray(data).reshape(-1).view(dtype))).view(
            np.uint8).reshape(index.shape)
    else:
        claim(w, b, index)
    b.data[index] = data
    b.known[index] = True


def tensor(form: Form, reduce: str) -> Run:
    """cp.async.bulk.tensor and cp.reduce.async.bulk.tensor of the tiled mode."""
    rank = int(form.one("1d", "2d", "3d", "4d", "5d")[0])
    form.has("tile")
    hint = form.has("L2::cache_hint")
    if form.has("mbarrier::complete_tx::bytes"):
        many = form.has("multicast::cluster")
        if form.mods and form.mods[0] in _SHARED and form.mods[1:] == ["global"] and not reduce:
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

    def run(w, mask: int) -> None:
        for i in np.flatnonzero(lanes(mask)):
            m = _map(w, int(src(w)[i]))
            start = [int(c(w)[i]) for c in coordinates]
            cta, at = _shared(w, int(dst(w)[i]), m.bytes, 128, "tensor copy")
            home, offset, b = _ready(w, int(bar(w)[i]), "shared::cluster", "tensor copy completing on the barrier")
            if which is None:
                if home is not cta:
                    raise Fault("bounds", "a copy's destination and its mbarrier are in different CTAs")
                targets = [(cta, at, b)]
            else:
                ranks = [c for c in w.cta.cluster.ctas if int(which(w)[i]) >> c.rank & 1]
                targets = [(c, at, _peer(c, offset)) for c in ranks]

            def places(at: int, m: TensorMap = m) -> np.ndarray:
                return m.places(at)[:, None] + np.arange(m.itemsize)

            into_shared(w, targets, m.bytes, lambda m=m, start=start: _read_tensor(w, m, start), places)

    return run


def _peer(cta: Cta, offset: int) -> MBarrier:
    b = cta.barriers.get(offset)
    if b is None:
        raise Fault("barrier", f"a multicast copy completes on {offset:#x} of {cta.name}, where no mbarrier was initialised")
    return b


def _store(form: Form, rank: int, hint: bool, reduce: str) -> Run:
    dst, src = form.address(0)[0], form.address(1)[0]
    coordinates = _coordinates(form, 0, rank)
    _hint(form, hint)

    def run(w, mask: int) -> None:
        before: set[tuple[int, ...]] = set()
        for i in np.flatnonzero(lanes(mask)):
            m = _map(w, int(dst(w)[i]))
            start = [int(c(w)[i]) for c in coordinates]
            cta, at = _shared(w, int(src(w)[i]), m.bytes, 128, "tensor copy")
            index = m.places(at)[:, None] + np.arange(m.itemsize)
            cta.shared.need(slice(at, at + m.bytes), "tensor copy")
            t = {2: "u16", 4: "f32", 8: "u64"}[m.itemsize] if reduce else ""

            def perform(cta=cta, m=m, start=start, index=index, t=t) -> None:
                _write_tensor(w, m, start, cta.shared.data[index], reduce, t)

            from_shared(w, 1 << int(i), cta, at, m.bytes, perform, (at, *start) in before)
            before.add((at, *start))

    return run


# ---------------------------------------------------------------------- plain bulk copies

def _size(n: int) -> int:
    if n % 16 or n <= 0:
        raise Fault("misaligned", f"bulk copy of {n} bytes: must be a multiple of 16")
    return n


def plain(form: Form, reduce: str, t: str) -> Run:
    """cp.async.bulk and cp.reduce.async.bulk without a tensor map."""
    hint = form.has("L2::cache_hint")
    if form.has("mbarrier::complete_tx::bytes"):
        if reduce:
            raise form.fail("reduction into shared memory")
        to, source = form.mods.pop(0), form.mods.pop(0)
        if to not in _SHARED or source not in ("global", "shared::cta"):
            raise form.fail("state spaces")
        form.done(4 + hint)
        dst, src, size, bar = form.address(0)[0], form.address(1)[0], form.get(2, "u32"), form.address(3)[0]

        def load(w, mask: int) -> None:
            for i in np.flatnonzero(lanes(mask)):
                n = _size(int(size(w)[i]))
                cta, at = _shared(w, int(dst(w)[i]), n, 16, "bulk copy")
                home, _, b = _ready(w, int(bar(w)[i]), "shared::cluster", "bulk copy completing on the barrier")
                if home is not cta:
                    raise Fault("bounds", "a copy's destination and its mbarrier are in different CTAs")
                a = int(src(w)[i])
                if a % 16:
                    raise Fault("misaligned", f"bulk copy from {a:#x}")
                if source == "global":
                    buffer, offset = w.cta.cluster.memory.find(a, n, "bulk copy")
                    span = slice(offset, offset + n)
                    buffer.need(span, "bulk copy")
                    ordered(w, buffer, span, "bulk copy from")
                    data = buffer.data
                else:
                    other, offset = _shared(w, a, n, 16, "bulk copy")
                    span = slice(offset, offset + n)
                    other.shared.need(span, "bulk copy")
                    other.shared.shadow.read(_words(offset, n), b.agent, b.phase + 1, w.clock, asynchronous=True)
                    data = other.shared.data
                into_shared(w, [(cta, at, b)], n, lambda data=data, span=span: data[span].copy(),
                            lambda at, n=n: slice(at, at + n))  # type: ignore[arg-type, return-value]

        return load
    form.one("bulk_group")
    if form.mods != ["global", "shared::cta"]:
        raise form.fail("state spaces")
    form.mods.clear()
    form.done(3 + hint)
    dst, src, size = form.address(0)[0], form.address(1)[0], form.get(2, "u32")

    def store(w, mask: int) -> None:
        for i in np.flatnonzero(lanes(mask)):
            n = _size(int(size(w)[i]))
            cta, at = _shared(w, int(src(w)[i]), n, 16, "bulk copy")
            cta.shared.need(slice(at, at + n), "bulk copy")
            buffer, offset = w.cta.cluster.memory.find(int(dst(w)[i]), n, "bulk copy")
            if offset % 16:
                raise Fault("misaligned", f"bulk copy to byte {offset:#x}")
            index = offset + np.arange(n)

            def perform(cta=cta, at=at, n=n, buffer=buffer, index=index) -> None:
                _put(w, buffer, index, cta.shared.data[at:at + n], reduce, t)

            from_shared(w, 1 << int(i), cta, at, n, perform)

    return store


# ---------------------------------------------------------------------- opcodes

@operation("cp")
def _cp(form: Form) -> Run:
    reduce = form.has("reduce")
    if not form.has("async"):
        raise form.fail("needs .async")
    if not form.has("bulk"):
        return _small(form)
    if form.has("commit_group"):
        form.done(0)
        return lambda w, mask: _groups(w).commit(mask)
    if form.has("wait_group"):
        form.has("read")  # the writes of a group happen together with its reads here
        form.done(1)
        n = form.integer(0)
        return lambda w, mask: _groups(w).wait(w, mask, n)
    if form.has("prefetch"):
        return lambda w, mask: None
    op, t = "", ""
    if reduce:
        op = form.one("add", "min", "max", "and", "or", "xor", "inc", "dec")
        form.has("noftz")
    if form.has("tensor"):
        return tensor(form, op)
    if reduce:
        t = form.type("u32", "s32", "u64", "s64", "b32", "b64", "f32", "f64")
    return plain(form, op, t)


def _small(form: Form) -> Run:
    """cp.async of 4, 8 or 16 bytes by each thread, non-bulk (9.7.9.25.2)."""
    if form.has("commit_group"):
        form.done(0)
        return lambda w, mask: _groups(w, "cp.async").commit(mask)
    if form.has("wait_group"):
        form.done(1)
        n = form.integer(0)
        return lambda w, mask: _groups(w, "cp.async").wait(w, mask, n)
    if form.has("wait_all"):
        form.done(0)

        def wait_all(w, mask: int) -> None:
            _groups(w, "cp.async").commit(mask)
            _groups(w, "cp.async").wait(w, mask, 0)

        return wait_all
    form.one("ca", "cg")
    form.one("shared", "shared::cta")
    form.one("global")
    form.opt("L2::64B", "L2::128B", "L2::256B")
    form.done(3, 4)
    dst, src = form.address(0)[0], form.address(1)[0]
    size = literal(form, 2)
    if size not in (4, 8, 16):
        raise form.fail("copies 4, 8 or 16 bytes")
    partial = form.get(3, "u32") if len(form.operands) == 4 else None

    def run(w, mask: int) -> None:
        for i in np.flatnonzero(lanes(mask)):
            cta, at = _shared(w, int(dst(w)[i]), size, size, "cp.async")
            n = int(partial(w)[i]) if partial is not None else size
            data = np.zeros(size, np.uint8)
            if n:
                buffer, offset = w.cta.cluster.memory.find(int(src(w)[i]), n, "cp.async")
                buffer.need(slice(offset, offset + n), "cp.async")
                data[:n] = buffer.data[offset:offset + n]
            groups = _groups(w, "cp.async")
            groups.issued += 1
            cta.shared.shadow.write(_words(at, size), groups.agent, groups.issued, w.clock)

            def perform(cta=cta, at=at, data=data) -> None:
                cta.shared.data[at:at + len(data)] = data
                cta.shared.known[at:at + len(data)] = True

            groups.add(w, perform, int(i))

    return run


__all__ = ["INDEX", "SHARED_WINDOW", "Copy", "Groups", "from_shared", "into_shared"]
