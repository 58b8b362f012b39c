"""One launch: arguments to parameters and global buffers, CTAs one cluster after another (PTX ISA 5.1.6
"Parameter State Space")."""
from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from . import access, approx, bulk, convert, exchange, floating, integer, move, sync, wgmma
from .cta import Cluster, Cta
from .decode import Step, decode
from .errors import Fault
from .lanes import LANES
from .memory import CONST_BASE, PARAM_BASE, Global, Memory
from .parser import Kernel, parse
from .stats import Stats
from .tensormap import TensorMap

MODULES = (access, approx, bulk, convert, exchange, floating, integer, move, sync, wgmma)
"""Imported for the decoders they register; a matrix unit joins by being listed here."""


@dataclass(frozen=True, eq=False)
class Out:
    """An array whose contents the kernel must not read before it has written them."""

    array: np.ndarray
    known: np.ndarray | None = None
    """A bool for each byte of the whole buffer: what has been written, by kernels before too; the launch adds to it."""


@dataclass(frozen=True, eq=False)
class Struct:
    """A parameter of several fields: an array stands for its address, (code, value) for a number."""

    fields: tuple[Any, ...]


class Program:
    """A parsed and decoded kernel; may be launched many times."""

    def __init__(self, text: str, name: str | None = None):
        kernels = parse(text)
        if name is None:
            if len(kernels) != 1:
                raise ValueError(f"the module has kernels {sorted(kernels)}")
            name = next(iter(kernels))
        self.kernel: Kernel = kernels[name]
        self.steps: list[Step] = decode(self.kernel)


class _Arguments:
    """Buffers, parameter bytes and tensor maps of one launch."""

    def __init__(self, kernel: Kernel, args: Sequence[Any]):
        if len(args) != len(kernel.params):
            raise ValueError(f"{len(args)} arguments for {len(kernel.params)} parameters")
        self.memory = Global()
        self.known: dict[int, tuple[Any, int]] = {}
        self.arrays: list[np.ndarray] = []
        size = max((p.offset + p.size for p in kernel.params), default=0)
        data = np.zeros(size, np.uint8)
        self.maps: dict[int, Any] = {}
        self.names: dict[str, int] = {}
        for p, arg in zip(kernel.params, args, strict=True):
            self.names[p.name] = PARAM_BASE + p.offset
            if isinstance(arg, TensorMap):
                if p.size != 128 or p.offset % 64:
                    raise ValueError(f"a tensor map for parameter {p.name} of {p.size} bytes")
                self.maps[PARAM_BASE + p.offset] = arg.bind(*self.pointer(Out(arg.array) if arg.unknown else arg.array, True))
                continue
            raw = self.pack(arg, p.size)
            if len(raw) != p.size:
                raise ValueError(f"argument of {len(raw)} bytes for parameter {p.name} of {p.size}")
            data[p.offset:p.offset + p.size] = np.frombuffer(raw, np.uint8)
        self.params = Memory("the parameters", PARAM_BASE, data, True)
        blob = bytearray()
        for name, value in kernel.constants.items():
            blob += bytes(-len(blob) % 16)
            self.names[name] = CONST_BASE + len(blob)
            blob += value
        self.constants = Memory("constant memory", CONST_BASE, np.frombuffer(bytes(blob), np.uint8), True)

    def pointer(self, arg: Any, buffer: bool = False) -> Any:
        """Global address of an array; views of one array share its buffer."""
        array, known = (arg.array, False if arg.known is None else arg.known) if isinstance(arg, Out) else (arg, True)
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        start = root.__array_interface__["data"][0]
        offset = array.__array_interface__["data"][0] - start
        if start not in self.known:
            self.known[start] = (self.memory.add(f"argument {len(self.known)}", root, known), len(self.arrays))
            self.arrays.append(root)
        b = self.known[start][0]
        return (b, offset) if buffer else b.base + offset

    def pack(self, arg: Any, size: int) -> bytes:
        if isinstance(arg, bytes):
            return arg
        if isinstance(arg, np.ndarray | Out):
            return struct.pack("<Q", self.pointer(arg))
        if isinstance(arg, Struct):
            raw = bytearray()
            for f in arg.fields:
                code, value = f if isinstance(f, tuple) else ("Q", self.pointer(f))
                n = struct.calcsize("<" + code)
                raw += bytes(-len(raw) % n) + struct.pack("<" + code, value)
            raw += bytes(size - len(raw) if 0 <= size - len(raw) < 8 else 0)
            return bytes(raw)
        if isinstance(arg, float | np.floating):
            return struct.pack("<f" if size == 4 else "<d", arg)
        return int(arg).to_bytes(size, "little", signed=int(arg) < 0)


def emulate(
    compiled: Program | str, grid: int | tuple[int, ...], args: Sequence[Any], *, block: int | tuple[int, ...] | None = None,
    cluster: tuple[int, int, int] = (1, 1, 1), shared_bytes: int = 0, seed: int = 0, limit: int = 200_000_000,
    launch_registers: int | None = None,
) -> tuple[list[np.ndarray], Stats]:
    """Run a kernel over a grid.

    compiled: a `Program`, or the text of a module with one kernel.  args: one for each parameter: an array (its
    address), `Out`, a `TensorMap`, a `Struct`, a number or bytes.  Kernels write into the caller's arrays.
    shared_bytes: dynamic shared memory.  limit: instructions of a cluster.

    Returns the global arrays in the order of their first use, and counts.

    Raises:
        Fault: the program does something that the ISA leaves undefined.
    """
    program = Program(compiled) if isinstance(compiled, str) else compiled
    kernel = program.kernel
    shape = _three(grid)
    threads = _three(block) if block is not None else kernel.threads
    if threads is None:
        raise ValueError("the kernel has no .reqntid: give block")
    arguments = _Arguments(kernel, args)
    stats = Stats()
    with np.errstate(all="ignore"):
        blocks = [tuple(reversed(i)) for i in product(*(range(n // c) for n, c in zip(reversed(shape), reversed(cluster),
                                                                                      strict=True)))]
        if any(n % c for n, c in zip(shape, cluster, strict=True)):
            raise ValueError(f"grid {shape} is no multiple of cluster {cluster}")
        for serial, (bx, by, bz) in enumerate(blocks):
            group = Cluster(cluster, arguments.memory, stats, seed * 1_000_003 + serial)
            inside = [tuple(reversed(i)) for i in product(*(range(c) for c in reversed(cluster)))]
            for rank, (x, y, z) in enumerate(inside):
                index = (bx * cluster[0] + x, by * cluster[1] + y, bz * cluster[2] + z)
                group.ctas.append(Cta(group, kernel, program.steps, index, serial * len(inside) + rank, rank, shape,
                                      threads, shared_bytes, arguments.params, arguments.maps, arguments.constants,
                                      arguments.names, launch_registers))
            try:
                group.run(limit)
            finally:
                for c in group.ctas:
                    stats.warps += len(c.warps)
                    for step, n in zip(program.steps, c.counts, strict=True):
                        if n:
                            stats.instructions[step.kind] += int(n)
    return arguments.arrays, stats


def _three(x: int | tuple[int, ...]) -> tuple[int, int, int]:
    t = (x,) if isinstance(x, int) else tuple(x)
    a, b, c = (*t, 1, 1, 1)[:3]
    return a, b, c


__all__ = ["LANES", "Fault", "Out", "Program", "Struct", "emulate"]
