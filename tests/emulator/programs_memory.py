"""Programs of loads, stores, 8x8 matrices and asynchronous copies of plain memory."""
from __future__ import annotations

import random
from collections.abc import Sequence

from .exact import signed
from .program import Program
from .programs_warp import whole


def random_bytes(seed: int, n: int) -> tuple[int, ...]:
    rnd = random.Random(seed)
    return tuple(rnd.getrandbits(8) for _ in range(n))


def word(b: Sequence[int], at: int, n: int) -> int:
    return int.from_bytes(bytes(b[at:at + n]), "little")


def _loads() -> list[Program]:
    found = []
    data = random_bytes(1, 1024)
    address = ".reg .b64 p; mad.wide.u32 p, %thread, STEP, %buf;"
    for t, reg, n, sign in (("b8", "b16", 1, False), ("u8", "b16", 1, False), ("s8", "b16", 1, True), ("u8", "b32", 1, False),
                            ("s8", "b32", 1, True), ("b16", "b16", 2, False), ("u16", "b32", 2, False), ("s16", "b32", 2, True),
                            ("b32", "b32", 4, False), ("b64", "b64", 8, False), ("s32", "b64", 4, True)):
        bits = int(reg[1:])
        want = [word(data, n * i, n) for i in range(32)]
        want = [signed(x, 8 * n) & ((1 << bits) - 1) if sign else x for x in want]
        found.append(whole(f"ld.global.{t} into {reg}", f"ld.global.{t}", f"{address.replace('STEP', str(n))} ld.global.{t} d, [p];",
                           [], [reg], [want], buffer=data))
    for k in (2, 4):
        names = "deij"[:k]
        want = [[word(data, 4 * (k * i + j), 4) for i in range(32)] for j in range(k)]
        found.append(whole(f"ld.global.v{k}.b32", f"ld.global.v{k}.b32", f"{address.replace('STEP', str(4 * k))} "
                           f"ld.global.v{k}.b32 {{{', '.join(names)}}}, [p];", [], ["b32"] * k, want, buffer=data))
    where = ".reg .b32 s, t; mov.b32 s, smem; mad.lo.u32 s, %thread, STEP, s;"
    a, b = ([word(random_bytes(s, 128), 4 * i, 4) for i in range(32)] for s in (2, 3))
    two = [("b32", tuple(a)), ("b32", tuple(b))]
    found += [
        whole("st.shared.b32 offset", "st.shared.b32", where.replace("STEP", "4") + "st.shared.b32 [s+128], a; "
              "ld.shared.b32 d, [s+128];", two[:1], ["b32"], [a], shared=512),
        whole("st.shared.v2.b32", "st.shared.v2.b32", where.replace("STEP", "8") + "st.shared.v2.b32 [s], {a, b}; "
              "ld.shared.v2.b32 {d, e}, [s];", two, ["b32", "b32"], [a, b], shared=512),
        whole("st.shared.v4.b32", "st.shared.v4.b32", where.replace("STEP", "16") + "st.shared.v4.b32 [s], {a, b, b, a}; "
              "ld.shared.v4.b32 {d, e, i, j}, [s];", two, ["b32"] * 4, [a, b, b, a], shared=512),
        whole("st.shared.b8", "st.shared.b8", where.replace("STEP", "1") + ".reg .b16 h; cvt.u16.u32 h, a; st.shared.b8 [s], h; "
              "bar.sync 0; mov.b32 s, smem; and.b32 t, %thread, 28; add.u32 s, s, t; ld.shared.b32 d, [s];", two[:1], ["b32"],
              [[sum((a[i & 28 | j] & 255) << 8 * j for j in range(4)) for i in range(32)]], shared=64),
        whole("st.shared.b64", "st.shared.b64", where.replace("STEP", "8") + ".reg .b64 q; mov.b64 q, {a, b}; st.shared.b64 [s], q; "
              "ld.shared.b64 d, [s];", two, ["b64"], [[y << 32 | x for x, y in zip(a, b, strict=True)]], shared=512),
        whole("generic shared", "cvta.shared.u64", where.replace("STEP", "4") + ".reg .b64 q, g; cvt.u64.u32 q, s; "
              "cvta.shared.u64 g, q; st.b32 [g], a; ld.b32 d, [g]; .reg .pred z; isspacep.shared z, g; selp.b32 e, 1, 0, z;",
              two[:1], ["b32", "b32"], [a, [1] * 32], shared=512),
        whole("st.global.v2.b32", "st.global.v2.b32", ".reg .b64 p; mad.wide.u32 p, %thread, 8, %buf; st.global.v2.b32 [p], {a, b}; "
              "mov.b32 d, 0;", two, ["b32"], [[0] * 32], buffer=(0,) * 256,
              want_buffer=tuple(x for i in range(32) for v in (a[i], b[i]) for x in v.to_bytes(4, "little"))),
        whole("st.global.b16", "st.global.b16", ".reg .b64 p; mad.wide.u32 p, %thread, 2, %buf; .reg .b16 h; cvt.u16.u32 h, a; "
              "st.global.b16 [p], h; mov.b32 d, 0;", two[:1], ["b32"], [[0] * 32], buffer=(0,) * 64,
              want_buffer=tuple(x for v in a for x in (v & 0xFFFF).to_bytes(2, "little"))),
        whole("ld.param.b32", "ld.param.b32", ".reg .b64 p; .reg .b32 x, y; ld.param.b32 x, [pbuf]; ld.param.b32 y, [pbuf+4]; "
              "mov.b64 p, {x, y}; sub.u64 d, p, %buf; ld.param.v2.b32 {x, y}, [pbuf]; mov.b64 p, {x, y}; sub.u64 e, p, %buf;", [],
              ["b64", "b64"], [[0] * 32, [0] * 32]),
        whole("ld.param.b64", "ld.param.b64", ".reg .b64 p, q; ld.param.b64 p, [pbuf]; sub.u64 d, p, %buf; mov.b64 q, pbuf; "
              "cvta.param.u64 q, q; ld.b64 q, [q]; sub.u64 e, q, p;", [], ["b64", "b64"], [[0] * 32, [0] * 32]),
    ]
    return found


