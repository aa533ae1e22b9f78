"""What goes wrong in the middle of a state's transfer: who hears of it, what is left, what need not come again."""

from __future__ import annotations

import mmap
import struct
import threading
import time
import zlib
from pathlib import Path

import pytest
import torch
from kits.contract import statekit
from kits.contract.statekit import nothing_posted, same, soon
from kits.meetkit import PATIENCE

from multiworld._c10d.lane import state_line, state_sums, state_tensors
from multiworld._c10d.lane.state_line import Line
from multiworld._c10d.lane.state_transfer import receive_state, send_state
from multiworld._core import state_pieces
from multiworld._core.state_notes import Kind
from multiworld._core.state_tree import flatten
from multiworld.errors import SizeMismatchError, StateTransferError

MANY = 20

pytestmark = pytest.mark.usefixtures("small")


def layers(seed=0):
    torch.manual_seed(seed)
    return {f"layer{each}": torch.randn(500) for each in range(MANY)}  # 2000 bytes: two in a part


def receive(messages, **options):
    return receive_state(messages, 0, **({"in_place": False, "deadline": soon()} | options))


# -- a provider that is lost -----------------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("as_before", [True, False])
def test_a_provider_dies_and_another_sends_the_rest(lanes, pair, in_place, as_before):
    first, receiver = pair

    def die(number, tensor):
        if number == 10:
            first.endpoint.fail(ConnectionError("killed"))
        return tensor

    first.before = die
    state, into, kept = layers(), layers(1), {}
    sent = lanes.give(first, state)
    with pytest.raises(ConnectionResetError, match="a member is lost"):
        receive(receiver, into=into, in_place=in_place, kept=kept)
    with pytest.raises(ConnectionError, match="killed"):
        sent.result(PATIENCE)
    assert nothing_posted(receiver)
    had = {path[0] for path in kept}
    assert 0 < len(had) <= 10
    assert all(torch.equal(tensor, state[path[0]]) for path, (tensor, _) in kept.items())

    second, again = lanes.connect(2)
    if not as_before:  # the second provider has gone on with the first layer
        state["layer0"] = state["layer0"] + 1
    sent = lanes.give(second, state)
    got = receive(again, into=into, in_place=in_place, kept=kept)
    sent.result(PATIENCE)
    assert same(got, state)
    assert second.sent == 2000 * (MANY - len(had) + (not as_before))
    assert all((got[each].data_ptr() == into[each].data_ptr()) is in_place for each in state)
    assert {path[0] for path in kept} == set(state)


def test_what_is_received_over_does_not_count_as_kept(lanes):
    """The second of three providers has another value of a tensor that came whole, and dies in the middle of it."""
    state = {"large": torch.full((4096,), 1.0), "last": torch.full((4096,), 1.0)}  # each comes in four parts
    other = {**state, "large": torch.full((4096,), 2.0)}
    into, kept, had = {name: torch.zeros(4096) for name in state}, {}, []
    for provided, last in ((state, 6), (other, 2), (state, None)):
        provider, receiver = lanes.connect(2)

        def die(number, tensor, provider=provider, last=last):
            if number == last:
                provider.endpoint.fail(ConnectionError("killed"))
            return tensor

        provider.before = die
        sent = lanes.give(provider, provided)
        if last is None:
            got = receive(receiver, into=into, in_place=True, kept=kept)
            sent.result(PATIENCE)
        else:
            with pytest.raises(ConnectionResetError, match="a member is lost"):
                receive(receiver, into=into, in_place=True, kept=kept)
            with pytest.raises(ConnectionError, match="killed"):
                sent.result(PATIENCE)
            had.append({path[0] for path in kept})
    assert had[0] == {"large"}
    assert same(got, state)
    assert all(got[each] is into[each] for each in state)


