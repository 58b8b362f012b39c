"""Scores and probabilities that something else reads: they have to be computed, and so has the rest."""
from __future__ import annotations

import torch
from forms_masked import INF, causal
from forms_negative_register import BOTH, registering
from forms_negative_scores import half
from forms_negative_weights import weights
from forms_support import Form
from forms_written import S, X, qk
from torch.nn import functional as F

from fa_inductor.reasons import Code

FORMS: dict[str, Form] = {}
form = registering(FORMS)


# -- scores that something else reads ----------------------------------------------------------------------------------

@form(Code.SCORE_USED, X)
def largest_score_returned(q, k, v):  # the logit that a training log or QK-clip looks at
    s = half(q, k)
    return s.softmax(-1) @ v, s.amax((-2, -1))


@form(Code.SCORE_USED, X)
def row_maximum_returned(q, k, v):
    s = half(q, k)
    return s.softmax(-1) @ v, s.amax(-1)


@form(Code.SCORE_USED, X)
def best_key_returned(q, k, v):
    s = half(q, k)
    return s.softmax(-1) @ v, s.argmax(-1)


@form(Code.SCORE_USED, X)
def best_keys_returned(q, k, v):
    s = half(q, k)
    return s.softmax(-1) @ v, s.topk(3, -1).indices


@form(Code.SCORE_USED, X)
def number_of_large_scores(q, k, v):
    s = half(q, k)
    return s.softmax(-1) @ v, (s > 1.0).sum()


@form(Code.SCORE_USED, X, modes=BOTH)
def z_loss(q, k, v):
    s = half(q, k)
    return s.softmax(-1) @ v, s.logsumexp(-1).square().mean()


@form(Code.SCORE_USED, X, modes=BOTH)
def entropy_of_the_scores(q, k, v):
    s = half(q, k)
    return s.softmax(-1) @ v, -(s.log_softmax(-1).exp() * s.log_softmax(-1)).sum(-1)


@form(Code.SCORE_USED, X, modes=BOTH)
def masked_scores_returned(q, k, v):
    s = half(q, k).masked_fill(torch.arange(14) > 11, INF)
    return s.softmax(-1) @ v, s


@form(Code.SCORE_USED, X, modes=BOTH)
def scores_guided_by_a_target(q, k, v):  # distillation, guided attention
    s = half(q, k)
    return s.softmax(-1) @ v, F.mse_loss(s, torch.zeros_like(s))


@form(Code.SCORE_USED, X, modes=BOTH)
def scores_against_other_values_by_sigmoid(q, k, v):
    s = half(q, k)
    return s.softmax(-1) @ v + s.sigmoid() @ v


@form(Code.SCORE_USED, X)
def scores_meet_values_without_a_softmax(q, k, v):
    s = half(q, k)
    return s.softmax(-1) @ v + s @ v


@form((Code.SCORE_USED, Code.SCORE_USED), X)
def two_temperatures(q, k, v):
    s = qk(q, k)
    return (s * 0.3).softmax(-1) @ v, (s * 0.6).softmax(-1) @ v


@form((Code.SCORE_USED, Code.SCORE_USED), X)
def with_and_without_a_mask(q, k, v):
    s = half(q, k)
    return s.softmax(-1) @ v - s.masked_fill(torch.arange(14) > 11, INF).softmax(-1) @ v


# -- probabilities that something else reads ---------------------------------------------------------------------------------

@form(Code.WEIGHTS_USED, X)
def one_row_of_the_weights_returned(q, k, v):
    p = weights(q, k)
    return p @ v, p[..., -1, :]


@form(Code.WEIGHTS_USED, X)
def received_attention_returned(q, k, v):  # what H2O and SnapKV evict by
    p = weights(q, k)
    return p @ v, p.sum(-2)


@form(Code.WEIGHTS_USED, X)
def largest_weight_returned(q, k, v):
    p = weights(q, k)
    return p @ v, p.amax(-1)


@form(Code.WEIGHTS_USED, X)
def detached_weights_returned(q, k, v):
    p = weights(q, k)
    return p @ v, p.detach()


@form(Code.WEIGHTS_USED, X)
def weights_returned_in_half(q, k, v):
    p = weights(q, k)
    return p @ v, p.half()


@form((Code.WEIGHTS_USED, Code.WEIGHTS_USED), X)
def weights_stored_in_a_list(q, k, v):
    kept = []
    for _ in range(2):
        p = weights(q, k)
        kept.append(p)
        q = q + (p @ v)[..., :8]
    return q, torch.stack(kept)


@form(Code.WEIGHTS_USED, X, modes=BOTH)
def entropy_of_the_weights(q, k, v):
    p = weights(q, k)
    return p @ v, -(p * p.clamp(1e-6).log()).sum(-1)


@form(Code.WEIGHTS_USED, X, modes=BOTH)
def weights_guided_by_a_diagonal(q, k, v):  # text to speech
    p = weights(q, k)
    far = (torch.arange(6)[:, None] / 6 - torch.arange(14)[None] / 14).abs().to(q.dtype)
    return p @ v, (p * far).sum(-1)


@form(Code.WEIGHTS_USED, X)
def pointer_generator(q, k, v):  # the copy distribution is scattered into a vocabulary
    p = weights(q, k)
    ids = (torch.arange(14) % 5).expand(3, 6, 14)
    return p @ v, torch.zeros(3, 6, 5, dtype=q.dtype).scatter_add(-1, ids, p.mean(1))


@form(Code.WEIGHTS_USED, "bhqd bhkd bhke bhkc", modes=BOTH)
def weights_for_values_and_positions(q, k, v, pos):  # vits: P meets two matrices
    p = weights(q, k)
    return p @ v, p @ pos


@form(Code.WEIGHTS_USED, X, modes=BOTH)
def weights_for_a_mean_and_a_variance(q, k, v):
    p = weights(q, k)
    mean = p @ v
    return mean, (p @ v.square() - mean.square()).clamp(0).sqrt()


@form(Code.WEIGHTS_USED, S, modes=BOTH)
def weights_both_ways(q, k, v):
    p = weights(q, k)
    return p @ v, p.mT @ v


@form(Code.WEIGHTS_USED, S)
def values_after_two_hops(q, k, v):  # P P V by hand
    p = weights(q, k)
    return p @ (p @ v)


@form(Code.WEIGHTS_USED, S)
def weights_shared_by_two_layers(q, k, v):
    s = (qk(q, k) * 0.3).masked_fill(~causal(q @ k.mT), INF)
    p = s.softmax(-1)
    return p @ (p @ v).tanh()


@form(Code.WEIGHTS_USED, X)
def weights_times_the_values_elementwise(q, k, v):
    p = weights(q, k)
    return p @ v, (p[..., None] * v[:, :, None]).amax(-2)


@form(Code.WEIGHTS_USED, X)
def centre_of_the_weights(q, k, v):  # where a query looks, in positions
    p = weights(q, k)
    return p @ v, (p * torch.arange(14)).sum(-1)


@form(Code.SCORE_USED, X, modes=BOTH)
def logsumexp_of_the_weights_returned(q, k, v):  # as partial attentions that are merged later need it
    s = half(q, k)
    lse = s.logsumexp(-1, keepdim=True)
    return (s - lse).exp() @ v, lse
