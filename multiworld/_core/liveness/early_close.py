"""Early-close connections: idle second connections that a killed process's kernel closes before all others.

Each end of a trusted connection dials one and, once it is accepted, moves it into the isolated descriptor
table (`multiworld._net.descriptor_table`), which the kernel closes before it frees the process's memory.
After that the connection carries only `Close`, sent before an orderly end. End of file without `Close`
therefore means that the process died, in whatever order the packets of the two connections arrive. What a
process that left one world and was killed right then has said of it is not waited for: on another host, that
member may count as crashed in place of left.

An early-close connection belongs to one trusted connection and ends with it. Worlds that share the trusted
connection share its early-close connections.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from multiworld._core.liveness.actions import Action, Dial, Drop, Keep, Release, Send
from multiworld._core.liveness.connection import PeerConnection
from multiworld._core.liveness.earliest import Earliest
from multiworld._core.liveness.wire import Attached, Close, Hello

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from multiworld._core.liveness.connection import Place
    from multiworld._core.liveness.wire import Frame
    from multiworld._core.membership.roster import Endpoint

__all__ = ["DELAY", "Credentials", "EarlyClose"]

DELAY = 0.05
"""Seconds from a world's readiness to the dial, so that joins and rebuilds do not compete with it."""
_AGAIN, _SELDOMEST = 1.0, 60.0
"""Seconds from a failed dial to the next one, doubled with each; at most.

The world that the dial was to prove may have ended at the other end meanwhile. The other worlds that the two
processes share still want the connection.
"""


@dataclass(frozen=True)
class Credentials:
    """Address and proof with which an early-close connection is dialed.

    Attributes:
        endpoint: where the other process listens.
        token: of a world that is ready on both ends.
        place: this process's member of it.
    """

    endpoint: Endpoint
    token: bytes
    place: Place


@dataclass
class _Pair:
    """The early-close connections of one trusted connection, one for each direction.

    Attributes:
        main: the trusted connection.
        due: when to dial this end's; infinite for never.
        failed: dials of this end's that failed, one after another.
        dial: this end's, until it is accepted.
        credentials: what `dial` was dialed with.
        kept: former channel of this end's, now in the isolated descriptor table.
        theirs: channel of the other end's.
    """

    main: PeerConnection
    due: float = math.inf
    failed: int = 0
    dial: PeerConnection | None = None
    credentials: Credentials | None = None
    kept: int | None = None
    theirs: int | None = None


