"""The ids by which all members of a generation find each other's spans."""

from __future__ import annotations

import hashlib

__all__ = ["generation_ids"]


def generation_ids(world: str, generation: int, shared: str) -> tuple[int, int]:
    """Return a trace id (128 bits) and a span id (64 bits): the same in all members of a generation.

    Args:
        world: name.
        generation: its number.
        shared: what only this generation's members have, as reports of breakages name it
            (`break_report.generation_id`): two runs may have a generation of one name and number.
    """
    digest = hashlib.sha256(f"m8d:span\0{world}\0{generation}\0{shared}".encode()).digest()
    # Ids of zero are none.
    return int.from_bytes(digest[:16], "big") or 1, int.from_bytes(digest[16:24], "big") or 1
