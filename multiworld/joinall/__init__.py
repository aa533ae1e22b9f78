"""`join_all`: joins this worker's worlds of the worlds file, all at once, and again when they break."""

from __future__ import annotations

from multiworld.joinall.calls import join_all, join_all_async, retiring

__all__ = ["join_all", "join_all_async", "retiring"]
