"""One member's end of a lane: its connections to the other members.

No thread belongs to a lane. A thread that waits for an operation reads and writes the connections meanwhile,
so that nothing is handed over: one thread at a time leads, others that wait are served by it, and one of them
leads after it. An event loop that awaits looks at its connection itself (`multiworld._net.lane.awaiting`).
Posted operations that no caller waits for have one thread in the process (`multiworld._net.lane.background`).
Long messages are read from their senders' memory by threads of the process (`multiworld._net.lane.reading`).

All I/O is non-blocking and happens under the endpoint's lock; only `poll` waits, without it, and so Ctrl-C is
heard. One that comes while the lock is held leaves the protocol in doubt: the lane ends then.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import TYPE_CHECKING

from multiworld._core.lane.frames import READ_FROM
from multiworld._core.lane.operations import Receive, Send
from multiworld._core.reraise import as_new, raised_by_the_program
from multiworld._net.lane import graceful_close, reading_threads, wakes
from multiworld._net.lane.connections import NOW
from multiworld._net.lane.waiting import LateError, Operation, Waiting

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld._core.lane.peer import Peer
    from multiworld._net.lane.reading import PieceRead
    from multiworld._net.lane.waiting import Short
    from multiworld._net.tls.stream import Stream

__all__ = ["Endpoint", "Operation"]

_ASK_AFTER, _ASK_AGAIN = 0.001, 0.5  # seconds; see `drain`
_SHORT = 4000  # bytes that come with their header in one read


class Endpoint(Waiting):
    """See the module.

    Args:
        connections: connected stream sockets by rank; the endpoint owns them.
        readers: of the members whose memory can be read, see `MemoryReader.read`.
        lost: told of a connection that ended, once, with its rank and why, by the thread that finds it, which
            holds the lock. What waits for that member goes on waiting until `fail`.
    """

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
            LateError: at the deadline; `view` must stay as it is, and `keep` is held, until the lane ends.
            NoDescriptorError: the process has none left for this thread, which may have to wait.
            RuntimeError: in a signal's handler that interrupts a call of the same thread here, which it would
                wait for; the message is sent nevertheless if a part of it was written.
            Exception: that the lane ended with, or of a signal's handler: the message is sent nevertheless.
        """
        try:
            wakes.here.wake  # noqa: B018  (cheaper than the call, and most have it)
        except AttributeError:
            wakes.mine()  # before a part of the message is written
        if self._lock.locked():
            self._refuse_in_the_middle()
        if peer not in self._same_memory:
            address = 0
        with self._lock:
            try:
                send = self._sent_at_once(peer, channel, tag, view, address, keep)
            except BaseException as error:
                self._in_doubt(error)
                raise
        if send is True:
            return
        if send is False:
            if self._leader is not None:
                self._refuse_in_the_middle()
            send = self.post_send(peer, channel, tag, view, address, keep)
        if not send.done:
            try:
                self.wait(send, deadline)
            except (LateError, ConnectionAbortedError):
                raise
            except BaseException:
                if self.left_alone is not None and not send.done:
                    self.left_alone(self, send)
                raise
        if send.error is not None:
            raise as_new(send.error)

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
            LateError: none came until the deadline.
            NoDescriptorError: the process has none left.
            Exception: that the lane ended with, or of a signal's handler.
        """
        if self._lock.locked():
            self._refuse_in_the_middle()
        posted: list[Receive] = []
        places: list[int] = []  # of a message that was taken the short way
        try:
            if source is not None and len(view) <= _SHORT:
                short = source, channel, tag, view, keep
                if self._received_at_once(short, deadline, posted, places):
                    return source
            if not posted:
                with self._lock:
                    self._post(source, channel, tag, view, keep, posted)
                if self._core.reads:
                    self.read_on()
            receive = posted[0]
            if not receive.done:
                self.wait(receive, deadline)
            if receive.error is None:
                assert receive.sender is not None  # noqa: S101  (it has a message)
                return receive.sender
        except BaseException:
            if source is not None and places:
                posted.append(_as_posted(source, channel, tag, view, places[0], keep))
            for each in posted:
                self.take_back(each)  # also if its message came just now
            raise
        raise as_new(receive.error)

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
        if self._lock.locked():
            self._refuse_in_the_middle()
        if peer not in self._same_memory:
            address = 0
        with self._lock:
            try:
                if self._core.peers[peer].outgoing.low and peer in self._net.sockets:
                    self._go_on(peer, select.POLLIN)  # a thread that only sends learns of credit here
                sent = self._sent_at_once(peer, channel, tag, view, address, keep)
                if sent is True:
                    send = Send(peer, channel, tag, view)
                    send.done = True
                    return send
                if sent:
                    return sent
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
        if self._lock.locked():
            self._refuse_in_the_middle()
        posted: list[Receive] = []
        try:
            with self._lock:
                self._post(source, channel, tag, view, keep, posted)
            if self._core.reads:
                self.read_on()
        except BaseException:
            for each in posted:
                self.take_back(each)
            raise
        return posted[0]

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

    def drop(self, channel: int) -> None:
        """Read what has come, and forget the messages of a channel that have no receive; see `Lane.drop`."""
        with self._lock:
            try:
                for rank in tuple(self._net.sockets):
                    self._net.read(rank)
                self._core.drop(channel)
                self._matched_anew()
            except BaseException as error:
                self._in_doubt(error)
                raise

    def has_come(self, channel: int) -> bool:
        """Whether a message of a channel has been read, and has no receive."""
        with self._lock:
            return self._core.has_come(channel)

    def drain(self, deadline: float, ask: Callable[[tuple[int, ...]], None]) -> bool:
        """Wait until the others' receives have taken all that was sent; False if they had not at `deadline`.

        What is sent here returns before it is received there: who leaves, and takes its world with it, first
        waits for that. Members that are lost are not waited for.

        Args:
            deadline: ``time.monotonic()`` seconds.
            ask: called with ranks that do not answer. Perhaps none of their threads waits, and so none reads:
                they have to be told, by another way, to call `ready`. It is called again, ever less often:
                what they are to read may not have been written by then.
        """
        drains: dict[int, Send] = {}
        with self._lock:
            try:
                for rank in tuple(self._net.sockets):
                    drains[rank] = self._core.drain(rank)
                    self._net.write(rank)
                self._tell()
            except BaseException as error:
                self._in_doubt(error)
                raise
        pause = _ASK_AFTER  # who waits there reads what comes, and answers sooner
        while waiting := tuple(rank for rank, each in drains.items() if not each.done):
            until = min(time.monotonic() + pause, deadline)
            try:
                for rank in waiting:
                    self._wait(drains[rank], until)  # also in a handler, where the others' end is not read
            except LateError:
                if until == deadline:
                    return False
                ask(tuple(rank for rank in waiting if not drains[rank].done))
                pause = min(4 * pause, _ASK_AGAIN)
        return all(each.error is None for each in drains.values())

    def fail(self, error: Exception) -> None:
        """End the lane: all that wait have `error`, at once, and the connections are closed; never waits.

        A receive into whose buffer a piece is being read has it when that is over.
        Messages whose sends were over arrive if their members read on, see `graceful_close`.
        In a process that was forked from the endpoint's, only its copies of the descriptors are closed.
        """
        if os.getpid() != self._pid:
            self._net.abandon()  # without the lock, which a thread of the parent may have held
            return
        with self._lock:  # which is free while a piece of a message is read
            # First: who reads a message from this process's memory learns so that it is not kept any more.
            parted = self._net.say_goodbye()
            piece = self._stop(error)
            self._wake_leader()
        graceful_close.close(parted)
        if piece is not None:
            with contextlib.suppress(RuntimeError):  # no thread: the one that reads the piece ends it later
                reading_threads.run(lambda: self._await_piece(piece))

    def _await_piece(self, piece: PieceRead) -> None:
        piece.wait()
        if piece.read is not None:
            self._end_piece(piece, piece.read)

    def _matched_anew(self) -> None:
        self._net.write_all()
        self._tell()
        self._see_to_reads()
        if self._led is None:
            self._wake_leader()  # the message that it waits for, the short way, may be here

    # -- the short ways of small messages --------------------------------------------------------------------

    def _sent_at_once(
        self, peer: int, channel: int, tag: int, view: memoryview, address: int, keep: object | None
    ) -> bool | Send:
        """Send with one call, if nothing waits to be written; returns the send if that was not all of it."""
        if (address and len(view) > READ_FROM) or self._core.error is not None:
            return False
        connection, outgoing = self._net.sockets.get(peer), self._core.peers[peer].outgoing
        if connection is None or (head := outgoing.at_once(channel, tag, len(view))) is None:
            return False
        try:
            count = connection.sendmsg((head, view), (), NOW)
        except OSError as error:  # the next write tells
            if raised_by_the_program(error):
                raise  # what was written would be sent again
            count = 0
        if count == len(head) + len(view):
            return True
        send = Send(peer, channel, tag, view, keep=keep)
        outgoing.half_written(head, send, count)
        self._net.write(peer)
        self._tell()
        return send

    def _received_at_once(
        self, short: Short, deadline: float, posted: list[Receive], places: list[int]
    ) -> bool:
        """Take the next message straight from the connection, if no other thread or message waits.

        Args:
            short: the receive.
            deadline: ``time.monotonic()`` seconds.
            posted: gets the receive, posted before all that came later, where none came before.
            places: gets the message's, see `Receive.place`, where it was taken.

        Returns:
            Whether it was taken.
        """
        source, channel, tag, view, _ = short
        lead: int | None = None
        try:
            with self._lock:
                peer = self._core.peers[source]
                if (
                    self._leader is not None
                    or not self._core.quiet(peer)
                    or source not in self._net.sockets
                    or self._core.reads
                ):
                    return False
                lead = self._leader = wakes.mine()
                self._short, self._sleeps = short, True
            ready = self._look(deadline)
            with self._lock:
                connection = self._net.sockets.get(source)
                self._no_longer_short(posted)
                if posted:
                    return False
                if (
                    connection is not None
                    and ready == [(connection.fileno(), select.POLLIN)]
                    and self._core.quiet(peer)
                    and self._take(connection, peer, channel, tag, view, places)
                ):
                    return True
                self._post(*short, posted)
                return False
        except BaseException:
            if lead is not None:
                with self._lock:
                    self._no_longer_short(posted)
            raise
        finally:
            if lead is not None:
                try:
                    with self._lock:
                        self._give_up_lead()
                except BaseException as error:
                    self._leave_in_doubt(error)
                    raise

    def _no_longer_short(self, posted: list[Receive]) -> None:
        """The leader waits no longer the short way; `posted` gets the receive that another thread posted."""
        if self._posted is not None:
            posted.append(self._posted)
        self._short = self._posted = None

    def _post(
        self,
        source: int | None,
        channel: int,
        tag: int,
        view: memoryview,
        keep: object | None,
        posted: list[Receive],
    ) -> None:
        """Post a receive; before it the one that a thread waits for the short way, which came earlier.

        `posted` gets it under the same hold of the lock: its caller can take it back, wherever interrupted.
        """
        try:
            if self._short is not None:
                short, self._short = self._short, None
                self._posted = self._core.receive(*short)
                self._wake_leader()
            if source is None:
                self._read_all_ready()  # for the turns: of what is read one member may have sent all
            posted.append(self._core.receive(source, channel, tag, view, keep))
            self._net.write_all()
            self._tell()
        except BaseException as error:
            self._in_doubt(error)
            raise

    def _read_all_ready(self) -> None:
        if self._leader is not None:  # it may be with the poll
            for each in tuple(self._net.sockets):
                if each in self._net.sockets:
                    self._net.read(each)
            return
        for fd, events in self._net.poll.poll(0):
            rank = self._net.ranks.get(fd)
            if rank is not None:
                self._go_on(rank, events)

    def _take(
        self, connection: Stream, peer: Peer, channel: int, tag: int, view: memoryview, places: list[int]
    ) -> bool:
        try:
            try:
                count = connection.recv_into(peer.incoming.want(), 0, NOW)
            except OSError as error:  # the next read tells
                if raised_by_the_program(error):
                    raise  # what was read would be lost
                return False
            payload = peer.incoming.whole(count, channel, tag, len(view))
            if payload is None:
                peer.incoming.got(count)  # for the receive that is posted next
                self._net.read_rest(peer.rank)
                return False
            view[:] = payload
            peer.taken(len(view))
            if peer.outgoing.pending:
                self._net.write(peer.rank)
                self._tell()
            places.append(peer.order)
        except BaseException as error:
            self._in_doubt(error)
            raise
        return True


def _as_posted(
    source: int, channel: int, tag: int, view: memoryview, place: int, keep: object | None
) -> Receive:
    """Return the receive that was taken the short way as one that was posted, and is over."""
    receive = Receive(source, channel, tag, view, 0, keep)
    receive.done, receive.sender, receive.place = True, source, place
    return receive
