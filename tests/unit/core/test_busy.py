"""Whether a silent process is busy rather than hung: what is asked, and what follows from the answers."""

from __future__ import annotations

import hashlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.peerkit import ANSWERS, SILENT_HOST, TOKEN, Net, process, rosters

from multiworld._core.liveness import actions
from multiworld._core.liveness.busy_or_hung import BusyTracker
from multiworld._core.liveness.detector import Detector
from multiworld._core.liveness.evidence import ANSWER_SIZE, Activity, Evidence, answer, question
from multiworld.events import Cause

RUNS, STOPPED, SLEEPS, NOTHING = (
    Evidence("R", 0.98),
    Evidence("T", 0.0),
    Evidence("S", 0.03),
    Evidence("?", 0.0),
)
OTHER = process(2)


class TestEvidence:
    @pytest.mark.parametrize(
        ("evidence", "activity"),
        [
            (RUNS, Activity.RUNS), (Evidence("R", 0.5), Activity.RUNS), (Evidence("R", 0.49), Activity.SLEEPS),
            (SLEEPS, Activity.SLEEPS), (STOPPED, Activity.STOPPED), (NOTHING, Activity.UNKNOWN),
        ],
    )  # fmt: skip
    def test_what_follows_from_it(self, evidence, activity):
        assert evidence.activity is activity

    def test_a_question_names_the_token_without_telling_it(self):
        asked = question(TOKEN, b"n" * 16)
        assert len(asked) == 44
        assert TOKEN not in asked
        assert asked[4:12] == hashlib.blake2b(TOKEN, digest_size=8).digest()

    def answered(self, token=TOKEN, nonce=b"n" * 16, said=b"R\x03\xe8"):
        return (
            b"m8da" + nonce + said + hashlib.blake2b(b"a" + nonce + said, key=token, digest_size=16).digest()
        )

    def test_an_answer_is_read_and_proved(self):
        assert len(self.answered()) == ANSWER_SIZE
        assert answer(self.answered(), TOKEN) == Evidence("R", 1.0)

    @given(st.binary(max_size=64))
    def test_what_is_none_is_not(self, data):
        assert answer(data, TOKEN) is None

    @pytest.mark.parametrize("place", range(ANSWER_SIZE))
    def test_nor_one_with_a_wrong_byte(self, place):
        data = bytearray(self.answered())
        data[place] ^= 1
        assert answer(bytes(data), TOKEN) is None
        assert answer(self.answered(token=b"1" * 16), TOKEN) is None


class TestBusy:
    def test_it_is_asked_from_half_of_the_silence_on_ten_times_as_often(self):
        busy = BusyTracker(60.0)
        assert busy.wake(OTHER, 100.0, 5.0) == 102.5
        busy.ask(OTHER, 102.6)
        assert busy.wake(OTHER, 100.0, 5.0) == pytest.approx(103.1)
        busy.forget(OTHER)
        assert busy.wake(OTHER, 104.0, 5.0) == 106.5
        busy.ask(OTHER, 106.5)
        assert busy.wake(OTHER, 104.0, 0.3) == pytest.approx(106.55)

    def test_without_a_bound_nothing_is_asked(self):
        assert BusyTracker(0.0).wake(OTHER, 100.0, 5.0) == math.inf

    def test_an_answer_to_no_question_is_none(self):
        busy = BusyTracker(60.0)
        busy.answered(OTHER, Activity.RUNS, 1.0)
        assert busy.activity(OTHER) is Activity.UNKNOWN
        assert busy.until(OTHER, 0.0, 5.0) == 5.0

    def test_who_runs_has_half_as_long_again_and_sleeping_meanwhile_takes_none_of_it(self):
        busy = BusyTracker(60.0)
        busy.ask(OTHER, 4.0)
        for activity in (Activity.RUNS, Activity.SLEEPS, Activity.UNKNOWN):
            busy.answered(OTHER, activity, 4.5)
            assert busy.until(OTHER, 0.0, 5.0) == 7.0
        assert busy.activity(OTHER) is Activity.SLEEPS
        busy.answered(OTHER, Activity.STOPPED, 4.6)
        assert busy.until(OTHER, 0.0, 5.0) == 5.0

    def test_but_not_beyond_the_bound_and_never_less_than_without(self):
        busy = BusyTracker(8.0)
        busy.ask(OTHER, 4.0)
        busy.answered(OTHER, Activity.RUNS, 7.9)
        assert busy.until(OTHER, 0.0, 5.0) == 8.0
        assert busy.until(OTHER, 0.0, 20.0) == 20.0


