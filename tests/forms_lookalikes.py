"""Look-alikes of attention by what happens to the scores: to be left alone, or rewritten with eager's numbers."""
from __future__ import annotations

import torch
from forms_masked import INF
from forms_support import Arg, Form, args
from forms_written import S, X, qk
from torch.nn import functional as F

from fa_inductor.reasons import Code

FORMS: dict[str, Form] = {}


def form(expect, spec: str, *more: Arg, **keywords):
    """Registers a function as a form; ``expect`` is what the report must say."""
    def register(fn):
        FORMS[fn.__name__] = Form(fn, args(spec, *more), expect=expect, **keywords)
        return fn
    return register


# -- between the product and the softmax -------------------------------------------------------------------------------

@form(1, X, Arg("qk", "const"))
def add_with_alpha(q, k, v, m):
    return torch.add(qk(q, k) / 3.0, m, alpha=2.0).softmax(-1) @ v


@form(Code.SCORE_OP, X, Arg("bhqk", "const"))
def scores_added_with_alpha(q, k, v, m):
    return torch.add(m, qk(q, k) / 3.0, alpha=2.0).softmax(-1) @ v


@form(1, X, Arg("qk", "const"))
def sub_with_alpha(q, k, v, m):
    return torch.sub(qk(q, k) / 3.0, m, alpha=0.5).softmax(-1) @ v


@form(1, X, Arg("bhqk", "keep"))
def penalty_of_minus_one(q, k, v, m):
    return (qk(q, k) / 3.0).masked_fill(m == 0, -1.0).softmax(-1) @ v


@form(1, X, Arg("bk", "keep"))
def penalty_of_zero_distilbert(q, k, v, m):
    s = qk(q / 3.0, k)
    return s.masked_fill((m == 0).view(m.size(0), 1, 1, -1).expand_as(s), 0.0).softmax(-1) @ v


@form(1, X, Arg("11qk", "bool"))
def where_zero(q, k, v, m):
    s = qk(q, k) / 3.0
    return torch.where(m, s, torch.full((), 0.0, dtype=s.dtype)).softmax(-1) @ v


@form(1, X, Arg("11qk", "bool"))
def where_minus_one(q, k, v, m):
    s = qk(q, k) / 3.0
    return torch.where(m, s, torch.full((), -1.0, dtype=s.dtype)).softmax(-1) @ v


@form(1, X, Arg("qk", "bool"))
def penalty_of_minus_hundred(q, k, v, m):
    return (qk(q, k) * 0.3).masked_fill(m, -100.0).softmax(-1) @ v


@form(1, X, Arg("bk", "int"))
def integer_mask_of_zero_and_two(q, k, v, m):
    s = qk(q, k) / 3.0
    return s.masked_fill((m == 0).view(m.size(0), 1, 1, -1).expand_as(s), -1e9).softmax(-1) @ v


@form(1, X, Arg("bk", "int"))
def integer_mask_compared_with_one(q, k, v, m):  # no value is one: every key is masked
    return (qk(q, k) / 3.0).masked_fill((m == 1)[:, None, None], -1e9).softmax(-1) @ v


@form(1, X, Arg("qk", "int"))
def integers_added(q, k, v, m):
    return (qk(q, k) * 0.3 + m).softmax(-1) @ v


@form(1, X, Arg("b1qk", "bool"))
def scores_multiplied_by_a_mask(q, k, v, m):
    return (qk(q, k) * 0.3 * m.to(q.dtype)).softmax(-1) @ v


@form(1, X, Arg("b1qk", "keep"))
def openai_gpt(q, k, v, keep):
    m = keep.to(q.dtype)
    return (qk(q, k) * 0.3 * m + -1e4 * (1 - m)).softmax(-1) @ v


@form(1, S, Arg("hss", "const"), sizes={"b": 4})
def bias_of_the_batch_lands_on_the_heads(q, k, v, m):
    return (qk(q, k) * 0.3 + m).softmax(-1) @ v


@form(1, S, Arg("bss", "const"), sizes={"h": 3})
def bias_without_a_head_dim(q, k, v, m):  # [B, S, S] lines up with the heads
    return (qk(q, k) * 0.3 + m).softmax(-1) @ v


