"""A launcher's snapshot as the other launchers of its run get it: compressed JSON of bounded length. Pure."""

from __future__ import annotations

import json
import zlib
from typing import Any

from multiworld._core.operations.report import MAX_REPORT

__all__ = ["decode", "encode"]

_MOST_BYTES = 16 << 20
"""Of a snapshot that is not compressed: what comes from a peer must not fill the memory."""

_LESS = ((), ("last", "faults"), ("last", "faults", "worlds", "workers"))
"""Lists that are left empty, one more than the other, until the snapshot fits."""


def encode(snapshot: dict[str, Any]) -> bytes:
    """Return the snapshot, at most `MAX_REPORT` bytes; of a very large one without its lists."""
    for names in _LESS:
        data = zlib.compress(json.dumps({**snapshot, **{name: [] for name in names}}).encode(), 1)
        if len(data) <= MAX_REPORT:
            return data
    return b""


def decode(data: bytes) -> dict[str, Any] | None:
    """Return the snapshot; None where these bytes are none."""
    whole = zlib.decompressobj()
    try:
        text = whole.decompress(data, _MOST_BYTES)
        found = json.loads(text) if whole.eof else None
    except (zlib.error, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
