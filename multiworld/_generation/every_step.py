"""Steps that are all taken, whatever becomes of one of them: the end of a generation, and of a world."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiworld.logs.source import about, logger

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = Callable[[], object]

__all__ = ["take_all"]

_log = logger(__name__)


def take_all(world: str, *steps: Step) -> None:
    """Take the steps in order, even if an earlier one raises, as Ctrl-C does in one that waits.

    Args:
        world: name, for the log: errors after the first are logged.
        steps: each is called once.

    Raises:
        BaseException: what a step raised first, when all are taken.
    """
    errors: list[BaseException] = []
    try:
        _take(steps, errors)
        for error in errors[1:]:
            _log.error("world %r: a step of its end failed", world, exc_info=error, extra=about(world))
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # their tracebacks refer to this frame: a cycle would keep the world's sockets


def _take(steps: tuple[Step, ...], errors: list[BaseException]) -> None:
    if not steps:
        return
    try:
        steps[0]()
    except BaseException as error:  # noqa: BLE001  (the first is raised, the others are logged)
        errors.append(error)
    finally:  # no loop: Ctrl-C may come between two steps, too
        _take(steps[1:], errors)
