"""Mutants in what the forward kernel computes: addresses, products, masks, softmax, epilogue."""
from __future__ import annotations

import re

from .cases import Case
from .mutants_order import AGAIN, EITHER, GROUPED, ITEMS, ONE_TILE, PADDED, PLAIN, TURNS, _waits
from .mutate import Edit, Mutant, Stale, Text

RISING = Case("mutants rising maxima", rows=64, keys=401, data="large", seed=108)
RISING_HALF = Case("mutants rising maxima float16", rows=64, keys=401, data="large", seed=108, dtype="float16")
"""P of 2^16 above the reference is no float16."""
RISING_APART = Case("mutants maxima that rise apart", rows=64, keys=401, data="large", seed=203)
"""In some warp an upper row's rises where no lower one's does."""
BIAS = Case("mutants bias", rows=64, keys=130, bias="hqk", heads=(2, 1), bias_dtype="float32", seed=106)
BANDED = Case("mutants window", rows=150, keys=150, lo=-20, hi=3, dtype="float16", seed=107)
NAN = Case("mutants nan scores", rows=64, keys=90, bias="hqk", bias_dtype="float32", nan_scores=True, seed=115)

WRONG = "^wrong answer: (out is off|non-finite values differ)"
DESCRIPTOR = r"mov\.b32(\s+%r\d+), 1073741888;"


