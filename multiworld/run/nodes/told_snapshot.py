"""A launcher's snapshot as the other launchers of its run get it: compressed JSON of bounded length."""

from __future__ import annotations

import json
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any

from multiworld._core.operations.report import MAX_REPORT
from multiworld.run.view.state import LAST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["ToldSnapshot", "decode", "encode"]

_MOST_BYTES = 16 << 20
"""Of a snapshot that is not compressed: what comes from a peer must not fill the memory."""

FRESH = 0.5
"""Seconds for which a snapshot is told."""


class ToldSnapshot:
    """What this launcher tells the others; any thread may call it, and does not wait.

    To make it takes 0.1 s for 256 worlds, and who asks is heard in the watchdog's thread: so it is made in
    another one, and who asks gets the last one. The first to ask gets nothing.

    Args:
        snapshot: makes the snapshot.
    """

    def __init__(self, snapshot: Callable[[], dict[str, Any]]) -> None:
        self._snapshot = snapshot
        self._lock = threading.Lock()
        self._told = b""
        self._at = float("-inf")

    def __call__(self) -> bytes:
        """Return the last one; b"" if there is none yet."""
        if time.monotonic() - self._at > FRESH and self._lock.acquire(blocking=False):
            try:
                threading.Thread(target=self._make, name="m8d-nodes-told", daemon=True).start()
            except RuntimeError:  # no thread is left: at the next question
                self._lock.release()
        return self._told

    def _make(self) -> None:
        try:
            self._told = encode(self._snapshot())
            self._at = time.monotonic()
        finally:
            self._lock.release()


def encode(snapshot: dict[str, Any]) -> bytes:
    """Return the snapshot, at most `MAX_REPORT` bytes; of a large one with fewer events, faults and lists."""
    for each in _shorter(snapshot):
        data = zlib.compress(json.dumps(each).encode(), 1)
        if len(data) <= MAX_REPORT:
            return data
    return b""


def _shorter(snapshot: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield snapshot
    snapshot = {**snapshot, "last": snapshot.get("last", [])[-LAST:]}
    yield snapshot
    for faults, steps in ((50, 10), (10, 10), (0, 0)):
        kept = [{**each, "steps": each["steps"][:steps]} for each in snapshot.get("faults", ())[:faults]]
        yield {**snapshot, "faults": kept}
    yield {**snapshot, "faults": [], "last": []}
    yield {**snapshot, "faults": [], "last": [], "worlds": [], "workers": [], "awaited": []}


def decode(data: bytes) -> dict[str, Any] | None:
    """Return the snapshot; None where these bytes are none."""
    whole = zlib.decompressobj()
    try:
        text = whole.decompress(data, _MOST_BYTES)
        found = json.loads(text) if whole.eof else None
    except (zlib.error, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
