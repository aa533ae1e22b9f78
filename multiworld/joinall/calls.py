"""`join_all` and its awaitable twin, and `retiring`."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

from multiworld import background_threads
from multiworld._join import threaded
from multiworld._join.join import no_thread
from multiworld.joinall.joins import UNDO_BUDGET, JoinAllRequest, Joins

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Mapping

    from multiworld._join.arguments import StateLike
    from multiworld.world import World

__all__ = ["join_all", "join_all_async", "retiring"]


def join_all(
    *names: str,
    rejoin: bool = True,
    timeout: float | dt.timedelta | None = None,
    state: Mapping[str, StateLike] | None = None,
) -> dict[str, World]:
    """Join this worker's worlds of the worlds file (``m8d-run --worlds``); returns when all are active.

    They are joined at the same time, each after those that its ``after`` names. A worker that was started
    again joins the same worlds under the same ranks. Worlds that this process is in already are returned as
    they are, and waited for where they are broken; one that it closed is joined anew.

    Args:
        names: of the worlds to join; none: all of this worker's.
        rejoin: whether a world that breaks is joined again in the background, under the launcher's present
            store address, until it is active or closed. The others go on meanwhile; operations of that one
            raise BrokenWorldException, and `World.wait_active` waits for it. It holds for the worlds joined
            by this call, but not for those with a `state`: call this again where they break.
        timeout: seconds for each join and each operation; None takes the file's, or M8D_JOIN_TIMEOUT (30).
        state: by world, what has its state (see `multiworld.join`); of worlds of a range of sizes that this
            call joins. One that broke goes on with what is given here; without, with what it had. Other
            objects than it had get the state of a member that has it; where none has, rank 0's, and `step` is
            0 again.

    Returns:
        The worlds by name, in the order given, or the file's.

    Raises:
        MultiworldError: this process has no launcher, or it does not answer, or it has no worlds file.
        UnknownWorldError: this worker is in no world of that name.
        InvalidJoinError: a state for a world of one size, for one that is not named, or for one that this
            process is in with other objects, or none; or something that is no state.
        JoinError: a world could not be joined (see `multiworld.join`); those joined by this call are closed
            again, but for those that another call waits for, or has been given.
    """
    request = JoinAllRequest(rejoin, timeout, state, _gpu_here(), threading.Event())
    joins = _here()
    worlds = joins.join(names, request)
    joins.keep(request)
    return worlds


async def join_all_async(
    *names: str,
    rejoin: bool = True,
    timeout: float | dt.timedelta | None = None,
    state: Mapping[str, StateLike] | None = None,
) -> dict[str, World]:
    """`join_all`, awaitable. Cancelling it closes what was joined here."""
    request = JoinAllRequest(rejoin, timeout, state, _gpu_here(), threading.Event())
    taken = threading.Lock()
    joins = _here()

    def run() -> dict[str, World]:
        try:
            return joins.join(names, request)
        finally:
            with taken:
                gone = request.stop.is_set()
                request.ended = True
            if gone:
                joins.undo(request)

    def over(_: dict[str, World] | None, told: bool) -> None:
        if not told:
            joins.undo(request)

    try:
        result = threaded.start(run, "m8d-join-all", over)
    except RuntimeError as error:
        raise no_thread("join_all", error) from error
    try:
        worlds = await asyncio.shield(result)
    except asyncio.CancelledError:
        with taken:
            request.stop.set()
            late = request.ended
        if late:  # it had come about already
            background_threads.call(partial(joins.undo, request), "m8d-join-all")
        await asyncio.wait({result}, timeout=UNDO_BUDGET)
        raise
    finally:
        del result  # it has the error, which has this frame
    joins.keep(request)
    return worlds


def retiring() -> bool:
    """Whether the launcher retires this worker (``m8d-run scale``, ``m8d-run retire``): it is to end soon.

    Its worlds of a range are left without the program: each is closed when one of its next `World.advance`
    returns. A program that is in others too, or in none, asks here whether to go on. False without a
    launcher; the first call connects with it.
    """
    return _here().retiring()


_mine: dict[str, Joins] = {}  # of this process, from its first call on
_parents: list[Joins] = []  # kept: they have its connection


def _here() -> Joins:
    found = _mine.get("")
    # One step, in which first calls of several threads agree; a lock could be held as the process forks.
    return _mine.setdefault("", Joins()) if found is None else found


def _forked() -> None:
    """Begin anew in a forked child: the worlds are the parent's, and so is its connection."""
    _parents.extend(_mine.values())
    _mine.clear()


os.register_at_fork(after_in_child=_forked)


def _gpu_here() -> int | None:
    """The GPU that is current in this thread, if the program chose one."""
    torch = sys.modules.get("torch")
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else None
