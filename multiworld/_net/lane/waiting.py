"""Waits for operations: which thread reads and writes the connections of an endpoint meanwhile.

One thread at a time leads: it polls, reads and writes; others that wait follow, and one of them leads after
it. Event loops look at connections themselves, and are told here what they cannot see there.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from multiworld._core.lane.operations import Receive, Send
from multiworld._net.lane import reading_threads, wakes
from multiworld._net.lane.connections import Connections, Next
from multiworld._net.lane.reading import PieceRead, Reading
from multiworld.logs.source import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType

    from multiworld._core.lane.peer import MemoryRead
    from multiworld._net.lane.reading import Reader
    from multiworld._net.tls.stream import Stream

    Short = tuple[int, int, int, memoryview, object | None]
    """A receive: source, channel, tag, memory, and what keeps that alive."""

__all__ = ["LateError", "Operation", "Waiting", "seconds_until"]

Operation = Send | Receive

_log = logger(__name__)

_Each = TypeVar("_Each")

_OWN = __name__.removesuffix("waiting")
_LONGEST = 3600.0  # seconds of one `poll`
_MOMENT = 1.0  # seconds for which a thread has the lock at most, but where the lane ends


class LateError(TimeoutError):
    """An operation is not over at its deadline; a plain TimeoutError is of a signal's handler."""


