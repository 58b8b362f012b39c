"""Mutants in what orders the warps of the forward kernel: barriers, phases, work items, waits for products and copies."""
from __future__ import annotations

import re

from .cases import Case
from .mutate import Edit, Mutant, Stale, Text

PLAIN = Case("mutants d64", rows=192, keys=401, seed=101)
TURNS = Case("mutants d128 causal", rows=200, keys=400, dims=(128, 128), hi=200, seed=102)
PADDED = Case("mutants padding", rows=64, keys=420, padding="gaps", nan_slots=True, seed=103, empty="zero")
AGAIN = Case("mutants persistent", rows=128, keys=200, dims=(128, 128), heads=(3, 3), sms=1, seed=104)
SHARED_O = Case("mutants O in the memory of Q", rows=128, keys=100, dims=(192, 192), heads=(3, 3), sms=1, seed=109)
ITEMS = Case("mutants items", rows=200, keys=140, heads=(2, 1), batch=2, sms=2, seed=110)
ONE_TILE = Case("mutants items of one tile", rows=64, keys=100, heads=(3, 3), sms=1, seed=111)
DRAWN = Case("mutants drawn items", rows=200, keys=200, heads=(2, 2), hi=0, sms=2, seed=112)
PADDED_ITEMS = Case("mutants padded items of one tile", rows=64, keys=128, heads=(4, 4), padding="none", seed=113, sms=1)
"""No bit is cleared and no item has a second tile, so that the mask warp waits for nothing but what it must."""
GROUPED = Case("mutants grouped", rows=64, keys=64, heads=(4, 2), batch=2, seed=105)
LEFT_OUT = Case("mutants tiles left out", rows=384, keys=384, hi=0, heads=(2, 2), sms=2, seed=117)
"""Of 192 rows a block and 128 keys a tile the first warpgroups do not see the last one."""
MANY = Case("mutants many tiles", rows=64, keys=1400, seed=116)
PLAIN_AGAIN = Case("mutants persistent d64", rows=64, keys=300, heads=(2, 2), sms=1, seed=114)

TEAM = Case("mutants team", rows=512, keys=500, dims=(128, 128), sms=2, seed=118)
TEAM_AGAIN = Case("mutants team again", rows=250, keys=500, dims=(128, 128), heads=(3, 3), sms=2, seed=119)

COPY_LATE = r"^race: write to shared memory .* not ordered after its read by products"
"""A tile is loaded over the one that a product still reads."""
READ_EARLY = r"^race: read of shared memory .* not ordered after its write by bulk copies.*wgmma"
"""A product reads what is still being loaded."""
EITHER = f"{COPY_LATE}|{READ_EARLY}"
"""A product reads what another copy must bring first: whichever of the two comes first, the other one is reported."""

DRAW = r"atom\.global\.inc\.u32 (%r\d+), (\[%rd\d+\]), (%r\d+);"
"""The next value of the counter of items: where to, from where, the last one before it starts again."""


