"""Scales without a meaning, dtypes that do not fit, tensors changed in place or laid over each other, odd sizes."""
from __future__ import annotations

import torch
from forms_axes import CUBE
from forms_masked import INF
from forms_negative_register import BOTH, registering
from forms_negative_scores import half
from forms_negative_weights import weights
from forms_support import Arg, Form
from forms_written import S, X, qk
from torch.nn import functional as F

from fa_inductor.reasons import Code

FORMS: dict[str, Form] = {}
form = registering(FORMS)
NAN = float("nan")


# -- scales ------------------------------------------------------------------------------------------------------------

@form(1, X, modes=BOTH)
def scale_negative(q, k, v):  # attends to what fits least
    return (qk(q, k) * -0.3).softmax(-1) @ v


@form(1, X)
def scale_zero(q, k, v):  # the mean of the values
    return (qk(q, k) * 0.0).softmax(-1) @ v


@form(1, X)
def scale_of_minus_one_by_negation(q, k, v):
    return (-qk(q, k)).softmax(-1) @ v


@form(1, X, modes=BOTH)
def softmin_over_the_keys(q, k, v):
    return F.softmin(half(q, k), dim=-1) @ v


@form(Code.SCALE, X)
def scale_minus_inf(q, k, v):
    return (qk(q, k) * INF).softmax(-1) @ v


@form(Code.SCALE, X)
def scale_overflows(q, k, v):  # 1e200 twice
    return (qk(q, k) * 1e200 * 1e200).softmax(-1) @ v


@form(Code.SCALE, X)
def scale_underflows_and_comes_back(q, k, v):
    return (qk(q, k) * 1e300 / 1e-300).softmax(-1) @ v


@form(Code.SCALE, X)
def scaled_queries_of_nan(q, k, v):
    return half(q, k).mul(NAN).softmax(-1) @ v


@form(Code.SCALE, X)
def not_a_number_in_the_queries(q, k, v):
    return half(q * NAN, k).softmax(-1) @ v


@form(Code.SCALE, X)
def divided_by_minus_zero(q, k, v):
    return (qk(q, k) / -0.0).softmax(-1) @ v


@form(1, X)
def divided_by_infinity(q, k, v):
    return (qk(q, k) / float("inf")).softmax(-1) @ v


@form(Code.MASK_FILL, X)
def not_a_number_added(q, k, v):
    return (half(q, k) + NAN).softmax(-1) @ v


@form(Code.MASK_FILL, X)
def plus_infinity_added(q, k, v):
    return (half(q, k) + float("inf")).softmax(-1) @ v


@form(1, X, train=Code.BACKWARD, modes=BOTH)
def scale_of_the_data_of_a_row(q, k, v):
    return (qk(q, k) / (q.norm(dim=-1, keepdim=True) + 1.0)).softmax(-1) @ v


@form(1, X)
def scale_of_the_number_of_keys(q, k, v):  # log n attention
    return (qk(q, k) * torch.tensor(float(k.size(-2))).log().to(q.dtype)).softmax(-1) @ v


@form(1, "bhqd bhkd bhke", Arg("b", "length"))
def scale_of_an_integer_tensor(q, k, v, n):
    return (qk(q, k) / n[:, None, None, None].to(q.dtype)).softmax(-1) @ v


@form(Code.INTEGER, X, Arg("b", "length"))
def scale_is_an_integer_tensor(q, k, v, n):
    return (qk(q, k) * n[:, None, None, None]).softmax(-1) @ v


@form(Code.INTEGER, X, Arg("qk", "bool"))
def scores_times_a_boolean(q, k, v, keep):
    return (qk(q, k) * keep).softmax(-1) @ v


@form(Code.SCALE, X, Arg("b", "length"))
def divided_by_an_integer_tensor(q, k, v, n):
    return (qk(q, k) / n[:, None, None, None]).softmax(-1) @ v


# -- alpha and beta ----------------------------------------------------------------------------------------------------

@form(1, "hqd hkd hke", Arg("hqk", "const"), modes=BOTH)
def baddbmm_with_both_factors(q, k, v, m):
    return torch.baddbmm(m, q, k.mT, beta=0.5, alpha=0.3).softmax(-1) @ v


