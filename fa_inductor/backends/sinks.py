"""A learned logit per head that takes part in the softmax but has no value row, put around any flash-style kernel.

With lse of the keys alone, ``lse' = log(exp(lse) + exp(sink))`` and ``out' = out exp(lse - lse')``.  A flash backward
that is fed with out' and lse' computes p = exp(s - lse') and delta = dO . out', which is the gradient with the sink;
the sink's own is ``-sum_{b,q} exp(sink - lse') delta``.
"""
from __future__ import annotations

import torch
from torch import Tensor

from fa_inductor.kernels.record import Attention


def apply_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """(out', lse') from out [B, Hq, Sq, Dv], lse [B, Hq, Sq] and sink [Hq]."""
    with_sink = torch.logaddexp(lse, sink.to(lse.dtype).view(1, -1, 1).expand_as(lse))
    # an infinite lse (a row without keys) would give inf - inf
    weight = torch.where(lse == with_sink, 1.0, torch.exp(lse - with_sink))
    return (out * weight.unsqueeze(-1)).to(out.dtype), with_sink


def sink_gradient(record: Attention, dout: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Gradient of the sink, in its shape and dtype, from the operator's out and lse (both with the sink)."""
    assert record.sink is not None
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    weight = torch.exp(sink.to(lse.dtype).view(1, -1, 1) - lse)
    return -(weight * delta).sum((0, 2)).view(sink.shape).to(sink.dtype)
