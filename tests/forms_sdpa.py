"""Calls of PyTorch's scaled_dot_product_attention, fused and in its math form."""
from __future__ import annotations

import torch
from forms_masked import additive
from forms_support import Arg, Form, args
from forms_written import S, X
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

FORMS: dict[str, Form] = {}
HALF = ("float32", "bfloat16")


def form(expect, spec: str, *more: Arg, **keywords):
    """Registers a function as a form; ``expect`` is what the report must say."""
    def register(fn):
        FORMS[fn.__name__] = Form(fn, args(spec, *more), expect=expect, **keywords)
        return fn
    return register


def math_form(expect, spec: str, *more: Arg, **keywords):
    """As `form`, with the math form of SDPA, which Inductor sees written out."""
    def register(fn):
        def written(*inputs):
            with sdpa_kernel(SDPBackend.MATH):
                return fn(*inputs)
        FORMS[fn.__name__] = Form(written, args(spec, *more), expect=expect, **keywords)
        return fn
    return register


@form(1, X, dtypes=HALF)
def sdpa_plain(q, k, v):
    return sdpa(q, k, v)


@form(1, S, dtypes=HALF)
def sdpa_causal(q, k, v):
    return sdpa(q, k, v, is_causal=True)


@form(1, X)
def sdpa_causal_of_unequal_lengths(q, k, v):
    return sdpa(q, k, v, is_causal=True)


@form(1, S)
def sdpa_scale(q, k, v):
    return sdpa(q, k, v, scale=0.7)


@form(1, S)
def sdpa_scale_negative(q, k, v):
    return sdpa(q, k, v, scale=-0.7)


@form(1, S, Arg("b1ss", "keep"), dtypes=HALF)
def sdpa_bool_mask(q, k, v, keep):
    return sdpa(q, k, v, keep)


@form(1, S, Arg("b1ss", "hole"))
def sdpa_bool_mask_with_empty_rows(q, k, v, keep):  # zero
    return sdpa(q, k, v, keep)


@form(1, S, Arg("b11s", "keep"))
def sdpa_padding(q, k, v, keep):
    return sdpa(q, k, v, keep.expand(-1, -1, q.size(2), -1))


@form(1, S, Arg("b1ss", "hole"), modes=("infer",))
def sdpa_smallest_added_with_empty_rows(q, k, v, keep):  # PyTorch's backward on CPU is Sk times too large here
    return sdpa(q, k, v, additive(keep, q))


@form(1, S)
def sdpa_window(q, k, v):
    i = torch.arange(q.size(2))
    return sdpa(q, k, v, (i[None] <= i[:, None]) & (i[None] > i[:, None] - 3))


@form(1, S, Arg("1hss", "const"), dtypes=HALF)
def sdpa_bias(q, k, v, bias):
    return sdpa(q, k, v, bias.expand(q.size(0), -1, -1, -1))


@form(1, S, Arg("1hss"))
def sdpa_bias_learned(q, k, v, bias):
    return sdpa(q, k, v, bias)


@form(1, "bhqd bnkd bnkd")
def sdpa_grouped(q, k, v):
    return sdpa(q, k, v, enable_gqa=True)


@form(1, "bhsd bnsd bnsd", dtypes=HALF)
def sdpa_grouped_causal(q, k, v):
    return sdpa(q, k, v, is_causal=True, enable_gqa=True)


@form(1, "bhqd bnkd bnkd")
def sdpa_keys_repeated(q, k, v):
    return sdpa(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))


@form(1, "bqd bkd bkd")
def sdpa_three_dims(q, k, v):
    return sdpa(q, k, v)


@form(1, "bshd bshd bshd")
def sdpa_transposed(q, k, v):
    return sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2).flatten(2)


@form(1, "bhsd")
def sdpa_one_tensor(x):
    return sdpa(x, x, x)


@form(1, S, dtypes=("float64",))
def sdpa_double_precision(q, k, v):
    return sdpa(q, k, v)


@math_form(1, X, dtypes=HALF)
def math_plain(q, k, v):
    return sdpa(q, k, v)


@math_form(1, S, dtypes=HALF)
def math_causal(q, k, v):
    return sdpa(q, k, v, is_causal=True)


@math_form(1, S)
def math_scale(q, k, v):
    return sdpa(q, k, v, scale=0.7)


@math_form(1, S, Arg("b1ss", "keep"))
def math_bool_mask(q, k, v, keep):
    return sdpa(q, k, v, keep)


@math_form(1, S, Arg("b1ss", "hole"))
def math_bool_mask_with_empty_rows(q, k, v, keep):
    return sdpa(q, k, v, keep)


@math_form(1, S, Arg("1hss", "const"))
def math_bias(q, k, v, bias):
    return sdpa(q, k, v, bias)


@math_form(1, "bhsd bnsd bnsd")
def math_grouped(q, k, v):
    return sdpa(q, k, v, is_causal=True, enable_gqa=True)
