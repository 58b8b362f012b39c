"""Softmax over another dimension than the keys in every layout, and operands whose axes do not line up."""
from __future__ import annotations

import torch
from forms_axes import CUBE
from forms_masked import INF, additive, causal
from forms_negative_register import BOTH, registering
from forms_support import Arg, Form
from forms_written import LIST, S, X, heads, qk
from torch.nn import functional as F

from fa_inductor.reasons import Code

FORMS: dict[str, Form] = {}
form = registering(FORMS)
CUBE5 = {**CUBE, "n": 4, "g": 4, "w": 4}


# -- the softmax of another dimension, layout by layout ----------------------------------------------------------------

@form(Code.SOFTMAX_DIM, "bqhd bkhd bkhe", sizes=CUBE)
def einsum_bqhk_over_heads(q, k, v):
    return torch.einsum("bqhk,bkhe->bqhe", (torch.einsum("bqhd,bkhd->bqhk", q, k) * 0.3).softmax(2), v)


@form(Code.SOFTMAX_DIM, "bqhd bkhd bkhe", sizes=CUBE)
def einsum_bqhk_over_queries(q, k, v):
    return torch.einsum("bqhk,bkhe->bqhe", (torch.einsum("bqhd,bkhd->bqhk", q, k) * 0.3).softmax(1), v)


@form(Code.SOFTMAX_DIM, "bqhd bkhd bkhe", sizes=CUBE)
def einsum_bhqk_over_queries(q, k, v):
    return torch.einsum("bhqk,bkhe->bqhe", (torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.3).softmax(2), v)


@form(Code.SOFTMAX_DIM, "bqhd bkhd bkhe", sizes=CUBE)
def einsum_bqkh_over_heads(q, k, v):  # the keys are not last, the softmax is
    return torch.einsum("bqkh,bkhe->bqhe", (torch.einsum("bqhd,bkhd->bqkh", q, k) * 0.3).softmax(-1), v)


@form(Code.SOFTMAX_DIM, "bqhd bkhd bkhe", sizes=CUBE)
def einsum_bkhq_over_the_last(q, k, v):
    return torch.einsum("bkhq,bkhe->bqhe", (torch.einsum("bqhd,bkhd->bkhq", q, k) * 0.3).softmax(-1), v)


@form(Code.SOFTMAX_DIM, "qbhd kbhd kbhe", sizes=CUBE)
def einsum_xlnet_over_queries(q, k, v):
    return torch.einsum("bhqk,kbhe->qbhe", (torch.einsum("qbhd,kbhd->bhqk", q, k) * 0.3).softmax(2), v)


@form(Code.SOFTMAX_DIM, "bqd bkd bke", sizes=CUBE)
def three_dims_over_batch(q, k, v):
    return torch.bmm((torch.bmm(q, k.transpose(1, 2)) * 0.3).softmax(0), v)


@form(Code.SOFTMAX_DIM, "hqd hkd hke", sizes=CUBE)
def three_dims_over_heads_baddbmm(q, k, v):
    s = torch.baddbmm(torch.empty(4, 4, 4, dtype=q.dtype), q, k.transpose(1, 2), beta=0, alpha=0.3)
    return torch.bmm(s.softmax(0), v)


@form(Code.SOFTMAX_DIM, "qd kd ke", sizes=CUBE)
def two_dims_over_queries_addmm(q, k, v):
    return torch.addmm(torch.zeros(4, dtype=q.dtype), q, k.t(), alpha=0.3).softmax(0) @ v


@form(Code.SOFTMAX_DIM, "bngqd bnkd bnke", sizes=CUBE5)
def grouped_over_groups(q, k, v):
    return (qk(q, k[:, :, None]) * 0.3).softmax(2) @ v[:, :, None]


@form(Code.SOFTMAX_DIM, "bngqd bnkd bnke", sizes=CUBE5)
def grouped_over_key_heads(q, k, v):
    return (qk(q, k[:, :, None]) * 0.3).softmax(1) @ v[:, :, None]


