"""Broken bytes to all that reads what strangers send: it raises what it documents, and nothing else."""

from __future__ import annotations

import contextlib
import random
import ssl

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits import fuzzkit
from kits.tlskit import Files, authority

from multiworld._core.lane.frames import ProtocolError
from multiworld._core.lane.greeting import ANSWER_SIZE, OFFER_SIZE, Greeting, GreetingError
from multiworld._core.lane.peer import LaneState, Peer
from multiworld._core.liveness import evidence, wire
from multiworld._core.membership import ledger
from multiworld._core.membership.roster import Endpoint, LaneAddress, Member, Roster
from multiworld._net.launcher_connection import Lines
from multiworld._net.launcher_connection import ProtocolError as LineError
from multiworld.errors import JoinError

TOKEN = bytes(range(16))
PROCESSES = tuple(f"{rank:032x}" for rank in range(3))
FACTS = fuzzkit.Facts("w#1", PROCESSES, TOKEN)
SEEDS = st.integers(0, (1 << 64) - 1)
MANY = settings(max_examples=300)
MEMBERS = tuple(
    Member(rank, each, Endpoint("127.0.0.1", 1), 1, "h", LaneAddress(3, "", 2))
    for rank, each in enumerate(PROCESSES)
)


def roster(rank):
    return Roster("w", 1, rank, MEMBERS, TOKEN, 10.0)


def drawn(seed):
    return random.Random(seed)  # noqa: S311


def pieces(dice, data):
    while data:
        size = dice.choice([1, 3, 40, 5000])
        yield data[:size]
        data = data[size:]


@MANY
@given(SEEDS)
def test_the_watchdogs_parser_never_raises(seed):
    dice = drawn(seed)
    parser, frames = wire.Parser(), []
    for part in pieces(dice, fuzzkit.mutated(dice, fuzzkit.watchdog(dice, FACTS))):
        over = parser.error
        more = parser.feed(part)
        assert not (over and more), "nothing is parsed after a fault"
        frames += more
    for each in frames:
        assert isinstance(each, wire.Frame)
    assert len(parser._buffer) <= wire.MAX_PAYLOAD + 6


@MANY
@given(SEEDS)
def test_what_is_not_broken_is_parsed(seed):
    parser, dice = wire.Parser(), drawn(seed)
    data = fuzzkit.watchdog(dice, FACTS)
    assert b"".join(map(wire.encode, parser.feed(data))) == data
    assert parser.error is None


@MANY
@given(SEEDS)
def test_the_lanes_reader_raises_protocol_errors_alone(seed):
    dice = drawn(seed)
    peer = Peer(LaneState(), 1, readable=dice.random() < 0.5)
    data, kept = fuzzkit.mutated(dice, fuzzkit.lane_frames(dice)), 0
    try:
        while data:
            want = peer.incoming.want()
            assert len(want), "it always wants something"
            size = min(len(want), len(data), dice.choice([1, 40, 5000]))
            want[:size] = data[:size]
            data = data[size:]
            peer.incoming.got(size)
            kept = max(kept, len(want))
    except ProtocolError:
        pass
    assert kept <= 1 << 20, "no more than a message that was not asked for is kept"


@pytest.fixture(scope="module")
def credentials(tmp_path_factory):
    return Files(tmp_path_factory.mktemp("tls"), authority()).credentials


def answered(credentials, data):
    """What the end that accepts says to records: its answer, and whether it goes on."""
    came, said = ssl.MemoryBIO(), ssl.MemoryBIO()
    end = credentials.context(server=True).wrap_bio(came, said, server_side=True)
    came.write(data)
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return said.read(), True
    except ssl.SSLError:
        return said.read(), False
    raise AssertionError("the handshake is over")


def test_a_hello_of_tls_is_taken_and_what_follows_it_is_not(credentials):
    taken, refused = 0, 0
    for seed in range(300):
        dice = drawn(seed)
        heard, goes_on = answered(credentials, fuzzkit._record(22, fuzzkit.client_hello(dice)))
        # A record of the handshake, and in it the server's hello.
        taken += goes_on and (heard[0], heard[5]) == (22, 2)
        for data in (fuzzkit.tls(dice, FACTS), fuzzkit.mutated(dice, fuzzkit.tls(dice, FACTS))):
            refused += not answered(credentials, data)[1]
    assert taken > 100
    assert refused > 100


class Memory:
    def offer(self):
        return bytes(OFFER_SIZE)

    def answer(self, offer):
        return bytes(ANSWER_SIZE)

    def accepts(self, answer):
        return True


