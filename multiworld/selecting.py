"""``with world:``: bare calls of torch.distributed mean this world.

Entering and leaving are on the path of each call that has a block of its own, so both are a few
calls of C and a few attributes: nothing is imported, locked or logged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiworld._c10d.routing.stack import put, top
from multiworld.errors import RouterError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from multiworld._c10d.routing.state import WorldState
    from multiworld._generation.generation import Generation

__all__ = ["Selecting"]


class Selecting:
    """Mixin of `multiworld.World`: a re-entrant context manager, per thread and per asyncio task."""

    _gen: Generation

    def __enter__(self) -> Self:
        state = self._gen.c10d
        if state is None:
            raise self._gen.error()
        before = top()
        try:
            state.enter()
            if state.traffic is not None:
                state.traffic.block_begins()
        except BaseException:  # a signal's handler raised it: no `__exit__` follows
            put(before)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Not by the generation: it may have given way to the next one inside the block.
        state = _leave()
        if state is None or state.name != self._gen.world:
            _leave_out_of_turn(state, self._gen.world, exc)
        elif exc is not None or state.traffic is not None:
            _end(state, exc)


def _leave() -> WorldState | None:
    # Replaces itself at the first use: torch is loaded by then; importing multiworld must not load it.
    global _leave  # noqa: PLW0603  (with what it stands for)
    from multiworld._c10d.routing import selection  # noqa: PLC0415  (a world exists, so torch is loaded)

    _leave = selection.leave
    left: WorldState | None = _leave()
    return left


def _leave_out_of_turn(left: WorldState | None, name: str, exc: BaseException | None) -> None:
    """Leave the block of the world `name`, although the one of `left` was entered after it."""
    from multiworld._c10d.routing import selection  # noqa: PLC0415  (it loads torch)

    state = selection.leave_instead(left, name)
    if state is not None and (exc is not None or state.traffic is not None):
        _end(state, exc)
    if exc is None:
        inner = "torch's own state" if left is None else f"world {left.name!r}"
        raise RouterError(
            f"The block of world {name!r} ended inside the block of {inner}",
            rule="The block that was entered last ends first; a generator's lasts while it is suspended",
            next_step="Enter the block around each step of the generator, or use the world's methods",
        )


def _end(state: WorldState, exc: BaseException | None) -> None:
    if state.traffic is not None:
        from multiworld._c10d.nccl import hooks  # noqa: PLC0415  (a world exists, so torch is loaded)

        hooks.leave_block(state, exc)
    if exc is not None:
        from multiworld._c10d.routing import error_owner  # noqa: PLC0415  (it loads torch)

        # What torch raises from C++ (DDP's reducer, functional collectives) passes nothing that could
        # translate it before here.
        better = error_owner.guessed(exc, state)
        try:
            if better is not None and better is not exc:
                raise better from exc
        finally:
            del better  # else this frame and the exception hold each other, and what the block worked on
