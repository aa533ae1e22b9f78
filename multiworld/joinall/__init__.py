"""The worlds that the launcher's worlds file gives this worker: joined at once, and joined again when they break."""

from __future__ import annotations

from multiworld.joinall.calls import join_all, join_all_async

__all__ = ["join_all", "join_all_async"]
