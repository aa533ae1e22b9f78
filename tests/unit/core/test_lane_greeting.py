"""The handshake of a lane connection: whatever is cut, changed, replayed or reflected, and who may read memory."""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld._core.lane.greeting import (
    ANSWER_SIZE,
    NONCE_SIZE,
    OFFER_SIZE,
    VERSION,
    Greeting,
    GreetingError,
)
from multiworld._core.membership.roster import Endpoint, LaneAddress, Member, Roster
from multiworld._net.lane import memory

SIZE = 4
TOKEN = bytes(range(16))
HELLO = 36
READ_BY_DIALER = NONCE_SIZE + 32 + OFFER_SIZE + ANSWER_SIZE + 32
READ_BY_ACCEPTOR = HELLO + 32 + OFFER_SIZE + ANSWER_SIZE + 32
nonces = random.Random(7).randbytes  # noqa: S311  (repeatable)


class Memory:
    """An end's proof for one connection; `readable`: whether this end can read the other's memory."""

    def __init__(self, readable: bool = True) -> None:
        self.place = nonces(OFFER_SIZE)
        self.readable = readable
        self.calls: list[str] = []

    def offer(self) -> bytes:
        self.calls.append("offer")
        return self.place

    def answer(self, offer: bytes) -> bytes:
        self.calls.append("answer")
        return hashlib.sha256(offer).digest() if self.readable else bytes(ANSWER_SIZE)

    def accepts(self, answer: bytes) -> bool:
        self.calls.append("accepts")
        return answer == hashlib.sha256(self.place).digest()


def roster(rank, *, token=TOKEN, world="w", generation=1, version=VERSION, size=SIZE):
    members = tuple(
        Member(each, f"{each:032x}", Endpoint("127.0.0.1", 1), 1, "h", LaneAddress(version, "", 1))
        for each in range(size)
    )
    return Roster(world, generation, rank, members, token, 5.0)


def dialer(rank=2, peer=1, proof=None, **changes):
    return Greeting(roster(rank, **changes), proof or Memory(), nonces(NONCE_SIZE), peer)


def acceptor(rank=1, proof=None, **changes):
    return Greeting(roster(rank, **changes), proof or Memory(), nonces(NONCE_SIZE))


def deliver(greeting, data, piece=lambda: 1 << 20):
    """Give an end the bytes that it wants; returns those it leaves."""
    while data and len(want := greeting.want()):
        count = min(len(want), len(data), piece())
        want[:count] = data[:count]
        data = data[count:]
        greeting.got(count)
    return data


def take(greeting, piece=lambda: 1 << 20):
    """Return what an end writes now."""
    said = b""
    while unsent := greeting.unsent:
        count = min(len(unsent), piece())
        said += unsent[:count]
        greeting.wrote(count)
    return said


def greet(one, other, piece=lambda: 1 << 20, change=lambda turn, said: said):
    """Let two ends talk until neither says anything; returns what each message was on its way."""
    messages = []
    while said := take(one, piece):
        said = change(len(messages), said)
        messages.append(said)
        assert deliver(other, said, piece) == b""
        one, other = other, one
    return messages


@given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_any_cuts_lead_to_the_same_end(seed, reads_acceptor, reads_dialer):
    draw = random.Random(seed)  # noqa: S311  (not a secret)
    one, other = dialer(proof=Memory(reads_acceptor)), acceptor(proof=Memory(reads_dialer))
    greet(one, other, lambda: draw.choice((1, 2, 3, 7, 31, 64)))
    assert (one.over, one.peer, one.may_read) == (True, 1, reads_acceptor)
    assert (other.over, other.peer, other.may_read) == (True, 2, reads_dialer)


def test_sizes_and_turns():
    messages = greet(dialer(), acceptor())
    assert [len(each) for each in messages] == [
        HELLO, NONCE_SIZE + 32, 32 + OFFER_SIZE, OFFER_SIZE + ANSWER_SIZE, ANSWER_SIZE + 32, 32,
    ]  # fmt: skip
    assert (OFFER_SIZE, ANSWER_SIZE) == (memory.OFFER_SIZE, memory.ANSWER_SIZE)


