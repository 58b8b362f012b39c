"""Compiled kernels on disk: compile once for a user and a machine, load in milliseconds in every later process.

``<root>/<toolchain>/<key>.o`` holds a header line (format, SHA-256 of the object, key in words) and the object file
that the DSL exports.  No pickle.  The folder belongs to the user alone (0700, owner checked, no link), an object is
loaded only after its digest was checked, files appear at once (`os.replace`), and one process compiles a key while
others wait.  Whatever is damaged, foreign or not writable is a miss, never an error, and so is a dependency of this file
that is not installed.

The folder is ``FA_INDUCTOR_KERNEL_CACHE_DIR``, else ``fa_inductor/kernels`` in the user's cache folder.  Off where
``FA_INDUCTOR_KERNEL_CACHE`` is 0.
"""
from __future__ import annotations

import hashlib
import logging
import os
import platform
import stat
import tempfile
from collections.abc import Callable
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

FORMAT = b"fa_inductor kernel 1"
FUNCTION = "fa_inductor_kernel"
"""Name of the exported function in every object."""
MAX_BYTES = 64 << 20
LOCK_SECONDS = 120.0
"""How long to wait for another process that compiles the same kernel, before compiling it here as well."""


def enabled() -> bool:
    return os.environ.get("FA_INDUCTOR_KERNEL_CACHE", "") != "0"


def folder() -> Path | None:
    """Where the kernels of this toolchain and machine are, or would be; None when nothing can say where that is."""
    named = os.environ.get("FA_INDUCTOR_KERNEL_CACHE_DIR")
    if named:
        return Path(named) / toolchain()
    try:
        import platformdirs
    except ImportError as e:
        _missing(str(e), "name a folder with FA_INDUCTOR_KERNEL_CACHE_DIR or install platformdirs")
        return None
    return platformdirs.user_cache_path("fa_inductor") / "kernels" / toolchain()


@lru_cache
def _missing(what: str, remedy: str) -> None:
    """Said once: every kernel of the process meets it."""
    log.warning("kernel cache: %s; compiling without the cache (%s)", what, remedy)


_TOOLS = (*(f"nvidia-cutlass-dsl{part}" for part in ("", "-libs-base", "-libs-core", "-libs-cu12", "-libs-cu13")), "apache-tvm-ffi")
"""What compiles and loads a kernel, as distributions; the DSL's libraries also come without the umbrella."""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


@lru_cache(maxsize=1)
def toolchain() -> str:
    """Digest of everything but the variant that an object depends on: our sources, compilers, and the host's CPU."""
    digest = hashlib.sha256()
    add_sources(digest, Path(__file__).parent)
    for package in _TOOLS:
        digest.update(f"{package} {_version(package)}\0".encode())
    digest.update(f"{platform.system()} {platform.machine()} {platform.python_version()}\0".encode() + _cpu())
    return digest.hexdigest()[:32]


def add_sources(digest: Any, top: Path) -> None:
    """Path and content of every Python file below ``top``."""
    for path in sorted(top.rglob("*.py")):
        digest.update(str(path.relative_to(top)).encode() + b"\0" + path.read_bytes() + b"\0")


def _cpu() -> bytes:
    """The instruction sets of this CPU: a home folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return next((x for x in lines if x.startswith((b"flags", b"Features"))), b"")


def _name(words: str) -> str:
    return f"{hashlib.sha256(words.encode()).hexdigest()}.o"


def has(words: str) -> bool:
    """Whether there is a file for the kernel that ``words`` describe; it is not looked into."""
    where = folder() if enabled() else None
    return where is not None and (where / _name(words)).exists()


def load_or_compile(words: str, compile_: Callable[[], Any]) -> Any:
    """The kernel that ``words`` describe: from disk, else compiled by ``compile_`` and stored.

    Args:
        words: everything that distinguishes this kernel from others of the same toolchain.

    Raises:
        whatever ``compile_`` raises.
    """
    where = folder() if enabled() else None
    path = None if where is None else _ready(where)
    if path is None:
        return compile_()
    path = path / _name(words)
    found = _load(path, words)
    if found is not None:
        return found
    try:
        import filelock
    except ImportError as e:
        _missing(str(e), "install filelock")
        return compile_()
    lock = filelock.FileLock(path.with_suffix(".lock"), mode=0o600)
    try:
        lock.acquire(timeout=LOCK_SECONDS)
    except (filelock.Timeout, OSError) as e:
        log.warning("kernel cache: no lock on %s (%s); compiling without the cache", path, e)
        return compile_()
    try:
        found = _load(path, words)  # another process may have been faster
        if found is None:
            found = compile_()
            _store(path, words, found)
        return found
    finally:
        lock.release()


def _ready(path: Path) -> Path | None:
    """``path`` as a folder of this user alone, made if need be; None when it cannot be one."""
    try:
        for p in (path.parent, path):
            p.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = os.lstat(p)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
                log.warning("kernel cache: %s is not a folder that only its owner can write to; not used", p)
                return None
        return path
    except OSError as e:
        log.warning("kernel cache: %s cannot be used: %s", path, e)
        return None


def _load(path: Path, words: str) -> Any | None:
    """The kernel in a file; None when there is none, or it is not what was stored."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as e:
        log.warning("kernel cache: %s: %s", path, e)
        return None
    with os.fdopen(handle, "rb") as f:
        status = os.fstat(f.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            log.warning("kernel cache: %s is not a file of this user; not used", path)
            return None
        header, _, payload = f.read(MAX_BYTES).partition(b"\n")
    if header != _header(words, payload):
        log.warning("kernel cache: %s is damaged; compiling anew", path)
        return None
    try:
        return _open(payload, path.parent)
    except Exception as e:  # whatever the DSL raises for an object that it does not take
        log.warning("kernel cache: %s does not load: %s", path, e)
        return None


def _header(words: str, payload: bytes) -> bytes:
    return b" ".join([FORMAT, hashlib.sha256(payload).hexdigest().encode(),
                      hashlib.sha256(words.encode()).hexdigest().encode()])


def _open(payload: bytes, near: Path) -> Any:
    """The function of an object whose digest was checked; the loader wants a file, which nobody else may name."""
    import cutlass.cute as cute

    handle, name = tempfile.mkstemp(dir=near, suffix=".o")
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(payload)
        return getattr(cute.runtime.load_module(name, enable_tvm_ffi=True), FUNCTION)
    finally:
        os.unlink(name)


def _store(path: Path, words: str, kernel: Any) -> None:
    """Export a compiled kernel and put it where `_load` looks; what cannot be written is not stored."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as private:
            exported = Path(private) / "kernel.o"
            kernel.export_to_c(object_file_path=str(exported), function_name=FUNCTION)
            payload = exported.read_bytes()
            whole = Path(private) / "whole"
            whole.write_bytes(_header(words, payload) + b"\n" + payload)
            os.chmod(whole, 0o600)
            os.replace(whole, path)
    except Exception as e:
        log.warning("kernel cache: %s was not stored: %s", path, e)