@form(1, X, Arg("bhq1", "const"))
def temperature_per_query(q, k, v, t):
    return (qk(q, k) * t).softmax(-1) @ v


@form(1, X, Arg("h1k", "const"))
def temperature_per_key(q, k, v, t):
    return (qk(q, k) * t).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def two_products_added(q, k, v):
    return (qk(q, k) * 0.3 + qk(q.flip(-1), k)).softmax(-1) @ v


@form(1, S, Arg("sd"))
def deberta(q, k, v, rel):
    i = torch.arange(q.size(-2))
    index = (i[:, None] - i[None]).clamp(0)
    c2p = torch.gather(q @ rel.t(), -1, index.expand(q.size(0), q.size(1), -1, -1))
    return (qk(q, k) * 0.3 + c2p).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def two_products_multiplied(q, k, v):
    return (qk(q, k) * qk(q.flip(-1), k)).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_squared(q, k, v):
    s = qk(q, k) * 0.3
    return (s * s).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_to_a_power(q, k, v):
    return (qk(q, k) * 0.3).pow(3).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_added_to_themselves(q, k, v):
    s = qk(q, k) * 0.3
    return (s + s.sin()).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_summed_up(q, k, v):
    return (qk(q, k) * 0.3).cumsum(-1).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_reversed(q, k, v):
    return (qk(q, k) * 0.3).flip(-1).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_rolled(q, k, v):
    return (qk(q, k) * 0.3).roll(1, -1).softmax(-1) @ v


@form(Code.SCORE_OP, S)
def relative_shift(q, k, v):  # transformer-xl
    s = F.pad(qk(q, k), (1, 0))
    b, h, n, m = s.shape
    return s.view(b, h, m, n)[:, :, 1:].reshape(b, h, n, m - 1).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_sorted(q, k, v):
    return (qk(q, k) * 0.3).sort(-1).values.softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_sliced(q, k, v):
    return qk(q, k)[..., 1:].softmax(-1) @ v[..., 1:, :]


@form(Code.SCORE_OP, X)
def maximum_minus_scores(q, k, v):  # DANet's channel attention
    s = qk(q, k)
    return (s.amax(-1, keepdim=True).expand_as(s) - s).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_padded(q, k, v):  # add_zero_attn
    return F.pad(qk(q, k), (0, 1)).softmax(-1) @ F.pad(v, (0, 0, 0, 1))


@form(Code.SCORE_OP, X)
def scores_minus_their_mean(q, k, v):
    s = qk(q, k)
    return (s - s.mean(-1, keepdim=True)).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def scores_divided_by_their_norm(q, k, v):
    s = qk(q, k)
    return (s / s.norm(dim=-1, keepdim=True)).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def maximum_over_queries_subtracted(q, k, v):
    s = qk(q, k)
    return (s - s.amax(-2, keepdim=True)).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def maximum_of_half_the_scores_subtracted(q, k, v):
    s = qk(q, k)
    return (s - 0.5 * s.amax(-1, keepdim=True)).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def leaky_scores(q, k, v):  # GAT
    return F.leaky_relu(qk(q, k), 0.2).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def rounded_scores(q, k, v):
    return (qk(q, k) * 4).round().softmax(-1) @ v


@form(Code.SCORE_OP, X)
def top_k(q, k, v):
    s = qk(q, k) * 0.3
    return s.masked_fill(s < s.topk(3, -1).values[..., -1:], INF).softmax(-1) @ v


@form(Code.SCORE_OP, X)
def own_threshold(q, k, v):
    s = qk(q, k) * 0.3
    return torch.where(s > 0, s, torch.full((), INF, dtype=s.dtype)).softmax(-1) @ v


@form(Code.SCORE_OP, X, Arg("hh"))
def talking_heads_before(q, k, v, w):
    return torch.einsum("bhqk,hg->bgqk", qk(q, k) * 0.3, w).softmax(-1) @ v


@form((Code.PROB_OP, Code.SCORE_OP), X)
def softmax_of_a_softmax(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1).softmax(-1) @ v
