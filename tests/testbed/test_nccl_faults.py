"""Every knob that makes the double's NCCL fail does what it says; and what a group makes of an error."""

from __future__ import annotations

import time

import numpy as np
import pytest
import rawnccl
from rawnccl import (
    IN_PROGRESS,
    INTERNAL,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    REMOTE,
    SUCCESS,
    SYSTEM,
    UNHANDLED_CUDA,
)

ONE = np.ones(4, "float32")
PATIENCE = 45.0  # seconds; each of these waits ends within milliseconds when the machine is free
MOMENT = 0.3  # seconds in which nothing may happen
LONG = 600_000  # ms: longer than any test


def begin(rank, kind="AllReduce", **more):
    return rank.begin(kind, ONE, 8, **{"dtype": "float32", "count": 4, **more})


@pytest.fixture
def pair(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 2) as crew:
        yield crew


# -- groups


def test_a_group_queues_until_it_ends(pair):
    before = pair[0].count("launches")
    assert pair.each("group", "Start") == [SUCCESS] * 2
    pair.each("group", "Start")
    for rank in pair.members:
        assert begin(rank) == SUCCESS
        assert begin(rank) == SUCCESS
        assert rank.ready(0)
    assert pair[0].count("group_depth") == 2
    assert pair.each("group", "End") == [SUCCESS] * 2  # the inner one
    assert pair[0].count("launches") == before
    assert pair.each("group", "End") == [SUCCESS] * 2
    assert pair[0].count("launches") == before + 1
    assert pair[0].count("group_depth") == 0
    assert all(pair.each("ready", PATIENCE))
    assert pair[0].group("End") == INVALID_USAGE  # none is open


def test_a_group_repeats_the_error_of_a_call_and_is_closed(pair):
    pair[0].set("ENQUEUE_RESULT", REMOTE)
    pair[0].set("ENQUEUE_FAIL_FROM", 2)
    pair[0].group("Start")
    assert begin(pair[0]) == SUCCESS
    assert begin(pair[0]) == REMOTE
    pair[0].set("ENQUEUE_RESULT", 0)
    assert begin(pair[0]) == SUCCESS  # queued, and dropped
    assert pair[0].group("End") == REMOTE
    assert pair[0].count("group_depth") == pair[0].count("ops_pending") == 0
    assert pair[0].error() == SUCCESS  # a blocking communicator keeps no error of a call
    pair[0].received()
    for got in pair.each("run", "AllReduce", ONE, 4, dtype="float32"):
        assert got.tolist() == [2] * 4


def test_a_group_belongs_to_its_thread(pair):
    """One that is left open swallows what its thread does next, on any communicator; other threads see nothing."""
    pair[0].group("Start")
    assert begin(pair[0]) == SUCCESS
    assert pair[0].ready(MOMENT)
    pair[0].start("other", "count", "group_depth")
    assert pair[0].finish("other", PATIENCE) == 0
    assert pair[0].abandon_group() == 1
    assert pair[0].abandon_group() == 0
    assert pair[0].received()[0].tolist() == [99] * 8
    for got in pair.each("run", "AllReduce", ONE, 4, dtype="float32"):
        assert got.tolist() == [2] * 4


# -- knobs


def test_enqueue_fails_from_the_nth_of_a_kind(pair):
    rank = pair[0]
    begin(rank)
    rank.set("ENQUEUE_RESULT", SYSTEM)
    rank.set("ENQUEUE_FAIL_KIND", "Send")
    rank.set("ENQUEUE_FAIL_FROM", 2)
    assert [begin(rank, root=1) for _ in range(3)] == [SUCCESS] * 3
    assert [begin(rank, "Send", root=1) for _ in range(3)] == [SUCCESS, SYSTEM, SYSTEM]
    assert begin(rank) == SUCCESS
    rank.set("ENQUEUE_FAIL_FROM", 1)  # counted anew
    assert begin(rank, "Send", root=1) == SYSTEM
    for knob in ("ENQUEUE_RESULT", "ENQUEUE_FAIL_FROM", "ENQUEUE_FAIL_KIND"):
        rank.set(knob)
    assert begin(rank, "Send", root=1) == SUCCESS


def test_enqueue_fails_always_without_a_start(pair):
    pair[0].set("ENQUEUE_RESULT", REMOTE)
    assert [begin(pair[0]) for _ in range(2)] == [REMOTE] * 2


