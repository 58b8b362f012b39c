"""Rows masked as a whole, one tensor in two parts, changes in place, SDPA calls: rewritten or refused, always right."""
from __future__ import annotations

import pytest
from forms_rows import FORMS as ROWS
from forms_sdpa import FORMS as SDPA
from forms_support import MODES, check_form

DYNAMIC = ("empty_rows_of_smallest_added", "left_padding_under_causal", "one_tensor_for_all", "attention_of_attention",
           "sdpa_causal", "sdpa_bool_mask", "sdpa_grouped_causal", "sdpa_window", "math_causal")
FORMS = {**ROWS, **SDPA}
CASES = [pytest.param(form, mode, dtype, id=f"{name}-{mode}-{dtype}") for name, form in FORMS.items()
         for mode in (MODES if name in DYNAMIC else form.modes)
         for dtype in (form.dtypes[:1] if "dynamic" in mode else form.dtypes)]


@pytest.mark.parametrize(("form", "mode", "dtype"), CASES)
def test_has_the_answer_of_eager_code(form, mode, dtype):
    check_form(form, mode, dtype)
