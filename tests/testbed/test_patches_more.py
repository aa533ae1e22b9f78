"""What the patches do beyond the defects of the table, as pairs where the official build shows something else."""

from __future__ import annotations

import pytest
from pairkit import PROMPT, lose, names_remote_error, running, still  # noqa: F401 -- a fixture

STALE = 1.0
STREAMS = 40  # torch's pool has 32 of a priority; the double has a thread for each that is used


class TestMakingACommunicator:
    """A thread that waits in NCCL for a peer is let go."""

    @pytest.mark.stock
    def test_stock_goes_on_waiting(self, run):
        with run("late_peer", let_go="timeout") as ranks:
            ranks.wait("ready")
            still(ranks, 0, 5)
            assert not ranks.events(0, "operation")

    @pytest.mark.patched
    @pytest.mark.parametrize("eager", [False, True], ids=["blocking", "non-blocking"])
    def test_the_groups_timeout(self, run, eager):
        if eager:
            pytest.skip("torch has a timeout of its own for that")
        with run("late_peer", let_go="timeout") as ranks:
            (ready, _) = ranks.wait("ready")
            (event,) = ranks.wait("operation", ranks=[0])
            assert event.at - ready.at < 3 + PROMPT
            assert event.fields["error"] == "DistBackendError"
            (ended,) = ranks.wait("destroy", ranks=[0])
            assert ended.fields["ok"]

    @pytest.mark.patched
    @pytest.mark.parametrize("eager", [False, True], ids=["blocking", "non-blocking"])
    def test_an_abort(self, run, eager):
        # By itself an eager group is non-blocking until torch 2.7 only.
        env = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"} if eager else {}
        with run("late_peer", let_go="abort", eager=eager, env=env) as ranks:
            ranks.wait("ready")
            still(ranks, 0, 1)
            ranks.tell("abort", ranks=[0])
            (event,) = ranks.wait("operation", ranks=[0])
            assert event.fields["ms"] < 1000 * (1 + PROMPT)
            assert event.fields["error"] == "DistBackendError"
            assert "abort" in event.fields["text"]


