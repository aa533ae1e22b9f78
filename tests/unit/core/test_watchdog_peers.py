"""Whole groups of processes, simulated: attaching, faults and gossip in any order of events."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.peerkit import ANSWERS, SILENT_HOST, TOKEN, Net, process, rosters

from multiworld._core.liveness import peers as peers_module
from multiworld._core.liveness.actions import Drop, Lost, Send, Why
from multiworld._core.liveness.detector import ConnectionEnd
from multiworld._core.liveness.dialing import Dialing
from multiworld._core.liveness.wire import (
    Attach,
    Attached,
    Beat,
    Broken,
    Close,
    Goodbye,
    Hello,
    Need,
    Reason,
    Refused,
)
from multiworld._core.membership.roster import Endpoint
from multiworld.events import Breakage, Cause


def joined(numbers=(1, 2), name="w", **more):
    net = Net(*numbers)
    net.join(rosters(name, numbers, **more))
    return net


def verdict(net, number, key="w/1", rank=None):
    rank = number - 1 if rank is None else rank
    return net[number].broken[key, rank]


def test_a_world_is_ready_when_everyone_proved_it_to_everyone():
    net = Net(1, 2, 3)
    group = rosters("w", (1, 2, 3))
    net[1].add(group[0])
    net[2].add(group[1])
    net.settle_all()
    net.run()
    assert not net[1].ready
    assert not net[2].ready
    assert net[1].peers.missing(("w/1", 0)) == {2: "its port is closed"} or net[1].peers.missing(("w/1", 0))
    net[3].add(group[2])
    net.pass_time(1.0)
    assert [net[number].ready for number in (1, 2, 3)] == [[("w/1", 0)], [("w/1", 1)], [("w/1", 2)]]
    assert net[1].peers.missing(("w/1", 0)) == {}


def test_who_left_many_worlds_is_dialed_where_it_listens_now():
    net = joined(name="old0")
    for number in range(1, 20):
        net.join(rosters(f"old{number}", (1, 2)))
    for number in range(20):
        net[2].remove((f"old{number}/1", 1))
    net.run()
    assert len(net[1].broken) == 20  # and none of them was closed here
    net.nodes[7] = net.nodes.pop(2)  # its next listener has another port
    net[7].number = 7
    group = rosters("new", (1, 2))
    moved = replace(group[0].members[1], endpoint=Endpoint("127.0.0.1", 7))
    group = [replace(each, members=(each.members[0], moved)) for each in group]
    net[1].add(group[0])
    net[7].add(group[1])
    net.pass_time(0.1)
    assert ("new/1", 0) in net[1].ready


def test_a_pair_has_one_connection_whatever_the_number_of_worlds():
    net = Net(1, 2)
    groups = [rosters(f"w{number}", (1, 2) if number % 2 else (2, 1)) for number in range(60)]
    for group in groups:
        net[1].add(next(each for each in group if each.members[each.rank].process == process(1)))
    for group in reversed(groups):
        net[2].add(next(each for each in group if each.members[each.rank].process == process(2)))
    net.settle_all()
    net.pass_time(1.0)
    assert len(net[1].ready) == len(net[2].ready) == 60
    assert net[1].peers.connections == net[2].peers.connections == 1


def test_more_worlds_than_an_unproven_peer_may_offer_are_offered_after_the_first_proof():
    net = Net(1, 2)
    groups = [rosters(f"w{number}", (1, 2)) for number in range(200)]
    for group in groups:
        net[1].add(group[0])
        net[2].add(group[1])
    net.settle_all()
    net.run()
    assert len(net[1].ready) == len(net[2].ready) == 200


def test_a_crash_breaks_every_world_that_is_shared_and_no_other():
    net = Net(1, 2, 3)
    net.join(rosters("a", (1, 2, 3)))
    net.join(rosters("b", (1, 3)))
    net.join(rosters("c", (1, 2)))
    net.crash(3)
    net.run()
    assert verdict(net, 1, "a/1").cause is Cause.CRASHED
    assert verdict(net, 1, "a/1").ranks == (2,)
    assert "pid 1003 on host3" in verdict(net, 1, "a/1").detail
    assert verdict(net, 2, "a/1").ranks == (2,)
    assert verdict(net, 1, "b/1", 0).ranks == (1,)
    assert ("c/1", 0) not in net[1].broken
    assert ("c/1", 1) not in net[2].broken


def test_leaving_one_world_leaves_the_others_and_the_connection():
    net = joined((1, 2))
    net.join(rosters("x", (1, 2)))
    net[2].remove(("w/1", 1))
    net.run()
    assert (verdict(net, 1).cause, verdict(net, 1).ranks) == (Cause.LEFT, (1,))
    assert ("x/1", 0) not in net[1].broken
    net[1].remove(("w/1", 0))
    net.run()
    assert net[1].peers.connections == 1
    net[1].remove(("x/1", 0))
    net.run()
    assert verdict(net, 2, "x/1", 1).cause is Cause.LEFT
    net[2].remove(("x/1", 1))
    assert net[1].peers.connections == net[2].peers.connections == 0
    net.pass_time(5.0)
    assert net[1].peers.wake() == math.inf


def connections(net, number):
    return {each.peer: each for each in net[number].peers._connections.everyone()}


def test_the_next_generation_has_the_connections_of_the_last_one():
    net = joined((1, 2, 3))
    before = {number: connections(net, number) for number in (1, 2, 3)}
    net.crash(3)
    net.pass_time(1.0)
    assert [verdict(net, number).cause for number in (1, 2)] == [Cause.CRASHED] * 2
    net.join(rosters("w", (1, 2), generation=2))
    for one, other in ((1, 2), (2, 1)):
        assert connections(net, one)[process(other)] is before[one][process(other)]
        net[one].remove(("w/1", one - 1), goodbye=False)
    net.run()
    assert [net[number].peers.connections for number in (1, 2)] == [1, 1], "the new generation needs it"
    net.crash(2)
    net.pass_time(1.0)
    assert verdict(net, 1, "w/2", 0).cause is Cause.CRASHED


def test_a_member_of_a_broken_world_that_ends_later_is_lost_too():
    net = joined((1, 2, 3, 4))
    net.crash(4)
    net.pass_time(1.0)
    assert verdict(net, 1).ranks == (3,)
    net.crash(3)
    net.pass_time(1.0)
    assert [net[number].lost for number in (1, 2)] == [[Lost(("w/1", 0), (2,))], [Lost(("w/1", 1), (2,))]]


@pytest.mark.parametrize(("quiet", "same"), [(0.9, True), (1.1, False)])
def test_a_connection_on_which_nothing_comes_is_made_anew(quiet, same):
    net = joined((1, 2), hang=2.0)
    net[1].peers.report(("w/1", 0), (1,), "failed", net.now)
    net.pass_time(2.0)
    assert verdict(net, 1).cause is Cause.FAILED
    before = connections(net, 1)[process(2)]
    net[2].stopped = True
    last = net[1].peers._detector._peers[process(2)].heard
    net.pass_time(last + quiet - net.now, step=0.05, probes={1: {process(2): ANSWERS}})
    net[1].add(rosters("w", (1, 2), generation=2, hang=2.0)[0])
    assert (connections(net, 1).get(process(2)) is before) == same


def test_all_peers_are_looked_at_a_few_times_in_each_second_and_not_in_each_turn():
    net = joined((1, 2, 3))
    net.pass_time(2.0)
    before, turns, settle = net[1].peers.looks, 0, net[1].settle

    def counted(probes=None):
        nonlocal turns
        turns += 1
        settle(probes)

    net[1].settle = counted
    net.pass_time(10.0, step=0.01)
    assert turns > 1000
    assert net[1].peers.looks - before < 100


def test_a_silent_connection_that_another_world_needs_stays():
    net = joined((1, 2), hang=9.0)
    before = connections(net, 1)[process(2)]
    net[2].stopped = True
    net.pass_time(4.0, step=0.5, probes={1: {process(2): ANSWERS}})
    net[1].add(rosters("x", (1, 2), hang=2.0)[0])
    assert connections(net, 1)[process(2)] is before


def test_a_connection_that_closes_in_good_order_while_a_world_waits_is_made_anew():
    net = joined((1, 2))
    group = rosters("x", (1, 2))
    net[1].add(group[0])
    net[2].remove(("w/1", 1))  # its last world with 1, as far as it knows
    net.run()
    net[1].remove(("w/1", 0))
    assert ("x/1", 0) not in net[1].broken
    net[2].add(group[1])
    net.pass_time(2.0)
    assert ("x/1", 0) in net[1].ready
    assert ("x/1", 1) in net[2].ready


def test_a_close_without_goodbyes_counts_as_leaving():
    net = joined((1, 2))
    channel = next(iter(net[1].peers._connections.by_channel))
    net[1].peers.received(channel, [Close()], net.now)
    net[1].settle()
    assert verdict(net, 1).cause is Cause.LEFT


@pytest.mark.parametrize("at_once", [True, False])
def test_who_was_ended_by_a_fault_of_its_own_failed_whatever_comes_with_it(at_once):
    net = joined((1, 2, 3))
    net[2].peers.remove(("w/1", 1), goodbye=True, now=net.now, failure="its program ended with ValueError")
    net[2].act()  # its connections are closed in good order, right behind
    net.together = lambda: at_once
    net.run()
    for number in (1, 3):
        found = net[number].broken["w/1", number - 1]
        assert (found.cause, found.ranks) == (Cause.FAILED, (1,))
        assert found.detail == "rank 1 (pid 1002 on host2): its program ended with ValueError"


def test_the_other_ranks_of_the_process_that_failed_hear_it_too():
    net = Net(1, 2)
    group = rosters("w", (1, 1, 2))
    net[1].add(group[0])
    net[1].add(group[1])
    net[2].add(group[2])
    net.pass_time(1.0)
    net[1].peers.remove(("w/1", 0), goodbye=True, now=net.now, failure="its program ended with ValueError")
    net.pass_time(0.1)
    for number, rank in ((1, 1), (2, 2)):
        assert (net[number].broken["w/1", rank].cause, net[number].broken["w/1", rank].ranks) == (
            Cause.FAILED,
            (0,),
        )


@pytest.mark.parametrize("last", [Goodbye("w/1", 1), Close()], ids=["goodbye", "close"])
def test_a_member_that_reports_the_world_broken_and_goes_at_once_is_not_the_cause(last):
    """It may join again within a millisecond, so that both arrive in one batch."""
    net = joined((1, 2, 3))
    link = net[1].peers._trusted[process(2)]
    net[1].peers.received(link.channel, [Broken("w/1", Cause.FAILED, (2,), "x"), last], net.now)
    net[1].settle()
    assert verdict(net, 1) == Breakage(Cause.FAILED, (2,), "x", at=verdict(net, 1).at)


def test_a_stranger_with_several_proofs_that_come_early_is_dropped_once():
    net = Net(1, 2)
    [one, other] = rosters("w", (1, 2))
    net[1].peers.accepted(77, net.now)
    proofs = [Attach("w/1", rank, b"x" * 32) for rank in range(2)]
    net[1].peers.received(77, [Hello(process(2), process(1), b"n" * 16), *proofs], net.now)
    net[1].add(one)
    assert 77 not in net[1].peers._connections.by_channel
    net[2].add(other)
    net.pass_time(1.0)
    assert net[1].ready == [("w/1", 0)]
    assert net[2].ready == [("w/1", 1)]


def test_a_crash_of_one_explains_the_closed_connections_of_others():
    """C crashed, A let its operations go, B's operation with A failed: B says crashed, and C."""
    net = joined((1, 2, 3))
    net[2].peers.report(("w/1", 1), (0,), "connection closed by peer", net.now)
    net[2].settle()
    net.crash(3)
    net.run()
    net.pass_time(1.0)
    assert (verdict(net, 2).cause, verdict(net, 2).ranks) == (Cause.CRASHED, (2,))


