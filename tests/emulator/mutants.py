"""Mutants of the forward kernel's PTX, and the command that runs them all.

    python -m emulator.mutants [--out FILE] [--only TEXT] [--seeds N]      (in tests/)

An edit names lines of PTX by pattern and by the kernel's source line; when the kernel changes, some need another pattern,
and say so (`Stale`).  A mutant is caught when the emulator refuses it or its answer is wrong, in one of the first seeds.  Exit status 1 when
one is not.
"""
from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fa_inductor.kernels.sm90.variant import Forward

from .cases import Case
from .errors import Fault
from .forward import Compiled, Launcher, ptx_of
from .judge import run, verdict
from .mutate import Edit, Mutant, Stale, Text

PLAIN = Case("mutants d64", rows=192, keys=401, seed=101)
RISING = Case("mutants rising maxima", rows=64, keys=401, data="large", seed=108)
TURNS = Case("mutants d128 causal", rows=200, keys=400, dims=(128, 128), hi=200, seed=102)
PADDED = Case("mutants padding", rows=64, keys=420, padding="gaps", nan_slots=True, seed=103, empty="zero")
AGAIN = Case("mutants persistent", rows=128, keys=200, dims=(128, 128), heads=(3, 3), sms=1, seed=104)
GROUPED = Case("mutants grouped", rows=64, keys=64, heads=(4, 2), batch=2, seed=105)
BIAS = Case("mutants bias", rows=64, keys=130, bias="hqk", heads=(2, 1), bias_dtype="float32", seed=106)
BANDED = Case("mutants window", rows=150, keys=150, lo=-20, hi=3, dtype="float16", seed=107)

K_EMPTY, V_EMPTY, K_FULL = r"\+64\]", r"\+96\]", r"\+48\]"
"""Offsets of barriers in the d64 kernel: three warpgroups, two stages."""


