"""mbarrier, bar, barrier.cluster, fences, setmaxnreg (PTX ISA 9.7.13, 9.7.19.5)."""
from __future__ import annotations

import numpy as np

from .barriers import MBarrier, NamedBarrier
from .clocks import Clock
from .cta import Cta
from .decode import BLOCK, Form, Run, operation
from .errors import Fault
from .exchange import agreed
from .lanes import LANES, lanes
from .memory import SHARED_WINDOW
from .parser import Address
from .warp import Warp

_SPACES = ("shared", "shared::cta", "shared::cluster")


def barrier_place(w: Warp, address: int, space: str | None) -> tuple[Cta, int]:
    """CTA and offset of an mbarrier's address, checked for alignment."""
    if space is None:
        address -= SHARED_WINDOW
    cta, offset = w.cta.local(address)
    if offset % 8:
        raise Fault("misaligned", f"mbarrier at {offset:#x}")
    cta.shared.check(offset, offset + 8, "mbarrier")
    return cta, offset


def find(w: Warp, address: int, space: str | None, what: str) -> MBarrier:
    cta, offset = barrier_place(w, address, space)
    return cta.barrier(offset, w, what)


def _state(b: MBarrier, phase: int) -> int:
    """The opaque 64-bit state: here the phase and the pending count."""
    return phase << 20 | b.pending


@operation("mbarrier")
def _mbarrier(form: Form) -> Run:
    form.type("b64")
    kind = form.one("init", "inval", "arrive", "arrive_drop", "expect_tx", "complete_tx", "test_wait", "try_wait",
                    "pending_count")
    if kind == "pending_count":
        form.done(2)
        put, get = form.put(0, "u32"), form.get(1, "b64")
        return lambda w, mask: put(w, (get(w) & np.uint64(0xFFFFF)).astype(np.uint32), mask)
    expect = kind.startswith("arrive") and form.has("expect_tx")
    form.has("noComplete")
    relaxed = form.opt("release", "acquire", "relaxed") == "relaxed"
    form.opt("cta", "cluster")
    space = form.opt(*_SPACES)
    if kind in ("test_wait", "try_wait"):
        return _wait(form, kind, space, relaxed)
    if kind == "init":
        form.done(2)
        get, count = form.address(0)[0], form.get(1, "u32")

        def init(w: Warp, mask: int) -> None:
            for i in np.flatnonzero(lanes(mask)):
                _init(w, int(get(w)[i]), int(count(w)[i]), space)

        return init
    if kind == "inval":
        form.done(1)
        get = form.address(0)[0]

        def inval(w: Warp, mask: int) -> None:
            for i in np.flatnonzero(lanes(mask)):
                b = find(w, int(get(w)[i]), space, "mbarrier.inval")
                cta, offset = barrier_place(w, int(get(w)[i]), space)
                if b.tx:
                    raise Fault("barrier", f"inval of {b.describe()}")
                del cta.barriers[offset]
                cta.shared.barrier_bytes[offset:offset + 8] = False
                cta.shared.known[offset:offset + 8] = False

        return inval
    if kind in ("expect_tx", "complete_tx"):
        form.done(2)
        get, size = form.address(0)[0], form.get(1, "u32")

        def tx(w: Warp, mask: int) -> None:
            for i in np.flatnonzero(lanes(mask)):
                b = find(w, int(get(w)[i]), space, f"mbarrier.{kind}")
                (b.expect if kind == "expect_tx" else b.deliver)(int(size(w)[i]))

        return tx
    return _arrive(form, kind, space, expect, relaxed)


