"""README.md and CONTRIBUTING.md say what is there: generated tables, links, files, commands, options, reason codes."""
from __future__ import annotations

import json
import re

import make_tables
import pytest
from conftest import ROOT

from fa_inductor import options
from fa_inductor.__main__ import VERBS
from fa_inductor.reasons import Code

PAGES = ("README.md", "CONTRIBUTING.md")


def text(page: str) -> str:
    return (ROOT / page).read_text()


def test_tables_are_what_the_results_give():
    assert make_tables.main(["--check"]) == 0


def test_check_finds_a_stale_table_and_a_second_run_mends_it(tmp_path, capsys):
    page = tmp_path / "README.md"
    page.write_text(re.sub(r"\d+ of \d+ cases passed", "1 of 1 cases passed", text("README.md")))
    arguments = ["--readme", str(page)]
    assert make_tables.main([*arguments, "--check"]) == 1 and "stale" in capsys.readouterr().err
    assert make_tables.main(arguments) == 0
    assert page.read_text() == text("README.md")


@pytest.mark.parametrize("change", [
    lambda t: t.replace("<!-- begin: llama -->", ""),
    lambda t: t.replace("begin: llama", "begin: lama").replace("end: llama", "end: lama"),
    lambda t: t + "<!-- begin: llama -->\n<!-- end: llama -->\n",
])
def test_a_marker_that_is_lost_or_misspelt_is_an_error(change):
    with pytest.raises(ValueError, match="expected"):
        make_tables.rewrite(change(text("README.md")), lambda name: None)


def test_what_no_file_has_is_not_measured():
    for name, make in make_tables.TABLES.items():
        assert make_tables.NOT_MEASURED in make(lambda name: None), name


HEAD = dict(device="a GPU", torch="2", date="today", dtype="bfloat16", model="m", cudnn=91900)


def test_a_missing_measurement_and_ratios():
    rows = [dict(seq=8, batch=1, train=train, fa_inductor=on, ms=4.0 - 3 * on, peak_gib=2.0)
            for train in (False, True) for on in (False, True)][:3]
    out = make_tables.llama(lambda name: dict(HEAD, rows=rows))
    assert "| 8 | 4.0 ms → 1.0 ms (4.0 ×) | 2.00 GiB → 2.00 GiB (1.0 ×) | 4.0 ms → not measured | " \
           "2.00 GiB → not measured |" in out
    rows[2] = {k: v for k, v in rows[2].items() if k not in ("ms", "peak_gib")} | {"error": "out of memory"}
    assert "| out of memory → not measured |" in make_tables.llama(lambda name: dict(HEAD, rows=rows))


def test_speed_is_compared_with_the_faster_of_the_others():
    rows = [dict(work=f"d64 s1024 b16 h32 {mask}", provider=p, tflops=t)
            for mask, speeds in (("full", (300.0, 400.0, 200.0)), ("causal", (300.0, 100.0)))
            for p, t in zip(("fa_inductor", "cudnn", "fa4_cute"), speeds, strict=False)]
    out = make_tables.forward_speed(lambda name: dict(HEAD, rows=rows))
    assert "| 64 | 1024 | 300 / 400 / not measured / 200 | 0.75 | 300 / 100 / not measured / not measured | 3.00 |" in out
    assert "cuDNN is 9.19.0" in out and "1.50 in the geometric mean" in out


def test_features_are_beside_what_they_are_compared_with():
    row = dict(dim=64, seq=8, what="softcap", beside="plain", per_tile=0.5, times_as_fast=0.25)
    out = make_tables.features_speed(lambda name: dict(HEAD, rows=[dict(row, what="plain"), row, dict(row, dim=128, per_tile=0.75)]))
    assert "| softcap | 8 | plain | 0.50, 0.25 × | 0.75, 0.25 × |" in out


