"""What the emulator refuses, one small program each, and what the message says; beside each, the right program."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from emulator import Fault, TensorMap, emulate
from emulator.launch import Out
from emulator.launch import Program as Compiled
from emulator.program import Program, aligned
from emulator.programs_matrix import product
from emulator.programs_tensor import rows_of_box, store_of_box

INIT = ("mov.b32 m, smem; setp.eq.u32 z, %thread, 0; @!z bra READY; mbarrier.init.shared.b64 [m], COUNT; "
        "fence.mbarrier_init.release.cluster; READY: bar.sync 0;")
REGISTERS = ".reg .b32 m, s, t, u; .reg .b64 q, st; .reg .pred z, y; .reg .f32 f;"
WAIT = " WAIT: mbarrier.try_wait.parity.shared.b64 y, [m], 0, 1000; @y bra GO; bra WAIT; GO: "
STORE = "mov.b32 s, smem; shl.b32 t, %thread, 2; add.u32 s, s, t; st.shared.b32 [s], %thread;"
COPY = ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [t], [%buf], 64, [m];")


def program(body: str, threads: int = 64, shared: int = 1024, buffer: int = 64, directives: str = "") -> Program:
    return Program("strict", "strict", REGISTERS + body, (), (), (), threads, shared, buffer=(1,) * buffer, directives=directives)


def other_half(then: str) -> str:
    """The second warp does `then`, the first nothing."""
    return f"setp.lt.u32 z, %thread, 32; @z bra END; {then} END:"


GOOD = {
    "barrier": STORE + "bar.sync 0; xor.b32 t, t, 128; mov.b32 s, smem; add.u32 s, s, t; ld.shared.b32 u, [s];",
    "mbarrier": INIT.replace("COUNT", "64") + STORE.replace("[s]", "[s+64]") + "mbarrier.arrive.shared.b64 st, [m];" + WAIT
    + "xor.b32 t, t, 128; mov.b32 s, smem; add.u32 s, s, t; ld.shared.b32 u, [s+64];",
    "copy out": STORE + "fence.proxy.async.shared::cta; bar.sync 0; @z bra END; setp.ne.u32 z, %thread, 0; @z bra END; mov.b32 s, smem; "
    "cp.async.bulk.global.shared::cta.bulk_group [%buf], [s], 64; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:",
    "copy in": INIT.replace("COUNT", "1") + "add.u32 t, m, 64; @!z bra GOT; mbarrier.arrive.expect_tx.shared.b64 st, [m], 64; " + COPY
    + " GOT:" + WAIT + "ld.shared.b32 u, [m+64];",
    "global memory, then a copy": INIT.replace("COUNT", "1") + "add.u32 t, m, 64; mov.b32 u, 3; @z st.global.b32 [%buf], u; "
    "@z fence.proxy.async.global; bar.sync 0; @!z bra GOT; mbarrier.arrive.expect_tx.shared.b64 st, [m], 64; " + COPY + " GOT:" + WAIT
    + "ld.shared.b32 u, [m+64];",
    "turns": "setp.lt.u32 z, %thread, 32; @z bra FIRST; bar.sync 1, 64; bra END; FIRST: bar.arrive 1, 64; END: bar.sync 0;",
    "registers": "setp.lt.u32 z, %thread, 128; @z bra LESS; setmaxnreg.inc.sync.aligned.u32 160; bra END; LESS: "
    "setmaxnreg.dec.sync.aligned.u32 40; END: bar.sync 0;",
    "guarded load": "setp.lt.u32 z, %lane, 8; @z ld.global.b32 u, [%buf]; add.u32 u, u, 1; selp.b32 u, u, 0, z; "
    "setp.eq.u32 y, u, 7; @y add.u32 t, u, u;",
}
LARGE = {"registers": (256, ".maxnreg 128")}


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("seed", range(3))
def test_accepted(name: str, seed: int) -> None:
    threads, directives = LARGE.get(name, (64, ""))
    body = GOOD[name]
    if name == "copy out":
        body = "setp.ne.u32 z, 0, 0;".replace("0, 0;", "%thread, %thread;") + body
    program(body, threads=threads, directives=directives).emulated(seed)


BAD: dict[str, tuple[str, str, str]] = {
    # Registers and arithmetic.
    "register never written": ("add.u32 s, t, 1;", "uninitialised", "register t in all lanes"),
    "register written in some lanes": ("setp.lt.u32 z, %lane, 8; @!z bra END; mov.b32 t, 1; END: add.u32 s, t, 1;", "uninitialised",
                                       "lanes 8-31"),
    "undefined value reaches a branch": ("setp.lt.u32 z, %lane, 8; @z ld.global.b32 u, [%buf]; setp.eq.u32 y, u, 7; @y bra END; END:",
                                         "undefined", "guard"),
    "undefined value is stored": ("setp.lt.u32 z, %lane, 8; @z ld.global.b32 u, [%buf]; mov.b32 m, smem; st.shared.b32 [m], u;",
                                  "undefined", "lanes 8-31"),
    "undefined value is shuffled": ("setp.lt.u32 z, %lane, 8; @z mov.b32 u, 1; shfl.sync.bfly.b32 s, u, 1, 31, -1;", "undefined", ""),
    "division by zero": ("mov.b32 s, 5; mov.b32 t, 0; div.s32 s, s, t;", "undefined", "division by zero"),
    # Memory.
    "shared byte never written": ("mov.b32 m, smem; ld.shared.b32 s, [m+16];", "uninitialised", "byte 0x410"),
    "below shared memory": ("mov.b32 m, smem; ld.shared.b32 s, [m-4];", "bounds", "0x3fc"),
    "beyond shared memory": ("mov.b32 m, smem; mov.b32 s, 1; st.shared.b32 [m+1024], s;", "bounds", "0x800"),
    "before a global buffer": ("ld.global.b32 s, [%buf-4];", "bounds", "4 bytes before argument 2"),
    "beyond a global buffer": ("mov.b32 s, 1; st.global.b32 [%buf+64], s;", "bounds", "0x40"),
    "no buffer": ("mov.b64 q, 64; ld.global.b32 s, [q];", "bounds", "outside every buffer"),
    "misaligned": ("mov.b32 m, smem; mov.b32 s, 1; st.shared.b32 [m+2], s;", "misaligned", "4 bytes"),
    "misaligned vector": ("ld.global.v4.b32 {s, t, u, m}, [%buf+8];", "misaligned", "16 bytes"),
    "two values at one address": ("mov.b32 m, smem; st.shared.b32 [m], %thread;", "race", "different values"),
    "two warps, one global word": ("st.global.b32 [%buf], %warp;", "race", "warp"),
    # Races between warps.
    "no barrier": (GOOD["barrier"].replace("bar.sync 0;", ""), "uninitialised|race", ""),
    "barrier of one warp": (GOOD["barrier"].replace("bar.sync 0;", "bar.warp.sync -1;"), "uninitialised|race", ""),
    "arrival does not acquire": ("setp.lt.u32 z, %thread, 32; @z bra FIRST; mov.b32 m, smem; mov.b32 u, 1; st.shared.b32 [m], u; "
                                 "bar.sync 1, 64; st.shared.b32 [m], u; bra END; FIRST: bar.arrive 1, 64; mov.b32 m, smem; "
                                 "LOOP: mov.b32 u, 2; st.shared.b32 [m], u; END:", "race", "not ordered"),
    "mbarrier not waited for": (GOOD["mbarrier"].replace(WAIT, ""), "uninitialised|race", ""),
    "initialisation not seen": (INIT.replace("COUNT", "64").replace("bar.sync 0;", "") + "mbarrier.arrive.shared.b64 st, [m];",
                                "barrier|race", "initialis"),
    "read of a copy before its wait": (GOOD["copy in"].replace(WAIT, ""), "uninitialised|race", ""),
    # Proxies.
    "no fence before a bulk copy": (GOOD["copy out"].replace("fence.proxy.async.shared::cta;", ""), "proxy", "fence.proxy.async"),
    "fence by another lane": (GOOD["copy out"].replace("fence.proxy", "setp.eq.u32 y, %lane, 5; @y fence.proxy"), "proxy",
                              "fence.proxy.async"),
    "relaxed wait": (GOOD["mbarrier"].replace("parity.shared", "parity.relaxed.cluster.shared"), "race", "not ordered"),
    "relaxed arrival": (GOOD["mbarrier"].replace("arrive.shared", "arrive.relaxed.cluster.shared"), "race", "not ordered"),
    "fence before the write": (STORE.replace("st.shared", "fence.proxy.async.shared::cta; st.shared") + "bar.sync 0; "
                               + GOOD["copy out"].split("bar.sync 0;")[1], "proxy", "fence.proxy.async"),
    "no fence before a bulk copy of global memory": (
        GOOD["copy in"].replace("@!z bra GOT;", "mov.b32 u, 3; st.global.b32 [%buf], u; bar.sync 0; @!z bra GOT;").replace(
            "st.global", "@z st.global"), "proxy", "fence.proxy.async"),
    "barrier unknown to the async proxy": (GOOD["copy in"].replace("fence.mbarrier_init.release.cluster;", ""), "proxy",
                                           "fence.mbarrier_init"),
    # Barriers.
    "double arrive": (INIT.replace("COUNT", "65") + "mbarrier.arrive.shared.b64 st, [m]; mbarrier.arrive.shared.b64 st, [m];",
                      "double arrive", "twice in phase 0"),
    "too many arrivals": (INIT.replace("COUNT", "1") + "@!z bra END; mbarrier.arrive.shared.b64 st, [m], 2; END:", "double arrive",
                          "1 of 1 pending"),
    "double arrive at a named barrier": (other_half("bar.arrive 1, 96; bar.arrive 1, 96;"), "double arrive", "warp 1 arrives twice"),
    "different thread counts": ("setp.lt.u32 z, %thread, 32; @z bra FIRST; bar.sync 1, 64; bra END; FIRST: bar.sync 1, 32; END:",
                                "barrier|deadlock", ""),
    "half a warp's count": ("bar.sync 1, 48;", "barrier", "multiple of a warp"),
    "no mbarrier there": ("mov.b32 m, smem; mbarrier.arrive.shared.b64 st, [m+8];", "barrier", "no mbarrier"),
    "mbarrier read as data": (INIT.replace("COUNT", "1") + "ld.shared.b32 s, [m];", "barrier", "mbarrier object"),
    "initialised twice": (INIT.replace("COUNT", "1") + "@!z bra END; mbarrier.init.shared.b64 [m], 1; END:", "barrier", "in use"),
    "phase parity of 2": (INIT.replace("COUNT", "1") + "mbarrier.test_wait.parity.shared.b64 y, [m], 2;", "barrier", "parity 2"),
    "deadlock at an mbarrier": (INIT.replace("COUNT", "65") + "mbarrier.arrive.shared.b64 st, [m];" + WAIT, "deadlock",
                                "1 of 65 arrivals"),
    "deadlock at a named barrier": (other_half("bar.sync 1, 64;"), "deadlock", "32 of 64 threads"),
    "deadlock: bytes that never come": (GOOD["copy in"].replace("st, [m], 64", "st, [m], 80"), "deadlock", "16 bytes missing"),
    "endless loop": ("LOOP: bra LOOP;", "limit", "instructions"),
    # Copies.
    "copy not waited for at the end": (GOOD["copy out"].replace("cp.async.bulk.wait_group 0;", ""), "exit", "nothing waits for"),
    "shared memory overwritten under a copy": (GOOD["copy out"].replace("cp.async.bulk.wait_group 0;", "st.shared.b32 [s], s;"), "race",
                                               "bulk copies"),
    "copy of 24 bytes": (GOOD["copy out"].replace("[s], 64", "[s], 24"), "misaligned", "24 bytes"),
    "copy to a misaligned place": (GOOD["copy in"].replace("t, m, 64", "t, m, 72"), "misaligned", "bulk copy"),
    "copy beyond the buffer": (GOOD["copy in"].replace("[%buf], 64", "[%buf], 128").replace("st, [m], 64", "st, [m], 128"), "bounds",
                               "bulk copy"),
    # Control.
    "divergent warp-wide instruction": ("setp.lt.u32 z, %lane, 8; @z bar.sync 0;", "divergence", "lanes 0-7"),
    "lane outside its member mask": ("vote.sync.ballot.b32 s, z, 255;".replace("z, 255", "y, 255")
                                     .replace("vote", "setp.eq.u32 y, %lane, 0; vote"), "divergence", "lanes 8-31"),
    "shuffle from an absent lane": ("setp.lt.u32 z, %lane, 8; @!z bra END; shfl.sync.idx.b32 s, %lane, 20, 31, 255; END:", "divergence",
                                    "do not take part"),
    "members that never come": ("setp.lt.u32 z, %lane, 8; @z bra ONE; bar.warp.sync -1; bra END; ONE: shfl.sync.bfly.b32 s, %lane, 1, 31, "
                                "-1; END:", "deadlock", "same instruction"),
    "trap": ("trap;", "trap", ""),
    "registers that nobody gave": ("setmaxnreg.inc.sync.aligned.u32 136;", "deadlock", "the pool has 0"),
    "inc to fewer registers": ("setmaxnreg.inc.sync.aligned.u32 40;", "registers", "has 128"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name: str) -> None:
    body, kind, words = BAD[name]
    directives = ".maxnreg 128" if "setmaxnreg" in body else ""
    if "copy" in name and "@z bra END; setp.ne" in body or "fence" in name and "@z bra END; setp.ne" in body:
        body = "setp.ne.u32 z, %thread, %thread;" + body
    p = program(body, directives=directives)
    with pytest.raises(Fault) as e:
        for seed in range(4):
            emulate(p.text(), 1, [np.zeros(16, np.uint8), np.zeros(16, np.uint8), aligned(np.ones(64, np.uint8))], seed=seed, limit=20_000)
    assert e.value.kind in kind.split("|"), str(e.value)
    assert words in str(e.value)
    assert "PTX line" in str(e.value) or e.value.kind == "limit"


@pytest.mark.parametrize(("text", "words"), [
    ("frobnicate.b32 s, t;", "no such opcode"), ("add.rz.s32 s, t, t;", "modifier .rz"), ("add.s8 s, t, t;", "type must be"),
    ("ld.shared.b32.frob s, [m];", ""), ("wgmma.mma_async.sync.aligned.m64n7k16.f32.f16.f16 {f}, q, q, z, 1, 1, 0, 0;", "shape"),
    ("setmaxnreg.inc.sync.aligned.u32 33;", "multiple of 8"), ("add.u32 s, nothing, t;", "no variable"), ("add.u32 q, s, t;", "64 bits"),
    ("mov.u32 s, %nothing;", "%nothing"), ("cvt.f16.f32 s, f;", "rounding"), ("shfl.bfly.b32 s, t, 1, 31;", "sync"),
    ("bra NOWHERE;", "no such label"), ("mbarrier.frob.shared.b64 [m];", "init"), ("fma.f32 f, f, f, f;", "rounding"),
])
def test_unknown_instructions_are_refused_before_they_run(text: str, words: str) -> None:
    """A strict decoder: nothing that is not understood is skipped, executed or not."""
    with pytest.raises(Fault) as e:
        Compiled(program("bra END; " + text + " END:").text())
    assert e.value.kind in ("unknown", "syntax") and words in str(e.value) and "PTX line" in str(e.value)


# ---------------------------------------------------------------------- products

MATRIX = product("bf16", "bf16", 64, 128, registers=False)
FROM_REGISTERS = product("f16", "f16", 64, 128, registers=True, trans_b=True)


@pytest.mark.parametrize(("name", "old", "new", "kind", "words"), [
    ("no fence at all", "wgmma.fence.sync.aligned;", "", "wgmma", "without wgmma.fence"),
    ("no wait", "wgmma.wait_group.sync.aligned 0;", "", "wgmma", "accumulator of the product"),
    ("wait for too few", "wait_group.sync.aligned 0;", "wait_group.sync.aligned 1;", "wgmma", "before wgmma.wait_group"),
    ("no commit", "wgmma.commit_group.sync.aligned;", "", "wgmma", "before wgmma.wait_group"),
    ("accumulator written in flight", "wgmma.commit_group.sync.aligned;", "wgmma.commit_group.sync.aligned; mov.b32 acc0, 0f00000000;",
     "wgmma", "write to acc0"),
    ("no proxy fence", "fence.proxy.async.shared::cta;", "", "proxy", "fence.proxy.async"),
    ("no barrier", "fence.proxy.async.shared::cta; bar.sync 0;", "fence.proxy.async.shared::cta;", "race|uninitialised|proxy", ""),
    ("accumulate on nothing", ", no, 1, 1", ", yes, 1, 1", "uninitialised", "acc0"),
    ("base offset", "mov.b64 q, ", "mov.b64 q, 562949953421312; mov.b64 st, ", "unknown", "base offset"),
    ("stray descriptor bits", "mov.b64 q, ", "mov.b64 q, 49152; mov.b64 st, ", "descriptor", "outside its fields"),
    ("operand beyond shared memory", "add.u32 s, m, 0;", "add.u32 s, m, 131072;", "bounds", "matrix operand"),
    ("warps disagree", "and.b32 s, s, 16383; cvt.u64.u32 da", "add.u32 s, s, %warp; and.b32 s, s, 16383; cvt.u64.u32 da", "divergence",
     "another warp of its warpgroup"),
])
def test_products_are_strict(name: str, old: str, new: str, kind: str, words: str) -> None:
    text = MATRIX.text()
    assert old in text
    text = text.replace(old, new).replace(".reg .b32 m, s", ".reg .b64 st; .reg .b32 m, s")
    with pytest.raises(Fault) as e:
        for seed in range(4):
            emulate(text, 1, [np.zeros(16, np.uint8)] * 2 + [np.array(MATRIX.buffer, np.uint8)], seed=seed)
    assert e.value.kind in kind.split("|"), str(e.value)
    assert words in str(e.value) and "PTX line" in str(e.value), name


def test_operand_registers_are_fenced() -> None:
    text = FROM_REGISTERS.text()
    at = text.rindex("wgmma.fence.sync.aligned;")
    bad = text[:at] + text[at + len("wgmma.fence.sync.aligned;"):]
    with pytest.raises(Fault, match="after the last wgmma.fence"):
        emulate(bad, 1, [np.zeros(16, np.uint8)] * 2 + [np.array(FROM_REGISTERS.buffer, np.uint8)])


@pytest.mark.parametrize("barrier", ["", "bar.sync 0; "])
def test_all_rows_of_a_belong_to_the_warpgroup(barrier: str) -> None:
    """A warp that has waited for its own part overwrites rows that only it needs: the others' products may read them."""
    wait = "wgmma.wait_group.sync.aligned 0;"
    text = MATRIX.text().replace(wait, f"{wait} {barrier}setp.eq.u32 z, %thread, 0; @z st.shared.b32 [m], s;")
    found = []
    for seed in range(4):
        try:
            emulate(text, 1, [np.zeros(16, np.uint8)] * 2 + [np.array(MATRIX.buffer, np.uint8)], seed=seed)
        except Fault as e:
            assert e.kind == "race" and ("its read by products of" in str(e) or "wgmma.mma_async" in str(e))
            found.append(str(e))
    assert bool(found) == (not barrier)


