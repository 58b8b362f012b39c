"""Where the choices of a random program come from: a seed, or a recorded list."""
from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Chooser(ABC):
    @abstractmethod
    def integer(self, n: int) -> int:
        """One of ``range(n)``."""

    def pick(self, options: Sequence[T]) -> T:
        return options[self.integer(len(options))]

    def chance(self, percent: int) -> bool:
        return self.integer(100) >= 100 - percent


class Seeded(Chooser):
    """Choices of a seed; keeps them in ``taken``."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.taken: list[int] = []

    def integer(self, n: int) -> int:
        self.taken.append(self.random.randrange(n))
        return self.taken[-1]


class Recorded(Chooser):
    """The choices of a list, then zeros."""

    def __init__(self, choices: Sequence[int]) -> None:
        self.choices = iter(choices)

    def integer(self, n: int) -> int:
        return min(next(self.choices, 0), n - 1)


def batches(first: int, last: int, size: int) -> list[range]:
    """``range(first, last)`` in pieces of ``size``."""
    return [range(i, min(i + size, last)) for i in range(first, last, size)]