def test_whole_models_are_beside_the_best_of_the_others():
    def row(work, variant, ms, first, peak, mode="infer"):
        return dict(work=work, mode=mode, variant=variant, ms=ms, first_call_s=first, peak_gib=peak, found=2, rewritten=2)

    rows = [row("a", "eager", 8.0, 10.0, 4.0), row("a", "sdpa", 4.0, 11.0, 1.0), row("a", "flex", 6.0, 20.0, 2.0),
            row("a", "ours", 2.0, 12.5, 1.1), row("a", "ours_sdpa", 2.5, 9.0, 1.0),
            row("b", "eager", 8.0, 10.0, 4.0), dict(work="b", mode="infer", variant="sdpa", error="ValueError: x", unsupported=True),
            dict(work="b", mode="infer", variant="flex", error="RuntimeError: x"),
            dict(work="b", mode="infer", variant="ours", error="out of memory"), row("b", "ours_sdpa", 16.0, 9.0, 6.0) | {"rewritten": 1},
            dict(work="c", mode="infer", variant="ours", error="out of memory")]
    data = dict(HEAD, transformers="5", layers=2, workers=4, rows=rows)
    out = make_tables.models_speed(lambda name: data)
    assert "| a | 8.00 | 4.00 | 6.00 | 2.00 (eager) | 2.00 × | +2.5 s | 1.10 |" in out
    assert "| b | 8.00 | unsupported | failed | 16.00 (sdpa) (1 of 2 blocks left alone) | 0.50 × | -1.0 s | 1.50 |" in out
    assert "| c | not measured | not measured | not measured | out of memory | not measured | not measured | not measured |" in out
    assert "1.00 × the best of the three (2 models), 1.00 × the better of eager and sdpa (2 models), 3.00 × flex (1 models)" in out
    assert "training step" not in out
    rows.append(row("a", "ours", 3.0, 1.0, 1.0, "train"))
    assert "| a | not measured | not measured | not measured | 3.00 (eager) |" in make_tables.models_speed(lambda name: data)


def test_drawn_cases_are_counted_where_there_are_some():
    data = dict(HEAD, passed=8, cases=9, variants=2)
    assert "8 of 9 cases passed, 2 kernel" in make_tables.forward_checks(lambda name: data if "forward" in name else None)
    data["many"] = dict(run=7)
    assert "8 of 9 cases passed, 7 of them drawn" in make_tables.forward_checks(lambda name: data if "forward" in name else None)


def test_a_model_outside_the_contract_is_named():
    row = dict(model="m", impl="eager", train=True, found=3, rewritten=2, backends=["kernels sm_90"], worst_max=8.49,
               worst_mean=1.2, bad=["w"])
    fine = dict(row, train=False, bad=0, backends=["sdpa"])
    data = dict(HEAD, transformers="5", seq=4, rows=[row], first_run=[fine, dict(fine, train=True)])
    out = make_tables.models(lambda name: data)
    assert "| m | 2/3 PyTorch SDPA ¹ | 2/3 kernel, **outside: max 8.5 ×, mean 1.2 ×** | not measured | not measured |" in out


def test_compile_time_has_every_model(tmp_path):
    (tmp_path / "compile_cpu.json").write_text(json.dumps(dict(
        torch="2", date="today", mode="inference", repeats=3, rows=[dict(model="a", ratio=1.049), dict(model="b", ratio=0.9)])))
    assert "a 1.05, b 0.90." in make_tables.compile_time(make_tables.loader(tmp_path))


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_somewhere(page):
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text(page)) if "://" not in link]
    anchors = {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-")
               for h in re.findall(r"(?m)^#+ (.+)$", text(page))}
    assert links or page != "README.md"
    broken = [x for x in links if not (x[1:] in anchors if x.startswith("#") else (ROOT / x.split("#")[0]).exists())]
    assert broken == []


@pytest.mark.parametrize("page", PAGES)
def test_named_files_and_folders_exist(page):
    named = re.findall(r"(?<![\w/.])((?:fa_inductor|kernels|tests|examples|\.ci)/[\w./]*)", text(page))
    assert named
    assert [n for n in named if not (ROOT / n.rstrip(".")).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_named_verbs_exist(page):
    named = re.findall(r"python -m fa_inductor ([\w-]+)", text(page))
    assert set(named) <= set(VERBS)
    if page == "README.md":
        assert set(named) == set(VERBS)


def test_every_option_is_described_with_its_default():
    rows = dict(re.findall(r"(?m)^\| `(\w+)` \| `FA_INDUCTOR_\w+` \| .*?\*\*`?(\w+)`?\*\*", text("README.md")))
    defaults = {name: str(int(v) if isinstance(v, bool) else v).lower()
                for name, v in type(options)().as_dict().items()}
    assert rows == defaults
    cache = set(re.findall(r"FA_INDUCTOR_(\w+)", text("kernels/cache.py") + text("kernels/ahead.py")))  # they know no options
    assert set(re.findall(r"FA_INDUCTOR_(\w+)", text("README.md"))) == {name.upper() for name in defaults} | cache


def test_named_reason_codes_exist():
    assert set(re.findall(r"\bFA\d{3}\b", text("README.md"))) <= {c.code for c in Code}
