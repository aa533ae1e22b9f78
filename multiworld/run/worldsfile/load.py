"""A worlds file on disk -> `WorldsPlan`; and what only this host can tell: whether stores and backends are there."""

from __future__ import annotations

import difflib
import errno
import os
import queue
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from multiworld.run.errors import PlanError
from multiworld.run.worldsfile.parse import parse
from multiworld.run.worldsfile.spec import LAUNCHER

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld._net.address import StoreAddress
    from multiworld.run.worldsfile.spec import PlannedWorld, WorldsPlan

__all__ = ["check_backends", "check_stores", "load"]

_MOST_BYTES = 1 << 20
_SLACK = 0.5
"""Seconds that a check gets beyond its own timeouts before it is given up."""


def load(path: str) -> WorldsPlan:
    """Read a worlds file.

    Args:
        path: of the file.

    Raises:
        PlanError: it cannot be read, is no TOML, or breaks a rule.
    """
    try:
        with Path(path).open("rb") as file:
            octets = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as exc:
        raise PlanError(
            getattr(exc, "strerror", None) or str(exc),
            path=path,
            rule="--worlds names a file that can be read",
            next_step="Give its path",
        ) from exc
    if len(octets) > _MOST_BYTES:
        raise PlanError(
            f"more than {_MOST_BYTES} bytes",
            path=path,
            rule=f"A worlds file has at most {_MOST_BYTES} bytes",
            next_step='Use patterns: [worlds."w{i}"] with for = "ROLE"',
        )
    try:
        text = octets.decode()
    except UnicodeDecodeError as exc:
        raise PlanError(
            f"byte {octets[exc.start]:#04x} is no UTF-8",
            path=path,
            line=octets.count(b"\n", 0, exc.start) + 1,
            rule="A worlds file is TOML, which is UTF-8",
            next_step="Save it as UTF-8",
        ) from exc
    return parse(text, path)


def check_backends(plan: WorldsPlan) -> None:
    """See that torch can build the worlds' backends. A name it does not know at all may be the script's to register.

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
    """See that the stores of the worlds can be used from here: all at once, each within `timeout`.

    Nobody needs to serve a tcp store yet (the world's rank 0 will), but its host must answer, and whoever serves its
    port already must be a TCPStore. Files need a folder that can be written.

    Args:
        plan: the worlds.
        timeout: seconds.

    Raises:
        PlanError: for the first world, in the file's order, whose store cannot be used.
    """
    first = {world.store: world for world in reversed(plan.worlds) if world.store != LAUNCHER}
    answers: dict[str, queue.SimpleQueue[PlanError | None]] = {}
    deadline = time.monotonic() + timeout
    for store, world in first.items():
        answer: queue.SimpleQueue[PlanError | None] = queue.SimpleQueue()
        answers[store] = answer
        check = _Check(plan.path, world, deadline)
        threading.Thread(target=check.tell, args=(answer.put,), daemon=True, name="m8d-check-store").start()
    for world in plan.worlds:
        if first.get(world.store) is not world:
            continue
        try:
            error = answers[world.store].get(timeout=max(0.0, deadline - time.monotonic()) + _SLACK)
        except queue.Empty:  # a name server, or a network file system, that does not answer
            error = _Check(plan.path, world, deadline).fault(f"no answer within {timeout:g} s")
        if error is not None:
            raise error


class _Check:
    """One store, seen from here."""

    def __init__(self, path: str, world: PlannedWorld, deadline: float) -> None:
        self._path, self._world, self._deadline = path, world, deadline

    def tell(self, answer: Callable[[PlanError | None], None]) -> None:
        """Check, and hand over what is wrong; None if nothing is."""
        try:
            answer(self._look())
        except (OSError, UnicodeError) as exc:  # UnicodeError: a name that no host can have
            answer(self.fault(getattr(exc, "strerror", None) or str(exc)))

    def fault(
        self,
        what: str,
        rule: str = "The host of a store resolves, and can be reached from here",
        next_step: str = 'Check the address, or leave "store" out: the launcher then serves it',
    ) -> PlanError:
        return PlanError(
            f"world {self._world.name!r}: store {self._world.store!r}: {what}",
            path=self._path,
            line=self._world.line,
            rule=rule,
            next_step=next_step,
        )

    def _look(self) -> PlanError | None:
        from multiworld._net.address import StoreAddress  # noqa: PLC0415  (only where stores are checked)
        from multiworld.errors import InvalidJoinError  # noqa: PLC0415  (only here)

        try:
            address = StoreAddress.parse(self._world.store, world=self._world.name)
        except InvalidJoinError as exc:
            return self.fault(
                "it is no store", f'A store is "{LAUNCHER}", or: {exc.rule}', exc.next_step or "Write it so"
            )
        return self._look_at_file(address) if address.scheme == "file" else self._look_at_host(address)

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
        from multiworld._net.tcpclient import NotAStoreError, TcpClient  # noqa: PLC0415  (same as in _look)

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
