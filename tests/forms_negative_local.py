"""Block-local, shifted and joined attention, memories and indexers: several products in one softmax, or other axes."""
from __future__ import annotations

import torch
from forms_masked import INF, causal
from forms_negative_register import BOTH, registering
from forms_negative_scores import half
from forms_negative_weights import weights
from forms_support import Arg, Form
from forms_written import S, X, qk
from torch.nn import functional as F

from fa_inductor.reasons import Code

FORMS: dict[str, Form] = {}
form = registering(FORMS)
EVEN = {"s": 12}


def blocks(x, n=4):
    """[B, H, S, D] as [B, H, S / n, n, D]."""
    return x.unflatten(2, (-1, n))


def three_blocks(x):
    """[B, H, N, n, D] with the block before and the block after joined along n."""
    y = F.pad(x, (0, 0, 0, 0, 1, 1))
    return torch.cat([y[:, :, :-2], y[:, :, 1:-1], y[:, :, 2:]], 3)


# -- blocks ------------------------------------------------------------------------------------------------------------

@form(1, S, sizes=EVEN, modes=BOTH)
def within_blocks(q, k, v):  # each block by itself is attention with more of a batch
    return (weights(blocks(q), blocks(k)) @ blocks(v)).flatten(2, 3)


@form(1, S, sizes=EVEN, modes=BOTH)
def across_blocks(q, k, v):  # dilated: the i-th of every block
    q, k, v = (blocks(x).transpose(2, 3) for x in (q, k, v))
    return (weights(q, k) @ v).transpose(2, 3).flatten(2, 3)


@form(1, S, sizes=EVEN)
def blocks_of_the_batch(q, k, v):  # window_partition and window_reverse
    b, h = q.shape[:2]
    q, k, v = (blocks(x).permute(0, 2, 1, 3, 4).flatten(0, 1) for x in (q, k, v))
    o = weights(q, k) @ v
    return o.view(b, 3, h, 4, -1).transpose(1, 2).flatten(2, 3)


@form(1, S, sizes=EVEN, modes=BOTH)
def three_neighbouring_blocks(q, k, v):  # longt5 local
    return (weights(blocks(q), three_blocks(blocks(k))) @ three_blocks(blocks(v))).flatten(2, 3)


@form(1, S, sizes=EVEN, modes=BOTH)
def three_neighbouring_blocks_masked(q, k, v):
    s = half(blocks(q), three_blocks(blocks(k)))
    block, place = torch.arange(3)[:, None, None], torch.arange(12)[None, None]
    inside = (block * 4 + place - 4 >= 0) & (block * 4 + place - 4 < 12)
    return (s.masked_fill(~inside, -1e10).softmax(-1) @ three_blocks(blocks(v))).flatten(2, 3)


@form(1, S, sizes=EVEN)
def rolled_blocks(q, k, v):  # shifted windows without a mask
    q, k, v = (blocks(x.roll(-2, 2)) for x in (q, k, v))
    return (weights(q, k) @ v).flatten(2, 3).roll(2, 2)


@form(1, S, sizes=EVEN)
def rolled_blocks_masked(q, k, v):  # swin in one dimension
    q, k, v = (blocks(x.roll(-2, 2)) for x in (q, k, v))
    zone = (torch.arange(12) + 2 >= 12).view(3, 4)
    s = half(q, k).masked_fill(zone[:, :, None] != zone[:, None], -100.0)
    return (s.softmax(-1) @ v).flatten(2, 3).roll(2, 2)


@form(1, S, sizes=EVEN, modes=BOTH)
def sliding_windows_unfolded(q, k, v):  # natten: each query has keys of its own
    k, v = (F.pad(x, (0, 0, 2, 2)).unfold(2, 5, 1) for x in (k, v))
    s = torch.einsum("bhsd,bhsdk->bhsk", q * 0.3, k)
    return torch.einsum("bhsk,bhsdk->bhsd", s.softmax(-1), v)


