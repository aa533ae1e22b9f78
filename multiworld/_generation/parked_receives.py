"""Receives whose callers stopped waiting (a cancelled ``await``), and those that come after them.

Torch cannot cancel a posted receive, so the messages that belong to such receives still arrive there. The
receives that are posted next get them, in order: whichever way they are posted (`World.recv`, ``dist.recv``,
a batch, any source).
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import itertools
import threading
import time
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from multiworld._core.reraise import raise_instead

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from torch import Tensor

__all__ = ["Parked", "ParkedReceives", "TakenOver", "next_order"]

_TURN = 1.0
"""Seconds for the thread of a receive that has its message to say so; usually far less than one."""

next_order: Callable[[], int] = itertools.count().__next__
"""Numbers receives, as they are posted."""


class Posted(Protocol):
    """The work of a receive."""

    def wait(self) -> object:
        """Block until its message is there."""

    def _source_rank(self) -> int:
        """The sender's rank."""


class Parked:
    """An operation that is waited for on one thread, for all who want to know; most of all a receive.

    When the caller of a receive stops waiting it stays posted, and a later receive of the same source and tag
    takes it over, and copies the message out of `tensor`.

    Args:
        tensor: where the message goes; None for what is no receive, and is not parked.
        wait: blocks until it is there, or raises; returns the sender's rank. None where `settle` is called.
        limit: seconds that `join` waits at most for another thread's `run`; the operation itself ends sooner.
        order: its sequence number among receives (`next_order`); None draws one.
        source: the sender's rank, where it is known.
        explain: makes of an error that `settle` is given what `join` raises.
        taking: the work that is waited for, where it takes over others: its place is that of the one it took.

    Attributes:
        src: the rank it receives from; None for any. Known once it was parked.
        tag: of the message; as `src`.
        ended: like `order`, of the moment when it was done.
    """

    def __init__(
        self,
        tensor: Tensor | None,
        wait: Callable[[], int] | None,
        limit: float,
        *,
        order: int | None = None,
        source: int = -1,
        explain: Callable[[BaseException], BaseException] | None = None,
        taking: TakenOver | None = None,
    ) -> None:
        self.tensor = tensor
        if order is None:
            order = next_order() if taking is None else taking.order
        self.order: int = order
        self._taking = taking
        self.source = source
        self.limit = limit
        self.src: int | None = None
        self.tag = 0
        self.ended = -1
        self._explain = explain
        self._wait = wait
        self._lock = threading.Lock()
        self._over = False
        self._done = threading.Event()
        self._watchers: list[Callable[[], object]] = []
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether the message is there, or an error in its place."""
        return self._over

    @property
    def place(self) -> tuple[int | None, int]:
        """The source and the order of the receive that torch knows, by which messages are given out."""
        taken = None if self._taking is None else self._taking.taken
        return (self.src, self.order) if taken is None else taken.place

    @property
    def failed(self) -> bool:
        """Whether an error came in the message's place."""
        return self._error is not None

    def run(self) -> None:
        """Wait for the message, on this thread; for `join` in others. Once."""
        wait, self._wait = self._wait, None  # it holds the work, and that gloo's device
        assert wait is not None  # noqa: S101  (it is run once)
        error: BaseException | None = None
        try:
            self.source = int(wait())
        except BaseException as exc:
            # A copy: the exception's traceback holds this object, which must not hold the exception.
            error = _copied(exc)
            raise
        finally:
            del wait
            self._end(error)

    def settle(self, error: BaseException | None) -> None:
        """The message is there, or `error` came in its place. The first word counts."""
        self._end(None if error is None else _copied(error))

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            if self._over:
                return
            self._error, self.ended, self._over = error, next_order(), True
            watchers, self._watchers = self._watchers, []
        self._done.set()
        for watcher in watchers:
            watcher()

    def then(self, watcher: Callable[[], object]) -> None:
        """Call `watcher` when this is done, at once if it is."""
        with self._lock:
            if not self._over:
                self._watchers.append(watcher)
                return
        watcher()

    def join(self) -> None:
        """Wait until `run` in another thread has come to its end, and raise what it raised."""
        if not self._done.wait(self.limit):
            raise TimeoutError(f"a receive that was taken over did not end within {self.limit} s")
        if self._error is not None:
            error = _copied(self._error)  # several may ask, and each raising adds to a traceback
            try:
                raise_instead(error, None if self._explain is None else self._explain(error))
            finally:
                del error  # else this frame and the exception hold each other

    def check_fits(self, tensor: Tensor) -> None:
        """Raise if the message, as it was posted, does not fit into `tensor`.

        Raises:
            ValueError: the two have different sizes in bytes, or `tensor` is not contiguous.
        """
        own = self._own()
        if tensor.nbytes != own.nbytes or not tensor.is_contiguous():
            raise ValueError(
                f"A tensor of {tensor.nbytes} bytes{'' if tensor.is_contiguous() else ', not contiguous'}. A cancelled "
                f"receive of {own.nbytes} bytes is still posted for this source and tag, and the next receive "
                "gets its message. Receive into a contiguous tensor of that size first."
            )

    def copy_to(self, tensor: Tensor) -> None:
        """Put the message where the receive that took it over wants it: its bytes, as a receive does."""
        own = self._own()
        if tensor is own:
            return
        if tensor.dtype == own.dtype:
            tensor.copy_(own.view_as(tensor))
            return
        import torch  # noqa: PLC0415  (a tensor is there, so torch is loaded)

        tensor.view(-1).view(torch.uint8).copy_(own.view(-1).view(torch.uint8))

    def _own(self) -> Tensor:
        assert self.tensor is not None  # noqa: S101  (a receive has one)
        return self.tensor


