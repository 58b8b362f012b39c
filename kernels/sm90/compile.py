"""Compile a `Forward` variant for a given target; needs the DSL, no GPU.

Everything is traced with fake tensors whose lengths and strides are symbols, so one compile serves every shape.
"""
from __future__ import annotations

import threading
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from .forward import ForwardKernel
from .variant import MAX_CAPTURES, MAX_INTS, Forward

LOCK = threading.Lock()
"""The DSL keeps its state in the process: one trace at a time."""

_DTYPES = {
    "bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32, "bool": cutlass.Boolean,
    "uint8": cutlass.Uint8, "int32": cutlass.Int32, "int64": cutlass.Int64,
}


def _tensor(dtype: str, rank: int, unit_last: bool, align: int) -> Any:
    """Fake tensor with symbolic lengths (32 bit) and strides (64 bit: no offset of it can overflow)."""
    kind = _DTYPES[dtype]
    per = align // itemsize(dtype)
    shape = tuple(cute.sym_int32() for _ in range(rank))
    strides: list[Any] = [cute.sym_int64(divisibility=per) for _ in range(rank)]
    if unit_last:
        strides[-1] = 1
    return make_fake_tensor(kind, shape, tuple(strides), assumed_align=align)


def compile_forward(variant: Forward, options: str = "") -> Any:
    """The compiled kernel of a variant, callable through tvm-ffi with the arguments of `ForwardKernel.__call__`
    less the stream (the current one of torch is taken).

    Raises:
        whatever the DSL raises when tracing or ptxas fails.
    """
    v = variant
    qkvo = [_tensor(v.dtype, 4, True, 16) for _ in range(4)]
    captures: list[Any] = [
        _tensor(x.dtype, 4, x.unit, itemsize(x.dtype) * (8 if x.wide else 2 if x.pairs else 1)) for x in v.captures]
    captures += [None] * (MAX_CAPTURES - len(captures))
    doc = v.documents
    args = [
        *qkvo,
        _tensor("float32", 3, True, 4),
        _tensor("bool", 2, False, 1) if v.padding else None,
        _tensor("int32", 2, True, 4) if v.padding else None,
        _tensor("bool", 4, v.dense_wide, 8 if v.dense_wide else 1) if v.dense else None,
        _tensor(doc, 2, False, itemsize(doc)) if doc else None,
        _tensor(doc, 2, True, itemsize(doc)) if doc else None,
        _tensor(v.sink, 1, False, itemsize(v.sink)) if v.sink else None,
        _tensor("float32", 3, True, 4) if v.empty == "mean" else None,
        _tensor("int32", 4, True, 4) if v.listed else None,
        *captures,
        *(Int32(0) for _ in range(MAX_INTS)),
        Float32(1.0), Float32(0.0), Int32(0), Int32(0), Int32(1), Int32(0), Int32(1),
        _tensor("int32", 1, True, 4) if v.counted else None,
        _tensor("float32", 4, True, 16) if v.split else None, Int32(1), Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    ]
    with LOCK:
        return cute.compile(ForwardKernel(v), *args, options=f"--enable-tvm-ffi --gpu-arch sm_90a {options}".strip())


def itemsize(dtype: str) -> int:
    """Bytes of an element."""
    return max(1, _DTYPES[dtype].width // 8)  # a bool is a byte
