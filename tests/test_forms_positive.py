"""Written-out attention that must be rewritten, with eager's numbers, in inference and training."""
from __future__ import annotations

import pytest
from forms_masked import FORMS as MASKED
from forms_shared import FORMS as SHARED
from forms_support import MODES, check_form
from forms_written import FORMS as WRITTEN

FORMS = {**WRITTEN, **MASKED, **SHARED}
DYNAMIC = (
    "scale_multiplied", "softmax_in_float32", "heads_permuted", "heads_by_view", "three_dims", "two_dims",
    "keys_times_queries", "values_times_weights", "einsum_bqhd", "einsum_one_key_head", "grouped_repeat_kv",
    "grouped_repeat_interleave", "grouped_five_dims", "one_key_head_expanded", "latent_keys_joined", "nanogpt",
    "causal_at_the_end", "gpt2_of_transformers_4", "sliding_window", "annotated_transformer", "padding_and_causal",
    "mask_where", "batched_heads", "llama", "bert", "alibi", "softcap",
    "exp_of_scores_minus_logsumexp",
)
"""Forms that also run with symbolic batch and lengths: one for each way in which sizes enter a graph."""

CASES = [(name, mode, dtype) for name, form in FORMS.items()
         for mode in (MODES if name in DYNAMIC else form.modes)
         for dtype in (form.dtypes[:1] if "dynamic" in mode else form.dtypes)]


@pytest.mark.parametrize(("name", "mode", "dtype"), CASES)
def test_is_rewritten(name, mode, dtype):
    check_form(FORMS[name], mode, dtype)


def test_lists_name_forms():
    assert set(DYNAMIC) <= set(FORMS)
