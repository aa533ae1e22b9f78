"""How communicators of the double end: a peer dies, aborts, revokes, destroys, in the middle of everything."""

from __future__ import annotations

import os
import signal

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
)

ONE = np.ones(4, "float32")
PATIENCE = 45.0  # seconds; each of these waits ends within milliseconds when the machine is free
MOMENT = 0.3  # seconds in which nothing may happen


def all_reduce(crew, ranks, size=4):
    data = np.ones(size, "float32")
    return crew.each("begin", "AllReduce", data, size, dtype="float32", ranks=ranks)


def test_a_peer_dies_before_the_operation(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 2) as crew:
        assert all_reduce(crew, [0, 1]) == [SUCCESS, SUCCESS]
        assert all(crew.each("ready", PATIENCE))
        crew[1].kill()
        assert crew[0].error() == SUCCESS  # nobody looks at an idle connection
        assert all_reduce(crew, [0]) == [SUCCESS]
        assert crew[0].error_within(PATIENCE, REMOTE) is not None
        assert not crew[0].ready(MOMENT)  # it never completes
        assert all_reduce(crew, [0]) == [REMOTE]
        assert "Connection closed by remote peer rank 1" in crew[0].stderr()
        assert crew[0].count("ops_pending") == 1
        assert crew[0].call("Abort")[0] == SUCCESS
        assert crew[0].ready(PATIENCE)
        assert crew[0].received()[1].tolist() == [99] * 4  # and it did not complete
        assert crew[0].count("comms") == crew[0].count("ops_pending") == 0


@pytest.mark.parametrize("run", range(20))
def test_a_peer_dies_in_the_operation(library, tmp_path, run):
    """The same every time: 20 runs agree. The data is too much for a connection to hold, so both are in the middle."""
    with rawnccl.crew(library, tmp_path, 2) as crew:
        all_reduce(crew, [0], size=4 << 20)
        assert not crew[0].ready(0.01)
        crew[1].kill()
        assert crew[0].error_within(PATIENCE, REMOTE) is not None
        assert crew[0].call("Abort")[0] == SUCCESS
        assert crew[0].ready(PATIENCE)


def test_only_who_exchanges_data_with_the_dead_learns_of_it(library, tmp_path):
    """In a ring of four, rank 2 is nobody's neighbour but 1 and 3: it learns when they give up."""
    with rawnccl.crew(library, tmp_path, 4) as crew:
        crew[0].kill()
        all_reduce(crew, [1, 2, 3])
        for neighbour in (1, 3):
            assert crew[neighbour].error_within(PATIENCE, REMOTE) is not None
        assert crew[2].error_within(MOMENT, REMOTE) is None
        assert crew[1].call("Abort")[0] == SUCCESS
        assert crew[2].error_within(PATIENCE, REMOTE) is not None


def test_a_stopped_peer_is_waited_for(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 2) as crew:
        crew[1].ask("begin", "AllReduce", ONE, 4, dtype="float32")
        assert crew[1].answer() == SUCCESS
        os.kill(crew[1].process.pid, signal.SIGSTOP)
        all_reduce(crew, [0], size=4)
        all_reduce(crew, [0], size=4)
        assert not crew[0].ready(MOMENT)
        assert crew[0].error() == SUCCESS
        os.kill(crew[1].process.pid, signal.SIGCONT)
        all_reduce(crew, [1], size=4)
        assert crew[0].ready(PATIENCE)
        assert [each.tolist() for each in crew[0].received()] == [[2] * 4] * 2


def test_what_a_peer_sent_before_it_went_arrives(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 2) as crew:
        assert crew[1].begin("Send", ONE, 0, dtype="float32", root=0) == SUCCESS
        assert crew[1].ready(PATIENCE)
        crew[1].kill()
        assert crew[0].run("Recv", [np.float32(0)], 4, dtype="float32", root=1).tolist() == [1] * 4


