"""Stores that are a list of addresses: another host, or process, serves when the one that does so is gone."""

from __future__ import annotations

import time

import pytest
import torch
from kits.contract.elastickit import LONG, claimed, enter, joins, member, of_seat, tell, together, two_ports
from kits.contract.worldkit import PATIENCE, SOON, enter_netns
from kits.meetkit import until
from kits.netkit import Network

import multiworld as mw
from multiworld._core.membership.serving import STRIDE
from multiworld._net.stores import listed, looking, moving_store
from multiworld._net.stores.looking import Addresses
from multiworld._net.stores.record import WorldRecord
from multiworld._net.stores.store import open_store

# -- programs ---------------------------------------------------------------------------------------------------------


def keep(me, netns=None):
    """Hold the store, and serve it where no other process does; it is no member of a world."""
    if netns is not None:
        enter_netns(netns)
    handle = open_store(me.store, world="none", serve=True, deadline=time.monotonic() + LONG)
    me.emit("open", serves=handle.serves, epoch=handle.store.epoch)
    while True:
        me.hear(LONG)
        me.emit("store", serves=handle.serves, epoch=handle.store.epoch)


def stepping(me, netns, size, **options):
    """Works in its world on a host of its own, and lets others in."""
    enter_netns(netns)
    w = enter(me, size, **options)
    known = 0
    while True:
        try:
            if known != w.generation:
                tell(me, w)
                known = w.generation
            w.all_reduce(torch.ones(1))
            w.advance()
        except mw.BrokenWorldException as broken:  # noqa: PERF203  (it works in the loop until then)
            me.emit("broken", cause=broken.cause)
            w.reform(LONG)


def leaving(me, size, **options):
    """Works in its world, and asks to leave when it is told to."""
    w = enter(me, size, **options)
    tell(me, w)
    while w.state is not mw.State.CLOSED:
        if me._conn.poll(0) and me.hear() == "leave":
            w.leave()
            me.emit("asked")
        w.all_reduce(torch.ones(1))
        w.advance()
    me.emit("left")


def two_keepers(cast, where):
    """Two processes that hold the store: the one that serves it, and the other."""
    keepers = [cast.start(keep, store=where) for _ in range(2)]
    opened = [each.expect("open") for each in keepers]
    return keepers if opened[0].serves else keepers[::-1]


def moves(keeper, before):
    """Wait until the keeper is at a newer server than the one of that epoch."""
    end = time.monotonic() + SOON
    while True:
        keeper.say("?")
        seen = keeper.expect("store")
        if seen.epoch > before:
            return
        assert time.monotonic() < end
        time.sleep(0.1)


def that_serves(where, members):
    """The member of the world "w" that serves the store."""
    handle = open_store(where, world="none", serve=False, deadline=time.monotonic() + SOON)
    record = WorldRecord(handle.store, "w", time.sleep)
    record.read()
    process = handle._shared.found.process
    (pid,) = (each.member.pid for each in record.ledger.current.claims if each.member.process == process)
    handle.close()
    return next(each for each in members if each.process.pid == pid)


def claimed_at(where, *seats):
    """Wait until these are the seats that are claimed for the next generation."""
    handle = open_store(where, world="none", serve=False, deadline=time.monotonic() + SOON)
    claimed(handle.store, *seats)
    handle.close()


# -- on one host ------------------------------------------------------------------------------------------------------


def test_whoever_serves_is_lost_and_the_others_go_on(cast):
    where = two_ports()
    members = [cast.start(member, number, store=where) for number in range(4)]
    numbers = [together(members)]
    assert numbers == [1]
    while len(members) > 1:
        members.pop(0).kill()
        numbers.append(together(members))
    assert numbers == sorted(set(numbers))


def test_a_server_that_is_no_member_is_lost_under_joins(cast):
    """No join fails."""
    where = two_ports()
    keepers = [cast.start(keep, store=where)]
    assert keepers[0].expect("open").serves
    actors = [cast.start(joins, rank, store=where, size=2) for rank in range(2)]
    actors[0].expect("joined")
    keepers.append(cast.start(keep, store=where))
    keepers[1].expect("open")
    keepers[0].kill()
    while actors[0].expect("joined").generation < STRIDE:
        pass
    actors[0].say("enough")
    for each in actors:
        assert each.expect("all").failed == []


def test_a_newcomer_does_not_begin_a_world_that_works(cast):
    """It comes to a new server before the members have told that of the world."""
    where = two_ports()
    keeper = cast.start(keep, store=where)
    keeper.expect("open")
    members = [cast.start(member, number, size="2:2", store=where) for number in range(2)]
    assert together(members) == 1
    seats = members[0].heard[-1].seats
    keeper.kill()
    for number in (2, 3):
        cast.start(member, number, size="2:2", store=where)
    claimed_at(where, "s2", "s3")
    of_seat(members, seats[0]).kill()
    told = of_seat(members, seats[1]).expect("in")
    assert (
        told.generation > 1
    )  # by which server's count: as the members had told the new one of the world, or not yet
    assert told.seats[0] == seats[1]
    assert told.seats[1] in {"s2", "s3"}