def _list() -> list[Mutant]:
    found: list[Mutant] = []

    def add(name: str, case: Case, edit: Edit, fast: bool = False) -> None:
        found.append(Mutant(name, case, edit, fast))

    # Barriers: initialisation.
    add("mbarrier not initialised", PLAIN, lambda t: t.drop(r"mbarrier\.init", 0, "shared.k_full"))
    add("no fence after mbarrier initialisation", PLAIN, lambda t: t.drop(r"fence\.mbarrier_init"), fast=True)
    add("no barrier after mbarrier initialisation", PLAIN, lambda t: t.drop(r"bar\.sync\s+0;"))
    add("one arrival too few expected", PLAIN, lambda t: t.sub(r"mov\.b32(\s+%r\d+), 12;", r"mov.b32\1, 11;"), fast=True)
    add("one arrival too many expected", PLAIN, lambda t: t.sub(r"mov\.b32(\s+%r\d+), 12;", r"mov.b32\1, 13;"))
    # Barriers: arrivals.
    add("dropped arrive: K stage not released", PLAIN, lambda t: t.drop(r"mbarrier\.arrive\.shared.*" + K_EMPTY, 1), fast=True)
    add("dropped arrive: V stage not released", PLAIN, lambda t: t.drop_all(r"mbarrier\.arrive\.shared.*" + V_EMPTY))
    add("dropped arrive: first K stage not released", PLAIN, lambda t: t.drop(r"mbarrier\.arrive\.shared.*" + K_EMPTY, 0))
    add("double arrive", PLAIN, lambda t: t.twice(r"mbarrier\.arrive\.shared.*" + V_EMPTY, 0), fast=True)
    add("arrive by all lanes", PLAIN, _arrive_by_all)
    add("arrive on the other barrier", PLAIN, lambda t: t.sub(r"(mbarrier\.arrive\.shared.*)\+96\]", r"\1+64]", 0))
    add("release of K before its product is done", PLAIN, lambda t: _early(t, K_EMPTY, 1))
    add("dropped arrive: Q not released", AGAIN, lambda t: t.drop_all(r"mbarrier\.arrive\.shared.*\[%r\d+\+16\]"))
    # Barriers: transaction counts.
    add("bytes not expected", PLAIN, lambda t: t.drop(r"mbarrier\.arrive\.expect_tx.*" + K_FULL))
    add("too few bytes expected", PLAIN, lambda t: t.sub(r"mov\.b32(\s+%r\d+), 16384;", r"mov.b32\1, 8192;"), fast=True)
    add("too many bytes expected", PLAIN, lambda t: t.sub(r"mov\.b32(\s+%r\d+), 16384;", r"mov.b32\1, 16400;"))
    add("copy completes on the other barrier", PLAIN, lambda t: t.sub(r"(cp\.async\.bulk\.tensor.*%rd2.*)\+48\]", r"\1+80]"))
    # Waits and phases.
    add("producer does not wait for a free K stage", PLAIN, lambda t: t.no_wait(1, "wait(empty.data_ptr()"), fast=True)
    add("producer does not wait for a free V stage", PLAIN, lambda t: t.no_wait(2, "wait(empty.data_ptr()"))
    add("producer does not wait for Q to be free", AGAIN, lambda t: t.no_wait(0, "wait(shared.q_empty"))
    add("consumer does not wait for Q", PLAIN, lambda t: t.no_wait(0, "shared.q_full"))
    add("consumer does not wait for the first K", PLAIN, lambda t: t.no_wait(0, "shared.k_full"), fast=True)
    add("consumer does not wait for K in the loop", PLAIN, lambda t: t.no_wait(1, "shared.k_full"))
    add("consumer does not wait for V", PLAIN, lambda t: t.no_wait(0, "shared.v_full"))
    add("swapped phase of K in the consumer", PLAIN, lambda t: _flip_parity(t, "shared.k_full", 0), fast=True)
    add("swapped phase of V in the consumer", PLAIN, lambda t: _flip_parity(t, "shared.v_full", 0))
    add("swapped phase of K in the producer", PLAIN, lambda t: _flip_parity(t, "wait(empty.data_ptr()", 0))
    add("phase never changes", PLAIN, lambda t: t.sub(r"selp\.b32(\s+%r\d+), 1, 0,", r"selp.b32\1, 0, 0,", 4, "wrap = stage"))
    add("stages never wrap", PLAIN, lambda t: t.sub(r"setp\.eq\.b32(.*), 2;", r"setp.eq.b32\1, 3;", 1, "wrap = stage"))
    add("stages wrap early", PLAIN, lambda t: t.sub(r"setp\.eq\.b32(.*), 2;", r"setp.eq.b32\1, 1;", 2, "wrap = stage"))
    # Stages and addresses.
    add("wrong K stage in the product", PLAIN, lambda t: t.sub(r"shl\.b32(.*), 10;", r"shl.b32\1, 9;", 1), fast=True)
    add("wrong K stage in the copy", PLAIN, lambda t: t.sub(r"shl\.b32(.*), 14;", r"shl.b32\1, 13;", 1))
    add("copy to the wrong half of shared memory", PLAIN, lambda t: t.sub(r"\+50176\]", "+50304]", 0))
    add("copy to a misaligned place", PLAIN, lambda t: t.sub(r"\+50176\]", "+50192]", 0))
    add("K tile one row too far", PLAIN, lambda t: _coordinate(t, r"%rd2,", 1, "+1"), fast=True)
    add("V tile one row too far", PLAIN, lambda t: _coordinate(t, r"%rd3,", 1, "+1"))
    add("Q tile of the next rows", PLAIN, lambda t: _coordinate(t, r"%rd1,", 1, "+64"))
    add("head and batch swapped", GROUPED, lambda t: t.sub(r"\[%rd2, \{(%r\d+), (%r\d+), (%r\d+), (%r\d+)\}", r"[%rd2, {\1, \2, \4, \3}"))
    add("K and V heads not grouped", GROUPED, lambda t: t.sub_all(r"div\.s32(\s+%r\d+), (%r\d+), %r\d+;", r"mov.b32\1, \2;",
                                                                 "hk = h // group"))
    add("O tile stored to the next rows", PLAIN, lambda t: t.sub(r"shl\.b32(\s+%r\d+), (%r\d+), 6;", r"mad.lo.s32\1, \2, 64, 1;",
                                                                -1, "cute.copy(tma_o"))
    # Products.
    add("wrong swizzle in the descriptors of Q and K", PLAIN, lambda t: t.sub(r"mov\.b32(\s+%r\d+), 1073741888;",
                                                                             r"mov.b32\1, -2147483584;", 0), fast=True)
    add("no swizzle in the descriptors of Q and K", PLAIN, lambda t: t.sub(r"mov\.b32(\s+%r\d+), 1073741888;", r"mov.b32\1, 64;", 0))
    add("wrong swizzle in the descriptor of V", PLAIN, lambda t: t.sub(r"mov\.b32(\s+%r\d+), 1073741888;",
                                                                      r"mov.b32\1, -2147483584;", -1))
    add("wrong stride in the descriptor", PLAIN, lambda t: t.sub(r"mov\.b32(\s+%r\d+), 1073741888;", r"mov.b32\1, 1073741856;", 0))
    add("wrong step along K", PLAIN, lambda t: t.sub(r"add\.s64(\s+%rd\d+, %rd\d+), 2;", r"add.s64\1, 4;"))
    add("V not transposed", PLAIN, lambda t: t.sub_all(r"(m64n64k16.*1,\s+1,) 1;", r"\1 0;"), fast=True)
    add("negated product", PLAIN, lambda t: t.sub(r"(wgmma\.mma_async.*p, )1,(\s+1)", r"\1-1,\2"))
    add("S accumulates on the scores before", PLAIN, lambda t: t.sub(r"setp\.ne\.b32 p, (%r\d+), 0;", r"setp.eq.b32 p, \1, 0;", 4))
    add("first S accumulates on nothing", PLAIN, lambda t: t.sub(r"setp\.ne\.b32 p, (%r\d+), 0;", r"setp.eq.b32 p, \1, 0;", 0))
    add("O does not accumulate", PLAIN, lambda t: t.sub(r"setp\.ne\.b32 p, (%r\d+), 0;", r"setp.eq.b32 p, \1, 0;", 8), fast=True)
    add("no wgmma.fence", PLAIN, lambda t: t.drop_all(r"wgmma\.fence"), fast=True)
    add("no wgmma.fence in the loop", PLAIN, lambda t: (t.drop(r"wgmma\.fence", 2), t.drop(r"wgmma\.fence", 1)) and None)
    add("no wgmma.fence before the last PV", PLAIN, lambda t: t.drop(r"wgmma\.fence", 3))
    add("no commit", PLAIN, lambda t: t.drop(r"wgmma\.commit_group", 0))
    add("no wait for S", PLAIN, lambda t: t.drop(r"wgmma\.wait_group", 0), fast=True)
    add("wait for one group too few", PLAIN, lambda t: t.sub(r"(wgmma\.wait_group\S+\s+)1;", r"\g<1>2;"))
    add("no wait for PV in the loop", PLAIN, lambda t: t.sub(r"(wgmma\.wait_group\S+\s+)0;", r"\g<1>1;", 1))
    add("no wait for the last PV", PLAIN, lambda t: t.drop(r"wgmma\.wait_group", -1))
    add("release of V before its product is done", PLAIN, lambda t: _early(t, V_EMPTY, 0))
    # Masks.
    add("off-by-one in the end of the keys", PLAIN, lambda t: t.sub(r"setp\.lt\.s32(\s+%p\d+, %r\d+), 16;", r"setp.lt.s32\1, 17;", 0,
                                                                  "hidden = right < c"), fast=True)
    add("off-by-one in every mask comparison", TURNS, lambda t: t.sub_all(r"setp\.lt\.s32", "setp.le.s32", "hidden = right < c"))
    add("causal edge one key late", TURNS, lambda t: t.sub_all(r"setp\.lt\.s32(\s+%p\d+, %r\d+), 0;", r"setp.lt.s32\1, -1;",
                                                              "hidden = right < c"))
    add("window edge", BANDED, lambda t: t.sub_all(r"setp\.gt\.s32", "setp.ge.s32", "left - col0 > c"))
    add("no mask on the last tile", PLAIN, lambda t: _never(t, "vote_any_sync(partial)", 0), fast=True)
    add("masked to zero instead of -inf", PLAIN, lambda t: t.sub_all(r"selp\.f32(\s+%r\d+), 0fFF800000", r"selp.f32\1, 0f00000000"))
    add("key tile left out", TURNS, lambda t: t.sub_all(r"add\.s32(\s+%r\d+, %r\d+), 127;", r"add.s32\1, 63;"))
    add("key bits of the next key", PADDED, lambda t: t.sub_all(r"and\.b32(\s+%r\d+, %r\d+), 2;", r"and.b32\1, 4;"))
    add("key bits not waited for", PADDED, lambda t: t.no_wait(0, "shared.bits_full"))
    add("cleared V not waited for", PADDED, lambda t: t.no_wait(0, "shared.v_clean"))
    add("V not cleared", PADDED, lambda t: t.drop_all(r"st\.shared\.b32", "lines[lane, key, c, v_stage]"))
    add("no proxy fence after clearing V", PADDED, lambda t: t.drop(r"fence\.proxy\.async", 0), fast=True)
    add("key bits not announced", PADDED, lambda t: t.drop(r"mbarrier\.arrive", 0, "shared.bits_full"))
    # Softmax.
    add("missing rescale of O", RISING, lambda t: _never(t, "vote_any_sync((factor0", 0), fast=True)
    add("missing rescale of the sum", RISING, lambda t: t.sub_all(r"fma\.rn\.f32(\s+%r\d+), (%r\d+), %r\d+, (%r\d+);",
                                                                r"add.f32\1, \2, \3;", "row_sum[r] = row_sum[r] * factors[r]"))
    add("maximum over half a row", TURNS, lambda t: t.sub_all(r"shfl\.sync\.bfly\.b32(.*), 1, 31", r"shfl.sync.bfly.b32\1, 4, 31", "shuffle_sync_bfly(top, 1)"))
    add("sum over half a row", PLAIN, lambda t: t.sub(r"shfl\.sync\.bfly\.b32(.*), 2, 31", r"shfl.sync.bfly.b32\1, 4, 31", 0,
                                                     "total = total"), fast=True)
    add("natural exponent", PLAIN, lambda t: t.sub(r"0f3FB8AA3B", "0f3F800000", 1))
    add("exponential left out", PLAIN, lambda t: t.sub(r"ex2\.approx\.ftz\.f32", "mov.b32", 40))
    add("one element not summed", PLAIN, lambda t: t.sub(r"add\.f32(\s+%r\d+), %r\d+, (%r\d+);", r"mov.b32\1, \2;", 30,
                                                        "sums[n % 4] = sums"))
    add("not normalised", PLAIN, lambda t: t.sub(r"rcp\.approx\.ftz\.f32", "mov.b32", 0))
    add("lse in base 2", PLAIN, lambda t: t.sub(r"0f3F317218", "0f3F800000", 0))
    add("bias of the wrong row", BIAS, lambda t: t.sub(r"ld\.global\.(\S+) (.*) \+ 32\]",
                                                      r"ld.global.\1 \2 + 40]", 0))
    # Epilogue.
    add("wrong swizzle of O", PLAIN, lambda t: t.sub(r"and\.b32(\s+%r\d+, %r\d+), 112;", r"and.b32\1, 48;", 0), fast=True)
    add("no proxy fence before the store", PLAIN, lambda t: t.drop(r"fence\.proxy\.async", -1), fast=True)
    add("no barrier before the store", PLAIN, lambda t: t.drop(r"bar\.sync\s+%r\d+, 128", -1))
    add("no barrier before O is written", AGAIN, lambda t: t.drop(r"bar\.sync\s+%r\d+, 128", 0))
    add("O overwritten while it is stored", AGAIN, lambda t: t.drop(r"cp\.async\.bulk\.wait_group", 0))
    add("store not committed", PLAIN, lambda t: t.drop(r"cp\.async\.bulk\.commit_group"))
    add("store not waited for", PLAIN, lambda t: t.drop(r"cp\.async\.bulk\.wait_group", -1), fast=True)
    add("lse stored beyond the rows", TURNS, _lse_everywhere)
    add("lse of the next row", PLAIN, lambda t: t.sub(r"(st\.global\.b32\s+\[%rd\d+)\+32\]", r"\1+36]", 0))
    # Registers, turns.
    add("more registers than there are", PLAIN, lambda t: t.sub(r"setmaxnreg\.inc(\S+\s+)160", r"setmaxnreg.inc\g<1>168"), fast=True)
    add("registers not given back", PLAIN, lambda t: t.drop(r"setmaxnreg\.dec"))
    add("dropped arrive: turn not passed on", TURNS, lambda t: t.drop(r"bar\.arrive", -1), fast=True)
    add("first turn not given", TURNS, lambda t: t.drop(r"bar\.arrive", 0))
    add("turn taken by half a pair", TURNS, lambda t: t.sub(r"(bar\.arrive\s+\S+), 256", r"\1, 128", -1))
    return found