@form(Code.NO_QK, S, sizes=EVEN)
def sliding_windows_by_shifts(q, k, v):
    s = torch.stack([(q * k.roll(i, 2)).sum(-1) for i in (-1, 0, 1)], -1)
    p = s.softmax(-1)[..., None, :]
    return (p @ torch.stack([v.roll(i, 2) for i in (-1, 0, 1)], -2)).squeeze(-2)


@form(Code.SCORE_OP, S, sizes=EVEN)
def diagonals_of_the_scores(q, k, v):  # longformer's chunks: the scores are taken apart by as_strided
    s = half(q, k)
    band = F.pad(s, (2, 2)).as_strided((3, 4, 12, 5), (768, 192, 17, 1))
    return torch.einsum("bhsk,bhskd->bhsd", band.softmax(-1), F.pad(v, (0, 0, 2, 2)).unfold(2, 5, 1).mT)


@form(Code.SCORE_OP, S, sizes=EVEN, modes=BOTH)
def local_and_global(q, k, v):  # longformer, led: a global key joins each window
    s = torch.cat([half(q, k[:, :, :1]), half(q, k)], -1)
    return s.softmax(-1) @ torch.cat([v[:, :, :1], v], 2)


@form(Code.SCORE_OP, S, sizes=EVEN)
def local_and_global_apart(q, k, v):  # the joint softmax, and two products with the values
    s = torch.cat([half(q, k[:, :, :3]), half(q, k[:, :, 3:])], -1)
    p = s.softmax(-1)
    return p[..., :3] @ v[:, :, :3] + p[..., 3:] @ v[:, :, 3:]


@form((1, 1), S, sizes=EVEN)
def global_queries_beside_the_rest(q, k, v):
    return torch.cat([weights(q[:, :, :2], k) @ v, weights(q[:, :, 2:], k) @ v], 2)


@form((1, 1), S, sizes=EVEN)
def halves_of_the_heads(q, k, v):  # half of the heads look ahead, half behind
    a = half(q[:, :2], k[:, :2])
    b = half(q[:, 2:], k[:, 2:])
    a, b = a.masked_fill(~causal(a), INF), b.masked_fill(causal(b).mT & ~torch.eye(12, dtype=torch.bool), INF)
    return torch.cat([a.softmax(-1) @ v[:, :2], b.softmax(-1) @ v[:, 2:]], 1)


@form((Code.SCORE_USED, Code.SCORE_USED), S)
def ring_of_two_parts_by_hand(q, k, v):  # two partial softmaxes joined by their log-sum-exp
    a, b = half(q, k[:, :, :5]), half(q, k[:, :, 5:])
    la, lb = a.logsumexp(-1, keepdim=True), b.logsumexp(-1, keepdim=True)
    w = (la - lb).sigmoid()
    return w * (a.softmax(-1) @ v[:, :, :5]) + (1 - w) * (b.softmax(-1) @ v[:, :, 5:])


@form(None, S)
def online_softmax_by_hand(q, k, v):  # flash attention written out in two steps
    a, b = half(q, k[:, :, :5]), half(q, k[:, :, 5:])
    m = torch.maximum(a.amax(-1, keepdim=True), b.amax(-1, keepdim=True))
    x, y = (a - m).exp(), (b - m).exp()
    return (x @ v[:, :, :5] + y @ v[:, :, 5:]) / (x.sum(-1, keepdim=True) + y.sum(-1, keepdim=True))


@form((1, 1, 1), S)
def queries_in_a_loop(q, k, v):  # sliced attention of diffusers
    return torch.cat([weights(q[:, :, i:i + 4], k) @ v for i in (0, 4, 8)], 2)


@form((1, 1), S, sizes={"h": 2})
def heads_in_a_loop(q, k, v):
    return torch.stack([weights(q[:, i], k[:, i]) @ v[:, i] for i in range(2)], 1)


@form((1, 1), "bshd bshd bshd", sizes={"s": 6, "h": 4})
def axial(q, k, v):  # rows, then columns
    o = weights(q, k) @ v
    q, k, o = (x.transpose(1, 2) for x in (q, k, o))
    return weights(q, k) @ o


# -- memories and other keys -------------------------------------------------------------------------------------------

