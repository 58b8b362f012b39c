"""The cases of tests/gpu/check_forward.py: how many, on which kernels, and that their judge tells right from wrong.

No kernel runs here; what a sound one gives is computed in plain torch (`forward_judge.stand_in`).
"""
from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from host_stand_in import stand_in

from fa_inductor.kernels import one_row


@pytest.fixture(scope="module")
def gpu() -> Iterator[SimpleNamespace]:
    """The modules of tests/gpu, and the drawn cases."""
    sys.path.insert(0, str(Path(__file__).parent / "gpu"))
    import check_forward
    import forward_case
    import forward_cases
    import forward_judge
    import forward_many

    bases = forward_cases.all_cases()
    groups = forward_many.by_variant(bases)
    drawn = forward_many.many(bases, groups)
    yield SimpleNamespace(check=check_forward, case=forward_case, judge=forward_judge, many=forward_many, bases=bases,
                          groups=groups, drawn=drawn, cases=[c for part in drawn.values() for c in part])
    sys.path.remove(str(Path(__file__).parent / "gpu"))


def test_there_are_enough_of_every_kind(gpu: SimpleNamespace) -> None:
    assert len(gpu.cases) >= 5000 and len({c.name for c in gpu.cases}) == len(gpu.cases)
    assert not {c.name for c in gpu.cases} & {c.name for c in gpu.bases}
    kinds = Counter(c.kind for c in gpu.cases)
    assert set(kinds) == set(gpu.many.KINDS) and min(kinds.values()) >= 200 and kinds["heavy"] >= 1000
    assert set(gpu.many.STRIDES) == {c.strides for c in gpu.cases}
    lengths = Counter(n for c in gpu.cases for n in (c.rows, c.keys))
    assert all(lengths[n] >= 20 for n in (1, 15, 16, 17, 63, 64, 65, 95, 96, 97, 127, 128, 129, 159, 160, 161, 191, 192, 193, 255,
                                          256, 257))
    assert sum(n for length, n in lengths.items() if length >= 1000) >= 500
    assert sum(c.rows != c.keys for c in gpu.cases) >= 2000
    for c in gpu.cases:
        b, h = c.batch, c.heads[0]
        assert b * h * c.rows * c.keys <= 2 * gpu.many.MOST and b * h * max(c.rows, c.keys) * max(c.dims) <= 2 * gpu.many.MOST, c


