"""Memory (PTX ISA 5.1 "State Spaces"): shared memory of a CTA, global buffers, parameters, constants.

Every byte knows whether it was ever written.  The generic address space holds global buffers far from each other, the
parameters of the launch, and the windows of shared memory of a cluster's CTAs.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from .clocks import Agents, Shadow
from .errors import Fault

PARAM_BASE = 0x0200_0000_0000
CONST_BASE = 0x0300_0000_0000
SHARED_WINDOW = 0x0100_0000_0000
"""Generic address of shared::cluster address 0."""
GLOBAL_BASE = 0x7000_0000_0000
GLOBAL_STEP = 1 << 36
RANK_SHIFT = 24
"""Address bits of a CTA's rank, plus one, in a shared::cluster address; none of them set means the own CTA."""
RESERVED = 1024
"""Bytes at the start of shared memory that belong to the system."""
Index = np.ndarray | slice


class Memory:
    """Bytes with a first address."""

    def __init__(self, name: str, base: int, data: np.ndarray, known: bool | np.ndarray):
        self.name, self.base, self.data, self.size = name, base, data, len(data)
        self.known = known if isinstance(known, np.ndarray) else np.full(self.size, known)

    def check(self, lo: int, hi: int, what: str) -> None:
        """Refuse bytes outside [0, size)."""
        if lo < 0 or hi > self.size:
            raise Fault("bounds", f"{what} of bytes {lo:#x} to {hi:#x} of {self.name}, which has {self.size:#x}")

    def need(self, index: Index, what: str) -> None:
        known = self.known[index]
        if not known.all():
            i = int(np.argmin(known.reshape(-1)))
            at = index.start + i if isinstance(index, slice) else int(index.reshape(-1)[i])
            raise Fault("uninitialised", f"{what} of byte {at:#x} of {self.name}, which nothing has written")


class Shared(Memory):
    """Shared memory of one CTA, addressed from 0; the first KiB is the system's."""

    def __init__(self, size: int, agents: Agents, cta: str):
        super().__init__(f"shared memory of {cta}", 0, np.zeros(RESERVED + size, np.uint8), False)
        self.shadow = Shadow(-(-self.size // 4), agents, f"shared memory of {cta}")
        self.barrier_bytes = np.zeros(self.size, bool)

    def check(self, lo: int, hi: int, what: str) -> None:
        if lo < RESERVED or hi > self.size:
            raise Fault("bounds", f"{what} of bytes {lo:#x} to {hi:#x} of {self.name}, which has {RESERVED:#x} to {self.size:#x}")

    def data_only(self, index: Index, what: str) -> None:
        """Refuse ordinary access to the 8 bytes of an mbarrier (PTX ISA 9.7.13.15: opaque)."""
        if self.barrier_bytes[index].any():
            raise Fault("barrier", f"{what} of {self.name} touches an mbarrier object")


class Buffer(Memory):
    """A global buffer over the caller's own array: writes arrive there."""

    def __init__(self, name: str, base: int, array: np.ndarray, known: bool | np.ndarray):
        flat = array.reshape(-1).view(np.uint8) if array.flags.c_contiguous else None
        if flat is None:
            raise ValueError(f"buffer {name} must be contiguous")
        super().__init__(name, base, flat, known)
        self.owner = np.zeros(self.size, np.int32)
        """Which warp of which CTA wrote a byte last: serial number of the CTA x 64 + warp + 1."""
        self.clock = np.zeros(self.size, np.int32)
        self.generic = np.zeros(self.size, bool)
        """Whether that write was an ordinary one, and not the async proxy's."""


class Global:
    """All global buffers of a launch."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []

    def add(self, name: str, array: Any, known: bool | np.ndarray = True) -> Buffer:
        """A buffer at the next free address; `known` False for one whose contents the kernel must not read."""
        b = Buffer(name, GLOBAL_BASE + GLOBAL_STEP * len(self.buffers), array, known)
        self.buffers.append(b)
        return b

    def find(self, address: int, size: int, what: str) -> tuple[Buffer, int]:
        """The buffer that holds `size` bytes at an address, and the offset in it."""
        n = (address - GLOBAL_BASE) // GLOBAL_STEP
        if not 0 <= n < len(self.buffers):
            raise Fault("bounds", f"{what} at {address:#x}, outside every buffer")
        b = self.buffers[n]
        offset = address - b.base
        if offset > b.size and GLOBAL_STEP - offset < 1 << 32 and n + 1 < len(self.buffers):
            raise Fault("bounds", f"{what} {GLOBAL_STEP - offset} bytes before {self.buffers[n + 1].name}")
        b.check(offset, offset + size, what)
        return b, offset