def test_faults_can_be_for_one_communicator(pair):
    assert [each[0] for each in pair.each("split", 0, 0)] == [SUCCESS] * 2
    ids = [line.split()[0] for line in pair[0].communicators()]
    assert len(set(ids)) == 2
    states = set()
    for number in ids:
        pair[0].set("COMM", number)
        pair[0].set("ASYNC_ERROR", REMOTE)
        states.add((pair[0].error("comm"), pair[0].error("child")))
    assert states == {(REMOTE, SUCCESS), (SUCCESS, REMOTE)}


def test_group_end_fails(pair):
    pair[0].set("GROUPEND_RESULT", SYSTEM)
    pair[0].group("Start")
    assert pair[0].group("End") == SUCCESS  # nothing was queued
    pair[0].group("Start")
    begin(pair[0])
    assert pair[0].group("End") == SYSTEM
    assert pair[0].count("ops_pending") == 0
    assert begin(pair[0]) == SUCCESS  # a call of its own is no ncclGroupEnd


def test_init_fails_and_hangs(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 2, connected=False, INIT_RESULT=SYSTEM) as crew:
        assert crew.connect() == [SYSTEM] * 2
        assert crew[0].count("comms") == 0
        crew.each("set", "INIT_RESULT")
        crew[0].set("INIT_HANG_MS", 500)
        started = time.monotonic()
        assert crew.connect() == [SUCCESS] * 2
        assert time.monotonic() - started >= 0.5
        crew[0].set("INIT_HANG_MS", LONG)
        crew[0].start("init", "init", crew[0].unique_id(), 2, 0, name="next")
        assert crew[0].finish("init", MOMENT) is None
        assert crew[0].call("Abort", "next")[0] == SUCCESS
        assert crew[0].finish("init", PATIENCE) == INTERNAL


def test_an_asynchronous_error(pair):
    pair[0].set("ASYNC_ERROR", REMOTE)
    assert pair[0].error() == REMOTE
    assert begin(pair[0]) == REMOTE  # as NCCL refuses a communicator in that state
    pair[0].set("ASYNC_ERROR", 0)
    assert pair[0].error() == SUCCESS


def test_operations_hang_from_the_nth(pair):
    pair[0].set("HANG_FROM_OP", 2)
    for _ in range(3):
        for rank in pair.members:
            begin(rank, stream="a")
    assert not pair[0].ready(MOMENT, "a")
    assert pair[0].count("ops_pending") == 2
    assert pair[0].error() == pair[1].error() == SUCCESS
    assert pair[0].call("Abort")[0] == SUCCESS
    assert pair[0].ready(PATIENCE, "a")
    assert [each[0] for each in pair[0].received()] == [2, 99, 99]


def test_a_death_is_not_seen(pair):
    pair[0].set("NO_DETECT", 1)
    pair[1].kill()
    begin(pair[0])
    assert pair[0].error_within(MOMENT, REMOTE) is None
    assert pair[0].call("Abort")[0] == SUCCESS
    assert pair[0].ready(PATIENCE)


def test_a_death_is_seen_late_and_under_another_name(pair):
    pair[0].set("DETECT_DELAY_MS", 400)
    pair[0].set("REMOTE_RESULT", SYSTEM)
    pair[1].kill()
    started = time.monotonic()
    begin(pair[0])
    assert pair[0].error_within(PATIENCE, SYSTEM) is not None
    assert time.monotonic() - started >= 0.4


def test_a_late_detection_does_not_delay_an_abort(pair):
    pair[0].set("DETECT_DELAY_MS", LONG)
    pair[1].kill()
    begin(pair[0])
    assert not pair[0].ready(MOMENT)
    assert pair[0].call("Abort")[0] == SUCCESS
    assert pair[0].ready(PATIENCE)


@pytest.mark.parametrize(("phase", "ends"), [("before", False), ("after", True)])
def test_abort_hangs(pair, phase, ends):
    """For as long as told; operations end before it or after; other threads and communicators go on."""
    assert [each[0] for each in pair.each("split", 0, 0)] == [SUCCESS] * 2
    begin(pair[0])
    pair[0].set("ABORT_HANG_MS", LONG)
    pair[0].set("ABORT_HANG_PHASE", phase)
    pair[0].start("abort", "call", "Abort")
    assert pair[0].ready(PATIENCE if ends else MOMENT) is ends
    assert pair[0].error() == SUCCESS
    for rank in pair.members:
        begin(rank, name="child", stream="other")
    assert pair[0].ready(PATIENCE, "other")
    assert pair[0].finish("abort", 0) is None
    pair[0].set("ABORT_HANG_MS", 0)  # a hang ends with its knob
    assert pair[0].finish("abort", PATIENCE)[0] == SUCCESS
    assert pair[0].ready(PATIENCE)