@pytest.mark.parametrize("end", ["dialer", "acceptor"])
def test_not_one_byte_more_is_read(end):
    """What follows the last byte is a frame of the lane."""
    one, other = dialer(), acceptor()
    messages = greet(one, other)
    heard = b"".join(messages[1::2] if end == "dialer" else messages[::2])
    assert len(heard) == (READ_BY_DIALER if end == "dialer" else READ_BY_ACCEPTOR)
    assert len((one if end == "dialer" else other).want()) == 0
    left = []

    def with_frames(turn, said):
        return said + b"frame" if turn == (5 if end == "dialer" else 4) else said

    one, other = dialer(), acceptor()
    sides = {0: other, 1: one}
    speaker, turn = one, 0
    while said := take(speaker):
        listener = sides[turn % 2]
        left.append(deliver(listener, with_frames(turn, said)))
        speaker, turn = listener, turn + 1
    assert one.over
    assert other.over
    assert b"".join(left) == b"frame"


def test_an_end_is_over_only_when_it_has_written_all():
    one, other = dialer(), acceptor()
    for listener, speaker in ((other, one), (one, other)) * 2:
        deliver(listener, take(speaker))
    deliver(other, take(one))
    assert len(other.want()) == 0
    while other.unsent:
        assert not other.over
        other.wrote(1)
    assert other.over


def outcome(one, other, **more):
    try:
        greet(one, other, **more)
    except GreetingError as error:
        return str(error)
    return None


@given(st.integers(0, 5), st.integers(0, 1000), st.integers(1, 255), st.booleans(), st.booleans())
def test_a_changed_byte_in_any_message_is_noticed(turn, position, bits, one_reads, other_reads):
    def change(at, said):
        if at != turn:
            return said
        changed = bytearray(said)
        changed[position % len(said)] ^= bits
        return bytes(changed)

    one, other = dialer(proof=Memory(one_reads)), acceptor(proof=Memory(other_reads))
    assert outcome(one, other, change=change) is not None
    assert not one.over
    assert not one.may_read
    if turn < 5:  # of the last one the acceptor knows nothing
        assert not other.over


@pytest.mark.parametrize("turn", range(6))
def test_a_message_of_another_handshake_is_noticed(turn):
    """Of the same two members, in the same generation, at the same place of the handshake."""
    before = greet(dialer(), acceptor())
    one, other = dialer(), acceptor()
    said = outcome(one, other, change=lambda at, said: before[at] if at == turn else said)
    assert "does not fit" in said
    assert not one.over


def test_a_replayed_dialer_opens_nothing():
    before = greet(dialer(), acceptor())
    end = acceptor()
    deliver(end, before[0])
    with pytest.raises(GreetingError, match="MAC of the dialer"):
        deliver(end, before[2])
    assert not end.over


def test_a_replayed_acceptor_opens_nothing():
    before = greet(dialer(), acceptor())
    end = dialer()
    take(end)
    with pytest.raises(GreetingError, match="MAC of the acceptor"):
        deliver(end, before[1])


def test_a_reflected_mac_opens_nothing():
    """A stranger says hello and hands the acceptor's own MAC back."""
    end = acceptor()
    deliver(end, take(dialer(token=b"another token...")))
    mac = take(end)[NONCE_SIZE:]
    with pytest.raises(GreetingError, match="MAC of the dialer"):
        deliver(end, mac)


def test_a_reflected_handshake_opens_nothing():
    end = dialer()
    with pytest.raises(GreetingError):
        deliver(end, take(end) * 2)


def test_two_dialers_do_not_meet():
    """Nor does one with itself, which TCP can do."""
    one, other = dialer(rank=2, peer=1), dialer(rank=3, peer=1)
    hello, another = take(one), take(other)
    for end, said in ((one, another), (other, hello)):
        with pytest.raises(GreetingError):
            deliver(end, said * 2)


WRONG = [
    pytest.param({"token": b"another token..."}, "does not hold the token", id="token"),
    pytest.param({"world": "v"}, "does not hold the token", id="world"),
    pytest.param({"generation": 2}, "does not hold the token", id="generation"),
    pytest.param({"version": VERSION + 1}, f"version {VERSION + 1}, the generation {VERSION}", id="version"),
]


