"""Every interleaving of a few processes in worlds that shrink and grow, with faults at every step."""

from __future__ import annotations

import pytest
from kits.explorekit import Explorer, stuck

ALL = ("death", "server", "timeout")


@pytest.mark.parametrize(
    ("size", "least", "most", "claims", "faults", "kinds"),
    [
        (2, 1, 2, 3, 2, ALL),
        (2, 2, 2, 3, 2, ALL),
        (3, 1, 3, 2, 1, ALL),
        (3, 2, 3, 2, 1, ALL),
        (3, 1, 2, 2, 1, ALL),
        (3, 1, 3, 2, 2, ALL),  # 167,000 states
    ],
)
def test_no_step_leads_astray_and_every_state_has_a_way_out(size, least, most, claims, faults, kinds):
    """One roster for each number, no two generations that last, and one that works in the end."""
    explorer = Explorer(size, least, most, claims=claims, faults=faults, kinds=kinds)
    steps = explorer.explore()
    assert stuck(explorer, steps) == []
    assert any(each.phase == "active" for state in steps for each in state.processes)


@pytest.mark.parametrize(
    ("size", "least", "most", "claims", "faults", "kinds", "leaver"),
    [
        (2, 1, 2, 3, 2, ALL, None),
        (3, 1, 3, 2, 0, (), None),
        (3, 1, 3, 2, 1, ("death",), None),
        (3, 1, 2, 2, 1, ("death",), None),
        (2, 1, 2, 3, 1, ALL, 0),
        (3, 1, 3, 2, 0, (), 1),
    ],
)
def test_changes_beside_a_working_generation(size, least, most, claims, faults, kinds, leaver):
    """The same, where newcomers are let in, and members leave, while a generation works."""
    explorer = Explorer(
        size, least, most, claims=claims, faults=faults, kinds=kinds, advances=True, leaver=leaver
    )
    steps = explorer.explore()
    assert stuck(explorer, steps) == []
    assert any(each.after for state in steps for each in state.processes), "one has entered the next"
    assert leaver is None or any(each.phase == "gone" for state in steps for each in state.processes)
