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
    from .hook import COMPILE_PASS, JOINT, NOTE, POST_GRAD, is_enabled
    from .slots import appended

    # torch's own wrapper checks the options and translates the mode
    inductor = torch._TorchCompileInductorWrapper(mode, options, None)
    for name, ours in ((JOINT, COMPILE_PASS), (POST_GRAD, NOTE)):
        given = inductor.config.get(name)
        if given is not None or not is_enabled():
            inductor.config[name] = appended(given or getattr(torch._inductor.config, name), ours)
    return inductor(gm, example_inputs)


def _reset() -> None:
    """Called by ``torch._dynamo.reset()``, as for Inductor's own backend."""
    torch._TorchCompileInductorWrapper(None, None, None).reset()


compile_backend.reset = _reset  # type: ignore[attr-defined]
