"""Unchanged transformers models of real width under torch.compile, without and with the rewriting: time, memory, first call.

    python tests/gpu/bench_models.py --out FILE [--only TEXT] [--modes infer,train] [--variants eager,sdpa,flex,ours,ours_sdpa]
                                     [--workers 4] [--add] [--until SECONDS]

Each row (workload, mode, variant) is a process with empty caches of its own, so that its first call is cold.  Several
compile at a time, on shares of the cores; what is timed runs alone, under a lock, and is timed again while its spread
is large (another process's first call may run kernels for some milliseconds).  ``ours`` is the model with
``attn_implementation="eager"`` and `fa_inductor.enable()`, ``ours_sdpa`` the same with "sdpa".  Rows are written as they
finish; ``--add`` keeps those that FILE has and runs the others, ``--until`` starts none after so many seconds.
"""
from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

VARIANTS = {"eager": "eager", "sdpa": "sdpa", "flex": "flex_attention", "ours": "eager", "ours_sdpa": "sdpa"}
"""Variant: ``attn_implementation``."""
MODES = ("infer", "train")
SPREAD, TRIES = 0.05, 4
"""Distance between the 20th and 80th percentile, as a part of the median, above which a timing is repeated."""


@dataclass(frozen=True)
class Work:
    """A model and what it is given."""

    config: str
    fields: dict[str, Any]
    batch: int
    length: int = 4096
    padded: bool = False
    """Right padding: the first row has half the length, the last one all of it, the others lie between."""
    tiny: tuple[tuple[str, Any], ...] = ()
    """Fields that are smaller in a check without a GPU."""


_LLAMA = dict(hidden_size=4096, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8,
              vocab_size=1024, max_position_embeddings=32768)