@form(1, X, Arg("hnd"), Arg("hne"), modes=BOTH)
def memory_tokens(q, k, v, mk, mv):  # persistent memory, prefix tuning
    k = torch.cat([mk.expand(q.size(0), -1, -1, -1), k], 2)
    v = torch.cat([mv.expand(q.size(0), -1, -1, -1), v], 2)
    return weights(q, k) @ v


@form(1, X, Arg("bhnd", "const"), Arg("bhne", "const"))
def cache_of_the_previous_segment(q, k, v, ck, cv):  # transformer-xl without positions
    return weights(q, torch.cat([ck, k], 2)) @ torch.cat([cv, v], 2)


@form(1, X, modes=BOTH)
def zero_key_and_value_added(q, k, v):  # add_zero_attn on the operands: softmax plus one
    return weights(q, F.pad(k, (0, 0, 0, 1))) @ F.pad(v, (0, 0, 0, 1))


@form(1, X, Arg("11h1d"), Arg("11h1e"), sizes={"h": 4})
def bias_key_and_value_added(q, k, v, bk, bv):  # add_bias_kv
    k, v = (torch.cat([x, y[0].transpose(0, 1)[0].expand(3, 4, 1, -1)], 2) for x, y in ((k, bk), (v, bv)))
    return weights(q, k) @ v


@form((Code.SCORE_OP, ), X, Arg("bhqn"), modes=BOTH)
def scores_of_a_memory_joined(q, k, v, s):  # two more logits that have values
    p = torch.cat([half(q, k), s], -1).softmax(-1)
    return p @ torch.cat([v, v[:, :, :2].sin()], 2)