@form(1, "hqd hkd hke", Arg("hqk", "const"))
def baddbmm_with_a_negative_beta(q, k, v, m):
    return torch.baddbmm(m, q, k.mT, beta=-2.0, alpha=0.3).softmax(-1) @ v


@form(1, "hqd hkd hke", Arg("hqk", "const"))
def baddbmm_without_alpha(q, k, v, m):  # alpha of zero: the mask alone
    return torch.baddbmm(m, q, k.mT, beta=1.0, alpha=0.0).softmax(-1) @ v


@form(1, "hqd hkd hke")
def baddbmm_of_nan_times_zero(q, k, v):  # beta of zero ignores what is there
    return torch.baddbmm(torch.full((4, 6, 14), NAN, dtype=q.dtype), q, k.mT, beta=0, alpha=0.3).softmax(-1) @ v


@form(Code.SCALE, "hqd hkd hke", Arg("hqk", "const"))
def baddbmm_with_an_infinite_alpha(q, k, v, m):
    return torch.baddbmm(m, q, k.mT, alpha=float("inf")).softmax(-1) @ v


@form(1, "qd kd ke", Arg("k", "const"), modes=BOTH)
def addmm_with_both_factors(q, k, v, m):
    return torch.addmm(m, q, k.t(), beta=2.0, alpha=0.3).softmax(-1) @ v


@form(Code.NOT_ATTENTION, "hqd hkd hke", Arg("hqe", "const"))
def values_by_baddbmm(q, k, v, m):  # the residual of the output in the product
    return torch.baddbmm(m, weights(q, k), v, beta=0.5, alpha=2.0)


# -- dtypes ------------------------------------------------------------------------------------------------------------

@form(Code.DTYPE_MIX, X, modes=("infer",))
def queries_and_keys_in_half_precision(q, k, v):
    return (qk(q.bfloat16(), k.bfloat16()).to(v.dtype) * 0.3).softmax(-1) @ v


@form(Code.DTYPE_MIX, X, modes=("infer",))
def queries_in_double(q, k, v):
    return half(q.double(), k.double().sin()).softmax(-1).float().to(v.dtype) @ v.sin()


@form(Code.SCORE_OP, X)
def scores_rounded_to_float8(q, k, v):
    return half(q, k).to(torch.float8_e4m3fn).to(q.dtype).softmax(-1) @ v


@form(Code.PROB_OP, X)
def weights_rounded_to_float8(q, k, v):
    return weights(q, k).to(torch.float8_e4m3fn).to(q.dtype) @ v


@form(1, X)
def operands_rounded_to_float8(q, k, v):
    q, k, v = (x.to(torch.float8_e5m2).to(v.dtype) for x in (q, k, v))
    return weights(q, k) @ v


@form(Code.INTEGER, X)
def scores_rounded_to_integers(q, k, v):
    return qk(q, k).long().to(q.dtype).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_quantised(q, k, v):
    return (torch.clamp((qk(q, k) * 8).round(), -127, 127) / 8).softmax(-1) @ v


@form(Code.PROB_OP, X)
def weights_as_integers(q, k, v):
    return ((weights(q, k) * 255).to(torch.uint8).to(q.dtype) / 255) @ v


@form(Code.PROB_OP, X)
def weights_as_booleans(q, k, v):
    return (weights(q, k) > 0.1).to(q.dtype) @ v


@form(Code.PROB_OP, X)
def weights_of_complex_values(q, k, v):
    return (weights(q, k).to(torch.complex64 if q.dtype == torch.float32 else torch.complex128)
            @ torch.complex(v, v.flip(-1))).real


@form(Code.NO_QK, X)
def absolute_value_of_complex_scores(q, k, v):
    s = torch.complex(q, q.flip(-1)) @ torch.complex(k, k.flip(-1)).mT
    return s.abs().softmax(-1) @ v


@form(1, X)
def rotary_by_complex_numbers(q, k, v):  # llama: before the product
    angle = torch.polar(torch.ones(14, 4, dtype=q.dtype), torch.arange(14)[:, None] * torch.ones(4, dtype=q.dtype))
    q, k = (torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2))) * angle[:x.size(2)]).flatten(-2)
            for x in (q, k))
    return weights(q, k) @ v


