"""Queries without communication (rank, size, backend) after a world's group has ended.

Error handlers ask for rank, size and backend after a breakage, and in a block whose world was closed
meanwhile. Stock torch answers until the default group is destroyed, even with broken connections; so do
worlds.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed.distributed_c10d as c10d

__all__ = ["QUESTIONS", "Departed", "facts"]

QUESTIONS = frozenset(
    inspect.unwrap(getattr(c10d, name)).__code__
    for name in (
        "is_initialized",
        "get_rank",
        "get_world_size",
        "_get_group_size",
        "get_backend",
        "get_backend_config",
        "get_group_rank",
        "get_global_rank",
        "get_process_group_ranks",
        "_get_group_tag",
    )
    if hasattr(c10d, name)
)
"""The code of functions that communicate nothing: they may have the default group of a world that is over."""


class Departed:
    """Stands for the default group of a world that was closed: it knows what it was, and can do nothing.

    Args:
        group: the process group, as long as it is there.
        group_name: in torch's registry.
    """

    def __init__(self, group: Any, group_name: str) -> None:
        self._rank, self._size, self._name = int(group.rank()), int(group.size()), str(group.name())
        self.group_name = group_name

    def rank(self) -> int:
        """As of the process group."""
        return self._rank

    def size(self) -> int:
        """As of the process group."""
        return self._size

    def name(self) -> str:
        """As of the process group."""
        return self._name

    def _has_hooks(self) -> bool:
        return False

    def shutdown(self) -> None:
        """There is nothing to shut down any more."""


def facts(entries: dict[Any, Any], names: dict[Any, Any]) -> dict[str, Any]:
    """Return what a map by process group says, by the groups' names, without anything of the groups.

    Args:
        entries: the map.
        names: the groups' names.
    """
    found = {}
    for group, value in list(entries.items()):
        name = dict.get(names, group)
        if name is not None:
            # Of (backend, store), the backend: the store goes with the world.
            found[str(name)] = (value[0], None) if isinstance(value, tuple) else value
    return found
