"""Programs in which lanes meet: shuffles, votes, elections, reductions, barriers, atomics."""
from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from .exact import signed
from .program import Program

FULL = 0xFFFFFFFF


def _draw(seed: int, n: int = 32, bits: int = 32) -> tuple[int, ...]:
    rnd = random.Random(seed)
    return tuple(rnd.getrandbits(bits) for _ in range(n))


def whole(name: str, form: str, body: str, ins: Sequence[tuple[str, tuple[int, ...]]], outs: Sequence[str],
          want: Sequence[Sequence[int]], threads: int = 32, shared: int = 0, buffer: Sequence[int] = (),
          want_buffer: Sequence[int] = ()) -> Program:
    """A program whose results are given for all threads at once."""
    return Program(name, form, body, tuple(ins), tuple(outs), tuple(tuple(w) for w in want), threads, shared,
                   buffer=tuple(buffer), want_buffer=tuple(want_buffer))


def _shuffles() -> list[Program]:
    found = []
    a = _draw(1)

    def source(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
        clamp, mask = c & 31, c >> 8 & 31
        top, low = lane & mask | clamp & ~mask & 31, lane & mask
        j = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": low | b & ~mask & 31}[mode]
        inside = j >= top if mode == "up" else j <= top
        return (j if inside else lane), inside

    for mode, b, c in (("bfly", 1, 31), ("bfly", 2, 31), ("bfly", 16, 31), ("bfly", 5, 0x181F), ("up", 1, 0), ("up", 3, 0x1800),
                       ("down", 2, 31), ("down", 7, 0x181F), ("idx", 0, 31), ("idx", 13, 31), ("idx", 2, 0x1C1F)):
        moves = [source(mode, i, b, c) for i in range(32)]
        found.append(whole(f"shfl.sync.{mode} {b} {c:#x}", f"shfl.sync.{mode}.b32",
                           f".reg .pred z; shfl.sync.{mode}.b32 d|z, a, {b}, {c}, -1; selp.b32 e, 1, 0, z;", [("b32", a)],
                           ["b32", "b32"], [[a[j] for j, _ in moves], [int(p) for _, p in moves]]))
    lanes = tuple((7 * i + 3) % 32 for i in range(32))
    found.append(whole("shfl.sync.idx by register", "shfl.sync.idx.b32", "shfl.sync.idx.b32 d, a, b, 31, -1;",
                       [("b32", a), ("b32", lanes)], ["b32"], [[a[j] for j in lanes]]))
    half = [a[i ^ 1] if i < 16 else 5 for i in range(32)]
    found.append(whole("shfl.sync in half a warp", "shfl.sync.bfly.b32", ".reg .pred z; setp.lt.u32 z, %lane, 16; mov.b32 d, 5; "
                       "@!z bra DONE; shfl.sync.bfly.b32 d, a, 1, 31, 0xffff; DONE: bar.warp.sync -1;", [("b32", a)], ["b32"], [half]))
    return found


def _votes() -> list[Program]:
    found = []
    patterns = {"none": (0,) * 32, "one": tuple(int(i == 9) for i in range(32)), "some": tuple(_draw(3)[i] & 1 for i in range(32)),
                "every": (1,) * 32}
    for name, p in patterns.items():
        ballot = sum(x << i for i, x in enumerate(p))
        for mode, value in (("any", any(p)), ("all", all(p)), ("uni", len(set(p)) == 1)):
            found.append(whole(f"vote.sync.{mode} {name}", f"vote.sync.{mode}.pred", ".reg .pred y, z; setp.ne.b32 y, a, 0; "
                               f"vote.sync.{mode}.pred z, y, -1; selp.b32 d, 1, 0, z;", [("b32", p)], ["b32"], [[int(value)] * 32]))
        found.append(whole(f"vote.sync.ballot {name}", "vote.sync.ballot.b32", ".reg .pred y; setp.ne.b32 y, a, 0; "
                           "vote.sync.ballot.b32 d, y, -1;", [("b32", p)], ["b32"], [[ballot] * 32]))
    found.append(whole("elect.sync one leader", "elect.sync", ".reg .pred z; .reg .b32 n, m; .reg .pred y; elect.sync n|z, -1; "
                       "vote.sync.ballot.b32 m, z, -1; popc.b32 d, m; setp.eq.u32 y, %lane, n; selp.b32 e, 1, 0, y; "
                       "selp.b32 m, 1, 0, z; xor.b32 e, e, m;", [], ["b32", "b32"], [[1] * 32, [0] * 32]))
    a = _draw(5)
    s = [signed(x, 32) for x in a]
    for op, t, value in (("min", "s32", min(s)), ("max", "s32", max(s)), ("add", "s32", sum(s)), ("min", "u32", min(a)),
                         ("max", "u32", max(a)), ("add", "u32", sum(a))):
        found.append(whole(f"redux.sync.{op}.{t}", f"redux.sync.{op}.{t}", f"redux.sync.{op}.{t} d, a, -1;", [("b32", a)], ["b32"],
                           [[value & FULL] * 32]))
    bits = {"and": FULL, "or": 0, "xor": 0}
    for x in a:
        bits = {"and": bits["and"] & (x | 3), "or": bits["or"] | (x | 3), "xor": bits["xor"] ^ (x | 3)}
    for op, value in bits.items():
        found.append(whole(f"redux.sync.{op}.b32", f"redux.sync.{op}.b32", f"or.b32 a, a, 3; redux.sync.{op}.b32 d, a, -1;",
                           [("b32", a)], ["b32"], [[value] * 32]))
    few = tuple(x % 5 for x in a)
    found.append(whole("match.any.sync", "match.any.sync.b32", "match.any.sync.b32 d, a, -1;", [("b32", few)], ["b32"],
                       [[sum(1 << j for j, y in enumerate(few) if y == x) for x in few]]))
    found.append(whole("match.all.sync", "match.all.sync.b32", ".reg .pred z; match.all.sync.b32 d|z, a, -1; selp.b32 e, 1, 0, z;",
                       [("b32", (7,) * 32)], ["b32", "b32"], [[FULL] * 32, [1] * 32]))
    found.append(whole("activemask", "activemask.b32", "activemask.b32 d;", [], ["b32"], [[FULL] * 32]))
    found.append(whole("elect then diverge", "elect.sync", ".reg .pred z; mov.b32 d, 3; elect.sync _|z, -1; @!z bra DONE; mov.b32 d, 4;"
                       " DONE: redux.sync.add.u32 d, d, -1;", [], ["b32"], [[97] * 32]))
    return found


def _barriers() -> list[Program]:
    """Values handed over between warps through shared memory."""
    a = _draw(7, 128)
    put = ".reg .b32 s, t; mov.b32 s, smem; shl.b32 t, %thread, 2; add.u32 s, s, t; st.shared.b32 [s], a;"
    get = "xor.b32 t, t, 384; mov.b32 s, smem; add.u32 s, s, t; ld.shared.b32 d, [s];"
    other = [a[i ^ 96] for i in range(128)]
    found = [
        whole("bar.sync", "bar.sync", f"{put} bar.sync 0; {get}", [("b32", a)], ["b32"], [other], 128, 512),
        whole("bar.sync with a count", "bar.sync", f"{put} bar.sync 3, 128; {get}", [("b32", a)], ["b32"], [other], 128, 512),
        whole("barrier.cta.sync", "barrier.cta.sync.aligned", f"{put} barrier.cta.sync.aligned 2; {get}", [("b32", a)], ["b32"],
              [other], 128, 512),
        whole("bar.arrive", "bar.arrive", ".reg .pred z; setp.lt.u32 z, %thread, 64; @z bra FIRST; bar.sync 1, 128; .reg .b32 s, t; "
              "mov.b32 s, smem; shl.b32 t, %thread, 2; sub.u32 t, t, 256; add.u32 s, s, t; ld.shared.b32 d, [s]; bra DONE; FIRST: "
              "mov.b32 s, smem; shl.b32 t, %thread, 2; add.u32 s, s, t; st.shared.b32 [s], a; bar.arrive 1, 128; mov.b32 d, 0; DONE:"
              " bar.sync 0;", [("b32", a)], ["b32"], [[0] * 64 + list(a[:64])], 128, 512),
    ]
    p = tuple(x & 1 for x in a)
    for op, value in (("popc.u32", sum(p)), ("or.pred", int(any(p))), ("and.pred", int(all(p)))):
        name = f"bar.red.{op}"
        result = "d" if op == "popc.u32" else "y"
        body = f".reg .pred y, z; setp.ne.b32 z, a, 0; {name} {result}, 0, z;"
        found.append(whole(name, name, body + ("" if result == "d" else " selp.b32 d, 1, 0, y;"), [("b32", p)], ["b32"],
                           [[value] * 128], 128))
    found.append(whole("setmaxnreg", "setmaxnreg.dec.sync.aligned.u32", ".reg .pred z; setp.lt.u32 z, %thread, 128; @z bra LESS; "
                       "setmaxnreg.inc.sync.aligned.u32 168; bra DONE; LESS: setmaxnreg.dec.sync.aligned.u32 40; DONE: "
                       "bar.sync 0; add.u32 d, a, 1;", [("b32", a)], ["b32"], [[x + 1 & FULL for x in a * 2]], 256))
    found[-1] = _wider(found[-1], 256, a)
    return found


def _wider(p: Program, threads: int, a: tuple[int, ...]) -> Program:
    from dataclasses import replace

    return replace(p, threads=threads, directives=".maxnreg 128", ins=(("b32", tuple((a * 2)[:threads])),))


def _mbarriers() -> list[Program]:
    start = (".reg .b32 m, n, s, t; .reg .b64 st; .reg .pred first, z; mov.b32 m, smem; setp.eq.u32 first, %thread, 0; "
             "@!first bra READY; mbarrier.init.shared.b64 [m], COUNT; fence.mbarrier_init.release.cluster; READY: bar.sync 0;")
    wait = ("WAIT: mbarrier.try_wait.parity.shared.b64 z, [m], PARITY, 10000000; @z bra DONE; bra WAIT; DONE:")
    a = _draw(9, 64)
    put = "shl.b32 t, %thread, 2; add.u32 s, m, t; st.shared.b32 [s+64], a;"
    get = "xor.b32 t, t, 128; add.u32 s, m, t; ld.shared.b32 d, [s+64];"
    other = [a[i ^ 32] for i in range(64)]
    arrive = "mbarrier.arrive.shared.b64 st, [m];"
    found = [
        whole("mbarrier of all threads", "mbarrier.arrive.shared.b64",
              start.replace("COUNT", "64") + put + arrive + wait.replace("PARITY", "0") + get, [("b32", a)], ["b32"], [other], 64, 512),
        whole("mbarrier with a count", "mbarrier.arrive.shared.b64",
              start.replace("COUNT", "128") + put + "mbarrier.arrive.shared.b64 st, [m], 2;" + wait.replace("PARITY", "0") + get,
              [("b32", a)], ["b32"], [other], 64, 512),
        whole("mbarrier state", "mbarrier.test_wait.shared.b64", start.replace("COUNT", "64") + put + arrive
              + "WAIT: mbarrier.test_wait.shared.b64 z, [m], st; @z bra DONE; bra WAIT; DONE:" + get, [("b32", a)], ["b32"], [other],
              64, 512),
        whole("mbarrier before its first phase", "mbarrier.try_wait.parity.shared.b64", start.replace("COUNT", "64")
              + wait.replace("PARITY", "1") + "mov.b32 d, 1;", [("b32", a)], ["b32"], [[1] * 64], 64, 512),
        whole("mbarrier not complete", "mbarrier.test_wait.parity.shared.b64", start.replace("COUNT", "65")
              + arrive + "mbarrier.test_wait.parity.shared.b64 z, [m], 0; selp.b32 d, 1, 0, z;", [("b32", a)], ["b32"], [[0] * 64],
              64, 512),
        whole("mbarrier bytes", "mbarrier.arrive.expect_tx.shared.b64", start.replace("COUNT", "1") + "@!first bra LATER; "
              "mbarrier.arrive.expect_tx.shared.b64 st, [m], 0; LATER: " + wait.replace("PARITY", "0") + "mov.b32 d, 2;",
              [("b32", a)], ["b32"], [[2] * 64], 64, 512),
    ]
    return found


def _atomics() -> list[Program]:
    a = tuple(x % 1000 for x in _draw(11))
    begin = ".reg .b32 m; .reg .pred z; mov.b32 m, smem; setp.eq.u32 z, %thread, 0; @z st.shared.b32 [m], 100; bar.sync 0;"
    end = "bar.sync 0; ld.shared.b32 d, [m];"
    functions: dict[str, Callable[[], int]] = {
        "add.u32": lambda: 100 + sum(a), "min.s32": lambda: min(100, *a), "max.s32": lambda: max(100, *a)}
    found = []
    for op, f in functions.items():
        form = f"red.shared.{op}"
        found.append(whole(form, form, f"{begin} {form} [m], a; {end}", [("b32", a)], ["b32"], [[f()] * 32], 32, 16))
    for op in ("and", "or", "xor"):
        value = 100
        for x in a:
            value = value & x if op == "and" else value | x if op == "or" else value ^ x
        form = f"atom.shared.{op}.b32"
        found.append(whole(form, form, f"{begin} .reg .b32 o; {form} o, [m], a; {end}", [("b32", a)], ["b32"], [[value] * 32], 32, 16))
    found.append(whole("atom.shared.inc.u32", "atom.shared.inc.u32", f"{begin} .reg .b32 o; atom.shared.inc.u32 o, [m], 110; {end}",
                       [], ["b32"], [[21] * 32], 32, 16))
    found.append(whole("atom.global.add.u32", "atom.global.add.u32", ".reg .b32 o; atom.global.add.u32 o, [%buf], a; "
                       "bar.sync 0; ld.global.b32 d, [%buf];", [("b32", a)], ["b32"], [[sum(a)] * 32], buffer=(0,) * 16,
                       want_buffer=tuple(sum(a).to_bytes(4, "little")) + (0,) * 12))
    # 32 steps of a counter of 9 values, of which each is given four times but those that come last.
    found.append(whole("atom.global.inc.u32", "atom.global.inc.u32", ".reg .b32 o; atom.global.inc.u32 o, [%buf], 8; "
                       "redux.sync.add.u32 d, o, -1;", [], ["b32"], [[3 * 36 + 10] * 32], buffer=(0,) * 16,
                       want_buffer=(5, *(0,) * 15)))
    # As many steps as it has values: where it began, which is the whole of a counter that has one value.
    for last, sums in ((31, 496), (0, 0)):
        found.append(whole(f"atom.global.inc.u32 to {last}", "atom.global.inc.u32", f".reg .b32 o; atom.global.inc.u32 o, [%buf], {last}; "
                           "redux.sync.add.u32 d, o, -1;", [], ["b32"], [[sums] * 32], buffer=(0,) * 16, want_buffer=(0,) * 16))
    found.append(whole("red.global.add.f32", "red.global.add.f32", ".reg .f32 x; cvt.rn.f32.u32 x, a; red.global.add.f32 [%buf], x; "
                       "bar.sync 0; .reg .f32 y; ld.global.f32 y, [%buf]; cvt.rzi.u32.f32 d, y;", [("b32", a)], ["b32"],
                       [[sum(a)] * 32], buffer=(0,) * 16))
    found.append(whole("atom.global.cas.b32", "atom.global.cas.b32", ".reg .b32 o; .reg .pred y; atom.global.cas.b32 o, [%buf], 0, 7; "
                       "setp.eq.b32 y, o, 0; .reg .b32 n; selp.b32 n, 1, 0, y; redux.sync.add.u32 d, n, -1;", [], ["b32"], [[1] * 32],
                       buffer=(0,) * 16, want_buffer=(7, *(0,) * 15)))
    return found


def programs() -> list[Program]:
    return _shuffles() + _votes() + _barriers() + _mbarriers() + _atomics()
