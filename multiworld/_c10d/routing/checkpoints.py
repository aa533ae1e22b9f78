"""A group of their own for checkpoints that are saved in the background.

Their collectives run in another thread, while the program goes on with others in the same world. In one group
either would take the other's messages for its own, and sums be wrong without an error. So the first
`async_save` of a generation makes a group for all of them, in the caller's thread. One save is over before
the next one uses it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from multiworld._c10d.routing.selection import selected
from multiworld._c10d.routing.state import StandIn

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable

    from multiworld._c10d.routing.state import WorldState

__all__ = ["submit"]


def submit(
    state: WorldState,
    begin: Callable[..., concurrent.futures.Future[Any]],
    save: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> concurrent.futures.Future[Any]:
    """Have a checkpoint saved in another thread, in a group of its own unless the caller has given one.

    Args:
        state: of the world.
        begin: of the executor: has a function called in its thread.
        save: torch's.
        args: for it.
        kwargs: for it.
    """
    if not _shares(state, kwargs):
        return begin(save, *args, **kwargs)
    kept = state.checkpoints
    if "group" not in kept:
        with selected(state):
            kept["group"] = dist.new_group()
    before, over = kept.get("over"), threading.Event()

    def in_turn(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before.wait()  # in another executor's thread: for as long as that save takes
        return save(*args, **kwargs)

    saving = begin(in_turn, *args, **kwargs | {"process_group": kept["group"]})
    kept["over"] = over
    saving.add_done_callback(lambda _: over.set())
    return saving


def _shares(state: WorldState, kwargs: dict[str, Any]) -> bool:
    """Whether the save communicates in the group in which the program does."""
    if kwargs.get("no_dist") or not kwargs.get("use_collectives", True):
        return False
    group, default = kwargs["process_group"], state.default_pg
    return default.size() > 1 and (group is None or group is default or isinstance(group, StandIn))
