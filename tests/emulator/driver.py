"""The CUDA driver through ctypes: load PTX, encode tensor maps, launch; for running the programs on a GPU."""
from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from .program import Program

_SWIZZLE = {0: 0, 32: 1, 64: 2, 128: 3}
_ELEMENTS = {"u16": 1, "u32": 2, "s32": 3, "f32": 7}


class DriverError(RuntimeError):
    """A driver call failed; `fatal` when the process's context is gone."""

    def __init__(self, call: str, code: int, log: str = ""):
        super().__init__(f"{call} returned {code} {log}".strip())
        self.fatal = code not in (1, 200, 201, 209, 218, 500)


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, call: str, log: str = "") -> None:
    if code:
        raise DriverError(call, code, log)


def encode_map(lib: ctypes.CDLL, spec: dict[str, Any], address: int) -> ctypes.Array:
    """A CUtensorMap in a buffer of 128 bytes at a multiple of 64."""
    raw = ctypes.create_string_buffer(192)
    start = -ctypes.addressof(raw) % 64
    out = (ctypes.c_char * 128).from_buffer(raw, start)
    rank = len(spec["shape"])
    code = lib.cuTensorMapEncodeTiled(
        ctypes.byref(out), ctypes.c_int(_ELEMENTS[spec.get("element", "u16")]), ctypes.c_uint32(rank), ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*spec["shape"]), (ctypes.c_uint64 * max(1, rank - 1))(*spec["strides"]),
        (ctypes.c_uint32 * rank)(*spec["box"]), (ctypes.c_uint32 * rank)(*[1] * rank), ctypes.c_int(0),
        ctypes.c_int(_SWIZZLE[spec["swizzle"]]), ctypes.c_int(0), ctypes.c_int(0))
    _check(code, "cuTensorMapEncodeTiled")
    return out


def load(lib: ctypes.CDLL, text: str, entry: str) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    """(module, function) of PTX text, through the driver's own assembler."""
    log = ctypes.create_string_buffer(8192)
    options = (ctypes.c_int * 2)(5, 6)  # CU_JIT_ERROR_LOG_BUFFER and its size
    values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    code = lib.cuModuleLoadDataEx(ctypes.byref(module), ctypes.c_char_p(text.encode()), 2, options, values)
    _check(code, "cuModuleLoadDataEx", log.value.decode(errors="replace")[:400])
    _check(lib.cuModuleGetFunction(ctypes.byref(function), module, entry.encode()), "cuModuleGetFunction")
    return module, function


def run(p: Program) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """Results of a program on the current GPU, and the bytes of its buffer."""
    lib = _driver()

    def on_gpu(data: bytes | Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(data) or [0] * 16, dtype=torch.uint8).cuda()

    source, out, buffer = on_gpu(p.input_bytes()), on_gpu(bytes(max(16, p.output_size))), on_gpu(p.buffer)
    keep: list[Any] = []
    pointers = [ctypes.c_uint64(x.data_ptr()) for x in (source, out, buffer)]
    addresses = [ctypes.addressof(x) for x in pointers]
    for spec in p.maps:
        target = buffer
        if spec.get("data") is not None:
            target = torch.tensor(spec["data"], dtype=torch.int32).to(torch.uint16).cuda()
        m = encode_map(lib, spec, target.data_ptr() + 2 * spec.get("skip", 0))
        keep += [target, m]
        addresses.append(ctypes.addressof(m))
    torch.cuda.synchronize()
    module, function = load(lib, p.text(), p.entry)
    params = (ctypes.c_void_p * len(addresses))(*addresses)
    _check(lib.cuLaunchKernel(function, 1, 1, 1, p.threads, 1, 1, 0, None, params, None), "cuLaunchKernel")
    _check(lib.cuCtxSynchronize(), "cuCtxSynchronize")
    _check(lib.cuModuleUnload(module), "cuModuleUnload")
    return p.split(bytes(out.cpu().tolist())), tuple(buffer.cpu().tolist())


def moved(x: torch.Tensor, device: str) -> torch.Tensor:
    """A tensor on another device with its strides: its whole storage goes there."""
    base = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())  # type: ignore[call-overload]
    return base.to(device, copy=True).as_strided(x.shape, x.stride(), x.storage_offset())
