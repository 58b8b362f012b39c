"""Symbolic sizes in a graph, for whoever changes it."""
from __future__ import annotations

from typing import Any

import torch
from torch import fx


def size_node(graph: fx.Graph, size: Any, before: fx.Node) -> fx.Node | None:
    """The first integer node before another one that holds this symbolic size."""
    for node in graph.nodes:
        if node is before:
            break
        val = node.meta.get("val")
        if isinstance(val, torch.SymInt) and val.node.expr == size:
            return node
    return None


def read_sizes_once(graph: fx.Graph) -> None:
    """Take each size from the first integer that holds it, and not from a later tensor.

    A backward may read the size of a matrix of scores, which would then stay in use for this alone.
    """
    first: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, torch.SymInt):
            earlier = first.setdefault(val.node.expr, node)
            if earlier is not node and node.target is torch.ops.aten.sym_size.int:
                node.replace_all_uses_with(earlier)