@pytest.mark.parametrize("phase", ["before", "after"])
def test_an_aborted_operation_writes_until_the_abort_returns(pair, phase):
    """It does so again and again, also when its stream has gone on; and then never again."""
    pair[0].set("HANG_FROM_OP", 1)
    begin(pair[0])
    pair[0].set("ABORT_WRITES", 1)
    assert not pair[0].rewrites(MOMENT)
    pair[0].set("ABORT_HANG_PHASE", phase)
    pair[0].set("ABORT_HANG_MS", LONG)
    pair[0].start("abort", "call", "Abort")
    assert pair[0].ready(PATIENCE if phase == "after" else MOMENT) is (phase == "after")
    assert pair[0].rewrites(PATIENCE)
    assert pair[0].rewrites(PATIENCE)
    pair[0].set("ABORT_HANG_MS", 0)
    assert pair[0].finish("abort", PATIENCE)[0] == SUCCESS
    assert not pair[0].rewrites(MOMENT)


def test_without_a_hang_it_has_written_when_the_abort_returns(pair):
    pair[0].set("HANG_FROM_OP", 1)
    begin(pair[0])
    assert not pair[0].ready(MOMENT)
    pair[0].set("ABORT_WRITES", 1)
    assert pair[0].call("Abort")[0] == SUCCESS
    assert not (pair[0].received()[0][:4] == 99).any()


def test_a_launch_and_a_destroy_hang_for_so_long(pair):
    pair[0].set("LAUNCH_HANG_MS", 300)
    began = time.monotonic()
    assert begin(pair[0]) == SUCCESS
    assert time.monotonic() - began >= 0.3
    begin(pair[1])
    pair[0].set("DESTROY_HANG_MS", 300)
    result, seconds = pair[0].call("Destroy")
    assert result == SUCCESS
    assert seconds >= 0.3


def test_an_abort_hangs_for_so_long(pair):
    begin(pair[0])
    pair[0].set("ABORT_HANG_MS", 300)
    result, seconds = pair[0].call("Abort")
    assert result == SUCCESS
    assert seconds >= 0.3


def test_an_init_that_hangs_goes_on_when_the_knob_is_changed(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 2, connected=False, INIT_HANG_MS=LONG) as crew:
        uid = crew[0].unique_id()
        for rank in (0, 1):
            crew[rank].start("init", "init", uid, 2, rank)
        assert crew[0].finish("init", MOMENT) is None
        crew.each("set", "INIT_HANG_MS")
        assert crew.each("finish", "init", PATIENCE) == [SUCCESS] * 2


def test_abort_fails_but_ends_the_communicator(pair):
    begin(pair[0])
    pair[0].set("ABORT_RESULT", SYSTEM)
    assert pair[0].call("Abort")[0] == SYSTEM
    assert pair[0].ready(PATIENCE)
    assert pair[0].error() == -INVALID_ARGUMENT  # it was not freed
    assert pair[0].count("aborts") == 1
    assert pair[0].count("comms") == 0


def test_non_blocking_communicators_take_their_time(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 2, connected=False, NONBLOCKING_MS=400) as crew:
        started = time.monotonic()
        assert crew.connect(blocking=False) == [IN_PROGRESS] * 2
        assert None not in crew.each("error_within", PATIENCE, SUCCESS)
        assert time.monotonic() - started >= 0.4
        data = {"dtype": "float32", "count": 4}
        assert crew.each("begin", "AllReduce", ONE, 4, **data) == [IN_PROGRESS] * 2
        assert None not in crew.each("error_within", PATIENCE, SUCCESS)
        assert all(crew.each("ready", PATIENCE))
        crew[0].set("ENQUEUE_RESULT", REMOTE)
        assert begin(crew[0]) == REMOTE
        crew[0].set("ENQUEUE_RESULT")
        assert crew[0].error() == REMOTE  # here the error of a call stays
        assert crew[0].call("Abort")[0] == SUCCESS


def test_a_wrong_knob_in_the_environment_fails_every_call(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 1, connected=False, NO_SUCH_KNOB=1) as crew:
        assert crew[0].group("Start") == SYSTEM
        assert "NO_SUCH_KNOB" in crew[0].stderr()


def test_errors_have_words(pair):
    assert pair[0].words(REMOTE) == "remote process exited or there was a network error"
    assert pair[0].words(77) == "unknown result code"


# -- connecting


