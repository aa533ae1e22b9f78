"""The versions of weights that a trainer has in memory, and which of them are being sent."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

from multiworld._core.reraise import as_new
from multiworld._core.weights import Entry, Head, superseded
from multiworld.weights.tensors import summed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

__all__ = ["Shelf", "Version"]


class Version:
    """A version of the weights, as buckets of bytes.

    Attributes:
        number: of the version.
        rooms: its buckets; none any more once the shelf has let go of it.
        cut: set when its transfers are to end, because others were published meanwhile.
        holds: engines that are about to get it, or get it.
        waits: engines that were told of it, and have not answered.
    """

    def __init__(
        self, session: str, number: int, bucket: int, entries: list[Entry], rooms: list[Tensor]
    ) -> None:
        self.number = number
        self.rooms = rooms
        self.cut = threading.Event()
        self.holds = self.waits = 0
        self._head = Head(session, number, bucket, tuple(entries), ())
        self._summing = threading.Lock()
        self._summed: Future[tuple[str, ...] | None] | None = None

    def head(self, within: float) -> Head | None:
        """Return what engines are told of it; None where the digests take longer, or it was cut before.

        The first caller has a thread compute them: of hundreds of gigabytes that takes minutes.

        Args:
            within: seconds.
        """
        with self._summing:
            if self._summed is None:
                done: Future[tuple[str, ...] | None] = Future()
                threading.Thread(target=self._sum, args=(done,), daemon=True, name="m8d-weights-sum").start()
                self._summed = done  # not before: where no thread can be had, the next caller tries
        if not wait([self._summed], within).done or (digests := self._summed.result()) is None:
            return None
        session, number, bucket, entries, _ = self._head
        return Head(session, number, bucket, entries, digests)

    def _sum(self, done: Future[tuple[str, ...] | None]) -> None:
        digests = []
        try:
            for number in range(len(self.rooms)):
                # One alone, for the shelf may let go of them meanwhile: there is none then.
                room = self.rooms[number : number + 1]
                if self.cut.is_set() or not room:
                    done.set_result(None)
                    return
                digests.append(summed(*room))
            done.set_result(tuple(digests))
        except BaseException as error:  # noqa: BLE001  (raised where it is waited for)
            done.set_exception(as_new(error))  # its frames have the weights


class Shelf:
    """See the module.

    Args:
        most: versions in memory, at most; one that is cut counts until the message that is being sent of it
            has gone, and the one that is copied comes on top until it is `put`. The bucket whose digest is
            being computed stays until that is done.
        stopped: whether the publisher is closed; `changed` is notified when that changes.

    Attributes:
        newest: that was published last; none any more once the publisher is closed.
        last: its number; -1 before the first.
        changed: held and notified at changes.
    """

    def __init__(self, most: int, stopped: Callable[[], bool]) -> None:
        self.newest: Version | None = None
        self.last = -1
        self.changed = threading.Condition()
        self._most = most
        self._stopped = stopped
        self._sending: dict[int, Version] = {}
        self._spare: list[list[Tensor]] = []

    def rooms(self) -> Iterator[Tensor]:
        """Return buckets that are not used any more, to fill them anew."""
        with self.changed:
            return iter(self._spare.pop() if self._spare else [])

    def put(self, version: Version) -> bool:
        """Publish a version; return False where one of its number or a larger one was while it was copied."""
        with self.changed:
            if version.number <= self.last:
                return False
            if self._stopped():
                return True
            # At once: where Ctrl-C comes, no other weights are published with that number.
            before, self.newest, self.last = self.newest, version, version.number
            if before is not None and before.number not in self._sending:
                self._release(before)
            sent = [number for number, each in self._sending.items() if each.holds]
            for number in superseded(version.number, sent, self._sending, self._most):
                cut = self._sending[number]
                cut.cut.set()
                self._free(cut)
            self.changed.notify_all()
            return True

    def take(self, after: int, timeout: float, lost: Callable[[], bool]) -> Version | None:
        """Wait for a version above `after`, and hold it until `done`; None where none comes in time.

        `lost` says whether the engine is: then there is none for it. `changed` is notified when that changes.
        """

        def over() -> bool:
            return self._stopped() or lost()

        with self.changed:
            self.changed.wait_for(
                lambda: over() or (self.newest is not None and self.newest.number > after), timeout
            )
            newest = self.newest
            if over() or newest is None or newest.number <= after:
                return None
            self._sending[newest.number] = newest
            newest.holds += 1
            return newest

    @contextlib.contextmanager
    def waiting(self, version: Version) -> Iterator[None]:
        """Wait for an engine's answer about a version that is held: in the block it is kept until it is cut.

        An engine may load for longer than it takes to publish many versions. If the version is cut when the
        block ends, its buckets may be gone.
        """
        with self.changed:
            version.holds, version.waits = version.holds - 1, version.waits + 1
            self._free(version)
        try:
            yield
        finally:
            with self.changed:
                version.holds, version.waits = version.holds + 1, version.waits - 1

    def done(self, version: Version) -> None:
        """End the hold on a version: it was sent, or cannot be."""
        with self.changed:
            version.holds -= 1
            self._free(version)

    def clear(self) -> None:
        """Keep nothing any more: the publisher is closed. What is being sent is freed when that ends."""
        with self.changed:
            self.newest = None
            self._spare.clear()

    def _free(self, version: Version) -> None:
        """Let go of a version that no engine gets any more."""
        wanted = version.holds or (version.waits and not version.cut.is_set())
        if wanted or self._sending.pop(version.number, None) is None:
            return
        if version is not self.newest:
            self._release(version)

    def _release(self, version: Version) -> None:
        rooms, version.rooms = version.rooms, []
        if not self._stopped() and len(self._spare) + len(self._sending) + 1 < self._most:
            self._spare.append(rooms)
