"""Written-out attention that must be rewritten, with eager's numbers, in inference and training."""
from __future__ import annotations

import pytest
from forms_masked import FORMS as MASKED
from forms_support import check_form
from forms_written import FORMS as WRITTEN

CASES = [pytest.param(form, mode, dtype, id=f"{name}-{mode}-{dtype}")
         for name, form in {**WRITTEN, **MASKED}.items() for mode in form.modes for dtype in form.dtypes]


@pytest.mark.parametrize(("form", "mode", "dtype"), CASES)
def test_is_rewritten(form, mode, dtype):
    check_form(form, mode, dtype)
