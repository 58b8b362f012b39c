"""Scores that are changed by more than a pointwise operation, that read themselves, or that something else reads."""
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


def half(q, k):
    """The scores of most forms."""
    return qk(q, k) * 0.3


# -- one score depends on others ---------------------------------------------------------------------------------------

@form(Code.SCORE_OP, X)
def scores_smoothed_along_the_keys(q, k, v):
    s = half(q, k)
    return F.avg_pool2d(s, (1, 3), 1, (0, 1)).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_of_the_largest_neighbour(q, k, v):
    return F.max_pool2d(half(q, k), (1, 3), 1, (0, 1)).softmax(-1) @ v


@form(Code.SCORE_OP, X, Arg("hh33"), sizes={"3": 3})
def scores_convolved_with_heads(q, k, v, w):  # evolving attention, multi-token attention
    return F.conv2d(half(q, k), w, padding=1).softmax(-1) @ v


@form(Code.SCORE_OP, X, Arg("h133"), sizes={"3": 3})
def scores_convolved_head_by_head(q, k, v, w):
    return F.conv2d(half(q, k), w, padding=1, groups=4).softmax(-1) @ v


@form(1, X, Arg("kk"), modes=BOTH)
def scores_mixed_by_a_matrix_of_keys(q, k, v, w):  # attention of S with W for keys
    return (half(q, k) @ w).softmax(-1) @ v


@form(Code.SCORE_OP, X, Arg("hh"))
def talking_heads_by_linear(q, k, v, w):  # cait
    return F.linear(half(q, k).permute(0, 2, 3, 1), w).permute(0, 3, 1, 2).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_averaged_over_heads(q, k, v):
    return half(q, k).mean(1, keepdim=True).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_of_the_largest_head(q, k, v):
    return half(q, k).amax(1, keepdim=True).softmax(-1) @ v


@form(Code.SCORE_OP, "bhqd bhkd bke")
def scores_summed_over_heads(q, k, v):
    return half(q, k).sum(1).softmax(-1) @ v


@form(Code.SCORE_OP, S)
def scores_made_symmetric(q, k, v):
    s = half(q, k)
    return (s + s.mT).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_of_the_previous_query(q, k, v):  # shifted by one row
    return F.pad(half(q, k), (0, 0, 1, 0))[:, :, :-1].softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_differenced(q, k, v):
    s = F.pad(half(q, k), (1, 0))
    return (s[..., 1:] - s[..., :-1]).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_accumulated_over_queries(q, k, v):
    return half(q, k).cumsum(-2).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_accumulated_by_logsumexp(q, k, v):
    return half(q, k).logcumsumexp(-1).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def selective_attention(q, k, v):  # what earlier queries selected is masked more
    s = half(q, k)
    return (s - s.relu().cumsum(-2)).softmax(-1) @ v


@form(Code.SCORE_OP, S)
def stick_breaking(q, k, v):
    s = half(q, k)
    later = F.logsigmoid(-s).flip(-1).cumsum(-1).flip(-1)
    return (F.logsigmoid(s) + later).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_layer_normed(q, k, v):
    s = half(q, k)
    return F.layer_norm(s, s.shape[-1:]).softmax(-1) @ v


@form(Code.SCORE_USED, X)
def scores_scaled_to_unit_rows(q, k, v):
    return F.normalize(qk(q, k), dim=-1).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_divided_by_their_largest(q, k, v):
    s = qk(q, k)
    return (s / (s.abs().amax(-1, keepdim=True) + 1.0)).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_divided_by_their_deviation(q, k, v):
    s = qk(q, k)
    return ((s - s.mean(-1, keepdim=True)) / (s.std(-1, keepdim=True) + 1e-3)).softmax(-1) @ v


@form(Code.SCORE_USED, X, modes=BOTH)
def adaptive_temperature(q, k, v):  # the entropy of a first softmax sets the scale of the second
    s = half(q, k)
    entropy = -(s.log_softmax(-1) * s.softmax(-1)).sum(-1, keepdim=True)
    return (s * entropy.detach().clamp(1.0)).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def minimum_over_keys_subtracted(q, k, v):
    s = qk(q, k)
    return (s - s.amin(-1, keepdim=True)).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def maximum_of_everything_subtracted(q, k, v):  # a constant, in truth
    s = half(q, k)
    return (s - s.max()).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def maximum_over_heads_subtracted(q, k, v):
    s = half(q, k)
    return (s - s.amax(1, keepdim=True)).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def maximum_added(q, k, v):
    s = half(q, k)
    return (s + s.amax(-1, keepdim=True) * k.sum(-1)[:, :, None]).softmax(-1) @ v


