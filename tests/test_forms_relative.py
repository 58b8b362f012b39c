"""A bias that only the distance of key and query decides is a table by distance; one that is nearly that is none."""
from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from forms_relative import BIASES, NO_TABLES, K, Q, W, attend, causal, distance, heads_first, looked_up
from forms_support import MODES, Arg, Compiled, args, check
from torch import Tensor
from torch.nn import functional as F

from fa_inductor.kernels.expr import MARGIN
from fa_inductor.kernels.record import Attention

SIZES = {"b": 2, "h": 4, "n": 2, "q": Q, "k": K, "s": 13, "d": 8, "w": W}
TABLE = Arg("wh", "const")
ATTENTION = "fa_inductor.attention.default"


def calls(compiled: Compiled) -> list[Any]:
    return [n for g in compiled.graphs for n in g.graph.nodes if str(n.target) == ATTENTION]


def tables(compiled: Compiled) -> list[Any]:
    """The table that each block reads, None where it reads none."""
    found: list[Any] = []
    for n in calls(compiled):
        relative = Attention.from_string(n.args[5]).score.relative()
        found += [n.args[3][i] for i in relative] or [None]
    return found


def both_lengths(compiled: Compiled) -> list[str]:
    """Tensors of the compiled graphs that have a dimension of queries and one of keys."""
    lengths = {tuple(str(n.args[i].meta["val"].shape[2]) for i in (0, 1)) for n in calls(compiled)}
    found = []
    for g in compiled.graphs:
        for n in g.graph.nodes:
            shape = list(map(str, n.meta["val"].shape)) if isinstance(n.meta.get("val"), Tensor) else []
            found += [n.name for r, k in lengths if r in shape and k in shape and (r != k or shape.count(r) > 1)]
    return found


def judged(fn, spec, mode: str = "infer", count: int = 1, expect: int = 1, dtype=torch.float64, **more) -> Compiled:
    """`check` without the pass's own validation, in float64: ours is eager's to rounding.

    Args:
        count: so many tables, one at least for each block and nothing of Sq x Sk; 0: no block has one.
        expect: so many blocks.
    """
    compiled = check(fn, spec, **MODES[mode], expect=expect, dtype=dtype, validate=False, **{"sizes": SIZES, **more})
    found = tables(compiled)
    assert len(found) == expect and (None in found) == (count == 0) and len(set(found) - {None}) == count, found
    if count:
        assert not both_lengths(compiled)
    for n, x in zip(calls(compiled), found, strict=True):
        if x is not None and "dynamic" not in mode:
            rows, keys = (n.args[i].meta["val"].shape[2] for i in (0, 1))
            assert x.meta["val"].shape[2:] == (1, rows + keys - 1 + 2 * MARGIN)
    return compiled


INPUTS = args("bhqd bhkd bhkd", TABLE)


@pytest.mark.parametrize("name", BIASES)
def test_table(name):
    judged(lambda q, k, v, w: attend(q, k, v, BIASES[name](q, k, w)), INPUTS)


@pytest.mark.parametrize("name", NO_TABLES)
def test_no_table(name):
    judged(lambda q, k, v, w: attend(q, k, v, NO_TABLES[name](q, k, w)), INPUTS, count=0)


@pytest.mark.parametrize("name", ["buckets", "parameter", "from the end"])
def test_table_beside_gradients_of_the_rest(name):
    judged(lambda q, k, v, w: attend(q, k, v, BIASES[name](q, k, w)), INPUTS, "train")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_table_in_a_dtype(dtype):
    judged(lambda q, k, v, w: attend(q, k, v, looked_up(q, k, w)), INPUTS, dtype=getattr(torch, dtype))


@pytest.mark.parametrize("mode", ["infer-dynamic", "train-dynamic"])
@pytest.mark.parametrize("name", ["buckets", "parameter", "clipped", "last rows"])
def test_table_of_other_lengths(name, mode):
    def fn(q, k, v, w):
        if name == "last rows":
            return attend(q, k, v, looked_up(k, k, w)[:, :, -q.shape[2]:])
        return attend(q, k, v, BIASES[name](q, k, w))

    judged(fn, INPUTS, mode)


