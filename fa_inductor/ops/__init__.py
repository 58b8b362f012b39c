"""Operators of the namespace ``fa_inductor``; importing this module registers them."""
from __future__ import annotations

from .hooks import forget, seen, seen_blocks, subscribe
from .library import attention, attention_backward, pin_strides

__all__ = ["attention", "attention_backward", "forget", "pin_strides", "seen", "seen_blocks", "subscribe"]
