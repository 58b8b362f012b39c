"""Editing PTX to make mutants: lines are found by pattern, by the kernel's source line that they come from, and by the
barrier that they work on.

An edit that picks one of several lines says how many there are, so that a kernel with another structure makes it `Stale`
instead of another fault than meant.
"""
from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

from .cases import Case


class Stale(Exception):
    """An edit no longer finds what it is about."""


class Text:
    """PTX of a variant; edits keep line numbers."""

    def __init__(self, ptx: str):
        from fa_inductor.kernels.sm90 import forward, prepare, program

        self.lines = ptx.split("\n")
        texts = {m.__name__.rsplit(".", 1)[1] + ".py": inspect.getsource(m).split("\n") for m in (forward, prepare, program)}
        files = {n: texts.get(path.rsplit("/", 1)[-1], []) for n, path in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', ptx)}
        inside, main, assembly, here = False, False, False, ""
        self.from_line: list[str] = []
        """Source line of each line, empty outside the main kernel."""
        self.before: list[int] = []
        """Lines of the kernel that runs before the main one."""
        self.defined: dict[str, list[str]] = {}
        """Definitions of each register of the main kernel by mov and add."""
        self.names: dict[int, str] = {}
        """Field of the shared memory's struct that the mbarrier at an offset belongs to."""
        self.base = ""
        """Register with the address of that struct."""
        for i, line in enumerate(self.lines):
            if ".entry" in line:
                inside, main = True, not any(name in line for name in ("seen_keys", "list_tiles", "mean_values", "_clear_"))
            assembly = assembly and "end inline asm" not in line or "begin inline asm" in line
            m = re.match(r"\s*\.loc\s+(\d+)\s+(\d+)\s+[1-9]", line)
            if m and not assembly:
                source = files.get(m[1], [])
                here = source[int(m[2]) - 1].strip() if 0 < int(m[2]) <= len(source) else ""
            self.from_line.append(here if inside and main else "")
            if inside and not main:
                self.before.append(i)
            if inside and main and (m := re.match(r"\s*(?:mov\.b32|add\.s32)\s+(%r\d+), (.*);", line)):
                self.defined.setdefault(m[1], []).append(m[2])
            if inside and main and (m := re.match(r"\s*mbarrier\.init\S*\s+\[(%r\d+)(?:\+(\d+))?\]", line)):
                field = re.search(r"shared\.(\w+)\.", here)
                if not field or self.base not in ("", m[1]):
                    raise Stale(f"cannot tell which mbarrier this is: {line.strip()}")
                self.base = m[1]
                self.names[int(m[2] or 0)] = field[1]

    # ------------------------------------------------------------------ finding lines

    def find(self, pattern: str, at: str = "") -> list[int]:
        """Lines of the main kernel that match, from a source line that contains `at`."""
        return [i for i, line in enumerate(self.lines) if self.from_line[i] and at in self.from_line[i]
                and re.search(pattern, line) and not line.lstrip().startswith((".loc", "//", ".param"))]

    def each(self, pattern: str, of: int, at: str = "") -> list[int]:
        """All lines that match: `of` of them (0: any number)."""
        return _counted(self.find(pattern, at), of, f"{pattern!r} at {at!r}")

    def one(self, pattern: str, nth: int = 0, of: int = 1, at: str = "") -> int:
        return self.each(pattern, of, at)[nth]

    def _offset(self, register: str, depth: int = 8) -> int | None:
        """Constant part of an address in the shared memory's struct."""
        if register == self.base:
            return 0
        for text in self.defined.get(register, ()) if depth else ():
            parts = text.split(", ")
            for part in parts:
                found = self._offset(part, depth - 1) if part.startswith("%r") else None
                if found is not None:
                    return found + sum(int(p) for p in parts if re.fullmatch(r"-?\d+", p))
        return None

    def field(self, address: str) -> str:
        """Which mbarrier an address `[...]` is that of; "" if of none."""
        m = re.fullmatch(r"\[(%r\d+)(?:\+(\d+))?\]", address)
        start = self._offset(m[1]) if m else None
        return "" if start is None else self.names.get(start + int(m[2] or 0), "")  # type: ignore[index]

    def _on(self, pattern: str, field: str) -> list[int]:
        if field not in self.names.values():
            raise Stale(f"there is no mbarrier {field!r}")
        return [i for i in self.find(pattern) if self.field(re.findall(r"\[[^]]*\]", self.lines[i])[-1]) == field]

    def arrive(self, field: str, nth: int = 0, of: int = 1) -> int:
        """The nth arrival on an mbarrier."""
        return _counted(self._on(r"mbarrier\.arrive\.shared", field), of, f"an arrival on {field}")[nth]

    def expect(self, field: str, nth: int = 0, of: int = 1) -> int:
        """The nth announcement of bytes to an mbarrier."""
        return _counted(self._on(r"mbarrier\.arrive\.expect_tx", field), of, f"an expect_tx on {field}")[nth]

    def wait(self, field: str, nth: int = 0, of: int = 1) -> int:
        """The nth wait for an mbarrier."""
        return _counted(self._on(r"mbarrier\.try_wait", field), of, f"a wait for {field}")[nth]

    def copy(self, field: str, nth: int = 0, of: int = 1) -> int:
        """The nth tensor copy that completes on an mbarrier."""
        found = [i for i in self.find(r"cp\.async\.bulk\.tensor.*mbarrier::")
                 if self.field(self.lines[i].rsplit("], ", 1)[0].rsplit(", ", 1)[1] + "]") == field]
        return _counted(found, of, f"a copy that completes on {field}")[nth]

    def phase(self, wait: int) -> str:
        """Register or number of the parity that a wait is for."""
        return self.lines[wait].split("], ")[1].split(",")[0].strip()

    def label(self, i: int) -> int:
        """The next label after a line."""
        return next(k for k in range(i, len(self.lines)) if self.lines[k].startswith("$L_"))

    def back(self, i: int, pattern: str) -> int:
        """The last line before line i that matches."""
        return max(k for k in self.find(pattern) if k < i)

    def origin(self, i: int, after: int) -> list[int]:
        """Lines between `after` and line i that compute what line i reads, if nothing branches around one of them."""
        needed, found = set(re.findall(r"%[a-z]+\d+", self.lines[i])), []
        for k in range(i - 1, after, -1):
            m = re.match(r"\s*\w[\w.:]*\s+(%[a-z]+\d+), (.*);$", self.lines[k])
            if m and m[1] in needed:
                found.append(k)
                needed = needed - {m[1]} | set(re.findall(r"%[a-z]+\d+", m[2]))
        return found[::-1]

    def release(self, field: str, nth: int, of: int) -> int:
        """The nth arrival on an mbarrier, which is one of a predicate's threads after some value is there."""
        i = self.arrive(field, nth, of)
        if not re.search(r"mov\.b32 bits, %r\d+; setp\.gt\.s32 p, bits, %r\d+; @p mbarrier", self.lines[i]):
            raise Stale(f"the arrival on {field} does not wait for a value: {self.lines[i].strip()}")
        return i

    # ------------------------------------------------------------------ changing them

    def cut(self, *places: int) -> None:
        for i in places:
            self.lines[i] = ""

    def put(self, i: int, pattern: str, to: str) -> None:
        """Replace in one line."""
        new = re.sub(pattern, to, self.lines[i], count=1)
        if new == self.lines[i]:
            raise Stale(f"{pattern!r} -> {to!r} changes nothing in {self.lines[i].strip()!r}")
        self.lines[i] = new

    def sub(self, pattern: str, to: str, nth: int = 0, at: str = "", of: int = 1) -> None:
        self.put(self.one(pattern, nth, of, at), pattern, to)

    def sub_all(self, pattern: str, to: str, at: str = "", of: int = 0) -> None:
        for i in self.each(pattern, of, at):
            self.put(i, pattern, to)

    def drop(self, pattern: str, nth: int = 0, at: str = "", of: int = 1) -> None:
        self.cut(self.one(pattern, nth, of, at))

    def drop_all(self, pattern: str, at: str = "", of: int = 0) -> None:
        self.cut(*self.each(pattern, of, at))

    def twice(self, i: int) -> None:
        self.lines[i] += " " + self.lines[i].strip()

    def prefix(self, i: int, text: str) -> None:
        self.lines[i] = f"{text} {self.lines[i].strip()}"

    def suffix(self, i: int, text: str) -> None:
        self.lines[i] += " " + text

    def no_wait(self, i: int) -> None:
        """An mbarrier wait that does not wait."""
        self.put(i, r"mbarrier\.try_wait.*", "setp.eq.u32 P1, 0, 0;")

    def other_phase(self, i: int) -> None:
        """An mbarrier wait for the other parity."""
        p = self.phase(i)
        self.lines[i] = f".reg .b32 other; xor.b32 other, {p}, 1; " + self.lines[i].replace(f"], {p},", "], other,")

    def early(self, release: int, before: int) -> None:
        """An arrival waits for no value, and moves up before another line."""
        if not before < release:
            raise Stale(f"line {release} is not behind line {before}")
        self.put(release, r"mov\.b32 bits, %r\d+;", "mov.b32 bits, 0;")
        self.prefix(before, " ".join(self.lines[k].strip() for k in (*self.origin(release, before), release)))
        self.cut(release)

    def later(self, i: int, after: int) -> None:
        """Line i moves behind a line further down."""
        if not i < after:
            raise Stale(f"line {i} is not before line {after}")
        self.suffix(after, self.lines[i].strip())
        self.cut(i)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def _counted(found: list[int], of: int, what: str) -> list[int]:
    if not found or of and len(found) != of:
        raise Stale(f"{len(found)} lines are {what}; there were {of or 'some'} when the edit was written")
    return found


Edit = Callable[[Text], None]


@dataclass(frozen=True)
class Mutant:
    """A wrong kernel and the case that must show it."""

    name: str
    case: Case
    shows: str
    """Pattern of what catches it: the kind of fault, a colon and what its message says.  Other faults do not count: they are
    not what the name says."""
    edit: Edit
    fast: bool = False
    """Run in CI; the rest by the command that writes the committed result."""
    limit: int = 2_000_000
    """Instructions of one block after which it counts as endless."""
