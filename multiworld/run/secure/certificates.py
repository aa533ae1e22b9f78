"""Certificates of this node's processes: signed by an authority, written, and renewed in place."""

from __future__ import annotations

import logging
import socket
import threading
import time
from typing import TYPE_CHECKING

from multiworld.run.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from multiworld._net.tls.authority import Authority
    from multiworld.run.secure.key_folder import KeyFolder

__all__ = ["Certificates"]

_LOOK_EVERY = 60.0
"""Seconds, at most, between two looks at the clock, which a suspended host or its administrator may move."""
_AGAIN = 60.0
"""Seconds, at most, before a renewal that failed is tried again."""
_DAY = 86400.0


class Certificates:
    """Writes a certificate with its key for each process, and renews all when half their time is over.

    Certificate and key are in one file, which is replaced as a whole: a process that starts meanwhile never
    reads a certificate with another one's key.

    Args:
        authority: signs them.
        folder: for the files.
        ca: path of the authorities that processes trust.
        days: for which a certificate is valid.
        addresses: of this host, by which it is reached.
        note: gets a level of `logging` and a line for the log; from any thread.
    """

    def __init__(
        self,
        authority: Authority,
        folder: KeyFolder,
        ca: Path,
        *,
        days: float,
        addresses: tuple[str, ...] = (),
        note: Callable[[int, str], object] = lambda _level, _text: None,
    ) -> None:
        self._authority, self._folder, self._ca, self._note = authority, folder, ca, note
        self._days, self._addresses = days, addresses
        self._host = socket.gethostname()
        self._lock = threading.Lock()  # guards the field below, and that a file has one writer
        self._names: dict[str, str] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="m8d-run-certificates", daemon=True)
        self._thread.start()

    def issue(self, stem: str, name: str) -> dict[str, str]:
        """Write a new certificate with a new key; return the process's variables.

        Args:
            stem: of the file's name; a file of that stem is replaced.
            name: of the process, in the certificate.

        Raises:
            OSError: it cannot be written.
            RunError: it cannot be signed.
        """
        with self._lock:
            self._names[stem] = name
            path = self._write(stem, name)
        return {"M8D_TLS_CERT": str(path), "M8D_TLS_KEY": str(path), "M8D_TLS_CA": str(self._ca)}

    def worker(self, rank: int, role: str, role_rank: int) -> dict[str, str]:
        """Write a new certificate for a worker that is about to start, as `issue`; return its variables."""
        return self.issue(f"rank-{rank}", f"rank {rank} {role}:{role_rank}")

    def close(self) -> None:
        """Renew no more. Idempotent."""
        self._closing.set()
        self._thread.join(5.0)

    def _write(self, stem: str, name: str) -> Path:
        until = self._authority.until
        left = (until - time.time()) / _DAY
        if left <= 0:
            ended = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(until))
            raise RunError(
                f"the authority's certificate was valid until {ended}",
                rule="What an authority signs is valid as long as its own certificate",
                next_step="Start the launchers again, with another authority",
            )
        try:
            issued = self._authority.issue(
                self._host, name, days=min(self._days, left), addresses=self._addresses
            )
        except ValueError as error:
            raise RunError(f"no certificate for {name!r} on {self._host!r}: {error}") from error
        return self._folder.write(f"{stem}.pem", issued.certificate + issued.key)

    def _run(self) -> None:
        half = self._days * _DAY / 2
        due = time.time() + half
        while not self._closing.wait(max(0.0, min(_LOOK_EVERY, due - time.time()))):
            if time.time() < due:
                continue
            try:
                due = time.time() + half
                self._renew()
            except (OSError, RunError) as error:
                due = time.time() + min(_AGAIN, half / 4)
                self._note(
                    logging.WARNING, f"certificates could not be renewed, and are tried again: {error}"
                )

    def _renew(self) -> None:
        with self._lock:
            for stem, name in self._names.items():
                if not self._closing.is_set():
                    self._write(stem, name)
        self._note(logging.INFO, f"certificates renewed: {len(self._names)}")