def _arrive_by_all(t: Text) -> None:
    """The branch around the release of a V stage goes."""
    i = t.find(r"mbarrier\.arrive\.shared.*" + V_EMPTY)[0]
    j = max(k for k in t.find(r"@%p\d+ bra") if k < i)
    t.lines[j] = ""


def _early(t: Text, stage: str, nth: int) -> None:
    """A stage is released before the product that reads it is waited for."""
    i = t.find(r"mbarrier\.arrive\.shared.*" + stage)[nth]
    wait = max(k for k in t.find(r"wgmma\.wait_group") if k < i)
    after = min(k for k in range(i, len(t.lines)) if t.lines[k].startswith("$L__"))
    t.lines[after] += " " + t.lines[wait].strip()
    t.lines[wait] = ""


def _flip_parity(t: Text, at: str, nth: int) -> None:
    i = t.find(r"mbarrier\.try_wait", at)[nth]
    register = t.lines[i].split("],")[1].split(",")[0].strip()
    t.lines[i] = f".reg .b32 other; xor.b32 other, {register}, 1; " + t.lines[i].replace(f"], {register},", "], other,")


def _coordinate(t: Text, descriptor: str, which: int, change: str) -> None:
    """One coordinate of a copy is off."""
    i = t.find(r"cp\.async\.bulk\.tensor.*\[" + descriptor)[0]
    inner = t.lines[i].split("{")[1].split("}")[0]
    names = [x.strip() for x in inner.split(",")]
    names[which] = "off"
    t.lines[i] = (f"{{ .reg .b32 off; add.s32 off, {inner.split(',')[which].strip()}, {change.lstrip('+')}; "
                  + t.lines[i].replace(inner, ", ".join(names)) + " }")