def values() -> list[Mutant]:
    found: list[Mutant] = []

    def add(name: str, case: Case, shows: str, edit: Edit, fast: bool = False, limit: int = 2_000_000) -> None:
        found.append(Mutant(name, case, shows, edit, fast, limit))

    # Stages and addresses.
    add("wrong K stage in the product", PLAIN, EITHER, lambda t: t.sub(
        r"shl\.b32(.*), 10;", r"shl.b32\1, 9;", at="_gemm(self._mmas()[0], s, f_q, f_k[None, None, None, k_stage]"), fast=True)
    add("wrong K stage in the first product of the next item", ONE_TILE, EITHER, lambda t: t.sub(
        r"shl\.b32(.*), 10;", r"shl.b32\1, 9;", at="_gemm(self._mmas()[0], s, f_q, f_k[None, None, None, stage]"))
    add("wrong V stage in the product", PLAIN, EITHER, lambda t: t.sub(
        r"shl\.b32(.*), 10;", r"shl.b32\1, 9;", 0, "_gemm(self._mmas()[1], o, p, f_v", of=2))
    add("wrong K stage in the copy", PLAIN, "^race: write .* after its (write by bulk copies|read by products)", lambda t: t.sub(
        r"shl\.b32(.*), 14;", r"shl.b32\1, 13;", 1, "cute.copy(tma, source", of=3))
    add("K copied 128 bytes too far", PLAIN, "^race: write to .* after its write by bulk copies", lambda t: _further(t, 128))
    add("K copied to a misaligned place", PLAIN, "^misaligned: tensor copy", lambda t: _further(t, 16))
    add("K tile one row too far", PLAIN, WRONG, lambda t: _coordinate(t, t.copy("k_full", 0, 2), 1, 1), fast=True)
    add("V tile one row too far", PLAIN, WRONG, lambda t: _coordinate(t, t.copy("v_full"), 1, 1))
    add("Q tile of the next rows", PLAIN, WRONG, lambda t: _coordinate(t, t.copy("q_full", 0, 3), 1, 64))
    add("head and batch swapped in the copy of K", GROUPED, WRONG, lambda t: t.put(
        t.copy("k_full", 0, 2), r"\{(%r\d+), (%r\d+), (%r\d+), (%r\d+)\}", r"{\1, \2, \4, \3}"))
    add("K and V heads not grouped", GROUPED, WRONG, lambda t: t.sub(r"div\.s32(\s+%r\d+), (%r\d+), %r\d+;", r"mov.b32\1, \2;",
                                                                     at="hk = h // group"))
    add("O tile stored to the next rows", PLAIN, WRONG, lambda t: t.sub(
        r"shl\.b32(\s+%r\d+), (%r\d+), 6;", r"mad.lo.s32\1, \2, 64, 1;", at="cute.copy(tma_o"))
    add("O stored to the head of the next item", ITEMS, "^(race: write to argument|wrong answer: )", _store_next)
    # Products.
    for name, to in (("wrong swizzle", "-2147483584"), ("no swizzle", "64"), ("wrong stride", "1073741856")):
        add(f"{name} in the descriptor of K", PLAIN, WRONG + "|^uninitialised: matrix", lambda t, to=to: t.sub(
            DESCRIPTOR, rf"mov.b32\1, {to};", 1, of=4), fast=name == "wrong swizzle")
    add("wrong swizzle in the descriptor of V", PLAIN, WRONG, lambda t: t.sub(DESCRIPTOR, r"mov.b32\1, -2147483584;", 2, of=4))
    add("wrong step along K", PLAIN, WRONG + "|^uninitialised: matrix", lambda t: t.sub(
        r"add\.s64(\s+%rd\d+, %rd\d+), 2;", r"add.s64\1, 4;", 0, of=6))
    add("V not transposed", PLAIN, WRONG + "|^uninitialised: matrix|^race: ", lambda t: t.sub_all(
        r"(m64n64k16.*1,\s+1,) 1;", r"\1 0;", of=16), fast=True)
    add("negated product", PLAIN, WRONG, lambda t: t.put(_products(t)[4], r"(wgmma\.mma_async.*p, )1,(\s+1)", r"\1-1,\2"))
    add("first S accumulates on nothing", PLAIN, "^uninitialised: read of register", lambda t: _accumulates(t, 0))
    add("S in the loop accumulates on nothing", PLAIN, "^uninitialised: read of register", lambda t: _accumulates(t, 4))
    add("S of the next item accumulates on P of this one", ITEMS, WRONG, lambda t: _accumulates(t, 24))
    add("O does not accumulate", PLAIN, WRONG, lambda t: _accumulates(t, 8), fast=True)
    add("last PV does not accumulate", PLAIN, WRONG, lambda t: _accumulates(t, 16))
    add("O not cleared for an item", PLAIN, "^uninitialised: read of register", lambda t: t.cut(t.each(
        r"mov\.b32\s+%r\d+, %r\d+;", 31, "for i in cutlass.range(last - first - 1, unroll=1)")[7]))
    # Masks.
    add("end of the keys one too far in the first tile", PLAIN, WRONG, lambda t: t.sub(
        r"setp\.lt\.s32(\s+%p\d+, %r\d+), 16;", r"setp.lt.s32\1, 17;", 0, "hidden = right < c", of=2), fast=True)
    add("off by one in every mask comparison", TURNS, WRONG, lambda t: t.sub_all(r"setp\.lt\.s32", "setp.le.s32", "hidden = right < c"))
    add("causal edge one key late", TURNS, "^wrong answer: ", lambda t: t.sub_all(
        r"setp\.lt\.s32(\s+%p\d+, %r\d+), 0;", r"setp.lt.s32\1, -1;", "hidden = right < c", of=4))
    add("window edge one key early", BANDED, WRONG, lambda t: t.sub_all(r"setp\.gt\.s32", "setp.ge.s32", "left - col0 > c"))
    add("no mask on the last tile", PLAIN, WRONG, lambda t: _never(t, "vote_any_sync(partial)", 0), fast=True)
    add("masked to zero instead of -inf", PLAIN, WRONG, lambda t: t.sub_all(
        r"selp\.f32(\s+%r\d+), 0fFF800000", r"selp.f32\1, 0f00000000", "hidden = right < c"))
    add("key tile left out", TURNS, WRONG, lambda t: t.sub_all(r"add\.s32(\s+%r\d+, %r\d+), 127;", r"add.s32\1, -1;",
                                                               "first, last = low // n", of=2))
    add("key bits of the next key", PADDED, "^wrong answer: ", lambda t: t.sub_all(
        r"and\.b32(\s+%r\d+, %r\d+), 2;", r"and.b32\1, 4;", "hidden = (shifted"))
    add("V of padded keys not cleared", PADDED, "^wrong answer: non-finite", lambda t: t.drop_all(
        r"st\.shared\.b32", "lines[lane, key, c, v_stage]"), fast=True)
    # Softmax.
    add("factors applied to the sum but not to O", RISING, WRONG, _o_kept, fast=True)
    add("factors applied to O but not to the sum", RISING, WRONG, _sum_kept)
    add("rescale of O with the factor of the other row", RISING, WRONG, _other_factor, fast=True)
    add("rescale of the sum with the factor of the other row", RISING, WRONG, _other_factor_of_sum)
    add("factors taken the wrong way round", RISING, "^wrong answer: ", _factors_inverted)
    add("never rescaled", RISING, "^wrong answer: ", lambda t: (_o_kept(t), _sum_kept(t)))
    for row, which, case in (("lower", 2, RISING_APART), ("upper", 3, RISING)):
        add(f"O rescaled where the maximum of the {row} row rose only", case, WRONG, lambda t, which=which: _one_row_asked(t, which),
            fast=True)
    add("O rescaled where every row of the warp rose", RISING, WRONG, lambda t: t.sub(
        r"vote\.sync\.any", "vote.sync.all", at="vote_any_sync(rose0 | rose1)"))
    add("reference of the first tile kept for all", RISING, WRONG, lambda t: _lazy(t, 0x7F800000))
    add("reference kept where its maximum rose by up to 24", RISING_HALF, WRONG, lambda t: _lazy(t, 0x41C00000), fast=True)
    add("reference of the lower row decided by the upper one", RISING, WRONG, _reference_asked_of_other)
    add("exponentials of the upper row in the maximum of the lower one", AGAIN, WRONG, lambda t: t.sub_all(
        r"(lop3\.b32 %r\d+, %r\d+, %r\d+), %r\d+, 0xF8;", r"\1, -1, 0xF8;", of=4), fast=True)
    add("maximum over half a row", TURNS, WRONG, lambda t: t.sub_all(
        r"shfl\.sync\.bfly\.b32(.*), 1, 31", r"shfl.sync.bfly.b32\1, 4, 31", "shuffle_sync_bfly(top, 1)", of=4))
    add("sum over half a row", PLAIN, WRONG, lambda t: t.sub(
        r"shfl\.sync\.bfly\.b32(.*), 2, 31", r"shfl.sync.bfly.b32\1, 4, 31", 0, "shuffle_sync_bfly(total, 2)", of=2), fast=True)
    add("natural exponent", PLAIN, WRONG, lambda t: t.sub(r"0f3FB8AA3B", "0f3F800000", 2, of=3))
    add("exponential left out", PLAIN, WRONG, lambda t: t.sub(
        r"ex2\.approx\.ftz\.f32", "mov.b32", 100, "s[i] = cute.math.exp2(x", of=128))
    add("NaN score dropped by the exponentials", NAN, "^wrong answer: non-finite", _nan_dropped, fast=True)
    add("one element not summed", PLAIN, "^wrong answer: ", lambda t: t.sub(
        r"add\.f32(\s+%r\d+), %r\d+, (%r\d+);", r"mov.b32\1, \2;", 90, "sums[n % 2] = sums", of=120))
    add("P packed with its halves swapped", PLAIN, WRONG, lambda t: _halves_swapped(t, 64), fast=True)
    add("P packed with its halves swapped in the first tile", ONE_TILE, WRONG, lambda t: _halves_swapped(t, 32))
    add("P of one pair of columns in the place of another", PLAIN, WRONG, _pairs_swapped)
    add("not normalised", PLAIN, WRONG, lambda t: t.sub(r"rcp\.approx\.ftz\.f32", "mov.b32", 0, of=2))
    add("normalised by the sum of the other row", PLAIN, WRONG, _other_sum)
    add("lse in base 2", PLAIN, "^wrong answer: lse", lambda t: t.sub(r"0f3F317218", "0f3F800000", 0, of=2))
    add("bias of another key", BIAS, WRONG, lambda t: t.sub(
        r"ld\.global\.(\S+) (.*) \+ 32\]", r"ld.global.\1 \2 + 40]", 2, of=4))
    # Epilogue.
    add("wrong swizzle of O", PLAIN, "^uninitialised: tensor copy", lambda t: t.sub(
        r"and\.b32(\s+%r\d+, %r\d+), 112;", r"and.b32\1, 48;", 0, "cute.copy(store", of=4), fast=True)
    add("lse stored beyond the rows", TURNS, "^bounds: write", _lse_everywhere)
    add("lse of the next row", PLAIN, "^race: write to argument", lambda t: t.sub(
        r"(st\.global\.b32\s+\[%rd\d+)\+32\]", r"\1+36]"))
    return found


