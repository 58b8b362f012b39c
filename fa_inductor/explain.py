"""The report of a model without running it: compile up to the pass, then stop."""
from __future__ import annotations

from typing import Any

from .report import Report


def explain(model: Any, *args: Any, **kwargs: Any) -> Report:
    """x"""
    raise NotImplementedError
