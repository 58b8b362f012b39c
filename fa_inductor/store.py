"""Reports on disk, beside Inductor's cache: one JSON file a graph, private to the user, a damaged file is a miss."""
from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from pathlib import Path

from .report import GraphReport, graph_from_dict, graph_to_dict

log = logging.getLogger(__name__)
_ID = re.compile(r"[0-9a-f]{32}")
_MAX_BYTES = 16 << 20


def directory() -> Path:
    """``<Inductor's cache dir>/fa_inductor``; goes when the user clears that cache."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "fa_inductor"


def save(graph: GraphReport) -> None:
    """Write atomically (file 0600 in a folder 0700); what cannot be written is not stored, and never an error."""
    try:
        folder = directory()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")  # mkstemp: 0600
        try:
            with os.fdopen(handle, "w") as f:
                json.dump(graph_to_dict(graph), f)
            os.replace(temporary, folder / f"{graph.id}.json")
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as e:
        log.debug("report of graph %s not stored: %s", graph.id, e)


def load(graph: str) -> GraphReport | None:
    """The stored report of a graph; None if there is none, it is damaged, or another user owns it."""
    if not _ID.fullmatch(graph):
        return None
    try:
        with open(directory() / f"{graph}.json", "rb") as f:
            status = os.fstat(f.fileno())
            if status.st_size > _MAX_BYTES or (hasattr(os, "getuid") and status.st_uid != os.getuid()):
                return None
            found = graph_from_dict(json.loads(f.read()))
        return found if found.id == graph else None
    except (OSError, ValueError) as e:
        log.debug("report of graph %s not loaded: %s", graph, e)
        return None
