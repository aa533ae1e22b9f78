"""Every fault knob does what it says, as torch sees it. (That NCCL's own functions do: test_nccl_faults.py.)"""

from __future__ import annotations

import re

import pytest
from bed.knobs import COUNTERS, KINDS, KNOBS

# As little as possible of torch's own error handling: nothing is aborted, dumped or killed unless a test wants it.
QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    # With a flight recorder torch spends a second on a stack trace before it aborts.
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
}
CLEAN_UP = {**QUIET, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}
HANG = 0.6  # seconds that something is told to hang
FOR_EVER = 600_000  # ms: until the knob is changed
LESS = HANG * 1000 * 0.95  # ms: at least that long it must have been


@pytest.fixture
def legacy(build) -> str:
    """What the build calls the implementation that the knobs are shown on: every build has it."""
    return "nccl" if build.nccl_default_is == "legacy" else "nccl-legacy"


@pytest.fixture
def go(launch, legacy):
    """Run a program with two ranks to its end, without destructors; give what each rank told, and the output."""

    def run(program, *, env=QUIET, size=2, allow_refused=False, **config):
        config = {"backend": legacy, "exit": "hard", "together": True, **config}
        with launch(f"knobs:{program}", size, config=config, env=env, allow_refused=allow_refused) as ranks:
            ranks.wait("through")
            ranks.tell("end")
            ranks.wait("ended")
            told = [{each.name: each.fields for each in ranks.events(rank)} for rank in range(size)]
            output = "".join(ranks.stderr(rank) for rank in range(size))
        return told, output

    return run


def test_the_table_is_the_library_s(go):
    told, _ = go("counters")
    for rank in told:
        seen = rank["seen"]
        assert {*seen["info"]["knobs"]} == {*KNOBS}
        assert {*COUNTERS} <= {*seen["info"]["counters"]}
        assert (seen["enqueues"], seen["launches"], seen["comms_made"], seen["aborts"], seen["stubs"]) == (
            2,
            2,
            0,
            0,
            0,
        )


def test_abort_hangs_before_it_ends_what_is_pending(go):
    told, _ = go("abort", knobs={"ABORT_HANG_PHASE": "before", "ABORT_HANG_MS": int(HANG * 1000)})
    for rank in told:
        assert rank["aborted"]["ms"] >= LESS
        assert rank["seen"]["aborts"] >= 1
        assert rank["seen"]["ms"] >= LESS


def test_abort_hangs_after_it_has_ended_what_is_pending(go):
    told, _ = go("abort", knobs={"ABORT_HANG_PHASE": "after", "ABORT_HANG_MS": FOR_EVER}, release=True)
    for rank in told:
        assert rank["seen"]["aborts"] >= 1
        assert rank["seen"]["hangs"]
        assert rank["aborted"]["ms"] < FOR_EVER / 2


def test_abort_fails(launch, legacy):
    """What torch makes of it differs: an exception here, in its watchdog, or both, whichever comes first."""
    config = {"backend": legacy, "exit": "hard", "knobs": {"ABORT_RESULT": 3, "TRACE": 1}}
    with launch("knobs:abort", 2, config=config, env=QUIET) as ranks:
        ranks.join()
        for rank in (0, 1):
            assert re.search(r"ncclCommAbort\(\w+\) -> 3", ranks.stderr(rank))


@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        ("", ["AllReduce", "Broadcast", "Reduce", "AllGather", "ReduceScatter", "Send", "Recv"]),
        ("AllReduce", ["AllReduce"]),
        ("Broadcast", ["Broadcast"]),
        ("Reduce", ["Reduce"]),
        ("AllGather", ["AllGather"]),
        ("ReduceScatter", ["ReduceScatter"]),
        ("Send", ["Send"]),
        ("Recv", ["Recv"]),
    ],
)
def test_enqueue_fails_by_kind(go, kind, calls):
    told, _ = go("enqueue", kind=kind, calls=calls, pair=True)
    for rank in told:
        for call in calls:
            assert not rank[call]["ok"], call
            assert "remote process exited" in rank[call]["text"]


def test_enqueue_fails_leaves_other_kinds_alone(go):
    told, _ = go("enqueue", kind="Send", calls=["AllReduce", "Broadcast", "AllGather"])
    assert all(rank[call]["ok"] for rank in told for call in ("AllReduce", "Broadcast", "AllGather"))
    assert {"Send", "Recv"} <= {*KINDS}


def test_enqueue_fails_from_the_nth(go):
    told, _ = go("nth")
    for rank in told:
        assert [rank[f"call {n}"]["ok"] for n in range(4)] == [True, True, False, False]
        assert "unhandled system error" in rank["call 2"]["text"]
        assert rank["after"]["ok"]
        assert rank["after"]["result"] == 2.0


def test_group_end_fails(go):
    told, _ = go("group_end")
    for rank in told:
        assert not rank["inside"]["ok"]
        assert "invalid usage" in rank["inside"]["text"]


def test_init_fails(go):
    told, _ = go("init", knobs={"INIT_RESULT": 2})
    for rank in told:
        assert not rank["inside"]["ok"]
        assert "unhandled system error" in rank["inside"]["text"]
        assert rank["made"]["result"] == 0


