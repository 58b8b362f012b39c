"""Kernels on disk: stored once, loaded by later processes, and never when anything about the file is odd."""
from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fa_inductor.kernels import cache


class Kernel:
    """Stands for a compiled kernel; its object is its text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def export_to_c(self, *, object_file_path: str, function_name: str) -> None:
        assert function_name == cache.FUNCTION
        Path(object_file_path).write_text(self.text)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("FA_INDUCTOR_KERNEL_CACHE", raising=False)
    monkeypatch.setenv("FA_INDUCTOR_KERNEL_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(cache, "_open", lambda payload, near: Kernel(payload.decode()))
    return tmp_path / "kernels"


def get(words: str = "one", made: str = "compiled") -> tuple[str, bool]:
    """(text of the kernel, whether it was compiled)"""
    calls: list[int] = []

    def compile_() -> Any:
        calls.append(1)
        return Kernel(made)

    return cache.load_or_compile(words, compile_).text, bool(calls)


def stored(root: Path) -> Path:
    (path,) = root.glob("*/*.o")
    return path


def test_the_second_time_it_is_loaded(root: Path) -> None:
    assert get(made="first") == ("first", True)
    assert get(made="second") == ("first", False)
    assert get("two", made="other") == ("other", True)
    assert sorted(p.suffix for p in root.glob("*/*")) == [".lock", ".lock", ".o", ".o"], "nothing temporary is left"


def test_it_is_on_unless_turned_off(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA_INDUCTOR_KERNEL_CACHE", "0")
    assert get() == ("compiled", True) and not root.exists()
    monkeypatch.delenv("FA_INDUCTOR_KERNEL_CACHE")
    assert get() == ("compiled", True) and get(made="again") == ("compiled", False)


def test_the_folder_and_its_files_are_private(root: Path) -> None:
    get()
    for path in (root, stored(root).parent):
        assert path.stat().st_mode & 0o777 == 0o700
    assert stored(root).stat().st_mode & 0o777 == 0o600


def test_another_toolchain_has_a_folder_of_its_own(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    get(made="old")
    monkeypatch.setattr(cache, "toolchain", lambda: "new")
    assert get(made="new") == ("new", True)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def rename(path: Path) -> None:
    """As if another kernel's object lay under this name."""
    get("two", made="other")
    (other,) = (p for p in path.parent.glob("*.o") if p != path)
    os.replace(other, path)


def link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


DAMAGE = {
    "flipped bit": flip, "cut short": lambda p: p.write_bytes(p.read_bytes()[:-3]), "empty": lambda p: p.write_bytes(b""),
    "another kernel": rename, "writable by others": lambda p: p.chmod(0o622), "a link": link,
    "another format": lambda p: p.write_bytes(p.read_bytes().replace(b"kernel 1", b"kernel 0")),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_an_odd_file_is_compiled_anew_and_replaced(how: str, root: Path) -> None:
    get(made="old")
    DAMAGE[how](stored(root))
    assert get(made="new") == ("new", True)
    assert get(made="newer") == ("new", False)


def test_an_object_that_does_not_load_is_compiled_anew(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    get()

    def refuse(payload: bytes, near: Path) -> Any:
        raise RuntimeError("another version")

    monkeypatch.setattr(cache, "_open", refuse)
    assert get(made="new") == ("new", True)


@pytest.mark.parametrize("how", ["writable by others", "a link", "a file"])
def test_an_odd_folder_is_not_used(how: str, root: Path, tmp_path: Path) -> None:
    if how == "a file":
        root.write_text("")
    elif how == "a link":
        (tmp_path / "real").mkdir(mode=0o700)
        root.symlink_to(tmp_path / "real")
    else:
        root.mkdir(mode=0o700)
        root.chmod(0o777)
    for _ in range(2):
        assert get() == ("compiled", True)
    assert not list(tmp_path.glob("**/*.o"))


@pytest.mark.parametrize("package", ["platformdirs", "filelock"])
def test_without_a_dependency_kernels_are_compiled_and_it_is_said_once(
    package: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if package == "platformdirs":
        monkeypatch.delenv("FA_INDUCTOR_KERNEL_CACHE_DIR")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setitem(sys.modules, package, None)
    cache._missing.cache_clear()
    for words in ("one", "two", "one"):
        assert get(words) == ("compiled", True)
    assert not list(tmp_path.glob("**/*.o"))
    (said,) = (r.getMessage() for r in caplog.records)
    assert package in said and "without the cache" in said


def test_a_folder_that_is_named_needs_no_platformdirs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert get() == ("compiled", True) and get(made="again") == ("compiled", False)


def test_the_folder_is_in_the_users_cache(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FA_INDUCTOR_KERNEL_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert get() == ("compiled", True) and get(made="again") == ("compiled", False)
    assert stored(tmp_path / "user" / "fa_inductor" / "kernels")


def test_what_cannot_be_stored_is_still_returned(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Kernel, **_: str) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Kernel, "export_to_c", full)
    assert get() == ("compiled", True)
    assert [p.suffix for p in root.glob("*/*")] == [".lock"]


def test_an_error_of_the_compiler_is_passed_on(root: Path) -> None:
    def fail() -> Any:
        raise ValueError("ptxas")

    with pytest.raises(ValueError, match="ptxas"):
        cache.load_or_compile("one", fail)
    assert get() == ("compiled", True), "and the lock is free again"


def test_threads_compile_a_kernel_once(root: Path) -> None:
    calls: list[int] = []

    def compile_() -> Any:
        calls.append(1)
        time.sleep(0.2)
        return Kernel("compiled")

    threads = [threading.Thread(target=cache.load_or_compile, args=("one", compile_)) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert calls == [1]


CHILD = """
import sys
from fa_inductor.kernels import api, cache
from fa_inductor.kernels.sm90.variant import Forward
if sys.argv[1] == "load":
    def refuse(variant):
        raise AssertionError("compiled again")
    api.compile_variant = refuse
kernel = api._kernel(Forward("bfloat16", 32, 32, empty="nan"))
try:
    kernel(1, 2, 3)
except TypeError as e:
    print("host code runs:", e)
"""


def test_a_real_kernel_is_loaded_by_another_process(tmp_path: Path) -> None:
    pytest.importorskip("cutlass")
    env = os.environ | {"FA_INDUCTOR_KERNEL_CACHE": "1", "FA_INDUCTOR_KERNEL_CACHE_DIR": str(tmp_path / "kernels"),
                        "CUTE_DSL_ARCH": "sm_90a"}
    for what in ("store", "load"):
        done = subprocess.run([sys.executable, "-c", CHILD, what], env=env, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0 and "host code runs" in done.stdout, done.stdout + done.stderr
