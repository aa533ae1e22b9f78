"""NCCL itself fails in one world: while an operation is enqueued, in an abort that hangs or fails, while it connects.

The other worlds of the process, used by the same thread, go on with right values.
"""

from __future__ import annotations

import pytest

BACKENDS = [pytest.param(name, marks=pytest.mark.backend(name)) for name in ("nccl", "nccl2")]
SOON = 15.0  # seconds; some tenths of one in truth
OPERATIONS = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter",
    "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier", "send", "recv",
)  # fmt: skip
ONE_SIDED = {"broadcast", "reduce", "gather", "recv", "scatter"}
ENQUEUES = [
    *({"way": "method", "name": name} for name in OPERATIONS),
    *(
        {"way": way, "name": name}
        for way in ("bare", "aio", "async")
        for name in ("all_reduce", "send", "gather")
    ),
    {"way": "bare", "name": "batch"},
    {"way": "bare", "name": "batch", "after": 1},
    {"way": "bare", "name": "coalesced"},
    {"way": "bare", "name": "functional"},
    {"way": "method", "name": "send", "fault": "group_end"},
    {"way": "bare", "name": "batch", "fault": "group_end"},
    {"way": "bare", "name": "functional_all_to_all"},
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_operation_that_cannot_be_enqueued_breaks_its_world_only(launch, backend):
    with launch(
        "worlds_faults:enqueues", 2, config={"backend": backend, "cases": ENQUEUES}, timeout=300
    ) as ranks:
        for told in ranks.wait("values"):
            assert told.fields["wrong"] == []
            assert told.fields["comms"] == 2
        for rank in (0, 1):
            for number, case in enumerate(ENQUEUES):
                (after,) = (e.fields for e in ranks.events(rank, "after") if e.fields["case"] == number)
                (seen,) = (e.fields for e in ranks.events(rank, "broken") if e.fields["case"] == number)
                assert after["depth"] == 0, case
                assert after["healthy"] == "active", case
                if rank == 1 and case["name"] in ONE_SIDED and seen["kind"] == "none":
                    continue  # what it sent was taken
                assert seen["kind"] == "BrokenWorldException", (rank, case, seen)
                # In the first call of a functional collective torch loads 865 modules.
                late = 60_000 if case["name"].startswith("functional") else 20_000
                assert seen["ms"] < late, (rank, case, seen)
                assert seen["cause"] == "failed", (rank, case, seen)
        assert {each.code for each in ranks.join().values()} == {0}


@pytest.mark.parametrize("fault", ["before", "after", "fails", "graphs"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_abort_that_hangs_or_fails_holds_nobody_up(launch, backend, fault):
    config = {"backend": backend, "fault": fault}
    with launch("worlds_ends:aborts", 2, config=config, timeout=180) as ranks:
        ranks.wait("ready", ranks=[0])
        ranks.tell("lose", ranks=[1])
        (left,) = ranks.wait("left", ranks=[1])
        (seen,) = ranks.wait("broken", ranks=[0])
        assert seen.fields["kind"] == "BrokenWorldException", seen
        assert seen.at - left.at < SOON, "0.25 s of grace, and no more"
        (closed,) = ranks.wait("closed", ranks=[0])
        assert closed.fields["ms"] < SOON * 1000
        assert closed.fields["freed"] is (fault == "fails")
        ranks.tell("again")
        joins = [told.fields["ms"] for told in ranks.wait("next")]
        beside = []
        for told in ranks.wait("values"):
            assert told.fields["wrong"] == []
            assert not told.fields["alive"]
            beside.append(told.fields["slowest_ms"])
        print(  # noqa: T201
            f"\n{launch.build.name} {backend} {fault}: operations elsewhere took {max(beside):.0f} ms at most, "
            f"the next join {max(joins):.0f} ms"
        )
        ranks.tell("end")


@pytest.mark.parametrize("phase", ["before", "after"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_after_the_exception_the_tensor_is_the_callers(launch, backend, phase):
    # The abort returns after 1.5 s, and until then the operation writes: its stream goes on before that, or after.
    config = {"backend": backend, "bytes": 1 << 20, "messages": 0, "timeout": 60}
    env = {"M8D_BED_ABORT_HANG_MS": "1500", "M8D_BED_ABORT_HANG_PHASE": phase, "M8D_BED_ABORT_WRITES": "1"}
    with launch("risks:overwritten", 2, config=config, env=env, timeout=180) as ranks:
        ranks.wait("pending")
        ranks.kill(1)
        (told,) = ranks.wait("told", ranks=[0])
        assert told.fields["error"] == "BrokenWorldException", told
        (after,) = ranks.wait("after", ranks=[0])
        assert after.fields["kept"], "written after the exception"
        assert ranks.join(ranks=[0])[0].code == 0


@pytest.mark.parametrize("faulty", [0, 1])
@pytest.mark.parametrize("fault", ["fails", "hangs"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_communicator_that_cannot_be_made_fails_the_join_everywhere(launch, backend, fault, faulty):
    # Where it hangs the join lasts for its timeout, and where it fails for a moment.
    timeout = 4 if fault == "hangs" else 60
    config = {"backend": backend, "fault": fault, "faulty": faulty, "timeout": timeout}
    with launch("worlds_ends:makes", 2, config=config, timeout=180) as ranks:
        kinds = set()
        for told in ranks.wait("join"):
            assert not told.fields["ok"]
            assert "JoinError" in told.fields["bases"], told
            assert told.fields["ms"] < 30_000, told
            kinds.add(told.fields["error"])
        assert len(kinds) == 1, kinds
        for told in ranks.wait("left"):
            assert told.fields["nothing"], told
        ranks.tell("again")
        for told in ranks.wait("values"):
            assert told.fields["wrong"] == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_made_inside_a_world(launch, backend):
    with launch("worlds_ends:subgroups", 3, config={"backend": backend}, timeout=180) as ranks:
        for told in ranks.wait("ready"):
            assert told.fields["wrong"] == []
        at = ranks.kill(2)
        for told in ranks.wait("broken", ranks=[0, 1]):
            assert told.fields["kind"] == "BrokenWorldException", told
            assert told.at - at < SOON
        exits = ranks.join(ranks=[0, 1], timeout=60)
        assert {each.code for each in exits.values()} == {0}, exits


@pytest.mark.parametrize("fault", ["hangs", "error"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_failure_of_nccl_alone_breaks_the_world_though_everybody_lives(launch, backend, fault):
    # What hangs is found by its timeout, an error at once.
    config = {"backend": backend, "fault": fault, "timeout": 6 if fault == "hangs" else 60}
    with launch("worlds_ends:stalls", 2, config=config, timeout=180) as ranks:
        for told in ranks.wait("broken"):
            assert told.fields["kind"] == "BrokenWorldException", told
            assert told.fields["cause"] == "failed", told
            assert told.fields["ms"] < 30_000
        for told in ranks.wait("values"):
            assert told.fields["wrong"] == []
