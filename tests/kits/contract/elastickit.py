"""How members join worlds whose ranks are assigned, what they do there, and what tests expect of them."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time

import torch

import multiworld as mw
from kits.contract.stopkit import stand_still
from kits.contract.worldkit import HANG, PATIENCE, SOON, enter_netns, free_port
from kits.meetkit import until
from multiworld._net.stores.record import WorldRecord

__all__ = [
    "LONG",
    "answered",
    "claimed",
    "enter",
    "has_come",
    "is_served",
    "joins",
    "member",
    "of_seat",
    "tell",
    "together",
    "two_ports",
]

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
    until_recorded(store, lambda ledger: slots(ledger.waiting) == set(seats))


def has_come(store, seat):
    """Wait until this seat is claimed for the next generation, or is in the one that is made."""
    until_recorded(store, lambda ledger: seat in slots(ledger.waiting) | slots(ledger.current))


def until_recorded(store, holds):
    """Wait until the ledger of the test's world is as `holds` says."""
    record = WorldRecord(store, "w", time.sleep)

    def seen():
        record.read()
        return holds(record.ledger)

    until(seen)


def slots(attempt):
    """Seats that are claimed in an attempt; none where there is no attempt."""
    return set() if attempt is None else {claim.slot for claim in attempt.claims}


def answered(call):
    """Call it again where the store did not answer: the test that serves it may stand still at its deadline."""
    for _ in range(3):
        with contextlib.suppress(mw.StoreUnreachableError):
            return call()
    return call()


def two_ports():
    """A list of two stores of this host."""
    port = free_port(further=1)
    return f"tcp://127.0.0.1:{port},127.0.0.1:{port + 1}"


def is_served(port):
    """Whether a process of this host listens at the port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def tell(me, w):
    """What this member knows of its world, and the sum of everybody's 1 + rank."""
    t = torch.ones(1) + w.rank
    w.all_reduce(t)
    me.emit("in", rank=w.rank, size=w.world_size, seats=w.seats, generation=w.generation, sum=t.item())


def member(me, size="1:4", late=0.0, stop=None, **options):
    """Works in its world until it is killed, or told to close it or to fail in it; reforms it when it breaks.

    `late`: seconds before it comes to its first reform. `stop`: a point of that reform at which it stands still.
    """
    w = enter(me, size, **options)
    if stop is not None:
        stand_still(me, stop)
    shrinks = options.get("on_loss") == "shrink"
    known = 0
    while True:
        try:
            if known != w.generation:
                tell(me, w)
                known = w.generation
            word = me.hear() if me._conn.poll(0) else ""
            if word == "close":
                w.close()
            w.all_reduce(torch.ones(2 if word == "fail" else 1))
        except mw.BrokenWorldException as broken:  # noqa: PERF203  (it works in the loop until then)
            me.emit("broken", cause=broken.cause, text=str(broken))
            late = time.sleep(late) or 0.0
            began = time.monotonic()
            (w.wait_active if shrinks else w.reform)(LONG)
            me.emit("reformed", took=time.monotonic() - began)
        except mw.WorldClosedError:
            me.emit("closed")
            return


def joins(me, size, worlds=None, netns=None):
    """Join so many worlds, one after the other, and leave each; without a number until rank 0 is told to end."""
    if netns is not None:
        enter_netns(netns)
    failed = []
    ends = False
    for number in itertools.count():
        if ends or number == worlds:
            break
        began = time.monotonic()
        try:
            with mw.joined(f"w{number}", me.rank, size, store=me.store, timeout=SOON) as w:
                t = torch.tensor([1.0, worlds is None and me.rank == 0 and me._conn.poll(0)])
                w.all_reduce(t)
                assert t[0].item() == size
                ends = t[1].item() > 0
        except (mw.JoinError, mw.BrokenWorldException) as error:
            failed.append(f"w{number}: {error}")
        me.emit("joined", number=number, took=time.monotonic() - began, generation=w.generation)
    me.emit("all", failed=failed)


def together(actors, size=None):
    """All are in one generation, of `size` members; returns its number."""
    told = [actor.expect("in") for actor in actors]
    while len({each.generation for each in told}) > 1:  # some saw a generation that broke at once
        last = max(each.generation for each in told)
        told = [
            each if each.generation == last else actor.expect("in")
            for actor, each in zip(actors, told, strict=True)
        ]
    assert {each.size for each in told} == {size or len(actors)}, told
    assert len({each.seats for each in told}) == 1
    return told[0].generation


def of_seat(actors, seat):
    return next(actor for actor in actors if f"s{actor.rank}" == seat)
