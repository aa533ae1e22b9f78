"""The work of a collective over the lane: what ``dist.all_reduce(..., async_op=True)`` returns in a world."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch.distributed import Work  # type: ignore[attr-defined, unused-ignore]

from multiworld._c10d.futures import fail
from multiworld._c10d.waiter_pool import pool

if TYPE_CHECKING:
    from datetime import timedelta

    from multiworld._c10d.lane.collective import Collective

__all__ = ["CollectiveWork"]


class _Messages(Protocol):
    def conclude(self, collective: Collective, timeout: float = ..., /) -> None: ...

    def explained(self, error: Exception, /) -> Exception: ...


class CollectiveWork(Work):  # type: ignore[misc, unused-ignore]
    """A collective that is under way, or over.

    Args:
        messages: of the world.
        collective: that was begun.
    """

    def __init__(self, messages: _Messages, collective: Collective) -> None:
        super().__init__()
        self._messages = messages
        self._collective = collective

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it is over.

        Args:
            timeout: None, or 0: the group's own.

        Raises:
            BrokenWorldException: the world broke, or this took longer than `timeout`, which breaks it.
        """
        self._messages.conclude(self._collective, timeout.total_seconds() if timeout else 0.0)
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether `wait` does not block."""
        return self._collective.done

    def is_success(self) -> bool:
        """Whether it is over, and went well."""
        return self._collective.done and self._collective.error is None

    def exception(self) -> Exception | None:
        """What `wait` raises; None as long as that is nothing."""
        error = self._collective.error
        return None if error is None else self._messages.explained(error)

    def source_rank(self) -> NoReturn:
        """A collective has no source."""
        raise RuntimeError("source_rank() is of receives, and this is a collective")

    def result(self) -> Any:
        """The tensors that it was given to write to, as torch has them for this kind of collective."""
        return self._collective.outputs

    def get_future(self) -> torch.futures.Future[object]:
        """Return a future that is done when this is over; its value is `result`."""
        future: torch.futures.Future[object] = torch.futures.Future()

        def complete() -> None:
            try:
                self.wait()
            except Exception as error:
                fail(future, error)
            else:
                future.set_result(self.result())

        if self.is_success():
            complete()  # torch's future of a work that was waited for is done, too
        else:
            pool.run(complete, later=True)
        return future

    def abort(self) -> NoReturn:
        """A collective cannot be aborted alone."""
        raise RuntimeError("a single collective cannot be aborted: close the world")
