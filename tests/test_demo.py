"""The commands: demo, doctor, help, and the quick start."""
import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT

from fa_inductor import __main__, doctor


def command(*arguments, check=True):
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def check_output(text, differences, blocks):
    for found in (differences, blocks):
        assert re.search(found, text), text
    assert float(re.search(differences, text)[1]) <= 1e-5


def test_demo_rewrites_six_of_six_blocks_and_keeps_the_embeddings():
    done = command("-m", "fa_inductor", "demo", "--device", "cpu", "--repeats", "3")
    check_output(done.stdout, r"largest difference from eager's embeddings: ([\d.e+-]+) \(equal\)",
                 r"(?m)^6 of 6 attention blocks rewritten")
    assert "Fresh pasta needs no more than three minutes" in done.stdout
    assert "The lander touched down softly" in done.stdout and "A memory leak brought the server down" in done.stdout
    assert len(re.findall(r"\d ms", done.stdout)) == 3
    assert "key padding" in done.stdout
    assert re.search(r"6 x rewritten +transformers/\S+\.py:\d+ \w+", done.stdout), done.stdout


def test_quickstart():
    done = command("examples/quickstart.py")
    check_output(done.stdout, r"largest difference from eager: ([\d.e+-]+)",
                 r"(?m)^6 of 6 attention blocks rewritten")


def test_demo_without_its_model_says_how_to_install_it(monkeypatch):
    from importlib import metadata

    from fa_inductor import demo

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(SystemExit, match=r"pip install 'fa_inductor\[demo\]'"):
        demo.model_folder()


def test_doctor_json(capsys):
    assert __main__.main(["doctor", "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    import torch

    assert state["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert state["devices"][0]["device"] == "cpu" and state["devices"][0]["target"] == "cpu"
    assert state["caches"]["inductor"]["writable"] is True
    assert state["stock_attention_patterns"] > 50
    assert set(state["options"]) == {"target", "backend", "max_rewrites", "validate", "aot"}


def test_doctor_text_names_every_package_and_problem(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: "2.4.1" if name == "torch" else None)
    assert doctor.main([]) == 1
    text = capsys.readouterr().out
    assert "ERROR: torch 2.4.1 is too old; pip install 'torch>=2.11'" in text


@pytest.mark.parametrize(("version", "problem"), [(None, "missing"), ("4.7.0", "too old"), ("4.8.1", None)])
def test_doctor_on_a_hopper_looks_at_the_kernel_compiler(version, problem):
    state = {"packages": {"torch": "2.13.0", "nvidia-cutlass-dsl": version}, "devices": [{"kernels": True}],
             "caches": {}, "problems": []}
    doctor._judge(state)
    found = [p["text"] for p in state["problems"]]
    assert [problem in text for text in found] == ([True] if problem else [])


def test_doctor_does_not_import_the_kernel_compiler(python):
    done = python("import sys, fa_inductor.doctor as d; d.main([]); print([m for m in ('cutlass', 'tvm_ffi') "
                  "if m in sys.modules])")
    assert done.stdout.strip().endswith("[]")


def test_help_lists_every_verb(capsys):
    with pytest.raises(SystemExit) as status:
        __main__.main(["--help"])
    text = capsys.readouterr().out
    assert status.value.code == 0 and all(verb in text for verb in __main__.VERBS)
    for verb in __main__.VERBS:
        with pytest.raises(SystemExit) as status:
            __main__.main([verb, "--help"])
        assert status.value.code == 0 and verb in capsys.readouterr().out


def test_wrong_arguments_give_status_2(capsys):
    for arguments in ([], ["dance"], ["doctor", "--yaml"]):
        with pytest.raises(SystemExit) as status:
            __main__.main(arguments)
        assert status.value.code == 2
    assert "demo" in capsys.readouterr().err
