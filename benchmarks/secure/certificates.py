"""Certificates of a run: an authority of its own, which nothing outlives."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measuring.part import Unavailable
from multiworld._net.tls.authority import Authority
from multiworld.errors import MultiworldError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def certificates() -> Iterator[dict[str, str]]:
    """The environment of a process in secure mode; its files are there inside.

    Raises:
        Unavailable: `cryptography` is missing.
    """
    try:
        authority = Authority.create("benchmark", days=1)
    except MultiworldError as error:
        raise Unavailable(str(error)) from error
    issued = authority.issue(socket.gethostname(), "member", days=1)
    with tempfile.TemporaryDirectory(prefix="m8d-secure-") as name:
        folder, environment = Path(name), {}
        for kind, text in (
            ("CERT", issued.certificate),
            ("KEY", issued.key),
            ("CA", authority.certificate),
        ):
            path = folder / f"{kind.lower()}.pem"
            path.touch(mode=0o600)
            path.write_bytes(text)
            environment[f"M8D_TLS_{kind}"] = str(path)
        yield environment
