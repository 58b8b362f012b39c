"""Which nodes of a graph belong to the forward pass."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch.utils._pytree as pytree
from torch.fx import Graph, Node

from .nodes import CASTS, VIEWS, aten, prims, target


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


def functional_backward(graph: Graph, softmaxes: Sequence[Node], operators: Mapping[Node, Sequence[Node]]) -> set[Node]:
    """The same for a graph without tangents in which ``torch.func.grad`` has written out a derivative, else empty.

    What only serves a second use of some weights, behind the last use of all others: a softmax's derivative multiplies
    them by another tensor and sums over the keys.  Whether it is the derivative of a block is for the search to say.

    Args:
        softmaxes: the weights of each softmax.
        operators: PyTorch's own attention operators, and the calls of their backward operators.
    """
    position = {n: i for i, n in enumerate(graph.nodes)}
    uses = [sorted(_uses(p), key=position.__getitem__) for p in softmaxes]
    again = {u for found in uses if any(map(_is_derivative, found)) for u in found[1:]}
    again |= {call for calls in operators.values() for call in calls}
    if not again:
        return set()
    last = max((position[n] for n in (*operators, *(found[0] for found in uses if found))), default=0)
    later = [n for n in graph.nodes if position[n] > last and n.op == "call_function"]
    reached: set[Node] = set()
    for n in later:
        if n in again or any(i in reached for i in n.all_input_nodes):
            reached.add(n)
    needed = set(reached)
    for n in reversed(later):
        if n in needed:
            needed.update(i for i in n.all_input_nodes if position[i] > last and i.op == "call_function")
    return needed


def _uses(weights: Node) -> Iterable[Node]:
    """What reads the weights, through views, casts and a filling of rows."""
    for u in weights.users:
        if target(u) in VIEWS or target(u) in CASTS or (target(u) is aten.where.self and u.args[0] is not weights):
            yield from _uses(u)
        elif u.op == "call_function":
            yield u


def _is_derivative(n: Node) -> bool:
    """n = w * g of a softmax's derivative ``n - w * sum(n)``, where w are its weights."""
    if target(n) is not aten.mul.Tensor:
        return False
    sums = [u for u in n.users if target(u) is aten.sum.dim_IntList and u.args[0] is n and u.args[2:] == (True,)]
    negative = {w for w in n.all_input_nodes for w in (w, *(u for u in w.users if target(u) is aten.neg.default))}
    return any(target(u) in (prims.fma.default, aten.mul.Tensor) and not negative.isdisjoint(u.all_input_nodes)
               for s in sums for u in s.users)
