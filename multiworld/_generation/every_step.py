"""Steps that are all taken, whatever becomes of one of them: the end of a generation, and of a world."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from multiworld.logs.source import about, logger

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    Step = Callable[[], object]

__all__ = ["take_all", "take_from"]

_log = logger(__name__)

_Step = TypeVar("_Step")


def take_all(world: str, *steps: Step) -> None:
    """Take the steps in order, even if an earlier one raises, as Ctrl-C does in one that waits.

    Args:
        world: name, for the log: errors after the first are logged.
        steps: each is called once.

    Raises:
        BaseException: what a step raised first, when all are taken.
    """
    take_from(world, list(steps), lambda step: step())


def take_from(
    world: str, left: list[_Step], take: Callable[[_Step], object], again: Collection[_Step] = ()
) -> None:
    """Take the steps that are left in order, as `take_all` does.

    Args:
        world: as of `take_all`.
        left: the steps; one that is begun is not in it any more. If Ctrl-C came at this call, call it again.
        take: takes one.
        again: steps that are taken once more where Ctrl-C came in them: perhaps they had done nothing.

    Raises:
        BaseException: what a step raised first, when all are taken.
    """
    errors: list[BaseException] = []
    repeated = set(again)
    try:
        while left:
            try:
                _take(left, take, repeated, errors)
            except BaseException as error:  # noqa: BLE001, PERF203  (Ctrl-C between two steps: the others follow)
                errors.append(error)
        for each in errors[1:]:
            _log.error("world %r: a step of its end failed", world, exc_info=each, extra=about(world))
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # their tracebacks refer to this frame: a cycle would keep the world's sockets


def _take(
    left: list[_Step], take: Callable[[_Step], object], again: set[_Step], errors: list[BaseException]
) -> None:
    while left:
        step = left[0]
        try:
            del left[0]  # no call: Ctrl-C comes before it, or within the step
            take(step)
        except BaseException as error:  # noqa: BLE001  (the first is raised, the others are logged)
            errors.append(error)
            if not isinstance(error, Exception) and step in again:
                again.remove(step)
                left.insert(0, step)
