"""How patched groups end: aborts that hang or find no thread, destructions, and what is left alone in other modes."""

from __future__ import annotations

import pytest
from pairkit import PROMPT, lose, names_remote_error, running, still, until_logged  # noqa: F401 -- a fixture

PATIENCE = 5.0  # seconds that an abort is waited for
NON_BLOCKING = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}


@pytest.mark.patched
class TestAborts:
    @pytest.mark.parametrize("result", [0, 3], ids=["succeeds", "fails"])
    @pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "non-blocking"])
    def test_the_backend_tells_whether_it_is_over(self, run, result, blocking):
        env = {} if blocking else NON_BLOCKING
        with run("patches_ends:abort_over", result=result, env=env) as ranks:
            lose(ranks)
            (over,) = ranks.wait("over", ranks=[0])
            (before,), (hangs,) = ranks.events(0, "before"), ranks.events(0, "hangs")
            assert (before.fields["told"], hangs.fields["told"]) == (True, True)
            assert over.fields["seen"]
            (wait,), (abort,) = ranks.events(0, "wait"), ranks.events(0, "abort")
            assert names_remote_error(wait.fields["text"])
            assert abort.fields["ms"] < 1000 * (PATIENCE + PROMPT)

    def test_who_made_a_non_blocking_communicator_stays_until_it_is_over(self, run):
        # Up to 2.26 NCCL goes on in memory of that thread: the test bed ends a process that lets it end.
        with run("patches_ends:maker_ends", env=NON_BLOCKING) as ranks:
            ranks.wait("ready")
            still(ranks, 0, 1)
            ranks.tell("abort", ranks=[0])
            (left,) = ranks.wait("left", ranks=[0])
            assert left.fields["comms"] == 0
            (event,) = ranks.events(0, "operation")
            assert "abort" in event.fields["text"]

    @pytest.mark.parametrize("asked", [False, True], ids=["watchdog", "program"])
    @pytest.mark.parametrize("pair", [False, True], ids=["one", "two"])
    def test_without_a_thread_it_is_tried_again(self, run, pair, asked):
        with run("patches_ends:no_threads", pair=pair, asked=asked) as ranks:
            lose(ranks)
            until_logged(ranks, 0, "watchdog caught")
            still(ranks, 0, 1)
            ranks.tell("threads", ranks=[0])
            (aborted,) = ranks.wait("aborted", ranks=[0])
            assert aborted.fields["seen"]
            assert [event.fields["ok"] for event in ranks.events(0, "refused")] == [False] * asked
            (wait,) = ranks.wait("wait", ranks=[0])
            assert names_remote_error(wait.fields["text"])

    def test_a_destroy_that_hangs_is_not_waited_for(self, run):
        with run("patches_ends:destroy_hangs") as ranks:
            for event in ranks.wait("abort"):
                assert event.fields["ok"]
                assert event.fields["ms"] < 1000 * (PATIENCE + PROMPT)


@pytest.mark.patched
class TestBesideOthers:
    @pytest.mark.parametrize("members", [[0, 1], [1]], ids=["member", "no member"])
    def test_a_split_is_over_before_its_parent_is_freed(self, run, members):
        # NCCL's abort of a blocking communicator frees what a split of it uses.
        env = {
            "TORCH_NCCL_USE_COMM_NONBLOCKING": "0"
        }  # torch 2.6 has non-blocking ones where a device is bound
        with run("patches_ends:split_aborted", members=members, env=env) as ranks:
            (aborts,) = ranks.wait("aborts", ranks=[0])
            assert aborts.fields["count"] == 0
            (event,) = ranks.events(0, "operation")
            assert event.fields["error"] == "DistBackendError"
            # A rank outside of the new group has its group's timeout as well, which is over about when the abort comes.
            ends = ("aborted",) if 0 in members else ("aborted", "has not split a communicator within")
            assert any(each in event.fields["text"] for each in ends), event
            assert event.fields["ms"] < 1000 * (3 + PROMPT)
            ranks.tell("come")
            (over,) = ranks.wait("over", ranks=[0])
            assert over.fields["seen"]

    def test_a_shrunk_group_is_aborted_as_others_are(self, run, build):
        if tuple(map(int, build.torch.split(".")[:2])) < (2, 10):
            pytest.skip("no group is made by shrinking there")
        with run("patches_ends:shrunk", 3) as ranks:
            for event in ranks.wait("abort", ranks=[0, 1]):
                assert event.fields["ok"]
                assert event.fields["ms"] < 1000 * (PATIENCE + PROMPT)
            for event in ranks.wait("operation", ranks=[0, 1]):
                assert "CleanUpOnly" in event.fields["text"]


@pytest.mark.patched
class TestDestroying:
    def test_without_a_thread_it_can_be_called_again(self, run):
        with run("patches_ends:no_threads_destroyed") as ranks:
            for rank, left in enumerate(ranks.wait("left")):
                assert not ranks.events(rank, "refused")[0].fields["ok"]
                assert ranks.events(rank, "destroyed")[0].fields["ok"]
                assert left.fields["comms"] == 0

    def test_a_stream_that_waits_for_another_group_is_not_waited_for(self, run):
        with run("patches_ends:destroyed_beside", 3) as ranks:
            lose(ranks, survivors=(0, 2))
            (event,) = ranks.wait("destroy", ranks=[0])
            assert event.fields["ok"]
            assert event.fields["ms"] < 1000 * PROMPT


@pytest.mark.parametrize("mode", ["0", "1", "3"])
def test_in_other_modes_a_barrier_takes_no_lock_that_an_abort_holds(run, build, mode):
    if tuple(map(int, build.torch.split(".")[:2])) < (2, 9):
        pytest.skip("its barrier waits for a work, which asks under that lock")
    with run("patches_ends:barrier_other_mode", env={"TORCH_NCCL_ASYNC_ERROR_HANDLING": mode}) as ranks:
        (seen,) = ranks.wait("aborts", ranks=[0])
        assert seen.fields["seen"]
        (event,) = ranks.wait("barrier", ranks=[0])
        assert event.fields["ms"] < 1000 * PROMPT
