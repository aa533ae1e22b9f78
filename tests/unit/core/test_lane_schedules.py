"""The schedules of collectives over simulated lanes: results, the same bits everywhere, and nothing left behind."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from kits.lanekit import Network

from multiworld._core.lane import frames, schedules
from multiworld._core.lane.schedules import Want

LARGE = frames.EAGER_LIMIT + 10
SIZES = st.integers(2, 6)
CROWDS = st.integers(schedules.STAR + 1, schedules.STAR + 9)
SEEDS = st.integers(0, 2**16)
few = settings(max_examples=4)  # each takes as long as a hundred of few members


TIMES_31 = bytes(each * 31 % 256 for each in range(256))


def mixed(first, second):
    """Return ``first * 31 + second`` of each two bytes, modulo 256: another order has another result.

    Every second byte at a time, as one large number, in which a byte's carry falls between two of them.
    """
    assert len(first) == len(second)
    a = int.from_bytes(bytes(first).translate(TIMES_31), "little")
    b = int.from_bytes(second, "little")
    even = int.from_bytes(b"\xff\x00" * (len(first) // 2 + 1), "little")
    total = (a & even) + (b & even) & even | ((a >> 8 & even) + (b >> 8 & even) & even) << 8
    return total.to_bytes(len(first) + 2, "little")[: len(first)]


class Member:
    """A `Line` over a lane of the kit; buffers are writable views of bytes."""

    def __init__(self, net, rank, size):
        self.net, self.rank, self.size = net, rank, size
        self.steps, self.waits = iter(()), None
        self.over = False
        self.compared = []

    def send(self, peer, buffer):
        # A copy of what is sent: a buffer that is changed before its send is over would show.
        operation = self.net.lanes[self.rank].send(peer, 7, 1, buffer)
        self.sent.append((operation, buffer, bytes(buffer)))
        return operation

    def reduce(self, first, second, into):
        self.check()
        into[:] = mixed(first, second)

    def number(self, value):
        return memoryview(bytearray(value.to_bytes(13, "little")))

    def compare(self, peer, buffer, value):
        self.compared.append((peer, int.from_bytes(buffer, "little") == value))

    def scratch(self, like):
        return memoryview(bytearray(len(like)))

    def begin(self, steps):
        self.steps, self.over, self.waits, self.sent = steps, False, None, []

    def check(self):
        """What is on its way was not changed."""
        for operation, buffer, before in self.sent:
            assert operation.done or bytes(buffer) == before

    def go_on(self):
        """Take one step if what it waits for is there; returns whether it did."""
        if self.over or (self.waits is not None and not self.waits.done):
            return False
        assert self.waits is None or self.waits.error is None, self.waits.error
        step = next(self.steps, None)
        if step is None:
            self.over = True
            assert all(
                operation.done for operation, _, _ in self.sent
            )  # the caller's tensors are its own again
        elif isinstance(step, Want):
            self.waits = self.net.lanes[self.rank].receive(step.peer, 7, 1, step.buffer)
        else:
            self.waits = step
        return True


def carry_out(size, seed, begin, *, readable=False):
    """Run a collective on all members, in an order that is drawn; ``begin(member)`` returns its steps."""
    net, draw = Network(size, seed=seed, readable=readable), random.Random(seed)  # noqa: S311  (not a secret)
    members = [Member(net, rank, size) for rank in range(size)]
    steps = {}
    for member in members:
        member.begin(iter(()))
        steps[member.rank] = begin(member)
    late = [*members]
    draw.shuffle(late)
    running = []
    while late or not all(member.over for member in members):
        if late and (not running or draw.random() < 0.2):
            member = late.pop()
            member.begin(steps[member.rank])
            running.append(member)
        moved = [member.go_on() for member in draw.sample(running, len(running))]
        assert net.step() or any(moved) or late, "nothing gets on any more"
    while net.step():
        pass
    for member in members:
        assert all(same for _, same in member.compared)
        assert all(operation.done for operation, _, _ in member.sent)
        assert net.lanes[member.rank].peers[(member.rank + 1) % size].incoming.between_frames
    return members


def buffers(size, length, seed=0):
    draw = random.Random(seed)  # noqa: S311  (not a secret)
    return [memoryview(bytearray(draw.randbytes(length))) for _ in range(size)]


def folded(views):
    total = bytes(views[0])
    for view in views[1:]:
        total = mixed(total, view)
    return total


@given(SIZES, SEEDS)
def test_nobody_passes_a_barrier_before_all_have_come(size, seed):
    nobody_passes_too_soon(size, seed)


@few
@given(CROWDS, SEEDS)
def test_nor_among_many_members(size, seed):
    nobody_passes_too_soon(size, seed)


def nobody_passes_too_soon(size, seed):
    net, draw = Network(size, seed=seed), random.Random(seed)  # noqa: S311  (not a secret)
    members = [Member(net, rank, size) for rank in range(size)]
    for member in members:
        member.begin(schedules.barrier(member, memoryview(bytearray())))
    *early, last = draw.sample(members, size)
    for _ in range(200):
        for member in early:
            member.go_on()
        net.step()
    assert not any(member.over for member in early)
    while not all(member.over for member in members):
        moved = [member.go_on() for member in members]
        assert net.step() or any(moved)
    assert last.over


@given(SIZES, SEEDS, st.sampled_from([0, 1, 33, LARGE]), st.data())
def test_what_one_member_has_gets_to_the_others(size, seed, length, data):
    root = data.draw(st.integers(0, size - 1))
    views = buffers(size, length)
    wanted = bytes(views[root])
    carry_out(size, seed, lambda me: schedules.broadcast(me, views[me.rank], root))
    assert [bytes(view) for view in views] == [wanted] * size

    out_of, into = buffers(size, length, 1), buffers(size, length, 2)
    own = bytes(into[root])
    carry_out(
        size, seed, lambda me: schedules.scatter(me, into[me.rank], out_of if me.rank == root else (), root)
    )
    expected = [own if rank == root else bytes(out_of[rank]) for rank in range(size)]
    assert [bytes(view) for view in into] == expected


@given(SIZES, SEEDS, st.sampled_from([0, 1, 33, LARGE]), st.data())
def test_what_all_members_have_gets_to_one_or_to_all(size, seed, length, data):
    root = data.draw(st.integers(0, size - 1))
    views, room = buffers(size, length), buffers(size, length, 1)
    own = bytes(room[root])
    carry_out(
        size, seed, lambda me: schedules.gather(me, views[me.rank], room if me.rank == root else (), root)
    )
    assert [bytes(each) for each in room] == [
        own if rank == root else bytes(views[rank]) for rank in range(size)
    ]

    rooms = [buffers(size, length, 2 + rank) for rank in range(size)]
    owns = [bytes(rooms[rank][rank]) for rank in range(size)]
    carry_out(size, seed, lambda me: schedules.all_gather(me, views[me.rank], rooms[me.rank]))
    for rank in range(size):
        wanted = [owns[rank] if each == rank else bytes(views[each]) for each in range(size)]
        assert [bytes(view) for view in rooms[rank]] == wanted


@given(SIZES, SEEDS, st.booleans())
def test_each_member_gets_its_part_of_everyone_s(size, seed, readable):
    # Sizes may differ, but between two members they are what both expect.
    out_of = [[memoryview(bytearray([a, b] * (a + 2 * b))) for b in range(size)] for a in range(size)]
    into = [[memoryview(bytearray(2 * (a + 2 * b))) for a in range(size)] for b in range(size)]
    carry_out(
        size, seed, lambda me: schedules.all_to_all(me, out_of[me.rank], into[me.rank]), readable=readable
    )
    for me in range(size):
        for peer in range(size):
            wanted = bytes(2 * (me + 2 * me)) if peer == me else bytes(out_of[peer][me])
            assert bytes(into[me][peer]) == wanted


@given(SIZES, SEEDS, st.sampled_from([0, 1, 33, LARGE]))
def test_a_whole_reduction_has_the_order_of_ranks_and_the_same_bits_everywhere(size, seed, length):
    views = buffers(size, length)
    wanted = folded(views)
    carry_out(size, seed, lambda me: schedules.all_reduce_whole(me, views[me.rank]))
    assert [bytes(view) for view in views] == [wanted] * size


def folded_in_a_tree(views, place=0):
    """As `folded`, in the order in which the members of a binomial tree are reduced."""
    total, step = bytes(views[place]), 1
    while step < len(views) and not place & step:
        if place + step < len(views):
            total = folded([total, folded_in_a_tree(views, place + step)])
        step *= 2
    return total


@few
@given(CROWDS, SEEDS, st.sampled_from([0, 1, 33]), st.data())
def test_a_crowd_gives_on_what_is_small(size, seed, length, data):
    views = buffers(size, length)
    wanted = folded_in_a_tree(views)
    members = carry_out(size, seed, lambda me: schedules.all_reduce_whole(me, views[me.rank]))
    assert [bytes(view) for view in views] == [wanted] * size
    assert max(len(me.sent) for me in members) <= size.bit_length() + 1, "one has to do with few"

    root, views = data.draw(st.integers(0, size - 1)), buffers(size, length)
    wanted = bytes(views[root])
    members = carry_out(size, seed, lambda me: schedules.broadcast(me, views[me.rank], root, deep=True))
    assert [bytes(view) for view in views] == [wanted] * size
    assert max(len(me.sent) for me in members) <= size.bit_length()


@few
@given(CROWDS, SEEDS)
def test_a_crowd_with_a_member_that_knows_no_trees_has_none(size, seed):
    views = buffers(size, 33)
    wanted = folded(views)
    carry_out(size, seed, lambda me: schedules.all_reduce_whole(me, views[me.rank], deep=False))
    assert [bytes(view) for view in views] == [wanted] * size
    members = carry_out(size, seed, lambda me: schedules.barrier(me, memoryview(bytearray()), deep=False))
    assert [len(me.sent) for me in members] == [size - 1] + [1] * (size - 1)


def cut(view, size, piece):
    """Parts for each member, in pieces."""
    count, rest = divmod(len(view), size)
    parts, at = [], 0
    for rank in range(size):
        end = at + count + (rank < rest)
        parts.append([view[start : min(start + piece, end)] for start in range(at, max(end, at + 1), piece)])
        at = end
    return parts


@given(SIZES, SEEDS, st.sampled_from([0, 5, 100, 1000]), st.sampled_from([7, 64]))
def test_a_cut_reduction_has_the_same_bits_everywhere(size, seed, length, piece):
    views = buffers(size, length)
    before = [cut(memoryview(bytearray(view)), size, piece) for view in views]
    carry_out(size, seed, lambda me: schedules.all_reduce_cut(me, cut(views[me.rank], size, piece), length))
    # Each part is reduced by its member: its own first, then those behind it.
    wanted = b"".join(
        folded([memoryview(before[(rank + step) % size][rank][at]) for step in range(size)])
        for rank in range(size)
        for at in range(len(before[0][rank]))
    )
    assert [bytes(view) for view in views] == [wanted] * size


@given(SIZES, SEEDS, st.sampled_from([1, 5, 100]), st.data())
def test_a_reduction_goes_to_one_member_or_in_parts_to_all(size, seed, length, data):
    root = data.draw(st.integers(0, size - 1))
    views = buffers(size, length)
    before = [bytes(view) for view in views]
    pieces = [[view[at : at + 7] for at in range(0, length, 7)] for view in views]
    carry_out(size, seed, lambda me: schedules.reduce(me, pieces[me.rank], root, length))
    order = [memoryview(before[(root + step) % size]) for step in range(size)]
    assert [bytes(view) for view in views] == [
        folded(order) if rank == root else before[rank] for rank in range(size)
    ]

    wholes = buffers(size, size * length, 1)
    parts_of = [
        [_pieces(whole[at * length : (at + 1) * length], 7) for at in range(size)] for whole in wholes
    ]
    into = [
        _pieces(memoryview(bytearray(wholes[rank][rank * length : (rank + 1) * length])), 7)
        for rank in range(size)
    ]
    carry_out(size, seed, lambda me: schedules.reduce_scatter(me, parts_of[me.rank], into[me.rank], length))
    for rank in range(size):
        for at, piece in enumerate(into[rank]):
            order = [parts_of[(rank + step) % size][rank][at] for step in range(size)]
            assert bytes(piece) == folded(order)


def _pieces(view, piece):
    return [view[at : at + piece] for at in range(0, max(1, len(view)), piece)]


def differs(size, seed, begin):
    """Whether a member finds that another has another size, before anything gets stuck or ends."""
    net, draw = Network(size, seed=seed), random.Random(seed)  # noqa: S311  (not a secret)
    members = [Member(net, rank, size) for rank in range(size)]
    for member in members:
        member.begin(begin(member))
    while True:
        for member in draw.sample(members, size):
            try:
                member.go_on()
            except (AssertionError, ValueError):  # a message of another size
                return True
            if not all(same for _, same in member.compared):
                return True
        if not net.step() and not any(_can_go_on(member) for member in members):
            return False


def _can_go_on(member):
    return not member.over and (member.waits is None or member.waits.done)


# A buffer of the size that a number has is taken for one: no member finds that out before the timeout.
LENGTHS = st.integers(1, 60).filter(lambda length: length != len(Member.number(None, 0)))


@given(SIZES, SEEDS, LENGTHS, LENGTHS, st.data())
def test_members_with_different_sizes_find_that_out(size, seed, usual, other, data):
    odd, root = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    if usual == other:
        other += 7 * size
    lengths = [other if rank == odd else usual for rank in range(size)]
    views = [memoryview(bytearray(length)) for length in lengths]

    def whole(me):
        return schedules.all_reduce_whole(me, views[me.rank])

    def in_parts(me):
        return schedules.all_reduce_cut(me, cut(views[me.rank], size, 7), lengths[me.rank])

    def whole_or_in_parts(me):
        return (whole if me.rank == odd else in_parts)(me)

    def to_one(me):
        return schedules.reduce(me, _pieces(views[me.rank], 7), root, lengths[me.rank])

    def scattered(me):
        parts = [_pieces(views[me.rank], 7) for _ in range(size)]
        return schedules.reduce_scatter(me, parts, _pieces(views[me.rank][:], 7), lengths[me.rank])

    for begin in (whole, in_parts, whole_or_in_parts, to_one, scattered):
        assert differs(size, seed, begin), begin
