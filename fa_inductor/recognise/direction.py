"""Which nodes of a joint graph belong to the forward pass."""
from __future__ import annotations

import torch.utils._pytree as pytree
from torch.fx import Graph, Node


def backward_nodes(graph: Graph) -> set[Node]:
    """Nodes that only gradients need; empty for an inference graph.

    A joint graph takes tangents as inputs.  An output that no tangent reaches is a forward output; whatever no
    forward output needs is backward, also a node that reads forward values only.
    """
    tangents = {n for n in graph.nodes if n.op == "placeholder" and n.name.startswith("tangents")}
    if not tangents:
        return set()
    reached = set(tangents)
    for n in graph.nodes:
        if n.op != "output" and any(i in reached for i in n.all_input_nodes):
            reached.add(n)
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    needed: set[Node] = set()
    todo = [a for a in pytree.tree_leaves(output.args) if isinstance(a, Node) and a not in reached]
    while todo:
        n = todo.pop()
        if n not in needed:
            needed.add(n)
            todo.extend(n.all_input_nodes)
    return {n for n in graph.nodes if n.op != "output" and n.op != "placeholder" and n not in needed} | tangents
