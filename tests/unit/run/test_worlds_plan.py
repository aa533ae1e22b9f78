"""What a worlds plan says of ranks and members; any plan can be written as a file and read back."""

from __future__ import annotations

import dataclasses

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from multiworld.run.worldsfile.parse import parse
from multiworld.run.worldsfile.worlds_plan import LAUNCHER, PlannedMember, PlannedWorld, Role, WorldsPlan

ROLES = st.dictionaries(
    st.text("abcXYZ019_.-", min_size=1, max_size=12), st.integers(1, 9), min_size=1, max_size=4
)
# Any text may name a world, but for what makes a pattern of it.
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).filter(
    lambda name: "{i}" not in name
)
SECONDS = st.none() | st.floats(0.5, 1e6, allow_nan=False)
WORDS = st.text("abc:/.0123456789 é'\"\\", min_size=1, max_size=20)


@st.composite
def plans(draw):
    """Any plan that keeps the rules."""
    roles = [Role(name, count, 0) for name, count in draw(ROLES).items()]
    members = [PlannedMember(role.name, index) for role in roles for index in range(role.count)]
    worlds, names = [], draw(st.lists(NAMES, unique=True, max_size=5)) if len(members) > 1 else []
    for number, name in enumerate(names):
        worlds.append(
            PlannedWorld(
                name=name,
                members=tuple(draw(st.permutations(members))[: draw(st.integers(2, len(members)))]),
                backend=draw(WORDS),
                store=draw(st.just(LAUNCHER) | WORDS),
                timeout=draw(SECONDS),
                hang_timeout=draw(SECONDS),
                device=draw(st.none() | st.sampled_from(["cpu", "cuda:{local_rank}"])),
                after=tuple(draw(st.lists(st.sampled_from(names[:number]), unique=True))) if number else (),
                line=0,
            )
        )
    return WorldsPlan(tuple(roles), tuple(worlds), "plan.toml")


def render(plan, *, short):
    """The plan as a file; `short` leaves out what has a default."""
    worlds = {}
    for world in plan.worlds:
        said = {
            "members": [str(member) for member in world.members],
            "backend": world.backend,
            "store": world.store,
            "timeout": world.timeout,
            "hang_timeout": world.hang_timeout,
            "device": world.device,
            "after": list(world.after),
        }
        defaults = {"backend": "gloo", "store": LAUNCHER, "after": []} if short else {}
        worlds[world.name] = {
            key: value for key, value in said.items() if value is not None and defaults.get(key) != value
        }
    roles = {
        role.name: role.count if number % 2 else {"count": role.count}
        for number, role in enumerate(plan.roles)
    }
    return tomli_w.dumps({"roles": roles, **({"worlds": worlds} if worlds or not short else {})})


def without_lines(plan):
    return dataclasses.replace(
        plan,
        # tomli_w writes plain values before tables, so the order may change; the ranks change with it.
        roles=tuple(
            sorted((dataclasses.replace(role, line=0) for role in plan.roles), key=lambda role: role.name)
        ),
        worlds=tuple(dataclasses.replace(world, line=0) for world in plan.worlds),
    )


@given(plans(), st.booleans())
def test_what_is_written_is_read(plan, short):
    text = render(plan, short=short)
    read = parse(text, "plan.toml")
    assert without_lines(read) == without_lines(plan)
    lines = text.split("\n")
    for role in read.roles:
        assert role.name in lines[role.line - 1]
    for world in read.worlds:
        assert lines[world.line - 1].startswith("[worlds.")


@given(plans())
def test_each_rank_is_one_member(plan):
    everyone = [plan.member_at(rank) for rank in range(plan.world_size)]
    assert len(set(everyone)) == plan.world_size == sum(role.count for role in plan.roles)
    assert [plan.rank_of(member) for member in everyone] == list(range(plan.world_size))
    assert all(0 <= member.index < plan.role_size(member.role) for member in everyone)
    for world in plan.worlds:
        ranks = [plan.rank_of(member) for member in world.members]
        assert len(set(ranks)) == len(ranks)
        for rank in range(plan.world_size):
            assert (world in plan.worlds_of(rank)) == (rank in ranks)
            assert (world.name in plan.worlds_without([rank])) == (rank in ranks)


@given(plans(), st.sets(st.integers(-3, 50)))
def test_worlds_that_cannot_be_whole(plan, gone):
    lost = plan.worlds_without(gone)
    there = [rank for rank in range(plan.world_size) if rank not in gone]
    assert set(lost) | {world.name for world in plan.worlds} == {world.name for world in plan.worlds}
    for world in plan.worlds:
        whole = all(plan.rank_of(member) in there for member in world.members)
        assert whole == (world.name not in lost)


def test_ranks_are_dealt_in_the_files_order():
    plan = parse(
        '[roles]\nhub = 1\nworker = 8\n[worlds."w{i}"]\nfor = "worker"\nmembers = ["hub:0", "worker:{i}"]\n',
        "f",
    )
    assert plan.world_size == 9
    assert (plan.rank_of(PlannedMember("hub", 0)), plan.rank_of(PlannedMember("worker", 0))) == (0, 1)
    assert plan.member_at(8) == PlannedMember("worker", 7)
    assert [world.name for world in plan.worlds_of(0)] == [f"w{i}" for i in range(8)]
    assert [world.name for world in plan.worlds_of(3)] == ["w2"]
    assert plan.worlds_without({3, 8}) == ("w2", "w7")
    assert (plan.role_size("worker"), plan.role_size("nobody")) == (8, 0)
    for rank in (-1, 9):
        with pytest.raises(ValueError, match=f"has ranks 0 to 8, not {rank}"):
            plan.member_at(rank)
    for member in (PlannedMember("hub", 1), PlannedMember("worker", -1), PlannedMember("nobody", 0)):
        with pytest.raises(ValueError, match=f"has no member {member}"):
            plan.rank_of(member)
