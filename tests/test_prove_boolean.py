"""Boolean masks: every atom in several spellings, and their nearest negatives, against brute force."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from prove_support import check_boolean, materialise, trace

from fa_inductor.kernels.record import Band, Chunk, Dense, Documents, KeyPadding, Predicate, Sym
from fa_inductor.prove import conjoin, prove_boolean

CAUSAL = (Band(None, 0),)


def qk(s: torch.Tensor, dtype: torch.dtype = torch.int64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(s.shape[2], dtype=dtype)[:, None], torch.arange(s.shape[3], dtype=dtype)[None, :]


def of_positions(f: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.int64):
    return lambda s: f(*qk(s, dtype))


def ones(s: torch.Tensor, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    return torch.ones(s.shape[2], s.shape[3], dtype=dtype)


def gathered(s: torch.Tensor) -> torch.Tensor:
    """transformers' way: positions expanded over the batch, read back with index tensors."""
    b = torch.arange(s.shape[0])[:, None, None, None]
    q = torch.arange(s.shape[2])[None, None, :, None]
    k = torch.arange(s.shape[3])[None, None, None, :]
    pos = torch.arange(max(s.shape[2], s.shape[3])).unsqueeze(0).expand(s.shape[0], -1)
    return pos[b, k] <= pos[b, q]


