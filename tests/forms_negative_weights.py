"""Probabilities that are changed, mixed or thinned out on their way to the values."""
from __future__ import annotations

import torch
from forms_masked import INF
from forms_negative_register import BOTH, registering
from forms_support import Arg, Form
from forms_written import S, X, qk
from torch.nn import functional as F

from fa_inductor.reasons import Code

FORMS: dict[str, Form] = {}
form = registering(FORMS)


def weights(q, k):
    """The probabilities of most forms."""
    return (qk(q, k) * 0.3).softmax(-1)


# -- changed one by one ------------------------------------------------------------------------------------------------

@form(Code.PROB_OP, X)
def weights_below_a_threshold_dropped(q, k, v):
    return F.threshold(weights(q, k), 0.05, 0.0) @ v


@form(Code.PROB_OP, X, modes=BOTH)
def weights_below_a_threshold_renormalised(q, k, v):
    p = weights(q, k)
    p = torch.where(p > 0.05, p, 0.0)
    return (p / (p.sum(-1, keepdim=True) + 1e-6)) @ v


@form(Code.PROB_OP, X)
def weights_sharpened(q, k, v):  # power normalisation
    p = weights(q, k).square()
    return (p / p.sum(-1, keepdim=True)) @ v


@form(Code.PROB_OP, X)
def weights_sharpened_by_their_logarithm(q, k, v):  # temperature after the softmax
    return ((weights(q, k) + 1e-9).log() * 2.0).exp() @ v


@form(None, X)
def weights_as_logarithms(q, k, v):
    return (qk(q, k) * 0.3).log_softmax(-1) @ v


@form(Code.PROB_OP, X)
def weights_clamped(q, k, v):
    return weights(q, k).clamp(0.02, 0.5) @ v


@form(Code.PROB_OP, X)
def weights_clipped_from_below(q, k, v):
    return weights(q, k).clamp(min=1e-3) @ v


@form(Code.PROB_OP, X)
def clipped_softmax(q, k, v):  # stretched to beyond [0, 1] and clipped
    return (weights(q, k) * 1.06 - 0.03).clamp(0.0, 1.0) @ v


@form(Code.PROB_OP, X)
def label_smoothed_weights(q, k, v):
    return (weights(q, k) * 0.9 + 0.1 / k.size(-2)) @ v


@form(Code.PROB_OP, X)
def one_minus_the_weights(q, k, v):
    return (1.0 - weights(q, k)) @ v


@form(Code.PROB_OP, X)
def weights_negated(q, k, v):
    return (-weights(q, k)) @ v


@form(Code.PROB_OP, X)
def weights_through_a_relu(q, k, v):
    return F.relu(weights(q, k) - 0.05) @ v


@form(Code.PROB_OP, X)
def weights_through_a_tanh(q, k, v):
    return weights(q, k).tanh() @ v


@form(Code.PROB_OP, X)
def weights_rounded(q, k, v):
    return (weights(q, k) * 8).round() @ v


@form(Code.PROB_OP, X)
def weights_quantised(q, k, v):
    return (torch.clamp((weights(q, k) * 255).round(), 0, 255) / 255) @ v


@form(Code.PROB_OP, X, Arg("bhqk", "const"))
def residual_added_to_the_weights(q, k, v, old):
    return (weights(q, k) + old) @ v


@form(Code.PROB_OP, S)
def identity_added_to_the_weights(q, k, v):
    return (weights(q, k) + torch.eye(q.size(-2))) @ v


@form(Code.PROB_OP, X, Arg("hqk"), modes=BOTH)
def learned_positions_added_to_the_weights(q, k, v, bias):
    return (weights(q, k) + bias) @ v


@form(Code.PROB_OP, X, Arg("b1q1", "const"))
def weights_times_a_gate_of_the_query(q, k, v, gate):  # could stand behind the values
    return (weights(q, k) * gate.sigmoid()) @ v


@form(Code.PROB_OP, X, Arg("b11k", "const"))
def weights_times_a_gate_of_the_key(q, k, v, gate):  # could stand before the values
    return (weights(q, k) * gate.sigmoid()) @ v


@form(Code.PROB_OP, X, Arg("1h11"), modes=BOTH)
def weights_times_a_learned_gate_of_the_head(q, k, v, gate):
    return (weights(q, k) * gate) @ v


