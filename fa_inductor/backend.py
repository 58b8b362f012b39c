"""``torch.compile(model, backend="fa_inductor")``: Inductor with our pass for that model only."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def compile_backend(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph; ``mode`` and ``options`` are those of ``torch.compile`` with Inductor.

    torch finds it by its entry point, without ``import fa_inductor``.

    Raises:
        RuntimeError: ``mode`` or ``options`` is not known to Inductor.
    """
    from torch._inductor import config

    from . import hook, ops  # noqa: F401

    # torch's own wrapper checks the options and translates the mode
    inductor = torch._TorchCompileInductorWrapper(mode, options, None)
    value = inductor.config.get(hook._HOOK, getattr(config, hook._HOOK))
    if not (hook.PASS.active and hook.PASS in hook.passes_in(value)):
        inductor.config[hook._HOOK] = hook.appended(value, _PASS())
    return inductor(gm, example_inputs)


def _reset() -> None:
    """Called by ``torch._dynamo.reset()``, as for Inductor's own backend."""
    torch._TorchCompileInductorWrapper(None, None, None).reset()


compile_backend.reset = _reset  # type: ignore[attr-defined]
_pass: Any = None


def _PASS() -> Any:
    global _pass
    if _pass is None:
        from .hook import AttentionPass, deliver

        _pass = AttentionPass(deliver)
    return _pass