def test_init_hangs(go):
    told, _ = go("init", knobs={"INIT_HANG_MS": int(HANG * 1000)})
    for rank in told:
        assert rank["inside"]["ok"]
        assert rank["inside"]["ms"] >= LESS


def test_async_error(go):
    told, output = go("async_error", env=CLEAN_UP)
    for rank in told:
        assert rank["seen"] == {"aborted": True, "ended": True}
    assert "internal error" in output


def test_operations_hang(go):
    told, _ = go("hang")
    for rank in told:
        assert rank["seen"]["later"] == [False, False]
        assert rank["pending"]["ended"]


@pytest.mark.parametrize(
    ("knobs", "seconds", "noticed"),
    [
        ({}, 30.0, True),
        ({"NO_DETECT": "1"}, 1.5, False),
        ({"DETECT_DELAY_MS": "900"}, 30.0, True),
        ({"REMOTE_RESULT": "2"}, 30.0, True),
    ],
    ids=["seen", "not seen", "seen late", "another code"],
)
def test_a_peer_s_death(launch, legacy, knobs, seconds, noticed):
    env = {**CLEAN_UP, **{f"M8D_BED_{name}": value for name, value in knobs.items()}}
    config = {"backend": legacy, "seconds": seconds, "exit": "hard"}
    with launch("knobs:death", 2, config=config, env=env) as ranks:
        ranks.wait("ready")
        at = ranks.kill(1)
        ranks.tell("killed", ranks=[0])
        (seen,) = ranks.wait("seen")
        output = ranks.stderr(0)
    assert seen.fields["noticed"] is noticed
    if "DETECT_DELAY_MS" in knobs:
        assert seen.at - at >= 0.85
    if noticed:
        expected = "unhandled system error" if "REMOTE_RESULT" in knobs else "remote process exited"
        assert expected in output


def test_a_fault_of_one_communicator(go):
    told, _ = go("one_communicator")
    for rank in told:
        assert len({*rank["ids"]["ids"]}) == 2
        assert not rank["that one"]["ok"]
        assert rank["the other"]["ok"]
    assert told[0]["ids"] == told[1]["ids"]


def test_non_blocking_communicators(go):
    env = {**QUIET, "TORCH_NCCL_USE_COMM_NONBLOCKING": "1", "M8D_BED_NONBLOCKING_MS": str(int(HANG * 1000))}
    told, _ = go("non_blocking", env=env)
    for rank in told:
        assert rank["seen"]["value"] == 2.0
        assert rank["seen"]["ms"] >= LESS


def test_devices_and_memory(go):
    told, _ = go("machine", env={"M8D_BED_DEVICES": "3", "M8D_BED_MEM_MB": "512"}, size=1)
    assert told[0]["seen"] == {"devices": 3, "megabytes": 512}


@pytest.mark.parametrize(
    ("error", "words"), [("", "device-side assert triggered"), ("700", "illegal memory access")]
)
def test_a_device_error_is_seen_by_every_later_call(go, error, words):
    env = {**QUIET, "M8D_BED_DEVICE_ERROR": error} if error else QUIET
    told, output = go("device_error", size=1, env=env)
    for later in ("synchronize", "allocate", "copy", "again"):
        assert not told[0][later]["ok"]
        assert words in told[0][later]["text"]
    assert "as told" in output


def test_no_threads(go):
    told, _ = go("no_threads", size=1)
    assert "can't start new thread" in told[0]["refused"]["text"]
    assert told[0]["own"]["result"] == [1.0, 1.0]
    assert told[0]["allowed"]["ok"]


def test_a_refused_kernel_fails_and_is_named(go):
    told, _ = go("kernel", size=1, allow_refused=True)
    assert not told[0]["kernel"]["ok"]
    assert told[0]["refused"]["count"] == 1
    with pytest.raises(AssertionError, match=r"rank 0: a kernel it refuses: .*MulFunctor"):
        go("kernel", size=1)


def test_kernels_can_be_ignored(go):
    told, _ = go("kernel", size=1, env={"M8D_BED_KERNELS": "ignore"}, allow_refused=True)
    assert told[0]["kernel"]["ok"]


def test_a_stub_that_is_hit_fails_with_its_name(go):
    with pytest.raises(
        AssertionError, match="rank 0: a function it has only as a stub: cudaGraphicsUnmapResources"
    ):
        go("stub", size=1)
    told, _ = go("stub", size=1, allow_refused=True)
    assert told[0]["stub"]["result"] != 0
    assert told[0]["stub"]["stubs"] == ["cudaGraphicsUnmapResources"]
    assert told[0]["stub"]["count"] == 1


def test_a_knob_that_does_not_exist(launch):
    with launch("knobs:machine", 1, env={"M8D_BED_ABORT_HANGS": "1"}) as ranks:
        assert ranks.join()[0].code == 1
        assert "M8D_BED_ABORT_HANGS" in ranks.stderr(0)


def test_trace_and_warnings(go):
    _, traced = go("counters", env={**QUIET, "M8D_BED_TRACE": "1"})
    assert "ncclAllReduce" in traced
    _, silent = go("nth", env={**QUIET, "M8D_BED_WARN": "0"})
    _, loud = go("nth")
    assert "fails, as told" in loud
    assert "fails, as told" not in silent
