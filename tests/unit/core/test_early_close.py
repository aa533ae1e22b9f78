"""Early-close connections, decided: whole groups of processes, simulated, whose second connections end before the first do."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.peerkit import ANSWERS, SILENT_HOST, TOKEN, Net, process, rosters

from multiworld._core.liveness import peers as peers_module
from multiworld._core.liveness.actions import Dial, Drop, Keep, Release, Send
from multiworld._core.liveness.connection import PeerConnection
from multiworld._core.liveness.detector import ConnectionEnd
from multiworld._core.liveness.early_close import DELAY, Credentials, EarlyClose
from multiworld._core.liveness.wire import (
    Attach,
    AttachEarlyClose,
    Attached,
    Beat,
    Broken,
    Close,
    Goodbye,
    Hello,
)
from multiworld.events import Cause


def joined(numbers=(1, 2), name="w", **more):
    """A world whose members are tied to each other."""
    net = Net(*numbers, early_close=True)
    net.join(rosters(name, numbers, **more))
    net.pass_time(3 * DELAY)
    return net


def tied(net, *numbers):
    """Whether each keeps an early-close connection to each other one, watches one of each, and has nothing else."""
    others = len(numbers) - 1
    return all(
        (len(net[number].kept), net[number].peers.early_close.watched, net[number].peers.connections)
        == (others,) * 3
        for number in numbers
    )


def theirs(net, number):
    """The channel at which `number` watches the early-close connection of its only peer."""
    [channel] = net[number].peers.early_close._by_channel
    return channel


def main(net, number):
    [connection] = net[number].peers._trusted.values()
    return connection


def found(net, number, key="w/1", rank=None):
    breakage = net[number].broken[key, number - 1 if rank is None else rank]
    return breakage.cause, breakage.ranks


def test_each_member_is_tied_to_each_other_one():
    assert tied(joined((1, 2, 3)), 1, 2, 3)


@pytest.mark.parametrize("cause", [Cause.HUNG, Cause.UNREACHABLE, Cause.CRASHED])
def test_a_member_that_tells_why_and_dies_at_once_is_not_the_cause(cause):
    net = joined((1, 2, 3))
    peers = net[1].peers
    peers.received(peers._trusted[process(2)].channel, [Broken("w/1", cause, (2,), "x")], net.now)
    [ends] = [
        channel for channel, each in peers.early_close._by_channel.items() if each.main.peer == process(2)
    ]
    peers.closed(ends, ConnectionEnd.LOST, net.now, plain=True)
    net[1].settle()
    assert found(net, 1) == (cause, (2,))


def test_a_member_that_tells_a_failure_of_its_own_and_dies_has_crashed():
    net = joined((1, 2, 3))
    peers = net[1].peers
    peers.received(peers._trusted[process(2)].channel, [Broken("w/1", Cause.FAILED, (0, 1), "x")], net.now)
    net.crash(2)
    net.run()
    assert found(net, 1) == (Cause.CRASHED, (1,))


def test_without_a_place_to_keep_them_none_is_dialed_and_those_of_others_are_accepted():
    net = Net(1, 2)
    net[2].peers.early_close.own_wanted = True
    net.join(rosters("w", (1, 2)))
    net.pass_time(1.0)
    assert (net[1].kept, net[1].peers.early_close.watched) == (set(), 1)
    assert (len(net[2].kept), net[2].peers.early_close.watched) == (1, 0)


def test_the_join_does_not_wait_for_them():
    net = Net(1, 2, early_close=True)
    net.join(rosters("w", (1, 2)))
    assert net[1].ready
    assert net[1].peers.early_close.watched == 0
    assert net[1].peers.wake() <= net.now + DELAY
    net.pass_time(3 * DELAY)
    assert tied(net, 1, 2)


def by_itself(credentials):
    """What one process decides, and what it wants done; a connection of its to process 2."""
    done = []
    found = EarlyClose(
        process(1),
        nonce=lambda: b"n" * 16,
        channel=iter(range(50, 99)).__next__,
        act=done.append,
        credentials=credentials,
    )
    found.own_wanted = True
    return found, done, PeerConnection(5, process(1), b"n" * 16, dialed=True, since=0.0, peer=process(2))


def test_where_no_world_is_to_be_proved_none_is_dialed():
    found, done, connection = by_itself(lambda _main: None)
    found.want(connection, 0.0)
    found.settle(1.0)
    assert (done, found.wake()) == ([], math.inf)
    net = joined()
    assert net[1].peers._worlds.credentials(main(net, 1)) is not None
    main(net, 1).accepted.clear()
    assert net[1].peers._worlds.credentials(main(net, 1)) is None


def test_an_attempt_has_its_time():
    roster = rosters("w", (1, 2))[0]
    found, done, connection = by_itself(
        lambda _main: Credentials(roster.members[1].endpoint, TOKEN, ("w/1", 0))
    )
    found.want(connection, 0.0)
    assert found.wake() == DELAY
    found.settle(1.0)
    assert done == [Dial(50, roster.members[1].endpoint)]
    late = found.wake()
    assert 1.0 < late < math.inf
    found.settle(late)
    assert done[1:] == [Drop(50, orderly=False)]
    assert found.wake() == late + 1.0


def test_attempts_that_fail_become_rare_and_one_that_succeeds_forgets_them():
    roster = rosters("w", (1, 2))[0]
    found, done, connection = by_itself(
        lambda _main: Credentials(roster.members[1].endpoint, TOKEN, ("w/1", 0))
    )
    found.want(connection, 0.0)
    now, waited = DELAY, []
    for channel in range(50, 62):
        found.settle(now)
        assert done.pop() == Dial(channel, roster.members[1].endpoint)
        found.closed(channel, now, plain=True)
        waited.append(found.wake() - now)
        now = found.wake()
    assert waited == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60, 60])
    assert found.ended() == []
    found.want(connection, now - 10)  # a world that is ready does not wait for that
    assert found.wake() == now - 10 + DELAY
    found.settle(now)
    found.connected(62, now)
    found.received(62, [HELLO, Attached("w/1", 0)], now)
    assert done[-1] == Keep(62)
    assert found._pair(connection).failed == 0


def test_any_number_of_worlds_shares_them():
    net = joined()
    kept = set(net[1].kept)
    for number in range(20):
        net.join(rosters(f"x{number}", (1, 2) if number % 2 else (2, 1)))
        net.pass_time(3 * DELAY)
    assert tied(net, 1, 2)
    assert net[1].kept == kept


def test_the_end_of_an_early_close_connection_is_a_crash_in_the_same_settle():
    net = joined((1, 2, 3))
    net.join(rosters("x", (3, 1)))
    net.join(rosters("y", (1, 2)))
    net.die(3)
    net.run()
    for number in (1, 2):
        assert found(net, number) == (Cause.CRASHED, (2,))
        assert "closed by its kernel" in net[number].broken["w/1", number - 1].detail
    assert found(net, 1, "x/1", 1) == (Cause.CRASHED, (0,))
    assert ("y/1", 0) not in net[1].broken
    assert ("y/1", 1) not in net[2].broken
    net.crash(3)  # its kernel closes the rest
    net.pass_time(1.0)
    assert tied(net, 1, 2)


@pytest.mark.parametrize("first", ["early close", "main"])
def test_who_left_in_the_same_batch_has_left(first):
    net = joined()
    frames = [Goodbye("w/1", 1)]
    steps = {
        "main": lambda: net[1].peers.received(main(net, 1).channel, frames, net.now),
        "early close": lambda: net[1].peers.closed(theirs(net, 1), ConnectionEnd.LOST, net.now, plain=True),
    }
    for step in (first, *(steps.keys() - {first})):
        steps[step]()
    net[1].settle()
    assert found(net, 1) == (Cause.LEFT, (1,))


def test_a_crash_beside_who_left_in_the_same_batch_is_a_crash():
    net = joined((1, 2, 3))
    links = net[1].peers._trusted
    net[1].peers.received(links[process(2)].channel, [Goodbye("w/1", 1)], net.now)
    net[1].peers.closed(links[process(2)].channel, ConnectionEnd.LOST, net.now)
    net[1].peers.closed(links[process(3)].channel, ConnectionEnd.LOST, net.now)
    net[1].settle()
    assert found(net, 1) == (Cause.CRASHED, (2,))


@pytest.mark.parametrize("frames", [[Close()], [Beat(1)], [Attach("w/1", 1, b"p" * 32)], []])
def test_whatever_is_said_on_an_early_close_connection_costs_only_that_connection(frames):
    net = joined()
    channel = theirs(net, 1)
    net[1].peers.received(channel, frames, net.now, error=None if frames else "what is this")
    assert Drop(channel, orderly=False) in net[1].peers._actions
    net[1].peers.closed(channel, ConnectionEnd.LOST, net.now, plain=True)
    net[1].act()
    net.pass_time(1.0)
    assert not net[1].broken
    assert not net[2].broken
    assert net[1].peers.early_close.watched == 0


@pytest.mark.parametrize("ending", list(ConnectionEnd))
def test_an_early_close_connection_that_is_not_closed_but_cut_is_none_any_more(ending):
    net = joined()
    net[1].peers.closed(theirs(net, 1), ending, net.now, plain=False)
    net.pass_time(1.0)
    assert not net[1].broken
    assert net[1].peers.early_close.watched == 0
    net.crash(2)
    net.run()
    assert found(net, 1) == (Cause.CRASHED, (1,))


def test_an_early_close_connection_goes_with_its_connection_and_says_so():
    net = joined()
    [kept] = net[2].kept
    net[2].peers.remove(("w/1", 1), goodbye=True, now=net.now)
    actions = net[2].peers._actions
    assert Release(kept) in actions
    net[2].act()
    net.run()
    assert found(net, 1) == (Cause.LEFT, (1,))
    net[1].remove(("w/1", 0))
    net.run()
    assert [net[number].peers.early_close.watched for number in (1, 2)] == [0, 0]
    assert [net[number].kept for number in (1, 2)] == [set(), set()]
    assert not net.queues
    net.pass_time(5.0)
    assert net[1].peers.wake() == math.inf


def test_an_early_close_connection_of_the_connection_before_says_nothing_about_the_one_after():
    net = joined()
    old = theirs(net, 1)
    early_close = net[1].peers.early_close
    net[2].remove(("w/1", 1))
    net[1].remove(("w/1", 0))
    net.run()
    net.join(rosters("w", (1, 2), generation=2))
    early_close.closed(old, net.now, plain=True)
    net[1].peers.closed(old, ConnectionEnd.LOST, net.now, plain=True)
    net.pass_time(1.0)
    assert not net[1].broken
    assert tied(net, 1, 2)


def test_an_end_that_was_noted_for_a_link_that_went_is_forgotten():
    net = joined()
    net[1].peers.closed(theirs(net, 1), ConnectionEnd.LOST, net.now, plain=True)
    net[1].peers.received(main(net, 1).channel, [Goodbye("w/1", 1), Close()], net.now)
    net[1].settle()
    assert found(net, 1) == (Cause.LEFT, (1,))


def test_silence_is_judged_as_without_them():
    for probe, cause in ((ANSWERS, Cause.HUNG), (SILENT_HOST, Cause.UNREACHABLE)):
        net = joined((1, 2), hang=2.0)
        net[2].stopped = True
        net.pass_time(2.4, probes={1: {process(2): probe}})
        assert found(net, 1) == (cause, (1,))


# -- the handshake


def dialed(net, number):
    """Let the delay pass, and return the early-close connection that is being dialed."""
    net.now += DELAY
    node = net[number].peers
    node.settle(net.now, {})
    [dial] = [action for action in node.take() if isinstance(action, Dial)]
    return dial.channel


def half(net=None):
    """1 has dialed an early-close connection and greeted; what 2 answers is the test's to say."""
    net = net or Net(1, 2, early_close=True)
    net[2].peers.early_close.own_wanted = False
    net.join(rosters("w", (1, 2)))
    channel = dialed(net, 1)
    net[1].peers.connected(channel, net.now)
    assert isinstance(net[1].peers.take()[-1].frame, Hello)
    return net, channel