@form(1, X, modes=BOTH)
def masked_at_random(q, k, v):  # a mask of the random numbers of this call, here with a probability of zero
    return torch.where(torch.rand_like(qk(q, k)) < 2.0, half(q, k), -1e9).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_gathered(q, k, v):  # the keys sorted by the score of the first query
    s = half(q, k)
    order = s[:, :, :1].argsort(-1).expand_as(s)
    return s.gather(-1, order).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_of_chosen_keys(q, k, v):
    return half(q, k).index_select(-1, torch.tensor([0, 2, 4])).softmax(-1) @ v[:, :, :6:2]


@form(Code.SCORE_OP, X)
def scores_interpolated(q, k, v):
    s = half(q, k)
    return F.interpolate(s, size=(s.size(-2), 2 * s.size(-1))).softmax(-1) @ v.repeat_interleave(2, -2)


@form(1, S, sizes={"s": 12}, modes=BOTH)
def scores_shuffled_in_blocks(q, k, v):  # the keys in another order than the values, by views alone
    s = half(q, k)
    return s.unflatten(-1, (3, 4)).transpose(-1, -2).flatten(-2).softmax(-1) @ v


@form(1, S, modes=BOTH)
def lower_triangle_of_the_scores(q, k, v):  # tril leaves zeros, which the softmax still sees
    return half(q, k).tril().softmax(-1) @ v


@form(Code.SCORE_OP, S)
def scores_with_a_zero_diagonal(q, k, v):
    return half(q, k).diagonal_scatter(torch.zeros(3, 4, 10, dtype=q.dtype), 0, -2, -1).softmax(-1) @ v


@form(Code.SCORE_OP, S)
def scores_with_the_diagonal_filled_in_place(q, k, v):
    s = half(q, k)
    s.diagonal(dim1=-2, dim2=-1).fill_(INF)
    return s.softmax(-1) @ v


@form(Code.SCORE_OP, X)
def first_key_zeroed_in_place(q, k, v):
    s = half(q, k)
    s[..., 0] = 0.0
    return s.softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_written_into_a_larger_tensor(q, k, v):
    s = torch.full((*q.shape[:3], 16), -1.0, dtype=q.dtype)
    s[..., :14] = half(q, k)
    return s.softmax(-1)[..., :14] @ v


# -- pointwise operations that a score program has no name for ---------------------------------------------------------

@form(Code.SCORE_OP, X)
def scores_cubed(q, k, v):
    return (qk(q, k) * 0.3).pow(3.0).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_floored(q, k, v):
    return qk(q, k).floor().softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_of_their_sign(q, k, v):
    return qk(q, k).sign().softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_modulo_one(q, k, v):
    return torch.remainder(qk(q, k), 1.0).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_as_arctangent(q, k, v):
    return qk(q, k).atan().softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_as_logarithm(q, k, v):
    return (qk(q, k).abs() + 1.0).log().softmax(-1) @ v


@form((1, Code.NO_QK), "bqd bkd bkc bce", modes=BOTH)
def scores_from_weights_times_a_matrix(q, k, m, v):  # the product PV of one block is QK^T of the next
    return (half(q, k).softmax(-1) @ m).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_as_gelu(q, k, v):
    return F.gelu(qk(q, k)).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_as_silu(q, k, v):
    return F.silu(qk(q, k)).softmax(-1) @ v


@form(Code.SCORE_OP, X, modes=BOTH)
def scores_gated_by_themselves(q, k, v):
    s = half(q, k)
    return (s * s.sigmoid()).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def hard_shrunk_scores(q, k, v):
    return F.hardshrink(qk(q, k), 0.5).softmax(-1) @ v


@form(Code.SCORE_OP, X, modes=BOTH)
def one_side_clamped_by_the_other(q, k, v):
    s = half(q, k)
    return torch.minimum(s, s.detach() * 0.5 + 1.0).softmax(-1) @ v


