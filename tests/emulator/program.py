"""Small PTX programs with known results, as data: run under the emulator, and as they are on a GPU.

A program is a body between loads of its inputs into registers a, b, c ... and stores of its results d, e ...: one value
a thread each.  Programs with shared memory or tensor maps say so.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .launch import Out, emulate
from .tensormap import ELEMENTS, TensorMap

VERSION = "8.6"
HEADER = f".version {VERSION}\n.target sm_90a\n.address_size 64\n"
_WIDTH = {"b8": 1, "b16": 2, "b32": 4, "b64": 8, "f32": 4, "f64": 8}
INPUTS, OUTPUTS = "abcfgh", "deijklnopqruvwxy"


@dataclass(frozen=True)
class Program:
    """One program.

    ins: (type, values of all threads as bits); outs: types; want: bits for each result and thread.  form: the
    instruction that it is about.  close: for approximations, the kind of error and the ISA's bound.
    """

    name: str
    form: str
    body: str
    ins: tuple[tuple[str, tuple[int, ...]], ...]
    outs: tuple[str, ...]
    want: tuple[tuple[int, ...], ...]
    threads: int = 32
    shared: int = 0
    close: tuple[str, float] | None = None
    maps: tuple[dict[str, Any], ...] = ()
    """Tensor maps as parameters ``map0`` ...: shape, strides, box, swizzle, data (uint16 values; none: over the buffer),
    skip (values in front of the tensor), element (type, where it is not u16)."""
    buffer: tuple[int, ...] = ()
    """Bytes of one more global buffer, at the address %buf; it is compared with want_buffer."""
    want_buffer: tuple[int, ...] = ()
    directives: str = ""

    @property
    def entry(self) -> str:
        return "program_" + "".join(c if c.isalnum() else "_" for c in self.name)

    def text(self, header: bool = True) -> str:
        """The PTX of this program."""
        params = [".param .u64 pin", ".param .u64 pout", ".param .u64 pbuf"]
        params += [f".param .align 64 .b8 map{i}[128]" for i in range(len(self.maps))]
        lines = [f".visible .entry {self.entry}({', '.join(params)})", f".reqntid {self.threads}, 1, 1 {self.directives}", "{",
                 ".reg .b64 %in, %out, %buf, %at;", ".reg .b32 %thread, %warp, %lane;", "ld.param.u64 %in, [pin];",
                 "ld.param.u64 %out, [pout];", "ld.param.u64 %buf, [pbuf];", "mov.u32 %thread, %tid.x;",
                 "shr.u32 %warp, %thread, 5;", "and.b32 %lane, %thread, 31;"]
        if self.shared:
            lines.append(f".shared .align 1024 .b8 smem[{self.shared}];")
        offset = 0
        for name, (kind, _) in zip(INPUTS, self.ins, strict=False):
            register = "b16" if kind == "b8" else kind
            lines += [f".reg .{register} {name};", f"mad.wide.u32 %at, %thread, {_WIDTH[kind]}, %in;",
                      f"ld.global.{'u8' if kind == 'b8' else kind} {name}, [%at+{offset}];"]
            offset += _WIDTH[kind] * self.threads
        lines += [f".reg .{kind} {name};" for name, kind in zip(OUTPUTS, self.outs, strict=False)]
        lines += ["{", self.body.strip(), "}"]
        offset = 0
        for name, kind in zip(OUTPUTS, self.outs, strict=False):
            lines += [f"mad.wide.u32 %at, %thread, {_WIDTH[kind]}, %out;", f"st.global.{kind} [%at+{offset}], {name};"]
            offset += _WIDTH[kind] * self.threads
        lines += ["ret;", "}", ""]
        return (HEADER if header else "") + "\n".join(lines)

    def input_bytes(self) -> bytes:
        return b"".join(np.array(v, f"u{_WIDTH[k]}").tobytes() for k, v in self.ins)

    @property
    def output_size(self) -> int:
        return sum(_WIDTH[k] * self.threads for k in self.outs)

    def split(self, raw: bytes) -> list[tuple[int, ...]]:
        """The output buffer as bits for each result."""
        found, at = [], 0
        for k in self.outs:
            n = _WIDTH[k] * self.threads
            found.append(tuple(int(x) for x in np.frombuffer(raw[at:at + n], f"u{_WIDTH[k]}")))
            at += n
        return found

    def emulated(self, seed: int = 0) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
        """Results of the emulator, and the bytes of the buffer."""
        source = np.frombuffer(self.input_bytes() or bytes(16), np.uint8).copy()
        out, buffer = np.zeros(max(16, self.output_size), np.uint8), aligned(np.array(self.buffer or (0,) * 16, np.uint8))
        maps = []
        for m in self.maps:
            data = buffer if m.get("data") is None else aligned(np.array(m["data"], np.uint16)).view(np.uint8)
            element = m.get("element", "")
            maps.append(TensorMap(data[2 * m.get("skip", 0):], m["shape"], m["strides"], m["box"], m["swizzle"],
                                  ELEMENTS.get(element, 2), element))
        emulate(self.text(), 1, [source, Out(out), buffer, *maps], seed=seed)
        return self.split(out.tobytes()), tuple(buffer.tolist())

    def differences(self, got: Sequence[Sequence[int]], buffer: Sequence[int] = ()) -> list[str]:
        """What is not as wanted, in words; empty when all is."""
        found = []
        for n, (kind, g, w) in enumerate(zip(self.outs, got, self.want, strict=True)):
            for t, (x, y) in enumerate(zip(g, w, strict=True)):
                if not self._same(kind, x, y):
                    given = ", ".join(hex(v[t]) for _, v in self.ins)
                    found.append(f"{self.name}: result {n} of thread {t} is {x:#x}, not {y:#x} (inputs {given})")
        if self.want_buffer and tuple(buffer) != self.want_buffer:
            bad = [i for i, (x, y) in enumerate(zip(buffer, self.want_buffer, strict=True)) if x != y]
            found.append(f"{self.name}: buffer differs at bytes {bad[:8]}")
        return found

    def _same(self, kind: str, x: int, y: int) -> bool:
        if x == y:
            return True
        if kind not in ("f32", "f64"):
            return False
        a, b = (float(np.array(v, f"u{_WIDTH[kind]}").view(f"f{_WIDTH[kind]}")) for v in (x, y))
        if a != a or b != b:
            return a != a and b != b
        if self.close is None or abs(a) == float("inf") or abs(b) == float("inf"):
            return False
        how, bound = self.close
        return abs(a - b) <= bound * (abs(b) if how == "relative" else 1.0) + 2.0**-149


def aligned(x: np.ndarray, to: int = 256) -> np.ndarray:
    """A copy that begins at a multiple of `to` bytes, as memory of a GPU does."""
    raw = np.zeros(x.nbytes + to, np.uint8)
    start = -raw.__array_interface__["data"][0] % to
    # Through a memoryview the copy is an array of its own, not a view: bounds are checked against it alone.
    out = np.frombuffer(memoryview(raw)[start:start + x.nbytes], x.dtype).reshape(x.shape)
    out[...] = x
    return out


def threads_of(*columns: Sequence[int]) -> int:
    """Number of threads for these values: whole warps."""
    return -(-max(len(c) for c in columns) // 32) * 32


def simple(name: str, form: str, body: str, ins: Sequence[tuple[str, Sequence[int]]], outs: Sequence[str],
           f: Callable[..., Any], close: tuple[str, float] | None = None) -> Program:
    """A program whose every thread is independent: `f` of its inputs gives its result, or a tuple of them."""
    n = threads_of(*(v for _, v in ins))
    columns = [(k, tuple(v[i % len(v)] for i in range(n))) for k, v in ins]
    rows = []
    for i in range(n):
        r = f(*(v[i] for _, v in columns))
        rows.append(r if isinstance(r, tuple) else (r,))
    sizes = [8 * _WIDTH[k] for k in outs]
    want = tuple(tuple(row[j] & ((1 << sizes[j]) - 1) for row in rows) for j in range(len(outs)))
    return Program(name, form, body, tuple(columns), tuple(outs), want, n, close=close)
