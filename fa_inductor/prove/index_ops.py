"""Evaluation rules of operators that create, move or select elements without computing on them."""
from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from .evaluate import Evaluator, rule
from .values import FALSE, TRUE, Poly, Pred, Tree, Undecided, Value

aten, prims = torch.ops.aten, torch.ops.prims
Index = tuple[Poly, ...]


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """A positional-or-keyword argument of a node."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def source(x: Any) -> fx.Node:
    if not isinstance(x, fx.Node):
        raise Undecided
    return x


def dimension(x: Any, rank: int) -> int:
    if not isinstance(x, int) or not -rank <= x < max(rank, 1):
        raise Undecided
    return x % max(rank, 1)


def choose(ev: Evaluator, p: Pred, a: Value, b: Value) -> Value:
    """``a`` where p holds, else ``b``, for two values of one kind."""
    if isinstance(a, Poly) and isinstance(b, Poly):
        return ev.facts.select(p, a, b)
    if isinstance(a, Pred) and isinstance(b, Pred):
        return ev.facts.where(p, a, b)
    if isinstance(a, Tree) and isinstance(b, Tree) and a.dtype == b.dtype:
        return ev.trees.select(p, a, b)
    raise Undecided


# -- creation -------------------------------------------------------------


def dtype_of(node: fx.Node) -> torch.dtype:
    return node.meta["val"].dtype


@rule(prims.iota)
def _iota(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    start, step = ev.integer(node.kwargs.get("start", 0)), ev.integer(node.kwargs.get("step", 1))
    value = start + step * index[0]
    if not ev.trees.fits(value, dtype_of(node)):
        raise Undecided
    return value


@rule(aten.arange)
def _arange(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    start = node.args[0] if len(node.args) > 1 else 0
    step = node.args[2] if len(node.args) > 2 else 1
    value = ev.integer(start) + ev.integer(step) * index[0]
    return ev.trees.convert(value, torch.int64, dtype_of(node))


@rule(aten.full, aten.full_like, aten.new_full)
def _full(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    position = 2 if getattr(node.target, "overloadpacket", None) is aten.new_full else 1
    return ev.scalar(argument(node, position, "fill_value"), dtype_of(node))


@rule(aten.scalar_tensor)
def _scalar_tensor(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    return ev.scalar(node.args[0], dtype_of(node))


@rule(aten.zeros, aten.zeros_like, aten.new_zeros)
def _zeros(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    return ev.scalar(0, dtype_of(node))


@rule(aten.ones, aten.ones_like, aten.new_ones)
def _ones(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    return ev.scalar(1, dtype_of(node))


@rule(aten.fill)
def _fill(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    if isinstance(node.args[1], fx.Node) and isinstance(node.args[1].meta.get("val"), torch.Tensor):
        raise Undecided
    return ev.scalar(node.args[1], dtype_of(node))


# -- views -------------------------------------------------------------


@rule(aten.clone, aten.alias, aten.detach, aten.contiguous, aten.lift_fresh_copy, aten.lift_fresh)
def _same(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    return ev.value(source(node.args[0]), index)


@rule(aten.expand)
def _expand(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    return ev.operand(node.args[0], node, index)


@rule(aten.unsqueeze)
def _unsqueeze(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    d = dimension(node.args[1], len(index))
    return ev.value(source(node.args[0]), index[:d] + index[d + 1:])


@rule(aten.squeeze)
def _squeeze(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    shape = ev.shape(source(node.args[0]))
    which = argument(node, 1, "dim", list(range(len(shape))))
    dims = {dimension(d, len(shape)) for d in (which if isinstance(which, list | tuple) else [which])}
    gone = {d for d in dims if shape[d] == 1}
    rest = iter(index)
    return ev.value(source(node.args[0]), [0 if d in gone else next(rest) for d in range(len(shape))])


@rule(aten.permute)
def _permute(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    order = [dimension(d, len(index)) for d in node.args[1]]  # type: ignore[union-attr]
    return ev.value(source(node.args[0]), [index[order.index(d)] for d in range(len(index))])


@rule(aten.transpose)
def _transpose(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    d0, d1 = (dimension(d, len(index)) for d in node.args[1:3])
    at = list(index)
    at[d0], at[d1] = at[d1], at[d0]
    return ev.value(source(node.args[0]), at)


@rule(aten.t)
def _t(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    return ev.value(source(node.args[0]), index[::-1])


@rule(aten.view, aten.reshape, aten._unsafe_view, prims.view_of)
def _view(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    src = source(node.args[0])
    return ev.value(src, reindex(ev, index, ev.shape(node), ev.shape(src)))


def reindex(ev: Evaluator, index: Index, shape: Index, target: Index) -> list[Poly]:
    """The index into a tensor of shape ``target`` of the element at ``index`` of its view of shape ``shape``.

    Dimensions are matched in the smallest groups of equal size, so that only merged or split ones need division.
    """
    result: list[Poly] = []
    i = j = 0
    while i < len(shape) or j < len(target):
        i0, j0 = i, j
        a = b = Poly.of(1)
        while True:
            if i < len(shape) and (i == i0 or _smaller(ev, a, b)):
                a = a * shape[i]
                i += 1
            elif j < len(target):
                b = b * target[j]
                j += 1
            elif i < len(shape):
                a = a * shape[i]
                i += 1
            if a == b and (j > j0 or j == len(target)):
                break
            if i == len(shape) and j == len(target):
                raise Undecided
        flat = Poly({})
        for at, n in zip(index[i0:i], shape[i0:i], strict=True):
            flat = flat * n + at
        parts: list[Poly] = []
        dims = target[j0:j]
        for n in reversed(dims[1:]):
            parts.append(ev.facts.mod(flat, n))
            flat = ev.facts.floordiv(flat, n)
        result += ([flat] if dims else []) + parts[::-1]
    return result


def _smaller(ev: Evaluator, a: Poly, b: Poly) -> bool:
    """Whether to grow a next, when two products of sizes shall become equal."""
    return ev.facts.nonneg(b - a - 1)


@rule(aten.slice)
def _slice(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    src = source(node.args[0])
    d = dimension(argument(node, 1, "dim", 0), len(index))
    start, step = argument(node, 2, "start"), ev.integer(argument(node, 4, "step", 1))
    return ev.value(src, replace_at(index, d, _slice_start(ev, start, ev.shape(src)[d]) + step * index[d]))


def _slice_start(ev: Evaluator, start: Any, size: Poly) -> Poly:
    """First index of a slice; a start past the end only makes empty slices, which hold nothing to read."""
    s = Poly({}) if start is None else ev.integer(start)
    if ev.facts.nonneg(s):
        return s
    if ev.facts.nonneg(-s - 1) and ev.facts.nonneg(size + s):
        return size + s
    c = s.constant()
    if c is not None and c < 0 and ev.facts.nonneg(-size - c):
        return Poly({})
    raise Undecided


def replace_at(index: Index, d: int, value: Poly) -> Index:
    return (*index[:d], value, *index[d + 1:])


@rule(aten.select)
def _select(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    src = source(node.args[0])
    shape = ev.shape(src)
    d = dimension(node.args[1], len(shape))
    return ev.value(src, (*index[:d], wrap(ev, ev.integer(node.args[2]), shape[d]), *index[d:]))


def wrap(ev: Evaluator, i: Poly, size: Poly) -> Poly:
    """An index as torch reads it: negative ones count from the end.

    Raises:
        Undecided: not proven to be on one side.
    """
    if ev.facts.in_range(i, 0, size):
        return i
    if ev.facts.in_range(i, -size, 0):
        return i + size
    raise Undecided


@rule(operator.getitem)
def _getitem(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    parts, which = source(node.args[0]), node.args[1]
    packet = getattr(parts.target, "overloadpacket", None)
    if not isinstance(which, int) or packet not in (aten.split, aten.split_with_sizes, aten.unbind, aten.chunk):
        raise Undecided
    src = source(parts.args[0])
    shape = ev.shape(src)
    if packet is aten.unbind:
        d = dimension(argument(parts, 1, "dim", 0), len(shape))
        return ev.value(src, (*index[:d], Poly.of(which), *index[d:]))
    d = dimension(argument(parts, 2, "dim", 0), len(shape))
    sizes = parts.args[1]
    if packet is aten.split and not isinstance(sizes, list | tuple):
        start = ev.integer(sizes) * which
    elif packet is aten.chunk:
        raise Undecided
    else:
        start = sum((ev.integer(n) for n in sizes[:which]), Poly({}))  # type: ignore[index]
    return ev.value(src, replace_at(index, d, start + index[d]))


@rule(aten.cat)
def _cat(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    d = dimension(argument(node, 1, "dim", 0), len(index))
    parts: list[tuple[fx.Node, Poly, Poly]] = []  # node, first position, end
    end = Poly({})
    for x in node.args[0]:  # type: ignore[union-attr]
        part = source(x)
        shape = ev.shape(part)
        if len(shape) != len(index) or part.meta["val"].dtype != dtype_of(node):
            raise Undecided
        parts.append((part, end, end + shape[d]))
        end = parts[-1][2]
    result: Value | None = None
    for part, first, last in reversed(parts):
        inside = TRUE if result is None else ev.facts.cmp("ge", last - 1 - index[d])
        if inside == FALSE:
            continue
        value = ev.value(part, replace_at(index, d, index[d] - first))
        result = value if inside == TRUE or result is None else choose(ev, inside, value, result)
    if result is None:
        raise Undecided
    return result


@rule(aten.constant_pad_nd)
def _pad(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    src, pads = source(node.args[0]), [ev.integer(p) for p in node.args[1]]  # type: ignore[union-attr]
    shape, at, inside = ev.shape(src), list(index), []
    for n in range(len(pads) // 2):
        d = len(index) - 1 - n
        at[d] = index[d] - pads[2 * n]
        inside += [ev.facts.cmp("ge", at[d]), ev.facts.cmp("ge", shape[d] - 1 - at[d])]
    p = ev.facts.and_(*inside)
    if p == TRUE:
        return ev.value(src, at)
    return choose(ev, p, ev.value(src, at), ev.scalar(argument(node, 2, "value", 0), dtype_of(node)))


@rule(aten.slice_scatter)
def _slice_scatter(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    base, src = source(node.args[0]), source(node.args[1])
    d = dimension(argument(node, 2, "dim", 0), len(index))
    if argument(node, 5, "step", 1) != 1 or src.meta["val"].dtype != dtype_of(node):
        raise Undecided
    first = _slice_start(ev, argument(node, 3, "start"), ev.shape(base)[d])
    at = index[d] - first
    p = ev.facts.and_(ev.facts.cmp("ge", at), ev.facts.cmp("ge", ev.shape(src)[d] - 1 - at))
    return choose(ev, p, ev.value(src, replace_at(index, d, at)), ev.value(base, index))


@rule(aten.copy)
def _copy(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    src = source(node.args[1])
    return ev.trees.convert(ev.operand(src, node, index), src.meta["val"].dtype, dtype_of(node))


@rule(aten.flip)
def _flip(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    src = source(node.args[0])
    dims = {dimension(d, len(index)) for d in node.args[1]}  # type: ignore[union-attr]
    shape = ev.shape(src)
    return ev.value(src, [shape[d] - 1 - i if d in dims else i for d, i in enumerate(index)])


@rule(aten.repeat)
def _repeat(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    src = source(node.args[0])
    shape = ev.shape(src)
    skip = len(index) - len(shape)
    repeats = list(node.args[1])[skip:]  # type: ignore[arg-type]
    return ev.value(src, [i if r == 1 else ev.facts.mod(i, n)
                          for i, n, r in zip(index[skip:], shape, repeats, strict=True)])


@rule(aten.index, aten._unsafe_index)
def _gather(ev: Evaluator, node: fx.Node, index: Index) -> Value:
    """``x[i, :, j]`` with index tensors whose values are proven to be inside x."""
    src, indices = source(node.args[0]), list(node.args[1])  # type: ignore[arg-type]
    shape = ev.shape(src)
    indices += [None] * (len(shape) - len(indices))
    given = [d for d, x in enumerate(indices) if x is not None]
    tensors = [source(indices[d]) for d in given]
    if any(t.meta["val"].dtype not in (torch.int64, torch.int32) for t in tensors):
        raise Undecided
    rank = max(t.meta["val"].ndim for t in tensors)
    # the broadcast dimensions stand where the index tensors do, or in front when those are not neighbours
    place = given[0] if given == list(range(given[0], given[-1] + 1)) else 0
    inner, outer = index[place:place + rank], iter(index[:place] + index[place + rank:])
    common = ev.shape(node)[place:place + rank]
    at: list[Poly] = []
    for d, x in enumerate(indices):
        if x is None:
            at.append(next(outer))
            continue
        own = ev.shape(x)  # type: ignore[arg-type]
        if any(n != 1 and n != o for n, o in zip(own, common[rank - len(own):], strict=True)):
            raise Undecided
        value = ev.value(x, inner[rank - len(own):])  # type: ignore[arg-type]
        if not isinstance(value, Poly):
            raise Undecided
        at.append(wrap(ev, value, shape[d]))
    return ev.value(src, at)