@form(1, X, modes=BOTH)
def scores_divided_into_a_constant(q, k, v):
    return (1.0 / (qk(q, k).abs() + 1.0)).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def constant_to_the_scores(q, k, v):
    return torch.pow(1.5, half(q, k)).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_divided_with_floor(q, k, v):
    return torch.div(qk(q, k), 0.7, rounding_mode="floor").softmax(-1) @ v


@form(Code.SCORE_OP, X, train=Code.BACKWARD, modes=BOTH)
def maximum_with_a_tensor(q, k, v):
    return torch.maximum(half(q, k), k[..., 0][:, :, None]).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def mantissas_of_the_scores(q, k, v):
    return (torch.frexp(qk(q, k)).mantissa).softmax(-1) @ v


@form(1, X, modes=BOTH)
def scores_with_noise(q, k, v):
    return (half(q, k) + 0.0 * torch.randn_like(qk(q, k))).softmax(-1) @ v


# -- other products meet the scores ------------------------------------------------------------------------------------

@form(Code.SCORE_OP, X, modes=BOTH)
def content_and_position_products(q, k, v):  # transformer-xl without its shift
    return (half(q + 0.1, k) + half(q - 0.1, k.flip(-2))).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def larger_of_two_products(q, k, v):
    return torch.maximum(half(q, k), half(q.flip(-1), k)).softmax(-1) @ v


@form(Code.SCORE_OP, X, Arg("qk", "bool"))
def one_product_or_the_other(q, k, v, m):
    return torch.where(m, half(q, k), half(q.flip(-1), k)).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def product_over_a_product(q, k, v):
    return (qk(q, k) / (1.0 + half(q.abs(), k.abs()))).softmax(-1) @ v


@form(Code.SCORE_OP, "bhqd bhkd bhke")
def scores_of_every_pair_of_halves(q, k, v):  # two head dims of four, the larger product of each
    s = torch.stack([qk(q[..., :4], k[..., :4]), qk(q[..., 4:], k[..., 4:])])
    return s.amax(0).softmax(-1) @ v


@form(Code.SCORE_OP, "bhqd bhkd bhke")
def late_interaction(q, k, v):  # the best of several sub-queries
    s = torch.einsum("bhqcd,bhkd->bhcqk", q.unflatten(-1, (1, 8)).expand(-1, -1, -1, 2, -1) * 0.3, k)
    return s.amax(2).softmax(-1) @ v


@form((Code.SCORE_USED, Code.SCORE_OP), X)
def scores_of_the_previous_layer_added(q, k, v):  # RealFormer: the first block's scores live on
    s = half(q, k)
    o = s.softmax(-1) @ v
    return o, (s + half(o[..., :8], k)).softmax(-1) @ v


# -- nearly exp(S - logsumexp(S)) --------------------------------------------------------------------------------------

@form(Code.SOFTMAX_DIM, S)
def logsumexp_over_queries(q, k, v):
    s = half(q, k)
    return (s - s.logsumexp(-2, keepdim=True)).exp() @ v


@form(None, S, modes=BOTH)
def logsumexp_of_another_row(q, k, v):  # there are as many queries as keys: the shapes fit
    s = half(q, k)
    return (s - s.logsumexp(-1)[..., None, :]).exp() @ v


@form(None, S, modes=BOTH)
def logsumexp_before_the_mask(q, k, v):
    s = half(q, k)
    return (s.masked_fill(torch.ones(10, 10).tril() == 0, INF) - s.logsumexp(-1, keepdim=True)).exp() @ v


@form(None, X)
def logsumexp_of_other_scores(q, k, v):
    s = half(q, k)
    return (s - (2 * s).logsumexp(-1, keepdim=True)).exp() @ v


@form(None, X)
def logsumexp_of_rows_and_columns(q, k, v):
    s = half(q, k)
    return (s - s.logsumexp((-2, -1), keepdim=True)).exp() @ v


@form(1, X, train=Code.BACKWARD, modes=BOTH)
def logsumexp_detached(q, k, v):  # its gradient is not that of a softmax
    s = half(q, k)
    return (s - s.logsumexp(-1, keepdim=True).detach()).exp() @ v
