"""Operations that are put together and never posted: the thread's NCCL group is closed, and its communicator waits."""

from __future__ import annotations

import pytest

BACKENDS = [pytest.param(name, marks=pytest.mark.backend(name)) for name in ("nccl", "nccl2")]
CASES = ("captured", "ending", "outside", "queued", "late", "user", "user_inside")


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_put_together_leaves_no_group_open(launch, backend):
    with launch("worlds_open:opened", 2, config={"backend": backend, "cases": CASES}, timeout=240) as ranks:
        for told in ranks.wait("values"):
            assert told.fields["wrong"] == []
            assert told.fields["gone"], "communicators of worlds that are over"
        for number, case in enumerate(CASES):
            after = ranks.events(0, "after")[number].fields
            seen = ranks.events(0, "broken")[number].fields
            assert after == {"case": case, "depth": 0, "open": 0}
            assert seen["kind"] == ("none" if case.startswith("user") else "BrokenWorldException"), seen
        (late,) = ranks.events(0, "late")
        assert late.fields["aborts"] == 0, "NCCL runs over the communicators of a group that is closed"
        assert {each.code for each in ranks.join().values()} == {0}