def _products(t: Text) -> list[int]:
    """Four products a tile of S, eight of O: first S of all, S and O in the loop, last O, first S of the next item."""
    found = t.each(r"wgmma\.mma_async", 28)
    waits = _waits(t)
    if not found[3] < waits[0] < found[4] < found[15] < waits[1] < found[16] < found[27] < waits[3]:
        raise Stale("the products are not where they were")
    return found


def _accumulates(t: Text, nth: int) -> None:
    """The nth product takes its accumulator where it should not, or the other way round."""
    t.put(t.back(_products(t)[nth], r"setp\.ne\.b32 p, (%r\d+), 0;"), r"setp\.ne\.b32", "setp.eq.b32")


def _further(t: Text, offset: int) -> None:
    i = t.copy("k_full", 1, 2)
    m = re.search(r"\[(%r\d+)\+(\d+)\], \[%rd", t.lines[i])
    if not m:
        raise Stale("the place that K is copied to is not a sum")
    t.put(i, re.escape(f"[{m[1]}+{m[2]}]"), f"[{m[1]}+{int(m[2]) + offset}]")


def _coordinate(t: Text, i: int, which: int, change: int) -> None:
    """One coordinate of a copy is off."""
    inner = t.lines[i].split("{")[1].split("}")[0]
    names = [x.strip() for x in inner.split(",")]
    was, names[which] = names[which], "off"
    t.lines[i] = f"{{ .reg .b32 off; add.s32 off, {was}, {change}; " + t.lines[i].replace(inner, ", ".join(names)) + " }"