def _matrices() -> list[Program]:
    """Element (m, r, c) of matrix m is 64 m + 8 r + c."""
    found = []
    # each thread writes its row of 8 halves: 8 thread + 0 .. 7
    rows = "shl.b32 t, %thread, 3; " + " ".join(
        f"add.u32 u, t, {2 * j}; add.u32 v, t, {2 * j + 1}; shl.b32 v, v, 16; or.b32 u, u, v; st.shared.b32 [s+{4 * j}], u;"
        for j in range(4))
    head = ".reg .b32 s, t, u, v; mov.b32 s, smem; shl.b32 t, %thread, 4; add.u32 s, s, t; " + rows + " bar.sync 0;"
    for n in (1, 2, 4):
        for trans in (False, True):
            form = f"ldmatrix.sync.aligned.m8n8.x{n}{'.trans' if trans else ''}.shared.b16"
            want = []
            for m in range(n):
                out = []
                for lane in range(32):
                    r, c = lane // 4, 2 * (lane % 4)
                    pair = [(r, c), (r, c + 1)]
                    x = [64 * m + (8 * q + p if trans else 8 * p + q) for p, q in pair]
                    out.append(x[1] << 16 | x[0])
                want.append(out)
            names = "deij"[:n]
            found.append(whole(form, form, f"{head} {form} {{{', '.join(names)}}}, [s];", [], ["b32"] * n, want, shared=512))
            form = form.replace("ldmatrix", "stmatrix")
            given = [tuple(x) for x in want]
            back = [[64 * (i // 8) + 8 * (i % 8) + 2 * j | 64 * (i // 8) + 8 * (i % 8) + 2 * j + 1 << 16 for i in range(32)]
                    for j in range(4)]
            back = [[x if i < 8 * n else 0 for i, x in enumerate(row)] for row in back]
            body = (".reg .b32 s, t; mov.b32 s, smem; shl.b32 t, %thread, 4; add.u32 s, s, t; st.shared.v4.b32 [s], {0, 0, 0, 0}; "
                    f"bar.sync 0; {form} [s], {{{', '.join('abcf'[:n])}}}; bar.sync 0; ld.shared.v4.b32 {{d, e, i, j}}, [s];")
            body = ".reg .b32 zero; mov.b32 zero, 0; " + body.replace("{0, 0, 0, 0}", "{zero, zero, zero, zero}")
            found.append(whole(form, form, body, [("b32", g) for g in given], ["b32"] * 4, back, shared=512))
    return found


BARRIER = (".reg .b32 m, s, t; .reg .b64 st; .reg .pred first, z; mov.b32 m, smem; setp.eq.u32 first, %thread, 0; @!first bra READY;"
           " mbarrier.init.shared.b64 [m], 1; fence.mbarrier_init.release.cluster; mbarrier.arrive.expect_tx.shared.b64 st, [m], BYTES;"
           " COPY READY: bar.sync 0; WAIT: mbarrier.try_wait.parity.shared.b64 z, [m], 0, 10000000; @z bra DONE; bra WAIT; DONE: ")


def _copies() -> list[Program]:
    data = random_bytes(4, 512)
    words = [[word(data, 4 * i + 128 * j, 4) for i in range(32)] for j in range(4)]
    read = "shl.b32 t, %thread, 2; add.u32 s, m, t; " + " ".join(f"ld.shared.b32 {n}, [s+{1024 + 128 * j}];" for j, n in enumerate("deij"))
    load = "add.u32 s, m, 1024; cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [s], [%buf], 512, [m];"
    found = [whole("cp.async.bulk to shared", "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
                   BARRIER.replace("BYTES", "512").replace("COPY", load) + read, [], ["b32"] * 4, words, shared=2048, buffer=data)]
    a = tuple(word(random_bytes(5, 128), 4 * i, 4) for i in range(32))
    put = (".reg .b32 s, t; .reg .pred z; mov.b32 s, smem; shl.b32 t, %thread, 2; add.u32 s, s, t; st.shared.b32 [s], a; "
           "fence.proxy.async.shared::cta; bar.sync 0; setp.eq.u32 z, %thread, 0; mov.b32 d, 0; @!z bra DONE; mov.b32 s, smem; ")
    close = " cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; DONE:"
    store = "cp.async.bulk.global.shared::cta.bulk_group"
    found.append(whole("cp.async.bulk to global", store, put + f"{store} [%buf], [s], 128;" + close, [("b32", a)], ["b32"], [[0] * 32],
                       shared=128, buffer=(9,) * 256, want_buffer=tuple(x for v in a for x in v.to_bytes(4, "little")) + (9,) * 128))
    for op, t in (("add", "u32"), ("min", "u32"), ("max", "s32")):
        base = [word(data, 4 * i, 4) for i in range(32)]
        want = [{"add": (x + y) & 0xFFFFFFFF, "min": min(x, y), "max": max(signed(x, 32), signed(y, 32)) & 0xFFFFFFFF}[op]
                for x, y in zip(a, base, strict=True)]
        form = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{op}.{t}"
        found.append(whole(form, form, put + f"{form} [%buf], [s], 128;" + close, [("b32", a)], ["b32"], [[0] * 32], shared=128,
                           buffer=data[:128], want_buffer=tuple(x for v in want for x in v.to_bytes(4, "little"))))
    for n in (4, 8, 16):
        cache = "cg" if n == 16 else "ca"
        form = f"cp.async.{cache}.shared.global"
        want = [[word(data, n * i, 4) for i in range(32)], [word(data, n * i + n - 4, 4) for i in range(32)]]
        found.append(whole(f"{form} {n}", form, f".reg .b32 s; .reg .b64 p; mov.b32 s, smem; mad.lo.u32 s, %thread, {n}, s; "
                           f"mad.wide.u32 p, %thread, {n}, %buf; {form} [s], [p], {n}; cp.async.commit_group; cp.async.wait_group 0; "
                           f"ld.shared.b32 d, [s]; ld.shared.b32 e, [s+{n - 4}];", [], ["b32", "b32"], want, shared=512, buffer=data))
    return found


def programs() -> list[Program]:
    return _loads() + _matrices() + _copies()
