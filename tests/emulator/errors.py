"""What a strict emulator refuses: one exception with a kind, the warp, the PTX line and the kernel's source line."""
from __future__ import annotations

from pathlib import Path


class Fault(Exception):
    """A program did something that the PTX ISA leaves undefined or forbids.

    kind: a short fixed word, for example ``race``, ``uninitialised``, ``deadlock``; tests match on it.
    """

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind, self.message = kind, message
        self.warp: str | None = None
        self.line: int | None = None
        self.text = ""
        self.source: tuple[str, int] | None = None

    def locate(self, warp: str, line: int, text: str, source: tuple[str, int] | None) -> Fault:
        """Add where it happened, once: the innermost place is the right one."""
        if self.line is None:
            self.warp, self.line, self.text, self.source = warp, line, text, source
        return self

    def __str__(self) -> str:
        where = f"{self.kind}: {self.message}"
        if self.warp is not None:
            where += f"\n  in {self.warp}"
        if self.line is not None:
            where += f"\n  PTX line {self.line}: {self.text[:160]}"
        if self.source is not None:
            where += f"\n  source {place(self.source)}"
        return where


def place(source: tuple[str, int] | None) -> str:
    """``forward.py:213: the text of that line`` of a line-info entry; the text only where the file is at hand."""
    if source is None:
        return "unknown source"
    path = Path(source[0])
    try:
        text = path.read_text().splitlines()[source[1] - 1].strip()
    except (OSError, IndexError, UnicodeDecodeError):
        text = ""
    return f"{path.name}:{source[1]}" + (f": {text}" if text else "")
