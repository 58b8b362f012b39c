"""New FX nodes with the metadata that Inductor and the partitioner rely on."""
from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ..reasons import Code, Refusal
from ..recognise.axes import Axis, Dims, Group, Size, group_size, resolve, resolve_dims, shape_of
from ..recognise.nodes import aten, val
from ..sizes import size_node

_CARRIED = ("stack_trace", "nn_module_stack", "source_fn_stack", "seq_nr", "recompute", "ac_graph_id", "custom",
            "partitioner_tag", "autograd_backward", "is_gradient_acc", "from_node", "fwd_source_fn_stack",
            "fwd_nn_module_stack")
"""Metadata a replacement takes over from the node it replaces: source lines, checkpointing and partitioner tags."""


class Emitter:
    """Inserts nodes before ``at``, with fake values computed by running each operator on fake tensors."""

    def __init__(self, graph: Graph, at: Node, like: Node) -> None:
        self.graph = graph
        self.at = at
        self.like = like
        self.created: list[Node] = []

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(self.at):
            node = self.graph.call_function(target, args, kwargs)
        self.created.append(node)
        for key in _CARRIED:
            if key in self.like.meta:
                node.meta[key] = self.like.meta[key]
        fake_args = torch.fx.map_arg(args, lambda n: n.meta["val"])
        fake_kwargs = torch.fx.map_arg(kwargs, lambda n: n.meta["val"])
        with _fake_mode(args):
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        return node

    def undo(self) -> None:
        """Remove what was created, newest first: nothing uses it yet."""
        for n in reversed(self.created):
            if not n.users:
                self.graph.erase_node(n)
        self.created.clear()

    def size(self, node: Node, dims: Dims, group: Group) -> int | Node:
        """The size of ``group`` as an int, or as an integer node read off a dimension of ``node``."""
        size = group_size(resolve(group))
        if isinstance(size, int):
            return size
        out: int | Node = math.prod(a.size for a in resolve(group) if isinstance(a.size, int))
        for a in resolve(group):
            if not isinstance(a.size, int):  # a node of two plain numbers would be one that the partitioner rejects
                factor = self._axis_size(node, dims, a)
                out = factor if out == 1 else self.call(operator.mul, out, factor)
        return out

    def _axis_size(self, node: Node, dims: Dims, axis: Axis) -> int | Node:
        if isinstance(axis.size, int):
            return axis.size
        for i, g in enumerate(resolve_dims(dims)):
            if axis in g:
                others = [a.size for a in g if a is not axis]
                if any(not isinstance(n, int) for n in others):
                    return self._in_graph(axis.size)
                size: int | Node = self.call(aten.sym_size.int, node, i)
                for other in others:
                    size = self.call(operator.floordiv, size, other)
                return size
        return self._in_graph(axis.size)

    def _in_graph(self, size: Size) -> Node:
        """A node that holds this size, which is one of several on its dimension (a window's, or the number of them), or on
        none: that of the batch, for queries that all batches share."""
        found = size_node(self.graph, size, self.at)
        if found is not None:
            return found
        raise Refusal(Code.RANK, "a symbolic size is on no dimension of its own")

    def arrange(self, node: Node, dims: Dims, want: Dims, *, copy: bool = True,
                sizes: tuple[Node, Dims] | None = None) -> Node | None:
        """``node``, whose dimensions are ``dims``, with dimensions ``want``; axes it lacks are broadcast.

        Only free views unless a reshape cannot be one; then a copy, or None when ``copy`` is false.  ``sizes`` names
        a node to read the sizes of broadcast axes from.
        """
        src, dst = resolve_dims(dims), resolve_dims(want)
        if src == dst and all(s == 1 or g for s, g in zip(shape_of(val(node)), src, strict=True)):
            return node
        have = [a for g in src for a in g]
        order = [a for g in dst for a in g]
        split = tuple((a,) for a in have)
        cur, cur_dims = node, src
        if cur_dims != split:
            out = self._reshape(cur, cur_dims, split, copy)
            if out is None:
                return None
            cur, cur_dims = out, split
        missing = [a for a in order if a not in have]
        present = [a for a in order if a in have]
        perm = [have.index(a) for a in present]
        if perm != list(range(len(perm))):
            cur = self.call(aten.permute.default, cur, perm)
        cur_dims = tuple((a,) for a in present)
        if missing:
            return self._broadcast(cur, cur_dims, dst, missing, copy, sizes or (node, dims))
        return self._reshape(cur, cur_dims, dst, copy)

    def _broadcast(self, cur: Node, cur_dims: Dims, dst: Dims, missing: list[Axis], copy: bool,
                   sizes: tuple[Node, Dims]) -> Node | None:
        """Group what is there by the wanted dimensions; a dimension that lacks axes is 1 or expanded."""
        partial: list[Group] = []
        for g in dst:
            keep = tuple(a for a in g if a not in missing)
            if keep and keep != g:
                raise Refusal(Code.RANK, "a dimension is broadcast in part")
            partial.append(keep)
        out = self._reshape(cur, cur_dims, tuple(partial), copy)
        if out is None:
            return None
        shape = [(-1 if p == g else self.size(*sizes, g)) for p, g in zip(partial, dst, strict=True)]
        return self.call(aten.expand.default, out, shape)

    def _reshape(self, node: Node, dims: Dims, want: Dims, copy: bool) -> Node | None:
        if dims == want and all(s == 1 or g for s, g in zip(shape_of(val(node)), dims, strict=True)):
            return node
        shape: list[int | Node] = []
        symbolic = [i for i, g in enumerate(want) if not isinstance(group_size(g), int)]
        for i, g in enumerate(want):
            if len(symbolic) == 1 and i == symbolic[0]:
                shape.append(-1)
            else:
                shape.append(self.size(node, dims, g))
        fake = [torch.fx.map_arg(s, lambda n: n.meta["val"]) for s in shape]
        if not _viewable(val(node), fake):
            if not copy:
                return None
            node = self.call(aten.clone.default, node, memory_format=torch.contiguous_format)
        return self.call(aten.view.default, node, shape)


def _viewable(t: torch.Tensor, shape: Sequence[Any]) -> bool:
    with contextlib.ExitStack() as stack:
        mode = getattr(t, "fake_mode", None)
        if mode is not None:
            stack.enter_context(mode)
        try:
            t.view(shape)
        except (RuntimeError, ValueError):
            return False
    return True


def _fake_mode(args: Any) -> contextlib.AbstractContextManager[Any]:
    found: list[Any] = []

    def look(n: Node) -> Node:
        mode = getattr(n.meta.get("val"), "fake_mode", None)
        if mode is not None:
            found.append(mode)
        return n

    torch.fx.map_arg(args, look)
    return found[0] if found else contextlib.nullcontext()
