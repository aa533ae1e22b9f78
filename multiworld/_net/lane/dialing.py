"""Dialing the members of lower rank, again and again until they listen."""

from __future__ import annotations

import errno
import os
import socket
import time
from typing import TYPE_CHECKING

from multiworld._net.lane.door import unix_name
from multiworld._net.liveness.listeners import resolve

if TYPE_CHECKING:
    from multiworld._core.membership.roster import LaneAddress, Roster

__all__ = ["Dial", "dials"]

_SHORTEST_PAUSE = 0.0002  # seconds before a dial is repeated
_LONGEST_PAUSE = 0.005
_UNIX_ALONE = 1.0  # seconds before TCP is tried too where the Unix socket should be reached


class Dial:
    """One member that is dialed.

    Attributes:
        rank: the member's.
        due: when it is to be dialed, in ``time.monotonic()`` seconds; None while a connection is being made.
        trouble: why the last attempt failed; "" if none did.
    """

    def __init__(self, roster: Roster, rank: int, now: float) -> None:
        member, lane, own = roster.members[rank], _lane_of(roster, rank), _lane_of(roster, roster.rank)
        self.rank = rank
        self.due: float | None = now
        self.trouble = ""
        self._pause = _SHORTEST_PAUSE
        self._tcp = (member.endpoint.host, lane.port)
        self._unix = unix_name(member.process, lane.port) if lane.place and lane.place == own.place else None
        self._unix_alone = now + _UNIX_ALONE

    def start(self, now: float) -> socket.socket:
        """Return a non-blocking socket that is connected to the member, or connecting.

        Raises:
            OSError: it cannot be made; call `again`.
        """
        self.due = None
        if self._unix is not None:
            try:
                return _connect(socket.AF_UNIX, self._unix)
            except OSError:
                # Another host may call itself the same, as copies of one virtual machine do; and a sandbox
                # may forbid the Unix socket alone.
                if now < self._unix_alone:
                    raise
        return _connect(*resolve(*self._tcp))

    def again(self, trouble: str) -> None:
        """The attempt has failed: the next one is due after a pause."""
        self.trouble = trouble
        self.due = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)


def dials(roster: Roster, now: float) -> dict[int, Dial]:
    """Return a `Dial` for each member that is to be dialed, by rank.

    Raises:
        ValueError: a member has no lane.
    """
    _lane_of(roster, roster.rank)
    return {rank: Dial(roster, rank, now) for rank in range(roster.rank)}


def _lane_of(roster: Roster, rank: int) -> LaneAddress:
    lane = roster.members[rank].lane
    if lane is None:
        raise ValueError(f"rank {rank} of {roster.key} has no lane: nothing can be connected")
    return lane


def _connect(family: socket.AddressFamily, address: str | tuple[object, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        code = sock.connect_ex(address)
    except BaseException:
        sock.close()
        raise
    if code in {0, errno.EINPROGRESS}:
        return sock
    sock.close()
    raise OSError(code, os.strerror(code))
