"""Attention of another kernel than the softmax of a product, and softmaxes that have another purpose."""
from __future__ import annotations

import torch
from forms_masked import INF, causal
from forms_negative_register import registering
from forms_negative_scores import half
from forms_negative_weights import weights
from forms_support import Arg, Form
from forms_written import LIST, S, X, heads, qk
from torch.nn import functional as F

from fa_inductor.reasons import Code

FORMS: dict[str, Form] = {}
form = registering(FORMS)


def feature(x):
    """A positive feature map of linear attention."""
    return F.elu(x) + 1


# -- no softmax at all -------------------------------------------------------------------------------------------------

@form(None, S)
def linear_attention_with_elu(q, k, v):
    q, k = feature(q), feature(k)
    return (q @ (k.mT @ v)) / (q @ k.sum(-2, keepdim=True).mT)


@form(None, S)
def causal_linear_attention(q, k, v):
    q, k = feature(q), feature(k)
    state = (k[..., None] * v[..., None, :]).cumsum(2)
    return torch.einsum("bhsd,bhsde->bhse", q, state)


@form(None, S)
def linear_attention_in_the_order_of_attention(q, k, v):
    s = feature(q) @ feature(k).mT
    return (s / s.sum(-1, keepdim=True)) @ v


@form(None, S)
def retention(q, k, v):  # RetNet: decayed scores
    s = half(q, k)
    i = torch.arange(10)
    decay = torch.where(causal(s), 0.9 ** (i[:, None] - i[None]).to(q.dtype), 0.0)
    return (s * decay) @ v


@form(None, X)
def squared_relu_attention(q, k, v):  # GAU
    return ((half(q, k)).relu().square() / 14) @ v


@form(None, X)
def relu_over_length(q, k, v):
    return (half(q, k).relu() / k.size(-2)) @ v


@form(None, X)
def sigmoid_with_a_bias(q, k, v):
    return (half(q, k) - 2.6).sigmoid() @ v


@form(None, X)
def sigmoid_renormalised(q, k, v):
    p = half(q, k).sigmoid()
    return (p / p.sum(-1, keepdim=True)) @ v


@form(None, X)
def tanh_attention(q, k, v):
    return half(q, k).tanh() @ v


@form(None, X)
def exponential_without_a_sum(q, k, v):
    return half(q, k).exp() @ v


@form(None, X)
def exponential_over_a_constant(q, k, v):
    return (half(q, k).exp() / 14.0) @ v


@form(None, X)
def softplus_normalised(q, k, v):
    p = F.softplus(half(q, k))
    return (p / p.sum(-1, keepdim=True)) @ v


@form(None, X)
def scores_normalised_by_their_sum_of_squares(q, k, v):  # taylor softmax
    s = half(q, k)
    p = 1 + s + s * s / 2
    return (p / p.sum(-1, keepdim=True)) @ v


@form(None, X)
def scores_normalised_to_unit_length(q, k, v):
    return F.normalize(half(q, k), dim=-1) @ v


@form(None, X)
def hard_attention(q, k, v):
    return v.gather(-2, half(q, k).argmax(-1, keepdim=True).expand(-1, -1, -1, 16))


@form(None, X, sizes={"k": 6})
def sparsemax(q, k, v):
    s = half(q, k)
    z = s.sort(-1, descending=True).values
    n = torch.arange(1, 7).to(q.dtype)
    top = z.cumsum(-1) - 1
    size = (n * z > top).sum(-1, keepdim=True)
    tau = top.gather(-1, size - 1) / size
    return (s - tau).relu() @ v


@form(None, S)
def fourier_mixing(q, k, v):
    return torch.fft.fft2(v, dim=(-2, -1)).real * 0.1 + q + k


@form(None, "bshd bshd bshd")
def gated_linear_unit(q, k, v):
    return q.sigmoid() * (k.mT @ v).mean(-1)[:, :, None]


# -- softmaxes of linear attention and of low rank ---------------------------------------------------------------------

@form(Code.NO_QK, S)
def efficient_attention(q, k, v):  # the softmax of the keys over positions
    return q @ (k.softmax(-2).mT @ v)


@form((Code.NO_QK, Code.NO_QK), S)
def double_softmax_linear_attention(q, k, v):  # coat, efficientvit
    context = torch.einsum("bhsd,bhse->bhde", k.softmax(2), v)
    return torch.einsum("bhsd,bhde->bhse", q.softmax(-1), context)


