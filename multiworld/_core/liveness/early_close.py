"""Tethers: second connections whose end says that a process has died, before its kernel gets round to the first.

Each end of a trusted link dials one to the other and, once that is accepted, puts it where the kernel closes it first
(`multiworld._net.descriptor_table`). Nothing travels on it then. Who ends it in good order says so on it (`Close`), so that no
order of events in the network makes a process that left look like one that died: an end without a word is a death.

A tether belongs to one trusted link, and goes with it. Worlds that share the link share its tethers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from multiworld._core.liveness.actions import Action, Dial, Drop, Keep, Loose, Send
from multiworld._core.liveness.connection import Link
from multiworld._core.liveness.wire import Attached, Close, Hello

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from multiworld._core.liveness.connection import Place
    from multiworld._core.liveness.wire import Frame
    from multiworld._core.membership.roster import Endpoint

__all__ = ["DELAY", "Pledge", "Tethers"]

DELAY = 0.05
"""Seconds between a world that is ready and the dialing of a tether: a join, or a rebuild, shall not wait for it."""


@dataclass(frozen=True)
class Pledge:
    """What a tether is dialed with.

    Attributes:
        endpoint: where the other process listens.
        token: of a world that is ready on both ends.
        place: this process's member of it.
    """

    endpoint: Endpoint
    token: bytes
    place: Place


@dataclass
class _Tie:
    """The tethers of one trusted link.

    Attributes:
        main: the link.
        due: when this end's is to be dialed; infinite for never.
        dial: this end's, until it is accepted.
        pledge: what that one was dialed with.
        kept: channel that this end's was, once it is kept.
        theirs: channel of the other end's.
    """

    main: Link
    due: float = math.inf
    dial: Link | None = None
    pledge: Pledge | None = None
    kept: int | None = None
    theirs: int | None = None


class Tethers:
    """Decides about this process's tethers, and about those of others that it holds the far end of.

    Args:
        own: this process's id.
        nonce: gives 16 fresh random bytes.
        channel: gives a fresh number for a connection.
        act: takes what is to be done.
        pledge: says what to dial with for a trusted link; None where nothing is shared.

    Attributes:
        own_wanted: whether this process dials tethers; it accepts those of others in any case.
    """

    def __init__(
        self,
        own: str,
        *,
        nonce: Callable[[], bytes],
        channel: Callable[[], int],
        act: Callable[[Action], None],
        pledge: Callable[[Link], Pledge | None],
    ) -> None:
        self.own_wanted = False
        self._own = own
        self._nonce = nonce
        self._channel = channel
        self._act = act
        self._pledge = pledge
        self._ties: dict[int, _Tie] = {}  # by the trusted link's channel
        self._by_channel: dict[int, _Tie] = {}  # by the tether's, while it is this module's to watch
        self._ended: list[Link] = []

    @property
    def watched(self) -> int:
        """How many connections are being made into tethers by this end, or are the other ends' tethers."""
        return len(self._by_channel)

    # -- what happened to trusted links

    def want(self, main: Link, now: float) -> None:
        """A world is ready on `main`: it shall have a tether, if it has none. One attempt for each call, at most."""
        if self.own_wanted:
            tie = self._tie(main)
            if tie.dial is None and tie.kept is None:
                tie.due = min(tie.due, now + DELAY)

    def adopt(self, main: Link, link: Link, place: Place) -> None:
        """`link`, which was dialed by the other end, is proved to be the tether of `main`'s other end."""
        tie = self._tie(main)
        if tie.theirs is not None:
            self._release(tie)  # it made another one
        tie.theirs = link.channel
        self._by_channel[link.channel] = tie
        self._act(Send(link.channel, Attached(*place)))

    def forget(self, main: Link) -> None:
        """`main` is gone: so are its tethers, on both ends."""
        tie = self._ties.pop(main.channel, None)
        if tie is None:
            return
        if tie.dial is not None:
            self._give_up(tie, tie.dial)
        if tie.kept is not None:
            self._act(Loose(tie.kept))
        if tie.theirs is not None:
            self._release(tie)

    # -- what happened to tethers; other channels are none of them

    def connected(self, channel: int, now: float) -> None:
        """The one that was dialed is established."""
        tie = self._by_channel.get(channel)
        if tie is not None and tie.dial is not None:
            tie.dial.established = True
            tie.dial.since = now
            self._act(Send(channel, tie.dial.hello()))

    def received(self, channel: int, frames: Iterable[Frame], *, error: str | None = None) -> None:
        """Frames came; `error`: what came after them is none."""
        tie = self._by_channel.get(channel)
        if tie is None:
            return
        if tie.dial is None or channel != tie.dial.channel:
            # In good order where it is `Close`. Whatever else it is: it costs the tether, and nothing else.
            self._release(tie)
        elif error is not None or not all(self._answered(tie, tie.dial, frame) for frame in frames):
            self._give_up(tie, tie.dial)
        elif tie.pledge is not None and tie.pledge.place in tie.dial.accepted:
            tie.kept, tie.dial = channel, None
            del self._by_channel[channel]
            self._act(Keep(channel))

    def closed(self, channel: int, *, plain: bool) -> None:
        """One ended; `plain`: it was closed, not reset or given up by a kernel."""
        tie = self._by_channel.pop(channel, None)
        if tie is None:
            return
        if tie.dial is not None and channel == tie.dial.channel:
            tie.dial = None
        else:
            tie.theirs = None
            if plain:
                self._ended.append(tie.main)

    # -- time

    def ended(self) -> list[Link]:
        """Return the links whose other end has died, once."""
        ended, self._ended = self._ended, []
        return [main for main in ended if main.channel in self._ties]

    def settle(self, now: float) -> None:
        """Dial what is due, give up what takes too long."""
        for tie in tuple(self._ties.values()):
            if tie.due <= now:
                tie.due = math.inf
                self._dial(tie, now)
            elif tie.dial is not None and tie.dial.since + tie.dial.patience <= now:
                self._give_up(tie, tie.dial)

    def wake(self) -> float:
        """When `settle` has to be called again if nothing happens before; infinite for never."""
        wake = math.inf
        for tie in self._ties.values():
            wake = min(wake, tie.due)
            if tie.dial is not None:
                wake = min(wake, tie.dial.since + tie.dial.patience)
        return wake

    # -- inside

    def _tie(self, main: Link) -> _Tie:
        return self._ties.setdefault(main.channel, _Tie(main))

    def _dial(self, tie: _Tie, now: float) -> None:
        tie.pledge = self._pledge(tie.main)
        if tie.pledge is None:
            return
        channel = self._channel()
        tie.dial = Link(
            channel, self._own, self._nonce(), dialed=True, since=now, peer=tie.main.peer, established=False
        )
        self._by_channel[channel] = tie
        self._act(Dial(channel, tie.pledge.endpoint))

    def _answered(self, tie: _Tie, dial: Link, frame: Frame) -> bool:
        """Take an answer to this end's; False where it is not one that leads to a tether."""
        if isinstance(frame, Hello) and tie.pledge is not None and dial.greet(frame):
            self._act(Send(dial.channel, dial.pledge(tie.pledge.token, tie.pledge.place)))
            return True
        if isinstance(frame, Attached) and dial.greeted:
            dial.accepted.add((frame.key, frame.rank))
            return True
        return False

    def _give_up(self, tie: _Tie, dial: Link) -> None:
        """End this end's in good order: the other end may hold it to be a tether already."""
        del self._by_channel[dial.channel]
        tie.dial = None
        if dial.greeted:
            self._act(Send(dial.channel, Close()))
        self._act(Drop(dial.channel, orderly=dial.greeted))

    def _release(self, tie: _Tie) -> None:
        """Let go of the other end's."""
        assert tie.theirs is not None  # noqa: S101  (whoever calls this has seen it)
        del self._by_channel[tie.theirs]
        self._act(Drop(tie.theirs, orderly=False))
        tie.theirs = None
