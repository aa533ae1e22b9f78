"""Blocks of torch's coalescing manager that an exception leaves: nothing of them stays in a world.

Torch puts the collectives of such a block into a list, and takes them out at the block's regular end only.
After an exception each later `all_reduce` of that process group would be put into the list too: it would
return, and never be run. Torch's own groups are left as they are.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch.distributed.distributed_c10d as c10d

from multiworld._c10d.routing.state import StandIn, owner_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from multiworld._c10d.monkeypatch import Patches

__all__ = ["install", "when_left_by_an_exception"]


def install(patches: Patches) -> None:
    """Let an exception that leaves such a block take out what it has put together.

    Args:
        patches: records what was replaced.
    """
    when_left_by_an_exception(patches, lambda group, pending: lambda _: pending.pop(group, None))


def when_left_by_an_exception(
    patches: Patches, begin: Callable[[Any, dict[Any, Any]], Callable[[BaseException], object]]
) -> None:
    """Have something undone where an exception leaves such a block of a world's group, or its beginning.

    Args:
        patches: records what was replaced.
        begin: called where a block begins, with the process group and what torch has put together by group;
            returns what is called with the exception.
    """
    manager: Any = c10d._coalescing_manager
    # The function inside of the context manager: programs have imported the manager by name.
    cell = manager.__closure__[manager.__code__.co_freevars.index("func")]
    patches.set(cell, "cell_contents", _undoing(cell.cell_contents, begin))


def _undoing(function: Any, begin: Callable[[Any, dict[Any, Any]], Callable[[BaseException], object]]) -> Any:
    plain = contextlib.contextmanager(function)

    def block(group: Any = None, *args: Any, **kwargs: Any) -> Iterator[Any]:
        group = group or c10d._get_default_group()
        # Of the world that is selected where the block begins.
        pending = c10d._world.pg_coalesce_state
        # The list of a block around this one, of the same group: it is that one's, until this one has begun.
        ours = group not in pending
        undo = begin(group, pending)
        of_a_world = isinstance(group, StandIn) or owner_of(group) is not None
        try:
            with plain(group, *args, **kwargs) as together:
                ours = True
                try:
                    yield together
                except BaseException as exc:
                    if of_a_world:  # before a patched torch ends the block, too
                        undo(exc)
                    raise
        except BaseException as exc:  # of its beginning, or of its end
            if ours and of_a_world:
                undo(exc)
            raise

    return block
