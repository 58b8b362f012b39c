"""Clusters of CTAs, multicast copies, remote barriers, and forms of instructions that Hopper lacks or our kernels do not use."""
from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from emulator import Fault, TensorMap, emulate
from emulator.exact import F32, operate, value
from emulator.program import HEADER, aligned
from emulator.programs_float import columns


def kernel(body: str, shared: int = 1024, params: str = ".param .u64 pout", threads: int = 32) -> str:
    return HEADER + f""".visible .entry k({params})
.reqntid {threads}, 1, 1
{{
.reg .b32 m, n, r, s, t, u, v; .reg .b64 out, q, st, map; .reg .pred z, y;
.shared .align 1024 .b8 smem[{shared}];
ld.param.u64 out, [pout]; mov.u32 t, %tid.x; mov.u32 r, %cluster_ctarank; mov.b32 m, smem;
{body}
mov.u32 n, %ctaid.x; mad.lo.u32 n, n, {threads}, t; mad.wide.u32 q, n, 4, out; st.global.b32 [q], u;
ret;
}}
"""


CLUSTER_BARRIER = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
WRITE_PEER = ("xor.b32 n, r, 1; mapa.shared::cluster.u32 s, m, n; shl.b32 v, t, 2; add.u32 s, s, v; mad.lo.u32 n, r, 100, t; "
              "st.shared::cluster.b32 [s], n;")
READ_OWN = "add.u32 s, m, v; ld.shared.b32 u, [s];"


def launch(text: str, ctas: int = 4, cluster: int = 2, seed: int = 0, threads: int = 32, more: tuple = ()) -> np.ndarray:
    out = np.zeros(ctas * threads, np.uint32)
    emulate(text, ctas, [out, *more], cluster=(cluster, 1, 1), seed=seed, limit=100_000)
    return out.reshape(ctas, threads)


@pytest.mark.parametrize("seed", range(3))
def test_shared_memory_of_a_peer(seed: int) -> None:
    got = launch(kernel(WRITE_PEER + CLUSTER_BARRIER + READ_OWN), seed=seed)
    for cta in range(4):
        assert got[cta].tolist() == [100 * (1 - cta % 2) + t for t in range(32)]


def test_a_missing_cluster_barrier_is_seen() -> None:
    with pytest.raises(Fault) as e:
        for seed in range(4):
            launch(kernel(WRITE_PEER + "bar.sync 0;" + READ_OWN), seed=seed)
    assert e.value.kind in ("race", "uninitialised")
    with pytest.raises(Fault) as e:
        for seed in range(4):
            launch(kernel(WRITE_PEER + CLUSTER_BARRIER.replace("release", "relaxed") + READ_OWN), seed=seed)
    assert e.value.kind == "race" and "CTA" in str(e.value)


def test_shared_memory_of_a_block_that_has_ended() -> None:
    with pytest.raises(Fault) as e:
        for seed in range(8):
            launch(kernel("setp.eq.u32 z, r, 0; @z ret; mov.u32 u, 0; " + WRITE_PEER), ctas=2, seed=seed)
    assert e.value.kind == "ended" and "CTA 0" in str(e.value)


def test_initialised_mbarriers_are_seen_behind_a_fence_and_a_relaxed_arrival() -> None:
    """Nothing else is (PTX ISA, fence.mbarrier_init)."""
    start = "setp.eq.u32 z, t, 0; @!z bra NEXT; mbarrier.init.shared.b64 [m], 1; fence.mbarrier_init.release.cluster; NEXT: "
    use = ("xor.b32 n, r, 1; mapa.shared::cluster.u32 s, m, n; @!z bra SENT; mbarrier.arrive.shared::cluster.b64 _, [s]; SENT: "
           "WAIT: mbarrier.try_wait.parity.shared.b64 y, [m], 0; @!y bra WAIT; mov.u32 u, 7; bar.warp.sync -1;")
    both = CLUSTER_BARRIER.replace("release", "relaxed")
    for seed in range(4):
        assert (launch(kernel(start + both + use + CLUSTER_BARRIER), seed=seed) == 7).all()
    with pytest.raises(Fault) as e:
        launch(kernel(start.replace("fence.mbarrier_init.release.cluster;", "") + both + use + CLUSTER_BARRIER))
    assert e.value.kind == "race"


