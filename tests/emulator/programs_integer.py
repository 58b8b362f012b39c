"""Programs of integer arithmetic, logic, shifts, comparisons, selections and moves."""
from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from .exact import signed
from .program import Program, simple

E16 = (0, 1, 2, 7, 15, 16, 0x7F, 0x80, 0xFF, 0x100, 0x1234, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFF80, 0xFFFE, 0xFFFF)
E32 = (0, 1, 2, 3, 31, 32, 33, 127, 128, 255, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x12345678, 0x2AAAAAAB, 0x55555555,
       0x7FFFFFFE, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xAAAAAAAA, 0xDEADBEEF, 0xFFFFFF80, 0xFFFFFFFE, 0xFFFFFFFF)
E64 = (*E32, 0x100000000, 0x123456789ABCDEF0, 0x7FFFFFFFFFFFFFFF, 0x8000000000000000, 0xFFFFFFFF00000000,
       0xFFFFFFFFFFFFFFFE, 0xFFFFFFFFFFFFFFFF)
EDGES = {16: E16, 32: E32, 64: E64}


def columns(widths: Sequence[int], seed: int, n: int = 128) -> list[list[int]]:
    """n rows of edge values and random ones for operands of these widths."""
    rnd = random.Random(seed)
    return [[rnd.choice(EDGES[w]) if rnd.random() < 0.7 else rnd.getrandbits(w) for _ in range(n)] for w in widths]


def width(t: str) -> int:
    return int(t.lstrip("sub"))


def num(x: int, t: str) -> int:
    """Bits as the number that type t reads."""
    return signed(x, width(t)) if t[0] == "s" else x


def alu(form: str, types: Sequence[str], f: Callable[..., int], seed: int, nonzero: bool = False) -> Program:
    """``form d, a, b ...`` with a destination and sources of these types."""
    ws = [width(t) for t in types[1:]]
    cols = columns(ws, seed)
    if nonzero:
        cols[-1] = [x or 3 for x in cols[-1]]
        # the one quotient that does not fit is left out: the ISA gives no result for it
        cols[0] = [1 if y == (1 << ws[1]) - 1 and x == 1 << (ws[0] - 1) else x for x, y in zip(cols[0], cols[-1], strict=True)]
    body = f"{form} d, {', '.join('abc'[:len(ws)])};"
    return simple(form, form, body, [(f"b{w}", c) for w, c in zip(ws, cols, strict=True)], [f"b{width(types[0])}"],
                  lambda *x: f(*(num(v, t) for v, t in zip(x, types[1:], strict=True))))


def _clamped(x: int) -> int:
    return max(-(1 << 31), min((1 << 31) - 1, x))


