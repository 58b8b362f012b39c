"""Written-out attention with masks and biases: forms that are rewritten."""
from __future__ import annotations

import math

import torch
from forms_support import Arg, Form, args, up
from forms_written import LIST, S, X, heads, qk, repeat_kv, soft32
from torch import Tensor
from torch.nn import functional as F

from fa_inductor.reasons import Code

FORMS: dict[str, Form] = {}
HALF = ("float32", "bfloat16")
BUFFER = Arg("11pp", "tril")
KEEP = Arg("bk", "keep")
INF = float("-inf")


def form(spec: str, *more: Arg, **keywords):
    """Registers a function as a form; the function's name is the form's."""
    def register(fn):
        FORMS[fn.__name__] = Form(fn, args(spec, *more), **{"sizes": {"p": 24}, **keywords})
        return fn
    return register


def smallest(t: Tensor) -> Tensor:
    return torch.full((), torch.finfo(t.dtype).min, dtype=t.dtype, device=t.device)


def additive(keep: Tensor, like: Tensor) -> Tensor:
    """A boolean mask as models add it: zero where attended, the dtype's smallest number elsewhere."""
    return torch.where(keep, torch.zeros((), dtype=like.dtype), smallest(like))


def causal(s: Tensor) -> Tensor:
    """[Sq, Sk] bool from comparing positions; queries are the last Sq of the Sk positions."""
    q, k = s.shape[-2:]
    return torch.arange(k)[None, :] <= torch.arange(q)[:, None] + (k - q)


# -- causal ----------------------------------------------------------------------------------------------------------