@form((1, Code.PROB_OP), S, Arg("es"))
def performer_features(q, k, v, w):  # random features with a softmax over all of them
    q, k = ((qk(x, w[:, :8]) * 0.3).softmax(-1) for x in (q, k))
    return q @ (k.mT @ v)


@form((1, 1), S)
def landmarks_between(q, k, v):  # Nystrom without its inverse, agent attention
    landmarks = k[:, :, ::2]
    return weights(q, landmarks) @ ((half(landmarks, k)).softmax(-1) @ v)


@form(1, "bhqd bhkd bhke", Arg("ek"))
def linformer(q, k, v, e):  # E shortens the keys and values: attention over what is left
    return weights(q, e @ k) @ (e @ v)


@form(1, "bhqd bhkd bhke", Arg("ek"))
def linformer_keys_alone(q, k, v, e):  # Q (E K)^T softmax, then E V: E again for values of another projection
    return weights(q, e @ k) @ (e.sin() @ v)


@form((1, 1), "bhqd bhkd bhke", Arg("hed"))
def induced_points(q, k, v, latents):  # set transformer, perceiver, luna
    context = weights(latents, k) @ v
    return weights(q, latents) @ context


@form(1, X, Arg("dd"))
def bilinear_scores(q, k, v, w):
    return (q @ w @ k.mT).softmax(-1) @ v


@form(1, X, Arg("d"))
def scores_of_weighted_features(q, k, v, w):
    return ((q * w) @ k.mT).softmax(-1) @ v


@form(1, X)
def random_features_of_queries_and_keys(q, k, v):
    return half(q.cos(), k.sin()).softmax(-1) @ v


@form(1, X)
def hopfield_step(q, k, v):  # one step of retrieval, then attention
    return weights(q, k) @ v


# -- kernels of distances ----------------------------------------------------------------------------------------------

@form(Code.NO_QK, X)
def gaussian_of_distances(q, k, v):
    return (-0.5 * (q[:, :, :, None] - k[:, :, None]).pow(2).sum(-1)).softmax(-1) @ v


@form(Code.NO_QK, X)
def laplacian_of_distances(q, k, v):
    return (-(q[:, :, :, None] - k[:, :, None]).abs().sum(-1)).softmax(-1) @ v


@form(Code.NO_QK, X)
def distances_by_cdist(q, k, v):
    return (-torch.cdist(q, k)).softmax(-1) @ v


@form(1, X)
def distances_expanded(q, k, v):  # |q|^2 + |k|^2 - 2 q k: a product with biases
    s = q.square().sum(-1, keepdim=True) + k.square().sum(-1)[:, :, None] - 2 * qk(q, k)
    return (-0.3 * s).softmax(-1) @ v


@form(1, X)
def root_of_distances_expanded(q, k, v):
    s = q.square().sum(-1, keepdim=True) + k.square().sum(-1)[:, :, None] - 2 * qk(q, k)
    return (-(s.relu() + 1.0).sqrt()).softmax(-1) @ v


@form(1, X)
def cosine_by_norms(q, k, v):
    s = qk(q, k) / (q.norm(dim=-1, keepdim=True) * k.norm(dim=-1)[:, :, None] + 1e-6)
    return s.softmax(-1) @ v


@form(Code.NO_QK, X)
def cosine_similarity_written_out(q, k, v):
    return F.cosine_similarity(q[:, :, :, None], k[:, :, None], dim=-1).softmax(-1) @ v


@form(Code.NO_QK, X, Arg("dd"), Arg("d"))
def additive_attention_with_projections(q, k, v, w, u):  # Bahdanau, GAT v2
    return (((q @ w)[:, :, :, None] + k[:, :, None]).tanh() @ u).softmax(-1) @ v


@form(Code.NO_QK, X, Arg("d"), Arg("d"))
def graph_attention(q, k, v, a, b):  # GAT: a function of the query plus one of the key
    s = (q @ a)[..., None] + (k @ b)[:, :, None]
    return F.leaky_relu(s, 0.2).softmax(-1) @ v


@form(Code.NO_QK, "bhqd bhkd bhke")
def elementwise_minimum(q, k, v):
    return torch.minimum(q[:, :, :, None], k[:, :, None]).sum(-1).softmax(-1) @ v


@form(Code.NO_QK, "qk bke")
def learned_positions_alone(s, v):  # synthesizer, gMLP
    return s.softmax(-1) @ v