HELLO = Hello(process(2), process(1), b"n" * 16)


@pytest.mark.parametrize(
    "answers",
    [
        [Hello(process(7), process(1), b"n" * 16)],
        [Attached("w/1", 0)],
        [Beat(1)],
        [HELLO, HELLO],
        [HELLO, Close()],
        [HELLO, Attached("w/1", 0), Close()],
    ],
)
def test_an_answer_that_is_none_ends_the_attempt(answers):
    net, channel = half()
    net[1].peers.received(channel, answers, net.now)
    greeted = answers[0] == HELLO
    actions = net[1].peers._actions
    assert actions[-1] == Drop(channel, orderly=greeted)
    assert (Send(channel, Close()) in actions) is greeted, (
        "the other end may hold it to be an early-close connection"
    )
    net[1].act()
    net.pass_time(0.5)
    assert (net[1].kept, net[1].peers.early_close.watched) == (set(), 0)
    assert net.owner.keys() == net.other.keys() == {main(net, 1).channel, main(net, 2).channel}


@pytest.mark.parametrize(
    ("end", "again"),
    [("closed", "world"), ("closed", "time"), ("garbage", "world"), ("garbage", "time"), ("time", "time")],
)
def test_an_attempt_that_fails_is_made_again_with_the_next_world_or_a_while_later(end, again):
    net, channel = half()
    if end == "closed":
        net[1].peers.closed(channel, ConnectionEnd.DEAD, net.now, refused=True)
    elif end == "garbage":
        net[1].peers.received(channel, [HELLO], net.now, error="what is this")
    net.pass_time(0.5)
    assert net[1].kept == set()
    assert not net[1].broken
    if again == "world":
        net.join(rosters("x", (1, 2)))
        net.pass_time(0.4)
    else:
        net.pass_time(5.0)
    assert len(net[1].kept) == 1
    assert net[1].peers.early_close.watched == 0