def watching(*groups, busy=60.0):
    detector = Detector(process(1), busy)
    for group in groups:
        detector.add(group[0])
        for member in group[0].members[1:]:
            detector.connected(member.process, 0.0)
    return detector


class TestDetector:
    def test_who_is_heard_is_not_asked_about(self):
        detector = watching(rosters())
        for tenth in range(100):
            if tenth % 10 == 0:
                detector.heard(OTHER, tenth / 10)
            assert detector.questions(tenth / 10) == ()

    def run(self, detector, evidence, until, *, start=0.0, step=0.1, probe=ANSWERS):
        """Let time pass in silence, each question be answered at once; returns the first verdict and its time."""
        now = start
        while now < until:
            now = round(now + step, 6)
            assert detector.wake() > -math.inf
            for asked in detector.questions(now):
                detector.answered(asked, evidence, now)
            suspects = detector.suspects(now)
            verdicts = detector.settle(now, dict.fromkeys(suspects, probe))
            if verdicts:
                return verdicts[0].breakage, now
        return None, now

    def test_who_runs_is_busy_until_the_bound(self):
        detector = watching(rosters())
        breakage, at = self.run(detector, RUNS, 59.0)
        assert (breakage, at) == (None, 59.0)
        assert [(each.world, each.ranks, each.busy) for each in detector.notices()] == [
            (("w/1", 0), (1,), True)
        ]
        breakage, at = self.run(detector, RUNS, 62.0, start=59.0)
        assert (breakage.cause, breakage.ranks) == (Cause.HUNG, (1,))
        assert at == pytest.approx(60.0, abs=0.11)
        assert breakage.detail.endswith("no sign of life for 60 s; it runs")

    def test_it_is_told_that_it_answers_again(self):
        detector = watching(rosters("a"), rosters("b"))
        self.run(detector, RUNS, 6.0)
        assert [each.busy for each in detector.notices()] == [True, True]
        detector.heard(OTHER, 6.1)
        assert [(each.world[0], each.ranks, each.busy) for each in detector.notices()] == [
            ("a/1", (1,), False),
            ("b/1", (1,), False),
        ]
        assert self.run(detector, SLEEPS, 20.0, start=6.1)[1] == pytest.approx(11.1, abs=0.11)

    @pytest.mark.parametrize(
        ("evidence", "said"),
        [(STOPPED, "; it is stopped"), (SLEEPS, "; none of its threads runs"), (NOTHING, "for 5 s")],
    )
    def test_who_does_not_run_is_hung_as_soon_as_without_evidence(self, evidence, said):
        breakage, at = self.run(watching(rosters()), evidence, 10.0)
        assert (breakage.cause, at) == (Cause.HUNG, 5.0)
        assert breakage.detail.endswith(said)

    def test_whose_host_answers_nothing_is_unreachable_as_ever(self):
        breakage, at = self.run(watching(rosters()), NOTHING, 10.0, probe=SILENT_HOST)
        assert (breakage.cause, at) == (Cause.UNREACHABLE, 5.0)

    def test_an_answer_about_one_that_is_gone_changes_nothing(self):
        detector = watching()
        detector.answered(OTHER, RUNS, 1.0)
        assert detector.settle(1.0, {}) == []

    def test_who_was_busy_and_is_stopped_is_hung_with_the_next_answer(self):
        detector = watching(rosters())
        self.run(detector, RUNS, 9.0)
        breakage, at = self.run(detector, STOPPED, 20.0, start=9.0)
        assert (breakage.cause, at) == (Cause.HUNG, pytest.approx(9.6, abs=0.11))

    def test_who_was_busy_and_says_nothing_more_is_hung_half_a_timeout_later(self):
        detector = watching(rosters())
        self.run(detector, RUNS, 9.0)
        assert self.run(detector, NOTHING, 20.0, start=9.0)[1] == pytest.approx(11.5, abs=0.6)

    def test_each_world_judges_by_its_own_time(self):
        detector = watching(rosters("slow", hang=5.0), rosters("fast", hang=1.0))
        self.run(detector, RUNS, 2.0)
        assert [each.world[0] for each in detector.notices()] == ["fast/1"]
        self.run(detector, RUNS, 5.5, start=2.0)
        assert [each.world[0] for each in detector.notices()] == ["slow/1"]
        breakage, at = self.run(detector, STOPPED, 8.0, start=5.5)
        assert (breakage.cause, at) == (Cause.HUNG, pytest.approx(5.6, abs=0.11))

    def test_one_that_runs_is_not_named_with_one_that_hangs(self):
        detector = watching(rosters("w", (1, 2, 3)))
        now = 0.0
        while now < 5.0:
            now = round(now + 0.1, 6)
            for asked in detector.questions(now):
                detector.answered(asked, RUNS if asked == OTHER else STOPPED, now)
            verdicts = detector.settle(now, {})
        assert verdicts[0].breakage.ranks == (2,)

    def test_a_world_that_comes_later_needs_no_answer_of_its_own(self):
        detector = watching(rosters("a"))
        self.run(detector, RUNS, 6.0)
        detector.notices()
        detector.add(rosters("b")[0], 6.0)
        assert self.run(detector, RUNS, 12.0, start=6.0)[0] is None
        assert [each.world[0] for each in detector.notices()] == ["b/1"]

    @given(
        st.lists(
            st.tuples(st.sampled_from([RUNS, STOPPED, SLEEPS, NOTHING, None]), st.floats(0.01, 3.0)),
            max_size=60,
        )
    )
    def test_in_any_order_of_answers_it_neither_spins_nor_waits_for_too_long(self, told):
        detector = watching(rosters("w", hang=2.0), busy=10.0)
        now = ran = 0.0
        for evidence, pause in told:
            now += pause
            detector.questions(now)
            if evidence is not None:
                detector.answered(OTHER, evidence, now)
                ran = now if evidence is RUNS else ran
            if verdicts := detector.settle(now, dict.fromkeys(detector.suspects(now), ANSWERS)):
                assert verdicts[0].breakage.cause is Cause.HUNG
                assert now >= 2.0
                return
            assert now < 10.0
            assert now < 2.0 or now < ran + 1.0
            assert detector.wake() > now or detector.questions(now) or evidence is not None


