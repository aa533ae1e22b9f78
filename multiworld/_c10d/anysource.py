"""Receives from any source in a gloo group, made so that an abort ends them.

gloo keeps such a receive in no pair, so the end of all pairs does not reach it: it would block until its timeout
(torch 2.4 to 2.15). It is therefore waited for on a thread of the pool, and its caller can be woken. The thread, and
with it gloo's listener of that group, stays until the operation's timeout; nothing else does.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from multiworld._c10d.completion import pool
from multiworld._c10d.translate import translated

if TYPE_CHECKING:
    import datetime as dt

    from multiworld._c10d.gloo import GlooWorld

__all__ = ["AnySource"]

_Work: Any = torch._C._distributed_c10d.Work


class AnySource(_Work):  # type: ignore[misc]
    """The work of a receive from any source.

    Args:
        work: gloo's own.
        world: whose abort ends the waiting.
        group: it was called on, for errors.
    """

    def __init__(self, work: Any, world: GlooWorld, group: Any) -> None:
        super().__init__()
        self._inner = work
        self._world = world
        self._group = weakref.ref(group)  # a work that somebody keeps must not keep the group
        self._woken = threading.Event()
        self._source = -1
        self._started = False
        self._outcome: tuple[Any, BaseException | None] | None = None

    def wait(self, timeout: dt.timedelta | None = None) -> bool:
        """Block until a message is there, as ``Work.wait`` does.

        Raises:
            RuntimeError: as gloo's, or the world's groups were aborted.
        """
        try:
            return self._wait(timeout)
        except Exception as error:
            instead = translated(error, self._group())
            if instead is None:
                raise
            raise instead from error

    def _wait(self, timeout: dt.timedelta | None) -> bool:
        if not self._started:
            self._started = True
            args = () if timeout is None else (timeout,)
            pool.run(lambda: self._run(args))
        with self._world.waking(self._woken):
            self._woken.wait()
        if self._outcome is None:
            self._world.verify()
        result, error = self._outcome if self._outcome is not None else (False, None)
        if error is not None:
            raise error
        return bool(result)

    def _run(self, args: tuple[Any, ...]) -> None:
        result, error = None, None
        try:
            result = self._inner.wait(*args)  # in no world here, so the error is gloo's own
            self._source = int(self._inner._source_rank())
        except BaseException as exc:  # noqa: BLE001  (raised where it is waited for)
            error = exc.with_traceback(
                None
            )  # which holds this frame, and so this work, its group and the sockets
        self._inner = None  # gloo's work keeps the whole group alive
        self._outcome = (result, error)
        self._woken.set()

    def is_completed(self) -> bool:
        """Whether the message is there, or the receive failed; known once somebody has begun to wait."""
        return self._outcome is not None

    def is_success(self) -> bool:
        """Whether the message is there."""
        return self._outcome is not None and self._outcome[1] is None

    def exception(self) -> Any:
        """What the receive failed with."""
        return None if self._outcome is None else self._outcome[1]

    def source_rank(self) -> int:
        """Rank in the group that the message came from."""
        return self._source

    _source_rank = source_rank

    def result(self) -> Any:
        """As gloo's own work: it has none.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("A receive from any source has no result; the message is in its tensor")

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def get_future(self) -> Any:
        """As gloo's own work: it has none.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("A receive from any source has no future in gloo; wait for it")
