"""Options of the library: attributes of one object, `options`, each also an environment variable.

==================  =============================  =========================================  =========
attribute           environment variable           values                                     default
==================  =============================  =========================================  =========
``target``          ``FA_INDUCTOR_TARGET``         ``auto``, ``cpu``, ``sm_90``, ``sm_100``   ``auto``
``backend``         ``FA_INDUCTOR_BACKEND``        ``auto``, ``kernels``, ``sdpa``,           ``auto``
                                                   ``reference``
``max_rewrites``    ``FA_INDUCTOR_MAX_REWRITES``   a number >= 0, or ``none``                 ``None``
``validate``        ``FA_INDUCTOR_VALIDATE``       ``0``, ``1``                               ``False``
``aot``             ``FA_INDUCTOR_AOT``            ``0``, ``1``                               ``False``
==================  =============================  =========================================  =========

Every option changes what is compiled, so all of them are part of the compile cache key.
"""
from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

TARGETS = ("auto", "cpu", "sm_90", "sm_100")
BACKENDS = ("auto", "kernels", "sdpa", "reference")
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "")


@dataclass(frozen=True)
class _Option:
    """One option: its default, and the check that turns a user's or an environment's value into the stored one."""

    default: Any
    check: Callable[[Any], Any]
    doc: str

    def parse(self, name: str, value: Any) -> Any:
        try:
            return self.check(value)
        except (ValueError, TypeError):
            raise ValueError(f"{name}={value!r} is not allowed; expected {self.doc}") from None


def _one_of(allowed: tuple[str, ...]) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise ValueError
        return value

    return check


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE + _FALSE:
        return value.lower() in _TRUE
    raise ValueError


def _limit(value: Any) -> int | None:
    if value is None or (isinstance(value, str) and value.lower() in ("none", "")):
        return None
    if isinstance(value, bool) or not isinstance(value, (int, str)) or int(value) < 0:
        raise ValueError
    return int(value)


_OPTIONS: dict[str, _Option] = {
    "target": _Option("auto", _one_of(TARGETS), f"one of {', '.join(TARGETS)}"),
    "backend": _Option("auto", _one_of(BACKENDS), f"one of {', '.join(BACKENDS)}"),
    "max_rewrites": _Option(None, _limit, "None or an integer >= 0"),
    "validate": _Option(False, _boolean, "a bool (environment: 0 or 1)"),
    "aot": _Option(False, _boolean, "a bool (environment: 0 or 1)"),
}


class Options:
    """The process-wide options; see the table at the top of this module.

    Setting an attribute checks the value at once.

    Raises:
        ValueError: the value is not allowed; the message lists what is.
        AttributeError: there is no option of that name; the message lists the names.
    """

    target: str
    """Whose guards decide.  ``auto`` is the device of the tensors; a named target also works without that GPU."""
    backend: str
    """What runs a rewritten block.  ``reference`` is plain torch: slow, any record, any device."""
    max_rewrites: int | None
    """At most so many blocks are rewritten in this process: bisect a wrong result with it."""
    validate: bool
    """Check each rewrite numerically at compile time; a block that differs is left alone."""
    aot: bool
    """Rewrite under AOTInductor too.  The process that runs the package then needs Python and this library."""

    def __init__(self) -> None:
        values: dict[str, Any] = {}
        for name, option in _OPTIONS.items():
            variable = f"FA_INDUCTOR_{name.upper()}"
            values[name] = option.default
            if (text := os.environ.get(variable)) is not None:
                try:
                    values[name] = option.parse(variable, text)
                except ValueError as e:
                    warnings.warn(f"{e}; using {option.default!r}", stacklevel=2)
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_lock", threading.RLock())

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(f"no option {name!r}; the options are {', '.join(_OPTIONS)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._set({name: value})

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_OPTIONS]

    def __repr__(self) -> str:
        return f"Options({', '.join(f'{k}={v!r}' for k, v in self.as_dict().items())})"

    def _set(self, changes: dict[str, Any]) -> None:
        checked: dict[str, Any] = {}
        for name, value in changes.items():
            if name not in _OPTIONS:
                raise AttributeError(f"no option {name!r}; the options are {', '.join(_OPTIONS)}")
            checked[name] = _OPTIONS[name].parse(name, value)
        with self.__dict__["_lock"]:
            self.__dict__["_values"].update(checked)

    def as_dict(self) -> dict[str, Any]:
        """A copy of all values, in the order of the table; equal dicts compile equal code."""
        with self.__dict__["_lock"]:
            return dict(self.__dict__["_values"])

    @contextmanager
    def patch(self, **changes: Any) -> Iterator[Options]:
        """Set several options inside a ``with`` block; all or none of them are set, and the old values come back.

        Raises:
            ValueError, AttributeError: as for setting an attribute.
        """
        before = self.as_dict()
        self._set(changes)
        try:
            yield self
        finally:
            self._set({name: before[name] for name in changes})

    def resolved_target(self, device: torch.device | str) -> str:
        """Whose guards decide for tensors on ``device``: ``cpu``, ``sm_90``, ``sm_100``, or another device's own name.

        ``auto`` gives ``sm_90`` on compute capability 9.0, ``sm_100`` on 10.x, ``sm_80`` and the like on other
        GPUs, and the device type (``cpu``, ``mps``, ...) elsewhere; any other value of ``target`` is returned as it is.
        """
        if self.target != "auto":
            return self.target
        import torch

        device = torch.device(device)
        if device.type != "cuda" or torch.version.hip is not None:
            return device.type if device.type != "cuda" else "hip"
        major, minor = torch.cuda.get_device_capability(device)
        return "sm_100" if major == 10 else f"sm_{major}{minor}"


options = Options()
