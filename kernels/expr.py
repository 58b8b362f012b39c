"""The score language: pointwise programs over one attention score.

A program is an `Expr` tree evaluated at one position (b, h, q, k) of the score matrix.  The same tree is
read by the mask prover, the plain-torch reference and the kernels (which emit it as device code), so it is
deliberately small and carries no torch, sympy or DSL object.

Leaves
    score                 the score ``scale * (Q K^T)[b, h, q, k]``, float32
    const(value)          bool, int or float
    index(axis)           one of ``b h q k``; ``h`` counts query heads; integer
    sym(i)                the i-th entry of the operator's ``ints`` argument; integer
    load(i)               capture i, broadcast to ``[B, Hq, Sq, Sk]`` and read at (b, h, q, k)
    relative(i)           capture i ``[B or 1, Hq or 1, 1, Sq + Sk - 1 + 2 MARGIN]`` read at (b, h, 0, k - q + Sq - 1 + MARGIN):
                          a bias that only the distance of key and query decides.  The `MARGIN` entries at either end are
                          never used; they spare a kernel whose last tiles are not full the tests of each address

Inner nodes are named in `OPS` with their number of arguments; ``cast`` has the target dtype's name
(``float32``, ``bfloat16`` ...) as a second, plain-string argument and rounds like a torch cast.
Integer ``floordiv`` rounds down and ``mod`` has the sign of the divisor, as in Python.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

OPS: dict[str, int] = {
    "add": 2, "sub": 2, "mul": 2, "div": 2, "floordiv": 2, "mod": 2, "pow": 2, "minimum": 2, "maximum": 2,
    "neg": 1, "abs": 1, "exp": 1, "exp2": 1, "log": 1, "log2": 1, "log1p": 1, "sqrt": 1, "rsqrt": 1, "reciprocal": 1,
    "tanh": 1, "sigmoid": 1, "relu": 1, "erf": 1, "sin": 1, "cos": 1, "floor": 1, "ceil": 1, "sign": 1,
    "eq": 2, "ne": 2, "lt": 2, "le": 2, "gt": 2, "ge": 2, "and": 2, "or": 2, "not": 1, "xor": 2, "where": 3,
    "cast": 2,
}
LEAVES = frozenset({"score", "const", "index", "sym", "load", "relative"})
MARGIN = 512
READS = frozenset({"load", "relative"})
"""Leaves that read a capture."""
AXES = ("b", "h", "q", "k")


@dataclass(frozen=True, slots=True)
class Expr:
    """One node of a score program; immutable, hashable, comparable by structure."""

    op: str
    args: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if self.op in LEAVES:
            if len(self.args) != (0 if self.op == "score" else 1):
                raise ValueError(f"leaf {self.op!r} has {len(self.args)} arguments")
            if self.op == "index" and self.args[0] not in AXES:
                raise ValueError(f"unknown axis {self.args[0]!r}; expected one of {AXES}")
        elif self.op not in OPS:
            raise ValueError(f"unknown operator {self.op!r} in a score program")
        elif len(self.args) != OPS[self.op]:
            raise ValueError(f"{self.op!r} takes {OPS[self.op]} arguments, got {len(self.args)}")

    def children(self) -> tuple[Expr, ...]:
        return tuple(a for a in self.args if isinstance(a, Expr))

    def walk(self) -> Iterator[Expr]:
        """This node and everything below it, parents first."""
        yield self
        for child in self.children():
            yield from child.walk()

    def axes(self) -> frozenset[str]:
        """Index axes this program reads directly (not through a capture)."""
        return frozenset(e.args[0] for e in self.walk() if e.op == "index")

    def loads(self) -> frozenset[int]:
        """Captures that it reads."""
        return frozenset(e.args[0] for e in self.walk() if e.op in READS)

    def relative(self) -> frozenset[int]:
        """Those of them that are read by distance."""
        return frozenset(e.args[0] for e in self.walk() if e.op == "relative")

    def uses_score(self) -> bool:
        return any(e.op == "score" for e in self.walk())

    def __str__(self) -> str:
        if self.op == "score":
            return "s"
        if self.op == "const":
            return repr(self.args[0])
        if self.op == "index":
            return str(self.args[0])
        if self.op == "relative":
            return f"t{self.args[0]}[k - q]"
        if self.op in ("sym", "load"):
            return f"{'n' if self.op == 'sym' else 't'}{self.args[0]}"
        return f"{self.op}({', '.join(map(str, self.args))})"


SCORE = Expr("score")


def const(value: bool | int | float) -> Expr:
    return Expr("const", (value,))


def index(axis: str) -> Expr:
    return Expr("index", (axis,))


def sym(i: int) -> Expr:
    return Expr("sym", (i,))


def load(i: int) -> Expr:
    return Expr("load", (i,))


def relative(i: int) -> Expr:
    return Expr("relative", (i,))


def to_json(expr: Expr) -> list[Any]:
    """Nested lists; floats that JSON cannot hold (inf, nan) are spelled as strings."""
    args: list[Any] = []
    for a in expr.args:
        if isinstance(a, Expr):
            args.append(to_json(a))
        elif isinstance(a, float) and (a != a or a in (float("inf"), float("-inf"))):
            args.append({"float": repr(a)})
        else:
            args.append(a)
    return [expr.op, *args]


def from_json(data: list[Any]) -> Expr:
    op, *raw = data
    args: list[Any] = []
    for a in raw:
        if isinstance(a, list):
            args.append(from_json(a))
        elif isinstance(a, dict):
            args.append(float(a["float"]))
        else:
            args.append(a)
    return Expr(op, tuple(args))