def test_an_operation_that_failed_is_the_verdict_after_its_grace_and_reaches_everyone():
    net = joined((1, 2, 3))
    net[2].peers.report(("w/1", 1), (2, 0, 2), "it broke", net.now)
    net.pass_time(0.4)
    assert not net[2].broken
    net.pass_time(0.7)  # each member gives a sign of life once a second
    for number in (1, 2, 3):
        found = verdict(net, number)
        assert (found.cause, found.ranks, found.detail) == (Cause.FAILED, (0, 2), "it broke")


def test_silence_is_hung_or_unreachable_and_the_silent_one_is_told():
    for probe, cause in ((ANSWERS, Cause.HUNG), (SILENT_HOST, Cause.UNREACHABLE)):
        net = joined((1, 2, 3), hang=2.0)
        net[3].stopped = True
        probes = {number: {process(3): probe} for number in (1, 2)}
        before = net.now
        net.pass_time(1.7, probes=probes)
        assert not net[1].broken
        net.pass_time(0.7, probes=probes)
        for number in (1, 2):
            assert (verdict(net, number).cause, verdict(net, number).ranks) == (cause, (2,))
            assert 1.7 <= verdict(net, number).at - before <= 2.4
        net[3].stopped = False
        net[3].peers.stalled(2.0, net.now)
        net.run()
        assert (verdict(net, 3).cause, verdict(net, 3).ranks) == (cause, (2,))


