"""Every instruction program, by name."""
from __future__ import annotations

from . import programs_float, programs_integer, programs_matrix, programs_memory, programs_tensor, programs_warp
from .program import Program

MODULES = (programs_integer, programs_float, programs_warp, programs_memory, programs_tensor, programs_matrix)


def by_name() -> dict[str, Program]:
    """All programs; names are unique.

    Raises:
        ValueError: two have one name.
    """
    every = [p for m in MODULES for p in m.programs()]
    found = {p.name: p for p in every}
    if len(found) != len(every):
        raise ValueError("two programs of one name")
    return found