@form(Code.PROB_OP, X)
def weights_divided_by_a_constant(q, k, v):
    return (weights(q, k) / 0.7) @ v


@form(Code.PROB_OP, X)
def weights_over_the_root_of_their_number(q, k, v):
    return (weights(q, k) * k.size(-2) ** 0.5) @ v


@form(Code.PROB_OP, X)
def nan_to_zero(q, k, v):
    return torch.nan_to_num(weights(q, k)) @ v


@form(Code.PROB_OP, X, Arg("bk", "hole"), modes=BOTH)
def nan_to_zero_in_empty_rows(q, k, v, keep):
    p = (qk(q, k) * 0.3).masked_fill(~keep[:, None, None], INF).softmax(-1)
    return torch.nan_to_num(p, 0.0) @ v


@form(Code.PROB_OP, X, Arg("bk", "hole"), modes=BOTH)
def where_not_a_number(q, k, v, keep):
    p = (qk(q, k) * 0.3).masked_fill(~keep[:, None, None], INF).softmax(-1)
    return torch.where(p.isnan(), 0.0, p) @ v


@form(Code.PROB_OP, X, Arg("bk", "hole"))
def filled_where_not_a_number(q, k, v, keep):
    p = (qk(q, k) * 0.3).masked_fill(~keep[:, None, None], INF).softmax(-1)
    return p.masked_fill(p.isnan(), 1.0 / 14) @ v


# -- changed row by row, or mixed --------------------------------------------------------------------------------------

@form(Code.PROB_OP, X, Arg("b1qk", "keep"), modes=BOTH)
def masked_after_and_renormalised(q, k, v, keep):  # MaskNet: a mask in truth
    p = weights(q, k) * keep.to(q.dtype)
    return (p / (p.sum(-1, keepdim=True) + 1e-9)) @ v


@form(Code.PROB_OP, S)
def causal_after_the_softmax(q, k, v):
    return weights(q, k).tril() @ v


@form(Code.PROB_OP, X, modes=BOTH)
def normalised_again_over_the_queries(q, k, v):  # slot attention, Sinkhorn
    p = weights(q, k)
    return (p / p.sum(-2, keepdim=True)) @ v


@form(Code.PROB_OP, X, modes=BOTH)
def slot_attention(q, k, v):
    p = (qk(q, k) * 0.3).softmax(-2) + 1e-6
    return (p / p.sum(-1, keepdim=True)) @ v


@form(Code.PROB_OP, X)
def weights_over_their_largest(q, k, v):
    p = weights(q, k)
    return (p / p.amax(-1, keepdim=True)) @ v


@form(Code.PROB_OP, X)
def weights_over_their_length(q, k, v):
    p = weights(q, k)
    return (p / p.norm(dim=-1, keepdim=True)) @ v


@form(Code.PROB_OP, X)
def weights_layer_normed(q, k, v):  # deepvit and ReAttention normalise the weights
    return F.layer_norm(weights(q, k), (14,)) @ v


@form(Code.PROB_OP, X)
def weights_group_normed(q, k, v):
    return F.instance_norm(weights(q, k)) @ v


@form(Code.PROB_OP, X, Arg("hh33"), sizes={"3": 3})
def weights_convolved(q, k, v, w):
    return F.conv2d(weights(q, k), w, padding=1) @ v


@form(Code.PROB_OP, X)
def weights_smoothed(q, k, v):
    return F.avg_pool2d(weights(q, k), (1, 3), 1, (0, 1)) @ v


@form(Code.PROB_OP, X)
def weights_accumulated(q, k, v):
    return weights(q, k).cumsum(-1) @ v


@form(Code.PROB_OP, X)
def weights_accumulated_over_queries(q, k, v):  # coverage
    return weights(q, k).cumsum(-2) @ v


@form(Code.PROB_OP, X)
def weights_multiplied_up(q, k, v):  # monotonic attention
    p = weights(q, k)
    return (p * (1 - p).cumprod(-1)) @ v


@form(Code.PROB_OP, X)
def weights_sorted(q, k, v):
    return weights(q, k).sort(-1, descending=True).values @ v


@form(Code.PROB_OP, X)
def largest_weights_kept(q, k, v):
    p = weights(q, k)
    return (p * (p >= p.topk(3, -1).values[..., -1:])) @ v


