"""What `World.wait_active` says to do about a world that does not become active."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from multiworld.errors import JoinTimeoutError
from multiworld.events import State
from multiworld.world import World


@pytest.mark.parametrize(
    ("state", "assigned", "on_loss", "step"),
    [
        (State.BROKEN, False, "break", "Call rejoin()"),
        (State.BROKEN, True, "break", "Call reform(), or join with on_loss='shrink'"),
        (State.BROKEN, True, "shrink", "See why a member is missing"),
        (State.JOINING, True, "break", "See why a member is missing"),
        (State.JOINING, False, "break", "See why a member is missing"),
    ],
)
def test_the_next_step_is_one_that_helps(state, assigned, on_loss, step):
    world = SimpleNamespace(
        name="w",
        generation=1,
        state=state,
        breakage=None,
        _changed=threading.Condition(),
        _plan=SimpleNamespace(assigned=assigned, on_loss=on_loss),
    )
    with pytest.raises(JoinTimeoutError) as raised:
        World.wait_active(world, 0)
    assert raised.value.next_step.startswith(step)