@form("bsc bsc bsc", BUFFER, dtypes=HALF)
def nanogpt(q, k, v, tril):
    b, t, c = q.shape
    q, k, v = (x.view(b, t, 4, c // 4).transpose(1, 2) for x in (q, k, v))
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(tril[:, :, :t, :t] == 0, INF)
    y = F.dropout(F.softmax(att, dim=-1), 0.0) @ v
    return y.transpose(1, 2).contiguous().view(b, t, c)


@form("bsc bsc bsc", Arg("11pp", "tril"))
def mingpt_under_autocast(q, k, v, tril):
    b, t, c = q.shape
    with torch.autocast("cpu", torch.bfloat16):
        q, k, v = (x.view(b, t, 4, c // 4).transpose(1, 2) for x in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(tril[:, :, :t, :t] == 0, INF)
        return F.softmax(att, dim=-1) @ v


@form(S)
def causal_by_tril(q, k, v):
    s = qk(q, k) * 0.3
    keep = torch.ones(s.shape[-2:], dtype=torch.bool).tril()
    return s.masked_fill(~keep, INF).softmax(-1) @ v


@form(S)
def causal_by_triu_added(q, k, v):
    s = qk(q, k) * 0.3
    return (s + torch.full(s.shape[-2:], INF, dtype=s.dtype).triu(1)).softmax(-1) @ v


@form(X)
def causal_at_the_end(q, k, v):
    s = qk(q, k) * 0.3
    return torch.where(causal(s), s, smallest(s)).softmax(-1) @ v


@form(LIST, Arg("11pp", "tril"), dtypes=HALF)
def gpt2_of_transformers_4(q, k, v, tril):
    q, k, v = heads(q, k, v)
    s = torch.matmul(q, k.transpose(-1, -2))
    s = s / torch.full([], v.size(-1) ** 0.5, dtype=s.dtype, device=s.device)
    s = torch.where(tril[:, :, k.size(-2) - q.size(-2):k.size(-2), :k.size(-2)], s, smallest(s))
    p = F.softmax(s, dim=-1).type(v.dtype)
    return (p @ v).transpose(1, 2)


@form(S)
def sliding_window(q, k, v):
    s = qk(q, k) * 0.3
    i = torch.arange(s.size(-1))
    keep = (i[None] <= i[:, None]) & (i[None] > i[:, None] - 4)
    return (s + additive(keep, s)).softmax(-1) @ v


@form(S)
def chunks(q, k, v):
    s = qk(q, k) * 0.3
    i = torch.arange(s.size(-1))
    keep = (i[None] <= i[:, None]) & (i[None] // 4 == i[:, None] // 4)
    return s.masked_fill(~keep, INF).softmax(-1) @ v


# -- padding ---------------------------------------------------------------------------------------------------------

@form("bqhd bkhd bkhe", KEEP, dtypes=HALF)
def annotated_transformer(q, k, v, keep):
    q, k, v = heads(q, k, v)
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    scores = scores.masked_fill(keep[:, None, None, :] == 0, -1e9)
    return torch.matmul(F.dropout(scores.softmax(dim=-1), 0.0), v)


@form(X, KEEP)
def distilbert(q, k, v, keep):
    s = (q / math.sqrt(q.size(-1))) @ k.transpose(2, 3)
    m = (keep == 0).view(k.size(0), 1, 1, k.size(2)).expand_as(s)
    return s.masked_fill(m, torch.finfo(s.dtype).min).softmax(-1) @ v


@form(X, KEEP)
def padding_scaled_by_smallest(q, k, v, keep):
    m = (1.0 - keep[:, None, None, :].to(q.dtype)) * torch.finfo(q.dtype).min
    return (qk(q, k) / 3.0 + m).softmax(-1) @ v


@form(X, KEEP)
def padding_times_minus_ten_thousand(q, k, v, keep):
    m = (1.0 - keep[:, None, None, :].to(q.dtype)) * -1e9
    return (qk(q, k) * 0.3 + m).softmax(-1) @ v


@form(X, KEEP)
def padding_subtracted(q, k, v, keep):
    return (qk(q, k) * 0.3 - 1e9 * (1.0 - keep[:, None, None, :].to(q.dtype))).softmax(-1) @ v


@form(X, KEEP)
def padding_by_masked_fill_in_place(q, k, v, keep):  # xlm
    s = qk(q / 3.0, k)
    s.masked_fill_(~keep[:, None, None, :].expand_as(s), torch.finfo(s.dtype).min)
    return F.softmax(s.to(up(s)), dim=-1).type_as(s) @ v


@form(S, Arg("bs", "keep"), dtypes=HALF)
def padding_and_causal(q, k, v, keep):
    s = qk(q, k) * 0.3
    m = causal(s) & keep[:, None, None, :]
    return soft32(s + additive(m, s), q) @ v


@form(S, Arg("b", "length"))
def padding_by_lengths(q, k, v, lengths):
    s = qk(q, k) * 0.3
    keep = torch.arange(s.size(-1))[None] < lengths[:, None]
    return s.masked_fill(~keep[:, None, None], INF).softmax(-1) @ v


@form(S, Arg("bs", "int"))
def documents(q, k, v, ids):
    s = qk(q, k) * 0.3
    return s.masked_fill(ids[:, None, :, None] != ids[:, None, None, :], INF).softmax(-1) @ v


# -- any mask --------------------------------------------------------------------------------------------------------

@form(X, Arg("bhqk", "keep"))
def mask_masked_fill_inf(q, k, v, keep):
    return (qk(q, k) * 0.3).masked_fill(~keep, INF).softmax(-1) @ v


@form(X, Arg("11qk", "keep"))
def mask_masked_fill_smallest(q, k, v, keep):
    s = qk(q, k) * 0.3
    return s.masked_fill(keep.logical_not(), torch.finfo(s.dtype).min).softmax(-1) @ v


@form(X, Arg("b1qk", "keep"), dtypes=HALF)
def mask_where(q, k, v, keep):
    s = qk(q, k) * 0.3
    return torch.where(keep, s, smallest(s)).softmax(-1) @ v


@form(X, Arg("qk", "keep"))
def mask_where_inverted(q, k, v, keep):
    s = qk(q, k) * 0.3
    return torch.where(~keep, torch.full_like(s, INF), s).softmax(-1) @ v


@form(X, Arg("b1qk", "keep"), dtypes=HALF)
def mask_added(q, k, v, keep):
    return (qk(q, k) * 0.3 + additive(keep, q)).softmax(-1) @ v


@form(X, Arg("b1qk", "keep"))
def mask_added_from_the_left(q, k, v, keep):
    return (additive(keep, q) + qk(q, k) * 0.3).softmax(-1) @ v


@form(X, Arg("b1qk", "keep"))
def mask_in_place(q, k, v, keep):
    s = qk(q, k) * 0.3
    s += additive(keep, q)
    return s.softmax(-1) @ v


@form(X, Arg("b1qk", "keep"))
def mask_before_the_scale(q, k, v, keep):
    return (qk(q, k).masked_fill(~keep, INF) * 0.3).softmax(-1) @ v


@form("bqhd bkhd bkhe", Arg("b1qk", "keep"))
def einsum_scale_after_the_mask(q, k, v, keep):
    energy = torch.einsum("bqhd,bkhd->bhqk", q, k).masked_fill(keep == 0, -1e20)
    return torch.einsum("bhqk,bkhd->bqhd", (energy / 3.0).softmax(3), v)


@form(X, Arg("bqk", "keep"))
def batched_heads(q, k, v, keep):  # mbart: [B*H, Q, K], views around the mask
    b, h, s, d = q.shape
    q, k, v = (t.reshape(b * h, -1, t.size(-1)) for t in (q * 0.3, k, v))
    w = torch.bmm(q, k.transpose(1, 2))
    w = (w.view(b, h, s, -1) + additive(keep, q)[:, None]).view(b * h, s, -1)
    return torch.bmm(w.softmax(-1), v).view(b, h, s, -1)


@form("bhqd bnkd bnke", Arg("b1qk", "keep"), dtypes=("float32", "bfloat16", "float16"))
def llama(q, k, v, keep):  # F1
    k, v = repeat_kv(k, 2), repeat_kv(v, 2)
    w = torch.matmul(q, k.transpose(2, 3)) * q.size(-1) ** -0.5
    w = w + additive(keep, q)
    w = F.softmax(w, dim=-1, dtype=up(q)).to(q.dtype)
    return torch.matmul(F.dropout(w, p=0.0), v).transpose(1, 2).contiguous()


@form(X, Arg("b1qk", "keep"), dtypes=("float32", "bfloat16", "float16"))
def bert(q, k, v, keep):  # F2
    w = torch.matmul(q, k.transpose(2, 3)) * q.size(-1) ** -0.5
    w = F.softmax(w + additive(keep, q), dim=-1)
    return torch.matmul(F.dropout(w, p=0.0), v).transpose(1, 2).contiguous()


# -- biases that need no gradient --------------------------------------------------------------------------------------

@form(X, Arg("bhqk", "const"), dtypes=HALF)
def bias_full(q, k, v, bias):
    return (qk(q, k) * 0.3 + bias).softmax(-1) @ v


@form(X, Arg("hqk", "const"))
def bias_per_head(q, k, v, bias):
    return (bias + qk(q, k) * 0.3).softmax(-1) @ v


@form(X, Arg("qk", "float32"), dtypes=("bfloat16",))
def bias_in_float32(q, k, v, bias):
    return (qk(q, k) * 0.3 + bias).softmax(-1).to(v.dtype) @ v


@form(X, Arg("1hqk", "const"), Arg("b1qk", "keep"))
def t5(q, k, v, bias, keep):  # no scale, two additions
    s = qk(q, k)
    s += bias
    return (s + additive(keep, s)).to(up(s)).softmax(-1).type_as(s) @ v


@form(X, Arg("h", "const"))
def alibi(q, k, v, slopes):
    s = qk(q, k) * 0.3
    distance = torch.arange(s.size(-1))[None] - torch.arange(s.size(-2))[:, None]
    return (s + slopes[:, None, None] * distance).softmax(-1) @ v


@form(S, Arg("h1k", "const"), sizes={"k": 10})
def falcon_alibi(q, k, v, a):  # the scale comes after the bias, in place
    s = qk(q, k) + a
    s *= 0.3
    return F.softmax(s + additive(causal(s), s), dim=-1, dtype=q.dtype) @ v


@form(S, Arg("hss", "const"))
def mpt(q, k, v, bias):
    s = qk(q, k) * 0.3 + bias[:, :, -q.size(2):]
    s = s.masked_fill(~causal(s), torch.finfo(q.dtype).min)
    return F.softmax(s.to(up(s)), dim=-1).to(v.dtype) @ v


@form("bwhsd bwhsd bwhsd", Arg("hss", "const"), Arg("wss", "bool"))
def swin_windows(q, k, v, bias, apart):
    s = qk(q * 0.3, k) + bias
    return (s + torch.where(apart, -100.0, 0.0).to(s.dtype)[:, None]).softmax(-1) @ v


@form(X, Arg("qk", "bool"), Arg("1hqk", "const"))
def bool_mask_added(q, k, v, ones, bias):  # True adds one
    return (qk(q, k) * 0.3 + ones).softmax(-1) @ v


@form(X)
def constant_added(q, k, v):
    return (qk(q, k) * 0.3 + 0.5).softmax(-1) @ v


# -- the score changed pointwise ---------------------------------------------------------------------------------------

@form(X, Arg("b1qk", "keep"), dtypes=HALF)
def softcap(q, k, v, keep):  # gemma2
    s = torch.tanh(qk(q, k) * 0.3 / 5.0) * 5.0
    return soft32(s + additive(keep, s), q) @ v


@form(X)
def clamped(q, k, v):
    return (qk(q, k) * 0.3).clamp(-1.0, 1.0).softmax(-1) @ v


@form(X, Arg("b1qk", "keep"), train=Code.EMPTY_ROWS)
def clamped_at_smallest(q, k, v, keep):  # xglm
    s = qk(q, k) * 0.3 + additive(keep, q)
    return torch.max(s, torch.tensor(torch.finfo(s.dtype).min, dtype=s.dtype)).softmax(-1) @ v


@form(X)
def cosine(q, k, v):
    return ((F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)) * 10.0).softmax(-1) @ v


@form(X, Arg("1h1", "const"))
def cosine_with_scale_per_head(q, k, v, scale):  # swinv2
    s = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
    return (s * scale.clamp(max=4.6).exp()[..., None]).softmax(-1) @ v


# -- sinks: a logit that takes part in the softmax and has no value ----------------------------------------------------

@form(X, Arg("h", "const"))
def sink_joined_and_sliced(q, k, v, sinks):  # gpt_oss
    s = qk(q, k) * 0.3
    s = torch.cat([s, sinks.view(1, -1, 1, 1).expand(s.size(0), -1, s.size(2), 1)], -1)
    s = s - s.max(-1, keepdim=True).values
    return s.softmax(-1)[..., :-1] @ v


@form(X, Arg("h", "const"))
def sink_by_logsumexp(q, k, v, sinks):  # granite_swa
    s = qk(q, k) * 0.3
    return (s.softmax(-1) @ v) * torch.sigmoid(s.logsumexp(-1, keepdim=True) - sinks.view(1, -1, 1, 1))
