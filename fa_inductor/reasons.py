"""Why an attention block was not rewritten: a closed list of codes, each with a sentence for the user.

A guard or a recogniser returns ``Reason | None``; a bare bool never says why.  Adding a code is one member
here and one row in the test that produces it.
"""
from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Code(Enum):
    """Value: (stable code, sentence saying what stands in the way and what the user can do)."""

    # the graph is not softmax(QK^T)V
    NO_QK = ("FA101", "the softmax input is no product of queries and keys; nothing to do")
    NO_PV = ("FA102", "the softmax output is not multiplied with values; nothing to do")
    SOFTMAX_DIM = ("FA103", "the softmax runs over another dimension than the keys; check the dim argument of softmax")
    CONTRACTION = ("FA104", "the matrix products do not line up as QK^T and PV; check the permutations of Q, K and V")
    SCORE_OP = ("FA105", "an operation between QK^T and the softmax is not pointwise in the score")
    PROB_OP = ("FA106", "an operation between the softmax and PV changes the probabilities")
    SCORE_USED = ("FA107", "the scores are also used outside the attention block; return or store them only when needed")
    WEIGHTS_USED = ("FA108", "the attention weights are also used elsewhere; ask the model not to return them")
    DROPOUT = ("FA109", "attention dropout is active; set the model's attention dropout to 0 or call eval()")
    NOT_ATTENTION = ("FA110", "this softmax is a known construct that is not standard attention")
    MUTATION = ("FA111", "a tensor of the attention block is changed in place while it is still in use")
    # the record cannot be trusted or expressed
    SCALE = ("FA201", "the scale is not a finite constant")
    MASK_FILL = ("FA202", "masks with different fill values meet and a row could be masked as a whole")
    EMPTY_ROWS = ("FA203", "a fully masked row could exist and the chosen backend cannot give eager's answer for it")
    DTYPE_MIX = ("FA204", "Q, K and V have different dtypes")
    RANK = ("FA205", "the shapes do not resolve to batch, heads, length and head dim")
    INTEGER = ("FA206", "an integer tensor takes part in the softmax")
    COMPLEX = ("FA207", "the score program is too large to compile")
    # training
    BACKWARD = ("FA301", "the matching backward was not found in the joint graph")
    GRAD_CAPTURE = ("FA302", "a gradient for a mask or bias tensor is needed that the backend does not give")
    GRAD_LSE = ("FA303", "a gradient flows into the log-sum-exp")
    DOUBLE_BACKWARD = ("FA304", "a second derivative is taken through the attention")
    # the target does not fit
    DEVICE = ("FA401", "no kernel for this device")
    DTYPE = ("FA402", "the dtype is not supported by the kernels of this device")
    HEAD_DIM = ("FA403", "the head dimension is not supported by the kernels of this device")
    LAYOUT = ("FA404", "the layout of Q, K or V is not supported; their last dimension must be contiguous")
    FEATURE = ("FA405", "the record uses a feature that the kernels of this device lack")
    DSL_MISSING = ("FA406", "nvidia-cutlass-dsl is not installed; pip install 'fa_inductor[cu13]'")
    DSL_VERSION = ("FA407", "this version of nvidia-cutlass-dsl is not known to work")
    JIT = ("FA408", "a kernel failed to compile or to launch; please report the log")
    SLOWER = ("FA409", "on this device the compiler's own lowering is faster for this shape")
    AOT = ("FA410", "ahead-of-time compilation targets a process without Python")
    SIZE = ("FA411", "a size is zero or too large for the kernels")
    TENSOR_SUBCLASS = ("FA412", "a tensor subclass or an unsupported memory format takes part")
    # the user or the library decided
    LIMIT = ("FA501", "the rewrite limit (FA_INDUCTOR_MAX_REWRITES) is reached")
    VALIDATION = ("FA502", "the compile-time check of the rewrite failed; the block was left alone, please report it")
    INTERNAL = ("FA503", "an internal error; the block was left alone, please report it")

    @property
    def code(self) -> str:
        return self.value[0]

    @property
    def sentence(self) -> str:
        return self.value[1]


@dataclass(frozen=True)
class Reason:
    """One refusal: the code and, where it helps, the particular of this block."""

    code: Code
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.code.code} {self.code.sentence}" + (f" [{self.detail}]" if self.detail else "")


class Refusal(Exception):
    """Raised inside a station to leave a block alone; caught at the station's border."""

    def __init__(self, code: Code, detail: str = "") -> None:
        super().__init__(str(Reason(code, detail)))
        self.reason = Reason(code, detail)
