"""Multi-node implementation of `multiworld.run.nodes.interface.Nodes`.

Threads: only ``m8d-nodes`` changes the membership and the state around it; ``m8d-nodes-rendezvous`` makes the
calls of torch's rendezvous handler, which may take minutes; the watchdog's thread delivers signals of peers.
The agent's thread only fetches finished events.

The leader (`rank_assignment.leader`) gives a slot away, through the rendezvous store: the first membership
under a number counts. If the store was lost with its node, connected nodes decide on their own, each the same
from the same membership. A node that reaches neither the store nor a majority of the others ends its workers
(`rank_assignment.cut_off`), and the others wait longer than that takes before they give its slot away
(`Losses`).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from multiworld.logs.source import logger
from multiworld.run.events import NodeJoined, SlotTaken
from multiworld.run.nodes import rank_assignment, told_snapshot, votes
from multiworld.run.nodes.address import reachable_address
from multiworld.run.nodes.agent_events import AgentEvents
from multiworld.run.nodes.beginnings import SAID, Beginnings
from multiworld.run.nodes.idle_nodes import IDLE, IdleNodes
from multiworld.run.nodes.interface import NodeEvent, Nodes, NodesSpec, Over, Reassigned, Stop
from multiworld.run.nodes.loss_verdicts import CutOff, LossVerdicts
from multiworld.run.nodes.meeting import Meeting
from multiworld.run.nodes.node_news import NodeNews
from multiworld.run.nodes.peer_links import PeerLinks, PeerSignal, link_epoch
from multiworld.run.nodes.rendezvous import Agreed, BackgroundRendezvous
from multiworld.run.nodes.rendezvous_store import StoreSilentError
from multiworld.run.nodes.shown_life import ShownLife
from multiworld.run.nodes.standing import Standing
from multiworld.run.nodes.store_health import StoreHealth
from multiworld.run.nodes.store_round import StoreRound
from multiworld.run.nodes.working_worlds import WorkingWorlds

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

    from multiworld.run.events import EventBus
    from multiworld.run.nodes.interface import LifeSigns
    from multiworld.run.nodes.slots import Assignment, Membership, Node
    from multiworld.run.worldsfile.worlds_plan import WorldsPlan

__all__ = ["MultiNode"]


_log = logger(__name__)
_POLL = 0.5
"""Seconds between two polls of the rendezvous store."""

_POLL_SOON = 0.1  # seconds, while a loss is not decided yet

_FORGETS = 3.0
"""Seconds without an answer after which the rendezvous may have dropped nodes whose heartbeats it missed."""

_TELLS = 10.0
"""Seconds that a node which ends has for its links to be made.

