"""Unlogged operations: `World.send` and `World.recv` without the log of operations, to tell what it costs.

Between two processes it is lost in the noise of a message, twenty times as long: the calls are timed without
their lane, and set beside a message of the same round.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import timeit
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from multiworld._c10d.lane import messages
from multiworld._core.operations.log import OperationLog

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Calls", "without_log"]

_LOG = re.compile(
    r"self\._logged\(entry := \[.*?\]\)$|entry\[ENDED\] = .*$"
    r"|self\._(?:sent|received)(?:_bytes)?\[\w+\] \+= .*$",
    re.MULTILINE,
)
"""Statements of `Messages.send` and `Messages.receive` that log."""

_STATEMENTS = 4
"""In each of the two: the entry, its end, and two counts."""


def without_log(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function with `pass` in place of what logs.

    Raises:
        ValueError: it has another number of such statements: this module does not know them any more.
    """
    source, found = _LOG.subn("pass", textwrap.dedent(inspect.getsource(function)))
    if found != _STATEMENTS or "entry" in source:
        raise ValueError(f"{function.__qualname__} has {found} statements that log, not {_STATEMENTS}")
    made: dict[str, Any] = {}
    exec(compile(source, f"{function.__qualname__} without the log", "exec"), vars(messages), made)  # noqa: S102  (the package's own source, less its log)
    unlogged_function: Callable[..., Any] = made[function.__name__]
    return unlogged_function


class _Nowhere:
    """In the place of the lane: every message is there at once."""

    def send(self, *_: object) -> None:
        pass

    def receive(self, *_: object) -> int:
        return 1


class Calls:
    """`World.send` and `World.recv` in a world of two without its lane, with and without the log."""

    def __init__(self) -> None:
        log, endpoint, tensor = OperationLog(0, 2), _Nowhere(), torch.zeros(1)
        itself: Any = messages.Messages(endpoint, "nowhere", 60.0, lambda error: error, log)  # type: ignore[arg-type]
        names = {"lane": itself, "tensor": tensor}
        for name in ("send", "receive"):
            names[name] = MethodType(without_log(getattr(messages.Messages, name)), itself)
        self._logged = timeit.Timer("lane.send(tensor, 1); lane.receive(tensor, 1)", globals=names)
        self._unlogged = timeit.Timer("send(tensor, 1); receive(tensor, 1)", globals=names)

    def log(self, repeat: int) -> float:
        """Return the µs that the log takes of each send or receive, of so many."""
        logged, unlogged = (
            min(timer.repeat(5, max(1, repeat // 10))) for timer in (self._logged, self._unlogged)
        )
        return 1e6 * (logged - unlogged) / max(1, repeat // 10) / 2
