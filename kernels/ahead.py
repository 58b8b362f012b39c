"""Kernels compiled in processes of their own, while the model's own code is still being compiled.

A process compiles one variant into the cache on disk (`cache`) and ends; the first call then loads it, or waits for its
lock where it is not done yet.  So this needs the cache, and changes nothing but when the work is done: whatever goes wrong
here leaves it to the first call.
"""
from __future__ import annotations

import base64
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path
from threading import Lock

from . import cache
from .sm90.variant import Forward

log = logging.getLogger(__name__)

CORES = 4
"""With fewer, the compiler of the model would only be slowed down."""
_MOST = 8
"""Processes at a time."""
_CODE = ("import sys; sys.path[:0] = sys.argv[2].split({separator!r}); sys.modules['torch'] = None; "
         "from fa_inductor.kernels import ahead; ahead.compile_one(sys.argv[1])")
"""Without torch, which the DSL would import when it can and does not need."""
_started: dict[Forward, subprocess.Popen[bytes]] = {}
_lock = Lock()


def words_of(variant: Forward) -> str:
    """What the cache knows a variant by."""
    return f"sm_90a forward {variant!r}"


def wanted() -> bool:
    """Whether this machine and process can compile ahead; off where ``FA_INDUCTOR_COMPILE_AHEAD`` is 0."""
    return (os.environ.get("FA_INDUCTOR_COMPILE_AHEAD", "") != "0" and cache.enabled() and (os.cpu_count() or 1) >= CORES
            and "python" in Path(sys.executable or "").name)


def start(variant: Forward) -> bool:
    """Begin to compile a variant elsewhere, unless that was done before or a file has it; whether a process was started.

    Thread-safe.
    """
    with _lock:
        if variant in _started or not wanted() or cache.has(words_of(variant)):
            return False
        if sum(p.poll() is None for p in _started.values()) >= _MOST:
            return False
        given = base64.b64encode(pickle.dumps(variant)).decode()
        paths = os.pathsep.join(p for p in sys.path if p)
        try:
            _started[variant] = subprocess.Popen(
                [sys.executable, "-c", _CODE.format(separator=os.pathsep), given, paths], stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
        except OSError as e:
            log.debug("no process to compile %s ahead: %s", variant.name, e)
            return False
        return True


def compile_one(given: str) -> None:
    """The other process: compile a variant into the cache."""
    variant: Forward = pickle.loads(base64.b64decode(given))

    def compile_() -> object:
        from .sm90.compile import compile_forward

        return compile_forward(variant)

    cache.load_or_compile(words_of(variant), compile_)
