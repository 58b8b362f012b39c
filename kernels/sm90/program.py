"""Emit a score program (`kernels/expr.py`) as CuTe DSL code for one element of the score tile.

An `Emitter` lives as long as one tile.  A node is computed once for every set of indices it depends on: what does not
change along the keys once a row, what does not change along the rows once a column.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cutlass_dsl import select_

from ..expr import MARGIN, READS, Expr
from .variant import Capture

LOG2E = math.log2(math.e)
INTEGERS = ("int32", "int64", "int16", "int8", "uint8")
_FLOATS = ("float32", "float64", "bfloat16", "float16")
_CASTS = {
    "float32": Float32, "float64": Float32, "bfloat16": cutlass.BFloat16, "float16": cutlass.Float16,
    "int32": Int32, "int64": Int64, "bool": Boolean,
}


class Emitter:
    """Evaluates programs at (b, h, q, k)."""

    def __init__(self, captures: Sequence[Capture], tensors: Sequence[Any], ints: Sequence[Any], b: Any, h: Any,
                 col0: Any, keys: Any, row0: Any, scale: Any = 1.0, small: bool = False,
                 whole: bool = False, ahead: dict[Any, list[Any]] | None = None):
        """``row0`` is the query of row 0, also where it is beyond Sq; row 1 is 8 rows below.  ``whole``: the tile has no
        column beyond the keys, so none is clamped.  ``scale`` makes scores of what is given as such; ``small``: the arguments
        of tanh are at most `TANH_SMALL`.  ``ahead``: what `read_ahead` gave."""
        self.captures, self.tensors, self.ints, self.b, self.h = captures, tensors, ints, b, h
        self.scale, self.small, self.whole, self.ahead = scale, small, whole, ahead or {}
        self.col0, self.keys, self.row0 = col0, keys, row0
        self._memo: dict[Any, Any] = {}
        self._axes: dict[Expr, frozenset[str]] = {}

    def axes(self, e: Expr) -> frozenset[str]:
        """Indices that the value of a node changes with; ``s`` stands for the score."""
        found = self._axes.get(e)
        if found is None:
            if e.op == "score":
                found = frozenset("s")
            elif e.op == "index":
                found = frozenset(e.args[0])
            elif e.op in READS:
                found = frozenset(self.captures[e.args[0]].axes)
            else:
                found = frozenset().union(*(self.axes(c) for c in e.children()))
            self._axes[e] = found
        return found

    def __call__(self, e: Expr, row: tuple[int, Any], column: tuple[int, Any], score: Any) -> Any:
        """Value of `e`; row is (static number, index), column (offset from col0, index): equal ones are recognised."""
        axes = self.axes(e)
        key = (e, row[0] if axes & {"q", "s"} else None, column[0] if axes & {"k", "s"} else None)
        if "s" in axes:  # used at one element only
            return _typed(self._emit(e, row, column, score))
        if key not in self._memo:
            self._memo[key] = _typed(self._emit(e, row, column, score))
        return self._memo[key]

    def slope(self, e: Expr) -> int | None:
        """By how much an integer node grows from one key to the next, None where that is no constant."""
        match e.op:
            case "index":
                return 1 if e.args[0] == "k" else 0
            case "sym":
                return 0
            case "const":
                return 0 if type(e.args[0]) is int else None
            case "load":
                capture = self.captures[e.args[0]]
                return 0 if capture.dtype in INTEGERS and "k" not in capture.axes else None
            case "neg":
                x = self.slope(e.args[0])
                return None if x is None else -x
            case "add" | "sub":
                x, y = self.slope(e.args[0]), self.slope(e.args[1])
                return None if x is None or y is None else x + y if e.op == "add" else x - y
        return None

    def _as_float(self, e: Expr, row: Any, column: Any, value: Any) -> Any:
        """`value` of node `e` as a float32.  Of an integer that grows evenly along the keys only the first in the tile is
        converted, which takes as long as an exponential; exact as far as float32 holds integers."""
        step = None if _is_float(value) or isinstance(value, Boolean) else self.slope(e)
        if not step:
            return as_float(value)
        key = ("float", e, row[0] if "q" in self.axes(e) else None)
        if key not in self._memo:
            self._memo[key] = as_float(self(e, row, (0, self.col0), None))
        return self._memo[key] + Float32(step * column[0])

    def _load(self, n: int, row: Any, column: Any) -> Any:
        capture, tensor = self.captures[n], self.tensors[n]
        c = column[0]
        if capture.wide:
            chunk = _chunk(capture, n, row[0], c // 32)
            if chunk not in self._memo:
                words = self.ahead.get(chunk) or self._wide(tensor, row[1], c // 32)
                self._memo[chunk] = transpose(list(words), cute.arch.lane_idx() % 4)
            word = self._memo[chunk][c % 32 // 8]
            return _decode(word >> 16 if c % 2 else word, capture.dtype)
        if not (capture.unit and self.whole):
            x = tensor[self.b, self.h, row[1], cutlass.min(self.col0 + column[0], self.keys - 1)]
            return _value(x, capture.dtype)
        key = ("row", n, row[0] if "q" in capture.axes else None)
        if key not in self._memo:
            self._memo[key] = cute.domain_offset((self.b, self.h, row[1], self.col0), tensor).iterator
        start, size = self._memo[key], tensor.element_type.width // 8
        if not capture.pairs:
            x = load(_WORDS[size], f"b{8 * size}", start, c * size)
            return _decode(x, capture.dtype)
        pair = (*key, c // 2)
        if pair not in self._memo:
            even = c - c % 2
            if size == 4:
                self._memo[pair] = cute.arch.inline_ptx(
                    f"ld.global.v2.b32 {{{{$w0}}, {{$w1}}}}, [{{$r0}} + {even * size}];", write_only_types=[Int32, Int32],
                    read_only_args=[start])
            else:
                word = load(Int32, "b32", start, even * size)
                self._memo[pair] = (word, word >> 16)
        return _decode(self._memo[pair][c % 2], capture.dtype)

    def _wide(self, tensor: Any, q: Any, chunk: int) -> list[Any]:
        """Eight of 32 keys of a row, four pairs; the four lanes of the row then exchange (`transpose`), so that each has its own
        pair of each 8.  The load unit takes a quarter of the time that pairs take.  Eight keys are inside or outside
        together."""
        lane = cute.arch.lane_idx() % 4
        first = cutlass.min(self.col0 - 2 * lane + (32 * chunk + 8 * lane), self.keys - 8)
        start = cute.domain_offset((self.b, self.h, q, first), tensor).iterator
        words = cute.arch.inline_ptx("ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Int32] * 4,
                                     read_only_args=[start])
        return list(words)

    def read_ahead(self, q: Sequence[Any], keys: int) -> list[Any]:
        """The words that the programs will read of wide captures for queries `q` and so many keys, in the order of `chunks`."""
        return [word for (_, n, r, c) in chunks(self.captures, keys) for word in self._wide(self.tensors[n], q[r or 0], c)]

    def _by_distance(self, n: int, row: Any, column: Any) -> Any:
        """The table at k - q.  A thread's second row is 8 below its first and finds there what was read 8 columns before."""
        capture, table = self.captures[n], self.tensors[n]
        size = table.element_type.width // 8
        if ("table", n) not in self._memo:
            first = self.col0 - self.row0 + (table.shape[3] - MARGIN - self.keys)
            self._memo["table", n] = cute.domain_offset((self.b, self.h, 0, first), table).iterator
        d = column[0] - 8 * row[0]
        if ("table", n, d) not in self._memo:  # queries and keys beyond the last ones read the margins
            x = load(_WORDS[size], f"b{8 * size}", self._memo["table", n], d * size)
            self._memo["table", n, d] = _decode(x, capture.dtype)
        return self._memo["table", n, d]

    def _emit(self, e: Expr, row: Any, column: Any, score: Any) -> Any:
        match e.op:
            case "score":
                return score * self.scale
            case "const":
                x = e.args[0]
                return Boolean(x) if isinstance(x, bool) else Int32(x) if isinstance(x, int) else Float32(x)
            case "index":
                return {"b": self.b, "h": self.h, "q": row[1], "k": column[1]}[e.args[0]]
            case "sym":
                return self.ints[e.args[0]]
            case "load":
                return self._load(e.args[0], row, column)
            case "relative":
                return self._by_distance(e.args[0], row, column)
            case "tanh" if self.small and factor(e.args[0]) is not None:
                return self._small_tanh(factor(e.args[0]), 1.0, score)
            case "mul" if self.small and e.args[0].op == "tanh" and e.args[1].op == "const" and factor(e.args[0].args[0]):
                return self._small_tanh(factor(e.args[0].args[0]), e.args[1].args[0], score)
            case "div" if e.args[1].op == "const":  # a true division branches, and branches here stall the products
                return as_float(self(e.args[0], row, column, score)) * (1.0 / e.args[1].args[0])
            case "cast":
                x, kind = self(e.args[0], row, column, score), e.args[1]
                return _cast(self._as_float(e.args[0], row, column, x) if kind in _FLOATS else x, kind)
            case "where":
                c, x, y = (self(a, row, column, score) for a in e.args)
                x, y = _common(x, y)
                return select_(as_bool(c), x, y)
        values = [self(a, row, column, score) for a in e.args]
        if any(map(_is_float, values)):
            values = [self._as_float(a, row, column, x) for a, x in zip(e.args, values, strict=True)]
        return _OPS[e.op](*values)

    def _small_tanh(self, by: Any, times: float, score: Any) -> Any:
        """times tanh(by score), its factors folded into the coefficients."""
        key = ("tanh", by, times)
        if key not in self._memo:
            x = Float32(by) * self.scale
            self._memo[key] = [Float32(c * times) * power for c, power in
                               zip(_TANH, (x, x * x * x, x * x * x * (x * x)), strict=True)]
        c0, c1, c2 = self._memo[key]
        square = score * score
        return score * cute.math.fma(square, cute.math.fma(square, c2, c1), c0)


