"""The kernels that a rewritten graph will ask for, begun while Inductor compiles the rest of it."""
from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

log = logging.getLogger(__name__)


def begin(calls: Sequence[Node]) -> None:
    """Start to compile what these calls of the operator will launch; what is not known now is left to the first call.

    Args:
        calls: nodes of `ops.attention` on CUDA tensors.
    """
    try:
        from .kernels import ahead, api

        if ahead.wanted() and api.available() is None:
            for variant in dict.fromkeys(filter(None, map(_expected, calls))):
                ahead.start(variant)
    except Exception as e:  # it only saves time
        log.debug("nothing compiled ahead: %s", e)


def _expected(call: Node) -> Any:
    from .kernels import api
    from .kernels.record import Attention

    q, k, _, captures, ints, record = call.args[:6]
    device = q.meta["val"].device  # type: ignore[union-attr]
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    tensors = [_like(n) for n in (q, k, *captures)]  # type: ignore[misc]
    numbers = [_hint(n.meta["val"] if isinstance(n, Node) else n) for n in ints]  # type: ignore[union-attr]
    return api.expected(Attention.from_string(record), tensors[0], tensors[1].shape[2], tensors[2:], numbers, sms)  # type: ignore[arg-type]


def _like(node: Node) -> torch.Tensor:
    """A tensor without memory, of the sizes and strides that the graph is compiled with."""
    x = node.meta["val"]
    return torch.empty_strided([_hint(n) for n in x.shape], [_hint(n) for n in x.stride()], dtype=x.dtype, device="meta")


def _hint(n: Any) -> int:
    """
    Raises:
        ValueError: the size depends on data.
    """
    if isinstance(n, int):
        return n
    hint = n.node.hint
    if hint is None:
        raise ValueError(f"{n} is not known")
    return int(hint)