def order() -> list[Mutant]:
    found: list[Mutant] = []

    def add(name: str, case: Case, shows: str, edit: Edit, fast: bool = False, limit: int = 2_000_000) -> None:
        found.append(Mutant(name, case, shows, edit, fast, limit))

    # Barriers: initialisation.
    add("mbarrier not initialised", PLAIN, "^barrier: arrival .* where no mbarrier was initialised",
        lambda t: t.drop(r"mbarrier\.init", 0, "shared.k_full", of=2))
    add("no fence after mbarrier initialisation", PLAIN, "^proxy: .* whose initialisation no fence",
        lambda t: t.drop(r"fence\.mbarrier_init"), fast=True)
    add("no barrier after mbarrier initialisation", PLAIN, "^(barrier: .* where no mbarrier was initialised|race: )",
        lambda t: t.drop(r"bar\.sync\s+0;"))
    add("one arrival too few expected", PLAIN, COPY_LATE,
        lambda t: t.sub(r"mov\.b32(\s+%r\d+), 12;", r"mov.b32\1, 11;", at="mbarrier_init(shared.k_empty"), fast=True)
    add("one arrival too many expected", PLAIN, "^deadlock: .*_wait.* 1 of 13 arrivals",
        lambda t: t.sub(r"mov\.b32(\s+%r\d+), 12;", r"mov.b32\1, 13;", at="mbarrier_init(shared.k_empty"))
    # Barriers: arrivals.
    add("K stage not released in the loop", PLAIN, r"^deadlock: .*12 of 12 arrivals.*mbarrier_wait\(shared\.k_full",
        lambda t: t.cut(t.arrive("k_empty", 1, 2)), fast=True)
    add("first K stage of an item not released", PLAIN, r"^deadlock: .*12 of 12 arrivals.*mbarrier_wait\(shared\.k_full",
        lambda t: t.cut(t.arrive("k_empty", 0, 2)))
    add("V stage not released in the loop", PLAIN, r"^deadlock: .*12 of 12 arrivals.*mbarrier_wait\(shared\.v_full",
        lambda t: t.cut(t.arrive("v_empty", 0, 2)))
    add("last V stage of an item not released", AGAIN, r"^deadlock: .*8 of 8 arrivals.*mbarrier_wait\(shared\.v_full",
        lambda t: t.cut(t.arrive("v_empty", 1, 2)))
    add("double arrive", PLAIN, "^double arrive: ", lambda t: t.twice(t.arrive("v_empty", 0, 2)), fast=True)
    add("arrive by all lanes", PLAIN, "^deadlock: .* in phase 32: ", lambda t: _by_all(t, t.release("v_empty", 0, 2)))
    add("K released by all lanes", PLAIN, COPY_LATE, lambda t: _by_all(t, t.release("k_empty", 1, 2)), fast=True)
    add("V released by all lanes but one", PLAIN, COPY_LATE, lambda t: t.put(
        t.release("v_empty", 0, 2), r"setp\.gt", "setp.le"))
    add("arrive on the barrier of K instead of V", PLAIN, "^double arrive: ", _arrive_elsewhere)
    add("K released before its product is done", PLAIN, COPY_LATE,
        lambda t: t.early(t.release("k_empty", 1, 2), _waits(t)[1]), fast=True)
    add("V released before its product is done", PLAIN, COPY_LATE,
        lambda t: t.early(t.release("v_empty", 0, 2), _waits(t)[2]), fast=True)
    add("last V of an item released before its product is done", AGAIN, COPY_LATE,
        lambda t: _wait_late(t, 3, t.arrive("v_empty", 1, 2)), fast=True)
    # Q.
    add("Q not released", AGAIN, r"^deadlock: .*mbarrier_wait\(shared\.q_empty", lambda t: t.cut(t.arrive("q_empty", 1, 2)))
    add("Q of an item of one tile not released", ONE_TILE, r"^deadlock: .*mbarrier_wait\(shared\.q_empty",
        lambda t: t.cut(t.arrive("q_empty", 0, 2)))
    add("Q released before its last product is done", AGAIN, COPY_LATE,
        lambda t: t.early(t.release("q_empty", 1, 2), _waits(t)[1]), fast=True)
    add("Q of an item of one tile released before its product is done", ONE_TILE, COPY_LATE,
        lambda t: _wait_late(t, 0, t.arrive("q_empty", 0, 2)))
    add("Q released a tile early", PLAIN_AGAIN, COPY_LATE + "|^double arrive", _q_a_tile_early)
    add("Q released with every tile", PLAIN_AGAIN, COPY_LATE + r"|^deadlock: .*mbarrier_wait\(shared\.q_empty", lambda t: t.suffix(
        i := _last_tile(t), f"mov.pred {re.findall('%p[0-9]+', t.lines[i])[0]}, 1;"))
    add("producer does not wait for Q to be free", AGAIN, EITHER, lambda t: t.no_wait(t.wait("q_empty", 0, 2)))
    add("first product of the first item does not wait for Q", PLAIN, EITHER, lambda t: t.no_wait(t.wait("q_full", 0, 2)))
    add("first product of the next item with the old Q", AGAIN, EITHER, lambda t: t.no_wait(t.wait("q_full", 1, 2)), fast=True)
    add("phase of Q not flipped in the consumer", AGAIN, EITHER, lambda t: _still(t, t.wait("q_full", 1, 2)))
    add("phase of Q not flipped in the producer", AGAIN, EITHER, lambda t: _still(t, t.wait("q_empty", 0, 2)))
    # Transaction counts.
    add("bytes not expected", PLAIN, r"^deadlock: .*mbarrier_wait\(shared\.k_full", lambda t: t.cut(t.expect("k_full", 0, 2)))
    add("too few bytes expected", PLAIN, r"^deadlock: .* -8192 bytes missing.*mbarrier_wait\(shared\.k_full", lambda t: _bytes(t, 8192), fast=True)
    add("too many bytes expected", PLAIN, r"^deadlock: .* 16 bytes missing.*mbarrier_wait\(shared\.k_full",
        lambda t: _bytes(t, 16400))
    add("copy of K completes on the barrier of V", PLAIN, r"^deadlock: .*mbarrier_wait\(shared\.k_full", _completes_elsewhere)
    # Waits and phases.
    add("producer does not wait for a free K stage", PLAIN, r"^double arrive: .*mbarrier_arrive_and_expect_tx",
        lambda t: t.no_wait(t.wait("k_empty", 1, 2)), fast=True)
    add("producer does not wait for a free V stage", PLAIN, COPY_LATE, lambda t: t.no_wait(t.wait("v_empty", 0, 1)))
    add("consumer does not wait for the first K", PLAIN, EITHER, lambda t: t.no_wait(t.wait("k_full", 0, 3)), fast=True)
    add("consumer does not wait for K in the loop", PLAIN, EITHER, lambda t: t.no_wait(t.wait("k_full", 1, 3)))
    add("K taken for there unasked", PLAIN, EITHER, lambda t: t.put(
        _test(t), r"mbarrier\.test_wait\S+ (%p\d+), .*", r"setp.eq.u32 \1, 0, 0;"), fast=True)
    add("answer about the next K taken the wrong way round", MANY, EITHER, lambda t: t.suffix(
        i := _test(t), f"not.pred {(p := re.findall('%p[0-9]+', t.lines[i])[0])}, {p};"))
    add("next K asked for by the other phase", MANY, EITHER, lambda t: t.put(
        _test(t), r"(.*\], )(%r\d+);", r".reg .b32 other; xor.b32 other, \2, 1; \1other;"))
    add("first product of the next item does not wait for K", AGAIN, EITHER, lambda t: t.no_wait(t.wait("k_full", 2, 3)))
    add("consumer does not wait for V in the loop", PLAIN, EITHER, lambda t: t.no_wait(t.wait("v_full", 0, 2)))
    add("consumer does not wait for the last V", ONE_TILE, EITHER, lambda t: t.no_wait(t.wait("v_full", 1, 2)))
    add("other phase of K in the consumer", PLAIN, r"^deadlock: .*mbarrier_wait\(shared\.k_full", lambda t: t.other_phase(t.wait("k_full", 1, 3)), fast=True)
    add("other phase of V in the consumer", PLAIN, r"^deadlock: .*mbarrier_wait\(shared\.v_full", lambda t: t.other_phase(t.wait("v_full", 0, 2)))
    add("other phase of K in the producer", PLAIN, r"^deadlock: .*mbarrier_wait\(empty", lambda t: t.other_phase(t.wait("k_empty", 0, 2)))
    add("phase of K not flipped in the producer", PLAIN, "^double arrive: .*mbarrier_arrive_and_expect_tx", lambda t: _still(t, t.wait("k_empty", 1, 2)))
    add("phase of K not flipped in the consumer", PLAIN, r"^deadlock: .*mbarrier_wait\(shared\.k_full", lambda t: _still(t, t.wait("k_full", 1, 3)))
    add("phase of V not flipped in the consumer", PLAIN, r"^deadlock: .*mbarrier_wait\(shared\.v_full", lambda t: _still(t, t.wait("v_full", 0, 2)))
    add("stages of K never wrap in the producer", PLAIN, "^race: write to .* after its write by bulk copies",
        lambda t: t.sub(r"setp\.eq\.b32(.*), 2;", r"setp.eq.b32\1, 3;", 1, "wrap = stage", of=7))
    add("stages of V wrap early in the producer", PLAIN, r"^deadlock: .*mbarrier_wait\(shared\.v_full",
        lambda t: t.sub(r"setp\.eq\.b32(.*), 2;", r"setp.eq.b32\1, 1;", 2, "wrap = stage", of=7))
    # Work items.
    add("item not announced", ITEMS, r"^deadlock: .*mbarrier_wait\(shared\.item_full", lambda t: t.cut(t.arrive("item_full", 1, 2)),
        fast=True)
    add("first item not announced", ITEMS, r"^deadlock: .*mbarrier_wait\(shared\.item_full",
        lambda t: t.cut(t.arrive("item_full", 0, 2)))
    add("item slot not released", ITEMS, r"^deadlock: .*mbarrier_wait\(shared\.item_empty",
        lambda t: t.cut(t.arrive("item_empty", 1, 2)), fast=True)
    add("item slot of the first item not released", ITEMS, r"^deadlock: .*mbarrier_wait\(shared\.item_empty",
        lambda t: t.cut(t.arrive("item_empty", 0, 2)))
    add("first item read before it is announced", ITEMS, r"^race: read of shared memory .* after its write by CTA 0 warp 0.*words.i.|"
        "^uninitialised: read .*words.i.", lambda t: t.no_wait(t.wait("item_full", 0, 2)), fast=True)
    add("first item announced before it is written", ITEMS, "^(race|uninitialised): read of .*words.i.", _announced_early)
    add("item heard from the other slot", ITEMS, "^(race: .*words|deadlock: )", _other_slot_read)
    add("item told in the other slot", ITEMS, "^(race|uninitialised): read of .*words", _other_slot_written, fast=True)
    add("phase of the item slots not flipped in the consumer", ITEMS, r"^deadlock: .*mbarrier_wait\(shared\.item_full",
        lambda t: _still(t, t.wait("item_full", 1, 2)), fast=True)
    add("phase of the item slots not flipped in the producer", ITEMS, r"^deadlock: .*mbarrier_wait\(shared\.item_empty",
        lambda t: _still(t, t.wait("item_empty", 1, 2)))
    add("item slots not taken in turn by the consumer", ITEMS, r"^deadlock: .*mbarrier_wait\(shared\.item_", lambda t: _one_slot(t, "item_full"))
    add("item slots not taken in turn by the producer", ITEMS, r"^deadlock: .*mbarrier_wait\(shared\.item_", lambda t: _one_slot(t, "item_empty"))
    add("word of an item not written", ITEMS, r"^uninitialised: read .*words.i.",
        lambda t: t.put(_words(t)[3], r"v2\.b32(.*)\{(%r\d+), (%r\d+)\}", r"b32\1\2"), fast=True)
    add("head and batch of an item swapped", ITEMS, "^wrong answer: out", lambda t: t.put(
        _words(t)[2], r"\{(%r\d+), (%r\d+), (%r\d+), (%r\d+)\}", r"{\1, \2, \4, \3}"))
    add("first and last key tile of an item swapped", ITEMS, r"^deadlock: .*mbarrier_wait\(shared\.q_", lambda t: t.put(
        _words(t)[3], r"\{(%r\d+), (%r\d+)\}", r"{\2, \1}"))
    add("row block of an item one too high", ITEMS, "^wrong answer: ", lambda t: t.lines.__setitem__(
        _words(t)[2], "{ .reg .b32 off; " + re.sub(r"\{(%r\d+), (%r\d+),(.*)\};", r"{\1, off,\3};", t.lines[_words(t)[2]]).replace(
            "st.shared", "add.s32 off, " + re.findall(r"%r\d+", t.lines[_words(t)[2]])[2] + ", 1; st.shared", 1) + " }"))
    add("items one block apart instead of the grid", ITEMS, "^race: write to argument",
        lambda t: t.sub(r"mov\.u32(\s+%r\d+), %nctaid\.x;", r"mov.b32\1, 1;"))
    # Teams: two blocks of a cluster that load K and V for both.
    add("team: no cluster barrier before the first use of its mbarriers", TEAM, "^(barrier: .* where no mbarrier was initialised|race: )",
        lambda t: (t.drop(r"barrier\.cluster\.arrive\.relaxed;"), t.drop(r"barrier\.cluster\.wait;", 0, of=2)), fast=True)
    add("team: a block ends while the other arrives at its mbarriers", TEAM, "^ended: ",
        lambda t: (t.drop(r"barrier\.cluster\.arrive;"), t.drop(r"barrier\.cluster\.wait;", 1, of=2)))
    add("team: stages released to the own block only", TEAM, "^race: write to shared memory", lambda t: t.sub(
        r"sub\.s32 (%r\d+), there, (%r\d+);", r"mov.b32 \1, 0;"), fast=True)
    add("team: stages counted as if one block used them", TEAM, COPY_LATE, lambda t: t.sub(
        r"mov\.b32(\s+%r\d+), 16;", r"mov.b32\1, 8;", at="mbarrier_init(shared.v_full"))
    add("team: K copied to one block only", TEAM, "^deadlock: |^uninitialised: |^race: ", lambda t: t.sub_all(
        r"mov\.b16(\s+%rs\d+), 3;", r"mov.b16\1, 1;", "mcast_mask", of=12))
    add("team: both blocks load the same half of K", TEAM, "^race: |^uninitialised: |^deadlock: ", lambda t: t.sub(
        r"and\.b32(\s+%r\d+), %r\d+, 1;", r"mov.b32\1, 0;", 0, "if self._rank() == i:", of=3))
    add("team: both blocks take the same rows", TEAM, "^race: write to argument", lambda t: [t.sub(
        r"and\.b32(\s+%r\d+), %r\d+, 1;", r"mov.b32\1, 0;", 0, "return cute.arch.block_idx()[0] % 2", of=n) for n in (3, 2)])
    add("team: every second item of a block left out", TEAM_AGAIN, "^wrong answer: |^uninitialised: ", lambda t: t.sub(
        r"shr\.u32(\s+%r\d+), (%r\d+), 1;", r"mov.b32\1, \2;", 0, "with cute.arch.elect_one():"))
    # What follows needs the mask warp: the barriers of Q, K and V order the other warps' words too.
    add("item read by the mask warp before it is announced", PADDED_ITEMS, r"^(race: read|uninitialised: read) .*words.i.",
        lambda t: t.no_wait(t.wait("item_full", 1, 4)))
    add("item slot not released by the mask warp", PADDED_ITEMS, r"^deadlock: .*mbarrier_wait\(shared\.item_empty",
        lambda t: t.cut(t.arrive("item_empty", 1, 4)))
    add("item slot released before it is read", PADDED_ITEMS, "^race: write to shared memory .* after its read by CTA 0 warp 1.*words.i.",
        _slot_early)
    add("item told over one that is still read", PADDED_ITEMS, "^(race: write to shared memory .* after its read by CTA 0 warp 1.*"
        "words.i.|double arrive: )", lambda t: t.no_wait(t.wait("item_empty", 1, 2)), fast=True)
    # The counter of items.
    add("counter that does not start again", DRAWN, "^counter: .* is 4 after a launch", lambda t: t.sub(
        DRAW, r"atom.global.add.u32 \1, \2, 1;"), fast=True)
    add("counter that starts again late", DRAWN, "^counter: .* is 4 after a launch", lambda t: t.sub(
        DRAW, r"{ .reg .b32 x; add.s32 x, \3, 1; atom.global.inc.u32 \1, \2, x; }"))
    add("counter that starts again early", DRAWN, "^(race: write to argument|counter: )", lambda t: t.sub(
        DRAW, r"{ .reg .b32 x; sub.s32 x, \3, 1; atom.global.inc.u32 \1, \2, x; }"))
    add("counter raised without an atomic", DRAWN, "^race: (read of|write to) argument .*CTA 0",
        lambda t: t.sub(DRAW, r"{ .reg .b32 x; ld.global.b32 \1, \2; add.s32 x, \1, 1; st.global.b32 \2, x; }"), fast=True)
    add("counter only read", DRAWN, "^limit: more than 300000 instructions",
        lambda t: t.sub(DRAW, r"ld.global.b32 \1, \2;"), limit=300_000)
    add("draw without the grid", DRAWN, "^limit: more than 300000 instructions",  # drawn one by one, the items never end
        lambda t: t.sub(r"add\.s32(\s+%r\d+, %r\d+), %r\d+;", r"add.s32\1, 0;", at="item = grid + cute.arch.inline_ptx("),
        limit=300_000)
    add("draw one too far", DRAWN, "^counter: .* is 3 after a launch", lambda t: t.suffix(
        i := t.one(r"add\.s32\s+%r\d+, %r\d+, %r\d+;", at="item = grid + cute.arch.inline_ptx("),
        f"add.s32 {(r := re.findall('%r[0-9]+', t.lines[i])[0])}, {r}, 1;"))
    add("drawn item not given to all lanes", DRAWN, "^(race|divergence|wrong answer): ", lambda t: t.sub(
        r"shfl\.sync\.idx\.b32(\s+%r\d+), (%r\d+), 0, 31, -1;", r"mov.b32\1, \2;", at="cute.arch.shuffle_sync(drawn"))
    # Waits for products.
    add("no wgmma.fence", PLAIN, "^wgmma: the first wgmma.mma_async without", lambda t: t.drop_all(r"wgmma\.fence", of=5), fast=True)
    add("no wgmma.fence before the products of the loop", PLAIN, "^wgmma: .* written after the last wgmma.fence",
        lambda t: t.cut(*t.each(r"wgmma\.fence", of=5)[1:3]))
    add("no wgmma.fence before the last PV", PLAIN, "^wgmma: .* written after the last wgmma.fence",
        lambda t: t.drop(r"wgmma\.fence", 3, of=5))
    add("first product not committed", PLAIN, "^wgmma: read of .*, accumulator of the product", lambda t: t.drop(
        r"wgmma\.commit_group", 0, of=5))
    add("first product of the next item not committed", AGAIN, "^wgmma: (read|write) .* of the product", lambda t: t.drop(
        r"wgmma\.commit_group", 4, of=5))
    add("first product of an item not waited for", PLAIN, "^wgmma: read of .*, accumulator of the product",
        lambda t: t.drop(r"wgmma\.wait_group", 0, of=5), fast=True)
    add("first product of the next item not waited for", AGAIN, "^wgmma: read of .*, accumulator of the product",
        _next_not_waited)
    add("no wait for S in the loop", PLAIN, "^wgmma: read of .*, accumulator of the product",
        lambda t: t.put(_waits(t)[1], "1;", "2;"))
    add("no wait for PV in the loop", PLAIN, "^wgmma: (read|write) .* of the product", lambda t: t.put(_waits(t)[2], "0;", "1;"))
    add("no wait for the last PV", PLAIN, "^wgmma: read of .*, accumulator of the product", lambda t: t.put(_waits(t)[3], "1;", "2;"),
        fast=True)
    add("last product not waited for", PLAIN, "^exit: .*products", lambda t: t.cut(_waits(t)[4]))
    add("product where no item is reads a stage that holds nothing", GROUPED, "^(uninitialised|race): .*wgmma", lambda t: t.sub(
        r"selp\.b32(\s+%r\d+), 1, %r\d+, %p\d+;", r"mov.b32\1, 1;", at="stage = select_(k_stage == 0"))
    # Key padding.
    add("key bits not waited for", PADDED, "^(race|uninitialised): read of .*words.i. ==", lambda t: t.no_wait(t.wait("bits_full", 0, 2)))
    add("key bits not announced", PADDED, r"^deadlock: .*mbarrier_wait\(shared\.bits_full", lambda t: t.cut(t.arrive("bits_full")))
    add("key bits overwritten while they are read", PADDED, "^(race: write .* after its read|double arrive: )", lambda t: t.no_wait(
        [i for i in t._on(r"mbarrier\.try_wait", "k_empty") if "shared.k_empty" in t.from_line[i]][0]))
    add("cleared V not waited for", PADDED, "^race: read of shared memory .* after its write by CTA 0 warp 1",
        lambda t: t.no_wait(t.wait("v_clean", 0, 2)))
    add("V cleared before it is loaded", PADDED, "^race: ", lambda t: t.no_wait(
        [i for i in t._on(r"mbarrier\.try_wait", "v_full") if "full_phase" in t.from_line[i]][0]))
    add("no proxy fence after clearing V", PADDED, "^proxy: .* after a write by CTA 0 warp 1", lambda t: t.drop(
        r"fence\.proxy\.async", 0, of=2), fast=True)
    # Epilogue.
    add("no proxy fence before the store", PLAIN, "^proxy: .*async proxy after a write", lambda t: t.drop(r"fence\.proxy\.async"),
        fast=True)
    add("no barrier before the store", PLAIN, "^(race|uninitialised|proxy): .*cp.async.bulk.tensor", lambda t: t.drop(
        r"bar\.sync\s+%r\d+, 128", 1, of=2))
    add("no barrier before O is written", AGAIN, "^race: write to shared memory .* after its read by bulk copies.*stmatrix",
        lambda t: t.drop(r"bar\.sync\s+%r\d+, 128", 0, of=2))
    add("no barrier before O is written over Q", SHARED_O, "^race: write to shared memory .* after its read by products.*stmatrix",
        lambda t: t.drop(r"bar\.sync\s+%r\d+, 128", 0, of=2))
    add("O overwritten while it is stored", AGAIN, "^race: write to shared memory .* after its read by bulk copies.*stmatrix",
        lambda t: t.drop(r"cp\.async\.bulk\.wait_group", 0, of=2))
    add("Q loaded over O that is stored", SHARED_O, "^race: write to shared memory .* after its read by bulk copies.*cp.async.bulk",
        lambda t: t.drop(r"cp\.async\.bulk\.wait_group", 0, of=2))
    add("Q in the memory of O not released", SHARED_O, r"^deadlock: .*mbarrier_wait\(shared\.q_empty", lambda t: t.cut(t.arrive("q_empty")))
    add("store not committed", PLAIN, "^exit: .* that nothing waits for", lambda t: t.drop(r"cp\.async\.bulk\.commit_group"))
    add("store not waited for", PLAIN, "^exit: .* that nothing waits for", lambda t: t.drop(r"cp\.async\.bulk\.wait_group", 1, of=2),
        fast=True)
    # Registers, turns.
    add("more registers than there are", PLAIN, "^deadlock: .*setmaxreg|^registers", lambda t: t.sub(
        r"setmaxnreg\.inc(\S+\s+)160", r"setmaxnreg.inc\g<1>168"), fast=True)
    add("registers not given back", PLAIN, "^deadlock: .*setmaxreg", lambda t: t.drop(r"setmaxnreg\.dec"))
    add("turn not passed on", TURNS, r"^deadlock: .*barrier\(barrier_id=_BAR_TURN", lambda t: t.drop(
        r"bar\.arrive", at="_BAR_TURN + peer"), fast=True)
    add("first turn not given", TURNS, r"^deadlock: .*barrier\(barrier_id=_BAR_TURN", lambda t: t.drop(
        r"bar\.arrive", at="barrier_id=_BAR_TURN,"))
    add("turn taken by half a pair", TURNS, "^barrier: .* for 128 threads", lambda t: t.sub(
        r"(bar\.arrive\s+\S+), 256", r"\1, 128", at="_BAR_TURN + peer"))
    # Tiles that a warpgroup leaves out.
    add("turn not given away with a tile left out", LEFT_OUT, "^deadlock: ", lambda t: t.drop_all(
        r"bar\.arrive", at="_BAR_TURN + other", of=2), fast=True)
    add("a tile left out not released", LEFT_OUT, "^deadlock: ", lambda t: t.cut(
        t.arrive("k_empty", 0, 4), t.arrive("k_empty", 3, 4)))
    add("a tile left out that is seen", LEFT_OUT, "^wrong answer: ", lambda t: t.sub_all(
        r"setp\.(?:gt|le)\.s32(\s+%p\d+), (%r\d+), (%r\d+);", r"setp.ne.s32\1, \2, \3;", at="> reach", of=2), fast=True)
    return found


