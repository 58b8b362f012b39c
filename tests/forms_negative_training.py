"""Attention whose derivative is not that of its forward: stopped, replaced, clipped and repeated gradients."""
from __future__ import annotations

import torch
from forms_masked import INF, additive, causal
from forms_negative_register import BOTH, registering
from forms_negative_scores import half
from forms_negative_weights import weights
from forms_support import Arg, Form
from forms_written import S, X, qk
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fa_inductor.reasons import Code

FORMS: dict[str, Form] = {}
form = registering(FORMS)
TRAIN = ("train",)


class Scaled(torch.autograd.Function):
    """The identity, with half of its gradient."""
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * 0.5


class Reversed(torch.autograd.Function):
    """The identity, with its gradient negated."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -g


class Clipped(torch.autograd.Function):
    """The identity, with its gradient clamped."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-0.1, 0.1)


class OwnSoftmax(torch.autograd.Function):
    """A softmax whose derivative forgets that the weights of a row add up to one."""

    @staticmethod
    def forward(ctx, s):
        p = s.softmax(-1)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx, g):
        (p,) = ctx.saved_tensors
        return p * g


class RightSoftmax(torch.autograd.Function):
    """A softmax with its own derivative, written out."""

    @staticmethod
    def forward(ctx, s):
        p = s.softmax(-1)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx, g):
        (p,) = ctx.saved_tensors
        return p * (g - (p * g).sum(-1, keepdim=True))


class OwnAttention(torch.autograd.Function):
    """Attention whose derivative gives half of the gradient of the values."""

    @staticmethod
    def forward(ctx, q, k, v):
        p = weights(q, k)
        ctx.save_for_backward(q, k, v, p)
        return p @ v

    @staticmethod
    def backward(ctx, g):
        q, k, v, p = ctx.saved_tensors
        dp = g @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * 0.3
        return ds @ k, ds.mT @ q, 0.5 * (p.mT @ g)


# -- stopped gradients -------------------------------------------------------------------------------------------------

@form(1, X, modes=TRAIN)
def weights_detached(q, k, v):
    return weights(q, k).detach() @ v, (q.sum() + k.sum())


@form(1, X, modes=TRAIN)
def scores_detached(q, k, v):
    return half(q, k).detach().softmax(-1) @ v, (q.sum() + k.sum())


@form(1, X, modes=TRAIN)
def product_detached_before_the_scale(q, k, v):
    return (qk(q, k).detach() * 0.3).softmax(-1) @ v, (q.sum() + k.sum())


@form(1, X, modes=TRAIN)
def output_detached(q, k, v):
    return (weights(q, k) @ v).detach() + v.mean(), q.sum() * k.sum()


@form(1, X, modes=TRAIN)
def keys_detached_in_the_values_path(q, k, v):  # k is keys with a gradient and values without
    return weights(q, k) @ k.detach(), v.sum()


@form(1, X, modes=TRAIN)
def queries_detached(q, k, v):
    return weights(q.detach(), k) @ v, q.sum()


@form(Code.PROB_OP, X, modes=BOTH)
def weights_half_detached(q, k, v):
    p = weights(q, k)
    return (0.5 * p + 0.5 * p.detach()) @ v


@form(Code.SCORE_OP, X, modes=BOTH)
def scores_half_detached(q, k, v):
    s = half(q, k)
    return (0.5 * s + 0.5 * s.detach()).softmax(-1) @ v


@form(Code.SCORE_OP, X, modes=BOTH)
def straight_through_rounding_of_scores(q, k, v):
    s = half(q, k)
    return (s + (s.round() - s).detach()).softmax(-1) @ v


@form(Code.SCORE_OP, X, modes=BOTH)
def row_mean_detached(q, k, v):
    s = half(q, k)
    return (s - s.detach().mean(-1, keepdim=True)).softmax(-1) @ v


@form(1, X, modes=BOTH)
def row_maximum_detached(q, k, v):
    s = half(q, k)
    return (s - s.detach().amax(-1, keepdim=True)).softmax(-1) @ v


@form(Code.BACKWARD, X, modes=TRAIN)
def denominator_detached(q, k, v):
    e = half(q, k).exp()
    return (e / e.sum(-1, keepdim=True).detach()) @ v


@form(Code.BACKWARD, X, modes=TRAIN)
def numerator_detached(q, k, v):
    e = half(q, k).exp()
    return (e.detach() / e.sum(-1, keepdim=True)) @ v