def shake(dialer, acceptor, between):
    """Pass all that they say through `between`, until both are over or have nothing to say."""
    while not (dialer.over and acceptor.over):
        moved = False
        for one, other in ((dialer, acceptor), (acceptor, dialer)):
            said = one.unsent
            one.wrote(len(said))
            said = between(said) if said else said
            while said and len(want := other.want()):
                size = min(len(want), len(said))
                want[:size] = said[:size]
                said = said[size:]
                other.got(size)
                moved = True
        if not moved:
            return


@MANY
@given(SEEDS)
def test_a_lanes_handshake_that_is_changed_on_the_way_is_never_over_at_both_ends(seed):
    dice = drawn(seed)
    dialer = Greeting(roster(1), Memory(), dice.randbytes(16), peer=0)
    acceptor = Greeting(roster(0), Memory(), dice.randbytes(16))
    at, changed = dice.randrange(6), [False]
    count = iter(range(100))

    def between(said):
        if next(count) != at:
            return said
        broken = fuzzkit.mutated(dice, said)
        changed[0] = broken[: len(said)] != said
        return broken

    try:
        shake(dialer, acceptor, between)
    except GreetingError:
        return
    assert not changed[0] or not (dialer.over and acceptor.over)


def test_a_lanes_handshake_that_is_not_changed_is_over():
    dialer, acceptor = (
        Greeting(roster(1), Memory(), bytes(16), peer=0),
        Greeting(roster(0), Memory(), bytes(16)),
    )
    shake(dialer, acceptor, lambda said: said)
    assert dialer.over
    assert acceptor.over


@MANY
@given(SEEDS)
def test_a_recorded_handshake_opens_nothing(seed):
    """All that a dialer said, once more to the same member."""
    dice = drawn(seed)
    dialer, acceptor = (
        Greeting(roster(1), Memory(), dice.randbytes(16), peer=0),
        Greeting(roster(0), Memory(), bytes(16)),
    )
    record = []
    shake(dialer, acceptor, lambda said: (record.append(said), said)[1])
    again = Greeting(roster(0), Memory(), dice.randbytes(16))
    with pytest.raises(GreetingError):
        for said in record[::2]:
            left = said
            while left and len(want := again.want()):
                size = min(len(want), len(left))
                want[:size] = left[:size]
                left = left[size:]
                again.got(size)
            again.wrote(len(again.unsent))
    assert not again.over


@MANY
@given(SEEDS)
def test_lines_to_a_launcher_raise_their_own_error_alone(seed):
    dice = drawn(seed)
    lines = Lines()
    try:
        for part in pieces(dice, fuzzkit.mutated(dice, fuzzkit.control(dice, FACTS))):
            for message in lines.feed(part):
                assert isinstance(message, dict)
    except LineError:
        pass


@MANY
@given(SEEDS)
def test_a_helpers_answer_that_is_broken_is_none(seed):
    dice = drawn(seed)
    body = dice.randbytes(16) + b"R" + dice.randbytes(2)
    sound = b"m8da" + body + evidence._proof(TOKEN, b"a" + body)
    assert evidence.answer(sound, TOKEN) is not None
    broken = fuzzkit.mutated(dice, sound)
    assert (evidence.answer(broken, TOKEN) is None) == (broken != sound)


@MANY
@given(SEEDS)
def test_a_record_that_is_broken_is_read_or_refused(seed):
    dice = drawn(seed)
    claims = tuple(ledger.Claim(each.process, each, 0) for each in MEMBERS)
    attempt = ledger.Attempt(1, ledger.Terms(3, "gloo", "cpu"), claims, 1, TOKEN.hex(), (0, 1, 2))
    failure = ledger.Failure(1, "JoinTimeoutError", "v")
    text = ledger.encode(ledger.Ledger(1, 1, attempt, failures=(failure,)))
    assert ledger.decode(text, "w").current == attempt
    broken = fuzzkit.mutated(dice, text.encode()).decode(errors="replace")
    with contextlib.suppress(JoinError):
        assert isinstance(ledger.decode(broken, "w"), ledger.Ledger)


@MANY
@given(SEEDS, st.sampled_from(sorted(fuzzkit._SAYS)))
def test_a_seed_says_the_same_each_time(seed, kind):
    once, twice = drawn(seed), drawn(seed)
    said = fuzzkit.say(once, kind, FACTS)
    assert fuzzkit.mutated(once, said) == fuzzkit.mutated(twice, fuzzkit.say(twice, kind, FACTS))