def _quotient(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return -q if (a < 0) != (b < 0) else q


def _shift(t: str, left: bool) -> Callable[[int, int], int]:
    w = width(t)
    return lambda a, n: (a << n if n < w else 0) if left else a >> min(n, 64)


def programs() -> list[Program]:
    found: list[Program] = []
    seed = iter(range(10_000))

    def add(form: str, types: Sequence[str], f: Callable[..., int], nonzero: bool = False) -> None:
        found.append(alu(form, types, f, next(seed), nonzero))

    for t in ("s16", "u16", "s32", "u32", "s64", "u64"):
        add(f"add.{t}", (t, t, t), lambda a, b: a + b)
        add(f"sub.{t}", (t, t, t), lambda a, b: a - b)
        add(f"mul.lo.{t}", (t, t, t), lambda a, b: a * b)
        add(f"mad.lo.{t}", (t, t, t, t), lambda a, b, c: a * b + c)
        add(f"min.{t}", (t, t, t), min)
        add(f"max.{t}", (t, t, t), max)
        add(f"div.{t}", (t, t, t), _quotient, nonzero=True)
        add(f"rem.{t}", (t, t, t), lambda a, b: a - _quotient(a, b) * b, nonzero=True)
        add(f"shr.{t}", (t, t, "u32"), _shift(t, False))
        w = width(t)
        add(f"mul.hi.{t}", (t, t, t), lambda a, b, w=w: a * b >> w)
        if w < 64:
            wide = f"{t[0]}{2 * w}"
            add(f"mul.wide.{t}", (wide, t, t), lambda a, b: a * b)
            add(f"mad.wide.{t}", (wide, t, t, wide), lambda a, b, c: a * b + c)
    add("add.sat.s32", ("s32", "s32", "s32"), lambda a, b: _clamped(a + b))
    add("sub.sat.s32", ("s32", "s32", "s32"), lambda a, b: _clamped(a - b))
    add("min.relu.s32", ("s32", "s32", "s32"), lambda a, b: max(0, min(a, b)))
    add("max.relu.s32", ("s32", "s32", "s32"), lambda a, b: max(0, a, b))
    add("mad.hi.s32", ("s32", "s32", "s32", "s32"), lambda a, b, c: (a * b >> 32) + c)
    for t in ("s16", "s32", "s64"):
        add(f"neg.{t}", (t, t), lambda a: -a)
        add(f"abs.{t}", (t, t), abs)
    for t in ("b16", "b32", "b64"):
        add(f"and.{t}", (t, t, t), lambda a, b: a & b)
        add(f"or.{t}", (t, t, t), lambda a, b: a | b)
        add(f"xor.{t}", (t, t, t), lambda a, b: a ^ b)
        add(f"not.{t}", (t, t), lambda a: ~a)
        add(f"shl.{t}", (t, t, "u32"), _shift(t, True))
    add("popc.b32", ("u32", "b32"), lambda a: a.bit_count())
    add("clz.b32", ("u32", "b32"), lambda a: 32 - a.bit_length())
    add("brev.b32", ("b32", "b32"), lambda a: int(f"{a:032b}"[::-1], 2))
    add("bfind.u32", ("u32", "u32"), lambda a: a.bit_length() - 1)
    add("bfind.s32", ("u32", "s32"), lambda a: (a if a >= 0 else ~a).bit_length() - 1)
    add("sad.s32", ("s32", "s32", "s32", "s32"), lambda a, b, c: abs(a - b) + c)
    add("shf.l.wrap.b32", ("b32", "b32", "b32", "u32"), lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32)
    add("shf.r.wrap.b32", ("b32", "b32", "b32", "u32"), lambda a, b, c: (b << 32 | a) >> (c & 31))
    add("shf.l.clamp.b32", ("b32", "b32", "b32", "u32"), lambda a, b, c: ((b << 32 | a) << min(c, 32)) >> 32)
    add("shf.r.clamp.b32", ("b32", "b32", "b32", "u32"), lambda a, b, c: (b << 32 | a) >> min(c, 32))
    add("prmt.b32", ("b32", "b32", "b32", "b32"), _prmt)
    add("bfi.b32", ("b32", "b32", "b32"), lambda a, b: b & ~0x1FE0 | a << 5 & 0x1FE0)
    add("bfe.u32", ("u32", "u32"), lambda a: a >> 7 & 0x7FF)
    add("bfe.s32", ("s32", "s32"), lambda a: signed(a >> 7, 11))
    constants = {"bfi.b32": "bfi.b32 d, a, b, 5, 8;", "bfe.u32": "bfe.u32 d, a, 7, 11;", "bfe.s32": "bfe.s32 d, a, 7, 11;"}
    found = [_with_body(p, constants.get(p.form, p.body)) for p in found]
    for table in (0x96, 0xE8, 0xCA, 0x1B):
        p = alu(f"lop3.b32 {table:#x}", ("b32", "b32", "b32", "b32"), lambda a, b, c, t=table: sum(
            (t >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i for i in range(32)), next(seed))
        found.append(_with_body(p, f"lop3.b32 d, a, b, c, {table:#x};", "lop3.b32"))
    found += _compare(seed) + _select(seed) + _moves(seed)
    return found


def _with_body(p: Program, body: str, form: str | None = None) -> Program:
    from dataclasses import replace

    return replace(p, body=body, form=form or p.form)


def _prmt(a: int, b: int, c: int) -> int:
    source = (b << 32 | a).to_bytes(8, "little")
    out = 0
    for i in range(4):
        s = c >> 4 * i & 15
        byte = source[s % 8]
        out |= (255 * (byte >> 7) if s > 7 else byte) << 8 * i
    return out


_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b}


def _compare(seed) -> list[Program]:
    found = []
    for t, names in (("s32", _COMPARE), ("u32", _COMPARE), ("b32", ("eq", "ne")), ("b16", ("eq", "ne")),
                     ("s16", ("lt", "gt")), ("s64", ("lt", "ge")), ("u64", ("lt", "ge")), ("b64", ("eq", "ne"))):
        w = width(t)
        for name in names:
            a, b = columns((w, w), next(seed))
            b = [x if i % 4 == 0 else y for i, (x, y) in enumerate(zip(a, b, strict=True))]
            form = f"setp.{name}.{t}"
            found.append(simple(form, form, f".reg .pred z; {form} z, a, b; selp.b32 d, 1, 0, z;", [(f"b{w}", a), (f"b{w}", b)],
                                ["b32"], lambda x, y, f=_COMPARE[name], t=t: int(f(num(x, t), num(y, t)))))
    a, b, c = columns((32, 32, 32), next(seed))
    c = [x & 1 for x in c]
    for op, f in (("and", lambda p, q: p and q), ("or", lambda p, q: p or q), ("xor", lambda p, q: p != q)):
        form = f"setp.lt.{op}.s32"
        body = f".reg .pred y, z, w; setp.ne.b32 w, c, 0; {form} y|z, a, b, w; selp.b32 d, 1, 0, y; selp.b32 e, 1, 0, z;"
        found.append(simple(form, form, body, [("b32", a), ("b32", b), ("b32", c)], ["b32", "b32"],
                            lambda x, y, z, f=f: (int(f(signed(x, 32) < signed(y, 32), bool(z))),
                                                  int(f(not signed(x, 32) < signed(y, 32), bool(z))))))
    bools = ([0, 0, 1, 1] * 8, [0, 1, 0, 1] * 8)
    for op, f in (("and", lambda x, y: x & y), ("or", lambda x, y: x | y), ("xor", lambda x, y: x ^ y)):
        body = (f".reg .pred y, z; setp.ne.b32 y, a, 0; setp.ne.b32 z, b, 0; {op}.pred y, y, z; selp.b32 d, 1, 0, y;")
        found.append(simple(f"{op}.pred", f"{op}.pred", body, [("b32", bools[0]), ("b32", bools[1])], ["b32"], f))
    body = ".reg .pred y, z; setp.ne.b32 y, a, 0; not.pred z, y; mov.pred y, z; selp.b32 d, 1, 0, y;"
    for form in ("not.pred", "mov.pred"):
        found.append(simple(form, form, body, [("b32", bools[0])], ["b32"], lambda x: 1 - x))
    return found


def _select(seed) -> list[Program]:
    found = []
    for t in ("b16", "b32", "b64", "f32", "s32"):
        w = 32 if t == "f32" else width(t)
        a, b, c = columns((w, w, 32), next(seed))
        c = [x & 1 for x in c]
        form = f"selp.{t}"
        kind = "f32" if t == "f32" else f"b{w}"
        found.append(simple(form, form, f".reg .pred z; setp.ne.b32 z, c, 0; {form} d, a, b, z;",
                            [(kind, a), (kind, b), ("b32", c)], [kind], lambda x, y, z: x if z else y))
    a, b, c = columns((32, 32, 32), next(seed))
    found.append(simple("slct.b32.s32", "slct.b32.s32", "slct.b32.s32 d, a, b, c;", [("b32", a), ("b32", b), ("b32", c)],
                        ["b32"], lambda x, y, z: x if signed(z, 32) >= 0 else y))
    found.append(simple("selp negated constant", "selp.b32", ".reg .pred z; setp.ne.b32 z, c, 0; selp.b32 d, -1, 7, !z;"
                        .replace("!z", "z"), [("b32", a), ("b32", b), ("b32", c)], ["b32"],
                        lambda x, y, z: 0xFFFFFFFF if z else 7))
    return found


def _moves(seed) -> list[Program]:
    a, b = columns((32, 32), next(seed))
    (q,) = columns((64,), next(seed))
    h, g = columns((16, 16), next(seed))
    two = [("b32", a), ("b32", b)]
    return [
        simple("mov.b32", "mov.b32", "mov.b32 d, a;", [("b32", a)], ["b32"], lambda x: x),
        simple("mov.b64", "mov.b64", "mov.b64 d, a;", [("b64", q)], ["b64"], lambda x: x),
        simple("mov.b16", "mov.b16", "mov.b16 d, a;", [("b16", h)], ["b16"], lambda x: x),
        simple("mov.b64 pack", "mov.b64", "mov.b64 d, {a, b};", two, ["b64"], lambda x, y: y << 32 | x),
        simple("mov.b64 unpack", "mov.b64", "mov.b64 {d, e}, a;", [("b64", q)], ["b32", "b32"],
               lambda x: (x & 0xFFFFFFFF, x >> 32)),
        simple("mov.b32 pack", "mov.b32", "mov.b32 d, {a, b};", [("b16", h), ("b16", g)], ["b32"], lambda x, y: y << 16 | x),
        simple("mov.b32 unpack", "mov.b32", "mov.b32 {d, e}, a;", [("b32", a)], ["b16", "b16"],
               lambda x: (x & 0xFFFF, x >> 16)),
        simple("mov.b32 float constant", "mov.b32", ".reg .f32 z; mov.b32 z, 0fFF800000; mov.b32 d, z;", [("b32", a)], ["b32"],
               lambda x: 0xFF800000),
        simple("mov.f32", "mov.f32", ".reg .f32 y, z; mov.b32 y, a; mov.f32 z, y; mov.b32 d, z;", [("b32", a)], ["b32"],
               lambda x: x),
        simple("mov.u32 special", "mov.u32", "mov.u32 d, %laneid; mov.u32 e, %ntid.x;", [("b32", list(range(64)))],
               ["b32", "b32"], lambda x: (x % 32, 64)),
        simple("mov.u32 masks", "mov.u32", "mov.u32 d, %lanemask_lt; mov.u32 e, %lanemask_ge;", [("b32", list(range(32)))],
               ["b32", "b32"], lambda x: ((1 << x) - 1, 0xFFFFFFFF & ~((1 << x) - 1))),
        simple("guarded", "add.s32", ".reg .pred z; mov.b32 d, b; setp.gt.s32 z, a, 0; @z add.s32 d, a, b; @!z sub.s32 d, b, 1;",
               two, ["b32"], lambda x, y: x + y if signed(x, 32) > 0 else y - 1),
        simple("branch", "bra", ".reg .pred z; setp.lt.u32 z, a, b; @z bra LESS; mov.b32 d, 1; bra.uni DONE; LESS: mov.b32 d, 2; "
               "DONE: add.s32 d, d, 10;", two, ["b32"], lambda x, y: 12 if x < y else 11),
        simple("loop", "bra", ".reg .pred z; .reg .b32 n; and.b32 n, a, 15; mov.b32 d, 0; AGAIN: add.s32 d, d, b; sub.s32 n, n, 1;"
               " setp.ge.s32 z, n, 0; @z bra AGAIN;", two, ["b32"], lambda x, y: y * ((x & 15) + 1)),
    ]
