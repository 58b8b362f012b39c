"""Write the tables of README.md from the files in tests/results/: what was measured, on what, and what was not.

    python tests/make_tables.py [--check] [--readme FILE] [--results FOLDER]

Replaces the text between ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->`` for each name in `TABLES`.  With
``--check`` nothing is written and the exit status is 1 when the text is not what the results give.
"""
from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NOT_MEASURED = "not measured"
PEERS = ("cudnn", "fa3", "fa4_cute")
BACKENDS: dict[str, str] = {"kernels sm_90": "kernel", "sdpa": "PyTorch SDPA"}
"""What the README calls the backends of a report."""
Load = Callable[[str], Any]
"""The parsed file of this name in tests/results/; None when there is none."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines: list[Sequence[str]] = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source(data: dict[str, Any], *names: str) -> str:
    """Where figures come from: device, versions, date, files."""
    links = ", ".join(f"[{n}](tests/results/{n})" for n in names)
    return f"{data['device']}, torch {data['torch']}, {data['date']}; {links}."


def forward_speed(load: Load) -> str:
    """TFLOP/s of the forward kernel and of its peers, and ours as a part of the best of those."""
    data = load("kernels_forward_bench_h200.json")
    if data is None:
        return f"Forward kernel: {NOT_MEASURED}."
    speed: dict[tuple[int, int], dict[str, dict[str, float]]] = {}
    for row in data["rows"]:
        found = re.fullmatch(r"d(\d+) s(\d+) b\d+ h\d+ (full|causal)", row["work"])
        assert found is not None, row["work"]
        cell = speed.setdefault((int(found[1]), int(found[2])), {}).setdefault(found[3], {})
        cell[row["provider"]] = row["tflops"]

    def cells(by: dict[str, float]) -> list[str]:
        ours, peers = by.get("fa_inductor"), [by[p] for p in PEERS if p in by]
        each = " / ".join(f"{by[p]:.0f}" if p in by else NOT_MEASURED for p in ("fa_inductor", *PEERS))
        if ours and peers:
            ratios.append(ours / max(peers))
            return [each, f"{ratios[-1]:.2f}"]
        return [each, NOT_MEASURED]

    ratios: list[float] = []
    rows = [[str(d), str(s), *cells(by.get("full", {})), *cells(by.get("causal", {}))]
            for (d, s), by in sorted(speed.items())]
    version = str(data["cudnn"])
    return "\n\n".join([
        f"Forward kernel, bfloat16, 16k tokens, hidden size 2048, TFLOP/s.  FA3 is FlashAttention-3; cuDNN is "
        f"{int(version[:-4])}.{int(version[-4:-2])}.{int(version[-2:])}, FA4 is flash-attn-4 on its Hopper path; the ratio is "
        f"to the fastest of the three, {math.prod(ratios) ** (1 / max(1, len(ratios))):.2f} in the geometric mean.",
        table(["head dim", "length", "no mask: ours / cuDNN / FA3 / FA4", "ratio", "causal: ours / cuDNN / FA3 / FA4", "ratio"],
              rows),
        " ".join(filter(None, (source(data, "kernels_forward_bench_h200.json"), data.get("note"))))])


def features_speed(load: Load) -> str:
    """What masks and score programs cost for each key tile that is walked."""
    data = load("kernels_features_h200.json")
    if data is None:
        return f"Masks and score programs: {NOT_MEASURED}."
    dims = sorted({r["dim"] for r in data["rows"]})
    cell = {(r["what"], r["seq"], r["dim"]): r for r in data["rows"] if "beside" in r and r["what"] != "causal"}
    rows = [[what, str(seq), cell[what, seq, dims[0]]["beside"],
             *(f"{r['per_tile']:.2f}, {r['times_as_fast']:.2f} ×" for d in dims if (r := cell.get((what, seq, d))))]
            for what, seq in dict.fromkeys((w, s) for w, s, _ in cell)]
    return "\n\n".join([
        "Masks and score programs beside our own plain or causal attention, bfloat16, 16k tokens: speed for each key tile that "
        "some row of a query tile sees, and how many times as fast the call is.",
        table(["what", "length", "beside", *(f"head dim {d}" for d in dims)], rows),
        " ".join(filter(None, (source(data, "kernels_features_h200.json"), data.get("note"))))])


def forward_checks(load: Load) -> str:
    name = "kernels_forward_h200.json"
    data = load(name)
    if data is None:
        return f"- Forward kernel against float64: {NOT_MEASURED}."
    drawn = f", {data['many']['run']} of them drawn over lengths, layouts and data with outliers" if "many" in data else ""
    return (f"- Forward kernel against float64: {data['passed']} of {data['cases']} cases passed{drawn}, "
            f"{data['variants']} kernel variants.  {source(data, name)}" + ("  " + data["note"] if "note" in data else "")
            + sanitizer(load("compute_sanitizer_h200.json")))


def host(load: Load) -> str:
    """What a call costs the processor."""
    name = "host_h200.json"
    data = load(name)
    if data is None:
        return f"Host time of a call: {NOT_MEASURED}."
    parts = [f"{case} {c['call_in_a_graph']:.0f} µs, of which the kernel's launch {c['steps']['direct.launch']:.0f}"
             for case, c in data["cases"].items()]
    return ("Host time that one more rewritten attention adds to a compiled graph: " + "; ".join(parts)
            + f".  The aim is 8.  {source(data, name)}" + ("  " + data["note"] if "note" in data else ""))


def sanitizer(data: Any) -> str:
    if data is None:
        return ""
    return (f"\n- `compute-sanitizer` on {data['cases']} of them, {data['date']}, not again since: memcheck {data['memcheck']['device_errors']} and synccheck "
            f"{data['synccheck']['errors']} errors in kernels ([compute_sanitizer_h200.json]"
            "(tests/results/compute_sanitizer_h200.json)).")


def backward_checks(load: Load) -> str:
    data = load("backward_h200.json")
    if data is None:
        return f"- Backward: {NOT_MEASURED}."
    by = data["summary"]["ok_of_cases"]

    def count(operator: str, *dtypes: str) -> str:
        ok, cases = (sum(by[f"{operator} {d}"][i] for d in dtypes) for i in (0, 1))
        return f"{ok} of {cases}"

    half = ("bfloat16", "float16")
    return (f"- Backward by PyTorch's kernels in 16 bits, each fed with an out and log-sum-exp that PyTorch's forward "
            f"made: {count('flash', *half)} flash and {count('efficient', *half)} memory-efficient cases within the "
            f"contract; results that no rounding explains: {data['summary']['wrong']}.  In float32 "
            f"{count('efficient', 'float32')} were within it, so float32 gradients come from plain torch instead.  "
            f"{source(data, 'backward_h200.json')}")


def llama(load: Load) -> str:
    """Time and peak memory of a two-layer llama, without and with the rewriting."""
    data = load("llama_h200.json")
    if data is None:
        return f"llama: {NOT_MEASURED}."
    got = {(r["seq"], r["train"], r["fa_inductor"]): r for r in data["rows"]}

    def pair(seq: int, train: bool, key: str, digits: int, unit: str) -> str:
        def cell(on: bool) -> str:
            row = got.get((seq, train, on), {})
            return f"{row[key]:.{digits}f} {unit}" if key in row else row.get("error", NOT_MEASURED)

        off, on = (got.get((seq, train, x), {}).get(key) for x in (False, True))
        ratio = f" ({off / on:.1f} ×)" if off and on else ""
        return f"{cell(False)} → {cell(True)}{ratio}"

    rows = [[str(seq), *(pair(seq, train, *what) for train in (False, True)
                         for what in (("ms", 1, "ms"), ("peak_gib", 2, "GiB")))]
            for seq in sorted({r["seq"] for r in data["rows"]})]
    batch = data["rows"][0]["batch"]
    return "\n\n".join([
        f"{data['model']} attention, {data['dtype']}, batch {batch}; `torch.compile` without → with `fa_inductor`; "
        "peak memory of one step above the model's own.",
        table(["length", "inference", "peak memory", "training step", "peak memory"], rows),
        source(data, "llama_h200.json")])


def models(load: Load) -> str:
    """Blocks rewritten, backend and contract by model, attention implementation and mode."""
    data = load("models_h200.json")
    if data is None:
        return f"Models: {NOT_MEASURED}."
    got: dict[tuple[str, str, bool], tuple[dict[str, Any], str]] = {
        (r["model"], r["impl"], r["train"]): (r, "") for r in data["rows"]}
    for r in data.get("first_run", []):
        got.setdefault((r["model"], r["impl"], r["train"]), (r, " ¹"))

    def cell(name: str, impl: str, train: bool) -> str:
        if (name, impl, train) not in got:
            return NOT_MEASURED
        row, mark = got[name, impl, train]
        backend = " and ".join(BACKENDS.get(b, b) for b in row["backends"])
        outside = f", **outside: max {row['worst_max']:.1f} ×, mean {row['worst_mean']:.1f} ×**" if row["bad"] else ""
        return f"{row['rewritten']}/{row['found']} {backend}{outside}{mark}"

    names = list(dict.fromkeys(n for n, _, _ in got))
    columns = [("eager", False), ("eager", True), ("sdpa", False), ("sdpa", True)]
    rows = [[name, *(cell(name, *c) for c in columns)] for name in names]
    earlier = "  ¹ measured on an earlier state of the same day." if any(m for _, m in got.values()) else ""
    return "\n\n".join([
        f"Two-layer models of transformers {data['transformers']}, random weights, {data['dtype']}, length {data['seq']}: "
        "blocks rewritten / found in the compiled graphs, and what runs the forward.  A cell without a remark is within "
        "the numerics contract (outputs and all gradients); else the worst error above the floor, as a multiple of eager's." + earlier,
        table(["model", "eager, inference", "eager, training", "sdpa, inference", "sdpa, training"], rows),
        source(data, "models_h200.json")])


def models_speed(load: Load) -> str:
    """Whole models: time of a step, beside the best of what PyTorch has; first call; peak memory.  A table a mode."""
    name = "models_speed_h200.json"
    data = load(name)
    if data is None:
        return f"Whole models of real width: {NOT_MEASURED} (`python tests/gpu/bench_models.py`)."
    tables = [_models_speed(data, m) for m in ("infer", "train") if any(r["mode"] == m for r in data["rows"])]
    return "\n\n".join([
        f"Unchanged transformers {data['transformers']} models of real width, {data['layers']} layers, random weights, "
        f"{data['dtype']}, `torch.compile`: milliseconds of a step.  Ours is the better of eager and sdpa with the rewriting; "
        f"beside it how many times as fast that is as the best of the three, how much longer the cold first call is than that "
        f"of eager ({data['workers']} compiles at a time), and peak memory as a multiple of the smallest of the three.",
        *tables, " ".join(filter(None, (source(data, name), data.get("note"))))])


def _models_speed(data: dict[str, Any], mode: str) -> str:
    got: dict[str, dict[str, dict[str, Any]]] = {}
    for r in data["rows"]:
        if r["mode"] == mode:
            got.setdefault(r["work"], {})[r["variant"]] = r
    ratios: dict[str, list[float]] = {"the best of the three": [], "the better of eager and sdpa": [], "flex": []}

    def time_of(row: dict[str, Any] | None) -> str:
        if row is None:
            return NOT_MEASURED
        if "ms" in row:
            return f"{row['ms']:.2f}"
        return "unsupported" if row.get("unsupported") else row["error"] if row["error"] == "out of memory" else "failed"

    rows = []
    for work, by in got.items():
        theirs = {v: by[v] for v in ("eager", "sdpa", "flex") if "ms" in by.get(v, {})}
        ours = min((by[v] for v in ("ours", "ours_sdpa") if "ms" in by.get(v, {})), key=lambda r: r["ms"], default=None)
        line = [work, *(time_of(by.get(v)) for v in ("eager", "sdpa", "flex"))]
        if ours is None:
            rows.append([*line, time_of(by.get("ours")), *[NOT_MEASURED] * 3])
            continue
        left = ours["found"] - ours["rewritten"]
        mark = f" ({left} of {ours['found']} blocks left alone)" if left else ""
        cells = [f"{ours['ms']:.2f} ({'sdpa' if ours['variant'] == 'ours_sdpa' else 'eager'}){mark}", *[NOT_MEASURED] * 3]
        if theirs:
            best = {v: r["ms"] / ours["ms"] for v, r in theirs.items()}
            cells[1] = f"{min(best.values()):.2f} ×"
            ratios["the best of the three"].append(min(best.values()))
            if {"eager", "sdpa"} & set(best):
                ratios["the better of eager and sdpa"].append(min(best[v] for v in ("eager", "sdpa") if v in best))
            if "flex" in best:
                ratios["flex"].append(best["flex"])
            if "eager" in theirs:
                cells[2] = f"{ours['first_call_s'] - theirs['eager']['first_call_s']:+.1f} s"
            cells[3] = f"{ours['peak_gib'] / min(r['peak_gib'] for r in theirs.values()):.2f}"
        rows.append([*line, *cells])
    means = ", ".join(f"{math.prod(x) ** (1 / len(x)):.2f} × {what} ({len(x)} models)" for what, x in ratios.items() if x)
    head = {"infer": "inference", "train": "training step"}[mode]
    return table([head, "eager", "sdpa", "flex", "ours", "beside the best", "first call", "peak memory"], rows) + (
        f"\n\nSpeed in the geometric mean: {means}." if means else "")


def cpu_rule(load: Load) -> str:
    data = load("cpu_sdpa_rule.json")
    if data is None:
        return f"SDPA on CPU: {NOT_MEASURED}."

    def spread(rows: list[dict[str, Any]]) -> str:
        found = [r["speedup"] for r in rows]
        return f"{min(found):.1f} to {max(found):.1f} times" if found else NOT_MEASURED

    infer = [r for r in data["rows"] if not r["training"]]
    plain = [r for r in infer if r["mask"] in ("none", "causal", "gqa")]
    long, short = ([r for r in plain if (r["seq"] >= 256) is x] for x in (True, False))
    train = [r for r in data["rows"] if r["training"]]
    return (f"On CPU ({data['cpu']}, {data['threads']} thread, torch {data['torch']}, {data['date']}) PyTorch SDPA beside "
            f"Inductor's own lowering of written-out attention: without a mask or causal {spread(long)} as fast from "
            f"length 256 on and {spread(short)} below; training {spread(train)} "
            f"([cpu_sdpa_rule.json](tests/results/cpu_sdpa_rule.json)).")


def compile_time(load: Load) -> str:
    data = load("compile_cpu.json")
    if data is None:
        return f"Cold `torch.compile` with the rewriting beside without: {NOT_MEASURED} (`python tests/bench_compile.py`)."
    each = ", ".join(f"{r['model']} {r['ratio']:.2f}" for r in data["rows"])
    return (f"Cold `torch.compile` on CPU, processor time with the rewriting as a multiple of that without "
            f"({data['mode']}, median of {data['repeats']}): {each}.  "
            f"torch {data['torch']}, {data['date']}; [compile_cpu.json](tests/results/compile_cpu.json)."
            + compile_depth(load))


def compile_depth(load: Load) -> str:
    """What part of a cold compile recognising and proving take, by depth."""
    data = load("compile_depth_cpu.json")
    if data is None:
        return ""
    each = "; ".join(f"{r['layers']} layers, {r['mode']}: {r['pass_s']:.1f} of {r['cpu_s']:.0f} s" for r in data["rows"])
    return (f"  Recognising, proving and rewriting in it, {data['model']}: {each} "
            f"([compile_depth_cpu.json](tests/results/compile_depth_cpu.json)).")


def emulator(load: Load) -> str:
    """Kernels under the PTX emulator: cases, mutants, and how it compares with a GPU."""
    cases, mutants = (load(f"emulator_{n}.json") for n in ("cases", "mutants"))
    if cases is None or mutants is None:
        return f"Kernels under the PTX emulator: {NOT_MEASURED}."
    confirmed = "  The emulator itself was not compared with a GPU yet."
    if "programs" in cases:
        same, of = cases["bit_equal_elements"]
        state = "" if cases["same_kernel"] else ", which ran an earlier state of the kernel"
        confirmed = (f"  Compared with {cases['what'].rpartition(' and ')[2]} ([emulator_h200.json](tests/results/emulator_h200.json)){state}, "
                     f"{cases['programs'] - len(cases['different_programs'])} of {cases['programs']} instruction programs give "
                     f"the same results, and {cases['beside_gpu'] - len(cases['different_cases'])} of {cases['beside_gpu']} cases are "
                     f"{'equal to rounding' if cases['same_kernel'] else 'as close as float64 asks of each'}: "
                     f"{cases['bit_equal_outputs']} outputs bit for bit, "
                     f"and {same} of {of} elements taken from all.")
    return (f"Without a GPU: the forward kernel's PTX runs under an emulator ([tests/emulator](tests/emulator/README.md)); "
            f"{cases['cases'] - cases['wrong']} of {cases['cases']} cases agree with float64 "
            f"([emulator_cases.json](tests/results/emulator_cases.json)), and {mutants['caught']} of {mutants['mutants']} "
            f"kernels with a planted fault are caught ([emulator_mutants.json](tests/results/emulator_mutants.json)"
            f"{'; ' + mutants['note'] if 'note' in mutants else ''}).  A part of both runs in every CI.{confirmed}")


def zoo(load: Load) -> str:
    """Blocks found and rewritten in the zoo, and the worst error, by mode and kind of shapes."""
    data = load("zoo_cpu.json")
    if data is None:
        return f"Blocks of the zoo: {NOT_MEASURED} (`python -m fa_inductor zoo --all`)."
    cells: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for r in data["rows"]:
        cells.setdefault((r["attention"], r["mode"], r["shapes"]), []).append(r)
    rows = [[*key, f"{sum(r['rewritten'] for r in found)} of {sum(r['found'] for r in found)}",
             f"{max(x for r in found for x in r['excess'].values()):.2f}"] for key, found in cells.items()]
    left = dict.fromkeys(f"{r['model']} ({r['attention']}, {r['mode']}, {r['shapes']})"
                         for r in data["rows"] if r["rewritten"] < r["found"])
    return "\n\n".join([
        f"{len({r['model'] for r in data['rows']})} kinds of transformers models, small and random, on CPU: attention blocks "
        f"rewritten, and the worst error of outputs and gradients as a part of what the contract allows.  Errors are "
        f"taken over {' or '.join(map(str, sorted({r['draws'] for r in data['rows']})))} inputs a row.  "
        f"torch {data['torch']}, transformers {data['transformers']}, {data['date']} ([zoo_cpu.json](tests/results/zoo_cpu.json)).",
        table(["attention", "mode", "shapes", "rewritten", "error"], rows),
        "Left alone: " + (", ".join(left) if left else "none") + "."])


TABLES: dict[str, Callable[[Load], str]] = {
    "llama": llama, "models-speed": models_speed, "models": models, "forward-speed": forward_speed, "features-speed": features_speed, "forward-checks": forward_checks,
    "host": host,
    "backward-checks": backward_checks, "cpu-rule": cpu_rule, "compile-time": compile_time,
    "zoo": zoo, "emulator": emulator,
}
"""Marker name: what makes the text between the markers."""
_BLOCK = re.compile(r"(<!-- begin: (?P<name>[\w-]+) -->\n).*?(<!-- end: (?P=name) -->)", re.DOTALL)


def rewrite(text: str, load: Load) -> str:
    """``text`` with every block made anew.

    Raises:
        ValueError: a block of `TABLES` is missing or there twice, a name is unknown, or a marker has no partner.
    """
    names = [m["name"] for m in _BLOCK.finditer(text)]
    if sorted(names) != sorted(TABLES) or len(re.findall(r"<!-- (?:begin|end):", text)) != 2 * len(names):
        raise ValueError(f"blocks in the text: {', '.join(sorted(names))}; expected: {', '.join(sorted(TABLES))}")
    return _BLOCK.sub(lambda m: f"{m[1]}{TABLES[m['name']](load)}\n{m[3]}", text)


def loader(folder: Path) -> Load:
    def load(name: str) -> Any:
        path = folder / name
        return json.loads(path.read_text()) if path.exists() else None

    return load


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--check", action="store_true", help="write nothing; exit with 1 when the text is stale")
    p.add_argument("--readme", type=Path, default=ROOT / "README.md")
    p.add_argument("--results", type=Path, default=ROOT / "tests" / "results")
    a = p.parse_args(argv)
    before = a.readme.read_text()
    after = rewrite(before, loader(a.results))
    if a.check:
        if before != after:
            print(f"{a.readme} is stale: run python tests/make_tables.py", file=sys.stderr)
        return int(before != after)
    if before != after:
        a.readme.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
