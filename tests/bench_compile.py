"""Cold ``torch.compile`` on CPU with the rewriting and without: seconds of the first call, in fresh processes.

    python tests/bench_compile.py [RESULT.json] [--models llama,bert] [--repeats 3]
    python tests/bench_compile.py [RESULT.json] --layers 2,8,32

The second form compiles a llama of so many layers, for inference and for a training step, with the rewriting: what
part of the compile time recognising and proving take, and how they grow with the depth.

Every first call runs in its own process with empty caches and one compile worker.  Counted is processor time of the
process and its children (user and system), which other load on the machine disturbs less than the wall clock does;
both are in the result.  The two variants take turns.
"""
from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

MODELS = ("llama", "mistral", "qwen3", "gemma", "bert", "vit", "gpt2", "whisper")


def depth_child(layers: int, training: bool) -> None:
    """Prints seconds of a cold compile, and of our pass in it, for a llama of ``layers`` layers."""
    import dataclasses
    import warnings

    warnings.filterwarnings("ignore")
    import torch

    import fa_inductor
    from fa_inductor import zoo

    spec = zoo.MODELS["llama"]
    zoo.MODELS["llama"] = dataclasses.replace(spec, options=spec.options | {"num_hidden_layers": layers})
    model = zoo._build("llama", "eager", torch.float32).train(training)
    inputs = zoo._inputs(spec, torch.float32)
    fa_inductor.options.backend = "sdpa"
    fa_inductor.enable()
    compiled = torch.compile(lambda: model(**inputs).last_hidden_state)
    with torch.set_grad_enabled(training):
        model(**inputs)
        cpu, wall = used(), time.perf_counter()
        out = compiled()
        if training:
            out.sum().backward()
        cpu, wall = used() - cpu, time.perf_counter() - wall
    rep = fa_inductor.report()
    print(json.dumps(dict(layers=layers, mode="training" if training else "inference", cpu_s=cpu, wall_s=wall,
                          rewritten=rep.rewritten, pass_s=sum(g.seconds for g in rep.graphs))))


def used() -> float:
    """Processor seconds of this process and its children."""
    import resource

    return sum(r.ru_utime + r.ru_stime for r in map(resource.getrusage, (
        resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def child(name: str, on: bool) -> None:
    import warnings

    warnings.filterwarnings("ignore")
    import torch

    import fa_inductor
    from fa_inductor import zoo

    model = zoo._build(name, "eager", torch.float32).eval()
    inputs = zoo._inputs(zoo.MODELS[name], torch.float32)
    if on:
        fa_inductor.options.backend = "sdpa"
        fa_inductor.enable()
    compiled = torch.compile(lambda: model(**inputs).last_hidden_state)

    with torch.no_grad():
        model(**inputs)
        cpu, wall = used(), time.perf_counter()
        compiled()
        cpu, wall = used() - cpu, time.perf_counter() - wall
    rep = fa_inductor.report()
    print(json.dumps(dict(cpu_s=cpu, wall_s=wall, rewritten=rep.rewritten, pass_s=sum(g.seconds for g in rep.graphs))))


def run(*arguments: str) -> dict:
    """What a child with these arguments prints."""
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1",
                            "TRANSFORMERS_VERBOSITY": "error"}
        done = subprocess.run([sys.executable, __file__, *arguments], env=env, check=True,
                              capture_output=True, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("result", nargs="?")
    p.add_argument("--models", default=",".join(MODELS))
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--layers")
    p.add_argument("--child", nargs=2)
    p.add_argument("--depth-child", nargs=2)
    a = p.parse_args()
    if a.child:
        return child(a.child[0], a.child[1] == "1")
    if a.depth_child:
        return depth_child(int(a.depth_child[0]), a.depth_child[1] == "1")
    rows = []
    if a.layers:
        for training, layers in itertools.product(("0", "1"), a.layers.split(",")):
            row = run("--depth-child", layers, training)
            rows.append(row | {"share": row["pass_s"] / row["cpu_s"]})
            print(json.dumps(rows[-1]), flush=True)
        return write(a.result, rows, model="llama, eager attention, float32")
    for name in a.models.split(","):
        runs: dict[bool, list[dict]] = {False: [], True: []}
        for _ in range(a.repeats):
            for on in (False, True):
                runs[on].append(run("--child", name, str(int(on))))
        off, on_ = (statistics.median(r["cpu_s"] for r in runs[x]) for x in (False, True))
        rows.append(dict(model=name, off_cpu_s=off, on_cpu_s=on_, ratio=on_ / off,
                         pass_s=statistics.median(r["pass_s"] for r in runs[True]),
                         rewritten=runs[True][0]["rewritten"],
                         off_wall_s=statistics.median(r["wall_s"] for r in runs[False]),
                         on_wall_s=statistics.median(r["wall_s"] for r in runs[True])))
        print(json.dumps(rows[-1]), flush=True)
    write(a.result, rows, repeats=a.repeats, mode="inference, eager attention, float32")


def write(path: str | None, rows: list[dict], **more: object) -> None:
    import torch

    if path:
        with open(path, "w") as f:
            json.dump(dict(torch=torch.__version__, cores=os.cpu_count(), date=datetime.date.today().isoformat(), **more,
                           rows=rows), f, indent=1)


if __name__ == "__main__":
    main()
