"""Options: checked when set, read from the environment, part of the compile cache key."""
import pytest
import torch

import fa_inductor
from fa_inductor.fingerprint import fingerprint
from fa_inductor.options import BACKENDS, TARGETS, Options


@pytest.mark.parametrize(("name", "value", "listed"), [
    ("target", "sm_70", TARGETS), ("target", 90, TARGETS), ("backend", "triton", BACKENDS), ("backend", None, BACKENDS),
    ("max_rewrites", -1, ("None", "0")), ("max_rewrites", True, ("None", "0")), ("max_rewrites", 1.5, ("None", "0")),
    ("max_rewrites", "many", ("None", "0")), ("validate", 2, ("bool",)), ("validate", "maybe", ("bool",)),
    ("aot", None, ("bool",)),
])
def test_a_wrong_value_is_refused_at_once_and_names_what_is_allowed(name, value, listed):
    before = fa_inductor.options.as_dict()
    with pytest.raises(ValueError) as error:
        setattr(fa_inductor.options, name, value)
    assert all(word in str(error.value) for word in listed) and name in str(error.value)
    assert fa_inductor.options.as_dict() == before


def test_an_unknown_option_lists_the_known_ones():
    with pytest.raises(AttributeError, match="target, backend, max_rewrites, validate, aot"):
        fa_inductor.options.tagret = "cpu"
    with pytest.raises(AttributeError, match="max_rewrites"):
        _ = fa_inductor.options.max_rewrite


def test_patch_sets_all_or_nothing_and_restores():
    options = Options()
    with options.patch(target="sm_90", max_rewrites=3):
        assert (options.target, options.max_rewrites) == ("sm_90", 3)
        with pytest.raises(KeyError), options.patch(backend="sdpa"):
            raise KeyError
        assert options.backend == "auto"
    with pytest.raises(ValueError), options.patch(target="sm_100", backend="cuda"):
        pass
    assert options.as_dict() == Options().as_dict()


@pytest.mark.parametrize(("variable", "text", "name", "value"), [
    ("TARGET", "sm_100", "target", "sm_100"), ("BACKEND", "reference", "backend", "reference"),
    ("MAX_REWRITES", "7", "max_rewrites", 7), ("MAX_REWRITES", "none", "max_rewrites", None),
    ("VALIDATE", "1", "validate", True), ("VALIDATE", "0", "validate", False), ("AOT", "true", "aot", True),
])
def test_environment(monkeypatch, variable, text, name, value):
    monkeypatch.setenv(f"FA_INDUCTOR_{variable}", text)
    assert getattr(Options(), name) == value


def test_a_wrong_environment_value_warns_once_and_gives_the_default(monkeypatch):
    monkeypatch.setenv("FA_INDUCTOR_TARGET", "h100")
    with pytest.warns(UserWarning, match="cpu, sm_90, sm_100") as caught:
        assert Options().target == "auto"
    assert len(caught) == 1


@pytest.mark.parametrize(("name", "value"), [("target", "sm_90"), ("backend", "reference"), ("max_rewrites", 0),
                                             ("validate", True), ("aot", True)])
def test_every_option_is_in_the_cache_key(name, value):
    before = fingerprint()
    with fa_inductor.options.patch(**{name: value}):
        assert fingerprint() != before
    assert fingerprint() == before


def test_resolved_target(monkeypatch):
    options = Options()
    assert options.resolved_target("cpu") == options.resolved_target(torch.device("cpu")) == "cpu"
    assert options.resolved_target("mps") == "mps"
    for capability, target in (((9, 0), "sm_90"), ((10, 0), "sm_100"), ((10, 3), "sm_100"), ((8, 6), "sm_86")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert options.resolved_target("cuda:0") == target
    with options.patch(target="sm_90"):
        assert options.resolved_target("cpu") == "sm_90"
