"""The wheel: complete, installable beside Hugging Face's `kernels`, and a checkout that hides nothing."""
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT

HUB_VERSION = "0.99.0"


def call(*command, **options):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout, built from a copy so that no build folder is left behind."""
    source = tmp_path_factory.mktemp("source")
    for name in ("fa_inductor", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    call(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, source)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def hub_kernels(tmp_path_factory):
    """A wheel that stands in for the Hub's package: the same distribution and import name."""
    path = tmp_path_factory.mktemp("hub") / f"kernels-{HUB_VERSION}-py3-none-any.whl"
    info = f"kernels-{HUB_VERSION}.dist-info"
    files = {
        "kernels/__init__.py": f"__version__ = {HUB_VERSION!r}\nHUB = True\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: kernels\nVersion: {HUB_VERSION}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w") as z:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            z.writestr(name, text)
    return path


@pytest.fixture(scope="module")
def installed(wheel, hub_kernels, tmp_path_factory):
    """The interpreter of a fresh environment with both wheels; what they need comes from this environment."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    site = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
    call(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, hub_kernels)
    # A folder named in a .pth file does not have its own .pth files read: the editable install stays out.
    (site / "parent.pth").write_text(str(Path(pytest.__file__).parent.parent) + "\n")
    return python, site


def test_every_folder_with_code_is_in_the_package_list():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {p.parent.relative_to(ROOT) for top in ("fa_inductor", "kernels") for p in (ROOT / top).rglob("*.py")}
    names = {".".join(f.parts) if f.parts[0] == "fa_inductor" else ".".join(("fa_inductor", *f.parts)) for f in folders}
    assert listed == names


def test_the_wheel_has_every_file_and_claims_no_other_name(wheel):
    with zipfile.ZipFile(wheel) as z:
        names = set(z.namelist())
        metadata = z.read(next(n for n in names if n.endswith("dist-info/METADATA"))).decode()
        entries = z.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
        licence = z.read(next(n for n in names if n.endswith("licenses/LICENSE"))).decode()
    tops = {n.split("/")[0] for n in names}
    assert tops == {"fa_inductor", next(t for t in tops if t.endswith(".dist-info"))}
    for top, prefix in (("fa_inductor", ""), ("kernels", "fa_inductor/")):
        expected = {prefix + p.relative_to(ROOT).as_posix() for p in (ROOT / top).rglob("*.py")}
        assert expected <= names
    assert "fa_inductor/py.typed" in names
    assert "fa_inductor = fa_inductor.backend:compile_backend" in entries
    assert "Apache License" in licence and "Version 2.0" in licence and len(licence) > 10_000
    for line in ("Requires-Python: >=3.11", "License-Expression: Apache-2.0", "Requires-Dist: torch>=2.11",
                 "Provides-Extra: cu13", "Provides-Extra: demo", "Provides-Extra: test", "Provides-Extra: bench"):
        assert line in metadata


def test_both_packages_import_side_by_side(installed, tmp_path):
    python, site = installed
    code = """
import fa_inductor, fa_inductor.kernels.record, kernels
print(fa_inductor.__file__, fa_inductor.kernels.__file__, kernels.__file__, kernels.HUB, sep="\\n")
"""
    *files, hub = call(python, "-c", code, cwd=tmp_path).split("\n")[:4]
    assert all(Path(f).is_relative_to(site) for f in files), files
    assert files[1] != files[2] and hub == "True"


def test_the_installed_backend_compiles(installed, tmp_path):
    python, _ = installed
    code = """
import torch
f = torch.compile(lambda q, k, v: torch.softmax(q @ k.mT * 0.5, -2) @ v, backend="fa_inductor")
q, k, v = (torch.randn(1, 2, 8, 8) for _ in range(3))
torch.testing.assert_close(f(q, k, v), torch.softmax(q @ k.mT * 0.5, -2) @ v)
import fa_inductor
print(len(fa_inductor.report().graphs))
"""
    assert call(python, "-c", code, cwd=tmp_path).strip() == "1"


def test_the_version_is_the_same_everywhere():
    import fa_inductor

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == fa_inductor.__version__
    assert f"## [{fa_inductor.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


KERNELS_AVAILABLE = "from transformers.utils.import_utils import is_kernels_available; print(is_kernels_available())"


def test_transformers_does_not_take_the_checkout_for_the_hub_package():
    """In a checkout, with the current folder on the path and the Hub's package not installed."""
    environment = {**os.environ, "PYTHONPATH": ""}
    assert call(sys.executable, "-c", KERNELS_AVAILABLE, cwd=ROOT, env=environment).strip() == "False"


def test_commands_in_a_checkout_leave_the_hub_package_visible(installed, tmp_path):
    """``python -m fa_inductor`` puts the current folder first on the path, where our kernels/ lies."""
    python, site = installed
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import fa_inductor.__main__ as command
assert command.__file__.startswith({str(ROOT)!r})
command._leave_checkout()
import kernels
print(kernels.__file__)
"""
    assert Path(call(python, "-c", code, cwd=ROOT).strip()).is_relative_to(site)


def test_the_tests_do_not_put_the_checkout_on_the_path():
    assert ROOT not in [Path(p or os.getcwd()).resolve() for p in sys.path]
