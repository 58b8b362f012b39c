"""What a function does to tensors as an FX graph: the operators of ``make_fx``, at a fraction of its cost.

``make_fx`` carries proxies for sizes, functions and subclasses.  None of these is needed to look operators up in
another graph, and they are most of its time.
"""
from __future__ import annotations

import operator
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode


@lru_cache(maxsize=4096)
def _returns_tensors(func: Any) -> bool:
    return any("Tensor" in str(r.type) for r in func._schema.returns)


class Recorder(TorchDispatchMode):
    """Records every operator that runs inside it, decomposed as Inductor does; ``meta["val"]`` is what it returned.

    Works on real and on fake tensors; for the latter, their mode must be entered first.  A symbolic size, and a tensor
    that no recorded operator returned, is recorded as a constant: an attribute of ``root``.
    """

    def __init__(self) -> None:
        from torch._inductor.decomposition import select_decomp_table

        super().__init__()
        self.graph = Graph()
        self.root = torch.nn.Module()
        self._table = select_decomp_table()
        self._nodes: dict[int, Node] = {}
        self._last: Node | None = None
        self._sizes: dict[str, Node] = {}
        self._kept: list[Tensor] = []
        """Keeps every recorded tensor alive, so that no other one gets its id."""

    def placeholder(self, name: str, value: Any) -> Node:
        """An input; it comes after those before it, and before everything else."""
        with self.graph.inserting_after(self._last) if self._last is not None else nullcontext():
            node = self._last = self.graph.placeholder(name)
        node.meta["val"] = value
        if isinstance(value, Tensor):
            self._put(value, node)
        return node

    def output(self, values: Any) -> None:
        """End the graph with these tensors; ``values`` is a tensor, None, or a tuple or list of such."""
        self.graph.output(self._argument(values))

    def _put(self, value: Tensor, node: Node) -> None:
        self._nodes[id(value)] = node
        self._kept.append(value)

    def _node(self, value: Tensor) -> Node:
        node = self._nodes.get(id(value))
        if node is None:
            node = self._attribute(value)
            self._put(value, node)
        return node

    def _attribute(self, value: Any) -> Node:
        name = f"_constant{len(self._kept)}_{len(self._sizes)}"
        setattr(self.root, name, value)
        node = self.graph.create_node("get_attr", name)
        node.meta["val"] = value
        return node

    def _argument(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            return self._node(a)
        if type(a) in (list, tuple):
            return type(a)(map(self._argument, a))
        if isinstance(a, torch.SymInt):
            key = str(a.node.expr)
            if key not in self._sizes:
                self._sizes[key] = self._attribute(a)
            return self._sizes[key]
        return a

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _returns_tensors(func):  # a question for a fake tensor's device or size; nothing may fail in it
            return func(*args, **kwargs)
        decomposition = self._table.get(func)
        if decomposition is not None:
            with self:
                out = decomposition(*args, **kwargs)
            if out is not NotImplemented:
                return out
        elif func._can_decompose():
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        inputs = tuple(map(self._argument, args)), {k: self._argument(v) for k, v in kwargs.items()}
        out = func(*args, **kwargs)
        node = self.graph.call_function(func, *inputs)
        node.meta["val"] = out
        if isinstance(out, Tensor):
            self._put(out, node)
        elif isinstance(out, (list, tuple)):
            for i, x in enumerate(out):
                if isinstance(x, Tensor):
                    item = self.graph.call_function(operator.getitem, (node, i))
                    item.meta["val"] = x
                    self._put(x, item)
        return out
