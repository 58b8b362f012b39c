"""PTX text to typed instructions (PTX ISA 4 "Syntax", 5 "State Spaces, Types, and Variables", 11 "Directives").

Scopes ``{ ... }`` inside a function have registers and labels of their own; both get the scope's number, so that the
labels of two copies of one inline-assembly block differ.
"""
from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

from .errors import Fault

WIDTHS = {"pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32,
          "u32": 32, "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64}


@dataclass(frozen=True, slots=True)
class Reg:
    """A register: its number in the function's register file and its width in bits (1 for a predicate)."""

    id: int
    width: int
    name: str
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Imm:
    """A constant; `bits` of a float literal, else the integer."""

    value: int
    is_float: int = 0
    """32 or 64 for ``0f...`` and ``0d...``."""


@dataclass(frozen=True, slots=True)
class Special:
    """``%tid.x`` and the like."""

    name: str


@dataclass(frozen=True, slots=True)
class Name:
    """A variable, a parameter or a label."""

    name: str


@dataclass(frozen=True, slots=True)
class Address:
    """``[base + offset]``, or ``[base, {coordinates}]`` of a tensor."""

    base: Reg | Imm | Name
    offset: int = 0
    coordinates: tuple[Operand, ...] | None = None


@dataclass(frozen=True, slots=True)
class Vector:
    """``{a, b, ...}``."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """``a|b``: two results of one instruction."""

    first: Operand
    second: Operand


Operand = Reg | Imm | Special | Name | Address | Vector | Pair | None
"""None is the sink ``_``."""


@dataclass(slots=True)
class Instruction:
    """One instruction as written."""

    op: str
    mods: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Reg | None
    line: int
    source: tuple[str, int] | None
    text: str


@dataclass(slots=True)
class Variable:
    """A declared piece of memory."""

    name: str
    align: int
    size: int
    offset: int = 0


@dataclass(slots=True)
class Kernel:
    """One entry function."""

    name: str
    params: list[Variable] = field(default_factory=list)
    shared: list[Variable] = field(default_factory=list)
    dynamic: str | None = None
    """Name of the ``.extern .shared`` array."""
    constants: dict[str, bytes] = field(default_factory=dict)
    registers: list[Reg] = field(default_factory=list)
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    threads: tuple[int, int, int] | None = None
    """``.reqntid``."""
    registers_limit: int | None = None
    """``.maxnreg``: registers of a thread at entry."""


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_ASSEMBLY = re.compile(r"// begin inline asm.*?// end inline asm", re.S)
_ENTRY = re.compile(r"(?:\.visible\s+|\.weak\s+)*\.entry\s+([\w$]+)\s*(\(([^)]*)\))?([^{]*)\{", re.S)
_PARAM = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?)?([\w$]+)(?:\[(\d+)\])?")
_MEMORY = re.compile(r"(?:\.visible\s+|\.extern\s+)*\.(shared|const|global)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)"
                     r"(?:\[(\d*)\])?\s*(?:=\s*\{([^}]*)\})?")
_LABEL = re.compile(r"([\w$]+):(?!:)")
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)[^\n]*")
_INTEGER = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")


def _align_up(x: int, to: int) -> int:
    return -(-x // to) * to


def parse(text: str) -> dict[str, Kernel]:
    """All entry functions of a PTX module."""
    inside = [(m.start(), m.end()) for m in _ASSEMBLY.finditer(text)]
    files = {int(n): path for n, path in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text)}
    # Comments keep their length, so that positions stay.
    text = _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)
    starts = [0]
    for m in re.finditer("\n", text):
        starts.append(m.end())
    kernels: dict[str, Kernel] = {}
    outside: list[str] = []
    at = 0
    for m in _ENTRY.finditer(text):
        if m.start() < at:
            continue
        outside.append(text[at:m.start()])
        kernel = Kernel(m.group(1))
        offset = 0
        for align, kind, name, count in _PARAM.findall(m.group(3) or ""):
            size = WIDTHS[kind] // 8 * int(count or 1)
            offset = _align_up(offset, int(align or WIDTHS[kind] // 8))
            kernel.params.append(Variable(name, int(align or size), size, offset))
            offset += size
        threads = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", m.group(4))
        if threads:
            kernel.threads = (int(threads[1]), int(threads[2] or 1), int(threads[3] or 1))
        limit = re.search(r"\.maxnreg\s+(\d+)", m.group(4))
        if limit:
            kernel.registers_limit = int(limit[1])
        at = _Body(kernel, text, m.end(), starts, files, inside).end
        kernels[kernel.name] = kernel
    outside.append(text[at:])
    for found in _MEMORY.finditer("\n".join(outside)):
        for kernel in kernels.values():
            _declare(kernel, found)
    for kernel in kernels.values():
        offset = 0
        for v in kernel.shared:
            offset = v.offset = _align_up(offset, v.align)
            offset += v.size
    return kernels


def _declare(kernel: Kernel, found: re.Match[str]) -> None:
    space, align, kind, name, count, values = found.groups()
    size = WIDTHS[kind] // 8
    if space == "shared" and count == "":
        kernel.dynamic = name
    elif space == "shared":
        kernel.shared.append(Variable(name, int(align or size), size * int(count or 1)))
    else:
        numbers = [int(v, 0) for v in (values or "").replace("\n", " ").split(",") if v.strip()]
        numbers += [0] * (int(count or 1) - len(numbers))
        kernel.constants[name] = b"".join(n.to_bytes(size, "little", signed=n < 0) for n in numbers)


class _Body:
    """Reads one function body."""

    def __init__(self, kernel: Kernel, text: str, at: int, starts: list[int], files: dict[int, str],
                 inside: list[tuple[int, int]]):
        self.kernel, self.text, self.files = kernel, text, files
        self.starts, self.inside = starts, inside
        self.line_index = 0
        self.source: tuple[str, int] | None = None
        self.scopes: list[tuple[int, dict[str, Reg]]] = [(0, {})]
        self.ranges: list[list[tuple[str, int, int, int]]] = [[]]
        self.count = 0
        self.pending: list[tuple[Instruction, list[int]]] = []
        self.end = self.run(at)

    def line(self, at: int) -> int:
        while self.line_index + 1 < len(self.starts) and self.starts[self.line_index + 1] <= at:
            self.line_index += 1
        return self.line_index + 1

    def run(self, at: int) -> int:
        text = self.text
        while True:
            while text[at].isspace():
                at += 1
            line = self.line(at)
            if text[at] == "{":
                self.count += 1
                self.scopes.append((self.count, {}))
                at += 1
            elif text[at] == "}":
                self.scopes.pop()
                at += 1
                if not self.scopes:
                    self.resolve()
                    return at
            elif text[at] == ";":
                at += 1
            elif m := _LOC.match(text, at):
                # In inline assembly, line info counts on from the call, line by line: the call's own line is the useful one.
                # Column 0 is the scope that the compiler put an instruction into, not a place.
                file, number = int(m[1]), int(m[2])
                if number and (int(m[3]) or self.source is None) and not any(lo < at < hi for lo, hi in self.inside):
                    self.source = (self.files.get(file, "?"), number)
                at = m.end()
            elif m := _LABEL.match(text, at):
                self.kernel.labels[f"{m[1]}@{self.scopes[-1][0]}"] = len(self.kernel.code)
                at = m.end()
            else:
                stop = text.index(";", at)
                self.statement(" ".join(text[at:stop].split()), line)
                at = stop + 1

    def statement(self, s: str, line: int) -> None:
        if s.startswith(".reg"):
            _, kind, names = s.split(None, 2)
            for name in names.split(","):
                self.declare(kind.lstrip("."), name.strip())
        elif s.startswith((".pragma", ".branchtargets")):
            pass
        elif s.startswith((".shared", ".local", ".const", ".global")):
            found = _MEMORY.match(s)
            if found is None:
                raise Fault("syntax", f"declaration {s!r}").locate("the parser", line, s, self.source)
            _declare(self.kernel, found)
        elif s.startswith("."):
            raise Fault("syntax", f"directive {s.split()[0]}").locate("the parser", line, s, self.source)
        else:
            self.instruction(s, line)

    def declare(self, kind: str, name: str) -> None:
        width = WIDTHS[kind]
        m = re.fullmatch(r"(%?[\w$]+)<(\d+)>", name)
        for n in [f"{m[1]}{i}" for i in range(int(m[2]))] if m else [name]:
            reg = Reg(len(self.kernel.registers), width, n)
            self.kernel.registers.append(reg)
            self.scopes[-1][1][n] = reg

    def instruction(self, s: str, line: int) -> None:
        guard, rest = None, s
        if s.startswith("@"):
            word, rest = s[1:].split(None, 1)
            reg = self.register(word.lstrip("!"))
            if reg is None:
                raise Fault("syntax", f"guard {word}").locate("the parser", line, s, self.source)
            guard = Reg(reg.id, reg.width, reg.name, word.startswith("!"))
        parts = rest.split(None, 1)
        op, *mods = parts[0].split(".")
        operands = tuple(self.operand(o, line, s) for o in _split(parts[1])) if len(parts) > 1 else ()
        i = Instruction(op, tuple(mods), operands, guard, line, self.source, s)
        self.kernel.code.append(i)
        if op in ("bra", "call", "brx"):
            self.pending.append((i, [n for n, _ in reversed(self.scopes)]))

    def resolve(self) -> None:
        """Labels are looked up from the innermost scope outwards, once all are known."""
        for i, scopes in self.pending:
            names = [f"{o.name}@{n}" for o in i.operands if isinstance(o, Name) for n in scopes]
            known = [n for n in names if n in self.kernel.labels]
            if not known:
                raise Fault("syntax", "no such label").locate("the parser", i.line, i.text, i.source)
            i.operands = (Name(known[0]),)

    def register(self, name: str) -> Reg | None:
        for _, regs in reversed(self.scopes):
            if name in regs:
                return regs[name]
        return None

    def operand(self, s: str, line: int, text: str) -> Operand:
        if s == "_":
            return None
        if s[0] == "{":
            return Vector(tuple(self.operand(o, line, text) for o in _split(s[1:-1])))
        if s[0] == "[":
            return self.address(s[1:-1], line, text)
        if "|" in s:
            a, b = s.split("|")
            return Pair(self.operand(a.strip(), line, text), self.operand(b.strip(), line, text))
        if s[0] == "!":
            reg = self.register(s[1:].strip())
            if reg is not None:
                return Reg(reg.id, reg.width, reg.name, True)
        reg = self.register(s)
        if reg is not None:
            return reg
        if s[:2] in ("0f", "0F"):
            return Imm(int(s[2:], 16), 32)
        if s[:2] in ("0d", "0D"):
            return Imm(int(s[2:], 16), 64)
        if _INTEGER.match(s):
            return Imm(_integer(s))
        if re.fullmatch(r"[+-]?\d+\.\d*(e[+-]?\d+)?", s):
            return Imm(int.from_bytes(struct.pack("<d", float(s)), "little"), 64)
        if s[0] == "%":
            return Special(s[1:])
        if re.fullmatch(r"[\w$]+", s):
            return Name(s)
        raise Fault("syntax", f"operand {s!r}").locate("the parser", line, text, self.source)

    def address(self, s: str, line: int, text: str) -> Address:
        first, *rest = _split(s)
        coordinates = None
        if rest:
            vector = self.operand(rest[0], line, text)
            coordinates = vector.items if isinstance(vector, Vector) else (vector,)
        m = re.fullmatch(r"([^+\s-]+)\s*(?:([+-])\s*(.+))?", first)
        base = self.operand(m[1] if m else first, line, text)
        offset = 0
        if m and m[3]:
            offset = _integer(m[3].strip()) * (-1 if m[2] == "-" else 1)
        if not isinstance(base, Reg | Imm | Name):
            raise Fault("syntax", f"address [{s}]").locate("the parser", line, text, self.source)
        return Address(base, offset, coordinates)


def _integer(s: str) -> int:
    s = s.rstrip("U")
    body = s.lstrip("+-")
    value = int(body, 8) if len(body) > 1 and body[0] == "0" and body.isdigit() else int(body, 0)
    return -value if s.startswith("-") else value


def _split(s: str) -> list[str]:
    """At commas outside brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(s):
        if c in "[{(":
            depth += 1
        elif c in ")}]":
            depth -= 1
        elif c == "," and not depth:
            parts.append(s[start:i].strip())
            start = i + 1
    last = s[start:].strip()
    return [*parts, last] if last else parts