def flattened(s: torch.Tensor) -> torch.Tensor:
    n, m = s.shape[2], s.shape[3]
    flat = torch.arange(n * m)
    return (flat % m <= flat // m).view(n, m)


SPELLINGS = {
    "le": (of_positions(lambda q, k: k <= q), CAUSAL),
    "ge": (of_positions(lambda q, k: q >= k), CAUSAL),
    "not gt": (of_positions(lambda q, k: ~(k > q)), CAUSAL),
    "lt plus one": (of_positions(lambda q, k: k < q + 1), CAUSAL),
    "difference": (of_positions(lambda q, k: k - q <= 0), CAUSAL),
    "doubled": (of_positions(lambda q, k: 2 * k < 2 * q + 1), CAUSAL),
    "int32": (of_positions(lambda q, k: k <= q, torch.int32), CAUSAL),
    "float32": (of_positions(lambda q, k: k.float() <= q.float()), CAUSAL),
    "float32 sub": (of_positions(lambda q, k: q.float() - k.float() >= 0), CAUSAL),
    "maximum": (of_positions(lambda q, k: torch.maximum(k, q) == q), CAUSAL),
    "clamp": (of_positions(lambda q, k: (k - q).clamp(min=0) == 0), CAUSAL),
    "where": (of_positions(lambda q, k: torch.where(k > q, 0, 1) == 1), CAUSAL),
    "tril bool": (lambda s: ones(s).tril(), CAUSAL),
    "tril float": (lambda s: ones(s, torch.float32).tril() == 1, CAUSAL),
    "not triu": (lambda s: ~ones(s).triu(1), CAUSAL),
    "triu eq 0": (lambda s: ones(s, torch.float16).triu(diagonal=1) == 0, CAUSAL),
    "tril uint8": (lambda s: ones(s, torch.uint8).tril().bool(), CAUSAL),
    "4-D slice": (lambda s: ones(s).tril().view(1, 1, s.shape[2], s.shape[3])[:, :, :, : s.shape[3]], CAUSAL),
    "expanded": (lambda s: ones(s).tril()[None, None].expand(s.shape[0], s.shape[1], -1, -1), CAUSAL),
    "transposed triu": (lambda s: torch.ones(s.shape[3], s.shape[2], dtype=torch.bool).triu().t(), CAUSAL),
    "gathered": (gathered, CAUSAL),
    "double negation": (of_positions(lambda q, k: ~~(k <= q) & torch.ones_like(k, dtype=torch.bool)), CAUSAL),
    "and all true": (of_positions(lambda q, k: (k <= q) & (q >= 0) & (k >= 0)), CAUSAL),
    "or itself": (of_positions(lambda q, k: (k <= q) | (k < q)), CAUSAL),
    "xor false": (of_positions(lambda q, k: (k <= q) ^ (q < 0)), CAUSAL),
    "offset": (of_positions(lambda q, k: k <= q + 2), (Band(None, 2),)),
    "tril offset": (lambda s: ones(s).tril(2), (Band(None, 2),)),
    "window gt": (of_positions(lambda q, k: (k > q - 3) & (k <= q)), (Band(-2, 0),)),
    "window lt": (of_positions(lambda q, k: (q - k < 3) & (k <= q)), (Band(-2, 0),)),
    "window triu": (lambda s: ones(s).tril() & ones(s).triu(-2), (Band(-2, 0),)),
    "window abs": (of_positions(lambda q, k: (q - k).abs() <= 2), (Band(-2, 2),)),
    "window abs lt": (of_positions(lambda q, k: ~((k - q).abs() >= 3)), (Band(-2, 2),)),
    "window only": (of_positions(lambda q, k: k > q - 3), (Band(-2, None),)),
    "two windows": (of_positions(lambda q, k: (k > q - 3) & (k > q - 2) & (k <= q) & (k < q + 4)), (Band(-1, 0),)),
    "diagonal": (of_positions(lambda q, k: q == k), (Band(0, 0),)),
    "chunk": (of_positions(lambda q, k: q // 3 == k // 3), (Chunk(3),)),
    "chunk rounded": (of_positions(lambda q, k: q - q % 3 == k - k % 3), (Chunk(3),)),
    "chunk difference": (of_positions(lambda q, k: q // 2 - k // 2 == 0), (Chunk(2),)),
    "chunk offset": (of_positions(lambda q, k: (q + 2) // 3 == k // 3), (Chunk(3, 2),)),
    "chunk far offset": (of_positions(lambda q, k: (q + 7) // 3 == k // 3), (Chunk(3, 7),)),
    "chunk causal": (of_positions(lambda q, k: (k // 2 == q // 2) & (k <= q)), (Band(None, 0), Chunk(2))),
    "all true": (of_positions(lambda q, k: (q >= 0) & (k > -1)), ()),
    "union all": (of_positions(lambda q, k: (k <= q) | (k > q)), ()),
    "full": (lambda s: torch.full((1, 1, s.shape[2], s.shape[3]), True), ()),
    "arange end": (lambda s: torch.arange(s.shape[3])[None, None, None] < s.shape[3], ()),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling_folds_to_its_atom(name: str, dynamic: bool) -> None:
    fn, expected = SPELLINGS[name]
    if dynamic and name.startswith("float32"):
        expected = None  # above 2**24 positions float32 is not exact, and a dynamic length has no bound
    _, atoms = check_boolean(fn, dynamic=dynamic)
    if expected is not None:
        assert atoms == expected


def test_dynamic_float_positions_are_no_band() -> None:
    _, atoms = check_boolean(of_positions(lambda q, k: k.float() <= q.float()), dynamic=True)
    assert not any(isinstance(a, Band) for a in atoms)


def test_flattened_index_folds() -> None:
    assert check_boolean(flattened)[1] == CAUSAL
    assert check_boolean(flattened, dynamic=True)[1] == CAUSAL


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_offset_from_lengths(dynamic: bool) -> None:
    """Decoding: the last query sees the last key."""
    proof, atoms = check_boolean(lambda s: ones(s).tril(s.shape[3] - s.shape[2]), dynamic=dynamic)
    assert atoms == ((Band(None, Sym(0)),) if dynamic else (Band(None, 2),))
    assert proof.nonempty or dynamic


NEAR_MISSES = {
    "strict": (of_positions(lambda q, k: k < q), (Band(None, -1),)),
    "anti-causal": (of_positions(lambda q, k: k >= q), (Band(0, None),)),
    "swapped window": (of_positions(lambda q, k: (q > k - 3) & (q <= k)), (Band(0, 2),)),
    "window one less": (of_positions(lambda q, k: (k >= q - 3) & (k <= q)), (Band(-3, 0),)),
    "tril of transpose": (lambda s: torch.ones(s.shape[3], s.shape[2], dtype=torch.bool).tril().t(), (Band(0, None),)),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss_is_its_own_atom(name: str) -> None:
    fn, expected = NEAR_MISSES[name]
    _, atoms = check_boolean(fn)
    assert atoms == expected
    assert atoms != CAUSAL


def test_wrong_axis_is_no_band() -> None:
    def by_head(s: torch.Tensor) -> torch.Tensor:
        return torch.arange(s.shape[3]) <= torch.arange(s.shape[1])[:, None, None]

    def by_batch(s: torch.Tensor) -> torch.Tensor:
        return torch.arange(s.shape[3]) <= torch.arange(s.shape[0])[:, None, None, None]

    assert isinstance(check_boolean(by_head)[1][0], Predicate)
    assert isinstance(check_boolean(by_batch)[1][0], KeyPadding)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bfloat16, torch.float16])
def test_narrow_positions_overflow(dtype: torch.dtype) -> None:
    """Positions past the range of the type wrap or round, so the mask is not causal."""
    n = 2100 if dtype == torch.float16 else 300
    fn = of_positions(lambda q, k: k.to(dtype) <= q.to(dtype))
    _, atoms = check_boolean(fn, sizes=(1, 1, n, n))
    assert not any(isinstance(a, Band) for a in atoms)
    assert check_boolean(fn, sizes=(1, 1, 100, 100))[1] == CAUSAL


def test_unsigned_difference_wraps() -> None:
    def fn(s: torch.Tensor) -> torch.Tensor:
        q, k = qk(s, torch.uint8)
        return (q - k) < 3

    _, atoms = check_boolean(fn)
    assert not any(isinstance(a, Band) for a in atoms)


PAD = torch.tensor([[1, 1, 0, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1]])
PADDINGS: dict[str, tuple[Callable[..., torch.Tensor], torch.Tensor]] = {
    "bool": (lambda s, m: m[:, None, None, :], PAD.bool()),
    "bool expanded": (lambda s, m: m[:, None, None, :].expand(-1, s.shape[1], s.shape[2], -1), PAD.bool()),
    "negated": (lambda s, m: ~m[:, None, None, :], PAD.bool()),
    "int ne": (lambda s, m: m[:, None, None, :] != 0, PAD),
    "int eq": (lambda s, m: m[:, None, None, :].expand(-1, 1, s.shape[2], -1) == 1, PAD),
    "int to bool": (lambda s, m: m.to(torch.bool)[:, None, None, :], PAD),
    "uint8": (lambda s, m: m.bool()[:, None, None, :], PAD.to(torch.uint8)),
    "float gt": (lambda s, m: m[:, None, None, :].expand(-1, -1, s.shape[2], -1) > 0.5, PAD.float()),
    "lengths": (lambda s, n: (torch.arange(s.shape[3])[None] < n[:, None])[:, None, None], torch.tensor([3, 7])),
    "lengths int32": (
        lambda s, n: (torch.arange(s.shape[3])[None] < n[:, None] - 1)[:, None, None],
        torch.tensor([3, 7], dtype=torch.int32),
    ),
    "left": (lambda s, n: (torch.arange(s.shape[3]) >= n[:, None])[:, None, None, :], torch.tensor([3, 0])),
    "repeated batch": (
        lambda s, m: m[:, None, None, :].expand(-1, s.shape[1], s.shape[2], -1).reshape(-1, s.shape[2], s.shape[3])
        .view(s.shape[0], s.shape[1], s.shape[2], s.shape[3]), PAD.bool(),
    ),
    "longer buffer": (lambda s, m: m[:, None, None, 1 : s.shape[3] + 1], torch.rand(2, 9) > 0.4),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", PADDINGS)
def test_key_padding(name: str, dynamic: bool) -> None:
    fn, mask = PADDINGS[name]
    _, atoms = check_boolean(fn, (mask,), dynamic=dynamic)
    assert atoms == (KeyPadding(0),)


def test_key_padding_members_become_one_capture() -> None:
    def fn(s: torch.Tensor, m: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        q, k = qk(s)
        return (k <= q) & m[:, None, None, :] & (k < n[:, None, None, None])

    _, atoms = check_boolean(fn, (PAD.bool(), torch.tensor([5, 6])))
    assert atoms == (Band(None, 0), KeyPadding(0))


def test_query_padding_is_a_small_capture() -> None:
    def fn(s: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return m[:, None, : s.shape[2], None].expand(-1, -1, -1, s.shape[3])

    proof, atoms = check_boolean(fn, (PAD.bool(),))
    assert isinstance(atoms[0], Predicate)
    assert not proof.nonempty


IDS = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 2, 2, 2]])


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
def test_documents(dtype: torch.dtype, dynamic: bool) -> None:
    def fn(s: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        q, k = qk(s)
        return (ids[:, None, :, None] == ids[:, None, None, :]) & (k <= q)

    proof, atoms = check_boolean(fn, (IDS.to(dtype),), (2, 3, 7, 7), dynamic)
    assert atoms == (Band(None, 0), Documents(0, 1))
    assert proof.nonempty


def test_documents_from_data_dependent_cumsum() -> None:
    def fn(s: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        doc = (torch.diff(pos, prepend=pos[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        return doc[:, None, :, None] == doc[:, None, None, :]

    pos = torch.tensor([[0, 1, 2, 0, 1, 0, 1]])
    assert check_boolean(fn, (pos,), (1, 2, 7, 7))[1] == (Documents(0, 1),)
    plain = check_boolean(lambda s: fn(s, torch.arange(s.shape[3])[None]), (), (1, 2, 7, 7), dynamic=True)
    assert plain[1] == () and plain[0].always_true


def test_documents_of_two_functions_and_wrong_axes() -> None:
    cross = check_boolean(lambda s, a, b: a[:, None, :, None] == b[:, None, None, :] + 1, (IDS[:, :5], IDS))
    assert cross[1] == (Documents(0, 1),)
    assert not cross[0].nonempty
    same_side = check_boolean(lambda s, a, b: a[:, None, None, :] == b[:, None, None, :], (IDS, IDS.flip(0)))
    assert same_side[1] == (KeyPadding(0),)
    per_head = check_boolean(lambda s, a: a[None, :, :, None] == a[None, :, None, :], (torch.randint(0, 2, (3, 5)),),
                             (2, 3, 5, 5))
    assert not any(isinstance(a, Documents) for a in per_head[1])


def test_documents_by_float_ids_and_inequality() -> None:
    floats = check_boolean(lambda s, a: a[:, None, :5, None] == a[:, None, None, :], (IDS.float(),))
    assert isinstance(floats[1][0], Predicate)
    different = check_boolean(lambda s, a: a[:, None, :5, None] != a[:, None, None, :], (IDS,))
    assert isinstance(different[1][0], Predicate)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_prefix_and_unions(dynamic: bool) -> None:
    def prefix(s: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        q, k = qk(s)
        return (k <= q) | (k < n[:, None, None, None])

    def sinks(s: torch.Tensor) -> torch.Tensor:
        q, k = qk(s)
        return (k <= q) & ((k > q - 2) | (k < 1))

    proof, atoms = check_boolean(prefix, (torch.tensor([2, 4]),), dynamic=dynamic)
    assert isinstance(atoms[0], Predicate) and len(atoms) == 1 and proof.nonempty
    proof, atoms = check_boolean(sinks, dynamic=dynamic)
    assert atoms[0] == Band(None, 0) and isinstance(atoms[1], Predicate) and proof.nonempty


def test_scalar_tensor_offset_stays_at_run_time() -> None:
    def fn(s: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        q, k = qk(s)
        return k <= q + offset

    _, atoms = check_boolean(fn, (torch.tensor(1),))
    assert isinstance(atoms[0], Predicate)


@pytest.mark.parametrize("shape", [(5, 7), (1, 1, 5, 7), (2, 1, 5, 7), (2, 3, 5, 7), (1, 3, 5, 7), (3, 5, 7)])
def test_dense(shape: tuple[int, ...]) -> None:
    proof, atoms = check_boolean(lambda s, m: m, (torch.rand(shape) > 0.5,))
    assert atoms == (Dense(0),)
    assert not proof.nonempty


def test_dense_beside_causal() -> None:
    def fn(s: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        q, k = qk(s)
        return m & (k <= q)

    assert check_boolean(fn, (torch.rand(2, 1, 5, 7) > 0.5,))[1] == (Band(None, 0), Dense(0))


def test_gpt2_buffer_slice_is_dense() -> None:
    buffer = torch.ones(1, 1, 16, 16, dtype=torch.bool).tril()
    assert check_boolean(lambda s, m: m[:, :, 2 : 2 + s.shape[2], : s.shape[3]], (buffer,))[1] == (Dense(0),)


def test_contradiction_is_recognised() -> None:
    proof, atoms = check_boolean(of_positions(lambda q, k: (k <= q) & (k > q)))
    assert proof.always_false and not proof.nonempty and len(atoms) == 1
    proof, _ = check_boolean(of_positions(lambda q, k: (k < q - 1) & (k > q)), dynamic=True)
    assert proof.always_false


def test_nonempty_needs_the_first_key() -> None:
    assert check_boolean(of_positions(lambda q, k: k <= q))[0].nonempty
    assert not check_boolean(of_positions(lambda q, k: k < q))[0].nonempty
    assert not check_boolean(of_positions(lambda q, k: k <= q - 1), dynamic=True)[0].nonempty
    # more queries than keys: a window slides off the end of the keys
    slid = of_positions(lambda q, k: (k > q - 2) & (k <= q))
    assert not check_boolean(slid, sizes=(1, 1, 7, 4))[0].nonempty
    assert check_boolean(slid, sizes=(1, 1, 4, 7))[0].nonempty


def test_conjoin_merges_bands_and_proves_together() -> None:
    traced = trace(lambda s: torch.stack([ones(s).tril(), ones(s).triu(-1)]))
    index = [0, *traced.index[1:]] if len(traced.index) == 3 else traced.index
    first = prove_boolean(traced.ev, traced.node, [0, *index[-2:]])
    second = prove_boolean(traced.ev, traced.node, [1, *index[-2:]])
    both = conjoin(traced.ev, [first, second])
    atoms, _, _ = materialise(traced, both)
    assert atoms == (Band(-1, 0),)
    assert both.nonempty
    assert conjoin(traced.ev, []).always_true


def test_a_guard_of_the_graph_is_a_fact() -> None:
    """With Sq <= Sk guarded, the diagonal key exists in every row."""
    def fn(s: torch.Tensor) -> torch.Tensor:
        q, k = qk(s)
        assert s.shape[2] < s.shape[3]
        return (k > q - 2) & (k <= q)

    assert check_boolean(fn, dynamic=True)[0].nonempty
    assert not check_boolean(of_positions(lambda q, k: (k > q - 2) & (k <= q)), dynamic=True)[0].nonempty


def test_random_numbers_are_never_evaluated_twice() -> None:
    """An operator with a random result must stay one load of one node."""
    traced = trace(lambda s: torch.bernoulli(torch.full((s.shape[2], s.shape[3]), 0.5)) > 0.5)
    proof = prove_boolean(traced.ev, traced.node, traced.index)
    atoms, _, _ = materialise(traced, proof)
    assert atoms == (Dense(0),)
