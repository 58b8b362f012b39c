"""Set-up shared by all tests: their own compile cache, no network, and a clean library after each test."""
from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

# The folder kernels/ of a checkout must not be taken for Hugging Face's package of that name (`python -m pytest`
# puts the current folder on the path); the library is tested as it is installed.
sys.path[:] = [p for p in sys.path if Path(p or os.getcwd()).resolve() != ROOT]
for _name in [n for n in os.environ if n.startswith("FA_INDUCTOR_")]:
    del os.environ[_name]
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
_cache = tempfile.TemporaryDirectory(prefix="fa_inductor_tests_")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _cache.name


@pytest.fixture(autouse=True)
def clean_library() -> Iterator[None]:
    """After each test: disabled, an empty report, default options, nothing compiled."""
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    if "fa_inductor.hook" in sys.modules:
        import fa_inductor

        fa_inductor.disable()
        fa_inductor.report(clear=True)


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], Any]], None]:
    """``pipeline(run)`` puts a function in the place of `fa_inductor.pipeline.run`: tests of what is around it."""
    import fa_inductor

    def replace(run: Callable[[Any], Any]) -> None:
        stub = ModuleType("fa_inductor.pipeline")
        stub.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "fa_inductor.pipeline", stub)
        monkeypatch.setattr(fa_inductor, "pipeline", stub, raising=False)

    return replace


Python = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def python(tmp_path: Path) -> Python:
    """Run code in a fresh interpreter, outside the checkout, and return the finished process.

    ``python(code, "argument", CACHE="x")``: positional texts are arguments, keywords environment variables;
    a failing process fails the test unless ``check=False``.
    """

    def run(code: str, *arguments: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True,
                              env={**os.environ, **environment}, timeout=300)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    return run


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What tests recorded as their summary is shown: how much they compared, which a count of tests does not say."""
    lines = [value for reports in terminalreporter.stats.values() for r in reports
             for name, value in getattr(r, "user_properties", ()) if name == "summary"]
    for line in dict.fromkeys(lines):
        terminalreporter.write_line(line)
