"""How the files of look-alikes register their functions."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forms_support import Arg, Expect, Form, args

BOTH = ("infer", "train")
"""Modes of a form whose backward could go wrong in a way of its own; the others are compiled for inference alone."""


def registering(forms: dict[str, Form]) -> Callable[..., Any]:
    """A decorator ``form(expect, spec, *more)`` that puts a function into ``forms`` under its name.

    ``expect`` is what the report must say; keywords are those of `Form`.
    """
    def form(expect: Expect, spec: str, *more: Arg, **keywords: Any) -> Callable[..., Any]:
        def register(fn: Callable[..., Any]) -> Callable[..., Any]:
            assert fn.__name__ not in forms, fn.__name__
            forms[fn.__name__] = Form(fn, args(spec, *more), expect=expect, **{"modes": ("infer",), **keywords})
            return fn
        return register
    return form