class EarlyClose:
    """Decides when early-close connections are dialed, accepted and released, and which peers died.

    Args:
        own: this process's id.
        nonce: gives 16 fresh random bytes.
        channel: gives a fresh number for a connection.
        act: takes an action to carry out.
        credentials: returns what to dial with; None where no world is shared.

    Attributes:
        own_wanted: whether this process dials; it always accepts those of its peers.
        due: when a dial is, or one has taken too long.
    """

    def __init__(
        self,
        own: str,
        *,
        nonce: Callable[[], bytes],
        channel: Callable[[], int],
        act: Callable[[Action], None],
        credentials: Callable[[PeerConnection], Credentials | None],
    ) -> None:
        self.own_wanted = False
        self._own = own
        self._nonce = nonce
        self._channel = channel
        self._act = act
        self._credentials = credentials
        self._pairs: dict[int, _Pair] = {}  # by the trusted connection's channel
        self._by_channel: dict[int, _Pair] = {}  # by the early-close connection's channel
        self._ended: list[PeerConnection] = []
        self.due = Earliest(self._due)

    @property
    def watched(self) -> int:
        """Number of open sockets: those being dialed by this end, and those of the other ends."""
        return len(self._by_channel)

    # -- trusted connections

    def want(self, main: PeerConnection, now: float) -> None:
        """Schedule one dial for `main`, on which a world is ready, unless there is one."""
        if self.own_wanted:
            pair = self._pair(main)
            if pair.dial is None and pair.kept is None:
                pair.due = min(pair.due, now + DELAY)
                self.due.by(pair.due)

    def adopt(self, main: PeerConnection, connection: PeerConnection, place: Place) -> None:
        """Take `connection` as the other end's early-close connection of `main`; its proof was checked."""
        pair = self._pair(main)
        self._release(pair)  # the other end may have made another one
        pair.theirs = connection.channel
        self._by_channel[connection.channel] = pair
        self._act(Send(connection.channel, Attached(*place)))

    def forget(self, main: PeerConnection) -> None:
        """End the early-close connections of `main`, which is gone."""
        pair = self._pairs.pop(main.channel, None)
        if pair is None:
            return
        if pair.dial is not None:
            self._give_up(pair, pair.dial)
        if pair.kept is not None:
            self._act(Release(pair.kept))
        self._release(pair)

    # -- early-close connections; other channels are ignored

    def connected(self, channel: int, now: float) -> None:
        """A dialed connection is established."""
        pair = self._by_channel.get(channel)
        if pair is not None and pair.dial is not None:
            pair.dial.established = True
            pair.dial.since = now
            self.due.by(now + pair.dial.patience)
            self._act(Send(channel, pair.dial.hello()))

    def received(
        self, channel: int, frames: Iterable[Frame], now: float, *, error: str | None = None
    ) -> None:
        """Frames arrived; `error`: why the bytes after them do not parse."""
        pair = self._by_channel.get(channel)
        if pair is None:
            return
        if pair.dial is None or channel != pair.dial.channel:
            # `Close`, or a protocol error; neither says anything about the process.
            self._release(pair)
        elif error is not None or not all(self._answered(pair, pair.dial, frame) for frame in frames):
            self._give_up(pair, pair.dial)
            self._again(pair, now)
        elif pair.credentials is not None and pair.credentials.place in pair.dial.accepted:
            pair.kept, pair.dial, pair.failed = channel, None, 0
            del self._by_channel[channel]
            self._act(Keep(channel))

    def closed(self, channel: int, now: float, *, plain: bool) -> None:
        """A connection ended; `plain`: by end of file, not by a reset or a timeout of the kernel."""
        pair = self._by_channel.pop(channel, None)
        if pair is None:
            return
        if pair.dial is not None and channel == pair.dial.channel:
            pair.dial = None
            self._again(pair, now)
        else:
            pair.theirs = None
            if plain:
                self._ended.append(pair.main)

    # -- time

    def ended(self) -> list[PeerConnection]:
        """Return the trusted connections whose peer died, each once."""
        ended, self._ended = self._ended, []
        return [main for main in ended if main.channel in self._pairs]

    def settle(self, now: float) -> None:
        """Dial what is due; give up dials that take too long."""
        if not self.due.passed(now):
            return
        self.due.changed()
        for pair in tuple(self._pairs.values()):
            if pair.due <= now:
                pair.due = math.inf
                self._dial(pair, now)
            elif pair.dial is not None and pair.dial.since + pair.dial.patience <= now:
                self._give_up(pair, pair.dial)
                self._again(pair, now)

    def wake(self) -> float:
        """Return when `settle` is due next without further events; infinite for never."""
        return self.due.time

    def _due(self) -> float:
        wake = math.inf
        for pair in self._pairs.values():
            wake = min(wake, pair.due)
            if pair.dial is not None:
                wake = min(wake, pair.dial.since + pair.dial.patience)
        return wake

    # -- inside

    def _pair(self, main: PeerConnection) -> _Pair:
        return self._pairs.setdefault(main.channel, _Pair(main))

    def _dial(self, pair: _Pair, now: float) -> None:
        pair.credentials = self._credentials(pair.main)
        if pair.credentials is None:
            return
        channel = self._channel()
        pair.dial = PeerConnection(
            channel, self._own, self._nonce(), dialed=True, since=now, peer=pair.main.peer, established=False
        )
        self._by_channel[channel] = pair
        self._act(Dial(channel, pair.credentials.endpoint))

    def _answered(self, pair: _Pair, dial: PeerConnection, frame: Frame) -> bool:
        """Handle a frame of the handshake; False for one that does not belong there."""
        if isinstance(frame, Hello) and pair.credentials is not None and dial.greet(frame):
            self._act(
                Send(dial.channel, dial.offer_early_close(pair.credentials.token, pair.credentials.place))
            )
            return True
        if isinstance(frame, Attached) and dial.greeted:
            dial.accepted.add((frame.key, frame.rank))
            return True
        return False

    def _give_up(self, pair: _Pair, dial: PeerConnection) -> None:
        """End this end's with `Close`: the other end may have accepted it already."""
        del self._by_channel[dial.channel]
        pair.dial = None
        if dial.greeted:
            self._act(Send(dial.channel, Close()))
        self._act(Drop(dial.channel, orderly=dial.greeted))

    def _again(self, pair: _Pair, now: float) -> None:
        """Schedule the next dial after one that failed."""
        pair.due = now + min(_AGAIN * 2.0**pair.failed, _SELDOMEST)
        pair.failed = min(pair.failed + 1, 10)
        self.due.by(pair.due)

    def _release(self, pair: _Pair) -> None:
        """Close the other end's."""
        if pair.theirs is not None:
            del self._by_channel[pair.theirs]
            self._act(Drop(pair.theirs, orderly=False))
            pair.theirs = None
