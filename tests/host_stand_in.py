"""The way of a call down to the compiled kernel, on a machine without a GPU: a Python function in the kernel's place.

Tensors are on the CPU; everything else is what runs before a launch on an H200.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from fa_inductor.backends import dispatch
from fa_inductor.kernels import api, launch
from fa_inductor.kernels.sm90.variant import Forward
from fa_inductor.ops import direct

SMS = 132
"""Multiprocessors of an H200."""


def allocate(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Past the dispatcher, as `launch.empty` does it on a GPU."""
    return torch._C._dynamo.guards._empty_strided_cpu(size, stride, dtype)


@contextmanager
def stand_in(kernel: Callable[[Forward], Callable[..., Any]], device: str = "cpu") -> Iterator[None]:
    """``kernel(variant)`` gives what is called where the compiled kernel would be; tensors on ``device`` take that way."""
    api._plans.clear()
    direct._memos.clear()
    dispatch._choose.cache_clear()

    def choose(record: Any, device_type: str, arch: str | None, wanted: str) -> tuple[str, None]:
        return (wanted if wanted in ("sdpa", "reference") else "kernels"), None

    with (
        patch.object(api, "DEVICE", device),
        patch.object(api, "_kernel", kernel),
        patch.object(api, "_sm_count", lambda index: SMS),
        patch.object(launch, "current_device", lambda: None),
        patch.object(launch, "current_stream", lambda index: 0),
        patch.object(launch, "empty", allocate),
        patch.object(dispatch, "_choose", choose),
    ):
        try:
            yield
        finally:
            api._plans.clear()
            direct._memos.clear()