def test_a_world_that_ended_at_the_other_end_before_it_was_proved_costs_no_early_close_connection():
    """Short worlds between processes that share a long one: the newest is the one that is proved."""
    net = Net(1, 2)
    net[1].peers.early_close.own_wanted = True
    net.join(rosters("w", (1, 2)))
    net.join(rosters("short", (1, 2)))
    channel = dialed(net, 1)
    net[2].remove(("short/1", 1))
    net[1].peers.connected(channel, net.now)
    net[1].act()
    net.run()
    net[1].remove(("short/1", 0))
    net.pass_time(0.5)
    assert net[1].kept == set()
    net.pass_time(2.0)
    assert len(net[1].kept) == 1


def test_an_attempt_whose_link_goes_is_given_up_in_good_order():
    net, channel = half()
    net[1].peers.received(channel, [HELLO], net.now)
    net[1].peers.take()
    net[1].peers.remove(("w/1", 0), goodbye=True, now=net.now)
    actions = net[1].peers.take()
    assert actions.index(Send(channel, Close())) < actions.index(Drop(channel, orderly=True))
    net[1].peers.received(channel, [Attached("w/1", 0)], net.now)
    assert net[1].peers.take() == []


def test_it_is_kept_when_it_is_accepted():
    net, channel = half()
    net[1].peers.received(channel, [HELLO, Attached("w/1", 0)], net.now)
    assert net[1].peers.take()[-1] == Keep(channel)


