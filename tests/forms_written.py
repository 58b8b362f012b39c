"""Attention as people write it out: forms that are rewritten, by the family names of the models they come from."""
from __future__ import annotations

import math

import torch
from forms_support import Arg, Form, args, up
from torch import Tensor
from torch.nn import functional as F

S = "bhsd bhsd bhsd"
X = "bhqd bhkd bhke"
LIST = "bshd bshd bshd"  # a linear layer's result, viewed as heads: [B, S, H, D]
FORMS: dict[str, Form] = {}


def form(spec: str, *more: Arg, **keywords):
    """Registers a function as a form; the function's name is the form's."""
    def register(fn):
        FORMS[fn.__name__] = Form(fn, args(spec, *more), **keywords)
        return fn
    return register


def qk(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1)


def repeat_kv(x: Tensor, n: int) -> Tensor:
    b, heads, s, d = x.shape
    return x[:, :, None, :, :].expand(b, heads, n, s, d).reshape(b, heads * n, s, d)


def heads(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.permute(0, 2, 1, 3) for t in tensors)


def soft32(s: Tensor, like: Tensor) -> Tensor:
    return F.softmax(s, dim=-1, dtype=up(like)).to(like.dtype)


# -- without a mask: where the scale stands ----------------------------------------------------------------------------

@form(S, dtypes=("float32", "bfloat16", "float16"))
def scale_multiplied(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1) @ v


@form(S)
def scale_divided(q, k, v):
    return (qk(q, k) / math.sqrt(q.size(-1))).softmax(-1) @ v


@form(X)
def scale_none(q, k, v):
    return qk(q, k).softmax(-1) @ v


@form(X)
def scale_on_q(q, k, v):
    return qk(q * 0.3, k).softmax(-1) @ v


@form(X)
def scale_on_q_divided(q, k, v):
    return qk(q / 3.0, k).softmax(-1) @ v


@form(X)
def scale_on_k(q, k, v):
    return qk(q, k / 3.0).softmax(-1) @ v


@form(X)
def scale_on_both(q, k, v):
    return qk(q * 0.5, k * 0.6).softmax(-1) @ v


@form(X)
def scale_of_one(q, k, v):
    return (qk(q, k) * 1.0).softmax(-1) @ v


@form(X)
def scale_twice(q, k, v):
    return (qk(q, k) / 4.0 * 1.7).softmax(-1) @ v


@form(X)
def scale_commuted(q, k, v):
    return (0.3 * qk(q, k)).softmax(-1) @ v


@form(X)
def scale_0d_tensor(q, k, v):
    return (qk(q, k) / torch.full([], 3.0, dtype=q.dtype, device=q.device)).softmax(-1) @ v


@form(X)
def scale_tensor_literal(q, k, v):
    return (qk(q, k) * torch.tensor(0.4, dtype=q.dtype)).softmax(-1) @ v


@form(X)
def scale_negative(q, k, v):
    return (qk(q, k) * -0.7).softmax(-1) @ v


@form(X)
def scale_zero(q, k, v):
    return (qk(q, k) * 0.0).softmax(-1) @ v


@form(X)
def scale_in_place(q, k, v):
    s = qk(q, k)
    s /= 2.0
    return s.softmax(-1) @ v


# -- precision ---------------------------------------------------------------------------------------------------------

@form(S, dtypes=("float32", "bfloat16", "float16"))
def softmax_in_float32(q, k, v):
    return soft32(qk(q, k) * 0.3, q) @ v


@form(S, dtypes=("bfloat16",))
def softmax_of_float(q, k, v):
    return (qk(q, k) * 0.3).to(up(q)).softmax(-1).type_as(v) @ v


@form(X, dtypes=("bfloat16", "float16"))
def products_in_float32(q, k, v):  # gptj, codegen
    s = qk(q.to(up(q)), k.to(up(k))) * 0.3
    return s.softmax(-1).to(v.dtype) @ v


@form(X)
def row_maximum_subtracted(q, k, v):
    s = qk(q, k) * 0.3
    return (s - s.amax(-1, keepdim=True)).softmax(-1) @ v


# -- layouts -----------------------------------------------------------------------------------------------------------

