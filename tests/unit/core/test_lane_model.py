"""The lane beside a plain model of MPI's matching: any schedule of sends, receives, cancellations and deliveries."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kits.lanekit import Network, payload

from multiworld._core.lane import frames
from multiworld._core.lane.peer import _cost

MEMBERS = 3
RANK = st.integers(0, MEMBERS - 1)
TAG = st.integers(0, 1)
SIZE = st.sampled_from([0, 3, 8, frames.EAGER_LIMIT + 1])


class LaneMachine(RuleBasedStateMachine):
    """What was sent and asked for; at rest everything that fits has met, in order, and with the right bytes."""

    @initialize(seed=st.integers(0, 2**16), readable=st.booleans(), budget=st.sampled_from([2048, 1 << 18]))
    def begin(self, seed, readable, budget):
        self._constants = frames.BUDGET, frames.PIECE
        frames.BUDGET, frames.PIECE = budget, 100_000
        self.net = Network(MEMBERS, seed=seed, readable=readable, most=100_000)
        self.sends = []  # (src, dst, tag, number, size, operation)
        self.receives = []  # (dst, src, tag, operation, cancelled)

    def teardown(self):
        if hasattr(self, "net"):
            self.rest()
            frames.BUDGET, frames.PIECE = self._constants

    @rule(src=RANK, shift=st.integers(1, MEMBERS - 1), tag=TAG, size=SIZE)
    def send(self, src, shift, tag, size):
        dst, number = (src + shift) % MEMBERS, len(self.sends) + 1
        # The size is that of the tag: so a receive knows it, and a number is in each message that has room.
        size = (8, frames.EAGER_LIMIT + 8)[tag] if size else 0
        operation = self.net.send(src, dst, payload(size, number), tag=tag + 2 * (not size))
        self.sends.append((src, dst, tag + 2 * (not size), number, operation))

    @rule(dst=RANK, shift=st.integers(0, MEMBERS - 1), tag=st.integers(0, 3))
    def receive(self, dst, shift, tag):
        src = (dst + shift) % MEMBERS if shift else None
        size = (8, frames.EAGER_LIMIT + 8, 0, 0)[tag]
        self.receives.append([dst, src, tag, self.net.receive(dst, src, size, tag=tag), False])

    @rule(which=st.integers(0, 1000))
    def cancel(self, which):
        if self.receives:
            entry = self.receives[which % len(self.receives)]
            if self.net.lanes[entry[0]].cancel(entry[3]):
                entry[4] = True

    @rule(which=st.integers(0, 1000))
    def take_back(self, which):
        choices = [each for each in self.receives if each[3].done and not each[4]] or self.receives
        if choices:
            entry = choices[which % len(choices)]
            view = entry[3].view
            self.net.lanes[entry[0]].take_back(entry[3])
            view[:] = bytes(len(view))  # it is the caller's again
            entry[4] = True

    @rule(which=st.integers(0, 1000))
    def receive_at_rest(self, which):
        """What nothing waits for goes out in the order in which it was sent, whatever was taken back."""
        self.net.settle()
        keys = [(a, b, of) for a, b, of, _, _ in self.sends if of < 2]
        if not keys:
            return
        src, dst, tag = keys[which % len(keys)]
        if any(each[0] == dst and each[2] == tag and not each[3].done for each in self.receives):
            return
        left = [n for a, b, of, n, _ in self.sends if (a, b, of) == (src, dst, tag)]
        for to, _, of, operation, cancelled in self.receives:
            if (to, of, cancelled) == (dst, tag, False) and operation.sender == src:
                left.remove(int.from_bytes(operation.view[:8], "little"))
        self.receive(dst, (src - dst) % MEMBERS, tag)
        self.net.settle()
        operation = self.receives[-1][3]
        assert operation.done is bool(left)
        if left:
            assert int.from_bytes(operation.view[:8], "little") == min(left)

    @rule(steps=st.integers(1, 20))
    def go_on(self, steps):
        for _ in range(steps):
            self.net.step()

    @rule()
    def rest(self):
        self.net.settle()
        for dst in range(MEMBERS):
            for tag in range(4):
                self.nothing_is_left_that_fits(dst, tag)
            for src in range(MEMBERS):
                if src != dst:
                    self.credit_adds_up(src, dst)

    def credit_adds_up(self, src, dst):
        """What the sender may send, what it is owed, and what waits without a receive make the budget."""
        waits = [
            each
            for sources in self.net.lanes[dst]._state.matching._arrivals.values()
            for each in sources.get(src, ())
        ]
        owed = self.net.lanes[dst].peers[src]._owed
        credit = self.net.lanes[src].peers[dst].outgoing._credit
        assert credit + owed + sum(_cost(each) for each in waits) == frames.BUDGET

    def nothing_is_left_that_fits(self, dst, tag):
        """Every message was taken once, or waits; none waits beside a receive for it."""
        taken = dict.fromkeys(range(MEMBERS), 0)
        open_for = set()
        for to, src, of, operation, cancelled in self.receives:
            if (to, of) != (dst, tag) or cancelled:
                continue
            assert operation.error is None
            if operation.done:
                taken[operation.sender] += 1
            else:
                open_for |= set(range(MEMBERS)) if src is None else {src}
        for src in range(MEMBERS):
            sent = sum((a, b, of) == (src, dst, tag) for a, b, of, _, _ in self.sends)
            assert taken[src] <= sent
            assert not (taken[src] < sent and src in open_for), "a message waits beside its receive"

    @invariant()
    def messages_are_whole_and_in_order(self):
        """Of each source and tag, receives have messages that were sent, each once.

        Where no receive of that tag was cancelled: in the order in which both were posted.
        """
        if not hasattr(self, "net"):
            return
        for dst in range(MEMBERS):
            for tag in (0, 1):
                mine = [each for each in self.receives if each[0] == dst and each[2] == tag]
                for src in range(MEMBERS):
                    got = []
                    for _, _, _, operation, cancelled in mine:
                        if operation.done and not cancelled and operation.sender == src:
                            number = int.from_bytes(operation.view[:8], "little")
                            assert bytes(operation.view) == payload(len(operation.view), number)
                            got.append(number)
                    sent = [n for a, b, of, n, _ in self.sends if (a, b, of) == (src, dst, tag)]
                    assert len(set(got)) == len(got)
                    assert set(got) <= set(sent)
                    if not any(each[4] for each in mine):
                        assert got == sorted(got)

    @invariant()
    def sends_end_well(self):
        if hasattr(self, "net"):
            assert all(each[4].error is None for each in self.sends)


TestLane = LaneMachine.TestCase
TestLane.settings = settings(max_examples=150, stateful_step_count=40)