@pytest.mark.parametrize(("changes", "said"), WRONG)
def test_another_generation_is_refused(changes, said):
    one, other = dialer(**changes), acceptor()
    assert said in outcome(one, other)
    assert not one.over
    assert not other.over


def test_another_protocol_is_refused():
    one, other = dialer(), acceptor()
    assert "no lane" in outcome(one, other, change=lambda turn, said: b"m8" + bytes(6) + said[8:])


@pytest.mark.parametrize(
    ("rank", "peer", "at", "size"),
    [(2, 0, 1, 4), (1, 0, 1, 4), (2, 2, 2, 4), (0, 2, 2, 4), (4, 1, 1, 5), (1, 1, 1, 4)],
    ids=["to another", "itself", "as itself", "lower", "no such rank", "equal"],
)
def test_ranks_that_do_not_dial_this_one_are_refused(rank, peer, at, size):
    one, other = dialer(rank, peer, size=size), acceptor(at)
    assert f"rank {rank} dials rank {peer}, and this is rank {at}" in outcome(one, other)
    assert other.peer is None


@pytest.mark.parametrize("pretended", [2, 3])
def test_a_rank_cannot_be_changed_on_the_way(pretended):
    """A member that dials rank 0 is led to rank 1, or appears there as another."""
    one, other = dialer(3, 0), acceptor(1)

    def change(turn, said):
        forged = said[:12] + pretended.to_bytes(4, "little") + (1).to_bytes(4, "little") + said[20:]
        return forged if turn == 0 else said

    assert "MAC of the acceptor" in outcome(one, other, change=change)


@pytest.mark.parametrize("changes", [{"token": b"another token..."}, {"generation": 2}])
def test_memory_is_proved_among_members_only(changes):
    """An answer reads this process's or another's memory: no stranger is given one."""
    mine, theirs = Memory(), Memory()
    assert outcome(dialer(proof=mine, **changes), acceptor(proof=theirs))
    assert mine.calls == theirs.calls == []
    # One that takes the acceptor's MAC unseen.
    end, stranger = acceptor(proof=theirs), dialer(**changes)
    deliver(end, take(stranger))
    with pytest.raises(GreetingError):
        deliver(end, bytes(32 + OFFER_SIZE))
    assert theirs.calls == []


def test_the_token_does_not_travel():
    assert TOKEN not in b"".join(greet(dialer(), acceptor()))


def test_no_two_handshakes_are_alike():
    first, second = greet(dialer(), acceptor()), greet(dialer(), acceptor())
    changed = [one != other for one, other in zip(first, second, strict=True)]
    assert changed == [True] * 6


@given(st.binary(max_size=400), st.booleans(), st.booleans())
def test_random_bytes_are_refused_or_waited_for(data, dials, plausible):
    end = dialer() if dials else acceptor()
    if plausible and not dials:
        data = take(dialer()) + data
    wanted = 0
    try:
        while data and (want := end.want()):
            wanted += len(want)
            count = min(len(want), len(data))
            want[:count], data = data[:count], data[count:]
            end.got(count)
    except GreetingError:
        assert end.unsent == b""
        assert len(end.want()) == 0
    assert not end.over
    assert not end.may_read
    assert wanted <= READ_BY_ACCEPTOR


@pytest.mark.parametrize("end", [dialer, acceptor])
def test_after_an_error_nothing_goes_on(end):
    end = end()
    take(end)
    with pytest.raises(GreetingError):
        deliver(end, bytes(200))
    for count in (0, 1):
        with pytest.raises(GreetingError):
            end.got(count)
    assert len(end.want()) == 0
    assert end.unsent == b""
    assert not end.over


def test_after_the_end_nothing_is_read():
    one, other = dialer(), acceptor()
    greet(one, other)
    for end in (one, other):
        with pytest.raises(GreetingError):
            end.got(1)
        assert end.over


def test_an_error_takes_back_what_is_unsent():
    end = dialer()
    with pytest.raises(GreetingError):
        deliver(end, bytes(48))
    assert end.unsent == b""
