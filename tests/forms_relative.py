"""Biases that only the distance of key and query decides, and their nearest relatives that more does."""
from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Q, K, W = 11, 23, 40
"""Queries, keys and entries of a table: no other size of a form is one of them."""


def distance(q: Tensor, k: Tensor) -> Tensor:
    return torch.arange(k.shape[-2])[None, :] - torch.arange(q.shape[-2])[:, None]


def bucket(distance: Tensor, both: bool = True, count: int = 8, far: int = 20) -> Tensor:
    """Near distances have an entry each, farther ones share it by their logarithm, as in T5."""
    first: Tensor | int = 0
    if both:
        count //= 2
        first = (distance > 0).long() * count
        distance = distance.abs()
    else:
        distance = -torch.min(distance, torch.zeros_like(distance))
    near = count // 2
    log = near + (torch.log(distance.float() / near) / math.log(far / near) * (count - near)).long()
    return first + torch.where(distance < near, distance, torch.min(log, torch.full_like(log, count - 1)))


def heads_first(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1)[None]


def looked_up(q: Tensor, k: Tensor, w: Tensor, both: bool = True) -> Tensor:
    return heads_first(F.embedding(bucket(distance(q, k), both), w))


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) + bias).softmax(-1) @ v


def causal(q: Tensor, k: Tensor) -> Tensor:
    return distance(q, k) <= k.shape[-2] - q.shape[-2]


