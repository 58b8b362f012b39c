"""Check the forward kernel of this GPU against float64 on hundreds or thousands of cases, and write the outcome as JSON.

    python tests/gpu/check_forward.py [--out FILE] [--workers N] [--only TEXT] [--quick] [--many]

``--many`` adds thousands of cases that run on the same kernels: other lengths, layouts and data (`forward_many`).  Each
failure of those is run alone with ``--only NAME``.  Judged by the numerics contract, see `forward_judge`.  Exit status 1
when a case fails or did not run.
"""
from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module, metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from forward_case import NEG_INF, Case, inputs, launched
from forward_cases import all_cases
from forward_judge import judge
from forward_many import EACH, by_variant, many

from fa_inductor.kernels import api

Done = list[tuple[Case, dict[str, Any]]]


def _work(cases: list[Case], device: str) -> Done:
    """Run the cases of one variant in this process."""
    done: Done = []
    before = set(api._compiled)
    for c in cases:
        try:
            done.append((c, judge(c, device)))
        except Exception as e:  # a case must not hide the others
            done.append((c, {"ok": False, "why": f"{type(e).__name__}: {str(e)[:300]}",
                             "trace": traceback.format_exc()[-1500:]}))
            if isinstance(e, torch.AcceleratorError):
                break  # this process's context is gone
    if device == "cuda":
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        more = set(api._compiled) - before - {launched(c, sms) for c in cases}
        if more:
            why = f"kernels that no case needs: {', '.join(v.name for v in more)}"
            done.append((Case(name="one kernel"), {"ok": False, "why": why}))
        torch.cuda.empty_cache()
    return done


def behaviour() -> Done:
    """What is no matter of numbers: streams, CUDA graphs, one compile for many lengths, cost of a call."""
    found: Done = []

    def check(name: str, ok: bool, why: str) -> None:
        found.append((Case(name=name), {"ok": ok, "why": why, "ratio_max": 0.0, "ratio_mean": 0.0}))

    c = Case(name="behaviour", rows=300, keys=300, hi=0)
    q, k, v, record, captures, ints = inputs(c)
    want, want_lse = api.attention(q, k, v, record, captures, ints)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late = q * 1.0  # only right if the kernel runs behind it on this stream
        out, _ = api.attention(late, k, v, record, captures, ints)
    side.synchronize()
    check("stream", torch.equal(out, want), "the kernel did not run on the current stream")
    graph = torch.cuda.CUDAGraph()
    static = torch.zeros_like(q)
    with torch.cuda.graph(graph):
        out, lse = api.attention(static, k, v, record, captures, ints)
    static.copy_(q)
    graph.replay()
    torch.cuda.synchronize()
    check("graph", torch.equal(out, want) and torch.equal(lse, want_lse), "a replayed graph gives another answer")
    for dims, kw in (((64, 64), {"hi": 0}), ((128, 128), {"hi": 0}), ((128, 128), {"padding": "right"}), ((256, 256), {})):
        # More tiles than multiprocessors, so that each takes several.
        c = Case(name="behaviour", rows=1000, keys=1000, heads=(16, 4), batch=4, dims=dims, **kw)
        args = inputs(c)
        want, want_lse = api.attention(*args[:6])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed, _ = api.attention(*args[:6])
        equal = torch.ones((), dtype=torch.bool, device="cuda")
        sides = [torch.cuda.Stream(), torch.cuda.Stream()]
        for _ in range(250):
            graph.replay()
            here = api.attention(*args[:6])
            there = []
            for side in sides:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    there.append(api.attention(*args[:6]))
            for side in sides:
                torch.cuda.current_stream().wait_stream(side)
            equal &= (replayed == want).all()
            for out, lse in (here, *there):
                equal &= (out == want).all() & (lse == want_lse).all()
        check("repeats", bool(equal), f"1000 calls, replays and calls side by side: not all equal, {dims} {kw}")
    before = len(api._compiled)
    for rows, keys, batch in ((1, 5, 1), (77, 300, 3), (300, 77, 2)):
        x = inputs(replace(c, rows=rows, keys=keys, batch=batch, seed=rows, scale=0.3))
        api.attention(x[0], x[1], x[2], x[3], x[4], x[5])
    check("compiles", len(api._compiled) == before, f"{len(api._compiled) - before} compiles for new lengths and scales")
    torch.cuda.synchronize()
    t = time.perf_counter()
    for _ in range(200):
        api.attention(q, k, v, record, captures, ints)
    us = (time.perf_counter() - t) / 200 * 1e6
    torch.cuda.synchronize()
    check("call", us < 200, f"{us:.0f} us a call")
    print(f"call {us:.1f} us on the host", flush=True)
    return found


