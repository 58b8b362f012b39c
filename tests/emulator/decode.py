"""From an instruction as written to a closure that runs it on one warp.

A decoder takes every modifier it knows from a `Form`; one that is left over makes the instruction unknown.  Decoding
happens once, before the launch.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import Fault
from .lanes import INDEX, LANES
from .parser import WIDTHS, Address, Imm, Instruction, Kernel, Name, Operand, Pair, Reg, Special, Vector

if TYPE_CHECKING:
    from .warp import Warp

Get = Callable[["Warp"], np.ndarray]
Run = Callable[["Warp", int], Any]
"""Runs on the lanes of a mask; returns BLOCK where the warp has to wait and come back."""


class _Block:
    """The type of BLOCK."""


BLOCK = _Block()

DTYPES: dict[str, Any] = {
    "u8": np.uint8, "s8": np.int8, "b8": np.uint8, "u16": np.uint16, "s16": np.int16, "b16": np.uint16, "f16": np.float16,
    "bf16": np.uint16, "u32": np.uint32, "s32": np.int32, "b32": np.uint32, "f32": np.float32, "f16x2": np.uint32,
    "bf16x2": np.uint32, "u64": np.uint64, "s64": np.int64, "b64": np.uint64, "f64": np.float64, "pred": np.bool_,
}
INTS = ("u16", "s16", "u32", "s32", "u64", "s64")
BITS = ("b16", "b32", "b64")
PURE = frozenset((
    "add", "sub", "mul", "mad", "fma", "div", "rem", "abs", "neg", "min", "max", "and", "or", "xor", "not", "cnot", "shl",
    "shr", "shf", "popc", "clz", "brev", "bfind", "bfe", "bfi", "lop3", "prmt", "sad", "setp", "set", "selp", "slct", "mov",
    "cvt", "ex2", "lg2", "rcp", "sqrt", "rsqrt", "tanh", "sin", "cos", "copysign", "testp"))


@dataclass(slots=True)
class Step:
    """A decoded instruction."""

    run: Run
    reads: tuple[int, ...]
    kind: str
    guard: Reg | None
    line: int
    source: tuple[str, int] | None
    text: str
    target: int = -1
    """Instruction number that a branch goes to."""
    stops: bool = False
    """ret or exit."""
    converged: bool = False
    """All live lanes of the warp must execute it together (``.aligned``)."""
    writes: tuple[int, ...] = ()
    pure: bool = False
    """Arithmetic on registers only: an undefined operand makes the result undefined, and nothing else."""
    select: tuple[int | None, int | None, int, bool] | None = None
    """Of selp: registers of both values, register of the predicate, whether it is negated."""


_DECODERS: dict[str, Callable[[Form], Run]] = {}


def operation(*names: str) -> Callable[[Callable[[Form], Run]], Callable[[Form], Run]]:
    """Register the decoder of opcodes."""

    def add(f: Callable[[Form], Run]) -> Callable[[Form], Run]:
        for n in names:
            if n in _DECODERS:
                raise ValueError(f"two decoders of {n}")
            _DECODERS[n] = f
        return f

    return add


def opcodes() -> list[str]:
    """All opcodes that have a decoder."""
    return sorted(_DECODERS)


class Form:
    """One instruction while it is decoded."""

    def __init__(self, i: Instruction, kernel: Kernel):
        self.i, self.kernel, self.op = i, kernel, i.op
        self.mods = list(i.mods)
        self.reads: list[int] = []
        self.writes: list[int] = []
        self.converged = False
        self.operands = i.operands

    def fail(self, why: str) -> Fault:
        return Fault("unknown", f"instruction {'.'.join((self.i.op, *self.i.mods))}: {why}").locate(
            "the decoder", self.i.line, self.i.text, self.i.source)

    def opt(self, *names: str) -> str | None:
        """Take one of these modifiers if it is the next or a later one."""
        for n in names:
            if n in self.mods:
                self.mods.remove(n)
                return n
        return None

    def has(self, name: str) -> bool:
        return self.opt(name) is not None

    def one(self, *names: str) -> str:
        found = self.opt(*names)
        if found is None:
            raise self.fail(f"needs one of {', '.join('.' + n for n in names)}")
        return found

    def type(self, *allowed: str) -> str:
        """The instruction type, which is the last modifier."""
        if not self.mods or self.mods[-1] not in allowed:
            raise self.fail(f"type must be one of {', '.join('.' + n for n in allowed)}")
        return self.mods.pop()

    def done(self, *counts: int) -> None:
        """All modifiers are taken and the number of operands is one of these."""
        if self.mods:
            raise self.fail(f"modifier .{self.mods[0]} is not known here")
        if counts and len(self.operands) not in counts:
            raise self.fail(f"{len(self.operands)} operands")

    # ------------------------------------------------------------------ operands

    def get(self, n: int, type: str, loose: bool = False) -> Get:
        return self.value(self.operands[n], type, loose)

    def value(self, o: Operand, type: str, loose: bool = False) -> Get:
        """How to read a source operand; `loose`: the register may be wider than the type (PTX ISA 9.4.1)."""
        dtype, width = DTYPES[type], WIDTHS[type]
        if isinstance(o, Reg):
            i = o.id
            self.reads.append(i)
            if type == "pred":
                if o.width != 1:
                    raise self.fail(f"{o.name} is not a predicate")
                return (lambda w: ~w.r.u[i]) if o.negated else (lambda w: w.r.u[i])
            if o.width != width:
                if not loose or o.width < width:
                    raise self.fail(f"{o.name} has {o.width} bits, .{type} has {width}")
                return lambda w: w.r.u[i].astype(f"u{width // 8}").view(dtype)
            if type in ("f16", "f32", "f64"):
                return lambda w: w.r.f[i]
            return (lambda w: w.r.s[i]) if type[0] == "s" else (lambda w: w.r.u[i])
        if isinstance(o, Imm):
            return constant(_immediate(self, o, type))
        if isinstance(o, Special):
            return _special(self, o.name, type)
        if isinstance(o, Name):
            return self.symbol(o.name, dtype)
        raise self.fail("operand of a kind that is not known here")

    def symbol(self, name: str, dtype: Any) -> Get:
        """The address of a variable."""
        k = self.kernel
        if name == k.dynamic or any(v.name == name for v in k.shared) or name in k.constants \
                or any(v.name == name for v in k.params):
            return lambda w: np.full(LANES, w.cta.address(name)).astype(dtype)
        raise self.fail(f"no variable {name}")

    def put(self, n: int, type: str) -> Callable[[Warp, np.ndarray, int], None]:
        return self.target(self.operands[n], type)

    def target(self, o: Operand, type: str, loose: bool = False) -> Callable[[Warp, np.ndarray, int], None]:
        """How to write a destination: the value must have the type's dtype."""
        if o is None:
            return lambda w, value, mask: None
        if not isinstance(o, Reg):
            raise self.fail("a destination must be a register")
        i, width = o.id, WIDTHS[type]
        self.writes.append(i)
        if o.width != width:
            if not loose or o.width < width or o.width == 1:
                raise self.fail(f"{o.name} has {o.width} bits, .{type} has {width}")
            if type[0] == "s":
                return lambda w, value, mask: w.r.put(w.r.s[i], i, value, mask)
            return lambda w, value, mask: w.r.put(w.r.u[i], i, value, mask)
        if type in ("f16", "f32", "f64"):
            return lambda w, value, mask: w.r.put(w.r.f[i], i, value, mask)
        if type[0] == "s":
            return lambda w, value, mask: w.r.put(w.r.s[i], i, value, mask)
        return lambda w, value, mask: w.r.put(w.r.u[i], i, value, mask)

    def alu(self, types: tuple[str, ...], f: Callable[..., np.ndarray]) -> Run:
        """Destination and sources of these types; `f` of the sources."""
        put = self.put(0, types[0])
        gets = [self.get(n + 1, t) for n, t in enumerate(types[1:])]
        if len(gets) == 1:
            a, = gets
            return lambda w, mask: put(w, f(a(w)), mask)
        if len(gets) == 2:
            a, b = gets
            return lambda w, mask: put(w, f(a(w), b(w)), mask)
        if len(gets) == 3:
            a, b, c = gets
            return lambda w, mask: put(w, f(a(w), b(w), c(w)), mask)
        return lambda w, mask: put(w, f(*(g(w) for g in gets)), mask)

    def integer(self, n: int) -> int:
        """An operand that must be a constant."""
        o = self.operands[n]
        if not isinstance(o, Imm) or o.is_float:
            raise self.fail(f"operand {n} must be an integer constant")
        return o.value

    def address(self, n: int) -> tuple[Get, Address]:
        """Addresses of a memory operand as int64, and the operand."""
        o = self.operands[n]
        if not isinstance(o, Address):
            raise self.fail(f"operand {n} must be an address")
        return self.base(o), o

    def base(self, o: Address) -> Get:
        offset = o.offset
        if isinstance(o.base, Reg):
            i, width = o.base.id, o.base.width
            if width not in (32, 64):
                raise self.fail("an address has 32 or 64 bits")
            self.reads.append(i)
            return lambda w: w.r.u[i].astype(np.int64) + offset
        if isinstance(o.base, Imm):
            return constant(np.full(LANES, o.base.value + offset, np.int64))
        get = self.symbol(o.base.name, np.int64)
        return lambda w: get(w) + offset