def _waits(t: Text) -> list[int]:
    """Waits for products: an item's first, S in the loop, PV in the loop, the last PV, at the end."""
    return t.each(r"wgmma\.wait_group", 5)


def _wait_late(t: Text, nth: int, release: int) -> None:
    """The nth wait for products comes after a release that stands behind it."""
    wait = _waits(t)[nth]
    if "wgmma" in "".join(t.lines[wait + 1:release]):
        raise Stale("the release no longer follows the wait")
    t.later(wait, t.label(release))


def _by_all(t: Text, release: int) -> None:
    """Every lane arrives."""
    t.put(release, r"setp\.gt\.s32 p, bits, %r\d+;", "setp.eq.s32 p, bits, bits;")


def _test(t: Text) -> int:
    """Whether the next K is there, asked without waiting."""
    return t.one(r"mbarrier\.test_wait", at="mbarrier_test_wait(shared.k_full")


def _offset_of(t: Text, field: str) -> int:
    return next(o for o, name in t.names.items() if name == field)


def _arrive_elsewhere(t: Text) -> None:
    v, k = _offset_of(t, "v_empty"), _offset_of(t, "k_empty")
    release = t.release("v_empty", 0, 2)
    address = re.findall(r"\[(%r\d+)\]", t.lines[release])[0]
    t.put(t.back(release, rf"add\.s32\s+{address},"), rf", {v};", f", {k};")


