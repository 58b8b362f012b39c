"""A softmax without a row maximum: numbers beside the scores that ``exp`` makes 0 or infinite.

Where all keys of a row get such a number, eager code divides 0 by 0.  The operators subtract the maximum and give
something finite.  Scores and the user's own tensors are taken to stay in range; what the program itself writes down is
looked at.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..kernels.expr import READS, Expr
from ..prove import AdditiveProof
from ..prove.values import Apply, Cast, Const, Indicator, Load, Select

EXP_RANGE = 80.0
"""``exp`` of a number of this size is finite and not 0 in float32."""
_BOUNDED = {"tanh", "sigmoid", "sin", "cos"}


def of_proof(proof: AdditiveProof) -> float:
    """Size that the constants of an operand may give it, its mask's fills included."""
    return max(of_tree(proof.residual), *map(_finite, proof.fills), 0.0)


def of_tree(t: Any) -> float:
    """Size of a value for its constants alone, every tensor in it taken to be of size 1; 0 for None."""
    match t:
        case bool():
            return 0.0
        case int() | float():
            return _finite(t)
        case Const(value=v):
            return _finite(v)
        case Load():
            return 1.0
        case Select(a=a, b=b):
            return max(of_tree(a), of_tree(b))
        case Cast(expr=p):
            flags = (abs(c) for m, c in p.terms.items() if all(isinstance(atom, Indicator) for atom, _ in m))
            return max(1.0, float(sum(flags)))
        case Apply(target=op, args=args, kwargs=kwargs):
            name = getattr(getattr(op, "overloadpacket", None), "__name__", "")
            return _combined(name, [of_tree(a) for a in (*args, *(v for _, v in kwargs))])
    return 0.0


def of_program(e: Expr, loads: Mapping[int, float]) -> float:
    """The same of a score program, in which the score itself counts as 0; ``loads`` are the sizes of its captures."""
    if e.op == "const":
        return 0.0 if isinstance(e.args[0], bool) else _finite(e.args[0])
    if e.op in READS:
        return loads.get(e.args[0], 1.0)
    parts = [of_program(a, loads) for a in e.args[e.op == "where":] if isinstance(a, Expr)]
    return _combined(e.op, parts)


def _combined(name: str, parts: list[float]) -> float:
    if not parts:
        return 0.0
    if name in ("add", "sub", "rsub"):
        return sum(parts)
    if name == "mul":
        return math.prod(parts)
    if name == "div":
        return parts[0] / parts[1] if parts[1] else parts[0]
    return min(1.0, max(parts)) if name in _BOUNDED else max(parts)


def _finite(x: float) -> float:
    """-inf is 0 after ``exp`` in the operators as well."""
    return abs(float(x)) if math.isfinite(x) else 0.0
