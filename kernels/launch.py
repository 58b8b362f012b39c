"""Calls of a kernel that are like an earlier one: what the earlier one worked out is used again.

How a kernel is launched, and with which views of its inputs, follows from sizes, strides, dtypes, devices and alignment
of the tensors and from the integers, never from what is in them.  A `Memo` holds, for one record and for each such
description, a `Launch`: the compiled function, what to allocate, and how each argument is a view of an input.  What needs
a copy, a conversion or any other kernel first is not held.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

MOST = 512
"""Launches held for one record; lengths that grow, as in decoding, make a new one each time."""

Size = tuple[int, ...]
_guards = torch._C._dynamo.guards
"""What Inductor's own generated code uses; private, so a later torch may lack some of it."""


def _empty(size: Size, stride: Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def _reinterpret(x: torch.Tensor, size: Size, stride: Size, offset: int) -> torch.Tensor:
    return x.as_strided(size, stride, x.storage_offset() + offset)


TensorGuards: Any = getattr(_guards, "TensorGuards", None)
reinterpret: Callable[..., torch.Tensor] = getattr(_guards, "_reinterpret_tensor", _reinterpret)
empty: Callable[..., torch.Tensor] = getattr(_guards, "_empty_strided_cuda", _empty)
"""(size, stride, dtype) -> uninitialised tensor on the current device, past the dispatcher, as Inductor allocates."""
current_device: Callable[[], int | None] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""Index of the current device, without the checks of `torch.cuda.current_device`: a tensor on the device is at hand."""
current_stream: Callable[..., int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream)
"""Handle of the current stream of a device, by the device's index; that of its default stream is 0."""
_counters: dict[int | None, torch.Tensor] = {}
"""Of the default streams, by index of their device; held for good."""


def counter(device: torch.device) -> torch.Tensor:
    """``[1]`` int32, 0 when the next launch on the current stream of the device begins; the kernel leaves it 0.

    All launches on the default stream share one: they run one after another, and none can be part of a CUDA graph, since
    that stream cannot be captured.  On any other stream each has its own.  A graph may be replayed beside anything; work
    of a destroyed stream may still run when a new one gets its handle; and what is allocated there may belong to the
    pool of a graph that is about to be captured, which does not let it live.
    """
    index = device.index
    if current_stream(index):
        return torch.zeros(1, dtype=torch.int32, device=device)
    found = _counters.get(index)
    if found is None:
        found = torch.zeros(1, dtype=torch.int32, device=device)
        if type(found) is torch.Tensor and not found.is_meta:  # no mode made something else of it
            found = _counters.setdefault(index, found)
    return found


Allocation = tuple[Size, Size, torch.dtype]
View = tuple[int, int, tuple[Size, Size, int] | None]
"""(argument, source, size and stride and offset from the source's); sources are q, k, v, out, lse and then the captures."""
Q, K, V, OUT, LSE, CAPTURES = range(6)


class Launch:
    """One prepared call."""

    __slots__ = ("args", "counter", "device", "fn", "lse", "no_lse", "out", "rest", "scratch", "views")

    def __init__(self, fn: Callable[..., Any], device: int | None, out: Allocation, lse: Allocation, no_lse: torch.Tensor,
                 args: list[Any], scratch: list[tuple[int, Allocation]], views: list[View], counter: int | None) -> None:
        """no_lse: what the kernel gets where lse is not wanted; scratch: arguments to allocate; counter: the argument that is
        a `counter`, if there is one."""
        self.fn, self.device, self.out, self.lse, self.no_lse = fn, device, out, lse, no_lse
        self.args, self.scratch, self.views, self.counter = args, scratch, views, counter
        self.rest: tuple[Any, ...] | None = None
        """What follows lse, where nothing of it is of one call only: on the default stream."""
        self._bind()

    def _bind(self) -> None:
        if self.views or self.scratch:
            return
        if self.counter is not None:
            shared = _counters.get(self.device)
            if shared is None:
                return
            self.args[self.counter] = shared
        self.rest = tuple(self.args[5:])

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, captures: Sequence[torch.Tensor], with_lse: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """out and lse; the caller has compared everything that this depends on, the current device included."""
        out, lse = empty(*self.out), empty(*self.lse) if with_lse else None
        if self.rest is not None and (self.counter is None or not current_stream(self.device)):
            self.fn(q, k, v, out, self.no_lse if lse is None else lse, *self.rest)
            return out, lse
        args = self.args.copy()
        args[:5] = q, k, v, out, lse
        for place, allocation in self.scratch:
            args[place] = empty(*allocation)
        if self.counter is not None:
            args[self.counter] = counter(q.device)
        sources = (q, k, v, out, lse, *captures)
        for place, source, geometry in self.views:
            x = sources[source]
            if x is not None:
                args[place] = x if geometry is None else reinterpret(x, *geometry)
        if lse is None:
            args[LSE] = self.no_lse
        self.fn(*args)
        if self.rest is None:
            self._bind()
        return out, lse


def describe(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, captures: Sequence[torch.Tensor], ints: Sequence[int]
) -> tuple[Any, ...] | None:
    """All that a launch may depend on; None where q, k or v is not aligned to 16 bytes, since a copy comes first, and for
    subclasses of Tensor."""
    for x in (q, k, v, *captures):
        if type(x) is not torch.Tensor and type(x) is not torch.nn.Parameter:
            return None
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
        return None
    found = (q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device, v.shape, v.stride(), v.dtype,
             v.device)
    if captures:
        found = (*found, *((x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15) for x in captures))
    return (*found, tuple(ints)) if ints else found


class Memo:
    """The launches of one record."""

    __slots__ = ("known", "last")

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], Launch] = {}
        self.last: tuple[Callable[..., bool], tuple[int, ...], list[int], Launch] | None = None
        """The latest one, behind a comparison of the tensors in C++; with the integers and the captures' alignment."""

    def call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, captures: Sequence[torch.Tensor], ints: Sequence[int],
        with_lse: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """out and lse as from an earlier call that was like this one; None, and nothing done, when there was none."""
        last = self.last  # read once: another thread may replace it
        if last is not None:
            same, numbers, places, found = last
            if ((len(captures) == len(places) and same(q, k, v, *captures) and [x.data_ptr() & 15 for x in captures] == places
                 if captures else not places and same(q, k, v))
                    and (tuple(ints) == numbers if ints else not numbers)
                    and not (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15
                    and current_device() == found.device):
                return found(q, k, v, captures, with_lse)
        key = describe(q, k, v, captures, ints)
        found = None if key is None else self.known.get(key)
        if found is None or current_device() != found.device:
            return None
        self._latest(q, k, v, captures, ints, found)
        return found(q, k, v, captures, with_lse)

    def keep(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, captures: Sequence[torch.Tensor], ints: Sequence[int],
        launch: Launch,
    ) -> None:
        """Hold a launch for calls that are like this one."""
        key = describe(q, k, v, captures, ints)
        if key is None:
            return
        if len(self.known) >= MOST:
            self.known.clear()
        self.known[key] = launch
        self._latest(q, k, v, captures, ints, launch)

    def _latest(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, captures: Sequence[torch.Tensor], ints: Sequence[int],
        launch: Launch,
    ) -> None:
        # Compares class, dispatch keys, dtype, device, sizes and strides of each, and holds none; private, hence optional.
        try:
            same = TensorGuards(q, k, v, *captures, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        except (TypeError, RuntimeError):
            self.last = None
            return
        self.last = same, tuple(ints), [x.data_ptr() & 15 for x in captures], launch


def view_of(place: int, x: torch.Tensor, source: int, of: torch.Tensor) -> View | None:
    """How argument ``place`` is made of a source, None when it does not share its memory."""
    if x is of:
        return place, source, None
    if x.dtype != of.dtype or x.device != of.device or x.untyped_storage().data_ptr() != of.untyped_storage().data_ptr():
        return None
    same = x.shape == of.shape and x.stride() == of.stride() and x.storage_offset() == of.storage_offset()
    return place, source, None if same else (tuple(x.shape), x.stride(), int(x.storage_offset() - of.storage_offset()))