def unproven(net, frames, channel=9000, number=2, host=""):
    """Connect to `number` as 1 would, and return what it does about that connection."""
    peers = net[number].peers
    peers.accepted(channel, net.now)
    peers.received(channel, [Hello(process(1), process(number), b"n" * 16)], net.now)
    [hello] = [each.frame for each in peers.take() if isinstance(each, Send)]
    connection = PeerConnection(channel, process(1), b"n" * 16, dialed=True, since=0.0, peer=process(number))
    connection.greet(hello)
    peers.received(channel, frames(connection), net.now, host=host)
    return [action for action in peers.take() if getattr(action, "channel", None) == channel]


def credentials(connection, key="w/1", rank=0, token=TOKEN):
    return [connection.offer_early_close(token, (key, rank))]


@pytest.mark.parametrize(
    "frames",
    [
        lambda connection: credentials(connection, token=b"x" * 16),
        lambda connection: credentials(connection, rank=1),
        lambda connection: credentials(connection, rank=9),
        lambda connection: credentials(connection, key="nope/1"),
        lambda connection: [AttachEarlyClose("w/1", 0, connection.offer(TOKEN, ("w/1", 0)).proof)],
    ],
)
def test_an_early_close_connection_that_proves_nothing_is_dropped(frames):
    net = joined()
    before = net[2].peers.early_close.watched
    assert unproven(net, frames)[-1] == Drop(9000, orderly=True)
    assert net[2].peers.early_close.watched == before
    assert tied(net, 1, 2)


