"""mov, cvta, branches and what has no effect here (PTX ISA 9.7.9 "Data Movement", 9.7.12 "Control
Flow", 9.7.19 "Miscellaneous")."""
from __future__ import annotations

import numpy as np

from .decode import Form, Operand, Run, operation
from .errors import Fault
from .lanes import lanes
from .memory import PARAM_BASE, RANK_SHIFT, SHARED_WINDOW
from .parser import WIDTHS, Vector
from .warp import Warp

_ALL = ("pred", "b16", "u16", "s16", "b32", "u32", "s32", "b64", "u64", "s64", "f32", "f64")


@operation("mov")
def _mov(form: Form) -> Run:
    t = form.type(*_ALL)
    form.done(2)
    d, s = form.operands
    return _keeping_time(form, _plain_mov(form, t, d, s))


def _keeping_time(form: Form, run: Run) -> Run:
    """A copy of registers counts, for wgmma.fence, as written when they were; see `wgmma._check_registers`."""
    reads, writes = tuple(form.reads), tuple(form.writes)
    if not reads:
        return run

    def copy(w: Warp, mask: int) -> None:
        wrote = w.r.wrote
        before = max(wrote[i] for i in reads)
        run(w, mask)
        for i in writes:
            wrote[i] = before

    return copy


def _plain_mov(form: Form, t: str, d: Operand, s: Operand) -> Run:
    if isinstance(d, Vector):
        n = WIDTHS[t] // len(d.items)
        puts = [form.target(o, f"b{n}") for o in d.items]
        get = form.get(1, t)

        def unpack(w: Warp, mask: int) -> None:
            x = get(w)
            for k, put in enumerate(puts):
                put(w, (x >> x.dtype.type(n * k)).astype(f"u{n // 8}"), mask)

        return unpack
    if isinstance(s, Vector):
        n = WIDTHS[t] // len(s.items)
        gets = [form.value(o, f"b{n}") for o in s.items]
        put = form.put(0, t)
        wide = np.dtype(f"u{WIDTHS[t] // 8}").type

        def pack(w: Warp, mask: int) -> None:
            x = np.zeros(32, wide)
            for k, g in enumerate(gets):
                x |= g(w).astype(wide) << wide(n * k)
            put(w, x, mask)

        return pack
    return form.alu((t, t), lambda a: a)


@operation("cvta")
def _cvta(form: Form) -> Run:
    """The windows of global, parameter and constant memory are at their generic addresses; shared memory's is not."""
    t = form.type("u64", "u32")
    to = form.has("to")
    space = form.one("global", "param", "const", "shared", "shared::cta", "shared::cluster", "local")
    form.done(2)
    put, get = form.put(0, t), form.get(1, t)
    if not space.startswith("shared"):
        return lambda w, mask: put(w, get(w), mask)

    def run(w: Warp, mask: int) -> None:
        a = get(w).astype(np.int64)
        if not to:
            a = np.where(a >> RANK_SHIFT == 0, a + (w.cta.rank + 1 << RANK_SHIFT), a) + SHARED_WINDOW
        else:
            a = a - SHARED_WINDOW
            if ((a < 0) | (a >> RANK_SHIFT > 64))[lanes(mask)].any():
                raise Fault("bounds", "a generic address outside shared memory is converted to it")
            own = a >> RANK_SHIFT == w.cta.rank + 1
            a = np.where(own, a & (1 << RANK_SHIFT) - 1, a)
        put(w, a.astype(f"u{WIDTHS[t] // 8}"), mask)

    return run


@operation("isspacep")
def _isspacep(form: Form) -> Run:
    space = form.one("global", "param", "const", "shared", "shared::cta", "shared::cluster")
    form.done(2)
    put, get = form.put(0, "pred"), form.get(1, "u64")

    def run(w: Warp, mask: int) -> None:
        a = np.where(lanes(mask), get(w), PARAM_BASE)
        put(w, np.array([w.cta.space(int(x)) == space.split("::")[0] for x in a]), mask)

    return run


@operation("mapa")
def _mapa(form: Form) -> Run:
    t = form.type("u32", "u64")
    space = form.opt("shared::cluster")
    form.done(3)
    put, get, rank = form.put(0, t), form.get(1, t), form.get(2, "u32")

    def run(w: Warp, mask: int) -> None:
        a, n = get(w).astype(np.int64), rank(w).astype(np.int64)
        far = (n >= len(w.cta.cluster.ctas)) & lanes(mask)
        if far.any():
            raise Fault("bounds", f"mapa to CTA rank {int(n[far].max())} of a cluster of {len(w.cta.cluster.ctas)}")
        offset = (a if space else a - SHARED_WINDOW) & (1 << RANK_SHIFT) - 1
        a = offset + (n + 1 << RANK_SHIFT) + (0 if space else SHARED_WINDOW)
        put(w, a.astype(f"u{WIDTHS[t] // 8}"), mask)

    return run


@operation("getctarank")
def _getctarank(form: Form) -> Run:
    t = form.type("u32", "u64")
    space = form.opt("shared::cluster")
    form.done(2)
    put, get = form.put(0, "u32"), form.get(1, t)

    def run(w: Warp, mask: int) -> None:
        a = get(w).astype(np.int64) - (0 if space else SHARED_WINDOW)
        rank = a >> RANK_SHIFT
        put(w, np.where(rank == 0, w.cta.rank, rank - 1).astype(np.uint32), mask)

    return run


@operation("bra", "ret", "exit")
def _control(form: Form) -> Run:
    """Executed by the warp itself."""
    form.has("uni")
    form.done(*((1,) if form.op == "bra" else (0,)))
    return lambda w, mask: None


@operation("trap")
def _trap(form: Form) -> Run:
    form.done(0)

    def run(w: Warp, mask: int) -> None:
        raise Fault("trap", "the kernel executes trap")

    return run


@operation("griddepcontrol", "nanosleep", "pmevent")
def _nothing(form: Form) -> Run:
    """griddepcontrol: launches run one after another here, so a dependent one finds everything done."""
    if form.op == "griddepcontrol":
        form.one("launch_dependents", "wait")
        form.done(0)
    else:
        form.has("u32")
        form.done(1)
    return lambda w, mask: None


@operation("prefetch", "prefetchu")
def _prefetch(form: Form) -> Run:
    kind = form.one("tensormap", "L1", "L2")
    form.opt("global", "local", "param", "const")
    form.done(1)
    get, _ = form.address(0)

    def run(w: Warp, mask: int) -> None:
        if kind == "tensormap":
            for a in {int(x) for x in get(w)[lanes(mask)]}:
                if a not in w.cta.maps:
                    raise Fault("bounds", f"no tensor map at {a:#x} ({a - PARAM_BASE} bytes into the parameters)")

    return run
