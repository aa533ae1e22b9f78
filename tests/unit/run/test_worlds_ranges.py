"""Roles and worlds of a range: which sizes they have, who is started at first, and who can be missed."""

from __future__ import annotations

import pytest

from multiworld.errors import InvalidJoinError
from multiworld.joinall.launcher_client import AssignedWorld
from multiworld.run.errors import PlanError
from multiworld.run.worldsfile.parse import parse

ROLES = '[roles]\nhub = 1\ntrainer = "2:4"\n'


def read(worlds, roles=ROLES):
    return parse(roles + worlds, "x.toml")


def world(line, members='"trainer:*"'):
    return read(f"[worlds.w]\nmembers = [{members}]\n{line}\n").worlds[0]


def test_a_role_of_a_range():
    hub, trainer = read("").roles
    assert (hub.count, hub.needed, hub.least) == (1, 1, 0)
    assert (trainer.count, trainer.needed, trainer.least) == (4, 2, 2)
    assert [role.name for role in read("").changing] == ["trainer"]
    assert (read("").least_workers, read("").world_size) == (3, 5)
    assert read("", '[roles]\na = "3:3"\nb = { count = "1:2" }\n').changing[0].name == "b"


@pytest.mark.parametrize("count", ['"4:2"', '"0:2"', '"2"', '"2:"', '"1:2:3"', '"1:100001"', '" 1:2"'])
def test_no_range(count):
    with pytest.raises(PlanError, match=r"^x.toml:2: role 'a': count .*MIN:MAX"):
        parse(f"[roles]\na = {count}\n", "x.toml")


def test_a_world_has_the_range_of_its_members():
    assert (world("").least, world("").most) == (2, 4)
    assert (world("", '"hub:0", "trainer:*"').least, world("", '"hub:0", "trainer:*"').most) == (3, 5)
    # Which two of the four are there is not known: one of the first three is at least.
    assert (world("", '"trainer:0", "trainer:1", "trainer:2"').least) == 1
    assert (world("", '"trainer:0", "trainer:1"').least, world("", '"trainer:0", "trainer:1"').most) == (1, 2)
    fixed = read('[worlds.w]\nmembers = ["hub:0", "a:0"]\n', "[roles]\nhub = 1\na = 2\n").worlds[0]
    assert (fixed.least, fixed.most, fixed.assigned) == (0, 0, False)


def test_a_world_may_say_its_size():
    assert (world('size = "1:3"').least, world('size = "1:3"').most) == (1, 3)
    assert (world("size = 2").least, world("size = 2").most, world("size = 2").assigned) == (2, 2, True)
    assert (world("").last_call, world("last_call = 0").last_call, world("last_call = 2").last_call) == (
        None,
        0,
        2,
    )
    lone = read('[worlds.w]\nmembers = ["a:*"]\nsize = "1:3"\n', "[roles]\na = 3\n")
    assert (lone.worlds[0].assigned, lone.changing) == (True, ())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('size = "1:5"', "size '1:5', and 4 members"),
        ('size = "3:4"', "size '3:4', and its roles may be down to 2 members"),
        ('size = "many"', "size 'many'"),
        ("size = true", "size True"),
        ("last_call = -1", "last_call = -1. It is a number of seconds, at least 0,"),
    ],
)
def test_a_size_that_cannot_be(line, words):
    with pytest.raises(PlanError) as caught:
        world(line)
    assert (caught.value.line, words in str(caught.value)) == (6, True), caught.value


def test_a_last_call_needs_a_range():
    with pytest.raises(PlanError, match=r"^x.toml:5: last_call in a world of one size"):
        read('[worlds.w]\nmembers = ["a:*"]\nlast_call = 3\n', "[roles]\na = 3\n")


def test_what_a_run_of_one_node_begins_with():
    plan = read("", '[roles]\na = "1:3"\nhub = 1\nb = "2:4"\n')
    assert [plan.starting(number) for number in range(4, 9)] == [
        (0, 3, 4, 5), (0, 1, 3, 4, 5), (0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5, 6), tuple(range(8)),
    ]  # fmt: skip
    assert (plan.ranks_of("b"), plan.ranks_of("nobody")) == (range(4, 8), range(0))


def test_who_can_be_missed():
    plan = read('[worlds.all]\nmembers = ["hub:0", "trainer:*"]\n[worlds.two]\nmembers = ["hub:0", "x:0"]\n'
                , '[roles]\nhub = 1\nx = 1\ntrainer = "2:4"\n')  # fmt: skip
    assert plan.missed({3, 5}) == ()
    assert plan.missed({3, 4, 5}) == (3, 4, 5)
    assert plan.missed({0, 2}) == (0,)
    # A world of a range goes on without them; the other one is of one size.
    assert plan.worlds_without({2, 3, 4, 5}) == ()
    assert plan.worlds_without({1}) == ("two",)


def assigned(**said):
    told = {"name": "w", "rank": None, "world_size": "1:4", "seat": "trainer:2", "last_call": None,
            "backend": "gloo", "store": "tcp://127.0.0.1:1", "launcher": True, **said}  # fmt: skip
    return AssignedWorld.read(told, "0")


class Model:
    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


def test_a_worker_joins_it_under_its_seat():
    plan = assigned().plan(None, None)
    assert (plan.least, plan.world_size, plan.seat, plan.assigned, plan.served) == (
        1,
        4,
        "trainer:2",
        True,
        True,
    )
    assert (plan.last_call, assigned(last_call=2).plan(None, None).last_call) == (30, 2)
    model = Model()
    assert assigned().plan(None, None, model).state is model
    with pytest.raises(InvalidJoinError, match="or a state with rank 1"):
        assigned(rank=1, world_size=2, seat=None).plan(None, None, model)