@form(Code.SOFTMAX_DIM, "bngqd bnkd bnke", sizes=CUBE5)
def grouped_over_queries(q, k, v):
    return torch.einsum("bngqk,bnke->bngqe", torch.einsum("bngqd,bnkd->bngqk", q, k).softmax(3), v)


@form(Code.SOFTMAX_DIM, "bwhsd bwhsd bwhsd", sizes=CUBE5)
def windows_over_windows(q, k, v):
    return (qk(q, k) * 0.3).softmax(1) @ v


@form(Code.SOFTMAX_DIM, "bhqd bkd bke", sizes=CUBE)
def one_key_head_over_heads(q, k, v):
    return torch.einsum("bhqk,bke->bhqe", torch.einsum("bhqd,bkd->bhqk", q, k).softmax(1), v)


@form(Code.SOFTMAX_DIM, LIST, sizes=CUBE)
def softmax_over_queries_of_transposed_scores(q, k, v):  # K Q^T, softmax over its last dimension
    q, k, v = heads(q, k, v)
    return (qk(k, q) * 0.3).softmax(-1).transpose(-2, -1) @ v


@form(Code.SOFTMAX_DIM, S, sizes=CUBE)
def transposed_scores_without_transposing_back(q, k, v):
    return (qk(k, q) * 0.3).softmax(-2) @ v


@form(Code.SOFTMAX_DIM, S, modes=BOTH)
def masked_softmax_over_queries(q, k, v):
    s = qk(q, k) * 0.3
    return s.masked_fill(~causal(s), INF).softmax(-2) @ v


@form(Code.SOFTMAX_DIM, S, Arg("b1s1", "keep"))
def padding_softmax_over_queries(q, k, v, keep):  # slot attention before it renormalises
    return (qk(q, k) * 0.3 + additive(keep, q)).softmax(-2) @ v


@form(Code.SOFTMAX_DIM, S)
def softmax_over_heads_and_keys(q, k, v):
    s = qk(q, k) * 0.3
    p = s.transpose(1, 2).flatten(-2).softmax(-1)
    return p.view(s.size(0), s.size(2), s.size(1), s.size(3)).transpose(1, 2) @ v


@form(Code.SOFTMAX_DIM, S)
def softmax_over_everything(q, k, v):
    s = qk(q, k) * 0.3
    return s.flatten().softmax(0).view_as(s) @ v


@form(Code.SOFTMAX_DIM, S, sizes={"s": 12})
def softmax_over_half_of_the_keys(q, k, v):  # two halves, each with a sum of one
    s = qk(q, k) * 0.3
    return s.unflatten(-1, (2, 6)).softmax(-1).flatten(-2) @ v


@form(Code.SOFTMAX_DIM, S, sizes={"s": 12})
def softmax_across_blocks_of_keys(q, k, v):
    s = qk(q, k) * 0.3
    return s.unflatten(-1, (3, 4)).softmax(-2).flatten(-2) @ v


@form(Code.SOFTMAX_DIM, "bhqd bhkd bhke", modes=BOTH)
def log_softmax_over_heads(q, k, v):
    return (qk(q, k) * 0.3).log_softmax(1).exp() @ v


@form(Code.SOFTMAX_DIM, X)
def exp_and_sum_over_heads(q, k, v):
    s = qk(q, k) * 0.3
    e = (s - s.amax(1, keepdim=True)).exp()
    return (e / e.sum(1, keepdim=True)) @ v


@form(Code.SOFTMAX_DIM, X)
def softmin_over_queries(q, k, v):
    return F.softmin(qk(q, k) * 0.3, dim=-2) @ v


# -- softmax over the keys of a product that is none of queries and keys, or values that miss the keys -----------------

@form(Code.SOFTMAX_DIM, S, sizes=CUBE)
def weights_transposed_by_einsum(q, k, v):
    return torch.einsum("bhqk,bhqd->bhkd", (qk(q, k) * 0.3).softmax(-1), v)