@form(Code.SCORE_OP, X, Arg("h"))
def sink_with_a_value(q, k, v, sink):
    s = half(q, k)
    s = torch.cat([s, sink.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    return s.softmax(-1) @ F.pad(v, (0, 0, 0, 1), value=1.0)


@form(Code.SCORE_OP, X, Arg("h"))
def sink_in_front(q, k, v, sink):  # in front of the keys and not behind
    s = half(q, k)
    s = torch.cat([sink.view(1, -1, 1, 1).expand(*s.shape[:3], 1), s], -1)
    return s.softmax(-1)[..., 1:] @ v


@form(Code.PROB_OP, X, Arg("h"))
def sink_cut_off_from_the_wrong_side(q, k, v, sink):
    s = half(q, k)
    s = torch.cat([s, sink.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    return s.softmax(-1)[..., 1:] @ v


@form(Code.SCORE_OP, X, Arg("h"))
def sink_in_the_middle(q, k, v, sink):
    s = half(q, k)
    s = torch.cat([s[..., :7], sink.view(1, -1, 1, 1).expand(*s.shape[:3], 1), s[..., 7:]], -1)
    p = s.softmax(-1)
    return torch.cat([p[..., :7], p[..., 8:]], -1) @ v


@form(Code.SCORE_OP, X, Arg("hn"))
def two_sinks(q, k, v, sink):
    s = half(q, k)
    s = torch.cat([s, sink.view(1, 4, 1, 2).expand(*s.shape[:3], 2)], -1)
    return s.softmax(-1)[..., :-2] @ v


@form(Code.FEATURE, X, Arg("bhq1"), modes=BOTH)
def sink_of_each_query(q, k, v, sink):
    return torch.cat([half(q, k), sink], -1).softmax(-1)[..., :-1] @ v


@form(Code.FEATURE, X, modes=BOTH)
def sink_of_the_scores(q, k, v):  # a null key: its logit is a product
    s = half(q, k)
    return torch.cat([s, q.sum(-1, keepdim=True)], -1).softmax(-1)[..., :-1] @ v


@form(Code.WEIGHTS_USED, X, Arg("h"))
def weight_of_the_sink_returned(q, k, v, sink):
    s = half(q, k)
    p = torch.cat([s, sink.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1).softmax(-1)
    return p[..., :-1] @ v, p[..., -1]


@form(Code.PROB_OP, X, Arg("h"))
def sink_renormalised(q, k, v, sink):
    s = half(q, k)
    p = torch.cat([s, sink.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1).softmax(-1)[..., :-1]
    return (p / (p.sum(-1, keepdim=True) + 0.1)) @ v


@form(Code.FEATURE, X, Arg("h"))
def sink_of_the_largest_score(q, k, v, sink):
    s = half(q, k)
    return torch.cat([s, s.amax(-1, keepdim=True)], -1).softmax(-1)[..., :-1] @ v


@form(Code.SCORE_USED, X, Arg("h"))
def sink_after_the_product_with_another_sign(q, k, v, sink):  # sigmoid(sink - LSE)
    s = half(q, k)
    return (s.softmax(-1) @ v) * torch.sigmoid(sink.view(1, -1, 1, 1) - s.logsumexp(-1, keepdim=True))


@form(Code.NOT_ATTENTION, X)
def softmax_plus_two(q, k, v):
    e = half(q, k).exp()
    return (e / (e.sum(-1, keepdim=True) + 2.0)) @ v


@form(Code.NOT_ATTENTION, X)
def softmax_plus_one_after_the_maximum(q, k, v):  # the one is not shifted with the scores
    s = half(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / (e.sum(-1, keepdim=True) + 1.0)) @ v


@form(Code.NOT_ATTENTION, X)
def softmax_plus_one_shifted_right(q, k, v):
    s = half(q, k)
    m = s.amax(-1, keepdim=True)
    e = (s - m).exp()
    return (e / (e.sum(-1, keepdim=True) + (-m).exp())) @ v


@form(Code.SCORE_OP, X)
def softmax_plus_one_by_padding(q, k, v):  # the zero column behind
    return F.pad(half(q, k), (0, 1)).softmax(-1)[..., :-1] @ v


# -- indexers ----------------------------------------------------------------------------------------------------------

@form(None, S)
def lightning_indexer(q, k, w):  # deepseek: relu of a product, weighted over the heads, the best kept
    s = torch.einsum("bhqk,bhq->bqk", qk(q, k).relu(), w.mean(-1))
    return s.masked_fill(~causal(s), INF).topk(3, -1).indices


@form(1, S, modes=BOTH)
def indexer_before_attention(q, k, v):  # the mask comes from another product: dense attention with a mask
    i = (q[:, :1, :, :4] @ k[:, :1, :, :4].mT).relu()
    keep = torch.zeros(i.shape, dtype=torch.bool).scatter(-1, i.topk(4, -1).indices, True)
    return half(q, k).masked_fill(~keep, INF).softmax(-1) @ v


@form(1, S, modes=BOTH)
def keys_gathered_for_each_query(q, k, v):  # sparse attention over an index: a batch of single queries
    i = (q[:, :1, :, :4] @ k[:, :1, :, :4].mT).topk(4, -1).indices[:, 0]
    b = torch.arange(3)[:, None, None]
    k, v = (x.transpose(1, 2)[b, i] for x in (k, v))
    s = torch.einsum("bhsd,bskhd->bshk", q * 0.3, k)
    return torch.einsum("bshk,bskhd->bhsd", s.softmax(-1), v)


@form(1, S, modes=BOTH)
def keys_sorted_first(q, k, v):  # the same keys for all queries, in another order
    order = k[:, :1, :, 0].argsort(-1)[..., None]
    k, v = (x.gather(2, order.expand(-1, 4, -1, 8)) for x in (k, v))
    return weights(q, k) @ v


@form(1, S, modes=BOTH)
def best_keys_of_the_batch(q, k, v):  # expert-choice: the longest keys
    order = k.norm(dim=-1).topk(6, -1).indices[..., None].expand(-1, -1, -1, 8)
    return weights(q, k.gather(2, order)) @ v.gather(2, order)


@form((Code.SCORE_OP, 1), X)
def routed_between_two_memories(q, k, v):
    gate = (q @ q.mT).sum(-1, keepdim=True).sigmoid()
    near = half(q, k)
    far = torch.cat([near[..., :7], half(q, k.flip(-2))[..., 7:]], -1)
    return gate * (far.softmax(-1) @ v) + (1 - gate) * (weights(q, k.sin()) @ v)
