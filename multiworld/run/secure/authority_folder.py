"""The folder of an authority that the launchers of several nodes share: two PEM files."""

from __future__ import annotations

import os
import stat
import time
from typing import TYPE_CHECKING

from multiworld._net.tls.authority import Authority, Issued
from multiworld.run.errors import ArgumentsError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["CERTIFICATE", "KEY", "make", "read", "readable_by_others"]

CERTIFICATE = "ca.pem"
KEY = "ca.key"

_MAKE = "Make one with m8d-run make-authority DIR, and have it on every node"


def make(folder: Path, *, days: float) -> Authority:
    """Make an authority, and write it into a folder, which is made unless it is there.

    Raises:
        ArgumentsError: there is one already, or the folder cannot be written.
        MultiworldError: `cryptography` is missing.
    """
    authority = Authority.create("", days=days)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The key first: without it the certificate is worth nothing, and it is what must not be overwritten.
        _write(folder / KEY, authority.pem.key, 0o600)
        _write(folder / CERTIFICATE, authority.certificate, 0o644)
    except FileExistsError as error:
        raise ArgumentsError(
            f"{error.filename} is there already",
            rule="An authority is not written over: the runs that use it could not go on",
            next_step="Give another folder, or remove this one when no run uses it",
        ) from error
    except OSError as error:
        raise ArgumentsError(
            f"{folder}: {error.strerror or error}",
            rule="The authority is written into a folder that this user can write",
            next_step="Give another one",
        ) from error
    return authority


def read(folder: Path, job: str) -> Authority:
    """Read the authority in a folder, to sign for the processes of a run.

    Raises:
        ArgumentsError: there is none, or its certificate has ended.
        MultiworldError: `cryptography` is missing.
    """
    try:
        issued = Issued((folder / CERTIFICATE).read_bytes(), (folder / KEY).read_bytes())
        authority = Authority.load(job, issued)
    except OSError as error:
        raise ArgumentsError(
            f"--authority {folder}: {error.filename}: {error.strerror}",
            rule=f"The folder of an authority has {CERTIFICATE} and {KEY}, which this user can read",
            next_step=_MAKE,
        ) from error
    except ValueError as error:
        raise ArgumentsError(
            f"--authority {folder}: {error}",
            rule=f"{CERTIFICATE} and {KEY} are PEM files of one authority, its key without a password",
            next_step=_MAKE,
        ) from error
    if authority.until <= time.time():
        ended = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(authority.until))
        raise ArgumentsError(
            f"--authority {folder}: its certificate was valid until {ended}",
            rule="What an authority signs is valid as long as its own certificate",
            next_step=_MAKE,
        )
    return authority


def readable_by_others(folder: Path) -> bool:
    """Whether other users of this host can read the authority's key."""
    return bool(stat.S_IMODE((folder / KEY).stat().st_mode) & stat.S_IROTH)


def _write(path: Path, data: bytes, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        file.write(data)
