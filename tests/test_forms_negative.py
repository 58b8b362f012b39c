"""Look-alikes of attention: refused with the expected reason, or rewritten with eager's numbers."""
from __future__ import annotations

import forms_axes
import forms_lookalikes
import forms_negative_axes
import forms_negative_kernels
import forms_negative_local
import forms_negative_masks
import forms_negative_scores
import forms_negative_training
import forms_negative_types
import forms_negative_used
import forms_negative_weights
import forms_no_attention
import forms_postscale
import pytest
from forms_support import check_form

FILES = (forms_axes, forms_lookalikes, forms_no_attention, forms_negative_axes, forms_negative_scores,
         forms_negative_used, forms_negative_weights, forms_negative_kernels, forms_negative_local,
         forms_negative_masks, forms_negative_training, forms_negative_types, forms_postscale)
FORMS = {name: form for file in FILES for name, form in file.FORMS.items()}
CASES = [pytest.param(form, mode, id=f"{name}-{mode}") for name, form in FORMS.items() for mode in form.modes]


@pytest.mark.parametrize(("form", "mode"), CASES)
def test_is_refused_or_right(form, mode):
    check_form(form, mode, form.dtypes[0])


def test_there_are_enough_of_them():
    """Look-alikes have names of their own, and three hundred of them have to be left alone in some mode."""
    assert len(FORMS) == sum(len(file.FORMS) for file in FILES)
    left_alone = [f for f in FORMS.values() if not isinstance(f.expect, int) or not isinstance(f.train, (int, str))]
    assert len(left_alone) >= 300
