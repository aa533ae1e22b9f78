"""What CUDA does to all of a process in an NCCL world's fault: its lock is held, or the device is of no more use."""

from __future__ import annotations

import pytest

BACKENDS = [pytest.param(name, marks=pytest.mark.backend(name)) for name in ("nccl", "nccl2")]
LOCK = 2500  # ms; an H100 showed 2200; the end of a program waits about as long for its aborts
NOISE = 2300  # ms of a busy machine, less than a second lock would take
SOON = 15.0  # seconds; some tenths of one in truth


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_worlds_are_held_up_by_the_lock_of_an_abort_and_by_nothing_else(launch, backend):
    config, env = {"backend": backend, "timeout": 60}, {"M8D_BED_ABORT_LOCK_MS": str(LOCK)}
    with launch("worlds_cuda:locked", 3, config=config, env=env, timeout=180) as ranks:
        ranks.wait("ready")
        at = ranks.kill(1)
        (seen,) = ranks.wait("broken", ranks=[0])
        assert seen.fields["kind"] == "BrokenWorldException", seen
        assert seen.at - at < SOON
        (slowest,) = (told.fields for told in ranks.wait("slowest", ranks=[0]))
        print(f"\n{launch.build.name} {backend}: {slowest}")  # noqa: T201
        assert slowest["aborts"] == 1
        assert 0.9 * LOCK < slowest["lives"] < LOCK + NOISE
        assert slowest["gloo"] < NOISE
        assert slowest["python"] < NOISE, "a thread kept the GIL while it waited for CUDA's lock"
        assert {each.code for each in ranks.join(ranks=[0, 2]).values()} == {0}


@pytest.mark.parametrize(
    ("error", "words"), [(710, "device-side assert triggered"), (700, "illegal memory access")]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_device_that_is_of_no_more_use_breaks_its_worlds_and_no_others(launch, backend, error, words):
    config, env = {"backend": backend, "timeout": 60, "code": 3}, {"M8D_BED_DEVICE_ERROR": str(error)}
    with launch("worlds_cuda:sticky", 2, config=config, env=env, timeout=120) as ranks:
        for name in ("broken", "later"):
            for told in ranks.wait(name):
                assert told.fields["kind"] == "BrokenWorldException", told
                assert told.fields["ms"] < SOON * 1000, told
        # A patched torch aborts by itself: the other member may have been heard first.
        assert words in ranks.events(1, "told")[0].fields["text"]
        for told in ranks.wait("beside"):
            assert told.fields["right"], told
        for told in ranks.wait("ends"):
            exits = ranks.join(ranks=[told.rank], timeout=60)
            assert exits[told.rank].code == 3, ranks.stderr(told.rank)[-3000:]