class TestNonBlocking:
    """An answer "in progress" is no error: the one that comes later must be seen."""

    @pytest.mark.patched
    def test_patched(self, run):
        with run("late_error", patience=30, env={"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}) as ranks:
            killed = lose(ranks)
            (event,) = ranks.wait("aborted", ranks=[0])
            assert event.fields["seen"]
            assert event.at - killed < PROMPT
            (waited,) = ranks.wait("wait", ranks=[0])
            assert names_remote_error(waited.fields["text"])

    @pytest.mark.patched
    def test_a_group_is_destroyed_while_an_operation_is_pending(self, run):
        """Up to 2.26 NCCL goes on in memory of the thread that finalizes: the test bed ends who lets it end."""
        with run("destroyed_busy", env={"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}) as ranks:
            ended = ranks.wait("destroy")
            assert [event.fields["ok"] for event in ended] == [True, True], ended
            assert [event.fields["result"] for event in ranks.wait("value")] == [2.0, 2.0]


class TestDestroying:
    """A peer is lost while a group is destroyed: from 2.22 on NCCL's abort frees what its finalize uses."""

    @pytest.mark.patched
    @pytest.mark.parametrize("aside", [False, True], ids=["current", "aside"])
    @pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
    def test_patched(self, run, sync, aside):
        with run("destroyed_lost", sync=sync, aside=aside) as ranks:
            ranks.wait("ready")
            still(ranks, 0, 1)
            assert not ranks.events(0, "destroy")
            killed = ranks.kill(1)
            (ended,) = ranks.wait("destroy", ranks=[0])
            assert ended.at - killed < PROMPT
            ranks.wait("left", ranks=[0])
            exits = ranks.join(ranks=[0])
            assert (exits[0].code, exits[0].signal) == (0, None), ranks.stderr(0)[-2000:]


@pytest.mark.parametrize("mode", ["0", "1", "3"])
def test_in_other_modes_no_wait_takes_a_lock_that_an_abort_holds(run, mode):
    # On the official builds, too: what a patch asks under that lock it asks in its own mode alone.
    env = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": mode, "M8D_BED_ABORT_HANG_MS": "60000"}
    with run("other_mode", env=env) as ranks:
        (seen,) = ranks.wait("aborts", ranks=[0])
        assert seen.fields["seen"]
        (waited,) = ranks.wait("wait", ranks=[0])
        assert waited.fields["ms"] < PROMPT * 1000


@pytest.mark.parametrize("how", ["nccl", "argument", "user"])
class TestSameGroup:
    """A coalesced operation fails; the group's next operation must run, or raise."""

    @pytest.mark.stock
    def test_stock_does_nothing_and_says_nothing(self, run, how):
        with run("same_group", how=how) as ranks:
            ranks.wait("value")
            for rank in range(2):
                assert not ranks.events(rank, "call")[0].fields["ok"]
                assert ranks.events(rank, "again")[0].fields["ok"]
                assert ranks.events(rank, "value")[0].fields["result"] == STALE

    @pytest.mark.patched
    @pytest.mark.parametrize("spelled", ["2", " 02", "by its older name"])
    def test_patched(self, run, how, spelled):
        env = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": spelled}
        if spelled == "by its older name":
            env = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": None, "NCCL_ASYNC_ERROR_HANDLING": "2"}
        with run("same_group", how=how, env=env) as ranks:
            for rank, told in enumerate(ranks.wait("depth")):
                assert not ranks.events(rank, "call")[0].fields["ok"]
                (again,) = ranks.events(rank, "again")
                if how == "argument":  # its first call was queued: the group is out of step, and says so
                    assert again.fields["error"] == "DistBackendError"
                else:
                    assert ranks.events(rank, "value")[0].fields["result"] == 2 * STALE
                assert told.fields["depth"] == 0
                for event in ranks.events(rank, "received"):
                    assert event.fields["result"] == STALE


@pytest.mark.parametrize("how", ["between", "type"])
class TestCutShort:
    """A coalesced operation ends after calls of it were queued: the group is out of step with its peers."""

    @pytest.mark.stock
    def test_stock_does_nothing_and_says_nothing(self, run, how):
        with run("same_group", how=how) as ranks:
            ranks.wait("value")
            for rank in range(2):
                assert not ranks.events(rank, "call")[0].fields["ok"]
                assert ranks.events(rank, "again")[0].fields["ok"]
                assert ranks.events(rank, "value")[0].fields["result"] == STALE

    @pytest.mark.patched
    def test_patched_says_so(self, run, how):
        with run("same_group", how=how) as ranks:
            for rank, told in enumerate(ranks.wait("depth")):
                assert not ranks.events(rank, "call")[0].fields["ok"]
                (again,) = ranks.events(rank, "again")
                assert again.fields["error"] == "DistBackendError"
                assert "coalesced" in again.fields["text"]
                assert told.fields["depth"] == 0


class TestUserGroup:
    """An NCCL group that the program opened itself is no coalesced operation left open."""

    @pytest.mark.parametrize("inside", ["plain", "coalesced", "both"])
    def test_its_operations_run_together(self, run, inside):
        with run("user_group", inside=inside) as ranks:
            ranks.wait("depth")
            for rank in range(2):
                (group,) = ranks.events(rank, "group")
                # NCCL launches once for all that a communicator has in a group.
                assert group.fields == {"depth": 1, "early": 0, "launches": 2}
                assert {*ranks.events(rank, "sums")[0].fields["values"]} == {2 * STALE}
                assert ranks.events(rank, "later")[0].fields["ok"]
                assert ranks.events(rank, "depth")[0].fields["depth"] == 0


class TestHook:
    """An on-completion hook that raises."""

    def calls(self, run, patience):
        env = {"TORCH_NCCL_ENABLE_TIMING": "1"}
        with run("failing_hook", 2, env=env, patience=patience) as ranks:
            return [event.fields for event in ranks.wait("calls")]

    @pytest.mark.stock
    def test_stock_asks_it_for_ever(self, run):
        assert all(told["later"] > told["first"] + 5 for told in self.calls(run, 60.0))

    @pytest.mark.patched
    def test_patched_asks_it_once(self, run):
        assert all(told["later"] == told["first"] == 1 for told in self.calls(run, 1.0))


class TestThreads:
    """A thread that used a group ends before its works do."""

    @pytest.mark.patched
    @pytest.mark.parametrize("later", [False, True], ids=["from-the-start", "later"])
    def test_patched(self, run, later):
        with run("short_threads", later=later) as ranks:
            assert {each.code for each in ranks.join().values()} == {0}


class TestCycles:
    """Breaking and rebuilding leaves nothing behind."""

    COUNT = 100

    @pytest.mark.patched
    def test_a_hundred(self, run):
        with run("cycles", count=self.COUNT, timeout=300) as ranks:
            ranks.join()
            for rank in range(2):
                counted = ranks.events(rank, "counted")
                for event in counted:
                    assert event.fields["broke"], "a cycle did not break"
                    assert names_remote_error(event.fields["text"])
                *_, first, last = counted  # since the last modules were imported
                assert last.fields["number"] == self.COUNT - 1
                assert last.fields["comms"] == first.fields["comms"] == 0
                for event in (first, last):
                    # Of torch's threads none is left. Those of the double's streams end by themselves 0.3 s after
                    # their last work: a cycle in which torch imports its compiler takes longer.
                    assert {*event.fields["threads"]} - {"m8d-stream"} == {"python"}
                assert last.fields["threads"].count("m8d-stream") <= STREAMS
                assert last.fields["events"] <= first.fields["events"] + 10
                # 0.3 MB in a hundred cycles, 1.0 in three hundred; an arena's pages are no leak.
                assert last.fields["used"] < first.fields["used"] + 5
