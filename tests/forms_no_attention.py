"""More look-alikes: no product of queries and keys, changed or reused weights, scales and masks without a meaning."""
from __future__ import annotations

import torch
from forms_axes import CUBE
from forms_masked import INF, additive
from forms_support import Arg, Form, args
from forms_written import S, X, qk
from torch._inductor.decomposition import bmm
from torch.nn import functional as F

from fa_inductor.reasons import Code

FORMS: dict[str, Form] = {}


def form(expect, spec: str, *more: Arg, **keywords):
    """Registers a function as a form; ``expect`` is what the report must say."""
    def register(fn):
        FORMS[fn.__name__] = Form(fn, args(spec, *more), expect=expect, **keywords)
        return fn
    return register


# -- no scores ---------------------------------------------------------------------------------------------------------

@form(Code.NO_QK, "bhqk bhke")
def a_given_matrix(s, v):
    return s.softmax(-1) @ v


@form(Code.NO_QK, "bhsd bhsd bhde")
def elementwise_scores(q, k, v):
    return (q * k).softmax(-1) @ v


@form(Code.NO_QK, "bhqd bhkd bhke", Arg("d"))
def additive_attention(q, k, v, w):  # Bahdanau
    return ((q[:, :, :, None] + k[:, :, None]).tanh() @ w).softmax(-1) @ v


@form(Code.NO_QK, "bhqd bhkd bhke")
def distances(q, k, v):
    return (-(q[:, :, :, None] - k[:, :, None]).square().sum(-1)).softmax(-1) @ v


@form((Code.NO_QK, Code.NO_QK), "bhsd bhsd bhsd")
def linear_attention(q, k, v):
    return q.softmax(-1) @ (k.softmax(-2).transpose(-2, -1) @ v)


@form(None, "bhsd bhsd bhsd")
def relu_attention(q, k, v):
    s = qk(q, k).relu()
    return (s / (s.sum(-1, keepdim=True) + 1.0)) @ v


@form(None, "bhsd bhsd bhsd")
def sigmoid_attention(q, k, v):
    return (qk(q, k) * 0.3).sigmoid() @ v


@form(None, "bhsd bhsd bhsd")
def no_softmax(q, k, v):
    return (qk(q, k) * 0.3) @ v


@form(None, "bqd kd")
def classifier(x, w):
    return (x @ w.t()).softmax(-1)


@form(None, "bqd dk bkqe")
def mixture_of_experts(x, gate, experts):
    return ((x @ gate).softmax(-1).transpose(1, 2)[..., None] * experts).sum(1)


@form(None, "bqd bkd")
def contrastive(q, k):
    return (q @ k.transpose(1, 2)).log_softmax(-1).diagonal(dim1=1, dim2=2).mean()


# -- between the softmax and the values --------------------------------------------------------------------------------

@form(Code.WEIGHTS_USED, X)
def weights_returned(q, k, v):
    p = (qk(q, k) * 0.3).softmax(-1)
    return p @ v, p


@form(Code.WEIGHTS_USED, X)
def weights_averaged_and_returned(q, k, v):
    p = (qk(q, k) * 0.3).softmax(-1)
    return p @ v, p.mean(1)


@form(Code.WEIGHTS_USED, X)
def weights_in_a_loss(q, k, v):
    p = (qk(q, k) * 0.3).softmax(-1)
    return p @ v, (p * (p + 1e-6).log()).sum()


@form(Code.WEIGHTS_USED, X)
def weights_for_two_values(q, k, v):
    p = (qk(q, k) * 0.3).softmax(-1)
    return p @ v, p @ v.flip(-1)


@form(Code.WEIGHTS_USED, S)
def weights_squared_by_product(q, k, v):
    p = (qk(q, k) * 0.3).softmax(-1)
    return p @ p @ v


@form(Code.WEIGHTS_USED, S)
def weights_times_weights(q, k, v):
    p = (qk(q, k) * 0.3).softmax(-1)
    return p @ p


@form(Code.PROB_OP, X, Arg("b1qk", "keep"))
def weights_multiplied_by_a_mask(q, k, v, m):
    return ((qk(q, k) * 0.3).softmax(-1) * m.to(q.dtype)) @ v


