"""Owner of an error: the world that it is of, and what follows from that for the world.

An error's world is known where its operation's group is: given to the call, the default one that a bare call
means, or the one that a work or a functional collective's result is of. The world is asked what to raise
instead (`translated`), and a transport fault breaks it.

A backward pass, the end of a block, and a work that is not remembered do not say of which group an error is:
worlds overlap, torch may have a default group, and blocks hold other code. There the world is only `guessed`:
it is asked whether it has lost a member, and the error breaks nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from multiworld._c10d.fault_classification import classify
from multiworld._c10d.routing.state import living, original_world
from multiworld.errors import MultiworldError

if TYPE_CHECKING:
    from multiworld._c10d.routing.state import WorldState

__all__ = ["guessed", "stays", "told", "translated"]

_STAYS = "_m8d_stays"
"""An attribute of exceptions that are no world's: what they pass afterwards must not guess."""

_TIMEOUTS = ("timed out waiting", "application timeout", "watchdog caught", "nccl")
"""What gloo and NCCL write where an operation takes too long; programs have timeouts of their own."""


def translated(error: BaseException, state: WorldState | None) -> BaseException | None:
    """Return what to raise instead of `error`; None where it is to stay.

    Args:
        error: what an operation raised.
        state: of the world whose operation it was; None where there is none.
    """
    if isinstance(error, MultiworldError) or state is None or state.translate is None:
        return None
    instead = state.translate(state, error)
    if instead is None:
        stays(error)
    return instead


def stays(error: BaseException) -> None:
    """Note that `error` is to stay as it is."""
    vars(error)[_STAYS] = True


def guessed(
    error: BaseException, state: WorldState | None, *, of_a_group: bool = False
) -> BaseException | None:
    """Return what to raise instead of `error`, where no more is known than the world that is selected.

    Args:
        error: what was raised.
        state: of the world that it may be of; None where there is none.
        of_a_group: whether a transport fault there is one of some process group: in a process that has no
            other one, it is this world's.
    """
    if isinstance(error, MultiworldError) or state is None or state.translate is None:
        return None
    if _STAYS in vars(error):
        return None
    return state.translate(state, error, sure=of_a_group and _surely_of(state, error))


def told(error: BaseException) -> BaseException | None:
    """Return the error of the world, one that is over, whose error's text `error` has; None without one."""
    fault = classify(error)
    if fault is None or fault.told is None:
        return None
    named = (guessed(error, state) for state in living() if fault.may_be_of(state.name))
    return next((instead for instead in named if instead is not None), None)


def _surely_of(state: WorldState, error: BaseException) -> bool:
    """Whether `error`, of some group, is of no other than this world's.

    Not where a connection has ended: that may be one of a world that is over. Its members know why it ended.
    """
    fault, text = classify(error), str(error).lower()
    if fault is None or fault.told is not None:
        return False
    if fault.timeout and not any(each in text for each in _TIMEOUTS):
        return False
    if not (fault.timeout or (state.traffic is not None and fault.peer is None)):
        return False
    own: Any = original_world().pg_map
    return not len(own) and all(each is state or each.group is None for each in living())