def test_an_early_close_connection_with_a_certificate_of_another_host_is_dropped():
    net = joined()
    before = net[2].peers.early_close.watched
    assert unproven(net, credentials, host="host9")[-1] == Drop(9000, orderly=True)
    assert net[2].peers.early_close.watched == before
    assert unproven(net, credentials, channel=9001, host="host1") == [Send(9001, Attached("w/1", 0))]


def test_the_proof_of_an_early_close_connection_is_no_proof_of_membership():
    net = joined()
    sent = unproven(
        net, lambda connection: [Attach("w/1", 0, connection.offer_early_close(TOKEN, ("w/1", 0)).proof)]
    )
    assert Send(9000, Attached("w/1", 0)) not in sent
    assert sent[-1] == Drop(9000, orderly=True)
    assert not net[2].broken


def test_an_early_close_connection_without_a_trusted_connection_is_dropped():
    net = Net(1, 2)
    net[2].add(rosters("w", (1, 2))[1])
    assert unproven(net, credentials)[-1] == Drop(9000, orderly=True)


def test_an_early_close_frame_on_a_trusted_connection_is_an_error():
    net = joined()
    connection = main(net, 2)
    net[2].peers.received(connection.channel, [connection.offer_early_close(TOKEN, ("w/1", 1))], net.now)
    net[2].settle()
    assert found(net, 2) == (Cause.FAILED, (0,))


def test_another_early_close_connection_takes_the_place_of_the_one_before():
    net = joined()
    old = theirs(net, 2)
    assert unproven(net, credentials) == [Send(9000, Attached("w/1", 0))]
    assert theirs(net, 2) == 9000
    net[2].peers.closed(old, ConnectionEnd.LOST, net.now, plain=True)
    net[2].settle()
    assert not net[2].broken
    net[2].peers.closed(9000, ConnectionEnd.LOST, net.now, plain=True)
    net[2].settle()
    assert found(net, 2) == (Cause.CRASHED, (0,))


def test_a_dialer_that_gave_up_before_it_was_heard_has_not_died():
    """The other process was stopped meanwhile, say: all that was said comes at once."""
    net = joined()
    sent = unproven(net, lambda connection: [*credentials(connection), Close()])
    assert sent[-1] == Drop(9000, orderly=False)
    net[2].peers.closed(9000, ConnectionEnd.LOST, net.now, plain=True)
    net[2].settle()
    assert not net[2].broken