@form(Code.NO_QK, "bhsd bhse", Arg("ds"))
def dense_synthesizer(x, v, w):  # scores are a projection of the query: product of X and a weight
    return F.leaky_relu(x.sum(-1, keepdim=True).expand(-1, -1, -1, 10)).softmax(-1) @ v


@form(1, "bhsd bhse", Arg("ds"))
def synthesizer_with_one_layer(x, v, w):  # attention with the rows of W^T for keys
    return (x @ w).softmax(-1) @ v


# -- softmaxes with another purpose ------------------------------------------------------------------------------------

@form(None, "bsd", Arg("d"))
def attention_pooling(x, w):
    return ((x @ w).softmax(-1)[..., None] * x).sum(1)


@form(Code.NO_QK, "bsd", Arg("d"))
def attention_pooling_by_a_column(x, w):  # a matrix times a column is no matrix product
    return torch.bmm((x @ w[:, None]).mT.softmax(-1), x)


@form(Code.NO_QK, "bsd bs")
def pooling_by_given_scores(x, s):
    return (s.softmax(-1)[:, None] @ x).squeeze(1)


@form(None, "bsd bk")
def language_model_loss(x, w):
    return (x.flatten(0, 1)[:, :3] @ w).log_softmax(-1)[:, 0]


@form(None, "bqd kd")
def label_smoothing_loss(x, w):
    logp = (x @ w.t()).log_softmax(-1)
    return -0.9 * logp[..., 0] - 0.1 * logp.mean(-1)


@form(None, "qd qd")
def clip_loss(q, k):
    s = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).t() * 10.0
    return -(s.log_softmax(-1).diagonal() + s.log_softmax(0).diagonal())


@form(None, "bqd bkd")
def dual_softmax_matching(q, k):  # loftr, lightglue: both softmaxes multiplied, no values
    s = q @ k.mT
    return s.softmax(-1) * s.softmax(-2)


@form(None, "bqd dk bkqe")
def router_of_the_largest_two(x, gate, experts):
    top = (x @ gate).softmax(-1).topk(2, -1)
    chosen = experts.transpose(1, 2).gather(2, top.indices[..., None].expand(-1, -1, -1, 16))
    return (top.values[..., None] * chosen).sum(2)


@form(Code.NO_QK, "bqd", Arg("k"), Arg("kd"))
def mixture_of_logits(x, prior, table):
    return x + prior.softmax(-1) @ table


@form(1, "bqd", Arg("kd"), Arg("kd"))
def softmax_codebook(x, codes, values):  # soft vector quantisation is attention over the codes
    return (x @ codes.t()).softmax(-1) @ values


@form(1, "bqd", Arg("kd"))
def expected_embedding(x, table):  # the tied output layer, fed back
    return (x @ table.t()).softmax(-1) @ table


@form(None, "bkk bqk")
def conditional_random_field(transition, emission):
    alpha = emission[:, 0]
    for t in range(1, 4):
        alpha = (alpha[:, :, None] + transition).logsumexp(1) + emission[:, t]
    return alpha.logsumexp(-1)


@form(None, "bqd bkd")
def energy_of_a_hopfield_net(q, k):
    return -(q @ k.mT).logsumexp(-1)


@form(Code.NO_QK, "bck bke")
def spatial_soft_argmax(heat, grid):  # the softmax of a heat map times coordinates
    return heat.softmax(-1) @ grid


@form(None, "bkc bke", sizes={"e": 32})
def channel_gate(x, y):  # squeeze and excitation with a softmax: selective kernels
    g = torch.stack([x.mean(1), y.mean(1)]).softmax(0)
    return g[0][:, None] * x + g[1][:, None] * y


@form(None, LIST)
def heads_mixed_by_a_softmax(q, k, v):
    q, k, v = heads(q, k, v)
    g = q.mean((-2, -1)).softmax(-1)
    return (g[:, :, None, None] * (k + v)).sum(1)


@form(None, X)
def logsumexp_pooling(q, k, v):
    return (half(q, k).logsumexp(-1, keepdim=True) * q).sum(-2) + v.mean(-2)[..., :8]


@form(None, X)
def masked_logsumexp_alone(q, k, v):
    s = half(q, k).masked_fill(torch.arange(14) > 10, INF)
    return (s - s.logsumexp(-1, keepdim=True)).exp().sum(-1) + v.sum((-2, -1))[..., None]
