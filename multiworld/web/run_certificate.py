"""The certificate for the page of a secure run that was started without one: its launcher's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiworld import settings
from multiworld.errors import MultiworldError
from multiworld.run.control.client import own_snapshot
from multiworld.run.secure.authority_folder import CERTIFICATE
from multiworld.run.secure.key_folder import NAME

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["variables_of"]

_ASKING = 2.0


def variables_of(control: Path) -> dict[str, str]:
    """Return the variables for a page of a run; none where they are set, or the run is not secure.

    Args:
        control: path of its launcher's control socket.

    Raises:
        MultiworldError: it is secure, and its files are not known here: its page would not be encrypted.
        LauncherSilentError: its launcher does not answer.
    """
    if settings.load().tls_cert:
        return {}
    own, ca = control.parent / NAME / "launcher.pem", control.parent / NAME / CERTIFICATE
    if own.is_file() and ca.is_file():
        return {"M8D_TLS_CERT": str(own), "M8D_TLS_KEY": str(own), "M8D_TLS_CA": str(ca)}
    if not (own_snapshot(control, _ASKING) or {}).get("secure"):
        return {}
    raise MultiworldError(
        "a secure run, and no certificate for its page",
        rule="M8D_TLS_CERT, M8D_TLS_KEY and M8D_TLS_CA name the files, as for the run",
        next_step=f"Set the first two to {own}, and M8D_TLS_CA to {CERTIFICATE} of the run's authority"
        if own.is_file()
        else "Set them to what m8d-run was started with",
    )