@form(Code.PROB_OP, X, Arg("bhqk", "keep"))
def weights_masked(q, k, v, m):
    return (qk(q, k) * 0.3).softmax(-1).masked_fill(~m, 0.0) @ v


@form(Code.PROB_OP, X, Arg("b1qk", "keep"))
def masked_before_and_after(q, k, v, keep):  # cpmant
    s = (qk(q, k) * 0.3).masked_fill(~keep, INF)
    return s.softmax(-1).masked_fill(~keep, 0.0) @ v


@form(Code.PROB_OP, X, Arg("1h11", "const"))
def weights_times_head_mask(q, k, v, m):
    return ((qk(q, k) * 0.3).softmax(-1) * m) @ v


@form(Code.PROB_OP, X)
def weights_scaled(q, k, v):
    return ((qk(q, k) * 0.3).softmax(-1) * 2.0) @ v


@form(Code.PROB_OP, X)
def weights_plus_constant(q, k, v):
    return ((qk(q, k) * 0.3).softmax(-1) + 0.1) @ v


@form(Code.PROB_OP, X)
def weights_to_a_power(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1).square() @ v


@form(Code.PROB_OP, X)
def weights_renormalised(q, k, v):
    p = (qk(q, k) * 0.3).softmax(-1)
    return (p / (p.sum(-1, keepdim=True) + 0.1)) @ v


@form((Code.PROB_OP, Code.PROB_OP), X)
def differential_attention(q, k, v):
    return ((qk(q, k) * 0.3).softmax(-1) - 0.4 * qk(q.flip(1), k).softmax(-1)) @ v


@form(Code.PROB_OP, "bhqd bhkd bke")
def weights_averaged_over_heads(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1).mean(1) @ v


@form(Code.PROB_OP, X, Arg("hh"))
def talking_heads_after(q, k, v, w):
    return torch.einsum("bhqk,hg->bgqk", (qk(q, k) * 0.3).softmax(-1), w) @ v


@form(Code.PROB_OP, X)
def weights_sliced(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1)[..., 2:] @ v[..., 2:, :]


@form(Code.PROB_OP, X)
def weights_rolled(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1).roll(1, -1) @ v


@form(Code.PROB_OP, X)
def weights_reversed(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1).flip(-1) @ v


@form(Code.PROB_OP, X)
def weights_normalised(q, k, v):
    return F.normalize((qk(q, k) * 0.3).softmax(-1), dim=-1) @ v


@form(Code.PROB_OP, X)
def straight_through(q, k, v):
    p = (qk(q, k) * 0.3).softmax(-1)
    hard = (p == p.amax(-1, keepdim=True)).to(p.dtype)
    return (hard - p.detach() + p) @ v


@form(Code.SCORE_OP, "bhqd bhkd bhke")
def two_blocks_joined(q, k, v):  # luke, longformer: the scores of two products side by side
    s = torch.cat([qk(q, k), qk(q, k.flip(-1))], -1)
    return s.softmax(-1) @ torch.cat([v, v.flip(-1)], -2)


# -- scores used elsewhere ---------------------------------------------------------------------------------------------

@form(Code.SCORE_USED, X)
def scores_returned(q, k, v):
    s = qk(q, k) * 0.3
    return s.softmax(-1) @ v, s


@form(Code.SCORE_USED, X)
def product_returned(q, k, v):
    s = qk(q, k)
    return (s * 0.3).softmax(-1) @ v, s


@form(Code.SCORE_USED, X)
def logsumexp_returned(q, k, v):
    s = qk(q, k) * 0.3
    return s.softmax(-1) @ v, s.logsumexp(-1)


@form(Code.SCORE_USED, X)
def scores_in_a_loss(q, k, v):
    s = qk(q, k) * 0.3
    return s.softmax(-1) @ v, s.square().mean()


@form((Code.SCORE_USED, Code.SCORE_USED), S)
def both_directions(q, k, v):  # grounding dino: one product, softmax over both of its dims
    s = qk(q, k) * 0.3
    return s.softmax(-1) @ v, s.softmax(-2).transpose(-2, -1) @ v


# -- scales and fills without a meaning --------------------------------------------------------------------------------

@form(Code.SCALE, X)
def scale_inf(q, k, v):
    return (qk(q, k) * float("inf")).softmax(-1) @ v