def _completes_elsewhere(t: Text) -> None:
    v, k = _offset_of(t, "v_full"), _offset_of(t, "k_full")
    t.put(t.copy("k_full", 1, 2), rf"\+{k}\]", f"+{v}]")


def _bytes(t: Text, size: int) -> None:
    """Another number of bytes for the first K tile."""
    i = t.expect("k_full", 0, 2)
    register = re.findall(r"%r\d+", t.lines[i])[-1]
    t.put(t.back(i, rf"mov\.b32\s+{register},"), r", \d+;", f", {size};")


def _still(t: Text, wait: int) -> None:
    """The parity that a wait is for never changes."""
    p = t.phase(wait)
    t.drop_all(rf"xor\.b32\s+{p}, {p}, ")


def _last_tile(t: Text) -> int:
    """Whether this is the last tile of an item, the one whose product is the last to read Q."""
    i = t.back(t.release("q_empty", 1, 2), r"setp\.\w+\.\w+\s+%p\d+, %r\d+, %r\d+;")
    if "last - first - 2" not in t.from_line[i]:
        raise Stale("the condition of the release of Q is not where it was")
    return i


def _q_a_tile_early(t: Text) -> None:
    """Q is released in the last iteration but one; its count is that of the last."""
    i = _last_tile(t)
    a, b = re.findall(r"%r\d+", t.lines[i])
    t.prefix(i, f".reg .b32 early; add.s32 early, {b}, -1;")
    t.put(i, rf"{b};", "early;")


