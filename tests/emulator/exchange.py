"""Between the lanes of a warp: shuffles, votes, elections, reductions, matches (PTX ISA 9.7.9: shfl.sync; 9.7.13:
vote.sync, match.sync, activemask, redux.sync, elect.sync)."""
from __future__ import annotations

import numpy as np

from .decode import BLOCK, DTYPES, Form, Get, Run, operation
from .errors import Fault
from .lanes import INDEX, LANES, bits, describe, first, lanes
from .parser import Imm, Pair
from .warp import Warp


def members(form: Form, n: int) -> Get:
    """The member mask, which must be the same in all its lanes."""
    return form.get(n, "b32")


def agreed(w: Warp, get: Get, mask: int) -> int:
    x = get(w)[lanes(mask)]
    if (x != x[0]).any():
        raise Fault("divergence", f"member masks {sorted({hex(int(v)) for v in x})} in one instruction")
    return int(x[0])


@operation("shfl")
def _shfl(form: Form) -> Run:
    """c holds the segment mask (bits 8 to 12) and the clamp (bits 0 to 4)."""
    if not form.has("sync"):
        raise form.fail("needs .sync")
    mode = form.one("up", "down", "bfly", "idx")
    form.type("b32")
    form.done(5)
    o = form.operands[0]
    puts = (o.first, o.second) if isinstance(o, Pair) else (o, None)
    put, put_p = form.target(puts[0], "b32"), form.target(puts[1], "pred")
    a, b, c, who = form.get(1, "b32"), form.get(2, "b32"), form.get(3, "b32"), members(form, 4)

    def run(w: Warp, mask: int):
        m = agreed(w, who, mask)
        if not w.together(mask, m):
            return BLOCK
        x, bv, cv = a(w), b(w).astype(np.int64) & 31, c(w).astype(np.int64)
        clamp, segment = cv & 31, cv >> 8 & 31
        top, low = INDEX & segment | clamp & ~segment, INDEX & segment
        if mode == "up":
            j = INDEX - bv
            inside = j >= top
        elif mode == "down":
            j = INDEX + bv
            inside = j <= top
        elif mode == "bfly":
            j = INDEX ^ bv
            inside = j <= top
        else:
            j = low | bv & ~segment
            inside = j <= top
        j = np.where(inside, j, INDEX)
        active = lanes(mask)
        gone = active & ~active[j]
        if gone.any():
            raise Fault("divergence", f"{describe(bits(gone))} read lanes that do not take part in the shuffle")
        put(w, x[j], mask)
        put_p(w, inside, mask)
        return None

    return run


@operation("vote")
def _vote(form: Form) -> Run:
    if not form.has("sync"):
        raise form.fail("needs .sync")
    mode = form.one("all", "any", "uni", "ballot")
    form.type("b32" if mode == "ballot" else "pred")
    form.done(3)
    put, a, who = form.put(0, "b32" if mode == "ballot" else "pred"), form.get(1, "pred"), members(form, 2)

    def run(w: Warp, mask: int):
        if not w.together(mask, agreed(w, who, mask)):
            return BLOCK
        yes = bits(a(w)) & mask
        if mode == "ballot":
            put(w, np.full(LANES, yes, np.uint32), mask)
        else:
            value = {"all": yes == mask, "any": yes != 0, "uni": yes in (0, mask)}[mode]
            put(w, np.full(LANES, value), mask)
        return None

    return run


@operation("elect")
def _elect(form: Form) -> Run:
    """The ISA leaves the choice of the leader open, but it is the same for one member mask: the lowest lane here."""
    if not form.has("sync"):
        raise form.fail("needs .sync")
    form.done(2)
    o = form.operands[0]
    if not isinstance(o, Pair):
        raise form.fail("needs d|p")
    put, put_p, who = form.target(o.first, "b32"), form.target(o.second, "pred"), members(form, 1)

    def run(w: Warp, mask: int):
        if not w.together(mask, agreed(w, who, mask)):
            return BLOCK
        leader = first(mask)
        put(w, np.full(LANES, leader, np.uint32), mask)
        put_p(w, INDEX == leader, mask)
        return None

    return run


@operation("redux")
def _redux(form: Form) -> Run:
    if not form.has("sync"):
        raise form.fail("needs .sync")
    op = form.one("add", "min", "max", "and", "or", "xor")
    t = form.type(*(("b32",) if op in ("and", "or", "xor") else ("u32", "s32")))
    form.done(3)
    put, a, who = form.put(0, t), form.get(1, t), members(form, 2)
    f = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
         "xor": np.bitwise_xor}[op]

    def run(w: Warp, mask: int):
        if not w.together(mask, agreed(w, who, mask)):
            return BLOCK
        put(w, np.full(LANES, f.reduce(a(w)[lanes(mask)]), DTYPES[t]), mask)
        return None

    return run


@operation("match")
def _match(form: Form) -> Run:
    mode = form.one("any", "all")
    if not form.has("sync"):
        raise form.fail("needs .sync")
    t = form.type("b32", "b64")
    form.done(3)
    o = form.operands[0]
    pair = (o.first, o.second) if isinstance(o, Pair) else (o, None)
    put, put_p = form.target(pair[0], "b32"), form.target(pair[1], "pred")
    a, who = form.get(1, t), members(form, 2)

    def run(w: Warp, mask: int):
        if not w.together(mask, agreed(w, who, mask)):
            return BLOCK
        x, active = a(w), lanes(mask)
        if mode == "any":
            put(w, np.array([bits((x == v) & active) for v in x], np.uint32), mask)
        else:
            same = len(set(x[active].tolist())) == 1
            put(w, np.full(LANES, mask if same else 0, np.uint32), mask)
            put_p(w, np.full(LANES, same), mask)
        return None

    return run


@operation("activemask")
def _activemask(form: Form) -> Run:
    form.type("b32")
    form.done(1)
    put = form.put(0, "b32")
    return lambda w, mask: put(w, np.full(LANES, mask, np.uint32), mask)


def literal(form: Form, n: int) -> int | None:
    """An operand that is a constant, else None."""
    o = form.operands[n]
    return o.value if isinstance(o, Imm) else None
