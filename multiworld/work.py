"""Work: the result of an asynchronous operation of a world."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, cast

from multiworld._core.reraise import raise_instead
from multiworld.events import State

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from datetime import timedelta

    import torch

    from multiworld._c10d.lane.work import LaneWork
    from multiworld._c10d.waiter_pool import Completing
    from multiworld._generation.generation import Generation

__all__ = ["Waitable", "WorldWork", "seen"]

_T = TypeVar("_T")


class Waitable(Protocol):
    """A ``torch.distributed.Work``."""

    def wait(self, timeout: timedelta = ..., /) -> bool:
        """Block until it is done."""

    def is_completed(self) -> bool:
        """Whether it is."""

    def get_future(self) -> Completing:
        """Its future; raises where it has none."""


class WorldWork:
    """A ``torch.distributed.Work`` whose errors name the world and the cause.

    Everything a ``Work`` has is reachable; `wait` raises `BrokenWorldException` where torch would raise a
    RuntimeError of the transport.

    Args:
        work: torch's.
        generation: of the world it is an operation of.
        once: to wait for `work` once only: gloo waits for a second message when a receive is waited for
            again, and that ends the world. Not on a GPU, where each wait is for the stream that is current
            then.
    """

    __slots__ = ("_done", "_generation", "_turn", "_work")

    def __init__(self, work: Waitable, generation: Generation, *, once: bool = False) -> None:
        self._work = work
        self._generation = generation
        self._turn = threading.Lock() if once else None  # of the thread that waits for `work`
        self._done = False

    @property
    def message(self) -> LaneWork | None:
        """Its message over the lane; None where torch carries it."""
        return cast("LaneWork", self._work) if hasattr(self._work, "operation") else None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation is done, as ``Work.wait`` does; at once when it is done already.

        Args:
            timeout: None, or 0, waits as long as the world's own timeout allows.

        Raises:
            BrokenWorldException: the world broke, or this operation showed that it is broken.
        """
        if self._done:
            return True
        if self._turn is None:
            return self._wait(timeout)
        if not timeout:  # another thread's wait ends at the world's timeout
            with self._turn:
                return self._wait_once(None)
        if not self._turn.acquire(timeout=_seconds(timeout)):
            raise self._generation.explain(TimeoutError("a receive timed out that another thread waits for"))
        try:
            return self._wait_once(timeout)
        finally:
            self._turn.release()

    def _wait_once(self, timeout: timedelta | None) -> bool:
        self._done = self._done or self._wait(timeout)
        return self._done

    def _wait(self, timeout: timedelta | None) -> bool:
        try:
            return bool(self._work.wait() if timeout is None else self._work.wait(timeout))
        except Exception as exc:  # noqa: BLE001  (explained, and raised again)
            try:
                raise_instead(exc, self._generation.explain(exc))
            finally:
                if self._generation.state is not State.ACTIVE:
                    # Who keeps the exception need not keep gloo's device.
                    self._work = _Failed(self._generation)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def __repr__(self) -> str:
        return f"<WorldWork {self._generation.world!r} {self._work!r}>"


def _seconds(timeout: timedelta) -> float:
    return min(max(0.0, timeout.total_seconds()), threading.TIMEOUT_MAX)


class _Failed:
    """Stands for a work that failed; holds nothing of torch's.

    What else a ``Work`` has raises the world's error.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002  (Work's signature)
        raise self._generation.error()

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return False

    def exception(self) -> Exception:
        return self._generation.error()

    def get_future(self) -> torch.futures.Future[object]:
        import torch  # noqa: PLC0415  (an operation has failed, so it is loaded)

        from multiworld._c10d.futures import fail  # noqa: PLC0415  (an operation has failed, so torch is loaded)

        future: torch.futures.Future[object] = torch.futures.Future()
        fail(future, self._generation.error())
        return future

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        from torch.distributed import Work  # type: ignore[attr-defined, unused-ignore]  # noqa: PLC0415  (an operation was posted, so torch is loaded)

        if not hasattr(Work, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def fail(*_: object, **__: object) -> NoReturn:
            raise self._generation.error()

        return fail


def seen(future: asyncio.Future[_T]) -> None:
    """Done callback: marks an error as seen, because its awaiter may have been cancelled."""
    if not future.cancelled():
        future.exception()
