"""Writer to one member: frames, their order, and how much of the budget they take.

Messages keep their order. A small one is sent whole, a large one is announced; where there is no credit for
that it is held here, and all after it. The other end knows that messages are held
(HELD) and asks for those that its receives wait for (WANT): so a message with a receive never waits for one
without.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from multiworld._core.lane import frames
from multiworld._core.lane.frames import ProtocolError

if TYPE_CHECKING:
    from multiworld._core.lane.operations import Receive, Send

__all__ = ["Outgoing"]

_AT_ONCE = 512 << 10  # bytes of one write, about
_PIECES = 64  # of one write, far below IOV_MAX


class Outgoing:
    """The writing half of a connection.

    Args:
        finished: gets each send that is over (a lane lists its receives there, too).
    """

    def __init__(self, finished: list[Send | Receive]) -> None:
        self._finished = finished
        self._credit = frames.BUDGET
        self._last_id = 0
        self._urgent: deque[memoryview] = deque()  # control frames
        # Frames: header, payload, and the send that goes on once both are written.
        self._queue: deque[tuple[bytes, memoryview | None, Send | None]] = deque()
        self._writing: deque[tuple[memoryview, Send | None]] = deque()  # what `views` returned last
        self._announced: dict[int, Send] = {}  # neither asked for nor given back
        self._held: deque[Send] = deque()
        self._wanted: Counter[tuple[int, int]] = Counter()  # by receives whose message was not held yet
        self._told_held = False
        self._drains: list[Send] = []  # over when the other end has taken all

    @property
    def pending(self) -> bool:
        """Whether there is something to write."""
        return bool(self._writing or self._urgent or self._queue)

    @property
    def low(self) -> bool:
        """Whether so little credit is left that more of it should have come by now."""
        return self._credit < frames.BUDGET // 2

    # -- from this member ------------------------------------------------------------------------------------

    def post(self, send: Send) -> None:
        """Send a message, after those that were posted before."""
        key = send.channel, send.tag
        if self._wanted and self._wanted[key]:
            self._take_want(key)
            self._announce(send)
        elif self._held or not self._send_now(send):
            self._held.append(send)
            self._tell_held()

    def at_once(self, channel: int, tag: int, size: int) -> bytes | None:
        """Return the header of a message that may be written now, before all else, and take its credit.

        None: it has to be posted. This is the short way of most messages; `half_written` takes over where not
        all of it can be written.
        """
        price = size + frames.OVERHEAD
        if (
            size > frames.EAGER_LIMIT
            or price > self._credit
            or self._writing
            or self._queue
            or self._urgent
            or self._held
            or self._wanted
        ):
            return None
        self._credit -= price
        return frames.HEADER.pack(frames.EAGER | channel << 8, tag, 0, size, 0)

    def half_written(self, head: bytes, send: Send, count: int) -> None:
        """`count` bytes of a message, of which `at_once` gave the header, are written; the rest follows."""
        send.sent = len(send.view)
        self._queue.append((head, send.view, send))
        self.views()
        self.wrote(count)

    def drain(self, send: Send) -> None:
        """Finish `send`, which has no bytes, when receives have taken all that was sent before."""
        self._drains.append(send)
        self._tell_held()  # so that credit comes for each message, not for many together
        self._settle_drains()

    def flush(self, send: Send) -> bool:
        """Finish `send`, which has no bytes, when the control frames that wait are written.

        Returns:
            False where a send waits to be written as well: who waits for that one writes them.
        """
        waiting = (*(each for _, each in self._writing), *(each for *_, each in self._queue))
        if not self.pending or any(each is not None for each in waiting):
            return False
        self._queue.append((b"", None, send))
        return True

    def give_up_drains(self) -> None:
        """Finish what `drain` was given: nothing will be taken any more."""
        drains, self._drains = self._drains, []
        for each in drains:
            self._finish(each)

    def tell(self, frame: bytes) -> None:
        """Write a control frame before what is not begun yet."""
        self._urgent.append(memoryview(frame))

    # -- from the other end ----------------------------------------------------------------------------------

    def credited(self, size: int) -> None:
        """CREDIT came: so many bytes were taken there."""
        self._credit += size
        if self._credit > frames.BUDGET:
            raise ProtocolError(f"{size} bytes were credited, more than were sent")
        while self._held and self._send_now(self._held[0]):
            self._held.popleft()
        self._tell_held()
        self._settle_drains()

    def wanted(self, channel: int, tag: int) -> None:
        """WANT came: a receive waits there for a message that may be held here."""
        for send in self._held:
            if (send.channel, send.tag) == (channel, tag):
                self._held.remove(send)
                self._announce(send)
                break
        else:
            if self._told_held:
                self._wanted[channel, tag] += 1
        self._tell_held()

    def cleared(self, id: int) -> None:
        """CLEAR came: the announced message is asked for."""
        self._next_chunk(self._forget(id))

    def given_back(self, id: int) -> None:
        """DONE came: the announced message is not needed any more."""
        self._finish(self._forget(id))
        self._settle_drains()

    # -- to the connection -----------------------------------------------------------------------------------

    def views(self) -> list[memoryview]:
        """Return what to write next, in order; empty if there is nothing."""
        writing, size = self._writing, sum(len(view) for view, _ in self._writing)
        while self._urgent and len(writing) < _PIECES:
            writing.append((self._urgent.popleft(), None))
        while self._queue and size < _AT_ONCE and len(writing) < _PIECES:
            head, payload, send = self._queue.popleft()
            if payload is None:
                writing.append((memoryview(head), send))
            else:
                size += len(payload)
                writing.append((memoryview(head), None))
                writing.append((payload, send))
        return [view for view, _ in writing]

    def wrote(self, count: int) -> None:
        """The first `count` bytes of `views` are written."""
        writing = self._writing
        while writing:
            view, send = writing[0]
            if count < len(view):
                if count:
                    writing[0] = view[count:], send
                return
            count -= len(view)
            writing.popleft()
            if send is not None:
                self._written(send)
        self._settle_drains()

    def fail(self, error: Exception) -> None:
        """Let all sends fail."""
        written = [*(send for _, send in self._writing), *(send for _, _, send in self._queue)]
        begun = [send for send in written if send is not None]
        for each in (*begun, *self._announced.values(), *self._held, *self._drains):
            each.error = error
            self._finish(each)
        for part in (self._urgent, self._queue, self._writing, self._announced, self._held, self._wanted):
            part.clear()
        self._drains.clear()

    # -- inside ----------------------------------------------------------------------------------------------

    def _send_now(self, send: Send) -> bool:
        size = len(send.view)
        if size <= (frames.READ_FROM if send.address else frames.EAGER_LIMIT):
            if frames.cost(size) > self._credit:
                return False
            self._credit -= frames.cost(size)
            head = frames.pack(frames.EAGER, channel=send.channel, tag=send.tag, size=size)
            send.sent = size
            self._queue.append((head, send.view if size else None, send))
            return True
        if self._credit >= frames.OVERHEAD:
            self._announce(send)
            return True
        return False

    def _announce(self, send: Send) -> None:
        # Below zero where a receive asked for it: the receive takes it at once.
        self._credit -= frames.OVERHEAD
        self._last_id = send.id = self._last_id % 0xFFFFFFFF + 1
        self._announced[send.id] = send
        head = frames.pack(
            frames.ANNOUNCE,
            channel=send.channel,
            tag=send.tag,
            id=send.id,
            size=len(send.view),
            address=send.address,
        )
        self._queue.append((head, None, None))

    def _next_chunk(self, send: Send) -> None:
        part = send.view[send.sent : send.sent + frames.CHUNK]
        send.sent += len(part)
        head = frames.pack(frames.DATA, id=send.id, size=len(part))
        self._queue.append((head, part or None, send))

    def _written(self, send: Send) -> None:
        if send.sent < len(send.view):
            self._next_chunk(send)
        else:
            self._finish(send)

    def _finish(self, send: Send) -> None:
        send.done, send.keep = True, None
        self._finished.append(send)

    def _forget(self, id: int) -> Send:
        send = self._announced.pop(id, None)
        if send is None:
            raise ProtocolError(f"message {id} was not announced, or is under way")
        return send

    def _take_want(self, key: tuple[int, int]) -> None:
        self._wanted[key] -= 1
        if not self._wanted[key]:
            del self._wanted[key]

    def _settle_drains(self) -> None:
        taken = self._credit == frames.BUDGET and not (self._announced or self._held)
        if self._drains and taken and not (self._queue or self._writing):
            self.give_up_drains()

    def _tell_held(self) -> None:
        held = bool(self._held or self._drains)
        if held is not self._told_held:
            self._told_held = held
            self._wanted.clear()
            self.tell(frames.pack(frames.HELD, size=int(held)))
