"""Forms in which rows may be masked as a whole, tensors change in place, or one tensor plays two parts."""
from __future__ import annotations

import torch
from forms_masked import INF, additive, causal
from forms_support import Arg, Form, args, up
from forms_written import S, X, qk, soft32
from torch.nn import functional as F

from fa_inductor.reasons import Code

FORMS: dict[str, Form] = {}
HOLE = Arg("bk", "hole")
HALF = ("float32", "bfloat16")


def form(expect, spec: str, *more: Arg, **keywords):
    """Registers a function as a form; ``expect`` is what the report must say."""
    def register(fn):
        FORMS[fn.__name__] = Form(fn, args(spec, *more), expect=expect, **keywords)
        return fn
    return register


# -- rows with every key masked ----------------------------------------------------------------------------------------

@form(1, X, HOLE, dtypes=HALF)
def empty_rows_of_inf(q, k, v, keep):  # NaN
    return (qk(q, k) * 0.3).masked_fill(~keep[:, None, None], INF).softmax(-1) @ v


@form(1, X, HOLE)
def empty_rows_of_inf_added(q, k, v, keep):
    m = torch.zeros(keep.shape, dtype=q.dtype).masked_fill(~keep, INF)
    return (qk(q, k) * 0.3 + m[:, None, None]).softmax(-1) @ v


@form(1, X, HOLE, dtypes=HALF)
def empty_rows_of_smallest_added(q, k, v, keep):  # the mean of V
    return soft32(qk(q, k) * 0.3 + additive(keep, q)[:, None, None], q) @ v


@form(1, X, HOLE, dtypes=HALF)
def empty_rows_of_smallest_filled(q, k, v, keep):
    s = qk(q, k) * 0.3
    return s.masked_fill(~keep[:, None, None], torch.finfo(s.dtype).min).softmax(-1) @ v


@form(1, X, HOLE)
def empty_rows_of_a_billion(q, k, v, keep):
    return (qk(q, k) * 0.3).masked_fill(~keep[:, None, None], -1e9).softmax(-1) @ v


@form(1, X, Arg("bhqk", "hole"))
def empty_rows_of_any_mask(q, k, v, keep):
    return (qk(q, k) * 0.3).masked_fill(~keep, -1e9).softmax(-1) @ v


@form(1, X, HOLE)
def empty_rows_of_ten_thousand(q, k, v, keep):  # a row keeps its scores beside -1e4
    return (qk(q, k) * 0.3 + (1 - keep.to(q.dtype))[:, None, None] * -1e4).softmax(-1) @ v


@form(1, S, Arg("bs", "hole"), dtypes=HALF)
def left_padding_under_causal(q, k, v, keep):
    s = qk(q, k) * 0.3
    return soft32(s + additive(causal(s) & keep[:, None, None], s), q) @ v


@form(1, S)
def causal_that_excludes_itself(q, k, v):  # the first row is empty
    s = qk(q, k) * 0.3
    return s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(), INF).softmax(-1) @ v


@form(1, "bhqd bhkd bhke", sizes={"q": 14, "k": 6})
def causal_with_more_queries_than_keys(q, k, v):
    s = qk(q, k) * 0.3
    return s.masked_fill(~causal(s), -1e9).softmax(-1) @ v


@form(Code.MASK_FILL, S, Arg("bs", "hole"))
def two_fills_that_meet(q, k, v, keep):
    s = (qk(q, k) * 0.3).masked_fill(~keep[:, None, None], -1e9)
    return s.masked_fill(~causal(s), torch.finfo(torch.float32).min).softmax(-1) @ v


@form(1, S, Arg("bs", "keep"))
def two_fills_that_never_meet(q, k, v, keep):
    keep = keep | (torch.arange(keep.size(1)) == 0)
    s = (qk(q, k) * 0.3).masked_fill(~keep[:, None, None], -1e9)
    return s.masked_fill(~causal(s), torch.finfo(torch.float32).min).softmax(-1) @ v


@form(Code.MASK_FILL, S, Arg("bs", "hole"))
def masks_added_twice(q, k, v, keep):  # twice the smallest number is -inf
    s = qk(q, k) * 0.3
    return (s + additive(keep, q)[:, None, None] + additive(causal(s), q)).softmax(-1) @ v


@form(1, X, HOLE)
def same_mask_twice(q, k, v, keep):
    s = (qk(q, k) * 0.3).masked_fill(~keep[:, None, None], -1e9)
    return s.masked_fill(~keep[:, None, None], -1e9).softmax(-1) @ v


@form(1, X, HOLE, dtypes=("float16",))
def smallest_float32_in_half(q, k, v, keep):  # becomes -inf
    m = torch.where(keep, 0.0, torch.finfo(torch.float32).min).to(q.dtype)[:, None, None]
    return (qk(q, k) * 0.3 + m).softmax(-1) @ v


@form(1, X, HOLE, dtypes=("float16", "bfloat16"))
def smallest_float32_beside_half(q, k, v, keep):  # the sum is float32
    m = torch.where(keep, 0.0, torch.finfo(torch.float32).min)[:, None, None]
    return (qk(q, k) * 0.3 + m).softmax(-1).to(v.dtype) @ v


@form(1, X, HOLE)
def smallest_before_the_scale(q, k, v, keep):
    s = qk(q, k).masked_fill(~keep[:, None, None], torch.finfo(torch.float32).min)
    return (s * 0.3).softmax(-1) @ v


@form(1, X, HOLE)
def smallest_before_a_large_scale(q, k, v, keep):  # becomes -inf in float32
    s = qk(q, k).masked_fill(~keep[:, None, None], -3e38)
    return (s.float() * 2.0).to(up(q)).softmax(-1).to(v.dtype) @ v