def constant(value: np.ndarray) -> Get:
    value.setflags(write=False)
    return lambda w: value


def _immediate(form: Form, o: Imm, type: str) -> np.ndarray:
    width, dtype = WIDTHS[type], DTYPES[type]
    if type == "pred":
        return np.full(LANES, bool(o.value))
    if o.is_float:
        if type in ("f32", "b32", "f64", "b64", "u32", "u64") and o.is_float == width:
            return np.full(LANES, o.value, f"u{width // 8}").view(dtype)
        if o.is_float == 64 and type == "f32":
            return np.full(LANES, o.value, np.uint64).view(np.float64).astype(np.float32)
        raise form.fail(f"a float literal of {o.is_float} bits as .{type}")
    if type in ("f16", "f32", "f64"):
        raise form.fail(f"an integer literal as .{type}")
    return np.full(LANES, o.value & ((1 << width) - 1), f"u{width // 8}").view(dtype)


def _special(form: Form, name: str, type: str) -> Get:
    """Special registers (PTX ISA 10)."""
    dtype = DTYPES[type]
    values: dict[str, Callable[[Warp], Any]] = {
        "laneid": lambda w: INDEX, "warpid": lambda w: w.index, "nwarpid": lambda w: len(w.cta.warps),
        "lanemask_eq": lambda w: 1 << INDEX, "lanemask_lt": lambda w: (1 << INDEX) - 1,
        "lanemask_le": lambda w: (2 << INDEX) - 1, "lanemask_gt": lambda w: ~((2 << INDEX) - 1) & 0xFFFFFFFF,
        "lanemask_ge": lambda w: ~((1 << INDEX) - 1) & 0xFFFFFFFF,
        "smid": lambda w: w.cta.serial, "nsmid": lambda w: 132,
        "cluster_ctarank": lambda w: w.cta.rank, "cluster_nctarank": lambda w: len(w.cta.cluster.ctas),
        "is_explicit_cluster": lambda w: len(w.cta.cluster.ctas) > 1,
        "dynamic_smem_size": lambda w: w.cta.dynamic_size,
        "total_smem_size": lambda w: w.cta.shared.size - 1024,
    }
    for n, axis in enumerate("xyz"):
        values |= {
            f"tid.{axis}": lambda w, n=n: w.tid[n], f"ntid.{axis}": lambda w, n=n: w.cta.threads[n],
            f"ctaid.{axis}": lambda w, n=n: w.cta.index[n], f"nctaid.{axis}": lambda w, n=n: w.cta.grid[n],
            f"clusterid.{axis}": lambda w, n=n: w.cta.index[n] // w.cta.cluster.shape[n],
            f"nclusterid.{axis}": lambda w, n=n: w.cta.grid[n] // w.cta.cluster.shape[n],
            f"cluster_ctaid.{axis}": lambda w, n=n: w.cta.index[n] % w.cta.cluster.shape[n],
            f"cluster_nctaid.{axis}": lambda w, n=n: w.cta.cluster.shape[n],
        }
    if name == "clock64" or name == "clock" or name == "globaltimer":
        return lambda w: np.full(LANES, w.cta.cluster.steps).astype(dtype)
    if name not in values:
        raise form.fail(f"special register %{name}")
    f = values[name]
    return lambda w: np.broadcast_to(np.asarray(f(w)), LANES).astype(dtype)


