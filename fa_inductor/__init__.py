"""Attention in PyTorch at FlashAttention-3/4 speed, with no change to the model.

    import fa_inductor
    fa_inductor.enable()              # once, before torch.compile
    model = torch.compile(model)
    model(x)
    print(fa_inductor.report())

Importing this package imports neither torch nor a kernel compiler; each function does when it is called.
"""
from __future__ import annotations

from contextlib import AbstractContextManager

from .explain import explain
from .options import options
from .report import report

__version__ = "0.1.0"
__all__ = ["__version__", "disable", "enable", "enabled", "explain", "options", "report"]


def enable() -> None:
    """Rewrite attention in every model that is compiled from now on; other passes in Inductor's hook stay.

    Idempotent and thread-safe; holds for all threads.  A model compiled before is not changed.
    """
    from . import hook

    hook.enable()


def disable() -> None:
    """Undo `enable`: Inductor's hook and its own attention patterns are as they were before."""
    from . import hook

    hook.disable()


def enabled() -> AbstractContextManager[None]:
    """``with fa_inductor.enabled():`` is `enable` for a block; the model must be called first inside it."""
    from . import hook

    return hook.enabled()
