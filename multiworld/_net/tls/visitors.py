"""Connections whose other end may come without a certificate: browsers, and probes of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiworld._net.tls.session import peer_of

if TYPE_CHECKING:
    import ssl

    from multiworld._net.tls.identity import Identity

__all__ = ["HANDSHAKE", "SILENCE", "is_peer"]

HANDSHAKE = 1.0
"""Seconds in which a handshake must be over."""

SILENCE = 1.0
"""Seconds after which a visitor that has shown nothing may say nothing more: one that sends has its time."""


def is_peer(tls: ssl.SSLObject | ssl.SSLSocket, own: Identity) -> bool:
    """Whether the other end has a certificate of the own job; False: it has shown none.

    Raises:
        RefusedError: it has one of another job.
    """
    if not tls.getpeercert():
        return False
    peer_of(tls, own)
    return True
