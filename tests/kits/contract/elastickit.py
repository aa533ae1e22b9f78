"""How members join the world of a test, where ranks are assigned."""

from __future__ import annotations

import socket
import time

import multiworld as mw
from kits.contract.worldkit import HANG, PATIENCE, free_port
from kits.meetkit import until
from multiworld._net.stores.record import WorldRecord

__all__ = ["LONG", "claimed", "enter", "is_served", "two_ports"]

LONG = 10 * PATIENCE
"""Seconds, of each operation and join: what ends before was ended by the verdict."""


def enter(me, size, **options):
    given = {
        "seat": f"s{me.rank}",
        "store": me.store,
        "timeout": LONG,
        "hang_timeout": HANG,
        "last_call": LONG,
    }
    return mw.join("w", None, size, **(given | options))


def claimed(store, *seats):
    """Wait until these are the seats that are claimed for the next generation of the test's world."""
    record = WorldRecord(store, "w", time.sleep)

    def seen():
        record.read()
        waiting = record.ledger.waiting
        return waiting is not None and {claim.slot for claim in waiting.claims} == set(seats)

    until(seen)


def two_ports():
    """A list of two stores of this host."""
    port = free_port(further=1)
    return f"tcp://127.0.0.1:{port},127.0.0.1:{port + 1}"


def is_served(port):
    """Whether a process of this host listens at the port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
