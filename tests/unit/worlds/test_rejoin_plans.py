"""What a world is joined again with: the store that the program gives, or the one its launcher has moved to."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from multiworld._join import join
from multiworld._join.arguments import make_plan

LAUNCHERS, PROGRAMS = "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"


@pytest.fixture
def world():
    """A world that a launcher planned, whose store it serves."""
    plan = make_plan("w", 0, 2, LAUNCHERS, "gloo", 3.0, 3.0, None)
    return SimpleNamespace(_plan=dataclasses.replace(plan, served=True, present=lambda: LAUNCHERS))


def test_a_store_that_the_program_gives_is_served_by_its_members_from_then_on(world):
    plan = join._again(world, None, PROGRAMS)
    assert (plan.store, plan.served, plan.meets_at) == (PROGRAMS, False, PROGRAMS)
    world._plan = plan
    assert join._again(world, None, None).store == PROGRAMS
    assert join._again(world, 5.0, None).store == PROGRAMS


def test_a_store_to_which_the_launcher_has_moved_is_served_by_it(world):
    plan = join._again(world, None, PROGRAMS, planned=True)
    assert (plan.store, plan.served) == (PROGRAMS, True)
    assert plan.meets_at == LAUNCHERS, "the launcher is asked again"
    assert join._again(world, None, None).served