def test_each_runs_on_the_kernel_of_the_case_it_varies(gpu: SimpleNamespace) -> None:
    assert {v for v, part in gpu.drawn.items() if part} == set(gpu.groups)
    for v, part in gpu.drawn.items():
        for c in part[:: max(1, len(part) // 6)]:
            _, _, _, record, captures, _ = gpu.case.inputs(c, "meta")
            assert gpu.case.api.supports(record, "sm_90") is None, c
            assert gpu.case.api.variant_of(record, captures) == v, c


def test_launched_is_what_a_call_launches(gpu: SimpleNamespace) -> None:
    """Few rows are split or packed, or neither; nothing else is launched, or check_forward would say so of every case."""
    asked: list[Any] = []

    def kernel(variant: Any) -> Any:
        asked.append(variant)
        return lambda *args: None

    everything = [*gpu.bases, *gpu.cases]
    cases = [c for c in everything if c.rows <= 64 or c.name == "decode"] + everything[::15]
    kinds: Counter[tuple[bool, bool]] = Counter()
    with stand_in(kernel, "meta"):
        for c in cases:
            asked.clear()
            q, k, v, record, captures, ints = gpu.case.inputs(c, "meta")
            gpu.case.api.attention(q, k, v, record, captures, ints)
            if asked:
                launched = gpu.case.launched(c)
                assert asked == [launched], c
                kinds[launched.split, one_row.packed(record) is not None and c.rows == 1] += 1
            else:  # nothing to launch where one row sees no key
                first, last = one_row.key_range(record, ints, c.keys)
                assert c.rows == 1 and first == last, c
    assert min(kinds[split, packed] for split in (False, True) for packed in (False, True)) >= 5, kinds


def test_a_name_is_enough(gpu: SimpleNamespace) -> None:
    assert all(gpu.many.named(c.name) == c for c in gpu.cases[::1500])
    args = SimpleNamespace(quick=False, many=True, only=gpu.cases[777].name, small=False, device="cuda")
    assert gpu.check.pick(args) == [[gpu.cases[777]]]
    for name in ("full.9999.00", "causal.0000.00", "full.0000.x"):
        with pytest.raises(ValueError, match="no case"):
            gpu.many.named(name)


def small(gpu: SimpleNamespace, step: int) -> list[Any]:
    return [c for c in gpu.cases if c.batch * c.heads[0] * c.rows * c.keys * max(c.dims) <= 1 << 21][::step]


def test_rows_without_keys_are_only_where_the_record_allows_them(gpu: SimpleNamespace) -> None:
    looked = 0
    for c in small(gpu, 3):
        if c.empty == "never" and not c.sink:
            q, _, _, record, captures, _ = gpu.case.inputs(c, "cpu")
            seen = gpu.case.visible(c, record, captures, q.device)
            assert seen is None or bool(seen.any(-1).all()), c
            looked += seen is not None
    assert looked >= 100


def test_what_a_sound_kernel_gives_is_within_the_contract(gpu: SimpleNamespace) -> None:
    found = [(c, gpu.judge.judge(c, "cpu")) for c in small(gpu, 24)]
    assert len(found) >= 50
    assert not [(c, r["why"]) for c, r in found if not r["ok"]]


def spoil(how: str) -> Any:
    def run(c: Any, q: Any, k: Any, v: Any, record: Any, captures: Any, ints: Any) -> Any:
        from forward_judge import stand_in

        if how == "last key lost":
            k = k.clone()
            k[:, :, -1] = 0
        if how == "one row wrong":
            out, lse = stand_in(c, q, k, v, record, captures, ints)
            out = out.clone()
            out[-1, -1, -1] = v.double().mean(-2)[-1, -1].to(out.dtype)
            return (out.transpose(1, 2).contiguous().transpose(1, 2) if c.layout == "bshd" else out), lse
        out, lse = stand_in(c, q, k, v, replace(record, scale=record.scale * 1.02) if how == "scale" else record, captures, ints)
        return out, lse + (1e-3 if how == "lse" else 0.0)

    return run


@pytest.mark.parametrize("how", ["last key lost", "scale", "lse", "one row wrong"])
def test_a_wrong_kernel_is_noticed(gpu: SimpleNamespace, how: str) -> None:
    """Each fault shows in most cases with ordinary numbers."""
    ordinary = [c for c in gpu.cases if c.kind in ("normal", "rows") and 16 <= c.keys <= 160 and 16 <= c.rows <= 300 and c.heads[0] <= 8
                and not (c.padding or c.dense or c.documents or c.chunk or c.hi is not None or c.lo is not None)
                and (c.scale is None or c.scale > 0)]
    assert len(ordinary) >= 36
    cases = ordinary[:: len(ordinary) // 12][:12]
    wrong = [c for c in cases if not gpu.judge.judge(c, "cpu", spoil(how))["ok"]]
    assert len(wrong) >= (12 if how == "lse" else 9), [c for c in cases if c not in wrong]


def test_from_cases_to_the_file(gpu: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["check_forward.py", "--device", "cpu", "--workers", "0", "--many", "--quick", "--largest", "3000",
                                      "--out", str(path), "--only", "causal"])
    assert gpu.check.main() == 0
    found = json.loads(path.read_text())
    assert found["cases"] == found["run"] == found["passed"] > found["many"]["run"] == found["many"]["passed"] > 0
    assert list(found["many"]["by_family"]) == ["causal"] and found["failures"] == found["many"]["failures"] == []
    assert sum(n["passed"] for n in found["many"]["by_numbers"].values()) == found["many"]["run"]
    monkeypatch.setattr(gpu.check, "judge", lambda c, device: 1 / 0)
    assert gpu.check.main() == 1
    found = json.loads(path.read_text())
    assert found["failed"] == found["cases"] and len(found["many"]["failures"]) == found["many"]["run"]
    assert found["many"]["failures"][0]["case"]["name"].startswith("causal.") and "ZeroDivision" in found["failures"][0]["why"]