def test_suspects_are_named_with_their_connection():
    net = joined((1, 2), hang=2.0)
    net[2].stopped = True
    net.now += 2.5
    assert [name for name, _ in net[1].peers.suspects(net.now)] == [process(2)]


def test_beats_follow_the_more_impatient_end_and_the_smallest_timeout():
    net = joined((1, 2), hangs=(1.0, 60.0))
    channel = next(iter(net[2].peers._connections.by_channel.values()))
    assert channel.interval == pytest.approx(0.2)
    net.join(rosters("x", (1, 2), hangs=(60.0, 0.3)))
    assert channel.interval == pytest.approx(0.06)
    net[1].remove(("x/1", 0))
    net.run()
    net[2].remove(("x/1", 1))
    net.run()
    assert channel.interval == pytest.approx(0.2)
    net.pass_time(5.0, step=0.05)
    assert ("w/1", 0) not in net[1].broken


def test_two_ranks_in_one_process():
    net = Net(1, 2)
    group = rosters("w", (1, 1, 2))
    net.join(group)
    assert net[1].ready == [("w/1", 0), ("w/1", 1)]
    net[1].remove(("w/1", 1))
    net.settle_all()
    net.run()
    assert verdict(net, 1, rank=0).ranks == (1,)
    assert verdict(net, 2, rank=2).ranks == (1,)
    assert verdict(net, 2, rank=2).cause is Cause.LEFT


