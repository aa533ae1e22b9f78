"""Whether the other launchers have lost a node too."""

from __future__ import annotations

import json

import pytest
from test_run_seats import formed

from multiworld.run.nodes import rank_assignment, votes

FIVE = formed("a", "b", "c", "d", "e")


def said(name, membership, *lost):
    """What a node says, as it comes over a link."""
    says = votes.says(membership, lambda nodes: [each for each in nodes if each not in lost])
    return json.loads(json.dumps({"node": name, **says}))


@pytest.mark.parametrize(
    ("others", "agreed"),
    [
        ([said("b", FIVE, "e"), said("c", FIVE, "e")], {"e"}),
        ([said("b", FIVE, "e"), said("b", FIVE, "e")], set()),
        ([said("b", FIVE, "e"), said("c", FIVE)], set()),
        ([said("b", FIVE, "e"), said("a", FIVE, "e")], set()),
        ([said("b", FIVE, "d", "e"), said("c", FIVE, "d")], set()),
        ([said("b", FIVE, "e"), said("x", FIVE, "e")], set()),
        ([said("b", FIVE, "e"), said("c", rank_assignment.leave(FIVE, {"e"}))], {"e"}),
        ([said("b", FIVE, "e"), said("c", None)], set()),
        ([said("b", FIVE, "e"), {"node": "c"}, {"node": ["c"], "epoch": 1, "sees": []}], set()),
        ([said("b", FIVE, "e"), {"node": "c", "epoch": "1", "sees": []}], set()),
        ([said("b", FIVE, "e"), {"node": "c", "epoch": 1, "sees": None}], set()),
    ],
)
def test_a_node_is_lost_where_a_majority_has_lost_it(others, agreed):
    assert votes.agreed(FIVE, "a", {"e"}, others) == agreed


def test_what_was_said_of_an_earlier_membership_does_not_count():
    """The node may have been admitted since."""
    later = rank_assignment.admit(FIVE, [FIVE.node("e")])
    earlier = rank_assignment.leave(FIVE, {"e"})
    assert earlier.epoch == later.epoch
    later = rank_assignment.admit(later, [])
    assert votes.agreed(later, "a", {"e"}, [said("b", earlier), said("c", earlier)]) == set()
    assert votes.agreed(later, "a", {"e"}, [said("b", later, "e"), said("c", later, "e")]) == {"e"}
