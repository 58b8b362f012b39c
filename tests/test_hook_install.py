"""enable, disable and enabled: what is in Inductor's hook before, during and after."""
import copy
import threading

import pytest
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import fa_inductor
from fa_inductor import hook, slots
from fa_inductor.hook import NOTE, PASS
from fa_inductor.slots import Chain, passes_in


class Other(CustomGraphPass):
    def __init__(self, name="other"):
        self.name, self.ran = name, 0

    def __call__(self, graph):
        self.ran += 1

    def uuid(self):
        return self.name


@pytest.fixture(autouse=True)
def empty_hook():
    config.joint_custom_pre_pass = None
    yield
    fa_inductor.disable()
    config.joint_custom_pre_pass = None


def current():
    return config.joint_custom_pre_pass


def test_enable_twice_is_once_and_disable_restores():
    fa_inductor.enable()
    fa_inductor.enable()
    assert passes_in(current()) == (PASS,) and hook.is_enabled()
    assert passes_in(config.post_grad_custom_pre_pass) == (NOTE,)
    fa_inductor.disable()
    assert config.post_grad_custom_pre_pass is None
    assert current() is None and not hook.is_enabled()
    fa_inductor.disable()
    assert current() is None


@pytest.mark.parametrize("make", [lambda o: o, lambda o: [o], lambda o: (o,), lambda o: [o, Other("second")]])
def test_what_was_there_stays_and_comes_back_as_the_same_object(make):
    before = make(Other())
    config.joint_custom_pre_pass = before
    others = passes_in(before)
    fa_inductor.enable()
    assert passes_in(current()) == (*others, PASS)
    assert passes_in(before) == others
    fa_inductor.disable()
    assert current() is before


def test_a_pass_added_in_between_stays():
    first, late = Other("first"), Other("late")
    config.joint_custom_pre_pass = first
    fa_inductor.enable()
    config.joint_custom_pre_pass = [*passes_in(current()), late]
    fa_inductor.enable()
    assert passes_in(current()) == (first, PASS, late)
    fa_inductor.disable()
    assert passes_in(current()) == (first, late)


def test_a_hook_that_somebody_overwrote_is_left_alone():
    fa_inductor.enable()
    late = Other()
    config.joint_custom_pre_pass = late
    assert not hook.is_enabled()
    fa_inductor.disable()
    assert current() is late


def test_inside_the_composite_of_somebody_else_the_pass_falls_asleep():
    """In a hook with one slot, a second library wraps what it finds; that wrapper cannot be undone by us."""
    fa_inductor.enable()
    inner = current()

    class Composite(Other):
        def __call__(self, graph):
            inner(graph)

    config.joint_custom_pre_pass = composite = Composite()
    asked = PASS.uuid()
    fa_inductor.disable()
    assert current() is composite
    assert PASS.uuid() != asked and PASS.uuid()
    current()(None)  # an active pass would fail on this graph


@pytest.mark.parametrize("order", ["ours first", "ours last"])
def test_one_slot_hook_runs_both(monkeypatch, order):
    """torch 2.11 takes one callable; a chain of passes stands in for the list."""
    monkeypatch.setattr(slots, "_LISTS", False)
    ran = []
    monkeypatch.setattr(hook, "_run", lambda graph: ran.append(graph) or hook.GraphReport("0" * 32))
    monkeypatch.setattr(PASS, "sink", lambda report: None)
    monkeypatch.setattr(hook.stock, "keep_off", lambda graph: None)
    other = Other()
    if order == "ours last":
        config.joint_custom_pre_pass = other
        fa_inductor.enable()
    else:
        fa_inductor.enable()
        config.joint_custom_pre_pass = Chain((current(), other))
        fa_inductor.enable()
    assert isinstance(current(), Chain)
    current()("graph")
    assert ran == ["graph"] and other.ran == 1
    assert current().uuid() and other.uuid() in current().uuid() and PASS.uuid() in current().uuid()
    fa_inductor.disable()
    assert current() is other


def test_a_chain_with_a_pass_that_has_no_uuid_turns_the_cache_off():
    assert Chain((Other(), lambda graph: None)).uuid() is None
    assert Chain((Other(), Other("x"))).uuid() == ("other", "x")


def test_torch_copies_its_config_and_there_is_one_pass():
    fa_inductor.enable()
    assert passes_in(config.get_config_copy()["joint_custom_pre_pass"]) == (PASS,)
    assert copy.deepcopy([PASS, NOTE]) == [PASS, NOTE]


def test_other_threads_are_served_and_released():
    """From torch 2.13 on, a config value belongs to the thread that set it."""
    seen = []

    def look():
        seen.append(hook.is_enabled())

    def in_thread():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    fa_inductor.enable()
    in_thread()
    fa_inductor.disable()
    in_thread()
    assert seen == [True, False]


def test_enabled_restores_and_nests():
    with fa_inductor.enabled():
        with fa_inductor.enabled():
            assert hook.is_enabled()
        assert hook.is_enabled()
    assert not hook.is_enabled()
    fa_inductor.enable()
    with fa_inductor.enabled():
        pass
    assert hook.is_enabled()


def test_enabled_restores_after_an_error():
    with pytest.raises(KeyError), fa_inductor.enabled():
        raise KeyError
    assert not hook.is_enabled()


def test_blocks_that_overlap_in_threads():
    """The first block to end must not switch off the second one."""
    inside, leave = threading.Event(), threading.Event()
    result = []

    def second():
        with fa_inductor.enabled():
            inside.set()
            leave.wait(10)
            result.append(hook.is_enabled())

    thread = threading.Thread(target=second)
    with fa_inductor.enabled():
        thread.start()
        inside.wait(10)
    leave.set()
    thread.join()
    assert result == [True] and not hook.is_enabled()


def test_many_threads_at_once():
    errors = []

    def work():
        try:
            for _ in range(50):
                fa_inductor.enable()
                fa_inductor.disable()
        except Exception as e:
            errors.append(e)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors and not PASS.active and PASS not in passes_in(current())