def decode(kernel: Kernel) -> list[Step]:
    """All instructions of a kernel, ready to run."""
    steps = []
    for i in kernel.code:
        form = Form(i, kernel)
        decoder = _DECODERS.get(i.op)
        if decoder is None:
            raise form.fail("no such opcode")
        run = decoder(form)
        reads = tuple(dict.fromkeys(form.reads))
        kind = ".".join((i.op, *i.mods))
        step = Step(run, reads, kind, i.guard, i.line, i.source, i.text, converged=form.converged,
                    writes=tuple(dict.fromkeys(form.writes)), pure=i.op in PURE)
        if i.op == "selp":
            a, b, p = i.operands[1:]
            if isinstance(p, Reg):
                step.select = (a.id if isinstance(a, Reg) else None, b.id if isinstance(b, Reg) else None, p.id, p.negated)
        if i.op == "bra":
            name = i.operands[0]
            step.target = kernel.labels[name.name] if isinstance(name, Name) else -1
        step.stops = i.op in ("ret", "exit")
        steps.append(step)
    return steps


__all__ = ["BITS", "BLOCK", "DTYPES", "INTS", "Address", "Form", "Get", "Imm", "Name", "Operand", "Pair", "Reg", "Run",
           "Special", "Step", "Vector", "constant", "decode", "opcodes", "operation"]
