"""The work of a message over the lane: what ``dist.isend`` and ``dist.irecv`` return in a world."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NoReturn, Protocol

import torch
from torch.distributed import Work  # type: ignore[attr-defined, unused-ignore]

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from torch import Tensor

    from multiworld._net.lane.endpoint import Operation

__all__ = ["LaneWork", "MessagesOfWork"]


class MessagesOfWork(Protocol):
    """A `multiworld._c10d.lane.messages.Messages`."""

    def finish(self, operation: Operation, timeout: float = ..., /) -> None:
        """Wait until an operation is over; seconds, 0: the world's. Raises what it ended with."""

    async def until_over(self, operation: Operation, /) -> None:
        """The same in the running loop; does not raise what it ended with."""

    def explained(self, error: Exception, /) -> Exception:
        """Return what `finish` raises for a lane's error."""

    def told(self, error: Exception, /) -> Exception:
        """Return a lane's error as a new one."""

    def when_over(self, work: LaneWork, future: torch.futures.Future[list[Tensor]], /) -> None:
        """Complete torch's future when a work is over."""


class LaneWork(Work):  # type: ignore[misc, unused-ignore]
    """A send or a receive that is under way, or over.

    Args:
        messages: of the world.
        operation: of the lane.
        tensor: as given to torch.
        rank_of: makes a world's rank one of the process group that it was posted in.
        landed: called once, in the first thread that waits, when it went well: puts a receive's bytes into
            `tensor`, where they had to go elsewhere first, and ends the profiler's record.

    Attributes:
        messages, operation: as given.
        limit: seconds that `wait` takes at most without a timeout of its own; 0: the world's.
    """

    def __init__(
        self,
        messages: MessagesOfWork,
        operation: Operation,
        tensor: Tensor,
        rank_of: Callable[[int], int] = int,
        landed: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self.operation = operation
        self.messages = messages
        self._tensor = tensor
        self._rank_of = rank_of
        self._landed = landed
        self.limit = 0.0
        self._landing = None if landed is None else threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it is over.

        Args:
            timeout: None, or 0: that of the process group.

        Raises:
            BrokenWorldException: the world broke, or this took longer than `timeout`, which breaks it.
            SizeMismatchError: the message has another size than the tensor.
        """
        self.messages.finish(self.operation, timeout.total_seconds() if timeout else self.limit)
        self.land()
        return True

    def land(self) -> None:
        """It is over, and went well: put the bytes where they are to be."""
        if self._landing is not None and self._landed is not None:
            with self._landing:  # another thread that waits may be about it
                if self._landed is not None:
                    self._landed()
                    self._landed = None  # not before: others look without the lock

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether `wait` does not block."""
        return self.operation.done

    def is_success(self) -> bool:
        """Whether it is over, and went well."""
        return self.operation.done and self.operation.error is None

    def exception(self) -> Exception | None:
        """What `wait` raises; None as long as that is nothing."""
        error = self.operation.error
        return None if error is None else self.messages.explained(error)

    def source_rank(self) -> int:
        """The sender's rank in the process group; -1 for a send, and before the message is there."""
        sender = getattr(self.operation, "sender", None)
        return -1 if sender is None or not self.operation.done else self._rank_of(sender)

    def _source_rank(self) -> int:
        """The same, for torch."""
        return self.source_rank()

    def result(self) -> list[Tensor]:
        """The tensor."""
        return [self._tensor]

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future that is done when this is over; its value is the list of the tensor."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self.messages.when_over(self, future)
        return future

    def abort(self) -> NoReturn:
        """A message cannot be aborted alone."""
        raise RuntimeError("a single message cannot be aborted: close the world")