@form(1, S, Arg("hss"), modes=TRAIN)
def bias_detached(q, k, v, bias):
    return (half(q, k) + bias.detach()).softmax(-1) @ v, bias.sum()


@form(Code.BACKWARD, X, Arg("hqk"), modes=TRAIN)
def bias_alone_has_a_gradient(q, k, v, bias):
    return (half(q.detach(), k.detach()) + bias).softmax(-1) @ v.detach(), q.sum() + k.sum() + v.sum()


# -- gradients of another function -------------------------------------------------------------------------------------

@form(Code.BACKWARD, X, modes=TRAIN)
def scores_with_half_their_gradient(q, k, v):
    return Scaled.apply(half(q, k)).softmax(-1) @ v


@form(Code.BACKWARD, X, modes=TRAIN)
def scores_with_a_reversed_gradient(q, k, v):
    return Reversed.apply(half(q, k)).softmax(-1) @ v


@form(Code.BACKWARD, X, modes=TRAIN)
def scores_with_a_clipped_gradient(q, k, v):
    return Clipped.apply(half(q, k)).softmax(-1) @ v


@form(Code.BACKWARD, X, modes=TRAIN)
def weights_with_half_their_gradient(q, k, v):
    return Scaled.apply(weights(q, k)) @ v


@form(Code.BACKWARD, X, modes=TRAIN)
def weights_with_a_clipped_gradient(q, k, v):
    return Clipped.apply(weights(q, k)) @ v


@form(1, X, modes=TRAIN)
def queries_with_half_their_gradient(q, k, v):
    return weights(Scaled.apply(q), k) @ v


@form(Code.BACKWARD, X, modes=TRAIN)
def softmax_with_another_derivative(q, k, v):
    return OwnSoftmax.apply(half(q, k)) @ v


@form(Code.BACKWARD, X, modes=TRAIN)
def softmax_with_its_derivative_by_hand(q, k, v):  # right, and written differently
    return RightSoftmax.apply(half(q, k)) @ v


@form(Code.BACKWARD, X, modes=TRAIN)
def attention_with_another_derivative(q, k, v):
    return OwnAttention.apply(q, k, v)


@form(Code.BACKWARD, X, modes=TRAIN)
def hook_on_the_scores(q, k, v):
    s = half(q, k)
    if s.requires_grad:
        s.register_hook(lambda g: g * 2.0)
    return s.softmax(-1) @ v


@form(Code.BACKWARD, X, modes=TRAIN)
def hook_on_the_weights(q, k, v):
    p = weights(q, k)
    if p.requires_grad:
        p.register_hook(lambda g: g.tanh())
    return p @ v


@form(1, X, modes=BOTH)
def capped_scores_of_another_sign(q, k, v):
    return (torch.tanh(half(q, k) / -5.0) * -5.0).softmax(-1) @ v


@form(1, X, modes=TRAIN)
def clamped_scores(q, k, v):  # no gradient beyond the clamp
    return half(q, k).clamp(-1.0, 1.0).softmax(-1) @ v


@form(1, X, modes=TRAIN)
def clamped_from_above(q, k, v):
    return half(q, k).clamp(max=1.0).softmax(-1) @ v


@form(1, X, modes=BOTH)
def relu_of_the_scores(q, k, v):
    return half(q, k).relu().softmax(-1) @ v


@form(1, X, modes=BOTH)
def absolute_scores(q, k, v):
    return half(q, k).abs().softmax(-1) @ v


@form(1, X, Arg("b1qk", "keep"), modes=BOTH)
def root_of_the_scores(q, k, v, keep):
    return (half(q, k).abs() + 0.1).sqrt().masked_fill(~keep, INF).softmax(-1) @ v


# -- gradients of what is added or multiplied --------------------------------------------------------------------------

@form(1, X, Arg("b1qk"), modes=TRAIN)
def mask_tensor_with_a_gradient(q, k, v, m):
    return (half(q, k) + m).softmax(-1) @ v


@form(1, X, Arg("bhqk"), modes=TRAIN)
def full_bias_with_a_gradient(q, k, v, bias):
    return (half(q, k) - bias).softmax(-1) @ v


@form(1, X, Arg("1h11"), modes=TRAIN)
def bias_of_a_head_with_a_gradient(q, k, v, bias):  # zero but for rounding
    return (half(q, k) + bias).softmax(-1) @ v


@form(1, X, Arg("k"), modes=TRAIN)
def bias_of_a_key_with_a_gradient(q, k, v, bias):
    return (half(q, k) + bias).softmax(-1) @ v


