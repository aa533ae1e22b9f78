"""Worlds on NCCL whose members all live: values of every operation in every way, side by side, again, to their end."""

from __future__ import annotations

import time

import pytest

BACKENDS = [pytest.param(name, marks=pytest.mark.backend(name)) for name in ("nccl", "nccl2")]


def until(done, what, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def events(ranks, name):
    return [each.fields for each in ranks.wait(name)]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_operation_in_every_way(launch, backend, size):
    with launch("worlds:values", size, config={"backend": backend}, timeout=180) as ranks:
        for found in events(ranks, "values"):
            assert found["wrong"] == []
        for found in events(ranks, "closed"):
            assert found["freed"]
        assert {each.code for each in ranks.join().values()} == {0}


@pytest.mark.parametrize("backend", BACKENDS)
def test_worlds_side_by_side(launch, backend):
    with launch("worlds:several", 2, config={"backend": backend}, timeout=180) as ranks:
        for found in events(ranks, "values"):
            assert found["wrong"] == []
            assert not any(found["alive"])
            assert found["worlds"] == ["a", "b", "c", "g", "mixed"]
        for found in events(ranks, "closed"):
            assert found["comms"] == 0
        assert {each.code for each in ranks.join().values()} == {0}


@pytest.mark.parametrize("backend", BACKENDS)
def test_leaving_and_rejoining_leaks_nothing(launch, backend):
    cycles = 20
    # With a flight recorder the first error that a watchdog sees costs 100 MB: the symbols for its stack trace.
    env = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_FR_BUFFER_SIZE": "0"}
    config = {"backend": backend, "cycles": cycles}
    with launch("worlds:again", 2, config=config, env=env, timeout=180) as ranks:
        before = {each.rank: each.fields for each in ranks.wait("before")}
        for told in ranks.wait("after"):
            after = told.fields
            assert after["wrong"] == []
            assert after["generations"] == sorted(set(after["generations"]))
            assert len(after["generations"]) == cycles
            assert after["comms"] == before[told.rank]["comms"] == 1
            for what, slack in (("python_threads", 4), ("threads", 6), ("fds", 6), ("kb", 20_000)):
                assert after[what] <= before[told.rank][what] + slack, what
        for found in events(ranks, "closed"):
            assert found["comms"] == 0


@pytest.mark.parametrize("how", ["idle", "pending", "thread"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_program_that_ends_with_worlds_open_ends_well(launch, backend, how):
    with launch("worlds:ends", 2, config={"backend": backend, "how": how}) as ranks:
        ranks.wait("ready")
        ranks.tell("go")
        exits = ranks.join(timeout=60)
        assert [(each.code, each.signal) for each in exits.values()] == [(0, None), (0, None)], [
            ranks.stderr(0)[-3000:], ranks.stderr(1)[-3000:]
        ]  # fmt: skip


@pytest.mark.parametrize(
    "said",
    ["failure detected by watchdog", "Stack trace of the failed collective: "],
    ids=["before", "after"],
)
@pytest.mark.backend("nccl")
def test_a_program_that_ends_while_torch_resolves_a_stack_ends_well(launch, said):
    """Torch imports its compiler for it, on a thread that Python ends inside of C++: SIGABRT."""
    env = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_FR_BUFFER_SIZE": "2000"}
    with launch("worlds_ends:traced", 2, env=env) as ranks:
        ranks.wait("failing")
        until(lambda: all(said in ranks.stderr(rank) for rank in (0, 1)), said)
        ranks.tell("go")
        assert not any(found["compiler"] for found in events(ranks, "loaded"))
        exits = ranks.join(timeout=60)
        assert [(each.code, each.signal) for each in exits.values()] == [(0, None), (0, None)], [
            ranks.stderr(0)[-3000:], ranks.stderr(1)[-3000:]
        ]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_devices(launch, backend):
    with launch("worlds:devices", 2, config={"backend": backend}) as ranks:
        for told in ranks.wait("devices"):
            found = told.fields
            assert found["told"] == {"current": f"cuda:{told.rank + 2}", "plain": "cuda:0"}
            wrong = {name: kind for name, kind in found["errors"].items() if kind != "WrongDeviceError"}
            # torch itself says it of a bare call
            assert set(wrong) <= {"bare cpu"}
            assert wrong.get("bare cpu") in {None, "RuntimeError"}
            assert found["value"] == [1.0] * 6
            assert found["message"] == [2.0 - told.rank] * 6
            assert found["state"] == "active"