@pytest.mark.parametrize("mode", ["infer", "infer-dynamic"])
def test_table_of_one_length(mode):
    judged(lambda q, k, v, w: attend(q, k, v, looked_up(q, k, w)), args("bhsd bhsd bhsd", TABLE), mode)


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_decoding_reads_a_row(mode):
    """One query: its bias is a row over the keys, as small as a table."""
    def decode(q, k, v, w):
        return attend(q, k, v, looked_up(k, k, w, both=False)[:, :, -1:])

    compiled = judged(decode, args("bh1d bhkd bhkd", TABLE), mode, count=0)
    assert [n.args[3][0].meta["val"].shape for n in calls(compiled)] == [(1, 4, 1, K)]


def causal_fill(q, k, v, w):
    hidden = torch.full((Q, K), torch.finfo(w.dtype).min, dtype=w.dtype).triu(K - Q + 1)
    return attend(q, k, v, looked_up(q, k, w, both=False) + hidden)


def causal_where(q, k, v, w):
    return attend(q, k, v, torch.where(causal(q, k), looked_up(q, k, w, both=False), -math.inf))


def window(q, k, v, w):
    s = q @ k.transpose(-1, -2) + looked_up(q, k, w)
    return s.masked_fill(distance(q, k).abs() > 6, -math.inf).softmax(-1) @ v


def softcap(q, k, v, w):
    return (5 * torch.tanh(q @ k.transpose(-1, -2) / 5) + looked_up(q, k, w)).softmax(-1) @ v


def sdpa(q, k, v, w):
    return F.scaled_dot_product_attention(q, k, v, looked_up(q, k, w))


def reused(q, k, v, w):
    b = looked_up(q, k, w)
    return (q @ k.transpose(-1, -2) + b + b).softmax(-1) @ v


def padded_keys(q, k, v, w):
    """The first keys are hidden, so that the others begin at position 0."""
    return attend(q, k, v, F.pad(looked_up(q, k[:, :, 3:], w), (3, 0), value=-math.inf))


BESIDE = {f.__name__: f for f in (causal_fill, causal_where, window, softcap, sdpa, reused, padded_keys)}


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("name", BESIDE)
def test_table_beside(name, mode):
    judged(BESIDE[name], INPUTS, mode)


@pytest.mark.parametrize("mode", ["infer", "train", "infer-dynamic"])
def test_table_beside_padding(mode):
    def fn(q, k, v, w, seen):
        hidden = (1.0 - seen[:, None, None, :].to(w.dtype)) * torch.finfo(w.dtype).min
        return attend(q, k, v, looked_up(q, k, w) + hidden)

    judged(fn, args("bhqd bhkd bhkd", TABLE, Arg("bk", "keep")), mode)


def test_table_times_a_factor_of_the_batch():
    def fn(q, k, v, w, factor):
        return attend(q, k, v, looked_up(q, k, w) * factor[:, None, None, None])

    compiled = judged(fn, args("bhqd bhkd bhkd", TABLE, Arg("b", "const")))
    (table,) = tables(compiled)
    assert table.meta["val"].shape[:2] == (2, 4)


def test_grouped_heads():
    def fn(q, k, v, w):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        return attend(q, k, v, looked_up(q, k, w))

    judged(fn, args("bhqd bnkd bnkd", TABLE))


@pytest.mark.parametrize("mode", MODES)
def test_layers_share_a_table(mode):
    def model(q, k, v, w):
        b = looked_up(q, k, w)
        for _ in range(3):
            q = q + attend(q, k, v, b)
        return q

    judged(model, INPUTS, mode, expect=3)


def test_layers_that_look_up_again_share_a_table():
    def model(q, k, v, w):
        for _ in range(2):
            q = q + attend(q, k, v, looked_up(q, k, w))
        return q

    compiled = check(model, INPUTS, train=False, dynamic=False, expect=2, dtype=torch.float64, sizes=SIZES)
    assert None not in tables(compiled) and not both_lengths(compiled)