@form(Code.SOFTMAX_DIM, "bqd bkd bqe", sizes=CUBE)
def values_gathered_to_the_keys(q, k, v):  # scatter by attention, as in a memory that is written to
    return torch.bmm(torch.bmm(q, k.mT).softmax(-1).mT, v)


@form(Code.SOFTMAX_DIM, S, sizes=CUBE)
def weights_rotated(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1).permute(0, 2, 3, 1) @ v


@form(Code.SOFTMAX_DIM, S, sizes=CUBE)
def weights_contracted_over_the_batch(q, k, v):
    return torch.einsum("bhqk,bhqe->hqke", (qk(q, k) * 0.3).softmax(-1), v)


@form(Code.SOFTMAX_DIM, S, sizes=CUBE)
def weights_contracted_over_heads_and_keys(q, k, v):
    return torch.einsum("bhqk,bhke->bqe", (qk(q, k) * 0.3).softmax(-1), v)


@form(Code.SOFTMAX_DIM, "bhqd bhkd bhke")
def weights_of_all_queries_joined(q, k, v):  # one vector of Sq x Sk weights a head
    p = (qk(q, k) * 0.3).softmax(-1)
    return p.flatten(-2).unsqueeze(-2) @ v.repeat(1, 1, q.size(2), 1)


@form(1, S, Arg("ss"), sizes=CUBE, modes=BOTH)
def weights_times_a_learned_matrix(q, k, v, w):  # (P W) V
    return ((qk(q, k) * 0.3).softmax(-1) @ w) @ v.sin()


@form(Code.PROB_OP, S, Arg("ss"), sizes=CUBE)
def learned_matrix_times_weights(q, k, v, w):  # W (P V) is fine, (W P) V mixes queries
    return (w @ (qk(q, k) * 0.3).softmax(-1)) @ v


@form((Code.PROB_OP, Code.PROB_OP), S)
def attention_rollout(q, k, v):
    p = (qk(q, k) * 0.3).softmax(-1)
    eye = torch.eye(q.size(-2))
    return ((0.5 * p + 0.5 * eye) @ (qk(k, q) * 0.3).softmax(-1)) @ v


@form(1, "bhqd bhkd kbhe", sizes=CUBE)
def values_by_length_batch_head(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1) @ v.permute(1, 2, 0, 3)


@form(1, "bhqd bhkd khbe", sizes=CUBE)
def values_of_heads_and_batch_swapped(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1) @ v.permute(1, 2, 0, 3)


@form(1, X, sizes=CUBE, modes=BOTH)
def queries_and_keys_swap_heads_and_batch(q, k, v):
    return (qk(q.transpose(0, 1), k.transpose(0, 1)) * 0.3).softmax(-1) @ v


@form(1, X, sizes=CUBE, modes=BOTH)
def keys_read_as_length_by_heads(q, k, v):  # a view where a transpose was meant
    b, h, s, d = k.shape
    return (qk(q, k.reshape(b, s, h, d)) * 0.3).softmax(-1) @ v


@form(1, S, sizes=CUBE)
def values_read_as_channels_by_length(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1) @ v.reshape(v.size(0), v.size(1), v.size(3), v.size(2))


@form(1, S, sizes=CUBE)
def queries_transposed_into_channels(q, k, v):
    return (q.transpose(-2, -1) @ k * 0.3).softmax(-1) @ v


@form(1, "bhqd hbkd bhke", sizes=CUBE, modes=BOTH)
def keys_of_the_batch_on_the_heads(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1) @ v


# -- which key head a query head reads ---------------------------------------------------------------------------------

@form(1, "bhqd bnkd bnke", modes=BOTH)
def grouped_by_repeat(q, k, v):  # head h reads key head h % n, where repeat_interleave gives h // group
    k, v = (t.repeat(1, 2, 1, 1) for t in (k, v))
    return (qk(q, k) * 0.3).softmax(-1) @ v


@form(1, "bhqd bnkd bnke", modes=BOTH)
def grouped_by_expand_in_front(q, k, v):
    k, v = (t[:, None].expand(-1, 2, -1, -1, -1).reshape(t.size(0), 4, *t.shape[2:]) for t in (k, v))
    return (qk(q, k) * 0.3).softmax(-1) @ v


