"""The secure mode of a launcher: its own certificate, and those of its workers."""

from __future__ import annotations

import logging
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from multiworld import settings
from multiworld._net.host_address import outward
from multiworld._net.tls.authority import Authority
from multiworld._net.tls.credentials import Credentials, current
from multiworld.run.errors import ArgumentsError, RunError
from multiworld.run.nodes.secure_rendezvous import ENVIRONMENT
from multiworld.run.secure import authority_folder
from multiworld.run.secure.certificates import Certificates
from multiworld.run.secure.key_folder import KeyFolder

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from multiworld.run.secure.source import CertificateSource

__all__ = ["Secured", "open_secure"]

_AUTHORITY_DAYS = 3650.0
"""Of an authority that one run has: its key ends with the launcher."""


class Secured:
    """A launcher in secure mode.

    Args:
        credentials: of the launcher.
        certificates: of the processes of this node; None where the user's files serve all.
        folder: of the keys; None likewise.

    Attributes:
        credentials: as given.
        folder: path of the folder of keys; "": there is none.
    """

    def __init__(
        self, credentials: Credentials, certificates: Certificates | None, folder: KeyFolder | None
    ) -> None:
        self.credentials = credentials
        self.folder = "" if folder is None else str(folder.path)
        self._certificates = certificates

    def worker(self, rank: int, role: str, role_rank: int) -> dict[str, str]:
        """Return the variables of a worker that is about to start; its certificate is a new one.

        Raises:
            RunError: it cannot be signed, or written.
        """
        if self._certificates is None:
            return {}
        try:
            return self._certificates.worker(rank, role, role_rank)
        except OSError as error:
            raise _unwritable(self.folder, error) from error


def open_secure(
    source: CertificateSource,
    job: str,
    launcher: Path,
    parts: ExitStack,
    note: Callable[[int, str], object],
    *,
    days: float,
) -> Secured:
    """Set this process's credentials up, and those of the workers that it will start.

    Args:
        source: of the certificates.
        job: id of the run.
        launcher: the launcher's folder, for the keys.
        parts: gets what is to be undone in the end.
        note: gets a level of `logging` and a line for the log; from any thread.
        days: for which certificates are valid that are made here.

    Raises:
        RunError: the certificates cannot be read or made.
        MultiworldError: likewise, or `cryptography` is missing.
    """
    certificates, folder = None, None
    own: dict[str, str] = {}
    if source.kind != "files":
        ca: Path | None = None
        if source.kind == "folder":
            home = Path(source.folder).absolute()
            authority = authority_folder.read(home, job)
            if authority_folder.readable_by_others(home):
                key = home / authority_folder.KEY
                note(logging.WARNING, f"{key} can be read by other users of this host: chmod 600 {key}")
            ca = home / authority_folder.CERTIFICATE
        else:
            authority = Authority.create(job, days=_AUTHORITY_DAYS)
        try:
            folder = KeyFolder(launcher)
            parts.callback(folder.remove)
            ca = ca or folder.write(authority_folder.CERTIFICATE, authority.certificate)
            certificates = Certificates(authority, folder, ca, days=days, addresses=_addresses(), note=note)
            parts.callback(certificates.close)
            own = certificates.issue("launcher", f"m8d-run on {socket.gethostname()}")
        except OSError as error:
            raise _unwritable(str(launcher), error) from error
    parts.callback(settings.set_environment, settings.set_environment({**own, **ENVIRONMENT}))
    credentials = current()
    assert credentials is not None  # noqa: S101  (the settings name the files)
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(credentials.until))
    made = {
        "run": "this run's own authority",
        "folder": f"the authority in {source.folder}",
        "files": f"{settings.load().tls_ca}",
    }[source.kind]
    renewed = "" if certificates is None else ", renewed in time"
    note(
        logging.INFO,
        f"secure: all connections are TLS 1.3; certificate {credentials.identity}, valid until {until}"
        f"{renewed}; of {made}",
    )
    return Secured(credentials, certificates, folder)


def _addresses() -> tuple[str, ...]:
    """Return the names by which this host's processes are reached, beside its own: browsers check them.

    Raises:
        ArgumentsError: one is no name as browsers send it.
    """
    more = settings.environment("M8D_WEB_HOSTS") or ""
    names = [each.strip() for each in more.split(",")]
    for name in names:
        if not name.isascii():
            raise ArgumentsError(
                f"M8D_WEB_HOSTS: {name}",
                rule="Browsers and certificates have names of hosts in ASCII",
                next_step="Give the name that begins with xn--, as browsers send it",
            )
    return ("localhost", "127.0.0.1", "::1", outward(), *(each for each in names if each))


def _unwritable(where: str, error: OSError) -> RunError:
    return RunError(
        f"certificates in {where}: {error.strerror or error}",
        rule="They are written into a folder that this user alone can read",
        next_step=f"See that there is room and that user {os.getuid()} can write there, or set "
        "XDG_RUNTIME_DIR or TMPDIR to such a folder",
    )
