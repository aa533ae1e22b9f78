"""Access to the page: a token, and the names of this host that a browser may have come by. Pure.

A page on another site cannot read this one: the cookie is SameSite=Lax (a link from elsewhere opens the page,
its requests for data get no cookie), and a request under a name that is not this host's is refused (DNS
rebinding).
"""

from __future__ import annotations

import hmac
import ipaddress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = ["COOKIE", "LET_IN", "PEER", "allowed", "known_host"]

COOKIE = "m8d_token"
"""Name of the cookie; the port is added, as browsers keep one set of cookies for all ports of a host."""

PEER = "m8d.peer"
"""Key of a request's state: whether the connection has a certificate of the job."""

LET_IN = "m8d.let_in"
"""Key of a request's state, once it is answered: it had the token, or its connection a certificate."""


def allowed(token: str, cookie: str | None, headers: Mapping[str, str]) -> bool:
    """Whether a request has the token: in the cookie, or as ``Authorization: Bearer TOKEN``.

    Args:
        token: of the page; "" where it has none.
        cookie: value of the page's cookie, if the request has one.
        headers: of the request, with names in lower case.
    """
    if not token:
        return True
    kind, _, given = headers.get("authorization", "").partition(" ")
    bearer = given.strip() if kind.lower() == "bearer" else ""
    return any(
        hmac.compare_digest(token.encode(), each.encode(errors="replace"))
        for each in (bearer, cookie or "")
        if each
    )


def known_host(header: str, names: Collection[str]) -> bool:
    """Whether the Host header of a request names this server.

    An address does: a name that was made to point here is what an attack needs.

    Args:
        header: "HOST" or "HOST:PORT".
        names: of this server, in lower case, beside "localhost".
    """
    host = header.rpartition(":")[0] if _has_port(header) else header
    host = host.strip("[]").lower()
    if host == "localhost" or host in names:
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _has_port(header: str) -> bool:
    before, colon, after = header.rpartition(":")
    return bool(colon) and after.isdigit() and (":" not in before or before.endswith("]"))
