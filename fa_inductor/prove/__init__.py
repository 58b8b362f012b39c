"""Mask proofs: what a mask or bias of the scores means, over batch, head, query and key.

Typical use, for one attention block whose scores are ``S[b, h, q, k]``::

    ev = Evaluator(Context(batch, heads, q_len, k_len))       # share over blocks of the same shape
    b, h, q, k = AXES
    proof = prove_additive(ev, mask_node, (b, 0, q, k))
    atoms, captures, ints = to_record(proof.atoms, Materialiser(graph, scores_node, ev))
"""
from . import index_ops, pointwise_ops, scan_ops  # noqa: F401  (they register the evaluation rules)
from .additive import MASK_THRESHOLD, AdditiveProof, MaskProof, conjoin, prove_additive, prove_boolean
from .atoms import (
    BandDraft,
    ChunkDraft,
    DenseDraft,
    DocumentsDraft,
    Draft,
    KeyPaddingDraft,
    PredicateDraft,
    classify,
)
from .evaluate import Context, Evaluator
from .materialise import Materialiser, to_program, to_record
from .relative import by_distance, distances
from .values import AXES, Undecided

__all__ = [
    "AXES", "MASK_THRESHOLD", "AdditiveProof", "BandDraft", "ChunkDraft", "Context", "DenseDraft", "DocumentsDraft",
    "Draft", "Evaluator", "KeyPaddingDraft", "MaskProof", "Materialiser", "PredicateDraft", "Undecided", "by_distance",
    "classify", "conjoin", "distances", "prove_additive", "prove_boolean", "to_program", "to_record",
]