def test_an_abort_ends_everything_at_once(library, tmp_path):
    """Also in other streams, and what is queued behind something else. The peers lose a connection."""
    with rawnccl.crew(library, tmp_path, 3) as crew:
        for stream in "abc":
            crew[0].begin("AllReduce", ONE, 4, dtype="float32", stream=stream)
        all_reduce(crew, [1])
        result, seconds = crew[0].call("Abort")
        assert result == SUCCESS
        assert seconds < PATIENCE
        for stream in "abc":
            assert crew[0].ready(PATIENCE, stream)
        assert [each.tolist() for each in crew[0].received()] == [[99] * 4] * 3
        assert crew[1].error_within(PATIENCE, REMOTE) is not None


def test_a_communicator_that_was_ended_is_named(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 2, AFTER_END="say") as crew:
        assert all(result == SUCCESS for result, _ in crew.each("call", "Destroy"))
        assert crew[0].begin("AllReduce", ONE, 4, dtype="float32", count=4) == INVALID_ARGUMENT
        assert crew[0].error() == -INVALID_ARGUMENT
        assert crew[0].call("Abort")[0] == INVALID_ARGUMENT
        for call in ("ncclAllReduce", "ncclCommGetAsyncError", "ncclCommAbort"):
            assert f"{call}: communicator 0x" in crew[0].stderr()
        assert "used after ncclCommDestroy" in crew[0].stderr()
        assert crew[0].count("freed_uses") == 3


def test_destroy_waits_for_what_is_pending(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 2) as crew:
        all_reduce(crew, [0])
        crew[0].start("destroy", "call", "Destroy")
        assert crew[0].finish("destroy", MOMENT) is None
        all_reduce(crew, [1])
        assert crew[0].finish("destroy", PATIENCE)[0] == SUCCESS
        assert crew[0].received()[0].tolist() == [2] * 4


def test_finalize(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 2) as crew:
        all_reduce(crew, [0, 1])
        assert [result for result, _ in crew.each("call", "Finalize")] == [SUCCESS, SUCCESS]
        assert crew[0].begin("AllReduce", ONE, 4, dtype="float32") == INVALID_USAGE
        assert crew[0].call("Finalize")[0] == INVALID_ARGUMENT
        assert crew[0].call("Destroy")[0] == SUCCESS


def test_ranks_that_do_different_things_are_told(library, tmp_path):
    cases = [
        ("AllReduce", {"count": 4}, "AllReduce", {"count": 3}),
        ("AllReduce", {"op": "sum"}, "AllReduce", {"op": "max"}),
        ("AllReduce", {}, "AllGather", {"count": 2}),
        ("ReduceScatter", {}, "AlltoAll", {}),
    ]
    for number, (one, how_one, other, how_other) in enumerate(cases):
        with rawnccl.crew(library, tmp_path, 2) as crew:
            crew[0].begin(one, ONE, 8, dtype="float32", **{"count": 4, **how_one})
            crew[1].begin(other, ONE, 8, dtype="float32", **{"count": 4, **how_other})
            told = [crew[rank].error_within(PATIENCE, INVALID_USAGE) for rank in (0, 1)]
            assert all(each is not None for each in told), number
            assert "mismatch with rank" in crew[0].last_error()
            assert not crew[0].ready(0.05)


# -- init


def test_init_waits_for_everybody(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 2, connected=False) as crew:
        uid = crew[0].unique_id()
        crew[0].start("init", "init", uid, 2, 0)
        assert crew[0].finish("init", MOMENT) is None
        assert crew[1].init(uid, 2, 1) == SUCCESS
        assert crew[0].finish("init", PATIENCE) == SUCCESS
        assert crew[1].about() == [(0, 1), (0, 2), (0, 0)]


@pytest.mark.parametrize("host", [0, 1])
def test_a_peer_dies_in_init(library, tmp_path, host):
    """Of three, one never comes; one that waits is killed: the one that made the id, or another."""
    with rawnccl.crew(library, tmp_path, 3, connected=False) as crew:
        uid = crew[host].unique_id()
        for rank in (0, 1):
            crew[rank].start("init", "init", uid, 3, rank)
            assert crew[rank].finish("init", MOMENT) is None
        crew[0].kill()
        assert crew[1].finish("init", PATIENCE) == REMOTE
        assert crew[1].count("comms") == 0