BIASES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "buckets": looked_up,
    "buckets of a causal model": lambda q, k, w: looked_up(q, k, w, both=False),
    "parameter": lambda q, k, w: heads_first(w[bucket(distance(q, k))]),
    "clipped": lambda q, k, w: heads_first(w[distance(q, k).clamp(-9, 9) + 9]),
    "each distance": lambda q, k, w: heads_first(w[distance(q, k) + q.shape[-2] - 1]),
    "absolute": lambda q, k, w: heads_first(w[distance(q, k).abs()]),
    "query minus key": lambda q, k, w: heads_first(F.embedding((-distance(q, k)).clamp(min=-3) + 3, w)),
    "from the end": lambda q, k, w: heads_first(w[distance(q, k)]),
    "scaled": lambda q, k, w: looked_up(q, k, w) * 0.37 + 0.5,
    "int32": lambda q, k, w: heads_first(F.embedding(distance(q, k).int() + Q, w)),
    "int32 that overflows": lambda q, k, w: heads_first(F.embedding(distance(q, k).int() * 400000007 % W, w)),
    "int8 that overflows": lambda q, k, w: heads_first(F.embedding(distance(q, k).to(torch.int8).mul(11).long() % W, w)),
    "remainder": lambda q, k, w: heads_first(F.embedding(distance(q, k) % 7, w)),
    "quotient": lambda q, k, w: heads_first(F.embedding(distance(q, k) // 4 + 5, w)),
    "square": lambda q, k, w: heads_first(F.embedding((distance(q, k) ** 2).clamp(max=30), w)),
    "a side each": lambda q, k, w: heads_first(torch.where(
        (distance(q, k) > 0)[..., None], F.embedding(distance(q, k).clamp(min=0), w),
        F.embedding((-distance(q, k)).clamp(min=0) + 3, w) * 2)),
    "take": lambda q, k, w: torch.take(w[:, 1], distance(q, k) + Q),
    "index_select": lambda q, k, w: heads_first(w.index_select(0, (distance(q, k) + Q).reshape(-1)).view(Q, K, 4)),
    "by head and distance": lambda q, k, w: w.t()[torch.arange(4)[:, None, None], distance(q, k) + Q],
    "padding_idx": lambda q, k, w: heads_first(F.embedding(distance(q, k) + Q, w, padding_idx=3)),
    "last rows": lambda q, k, w: looked_up(k, k, w)[:, :, -Q:],
    "counted": lambda q, k, w: heads_first(F.embedding(
        torch.ones(K, dtype=torch.long).cumsum(0) - torch.ones(Q, dtype=torch.long).cumsum(0)[:, None] + Q, w)),
    "entries replaced": lambda q, k, w: looked_up(
        q, k, w.index_put((torch.tensor([1, 4]),), torch.ones(2, 4, dtype=w.dtype))),
    "computed table": lambda q, k, w: looked_up(q, k, torch.tanh(w @ w[:4])),
    "table of indices": lambda q, k, w: heads_first(F.embedding((w[:, 0] * 4).long().abs().clamp(max=W - 1)[distance(q, k) + Q], w)),
    "shifts that overflow": lambda q, k, w: heads_first(F.embedding((distance(q, k) << 60 >> 59) % W, w)),
    "powers that overflow": lambda q, k, w: heads_first(F.embedding(
        (distance(q, k) * 262147) * (distance(q, k) * 262147) * (distance(q, k) * 262147) % W, w)),
    "a lower triangle": lambda q, k, w: looked_up(q, k, w).tril(),
    "some heads": lambda q, k, w: torch.where(
        torch.arange(4)[:, None, None] < 2, looked_up(q, k, w), torch.zeros((), dtype=w.dtype)),
    "entries of -inf": lambda q, k, w: looked_up(q, k, w.index_fill(0, torch.tensor([2]), -math.inf)),
    "a wave": lambda q, k, w: torch.sin(distance(q, k).to(w.dtype) / 3) * w[0][:, None, None],
}
NO_TABLES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sum": lambda q, k, w: heads_first(w[torch.arange(K) + torch.arange(Q)[:, None]]),
    "two queries a key": lambda q, k, w: heads_first(F.embedding(
        (torch.arange(K) - 2 * torch.arange(Q)[:, None] + 2 * Q) // 2, w)),
    "buckets before the difference": lambda q, k, w: heads_first(F.embedding(
        torch.arange(K) // 4 - torch.arange(Q)[:, None] // 4 + Q, w)),
    "positions that repeat": lambda q, k, w: heads_first(F.embedding(
        torch.arange(K) % 7 - torch.arange(Q)[:, None] % 7 + 7, w)),
    "keys from behind": lambda q, k, w: heads_first(F.embedding(distance(q, k) + Q, w)).flip(-1),
    "no bias on the first keys": lambda q, k, w: F.pad(looked_up(q, k[:, :, 3:], w), (3, 0)),
    "no bias on the last queries": lambda q, k, w: F.pad(looked_up(q[:, :, 2:], k, w), (0, 0, 0, 2)),
    "columns in front": lambda q, k, w: torch.cat([torch.ones(1, 4, Q, 3), looked_up(q, k[:, :, 3:], w)], -1),
    "a query of its own": lambda q, k, w: torch.cat([looked_up(q[:, :, :1], k, w) * 0, looked_up(q, k, w)[:, :, 1:]], 2),
    "exclusive or": lambda q, k, w: heads_first(F.embedding(torch.arange(K) ^ torch.arange(Q)[:, None], w)),
    "one of the keys as well": lambda q, k, w: looked_up(q, k, w) + F.embedding(torch.arange(K), w).t()[:, None],
    "positions in int8": lambda q, k, w: heads_first(F.embedding(
        ((torch.arange(K) * 20).to(torch.int8) - (torch.arange(Q) * 20).to(torch.int8)[:, None]).long() % W, w)),
    "columns moved round": lambda q, k, w: looked_up(q, k, w).roll(2, -1),
    "one index more": lambda q, k, w: w.t()[torch.arange(Q)[:, None] // 3, distance(q, k) + Q],
}


def in_place_index(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    i = distance(q, k) + Q
    i[0, 5] = 1
    return heads_first(F.embedding(i, w))


def in_place_bias(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    b = heads_first(F.embedding(distance(q, k) + Q, w)).contiguous()
    b[:, :, 0] = 0
    return b


NO_TABLES |= {"an index replaced": in_place_index, "a row replaced": in_place_bias}
