"""cp.async, cp.async.bulk and cp.reduce.async.bulk, and the opcodes that share their name (PTX ISA 9.7.9.25)."""
from __future__ import annotations

import numpy as np

from .access import ordered
from .copies import SHARED, from_shared, groups_of, into_shared, put_global, ready_barrier, shared_place, words_of
from .decode import Form, Run, operation
from .errors import Fault
from .exchange import literal
from .lanes import lanes
from .tensors import tensor
from .warp import Warp


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
        if to not in SHARED or source not in ("global", "shared::cta"):
            raise form.fail("state spaces")
        form.done(4 + hint)
        dst, src, size, bar = form.address(0)[0], form.address(1)[0], form.get(2, "u32"), form.address(3)[0]

        def load(w: Warp, mask: int) -> None:
            for i in np.flatnonzero(lanes(mask)):
                n = _size(int(size(w)[i]))
                cta, at = shared_place(w, int(dst(w)[i]), n, 16, "bulk copy")
                home, _, b = ready_barrier(w, int(bar(w)[i]), "shared::cluster", "bulk copy completing on the barrier")
                if home is not cta:
                    raise Fault("bounds", "a copy's destination and its mbarrier are in different CTAs")
                a = int(src(w)[i])
                if a % 16:
                    raise Fault("misaligned", f"bulk copy from {a:#x}")
                if source == "global":
                    buffer, offset = w.cta.cluster.memory.find(a, n, "bulk copy")
                    span = slice(offset, offset + n)
                    buffer.need(span, "bulk copy")
                    ordered(w, buffer, span, "bulk copy from", asynchronous=True)
                    data = buffer.data
                else:
                    other, offset = shared_place(w, a, n, 16, "bulk copy")
                    span = slice(offset, offset + n)
                    other.shared.need(span, "bulk copy")
                    other.shared.shadow.read(words_of(offset, n), b.agent, b.phase + 1, w.clock, asynchronous=True)
                    data = other.shared.data
                into_shared(w, [(cta, at, b)], n, n, lambda data=data, span=span: data[span].copy(),
                            lambda at, n=n: slice(at, at + n))  # type: ignore[arg-type, return-value]

        return load
    form.one("bulk_group")
    if form.mods != ["global", "shared::cta"]:
        raise form.fail("state spaces")
    form.mods.clear()
    form.done(3 + hint)
    dst, src, size = form.address(0)[0], form.address(1)[0], form.get(2, "u32")

    def store(w: Warp, mask: int) -> None:
        for i in np.flatnonzero(lanes(mask)):
            n = _size(int(size(w)[i]))
            cta, at = shared_place(w, int(src(w)[i]), n, 16, "bulk copy")
            cta.shared.need(slice(at, at + n), "bulk copy")
            buffer, offset = w.cta.cluster.memory.find(int(dst(w)[i]), n, "bulk copy")
            if offset % 16:
                raise Fault("misaligned", f"bulk copy to byte {offset:#x}")
            index = offset + np.arange(n)

            def perform(cta=cta, at=at, n=n, buffer=buffer, index=index) -> None:
                put_global(w, buffer, index, cta.shared.data[at:at + n], reduce, t)

            from_shared(w, 1 << int(i), cta, at, n, n, perform)

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
        return lambda w, mask: groups_of(w).commit(mask)
    if form.has("wait_group"):
        form.has("read")  # the writes of a group happen together with its reads here
        form.done(1)
        n = form.integer(0)
        return lambda w, mask: groups_of(w).wait(w, mask, n)
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
    """cp.async of 4, 8 or 16 bytes by each thread, non-bulk (9.7.9.25)."""
    if form.has("commit_group"):
        form.done(0)
        return lambda w, mask: groups_of(w, "cp.async").commit(mask)
    if form.has("wait_group"):
        form.done(1)
        n = form.integer(0)
        return lambda w, mask: groups_of(w, "cp.async").wait(w, mask, n)
    if form.has("wait_all"):
        form.done(0)

        def wait_all(w: Warp, mask: int) -> None:
            groups_of(w, "cp.async").commit(mask)
            groups_of(w, "cp.async").wait(w, mask, 0)

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

    def run(w: Warp, mask: int) -> None:
        for i in np.flatnonzero(lanes(mask)):
            cta, at = shared_place(w, int(dst(w)[i]), size, size, "cp.async")
            n = int(partial(w)[i]) if partial is not None else size
            data = np.zeros(size, np.uint8)
            if n:
                buffer, offset = w.cta.cluster.memory.find(int(src(w)[i]), n, "cp.async")
                buffer.need(slice(offset, offset + n), "cp.async")
                data[:n] = buffer.data[offset:offset + n]
            groups = groups_of(w, "cp.async")
            groups.issued += 1
            cta.shared.shadow.write(words_of(at, size), groups.agent, groups.issued, w.clock)

            def perform(cta=cta, at=at, data=data) -> None:
                cta.shared.data[at:at + len(data)] = data
                cta.shared.known[at:at + len(data)] = True

            groups.add(w, perform, int(i))

    return run