def _slot_early(t: Text) -> None:
    """An item's words are read after its slot has been released."""
    release = t.arrive("item_empty", 1, 4)
    loads = [i for i in t.find(r"ld\.shared\.b32|shfl\.sync\.idx", "make_warp_uniform(words[i])") if t.wait("item_full", 1, 4) < i < release]
    if len(loads) not in (8, 12):
        raise Stale(f"{len(loads)} instructions read an item's words")
    end = t.label(release)
    for i in loads:
        t.later(i, end)


def _announced_early(t: Text) -> None:
    """The arrival comes before the words."""
    i, first = t.arrive("item_full", 0, 2), _words(t)[0]
    count = re.findall(r"%r\d+", t.lines[i])[-1]
    t.prefix(first, f"mov.b32 {count}, 1; " + t.lines[i].strip())
    t.cut(i)


def _words(t: Text) -> list[int]:
    """Stores of the words of the first item (two) and of the following ones (two)."""
    return t.each(r"st\.shared\.v[24]\.b32", 4, "words[i] = item[i]")


def _shift(t: Text, nth: int, of: int) -> int:
    return t.one(r"shl\.b32\s+%r\d+, %r\d+, 5;", nth, of, "words = cute.make_tensor(shared.items")


def _other(t: Text, i: int) -> None:
    slot = re.findall(r"%r\d+", t.lines[i])[1]
    t.put(i, rf"{slot}, 5;", "slot, 5;")
    t.prefix(i, f".reg .b32 slot; xor.b32 slot, {slot}, 1;")


def _other_slot_written(t: Text) -> None:
    _other(t, _shift(t, 0, 2))


def _other_slot_read(t: Text) -> None:
    _other(t, _shift(t, 1, 2))


def _one_slot(t: Text, field: str) -> None:
    """The slot of the second item is that of all that follow."""
    wait = t.wait(field, 1, 2)
    shift = t.back(wait, r"shl\.b32\s+%r\d+, %r\d+, 3;")
    slot = re.findall(r"%r\d+", t.lines[shift])[1]
    t.sub(rf"xor\.b32(\s+%r\d+), {slot}, 1;", rf"mov.b32\1, {slot};")


def _next_not_waited(t: Text) -> None:
    """The wait at the head of an item is skipped but for the first one."""
    wait = _waits(t)[0]
    head = max(k for k in range(wait) if t.lines[k].startswith("$L_"))
    t.prefix(head, t.lines[wait].strip())
    t.cut(wait)
