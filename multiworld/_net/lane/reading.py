"""Reading messages from the memory of their senders, a piece at a time.

A piece is read without the endpoint's lock, so that other operations go on; no second piece begins meanwhile.
A thread that cancels a receive waits, with the lock, until the piece that is being read into its buffer is
there: about a millisecond. The end of a lane does not wait; only the receive of that piece does.

If the sender dies meanwhile, the kernel may free its memory within that system call: half a second for each
GiB. So a message of more than `LONG` is read by a thread that nothing waits for (`reading_threads`). The
receive fails once no byte of the piece is written any more, whether or not the system call has returned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from multiworld._net.lane.memory import Copied

if TYPE_CHECKING:
    from collections.abc import Mapping

    from multiworld._core.lane.lane import Lane
    from multiworld._core.lane.operations import Arrival
    from multiworld._core.lane.peer import MemoryRead

__all__ = ["LONG", "PieceRead", "Reader", "Reading"]

Reader = Callable[[int, memoryview, Callable[[], bool], Copied], bool]
"""``(address, view, stop, copied) -> whether it was read``; see `MemoryReader.read`."""

LONG = 1 << 20
"""Bytes beyond which a message is read by a thread of its own, which takes a tenth of a millisecond more."""

_LONGEST = 60.0  # seconds that the copy of one piece may take, on a machine that swaps
_LOOK_EVERY = 0.0005


class PieceRead:
    """A part of a message, and the thread that reads it.

    Attributes:
        read: what is read; None before `Reading.begin`.
        reader: reads it.
        copied: whether all of it is there, though the reader may go on.
        succeeded: None while it is not known.
        left_to_thread: whether it is not read, because the caller is to start `reading_threads` for it.
    """

    def __init__(self) -> None:
        self.read: MemoryRead | None = None
        self.reader: Reader | None = None
        self.copied = Copied()
        self.succeeded: bool | None = None
        self.left_to_thread = False
        self.thread = threading.get_ident()
        self._over = threading.Lock()
        self._over.acquire()

    def over(self) -> None:
        """Say that no byte is written any more."""
        self._over.release()

    def wait(self) -> None:
        """Wait until that was said or is seen; a signal handler of the reading thread does not wait."""
        deadline = time.monotonic() + _LONGEST
        while self.thread != threading.get_ident() and not self.copied and time.monotonic() < deadline:
            if self._over.acquire(timeout=_LOOK_EVERY):
                self._over.release()
                return


class Reading:
    """The piece of an endpoint that is being read; all calls but `carry_out` are made under its lock.

    Args:
        lane: says what is to be read.
        readers: ``read(address, view, stop)`` by rank.

    Attributes:
        stopped: whether nothing is to be read any more.
        has_thread: whether a thread of its own reads all that is to be read.
    """

    def __init__(self, lane: Lane, readers: Mapping[int, Reader]) -> None:
        self.stopped = False
        self.has_thread = False
        self._lane = lane
        self._readers = readers
        self._piece: PieceRead | None = None

    def begin(self, piece: PieceRead, *, in_thread: bool = False) -> bool:
        """Choose what is to be read as `piece`; False if nothing is, or another thread reads, or is to.

        `in_thread`: whether the caller is that of `has_thread`.
        """
        if self._piece is not None or self.stopped or self.has_thread is not in_thread:
            return False
        read = self._lane.next_read()
        if read is None:
            return False
        if not in_thread and read.arrival.size > LONG:
            self.has_thread = piece.left_to_thread = True
            return False
        self._piece, piece.read, piece.reader = piece, read, self._readers[read.arrival.peer]
        return True

    def carry_out(self, piece: PieceRead) -> None:
        """Read it."""
        assert piece.read is not None  # noqa: S101  (`begin` returned True)
        assert piece.reader is not None  # noqa: S101  (the same)
        piece.succeeded = piece.reader(
            piece.read.address, piece.read.view, lambda: self.stopped, piece.copied
        )

    def end(self, piece: PieceRead) -> None:
        """Let others begin."""
        if self._piece is piece:
            self._piece = None

    def settle(self, arrival: Arrival | None) -> None:
        """Wait until no byte of a message is being read; for a receive without one there is nothing to do."""
        piece = self._piece
        if piece is not None and piece.read is not None and piece.read.arrival is arrival:
            piece.wait()

    def stop(self) -> PieceRead | None:
        """Begin no other piece; returns the one into whose buffer bytes may still be written."""
        self.stopped = True
        self._readers = {}  # they hold descriptors
        return self._piece
