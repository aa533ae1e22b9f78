"""Files and folders: moved into place when whole, locked, named by digests, counted and pruned."""

from __future__ import annotations

__all__: list[str] = []
