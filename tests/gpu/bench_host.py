"""What one rewritten attention costs the host, in microseconds, and where it goes; writes one JSON file.

    python tests/gpu/bench_host.py --out FILE [--device cpu]

``call_in_a_graph`` is what counts: compiled graphs of `MANY` and of one attention, and the difference a call.  ``steps``
are parts of it, measured alone.  On a GPU the kernels are real and small, and few calls are made between two waits, so
that the host never waits for the device.  On a CPU a function that does nothing stands in the kernel's place: a real one
of tvm-ffi where a C++ compiler can make it, else one of Python.
"""
from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import fa_inductor
from fa_inductor.kernels import api, launch
from fa_inductor.kernels.record import Attention, Band, KeyPadding
from fa_inductor.ops import direct, hooks
from fa_inductor.ops.library import attention as operator

MANY = 17
CALLS = 24
"""Between two waits for the device."""
ROUNDS = 40


def nothing(device: str) -> tuple[str, Callable[..., Any]]:
    """A function of any arguments, called as the kernels are."""
    try:
        import tvm_ffi.cpp

        source = """#include <tvm/ffi/tvm_ffi.h>
        TVM_FFI_STATIC_INIT_BLOCK() { tvm::ffi::Function::SetGlobal("fa_inductor.nothing", tvm::ffi::Function::FromPacked(
            [](tvm::ffi::PackedArgs, tvm::ffi::Any*) {}), true); }"""
        tvm_ffi.cpp.load_inline("fa_inductor_nothing", cpp_sources=source)
        return "a function of tvm-ffi that does nothing", tvm_ffi.get_global_func("fa_inductor.nothing")
    except Exception as e:  # no compiler, no tvm-ffi: say what was measured instead
        print(f"tvm-ffi: {type(e).__name__}", flush=True)
        return "a Python function that does nothing", lambda *args: None


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def cost(call: Callable[[], Any], device: str, calls: int = CALLS) -> float:
    """Microseconds a call, the median of `ROUNDS`."""
    found = []
    for _ in range(10):
        call()
    for _ in range(ROUNDS):
        wait(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - start) / calls * 1e6)
        wait(device)
    return statistics.median(found)


def cases(device: str) -> dict[str, tuple[Attention, list[torch.Tensor], list[torch.Tensor], Callable[..., torch.Tensor]]]:
    """Record, [q, k, v], captures, and code that is rewritten to that record: q -> out of q's shape."""
    import torch.nn.functional as F

    def operands(rows: int, keys: int, heads: int, kv: int) -> list[torch.Tensor]:
        return [torch.randn(1, s, h, 64, device=device, dtype=torch.bfloat16).transpose(1, 2)
                for s, h in ((rows, heads), (keys, kv), (keys, kv))]

    padding = torch.ones(1, 128, dtype=torch.bool, device=device)
    padding[:, 100:] = False

    def full(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=m[:, None, None, :])

    plain = Attention(4, 4, 64, 64, "bfloat16", 0.125)
    return {
        "full": (plain, operands(128, 128, 4, 4), [], full),
        "causal": (plain.with_(mask=(Band(None, 0),)), operands(128, 128, 4, 4), [], causal),
        "padding": (plain.with_(mask=(KeyPadding(0),), empty_rows="zero"), operands(128, 128, 4, 4), [padding], padded),
        "decoding": (Attention(4, 2, 64, 64, "bfloat16", 0.125), operands(1, 256, 4, 2), [], full),
    }


