"""What an FX node is, independent of its spelling: views, copies, casts, constants."""
from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node

from .axes import AxesError, Dims, regroup, shape_of

aten = torch.ops.aten
prims = torch.ops.prims

COPIES = {aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default,
          aten.contiguous.default, aten.lift_fresh.default}
RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
            aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.flatten.using_ints,
            aten.unflatten.int, aten._reshape_copy.default, aten.view_copy.default}
PERMUTES = {aten.permute.default, aten.transpose.int, aten.t.default}
CASTS = {prims.convert_element_type.default, aten._to_copy.default}
VIEWS = COPIES | RESHAPES | PERMUTES | {aten.expand.default, aten.slice.Tensor}
"""Rearrangements and copies; a slice counts only when it keeps everything (`pull` and `push` check that)."""


def val(node: Node) -> torch.Tensor:
    """The node's FakeTensor."""
    return node.meta["val"]


def is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def target(node: Any) -> Any:
    return node.target if isinstance(node, Node) and node.op == "call_function" else None


_RANDOM = ("rand", "bernoulli", "dropout", "normal", "multinomial")


def is_random(node: Node) -> bool:
    """Whether a second call with the same arguments gives something else."""
    t = target(node)
    return t is not None and (torch.Tag.nondeterministic_seeded in getattr(t, "tags", ())
                              or any(w in str(t) for w in _RANDOM))


def arg(node: Node, i: int, name: str, default: Any = None) -> Any:
    """Argument by position or keyword."""
    return node.args[i] if len(node.args) > i else node.kwargs.get(name, default)


def permutation(node: Node) -> tuple[int, ...]:
    """``out dim i = in dim perm[i]`` of a permute, transpose or t node."""
    n = val(node.args[0]).dim()
    if node.target is aten.permute.default:
        return tuple(d % n for d in node.args[1])
    perm = list(range(n))
    if node.target is aten.t.default:
        return tuple(reversed(perm))
    a, b = (node.args[1] % n, node.args[2] % n)
    perm[a], perm[b] = perm[b], perm[a]
    return tuple(perm)


def cast_dtypes(node: Node) -> tuple[torch.dtype, torch.dtype] | None:
    """(from, to) of a dtype cast; None for anything else."""
    if target(node) in CASTS:
        return val(node.args[0]).dtype, val(node).dtype
    return None


ROUNDINGS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
"""Dtypes whose rounding on the way may be left out; a cast to anything narrower is the user's quantisation."""
_EXACT = {(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.bfloat16, torch.float64),
          (torch.float16, torch.float64), (torch.float32, torch.float64)}


def is_rounding(node: Node) -> bool:
    """A cast between float dtypes of 16 bits and more."""
    d = cast_dtypes(node)
    return d is not None and d[0] in ROUNDINGS and d[1] in ROUNDINGS


def is_widening(node: Node) -> bool:
    """A float cast that keeps every value."""
    d = cast_dtypes(node)
    return d is not None and (d in _EXACT or d[0] == d[1])


def constant(x: Any) -> bool | int | float | None:
    """The Python number that a literal, or a node filled with one literal, stands for; else None."""
    if isinstance(x, (bool, int, float)):
        return x
    t = target(x)
    if t is aten.full.default and isinstance(x.args[1], (bool, int, float)):
        return _in_dtype(x.args[1], val(x).dtype)
    if t is aten.scalar_tensor.default and isinstance(x.args[0], (bool, int, float)):
        return _in_dtype(x.args[0], val(x).dtype)
    if t is aten.lift_fresh_copy.default:
        return _literal(x.args[0])
    if t in VIEWS and is_tensor(x.args[0]):
        return constant(x.args[0])
    if t in CASTS:
        c = constant(x.args[0])
        return None if c is None else _in_dtype(c, val(x).dtype)
    return None


def _literal(x: Node) -> bool | int | float | None:
    """The number that ``torch.tensor(number)`` became while tracing: one that nothing can write to."""
    if x.op != "get_attr" or x.graph.owning_module is None or any(
            u.target is not aten.lift_fresh_copy.default for u in x.users):
        return None
    t = getattr(x.graph.owning_module, str(x.target), None)
    if not isinstance(t, torch.Tensor) or t.dim() or t.is_complex() or t.device.type != "cpu":
        return None
    with unset_fake_temporarily():
        return t.item()


def _in_dtype(value: bool | int | float, dtype: torch.dtype) -> bool | int | float:
    if dtype.is_floating_point and abs(value) != float("inf") and abs(value) > torch.finfo(dtype).max:
        return float("inf") if value > 0 else float("-inf")
    with unset_fake_temporarily():
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None).to(dtype).item()


def is_full_slice(node: Node) -> bool:
    """A slice that keeps every element."""
    return (arg(node, 2, "start") in (0, None) and arg(node, 4, "step", 1) == 1
            and shape_of(val(node)) == shape_of(val(node.args[0])))


def pull(node: Node, dims: Dims) -> tuple[Node, Dims] | None:
    """One step from a view or copy to its input, with the input's axes; None when the node is neither.

    Raises:
        AxesError: a reshape whose axes do not line up.
    """
    t = target(node)
    if t not in VIEWS:
        return None
    src = node.args[0]
    if not is_tensor(src) or val(src).dtype != val(node).dtype:
        return None
    shape = shape_of(val(src))
    if t is aten.slice.Tensor:
        return (src, dims) if is_full_slice(node) else None
    if t in COPIES:
        return src, dims
    if t in PERMUTES:
        out: list[Any] = [()] * len(dims)
        for i, d in enumerate(permutation(node)):
            out[d] = dims[i]
        return src, tuple(out)
    if t is aten.expand.default:
        tail = dims[len(dims) - len(shape):]
        full = shape_of(val(node))[len(dims) - len(shape):]
        return src, tuple(() if s == 1 and f != 1 else g for g, s, f in zip(tail, shape, full, strict=True))
    return src, regroup(dims, shape)


def push(node: Node, dims: Dims) -> Dims | None:
    """Axes of a view's or copy's output from those of its input; None when an axis is repeated or it is no view."""
    t = target(node)
    if t not in VIEWS:
        return None
    if t in COPIES or (t is aten.slice.Tensor and is_full_slice(node)):
        return dims
    if t in PERMUTES:
        return tuple(dims[d] for d in permutation(node))
    shape = shape_of(val(node))
    if t is aten.expand.default:
        pad = (tuple(() for _ in range(len(shape) - len(dims)))) + dims
        src = shape_of(val(node.args[0]))
        src = (1,) * (len(shape) - len(src)) + src
        return pad if all(a == b for a, b in zip(src, shape, strict=True)) else None
    if t in RESHAPES:
        try:
            return regroup(dims, shape)
        except AxesError:
            return None
    return None