def test_a_transfer_that_gets_on_may_take_longer_than_its_patience(lanes, pair):
    provider, receiver = pair

    def slowly(number, tensor):
        time.sleep(0.35)
        return tensor

    provider.before = slowly
    state, began = layers(), time.monotonic()
    sent = lanes.give(provider, state, within=6.0, patience=6.0)
    assert same(receive(receiver, deadline=soon(6.0), patience=6.0), state)
    sent.result(PATIENCE)
    assert time.monotonic() - began > 6.2


def test_what_was_kept_goes_to_where_it_belongs(lanes, pair):
    """The caller's own tensors may be others by the second attempt."""
    state, kept = layers(), {}
    sent = lanes.give(pair[0], state)
    receive(pair[1], kept=kept)
    sent.result(PATIENCE)
    into, before = layers(1), pair[0].sent
    sent = lanes.give(pair[0], state)
    got = receive(pair[1], into=into, in_place=True, kept=kept)
    sent.result(PATIENCE)
    assert pair[0].sent == before
    assert same(into, state)
    assert all(got[each] is into[each] for each in state)


# -- what was kept is compared ---------------------------------------------------------------------------------


def had(lanes):
    """A state, and what a member has that got it whole from a provider."""
    state, kept = layers(), {}
    provider, receiver = lanes.connect(2)
    sent = lanes.give(provider, state)
    receive(receiver, kept=kept)
    sent.result(PATIENCE)
    assert len(kept) == MANY
    return state, kept


def test_a_provider_may_compare_for_longer_than_the_receiver_s_patience(lanes, pair, monkeypatch):
    state, kept = had(lanes)
    checksum = state_sums._checksum

    def slowly(piece):
        time.sleep(0.3)
        return checksum(piece)

    monkeypatch.setattr(state_sums, "_WORKERS", 1)
    monkeypatch.setattr(state_sums, "_checksum", slowly)
    began = time.monotonic()
    sent = lanes.give(pair[0], state, within=4.0, patience=4.0)
    assert same(receive(pair[1], kept=kept, deadline=soon(4.0), patience=4.0), state)
    sent.result(PATIENCE)
    assert time.monotonic() - began > 4.5
    assert pair[0].sent == 0


@pytest.mark.parametrize(("knows", "heard"), [((), Kind.OFFER), ((1,), Kind.BUSY)])
def test_only_a_receiver_that_knows_it_is_told_that_the_provider_compares(
    lanes, pair, monkeypatch, knows, heard
):
    """One of an older version takes it for an error."""
    state, kept = had(lanes)
    monkeypatch.setattr(state_line, "_BUSY_BELOW", 1.0)  # at each part
    announced = [(path, *state_tensors.form(tensor), checksum) for path, (tensor, checksum) in kept.items()]
    data = flatten(announced, lambda _: False)[0].encode()
    sent = lanes.give(pair[0], state, patience=PATIENCE)
    line = Line(pair[1], 0, soon(), 7, PATIENCE)
    line.tell(Kind.HELLO, 7, len(data), zlib.crc32(data), *knows)
    line.send_text(data)
    assert line.hear(Kind.OFFER, Kind.BUSY).kind is heard
    line.tell(Kind.FAILED, text="that was all")
    with pytest.raises(StateTransferError, match="that was all"):
        sent.result(PATIENCE)


def test_a_provider_does_not_go_on_comparing_in_a_world_that_is_over(lanes, pair, monkeypatch):
    state, kept = had(lanes)
    provider, receiver = pair
    checksum, compared = state_sums._checksum, []

    def last(piece):
        compared.append(piece)
        provider.endpoint.fail(ConnectionError("the world is over"))
        return checksum(piece)

    monkeypatch.setattr(state_sums, "_checksum", last)
    sent = lanes.give(provider, state)
    with pytest.raises(ConnectionResetError, match="a member is lost"):
        receive(receiver, kept=kept)
    with pytest.raises(ConnectionError, match="the world is over"):
        sent.result(PATIENCE)
    assert len(compared) < MANY


# -- damage ----------------------------------------------------------------------------------------------------


def damaged(number, tensor):
    if number == 5:
        tensor = tensor.clone()
        tensor.view(torch.uint8)[77] ^= 1
    return tensor