def test_an_init_can_be_aborted(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 2, connected=False) as crew:
        before = crew[0].held()
        uid = crew[0].unique_id()
        crew[0].start("init", "init", uid, 2, 0)
        assert crew[0].finish("init", MOMENT) is None
        assert crew[0].call("Abort")[0] == SUCCESS
        assert crew[0].finish("init", PATIENCE) == INTERNAL
        assert crew[0].settles(before, PATIENCE)


def test_a_wrong_init_is_refused(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 2, connected=False) as crew:
        uid = crew[0].unique_id()
        assert crew[0].init(uid, 2, 2) == INVALID_ARGUMENT
        assert crew[0].init(b"x" * 128, 2, 0) == INVALID_ARGUMENT
        assert crew.each("init", uid, 2, 0) == [INVALID_ARGUMENT] * 2  # the same rank twice


def test_inits_of_a_group_go_together(library, tmp_path):
    """Two communicators in one group, in different orders: one after the other they would wait for each other."""
    with rawnccl.crew(library, tmp_path, 2, connected=False) as crew:
        uids = {"a": crew[0].unique_id(), "b": crew[0].unique_id()}
        crew.each("group", "Start")
        for rank, order in ((0, "ab"), (1, "ba")):
            for name in order:
                assert crew[rank].init(uids[name], 2, rank, name=name) == SUCCESS
                assert crew[rank].error(name) == IN_PROGRESS
        assert crew.each("group", "End") == [SUCCESS, SUCCESS]
        for name in "ab":
            data = np.ones(1, "float32")
            for got in crew.each("run", "AllReduce", data, 1, dtype="float32", name=name):
                assert got.tolist() == [2]


def test_a_non_blocking_init(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 2, connected=False) as crew:
        uid = crew[0].unique_id()
        assert crew[0].init(uid, 2, 0, blocking=False) == IN_PROGRESS
        assert crew[0].error() == IN_PROGRESS
        assert crew[0].begin("AllReduce", ONE, 4, dtype="float32") == INVALID_ARGUMENT  # too early
        assert crew[0].call("Abort")[0] == SUCCESS
        uid = crew[0].unique_id()
        assert crew.each("init", uid, 2, lambda rank: rank, blocking=False) == [IN_PROGRESS] * 2
        assert None not in crew.each("error_within", PATIENCE, SUCCESS)
        for got in crew.each("run", "AllReduce", ONE, 4, dtype="float32"):
            assert got.tolist() == [2] * 4
        crew[1].kill()
        crew[0].begin("AllReduce", ONE, 4, dtype="float32")
        assert crew[0].error_within(PATIENCE, REMOTE) is not None


def test_an_init_with_several_ids(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 2, connected=False) as crew:
        before = crew.each("held")
        uids = [crew[0].unique_id(), crew[0].unique_id()]
        assert crew.each("init_scalable", uids, 2, lambda rank: rank) == [SUCCESS] * 2
        for got in crew.each("run", "AllReduce", ONE, 4, dtype="float32"):
            assert got.tolist() == [2] * 4
        crew.each("call", "Destroy")
        for rank in (0, 1):
            assert crew[rank].settles(before[rank], PATIENCE, threads=1), (before[rank], crew[rank].held())


# -- communicators from communicators


def test_split(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 4) as crew:
        colors, keys = (0, 1, 0, -1), (2, 0, 1, 0)
        made = crew.each("split", lambda rank: colors[rank], lambda rank: keys[rank])
        assert made == [(0, True), (0, True), (0, True), (0, False)]
        about = crew.each("about", "child", ranks=[0, 1, 2])
        assert [[value for _, value in each][:2] for each in about] == [[1, 2], [0, 1], [0, 2]]
        # While an operation of the parent is pending, too.
        crew[0].begin("AllReduce", ONE, 4, dtype="float32", stream="parent")
        assert [each[0] for each in crew.each("split", 0, 0, name="again")] == [0] * 4
        for got in crew.each("run", "AllReduce", ONE, 4, dtype="float32", name="again"):
            assert got.tolist() == [4] * 4
        gathered = crew.each(
            "run", "AllGather", lambda rank: ONE * rank, 8, dtype="float32", name="child", ranks=[0, 2]
        )
        assert [each[::4].tolist() for each in gathered] == [[2, 0]] * 2


