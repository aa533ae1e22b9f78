"""Reachability of two members at the addresses that they publish."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiworld._core.membership.roster import Member

__all__ = ["apart"]


def apart(one: Member, other: Member) -> bool:
    """Whether one member's address may mean another host for the other: silence is then no proof of death.

    True where exactly one address is a loopback address, and where members on different hosts publish
    loopback or equal addresses.
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