def test_the_first_operation_with_a_peer_waits_for_it_inside_the_call(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 2, LAZY_CONNECT=1) as crew:
        crew[0].start("call", "begin", "Recv", ONE, 4, dtype="float32", root=1)
        assert crew[0].finish("call", MOMENT) is None
        assert crew[0].ready(0), "nothing is queued before the peer has come"
        assert crew[1].begin("Send", ONE * 3, 0, dtype="float32", root=0) == SUCCESS
        assert crew[0].finish("call", PATIENCE) == SUCCESS
        assert crew[0].ready(PATIENCE)
        assert crew[0].received()[-1].tolist() == [3] * 4
        assert begin(crew[0], "Recv", root=1) == SUCCESS, "connected once"
        assert not crew[0].ready(MOMENT)
        crew[0].start("other", "begin", "Send", ONE, 0, dtype="float32", root=1)
        assert crew[0].finish("other", MOMENT) is None, "the other direction is another connection"
        assert begin(crew[1], "Recv", root=0) == SUCCESS
        assert crew[0].finish("other", PATIENCE) == SUCCESS


def test_each_collective_connects_with_its_neighbours_at_its_first_use(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 3, LAZY_CONNECT=1) as crew:
        assert crew.each("begin", "AllReduce", ONE, 4, dtype="float32") == [SUCCESS] * 3
        assert all(crew.each("ready", PATIENCE))
        for rank in (0, 1):
            crew[rank].start("call", "begin", "Broadcast", ONE, 4, dtype="float32")
        assert crew[0].finish("call", MOMENT) is None
        assert begin(crew[2], "Broadcast") == SUCCESS
        assert [crew[rank].finish("call", PATIENCE) for rank in (0, 1)] == [SUCCESS] * 2
        assert all(crew.each("ready", PATIENCE))


def test_an_abort_ends_the_wait_for_a_peer_that_does_not_come(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 2, LAZY_CONNECT=1) as crew:
        crew[0].start("call", "begin", "Recv", ONE, 4, dtype="float32", root=1)
        assert crew[0].finish("call", MOMENT) is None
        crew[1].kill()
        assert crew[0].finish("call", MOMENT) is None, "that the peer has died is not learnt"
        assert crew[0].error() == SUCCESS
        assert crew[0].call("Abort")[0] == SUCCESS
        assert crew[0].finish("call", PATIENCE) == INTERNAL
        assert crew[0].count("comms") == crew[0].count("group_depth") == 0


# -- CUDA


def test_an_abort_holds_the_lock_of_cuda_s_calls(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 2) as crew:
        assert crew.connect(name="other") == [SUCCESS] * 2
        crew[0].set("ABORT_LOCK_MS", LONG)
        crew[0].start("abort", "call", "Abort")
        crew[0].start("query", "ready", PATIENCE)
        crew[0].start("launch", "begin", "AllReduce", ONE, 4, dtype="float32", name="other", stream="other")
        assert crew[0].finish("launch", MOMENT) is None
        assert crew[0].finish("query", 0) is crew[0].finish("abort", 0) is None
        crew[0].set("ABORT_LOCK_MS", 0)
        assert crew[0].finish("abort", PATIENCE)[0] == SUCCESS
        assert crew[0].finish("launch", PATIENCE) == SUCCESS
        assert crew[0].finish("query", PATIENCE)


def test_a_launch_that_breaks_the_device_ends_all_use_of_it(pair):
    pair[0].set("DEVICE_ERROR_FROM", 2)
    for got in pair.each("run", "AllReduce", ONE, 4, dtype="float32"):
        assert got.tolist() == [2] * 4
    assert pair.each("begin", "AllReduce", ONE, 4, dtype="float32") == [SUCCESS] * 2, "it is found later"
    assert not pair[0].ready(MOMENT)
    assert begin(pair[0]) == UNHANDLED_CUDA
    assert pair.each("error") == [SUCCESS] * 2
    assert not pair[1].ready(MOMENT), "the peer waits"
    assert pair[0].call("Destroy")[0] == UNHANDLED_CUDA
    assert pair[0].count("comms") == 0
    assert pair[1].call("Abort")[0] == SUCCESS


def test_an_abort_waits_for_graphs(pair):
    begin(pair[0])
    pair[0].set("GRAPHS_ALIVE", 2)
    pair[0].start("abort", "call", "Abort")
    assert pair[0].ready(PATIENCE), "what was pending ends"
    for left in (1, 0):
        assert pair[0].finish("abort", MOMENT) is None
        pair[0].set("GRAPHS_ALIVE", left)
    assert pair[0].finish("abort", PATIENCE)[0] == SUCCESS