def _never(t: Text, at: str, nth: int) -> None:
    """A vote that is always false."""
    t.sub(r"vote\.sync\.any\.pred(\s+%p\d+), %p\d+, -1;", r"mov.pred\1, 0;", nth, at)


def _lse_everywhere(t: Text) -> None:
    """The branch around the store of lse looks at the column only."""
    i = t.find(r"st\.global\.b32")[1]
    j = max(k for k in t.find(r"or\.pred") if k < i)
    parts = t.lines[j].replace(";", "").split(",")
    t.lines[j] = f"\tmov.pred {parts[0].split()[1]}, {parts[1].strip()};"


MUTANTS: dict[str, Mutant] = {m.name: m for m in _list()}


def tampered(m: Mutant) -> Any:
    """What the launcher runs instead of the compiled variant."""
    def make(variant: Forward) -> Compiled:
        t = Text(ptx_of(variant))
        try:
            m.edit(t)
        except (Stale, IndexError, ValueError) as e:
            raise Stale(f"mutant {m.name!r} no longer applies to the kernel's PTX; adapt its edit in emulator/mutants.py: {e}") from e
        return Compiled.from_text(t.text)

    return make


def hunt(m: Mutant, seeds: Sequence[int]) -> dict[str, Any]:
    """Run a mutant with each seed until it is caught."""
    start = time.time()
    for seed in seeds:
        try:
            out, lse, p = run(m.case, Launcher(seed=seed, tamper=tampered(m), limit=2_000_000))
        except Fault as e:
            return {"caught": True, "how": e.kind, "message": str(e), "seed": seed, "seconds": round(time.time() - start, 2)}
        wrong, _ = verdict(m.case, p, out, lse)
        if wrong:
            return {"caught": True, "how": "wrong answer", "message": wrong, "seed": seed, "seconds": round(time.time() - start, 2)}
    return {"caught": False, "how": "", "message": "", "seed": None, "seconds": round(time.time() - start, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", type=int, default=4)
    args = parser.parse_args()
    found = {}
    for name, m in MUTANTS.items():
        if args.only in name:
            found[name] = hunt(m, range(args.seeds))
            print(f"{'ok  ' if found[name]['caught'] else 'LIVE'} {name}: {found[name]['how']} ({found[name]['seconds']} s)", flush=True)
    caught = sum(r["caught"] for r in found.values())
    report = {"what": "mutants of the forward kernel's PTX under the emulator", "date": datetime.date.today().isoformat(),
              "mutants": len(found), "caught": caught, "seeds": args.seeds, "results": found}
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{caught} of {len(found)} caught")
    return 0 if caught == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