def test_two_ranks_in_one_process_and_nobody_else():
    net = Net(1)
    group = rosters("w", (1, 1))
    net[1].add(group[0])
    assert net[1].ready == []
    assert net[1].peers.missing(("w/1", 0)) == {1: ""}
    net[1].add(group[1])
    assert sorted(net[1].ready) == [("w/1", 0), ("w/1", 1)]
    net[1].peers.report(("w/1", 0), (1,), "x", net.now)
    net.pass_time(1.0)
    assert verdict(net, 1, rank=0).cause is Cause.FAILED
    assert verdict(net, 1, rank=1).cause is Cause.FAILED


def test_a_wrong_token_is_refused_and_named():
    net = Net(1, 2)
    net[1].add(rosters("w", (1, 2))[0])
    net[2].add(rosters("w", (1, 2), token=b"x" * 16)[1])
    net.pass_time(3.0)
    assert not net[1].ready
    assert not net[2].ready
    assert "token" in net[1].peers.missing(("w/1", 0))[1]
    assert not net[1].broken
    assert not net[2].broken


def test_a_wrong_token_on_a_trusted_connection_is_refused_there():
    net = joined((1, 2))
    net[1].add(rosters("x", (1, 2))[0])
    net[2].add(rosters("x", (1, 2), token=b"x" * 16)[1])
    net.run()
    assert "token" in net[1].peers.missing(("x/1", 0))[1]
    assert net[1].peers.connections == 1
    assert ("w/1", 0) not in net[1].broken


def test_a_member_that_is_another_process_is_refused():
    net = Net(1, 2, 3)
    net[2].add(rosters("w", (3, 2))[1])
    net[1].add(rosters("w", (1, 2))[0])
    net.pass_time(1.0)
    assert not net[1].ready
    assert not net[2].ready