@form(LIST, dtypes=("float32", "bfloat16"))
def heads_permuted(q, k, v):
    q, k, v = heads(q, k, v)
    return ((qk(q, k) * 0.3).softmax(-1) @ v).permute(0, 2, 1, 3).reshape(q.size(0), -1, 32)


@form(LIST)
def heads_transposed_copied(q, k, v):
    q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    return ((q @ k.permute(0, 1, 3, 2)) / 3.0).softmax(-1).matmul(v).transpose(1, 2).contiguous()


@form("bsc bsc bsc")
def heads_by_view(q, k, v):
    b, s, _ = q.shape
    q, k, v = (t.view(b, s, 4, 8).transpose(1, 2) for t in (q, k, v))
    return ((qk(q, k) * 0.3).softmax(-1) @ v).transpose(1, 2).reshape(b, s, 32)


@form("bsp", sizes={"p": 96})
def packed_qkv(x):
    q, k, v = x.reshape(x.size(0), x.size(1), 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
    return ((q * 0.3) @ k.transpose(-2, -1)).softmax(-1) @ v


@form("bqd bkd bke")
def three_dims(q, k, v):
    return torch.bmm(torch.bmm(q, k.transpose(1, 2)).mul(0.3).softmax(-1), v)


@form("qd kd ke")
def two_dims(q, k, v):
    return (q @ k.t() / 3.0).softmax(-1) @ v


@form("bwhsd bwhsd bwhsd")
def five_dims(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1) @ v


@form(X, sizes={"b": 1})
def batch_of_one(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1) @ v


@form(X, sizes={"q": 1})
def one_query(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1) @ v


@form(X, sizes={"k": 1}, expect=None)  # a softmax over one key: nothing to gain
def one_key(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1) @ v


@form(X, sizes={"h": 1})
def one_head(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1) @ v


@form(X, sizes={"e": 1})
def value_dim_of_one(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1) @ v


@form("bhsd bhs1 bhsd")
def latent_keys_joined(q, k, v):  # MLA: Dqk != Dv
    q, k = torch.cat((q, q[..., :4]), -1), torch.cat((k.expand(-1, -1, -1, 8), v[..., :4]), -1)
    return soft32(qk(q, k) * 0.2, q) @ v


@form("bhdq bhdk bhek")
def channels_first(q, k, v):
    return v @ ((q.transpose(-2, -1) @ k) * 0.3).softmax(-1).transpose(-2, -1)


@form(X)
def keys_times_queries(q, k, v):
    return ((k @ q.transpose(-2, -1)).transpose(-2, -1) * 0.3).softmax(-1) @ v


@form(X)
def keys_times_queries_softmax_rows(q, k, v):
    p = ((k @ q.transpose(-2, -1)) * 0.3).softmax(-2)
    return p.transpose(-2, -1) @ v


@form(X)
def values_times_weights(q, k, v):
    return (v.transpose(-2, -1) @ (qk(q, k) * 0.3).softmax(-1).transpose(-2, -1)).transpose(-2, -1)


@form("bqd bkd bdk")
def conv_attention(q, k, v):  # VQ-VAE blocks: softmax over dim 2, permute, bmm(v, P^T)
    w = F.softmax(torch.bmm(q, k.permute(0, 2, 1)) * 0.3, dim=2)
    return torch.bmm(v, w.permute(0, 2, 1))


@form("bhsd bhsd bhsd")
def channel_attention(q, k, v):  # XCA: over the channels, still softmax(QK^T)V of transposed tensors
    q, k, v = (t.transpose(-2, -1) for t in (q, k, v))
    return ((F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)) * 1.5).softmax(-1) @ v


# -- einsum ------------------------------------------------------------------------------------------------------------

@form(X)
def einsum_bhid(q, k, v):
    s = torch.einsum("bhid,bhjd->bhij", q, k) * 0.3
    return torch.einsum("bhij,bhjd->bhid", s.softmax(-1), v)


@form("bqhd bkhd bkhe")
def einsum_bqhd(q, k, v):
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) / 3.0
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(dim=3), v)


@form("qbhd kbhd kbhe")
def einsum_xlnet(q, k, v):
    s = torch.einsum("ibnd,jbnd->bnij", q, k) * 0.3
    return torch.einsum("bnij,jbnd->ibnd", s.softmax(3), v)


@form("bqd bkd bke")
def einsum_ellipsis(q, k, v):
    s = torch.einsum("...qc,...kc->...qk", q, k) * 0.3
    return torch.einsum("...hq,...qc->...hc", s.softmax(-1), v)


