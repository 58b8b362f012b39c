"""The strides that a graph says its tensors have, put right after a node was replaced by one with other strides."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..recognise.nodes import VIEWS, aten, target
from .emit import Emitter


def refresh(node: Node) -> list[Callable[[], None]]:
    """Correct the strides below ``node`` as far as they differ from before; copy where a view now needs it.

    Pointwise operators and reductions hand strides on, to views further down.  Inductor would make a reshape of such a
    view, but then the graph would be right for Inductor's code generation alone.

    Returns:
        What undoes it, to be run in reverse order.
    """
    journal: list[Callable[[], None]] = []
    pending = set(node.users)
    user = node
    while pending:  # in the graph's order, so that each node is looked at once
        user = user.next
        if user not in pending:
            continue
        pending.discard(user)
        if not _hands_on(user):
            continue
        before = user.meta["val"]
        try:
            new = _run(user)
        except (RuntimeError, ValueError):
            if target(user) not in VIEWS:
                continue
            journal.append(_copy_input(user))
            new = _run(user)
        if not _same(new.stride(), before.stride()):
            user.meta["val"] = new
            journal.append(lambda u=user, v=before: u.meta.update(val=v))
            pending.update(user.users)
    return journal


def _hands_on(node: Node) -> bool:
    op = target(node)
    if op in VIEWS:
        return True
    if not isinstance(op, torch._ops.OpOverload) or not isinstance(node.meta.get("val"), Tensor):
        return False
    tags = op.tags
    return ((torch.Tag.pointwise in tags or torch.Tag.reduction in tags) and not op._schema.is_mutable
            and torch.Tag.nondeterministic_seeded not in tags)


def _copy_input(view: Node) -> Callable[[], None]:
    source = view.args[0]
    copy = Emitter(view.graph, view, view).call(aten.clone.default, source, memory_format=torch.contiguous_format)
    view.replace_input_with(source, copy)  # type: ignore[arg-type]
    return lambda: view.replace_input_with(copy, source)  # type: ignore[arg-type]


def _run(node: Node) -> Tensor:
    args, kwargs = (torch.fx.map_arg(a, lambda n: n.meta["val"]) for a in (node.args, node.kwargs))
    with torch.no_grad(), _mode(node.meta["val"], guards=target(node) in VIEWS):
        return node.target(*args, **kwargs)  # type: ignore[operator]


@contextlib.contextmanager
def _mode(like: Tensor, *, guards: bool) -> Iterator[None]:
    """The fake mode of a value.  Only whether a view is one may take a guard; what else runs here ran before."""
    mode = getattr(like, "fake_mode", None)
    if mode is None:
        yield
        return
    with mode, mode.shape_env.suppress_guards() if mode.shape_env and not guards else contextlib.nullcontext():
        yield


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether strides are equal for all sizes: as expressions, since to compare symbols makes guards."""
    return [getattr(getattr(x, "node", None), "expr", x) for x in a] == [
        getattr(getattr(x, "node", None), "expr", x) for x in b]
