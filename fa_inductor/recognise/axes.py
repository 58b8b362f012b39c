"""Axes: what each dimension of a tensor means, through any chain of views.

Every dimension of a tensor under study is a *group*: the axes it enumerates, most significant first.  A reshape
regroups axes and may split one (``heads -> kv heads x group``); an axis once split stays split everywhere, so
facts learnt on one operand (a GQA expand on K) hold for all.  A dimension of size 1, or one that was broadcast,
is the empty group.  Sizes are ints or sympy expressions of the graph's shape symbols.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar

import sympy
import torch

Size = int | sympy.Expr

_EQUAL: ContextVar[Mapping[sympy.Expr, Size]] = ContextVar("equal sizes", default={})  # noqa: B039


@contextlib.contextmanager
def spelled_alike(equal: Mapping[sympy.Expr, Size]) -> Iterator[None]:
    """Sizes that are equal in the graph at hand have one `spelling` (see `equal_sizes`)."""
    token = _EQUAL.set(equal)
    try:
        yield
    finally:
        _EQUAL.reset(token)


def size_of(x: int | torch.SymInt) -> Size:
    """Size of one tensor dimension, as an int when it is static."""
    if isinstance(x, int):
        return x
    e = x.node.expr
    return int(e) if e.is_number else e


def shape_of(t: torch.Tensor) -> tuple[Size, ...]:
    return tuple(size_of(s) for s in t.shape)


def spelling(x: int | torch.SymInt) -> Size:
    """`size_of` in the one spelling of all equal sizes.  To compare, and not to divide: that needs the graph's own."""
    e = size_of(x)
    return e if isinstance(e, int) else _EQUAL.get().get(e, e)


def spelt_shape(t: torch.Tensor) -> tuple[Size, ...]:
    """`shape_of` in `spelling`."""
    return tuple(spelling(s) for s in t.shape)


def size_hint(size: Size, *tensors: torch.Tensor) -> int:
    """The value of a size in this compile, without a guard; 0 for one that depends on data.

    Args:
        tensors: fake tensors with symbolic sizes, for the values of the symbols.
    """
    if isinstance(size, int):
        return size
    known = {s.node.expr: s.node.hint for t in tensors for s in t.shape if isinstance(s, torch.SymInt)}
    value = size.xreplace({e: sympy.Integer(h) for e, h in known.items() if h is not None and e.is_Symbol})
    if not value.is_number and size in known and known[size] is not None:
        return int(known[size])
    return int(value) if value.is_number else 0


def quotient(a: Size, b: Size) -> Size | None:
    """a / b when that is exact for all values of the symbols, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    q = sympy.cancel(sympy.sympify(a) / sympy.sympify(b))
    if sympy.fraction(q)[1] != 1:
        return None
    return int(q) if q.is_number else q


def product(sizes: Iterable[Size]) -> Size:
    p: Size = 1
    for s in sizes:
        p = p * s
    return p if isinstance(p, int) else sympy.expand(p)


class AxesError(Exception):
    """The axes of a reshape do not line up."""


class Axis:
    """One independent index; identity matters, not its name."""

    __slots__ = ("name", "parts", "size")

    def __init__(self, size: Size, name: str = "") -> None:
        self.size = size
        self.name = name
        self.parts: tuple[Axis, ...] | None = None

    def split(self, outer: Size, inner: Size) -> tuple[Axis, Axis]:
        parts = (Axis(outer, self.name + "0"), Axis(inner, self.name + "1"))
        self.parts = parts
        return parts

    def become(self, other: Axis) -> None:
        """This axis and ``other`` are one, though their sizes are two symbols.

        Raises:
            AxesError: this one has been split.
        """
        if self.parts is not None:
            raise AxesError(f"{self!r} was split and is to be {other!r}")
        self.parts = (other,)

    def __repr__(self) -> str:
        return f"{self.name or 'axis'}:{self.size}"


Group = tuple[Axis, ...]
Dims = tuple[Group, ...]


def resolve(group: Iterable[Axis]) -> Group:
    """The group with every split axis replaced by its parts."""
    out: list[Axis] = []
    for a in group:
        if a.parts is None:
            out.append(a)
        else:
            out.extend(resolve(a.parts))
    return tuple(out)


def resolve_dims(dims: Dims) -> Dims:
    return tuple(resolve(g) for g in dims)


def group_size(group: Group) -> Size:
    return product(a.size for a in group)


def fresh(shape: Sequence[Size], name: str = "") -> Dims:
    """New axes for a tensor of this shape."""
    return tuple(() if s == 1 else (Axis(s, f"{name}{i}"),) for i, s in enumerate(shape))


def regroup(dims: Dims, shape: Sequence[Size]) -> Dims:
    """Distribute the axes of ``dims``, in row-major order, over the dimensions of ``shape``.

    Raises:
        AxesError: an axis would have to be cut at a place that does not divide its size.
    """
    flat = [a for g in dims for a in resolve(g)]
    out: list[Group] = []
    i = 0
    for want in shape:
        group: list[Axis] = []
        rest: Size = want
        while rest != 1:
            if i == len(flat):
                raise AxesError(f"no axes left for a dimension of size {want}")
            a = flat[i]
            q = quotient(rest, a.size)
            if q is not None:
                group.append(a)
                rest = q
                i += 1
                continue
            inner = quotient(a.size, rest)
            if inner is None:
                raise AxesError(f"{a!r} does not split at {rest}")
            outer_axis, inner_axis = a.split(rest, inner)
            group.append(outer_axis)
            flat[i] = inner_axis
            rest = 1
        out.append(tuple(group))
    if i != len(flat):
        raise AxesError("axes left over")
    return tuple(out)


def broadcast_operand(dims: Dims, shape: Sequence[Size], full: Sequence[Size]) -> Dims:
    """Dims of an operand of ``shape`` that broadcasts into a result of shape ``full`` with ``dims``."""
    tail = dims[len(dims) - len(shape):]
    tail_full = full[len(full) - len(shape):]
    return tuple(() if s == 1 and f != 1 else g for g, s, f in zip(tail, shape, tail_full, strict=True))
