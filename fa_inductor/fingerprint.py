"""What decides the outcome of a rewrite besides the graph: the part of the compile cache key that is ours."""
from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from .options import options


@lru_cache(maxsize=1)
def source_hash() -> str:
    """SHA-256 over the path and content of every Python file of the package, ``fa_inductor.kernels`` included."""
    from . import kernels
    from .kernels.cache import add_sources

    digest = hashlib.sha256()
    for top in (Path(__file__).parent, Path(kernels.__file__).parent):
        add_sources(digest, top)
    return digest.hexdigest()


@lru_cache(maxsize=1)
def versions() -> tuple[tuple[str, str], ...]:
    """Versions of what generates and loads code; ``none`` for a package that is missing.  Imports none of them."""

    def version(name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return "none"

    return tuple((name, version(name)) for name in ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi"))


def devices() -> tuple[str, ...]:
    """Compute capability of each visible GPU; empty without one."""
    import torch

    if not torch.cuda.is_available():
        return ()
    return tuple(options.resolved_target(f"cuda:{i}") for i in range(torch.cuda.device_count()))


def fingerprint() -> str:
    """Equal in two processes only if both would compile a graph to the same code."""
    text = repr((source_hash(), versions(), devices(), tuple(options.as_dict().items())))
    return hashlib.sha256(text.encode()).hexdigest()
