"""Launches that are used again: only for calls that the kernel would be given the same arguments for.

A stand-in takes the compiled kernel's place; what it is called with is compared with what a call gives it for which
nothing is held.
"""
from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from host_stand_in import stand_in
from torch import Tensor

from fa_inductor.kernels import api, launch
from fa_inductor.kernels.expr import SCORE, Expr, load
from fa_inductor.kernels.record import Attention, Band, Dense, Documents, KeyPadding, Sym
from fa_inductor.kernels.sm90.variant import ALONE, HEADS, ROWS, Forward

PLAIN = Attention(4, 4, 64, 64, "bfloat16", 0.125)
BIASED = PLAIN.with_(score=Expr("add", (SCORE, load(0))))


class Spy:
    """What the kernels were called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Forward, tuple[Any, ...]]] = []
        self.prepared = 0

    def kernel(self, variant: Forward) -> Callable[..., None]:
        self.prepared += 1

        def run(*args: Any) -> None:
            self.calls.append((variant, args))

        return run


@pytest.fixture
def spy() -> Iterator[Spy]:
    found = Spy()
    with stand_in(found.kernel):
        yield found


def tensor(rows: int, *, batch: int = 2, heads: int = 4, dim: int = 64, dtype: torch.dtype = torch.bfloat16, gap: int = 0,
           skip: int = 0, order: str = "bshd") -> Tensor:
    """[batch, heads, rows, dim]: ``gap`` elements behind each row, ``skip`` in front of all."""
    flat = torch.zeros(skip + batch * heads * rows * (dim + gap), dtype=dtype)[skip:]
    sizes = {"b": batch, "h": heads, "s": rows}
    x = flat.view(*(sizes[a] for a in order[:3]), dim + gap)[..., :dim]
    return x.permute(order.index("b"), order.index("h"), order.index("s"), 3)


Given = tuple[Tensor, Tensor, Tensor, list[Tensor], list[int]]


def passed(spy: Spy, record: Attention, given: Given) -> tuple[Any, ...]:
    """What a call passes to which kernel, each tensor as a view of which input."""
    q, k, v, captures, ints = given
    spy.calls.clear()
    out, lse = api.attention(q, k, v, record, captures, ints)
    (variant, args), = spy.calls
    inputs = {"q": q, "k": k, "v": v, "out": out, "lse": lse, **{f"capture {i}": x for i, x in enumerate(captures)}}

    def what(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        of = [name for name, y in inputs.items() if x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()]
        start = (x.data_ptr() - inputs[of[0]].data_ptr()) if of else "memory of its own"
        return tuple(x.shape), x.stride(), x.dtype, x.device, of, start

    results = tuple((tuple(x.shape), x.stride(), x.dtype, x.device) for x in (out, lse))
    return variant, tuple(what(x) for x in args), results


def anew(spy: Spy, record: Attention, given: Given) -> tuple[Any, ...]:
    api._plans.clear()
    return passed(spy, record, given)


def mask(batch: int = 2, keys: int = 96, skip: int = 0, step: int = 1) -> Tensor:
    return torch.ones(skip + batch * keys * step, dtype=torch.bool)[skip:].view(batch, keys, step)[..., 0]


def bias(keys: int = 96, skip: int = 0, heads: int = 4, dtype: torch.dtype = torch.bfloat16, rows: int = 96) -> Tensor:
    return torch.zeros(skip + heads * rows * keys, dtype=dtype)[skip:].view(1, heads, rows, keys)


def qkv(captures: list[Tensor] | None = None, ints: list[int] | None = None, **changed: Tensor) -> Given:
    return (changed.get("q", tensor(96)), changed.get("k", tensor(96)), changed.get("v", tensor(96)), captures or [], ints or [])


CAUSAL, SHIFTED = PLAIN.with_(mask=(Band(None, 0),)), PLAIN.with_(mask=(Band(None, Sym(0)),))
PADDED, MASKED = PLAIN.with_(mask=(KeyPadding(0),)), PLAIN.with_(mask=(Dense(0),))
DOCUMENTS = PLAIN.with_(mask=(Documents(0, 1),))
GROUPED = PLAIN.with_(kv_heads=2)


def ids(dtype: torch.dtype = torch.int32, batch: int = 2) -> list[Tensor]:
    return [torch.zeros(batch, 96, dtype=dtype), torch.zeros(batch, 96, dtype=torch.int32)]


def few(q: Tensor | None = None, keys: int = 4096, **kw: Any) -> Given:
    k, v = (tensor(keys, heads=2, **kw) for _ in range(2))
    return (tensor(1) if q is None else q), k, v, [], []


PAIRS: dict[str, tuple[Attention, Given, Given]] = {
    "batch": (CAUSAL, qkv(), qkv(q=tensor(96, batch=3), k=tensor(96, batch=3), v=tensor(96, batch=3))),
    "rows": (PLAIN, qkv(), qkv(q=tensor(97))),
    "keys": (SHIFTED, qkv(ints=[0]), qkv(k=tensor(200), v=tensor(200), ints=[0])),
    "rows, same strides": (PLAIN, qkv(q=tensor(96, order="sbhd")), qkv(q=tensor(300, order="sbhd"))),
    "rows, few": (GROUPED, few(), few(q=tensor(7))),
    "keys, few": (GROUPED, few(), few(keys=8192)),
    "stride of q": (PLAIN, qkv(), qkv(q=tensor(96, gap=4))),
    "stride of k": (PLAIN, qkv(), qkv(k=tensor(96, gap=4))),
    "stride of v": (PLAIN, qkv(), qkv(v=tensor(96, gap=4))),
    "last stride": (PLAIN, qkv(), qkv(k=tensor(64, dim=96).transpose(2, 3))),
    "order of q, few": (GROUPED, few(), few(q=tensor(1, gap=64, order="hbsd"))),
    "stride that means nothing": (
        PLAIN, qkv(k=tensor(96, batch=1), q=tensor(96, batch=1), v=tensor(96, batch=1)),
        qkv(k=tensor(96, batch=1).as_strided((1, 4, 96, 64), (3, 64, 256, 1)), q=tensor(96, batch=1), v=tensor(96, batch=1))),
    "alignment of q": (PLAIN, qkv(), qkv(q=tensor(96, skip=1))),
    "alignment of k": (CAUSAL, qkv(), qkv(k=tensor(96, skip=4))),
    "alignment of v": (PADDED, qkv([mask()]), qkv([mask()], v=tensor(96, skip=2))),
    "integer": (SHIFTED, qkv(ints=[0]), qkv(ints=[5])),
    "size of a capture": (PADDED, qkv([mask()]), qkv([mask(batch=1)])),
    "stride of a capture": (PADDED, qkv([mask()]), qkv([mask(step=2)])),
    "broadcast capture": (MASKED, qkv([torch.ones(2, 4, 96, 96, dtype=torch.bool)]),
                          qkv([torch.ones(2, 1, 96, 96, dtype=torch.bool).expand(2, 4, 96, 96)])),
    "dtype of a capture": (BIASED, qkv([bias()]), qkv([bias(dtype=torch.float32)])),
    "dtype of ids": (DOCUMENTS, qkv(ids()), qkv(ids(torch.int64))),
    "alignment of a capture": (BIASED, qkv([bias()]), qkv([bias(skip=1)])),
}
"""Two calls of a record, of which the second differs from the first in what the name says."""


@pytest.mark.parametrize("name", PAIRS)
def test_a_call_unlike_the_one_before(spy: Spy, name: str) -> None:
    record, first, second = PAIRS[name]
    want = anew(spy, record, second)
    before = anew(spy, record, first)
    assert before != want  # else the pair says nothing
    assert passed(spy, record, first) == before
    assert passed(spy, record, second) == want
    assert passed(spy, record, second) == want
    assert passed(spy, record, first) == before


@pytest.mark.parametrize("name", PAIRS)
def test_the_comparison_in_python_alone_suffices(spy: Spy, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "TensorGuards", None)
    test_a_call_unlike_the_one_before(spy, name)


SOME: dict[str, tuple[Attention, Given]] = {
    "plain": (PLAIN, qkv()),
    "causal": (CAUSAL, qkv()),
    "an integer": (SHIFTED, qkv(ints=[3])),
    "padding": (PADDED, qkv([mask()])),
    "padding of all batches": (PADDED, qkv([mask(batch=1)])),
    "a mask": (MASKED, qkv([torch.ones(2, 4, 96, 96, dtype=torch.bool)])),
    "documents": (DOCUMENTS, qkv(ids())),
    "a bias": (BIASED, qkv([bias()])),
    "a bias of heads": (BIASED, qkv([torch.zeros(4, 1, 1)])),
    "a sink": (PLAIN.with_(sink=0), qkv([torch.zeros(4)])),
    "one row": (GROUPED, few()),
    "one row, window": (GROUPED.with_(mask=(Band(100, 3000),)), few()),
    "split, causal": (CAUSAL, (tensor(7), tensor(4096), tensor(4096), [], [])),
    "split": (PLAIN, (tensor(7), tensor(4096), tensor(4096), [], [])),
    "heads first": (PLAIN.with_(layout="bhsd"), qkv(q=tensor(96, order="bhsd"))),
    "slices of one tensor": (PLAIN, qkv(**{name: x.transpose(1, 2) for name, x in zip(
        "qkv", torch.zeros(2, 96, 3, 4, 64, dtype=torch.bfloat16).unbind(2), strict=True)})),
    "one batch": (PLAIN, qkv(q=tensor(96, batch=1), k=tensor(96, batch=1), v=tensor(96, batch=1))),
}


@pytest.mark.parametrize("name", SOME)
def test_a_call_like_the_one_before_is_not_worked_out_again(spy: Spy, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record, given = SOME[name]
    want = anew(spy, record, given)
    monkeypatch.setattr(api, "_run", None)  # would fail
    assert passed(spy, record, given) == want
    assert spy.prepared == 1
    api._plans[id(record)].memo.last = None
    assert passed(spy, record, given) == want
    others = tuple(x.clone() for x in given[:3])
    if all(x.stride() == y.stride() for x, y in zip(others, given[:3], strict=True)):
        assert passed(spy, record, (*others, *given[3:])) is not None  # other memory is no other call


@pytest.mark.parametrize(("record", "given"), [
    (PLAIN, qkv(k=tensor(96, gap=4))),
    (PLAIN, qkv(q=tensor(96, skip=1))),
    (DOCUMENTS, qkv(ids(torch.int16))),
], ids=["a copy for strides", "a copy for alignment", "a conversion"])
def test_what_is_computed_from_the_inputs_is_computed_each_time(spy: Spy, record: Attention, given: Given) -> None:
    anew(spy, record, given)
    assert not api._plans[id(record)].memo.known
    for i, x in enumerate(given[:3]):
        x.fill_(i + 1)
    for x in given[3]:
        x.fill_(1)
    spy.calls.clear()
    api.attention(*given[:3], record, *given[3:])
    (_, args), = spy.calls
    assert all(bool((x == i + 1).all()) for i, x in enumerate(args[:3]))
    if record is DOCUMENTS:
        assert bool((args[5 + 3] == 1).all())


def test_wrong_tensors_are_refused_after_right_ones(spy: Spy) -> None:
    wrong: dict[str, Given] = {
        "dtype": qkv(**{name: tensor(96, dtype=torch.float16) for name in "qkv"}),
        **{f"dtype of {name}": qkv(**{name: tensor(96, dtype=torch.float16)}) for name in "qkv"},
        "device": qkv(**{name: tensor(96).to("meta") for name in "qkv"}),
        **{f"device of {name}": qkv(**{name: tensor(96).to("meta")}) for name in "qkv"},
        "batch of k": qkv(k=tensor(96, batch=1)),
        "keys of v": qkv(v=tensor(95, order="sbhd")),
        "heads": qkv(q=tensor(96, heads=8)),
    }
    for record, good in ((PLAIN, qkv()), (CAUSAL, qkv(v=tensor(96, order="sbhd")))):
        anew(spy, record, good)
        for name, given in wrong.items():
            for _ in range(2):
                with pytest.raises(ValueError, match="q|k|v"):
                    api.attention(*given[:3], record, *given[3:])
                    pytest.fail(name)
    anew(spy, PADDED, qkv([mask()]))
    for capture in (mask().to(torch.uint8), mask().to("meta")):
        with pytest.raises(ValueError, match="mask|device"):
            api.attention(*qkv()[:3], PADDED, [capture], [])


def test_another_current_device(spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    given = qkv()
    anew(spy, PLAIN, given)
    memo = api._plans[id(PLAIN)].memo
    assert memo.call(*given) is not None
    monkeypatch.setattr(launch, "current_device", lambda: 1)
    assert memo.call(*given) is None
    memo.last = None
    assert memo.call(*given) is None


def counters(spy: Spy, record: Attention, given: Given) -> list[Tensor]:
    """What four calls pass as the counter of work items: the first is worked out, the others are held."""
    api._plans.clear()
    spy.calls.clear()
    for _ in range(4):
        api.attention(*given[:3], record, *given[3:])
    return [args[launch.CAPTURES + api._TICKETS] for _, args in spy.calls]


@pytest.mark.parametrize("name", ["causal", "padding", "a mask", "split, causal"])
def test_launches_on_the_default_stream_share_a_counter(spy: Spy, name: str) -> None:
    found = [x for _ in range(2) for x in counters(spy, *SOME[name])]
    assert all(x is found[0] for x in found)
    assert found[0].dtype == torch.int32 and found[0].tolist() == [0]


@pytest.mark.parametrize("name", ["causal", "padding", "a mask", "split, causal"])
def test_a_counter_of_another_stream_is_of_one_launch(spy: Spy, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = counters(spy, *SOME[name])[0]
    monkeypatch.setattr(launch, "current_stream", lambda index: 2)
    found = counters(spy, *SOME[name])
    assert len({x.data_ptr() for x in (shared, *found)}) == 5 and all(x.tolist() == [0] for x in found)
    for x in found:
        x.fill_(3)  # a launch that is still under way
    api.attention(*SOME[name][1][:3], SOME[name][0], *SOME[name][1][3:])
    assert spy.calls[-1][1][launch.CAPTURES + api._TICKETS].tolist() == [0]
    monkeypatch.setattr(launch, "current_stream", lambda index: 0)
    assert all(x is shared for x in counters(spy, *SOME[name]))


def test_no_counter_where_items_cost_the_same(spy: Spy) -> None:
    assert counters(spy, *SOME["plain"]) == [None] * 4


def test_a_counter_of_another_kind_of_tensor_is_not_held(spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    monkeypatch.setattr(launch, "_counters", {})
    with FakeTensorMode():
        assert isinstance(launch.counter(torch.device("cpu")), FakeTensor)
    launch.counter(torch.device("meta"))
    assert type(launch.counter(torch.device("cpu"))) is Tensor and not launch.counter(torch.device("cpu")).is_meta


def test_results_of_the_caller_are_no_model_for_later_calls(spy: Spy) -> None:
    api._plans.clear()
    q, k, v, _, _ = qkv()
    mine = tensor(96, order="bhsd")
    out, _ = api.attention(q, k, v, PLAIN, out=mine)
    assert out is mine and not api._plans[id(PLAIN)].memo.known
    assert passed(spy, PLAIN, qkv()) == anew(spy, PLAIN, qkv())
    out, _ = api.attention(q, k, v, PLAIN, out=mine)
    assert out is mine and spy.calls[-1][1][3] is mine


def test_nothing_of_a_call_is_kept_alive(spy: Spy) -> None:
    for record, given in ((PLAIN, qkv()), (PADDED, qkv([mask()])), (GROUPED, few())):
        q, k, v, captures, ints = (x.clone() if isinstance(x, Tensor) else list(x) for x in given)
        captures = [x.clone() for x in captures]
        out, lse = api.attention(q, k, v, record, captures, ints)
        assert api._plans[id(record)].memo.known
        passed_on = (x for i, x in enumerate(spy.calls[-1][1]) if isinstance(x, Tensor) and i != launch.CAPTURES + api._TICKETS)
        watched = [weakref.ref(x) for x in (q, k, v, out, lse, *captures, *passed_on)]
        del q, k, v, out, lse, captures
        spy.calls.clear()
        gc.collect()
        assert not any(w() is not None for w in watched)


def test_the_number_held_is_bounded(spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MOST", 5)
    api._plans.clear()
    for keys in range(1, 40):
        api.attention(tensor(3), tensor(keys), tensor(keys), PLAIN)
    assert 0 < len(api._plans[id(PLAIN)].memo.known) <= 5


def test_a_subclass_is_not_taken_for_a_tensor(spy: Spy) -> None:
    class Mine(Tensor):
        pass

    given = qkv()
    anew(spy, PLAIN, given)
    assert launch.describe(*given) is not None
    assert api._plans[id(PLAIN)].memo.call(given[0].as_subclass(Mine), *given[1:]) is None


@pytest.mark.parametrize("lengths", [(256, 384, 129), (384, 256, 129)])
def test_another_length_is_no_new_kernel(spy: Spy, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """An even number of row blocks would be one with teams, an odd one without: whichever is compiled serves both."""
    monkeypatch.setattr(api, "_compiled", {})
    wide = PLAIN.with_(head_dim=128, head_dim_v=128)
    for length in lengths:
        q, k, v = (tensor(length, dim=128) for _ in range(3))
        api.attention(q, k, v, wide)
        api._compiled[spy.calls[-1][0]] = None
    first, *others = (variant for variant, _ in spy.calls)
    assert first.team == (ROWS if lengths[0] == 256 else ALONE) and all(v == first for v in others)


def test_teams_of_heads_whatever_the_length(spy: Spy) -> None:
    for mask_ in ((), CAUSAL.mask):
        for length in (128, 300, 1000):
            q, k, v = tensor(length, dim=128), tensor(length, dim=128, heads=2), tensor(length, dim=128, heads=2)
            api.attention(q, k, v, PLAIN.with_(head_dim=128, head_dim_v=128, kv_heads=2, mask=mask_))
    assert {v.team for v, _ in spy.calls if not v.split} == {HEADS}