@pytest.mark.parametrize(("old", "new"), [(1, 2), (2, 1)])
def test_an_old_generation_is_refused_whoever_would_dial(old, new):
    net = Net(1, 2)
    net.join(rosters("w", (old, new)))
    net[new].remove(("w/1", 1))
    net[old].remove(("w/1", 0))
    net.run()
    net[new].add(rosters("w", (new, new), generation=2)[0])
    net[old].add(rosters("w", (old, new))[0])
    net.pass_time(1.5)
    refusal = net[old].refused[0]
    assert (refusal.why, refusal.detail) == (Why.STALE, "rank 1 is in generation 2")


def test_a_token_of_a_generation_that_is_over_is_told_so_without_a_newer_one():
    net = joined((1, 2))
    net.join(rosters("x", (1, 2)))
    net[2].remove(("w/1", 1))
    net.run()
    net[1].remove(("w/1", 0))
    net[1].add(rosters("w", (1, 2))[0])
    net.run()
    assert net[1].refused[0].why is Why.GONE
    assert "gave up generation 1" in net[1].refused[0].detail


def test_an_attach_ends_when_a_member_gives_up_or_crashes():
    for end in ("leave", "crash"):
        net = Net(1, 2, 3)
        group = rosters("w", (1, 2, 3))
        net[1].add(group[0])
        net[2].add(group[1])
        net.settle_all()
        net.run()
        if end == "crash":
            net.crash(2)
        else:
            net[2].remove(("w/1", 1))
        net.run()
        assert verdict(net, 1).ranks == (1,)


@pytest.mark.parametrize("dialer", [1, 2])
def test_a_process_that_refuses_connections_for_a_second_is_gone(dialer):
    net = Net(1, 2)
    net[3 - dialer].listening = False
    net[dialer].add(rosters("w", (1, 2))[dialer - 1])
    net.pass_time(0.9)
    assert not net[dialer].refused
    net.pass_time(2.0)
    assert net[dialer].refused[0].why is Why.GONE
    assert f"rank {2 - dialer}" in net[dialer].refused[0].detail


def test_a_second_endpoint_of_the_same_process_is_tried():
    net = Net(1, 2)
    bad = rosters("x", (1, 9))[0]
    moved = [
        type(each)(
            "x",
            1,
            each.rank,
            (bad.members[0], type(bad.members[1])(1, process(2), bad.members[1].endpoint, 1, "h")),
            TOKEN,
            5.0,
        )
        for each in rosters("x", (1, 2))
    ]
    net[1].add(moved[0])
    net[2].add(moved[1])
    net[1].add(rosters("w", (1, 2))[0])
    net[2].add(rosters("w", (1, 2))[1])
    net.pass_time(1.0)
    assert sorted(net[1].ready) == [("w/1", 0), ("x/1", 0)]


# -- unauthenticated connections


def unproven(net, number, frames=(), channel=9000):
    """A connection from nowhere; what is sent to it is returned."""
    peers = net[number].peers
    peers.accepted(channel, net.now)
    peers.received(channel, frames, net.now)
    return [action for action in peers.take() if getattr(action, "channel", None) == channel]


def test_a_silent_connection_is_dropped_within_a_second():
    net = joined((1, 2))
    assert unproven(net, 1) == []
    net.now += 0.95
    net[1].peers.settle(net.now, {})
    assert Drop(9000, orderly=False) in net[1].peers.take()


def test_an_unproven_peer_that_greets_and_proves_nothing_is_dropped_too():
    net = joined((1, 2))
    sent = unproven(net, 2, [Hello(process(1), process(2), b"n" * 16), Attach("nope/1", 0, b"p" * 32)])
    assert [type(action) for action in sent] == [Send]
    net.now += 0.95
    net[2].peers.settle(net.now, {})
    actions = net[2].peers.take()
    assert Drop(9000, orderly=True) in actions
    assert not net[2].broken


@pytest.mark.parametrize(
    "frames",
    [
        [Beat(1)],
        [Need(1.0)],
        [Hello(process(1), process(7), b"n" * 16)],
        [Hello(process(2), process(2), b"n" * 16)],
        [Hello(process(1), process(2), b"n" * 16)] * 2,
        [Hello(process(1), process(2), b"n" * 16), *(Attach(f"n{i}/1", 0, b"p" * 32) for i in range(65))],
    ],
)
def test_an_unproven_peer_that_does_not_follow_the_protocol_is_dropped_at_once(frames):
    net = joined((1, 2))
    assert unproven(net, 2, [*frames, Beat(2)])[-1] == Drop(9000, orderly=False)
    assert net[2].peers.connections == 1


