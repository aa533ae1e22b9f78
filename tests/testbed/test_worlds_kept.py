"""Whoever keeps a work, or an exception that went through its frames, may keep it for longer than the world."""

from __future__ import annotations

import pytest

BACKENDS = [pytest.param(name, marks=pytest.mark.backend(name)) for name in ("nccl", "nccl2")]


@pytest.mark.parametrize("what", ["exception", "finished", "pending", "subgroup", "batch", "functional"])
@pytest.mark.parametrize("end", ["rejoin", "close"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_kept_of_a_world_that_is_over_ends_nobody(launch, backend, end, what):
    config = {"backend": backend, "end": end, "what": what}
    with launch("worlds_kept:kept", 2, config=config, timeout=180) as ranks:
        first, second = ranks.wait("over")
        assert first.fields["kept"]
        for told in (first, second):
            assert told.fields["wrong"] == []
            if told.fields["needed"] and told.fields["kept"]:
                assert told.fields["alive"], "a work needs its backend"
        for told in ranks.wait("gone"):
            assert told.fields["gone"], "it is freed when the last work is"
        assert {each.code for each in ranks.join().values()} == {0}
