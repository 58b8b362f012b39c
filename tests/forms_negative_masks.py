"""Masks with odd fills, masks that meet, masks that depend on the scores, rows that may be empty."""
from __future__ import annotations

import torch
from forms_masked import INF, additive, causal, smallest
from forms_negative_register import BOTH, registering
from forms_negative_scores import half
from forms_support import Arg, Form
from forms_written import S, X, qk

from fa_inductor.reasons import Code

FORMS: dict[str, Form] = {}
form = registering(FORMS)
HOLE = Arg("bk", "hole")
KEEP = Arg("qk", "keep")


def wide(keep):
    """[B, Sk] as [B, 1, 1, Sk]."""
    return keep[:, None, None]


# -- fills that are no mask --------------------------------------------------------------------------------------------

@form(1, X, KEEP, modes=BOTH)
def fill_of_minus_ten(q, k, v, keep):
    return half(q, k).masked_fill(~keep, -10.0).softmax(-1) @ v


@form(1, X, KEEP, modes=BOTH)
def added_minus_ten(q, k, v, keep):
    return (half(q, k) + (1 - keep.to(q.dtype)) * -10.0).softmax(-1) @ v


@form(1, X, KEEP)
def added_minus_hundred_twice(q, k, v, keep):
    m = (1 - keep.to(q.dtype)) * -100.0
    return (half(q, k) + m + m).softmax(-1) @ v


@form(1, X, KEEP)
def fill_of_plus_ten(q, k, v, keep):
    return half(q, k).masked_fill(~keep, 10.0).softmax(-1) @ v


@form(1, X, KEEP)
def wrong_sign_of_ten_thousand(q, k, v, keep):  # + 1e4 (1 - m): attends to what should be masked
    return (half(q, k) + (1 - keep.to(q.dtype)) * 1e4).softmax(-1) @ v


@form(1, X, KEEP)
def wrong_sign_of_a_billion_filled(q, k, v, keep):
    return half(q, k).masked_fill(keep, 1e9).softmax(-1) @ v


@form(1, X, KEEP)
def inverted_padding(q, k, v, keep):  # m instead of 1 - m
    return (half(q, k) + keep.to(q.dtype) * -1e9).softmax(-1) @ v


@form(1, X, KEEP, modes=BOTH)
def masked_scores_of_the_smallest_positive(q, k, v, keep):  # finfo.tiny where finfo.min was meant
    return half(q, k).masked_fill(~keep, torch.finfo(torch.float32).tiny).softmax(-1) @ v


@form(1, X, KEEP)
def fill_of_finfo_eps_negated(q, k, v, keep):
    return half(q, k).masked_fill(~keep, -torch.finfo(torch.float32).eps).softmax(-1) @ v


@form(Code.MASK_FILL, X, KEEP)
def fill_plus_inf_by_where(q, k, v, keep):
    s = half(q, k)
    return torch.where(keep, s, torch.full_like(s, -INF)).softmax(-1) @ v


@form(1, X, KEEP)
def mask_multiplied_by_minus_inf(q, k, v, keep):  # 0 * -inf is NaN where the key is kept
    return (half(q, k) + (1 - keep.to(q.dtype)) * INF).softmax(-1) @ v


@form(1, X, KEEP)
def scores_multiplied_by_minus_inf(q, k, v, keep):
    return (half(q, k) * torch.where(keep, 1.0, INF)).softmax(-1) @ v


@form(1, X, KEEP)
def logarithm_of_a_mask(q, k, v, keep):  # log(1e-9) is -20.7
    return (half(q, k) + (keep.to(q.dtype) + 1e-9).log()).softmax(-1) @ v


@form(1, X, KEEP)
def logarithm_of_a_mask_of_zero(q, k, v, keep):
    return (half(q, k) + keep.to(q.dtype).log()).softmax(-1) @ v


@form(1, X, Arg("b1qk", "const"), modes=BOTH)
def soft_mask_multiplied(q, k, v, m):
    return (half(q, k) * m.sigmoid()).softmax(-1) @ v


@form(1, X, Arg("b1qk", "const"))
def soft_mask_of_minus_ten_thousand(q, k, v, m):
    return (half(q, k) - 1e4 * (1 - m.sigmoid())).softmax(-1) @ v