def test_an_unproven_peer_changes_nothing():
    net = joined((1, 2))
    frames = [
        Hello(process(1), process(2), b"n" * 16),
        Attached("w/1", 1), Refused("w/1", 1, Reason.STALE, 9), Goodbye("w/1", 0),
        Broken("w/1", Cause.CRASHED, (0,), "x"), Beat(1), Need(0.001), Attach("w/1", 0, b"p" * 32),
    ]  # fmt: skip
    sent = unproven(net, 2, frames)
    assert Send(9000, Refused("w/1", 0, Reason.PROOF, 1)) in sent
    net.pass_time(2.0)
    assert not net[2].broken
    assert not net[2].refused
    assert not net[1].broken


def test_an_unproven_peer_may_hang_up():
    net = joined((1, 2))
    unproven(net, 2, [Hello(process(1), process(2), b"n" * 16), Close()])
    assert net[2].peers.connections == 1
    unproven(net, 2, [], channel=9001)
    net[2].peers.closed(9001, ConnectionEnd.LOST, net.now)
    net[2].peers.closed(9001, ConnectionEnd.LOST, net.now)
    net[2].peers.connected(9001, net.now)
    net[2].peers.received(9001, [Beat(1)], net.now, error="gone")
    assert net[2].peers.connections == 1


@pytest.mark.parametrize("number", [1, 2])
def test_a_member_whose_certificate_is_of_another_host_is_refused(number):
    """Whichever end dials; the one that is refused hears why it may be."""
    net = Net(1, 2)
    net[3 - number].host = f"host{3 - number}"
    net[number].host = "elsewhere"
    for node, roster in zip((net[1], net[2]), rosters("w", (1, 2)), strict=True):
        node.add(roster)
    net.pass_time(3.0)
    assert not net[1].ready
    assert not net[2].ready
    other = 3 - number
    assert "of another host, 'elsewhere'" in net[other].peers.missing(("w/1", other - 1))[number - 1]
    assert "of another host" in net[number].peers.missing(("w/1", number - 1))[other - 1]


def test_members_on_the_hosts_of_their_certificates_meet_and_others_are_refused_in_a_later_world():
    net = Net(1, 2)
    for number in (1, 2):
        net[number].host = f"host{number}"
    net.join(rosters("w", (1, 2)))
    moved = [
        replace(each, members=(each.members[0], replace(each.members[1], hostname="x")))
        for each in rosters("v", (1, 2))
    ]  # fmt: skip
    net[1].add(moved[0])
    net[2].add(moved[1])
    net.pass_time(1.0)
    assert net[1].ready == [("w/1", 0)]
    assert net[2].ready == [("w/1", 1)]
    assert not net[1].broken


def test_the_oldest_unproven_connection_makes_room():
    net = Net(1)
    for number in range(peers_module.MAX_UNAUTHENTICATED + 3):
        net[1].peers.accepted(5000 + number, net.now)
    assert net[1].peers.take() == [Drop(5000 + number, orderly=False) for number in range(3)]
    assert net[1].peers.connections == peers_module.MAX_UNAUTHENTICATED


def test_an_answer_that_never_comes_is_given_up_and_dialed_again():
    net = Net(1, 2)
    net[1].add(rosters("w", (1, 2))[0])
    net[2].stopped = True
    net.settle_all()
    net.now += 1.6
    net[1].settle()
    assert "does not answer" not in net[1].peers.missing(("w/1", 0))[1]
    net.run()
    net.now += 1.6
    net[1].settle()
    assert net[1].peers.missing(("w/1", 0)) == {1: "it does not answer"}
    net.now += 0.5
    net[1].settle()
    net[2].stopped = False
    net[2].add(rosters("w", (1, 2))[1])
    net.pass_time(3.0)
    assert net[1].ready


def test_garbage_from_a_member_is_a_failure_of_that_member():
    net = joined((1, 2))
    channel = next(iter(net[1].peers._connections.by_channel))
    net[1].peers.received(channel, [Beat(1)], net.now, error="what is this")
    net[1].settle()
    assert (verdict(net, 1).cause, verdict(net, 1).ranks) == (Cause.FAILED, (1,))


