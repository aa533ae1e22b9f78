"""NCCL worlds that change their size: the communicators of each generation, values, and worlds beside."""

from __future__ import annotations

import pytest

BACKENDS = [pytest.param(name, marks=pytest.mark.backend(name)) for name in ("nccl", "nccl2")]


def grown(launch, config, **more):
    """A third member for the world of ranks that run."""
    return launch("worlds_elastic:newcomer", 1, config={**config, "stores": 0, **more}, timeout=120)


def ended(*all_ranks):
    """All have worked with right values, their worlds beside have noticed nothing, and nothing is left."""
    for ranks in all_ranks:
        ranks.tell("stop")
    for ranks in all_ranks:
        for told in ranks.wait("worked"):
            assert told.fields["wrong"] == []
        for told in ranks.wait("closed"):
            assert told.fields["left"] == 0
        for told in ranks.events(name="in"):
            assert told.fields["over"] == 0, "the last generation's communicators are gone"
        for told in ranks.events(name="beside"):
            assert told.fields["wrong"] == []
            assert told.fields["rounds"] > 0
        assert {each.code for each in ranks.join().values()} == {0}


@pytest.mark.parametrize(("op", "how"), [("world", "reform"), ("group", "shrink")])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_others_go_on_without_a_member_that_is_killed(launch, backend, op, how):
    config = {"backend": backend, "op": op, "shrinks": how == "shrink"}
    with launch("worlds_elastic:shrinks", 2, config=config, timeout=120) as ranks:
        port = ranks.wait("store")[0].fields["port"]
        lost = {"backend": backend, "port": port, "stores": 0, "seat": "lost"}
        with launch("worlds_elastic:victim", 1, config=lost, timeout=120) as victim:
            ranks.tell("join")
            (ready,) = victim.wait("ready")
            assert ready.fields["wrong"] == []
            assert {told.fields["size"] for told in ranks.wait("ready")} == {3}
            victim.kill(0)
            told = [each.fields for each in ranks.wait("values")]
        for each in told:
            assert each["wrong"] == each["beside"]["wrong"] == []
            assert each["beside"]["rounds"] > 0
            assert each["comms"] == 3
            assert each["size"] == 2
            assert each["generation"] > each["old"][1]
            assert each["rank"] == each["old"][0] - (each["old"][0] > ready.fields["rank"]), "in order"
            assert sorted(each["seats"]) == ["s0", "s1"]
        for rank in (0, 1):
            first, *later = (each.fields["kind"] for each in ranks.events(rank, "broken"))
            assert first == "BrokenWorldException"
            assert {*later} <= {"BrokenWorldException", "WorldClosedError"}
        assert {each.fields["left"] for each in ranks.wait("closed")} == {0}
        assert {each.code for each in ranks.join().values()} == {0}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_newcomer_comes_in_and_a_member_leaves_while_the_world_works(launch, backend):
    with launch("worlds_elastic:grows", 2, config={"backend": backend}, timeout=120) as ranks:
        config = {"backend": backend, "port": ranks.wait("store")[0].fields["port"], "seat": "new"}
        ranks.wait("in")
        ranks.tell("hang", ranks=[1])  # so that they work on beside what is prepared
        with grown(launch, config) as new:
            ranks.wait("prepares")
            ranks.tell("go on", ranks=[1])
            (came,) = new.wait("in")
            assert came.fields["rank"] == 2, "newcomers come last"
            assert [each.fields["size"] for each in ranks.wait("in", count=2)] == [3, 3]
            for told in ranks.wait("entered"):
                assert told.fields["before"] > told.fields["wanted"], "made before it was entered"
                assert told.fields["steps"] > 0, "steps were worked meanwhile"
            ranks.tell("leave", ranks=[0])
            (left,) = ranks.wait("worked", ranks=[0])
            assert left.fields["state"] == "closed"
            (last,), (other,) = ranks.wait("in", ranks=[1], count=3), new.wait("in", count=2)
            assert last.fields["size"] == other.fields["size"] == 2
            assert last.fields["seats"] == ["s1", "new"]
            ended(ranks, new)


@pytest.mark.parametrize("where", ["before", "inside"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_newcomer_that_dies_as_it_connects_leaves_the_generation_that_works(launch, backend, where):
    # One that dies before it has told NCCL of itself is waited for inside ncclCommInitRank as long as NCCL does.
    stuck = int(where == "before")
    with launch("worlds_elastic:grows", 2, config={"backend": backend, "stuck": stuck}, timeout=120) as ranks:
        config = {"backend": backend, "port": ranks.wait("store")[0].fields["port"], "seat": "new"}
        began = [told.fields for told in ranks.wait("in")]
        if not stuck:
            ranks.tell("hang", ranks=[1])  # the newcomer and rank 0 wait for it
        with grown(launch, config, hangs=bool(stuck)) as new:
            new.wait("connecting")
            ranks.wait("prepares")
            new.kill(0)
        ranks.tell("count")
        for told, at_first in zip(ranks.wait("counted"), began, strict=True):
            now = told.fields
            assert now["generation"] == at_first["generation"]
            assert now["comms"] == now["wanted"] + stuck
            assert now["background"] == stuck
            # Early-close connections come a moment after the first world.
            assert now["fds"] <= at_first["fds"] + 6 + 10 * stuck
        with grown(launch, config) as new:
            sizes = [told.fields["size"] for told in (*ranks.wait("in", count=2), *new.wait("in"))]
            assert sizes == [3, 3, 3]
            ended(ranks, new)
