"""Reading messages from the memory of their senders, a piece at a time.

A piece is read without the endpoint's lock, so that other operations go on; no second piece begins meanwhile.
A thread that cancels a receive waits, with the lock, until the piece that is being read into its buffer is
there: about a millisecond. If the sender dies meanwhile, the kernel may free its memory within that system
call: half a second for each GiB. So the end of a lane does not wait; only the receive of that piece does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from multiworld._core.lane.lane import Lane
    from multiworld._core.lane.operations import Arrival
    from multiworld._core.lane.peer import MemoryRead

__all__ = ["Piece", "Reader", "Reading"]

Reader = Callable[[int, memoryview, Callable[[], bool]], bool]
"""``(address, view, stop) -> whether it was read``; it ends soon if ``stop()`` is true."""

_LONGEST = 60.0  # seconds that a system call for one piece may take, on a machine that swaps


class Piece:
    """A part of a message, and the thread that reads it.

    Attributes:
        read: what is read; None before `Reading.begin`.
        reader: reads it.
        succeeded: None while it is not known.
    """

    def __init__(self) -> None:
        self.read: MemoryRead | None = None
        self.reader: Reader | None = None
        self.succeeded: bool | None = None
        self.thread = threading.get_ident()
        self._over = threading.Lock()
        self._over.acquire()

    def over(self) -> None:
        """Say that no byte is written any more."""
        self._over.release()

    def wait(self) -> None:
        """Wait until that was said; a signal handler of the reading thread does not wait for itself."""
        if self.thread != threading.get_ident() and self._over.acquire(timeout=_LONGEST):
            self._over.release()


class Reading:
    """The piece of an endpoint that is being read; all calls but `carry_out` are made under its lock.

    Args:
        lane: says what is to be read.
        readers: ``read(address, view, stop)`` by rank.

    Attributes:
        stopped: whether nothing is to be read any more.
    """

    def __init__(self, lane: Lane, readers: Mapping[int, Reader]) -> None:
        self.stopped = False
        self._lane = lane
        self._readers = readers
        self._piece: Piece | None = None

    def begin(self, piece: Piece) -> bool:
        """Choose what is to be read as `piece`; False if nothing is, or another thread reads."""
        if self._piece is not None or self.stopped:
            return False
        piece.read = self._lane.next_read()
        if piece.read is not None:
            self._piece, piece.reader = piece, self._readers[piece.read.arrival.peer]
        return piece.read is not None

    def carry_out(self, piece: Piece) -> None:
        """Read it."""
        assert piece.read is not None  # noqa: S101  (`begin` returned True)
        assert piece.reader is not None  # noqa: S101  (the same)
        piece.succeeded = piece.reader(piece.read.address, piece.read.view, lambda: self.stopped)

    def end(self, piece: Piece) -> None:
        """Let others begin."""
        if self._piece is piece:
            self._piece = None

    def settle(self, arrival: Arrival | None) -> None:
        """Wait until no byte of a message is being read; for a receive without one there is nothing to do."""
        piece = self._piece
        if piece is not None and piece.read is not None and piece.read.arrival is arrival:
            piece.wait()

    def stop(self) -> Arrival | None:
        """Begin no other piece; returns the message of which one is being read still."""
        self.stopped = True
        self._readers = {}  # they hold descriptors
        piece = self._piece
        return None if piece is None or piece.read is None else piece.read.arrival