# -- in place, and over each other -------------------------------------------------------------------------------------

@form(Code.SCORE_OP, X)
def one_score_changed_in_place(q, k, v):
    s = half(q, k)
    s[:, :, 0, 0] = -1e9
    return s.softmax(-1) @ v


@form(1, X)
def scores_changed_in_place_through_a_view(q, k, v):  # every score, through another shape
    s = half(q, k)
    s.view(-1).mul_(2.0)
    return s.softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_zeroed_through_a_view(q, k, v):
    s = half(q, k)
    s.view(-1)[:5] = 0.0
    return s.softmax(-1) @ v


@form(Code.SCORE_USED, X)
def scores_changed_after_they_were_returned(q, k, v):
    s = half(q, k)
    kept = s * 1.0
    s.mul_(2.0)
    return s.softmax(-1) @ v, kept


@form(1, X, Arg("qk", "keep"))
def mask_changed_after_its_use(q, k, v, keep):
    m = torch.where(keep, 0.0, -1e9).to(q.dtype)
    s = half(q, k) + m
    m.zero_()
    return s.softmax(-1) @ v, m


@form(1, X, Arg("qk", "const"))
def bias_changed_before_its_use(q, k, v, bias):
    bias = bias.clone()
    s = half(q, k)
    bias[0] = 2.0
    return (s + bias).softmax(-1) @ v


@form(1, X, Arg("qk", "const"))
def bias_input_changed_between_two_uses(q, k, v, bias):
    a = (half(q, k) + bias).softmax(-1) @ v
    bias = bias * 1.0
    bias.neg_()
    return a, bias


@form((1, 1), S, Arg("ss", "const"))
def bias_changed_between_two_blocks(q, k, v, bias):
    bias = bias.clone()
    o = (half(q, k) + bias).softmax(-1) @ v
    bias.mul_(-1.0)
    return (half(o, k) + bias).softmax(-1) @ v


@form((1, 1), S)
def cache_changed_between_two_blocks(q, k, v):
    cache = torch.zeros_like(k)
    cache[:, :, :5] = k[:, :, :5]
    o = weights(q, cache) @ v
    cache[:, :, 5:] = k[:, :, 5:]
    return weights(o, cache) @ v


@form(1, X)
def values_changed_after_the_weights(q, k, v):
    v = v.clone()
    p = weights(q, k)
    v[:, :, 0] = 0.0
    return p @ v


@form(1, X)
def weights_scaled_in_place_and_back(q, k, v):  # the output is scaled, not the weights
    o = weights(q, k) @ v
    o.mul_(2.0)
    return o


@form(1, X, modes=BOTH)
def keys_overlap_the_values(q, k, v):  # two windows of one tensor
    kv = torch.cat([k, v], -1)
    return weights(q, kv[..., :8]) @ kv[..., 4:20]


@form(1, "bhsd", modes=BOTH)
def queries_keys_and_values_overlap(x):
    return weights(x[:, :, :6], x[:, :, 2:8]) @ x[:, :, 4:]


@form(1, "bhqd hkd hke", modes=BOTH)
def keys_expanded_with_stride_zero(q, k, v):
    return weights(q, k.expand(3, -1, -1, -1)) @ v.expand(3, -1, -1, -1)


@form(Code.CONTRACTION, "bhqd bh1d bh1e")
def one_key_expanded_to_many(q, k, v):  # all keys are the same: the mean of the values
    return weights(q, k.expand(-1, -1, 14, -1)) @ v.expand(-1, -1, 14, -1)


@form(None, X, sizes={"k": 1})
def one_key(q, k, v):  # its weight is one
    return weights(q, k) @ v


@form(1, X, sizes={"q": 1}, modes=BOTH)
def one_query(q, k, v):
    return weights(q, k) @ v


@form(1, X, sizes={"e": 1})
def values_of_one_channel(q, k, v):
    return weights(q, k) @ v


@form(1, X, sizes={**CUBE, "b": 1}, modes=BOTH)
def batch_of_one(q, k, v):
    return weights(q, k) @ v