def _chunk(capture: Capture, n: int, row: int, c: int) -> tuple[Any, ...]:
    """Name of 32 keys of a row of a wide capture."""
    return "chunk", n, row if "q" in capture.axes else None, c


def chunks(captures: Sequence[Capture], keys: int) -> list[tuple[Any, ...]]:
    """What a thread reads of wide captures in a tile of so many keys: four words each."""
    return list(dict.fromkeys(_chunk(capture, n, r, c) for n, capture in enumerate(captures) if capture.wide
                              for r in range(2) for c in range((keys + 31) // 32)))


TANH_SMALL = 0.4
_TANH = (0.99999369, -0.33262259, 0.12125794)
"""tanh(x) / x in x^2 up to `TANH_SMALL`, relative error 6.4e-6 (minimax): 1.3e-4 of a score at a cap of 50, where a P of 16 bits
is rounded by 2.4e-4 (fp16) or 2e-3 (bf16)."""


def factor(e: Expr) -> float | None:
    """c where `e` is c times the score."""
    match e.op:
        case "score":
            return 1.0
        case "neg":
            c = factor(e.args[0])
            return None if c is None else -c
        case "mul" | "div" if e.args[1].op == "const" and e.args[1].args[0]:
            c = factor(e.args[0])
            return None if c is None else c * e.args[1].args[0] if e.op == "mul" else c / e.args[1].args[0]
    return None


def tanh_reach(e: Expr) -> float:
    """Largest |c| of the tanh(c score) in a program, 0 without any."""
    own = abs(factor(e.args[0]) or 0.0) if e.op == "tanh" else 0.0
    return max(own, *map(tanh_reach, e.children()), 0.0)


# What one load of a capture gives, by its size; the bits are taken apart in `_decode`.
_WORDS = {1: Int32, 2: Int32, 4: Int32, 8: Int64}


def load(kind: Any, suffix: str, start: Any, offset: int) -> Any:
    """Load from a constant distance.  Without a predicate: what it would have been before has to be kept for that, in a
    register for each load of a tile, and they spill."""
    suffix = {"b8": "u8", "b16": "u16"}.get(suffix, suffix)
    return cute.arch.inline_ptx(f"ld.global.{suffix} {{$w0}}, [{{$r0}} + {offset}];", write_only_types=[kind],
                                read_only_args=[start])


def transpose(words: list[Any], lane: Any) -> list[Any]:
    """Word i of lane j of four becomes word j of lane i."""
    for step in (1, 2):
        upper = (lane & step) != 0
        for i in range(4):
            if i & step == 0:
                low, high = words[i], words[i + step]
                other = cute.arch.shuffle_sync_bfly(select_(upper, low, high), step)
                words[i], words[i + step] = select_(upper, other, low), select_(upper, high, other)
    return words


def _decode(bits: Any, kind: str) -> Any:
    """Value of a loaded word (its low bits for 16-bit kinds)."""
    if kind == "float32":
        return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])
    if kind == "bfloat16":
        return cute.arch.inline_ptx("shl.b32 {$w0}, {$r0}, 16;", write_only_types=[Float32], read_only_args=[bits])
    if kind == "float16":
        return cute.arch.inline_ptx("{ .reg .b16 l, u; mov.b32 {l, u}, {$r0}; cvt.f32.f16 {$w0}, l; }",
                                    write_only_types=[Float32], read_only_args=[bits])
    if kind == "bool":
        return (bits & 255) != 0
    return bits


def _value(x: Any, kind: str) -> Any:
    """The same for an element read through its tensor."""
    if kind == "bool":
        return x != cutlass.Uint8(0)
    return x if kind == "int64" else x.to(Int32) if kind in INTEGERS else x.to(Float32)


def _typed(x: Any) -> Any:
    """Some operators of the DSL give a bare value; the code here goes by the numeric type."""
    if isinstance(x, Float32 | Int32 | Int64 | Boolean):
        return x
    kinds = {"f32": Float32, "i32": Int32, "i64": Int64, "i1": Boolean}
    return kinds[str(x.type)](x)


def _is_float(x: Any) -> bool:
    return isinstance(x, Float32)


def as_float(x: Any) -> Any:
    if isinstance(x, Boolean):
        return select_(x, Float32(1.0), Float32(0.0))
    return x if _is_float(x) else x.to(Float32)


def _int(x: Any) -> Any:
    if isinstance(x, Boolean):
        return select_(x, Int32(1), Int32(0))
    return x


def as_bool(x: Any) -> Any:
    if isinstance(x, Boolean):
        return x
    return x != 0.0 if _is_float(x) else x != 0


def _common(x: Any, y: Any) -> tuple[Any, Any]:
    """Both operands in the wider of their kinds: bool < int32 < int64 < float32."""
    if _is_float(x) or _is_float(y):
        return as_float(x), as_float(y)
    if isinstance(x, Boolean) and isinstance(y, Boolean):
        return x, y
    x, y = _int(x), _int(y)
    if isinstance(x, Int64) or isinstance(y, Int64):
        return x.to(Int64), y.to(Int64)
    return x, y


def _numbers(x: Any, y: Any) -> tuple[Any, Any]:
    x, y = _common(x, y)
    return (_int(x), _int(y)) if isinstance(x, Boolean) else (x, y)  # both are bool then


def _cast(x: Any, kind: str) -> Any:
    to = _CASTS[kind]
    if to is Boolean:
        return as_bool(x)
    if to in (Int32, Int64):
        return x.to(to) if _is_float(x) or kind == "int64" else _int(x)
    x = as_float(x)
    return x if to is Float32 else x.to(to).to(Float32)


def _floordiv(x: Any, y: Any) -> Any:
    x, y = _numbers(x, y)
    return _typed(cute.math.floor(x / y) if _is_float(x) else x // y)


def _mod(x: Any, y: Any) -> Any:
    x, y = _numbers(x, y)
    return x - _floordiv(x, y) * y


def _extreme(x: Any, y: Any, largest: bool) -> Any:
    x, y = _numbers(x, y)
    if _is_float(x):
        return (cute.arch.fmax if largest else cute.arch.fmin)(x, y, nan=True)
    return select_(x > y if largest else x < y, x, y)


def _tanh(x: Any) -> Any:
    """1 - 2 / (1 + e^2x): absolute error of about 1e-7, where the hardware's tanh has 5e-4, too much for fp16 softcap."""
    e = cute.math.exp2(as_float(x) * (2.0 * LOG2E), fastmath=True)
    return Float32(1.0) - Float32(2.0) * cute.arch.rcp_approx(e + 1.0)


def _sigmoid(x: Any) -> Any:
    return cute.arch.rcp_approx(Float32(1.0) + cute.math.exp2(as_float(x) * -LOG2E, fastmath=True))


def _sign(x: Any) -> Any:
    if _is_float(x):
        return select_(x > 0.0, Float32(1.0), select_(x < 0.0, Float32(-1.0), x))
    x = _int(x)
    return select_(x > 0, Int32(1), select_(x < 0, Int32(-1), Int32(0)))


def _abs(x: Any) -> Any:
    x = x if _is_float(x) else _int(x)
    return select_(x < x.__class__(0), -x, x)


def _arith(f: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, y: f(*_numbers(x, y))


def _unary(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: f(as_float(x))


_OPS: dict[str, Callable[..., Any]] = {
    "add": _arith(lambda x, y: x + y),
    "sub": _arith(lambda x, y: x - y),
    "mul": _arith(lambda x, y: x * y),
    "div": lambda x, y: as_float(x) / as_float(y),
    "floordiv": _floordiv,
    "mod": _mod,
    "pow": lambda x, y: cute.math.pow(as_float(x), as_float(y)),
    "minimum": lambda x, y: _extreme(x, y, False),
    "maximum": lambda x, y: _extreme(x, y, True),
    "neg": lambda x: -(x if _is_float(x) else _int(x)),
    "abs": _abs,
    "exp": _unary(lambda x: cute.math.exp2(x * LOG2E, fastmath=True)),
    "exp2": _unary(lambda x: cute.math.exp2(x, fastmath=True)),
    "log": _unary(cute.math.log),
    "log2": _unary(cute.math.log2),
    "log1p": _unary(cute.math.log1p),
    "sqrt": _unary(cute.math.sqrt),
    "rsqrt": _unary(cute.math.rsqrt),
    "reciprocal": _unary(lambda x: Float32(1.0) / x),
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "relu": lambda x: _extreme(x, Float32(0.0) if _is_float(x) else Int32(0), True),
    "erf": _unary(cute.math.erf),
    "sin": _unary(cute.math.sin),
    "cos": _unary(cute.math.cos),
    "floor": lambda x: cute.math.floor(x) if _is_float(x) else _int(x),
    "ceil": lambda x: cute.math.ceil(x) if _is_float(x) else _int(x),
    "sign": _sign,
    "eq": _arith(lambda x, y: x == y),
    "ne": _arith(lambda x, y: x != y),
    "lt": _arith(lambda x, y: x < y),
    "le": _arith(lambda x, y: x <= y),
    "gt": _arith(lambda x, y: x > y),
    "ge": _arith(lambda x, y: x >= y),
    "and": lambda x, y: as_bool(x) & as_bool(y),
    "or": lambda x, y: as_bool(x) | as_bool(y),
    "not": lambda x: ~as_bool(x),
    "xor": lambda x, y: as_bool(x) ^ as_bool(y),
}