# ---------------------------------------------------------------------- tensor maps and launches

def test_what_a_launch_wrote_is_known_to_the_next() -> None:
    scratch, known = np.full(64, 7, np.uint8), np.zeros(64, bool)
    write, read, beyond = (program(x).text() for x in (
        "mov.b32 s, 5; st.global.b32 [%buf], s;".replace("st", "setp.eq.u32 z, %thread, 0; @z st"), "ld.global.b32 s, [%buf];",
        "ld.global.b32 s, [%buf+4];"))

    def launch(text: str) -> None:
        emulate(text, 1, [np.zeros(16, np.uint8), np.zeros(16, np.uint8), Out(scratch, known)])

    with pytest.raises(Fault, match="read of byte 0x0 of argument 2, which nothing has written"):
        launch(read)
    launch(write)
    assert known.tolist() == [True] * 4 + [False] * 60
    launch(read)
    with pytest.raises(Fault, match="read of byte 0x4 of argument 2, which nothing has written"):
        launch(beyond)


def test_tensor_maps_are_checked() -> None:
    data = aligned(np.zeros(4096, np.uint8))
    TensorMap(data, (32, 8), (64,), (32, 8), 64)
    for bad in (dict(strides=(60,)), dict(box=(512, 1)), dict(box=(4, 8)), dict(swizzle=16), dict(swizzle=32), dict(shape=(0, 8)),
                dict(array=data[8:]), dict(element="f32"), dict(element="bf16")):
        kw = {"array": data, "shape": (32, 8), "strides": (64,), "box": (32, 8), "swizzle": 64, **bad}
        with pytest.raises(ValueError):
            TensorMap(**kw)  # type: ignore[arg-type]


