"""``torch.compile(model, backend="fa_inductor")``: Inductor with our pass for that model only."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def compile_backend(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Any:
    """Compile one Dynamo graph; ``mode`` and ``options`` are those of ``torch.compile`` with Inductor.

    torch finds it by its entry point, without ``import fa_inductor``.

    Raises:
        RuntimeError: ``mode`` or ``options`` is not known to Inductor.
    """
    from .hook import COMPILE_PASS, HOOK, PASS, appended, passes_in

    # torch's own wrapper checks the options and translates the mode
    inductor = torch._TorchCompileInductorWrapper(mode, options, None)
    value = inductor.config.get(HOOK, getattr(torch._inductor.config, HOOK))
    if not (PASS.active and PASS in passes_in(value)):
        inductor.config[HOOK] = appended(value, COMPILE_PASS)
    return inductor(gm, example_inputs)


def _reset() -> None:
    """Called by ``torch._dynamo.reset()``, as for Inductor's own backend."""
    torch._TorchCompileInductorWrapper(None, None, None).reset()


compile_backend.reset = _reset  # type: ignore[attr-defined]
