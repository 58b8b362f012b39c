"""The `Attention` record: what one attention block computes, independent of how it was written.

Recogniser, prover, guards, rewriting, operators and kernels all speak this record and nothing else.  It is
frozen, has no torch object in it and travels through compiled graphs as a JSON string.

Meaning, for ``q [B, Hq, Sq, D]``, ``k [B, Hkv, Sk, D]``, ``v [B, Hkv, Sk, Dv]`` and ``g = Hq // Hkv``::

    s[b,h,q,k] = score(scale * sum_d Q[b,h,q,d] K[b,h//g,k,d])      in float32
    s          = fill   where any atom of ``mask`` is false
    p          = softmax_k(s)      (``sink``: one more column exp(sink[h]) in the denominator only)
    out        = sum_k p V[b,h//g,k,:]                              cast to ``dtype``
    lse[b,h,q] = log sum_k exp(s)  (sink included)                  float32

Symbolic integers (`Sym`) index the operator's ``ints`` argument, captures its ``captures`` argument.
"""
from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from . import expr as ex
from .expr import SCORE, Expr

FORMAT = 1

EmptyRows = Literal["never", "nan", "mean", "zero"]
"""What a row with every key masked gives: proven not to exist, NaN (fill -inf in eager code), the mean of V
over all Sk keys (finite fill), zero (PyTorch SDPA)."""

Layout = Literal["bhsd", "bshd"]
"""Memory order of the output; its logical shape is always [B, Hq, Sq, Dv]."""


@dataclass(frozen=True, slots=True)
class Sym:
    """The i-th run-time integer of the operator's ``ints``."""

    i: int


SInt = int | Sym


@dataclass(frozen=True, slots=True)
class Band:
    """``q + lo <= k <= q + hi``; None is unbounded.  Causal is ``hi``, a sliding window is ``lo``."""

    lo: SInt | None
    hi: SInt | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """``k // size == (q + offset) // size``: attention inside chunks of the key axis."""

    size: SInt
    offset: SInt = 0


@dataclass(frozen=True, slots=True)
class KeyPadding:
    """Capture ``[B or 1, Sk]`` bool, true where the key may be attended to; gaps and left padding are legal."""

    capture: int


@dataclass(frozen=True, slots=True)
class Documents:
    """Captures ``[B or 1, Sq]`` and ``[B or 1, Sk]`` integer: ids must be equal."""

    q: int
    k: int


@dataclass(frozen=True, slots=True)
class Dense:
    """Capture bool, broadcastable to ``[B, Hq, Sq, Sk]``, true where attended to."""

    capture: int


@dataclass(frozen=True, slots=True)
class Predicate:
    """A boolean score program over indices, syms and captures (no score): prefix-LM, unions, negations."""

    expr: Expr


