"""Every instruction program, by name."""
from __future__ import annotations

from collections.abc import Iterable

from . import launch, programs_float, programs_integer, programs_matrix, programs_memory, programs_tensor, programs_warp
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


def form_of(kind: str) -> str:
    """An opcode with its modifiers, without cache hints, the uniformity of a branch, defaults that are written out (of a wait
    for an mbarrier: PTX ISA 9.7.13.15.16), and spellings of one state space or of one move of bits."""
    kind = {"mov.f32": "mov.b32"}.get(kind, kind).replace("_wait.parity.acquire.cta", "_wait.parity")
    drop = ("uni", "L2::cache_hint", "tile")
    words = [{"shared::cta": "shared", "shared::cluster": "shared", "2d": "3d", "4d": "3d"}.get(w, w) for w in kind.split(".")]
    return ".".join(w for w in words if w not in drop)


OF_CLUSTERS = frozenset({
    "barrier.cluster.arrive", "barrier.cluster.arrive.relaxed", "barrier.cluster.wait", "cvta.to.shared.u64", "mapa.shared.u32",
    "cp.async.bulk.tensor.3d.shared.global.mbarrier::complete_tx::bytes.multicast::cluster"})
"""Forms that a program, which is one block, does not have: a GPU has run them in forward cases only."""


def forms(names: Iterable[str]) -> set[str]:
    """Of all instructions in these programs."""
    every = by_name()
    return {form_of(s.kind) for n in names for s in launch.Program(every[n].text()).steps}
