"""Look-alikes of attention by their axes: another softmax dimension, other contractions, other permutations."""
from __future__ import annotations

import torch
from forms_masked import additive
from forms_support import Arg, Form, args
from forms_written import S, heads, qk

from fa_inductor.reasons import Code

FORMS: dict[str, Form] = {}
CUBE = {"b": 4, "h": 4, "s": 4, "d": 4, "q": 4, "k": 4, "e": 4}
"""Equal sizes: nothing but the axes themselves tells a right permutation from a wrong one."""


def form(expect, spec: str, *more: Arg, **keywords):
    """Registers a function as a form; ``expect`` is what the report must say."""
    def register(fn):
        FORMS[fn.__name__] = Form(fn, args(spec, *more), expect=expect, **keywords)
        return fn
    return register


# -- softmax over something else than the keys -------------------------------------------------------------------------

@form(Code.SOFTMAX_DIM, S)
def softmax_over_batch(q, k, v):
    return (qk(q, k) * 0.3).softmax(0) @ v


@form(Code.SOFTMAX_DIM, S)
def softmax_over_heads(q, k, v):
    return (qk(q, k) / 3.0).softmax(1) @ v


@form(Code.SOFTMAX_DIM, S, sizes=CUBE)
def softmax_over_queries(q, k, v):
    return (qk(q, k) * 0.3).softmax(-2) @ v


@form(Code.SOFTMAX_DIM, "bsd bsd bsd", sizes=CUBE)
def softmax_over_queries_bmm(q, k, v):
    return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(1), v)


@form(Code.SOFTMAX_DIM, "sd sd sd")
def softmax_over_rows_two_dims(q, k, v):
    return (q @ k.t()).softmax(0) @ v


@form(Code.SOFTMAX_DIM, S, Arg("b1ss", "keep"))
def softmax_over_queries_mbart(q, k, v, keep):
    b, h, s, d = q.shape
    q, k, v = (t.reshape(b * h, s, d) for t in (q, k, v))
    w = (torch.bmm(q, k.transpose(1, 2)).view(b, h, s, s) + additive(keep, q)).view(b * h, s, s)
    return torch.bmm(w.softmax(1), v)


@form(Code.SOFTMAX_DIM, "bshd bshd bshd", Arg("11ss", "tril"), sizes=CUBE)
def softmax_over_heads_gpt2(q, k, v, tril):
    q, k, v = heads(q, k, v)
    s = torch.where(tril, qk(q, k) / 2.0, torch.full((), -3e38, dtype=q.dtype))
    return s.softmax(1) @ v


@form(Code.SOFTMAX_DIM, S, Arg("1hss", "const"))
def softmax_over_queries_t5(q, k, v, bias):
    return (qk(q, k) + bias).softmax(-2) @ v


@form(Code.SOFTMAX_DIM, S)
def log_softmax_over_queries(q, k, v):
    return qk(q, k).log_softmax(-2).exp() @ v


@form(Code.SOFTMAX_DIM, S)
def exp_and_sum_over_queries(q, k, v):
    e = qk(q, k).exp()
    return (e / e.sum(-2, keepdim=True)) @ v


@form(None, S)
def exp_and_sum_of_two_dims(q, k, v):
    s = qk(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / e.sum(-2, keepdim=True)) @ v


@form(Code.NOT_ATTENTION, S)
def softmax_plus_one(q, k, v):
    e = (qk(q, k) * 0.3).exp()
    return (e / (e.sum(-1, keepdim=True) + 1.0)) @ v


@form(Code.NOT_ATTENTION, S)
def softmax_with_epsilon(q, k, v):
    e = (qk(q, k) * 0.3).exp()
    return (e / (e.sum(-1, keepdim=True) + 1e-3)) @ v


@form(None, S)
def softmax_of_another_sum(q, k, v):
    e = (qk(q, k) * 0.3).exp()
    return (e / e.exp().sum(-1, keepdim=True)) @ v


@form(None, S)
def softmax_base_two(q, k, v):
    e = (qk(q, k) * 0.3).exp2()
    return (e / e.sum(-1, keepdim=True)) @ v


@form(Code.SOFTMAX_DIM, S)
def softmax_over_queries_and_keys(q, k, v):
    s = qk(q, k) * 0.3
    return s.flatten(-2).softmax(-1).view_as(s) @ v


# -- other contractions ------------------------------------------------------------------------------------------------

@form(1, "bshd bshd bshd", sizes=CUBE)
def openfold_keys_equal_sizes(q, k, v):
    q, k, v = q.permute(0, 2, 1, 3), k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3)
    return ((q @ k) * 0.3).softmax(-1) @ v


@form(1, "bshd bshd bshd")
def openfold_keys(q, k, v):
    q, k, v = q.permute(0, 2, 1, 3), k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3)
    return ((q @ k) * 0.3).softmax(-1) @ v


@form(1, "bhsd bshd bhsd", sizes=CUBE)
def keys_permuted_queries_not(q, k, v):
    return ((q @ k.permute(0, 2, 3, 1)) / 2.0).softmax(-1) @ v


@form(1, S, sizes=CUBE)
def keys_not_transposed(q, k, v):  # softmax over the channels of K: attention with K^T for keys
    return ((q @ k) * 0.3).softmax(-1) @ v


@form(1, S, sizes=CUBE)
def keys_permuted_across_heads(q, k, v):
    return ((q @ k.permute(0, 3, 2, 1)) * 0.3).softmax(-1) @ v


@form(1, "bsd bsd bsd", sizes=CUBE)
def keys_permuted_across_batch(q, k, v):
    return torch.bmm(torch.bmm(q, k.permute(2, 1, 0)).softmax(-1), v)


@form(Code.SOFTMAX_DIM, S, sizes=CUBE)
def weights_transposed(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1).transpose(-2, -1) @ v


@form(Code.SOFTMAX_DIM, S, sizes=CUBE)
def values_from_the_left(q, k, v):
    return v @ (qk(q, k) * 0.3).softmax(-1)


@form(1, S, sizes=CUBE)
def values_of_swapped_batch_and_heads(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1) @ v.transpose(0, 1)


@form(1, S, sizes=CUBE)
def weights_of_swapped_batch_and_heads(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1).transpose(0, 1) @ v


@form(Code.SOFTMAX_DIM, S, sizes=CUBE)
def weights_of_swapped_heads_and_keys(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1).transpose(1, 3) @ v


@form(1, S)
def keys_of_reversed_heads(q, k, v):
    return (qk(q, k.flip(1)) * 0.3).softmax(-1) @ v


@form(1, S)
def keys_of_mixed_batch(q, k, v):  # [B*H] against [H*B]
    b, h, s, d = q.shape
    q, v = q.reshape(b * h, s, d), v.reshape(b * h, s, d)
    return (qk(q, k.transpose(0, 1).reshape(h * b, s, d)) * 0.3).softmax(-1) @ v


@form(1, "bhqd qkd bhke", sizes={"b": 2, "h": 2, "q": 4, "k": 4, "d": 4, "e": 4})
def keys_that_depend_on_the_query(q, r, v):  # relative positions alone
    s = torch.einsum("bhqd,qkd->bhqk", q, r)
    return s.softmax(-1) @ v


@form(1, "bhqd bhkd bhqke")
def values_that_depend_on_the_query(q, k, v):
    return torch.einsum("bhqk,bhqke->bhqe", qk(q, k).softmax(-1), v)
