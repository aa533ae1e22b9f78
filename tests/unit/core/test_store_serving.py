"""Which server of a list is the store: single decisions, and many processes that bind, look and die in any order."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiworld._core.membership import serving
from multiworld._core.membership.serving import NEVER, STRIDE, AddressState, Found, Verdict

SEEDS = st.integers(0, 2**32)
FREE, SILENT, CANDIDATE, FOREIGN = (
    Found(each)
    for each in (AddressState.FREE, AddressState.SILENT, AddressState.CANDIDATE, AddressState.FOREIGN)
)


def up(epoch, mark="x"):
    return Found(AddressState.OPEN, epoch, mark)


@pytest.mark.parametrize(
    ("found", "known", "at"),
    [
        ([up(0), FREE, FREE], NEVER, 0),
        ([FREE, up(1), FREE], 0, 1),
        ([up(0), up(STRIDE), FREE], 0, 1),
        ([up(0), FREE, up(0)], 0, 0),
        ([up(0), FREE, FREE], STRIDE, None),
        ([CANDIDATE, SILENT, FOREIGN], NEVER, None),
    ],
)
def test_the_newest_server_is_used_and_none_that_is_older_than_known(found, known, at):
    assert serving.best(found, known) == at


def test_older_servers_are_told():
    assert serving.outdated([up(0), up(STRIDE), FREE], STRIDE) == (0,)


@pytest.mark.parametrize(
    ("found", "own", "at"),
    [
        ([FREE, FREE, FREE], [False, True, True], 1),
        ([FREE, CANDIDATE, FREE], [False, False, True], None),
        ([SILENT, FOREIGN, FREE], [True, True, True], 2),
        ([FREE, FREE, FREE], [False, False, False], None),
    ],
)
def test_a_process_serves_at_the_first_address_of_its_host(found, own, at):
    assert serving.to_serve(found, own) == at


@pytest.mark.parametrize(
    ("found", "known", "what"),
    [
        ([FREE, FREE, SILENT], NEVER, Verdict.SERVE),
        ([CANDIDATE, FREE, FREE], NEVER, Verdict.YIELD),
        ([FREE, FREE, CANDIDATE], NEVER, Verdict.WAIT),
        ([FREE, FREE, up(0)], NEVER, Verdict.YIELD),
        ([FREE, FREE, up(0)], STRIDE, Verdict.SERVE),
        ([FREE, CANDIDATE, FREE], NEVER, Verdict.SERVE),  # its own address
    ],
)
def test_a_candidate_gives_way_to_servers_and_to_candidates_before_it(found, known, what):
    assert serving.verdict(1, found, known) is what


def test_epochs_rise_and_those_of_two_addresses_differ():
    assert serving.next_epoch(2, [SILENT] * 3, NEVER, 7) == 0
    for known, draw in itertools.product((0, 1, STRIDE, 5 * STRIDE + 17), (0, 3, STRIDE - 1)):
        counts = []
        for position in range(3):
            epoch = serving.next_epoch(position, [FREE] * 3, known, draw)
            assert epoch > known
            assert epoch // STRIDE % 3 == position
            counts.append(epoch // STRIDE)
        assert len(set(counts)) == 3
    assert serving.next_epoch(0, [FREE, up(4 * STRIDE), FREE], 0, 0) > 4 * STRIDE


def test_a_server_ends_when_a_newer_one_is_there_or_an_equal_one_before_it():
    assert serving.outranked(1, 0, [FREE, FREE, up(STRIDE)])
    assert serving.outranked(1, 0, [up(0), FREE, FREE])
    assert not serving.outranked(1, 0, [FREE, up(9), up(0)])
    assert not serving.outranked(1, STRIDE, [up(0), SILENT, CANDIDATE])


@pytest.mark.parametrize(
    ("position", "found", "may"),
    [
        (0, [FREE, SILENT, FREE], True),
        (2, [SILENT, SILENT, FREE], False),
        (2, [FREE, SILENT, FREE], True),
        (0, [FREE, SILENT], True),
        (1, [SILENT, FREE], False),
    ],
)
def test_worlds_begin_where_more_than_half_is_seen(position, found, may):
    assert serving.may_begin(position, found) is may


# -- in any order -----------------------------------------------------------------------------------------------------


class Process:
    """Looks at one address after the other, binds, looks again, opens; a turn is one of these."""

    def __init__(self, hosts, position):
        self.hosts, self.position = hosts, position
        self.known, self.state, self.epoch = NEVER, "idle", NEVER
        self.found, self.todo = [], []
        self.cut = set()

    def see(self, at):
        if at in self.cut:
            return SILENT
        there = self.hosts.bound.get(at)
        if there is None:
            return FREE
        return up(there.epoch) if there.state == "open" else CANDIDATE

    def turn(self):
        if self.state == "open":
            found = [self.see(at) for at in range(self.hosts.count)]
            if serving.outranked(self.position, self.epoch, found):
                self.end()
            return
        if not self.todo:
            self.found, self.todo = [FREE] * self.hosts.count, list(range(self.hosts.count))
            self.hosts.random.shuffle(self.todo)
        at = self.todo.pop()
        self.found[at] = self.see(at)
        if self.todo:
            return
        if self.state == "idle":
            best = serving.best(self.found, self.known)
            own = [at == self.position for at in range(self.hosts.count)]
            if best is not None:
                self.known = self.found[best].epoch
            elif serving.to_serve(self.found, own) is not None and self.position not in self.hosts.bound:
                self.hosts.bound[self.position] = self
                self.state = "candidate"
            return
        what = serving.verdict(self.position, self.found, self.known)
        if what is Verdict.YIELD:
            self.end()
        elif what is Verdict.SERVE:
            self.hosts.opens(self)
            draw = self.hosts.random.randrange(STRIDE)
            self.epoch = self.known = serving.next_epoch(self.position, self.found, self.known, draw)
            self.state = "open"
            self.hosts.epochs.append((self.epoch, self.position))

    def end(self):
        self.state, self.todo = "idle", []
        if self.hosts.bound.get(self.position) is self:
            del self.hosts.bound[self.position]


class Hosts:
    def __init__(self, seed, count=3, each=2):
        self.random = random.Random(seed)  # noqa: S311  (nothing secret)
        self.count, self.bound, self.epochs = count, {}, []
        self.processes = [Process(self, at) for at in range(count) for _ in range(each)]
        self.whole = True

    def opens(self, process):
        if self.whole:  # one that knows nothing, of a process that was started again, is told of newer ones
            there = [each.epoch for each in self.bound.values() if each.state == "open"]
            assert all(epoch < process.known for epoch in there), "two, though all see each other"

    def restart(self):
        """Kill a process; another begins in its place, and knows nothing."""
        at = self.random.randrange(len(self.processes))
        dead = self.processes[at]
        dead.end()
        self.processes[at] = Process(self, dead.position)


@given(SEEDS)
@settings(max_examples=200)
def test_where_all_see_each_other_there_is_one_server(seed):
    hosts = Hosts(seed)
    for _ in range(400):
        hosts.random.choice(hosts.processes).turn()
        if hosts.random.random() < 0.01:
            hosts.restart()
    assert hosts.epochs
    for _ in range(40):
        for each in hosts.processes:
            each.turn()
    assert [each.state for each in hosts.bound.values()] == ["open"], "one serves in the end"


@given(SEEDS)
@settings(max_examples=200)
def test_where_hosts_are_cut_off_no_two_servers_have_one_epoch(seed):
    hosts = Hosts(seed)
    for each in hosts.processes:  # all have been at the first server
        each.known = 0
    hosts.whole = False
    for _ in range(600):
        hosts.random.choice(hosts.processes).turn()
        if hosts.random.random() < 0.02:
            apart = hosts.random.choice(hosts.processes)
            apart.cut = set(hosts.random.sample(range(hosts.count), hosts.random.randrange(hosts.count)))
            apart.cut.discard(apart.position)
    assert len(set(hosts.epochs)) == len(hosts.epochs)
    for each in hosts.processes:
        each.cut = set()
    for _ in range(60):
        for each in hosts.processes:
            each.turn()
    assert len(hosts.bound) == 1, "the older one ends when they see each other again"
    (last,) = hosts.bound.values()
    assert last.epoch == max(epoch for epoch, _ in hosts.epochs)