@form(1, "bhqd bnkd bnke", modes=BOTH)
def keys_interleaved_values_repeated(q, k, v):
    return (qk(q, k.repeat_interleave(2, 1)) * 0.3).softmax(-1) @ v.repeat(1, 2, 1, 1)


@form(1, "bhqd bnkd bhke", modes=BOTH)
def grouped_keys_and_values_of_every_head(q, k, v):
    return (qk(q, k.repeat_interleave(2, 1)) * 0.3).softmax(-1) @ v


@form(1, "bhqd bhkd bnke", modes=BOTH)
def grouped_values_and_keys_of_every_head(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1) @ v.repeat_interleave(2, 1)


@form(1, "bgnqd bnkd bnke", modes=BOTH)
def groups_before_key_heads(q, k, v):
    return (qk(q, k[:, None]) * 0.3).softmax(-1) @ v[:, None]


@form(Code.RANK, "bgnqd bgkd bnke", sizes={"n": 2, "g": 2}, modes=BOTH)
def keys_by_group_values_by_head(q, k, v):
    return (qk(q, k[:, :, None]) * 0.3).softmax(-1) @ v[:, None]


@form(1, "bhqd bnkd bnke", modes=BOTH)
def batch_repeated_with_the_heads(q, k, v):  # repeat_interleave over [B * n] mixes nothing, repeat would
    b, h, s, d = q.shape
    k, v = (t.flatten(0, 1).repeat(2, 1, 1) for t in (k, v))
    return ((qk(q.flatten(0, 1), k) * 0.3).softmax(-1) @ v).view(b, h, s, -1)


@form(1, "bhqd bkd bke", sizes={"b": 4})
def keys_of_a_batch_of_the_size_of_the_heads(q, k, v):  # [B, Sk, D] lines up with the heads
    return (qk(q, k) * 0.3).softmax(-1) @ v


@form(1, "bhqd 1hkd bhke", modes=BOTH)
def keys_shared_by_the_batch(q, k, v):  # Perceiver, learned keys
    return (qk(q, k) * 0.3).softmax(-1) @ v


@form(1, "1hqd bhkd bhke", modes=BOTH)
def queries_shared_by_the_batch(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1) @ v


@form(1, "bhqd bhkd 11ke", modes=BOTH)
def values_shared_by_everything(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1) @ v


@form(Code.PROB_OP, "bhqd bhkd ke", sizes={"b": 2})
def weights_summed_over_the_batch(q, k, v):
    p = (qk(q, k) * 0.3).softmax(-1)
    return p.sum(0, keepdim=True) @ v


@form(1, "bsc bsc bsc", sizes={"c": 16}, modes=BOTH)
def attention_across_the_batch(q, k, v):  # each position attends over the batch: axial, NPT
    return (qk(q.transpose(0, 1), k.transpose(0, 1)) * 0.3).softmax(-1) @ v.transpose(0, 1)


@form(1, LIST, modes=BOTH)
def attention_across_the_heads(q, k, v):  # [B, S, H, D]: nobody transposed
    return (qk(q, k) * 0.3).softmax(-1) @ v


@form(1, "bsc bsc bsc", modes=BOTH)
def attention_over_channels(q, k, v):  # XCA
    s = F.normalize(q, dim=1).transpose(-2, -1) @ F.normalize(k, dim=1)
    return (s * 2.0).softmax(-1) @ v.transpose(-2, -1)


@form(Code.SOFTMAX_DIM, "bsc bsc bsc", sizes={"c": 10})
def attention_over_channels_from_the_wrong_side(q, k, v):
    return v @ (q.transpose(-2, -1) @ k * 0.3).softmax(-1)


@form(1, "bsc bsc bsc", sizes={"c": 10})
def attention_over_channels_from_the_right_side(q, k, v):  # V P^T
    return v @ (q.transpose(-2, -1) @ k * 0.3).softmax(-1).transpose(-2, -1)
