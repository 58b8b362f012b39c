"""Calls from generated code that pass the operator by: where they are made, what they give, when the operator is called.

A function of Python computes what the kernel would, on the CPU.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from host_stand_in import stand_in
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

import fa_inductor
import fa_inductor.ops as ops
from fa_inductor.backends import dispatch
from fa_inductor.kernels.record import Attention, Band
from fa_inductor.kernels.sm90.variant import Forward
from fa_inductor.ops import direct, library
from fa_inductor.options import options

PADDING, SCALE, LO, HI = 5, 21, 23, 24
"""Places of a kernel's arguments."""
CAUSAL = Attention(4, 4, 64, 64, "bfloat16", 0.125, mask=(Band(None, 0),))


class Kernel:
    """Counts launches; what it computes follows from its arguments alone."""

    def __init__(self) -> None:
        self.launches = 0
        self.error: Exception | None = None

    def of(self, variant: Forward) -> Callable[..., None]:
        def run(*args: Any) -> None:
            if self.error is not None:
                raise self.error
            self.launches += 1
            q, k, v, out, lse = args[:5]
            group = q.shape[1] // k.shape[1]
            s = q.float() @ k.float().repeat_interleave(group, 1).transpose(-1, -2) * args[SCALE]
            i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
            seen = (j >= i + args[LO]) & (j <= i + args[HI])
            if args[PADDING] is not None:
                seen = seen & (args[PADDING] != 0)[:, None, None, :]
            s = s.masked_fill(~seen, -math.inf)
            out.copy_(torch.softmax(s, -1) @ v.float().repeat_interleave(group, 1))
            if lse.shape[2]:
                lse.copy_(torch.logsumexp(s, -1))

        return run


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    found = Kernel()
    ops.forget()
    dispatch.forget_failures()
    with stand_in(found.of), config.patch(force_disable_caches=True):
        yield found
    ops.forget()
    dispatch.forget_failures()


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Blocks for which the operator was called by `direct`."""
    found: list[str] = []
    original = direct.operator

    def count(*args: Any) -> Any:
        found.append(args[-1])
        return original(*args)

    monkeypatch.setattr(direct, "operator", count)
    return found


def operands(seed: int = 0, rows: int = 40, heads: int = 4, kv: int = 4, **kw: Any) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(2, h, rows, 64, generator=g, dtype=torch.bfloat16).requires_grad_(kw.get("grad", False))
            for h in (heads, kv, kv)]


def compiled(code: Callable[..., Tensor], *args: Tensor, **kw: Any) -> Any:
    """Rewritten on a CPU as for a GPU: the choice of the reference rewrites everything, and holds for this call alone."""
    torch._dynamo.reset()
    made = torch.compile(code, **kw)
    with fa_inductor.enabled(), options.patch(backend="reference"):
        made(*args)
    return made


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    for _ in range(3):
        q = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return q * 2


def padded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    for _ in range(2):
        q = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :], enable_gqa=True) + 1
    return q


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a.float(), b.float(), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_graph_calls_the_kernels_without_the_operator(kernel: Kernel, operator: list[str], dynamic: bool) -> None:
    first = operands()
    if dynamic:
        for x in first:
            torch._dynamo.mark_dynamic(x, 2)
    model = compiled(causal, *first)
    assert len(operator) == 3 and kernel.launches == 0  # the reference ran
    model(*operands())  # the kernels, for the first time
    operator.clear()
    for seed in range(1, 5):
        args = operands(seed)
        close(model(*args), causal(*args))
        assert kernel.launches == 3 * (seed + 1)
    assert not operator
    if dynamic:
        for rows in (40, 33, 64):
            args = operands(rows=rows)
            close(model(*args), causal(*args))
        assert operator
        operator.clear()
        for rows in (33, 40, 64):
            args = operands(1, rows)
            close(model(*args), causal(*args))
        assert not operator


def test_padding_and_groups(kernel: Kernel, operator: list[str]) -> None:
    mask = torch.ones(2, 40, dtype=torch.bool)
    args = operands(kv=2)
    model = compiled(padded, *args, mask)
    model(*args, mask)
    operator.clear()
    for last in (40, 17, 31):
        mask = (torch.arange(40).expand(2, 40) < last).contiguous()
        q, k, v = args
        close(model(q, k, v, mask), padded(q, k, v, mask))
    assert not operator and kernel.launches == 8


def test_training(kernel: Kernel, operator: list[str]) -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (causal_once(q * 2, k, v) + 1).float().square().sum()

    model: Any = compiled(loss, *operands(grad=True))
    model(*operands(grad=True)).backward()
    operator.clear()
    for seed in range(3):
        mine, theirs = operands(seed, grad=True), operands(seed, grad=True)
        model(*mine).backward()
        loss(*theirs).backward()
        for x, y in zip(mine, theirs, strict=True):
            assert x.grad is not None and y.grad is not None
            scale = float(y.grad.float().abs().max())
            torch.testing.assert_close(x.grad.float() / scale, y.grad.float() / scale, atol=3e-2, rtol=0.0)
    assert not operator and kernel.launches == 4


def test_generated_code(kernel: Kernel) -> None:
    torch._dynamo.reset()
    with fa_inductor.enabled(), options.patch(backend="reference"), torch.no_grad():
        _, (code,) = run_and_get_code(torch.compile(causal), *operands())
    assert code.count("= fa_inductor_attention(") == 3 and code.count("import attention as fa_inductor_attention") == 1
    assert "torch.ops.fa_inductor.attention.default(" not in code
    calls = [line for line in code.splitlines() if "= fa_inductor_attention(" in line]
    assert all(line.endswith(", False)") for line in calls)  # nothing reads lse


def test_lse_is_made_where_it_is_read(kernel: Kernel, operator: list[str]) -> None:
    text = CAUSAL.to_string()

    def code(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.fa_inductor.attention(q, k, v, [], [], text, "read")
        return torch.ops.fa_inductor.attention(out, k, v, [], [], text, "not read")[0] + 1, lse * 2

    from fa_inductor.ops.generated import install

    install()
    args = operands()
    with torch.no_grad():
        torch._dynamo.reset()
        model: Any = torch.compile(code)
        for _ in range(3):
            for x, y in zip(model(*args), code(*args), strict=True):
                close(x, y)
        _, (written,) = run_and_get_code(torch.compile(code), *args)
    assert written.count("'read')") == 1 and written.count("'not read', False)") == 1


def test_a_result_without_lse(kernel: Kernel) -> None:
    args = operands()
    out, lse = call(args)
    for _ in range(3):
        got, none = direct.attention(*args, [], [], CAUSAL.to_string(), "b", False)
        assert none is None and torch.equal(got, out)
        got, again = call(args)
        assert again is not None and torch.equal(got, out) and torch.equal(again, lse)
    assert kernel.launches == 7


def test_in_a_branch_of_a_condition(kernel: Kernel, operator: list[str]) -> None:
    """The import is written where the branch's code can see it."""
    from fa_inductor.ops.generated import install

    install()
    text = CAUSAL.to_string()

    def branch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.fa_inductor.attention(q, k, v, [], [], text, "branch")[0] + 1

    def other(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q + 2).transpose(1, 2).contiguous().transpose(1, 2)

    def code(yes: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cond(yes, branch, other, (q, k, v))

    args = operands()
    torch._dynamo.reset()
    with torch.no_grad():
        model = torch.compile(code)
        for yes in (True, False, True):
            close(model(torch.tensor(yes), *args), branch(*args) if yes else args[0] + 2)
    assert operator == ["branch"]


def call(args: list[Tensor], block: str = "b", record: str = CAUSAL.to_string()) -> tuple[Tensor, Tensor]:
    q, k, v = args
    return direct.attention(q, k, v, [], [], record, block)


def test_each_block_is_announced(kernel: Kernel) -> None:
    args = operands()
    for block in ("one", "two", "two", "one"):
        call(args, block)
    assert list(ops.seen_blocks()) == ["one", "two"]
    ops.forget()
    call(args, "one")
    assert list(ops.seen_blocks()) == ["one"]


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_the_backend_option_holds_at_once(kernel: Kernel, operator: list[str], backend: str) -> None:
    args = operands()
    want = call(args)[0]
    call(args)
    assert kernel.launches == 2 and len(operator) == 1
    with options.patch(backend=backend):
        close(call(args)[0], want)
    assert kernel.launches == 2 and len(operator) == 2
    call(args)
    assert kernel.launches == 3


def test_a_kernel_that_fails_is_replaced(kernel: Kernel, operator: list[str]) -> None:
    args = operands()
    want = call(args)[0]
    call(args)
    kernel.error = RuntimeError("no more")
    said: list[str] = []
    remove = dispatch.on_fallback(lambda record, backend, reason: said.append(str(reason)))
    for _ in range(3):
        close(call(args)[0], want)
    remove()
    assert len(said) == 1 and "no more" in said[0]
    kernel.error = None
    call(args)
    assert kernel.launches == 2  # it is not tried again
    dispatch.forget_failures()
    call(args)
    call(args)
    assert kernel.launches == 4


def test_a_failure_elsewhere_is_minded(kernel: Kernel, operator: list[str]) -> None:
    args = operands()
    for _ in range(2):
        call(args)
    dispatch._failed(CAUSAL, "kernels", "forward", RuntimeError("of another shape"))
    close(call(args)[0], causal_once(*args))
    assert kernel.launches == 2 and len(operator) == 2


def causal_once(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_a_dispatch_mode_sees_the_operator(kernel: Kernel) -> None:
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    args = operands()
    for _ in range(2):
        call(args)
    with Names():
        call(args)
    assert "fa_inductor.attention.default" in names


def test_results_are_laid_out_as_the_fake_says(kernel: Kernel) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for layout in ("bshd", "bhsd"):
        for record in (CAUSAL, Attention(4, 2, 64, 64, "bfloat16", 0.125)):
            text = record.with_(layout=layout).to_string()
            for rows in (1, 40):
                args = operands(kv=record.kv_heads, rows=rows)
                with FakeTensorMode() as mode:
                    want = library.attention(*(mode.from_tensor(x) for x in args), [], [], text, "b")
                for _ in range(3):
                    got = call(args, record=text)
                    for x, y in zip(got, want, strict=True):
                        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


def test_fake_tensors_go_through_the_operator(kernel: Kernel) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    args = operands()
    for _ in range(2):
        call(args)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in args]
        assert isinstance(call(fake)[0], FakeTensor)
    assert isinstance(call(fake)[0], FakeTensor)  # without the mode being active, too
    assert type(call(args)[0]) is Tensor and kernel.launches == 3


def test_memory_is_not_shared_between_calls(kernel: Kernel) -> None:
    args = operands()
    found = [call(args) for _ in range(3)]
    addresses = [x.data_ptr() for pair in found for x in pair]
    assert len(set(addresses)) == 6
    assert all(torch.equal(found[0][0], out) for out, _ in found)
