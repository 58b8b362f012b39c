"""Where in the user's code a node comes from."""
from __future__ import annotations

import re

from torch.fx import Node

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def source_of(node: Node) -> str:
    """``file:line function`` of the innermost frame outside torch; ``unknown source`` when none is recorded."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    for file, line, function in reversed(frames):
        if "/torch/" not in file:
            return f"{file}:{line} {function}"
    if frames:
        file, line, function = frames[-1]
        return f"{file}:{line} {function}"
    return "unknown source"