@form(1, X, Arg("bq", "hole"))
def rows_masked_by_query(q, k, v, keep):
    return (qk(q, k) * 0.3).masked_fill(~keep[:, None, :, None], -1e9).softmax(-1) @ v


@form(1, S, Arg("bs", "hole"))
def masked_on_both_sides(q, k, v, keep):  # fastspeech2
    m = keep[:, None, :, None] & keep[:, None, None]
    return (qk(q, k) * 0.3).masked_fill(~m, torch.finfo(q.dtype).min).softmax(-1) @ v


# -- one tensor in two parts -------------------------------------------------------------------------------------------

@form(1, "bhsd", dtypes=HALF)
def one_tensor_for_all(x):
    return (qk(x, x) * 0.3).softmax(-1) @ x


@form(1, "bhqd bhkd")
def keys_as_values(q, k):
    return (qk(q, k) * 0.3).softmax(-1) @ k


@form(1, "bhsd bhsd")
def queries_as_keys(q, v):
    return (qk(q, q) * 0.3).softmax(-1) @ v


@form(1, "bhsd bhsd")
def queries_as_values(q, k):
    return (qk(q, k) * 0.3).softmax(-1) @ q


@form(1, X)
def output_used_twice(q, k, v):
    o = (qk(q, k) * 0.3).softmax(-1) @ v
    return o + o.sin(), o.mean(-1)


@form(1, X)
def gradient_into_queries_only(q, k, v):
    return (qk(q, k.detach()) * 0.3).softmax(-1) @ v.detach(), (k * v.mean()).sum()


@form(1, X)
def gradient_into_keys_only(q, k, v):
    return (qk(q.detach(), k) * 0.3).softmax(-1) @ v.detach(), (q * v.mean()).sum()


@form(1, X)
def gradient_into_values_only(q, k, v):
    return (qk(q.detach(), k.detach()) * 0.3).softmax(-1) @ v, (q * k.mean()).sum()


@form(1, X)
def gradient_into_queries_and_keys(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1) @ v.detach(), v.sin()


@form(1, X)
def no_gradient(q, k, v):
    with torch.no_grad():
        o = (qk(q, k) * 0.3).softmax(-1) @ v
    return o.detach() * v.mean(), q * k.mean()


@form(2, S)
def attention_of_attention(q, k, v):
    o = (qk(q, k) * 0.3).softmax(-1) @ v
    return (qk(o, k) * 0.3).softmax(-1) @ v


@form(2, S)
def output_as_keys_and_values(q, k, v):
    o = (qk(q, k) * 0.3).softmax(-1) @ v
    return (qk(q, o) * 0.3).softmax(-1) @ o


@form(3, S)
def three_layers_of_one_tensor(x, y, z):
    for _ in range(3):
        x = x + (qk(x, y) * 0.3).softmax(-1) @ z
    return x


@form(1, "bhsd bhsd bhsd", sizes={"b": 1, "h": 2, "s": 5})
def output_as_a_matrix(q, k, v):
    return ((qk(q, k) * 0.3).softmax(-1) @ v).view(10, 8) @ q.view(10, 8).t()


@form(1, "bhsd bhsd bhsd pc", sizes={"p": 12})
def output_reshaped_for_a_linear_layer(q, k, v, w):
    o = (qk(q, k) * 0.3).softmax(-1) @ v
    return o.transpose(1, 2).reshape(-1, 32) @ w.t()


# -- changes in place --------------------------------------------------------------------------------------------------

@form(1, X, modes=("infer",))  # autograd itself refuses to differentiate this
def keys_changed_after_the_product(q, k, v):
    k = k.clone()
    s = qk(q, k) * 0.3
    k.add_(1.0)
    return s.softmax(-1) @ v, k


@form(1, "bhqd bhkd")
def keys_changed_before_they_are_values(q, k):
    k = k.sin()
    s = qk(q, k.clone()) * 0.3
    k.mul_(2.0)
    return s.softmax(-1) @ k


@form(1, X, modes=("infer",))
def queries_changed_after_the_product(q, k, v):
    x = q.clone()
    s = qk(x, k) * 0.3
    x.zero_()
    return s.softmax(-1) @ v + x.sum()


@form(1, X)
def output_changed(q, k, v):
    o = (qk(q, k) * 0.3).softmax(-1) @ v
    o[..., 0] = 0.0
    return o.mul_(2.0)


@form(1, X)
def output_written_into_a_buffer(q, k, v):
    out = torch.zeros(q.shape[0], q.shape[1], q.shape[2] + 1, v.shape[3], dtype=q.dtype)
    out[:, :, 1:] = (qk(q, k) * 0.3).softmax(-1) @ v
    return out


@form(1, "bhqd bhkd bhke", Arg("bhkd", "const"), modes=("infer",))
def input_changed(q, k, v, cache):  # a cache that the caller sees change
    cache.add_(1e-3)
    return (qk(q, k + cache) * 0.3).softmax(-1) @ v


@form(1, X)
def keys_and_values_of_one_tensor(q, k, v):
    kv = torch.cat([k, v], -1)
    k, v = kv.split([8, 16], -1)
    return (qk(q, k) * 0.3).softmax(-1) @ v


@form(1, X, dtypes=("float64",))
def double_precision(q, k, v):
    return (qk(q, k) * 0.3).softmax(-1) @ v


@form(1, X, dtypes=("bfloat16",))
def under_autocast_of_float32(q, k, v):
    with torch.autocast("cpu", torch.bfloat16):
        return F.softmax(torch.matmul(q, k.transpose(-1, -2)) * 0.3, -1) @ v
