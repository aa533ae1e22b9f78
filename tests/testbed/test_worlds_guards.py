"""What is set and said before the first NCCL world, and that it is true: the process stays, whatever torch's monitor
would do."""

from __future__ import annotations

import time

import pytest

BACKENDS = [pytest.param(name, marks=pytest.mark.backend(name)) for name in ("nccl", "nccl2")]
HEARTBEAT = 3  # seconds
HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_doctor_and_the_warning_say_what_is_done(launch, build, backend):
    with launch("worlds:guards", 2, config={"backend": backend}, timeout=120) as ranks:
        for told in ranks.wait("guards"):
            found = told.fields
            nccl = found["status"]["nccl"]
            newer = backend == "nccl2" or build.nccl_default_is == "nccl2"
            mode = "on" if build.patched and not newer else "guarded"
            default = "on" if build.patched and build.nccl_default_is == "legacy" else "guarded"
            assert nccl["mode"] == default
            assert found["environment"][HANDLING] == ("2" if build.patched else "0")
            assert bool(found["said"]) == (mode == "guarded")
            if mode == "guarded":
                assert ("N3" if newer else "D5") in found["said"][0]
                assert found["said"][0].count("\n") < 12
            abilities = {each["name"]: each for each in found["status"]["backends"]}
            for name, implementation in build.backends.items():
                assert abilities[name]["implementation"] == implementation
                assert abilities[name]["available"]
                assert abilities[name]["abort"] == "abort"
            assert abilities["nccl"]["survive"] == ("yes" if default == "on" else "guarded")
            assert found["wrong"] == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_process_lives_longer_than_torchs_monitor_would_let_it(launch, backend):
    env = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(HEARTBEAT), "TORCH_NCCL_COORD_CHECK_MILSEC": "200"}
    with launch("worlds_ends:lingers", 3, config={"backend": backend}, env=env, timeout=120) as ranks:
        ranks.wait("ready")
        ranks.kill(2)
        for told in ranks.wait("broken", ranks=[0, 1]):
            assert told.fields["kind"] == "BrokenWorldException"
        until = time.monotonic() + 2 * HEARTBEAT + 1
        while (left := until - time.monotonic()) > 0:
            assert set(ranks.alive()) >= {0, 1}
            time.sleep(min(left, 0.2))  # it is the passing of this time that is tried
        ranks.tell("go", ranks=[0, 1])
        for told in ranks.wait("values", ranks=[0, 1]):
            assert told.fields["wrong"] == []
        exits = ranks.join(ranks=[0, 1], timeout=60)
        assert {each.code for each in exits.values()} == {0}, ranks.stderr(0)[-2000:]