class ParkedReceives:
    """The parked receives of one generation.

    Args:
        run: runs a function on a thread of its own.

    Attributes:
        waiting: those that can be claimed, in order; a list, because each operation asks whether it is empty.
    """

    def __init__(self, run: Callable[[Callable[[], None]], None]) -> None:
        self._run = run
        self._lock = threading.Lock()
        self.waiting: list[Parked] = []

    def park(self, src: int | None, tag: int, parked: Parked) -> None:
        """Keep a receive whose caller stopped waiting, in the order in which they were posted."""
        parked.src, parked.tag = src, tag
        with self._lock:
            bisect.insort(self.waiting, parked, key=attrgetter("order"))

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self.waiting.clear()

    def claim(
        self, src: int | None, tag: int, tensor: Tensor, post: Callable[[Tensor], Posted]
    ) -> TakenOver | None:
        """Return the work of a receive whose message may be that of a parked one; None if no parked one fits.

        Args:
            src: rank to receive from; None for any.
            tag: of the message.
            tensor: where the message goes; contiguous.
            post: posts a receive of `src` and `tag` into a tensor, where it needs one of its own.

        Raises:
            ValueError: a message that is to come first does not fit into `tensor`; nothing has changed.
        """
        with self._lock:
            found = [each for each in self.waiting if each.tag == tag and _may_match(each, src)]
            for each in found:
                each.check_fits(tensor)
            self.waiting = [each for each in self.waiting if each not in found]
        if not found:
            return None
        taken = TakenOver(self, found, src, tag, tensor, post)
        if src is None and all(each.src is not None for each in found):
            # A message of any other member is welcome. (A receive of one source is not posted beside those of
            # any: gloo would give it the message that they wait for.)
            try:
                taken.post()
            except BaseException:
                self.give_back(found)
                raise
        return taken

    def wait_for(self, parked: Parked) -> None:
        """Wait for a receive on a thread of its own; it says itself what came of it."""

        def run() -> None:
            with contextlib.suppress(Exception):  # `join` raises it where it is waited for
                parked.run()

        self._run(run)

    def give_back(self, unused: list[Parked]) -> None:
        """Park again what a receive has not used."""
        for each in unused:
            self.park(each.src, each.tag, each)


def _may_match(parked: Parked, src: int | None) -> bool:
    """Whether the message of `parked` may be the next one of `src`."""
    if src is None or parked.src == src:
        return True
    return parked.src is None and (not parked.done or parked.source == src)


