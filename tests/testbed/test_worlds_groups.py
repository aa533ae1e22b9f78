"""Groups inside NCCL worlds, what their works say, and an abort that torch gives up."""

from __future__ import annotations

import pytest

BACKENDS = [pytest.param(name, marks=pytest.mark.backend(name)) for name in ("nccl", "nccl2")]


def values(ranks):
    for told in ranks.wait("values"):
        assert told.fields["wrong"] == []
    assert {each.code for each in ranks.join().values()} == {0}


@pytest.mark.parametrize("backend", BACKENDS)
def test_members_with_different_groups_make_a_mesh(launch, backend):
    with launch("worlds_groups:meshes", 4, config={"backend": backend, "timeout": 20}, timeout=180) as ranks:
        values(ranks)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_group_is_split_again_after_its_parts_were_destroyed(launch, backend):
    with launch("worlds_groups:splits", 3, config={"backend": backend, "timeout": 20}, timeout=180) as ranks:
        values(ranks)


@pytest.mark.parametrize("backend", BACKENDS)
def test_futures_of_point_to_point_operations_and_batches(launch, backend):
    with launch("worlds_groups:futures", 2, config={"backend": backend}, timeout=180) as ranks:
        values(ranks)


@pytest.mark.backend("nccl")
def test_torchs_own_group_works_after_an_operation_that_torch_refused(launch):
    with launch("worlds_groups:refused", 2, config={"backend": "nccl"}, timeout=180) as ranks:
        for told in ranks.wait("values"):
            assert told.fields["state"] == "active"
        for rank in (0, 1):
            assert [each.fields["ok"] for each in ranks.events(rank, "refused")] == [False, False]
        values(ranks)


@pytest.mark.backend("nccl")
def test_a_groups_own_timeout_holds_for_its_operations(launch):
    with launch("worlds_groups:limits", 2, config={"backend": "nccl"}, timeout=180) as ranks:
        for told in ranks.wait("waited"):
            assert (told.fields["wrong"], told.fields["state"]) == ([], "active")
        (told,) = ranks.wait("broken", ranks=[0])
        assert told.fields["kind"] == "BrokenWorldException"
        assert told.fields["ms"] < 20_000, "its group's timeout is 2 s, the world's 60"


@pytest.mark.backend("nccl")
def test_an_abort_that_torch_gives_up_is_not_over(launch):
    # The patched builds wait 5 s for it; the operation is waited for after that.
    config = {"backend": "nccl", "timeout": 60, "later": 5.0}
    env = {"M8D_BED_ABORT_HANG_MS": "600000"}
    with launch("worlds_groups:gives_up", 2, config=config, env=env, timeout=180) as ranks:
        ranks.wait("pending", ranks=[0])
        ranks.kill(1)
        for name in ("first", "second"):
            (told,) = ranks.wait(name, ranks=[0])
            assert told.fields["kind"] == "BrokenWorldException", told
        (closed,) = ranks.wait("closed", ranks=[0])
        assert closed.fields["freed"] is False
        (later,) = ranks.wait("later", ranks=[0])
        assert later.fields["freed"] is True
        assert ranks.stderr(0).count("NCCL has not ended an operation") == 2
