"""Rounds of torch's rendezvous after the first one."""

from __future__ import annotations

import pytest

from multiworld.run.nodes.handlers import later_rendezvous


class Handler:
    """As that of torch 2.6: what it needs of the first round it keeps, and asserts in each later one."""

    def __init__(self, **kept):
        self.__dict__.update(kept)

    def next_rendezvous(self):
        return dict(self.__dict__)


@pytest.mark.parametrize(
    ("kept", "then"),
    [
        ({"_bootstrap_store_info": "of round 1", "_shared_tcp_store_server": None}, None),
        ({"_bootstrap_store_info": "of round 1", "_shared_tcp_store_server": "a server"}, "of round 1"),
    ],
)
def test_a_node_that_does_not_serve_the_workers_store_asks_for_its_address_anew(kept, then):
    assert later_rendezvous(Handler(**kept))["_bootstrap_store_info"] == then


def test_other_handlers_are_left_alone():
    assert later_rendezvous(Handler()) == {}