@pytest.mark.parametrize("start", [(-8, 4, 0), (0, -5, 1), (0, 0, -1)])
def test_a_store_begins_inside_its_tensor(start: tuple[int, int, int]) -> None:
    """A GPU calls it an illegal instruction, whatever the swizzle; the box of a load may begin there."""
    with pytest.raises(Fault, match=rf"^bounds: .* begins at \({', '.join(map(str, start))}\)"):
        store_of_box("before", 64, 32, start).emulated()
    loaded = rows_of_box("before", 64, (32, 16, 1), start)
    assert not loaded.differences(*loaded.emulated())


SHORT = rows_of_box("short rows", 128, (32, 16, 1), (0, 0, 0))
"""Rows of 64 bytes, 128 apart; the first is not moved."""


def test_what_lies_between_short_rows_is_undefined() -> None:
    first, second = (replace(SHORT, body=SHORT.body + f" ld.shared.b32 s, [base+{at}];") for at in (60, 64))
    first.emulated()
    with pytest.raises(Fault, match="^uninitialised: .* byte 0x840 "):
        second.emulated()
    # Also where the program has written before the copy: that the copy leaves it alone is nowhere said.
    written = ("fence.mbarrier_init.release.cluster;", "fence.mbarrier_init.release.cluster; st.shared.b32 [m+1088], m; "
               "fence.proxy.async.shared::cta;")
    replace(first, body=first.body.replace(*written)).emulated()
    with pytest.raises(Fault, match="^uninitialised: .* byte 0x840 "):
        replace(second, body=second.body.replace(*written)).emulated()