@form("bhqd bkd bke")
def einsum_one_key_head(q, k, v):
    s = torch.einsum("bhid,bjd->bhij", q, k) * 0.3
    return torch.einsum("bhij,bjd->bhid", s.softmax(-1), v)


@form("bshd bnsd bnsd")
def einsum_grouped(q, k, v):
    q = q.view(q.size(0), q.size(1), 2, 2, 8)
    s = torch.einsum("bsngd,bntd->bngst", q, k) * 0.3
    return torch.einsum("bngst,bntd->bsngd", s.softmax(-1), v)


# -- grouped heads -----------------------------------------------------------------------------------------------------

@form("bhqd bnkd bnke", dtypes=("float32", "bfloat16"))
def grouped_repeat_kv(q, k, v):
    return soft32(qk(q, repeat_kv(k, 2)) * 0.3, q) @ repeat_kv(v, 2)


@form("bhqd bnkd bnke")
def grouped_repeat_interleave(q, k, v):
    return soft32(qk(q, k.repeat_interleave(2, 1)) * 0.3, q) @ v.repeat_interleave(2, dim=1)


@form("bngqd bnkd bnke")
def grouped_five_dims(q, k, v):
    return (qk(q, k[:, :, None]) * 0.3).softmax(-1) @ v[:, :, None]


@form("bhqd bnkd bnke")
def grouped_view(q, k, v):
    b, _, s, d = q.shape
    q = q.view(b, 2, 2, s, d)
    return ((qk(q, k.unsqueeze(2)) * 0.3).softmax(-1) @ v.unsqueeze(2)).reshape(b, 4, s, 16)


@form("bhqd b1kd b1ke")
def one_key_head_broadcast(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1) @ v


@form("bhqd b1kd b1ke")
def one_key_head_expanded(q, k, v):
    return (qk(q, k.expand(-1, 4, -1, -1)) * 0.3).softmax(-1) @ v.expand(-1, 4, -1, -1)


# -- softmax spelled differently ---------------------------------------------------------------------------------------

@form(X)
def softmax_module(q, k, v):
    return torch.nn.Softmax(dim=-1)(qk(q, k) * 0.3) @ v


@form(X)
def softmax_by_exp_and_sum(q, k, v):
    s = qk(q, k) * 0.3
    e = (s - s.max(-1, keepdim=True).values).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


@form(X)
def softmax_by_exp_of_a_detached_maximum(q, k, v):
    s = qk(q, k) * 0.3
    e = (s - s.amax(-1, keepdim=True).detach()).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


@form(X)
def softmax_by_exp_without_maximum(q, k, v):
    e = (qk(q, k) * 0.3).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


@form(X)
def log_softmax_exp(q, k, v):
    return (qk(q, k) * 0.3).log_softmax(-1).exp() @ v


@form(X)
def exp_of_scores_minus_logsumexp(q, k, v):
    s = qk(q, k) * 0.3
    return (s - s.logsumexp(-1, keepdim=True)).exp() @ v


@form(S)
def masked_scores_minus_logsumexp(q, k, v):  # the last dimension of the logsumexp put back by an index
    s = (qk(q, k) * 0.3).masked_fill(torch.ones(10, 10).tril() == 0, float("-inf"))
    return torch.exp(s - torch.logsumexp(s, -1)[..., None].expand_as(s)) @ v


# -- products with a built-in addition ---------------------------------------------------------------------------------

@form("bqd bkd bke")
def baddbmm_of_nothing(q, k, v):  # diffusers
    empty = torch.empty(q.size(0), q.size(1), k.size(1), dtype=q.dtype, device=q.device)
    s = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=0.3)
    return torch.bmm(s.softmax(-1), v)


@form("bqd bkd bke", Arg("bqk", "const"))
def baddbmm_of_a_mask(q, k, v, m):
    return torch.bmm(torch.baddbmm(m, q, k.transpose(-1, -2), beta=1, alpha=0.3).softmax(-1), v)


@form("bhqd bhkd bhke")
def dropout_that_is_off(q, k, v):
    p = F.dropout((qk(q, k) * 0.3).softmax(-1), 0.1, training=False)
    return F.dropout(p, 0.0, training=True) @ v