def test_ranks() -> None:
    got = launch(kernel("mov.u32 u, %cluster_nctarank; mad.lo.u32 u, r, 10, u; mov.u32 v, %clusterid.x; mad.lo.u32 u, v, 1000, u;"))
    assert got[:, 0].tolist() == [2, 12, 1002, 1012]


def test_no_such_rank() -> None:
    with pytest.raises(Fault, match="rank 5 of a cluster of 2"):
        launch(kernel("mov.b32 n, 5; mapa.shared::cluster.u32 s, m, n; mov.b32 u, 0;"))


REMOTE = ("setp.eq.u32 z, t, 0; @!z bra READY; mbarrier.init.shared.b64 [m], 2; fence.mbarrier_init.release.cluster; READY: "
          + CLUSTER_BARRIER + " mov.b32 n, 0; mapa.shared::cluster.u32 s, m, n; @!z bra SENT; "
          "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [s]; SENT: setp.ne.u32 y, r, 0; @y bra END; "
          "WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 y, [m], 0; @y bra END; bra WAIT; END: mov.b32 u, 7;")


def test_remote_arrival() -> None:
    assert (launch(kernel(REMOTE)) == 7).all()
    with pytest.raises(Fault, match="1 of 2 arrivals"):
        launch(kernel(REMOTE.replace("@!z bra SENT;", "setp.ne.u32 z, r, 0; @!z bra SENT; setp.eq.u32 z, t, 0; @!z bra SENT;")))


def multicast(mask: int, bytes_expected: int = 2048) -> str:
    """The first CTA of a cluster loads a box into those of the mask; each reads word `lane` of its own."""
    return ("setp.eq.u32 z, t, 0; @!z bra READY; mbarrier.init.shared.b64 [m], 1; fence.mbarrier_init.release.cluster; "
            f"mbarrier.arrive.expect_tx.shared.b64 st, [m], {bytes_expected}; READY: {CLUSTER_BARRIER} add.u32 s, m, 1024; "
            "setp.ne.u32 y, r, 0; @y bra LOADED; @!z bra LOADED; .reg .b16 who; .reg .b64 hint; mov.b64 hint, 0; "
            f"mov.b16 who, {mask}; mov.b64 map, pmap; cvta.param.u64 map, map; "
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [s], "
            "[map, {0, 4}], [m], who, hint; LOADED: WAIT: mbarrier.try_wait.parity.shared.b64 y, [m], 0; @y bra GO; bra WAIT; GO: "
            "shl.b32 v, t, 2; add.u32 s, s, v; ld.shared.b32 u, [s];")


def test_multicast() -> None:
    data = aligned(np.arange(64 * 32, dtype=np.uint16))
    params = ".param .u64 pout, .param .align 64 .b8 pmap[128]"
    tensor = TensorMap(data.view(np.uint8), (64, 32), (128,), (64, 16), 128)
    text = kernel(multicast(3), 4096, params)
    got = launch(text, ctas=2, more=(tensor,))
    first_row = np.arange(64 * 4, 64 * 5, dtype=np.uint16).view(np.uint32)
    assert (got == first_row).all()  # row 0 of a box is not moved by the swizzle
    with pytest.raises(Fault, match="2048 bytes missing"):
        launch(kernel(multicast(1), 4096, params), ctas=2, more=(tensor,))
    assert (launch(text, ctas=2, more=(tensor,), seed=5) == first_row).all()


