"""What an asynchronous operation of a world returns."""

from __future__ import annotations

import copy
import itertools
import threading
from typing import TYPE_CHECKING, Any

from multiworld._core.raising import raise_instead
from multiworld.events import State

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from datetime import timedelta

    from multiworld.generation import Generation

__all__ = ["Parked", "TakenOver", "WorldWork", "next_order", "seen"]

next_order: Callable[[], int] = itertools.count().__next__
"""Numbers receives, as they are posted."""


class WorldWork:
    """A ``torch.distributed.Work`` whose errors name the world and the cause.

    Everything a ``Work`` has is reachable; `wait` raises `BrokenWorldException` where torch would raise a
    RuntimeError of the transport.

    Args:
        work: torch's.
        generation: of the world it is an operation of.
        once: to wait for `work` once only: gloo waits for a second message when a receive is waited for again, and
            that ends the world. Not on a GPU, where each wait is for the stream that is current then.
    """

    __slots__ = ("_done", "_generation", "_once", "_work")

    def __init__(self, work: Any, generation: Generation, *, once: bool = False) -> None:
        self._work = work
        self._generation = generation
        self._once = once
        self._done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation is done, as ``Work.wait`` does; at once when it is done already.

        Args:
            timeout: None waits as long as the world's own timeout allows.

        Raises:
            BrokenWorldException: the world broke, or this operation showed that it is broken.
        """
        if self._done:
            return True
        try:
            done = self._work.wait() if timeout is None else self._work.wait(timeout)
        except Exception as exc:  # noqa: BLE001  (explained, and raised again)
            try:
                raise_instead(exc, self._generation.explain(exc))
            finally:
                if self._generation.state is not State.ACTIVE:
                    # Who keeps the exception need not keep gloo's device.
                    self._work = _Failed(self._generation)
        self._done = bool(done) and self._once
        return bool(done)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def __repr__(self) -> str:
        return f"<WorldWork {self._generation.world!r} {self._work!r}>"


class _Failed:
    """What is left of a work that failed: nothing of torch's."""

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


class Parked:
    """An operation that is waited for on one thread, for whoever wants to know; most of all a receive.

    When the caller of a receive stops waiting (a cancelled ``await``) it stays posted: the next receive of the same
    source and tag takes it, and copies the message out of `tensor`.

    Args:
        tensor: where the message goes.
        wait: blocks until it is there, or raises; returns the sender's rank. None where `settle` will be told.
        limit: seconds after which waiting for another thread's wait is given up; the operation itself ends sooner.
        order: among its like, where it was taken (`next_order`) before; else it is the last so far.
        source: the sender's rank, where it is known.
        explain: makes of an error that `settle` is given what `join` raises.
    """

    def __init__(
        self,
        tensor: Any,
        wait: Callable[[], Any] | None,
        limit: float,
        *,
        order: int | None = None,
        source: int = -1,
        explain: Callable[[BaseException], BaseException] | None = None,
    ) -> None:
        self.tensor = tensor
        self.order = next_order() if order is None else order
        self.source = source
        self._explain = explain
        self._wait = wait
        self._limit = limit
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Wait for the message, on this thread; for `join` in others. Once."""
        wait, self._wait = self._wait, None  # it holds the work, and that gloo's device
        assert wait is not None  # noqa: S101  (whoever made it runs it, once)
        try:
            self.source = int(wait())
        except BaseException as exc:
            # A copy: the exception's traceback holds this object, which must not hold the exception.
            self._error = _copied(exc)
            raise
        finally:
            del wait
            self._done.set()

    def settle(self, error: BaseException | None) -> None:
        """The message is there, or `error` came in its place. The first word counts."""
        if not self._done.is_set():
            self._error = None if error is None else _copied(error)
            self._done.set()

    def join(self) -> None:
        """Wait until `run` in another thread has come to its end, and raise what it raised."""
        if not self._done.wait(self._limit):
            raise TimeoutError(f"a receive that was taken over did not end within {self._limit} s")
        if self._error is not None:
            error = _copied(self._error)  # several may ask, and each raising adds to a traceback
            try:
                raise_instead(error, None if self._explain is None else self._explain(error))
            finally:
                del error  # else this frame and the exception hold each other

    def check_fits(self, tensor: Any) -> None:
        """Raise if the message, as it was posted, does not fit into `tensor`.

        Raises:
            ValueError: the two have different sizes in bytes, or `tensor` is not contiguous.
        """
        if tensor.nbytes != self.tensor.nbytes or not tensor.is_contiguous():
            raise ValueError(
                f"A tensor of {tensor.nbytes} bytes{'' if tensor.is_contiguous() else ', not contiguous'}. A cancelled "
                f"receive of {self.tensor.nbytes} bytes is still posted for this source and tag, and the next receive "
                "gets its message. Receive into a contiguous tensor of that size first."
            )

    def copy_to(self, tensor: Any) -> None:
        """Put the message where the one who took it over wants it: its bytes, as a receive does."""
        if tensor is self.tensor:
            return
        if tensor.dtype == self.tensor.dtype:
            tensor.copy_(self.tensor.view_as(tensor))
            return
        import torch  # noqa: PLC0415  (a tensor is there, so torch is loaded)

        tensor.view(-1).view(torch.uint8).copy_(self.tensor.view(-1).view(torch.uint8))


def _copied(exc: BaseException) -> BaseException:
    try:
        twin = copy.copy(exc)
    except Exception:  # noqa: BLE001  (an exception class may refuse to be built from its own arguments)
        return RuntimeError(str(exc))
    return twin.with_traceback(None)


class TakenOver:
    """The work of a receive that takes over one whose caller stopped waiting."""

    def __init__(self, parked: Parked, tensor: Any) -> None:
        self._parked = parked
        self._tensor = tensor
        self._copied = False

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002  (the operation has its own timeout)
        """Block until the message is in the tensor."""
        self._parked.join()
        if not self._copied:
            self._copied = True
            self._parked.copy_to(self._tensor)
        return True

    def _source_rank(self) -> int:
        return self._parked.source


def seen(future: asyncio.Future[Any]) -> None:
    """A done callback: an error that nobody awaits any more is not an unhandled one."""
    if not future.cancelled():
        future.exception()