def _store_next(t: Text) -> None:
    words = t.each(r"shfl\.sync\.idx", 12, "make_warp_uniform(words[i])")
    head = re.findall(r"%r\d+", t.lines[words[8]])[0]
    t.sub(r"\{(%r\d+), (%r\d+), %r\d+, (%r\d+)\}", rf"{{\1, \2, {head}, \3}}", at="cute.copy(tma_o")


def _never(t: Text, at: str, nth: int) -> None:
    """A vote that is always false."""
    t.sub(r"vote\.sync\.any\.pred(\s+%p\d+), %p\d+, -1;", r"mov.pred\1, 0;", nth, at, of=2)


def _factors(t: Text) -> list[int]:
    """Exponentials that give the factors of both rows in the loop."""
    return t.each(r"ex2\.approx\.ftz\.f32", 4, "return cute.math.exp2((old - _finite(row_max[r]))")[2:]


def _register(t: Text, i: int, which: int = 0) -> str:
    return re.findall(r"%r\d+", t.lines[i])[which]


def _scalings(t: Text) -> list[int]:
    """What multiplies O in the loop, the upper row's half first."""
    return t.each(r"mul\.f32\s+(%r\d+), \1, %r\d+;", 32, "o[e] = o[e] * factor")


def _carried(t: Text) -> list[int]:
    """Where the row sums of the tiles before come in: upper row, lower row."""
    return t.each(r"fma\.rn\.f32\s+%r\d+, %r\d+, %r\d+, %r\d+;", 2, "sums[n % 2] = sums")


def _o_kept(t: Text) -> None:
    for i in _scalings(t):
        t.put(i, r"mul\.f32(\s+%r\d+), (%r\d+), %r\d+;", r"mov.b32\1, \2;")


def _sum_kept(t: Text) -> None:
    for i in _carried(t):
        t.put(i, r"fma\.rn\.f32(\s+%r\d+, %r\d+), %r\d+, ", r"add.f32\1, ")


def _other_factor(t: Text) -> None:
    upper, lower = (_register(t, i) for i in _factors(t))
    for n, i in enumerate(_scalings(t)):
        t.put(i, r"(mul\.f32\s+%r\d+, %r\d+), %r\d+;", rf"\1, {lower if n < 16 else upper};")