def test_a_server_that_stood_still_ends_when_another_has_followed(cast):
    where = two_ports()
    first, second = two_keepers(cast, where)
    members = [cast.start(member, number, size="1:3", store=where) for number in range(3)]
    assert together(members) == 1
    first.stop()
    moves(second, 0)
    members.pop(0).kill()
    number = together(members)
    assert number > STRIDE
    first.go_on()
    moves(first, 0)
    members.pop(0).kill()
    assert together(members) > number


def patient(me):
    """Waits a minute for an answer where one would wait a second or two for a process that may only be slow."""
    listed.BUSY = listed.PATIENCE = looking.BUSY = moving_store.PATIENCE = PATIENCE
    member(me, size="1:3")


def test_a_member_that_serves_stands_still_and_no_answer_of_it_is_waited_for(cast):
    """The watchdog has found that it is lost, so that the others look for another server at once."""
    where = two_ports()
    members = [cast.start(patient, number, store=where) for number in range(3)]
    together(members)
    serving = that_serves(where, members)
    serving.stop()
    rest = [each for each in members if each is not serving]
    for each in rest:
        assert each.expect("broken").cause == "hung"
    assert all(each.expect("reformed").took < SOON for each in rest)
    assert together(rest) > STRIDE


@pytest.fixture
def asked(monkeypatch):
    """The ports of addresses that this process asks what they are, each with the seconds to answer."""
    ask, given = Addresses._ask, []

    def seen(self, at, family, to, deadline):
        given.append((to[1], deadline - time.monotonic()))
        return ask(self, at, family, to, deadline)

    monkeypatch.setattr(Addresses, "_ask", seen)
    return given


def test_an_address_that_was_silent_is_not_waited_for_again(cast, asked, monkeypatch):
    monkeypatch.setattr(listed, "_BRIEFLY", LONG)  # the other process may be slow here
    where = two_ports()
    first, second = two_keepers(cast, where)
    handle = open_store(where, world="none", serve=False, deadline=time.monotonic() + SOON)
    asked.clear()
    second.stop()
    first.stop()
    until(lambda: len(asked) >= 5)
    second.go_on()
    until(lambda: handle.store.epoch > 0)
    handle.close()
    assert [within > 1.0 for port, within in asked if port == asked[0][0]].count(True) == 1


def test_a_newcomer_waits_little_for_an_address_where_no_process_answers(cast, asked):
    where = two_ports()
    first, second = two_keepers(cast, where)
    first.stop()
    moves(second, 0)
    handle = open_store(where, world="none", serve=False, deadline=time.monotonic() + SOON)
    assert handle.store.epoch > 0
    handle.close()
    stands_still = int(where.partition(",")[0].rpartition(":")[2])
    first_look, second_look = (within for port, within in asked if port == stands_still)
    assert first_look <= 0.3
    assert second_look > 0.4, "it may be the newest server"


@pytest.mark.parametrize("noticed", [False, True], ids=["at-once", "noticed"])
def test_a_client_of_its_own_is_one_of_the_server_that_follows(cast, noticed):
    """NCCL is given one while it connects a group."""
    where = two_ports()
    first, second = two_keepers(cast, where)
    handle = open_store(where, world="none", serve=False, deadline=time.monotonic() + SOON)
    first.kill()
    if noticed:
        moves(second, 0)
        with handle._shared._lock:
            handle._shared._lose()
    own = handle.fresh()
    own.set("a", b"b")
    assert own.get("a") == b"b"
    assert handle.store.get("a") == b"b"
    second.say("?")
    assert second.expect("store").serves
    handle.close()


def test_a_member_leaves_also_while_its_store_stands_still(cast):
    """It asks once, and the store hears of it when another process serves."""
    where = two_ports()
    serving, _ = two_keepers(cast, where)
    members = [cast.start(leaving, number, size="1:3", store=where) for number in range(3)]
    assert together(members) == 1
    serving.stop()
    members[0].say("leave")
    members[0].expect("asked")
    members[0].expect("left")


# -- on three hosts ---------------------------------------------------------------------------------------------------


@pytest.fixture
def network():
    with Network(3) as made:
        yield made


def test_a_host_is_lost_and_comes_back(cast, network):
    """The others go on, and what it had served before ends: the members there are let in again."""
    where = "tcp://" + ",".join(f"{network.address(number)}:29500" for number in (1, 2, 3))
    keeper = cast.start(keep, netns=network.hosts[0], store=where)
    assert keeper.expect("open").serves
    members = [
        cast.start(stepping, number, netns=network.hosts[number], size="1:3", store=where)
        for number in range(3)
    ]
    first = together(members)
    network.pull(1)
    second = together(members[1:])
    assert second // STRIDE > first // STRIDE, "another store counts on"
    assert members[0].expect("broken").cause == "unreachable"
    network.plug(1)
    moves(keeper, 0)
    assert together(members, 3) > second


def test_all_members_on_a_host_that_is_lost_are_left_out_without_a_last_call(cast, network):
    """Their silence is not known at once: the verdict names one of them."""
    where = f"tcp://{network.address(1)}:29500,{network.address(2)}:29500"
    cast.start(keep, netns=network.hosts[0], store=where).expect("open")
    members = [
        cast.start(stepping, number, netns=network.hosts[host], size="1:6", store=where)
        for number, host in enumerate((0, 1, 1, 1, 2, 2))
    ]
    first = together(members)
    network.pull(3)
    assert together(members[:4]) == first + 1
