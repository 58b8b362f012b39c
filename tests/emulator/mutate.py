"""Editing PTX to make mutants: lines are found by pattern, and by the kernel's source line that they come from."""
from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

from .cases import Case


class Stale(Exception):
    """An edit no longer finds what it is about."""


class Text:
    """PTX of a variant; edits touch the main kernel only and keep line numbers."""

    def __init__(self, ptx: str):
        from fa_inductor.kernels.sm90 import forward, program

        self.lines = ptx.split("\n")
        texts = {m.__name__.rsplit(".", 1)[1] + ".py": inspect.getsource(m).split("\n") for m in (forward, program)}
        files = {n: texts.get(path.rsplit("/", 1)[-1], []) for n, path in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', ptx)}
        inside, main, assembly, here = False, False, False, ""
        self.from_line: list[str] = []
        """Source line of each line, empty outside the main kernel."""
        for line in self.lines:
            if ".entry" in line:
                inside, main = True, "seen_keys" not in line
            assembly = assembly and "end inline asm" not in line or "begin inline asm" in line
            m = re.match(r"\s*\.loc\s+(\d+)\s+(\d+)\s+[1-9]", line)
            if m and not assembly:
                source = files.get(m[1], [])
                here = source[int(m[2]) - 1].strip() if 0 < int(m[2]) <= len(source) else ""
            self.from_line.append(here if inside and main else "")

    def find(self, pattern: str, at: str = "") -> list[int]:
        """Lines of the main kernel that match, from a source line that contains `at`."""
        return [i for i, line in enumerate(self.lines) if self.from_line[i] and at in self.from_line[i]
                and re.search(pattern, line) and not line.lstrip().startswith((".loc", "//", ".param"))]

    def _one(self, pattern: str, nth: int, at: str) -> int:
        found = self.find(pattern, at)
        if not -len(found) <= nth < len(found):
            raise Stale(f"{len(found)} lines match {pattern!r} at {at!r}; the {nth}th was asked for")
        return found[nth]

    def drop(self, pattern: str, nth: int = 0, at: str = "") -> None:
        i = self._one(pattern, nth, at)
        self.lines[i] = ""

    def drop_all(self, pattern: str, at: str = "") -> None:
        found = self.find(pattern, at)
        if not found:
            raise Stale(f"nothing matches {pattern!r} at {at!r}")
        for i in found:
            self.lines[i] = ""

    def sub(self, pattern: str, to: str, nth: int = 0, at: str = "") -> None:
        """Replace in one line."""
        i = self._one(pattern, nth, at)
        new = re.sub(pattern, to, self.lines[i], count=1)
        if new == self.lines[i]:
            raise Stale(f"{pattern!r} -> {to!r} changes nothing")
        self.lines[i] = new

    def sub_all(self, pattern: str, to: str, at: str = "") -> None:
        found = self.find(pattern, at)
        if not found:
            raise Stale(f"nothing matches {pattern!r} at {at!r}")
        for i in found:
            self.lines[i] = re.sub(pattern, to, self.lines[i], count=1)

    def twice(self, pattern: str, nth: int = 0, at: str = "") -> None:
        i = self._one(pattern, nth, at)
        self.lines[i] += " " + self.lines[i].strip()

    def no_wait(self, nth: int = 0, at: str = "") -> None:
        """An mbarrier wait that does not wait."""
        self.sub(r"mbarrier\.try_wait.*", "setp.eq.u32 P1, 0, 0;", nth, at)

    def after(self, pattern: str, line: str, nth: int = 0, at: str = "") -> None:
        self.lines[self._one(pattern, nth, at)] += " " + line

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


Edit = Callable[[Text], None]


@dataclass(frozen=True)
class Mutant:
    """A wrong kernel and the case that must show it."""

    name: str
    case: Case
    edit: Edit
    fast: bool = False
    """Run in CI; the rest by the command that writes the committed result."""
