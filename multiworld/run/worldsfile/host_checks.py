"""Checks of a worlds file that depend on this host: its backends, and its stores."""

from __future__ import annotations

import difflib
import errno
import os
import socket
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from multiworld._net.blocking import BlockingCall
from multiworld._net.stores.address import StoreAddress, without_login
from multiworld._net.stores.etcd_address import EtcdAddress, is_etcd
from multiworld._net.stores.tcp_client import NotAStoreError, TcpClient
from multiworld.errors import InvalidJoinError
from multiworld.run.errors import PlanError
from multiworld.run.worldsfile.worlds_plan import LAUNCHER

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld.run.worldsfile.worlds_plan import PlannedWorld, WorldsPlan

__all__ = ["check_backends", "check_stores"]

_SLACK = 0.5
"""Seconds that a check gets beyond its own timeouts before it is given up."""


def check_backends(plan: WorldsPlan) -> None:
    """Check that torch can build the worlds' backends; a script may register unknown ones.

    Raises:
        PlanError: torch knows a backend and was built without it, or its name is misspelt.
    """
    from multiworld._c10d.capabilities import backend_abilities  # noqa: PLC0415  (loads torch.distributed)

    known = {ability.name: ability.available for ability in backend_abilities()}
    there = [name for name, available in known.items() if available]
    for world in plan.worlds:
        for part in world.backend.split(","):
            name = part.rpartition(":")[2].strip()
            close = difflib.get_close_matches(name, known, 1, 0.6)
            if known.get(name, not close and name != ""):
                continue
            meant = f" (did you mean {close[0]!r}?)" if close and name not in known else ""
            raise PlanError(
                f"world {world.name!r}: backend {world.backend!r}: this torch has no {name!r}{meant}",
                path=plan.path,
                line=world.line,
                rule=f"This torch has {', '.join(there)}",
                next_step="Choose one of them, or install a torch that has it",
            )


def check_stores(plan: WorldsPlan, *, timeout: float = 2.0) -> None:
    """Check that the stores of the worlds can be used from here: all at once, each within `timeout`.

    A tcp store need not be served yet (the world's rank 0 will do it), but its host must answer, and a server
    at its port must be a TCPStore. Files need a folder that can be written.

    Args:
        plan: the worlds.
        timeout: seconds.

    Raises:
        PlanError: for the first world, in the file's order, whose store cannot be used.
    """
    first = {world.store: world for world in reversed(plan.worlds) if world.store != LAUNCHER}
    deadline = time.monotonic() + timeout
    checks = {store: _Check(plan.path, world, deadline) for store, world in first.items()}
    calls = {store: BlockingCall(check.find, name="m8d-check-store") for store, check in checks.items()}
    for world in plan.worlds:
        if first.get(world.store) is not world:
            continue
        call = calls[world.store]
        if call.wait(deadline - time.monotonic() + _SLACK):
            error = call.result()
        else:  # a name server, or a network file system, that does not answer
            error = checks[world.store].fault(f"no answer within {timeout:g} s")
        if error is not None:
            raise error


class _Check:
    """Check of one store."""

    def __init__(self, path: str, world: PlannedWorld, deadline: float) -> None:
        self._path, self._world, self._deadline = path, world, deadline

    def find(self) -> PlanError | None:
        """Return the store's fault; None if it can be used."""
        return self._try(self._look)

    def _try(self, look: Callable[[], PlanError | None]) -> PlanError | None:
        try:
            return look()
        except (OSError, UnicodeError) as exc:  # UnicodeError: a name that no host can have
            return self.fault(getattr(exc, "strerror", None) or str(exc))

    def fault(
        self,
        what: str,
        rule: str = "The host of a store resolves, and can be reached from here",
        next_step: str = 'Check the address, or leave "store" out: the launcher then serves it',
    ) -> PlanError:
        return PlanError(
            f"world {self._world.name!r}: store {without_login(self._world.store)!r}: {what}",
            path=self._path,
            line=self._world.line,
            rule=rule,
            next_step=next_step,
        )

    def _look(self) -> PlanError | None:
        try:
            if is_etcd(self._world.store):
                EtcdAddress.parse(self._world.store, world=self._world.name)
                return None  # its members may differ in what they reach of it
            addresses = StoreAddress.parse_all(self._world.store, world=self._world.name)
        except InvalidJoinError as exc:
            return self.fault(
                "it is no store", f'A store is "{LAUNCHER}", or: {exc.rule}', exc.next_step or "Write it so"
            )
        if addresses[0].scheme == "file":
            return self._look_at_file(addresses[0])
        fault: PlanError | None = None
        for address in addresses:
            if (fault := self._try(partial(self._look_at_host, address))) is None:
                return None  # of a list one is enough
        return fault

    def _look_at_file(self, address: StoreAddress) -> PlanError | None:
        folder = Path(address.path).parent
        if folder.is_dir() and os.access(folder, os.W_OK) and not Path(address.path).is_dir():
            return None
        return self.fault(
            "it cannot be written",
            "A file store is a file in a folder that exists and can be written",
            f"Make {folder} writable, or give another path",
        )

    def _look_at_host(self, address: StoreAddress) -> PlanError | None:
        last: Exception | None = None
        for family, _, _, _, to in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
            try:
                client = TcpClient.connect(family, (str(to[0]), int(to[1])), deadline=self._deadline)
            except NotAStoreError:  # noqa: PERF203  (one or two addresses)
                return self.fault(
                    "somebody else listens there",
                    "The port is free, or a TCPStore's",
                    "Give another port",
                )
            except ConnectionRefusedError:  # the host is there, the port is free for rank 0
                return None
            except OSError as exc:
                last = exc
                if exc.errno == errno.ECONNRESET:
                    return None
            else:
                client.close()
                return None
        reason = getattr(last, "strerror", None) or str(last)
        return self.fault("no answer in time" if isinstance(last, TimeoutError) else reason)