@form(Code.SCALE, X, train=Code.BACKWARD)
def scale_nan(q, k, v):
    return (qk(q, k) * float("nan")).softmax(-1) @ v


@form(Code.SCALE, X)
def divided_by_zero(q, k, v):
    return (qk(q, k) / 0.0).softmax(-1) @ v


@form(1, X)
def scale_learned(q, k, v):
    return (qk(q, k) * v.mean()).softmax(-1) @ v


@form(1, X, Arg("hqk"))
def bias_learned(q, k, v, bias):
    return (qk(q, k) * 0.3 + bias).softmax(-1) @ v


@form(Code.MASK_FILL, X, Arg("qk", "keep"))
def mask_before_a_negative_scale(q, k, v, keep):
    return (qk(q, k).masked_fill(~keep, INF) * -0.3).softmax(-1) @ v


@form(Code.MASK_FILL, X, Arg("qk", "keep"))
def mask_before_a_zero_scale(q, k, v, keep):
    return (qk(q, k).masked_fill(~keep, INF) * 0.0).softmax(-1) @ v


@form(Code.MASK_FILL, X, Arg("qk", "keep"))
def mask_before_a_tiny_scale(q, k, v, keep):
    return (qk(q, k).masked_fill(~keep, -1e9) * 1e-9).softmax(-1) @ v


@form(Code.MASK_FILL, X, Arg("qk", "keep"))
def fill_plus_inf(q, k, v, keep):
    return (qk(q, k) * 0.3).masked_fill(~keep, -INF).softmax(-1) @ v


@form(Code.MASK_FILL, X, Arg("qk", "keep"), train=Code.BACKWARD)
def fill_nan(q, k, v, keep):
    return (qk(q, k) * 0.3).masked_fill(~keep, float("nan")).softmax(-1) @ v


@form(1, X, Arg("qk", "keep"))
def fill_large_positive(q, k, v, keep):
    return (qk(q, k) * 0.3).masked_fill(~keep, 1e9).softmax(-1) @ v


@form(Code.MASK_FILL, X)
def inf_added(q, k, v):
    return (qk(q, k) + INF).softmax(-1) @ v


@form(Code.SCORE_OP, X, Arg("qk", "keep"))
def softcap_after_the_mask(q, k, v, keep):
    return (torch.tanh((qk(q, k) + additive(keep, q)) / 5.0) * 5.0).softmax(-1) @ v


@form(Code.SCORE_OP, X, Arg("qk", "keep"))
def masked_scores_negated(q, k, v, keep):
    return (-(qk(q, k).masked_fill(~keep, INF))).softmax(-1) @ v


@form(Code.SCORE_OP, X, Arg("qk", "keep"), Arg("qk", "const"))
def where_between_scores_and_a_tensor(q, k, v, keep, other):
    return torch.where(keep, qk(q, k), other).softmax(-1) @ v


# -- types -------------------------------------------------------------------------------------------------------------

@form(Code.INTEGER, X, modes=("infer",))
def integer_scores(q, k, v):
    return (q.long() @ k.long().transpose(-2, -1)).to(v.dtype).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def complex_scores(q, k, v):
    s = torch.complex(q, q) @ torch.complex(k, -k).transpose(-2, -1)
    return (s.real * 0.1).softmax(-1) @ v


@form(Code.DTYPE_MIX, X)
def values_in_half_precision(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1).bfloat16() @ v.bfloat16()


@form(Code.SIZE, X, sizes={"q": 0}, outliers=False, modes=("infer",))
def no_queries(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1) @ v


@form(Code.SIZE, X, sizes={"b": 0}, outliers=False, modes=("infer",))
def no_batch(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1) @ v


@form(Code.SIZE, X, sizes={"k": 0}, outliers=False, modes=("infer",))
def no_keys(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1) @ v


OUTER = bmm(torch.ones(1, 2, 1), torch.ones(1, 1, 2)) is not NotImplemented
"""Inductor turns an outer product into a pointwise one, in 2.13 and not in 2.11."""


@form(Code.NO_QK if OUTER else 1, X, sizes={"d": 1, "e": 1})
def head_dims_of_one(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1) @ v


@form(1, S, sizes={**CUBE, "b": 1, "h": 1})
def one_batch_one_head(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1) @ v