# -- masks that depend on what is computed -----------------------------------------------------------------------------

@form(1, X, modes=BOTH)
def mask_of_the_query_values(q, k, v):
    keep = (q.sum(-1, keepdim=True) > 0) | (torch.arange(14) < 3)
    return half(q, k).masked_fill(~keep, -1e9).softmax(-1) @ v


@form(1, X, modes=BOTH)
def mask_of_the_key_norms(q, k, v):  # keys of zero length are padding
    keep = (k.norm(dim=-1) > 1.5)[:, :, None] | (torch.arange(14) == 0)
    return half(q, k).masked_fill(~keep, -1e9).softmax(-1) @ v


@form(1, X, modes=BOTH)
def mask_of_the_values(q, k, v):
    return half(q, k).masked_fill((v[..., 0] > 0)[:, :, None], -1e9).softmax(-1) @ v


@form(1, X, modes=BOTH)
def mask_of_a_detached_product(q, k, v):  # the same product, computed twice
    keep = qk(q, k).detach() > -1.0
    return half(q, k).masked_fill(~keep, -1e9).softmax(-1) @ v


@form(1, X, modes=BOTH)
def mask_of_another_product(q, k, v):  # an indexer
    keep = (q[..., :4] @ k[..., :4].mT > -0.5) | (torch.arange(14) == 0)
    return half(q, k).masked_fill(~keep, -1e9).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def mask_of_scores_over_their_mean(q, k, v):
    s = half(q, k)
    return s.masked_fill(s < s.mean(-1, keepdim=True), INF).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def top_k_scattered(q, k, v):
    s = half(q, k)
    keep = torch.zeros_like(s, dtype=torch.bool).scatter(-1, s.topk(3, -1).indices, True)
    return s.masked_fill(~keep, INF).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def top_k_of_a_kth_value(q, k, v):
    s = half(q, k)
    return s.masked_fill(s < s.kthvalue(12, -1, keepdim=True).values, INF).softmax(-1) @ v


@form(Code.SCORE_USED, X)
def top_p(q, k, v):  # nucleus: the keys that make up most of the weight
    s = half(q, k)
    order = s.sort(-1, descending=True)
    far = (order.values.softmax(-1).cumsum(-1) > 0.9).roll(1, -1)
    far = far & (torch.arange(14) > 0)
    return s.masked_fill(far.gather(-1, order.indices.argsort(-1)), INF).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def zero_scores_masked(q, k, v):  # padding found by a score of exactly zero
    s = half(q, k)
    return s.masked_fill(s == 0, INF).softmax(-1) @ v


@form(Code.SCORE_OP, S)
def where_of_two_maskings(q, k, v):
    s = half(q, k)
    return torch.where(causal(s), s, s.clamp(max=-1.0)).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def not_a_number_replaced_before(q, k, v):
    s = half(q, k)
    return torch.where(s.isnan(), -1e9, s).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def infinities_replaced_before(q, k, v):
    return torch.nan_to_num(half(q, k), 0.0, 1e4, -1e4).softmax(-1) @ v


# -- masks that meet ---------------------------------------------------------------------------------------------------

@form(Code.MASK_FILL, S, Arg("bs", "hole"), modes=BOTH)
def padding_of_a_billion_causal_of_inf(q, k, v, keep):
    s = half(q, k).masked_fill(~wide(keep), -1e9)
    return s.masked_fill(~causal(s), INF).softmax(-1) @ v


@form(Code.MASK_FILL, S, Arg("bs", "hole"), modes=BOTH)
def padding_of_inf_causal_of_a_billion(q, k, v, keep):
    s = half(q, k).masked_fill(~causal(q @ k.mT), -1e9)
    return s.masked_fill(~wide(keep), INF).softmax(-1) @ v


@form(1, S, Arg("bs", "hole"), modes=BOTH)
def two_masks_added_of_a_billion(q, k, v, keep):  # where both lie, -2e9
    s = half(q, k) - (1 - wide(keep).to(q.dtype)) * 1e9
    return (s - (~causal(s)).to(q.dtype) * 1e9).softmax(-1) @ v


@form(1, S, Arg("bs", "hole"), modes=BOTH)
def minimum_added_over_a_fill(q, k, v, keep):
    s = half(q, k).masked_fill(~causal(q @ k.mT), torch.finfo(torch.float32).min)
    return (s + (1 - wide(keep).to(q.dtype)) * -1e4).softmax(-1) @ v