def test_two_lengths_have_a_table_each():
    def model(q, k, v, w):
        q = attend(q, k, v, looked_up(q, k, w))
        k, v = k[:, :, :17], v[:, :, :17]
        return attend(q, k, v, looked_up(q, k, w))

    judged(model, INPUTS, count=2, expect=2)


def test_cross_attention_after_self_attention():
    def model(q, k, v, w):
        q = attend(q, q, q, looked_up(q, q, w, both=False))
        return attend(q, k, v, looked_up(q, k, w))

    judged(model, INPUTS, count=2, expect=2)


def test_a_table_changed_between_two_blocks():
    def model(q, k, v, w):
        w = w.clone()
        first = attend(q, k, v, looked_up(q, k, w))
        w.mul_(2.0)
        w[1] = 1.0
        return first, attend(q, k, v, looked_up(q, k, w))

    judged(model, INPUTS, count=2, expect=2)


def test_an_index_changed_between_two_blocks():
    def model(q, k, v, w):
        i = distance(q, k) + Q
        first = attend(q, k, v, heads_first(F.embedding(i, w)))
        i.add_(2)
        return first, attend(q, k, v, heads_first(F.embedding(i, w)))

    judged(model, INPUTS, count=2, expect=2)


def test_the_input_changed_after_the_block():
    """The caller's table is changed, and the block has read what it held before."""
    def model(q, k, v, w):
        w = w.clone()
        view = w[:]
        out = attend(q, k, v, looked_up(q, k, w))
        view.add_(1.0)
        return out, w

    judged(model, INPUTS)


def test_norms_limited_in_place():
    def fn(q, k, v, w):
        w = w.clone()
        return attend(q, k, v, heads_first(F.embedding(distance(q, k) + Q, w, max_norm=0.5))), w

    compiled = check(fn, INPUTS, train=False, dynamic=False, expect=1, dtype=torch.float64, sizes=SIZES, validate=False)
    assert None not in tables(compiled)


def test_positions_of_the_caller_are_no_table():
    def fn(q, k, v, w, pq, pk):
        return attend(q, k, v, F.embedding(pk[:, None, :] - pq[:, :, None] + 4, w).permute(0, 3, 1, 2))

    judged(fn, args("bhqd bhkd bhkd", TABLE, Arg("bq", "int"), Arg("bk", "int")), count=0)


@pytest.mark.parametrize("mode", ["train", "train-dynamic"])
@pytest.mark.parametrize("name", ["buckets", "parameter", "from the end"])
def test_a_table_that_is_trained_stays_a_tensor(name, mode):
    """Its gradient is summed by the user's own derivative of the look-up; several blocks add to it."""
    def model(q, k, v, w):
        b = BIASES[name](q, k, w)
        for _ in range(2):
            q = q + attend(q, k, v, b)
        return q

    judged(model, args("bhqd bhkd bhkd wh"), mode, count=0, expect=2)


@pytest.mark.parametrize("mode", ["infer", "train", "train-dynamic"])
@pytest.mark.parametrize("kind", ["const", "float"])
@pytest.mark.parametrize("shape", ["qkh", "bqkh"])
@pytest.mark.parametrize("late", [False, True])
def test_a_tensor_with_heads_side_by_side(late, shape, kind, mode):
    """Both blocks read one copy with keys side by side; when the second output comes first, it is made before that."""
    def model(q, k, v, t):
        b = t.movedim(-1, -3)
        first, second = (q @ k.transpose(-1, -2) * c + b for c in (1.0, 0.5))
        first, second = first.softmax(-1), second.softmax(-1)
        if late:
            second = second @ v
            return first @ v, second
        return first @ v, second @ v

    compiled = judged(model, args("bhqd bhkd bhkd", Arg(shape, kind)), mode, count=0, expect=2)
    read = [n.args[3][0] for n in calls(compiled)]
    assert all(x.meta["val"].stride(3) == 1 for x in read)
    assert late or read[0] is read[1]