_BERT = dict(hidden_size=1024, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=16, vocab_size=1024,
             max_position_embeddings=4096, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
_TINY = (("hidden_size", 64), ("intermediate_size", 64), ("num_attention_heads", 4))
_TINY_GQA = (*_TINY, ("num_key_value_heads", 2))
WORKS = {
    "llama_4k": Work("LlamaConfig", _LLAMA, 4, tiny=_TINY_GQA),
    "llama_4k_pad": Work("LlamaConfig", _LLAMA, 4, padded=True, tiny=_TINY_GQA),
    "mistral_w1024_8k": Work("MistralConfig", _LLAMA | dict(sliding_window=1024), 2, 8192,
                             tiny=(*_TINY_GQA, ("sliding_window", 16))),
    "gemma2_4k": Work("Gemma2Config", dict(
        hidden_size=2304, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, head_dim=256,
        vocab_size=1024, sliding_window=1024, max_position_embeddings=32768), 2,
        tiny=(*_TINY_GQA, ("head_dim", 16), ("sliding_window", 16))),
    "gptoss_4k": Work("GptOssConfig", dict(
        hidden_size=2880, intermediate_size=256, num_hidden_layers=2, num_attention_heads=64, num_key_value_heads=8, head_dim=64,
        vocab_size=1024, num_local_experts=2, num_experts_per_tok=1, sliding_window=128), 2,
        tiny=(*_TINY_GQA, ("head_dim", 16), ("sliding_window", 16))),
    "gpt2xl_4k": Work("GPT2Config", dict(
        n_embd=1600, n_layer=2, n_head=25, n_positions=4096, vocab_size=1024, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0), 4,
        tiny=(("n_embd", 64), ("n_head", 4))),
    "bert_4k": Work("BertConfig", _BERT, 8, tiny=_TINY),
    "bert_4k_pad": Work("BertConfig", _BERT, 8, padded=True, tiny=_TINY),
    "t5enc_4k": Work("T5Config", dict(
        d_model=1024, d_kv=64, d_ff=1024, num_layers=2, num_heads=16, vocab_size=1024, dropout_rate=0.0, is_encoder_decoder=False,
        use_cache=False), 4, tiny=(("d_model", 64), ("d_kv", 16), ("d_ff", 64), ("num_heads", 4))),
}


def build(work: Work, implementation: str, device: str) -> Any:
    """The model in bfloat16, with random weights that do not depend on the implementation.

    Raises:
        ValueError: transformers has no such implementation of this model.
    """
    import torch
    import transformers as T

    fields = work.fields | (dict(work.tiny) if device == "cpu" else {})
    config = getattr(T, work.config)(**fields)
    torch.manual_seed(0)
    if work.config == "T5Config":
        model = T.T5EncoderModel._from_config(config, attn_implementation=implementation)
    else:
        model = T.AutoModel.from_config(config, attn_implementation=implementation)
    return model.to(device, torch.bfloat16).eval()


def sizes(work: Work, device: str) -> tuple[int, int]:
    """Batch and length."""
    return (2, 64) if device == "cpu" else (work.batch, work.length)


def given(work: Work, device: str) -> dict[str, Any]:
    """Arguments of the model's forward."""
    import torch

    batch, length = sizes(work, device)
    ids = torch.randint(3, 1000, (batch, length), device=device, generator=torch.Generator(device).manual_seed(1))
    args: dict[str, Any] = dict(input_ids=ids)
    if work.config != "T5Config":
        args["use_cache"] = False
    if work.padded:
        lengths = torch.linspace(length // 2, length, batch, device=device).long()
        args["attention_mask"] = (torch.arange(length, device=device) < lengths[:, None]).long()
    return args


def on_gpu(step: Callable[[], Any]) -> tuple[float, float, float]:
    """Milliseconds of a step: 20th percentile, median, 80th."""
    from triton.testing import do_bench

    low, middle, high = do_bench(step, warmup=20, rep=100, quantiles=[0.2, 0.5, 0.8])
    return low, middle, high


def on_cpu(step: Callable[[], Any]) -> tuple[float, float, float]:
    found = []
    for _ in range(5):
        t = time.perf_counter()
        step()
        found.append((time.perf_counter() - t) * 1e3)
    found.sort()
    return found[1], statistics.median(found), found[3]


def measure(name: str, mode: str, variant: str, device: str, lock: Path) -> dict[str, Any]:
    """One row, in this process; `first_call_s` is cold only where the caches that the environment names are empty."""
    import filelock
    import torch
    import transformers as T

    import fa_inductor
    from fa_inductor.backends.dispatch import on_fallback

    T.logging.set_verbosity_error()
    work = WORKS[name]
    cuda = device == "cuda"
    row: dict[str, Any] = dict(
        work=name, mode=mode, variant=variant, device=torch.cuda.get_device_name() if cuda else "cpu",
        torch=torch.__version__, transformers=T.__version__, **dict(zip(("batch", "length"), sizes(work, device), strict=True)))
    fallbacks: list[str] = []
    on_fallback(lambda record, backend, reason: fallbacks.append(f"{reason} [{record.describe()}]"))
    try:
        model = build(work, VARIANTS[variant], device)
    except (ValueError, ImportError) as e:
        return row | dict(error=f"{type(e).__name__}: {e}"[:600], unsupported="support" in str(e).lower())
    args = given(work, device)
    if variant.startswith("ours"):
        fa_inductor.enable()
    compiled = torch.compile(model, dynamic=False)

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize()

    def step() -> torch.Tensor:
        with torch.set_grad_enabled(mode == "train"):
            out = compiled(**args).last_hidden_state
            if mode == "train":
                model.zero_grad(set_to_none=True)
                out.float().square().mean().backward()
        return out.detach()

    turn = filelock.FileLock(lock)
    wait()
    t = time.perf_counter()
    try:
        out = step()
        wait()
    except torch.OutOfMemoryError:  # beside the others' first calls: again, alone
        torch.cuda.empty_cache()
        row["first_call_alone"] = True
        turn.acquire()
        t = time.perf_counter()
        out = step()
        wait()
    row["first_call_s"] = round(time.perf_counter() - t, 2)
    real = out.float() if not work.padded else out.float()[args["attention_mask"].bool()]
    row["rms"] = round(float(real.square().mean().sqrt()), 5)  # equal to rounding for all variants of a workload
    del out, real
    if cuda:
        torch.cuda.empty_cache()
    report = fa_inductor.report()
    row |= dict(
        rewritten=report.rewritten, found=report.found, backends=sorted({b.backend for b in report.blocks if b.backend}),
        blocks=sorted({b.words for b in report.blocks if b.outcome == "rewritten"}),
        reasons=sorted({f"{b.reason} [{b.words}]" for b in report.blocks if b.outcome == "refused"}))
    with turn:
        step()
        wait()
        if cuda:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step()
            wait()
            peak = torch.cuda.max_memory_allocated()
            row |= dict(peak_gib=round(peak / 2**30, 4), step_gib=round((peak - before) / 2**30, 4))
        tries: list[tuple[float, float, float]] = []
        while len(tries) < TRIES and not any(_spread(x) <= SPREAD for x in tries):
            tries.append((on_gpu if cuda else on_cpu)(step))
    turn.release(force=True)
    low, middle, high = min(tries, key=_spread)
    row |= dict(ms=round(middle, 4), ms_low=round(low, 4), ms_high=round(high, 4), timings=len(tries))
    return row | (dict(fallbacks=fallbacks) if fallbacks else {})


def _spread(x: tuple[float, float, float]) -> float:
    return (x[2] - x[0]) / x[1]


def alone(name: str, mode: str, variant: str, device: str, lock: Path, threads: int, limit: float) -> dict[str, Any]:
    """`measure` in a new process with empty caches; what goes wrong is the row's `error`."""
    with tempfile.TemporaryDirectory(prefix="bench_models_", ignore_cleanup_errors=True) as folder:
        result = Path(folder) / "row.json"
        env = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton",
            "FA_INDUCTOR_KERNEL_CACHE_DIR": f"{folder}/kernels", "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-W", "ignore", __file__, "--row", f"{name},{mode},{variant}", "--device", device,
                   "--lock", str(lock), "--out", str(result)]
        row: dict[str, Any] = dict(work=name, mode=mode, variant=variant)
        said = Path(folder) / "said"
        with said.open("w") as f:  # a file, since the compile workers of a process that was ended may keep a pipe open
            process = subprocess.Popen(command, env=env, stdout=f, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return row | dict(error=f"no result after {limit:.0f} s")
        if not result.exists():
            return row | dict(error=f"exit status {status}: {said.read_text(errors='replace')[-600:]}")
        return json.loads(result.read_text())


def one_row(args: argparse.Namespace) -> int:
    """The inner process: one row into a file."""
    name, mode, variant = args.row.split(",")
    try:
        row = measure(name, mode, variant, args.device, args.lock)
    except Exception as e:
        text = "out of memory" if "OutOfMemory" in type(e).__name__ else f"{type(e).__name__}: {e}"[:600]
        row = dict(work=name, mode=mode, variant=variant, error=text, trace=traceback.format_exc()[-1500:])
    args.out.write_text(json.dumps(row))
    return 0


def version(distribution: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"


def report(rows: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """What the file holds: what was run on, and the rows in their order."""
    order = [(w, m, v) for w in WORKS for m in MODES for v in VARIANTS]
    rows = sorted(rows, key=lambda r: order.index((r["work"], r["mode"], r["variant"])))
    first: dict[str, Any] = next((r for r in rows if "torch" in r), {})
    return {
        "what": "transformers models under torch.compile: milliseconds of a step, peak memory, seconds of a cold first call",
        "date": datetime.date.today().isoformat(), "device": first.get("device", "unknown"), "torch": first.get("torch", "unknown"),
        "transformers": first.get("transformers", "unknown"), "triton": version("triton"), "python": platform.python_version(),
        "nvidia-cutlass-dsl": version("nvidia-cutlass-dsl-libs-base"), "dtype": "bfloat16", "layers": 2,
        "workers": args.workers, "compile_threads": args.threads, "cores": os.cpu_count(), "rows": rows}


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--only", default="", help="workloads whose name contains this")
    p.add_argument("--modes", default="infer")
    p.add_argument("--variants", default=",".join(VARIANTS))
    p.add_argument("--workers", type=int, default=4, help="rows that compile at a time")
    p.add_argument("--threads", type=int, default=0, help="TORCHINDUCTOR_COMPILE_THREADS of each; 0 shares the cores")
    p.add_argument("--limit", type=float, default=400.0, help="seconds for a row, waiting for its turn included")
    p.add_argument("--until", type=float, default=float("inf"), help="start no row after so many seconds")
    p.add_argument("--add", action="store_true", help="keep the rows of FILE that have no error, and run the others")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny models, to check this program")
    p.add_argument("--row", default="", help=argparse.SUPPRESS)
    p.add_argument("--lock", type=Path, default=None, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.row:
        return one_row(args)
    start = time.monotonic()
    args.threads = args.threads or max(1, (os.cpu_count() or 1) // args.workers)
    modes, variants = args.modes.split(","), args.variants.split(",")
    if not set(modes) <= set(MODES) or not set(variants) <= set(VARIANTS):
        p.error(f"modes are of {', '.join(MODES)}, variants of {', '.join(VARIANTS)}")
    rows: list[dict[str, Any]] = []
    if args.add and args.out.exists():
        rows = [r for r in json.loads(args.out.read_text())["rows"] if "error" not in r or r.get("unsupported")]
    known = {(r["work"], r["mode"], r["variant"]) for r in rows}
    wanted = [key for m in modes for w in WORKS if args.only in w for v in variants if (key := (w, m, v)) not in known]
    writing = Lock()

    def run(key: tuple[str, str, str]) -> None:
        if time.monotonic() - start > args.until:
            return
        row = alone(*key, args.device, lock, args.threads, args.limit)
        with writing:
            rows.append(row)
            part = args.out.with_name(args.out.name + ".part")
            part.write_text(json.dumps(report(rows, args), indent=1) + "\n")
            part.replace(args.out)
            shown = {k: v for k, v in row.items() if k not in ("device", "torch", "transformers", "trace", "blocks")}
            print(f"{time.monotonic() - start:4.0f} s", json.dumps(shown), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder) / "timing.lock"
        with ThreadPoolExecutor(args.workers) as pool:
            list(pool.map(run, wanted))
    ran = {(r["work"], r["mode"], r["variant"]): r for r in rows}
    left = [key for key in wanted if key not in ran]
    failed = [key for key in wanted if key in ran and "error" in ran[key] and not ran[key].get("unsupported")]
    print(f"{len(ran)} rows; failed: {failed}; not started: {left}")
    return int(bool(failed or left))


if __name__ == "__main__":
    sys.exit(main())
