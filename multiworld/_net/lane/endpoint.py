"""One member's end of a lane: its connections to the other members.

No thread belongs to a lane. A thread that waits for an operation reads and writes the connections meanwhile,
so that nothing is handed over: one thread at a time leads, others that wait are served by it, and one of them
leads after it. An event loop that awaits looks at its connection itself (`multiworld._net.lane.awaiting`).
Posted operations that no caller waits for have one thread in the process (`multiworld._net.lane.background`).

All I/O is non-blocking and happens under the endpoint's lock; only `poll` waits, without it, and so Ctrl-C is
heard. One that comes while the lock is held leaves the protocol in doubt: the lane ends then.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from multiworld._core.lane.operations import Receive, Send
from multiworld._net.lane import closing, wakes
from multiworld._net.lane.connections import NOW, Connections, Next
from multiworld._net.lane.reading import Piece, Reading

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from multiworld._core.lane.peer import MemoryRead, Peer
    from multiworld._net.lane.reading import Reader

__all__ = ["Endpoint", "Operation"]

Operation = Send | Receive

_Each = TypeVar("_Each")

_LONGEST = 3600.0  # seconds of one `poll`
_SHORT = 4000  # bytes that come with their header in one read


class Endpoint:
    """See the module.

    Args:
        connections: connected stream sockets by rank; the endpoint owns them.
        readers: of the members whose memory can be read: ``read(address, view, stop)`` says whether it was;
            it ends soon if ``stop()`` is true. See `MemoryReader.read`.
        lost: told of a connection that ended, once, with its rank and why, by the thread that finds it, which
            holds the lock. What waits for that member goes on waiting until `fail`.
    """

    def __init__(
        self,
        connections: Mapping[int, socket.socket],
        readers: Mapping[int, Reader] | None = None,
        lost: Callable[[int, Exception], None] | None = None,
    ) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._net = Connections(connections, tuple(readers or ()), lost)
        self._net.on_blocked[self] = self._was_blocked
        self._core = self._net.lane
        self._reading = Reading(self._core, dict(readers or {}))
        self._on_reads: dict[object, Callable[[], None]] = {}  # see `watch`
        self._leader: int | None = None  # the descriptor that wakes it
        self._led: Operation | None = None  # which it waits for; None while it has the short way
        self._awake: int | None = None  # the descriptor of a leader that is with `_poll`
        # Released when it is over, or when its thread is to lead.
        self._followers: dict[Operation, list[threading.Lock]] = {}
        self._awaited: dict[Operation, list[Callable[[], None]]] = {}  # called when it is over

    # -- blocking --------------------------------------------------------------------------------------------

    def send(
        self,
        peer: int,
        channel: int,
        tag: int,
        view: memoryview,
        deadline: float,
        address: int = 0,
        keep: object | None = None,
    ) -> None:
        """Send, and wait until `view` may be reused; see `post_send`.

        Raises:
            TimeoutError: at the deadline; `view` must stay as it is, and `keep` is held, until the lane ends.
            Exception: that the lane ended with.
        """
        with self._lock:
            try:
                send = self._sent_at_once(peer, channel, tag, view, keep)
            except BaseException as error:
                self._in_doubt(error)
                raise
        if send is True:
            return
        if send is False:
            send = self.post_send(peer, channel, tag, view, address, keep)
        if not send.done:
            self.wait(send, deadline)
        if send.error is not None:
            raise send.error

    def receive(
        self,
        source: int | None,
        channel: int,
        tag: int,
        view: memoryview,
        deadline: float,
        keep: object | None = None,
    ) -> int:
        """Receive a message of exactly that size; returns the sender's rank. See `post_receive`.

        Raises:
            SizesDifferError: the message had another size; it is gone, and nothing is written.
            TimeoutError: none came until the deadline.
            Exception: that the lane ended with.
        """
        if (
            source is not None
            and len(view) <= _SHORT
            and self._received_at_once(source, channel, tag, view, deadline)
        ):
            return source
        receive = self.post_receive(source, channel, tag, view, keep)
        try:
            if not receive.done:
                self.wait(receive, deadline)
        except BaseException:
            self.take_back(receive)  # also if its message came just now
            raise
        if receive.error is not None:
            raise receive.error
        assert receive.sender is not None  # noqa: S101  (it has a message)
        return receive.sender

    # -- operations ------------------------------------------------------------------------------------------

    def post_send(
        self,
        peer: int,
        channel: int,
        tag: int,
        view: memoryview,
        address: int = 0,
        keep: object | None = None,
    ) -> Send:
        """Begin to send; see `Lane.send`. A small message is over when this returns, if the peer reads."""
        with self._lock:
            try:
                if self._core.peers[peer].outgoing.low and peer in self._net.sockets:
                    self._net.read(peer)  # a thread that only sends learns of credit here
                send = self._core.send(peer, channel, tag, view, address, keep)
                self._net.write(peer)
                self._tell()
                self._see_to_reads()
            except BaseException as error:
                self._in_doubt(error)
                raise
        return send

    def post_receive(
        self, source: int | None, channel: int, tag: int, view: memoryview, keep: object | None = None
    ) -> Receive:
        """Begin to receive; see `Lane.receive`."""
        with self._lock:
            try:
                receive = self._core.receive(source, channel, tag, view, keep)
                self._net.write_all()
                self._tell()
            except BaseException as error:
                self._in_doubt(error)
                raise
        if self._core.reads:
            self.read_on()
        return receive

    def cancel(self, receive: Receive) -> bool:
        """Take a receive back; see `Lane.cancel`."""
        with self._lock:
            try:
                self._reading.settle(receive.arrival)
                cancelled = self._core.cancel(receive)
                self._matched_anew()
            except BaseException as error:
                self._in_doubt(error)
                raise
        return cancelled

    def take_back(self, receive: Receive) -> None:
        """Take a receive back even if it is over; see `Lane.take_back`.

        Also if it was told to be over and its task was cancelled before it went on: no message is lost.
        """
        with self._lock:
            try:
                self._reading.settle(receive.arrival)
                self._core.take_back(receive)
                self._matched_anew()
            except BaseException as error:
                self._in_doubt(error)
                raise

    def fail(self, error: Exception) -> None:
        """End the lane: all that wait have `error`, at once, and the connections are closed; never waits.

        Messages whose sends were over arrive if their members read on, see `multiworld._net.lane.closing`.
        In a process that was forked from the endpoint's, only its copies of the descriptors are closed.
        """
        if os.getpid() != self._pid:
            self._net.abandon()  # without the lock, which a thread of the parent may have held
            return
        with self._lock:  # which is free while a piece of a message is read
            self._reading.stop()
            # First: who reads a message from this process's memory learns so that it is not kept any more.
            parted = self._net.say_goodbye()
            self._core.fail(error)
            self._tell()
            self._wake_leader()
        closing.close(parted)

    # -- waiting ---------------------------------------------------------------------------------------------

    def wait(self, operation: Operation, deadline: float) -> None:
        """Wait until an operation is over, and lead meanwhile if no other thread does.

        Args:
            operation: of this endpoint; several threads may wait for it.
            deadline: ``time.monotonic()`` seconds.

        Raises:
            TimeoutError: it is not over at the deadline; it goes on.
        """
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
                elif turn.acquire(timeout=max(0.0, deadline - time.monotonic())):
                    turn = None
                else:
                    raise TimeoutError
        finally:
            with self._lock:
                if turn is not None:
                    _remove(self._followers, operation, turn)
                if self._leader is None or (self._led is operation and self._leader == wakes.mine()):
                    self._give_up_lead()

    def _lead(self, operation: Operation, deadline: float) -> None:
        while not operation.done:
            if time.monotonic() >= deadline:
                raise TimeoutError
            read = bool(self._core.reads) and self.read_on()
            if operation.done:
                return
            # Where another thread reads, it tells when it has.
            ready = self._look(0.0 if read and self._core.reads else deadline)
            with self._lock:
                for fd, events in ready:
                    rank = self._net.ranks.get(fd)
                    if rank is not None:
                        self._go_on(rank, events)

    # -- for loops and the background thread, which look at connections themselves ---------------------------

    def when_over(self, operation: Operation, call: Callable[[], None]) -> bool:
        """Have `call` called once, by any thread, when an operation is over; False if it is over already.

        `call` may not use the endpoint, which is locked, and may not raise. Several calls may be kept for one
        operation.
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
        piece = Piece()
        try:
            with self._lock:
                begun = self._reading.begin(piece)
            if begun:
                self._reading.carry_out(piece)
        finally:
            piece.over()
            if piece.read is not None:
                self._end_piece(piece, piece.read)
        return begun

    def _end_piece(self, piece: Piece, read: MemoryRead) -> None:
        with self._lock:
            try:
                self._reading.end(piece)
                if piece.succeeded is not None:
                    # A sender that ended its lane does not keep its messages as they were.
                    succeeded = piece.succeeded and self._net.lives(read.arrival.peer)
                    self._core.read(read, succeeded=succeeded)
                    self._net.write(read.arrival.peer)
                    self._tell()
                self._see_to_reads()
            except BaseException as error:
                self._in_doubt(error)
                raise

    # -- the short ways of small messages --------------------------------------------------------------------

    def _sent_at_once(
        self, peer: int, channel: int, tag: int, view: memoryview, keep: object | None
    ) -> bool | Send:
        """Send with one call, if nothing waits to be written; returns the send if that was not all of it."""
        connection, outgoing = self._net.sockets.get(peer), self._core.peers[peer].outgoing
        if connection is None or (head := outgoing.at_once(channel, tag, len(view))) is None:
            return False
        try:
            count = connection.sendmsg((head, view), (), NOW)
        except OSError:  # the next write tells
            count = 0
        if count == len(head) + len(view):
            return True
        send = Send(peer, channel, tag, view, keep=keep)
        outgoing.half_written(head, send, count)
        self._net.write(peer)
        self._tell()
        return send

    def _received_at_once(
        self, source: int, channel: int, tag: int, view: memoryview, deadline: float
    ) -> bool:
        """Take the next message straight from the connection, if no other thread or message waits."""
        with self._lock:
            peer = self._core.peers[source]
            if (
                self._leader is not None
                or not self._core.quiet(peer)
                or source not in self._net.sockets
                or self._core.reads
            ):
                return False
            self._leader = wakes.mine()
        try:
            ready = self._look(deadline)
            with self._lock:
                connection = self._net.sockets.get(source)
                if connection is None or ready != [(connection.fileno(), select.POLLIN)]:
                    return False
                return self._core.quiet(peer) and self._take(connection, peer, channel, tag, view)
        finally:
            with self._lock:
                self._give_up_lead()

    def _take(self, connection: socket.socket, peer: Peer, channel: int, tag: int, view: memoryview) -> bool:
        try:
            count = connection.recv_into(peer.incoming.want(), 0, NOW)
        except OSError:  # the next read tells
            return False
        try:
            payload = peer.incoming.whole(count, channel, tag, len(view))
            if payload is None:
                peer.incoming.got(count)  # for the receive that is posted next
                return False
            view[:] = payload
            peer.taken(len(view))
            if peer.outgoing.pending:
                self._net.write(peer.rank)
                self._tell()
        except BaseException as error:
            self._in_doubt(error)
            raise
        return True

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
        left = min(max(0.0, deadline - time.monotonic()), _LONGEST)
        ready = self._net.poll.poll(left * 1000 + 1 if left else 0)
        if (wake, select.POLLIN) in ready:
            os.eventfd_read(wake)
        return ready

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

    def _matched_anew(self) -> None:
        self._net.write_all()
        self._tell()
        self._see_to_reads()
        if self._led is None:
            self._wake_leader()  # the message that it waits for, the short way, may be here

    def _tell(self) -> None:
        for operation in self._core.take_finished():
            for turn in self._followers.pop(operation, ()):
                turn.release()
            for call in self._awaited.pop(operation, ()):
                call()
            if operation is self._led:
                self._wake_leader()

    def _give_up_lead(self) -> None:
        self._leader = self._led = None
        if self._followers:
            operation, turns = next(iter(self._followers.items()))
            turn = turns[0]
            _remove(self._followers, operation, turn)
            turn.release()
        else:
            self._see_to_reads()

    def _wake_leader(self) -> None:
        leader = self._leader
        if leader is not None and leader != wakes.mine():
            os.eventfd_write(leader, 1)

    def _was_blocked(self, _: int) -> None:
        self._wake_leader()  # so that it looks whether the connection can be written

    def _see_to_reads(self) -> None:
        """Have somebody read what is to be read from memory: the leader, or else those that watch."""
        if self._core.reads:
            if self._leader is not None:
                self._wake_leader()
            else:
                for call in self._on_reads.values():
                    call()

    def _in_doubt(self, error: BaseException) -> None:
        self._reading.stop()
        self._core.fail(ConnectionAbortedError(f"the lane was interrupted by {type(error).__name__}"))
        self._tell()


def _remove(lists: dict[Operation, list[_Each]], operation: Operation, each: _Each) -> None:
    """Take one out of the list of an operation, if it is there."""
    of = lists.get(operation, [])
    if each in of:
        of.remove(each)
        if not of:
            del lists[operation]
