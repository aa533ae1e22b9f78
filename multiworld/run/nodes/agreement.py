"""Agreement on a membership after a rendezvous: all publish a record, the first node decides."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from multiworld.logs.source import logger
from multiworld.run.errors import RunError
from multiworld.run.nodes import rank_assignment, slots
from multiworld.run.nodes.rendezvous_store import RendezvousStore, StoreSilentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld.run.nodes.slots import Membership, NodeRecord

__all__ = ["Agreement", "admissions", "newest_membership"]

_log = logger(__name__)

GATHERING = 15.0
"""Seconds for which the first node waits for the others' records: one that died since the rendezvous has
none."""

_PAUSE = 0.03  # seconds between two polls
_PAUSE_SILENT = 0.5  # seconds after a poll that failed


@dataclass(frozen=True)
class Agreement:
    """One agreement.

    Attributes:
        store: of the round.
        rank, size: of this node and the round.
        record: of this node.
        after: epoch that this node knows; the membership has to be a later one.
        counts: see `decisions.form`.
        token: for a run that has no membership yet.
        once: whether the store has one agreement for all rounds, as that of a static rendezvous.
    """

    store: RendezvousStore
    rank: int
    size: int
    record: NodeRecord
    after: int
    counts: tuple[int, ...] | None
    token: str
    once: bool = False

    def membership(self, deadline: float, cancelled: Callable[[], bool]) -> tuple[int, Membership]:
        """Return the agreed membership and its number in the store.

        Args:
            deadline: ``time.monotonic()`` seconds.
            cancelled: asked between two polls.

        Raises:
            RunError: there was no agreement in time.
        """
        last = "the first node has not decided"
        published: str | None = None  # id of the notes that have this node's record
        decided = applied = False
        while not cancelled():
            try:
                if (notes := self._notes()) != published:
                    self.store.write(f"record/{self.rank}", slots.to_json(self.record))
                    published, applied = notes, False
                if self.rank == 0 and not decided:
                    self._decide(min(deadline - 1.0, time.monotonic() + GATHERING), cancelled)
                    decided = True
                found = newest_membership(self.store, -1)
                if found is not None:
                    if found[1].epoch > self.after and found[1].node(self.record.node.id) is not None:
                        return found
                    last = "the other nodes have not let this one in yet"
                    if not applied:
                        number = self.store.count("applies")
                        self.store.write(f"apply/{number}", slots.to_json(self._application(found[1])))
                        applied = True
            except StoreSilentError as error:
                last = f"the rendezvous store does not answer: {error}"
                if error.gone:
                    break
                time.sleep(_PAUSE_SILENT)
            if time.monotonic() >= deadline:
                break
            time.sleep(_PAUSE)
        raise RunError(
            f"the nodes did not agree on rank assignment: {last}",
            rule="All nodes of a rendezvous agree within a minute",
            next_step="See whether the other nodes run m8d-run with the same --rdzv-id and --worlds, and "
            "look at their logs",
        )

    def _notes(self) -> str:
        """Return the id of the round's notes: for all but the first node another one, perhaps, each time."""
        if self.once:
            return ""
        return self.store.begin() if self.rank == 0 else self.store.follow()

    def _application(self, newest: Membership) -> NodeRecord:
        """Return this node's record as an application: ``since`` is the latest epoch without this node."""
        node = self.record.node
        return replace(self.record, node=replace(node, since=max(node.since, newest.epoch)))

    def _decide(self, deadline: float, cancelled: Callable[[], bool]) -> None:
        """Gather the records until the deadline, and write the first membership."""
        if self.store.read("membership/0") is not None:
            return  # a static rendezvous has one store for all its rounds
        records: dict[int, NodeRecord] = {}
        while True:
            for rank in range(self.size):
                data = None if rank in records else self.store.read(f"record/{rank}")
                if data is not None:
                    records[rank] = slots.record_from(data)
            if len(records) == self.size or time.monotonic() >= deadline or cancelled():
                break
            time.sleep(_PAUSE)
        if len(records) < self.size:
            _log.warning(
                "%d of %d nodes of the rendezvous published no record", self.size - len(records), self.size
            )
        membership = rank_assignment.form(
            [records[rank] for rank in sorted(records)], counts=self.counts, token=self.token
        )
        self.store.add("membership", 0, slots.to_json(membership))


def newest_membership(store: RendezvousStore, after: int) -> tuple[int, Membership] | None:
    """Return the newest membership with a number above `after`.

    Raises:
        StoreSilentError: the store does not answer, or holds something else there.
    """
    found = store.newest("membership", after)
    if found is None:
        return None
    try:
        return found[0], slots.membership_from(found[1])
    except (KeyError, TypeError, ValueError) as error:
        raise StoreSilentError(
            f"membership/{found[0]} in the rendezvous store is no membership: {error!r}"
        ) from error


def admissions(store: RendezvousStore, newest: int) -> dict[str, int]:
    """Return the epoch in which each node was last admitted, by its id; also of nodes that have left since.

    Args:
        store: of the round; it keeps all memberships.
        newest: number of the last membership that is read.

    Raises:
        StoreSilentError: the store does not answer.
    """
    found: dict[str, int] = {}
    for number in range(newest + 1):
        data = store.read(f"membership/{number}")
        try:
            nodes = () if data is None else slots.membership_from(data).nodes
        except (KeyError, TypeError, ValueError):
            continue  # it was no membership for any node
        found.update((node.id, node.since) for node in nodes if node.since >= found.get(node.id, 0))
    return found