def test_a_member_is_asked_about_where_it_listens_with_a_token_that_it_has():
    net = Net(1, 2)
    for node in net.nodes.values():
        node.peers.bear(60.0)
    net.join(rosters())
    net[2].stopped = True
    asked = []
    while not asked:
        net.now += 0.1
        net[1].peers.settle(net.now, {})
        asked = [each for each in net[1].peers.take() if isinstance(each, actions.Ask)]
    assert net.now == pytest.approx(102.5, abs=0.3)
    assert [(each.process, each.endpoint.port, each.token) for each in asked] == [(OTHER, 2, TOKEN)]
    busy = []
    while net.now < 110.0:
        net[1].peers.answered(OTHER, RUNS, net.now)
        net.now += 0.1
        net[1].peers.settle(net.now, {OTHER: ANSWERS})
        busy += [each for each in net[1].peers.take() if isinstance(each, actions.BusyReport)]
    assert busy == [actions.BusyReport(("w/1", 0), (1,), busy=True)]
    assert not net[1].broken


def test_about_one_that_shares_no_world_that_is_ready_nothing_is_asked():
    net = Net(1, 2, 3)
    net.join(rosters("w", (1, 2)))
    net[1].remove(("w/1", 0), goodbye=False)
    group = rosters("half", (1, 2, 3), hang=1.0)
    net[1].peers.bear(60.0)
    net[1].add(group[0])
    net[2].add(group[1])
    net.pass_time(0.5)
    assert process(2) in net[1].peers._trusted
    net[2].stopped = True
    for _ in range(8):
        net.now += 0.1
        net[1].peers.settle(net.now, {})
        assert not [each for each in net[1].peers.take() if isinstance(each, actions.Ask)]