@form(Code.SCORE_OP, S, Arg("bs", "hole"))
def penalty_and_mask(q, k, v, keep):  # -100 and -1e9 in one row
    s = half(q, k).masked_fill(~wide(keep), -1e9)
    return torch.where(causal(s), s, s - 100.0).softmax(-1) @ v


@form(Code.MASK_FILL, S, Arg("bs", "hole"), Arg("1s", "hole"))
def three_fills(q, k, v, keep, other):
    s = half(q, k).masked_fill(~wide(keep), -1e9).masked_fill(~wide(other), -1e8)
    return s.masked_fill(~causal(s), -1e7).softmax(-1) @ v


@form(Code.EMPTY_ROWS, X, HOLE, modes=BOTH)
def fill_shifted_by_the_row_maximum(q, k, v, keep):
    s = half(q, k).masked_fill(~wide(keep), -1e9)
    s = s - s.amax(-1, keepdim=True)
    return (s + (torch.arange(14) > 11).to(q.dtype) * -1e9).softmax(-1) @ v


@form(1, X, HOLE, modes=BOTH)
def same_mask_filled_and_added(q, k, v, keep):
    s = half(q, k).masked_fill(~wide(keep), -1e9)
    return (s + (1 - wide(keep).to(q.dtype)) * -1e9).softmax(-1) @ v


@form(Code.SCORE_OP, X, KEEP, modes=BOTH)
def mask_and_its_opposite_with_a_small_fill(q, k, v, keep):
    s = half(q, k).masked_fill(~keep, -1e9)
    return s.masked_fill(keep & (torch.arange(14) == 13), -5.0).softmax(-1) @ v


@form(Code.SCORE_OP, X, KEEP)
def penalty_after_a_mask(q, k, v, keep):
    s = half(q, k).masked_fill(~keep, -1e9)
    return torch.where(torch.arange(14) < 12, s, -3.0).softmax(-1) @ v


@form(Code.EMPTY_ROWS, X, modes=BOTH)
def every_key_masked(q, k, v):
    return half(q, k).masked_fill(torch.ones(14, dtype=torch.bool), -1e9).softmax(-1) @ v


@form(Code.EMPTY_ROWS, S)
def two_triangles_that_leave_nothing(q, k, v):
    s = half(q, k)
    i = torch.arange(10)
    s = s.masked_fill(i[:, None] <= i[None], INF).masked_fill(i[:, None] > i[None], INF)
    return s.softmax(-1) @ v


# -- operations after a mask -------------------------------------------------------------------------------------------

@form(Code.SCORE_OP, X, KEEP, modes=BOTH)
def temperature_tensor_after_the_mask(q, k, v, keep):
    return (half(q, k).masked_fill(~keep, -1e9) * v[..., :1, :1].exp()).softmax(-1) @ v


@form(Code.SCORE_OP, X, KEEP)
def absolute_value_after_the_mask(q, k, v, keep):
    return half(q, k).masked_fill(~keep, -1e9).abs().softmax(-1) @ v


@form(Code.SCORE_OP, X, KEEP, modes=BOTH)
def clamp_after_the_mask(q, k, v, keep):
    return half(q, k).masked_fill(~keep, INF).clamp(-50.0, 50.0).softmax(-1) @ v


@form(Code.SCORE_OP, X, KEEP)
def relu_after_the_mask(q, k, v, keep):
    return half(q, k).masked_fill(~keep, INF).relu().softmax(-1) @ v


@form(Code.SCORE_OP, X, KEEP)
def sigmoid_after_the_mask(q, k, v, keep):
    return (half(q, k) + additive(keep, q)).sigmoid().softmax(-1) @ v


@form(Code.SCORE_OP, X, KEEP)
def mask_added_before_the_softcap(q, k, v, keep):  # masked keys end at -5
    return (torch.tanh(half(q, k).masked_fill(~keep, INF)) * 5.0).softmax(-1) @ v


@form(1, X, KEEP)
def mask_scaled_to_a_penalty(q, k, v, keep):  # -1e4 * 1e-3
    return (qk(q, k).masked_fill(~keep, -1e4) * 1e-3).softmax(-1) @ v


