"""Importing the package: no torch, no kernel compiler, no GPU, and hardly any time."""
import statistics

CLOCK = """
import time
start = time.perf_counter()
import torch
torch_done = time.perf_counter()
import fa_inductor
print(time.perf_counter() - torch_done)
"""


def test_import_brings_neither_torch_nor_the_kernel_compiler(python):
    code = "import sys, fa_inductor; print([m for m in ('torch', 'cutlass', 'tvm_ffi', 'sympy') if m in sys.modules])"
    assert python(code).stdout.strip() == "[]"


def test_enable_and_compile_do_not_import_the_kernel_compiler(python):
    code = """
import sys, torch, fa_inductor
fa_inductor.enable()
f = torch.compile(lambda q, k, v: torch.softmax(q @ k.mT * 0.25, -1) @ v)
f(*(torch.randn(1, 2, 16, 16) for _ in range(3)))
print([m for m in ("cutlass", "tvm_ffi") if m in sys.modules], fa_inductor.report().found)
"""
    assert python(code).stdout.strip() == "[] 1"


def test_import_without_the_kernel_compiler_and_without_a_gpu(python):
    """Packages set to None in sys.modules cannot be imported."""
    code = """
import sys
for name in ("cutlass", "tvm_ffi", "cuda", "triton"):
    sys.modules[name] = None
import fa_inductor
fa_inductor.enable()
fa_inductor.disable()
print(fa_inductor.__version__)
"""
    assert python(code, CUDA_VISIBLE_DEVICES="").stdout.strip() == "0.1.0"


def test_import_adds_less_than_100_ms_to_torch(python):
    """Measured: 12 ms on two shared cores (median of 5); the bound leaves room for a busy machine."""
    assert statistics.median(float(python(CLOCK).stdout) for _ in range(5)) < 0.1


def test_the_public_names(python):
    code = "import fa_inductor, torch; torch.compile; print(sorted(n for n in fa_inductor.__all__))"
    assert python(code).stdout.strip() == str(
        ["__version__", "disable", "enable", "enabled", "explain", "options", "report"])


def test_the_public_functions_are_not_hidden_by_modules_of_the_same_name(python):
    """`report`, `explain` and `options` are files too; importing a file must not put it in the function's place."""
    code = """
import fa_inductor, fa_inductor.report, fa_inductor.explain, fa_inductor.options
from fa_inductor.report import Block
fa_inductor.enable()
print(callable(fa_inductor.report), callable(fa_inductor.explain), fa_inductor.options.target)
"""
    assert python(code).stdout.split() == ["True", "True", "auto"]
