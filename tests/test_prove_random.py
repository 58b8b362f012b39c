"""Random mask programs: whatever the prover makes of them, the atoms must equal eager everywhere."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prove_support import check_additive, check_boolean

Inputs = dict[str, torch.Tensor]
Term = Callable[[torch.Tensor, Inputs], torch.Tensor]


@dataclass
class Program:
    """A named tensor program, so that a failing example prints as source."""

    text: str
    run: Term

    def __repr__(self) -> str:
        return self.text


def _axis(name: str, d: int, shape: tuple[int, ...]) -> Program:
    return Program(name, lambda s, x: torch.arange(s.shape[d]).view(shape))


AXES = {
    "b": _axis("b", 0, (-1, 1, 1, 1)), "h": _axis("h", 1, (1, -1, 1, 1)),
    "q": _axis("q", 2, (1, 1, -1, 1)), "k": _axis("k", 3, (1, 1, 1, -1)),
}
LEAVES = [
    *AXES.values(), AXES["q"], AXES["k"], AXES["q"], AXES["k"],
    Program("ids_q", lambda s, x: x["ids"][:, None, : s.shape[2], None]),
    Program("ids_k", lambda s, x: x["ids"][:, None, None, : s.shape[3]]),
    Program("before_k", lambda s, x: torch.cat([x["ids"][:, :1] * 0, x["ids"][:, : s.shape[3] - 1]], 1)[:, None, None]),
    Program("pad_q", lambda s, x: torch.nn.functional.pad(x["ids"][:, None, 2 : s.shape[2], None], (0, 0, 1, 1))),
    Program("ids8_k", lambda s, x: x["ids"].to(torch.int8)[:, None, None, : s.shape[3]]),
    Program("gather_k", lambda s, x: x["ids"][:, (torch.arange(s.shape[3]) * 2) % s.shape[3]][:, None, None]),
    Program("n[b]", lambda s, x: x["n"][:, None, None, None]),
    Program("flat", lambda s, x: torch.arange(s.shape[2] * s.shape[3]).view(1, 1, s.shape[2], s.shape[3])),
    Program("flipped_k", lambda s, x: torch.arange(s.shape[3]).flip(0)[None, None, None]),
    Program("shifted_q", lambda s, x: torch.arange(s.shape[2] + 4)[2:-2].view(1, 1, -1, 1)),
    Program("rolled_k", lambda s, x: torch.cat([torch.arange(2), torch.arange(s.shape[3] - 2)])[None, None, None]),
    Program("sum_k", lambda s, x: torch.ones(s.shape[3], dtype=torch.int64).cumsum(0)[None, None, None]),
    Program("Sk", lambda s, x: torch.full((1, 1, 1, 1), s.shape[3])),
]


def _ints() -> st.SearchStrategy[Program]:
    def extend(inner: st.SearchStrategy[Program]) -> st.SearchStrategy[Program]:
        small = st.integers(-3, 4)
        positive = st.integers(1, 4)
        return st.one_of(
            st.builds(lambda a, b: Program(f"({a}+{b})", lambda s, x: a.run(s, x) + b.run(s, x)), inner, inner),
            st.builds(lambda a, b: Program(f"({a}-{b})", lambda s, x: a.run(s, x) - b.run(s, x)), inner, inner),
            st.builds(lambda a, c: Program(f"({a}+{c})", lambda s, x: a.run(s, x) + c), inner, small),
            st.builds(lambda a, c: Program(f"({a}*{c})", lambda s, x: a.run(s, x) * c), inner, small),
            st.builds(lambda a, c: Program(f"({a}//{c})", lambda s, x: a.run(s, x) // c), inner, positive),
            st.builds(lambda a, c: Program(f"({a}%{c})", lambda s, x: a.run(s, x) % c), inner, positive),
            st.builds(lambda a: Program(f"|{a}|", lambda s, x: a.run(s, x).abs()), inner),
            st.builds(lambda a, c: Program(f"max({a},{c})", lambda s, x: a.run(s, x).clamp(min=c)), inner, small),
            st.builds(lambda a, b: Program(f"min({a},{b})", lambda s, x: torch.minimum(a.run(s, x), b.run(s, x))),
                      inner, inner),
            st.builds(lambda a: Program(f"i8({a})", lambda s, x: a.run(s, x).to(torch.int8).to(torch.int64)), inner),
            st.builds(lambda a: Program(f"f32({a})", lambda s, x: a.run(s, x).float().to(torch.int64)), inner),
            st.builds(
                lambda a, b, c: Program(f"where({a}>={c},{a},{b})",
                                        lambda s, x: torch.where(a.run(s, x) >= c, a.run(s, x), b.run(s, x))),
                inner, inner, small,
            ),
        )

    return st.recursive(st.sampled_from(LEAVES), extend, max_leaves=4)


COMPARISONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "<": torch.lt, "<=": torch.le, ">": torch.gt, ">=": torch.ge, "==": torch.eq, "!=": torch.ne,
}
BOOLEAN_LEAVES = [
    Program("pad_k", lambda s, x: x["pad"][:, None, None, : s.shape[3]]),
    Program("pad_q", lambda s, x: x["pad"][:, None, : s.shape[2], None]),
    Program("dense", lambda s, x: x["dense"][:, :, : s.shape[2], : s.shape[3]]),
    Program("tril", lambda s, x: torch.ones(s.shape[2], s.shape[3], dtype=torch.bool).tril()[None, None]),
    Program("true", lambda s, x: torch.ones(1, 1, 1, 1, dtype=torch.bool)),
]


def _bools() -> st.SearchStrategy[Program]:
    compare = st.builds(
        lambda a, op, b: Program(f"({a}{op}{b})", lambda s, x: COMPARISONS[op](a.run(s, x), b.run(s, x))),
        _ints(), st.sampled_from(sorted(COMPARISONS)), _ints(),
    )
    against = st.builds(
        lambda a, op, c: Program(f"({a}{op}{c})", lambda s, x: COMPARISONS[op](a.run(s, x), c)),
        _ints(), st.sampled_from(sorted(COMPARISONS)), st.integers(-2, 5),
    )

    def extend(inner: st.SearchStrategy[Program]) -> st.SearchStrategy[Program]:
        return st.one_of(
            st.builds(lambda a, b: Program(f"({a}&{b})", lambda s, x: a.run(s, x) & b.run(s, x)), inner, inner),
            st.builds(lambda a, b: Program(f"({a}|{b})", lambda s, x: a.run(s, x) | b.run(s, x)), inner, inner),
            st.builds(lambda a, b: Program(f"({a}^{b})", lambda s, x: a.run(s, x) ^ b.run(s, x)), inner, inner),
            st.builds(lambda a: Program(f"~{a}", lambda s, x: ~a.run(s, x)), inner),
            st.builds(lambda a: Program(f"({a}.long()!=0)", lambda s, x: a.run(s, x).long() != 0), inner),
            st.builds(
                lambda a, b, c: Program(f"where({a},{b},{c})",
                                        lambda s, x: torch.where(a.run(s, x), b.run(s, x), c.run(s, x))),
                inner, inner, inner,
            ),
        )

    return st.recursive(st.one_of(compare, against, st.sampled_from(BOOLEAN_LEAVES)), extend, max_leaves=5)


NAMES = ("ids", "n", "pad", "dense")


def _inputs(seed: int, sizes: tuple[int, int, int, int]) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    length = max(sizes[2:])
    return [
        torch.randint(0, 3, (sizes[0], length), generator=g), torch.randint(-1, length + 1, (sizes[0],), generator=g),
        torch.rand(sizes[0], length, generator=g) > 0.4, torch.rand(sizes[0], 1, length, length, generator=g) > 0.4,
    ]


SHAPES = st.sampled_from([(2, 3, 4, 6), (2, 2, 6, 4), (3, 2, 5, 5)])
CHECKED = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@CHECKED
@given(program=_bools(), sizes=SHAPES, dynamic=st.booleans(), seed=st.integers(0, 3))
def test_atoms_equal_eager(program: Program, sizes: tuple[int, int, int, int], dynamic: bool, seed: int) -> None:
    def fn(s: torch.Tensor, *xs: torch.Tensor) -> torch.Tensor:
        return program.run(s, dict(zip(NAMES, xs, strict=True)))

    check_boolean(fn, _inputs(seed, sizes), sizes, dynamic)


FILLS = st.sampled_from([float("-inf"), torch.finfo(torch.float32).min, -1e9, -5.0, 0.0, 2.0])


@CHECKED
@given(
    programs=st.lists(st.tuples(_bools(), FILLS, FILLS), min_size=1, max_size=3), sizes=SHAPES, dynamic=st.booleans(),
    cast=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_additive_split_equals_eager(
    programs: list[tuple[Program, float, float]], sizes: tuple[int, int, int, int], dynamic: bool, cast: torch.dtype
) -> None:
    def fn(s: torch.Tensor, *xs: torch.Tensor) -> torch.Tensor:
        x = dict(zip(NAMES, xs, strict=True))
        terms = [torch.where(p.run(s, x), a, b) for p, a, b in programs]
        total = terms[0]
        for t in terms[1:]:
            total = total + t
        return total.to(cast)

    check_additive(fn, _inputs(1, sizes), sizes, dynamic)
