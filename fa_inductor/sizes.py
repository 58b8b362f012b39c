"""Symbolic sizes in a graph, for whoever adds nodes to it."""
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
