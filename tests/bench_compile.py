"""Cold ``torch.compile`` on CPU with the rewriting and without: seconds of the first call, in fresh processes.

    python tests/bench_compile.py [RESULT.json] [--models llama,bert] [--repeats 3]

Every first call runs in its own process with empty caches and one compile worker.  Counted is processor time of the
process and its children (user and system), which other load on the machine disturbs less than the wall clock does;
both are in the result.  The two variants take turns.
"""
from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

MODELS = ("llama", "mistral", "qwen3", "gemma", "bert", "vit", "gpt2", "whisper")


def child(name: str, on: bool) -> None:
    import resource
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

    def used() -> float:
        return sum(r.ru_utime + r.ru_stime for r in map(resource.getrusage, (
            resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))

    with torch.no_grad():
        model(**inputs)
        cpu, wall = used(), time.perf_counter()
        compiled()
        cpu, wall = used() - cpu, time.perf_counter() - wall
    rep = fa_inductor.report()
    print(json.dumps(dict(cpu_s=cpu, wall_s=wall, rewritten=rep.rewritten, pass_s=sum(g.seconds for g in rep.graphs))))


def run(name: str, on: bool) -> dict:
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1",
                            "TRANSFORMERS_VERBOSITY": "error"}
        done = subprocess.run([sys.executable, __file__, "--child", name, str(int(on))], env=env, check=True,
                              capture_output=True, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("result", nargs="?")
    p.add_argument("--models", default=",".join(MODELS))
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--child", nargs=2)
    a = p.parse_args()
    if a.child:
        return child(a.child[0], a.child[1] == "1")
    import torch

    rows = []
    for name in a.models.split(","):
        runs: dict[bool, list[dict]] = {False: [], True: []}
        for _ in range(a.repeats):
            for on in (False, True):
                runs[on].append(run(name, on))
        off, on_ = (statistics.median(r["cpu_s"] for r in runs[x]) for x in (False, True))
        rows.append(dict(model=name, off_cpu_s=off, on_cpu_s=on_, ratio=on_ / off,
                         pass_s=statistics.median(r["pass_s"] for r in runs[True]),
                         rewritten=runs[True][0]["rewritten"],
                         off_wall_s=statistics.median(r["wall_s"] for r in runs[False]),
                         on_wall_s=statistics.median(r["wall_s"] for r in runs[True])))
        print(json.dumps(rows[-1]), flush=True)
    if a.result:
        with open(a.result, "w") as f:
            json.dump(dict(torch=torch.__version__, cores=os.cpu_count(), date=datetime.date.today().isoformat(),
                           repeats=a.repeats, mode="inference, eager attention, float32", rows=rows), f, indent=1)


if __name__ == "__main__":
    main()