One that is done and cannot tell the others counts as lost.
"""

_COMES_BACK = 3.0
"""Seconds that a node which ends has for a call of the rendezvous store that was given up."""


class MultiNode(Nodes):
    """The other nodes of a run of several.

    Args:
        spec: of this node.
        handler: its rendezvous; ``next_rendezvous`` and ``num_nodes_waiting`` are called in threads of this
            object, after the agent's first ``next_rendezvous``. The agent shuts it down.
        bus: gets NodeJoined, NodeLost, SlotTaken and notes.
        plan: of the worlds file.
        snapshot: returns what other nodes' launchers get when they ask for this one's. Quick.
        signs: gets a sign of life every 0.5 s and after each answer of the store, from ``m8d-nodes``.

    Raises:
        RunError: its --local-addr is no address of this host.
    """

    def __init__(
        self,
        spec: NodesSpec,
        handler: RendezvousHandler,
        bus: EventBus,
        plan: WorldsPlan | None,
        snapshot: Callable[[], dict[str, Any]] = dict,
        signs: LifeSigns | None = None,
    ) -> None:
        if spec.local_addr:
            # A wrong one is found before the rendezvous: the others would hold one for this node.
            reachable_address(spec.endpoint, spec.local_addr)
        self._spec = spec
        self._events = AgentEvents(bus)
        self._life = ShownLife(signs)
        self._news = NodeNews(plan, spec.on_loss, spec.max_nodes)
        self._inbox: queue.SimpleQueue[PeerSignal | Agreed | str] = queue.SimpleQueue()
        self._working = WorkingWorlds(plan)
        bus.subscribe(self._working.hear)
        told = told_snapshot.ToldSnapshot(lambda: {**snapshot(), SAID: self._says()})
        self._links = PeerLinks(spec.hang_timeout, self._inbox.put, told)
        self._beginnings = Beginnings(self._working.names, self._says, self._told)
        # Whether the store can arbitrate between nodes that have lost each other: c10d's is on one of them.
        backend = handler.get_backend()
        self._outside = backend not in {"c10d", "static"}
        # After `settle` only the thread ``m8d-nodes`` changes these.
        self._standing = Standing(self._links.me)
        self._verdicts = LossVerdicts(spec.hang_timeout, self._told, outside=self._outside)
        self._idle = IdleNodes(self._told)
        self._health = StoreHealth()
        self._round: StoreRound | None = None
        self._no_rendezvous = ""  # why there is none any more: "closed" or "gone"
        self._over = False
        self._meeting = Meeting(
            spec, plan, self._links, self._standing, self._verdicts, backend, returns=self._outside
        )
        self._rendezvous = BackgroundRendezvous(handler, self._agree, self._inbox.put, returns=self._outside)
        self._thread: threading.Thread | None = None
        self._closing = False

    # -- the agent's thread

    def fileno(self) -> int:
        """See `Nodes.fileno`."""
        return self._events.fileno()

    def snapshots(self, timeout: float) -> list[dict[str, Any]]:
        """See `Nodes.snapshots`."""
        found = [{key: value for key, value in each.items() if key != SAID} for each in self._told(timeout)]
        return [each for each in found if each]

    def _told(self, timeout: float) -> list[dict[str, Any]]:
        found = map(told_snapshot.decode, self._links.ask(timeout))
        return [each for each in found if each]

    def _says(self) -> dict[str, Any]:
        """Return what `Beginnings` and `votes` on another node have to know of this one; in any thread."""
        standing = self._standing
        # The first: what is said after it is younger than what it is said to know.
        assignment = standing.assignment
        store = "" if assignment is None else assignment.store
        membership, now = standing.membership, time.monotonic()
        seen = votes.says(membership, lambda nodes: self._verdicts.may_run(nodes, now))
        seen[IDLE] = standing.idle
        return {"node": self._links.me, "store": store, "members": self._working.members(), **seen}

    def settle(self, info: RendezvousInfo) -> Assignment:
        """See `Nodes.settle`."""
        self._meeting.introduce(self._beginnings)
        self._take(self._agree(info))
        standing = self._standing
        assert standing.assignment is not None  # noqa: S101  (`_take` sets it)
        if standing.membership is not None and (warning := self._news.room(standing.membership)):
            self._events.note(logging.WARNING, warning)
        self._thread = threading.Thread(target=self._run, name="m8d-nodes", daemon=True)
        self._thread.start()
        self._rendezvous.start()
        return standing.assignment

    def _agree(self, info: RendezvousInfo) -> Agreed:
        return self._meeting.agree(info, lambda: self._closing)

    def poll(self) -> list[NodeEvent]:
        """See `Nodes.poll`."""
        self._life.polled()
        return self._events.poll()

    def watch(self) -> None:
        """See `Nodes.watch`."""
        self._rendezvous.look()

    def done(self) -> None:
        """See `Nodes.done`."""
        self._inbox.put("done")

    def idle(self, *, yes: bool) -> None:
        """See `Nodes.idle`."""
        self._inbox.put("idle" if yes else "not idle")

    def stood_still(self) -> None:
        """See `Nodes.stood_still`."""
        self._inbox.put("stood still")

    def close(self, failed: str = "") -> None:
        """See `Nodes.close`."""
        if self._closing:
            return
        self._closing = True
        self._life.free()
        self._rendezvous.stop()
        self._inbox.put("close")
        if self._thread is not None:
            self._thread.join(1.0)
        tells = bool(failed) or self._standing.done
        self._links.settle(time.monotonic() + (_TELLS if tells else 1.0))
        if failed:
            self._links.fail()
        self._beginnings.close()
        self._links.close(time.monotonic() + 1.5)
        self._meeting.close()
        if self._round is not None:
            self._round.store.settle(_COMES_BACK)
        self._events.close()

    # -- the thread ``m8d-nodes``

    def _run(self) -> None:
        while True:
            if not self._closing:
                self._life.show()
            try:
                item = self._inbox.get(timeout=self._pause())
            except queue.Empty:
                item = None
            try:
                while item is not None:
                    self._take_in(item)
                    item = None
                    with contextlib.suppress(queue.Empty):
                        item = self._inbox.get_nowait()
                if self._closing:  # it is asked after the inbox: "done" comes just before the end
                    return
                self._turn(time.monotonic())
            # A bug in here must not silently leave the run unwatched.
            except Exception as error:  # noqa: BLE001  (logged, and the run ends)
                _log.exception("the watch over the other nodes failed")
                said = f"the watch over the other nodes failed: {type(error).__name__}: {error}"
                self._events.put(Stop(said, alone=True))
                return

    def _pause(self) -> float:
        return _POLL_SOON if self._verdicts.losses.causes else _POLL

    def _take_in(self, item: PeerSignal | Agreed | str) -> None:
        if isinstance(item, Agreed):
            self._take(item)
        elif isinstance(item, PeerSignal):
            self._hear(item)
        elif item == "close":
            pass  # it ends the wait for an item
        elif item == "done":
            self._done()
        elif item in {"idle", "not idle"}:
            self._standing.idle = item == "idle"
        elif item == "stood still":
            if self._standing.membership is not None:
                self._give_up_slot("it stood still, and its workers were ended")
        else:
            self._no_rendezvous = item
            if self._standing.membership is None:
                self._end_without_slot()

    def _done(self) -> None:
        self._standing.finished.add(self._links.me)
        self._links.done()

    def _end_without_slot(self) -> None:
        """End this node: it has no slot, and there is no rendezvous any more that could give it one."""
        if self._over:
            return
        self._over = True
        # The others have ended the run without it. One whose workers have ended with 0 needs no slot.
        if self._no_rendezvous == "closed" or self._standing.done:
            self._events.put(Over())
        else:
            said = "this node has no seat, and the rendezvous store is gone: it cannot get one"
            self._events.put(Stop(said, alone=True))

    def _take(self, agreed: Agreed) -> None:
        """Adopt an agreement: its store is polled from now on."""
        self._round, self._standing.master = StoreRound(agreed.store, agreed.number), agreed.master
        agreed.store.answered = self._life.show  # a slow store is no dead thread
        self._apply(agreed.membership)

    def _hear(self, signal: PeerSignal) -> None:
        membership = self._standing.membership
        mine = membership.node(self._links.me) if membership is not None else None
        node = membership.node(signal.id) if membership is not None else None
        if mine is None or node is None or membership is None or link_epoch(mine, node) != signal.epoch:
            return
        if signal.what == "done":
            self._standing.finished.add(signal.id)
        elif signal.what == "failed":
            self._events.put(Stop(f"node {node.host} (pid {node.pid}) has ended the run"))
        elif signal.id not in self._verdicts.losses.causes:
            self._check_over(membership)  # a node without a seat leaves when all are done: no loss
            self._health.next_poll = 0.0
            self._verdicts.losses.add(signal.id, signal.epoch, signal.cause, signal.at)
            self._tell_lost(membership, node, signal.cause)

    def _tell_lost(self, membership: Membership, node: Node, cause: str) -> None:
        if node.id in self._standing.finished or self._over:
            return
        for each in self._news.lost(membership, node, cause, time.time()):
            self._events.put(each)

    def _turn(self, now: float) -> None:
        if self._round is not None and self._standing.membership is not None:
            if self._health.due(now):
                self._poll_store(self._round)
                if self._health.answers:
                    self._health.next_poll = time.monotonic() + self._pause()
            self._judge_losses(time.monotonic())
        if self._standing.membership is not None:
            self._check_over(self._standing.membership)
        self._links.begin()
        self._beginnings.begin()

    def _check_over(self, membership: Membership) -> None:
        if self._over:
            return
        standing, lost = self._standing, self._verdicts.losses.causes
        idle = self._idle.others(standing, membership, lost, time.monotonic())
        free = standing.over(membership, lost, idle)
        if free is not None:
            self._over = True
            if standing.idle:
                self._done()  # the others wait for it
            self._events.put(Over(self._news.missed(free)))
        elif self._no_rendezvous and (stranded := standing.stranded(membership)):
            self._over = True
            self._events.put(Over(stranded))

    def _poll_store(self, round_: StoreRound) -> None:
        """Adopt a newer membership from the store; as the leader, admit nodes that applied."""
        try:
            found = round_.newer()
            if found is not None:
                self._apply(found)
            self._admit(round_)
        except StoreSilentError as error:
            self._store_is_silent(error)
            return
        lasted = self._health.answered(time.monotonic())
        if lasted is not None:
            self._events.note(logging.WARNING, "the rendezvous store answers again")
            if self._outside or lasted > _FORGETS:
                # It may have dropped nodes for missed heartbeats, and then no node could join.
                self._rendezvous.again()

    def _store_is_silent(self, error: StoreSilentError) -> None:
        if error.gone and not self._health.gone:
            self._no_rendezvous = self._no_rendezvous or "gone"
            self._rendezvous.give_up()
        if self._health.silent(time.monotonic(), gone=error.gone):
            what = "no other node can join" if error.gone else "no other node can join until it answers again"
            if error.gone and self._spec.min_nodes < self._spec.max_nodes:
                what += (
                    ". Do not start the endpoint's node again while this run goes on:"
                    " it would begin a second run with the same ranks"
                )
            said = f"rendezvous store lost ({error}): running workers go on, {what}"
            self._events.note(logging.WARNING, said)
        if not self._verdicts.losses.causes:
            self._health.next_poll = time.monotonic() + 2.0

    def _admit(self, round_: StoreRound) -> None:
        """Admit nodes that missed the agreement, or came back to a store that has only one round."""
        membership = self._standing.membership
        if (
            membership is None
            or self._verdicts.losses.causes
            or rank_assignment.leader(membership, ()) != self._links.me
        ):
            return
        read, new = round_.applicants()
        if new:
            holders = self._verdicts.silent_holders(
                membership, time.monotonic(), answers=self._health.answers
            )
            admitted = rank_assignment.admit(membership, new, self._standing.finished, holders)
            self._decide(round_, admitted)
            if self._standing.membership is not admitted:
                return  # another membership was first, or the store is silent: they are still due
        round_.applications.take(read)

    def _judge_losses(self, now: float) -> None:
        membership, answers = self._standing.membership, self._health.answers
        if membership is None or self._round is None:
            return
        unmade = self._links.unmade(now - self._verdicts.losses.connects)
        after = self._verdicts.judge(self._standing, membership, unmade, now, answers=answers)
        if isinstance(after, CutOff):
            self._give_up_slot("it can reach neither the rendezvous store nor a majority of the other nodes")
        elif after is not None and answers:
            self._decide(self._round, after)
        elif after is not None:
            self._apply(after)

    def _decide(self, round_: StoreRound, membership: Membership) -> None:
        """Write a membership under the next number; adopt the other one if another node was first."""
        try:
            found = round_.decide(membership)
        except StoreSilentError as error:
            self._store_is_silent(error)
            return
        if found is not None:
            self._apply(found)

    def _apply(self, membership: Membership) -> None:
        changed, mine = self._standing.adopt(membership), membership.node(self._links.me)
        if changed is None or mine is None:
            self._give_up_slot("the other nodes gave its seat away: they could not see it")
            return
        old, before, assignment = changed.old, changed.before, changed.assignment
        if old is not None:
            for node in changed.gone:
                # Others removed it; this node may not have had a connection with it.
                if node.id not in self._verdicts.losses.causes:
                    self._tell_lost(old, node, "unreachable")
        if changed.again:
            self._links.not_done()
        links = {(node.id, link_epoch(mine, node)) for node in membership.nodes}
        self._verdicts.follow(old, membership, links, time.monotonic())
        self._links.update(membership)
        for node, slot in changed.joined:
            self._events.put(NodeJoined(time.time(), node.host, slot))
        self._beginnings.follow(membership, self._links.me)
        if before is None or (before.slot, before.nodes) != (assignment.slot, assignment.nodes):
            self._events.put(SlotTaken(time.time(), assignment.slot, assignment.nodes))
        if before is not None and before != assignment:
            found = assignment.slot not in {None, before.slot}
            self._events.put(Reassigned(assignment, f"seat {assignment.slot} was free" if found else ""))
        vacant = self._news.vacant(old, membership)
        if isinstance(vacant, Stop):
            self._events.put(vacant)
        elif vacant:
            self._events.note(logging.WARNING, vacant)

    def _give_up_slot(self, reason: str) -> None:
        """Give up the slot, end the links, and request a rendezvous to get a slot again, if there can be one.

        A node whose workers have ended with 0 keeps its slot: the work is done.
        """
        left = self._standing.leave()
        self._verdicts.losses.forget()
        if left is not None:
            self._links.update(replace(left, nodes=()))
        assignment = self._standing.lose_seat()
        if assignment is not None:
            self._events.put(SlotTaken(time.time(), None, assignment.nodes))
            self._events.put(Reassigned(assignment, f"this node has lost its seat: {reason}"))
            self._life.seat_lost()
        if self._no_rendezvous:
            self._end_without_slot()
        else:
            self._rendezvous.again()