def in_a_graph(code: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor,
               device: str) -> tuple[float, float]:
    """(a call more in a compiled graph, a whole graph of one call)."""

    def graph(n: int) -> Callable[..., torch.Tensor]:
        def chain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
            for _ in range(n):
                q = code(q, k, v, m)
            return q

        return torch.compile(chain)

    took = []
    for n in (1, MANY):
        torch._dynamo.reset()
        compiled = graph(n)
        before = len(hooks.seen_blocks())
        # On a CPU this rewrites whatever it is; what runs after that is said by `stand_in`.
        with fa_inductor.options.patch(backend="reference") if device == "cpu" else contextlib.nullcontext():
            compiled(q, k, v, m)
        ran = len(hooks.seen_blocks()) - before
        if ran != n:
            raise RuntimeError(f"{ran} of {n} attentions were rewritten")
        took.append(cost(lambda c=compiled: c(q, k, v, m), device, calls=max(1, CALLS // n)))
    return (took[1] - took[0]) / (MANY - 1), took[0]


def steps(record: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, captures: list[torch.Tensor],
          device: str) -> dict[str, float]:
    """Microseconds of each way in, and of the parts of the shortest."""
    text = record.to_string()
    parsed = Attention.from_string(text)
    given = (q, k, v, captures, [], text, "bench")
    direct.attention(*given, False)  # as in a graph that reads no lse
    direct.attention(*given, False)
    memo = api.memo_of(parsed)
    assert memo is not None and memo.last is not None
    same = memo.last[0]
    key = launch.describe(q, k, v, captures, [])
    assert key is not None
    prepared = memo.known[key]
    held: list[Any] = []

    def seen(fn: Callable[..., Any]) -> Callable[..., Any]:
        def keep(*args: Any) -> Any:
            held[:] = args
            return fn(*args)

        return keep

    kernel = prepared.fn
    prepared.fn = seen(kernel)
    prepared(q, k, v, captures, False)
    prepared.fn = kernel
    size, stride = tuple(q.shape), q.stride()
    guards = torch._C._dynamo.guards

    def general() -> None:
        memo.known.clear()
        memo.last = None
        api.attention(q, k, v, parsed, captures, [])

    found = {
        "operator": cost(lambda: operator(*given), device),
        "direct": cost(lambda: direct.attention(*given, False), device),
        "direct.compare": cost(lambda: same(q, k, v, *captures), device),
        "direct.allocate one": cost(lambda: launch.empty(size, stride, torch.bfloat16), device),
        "direct.prepared": cost(lambda: prepared(q, k, v, captures, False), device),
        "direct.launch": cost(lambda: kernel(*held), device),
        "kernels.api, first of its kind": cost(general, device),
        "graph.assert_size_stride": cost(lambda: guards.assert_size_stride(q, size, stride), device),
        "graph.reinterpret_tensor": cost(lambda: guards._reinterpret_tensor(q, size, stride, 0), device),
        "of the above, the loop itself": cost(lambda: None, device),
    }
    return {name: round(us, 2) for name, us in found.items()}


def replayed(code: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> bool:
    """Whether CUDA graphs (``mode="reduce-overhead"``) give what the same compiled code gives without, bit for bit, for
    inputs that change; a GPU only."""

    def chain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return code(code(q, k, v, m), k, v, m) * 2

    torch._dynamo.reset()
    inputs = [(q * (1 + n), k, v * (1 - n / 4), m) for n in range(6)]
    plain = torch.compile(chain)
    want = [plain(*x).clone() for x in inputs]
    torch._dynamo.reset()
    graphs = torch.compile(chain, mode="reduce-overhead")
    found = []
    for x in inputs:
        torch.compiler.cudagraph_mark_step_begin()
        found.append(graphs(*x).clone())
    eager = [chain(*x) for x in inputs]
    near = all(bool(((a.float() - b.float()).abs() <= 0.05 + 0.05 * b.float().abs()).all()) for a, b in zip(want, eager, strict=True))
    return near and all(torch.equal(a, b) for a, b in zip(want, found, strict=True))


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=None)
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = p.parse_args()
    device = args.device
    kernel, scope = "ours", contextlib.nullcontext()
    if device == "cpu":
        from host_stand_in import stand_in

        kernel, fn = nothing(device)
        scope = stand_in(lambda variant: fn)
    report: dict[str, Any] = {
        "what": "host time of one rewritten attention", "unit": "microseconds", "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU", "kernel": kernel,
        "torch": torch.__version__, "python": platform.python_version(), "cases": {},
    }
    torch._dynamo.config.recompile_limit = 64
    with scope, torch.no_grad(), fa_inductor.enabled(), torch._inductor.config.patch(force_disable_caches=True):
        for name, (record, (q, k, v), captures, code) in cases(device).items():
            mask = captures[0] if captures else torch.ones(1, k.shape[2], dtype=torch.bool, device=device)
            report["cases"][name] = row = {}
            more, whole = in_a_graph(code, q, k, v, mask, device)
            row["call_in_a_graph"], row["graph_of_one"] = round(more, 2), round(whole, 2)
            row["steps"] = steps(record, q, k, v, captures, device)
            if device == "cuda":
                row["cuda_graphs_equal"] = replayed(code, q, k, v, mask)
            print(name, json.dumps(row), flush=True)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(row.get("cuda_graphs_equal", True) for row in report["cases"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
