"""Votes on a lost node: whether the other launchers have lost it too, where no store tells it. Pure.

A spare then takes a lost node's seat on its own. If nothing but the link between those two is broken, that
node is not cut off and its workers run: so a majority of the nodes must have lost it, long enough ago for it
to have ended its workers (`rank_assignment.cut_off`, `losses.Losses`): it sees a minority.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from multiworld.run.nodes.slots import Membership

__all__ = ["agreed", "says"]

_EPOCH, _SEES = "epoch", "sees"


def says(membership: Membership | None, runs: Callable[[list[str]], Iterable[str]]) -> dict[str, Any]:
    """Return what a launcher tells the others.

    Args:
        membership: that it knows; None: it is in none.
        runs: returns those of the nodes with these ids whose workers may run (`Losses.may_run`).
    """
    if membership is None:
        return {}
    return {_EPOCH: membership.epoch, _SEES: list(runs([node.id for node in membership.nodes]))}


def agreed(
    membership: Membership, me: str, lost: Collection[str], said: Iterable[Mapping[str, Any]]
) -> set[str]:
    """Return those of the lost nodes that a majority of the membership's nodes has lost.

    Args:
        membership: that this node knows.
        me: id of this node.
        lost: ids of the nodes of it that this one has lost.
        said: by others, see `says`, and their ``node``; of an earlier membership it does not count.
    """
    sees = {
        each["node"]: sees
        for each in said
        if isinstance(each.get("node"), str)
        and isinstance(epoch := each.get(_EPOCH), int)
        and isinstance(sees := each.get(_SEES), list)
        and epoch >= membership.epoch
    }
    votes = {
        id_: 1
        + sum(node.id in sees and id_ not in sees[node.id] for node in membership.nodes if node.id != me)
        for id_ in lost
    }
    return {id_ for id_, count in votes.items() if 2 * count > len(membership.nodes)}