@form(Code.PROB_OP, X)
def largest_weights_scattered(q, k, v):
    p = weights(q, k)
    top = p.topk(3, -1)
    return torch.zeros_like(p).scatter(-1, top.indices, top.values) @ v


@form(Code.PROB_OP, X, modes=("infer",))
def one_hot_of_the_largest(q, k, v):
    p = weights(q, k)
    return F.one_hot(p.argmax(-1), 14).to(p.dtype) @ v


@form(Code.PROB_OP, X, modes=BOTH)
def straight_through_rounding(q, k, v):
    p = weights(q, k)
    return (p + (p.round() - p).detach()) @ v


@form(Code.PROB_OP, X)
def weights_mixed_with_a_uniform(q, k, v):
    p = weights(q, k)
    return torch.lerp(p, torch.full_like(p, 1 / 14), 0.2) @ v


@form((Code.PROB_OP, Code.PROB_OP), X, Arg("h", "const"), modes=BOTH)
def gated_positions(q, k, v, gate):  # convit: a mixture of two softmaxes
    g = gate.sigmoid().view(1, -1, 1, 1)
    return ((1 - g) * weights(q, k) + g * weights(q.flip(-1), k)) @ v


@form((Code.PROB_OP, Code.PROB_OP), X)
def product_of_two_softmaxes(q, k, v):
    return (weights(q, k) * weights(q.flip(-1), k)) @ v


@form((Code.PROB_OP, Code.PROB_OP), X)
def larger_of_two_softmaxes(q, k, v):
    return torch.maximum(weights(q, k), weights(q.flip(-1), k)) @ v


@form(Code.PROB_OP, X, Arg("hh"), modes=BOTH)
def talking_heads_after_by_linear(q, k, v, w):  # cait
    return F.linear(weights(q, k).permute(0, 2, 3, 1), w).permute(0, 3, 1, 2) @ v


@form(Code.PROB_OP, "bhqd bhkd bhke")
def weights_of_the_largest_head(q, k, v):
    return weights(q, k).amax(1, keepdim=True) @ v


@form(Code.PROB_OP, X)
def weights_of_the_other_heads(q, k, v):
    return weights(q, k).roll(1, 1) @ v


@form(Code.PROB_OP, X)
def weights_of_the_other_queries(q, k, v):
    return weights(q, k).flip(-2) @ v


@form(Code.PROB_OP, X)
def weights_of_the_first_keys(q, k, v):
    return weights(q, k)[..., :10] @ v[..., :10, :]


@form(Code.PROB_OP, X)
def weights_of_the_last_query(q, k, v):  # the slice could stand before the softmax
    return weights(q, k)[..., -1:, :] @ v


@form(Code.PROB_OP, X)
def weights_of_the_first_head(q, k, v):
    return weights(q, k)[:, :1] @ v


@form(Code.PROB_OP, X)
def weights_padded_with_zeros(q, k, v):
    return F.pad(weights(q, k), (0, 2)) @ F.pad(v, (0, 0, 0, 2))


@form(Code.PROB_OP, X)
def every_other_weight(q, k, v):
    return weights(q, k)[..., ::2] @ v[..., ::2, :]


@form(Code.PROB_OP, S)
def diagonal_taken_out_of_the_weights(q, k, v):
    p = weights(q, k)
    return (p - torch.diag_embed(p.diagonal(dim1=-2, dim2=-1))) @ v


@form(Code.PROB_OP, X)
def first_weight_zeroed_in_place(q, k, v):
    p = weights(q, k)
    p[..., 0] = 0.0
    return p @ v


# -- what is no softmax, but nearly ------------------------------------------------------------------------------------

def exponentials(q, k):
    scores = qk(q, k) * 0.3
    return (scores - scores.amax(-1, keepdim=True)).exp()


@form(Code.NOT_ATTENTION, X, modes=BOTH)
def divided_by_the_sum_behind_the_product(q, k, v):
    e = exponentials(q, k)
    return (e @ v) / e.sum(-1, keepdim=True)


@form(Code.NOT_ATTENTION, X)
def divided_by_the_sum_of_other_exponentials(q, k, v):
    e = exponentials(q, k)
    return (e / torch.maximum(e.sum(-1, keepdim=True), e.amax(-1, keepdim=True) * 3)) @ v