def test_a_piece_that_comes_damaged(lanes, pair):
    pair[0].before = damaged
    kept = {}
    sent = lanes.give(pair[0], layers())
    with pytest.raises(StateTransferError, match=r"1 tensors came damaged.*layer5\."):
        receive(pair[1], kept=kept)
    with pytest.raises(StateTransferError, match="rank 1 gave up: StateTransferError"):
        sent.result(PATIENCE)
    assert len(kept) == MANY - 1
    assert ("layer5",) not in kept

    pair[0].before = statekit.unchanged
    before = pair[0].sent
    sent = lanes.give(pair[0], layers())
    assert same(receive(pair[1], kept=kept), layers())
    sent.result(PATIENCE)
    assert pair[0].sent - before == 2000


class Liar:
    """A provider that is about to break a rule."""

    def __init__(self, messages):
        self.messages = messages

    def __call__(
        self,
        *,
        count=1,
        total=8,
        forms=(("float32", (2,), False),),
        text='["T"]',
        pieces=(2,),
        data=None,
        **more,
    ):
        line = Line(self.messages, 1, soon())
        line.transfer, size, checksum, _ = line.hear(Kind.HELLO).numbers
        line.receive_text(size, checksum)
        data = flatten([text, list(forms)], lambda _: False)[0].encode() if data is None else data
        checksum = more.get("checksum", state_line.zlib.crc32(data))
        line.tell(Kind.OFFER, more.get("size", len(data)), checksum, count, total)
        line.hear(Kind.GO)
        line.send_text(data)
        for each in pieces:
            line.send(torch.zeros(each))
        line.tell(Kind.PART, more.get("part", 0))
        line.hear(Kind.TOOK)
        sums = struct.pack("<I", 0) * more.get("sums", 1)
        line.tell(Kind.SUMS, len(sums), state_line.zlib.crc32(sums))
        line.send_text(sums)
        line.hear(Kind.DONE)


@pytest.mark.parametrize(
    ("lie", "says"),
    [
        ({"count": 2}, "2 tensors were offered"),
        ({"total": 4}, "4 bytes were offered, and 8 are described"),
        ({"text": '["l",["T"],["T"]]'}, "1 and 2 are described"),
        ({"text": "["}, "description of a state is damaged"),
        ({"text": 5}, "description is none"),
        ({"forms": (("float32", (2,), True),), "total": 0}, "does not come, and is not here"),
        ({"forms": (("load", (2,), False),)}, "a tensor of dtype 'load'"),
        ({"forms": (("qint8", (2,), False),)}, "a tensor of dtype 'qint8'"),
        ({"forms": (("float32", (-2,), False),)}, r"shape \(-2,\)"),
        ({"forms": (("float32", (2**40, 2**40), False),)}, "and shape"),
        ({"forms": (("float32", (2**53, 1), False),), "total": 2**55}, "fits into the memory"),
        ({"forms": (("float32", [2], False),)}, "and shape"),
        ({"forms": (("float32",),)}, "description is none"),
        ({"data": b"\xff"}, "utf-8"),
        ({"data": b"7"}, "description is none"),
        ({"checksum": 0}, "bytes of description came damaged"),
        ({"size": 2**40}, "of which 67108864 are taken"),
        ({"part": 3}, "part 0 was due"),
        ({"sums": 2}, "8 bytes of checksums came"),
        ({"sums": 0}, "0 bytes of checksums came"),
    ],
    ids=str,
)
def test_a_provider_that_breaks_a_rule(lanes, pair, lie, says):
    sent = lanes.pool.submit(Liar(pair[0]), **lie)
    with pytest.raises(StateTransferError, match=says):
        receive(pair[1])
    with pytest.raises(StateTransferError, match="rank 1 gave up"):
        sent.result(PATIENCE)
    assert nothing_posted(pair[1])


