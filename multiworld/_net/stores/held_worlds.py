"""Worlds that may not begin at a server yet, because members of a working one may have met at another.

A server that follows another one knows none of the worlds that work. Its owner holds these: as long as it has
a key for a world, and no member has brought what it knows, newcomers wait. The key's value says for what.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

import torch.distributed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["held", "key_of"]

_NO_ANSWER = "its store, which does not answer"
_NOTHING = "\x01nothing"


def key_of(world: str) -> str:
    """Return the key of a world that is held."""
    return f"m8d/held/{quote(world, safe='', errors='surrogatepass')}"


def held(store: Store, world: str) -> str:
    """Return what a world of which nothing is known waits for before it may begin; "" where it may.

    Args:
        store: whose calls keep deadlines.
        world: its name.
    """
    try:
        # Where there is no such key, what was expected is returned, and none is made.
        found = store.compare_set(key_of(world), _NOTHING, _NOTHING)
    except torch.distributed.DistError:
        return _NO_ANSWER
    return "" if found == _NOTHING.encode() else found.decode(errors="replace")