class Waiting:
    """Waiting for the operations of an endpoint; see `Endpoint`, which makes them.

    Attributes:
        readable: by rank, the processes of members whose memory this one may read, as they have proved: their
            pids as the kernel names them.
    """

    left_alone: Callable[[Any, Send], None] | None = None
    """Called with the endpoint and a send under way that no caller waits for: another thread has to go on.

    It may be called under the lock.
    """

    interrupted: Callable[[Exception], None] | None = None
    """Called once, under the lock, when an interrupt has ended the lane: with the error of its operations."""

    def __init__(
        self,
        connections: Mapping[int, Stream],
        readers: Mapping[int, Reader] | None = None,
        lost: Callable[[int, Exception], None] | None = None,
    ) -> None:
        self.readable: Mapping[int, int] = {}
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._net = Connections(connections, tuple(readers or ()), lost)
        self._net.on_blocked[self] = self._was_blocked
        self._core = self._net.lane
        self._reading = Reading(self._core, dict(readers or {}))
        # Who can be read from here can read here, as a rule; where not, messages travel all the same.
        self._same_memory = frozenset(readers or ())
        self._on_reads: dict[object, Callable[[], None]] = {}  # see `watch`
        self._leader: int | None = None  # the descriptor that wakes it
        self._led: Operation | None = None  # which it waits for; None while it has the short way
        self._short: Short | None = None  # what the leader receives the short way
        self._posted: Receive | None = None  # that, once it was posted since another receive came after it
        self._sleeps = False  # the leader looks at nothing any more before its `poll`
        self._awake: int | None = None  # the descriptor of a leader that is with `_poll`
        # Released when it is over, or when its thread is to lead.
        self._followers: dict[Operation, list[threading.Lock]] = {}
        self._awaited: dict[Operation, list[Callable[[], None]]] = {}  # called when it is over

    def wait(self, operation: Operation, deadline: float) -> None:
        """Wait until an operation is over, and lead meanwhile if no other thread does.

        Args:
            operation: of this endpoint; several threads may wait for it.
            deadline: ``time.monotonic()`` seconds.

        Raises:
            LateError: it is not over at the deadline; it goes on.
            NoDescriptorError: the process has no descriptor left; it goes on.
            ConnectionAbortedError: in a forked child.
            RuntimeError: in a signal's handler, in whose thread another operation waits; this one goes on.
        """
        self.require_own()
        if self._leader is not None or self._lock.locked():
            self._refuse_in_the_middle()
        self._wait(operation, deadline)

    def _wait(self, operation: Operation, deadline: float) -> None:
        turn: threading.Lock | None = None
        try:
            while True:
                with self._lock:
                    if operation.done:
                        return
                    if self._leader is None:
                        self._leader, self._led, turn = wakes.mine(), operation, None
                    elif turn is None:
                        turn = threading.Lock()
                        turn.acquire()
                        self._followers.setdefault(operation, []).append(turn)
                if turn is None:
                    self._lead(operation, deadline)
                elif turn.acquire(timeout=seconds_until(deadline)):
                    turn = None
                else:
                    raise LateError
        finally:
            try:
                with self._lock:
                    if turn is not None:
                        _remove(self._followers, operation, turn)
                    if self._leader is None or (self._led is operation and self._leader == wakes.known()):
                        self._give_up_lead()
            except BaseException as error:
                self._leave_in_doubt(error)
                raise

    def require_wait(self) -> None:
        """Raise what `wait` would raise at once, before something is begun that goes on then."""
        self.require_descriptor()
        self._refuse_in_the_middle()

    def require_descriptor(self) -> None:
        """Raise NoDescriptorError if this thread could not wait; ConnectionAbortedError in a forked child."""
        self.require_own()
        wakes.mine()

    def _refuse_in_the_middle(self) -> None:
        """Raise in a signal's handler that would wait here for the call that it interrupts.

        Its thread is the leader, or has the lock, which is another thread's no longer than for a moment.
        """
        stuck = self._leader is not None and self._leader == wakes.known()
        if not stuck and self._lock.locked() and _is_nested(self):
            stuck = True
            try:
                # `for` stores what it is given before Python looks for signals.
                for free in map(self._lock.acquire, (True,), (_MOMENT,)):
                    stuck = not free
            finally:
                if not stuck:
                    self._lock.release()
        if stuck:
            raise nested_call()

    def require_own(self) -> None:
        """Raise ConnectionAbortedError in a forked child: the connections are its parent's."""
        if os.getpid() != self._pid:
            raise ConnectionAbortedError(f"process {os.getpid()} was forked from the one of this connection")

    def _leave_in_doubt(self, error: BaseException) -> None:
        """The thread was interrupted as it gave up the lead: end the lane, as others would wait for it."""
        with self._lock:
            if self._leader is not None and self._leader == wakes.known():
                self._leader = self._led = None
            self._in_doubt(error)

    def _lead(self, operation: Operation, deadline: float) -> None:
        while not operation.done:
            if time.monotonic() >= deadline:
                raise LateError
            before = bool(self._core.reads)
            read = before and self.read_on()
            self._sleeps = True
            if operation.done:
                return
            # Where another thread reads, it tells when it has. What a handler brought is read at once.
            ready = self._look(0.0 if self._core.reads and (read or not before) else deadline)
            with self._lock:
                for fd, events in ready:
                    rank = self._net.ranks.get(fd)
                    if rank is not None:
                        self._go_on(rank, events)

    def _look(self, deadline: float) -> list[tuple[int, int]]:
        """Wait until a connection is ready, this leader is woken, or the deadline."""
        wake = self._leader
        assert wake is not None  # noqa: S101  (this thread leads)
        if self._awake != wake:
            if self._awake is not None and self._awake not in self._net.ranks:
                with contextlib.suppress(KeyError):
                    self._net.poll.unregister(self._awake)
            self._net.poll.register(wake, select.POLLIN)
            self._awake = wake
        left = min(seconds_until(deadline), _LONGEST)
        ready = self._net.poll.poll(left * 1000 + 1 if left else 0)
        self._sleeps = False
        if (wake, select.POLLIN) in ready:
            os.eventfd_read(wake)
        return ready

    # -- for loops and the background thread, which look at connections themselves ---------------------------

    def when_over(self, operation: Operation, call: Callable[[], None]) -> bool:
        """Have `call` called, by any thread, when an operation is over; False if it is over already.

        It is called once, or twice where an interrupt ends the lane meanwhile. It may not use the endpoint,
        which is locked, and may not raise. Several calls may be kept for one operation.
        """
        with self._lock:
            if not operation.done:
                self._awaited.setdefault(operation, []).append(call)
            return not operation.done

    def forget(self, operation: Operation, call: Callable[[], None]) -> None:
        """Take `when_over` back, if `call` is still to come."""
        with self._lock:
            _remove(self._awaited, operation, call)

    def watch(self, watcher: object, on_blocked: Callable[[int], None], on_reads: Callable[[], None]) -> None:
        """Have calls made, by any thread, which may not use the endpoint: it is locked.

        Args:
            watcher: for `unwatch`.
            on_blocked: called with a rank whose connection has to be written later.
            on_reads: called when no thread that waits carries out `read_on`, which is to be done then.
        """
        with self._lock:
            self._net.on_blocked[watcher] = on_blocked
            self._on_reads[watcher] = on_reads
            self._see_to_reads()

    def unwatch(self, watcher: object) -> None:
        """Take `watch` back."""
        with self._lock:
            self._net.on_blocked.pop(watcher, None)
            self._on_reads.pop(watcher, None)

    def hold(self, rank: int | None) -> list[tuple[int, int, Next]]:
        """Keep descriptors, see `Connections.hold`; returns what each connection waits for as well."""
        with self._lock:
            return [(each, fd, self._net.next(each)) for each, fd in self._net.hold(rank)]

    def let_go(self, rank: int) -> None:
        """Take one `hold` of a rank back."""
        with self._lock:
            self._net.let_go(rank)
            if rank in self._net.blocked:
                self._leave_writes(rank)

    def ready(self, rank: int) -> Next:
        """Read and write the connection to `rank` as far as it goes; returns what it waits for then."""
        with self._lock:
            if rank in self._net.sockets:
                self._go_on(rank, select.POLLIN | select.POLLOUT)
        if self._core.reads:
            self.read_on()
        with self._lock:
            return self._net.next(rank)

    def read_on(self) -> bool:
        """Read a part of a message from its sender's memory, if there is one to be read.

        Returns:
            False if there is none, or another thread reads, which calls `on_reads` afterwards.
        """
        piece = PieceRead()
        try:
            begun = self._read_piece(piece)
            if piece.left_to_thread:
                self._start_thread()
        except BaseException:
            if piece.left_to_thread:
                self._end_thread()
            raise
        return begun

    def _start_thread(self) -> None:
        try:
            reading_threads.run(self._read_all)
        except RuntimeError:  # the process gets none
            self._read_all()

    def _read_all(self) -> None:
        try:
            while self._read_piece(PieceRead(), in_thread=True):
                pass
        except Exception as error:  # noqa: BLE001  (logged: it has no caller to hear of it)
            _log.exception("a message could not be read from its sender's memory")
            with self._lock:
                self._in_doubt(error)
        finally:
            self._end_thread()

    def _end_thread(self) -> None:
        with self._lock:
            self._reading.has_thread = False
            self._see_to_reads()

    def _read_piece(self, piece: PieceRead, *, in_thread: bool = False) -> bool:
        try:
            with self._lock:
                begun = self._reading.begin(piece, in_thread=in_thread)
            if begun:
                self._reading.carry_out(piece)
        finally:
            piece.over()
            if piece.read is not None:
                self._end_piece(piece, piece.read)
        return begun

    def _end_piece(self, piece: PieceRead, read: MemoryRead) -> None:
        with self._lock:
            try:
                self._reading.end(piece)
                if piece.succeeded is not None or self._core.error is not None:
                    # A sender that ended its lane does not keep its messages as they were.
                    succeeded = bool(piece.succeeded) and self._net.lives(read.arrival.peer)
                    self._core.read(read, succeeded=succeeded)
                    self._net.write(read.arrival.peer)
                    self._tell()
                self._see_to_reads()
            except BaseException as error:
                self._in_doubt(error)
                raise

    # -- under the lock --------------------------------------------------------------------------------------

    def _go_on(self, rank: int, events: int) -> None:
        try:
            self._net.go_on(rank, events)
            self._tell()
        except BaseException as error:
            self._in_doubt(error)
            raise
        if self._led is None:
            self._wake_leader()  # what it waits for may have come
        elif self._core.reads:
            self._wake_leader()

    def _tell(self) -> None:
        for operation in self._core.take_finished():
            if operation in self._followers or operation in self._awaited:
                self._tell_of(operation)
            if operation is self._led:
                self._wake_leader()

    def _tell_of(self, operation: Operation) -> None:
        """Tell who waits, and then forget that: if an interrupt comes in between they are told again."""
        for turn in self._followers.get(operation, ()):
            if turn.locked():
                turn.release()
        for call in self._awaited.get(operation, ()):
            call()
        self._followers.pop(operation, None)
        self._awaited.pop(operation, None)

    def _give_up_lead(self) -> None:
        self._leader = self._led = None
        self._sleeps = False
        if self._followers:
            operation, turns = next(iter(self._followers.items()))
            turn = turns[0]
            turn.release()  # first: `_stop` tells those that are still listed
            _remove(self._followers, operation, turn)
        else:
            self._see_to_reads()
            for rank in self._net.blocked:
                self._leave_writes(rank)

    def _wake_leader(self) -> None:
        leader = self._leader
        # A signal's handler runs in the thread that sleeps, which goes on to sleep after it.
        if leader is not None and (self._sleeps or leader != wakes.known()):
            os.eventfd_write(leader, 1)

    def _was_blocked(self, rank: int) -> None:
        self._wake_leader()  # so that it looks whether the connection can be written
        self._leave_writes(rank)

    def _leave_writes(self, rank: int) -> None:
        """Leave control frames, for which no operation waits, to another thread if none looks."""
        if self._leader is None and self.left_alone is not None and not self._net.is_held(rank):
            flush = self._core.flush(rank)
            if flush is not None:
                self.left_alone(self, flush)

    def _see_to_reads(self) -> None:
        """Have the leader, or else the watchers, read what is to be read from memory."""
        if self._core.reads and not self._reading.has_thread:
            if self._leader is not None:
                self._wake_leader()
            else:
                for call in self._on_reads.values():
                    call()

    def _in_doubt(self, error: BaseException) -> None:
        if self._core.error is not None:
            return
        stopped_by = ConnectionAbortedError(f"the lane was interrupted by {type(error).__name__}")
        self._stop(stopped_by)
        self._wake_leader()  # no operation is told of one that has the short way
        if self.interrupted is not None:
            self.interrupted(stopped_by)

    def _stop(self, error: Exception) -> PieceRead | None:
        """End the protocol; returns the piece whose receive is told by `_end_piece` alone."""
        piece = self._reading.stop()
        self._core.fail(error, None if piece is None or piece.read is None else piece.read.arrival)
        self._tell()
        # Also those whose turn to be told an interrupt took.
        for operation in [each for each in (*self._followers, *self._awaited) if each.done]:
            self._tell_of(operation)
        return piece


def nested_call() -> RuntimeError:
    """Return what a call raises that would wait for the one that its signal's handler interrupts."""
    return RuntimeError(
        "a signal's handler called an operation that has to wait for the one that it interrupts. "
        "Set a flag in the handler, and call it afterwards"
    )


def _is_nested(endpoint: Waiting) -> bool:
    """Whether this call of an endpoint came in the middle of another one, in a signal's handler."""
    if threading.current_thread() is not threading.main_thread():  # in which alone they run
        return False
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001  (the documented way to the caller's frame)
    outside = False
    while frame is not None:
        if not str(frame.f_globals.get("__name__")).startswith(_OWN):
            outside = True
        elif outside and frame.f_locals.get("self") is endpoint:
            return True
        frame = frame.f_back
    return False


def seconds_until(deadline: float) -> float:
    """Return the seconds until `deadline` (``time.monotonic()``) as locks take them: 0 to some centuries."""
    return min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)


def _remove(lists: dict[Operation, list[_Each]], operation: Operation, each: _Each) -> None:
    """Take one out of the list of an operation, if it is there."""
    of = lists.get(operation, [])
    if each in of:
        of.remove(each)
        if not of:
            del lists[operation]
