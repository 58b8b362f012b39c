"""Look-alikes of attention: refused with the expected reason, or rewritten with eager's numbers."""
from __future__ import annotations

import pytest
from forms_axes import FORMS as AXES
from forms_lookalikes import FORMS as LOOKALIKES
from forms_no_attention import FORMS as NO_ATTENTION
from forms_support import check_form

FORMS = {**AXES, **LOOKALIKES, **NO_ATTENTION}
CASES = [pytest.param(form, mode, id=f"{name}-{mode}") for name, form in FORMS.items() for mode in form.modes]


@pytest.mark.parametrize(("form", "mode"), CASES)
def test_is_refused_or_right(form, mode):
    check_form(form, mode, "float32")
