"""``doctor``: what this machine has, what is missing, and what to do about it."""
from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

OLDEST_TORCH = (2, 11)
OLDEST_DSL = (4, 8)


def main(argv: list[str]) -> int:
    """Print the state of this machine as text, or as JSON with ``--json``.

    Returns:
        0 when attention can be rewritten here (with kernels or on PyTorch SDPA), 1 when something is broken.
    """
    parser = argparse.ArgumentParser(prog="python -m fa_inductor doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed = parser.parse_args(argv)
    state = collect()
    print(json.dumps(state, indent=2) if parsed.json else _text(state))
    return 1 if any(p["level"] == "error" for p in state["problems"]) else 0


def collect() -> dict[str, Any]:
    """The state as plain JSON values: versions, devices, target, caches, options, and a list of problems."""
    from . import __version__, kernels
    from .options import options

    state: dict[str, Any] = {
        "fa_inductor": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in
                     ("torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "transformers", "kernels")},
        "source": {"package": str(Path(__file__).parent), "kernels": str(Path(kernels.__file__).parent)},
        "devices": [], "options": options.as_dict(), "problems": [],
    }
    state["caches"] = {"inductor": _folder(_inductor_cache())}
    state["devices"] = _devices(state)
    _stock_patterns(state)
    _judge(state)
    return state


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` to (2, 13, 0)."""
    parts = []
    for part in version.split("+")[0].split("."):
        digits = "".join(c for c in part if c.isdigit())
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def _inductor_cache() -> Path:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())


def _folder(path: Path) -> dict[str, Any]:
    """Where a cache is, whether it can be written, and how many of our reports it holds."""
    exists = path.is_dir()
    parent = path if exists else next(p for p in path.parents if p.is_dir())
    reports = path / "fa_inductor"
    return {"path": str(path), "exists": exists, "writable": os.access(parent, os.W_OK),
            "mode": oct(path.stat().st_mode & 0o777) if exists else None,
            "reports": sum(1 for _ in reports.glob("*.json")) if reports.is_dir() else 0}


def _devices(state: dict[str, Any]) -> list[dict[str, Any]]:
    import torch

    from .options import options

    found = [{"device": "cpu", "name": platform.processor() or platform.machine(),
              "target": options.resolved_target("cpu"), "kernels": False}]
    try:
        count = torch.cuda.device_count()
        for i in range(count):
            properties = torch.cuda.get_device_properties(i)
            target = options.resolved_target(f"cuda:{i}")
            found.append({"device": f"cuda:{i}", "name": properties.name, "target": target,
                          "capability": f"{properties.major}.{properties.minor}",
                          "multiprocessors": properties.multi_processor_count,
                          "memory_gib": round(properties.total_memory / 2**30, 1),
                          "kernels": target in ("sm_90", "sm_100")})
    except (RuntimeError, AssertionError) as e:
        _problem(state, "error", f"CUDA does not start: {e}", "check the driver with nvidia-smi")
    state["cuda"] = torch.version.cuda
    return found


def _stock_patterns(state: dict[str, Any]) -> None:
    """Whether Inductor's own attention patterns can be told apart in this torch version, as `stock` must."""
    from torch._inductor.fx_passes import joint_graph

    from . import stock

    joint_graph.lazy_init(None)
    state["stock_attention_patterns"] = sum(1 for _ in stock.entries())
    if not state["stock_attention_patterns"]:
        _problem(state, "warning", "Inductor's own attention patterns were not found in this torch version",
                 "they stay on beside ours; please report it with this output")


def _judge(state: dict[str, Any]) -> None:
    packages = state["packages"]
    if _numbers(packages["torch"] or "0") < OLDEST_TORCH:
        _problem(state, "error", f"torch {packages['torch']} is too old", "pip install 'torch>=2.11'")
    if sys.platform == "linux" and any(d["kernels"] for d in state["devices"]):
        dsl = packages["nvidia-cutlass-dsl"]
        if dsl is None:
            _problem(state, "warning", "nvidia-cutlass-dsl is missing, so kernels cannot be compiled",
                     "pip install 'fa_inductor[cu13]'")
        elif _numbers(dsl) < OLDEST_DSL:
            _problem(state, "warning", f"nvidia-cutlass-dsl {dsl} is too old", "pip install 'nvidia-cutlass-dsl>=4.8'")
    for name, cache in state["caches"].items():
        if not cache["writable"]:
            _problem(state, "warning", f"the {name} cache {cache['path']} cannot be written",
                     "set TORCHINDUCTOR_CACHE_DIR to a folder of yours")


def _problem(state: dict[str, Any], level: str, text: str, remedy: str) -> None:
    state["problems"].append({"level": level, "text": text, "remedy": remedy})


def _text(state: dict[str, Any]) -> str:
    lines = [f"fa_inductor {state['fa_inductor']}, Python {state['python']}, {state['platform']}", "packages"]
    lines += [f"  {name:<20} {version or '-'}" for name, version in state["packages"].items()]
    lines.append("devices")
    for device in state["devices"]:
        memory = f", {device['memory_gib']} GiB" if "memory_gib" in device else ""
        runs = "own kernels" if device["kernels"] else "PyTorch SDPA"
        lines.append(f"  {device['device']:<8} {device['name']}{memory}: target {device['target']}, {runs}")
    lines.append("caches")
    for name, cache in state["caches"].items():
        lines.append(f"  {name:<10} {cache['path']} ({'exists' if cache['exists'] else 'not there yet'}, "
                     f"{'writable' if cache['writable'] else 'NOT writable'}, {cache['reports']} reports)")
    lines.append("options")
    lines += [f"  {name:<20} {value}" for name, value in state["options"].items()]
    lines.append(f"Inductor's own attention patterns: {state['stock_attention_patterns']}, off while enabled")
    lines += [f"{p['level'].upper()}: {p['text']}; {p['remedy']}" for p in state["problems"]] or ["no problem found"]
    return "\n".join(lines)