def test_short_rows_take_the_room_of_whole_ones() -> None:
    """1 KiB of elements in 2 KiB of shared memory."""
    replace(SHORT, shared=3072).emulated()
    with pytest.raises(Fault, match="^bounds: tensor copy .* 0x800 to 0x1000 "):
        replace(SHORT, shared=2048).emulated()
    stored = store_of_box("short rows", 128, 32, (0, 0, 0))
    head, rest = stored.body.split(" fence.proxy", 1)
    half = head[:head.index("mul.lo.u32 t, a, 17;")] + " fence.proxy" + rest
    with pytest.raises(Fault, match="^bounds: tensor copy .* 0x400 to 0xc00 "):
        replace(stored, shared=1024, body=half).emulated()


def test_shared_memory_ends_where_its_variables_do() -> None:
    body = "mov.b32 m, smem; mov.b32 s, 1; st.shared.b32 [m+AT], s;"
    program(body.replace("AT", "96"), threads=32, shared=100).emulated()
    with pytest.raises(Fault, match="^bounds: .*0x464"):
        program(body.replace("AT", "100"), threads=32, shared=100).emulated()


def test_arguments_are_checked() -> None:
    p = program("mov.b32 s, 1;")
    with pytest.raises(ValueError, match="arguments"):
        emulate(p.text(), 1, [1, 2])
    with pytest.raises(ValueError, match="4 bytes"):
        emulate(p.text(), 1, [b"1234", 1, 2])