def test_garbage_from_a_dialed_peer_is_dialed_again():
    net = Net(1, 2)
    net[1].add(rosters("w", (1, 2))[0])
    net.settle_all()
    channel = next(iter(net[1].peers._connections.by_channel))
    net[1].peers.received(channel, [], net.now, error="what is this")
    net[1].act()
    net[2].add(rosters("w", (1, 2))[1])
    net.pass_time(1.0)
    assert net[1].ready


def test_why_the_bytes_of_a_dialed_peer_were_refused_is_the_reason_that_it_is_missing():
    net = Net(1, 2)
    net[1].add(rosters("w", (1, 2))[0])
    net.settle_all()
    channel = next(iter(net[1].peers._connections.by_channel))
    net[1].peers.received(channel, [], net.now, error="TLS: another job")
    assert net[1].peers.missing(("w/1", 0)) == {1: "TLS: another job"}


def test_what_a_stranger_sends_is_no_reason_that_the_process_it_names_is_missing():
    net = Net(1, 2)
    net[1].add(rosters("w", (1, 2))[0])
    unproven(net, 1, [Hello(process(2), process(1), b"n" * 16)])
    net[1].peers.received(9000, [], net.now, error="what is this")
    assert net[1].peers.missing(("w/1", 0)) == {1: ""}


def test_a_member_that_connects_again_gave_its_old_connection_up():
    net = joined((1, 2))
    node = net[1].peers
    link = next(iter(node._connections.by_channel.values()))
    node._connections.by_channel.clear()
    node._trusted.clear()
    node._detector.disconnected(link.peer)
    node.remove(("w/1", 0), goodbye=False, now=net.now)
    group = rosters("w", (1, 2), generation=2)
    net[1].add(group[0])
    net[2].add(group[1])
    net.pass_time(1.0)
    assert (verdict(net, 2).cause, verdict(net, 2).ranks) == (Cause.UNREACHABLE, (0,))
    assert ("w/2", 0) in net[1].ready
    assert ("w/2", 1) in net[2].ready


def test_gossip_of_a_world_that_the_teller_is_not_in_is_not_believed():
    net = joined((1, 2))
    net.join(rosters("x", (1, 3)) if 3 in net.nodes else rosters("x", (1, 1)))
    channel = next(iter(net[1].peers._connections.by_channel))
    net[1].peers.received(
        channel,
        [
            Broken("x/1", Cause.CRASHED, (1,), "x"),
            Goodbye("x/1", 1),
            Attached("zz/1", 0),
            Refused("zz/1", 0, Reason.OVER, 1),
        ],
        net.now,
    )
    net[1].settle()
    assert not net[1].broken


def test_removing_twice_and_unknown_worlds_are_harmless():
    net = joined((1, 2))
    net[1].remove(("w/1", 0))
    net[1].remove(("w/1", 0))
    assert net[1].peers.missing(("w/1", 0)) == {}
    net[1].peers.report(("w/1", 0), (), "late", net.now)
    net[1].settle()
    assert not net[1].broken


def test_a_stall_of_our_own_is_not_the_peers_fault():
    net = joined((1, 2), hang=1.0)
    net[2].stopped = True
    net.pass_time(0.5)
    net.now += 3.0
    net[1].peers.stalled(3.0, net.now)
    net[1].settle()
    assert not net[1].broken
    net[2].stopped = False
    net.run()
    net.pass_time(3.0)
    assert not net[1].broken


def test_only_the_last_generations_are_remembered():
    net = Net(1, 2)
    for generation in range(1, 4200):
        roster = rosters("w", (1, 1), generation=generation)[0]
        net[1].peers._ended_generations.add(roster)
    assert len(net[1].peers._ended_generations._tokens) == 4096