def version(distribution: str, module: str) -> str:
    """Version of an installed package, also where it was unpacked without its metadata."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return str(getattr(import_module(module), "__version__", "unknown"))


def pick(args: argparse.Namespace) -> list[list[Case]]:
    """The cases to run, those of one variant together."""
    bases = all_cases(args.quick)
    groups = by_variant(bases)
    found = {v: [bases[i] for i in places if args.only in bases[i].name] for v, places in groups.items()}
    if args.many:
        full = all_cases()  # a name holds a place in the whole list
        more = many(full, groups if not args.quick else by_variant(full), 2 if args.quick else EACH)
        for v, cases in more.items():
            found.setdefault(v, []).extend(c for c in cases if args.only in c.name)
    if args.device == "cpu":
        found = {v: [c for c in cases if c.strides != "far" and c.rows * c.keys * c.heads[0] * c.batch <= args.largest]
                 for v, cases in found.items()}
    if args.small:
        cases = [c for part in found.values() for c in part if c.strides != "far"]
        cases.sort(key=lambda c: (abs(c.rows * c.keys * c.heads[0] * c.batch - 500_000), c.seed))
        return [list({c.name: c for c in reversed(cases)}.values())]
    # Long groups first, so that the processes end together.
    return sorted(filter(None, found.values()), key=len, reverse=True)


def count(done: Iterable[tuple[str, bool]]) -> dict[str, dict[str, int]]:
    """Passed and failed by label."""
    counts: dict[str, dict[str, int]] = defaultdict(lambda: {"passed": 0, "failed": 0})
    for label, ok in done:
        counts[label]["passed" if ok else "failed"] += 1
    return dict(sorted(counts.items()))


def row(c: Case, r: dict[str, Any]) -> dict[str, Any]:
    """A case, as far as it differs from the default one, and what came of it."""
    plain = asdict(replace(c, fill=0.0 if c.fill == NEG_INF else c.fill))
    default = asdict(Case(name="", fill=0.0))
    return {"case": {k: v for k, v in plain.items() if v != default[k]}, **r}


def worst(done: Done) -> Done:
    """The largest errors beside eager's."""
    passed = [x for x in done if x[1]["ok"]]
    return [x for key in ("ratio_max", "ratio_mean") for x in sorted(passed, key=lambda x: -x[1][key])[:10]]


def summary(done: Done) -> dict[str, Any]:
    """Of the drawn cases: counts by family and kind of numbers, and the largest errors."""
    kinds: dict[str, Done] = defaultdict(list)
    for x in done:
        kinds[x[0].kind].append(x)
    largest = {kind: {key: max((r[key] for _, r in part if r["ok"]), default=0.0) for key in ("ratio_max", "ratio_mean", "lse")}
               for kind, part in sorted(kinds.items())}
    return {"run": len(done), "passed": sum(r["ok"] for _, r in done), "failed": sum(not r["ok"] for _, r in done),
            "by_family": count((c.name.rsplit(".", 2)[0], r["ok"]) for c, r in done),
            "by_numbers": count((c.kind, r["ok"]) for c, r in done), "largest_by_numbers": largest,
            "worst": [row(*x) for x in worst(done)], "failures": [row(*x) for x in done if not x[1]["ok"]]}


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=None)
    p.add_argument("--workers", type=int, default=8)
    p.add_argument("--only", default="", help="run cases whose name contains this")
    p.add_argument("--quick", action="store_true")
    p.add_argument("--many", action="store_true", help="thousands of cases more, on the same kernels")
    p.add_argument("--small", action="store_true", help="one small case of each name, in this process: for compute-sanitizer")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                   help="cpu: judge what a sound kernel would give, in plain torch, to check cases and judge themselves")
    p.add_argument("--largest", type=int, default=1 << 20, help="scores of a case on a CPU")
    args = p.parse_args()
    start = time.time()
    parts = pick(args)
    cases = [c for part in parts for c in part]
    done: Done = []
    work = partial(_work, device=args.device)
    if args.small or args.workers == 0:
        for part in parts:
            done += work(part)
    else:
        with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
            for found in pool.map(work, parts):
                done += found
    if not args.only and not args.small and args.device == "cuda":
        extra = behaviour()
        done += extra
        cases += [c for c, _ in extra]
    listed, drawn = [x for x in done if not x[0].kind], [x for x in done if x[0].kind]
    failed = [x for x in done if not x[1]["ok"]]
    passed = len(done) - len(failed)
    cuda = args.device == "cuda"
    report = {
        "what": "forward kernel against float64" if cuda else "plain torch in the kernel's place, against float64",
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__, "python": platform.python_version(),
        "nvidia-cutlass-dsl": version("nvidia-cutlass-dsl", "cutlass"), "apache-tvm-ffi": version("apache-tvm-ffi", "tvm_ffi"),
        "cases": len(cases), "run": len(done), "passed": passed, "failed": len(failed), "variants": len(parts),
        "seconds": round(time.time() - start, 1),
        "by_name": count((c.name, r["ok"]) for c, r in listed),
        "worst": [row(*x) for x in worst([x for x in listed if "max" in x[1]])],
        "failures": [row(*x) for x in listed if not x[1]["ok"]],
        **({"many": summary(drawn)} if args.many else {}),
    }
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    for c, r in failed[:60]:
        print("FAIL", row(c, {})["case"], r["why"], flush=True)
    print(json.dumps({k: report[k] for k in ("device", "cases", "run", "passed", "failed", "seconds", "by_name")}))
    if args.many:
        print(json.dumps({k: report["many"][k] for k in ("run", "passed", "failed", "by_numbers", "largest_by_numbers")}))
    return 0 if passed == len(cases) == len(done) else 1


if __name__ == "__main__":
    sys.exit(main())