@pytest.mark.parametrize(("step", "size", "extra"), [(4, 4, 0), (8, 4, 1), (128, 4, 31), (16, 16, 0), (64, 16, 12), (0, 4, 0)])
def test_bank_conflicts_are_counted(step: int, size: int, extra: int) -> None:
    """32 lanes, `size` bytes each, `step` bytes apart: passes beyond one for each 128 bytes; one word for all is no conflict."""
    if size == 4:
        body = f"mov.b32 m, smem; mad.lo.u32 s, %lane, {step}, m; mov.b32 u, 1; st.shared.b32 [s], u;"
    else:
        body = f"mov.b32 m, smem; mad.lo.u32 s, %lane, {step}, m; mov.b32 u, 1; st.shared.v4.b32 [s], {{u, u, u, u}};"
    p = program(body, threads=32, shared=8192)
    _, stats = emulate(p.text(), 1, [np.zeros(16, np.uint8)] * 3)
    assert stats.shared_accesses == 1 and stats.bank_conflicts == extra
    assert stats.instructions["mad.lo.u32"] == 1 and stats.total == sum(stats.instructions.values())


def test_waits_are_counted() -> None:
    _, stats = emulate(program("bar.sync 0; bar.sync 0;", threads=128).text(), 1, [np.zeros(16, np.uint8)] * 3)
    assert stats.barrier_waits["bar"] == 2 * 3 and stats.warps == 4  # the last of four warps does not wait


