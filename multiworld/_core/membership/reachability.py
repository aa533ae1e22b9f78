"""Whether two members can reach each other at the addresses that they give."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiworld._core.membership.roster import Member

__all__ = ["apart"]


def apart(one: Member, other: Member) -> bool:
    """Whether a member where nobody answers may live all the same: its address means another place for the other.

    So it is where one gives an address of loopback and the other does not, and where members of different hosts
    give one of loopback, or the same.
    """
    mine, theirs = _loopback(one), _loopback(other)
    if mine != theirs:
        return True
    return one.hostname != other.hostname and (mine or one.endpoint.host == other.endpoint.host)


def _loopback(member: Member) -> bool:
    try:
        return ipaddress.ip_address(member.endpoint.host.partition("%")[0]).is_loopback
    except ValueError:
        return False
