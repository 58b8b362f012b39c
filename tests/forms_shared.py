"""Attention in which the batch shares the queries, or the keys and values, and attention over rows of an alignment."""
from __future__ import annotations

import torch
from forms_support import MODES, Arg, Form, args

from fa_inductor.reasons import Code

FORMS: dict[str, Form] = {}


def form(spec: str, *more: Arg, **keywords):
    """Registers a function as a form, in all modes; the function's name is the form's."""
    def register(fn):
        FORMS[fn.__name__] = Form(fn, args(spec, *more), modes=tuple(MODES), **keywords)
        return fn
    return register


@form("qd bkd bke")
def latents_expanded(latents, k, v):  # Perceiver
    q = latents.expand(k.shape[0], -1, -1)
    return (q @ k.mT * 0.3).softmax(-1) @ v


@form("qd bkd bke")
def latents_that_broadcast(latents, k, v):
    return (latents @ k.mT * 0.3).softmax(-1) @ v


@form("hqd bhkd bhke")
def latents_of_heads(latents, k, v):
    return torch.einsum("bhqk,bhke->bhqe", (torch.einsum("hqd,bhkd->bhqk", latents, k) * 0.3).softmax(-1), v)


@form("hqd bhkd bhke", expect=Code.SOFTMAX_DIM)
def latents_of_heads_over_the_batch(latents, k, v):
    return torch.einsum("bhqk,bhke->bhqe", (torch.einsum("hqd,bhkd->bhqk", latents, k) * 0.3).softmax(0), v)


@form("hqd bhkd bhke", expect=Code.SOFTMAX_DIM)
def latents_whose_values_are_summed_over_the_batch(latents, k, v):
    return torch.einsum("bhqk,bhke->hqe", (torch.einsum("hqd,bhkd->bhqk", latents, k) * 0.3).softmax(-1), v)


@form("bqd kd ke")
def memory_of_all(q, k, v):
    return (q @ k.mT * 0.3).softmax(-1) @ v


@form("bhqd kd ke")
def memory_of_all_heads(q, k, v):
    return (q @ k.mT * 0.3).softmax(-1) @ v


MSA = "bwhqd bwhkd bwhke"


@form(MSA, Arg("bwk", "keep"))
def rows_of_an_alignment(q, k, v, keep):  # OpenFold: the mask is one of a row, of which a batch has several
    s = q @ k.mT * 0.3
    return (s + 1e9 * (keep.to(s.dtype) - 1)[:, :, None, None]).softmax(-1) @ v


@form(MSA, Arg("bwk", "keep"), Arg("bhqk", "const"))
def rows_with_a_bias_of_pairs(q, k, v, keep, pairs):
    s = q @ k.mT * 0.3
    s = s + 1e9 * (keep.to(s.dtype) - 1)[:, :, None, None]
    return (s + pairs[:, None]).softmax(-1) @ v


@form(MSA, Arg("bhqk"), train=Code.GRAD_CAPTURE)
def rows_with_a_learned_bias_of_pairs(q, k, v, pairs):
    return (q @ k.mT * 0.3 + pairs[:, None]).softmax(-1) @ v


@form(MSA, Arg("whqk", "const"))
def rows_with_a_bias_of_each_row(q, k, v, bias):
    return (q @ k.mT * 0.3 + bias).softmax(-1) @ v