def test_one_that_is_accepted_is_unproven_no_more():
    net = joined()
    watched = theirs(net, 2)
    for number in range(peers_module.MAX_UNAUTHENTICATED + 3):
        net[2].peers.accepted(5000 + number, net.now)
    net.now += 3.0
    net[2].peers.settle(net.now, {process(1): ANSWERS})
    assert watched not in {each.channel for each in net[2].peers.take() if isinstance(each, Drop)}
    assert net[2].peers.early_close.watched == 1


# -- any order of events

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["leave", "quit", "die", "crash", "time"]), st.integers(1, 4), st.integers(0, 2)
    ),
    max_size=10,
)


@settings(max_examples=80, deadline=None)
@given(events=EVENTS, chance=st.randoms(use_true_random=False), early=st.booleans())
def test_in_whatever_order_it_arrives_who_left_has_left_and_who_died_has_crashed(events, chance, early):
    """Connections are independent of each other, as over a slow network; `early`: early-close connections are still being made."""
    numbers = (1, 2, 3, 4)
    worlds = {"a": (1, 2, 3), "b": (3, 1), "c": (2, 3, 4)}
    net = Net(*numbers, early_close=True)
    net.together = lambda: chance.random() < 0.5
    for name, members in worlds.items():
        for roster, number in zip(rosters(name, members), members, strict=True):
            net[number].add(roster)
    net.settle_all()
    net.run(chance.choice)
    net.now += DELAY
    net.settle_all()
    if not early:
        net.run(chance.choice)
        assert tied(net, 3) or all(len(net[each].kept) == net[each].peers.connections for each in numbers)
    left: set[tuple[str, int]] = set()
    died: set[tuple[str, int]] = set()
    overtaken: set[tuple[int, str, int]] = set()  # by the process that is to hear of it
    for kind, number, which in events:
        for _ in range(chance.randrange(6)):
            if busy := net.busy():
                net.deliver(chance.choice(busy))
        node = net[number]
        every = [(name, members.index(number)) for name, members in worlds.items() if number in members]
        own = [each for each in every if each not in left]
        if kind == "time":
            net.pass_time(0.1, pick=chance.choice)
        elif not node.alive:
            net.crash(number)
        elif kind in {"leave", "quit"}:
            for name, rank in own if kind == "quit" else own[which : which + 1]:
                node.remove((f"{name}/1", rank))
                left.add((name, rank))
            if kind == "quit":  # and its process ends
                assert not node.kept
                net.crash(number)
        else:
            died.update(own)
            # Its word to a world that it left may be under way on the first connection.
            overtaken |= {(to, *each) for to in net.on_their_way(number) for each in left.intersection(every)}
            net.die(number)
            if kind == "crash":
                net.crash(number)
    net.pass_time(1.0, pick=chance.choice)
    for name, members in worlds.items():
        gone = {rank for kind in (left, died) for key, rank in kind if key == name}
        for rank, number in enumerate(members):
            if rank in gone:
                continue
            breakage = net[number].broken.get((f"{name}/1", rank))
            # Who died before its early-close connection was made is seen when its kernel comes to the first connection.
            assert breakage is not None or not gone or early
            if breakage is None:
                continue
            assert breakage.ranks
            assert set(breakage.ranks) <= gone
            wanted = (
                left
                if breakage.cause is Cause.LEFT
                else died | {each[1:] for each in overtaken if each[0] == number}
            )
            assert breakage.cause in {Cause.LEFT, Cause.CRASHED}
            assert {(name, each) for each in breakage.ranks} <= wanted


def test_a_word_that_is_under_way_is_not_waited_for():
    """It left the world and was killed right then: another host may read of its death first."""
    net = joined()
    net.join(rosters("v", (1, 2)))
    net[1].remove(("w/1", 0))
    net.die(1)
    net.deliver(theirs(net, 2))
    assert found(net, 2) == (Cause.CRASHED, (0,))