@pytest.mark.parametrize(("body", "want"), [
    ("ld.const.b32 t, [table+12];", [-40] * 4),
    (".reg .b64 c, w; mov.u64 c, table; and.b32 u, i, 3; shl.b32 u, u, 2; cvt.u64.u32 w, u; add.u64 c, c, w; ld.const.b32 t, [c];",
     [10, 20, 30, -40]),
    ("mov.u32 u, cell; shl.b32 t, i, 2; add.u32 u, u, t; st.shared.b32 [u], i; ld.shared.b32 t, [u];", [0, 1, 2, 3]),
])
def test_constants_and_variables(body: str, want: list[int]) -> None:
    """A .const array by its name and at a register's offset, and a static shared variable."""
    text = """.version 8.6
.target sm_90a
.address_size 64
.const .align 4 .b32 table[4] = { 10, 20, 30, -40 };
.visible .entry k(.param .u64 pout) .reqntid 32, 1, 1 {
.reg .b64 out, q; .reg .b32 i, t, u;
.shared .align 4 .b32 cell[32];
ld.param.u64 out, [pout]; mov.u32 i, %tid.x;
BODY
mad.wide.u32 q, i, 4, out; st.global.b32 [q], t; ret; }
"""
    out = np.zeros(32, np.int32)
    emulate(text.replace("BODY", body), 1, [out])
    assert out[:4].tolist() == want


def test_source_lines_are_named() -> None:
    text = program("mov.b32 s, 1;").text().replace("mov.b32 s, 1;", ".loc 1 7 3\nadd.u32 s, t, 1;") + f'\n.file 1 "{__file__}"\n'
    with pytest.raises(Fault) as e:
        emulate(text, 1, [np.zeros(16, np.uint8)] * 3)
    assert "test_emulator_strict.py:7" in str(e.value) and "warp" in str(e.value)
