"""Sinks as a factor on the output, and factors that look like one: rewritten with eager's numbers, or left alone."""
from __future__ import annotations

import torch
from forms_masked import additive, causal
from forms_negative_register import BOTH, registering
from forms_support import Arg, Form
from forms_written import LIST, X, heads, qk

from fa_inductor.reasons import Code

FORMS: dict[str, Form] = {}
form = registering(FORMS)
SINK = Arg("h")
SQUARE = {"h": 6, "q": 6}
"""As many heads as queries: a factor in the wrong order has the right shape."""


def gate(s, sinks):
    return torch.sigmoid(s.logsumexp(-1, keepdim=True) - sinks.view(1, -1, 1, 1))


def scores(q, k):
    return qk(q, k) * 0.3


# -- sinks -----------------------------------------------------------------------------------------------------------

@form(1, X, SINK, modes=BOTH, dtypes=("float32",))
def factor_on_the_output(q, k, v, sinks):
    s = scores(q, k)
    return (s.softmax(-1) @ v) * gate(s, sinks)


@form(1, X, Arg("h", "const"), modes=BOTH)
def factor_of_a_frozen_sink(q, k, v, sinks):
    s = scores(q, k)
    return gate(s, sinks) * (s.softmax(-1) @ v)


@form(1, X, SINK, modes=BOTH)
def factor_without_keepdim(q, k, v, sinks):
    s = scores(q, k)
    return (s.softmax(-1) @ v) * torch.sigmoid(s.logsumexp(-1) - sinks[:, None]).unsqueeze(-1)


@form(1, LIST, SINK, modes=BOTH)
def factor_in_the_layout_of_the_output(q, k, v, sinks):
    q, k, v = heads(q, k, v)
    s = scores(q, k)
    lse = s.logsumexp(-1).transpose(1, 2)  # [B, S, H]
    return ((s.softmax(-1) @ v).transpose(1, 2) * torch.sigmoid(lse - sinks).unsqueeze(-1)).flatten(2)


@form(1, LIST, SINK, modes=BOTH)
def factor_on_causal_attention(q, k, v, sinks):
    q, k, v = heads(q, k, v)
    s = scores(q, k)
    s = s.masked_fill(~causal(s), float("-inf"))
    return (s.softmax(-1) @ v) * gate(s, sinks)


@form(1, X, SINK, Arg("b11k", "hole"), modes=BOTH)
def factor_beside_padding_with_a_finite_fill(q, k, v, sinks, keep):
    s = scores(q, k) + additive(keep, q)
    return (s.softmax(-1) @ v) * gate(s, sinks)


@form(1, X, SINK, modes=BOTH, sizes=SQUARE)
def factor_where_heads_and_queries_are_as_many(q, k, v, sinks):
    s = scores(q, k)
    return (s.softmax(-1) @ v) * gate(s, sinks)


# -- no sinks --------------------------------------------------------------------------------------------------------

@form(Code.EMPTY_ROWS, X, SINK, Arg("b11k", "hole"), modes=BOTH)
def factor_beside_padding_with_infinity(q, k, v, sinks, keep):
    s = scores(q, k).masked_fill(~keep, float("-inf"))
    return (s.softmax(-1) @ v) * gate(s, sinks)


@form(Code.SCORE_USED, X, SINK, modes=BOTH)
def factor_of_the_other_sign(q, k, v, sinks):
    s = scores(q, k)
    return (s.softmax(-1) @ v) * torch.sigmoid(sinks.view(1, -1, 1, 1) - s.logsumexp(-1, keepdim=True))


@form(Code.SCORE_USED, X, SINK, modes=BOTH)
def factor_of_twice_the_difference(q, k, v, sinks):
    s = scores(q, k)
    return (s.softmax(-1) @ v) * torch.sigmoid((s.logsumexp(-1, keepdim=True) - sinks.view(1, -1, 1, 1)) * 2.0)


@form(Code.SCORE_USED, X, SINK, modes=BOTH)
def factor_of_tanh(q, k, v, sinks):
    s = scores(q, k)
    return (s.softmax(-1) @ v) * torch.tanh(s.logsumexp(-1, keepdim=True) - sinks.view(1, -1, 1, 1))


@form(Code.SCORE_USED, X, SINK, modes=BOTH)
def factor_with_alpha(q, k, v, sinks):
    s = scores(q, k)
    return (s.softmax(-1) @ v) * torch.sigmoid(torch.sub(s.logsumexp(-1, keepdim=True), sinks.view(1, -1, 1, 1), alpha=2))


@form(Code.SCORE_USED, X, SINK, modes=BOTH)
def factor_of_unscaled_scores(q, k, v, sinks):
    s = qk(q, k)
    return ((s * 0.3).softmax(-1) @ v) * gate(s, sinks)


@form(Code.SCORE_USED, LIST, SINK, modes=BOTH)
def factor_of_scores_before_the_mask(q, k, v, sinks):
    q, k, v = heads(q, k, v)
    s = scores(q, k)
    return (s.masked_fill(~causal(s), float("-inf")).softmax(-1) @ v) * gate(s, sinks)


@form(Code.SCORE_USED, X, SINK, modes=BOTH, sizes=SQUARE | {"k": 6})
def factor_over_the_queries(q, k, v, sinks):
    s = scores(q, k)
    return (s.softmax(-1) @ v) * torch.sigmoid(s.logsumexp(-2)[..., None] - sinks.view(1, -1, 1, 1))


@form(Code.SCORE_USED, X, SINK, modes=BOTH, sizes=SQUARE)
def factor_with_heads_and_queries_swapped(q, k, v, sinks):
    s = scores(q, k)
    return (s.softmax(-1) @ v) * gate(s, sinks).transpose(1, 2)


@form(Code.SCORE_USED, X, Arg("q"), modes=BOTH, sizes=SQUARE)
def factor_of_each_query(q, k, v, sinks):
    s = scores(q, k)
    return (s.softmax(-1) @ v) * torch.sigmoid(s.logsumexp(-1, keepdim=True) - sinks[:, None])


@form(Code.SCORE_USED, X, SINK, modes=BOTH)
def factor_and_the_output_itself(q, k, v, sinks):
    s = scores(q, k)
    out = s.softmax(-1) @ v
    return out * gate(s, sinks) + out


@form(Code.SCORE_USED, X, SINK, modes=BOTH)
def factor_added(q, k, v, sinks):
    s = scores(q, k)
    return (s.softmax(-1) @ v) + gate(s, sinks)


@form(Code.SCORE_USED, X, SINK, modes=BOTH)
def factor_returned_too(q, k, v, sinks):
    s = scores(q, k)
    g = gate(s, sinks)
    return (s.softmax(-1) @ v) * g, g


@form(Code.SCORE_USED, X, SINK, modes=BOTH)
def log_sum_exp_of_the_batch_reversed(q, k, v, sinks):
    s = scores(q, k)
    return (s.softmax(-1) @ v) * torch.sigmoid(s.logsumexp(-1, keepdim=True).flip(0) - sinks.view(1, -1, 1, 1))


@form(Code.SCORE_USED, X, Arg("1hqe"), modes=BOTH)
def gate_of_every_channel(q, k, v, sinks):
    s = scores(q, k)
    return (s.softmax(-1) @ v) * torch.sigmoid(s.logsumexp(-1, keepdim=True) - sinks)


@form(Code.SCORE_USED, X, SINK, modes=("train",), train=Code.BACKWARD)
def factor_that_is_detached(q, k, v, sinks):
    s = scores(q, k)
    return (s.softmax(-1) @ v) * gate(s, sinks).detach()