@form(Code.GRAD_CAPTURE, X, Arg("hqk"), modes=TRAIN)
def bias_added_with_a_factor(q, k, v, bias):
    return torch.add(half(q, k), bias, alpha=0.5).softmax(-1) @ v


@form(Code.GRAD_CAPTURE, X, Arg("hqk"), modes=TRAIN)
def bias_added_twice(q, k, v, bias):
    return (half(q, k) + bias + bias).softmax(-1) @ v


@form(Code.BACKWARD, S, Arg("hss"), modes=TRAIN)
def bias_and_its_transpose(q, k, v, bias):
    return (half(q, k) + bias + bias.mT).softmax(-1) @ v


@form(2, S, Arg("hss"), modes=TRAIN)
def bias_of_two_layers(q, k, v, bias):
    o = (half(q, k) + bias).softmax(-1) @ v
    return (half(o, k) + bias).softmax(-1) @ v


@form(Code.GRAD_CAPTURE, X, Arg("h1k"), modes=TRAIN)
def temperature_of_a_key_with_a_gradient(q, k, v, t):
    return (half(q, k) * t).softmax(-1) @ v


@form(Code.BACKWARD, X, Arg("bhq1"), modes=TRAIN)
def divided_by_a_learned_temperature(q, k, v, t):
    return (qk(q, k) / (t.abs() + 1.0)).softmax(-1) @ v


@form(1, X, Arg("bhqk", "keep"), Arg("bhq1"), modes=TRAIN)
def learned_scale_under_a_mask(q, k, v, keep, t):
    return (qk(q, k) * t.exp()).masked_fill(~keep, INF).softmax(-1) @ v


@form(Code.GRAD_CAPTURE, X, Arg("bhq1"), Arg("bhq1"), modes=TRAIN)
def two_learned_scales(q, k, v, t, u):
    return (qk(q, k) * t * u).softmax(-1) @ v


@form(Code.GRAD_CAPTURE, X, Arg("bhq1"), modes=TRAIN)
def learned_softcap(q, k, v, cap):
    c = cap.abs() + 1.0
    return (torch.tanh(half(q, k) / c) * c).softmax(-1) @ v


@form(Code.BACKWARD, X, Arg("qk", "keep"), Arg("bhqk"), modes=TRAIN)
def learned_fill(q, k, v, keep, fill):
    return torch.where(keep, half(q, k), fill).softmax(-1) @ v


@form(1, X, Arg("bhq"), modes=TRAIN)
def learned_slopes(q, k, v, slopes):  # ALiBi with a gradient
    far = (torch.arange(14)[None] - torch.arange(6)[:, None]).to(q.dtype)
    return (half(q, k) + slopes[..., None] * far).softmax(-1) @ v


@form(1, S, Arg("sh"), modes=TRAIN)
def learned_table_of_distances(q, k, v, table):  # T5
    i = torch.arange(10)
    bias = F.embedding((i[None] - i[:, None]).abs(), table).permute(2, 0, 1)
    s = half(q, k) + bias
    return (s + additive(causal(s), s)).softmax(-1) @ v


@form(Code.SCORE_OP, S, Arg("sd"), modes=TRAIN)
def bias_of_the_queries(q, k, v, rel):  # shaw: the bias is a function of Q, with a gradient to it
    i = torch.arange(10)
    r = rel[(i[None] - i[:, None]).abs()]
    return (half(q, k) + torch.einsum("bhqd,qkd->bhqk", q, r)).softmax(-1) @ v


# -- run again ---------------------------------------------------------------------------------------------------------

@form((1, 1), S, modes=TRAIN)
def checkpointed_block_in_a_checkpointed_layer(q, k, v):
    def layer(x):
        return x + checkpoint(lambda y: weights(y, k) @ v, x, use_reentrant=False)
    return checkpoint(lambda x: layer(layer(x)), q, use_reentrant=False)


@form(Code.WEIGHTS_USED, X, modes=TRAIN)
def checkpointed_weights_returned(q, k, v):
    def layer(a, b, c):
        p = weights(a, b)
        return p @ c, p
    return checkpoint(layer, q, k, v, use_reentrant=False)


@form(Code.WEIGHTS_USED, X, modes=TRAIN)
def weights_in_a_loss_that_alone_has_a_gradient(q, k, v):
    p = weights(q, k)
    return (p @ v).detach(), (p * p).sum(-1)