# -- any order of events

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["leave", "crash", "report", "time", "add"]), st.integers(1, 4), st.integers(0, 2)
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(events=EVENTS, chance=st.randoms(use_true_random=False))
def test_whatever_happens_in_whatever_order_the_right_ranks_are_named(events, chance):
    numbers = (1, 2, 3, 4)
    worlds = [("a", (1, 2, 3)), ("b", (3, 1)), ("c", (2, 3, 4))]
    net = Net(*numbers)
    groups = {name: rosters(name, members) for name, members in worlds}
    for name, members in worlds:
        for roster, number in zip(groups[name], members, strict=True):
            net[number].add(roster)
    net.settle_all()
    net.run(chance.choice)
    for name, members in worlds:
        for rank, number in enumerate(members):
            assert (f"{name}/1", rank) in net[number].ready
    gone: dict[str, set[int]] = {name: set() for name, _ in worlds}
    blamed: dict[str, set[int]] = {name: set() for name, _ in worlds}
    for kind, number, which in events:
        name, members = worlds[which]
        node = net[number]
        for _ in range(chance.randrange(4)):
            if busy := net.busy():
                net.deliver(chance.choice(busy))
        if not node.alive:
            continue
        if kind == "crash":
            net.crash(number)
            for each, group in worlds:
                if number in group:
                    gone[each].add(group.index(number))
        elif kind == "time":
            net.pass_time(0.2, pick=chance.choice)
        elif number in members and kind == "leave":
            rank = members.index(number)
            node.remove((f"{name}/1", rank))
            gone[name].add(rank)
        elif number in members and kind == "report":
            rank = members.index(number)
            other = (rank + 1) % len(members)
            node.peers.report((f"{name}/1", rank), (other,), "it failed", net.now)
            blamed[name].add(other)
    net.pass_time(3.0, pick=chance.choice)
    for name, members in worlds:
        for rank, number in enumerate(members):
            broken = net[number].broken.get((f"{name}/1", rank))
            if not net[number].alive or rank in gone[name]:
                continue
            if gone[name]:
                assert broken is not None
            if broken is None:
                assert not blamed[name]
            elif broken.cause is Cause.FAILED:
                assert set(broken.ranks) <= blamed[name]
            else:
                assert broken.cause in {Cause.CRASHED, Cause.LEFT}
                assert broken.ranks
                assert set(broken.ranks) <= gone[name]


# -- corners


def test_a_knock_on_a_door_that_is_open_to_it_proves_nothing():
    """The bigger id only asks; the pair's connection is the other one's to make."""
    net = Net(1, 2)
    group = rosters("w", (1, 2))
    net[2].add(group[1])
    net.now += 0.6
    net[2].settle()
    net[1].peers.add(group[0], net.now)  # its own dial is decided and not yet made
    net[1].act()
    net.run(lambda busy: busy[-1])
    net.pass_time(2.0)
    assert (net[1].ready, net[2].ready) == ([("w/1", 0)], [("w/1", 1)])
    assert (net[1].peers.connections, net[2].peers.connections) == (1, 1)
    [link] = net[1].peers._connections.by_channel.values()
    assert (link.dialed, link.knocking) == (True, False)


def test_a_connection_that_closes_while_its_only_world_is_attached_is_made_anew():
    net = Net(1, 2)
    group = rosters("w", (1, 2, 3))
    net[1].add(group[0])
    net[2].add(group[1])
    net.settle_all()
    net.run()
    channel = next(iter(net[2].peers._trusted.values())).channel
    net[2].peers.received(channel, [Close()], net.now)
    net[2].act()
    net.pass_time(0.5)
    assert not net[2].broken
    assert process(1) in net[2].peers._dialing._targets or process(1) in net[2].peers._trusted


def test_a_world_that_goes_while_its_connection_is_being_made():
    net = Net(1, 2)
    net[1].add(rosters("w", (1, 2))[0])
    net[1].settle()
    net[1].remove(("w/1", 0))
    assert net[1].peers.connections == 0
    net.run()
    assert not net[2].broken


def test_dialing_forgets_what_is_not_wanted():
    dialing = Dialing(process(1))
    dialing.connected(process(2))
    dialing.ended(process(2), 1.0, refused=True)
    assert dialing.due(9.0) == []
    assert dialing.wake() == math.inf
    dialing.want(process(2), 1.0)
    assert dialing.due(1.0) == [(process(2), 0)]
    assert dialing.due(1.0) == []
    dialing.ended(process(2), 1.0, refused=True)
    assert dialing.gone(1.5) == []
    assert dialing.gone(2.0) == [process(2)]
    dialing.ended(process(2), 2.0, refused=False)
    assert dialing.gone(9.0) == []