def _other_factor_of_sum(t: Text) -> None:
    """The upper row's old sum comes in when both factors are known."""
    first, second = _carried(t)
    upper, lower = _factors(t)
    old, tile = _register(t, first, 1), t.each(r"add\.f32", 4, "row_sum[r] = sums[0] + sums[1]")[2]
    if _register(t, tile) != old or not first < tile < lower < second:
        raise Stale("the sum of the upper row is not where it was")
    t.put(second, rf", {_register(t, lower)}, ", f", {_register(t, upper)}, ")
    t.put(first, r"fma\.rn\.f32(\s+%r\d+), %r\d+, %r\d+, ", r"mov.b32\1, ")
    t.prefix(tile, f".reg .b32 old; mov.b32 old, {old};")
    t.suffix(lower, f"fma.rn.f32 {old}, old, {_register(t, lower)}, {old};")


def _factors_inverted(t: Text) -> None:
    for i in t.each(r"sub\.f32\s+%r\d+, %r\d+, %r\d+;", 4, "return cute.math.exp2((old - _finite(row_max[r]))")[2:]:
        t.put(i, r"(%r\d+), (%r\d+);", r"\2, \1;")


def _one_row_asked(t: Text, which: int) -> None:
    """Whether O is rescaled goes by one row of each thread."""
    t.sub(r"or\.pred(\s+%p\d+), (%p\d+), (%p\d+);", rf"or.pred\1, \{which}, \{which};", at="vote_any_sync(rose0 | rose1)")


def _reference_asked_of_other(t: Text) -> None:
    """The lower row takes its maximum where the upper one does; what is rescaled goes by its own."""
    upper, lower = t.each(r"selp\.f32\s+%r\d+, %r\d+, %r\d+, %p\d+;", 2, "keep = (top - old) * unit <= LAZY")
    t.put(lower, r"%p\d+;", t.lines[upper].split(", ")[-1])


def _lazy(t: Text, bits: int) -> None:
    """Another limit for the rise of a maximum over its reference, in the loop."""
    for i in t.each(r"setp.*, 0f41000000;", 4, "keep = (top - old) * unit <= LAZY")[2:]:
        t.put(i, "0f41000000", f"0f{bits:08X}")


def _nan_dropped(t: Text) -> None:
    """Arguments of the exponentials are held above -126, and a NaN is not above; those of the factors too, by which a NaN
    comes into the sum as well."""
    for i in (*t.each(r"ex2\.approx\.ftz\.f32", 112, "s[i] = cute.math.exp2(x"), *t.each(
            r"ex2\.approx\.ftz\.f32", 4, "return cute.math.exp2((old - _finite(row_max[r]))")):
        x = re.findall(r"%r\d+", t.lines[i])[1]
        t.prefix(i, f"max.f32 {x}, {x}, 0fC2FC0000;")


def _halves_swapped(t: Text, count: int) -> None:
    for i in t.each("cvt.rn.bf16x2", 64, "packed[e] =")[:count]:
        t.put(i, r"(f32 %r\d+), (%r\d+), (%r\d+);", r"\1, \3, \2;")


def _pairs_swapped(t: Text) -> None:
    """Two registers of P change places in the loop."""
    a, b = t.each(r"cvt\.rn\.bf16x2\.f32", 64, "packed[e] =")[33:35]
    first, second = (re.findall(r"%r\d+", t.lines[i])[0] for i in (a, b))
    t.put(a, rf"f32 {first},", f"f32 {second},")
    t.put(b, rf"f32 {second},", f"f32 {first},")


def _other_sum(t: Text) -> None:
    """O of the lower row is divided by the sum of the upper one."""
    upper, lower = t.each(r"rcp\.approx\.ftz\.f32", 2)
    first, second = (re.findall(r"%r\d+", t.lines[i])[0] for i in (upper, lower))
    t.suffix(lower, f"mov.b32 {second}, {first};")


def _lse_everywhere(t: Text) -> None:
    """The branch around the store of lse looks at the column only."""
    i = t.one(r"st\.global\.b32", 1, 2)
    j = t.back(i, r"or\.pred")
    parts = t.lines[j].replace(";", "").split(",")
    t.lines[j] = f"\tmov.pred {parts[0].split()[1]}, {parts[1].strip()};"