def _init(w: Warp, address: int, count: int, space: str | None) -> None:
    cta, offset = barrier_place(w, address, space)
    if offset in cta.barriers:
        raise Fault("barrier", f"init of an mbarrier at {offset:#x} that is in use")
    cta.shared.shadow.write(slice(offset // 4, offset // 4 + 2), w.agent, w.now, w.clock)
    agents = cta.cluster.agents
    where = f"mbarrier at {offset:#x} of {cta.name}"
    cta.barriers[offset] = MBarrier(where, count, agents.new(f"bulk copies on {where}"), w.agent, w.now)
    cta.shared.barrier_bytes[offset:offset + 8] = True
    cta.shared.known[offset:offset + 8] = True


def _arrive(form: Form, kind: str, space: str | None, expect: bool, relaxed: bool) -> Run:
    drop = kind == "arrive_drop"
    result = not isinstance(form.operands[0], Address)
    k = 1 if result else 0
    form.done(k + 1, k + 2)
    put = form.target(form.operands[0], "b64") if result else None
    get = form.address(k)[0]
    more = form.get(k + 1, "u32") if len(form.operands) == k + 2 else None

    def run(w: Warp, mask: int) -> None:
        states = np.zeros(LANES, np.uint64)
        for i in np.flatnonzero(lanes(mask)):
            b = find(w, int(get(w)[i]), space, "arrival at")
            n = int(more(w)[i]) if more is not None else 1
            if expect:
                b.expect(n)
                n = 1
            phase = b.arrive(Clock() if relaxed else w.clock, (w.agent, int(i)), w.name, n, drop)
            states[i] = _state(b, phase)
        w.tick()
        if put is not None:
            put(w, states, mask)

    return run


def _wait(form: Form, kind: str, space: str | None, relaxed: bool) -> Run:
    """test_wait answers at once; try_wait is held back until the phase is complete (its time limit is the machine's)."""
    parity = form.has("parity")
    form.done(*((3,) if kind == "test_wait" else (3, 4)))
    put, get = form.put(0, "pred"), form.address(1)[0]
    state = form.get(2, "u32" if parity else "b64")
    if len(form.operands) == 4:
        form.get(3, "u32")

    def run(w: Warp, mask: int):
        active = np.flatnonzero(lanes(mask))
        addresses, states = get(w)[active], state(w)[active]
        done = np.zeros(LANES, bool)
        found = []
        for i, a, s in zip(active, addresses, states, strict=True):
            b = find(w, int(a), space, f"mbarrier.{kind}")
            p = int(s)
            if parity and p > 1:
                raise Fault("barrier", f"phase parity {p}")
            done[i] = b.phase & 1 != p if parity else b.phase > p >> 20
            found.append((b, p, bool(done[i])))
            if len(set(addresses.tolist())) == 1 and len(set(states.tolist())) == 1:
                done[active] = done[i]
                break
        missing = [(b, p) for b, p, ok in found if not ok]
        if missing and kind == "try_wait":
            b, p = missing[0]
            if parity:
                return w.block("mbarrier", lambda: f"parity {p} of {b.describe()}", lambda: b.phase & 1 != p)
            return w.block("mbarrier", lambda: f"phase {p >> 20} of {b.describe()}", lambda: b.phase > p >> 20)
        for b, _, ok in found:
            if ok and not relaxed:
                w.clock.join(b.complete)
        put(w, done, mask)
        return None

    return run


# ---------------------------------------------------------------------- barriers of the CTA and of the cluster

@operation("bar", "barrier")
def _bar(form: Form) -> Run:
    if form.op == "barrier" and form.has("cluster"):
        return _cluster(form)
    form.has("cta")
    if form.op == "bar" and form.has("warp"):
        if not form.has("sync"):
            raise form.fail("needs .sync")
        form.done(1)
        who = form.get(0, "b32")
        return lambda w, mask: None if w.together(mask, agreed(w, who, mask)) else BLOCK
    kind = form.one("sync", "arrive", "red")
    aligned = form.has("aligned") or form.op == "bar"
    form.converged = aligned
    vote = form.one("popc", "and", "or") if kind == "red" else ""
    if kind == "red":
        form.type("u32" if vote == "popc" else "pred")
    k = 1 if kind == "red" else 0
    n = len(form.operands) - k - (1 if kind == "red" else 0)
    if n not in ((2,) if kind == "arrive" else (1, 2)):
        raise form.fail("operands")
    form.done()
    number, threads = form.get(k, "u32"), form.get(k + 1, "u32") if n == 2 else None
    put = form.put(0, "u32" if vote == "popc" else "pred") if k else None
    yes = form.get(len(form.operands) - 1, "pred") if k else None

    def run(w: Warp, mask: int):
        active = lanes(mask)
        token = w.path.token
        if token is None:
            i = _uniform(number(w)[active], "barrier number")
            if i > 15:
                raise Fault("barrier", f"barrier {i}")
            x, y, z = w.cta.threads
            expected = _uniform(threads(w)[active], "thread count") if threads is not None else -(-x * y * z // 32) * 32
            if expected % 32 or expected == 0:
                raise Fault("barrier", f"{expected} threads at barrier {i}: not a multiple of a warp")
            b = w.cta.named[i]
            if yes is not None:
                b.contribute(int(yes(w)[active].sum()), int(active.sum()))
            mine = b.arrive(w.clock, w.name, 32, expected)
            w.tick()
            if kind == "arrive":
                return None
            w.path.token = token = (b, mine)
        b, mine = token
        if b.generation <= mine:
            return w.block("bar", b.describe, lambda: b.generation > mine)
        w.path.token = None
        w.clock.join(b.complete[-(b.generation - mine)])
        if put is not None:
            every, some, total = b.results[mine]
            value = {"popc": total, "and": every, "or": some}[vote]
            put(w, np.full(LANES, value).astype(np.uint32 if vote == "popc" else bool), mask)
        return None

    return run


def _uniform(x: np.ndarray, what: str) -> int:
    if (x != x[0]).any():
        raise Fault("divergence", f"{what} differs between lanes")
    return int(x[0])


def _cluster(form: Form) -> Run:
    kind = form.one("arrive", "wait")
    order = form.opt("release", "acquire", "relaxed")
    form.converged = form.has("aligned")
    form.done(0)

    def run(w: Warp, mask: int):
        cluster = w.cta.cluster
        b: NamedBarrier = cluster.barrier
        if kind == "arrive":
            threads = sum(32 * len(c.warps) for c in cluster.ctas)
            w.units.setdefault("cluster", ClusterPhase()).mine = b.arrive(
                w.clock if order != "relaxed" else w.clock.released(), w.name, 32, threads)
            w.tick()
            return None
        unit = w.units.get("cluster")
        if unit is None or unit.mine is None:
            raise Fault("barrier", "barrier.cluster.wait without an arrive")
        mine = unit.mine
        if b.generation <= mine:
            return w.block("cluster", b.describe, lambda: b.generation > mine)
        w.clock.join(b.complete[-(b.generation - mine)])
        unit.mine = None
        return None

    return run


class ClusterPhase:
    """The phase of the cluster barrier that a warp has arrived at and not waited for."""

    mine: int | None = None

    def at_exit(self, w: Warp) -> None:
        """Leaving between arrive and wait is allowed."""


# ---------------------------------------------------------------------- fences

@operation("fence", "membar")
def _fence(form: Form) -> Run:
    """Order between generic accesses comes from the barriers here, so only the fences between proxies have effects."""
    if form.has("mbarrier_init"):
        form.one("release")
        form.one("cluster")
        form.done(0)
        return lambda w, mask: _publish_barriers(w, release=True)
    if form.has("proxy"):
        kind = form.one("async", "async.global", "alias", "tensormap::generic")
        if kind.startswith("async"):
            form.opt("global", "shared::cta", "shared::cluster", "shared::{cta,cluster}")
            form.done(0)

            def run(w: Warp, mask: int) -> None:
                w.proxy_fence(mask)
                _publish_barriers(w)

            return run
        form.opt("acquire", "release")
        form.opt("cta", "cluster", "gpu", "sys")
        form.done(0, 2)
        return lambda w, mask: None
    form.opt("sc", "acq_rel", "acquire", "release")
    form.opt("cta", "cluster", "gpu", "sys", "gl")
    form.opt("sync_restrict::shared::cta", "sync_restrict::shared::cluster")
    form.done(0)
    return lambda w, mask: None


def _publish_barriers(w: Warp, release: bool = False) -> None:
    for b in w.cta.barriers.values():
        if w.clock.seen[b.owner] >= b.at:
            b.fenced = True
            if release:
                w.clock.barriers[b.owner] = max(w.clock.barriers[b.owner], b.at)


@operation("setmaxnreg")
def _setmaxnreg(form: Form) -> Run:
    """Registers go back to, and come from, the CTA's pool; .inc waits until the pool has enough (9.7.19.5)."""
    more = form.one("inc", "dec") == "inc"
    if not (form.has("sync") and form.has("aligned")):
        raise form.fail("needs .sync.aligned")
    form.converged = True
    form.type("u32")
    form.done(1)
    n = form.integer(0)
    if not 24 <= n <= 256 or n % 8:
        raise form.fail(f"{n} registers: must be 24 to 256 and a multiple of 8")

    def run(w: Warp, mask: int):
        have = w.register_count
        cta = w.cta
        if more and n < have or not more and n > have:
            raise Fault("registers", f"setmaxnreg.{'inc' if more else 'dec'} to {n} in a warp that has {have}")
        need = (n - have) * 32
        if need > cta.register_pool:
            return w.block("setmaxnreg", lambda: f"{need} registers, the pool has {cta.register_pool}",
                           lambda: need <= cta.register_pool)
        cta.register_pool -= need
        w.register_count = n
        return None

    return run
