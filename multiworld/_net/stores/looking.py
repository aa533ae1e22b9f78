"""Looking at the addresses of a store's list: what is there, and which are this host's."""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING

from multiworld._core.membership.roster import Endpoint
from multiworld._core.membership.serving import AddressState, Found
from multiworld._net import host_address
from multiworld._net.stores.probe import answers
from multiworld._net.stores.resolving import resolved_targets
from multiworld._net.stores.tcp_client import NotAStoreError, TcpClient
from multiworld.errors import WorldError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from multiworld._net.stores.address import StoreAddress
    from multiworld._net.tls.credentials import Credentials

__all__ = ["BUSY", "LOOK", "PROCESS", "STATE", "Addresses"]

STATE = "m8d/serving"
"""The key by which a server says what it is: "candidate", or "open", its epoch and its mark."""

PROCESS = "m8d/process"
"""The key by which an open server says which process serves it, by its id in rosters, if it has one."""

LOOK = 0.3
"""Seconds that all addresses have to accept a connection, and to answer where another may have the server."""

BUSY = 2.0
"""Seconds that a process has to answer whose host accepts connections for it: it may only be slow."""

_BRIEF = 0.1
"""The same where it was slow before, or its process is lost for a world: one that works answers at once."""

_RESOLVE_AGAIN = 5.0
"""Seconds after which the name of a host that is silent is resolved anew: it may lead elsewhere by now."""

_UNRESOLVED = 0.25
"""Seconds for the same where it does not resolve."""

ORDINARY = 3.0
"""Seconds after which a store that has not said what it is counts as an ordinary one, not as a candidate.

A candidate says so right after it has bound its address, in two calls of a second at most. One that stood
still for longer looks at the others after that, and gives way to a server that has followed meanwhile.
"""

_SLOW = Found(AddressState.SILENT, slow=True)


class Addresses:
    """The addresses of a list.

    Args:
        every: in the list's order.
        credentials: with which connections are TLS; None: they are not.

    Attributes:
        all: as given.
    """

    def __init__(self, every: tuple[StoreAddress, ...], credentials: Credentials | None = None) -> None:
        self.all = every
        self._credentials = credentials
        self._why: dict[int, str] = {}  # what TLS has to do with what was found
        self._unsaid: dict[int, float] = {}  # since when a store does not say what it is; by position
        self._targets: dict[int, list[tuple[int, tuple[str, int]]]] = {}
        # When a name is resolved anew: of a silent host, or that did not resolve; by position.
        self._resolve_at: dict[int, float] = {}

    def look(
        self, skip: int | None = None, *, busy: float = BUSY, brief: Collection[int] = ()
    ) -> tuple[list[Found], dict[int, TcpClient]]:
        """Look at all addresses, or all but one.

        Args:
            skip: its position.
            busy: seconds that each process has to answer.
            brief: positions of those that are hardly waited for.

        Returns:
            What is at each, and by position clients of stores, for the caller to close.
        """
        where = {at: self.targets(at) for at in range(len(self.all)) if at != skip}
        accepted = answers((Endpoint(*to) for targets in where.values() for _, to in targets), LOOK)
        found, clients = [Found(AddressState.SILENT)] * len(self.all), dict[int, TcpClient]()
        for at, targets in where.items():
            said = [accepted[Endpoint(*to)] for _, to in targets]
            if True in said:
                family, to = targets[said.index(True)]
                within = min(busy, _BRIEF) if at in brief else busy
                found[at], client = self._ask(at, family, to, time.monotonic() + within)
                if client is not None:
                    clients[at] = client
            else:
                self._unsaid.pop(at, None)
                if False in said:
                    found[at] = Found(AddressState.FREE)
            if found[at] == Found(AddressState.SILENT):
                self._resolve_at.setdefault(at, time.monotonic() + _RESOLVE_AGAIN)
            else:
                self._resolve_at.pop(at, None)
        return found, clients

    def look_aside(self, at: int, *, quick: bool = True, brief: Collection[int] = ()) -> list[Found]:
        """Look at all addresses but one; `quick`: a process that is slow is silent; `brief`: see `look`."""
        found, clients = self.look(at, busy=LOOK if quick else BUSY, brief=brief)
        for client in clients.values():
            client.close()
        return found

    def targets(self, at: int) -> list[tuple[int, tuple[str, int]]]:
        """Return the numeric addresses of a host, with their families; none while it does not resolve."""
        if at not in self._targets or self._resolve_at.get(at, math.inf) <= time.monotonic():
            self._resolve_at.pop(at, None)
            try:
                self._targets[at] = resolved_targets(self.all[at], world="", deadline=time.monotonic() + LOOK)
            except WorldError:  # silent, as a host that does not answer
                known = self._targets.setdefault(at, [])
                self._resolve_at[at] = time.monotonic() + (_RESOLVE_AGAIN if known else _UNRESOLVED)
        return self._targets[at]

    def is_own(self, at: int) -> bool:
        """Whether an address is one of this host."""
        return any(host_address.is_own(to[0]) for _, to in self.targets(at))

    def told(self, found: Sequence[Found]) -> str:
        """Return what was found, for a message."""
        return ", ".join(
            f"{address.host}:{address.port} {each.look.value}"
            + (f" ({self._why[at]})" if at in self._why else "")
            for at, (address, each) in enumerate(zip(self.all, found, strict=True))
        )

    def _ask(
        self, at: int, family: int, to: tuple[str, int], deadline: float
    ) -> tuple[Found, TcpClient | None]:
        """Ask what accepts connections there what it is."""
        self._why.pop(at, None)
        unsaid = self._unsaid.pop(at, time.monotonic())
        try:
            client = TcpClient.connect_as(self._credentials, family, to, deadline=deadline)
        except NotAStoreError as error:
            silent = isinstance(error.__cause__, TimeoutError)
            if error.next_step:
                self._why[at] = str(error)
            return (_SLOW if silent else Found(AddressState.FOREIGN)), None
        except ConnectionRefusedError:
            return Found(AddressState.FREE), None
        except OSError:
            return _SLOW, None
        try:
            said = (client.get(STATE, deadline=deadline) or b"").decode("latin-1").split()
        except OSError:
            client.close()
            return _SLOW, None
        if not said:
            self._unsaid[at] = unsaid
            if time.monotonic() - unsaid >= ORDINARY:
                self._why[at] = "an ordinary store"
                return Found(AddressState.FOREIGN), client
        if len(said) != 3 or said[0] != "open" or not said[1].isdigit():
            return Found(AddressState.CANDIDATE), client
        process = b""
        with contextlib.suppress(OSError):  # it matters little
            process = client.get(PROCESS, deadline=deadline) or b""
        return Found(AddressState.OPEN, int(said[1]), said[2], process.decode("latin-1")), client
