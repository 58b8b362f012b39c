"""Numbers that a reader of a kernel wants: what was executed, moved and waited for."""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Stats:
    """Counts of one launch, over all its CTAs."""

    instructions: Counter[str] = field(default_factory=Counter)
    """Warp instructions by opcode, for example ``fma.rn.f32`` or ``wgmma.mma_async``."""
    tma_load_bytes: int = 0
    tma_store_bytes: int = 0
    tma_copies: int = 0
    shared_accesses: int = 0
    bank_conflicts: int = 0
    """Extra passes over the banks of shared memory, beyond one for each 128 bytes."""
    barrier_waits: Counter[str] = field(default_factory=Counter)
    """How often a warp had to wait, by kind: ``mbarrier``, ``bar``, ``setmaxnreg``, ``warp``."""
    flops: int = 0
    """Multiplications and additions of matrix products."""
    warps: int = 0
    switches: int = 0

    @property
    def total(self) -> int:
        return sum(self.instructions.values())

    def summary(self) -> dict[str, Any]:
        """A plain dict for JSON."""
        return {
            "instructions": self.total, "by_kind": dict(self.instructions.most_common()),
            "tma_load_bytes": self.tma_load_bytes, "tma_store_bytes": self.tma_store_bytes, "tma_copies": self.tma_copies,
            "shared_accesses": self.shared_accesses, "bank_conflicts": self.bank_conflicts,
            "barrier_waits": dict(self.barrier_waits), "flops": self.flops, "warps": self.warps,
        }
