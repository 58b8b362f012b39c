"""Additive masks: fills, their dtypes, sums and nesting, residual biases; against brute force."""
from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from prove_support import check_additive, program, run, trace

from fa_inductor.kernels.record import Band, Dense, KeyPadding
from fa_inductor.prove import Materialiser, prove_additive, to_program

INF = float("inf")
MIN32, MIN16 = torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min
CAUSAL = (Band(None, 0),)
PAD = torch.tensor([[1, 1, 0, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1]], dtype=torch.bool)


def keep(s: torch.Tensor) -> torch.Tensor:
    return torch.arange(s.shape[3])[None, :] <= torch.arange(s.shape[2])[:, None]


def full(s: torch.Tensor, fill: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((s.shape[2], s.shape[3]), fill, dtype=dtype)


SPELLINGS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float]] = {
    "triu of -inf": (lambda s: full(s, -INF).triu(1), -INF),
    "triu of ones times -inf": (lambda s: torch.triu(torch.ones(s.shape[2], s.shape[3]) * -INF, diagonal=1), -INF),
    "where": (lambda s: torch.where(keep(s), torch.zeros(()), MIN32), MIN32),
    "where scalars": (lambda s: torch.where(keep(s), 0.0, -1e9), -1e9),
    "where swapped": (lambda s: torch.where(~keep(s), -1e9, 0.0), -1e9),
    "masked_fill": (lambda s: torch.zeros(s.shape[2], s.shape[3]).masked_fill(~keep(s), -INF), -INF),
    "masked_fill of fill": (lambda s: full(s, MIN32).masked_fill(keep(s), 0.0), MIN32),
    "one minus": (lambda s: (1.0 - keep(s).float()) * -10000.0 * 10, -1e5),
    "one minus finfo": (lambda s: (1 - keep(s).float()) * MIN32, MIN32),
    "negated times": (lambda s: (~keep(s)).float() * -1e9, -1e9),
    "bool times": (lambda s: ~keep(s) * -1e9, -1e9),
    "m minus one": (lambda s: (keep(s).float() - 1) * 1e9, -1e9),
    "minus large": (lambda s: -torch.where(keep(s), 0.0, 1e9), -1e9),
    "zero minus": (lambda s: 0.0 - torch.where(keep(s), 0.0, 1e9), -1e9),
    "log": (lambda s: keep(s).float().log(), -INF),
    "integers": (lambda s: torch.where(keep(s), 0, -100000), -1e5),
    "min times triu": (lambda s: MIN32 * torch.triu(torch.ones(s.shape[2], s.shape[3]), 1), MIN32),
    "triu times comparison": (
        lambda s: full(s, MIN32).triu(1) * (torch.arange(s.shape[3])[None] > torch.arange(s.shape[2])[:, None]), MIN32,
    ),
    "add neg": (lambda s: torch.where(keep(s), 0.0, -1e9) + torch.zeros(s.shape[2], s.shape[3]), -1e9),
    "4-D slice": (lambda s: torch.where(keep(s), 0.0, MIN32)[None, None][:, :, :, : s.shape[3]], MIN32),
    "bf16 then float": (lambda s: torch.where(keep(s), 0.0, MIN16).to(torch.bfloat16).float(), MIN16),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_causal_spelling(name: str, dynamic: bool) -> None:
    fn, fill = SPELLINGS[name]
    traced_type = torch.int64 if name == "integers" else torch.float32
    if traced_type == torch.int64:
        traced = trace(fn, (), dynamic=dynamic)
        proof = prove_additive(traced.ev, traced.node, traced.index)
        assert proof.fills == (fill,) and proof.residual is None and proof.nonempty
        return
    proof, atoms = check_additive(fn, dynamic=dynamic)
    assert atoms == CAUSAL
    assert proof.fills == (fill,) and proof.fill == fill
    assert proof.residual is None and proof.nonempty


def test_narrow_casts_are_exact() -> None:
    """finfo(float32).min is -inf in bfloat16 and float16; -1e9 is -inf in float16 only."""
    def cast(fill: float, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda s: torch.where(keep(s), 0.0, fill).to(dtype)

    assert check_additive(cast(MIN32, torch.bfloat16))[0].fill == -INF
    assert check_additive(cast(MIN16, torch.bfloat16))[0].fill == MIN16
    assert check_additive(cast(-1e9, torch.float16))[0].fill == -INF
    assert check_additive(cast(-1e9, torch.bfloat16))[0].fill == torch.tensor(-1e9).bfloat16().item()


def test_dtype_of_the_sum_counts() -> None:
    traced = trace(lambda s: torch.where(keep(s), 0.0, MIN32))
    assert prove_additive(traced.ev, traced.node, traced.index).fill == MIN32
    assert prove_additive(traced.ev, traced.node, traced.index, torch.bfloat16).fill == -INF


@pytest.mark.parametrize("fill", [-1e4, -100.0, 1.0, 0.5])
def test_soft_penalty_is_a_bias(fill: float) -> None:
    proof, atoms = check_additive(lambda s: torch.where(keep(s), 0.0, fill))
    assert atoms == () and proof.fill is None and proof.residual is not None and proof.fills == ()


def test_threshold() -> None:
    assert check_additive(lambda s: torch.where(keep(s), 0.0, -3e4))[0].residual is None
    assert check_additive(lambda s: torch.where(keep(s), 0.0, -2.9e4))[0].residual is not None


def test_two_masks_overflow_in_their_dtype() -> None:
    def two(s: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return torch.where(keep(s), 0.0, MIN32) + torch.where(m[:, None, None, :], 0.0, MIN32)

    proof, atoms = check_additive(two, (PAD,))
    assert atoms == (Band(None, 0), KeyPadding(0))
    assert set(proof.fills) == {MIN32, -INF} and proof.fill is None and not proof.nonempty


def test_two_masks_with_inf() -> None:
    def two(s: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return torch.where(keep(s), 0.0, -INF) + torch.where(m[:, None, None, :], 0.0, -INF)

    proof, _ = check_additive(two, (PAD,))
    assert proof.fill == -INF


def test_disjoint_masks_never_add_up() -> None:
    def fn(s: torch.Tensor) -> torch.Tensor:
        q, k = torch.arange(s.shape[2])[:, None], torch.arange(s.shape[3])[None]
        return torch.where(k <= q, 0.0, MIN32) + torch.where(k > q - 3, 0.0, MIN32)

    proof, atoms = check_additive(fn)
    assert atoms == (Band(-2, 0),)
    assert proof.fill == MIN32


def test_nested_where() -> None:
    def nested(s: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return torch.where(keep(s), torch.where(m[:, None, None, :], 0.0, -1e9), -INF)

    proof, atoms = check_additive(nested, (PAD,))
    assert atoms == (Band(None, 0), KeyPadding(0))
    assert set(proof.fills) == {-1e9, -INF}


def test_integer_padding_times_min_is_a_bias() -> None:
    """Nothing proves that an integer mask holds only 0 and 1."""
    def bert(s: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return (1.0 - m[:, None, None, :].float()) * MIN32

    proof, atoms = check_additive(bert, (PAD.long(),))
    assert atoms == () and proof.residual is not None
    assert check_additive(bert, (PAD,))[1] == (KeyPadding(0),)


def test_bool_mask_added_as_numbers() -> None:
    traced = trace(lambda s, m: m[:, None, None, :], (PAD,))
    proof = prove_additive(traced.ev, traced.node, traced.index)
    assert proof.atoms == () and proof.residual is not None  # True adds one


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_bias_plus_mask(dynamic: bool) -> None:
    bias = torch.randn(1, 3, 5, 7)
    proof, atoms = check_additive(lambda s, b: b + torch.where(keep(s), 0.0, MIN32), (bias,), dynamic=dynamic)
    assert atoms == CAUSAL and proof.fills == (MIN32,)
    proof, atoms = check_additive(lambda s, b: torch.where(keep(s), b, -INF), (bias,), dynamic=dynamic)
    assert atoms == CAUSAL and proof.fills == (-INF,)
    proof, atoms = check_additive(lambda s, b: torch.where(keep(s), 0.0, -INF) - b, (bias,), dynamic=dynamic)
    assert atoms == CAUSAL and proof.residual is not None
    proof, atoms = check_additive(lambda s, b: b, (bias,), dynamic=dynamic)
    assert atoms == () and proof.residual is not None and proof.nonempty


def test_bias_plus_mask_cast_together() -> None:
    def fn(s: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (b + torch.where(keep(s), 0.0, MIN32)).to(torch.bfloat16)

    proof, atoms = check_additive(fn, (torch.randn(1, 3, 5, 7),))
    assert atoms == CAUSAL and proof.fills == (-INF,) and proof.residual.dtype == torch.bfloat16


def test_bias_origin_is_the_users_node() -> None:
    """A bias that may need a gradient is read from the node that holds it, not computed again."""
    def fn(s: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (w * 2).sum(0)[None] + torch.where(keep(s), 0.0, MIN32)

    traced = trace(fn, (torch.randn(4, 3, 5, 7),))
    proof = prove_additive(traced.ev, traced.node, traced.index)
    (output,) = (n for n in traced.graph.nodes if n.op == "output")
    before = set(traced.graph.nodes)
    m = Materialiser(traced.graph, output, traced.ev)
    m.tree(proof.residual, use_origin=True)
    added = [n.target for n in traced.graph.nodes if n not in before]
    assert set(added) <= {torch.ops.aten.unsqueeze.default}


def test_alibi_as_score_program() -> None:
    def alibi(s: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        k, q = torch.arange(s.shape[3])[None], torch.arange(s.shape[2])[:, None]
        return torch.where(k <= q, slopes[:, None, None] * (k - q).float(), -INF)

    proof, atoms = check_additive(alibi, (torch.rand(3),))
    assert atoms == CAUSAL and proof.fills == (-INF,)
    traced = trace(alibi, (torch.rand(3),))
    proof = prove_additive(traced.ev, traced.node, traced.index)
    (output,) = (n for n in traced.graph.nodes if n.op == "output")
    captures: list = []
    e = to_program(proof.residual, Materialiser(traced.graph, output, traced.ev), captures, [])
    assert [tuple(c.meta["val"].shape) for c in captures] == [(1, 3, 1, 1)]
    position = torch.meshgrid(*(torch.arange(n) for n in traced.sizes), indexing="ij")
    value = program(e, position, run(traced, captures), [])
    eager = alibi(*traced.inputs).expand(traced.sizes)
    assert torch.equal(value[eager > -INF], eager[eager > -INF])


def test_additive_dense_mask_is_a_bias() -> None:
    """A float mask from outside is only a tensor: nothing is known about its values."""
    mask = torch.where(torch.rand(2, 1, 5, 7) > 0.5, 0.0, -INF)
    proof, atoms = check_additive(lambda s, m: m, (mask,))
    assert atoms == () and proof.residual is not None
    proof, atoms = check_additive(lambda s, m: torch.where(m, 0.0, -INF), (mask == 0,))
    assert atoms == (Dense(0),) and proof.residual is None


def test_nan_and_positive_infinity_are_no_masks() -> None:
    proof, atoms = check_additive(lambda s: torch.where(keep(s), 0.0, INF))
    assert atoms == () and proof.residual is not None
    traced = trace(lambda s: torch.where(keep(s), 0.0, math.nan))
    proof = prove_additive(traced.ev, traced.node, traced.index)
    assert proof.atoms == () and proof.residual is not None


def test_always_masked() -> None:
    proof, _ = check_additive(lambda s: full(s, -INF))
    assert proof.always_false and not proof.nonempty and proof.fill == -INF


def test_zeros_are_nothing() -> None:
    proof, atoms = check_additive(lambda s: torch.zeros(1, 1, s.shape[2], s.shape[3]))
    assert atoms == () and proof.residual is None and proof.always_true and proof.nonempty
