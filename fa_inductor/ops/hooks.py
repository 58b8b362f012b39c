"""Which rewritten blocks have run in this process.

A compiled graph that was loaded from a cache runs without any pass having run, so the report cannot know it.
Every implementation of the operators therefore announces the block it belongs to; after the first time that is
one dictionary look-up.
"""
from __future__ import annotations

import threading
from collections.abc import Callable

Callback = Callable[[str, str], None]
"""Called with ``(block, record)``, both strings, the first time that a block runs."""

_lock = threading.Lock()
_seen: dict[str, str] = {}
_callbacks: list[Callback] = []


def seen(block: str, record: str) -> None:
    """Announce that ``block`` (an id of the report) runs with ``record`` (its JSON string)."""
    if block in _seen:
        return
    with _lock:
        if block in _seen:
            return
        _seen[block] = record
        callbacks = list(_callbacks)
    for callback in callbacks:
        callback(block, record)


def subscribe(callback: Callback, replay: bool = True) -> Callable[[], None]:
    """Call ``callback`` for every block seen from now on, and at once for those already seen if ``replay``.

    Returns:
        A function that ends the subscription; calling it twice does nothing.
    """
    with _lock:
        _callbacks.append(callback)
        past = list(_seen.items()) if replay else []
    for block, record in past:
        callback(block, record)

    def unsubscribe() -> None:
        with _lock:
            if callback in _callbacks:
                _callbacks.remove(callback)

    return unsubscribe


def seen_blocks() -> dict[str, str]:
    """Blocks that have run so far: id to record string, in order of their first run."""
    with _lock:
        return dict(_seen)


def forget() -> None:
    """Start anew: every block counts as not seen (a fresh report)."""
    with _lock:
        _seen.clear()