Atom = Band | Chunk | KeyPadding | Documents | Dense | Predicate
_ATOMS: dict[str, type] = {c.__name__: c for c in (Band, Chunk, KeyPadding, Documents, Dense, Predicate)}


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention block.  Batch and sequence lengths are not in it: they come from the tensors."""

    q_heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str
    """dtype of q, k, v and out: ``float32``, ``bfloat16``, ``float16`` or ``float64``."""
    scale: float
    """Multiplies QK^T before ``score``; any finite value, zero and negative ones included."""
    score: Expr = SCORE
    mask: tuple[Atom, ...] = ()
    fill: float = float("-inf")
    """Score of a masked position: -inf, or the finite value that the user's code put or added there.
    A finite fill is at most -3e4, so it only shows in rows that are masked as a whole (``empty_rows``)."""
    fill_mode: Literal["add", "replace"] = "add"
    """Whether the fill is added to the score (the score keeps its gradient) or takes its place.  Only the gradient
    of a row that is masked as a whole depends on it."""
    empty_rows: EmptyRows = "never"
    sink: int | None = None
    """Capture ``[Hq]``: learned logit that takes part in the softmax but has no value row."""
    grads: tuple[int, ...] = ()
    """Captures (float bias or sink) whose gradient the backward operator returns, in this order."""
    layout: Layout = "bshd"

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.q_heads % self.kv_heads:
            raise ValueError(f"{self.q_heads} query heads are not a multiple of {self.kv_heads} key heads")
        if self.fill > -3e4:
            raise ValueError(f"fill {self.fill} is not a mask; it belongs in the score program")

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.q_heads // self.kv_heads

    def bias(self) -> int | None:
        """Capture i when the score program is exactly ``score + capture_i``; None otherwise."""
        if self.score.op == "add":
            a, b = self.score.args
            for x, y in ((a, b), (b, a)):
                while y.op == "cast" and y.args[1] in ("float32", "float64"):
                    y = y.args[0]
                if x == SCORE and y.op == "load":
                    return int(y.args[0])
        return None

    def with_(self, **changes: Any) -> Attention:
        return replace(self, **changes)

    def to_string(self) -> str:
        """Canonical JSON: equal records give equal strings."""
        data: dict[str, Any] = {
            "format": FORMAT, "heads": [self.q_heads, self.kv_heads], "dims": [self.head_dim, self.head_dim_v],
            "dtype": self.dtype, "scale": repr(self.scale), "score": ex.to_json(self.score),
            "mask": [_atom_json(a) for a in self.mask], "fill": repr(self.fill), "fill_mode": self.fill_mode,
            "empty": self.empty_rows,
            "sink": self.sink, "grads": list(self.grads), "layout": self.layout,
        }
        return json.dumps(data, sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_string(text: str) -> Attention:
        """Inverse of `to_string`.

        Raises:
            ValueError: the text is no record, or of another format version.
        """
        return _parse(text)

    def describe(self) -> str:
        """In words: ``causal, window 4096, GQA 32/8, d128, bf16``."""
        words = [w for a in self.mask for w in _atom_words(a)] or ["no mask"]
        if self.score != SCORE:
            words.append("bias" if self.bias() is not None else f"score {self.score}")
        if self.sink is not None:
            words.append("sink")
        hq, hk = self.q_heads, self.kv_heads
        words.append(f"MHA {hq}" if hq == hk else f"{'MQA' if hk == 1 else 'GQA'} {hq}/{hk}")
        words.append(f"d{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v != self.head_dim else ""))
        words.append({"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}.get(self.dtype, self.dtype))
        return ", ".join(words)


@lru_cache(maxsize=1024)
def _parse(text: str) -> Attention:
    try:
        d = json.loads(text)
        if d["format"] != FORMAT:
            raise ValueError(f"attention record of format {d['format']}, this version reads {FORMAT}")
        return Attention(
            q_heads=d["heads"][0], kv_heads=d["heads"][1], head_dim=d["dims"][0], head_dim_v=d["dims"][1],
            dtype=d["dtype"], scale=float(d["scale"]), score=ex.from_json(d["score"]),
            mask=tuple(_atom_from_json(a) for a in d["mask"]), fill=float(d["fill"]), fill_mode=d["fill_mode"], empty_rows=d["empty"],
            sink=d["sink"], grads=tuple(d["grads"]), layout=d["layout"],
        )
    except (KeyError, TypeError, IndexError, json.JSONDecodeError) as e:
        raise ValueError(f"not an attention record: {text[:80]!r} ({e})") from e


def _sint_words(x: SInt | None) -> str:
    return f"n{x.i}" if isinstance(x, Sym) else str(x)


def _atom_words(atom: Atom) -> list[str]:
    match atom:
        case Band(lo=lo, hi=hi):
            words = []
            if hi is not None:
                words.append("causal" if hi == 0 else f"causal{'+' if isinstance(hi, Sym) or hi > 0 else ''}{_sint_words(hi)}")
            if lo is not None:
                if isinstance(lo, int) and (hi == 0 or hi is None):
                    words.append(f"window {1 - lo}")
                else:
                    words.append(f"window from q{'+' if isinstance(lo, Sym) or lo >= 0 else ''}{_sint_words(lo)}")
            return words
        case Chunk(size=size):
            return [f"chunk {_sint_words(size)}"]
        case KeyPadding():
            return ["key padding"]
        case Documents():
            return ["documents"]
        case Dense():
            return ["mask tensor"]
        case Predicate(expr=e):
            return [f"where {e}"]


def _atom_json(atom: Atom) -> list[Any]:
    def enc(x: Any) -> Any:
        if isinstance(x, Sym):
            return {"sym": x.i}
        return ex.to_json(x) if isinstance(x, Expr) else x

    return [type(atom).__name__, *(enc(getattr(atom, f)) for f in type(atom).__dataclass_fields__)]


def _atom_from_json(data: list[Any]) -> Atom:
    def dec(x: Any) -> Any:
        if isinstance(x, dict):
            return Sym(x["sym"])
        return ex.from_json(x) if isinstance(x, list) else x

    return _ATOMS[data[0]](*(dec(x) for x in data[1:]))