def test_split_without_everybody(library, tmp_path):
    """It waits for who is late, and fails when somebody is dead, or when the parent is aborted."""
    with rawnccl.crew(library, tmp_path, 3) as crew:
        crew[0].start("split", "split", 0, 0)
        crew[1].start("split", "split", 0, 0)
        assert crew[0].finish("split", MOMENT) is None
        crew[2].kill()
        assert crew[0].finish("split", PATIENCE) == (REMOTE, False)
        assert crew[1].finish("split", PATIENCE) == (REMOTE, False)
    with rawnccl.crew(library, tmp_path, 2, connected=False) as crew:
        crew.connect(blocking=False)
        assert None not in crew.each("error_within", PATIENCE, SUCCESS)
        assert crew[1].split(0, 0) == (IN_PROGRESS, False)  # a blocking one would be left in freed memory
        assert crew[1].error_within(MOMENT, SUCCESS) is None
        assert crew[1].call("Abort")[0] == SUCCESS
        assert crew[1].counts("comms", 0, PATIENCE)


def test_revoke_and_shrink(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 3) as crew:
        if not crew[0].models("ncclCommShrink"):
            pytest.skip("this NCCL cannot shrink")
        crew[1].kill()
        all_reduce(crew, [0, 2])
        for rank in (0, 2):
            assert crew[rank].error_within(PATIENCE, REMOTE) is not None
        assert crew.each("shrink", [1], flags=1, ranks=[0, 2]) == [SUCCESS, SUCCESS]
        for rank in (0, 2):
            assert crew[rank].ready(PATIENCE)  # the parent's operation was ended
        for got in crew.each("run", "AllReduce", ONE, 4, dtype="float32", name="child", ranks=[0, 2]):
            assert got.tolist() == [2] * 4
    with rawnccl.crew(library, tmp_path, 2) as crew:
        if not crew[0].models("ncclCommRevoke"):
            return
        all_reduce(crew, [0])
        assert crew[0].call("Revoke", "comm", 0)[0] == SUCCESS
        assert crew[0].ready(PATIENCE)
        assert crew[0].begin("AllReduce", ONE, 4, dtype="float32") == INVALID_USAGE
        assert crew[0].error() == SUCCESS
        assert crew[1].call("Revoke", "comm", 0)[0] == SUCCESS
        assert [each[0] for each in crew.each("split", 0, 0)] == [SUCCESS, SUCCESS]
        assert crew[0].call("Finalize")[0] == INVALID_ARGUMENT
        assert crew[0].call("Destroy")[0] == SUCCESS


def test_grow(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 3, connected=False) as crew:
        uid = crew[0].unique_id()
        assert crew.each("init", uid, 2, lambda rank: rank, ranks=[0, 1]) == [SUCCESS] * 2
        uid = crew[1].unique_id()
        ids, numbers = (None, uid, uid), (-1, -1, 2)
        made = crew.each("grow", 3, lambda rank: ids[rank], lambda rank: numbers[rank])
        assert made == [SUCCESS] * 3
        for got in crew.each("run", "AllReduce", ONE, 4, dtype="float32", name="child"):
            assert got.tolist() == [3] * 4


def test_a_hundred_times_broken_and_made_again(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 2) as crew:
        crew.each("call", "Abort")
        before = crew.each("held")
        for _ in range(100):
            assert crew.connect() == [SUCCESS, SUCCESS]
            crew[0].begin("AllReduce", ONE, 4, dtype="float32")
            assert crew[1].call("Abort")[0] == SUCCESS
            assert crew[0].error_within(PATIENCE, REMOTE) is not None
            assert crew[0].call("Abort")[0] == SUCCESS
            assert crew[0].ready(PATIENCE)
        for rank in (0, 1):
            # The stream's thread, and the one of the last id.
            assert crew[rank].settles(before[rank], PATIENCE, threads=1), (before[rank], crew[rank].held())