def _next(candidates: list[Parked], src: int | None) -> Parked | None:
    """Return the candidate that has the oldest message of `src`; None if none is there.

    gloo gives a message to the oldest receive of its source, and only then to the oldest one of any source;
    one of any source that ended before the other was posted had its message before.
    """
    done = [each for each in candidates if each.done and (src is None or src in {each.src, each.source})]
    if not done:
        return None
    first = min(done, key=lambda each: (each.place[0] is None, each.place[1]))
    if first.place[0] is None:
        return first
    earlier = [each for each in done if each.place[0] is None and each.ended < first.place[1]]
    return min(earlier, key=lambda each: each.place[1], default=first)


def _ahead(candidates: list[Parked], of: Parked) -> bool:
    """Whether a receive that is not done must have its message, because `of` has: its thread is late."""
    src, order = of.place
    return any(
        not each.done
        and (each.place[0] == of.source or (each.place[0] is None and src is None))
        and each.place[1] < order
        for each in candidates
    )


class TakenOver:
    """The work of a receive whose message may be that of a parked one.

    Args:
        receives: that the candidates are taken from, and given back to.
        candidates: parked receives, in the order in which they were posted.
        src: rank to receive from; None for any.
        tag: of the message.
        tensor: where the message goes.
        post: posts a receive into a tensor.

    Attributes:
        order: of the oldest candidate.
        taken: the one whose message it gets; None before that is known.
    """

    def __init__(
        self,
        receives: ParkedReceives,
        candidates: list[Parked],
        src: int | None,
        tag: int,
        tensor: Tensor,
        post: Callable[[Tensor], Posted],
    ) -> None:
        self.order = candidates[0].order
        self._receives = receives
        self._candidates = candidates
        self._src = src
        self._tag = tag
        self._tensor = tensor
        self._post = post
        self.taken: Parked | None = None
        self._copied = False

    def post(self) -> None:
        """Post one more receive; its thread waits for it."""
        own = self._tensor.new_empty(
            self._tensor.shape
        )  # it may have to stay, and the tensor is the caller's
        work, src = self._post(own), self._src

        def wait() -> int:
            work.wait()
            return src if src is not None else int(work._source_rank())  # noqa: SLF001  (as torch's own recv)

        posted = Parked(own, wait, self._candidates[0].limit)
        posted.src, posted.tag = src, self._tag
        self._candidates.append(posted)
        self._receives.wait_for(posted)

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002  (torch's signature)
        """Block until the message is in the tensor.

        Raises:
            Exception: what ended the receive instead.
        """
        if not self._copied:
            taken = self._first() if self.taken is None else self.taken
            taken.join()
            taken.copy_to(self._tensor)
            self._copied = True
        return True

    def _first(self) -> Parked:
        """Wait for the first message of the source; receives that are not needed are parked again."""
        ended = threading.Semaphore(0)
        watched = 0
        while True:
            while watched < len(self._candidates):
                self._candidates[watched].then(ended.release)
                watched += 1
            limit = self._candidates[-1].limit
            in_time = ended.acquire(timeout=limit)
            found = _next(self._candidates, self._src)
            if found is not None:
                end = time.monotonic() + _TURN
                while _ahead(self._candidates, found) and (left := end - time.monotonic()) > 0:
                    ended.acquire(timeout=left)
                found = _next(self._candidates, self._src)
            elif not in_time or all(each.done for each in self._candidates):
                failed = next((each for each in self._candidates if each.failed), None)
                if failed is None and in_time:
                    self.post()
                    continue
                found = failed or self._candidates[-1]
            if found is not None:
                self.taken = found  # before the others can be claimed: this one comes before them
                self._receives.give_back([each for each in self._candidates if each is not found])
                self._candidates = [found]
                return found

    def is_completed(self) -> bool:
        """Whether `wait` does not block."""
        return self._copied or _next(self._candidates, self._src) is not None

    def source_rank(self) -> int:
        """Return the rank that the message came from."""
        return self.taken.source if self._copied and self.taken is not None else -1

    _source_rank = source_rank


def _copied(exc: BaseException) -> BaseException:
    try:
        twin = copy.copy(exc)
    except Exception:  # noqa: BLE001  (an exception class may refuse to be built from its own arguments)
        return RuntimeError(str(exc))
    return twin.with_traceback(None)