def test_a_piece_of_a_wrong_size(lanes, pair):
    sent = lanes.pool.submit(Liar(pair[0]), pieces=(3,))
    with pytest.raises(SizeMismatchError, match="sent 12 bytes"):
        receive(pair[1])
    with pytest.raises(StateTransferError, match="rank 1 gave up: SizeMismatchError"):
        sent.result(PATIENCE)


@pytest.mark.parametrize("announced", [b"\xff", b"7", b'["l",["t",["l"],"float32",["t",2],5]]'], ids=str)
def test_a_receiver_that_announces_nonsense(lanes, pair, announced):
    sent = lanes.give(pair[0], layers())
    line = Line(pair[1], 0, soon(), 5)
    line.tell(Kind.HELLO, 5, len(announced), state_line.zlib.crc32(announced))
    line.send_text(announced)
    with pytest.raises(StateTransferError, match="rank 0 gave up"):
        line.hear(Kind.OFFER)
    with pytest.raises(StateTransferError):
        sent.result(PATIENCE)


# -- time ------------------------------------------------------------------------------------------------------


def test_a_receiver_waits_no_longer_than_its_deadline(pair):
    with pytest.raises(TimeoutError, match="from rank 0 timed out"):
        receive(pair[1], deadline=soon(0.1))
    assert nothing_posted(pair[1])


def test_a_provider_waits_no_longer_than_its_deadline(pair):
    with pytest.raises(TimeoutError, match="from rank 1 timed out"):
        send_state(pair[0], 1, layers(), deadline=soon(0.1))
    assert nothing_posted(pair[0])


def test_a_receiver_that_is_gone_and_comes_again(lanes, pair):
    for _ in range(3):
        with pytest.raises(TimeoutError):
            receive(pair[1], deadline=soon(0.05))
    assert same(lanes.carried(pair, layers()), layers())


@pytest.mark.parametrize("who", ["provider", "receiver"])
def test_one_end_gives_up_in_the_middle_and_the_other_hears_at_once(lanes, pair, who):
    """`progress` raises, as Ctrl-C would."""

    class StopError(Exception):
        pass

    def stop(done, total):
        if done > total / 2:
            raise StopError("enough")

    options = {"provider": {}, "receiver": {}}
    options[who] = {"progress": stop}
    kept = {}
    sent = lanes.give(pair[0], layers(), **options["provider"])
    begun = time.monotonic()
    kinds = {"provider": (StateTransferError, StopError), "receiver": (StopError, StateTransferError)}[who]
    with pytest.raises(kinds[0]):
        receive(pair[1], kept=kept, **options["receiver"])
    with pytest.raises(kinds[1], match="enough"):
        sent.result(PATIENCE)
    assert time.monotonic() - begun < PATIENCE / 2
    assert all(nothing_posted(each) for each in pair)
    assert MANY / 2 < len(kept) < MANY
    sent = lanes.give(pair[0], layers())
    assert same(receive(pair[1], kept=kept), layers())
    sent.result(PATIENCE)


# -- memory ----------------------------------------------------------------------------------------------------


def peak_of(call):
    """Bytes of memory that this process had at most while `call` ran, beyond what it had before."""

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before, most, over = resident(), [0], threading.Event()

    def look():
        while not over.wait(0.002):
            most[0] = max(most[0], resident())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        kept = call()
    finally:
        over.set()
        thread.join()
    return most[0] - before, kept


def test_memory_is_bounded_by_the_largest_part(lanes, pair, monkeypatch):
    """Both ends are in this process: two parts each where tensors have to be copied, none where they lie in order."""
    monkeypatch.setattr(state_pieces, "CHUNK", 16 << 20)
    state = {"order": torch.ones(128 << 18), "across": torch.ones(1 << 10, 128 << 8).t()}  # 128 MB each
    into = {"order": 2 * state["order"], "across": 2 * state["across"]}  # not zeros: their pages come later
    used, got = peak_of(lambda: lanes.carried(pair, state, into, in_place=True))
    assert same(got, state)
    assert used < 5 * (16 << 20)