@pytest.mark.parametrize(("op", "mode"), [("add", "rn"), ("add", "rm"), ("sub", "rn"), ("mul", "rz"), ("fma", "rn"), ("fma", "rp")])
def test_pairs_of_float32(op: str, mode: str) -> None:
    """``.f32x2`` exists from sm_100 on; the arithmetic is that of two f32."""
    n = 3 if op == "fma" else 2
    given = columns([F32] * (2 * n), 77)
    words = [[h << 32 | x for x, h in zip(given[2 * i], given[2 * i + 1], strict=True)] for i in range(n)]
    names = "abc"[:n]
    loads = "".join(f"mad.wide.u32 at, tid, 8, in; ld.global.b64 {c}, [at+{8 * 160 * i}]; " for i, c in enumerate(names))
    text = HEADER + (".visible .entry k(.param .u64 pin, .param .u64 pout) .reqntid 160, 1, 1 { .reg .b64 in, out, at, a, b, c, d; "
                     ".reg .b32 tid; ld.param.u64 in, [pin]; ld.param.u64 out, [pout]; mov.u32 tid, %tid.x; " + loads
                     + f"{op}.{mode}.f32x2 d, {', '.join(names)}; mad.wide.u32 at, tid, 8, out; st.global.b64 [at], d; ret; }}")
    out = np.zeros(160, np.uint64)
    emulate(text, 1, [np.array(words, np.uint64), out])
    for i, x in enumerate(out.tolist()):
        for half in range(2):
            want = operate(op, [value(given[2 * j + half][i], F32) for j in range(n)], F32, mode)
            got = x >> 32 * half & 0xFFFFFFFF
            assert got == want, (i, half, hex(got), hex(want))


def test_tensor_reduction() -> None:
    """cp.reduce.async.bulk.tensor adds a box to a tensor, outside elements left out."""
    data = aligned(np.full((8, 16), 5, np.float32))
    params = ".param .u64 pout, .param .align 64 .b8 pmap[128]"
    body = ("shl.b32 v, t, 4; add.u32 s, m, v; mov.b32 u, 0f40000000; st.shared.v4.b32 [s], {u, u, u, u}; "
            "fence.proxy.async.shared::cta; bar.sync 0; setp.eq.u32 z, t, 0; @!z bra END; mov.b64 map, pmap; cvta.param.u64 map, map; "
            "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [map, {8, 5}], [m]; cp.async.bulk.commit_group; "
            "cp.async.bulk.wait_group 0; END: griddepcontrol.launch_dependents; griddepcontrol.wait;")
    tensor = TensorMap(data.reshape(-1).view(np.uint8), (16, 8), (64,), (16, 8), 64, itemsize=4, element="f32")
    launch(kernel(body, params=params), ctas=1, cluster=1, more=(tensor,))
    want = np.full((8, 16), 5, np.float32)
    want[5:, 8:] += 2
    assert (data == want).all()
    tensor = TensorMap(data.reshape(-1).view(np.uint8), (16, 8), (64,), (16, 8), 64, itemsize=4)
    with pytest.raises(Fault, match="of which type"):
        launch(kernel(body, params=params), ctas=1, cluster=1, more=(tensor,))


def test_exact_arithmetic_is_exact() -> None:
    """The oracle of the programs, on numbers whose rounding is known."""
    one, ulp = Fraction(1), Fraction(1, 1 << 23)
    from emulator.exact import encode

    assert encode(one + ulp / 2, F32) == 0x3F800000 and encode(one + ulp * 3 / 2, F32) == 0x3F800002
    assert encode(one + ulp / 2, F32, "rp") == 0x3F800001 and encode(-one - ulp / 2, F32, "rm") == 0xBF800001
    assert encode(Fraction(2) ** 128, F32) == 0x7F800000 and encode(Fraction(2) ** 128, F32, "rz") == 0x7F7FFFFF
    assert encode(Fraction(1, 1 << 149), F32) == 1 and encode(Fraction(1, 1 << 150), F32) == 0