@form(Code.MASK_FILL, X, KEEP)
def smallest_divided_to_nothing(q, k, v, keep):
    return (qk(q, k).masked_fill(~keep, -1e9) / 1e10).softmax(-1) @ v


@form(1, X, HOLE, modes=BOTH)
def smallest_divided_by_the_scale(q, k, v, keep):
    return (qk(q, k).masked_fill(~wide(keep), -1e9) / 3.0).softmax(-1) @ v


@form(1, X, HOLE, modes=BOTH)
def bias_above_a_mask_of_ten_thousand(q, k, v, keep):  # rows of -1e4 keep their order
    return (half(q, k) + wide(1 - keep.to(q.dtype)) * -1e4 + torch.arange(14) * 0.1).softmax(-1) @ v


@form(1, X, HOLE, Arg("qk", "const"), modes=BOTH)
def bias_added_to_an_empty_row(q, k, v, keep, bias):
    return (half(q, k).masked_fill(~wide(keep), -1e4) + bias).softmax(-1) @ v


@form(1, X, HOLE, Arg("hqk"), modes=BOTH, train=Code.GRAD_CAPTURE)
def learned_bias_added_to_an_empty_row(q, k, v, keep, bias):
    s = half(q, k).masked_fill(~wide(keep), torch.finfo(torch.float32).min)
    return (s + bias).softmax(-1) @ v


@form(1, X, HOLE, modes=BOTH)
def constant_added_to_an_empty_row(q, k, v, keep):
    return (torch.where(wide(keep), half(q, k), smallest(q)) + 1.0).softmax(-1) @ v


# -- denominators and outputs of empty rows ----------------------------------------------------------------------------

@form(None, X, HOLE, modes=BOTH)
def epsilon_in_the_denominator(q, k, v, keep):
    s = half(q, k).masked_fill(~wide(keep), -1e9)
    e = (s - s.amax(-1, keepdim=True)).exp() * wide(keep)
    return (e / (e.sum(-1, keepdim=True) + 1e-6)) @ v


@form(None, X, HOLE)
def masked_exponentials(q, k, v, keep):  # the mask is multiplied in after exp
    e = half(q, k).exp() * wide(keep | (torch.arange(14) == 0))
    return (e / e.sum(-1, keepdim=True)) @ v


@form(Code.NOT_ATTENTION, X)
def denominator_clamped(q, k, v):
    e = half(q, k).exp()
    return (e / e.sum(-1, keepdim=True).clamp(min=1.0)) @ v


@form(None, X)
def root_of_the_denominator(q, k, v):
    e = half(q, k).exp()
    return (e / e.sum(-1, keepdim=True).sqrt()) @ v


@form(1, X, HOLE, modes=BOTH)
def output_of_empty_rows_zeroed(q, k, v, keep):  # ESM, XLM: after the product
    o = half(q, k).masked_fill(~wide(keep), -1e9).softmax(-1) @ v
    return o * keep.any(-1)[:, None, None, None]


@form(1, X, HOLE, modes=BOTH)
def output_not_a_number_replaced(q, k, v, keep):
    o = half(q, k).masked_fill(~wide(keep), INF).softmax(-1) @ v
    return torch.nan_to_num(o)


@form(Code.PROB_OP, X, HOLE, modes=BOTH)
def weights_of_empty_rows_zeroed(q, k, v, keep):
    p = half(q, k).masked_fill(~wide(keep), -1e9).softmax(-1)
    return p.masked_fill(~keep.any(-1)[:, None, None, None], 0.0) @ v


@form(1, X, HOLE, modes=BOTH)
def empty_rows_attend_to_the_first_key(q, k, v, keep):  # the mask is mended beforehand
    keep = keep | (~keep.any(-1, keepdim=True) & (torch.arange(14) == 0))
    return half(q, k).masked_fill(~wide(keep), INF).softmax(-1) @ v


@form(1, X, HOLE, modes=BOTH)
def empty_rows_unmasked(q, k, v, keep):  # AttentionMaskConverter._unmask_unattended
    m = additive(wide(keep), q)
    m = m.mul(~torch.all(m == torch.finfo(q.dtype).min, dim=-1, keepdim=True))
    return (half(q, k) + m).softmax(-1) @ v
