"""One round of the rendezvous store, as a launcher follows it."""

from __future__ import annotations

from dataclasses import replace

from test_run_seats import formed, node

from multiworld.run.nodes import slots
from multiworld.run.nodes.slots import NodeRecord
from multiworld.run.nodes.store_round import StoreRound

ONE = formed("a")


class Notes:
    """A RendezvousStore's."""

    def __init__(self, *memberships):
        self.data = {f"membership/{n}": slots.to_json(each) for n, each in enumerate(memberships)}
        self.claimed = set()

    def add(self, name, number, data):
        if f"{name}/{number}" in self.data.keys() | self.claimed:
            return False
        self.data[f"{name}/{number}"] = data
        return True

    def read(self, name):
        return self.data.get(name)

    def newest(self, name, after):
        number = after
        while f"{name}/{number + 1}" in self.data:
            number += 1
        return None if number == after else (number, self.data[f"{name}/{number}"])


def epoch(number, **changes):
    return replace(ONE, epoch=number, **changes)


def test_the_newest_membership_is_adopted_once():
    round_ = StoreRound(Notes(ONE, epoch(2), epoch(3)), 0)
    assert round_.newer() == epoch(3)
    assert round_.number == 2
    assert round_.newer() is None


def test_the_first_membership_under_a_number_counts():
    notes = Notes(ONE)
    round_, other = StoreRound(notes, 0), StoreRound(notes, 0)
    assert round_.decide(epoch(2)) == epoch(2)
    assert round_.number == 1
    assert other.decide(epoch(2, store_node="x")) == epoch(2)
    assert other.number == 1


def test_a_number_that_was_claimed_and_not_written_is_passed_over():
    notes = Notes(ONE)
    round_ = StoreRound(notes, 0)
    notes.claimed = {"membership/1"}
    assert round_.decide(epoch(2)) == epoch(2)
    assert round_.number == 2
    notes.claimed = {"membership/3", "membership/4"}
    assert round_.decide(epoch(3)) is None
    assert round_.number == 2


def test_applications_are_read_and_what_was_decided_of_them_already_is_not_asked_again():
    notes = Notes(ONE)
    round_ = StoreRound(notes, 0)
    assert round_.applicants() == ([], [])
    for number, each in enumerate([node("b"), node("c", since=1), node("c", capacity=2, since=1)], 1):
        notes.data[f"apply/{number}"] = slots.to_json(NodeRecord(each))
    read, new = round_.applicants()
    assert read == [1, 2, 3]
    assert new == [node("b"), node("c", capacity=2, since=1)]
    round_.applications.take(read)
    notes.data["apply/4"] = {"no": "application"}
    notes.data["apply/5"] = slots.to_json(NodeRecord(node("a")))
    assert round_.applicants() == ([4, 5], []), "it was admitted since"
