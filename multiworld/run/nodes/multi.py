"""The other nodes of a run of several: see `multiworld.run.nodes.interface` for what the agent has of it.

Threads: ``m8d-nodes`` is the only one that changes what is known; ``m8d-nodes-rendezvous`` makes the calls of
torch's rendezvous handler, which may take minutes; the watchdog's thread brings signs. The agent's thread only
takes what is ready.

A seat is given away by whoever decides (`seats.leader`), through the rendezvous store: the first table of a number
is the one that counts. Where the store was lost with its node, those who see each other decide by themselves, each
for itself from the same table. A node that can neither reach the store nor see a majority of the others ends its
workers (`seats.cut_off`), and the others wait `_GRACE` longer than that takes before they give its seat away.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from multiworld.run.errors import RunError
from multiworld.run.events import Happening, NodeJoined, NodeLost, Note, SeatTaken
from multiworld.run.nodes import slots as seats
from multiworld.run.nodes.address import reachable_address
from multiworld.run.nodes.agreement import Meeting, newest_table
from multiworld.run.nodes.interface import Lost, NodeEvent, Nodes, NodesSpec, Over, Seated, Stop
from multiworld.run.nodes.peer_links import Bonds, Sign, tie
from multiworld.run.nodes.rendezvous import Lane, Met
from multiworld.run.nodes.rendezvous_store import Board, SilentError
from multiworld.run.nodes.world_store import WorldStore

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

    from multiworld.run.events import Happenings
    from multiworld.run.nodes.slots import Seating, Table
    from multiworld.run.worldsfile.spec import WorldsPlan

__all__ = ["ManyNodes"]

_LOOK = 0.5
"""Seconds between two looks at the rendezvous store when all is well."""

_LOOK_SOON = 0.1  # seconds, as long as somebody is lost and nobody has decided

_CALL = 2.0
"""Seconds that the store has to answer a look; a node that was cut off finds it out in this time."""

_FORGETS = 3.0
"""Seconds without an answer after which a rendezvous may have dropped nodes whose heartbeats it missed."""

_GRACE = 3.0
"""Seconds, more than `_CALL`, that a node which may have been cut off has to end its workers; see `_patience`."""

_AWAKE = 3.0
"""Seconds after a standstill of this process (a SIGSTOP, a suspended host) in which it does not trust its eyes."""

_SLOW_LEADER = 10.0
"""Seconds after which another one decides, where the first has not seen the loss itself."""


@dataclass
class _Loss:
    cause: str
    at: float


class ManyNodes(Nodes):
    """See `multiworld.run.nodes.interface.make_nodes`."""

    def __init__(
        self, spec: NodesSpec, handler: RendezvousHandler, happenings: Happenings, plan: WorldsPlan | None
    ) -> None:
        self._spec, self._handler, self._happenings, self._plan = spec, handler, happenings, plan
        self._ready: deque[NodeEvent | Happening] = deque()
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._inbox: queue.SimpleQueue[Sign | Met | str] = queue.SimpleQueue()
        self._bonds = Bonds(spec.hang_timeout, self._inbox.put)
        # Whether the store is the judge between nodes that do not see each other: c10d's is on one of them.
        self._outside = handler.get_backend() not in {"c10d", "static"}
        self._lane = Lane(handler, self._meet, self._inbox.put, returns=self._outside)
        self._thread: threading.Thread | None = None
        self._closing = False
        self._worldstore: WorldStore | None = None
        self._node: seats.Node | None = None
        # What is known; after `settle` only the thread changes it.
        self._board: Board | None = None
        self._number = -1
        self._table: Table | None = None
        self._epoch = 0
        self._seating: Seating | None = None
        self._master: tuple[str, int] | None = None
        self._lost: dict[str, _Loss] = {}
        self._finished: set[str] = set()
        self._answers = True
        self._silent_since: float | None = None
        self._store_gone = False  # for good: torch's TCPStore clients do not connect a second time
        self._next_look = 0.0
        self._gone: dict[tuple[str, int], _Loss] = {}
        self._stood_still = float("-inf")
        self._over = False
        self._applied = 0

    # -- the agent's thread

    def fileno(self) -> int:
        """See `Nodes.fileno`."""
        return self._bell.fileno()

    def settle(self, info: RendezvousInfo) -> Seating:
        """See `Nodes.settle`."""
        self._introduce()
        self._take(self._meet(info))
        assert self._seating is not None  # noqa: S101  (a table with this node in it gives a place)
        self._see_whether_all_have_room()
        self._thread = threading.Thread(target=self._run, name="m8d-nodes", daemon=True)
        self._thread.start()
        self._lane.start()
        return self._seating

    def _see_whether_all_have_room(self) -> None:
        table, plan = self._table, self._plan
        if table is None or plan is None or table.epoch != 1:
            return
        ranks = seats.vacant(table)
        if not ranks:
            return
        brought = ", ".join(f"{node.host}: {node.capacity}" for node in table.nodes)
        value = f"{plan.world_size} workers of {plan.path}, and the nodes have room for {plan.world_size - len(ranks)} ({brought})"
        if len(table.nodes) >= self._spec.max_nodes:
            raise RunError(
                value,
                rule="The --nproc-per-node of all nodes together is at least the number of workers",
                next_step="Leave --nproc-per-node out, or change it or --nnodes",
            )
        self._note(logging.WARNING, f"{value}: ranks {ranks[0]} to {ranks[-1]} start when another node comes")

    def poll(self) -> list[NodeEvent]:
        """See `Nodes.poll`."""
        with contextlib.suppress(BlockingIOError):
            while self._bell.recv(4096):
                pass
        events: list[NodeEvent] = []
        while self._ready:
            each = self._ready.popleft()
            if isinstance(each, Happening):
                self._happenings.publish(each)
            else:
                events.append(each)
        return events

    def watch(self) -> None:
        """See `Nodes.watch`."""
        self._lane.look()

    def done(self) -> None:
        """See `Nodes.done`."""
        self._inbox.put("done")

    def close(self, failed: str = "") -> None:
        """See `Nodes.close`."""
        if self._closing:
            return
        self._closing = True
        deadline = time.monotonic() + 3.0
        self._lane.stop()
        self._inbox.put("close")
        if self._thread is not None:
            self._thread.join(1.0)
        self._bonds.settle(deadline - 1.5)
        if failed:
            self._bonds.fail()
        self._bonds.close(deadline)
        if self._worldstore is not None:
            self._worldstore.close()
        self._bell.close()
        self._ringer.close()

    # -- meeting the others: the agent's thread at first, the lane's later

    def _introduce(self) -> None:
        if self._node is not None:
            return
        spec = self._spec
        address = reachable_address(spec.endpoint, spec.local_addr)
        endpoint = self._bonds.listen(address)
        self._worldstore = WorldStore(address)
        self._node = seats.Node(
            id=self._bonds.me,
            host=socket.gethostname(),
            address=endpoint.host,
            port=endpoint.port,
            pid=os.getpid(),
            capacity=spec.capacity,
            role="" if self._plan is not None else spec.role,
            store=self._worldstore.address,
        )

    def _meet(self, info: RendezvousInfo) -> Met:
        assert self._node is not None  # noqa: S101  (settle comes first)
        board = Board(info.store, patience=_CALL, returns=self._outside)
        epoch = self._epoch
        card = seats.Card(
            replace(self._node, since=epoch), self._table, self._bonds.alive(), tuple(self._finished)
        )
        meeting = Meeting(
            board=board,
            rank=info.rank,
            size=info.world_size,
            card=card,
            after=epoch,
            counts=None if self._plan is None else tuple(role.count for role in self._plan.roles),
            token=secrets.token_hex(16),
        )
        store = info.bootstrap_store_info
        if info.rank == 0 and store is not None:
            with contextlib.suppress(SilentError):  # the meeting says it
                board.tell_master(store.master_addr, store.master_port)
        number, table = meeting.table(time.monotonic() + self._spec.timeout, lambda: self._closing)
        return Met(board, number, table, None if store is None else (store.master_addr, store.master_port))

    # -- the thread that knows

    def _run(self) -> None:
        while not self._closing:
            try:
                item = self._inbox.get(timeout=self._pause())
            except queue.Empty:
                item = None
            while item is not None:
                self._take_in(item)
                item = None
                with contextlib.suppress(queue.Empty):
                    item = self._inbox.get_nowait()
            if not self._closing:
                try:
                    self._think(time.monotonic())
                except Exception as error:  # a fault of ours must not leave the run without its watch, unsaid
                    logging.getLogger(__name__).exception("the watch over the other nodes failed")
                    self._emit(
                        Stop(f"the watch over the other nodes failed: {type(error).__name__}: {error}")
                    )
                    return

    def _pause(self) -> float:
        return _LOOK_SOON if self._pending() else _LOOK

    def _take_in(self, item: Sign | Met | str) -> None:
        if isinstance(item, Met):
            self._take(item)
        elif isinstance(item, Sign):
            self._hear(item)
        elif item == "done":
            self._finished.add(self._bonds.me)
            self._bonds.done()
        elif item in {"closed", "gone"} and self._table is None and not self._over:
            self._over = True
            if item == "closed":  # while this node had no place: the others have ended the run without it
                self._emit(Over())
            else:
                self._emit(Stop("this node has no seat, and the rendezvous store is gone: it cannot get one"))

    def _take(self, met: Met) -> None:
        """A meeting came about: its board is the one to look at from now on."""
        self._board, self._number, self._master = met.board, met.number, met.master
        self._applied = 0
        self._apply(met.table)

    def _hear(self, sign: Sign) -> None:
        mine = self._table.node(self._bonds.me) if self._table is not None else None
        node = self._table.node(sign.id) if self._table is not None else None
        if mine is None or node is None or self._table is None or tie(mine, node) != sign.tie:
            return
        if sign.what == "done":
            self._finished.add(sign.id)
        elif sign.what == "failed":
            self._emit(Stop(f"node {node.host} (pid {node.pid}) has ended the run"))
        elif sign.id not in self._lost:
            # After a standstill of this process what it sees proves nothing about the others.
            cause = "failed" if time.monotonic() - self._stood_still < _AWAKE else sign.cause
            self._next_look = 0.0
            self._lost[sign.id] = self._gone[sign.id, sign.tie] = _Loss(cause, sign.at)
            if sign.id in self._finished or self._over:
                return
            seat = self._table.seat_of(sign.id)
            ranks = () if seat is None else self._table.ranks_of(seat)
            worlds = () if self._plan is None else self._plan.worlds_without(ranks)
            self._emit(NodeLost(time.time(), node.host, seat, sign.cause, worlds))
            self._emit(Lost(node.host, seat, sign.cause, ranks, worlds))

    def _think(self, now: float) -> None:
        if self._board is not None and self._table is not None:
            if now >= self._next_look and not self._store_gone:
                self._look(self._board)
                if self._answers:
                    self._next_look = time.monotonic() + self._pause()
            self._judge(time.monotonic())
        if self._table is not None and not self._over:
            self._see_whether_it_is_over(self._table)

    def _see_whether_it_is_over(self, table: Table) -> None:
        seat, me = table.seat_of(self._bonds.me), self._bonds.me
        lost = seats.over(table, self._finished, self._lost)
        if lost is not None and (seat is None or me in self._finished):
            self._over = True
            self._emit(Over(lost))

    def _look(self, board: Board) -> None:
        """See whether there is a newer table, or somebody to let in."""
        try:
            found = newest_table(board, self._number)
            if found is not None:
                self._number = found[0]
                self._apply(found[1])
            self._admit(board)
        except SilentError as error:
            self._store_is_silent(error)
            return
        self._answers = True
        if self._silent_since is not None:
            lasted, self._silent_since = time.monotonic() - self._silent_since, None
            self._note(logging.WARNING, "the rendezvous store answers again")
            if self._outside or lasted > _FORGETS:
                # It may have forgotten who is there while nobody could tell it, and then nobody could join.
                self._lane.again()

    def _store_is_silent(self, error: SilentError) -> None:
        self._answers = False
        for_good = self._store_gone = error.gone
        if self._silent_since is None:
            self._silent_since = time.monotonic()
            what = "no other node can join" if for_good else "no other node can join until it answers again"
            self._note(logging.WARNING, f"rendezvous store lost ({error}): running workers go on, {what}")
            if for_good:
                self._lane.give_up()
        if not self._pending():
            self._next_look = time.monotonic() + 2.0

    def _admit(self, board: Board) -> None:
        """Let in who came too late for the meeting, or comes back to a store that has only one."""
        table = self._table
        if table is None or seats.leader(table, self._lost) != self._bonds.me or self._pending():
            return
        come: list[seats.Node] = []
        highest = self._applied
        for number in range(self._applied + 1, self._applied + 4):
            data = board.read(f"apply/{number}")
            if data is None:
                continue
            highest = number
            try:
                node = seats.card_from(data).node
            except (KeyError, TypeError, ValueError):
                continue
            there = table.node(node.id)
            if there is None or there.since <= node.since:
                come.append(node)
        self._applied = highest
        if come:
            self._decide(board, seats.admit(table, come))

    def _pending(self) -> dict[str, _Loss]:
        """Losses that no table tells of yet."""
        table = self._table
        if table is None:
            return {}
        return {id_: loss for id_, loss in self._lost.items() if table.node(id_) is not None}

    def _judge(self, now: float) -> None:
        table, pending = self._table, self._pending()
        if table is None or not pending or self._board is None:
            return
        causes = {id_: loss.cause for id_, loss in pending.items()}
        if seats.cut_off(table, self._bonds.me, causes, answers=self._answers, outside=self._outside):
            self._unseat("it can reach neither the rendezvous store nor a majority of the other nodes")
            return
        due = max(loss.at + self._patience(loss.cause) for loss in pending.values())
        if 2 * (len(table.nodes) - len(pending)) <= len(table.nodes):
            due += 1.0  # a majority, where there is one elsewhere, decides first
        decides = seats.leader(table, pending) == self._bonds.me
        if not decides and self._answers:
            due += _SLOW_LEADER
        elif not self._answers:
            due += 1.0  # nobody can tell who was lost: all have to see it for themselves
        if now < due:
            return
        after = seats.leave(table, pending, self._finished)
        if self._answers:
            self._decide(self._board, after)
        else:
            self._apply(after)

    def _patience(self, cause: str) -> float:
        """Seconds after which a lost node's workers have ended, whatever became of it."""
        if cause in {"crashed", "left"}:
            return 0.0
        return max(2 * self._spec.hang_timeout, self._spec.hang_timeout + _CALL + _GRACE)

    def _decide(self, board: Board, table: Table) -> None:
        """Write a table under the next number; where somebody else was first, theirs is read soon."""
        try:
            number = self._number + 1
            while number <= self._number + 2:
                if board.add("table", number, seats.to_json(table)):
                    self._number = number
                    self._apply(table)
                    return
                found = newest_table(board, self._number)
                if found is not None:
                    self._number = found[0]
                    self._apply(found[1])
                    return
                number += 1  # claimed, and nothing written: its writer is gone, or slower than this
        except SilentError as error:
            self._store_is_silent(error)

    def _apply(self, table: Table) -> None:
        me, before, old = self._bonds.me, self._seating, self._table
        mine = table.node(me)
        if mine is None:
            self._unseat("the other nodes gave its seat away: they could not see it")
            return
        self._table, self._epoch = table, table.epoch
        known = {node.id: node.since for node in old.nodes} if old is not None else {}
        # Who is out, or came back, is not lost; who is back at the table by mistake is lost still.
        ties = {(node.id, tie(mine, node)) for node in table.nodes}
        self._lost = {key[0]: loss for key, loss in self._gone.items() if key in ties}
        self._bonds.update(table)
        for node in table.nodes:
            if node.id != me and known.get(node.id) != node.since:
                self._emit(NodeJoined(time.time(), node.host, table.seat_of(node.id)))
        seating = self._seating = seats.seating(table, me, self._master)
        if before is None or (before.seat, before.nodes) != (seating.seat, seating.nodes):
            self._emit(SeatTaken(time.time(), seating.seat, seating.nodes))
        if before is not None and before != seating:
            found = seating.seat not in {None, before.seat}
            self._emit(Seated(seating, f"seat {seating.seat} was free" if found else ""))
        self._tell_vacant(old, table)

    def _tell_vacant(self, old: Table | None, table: Table) -> None:
        was = set(seats.vacant(old)) if old is not None else set()
        ranks = tuple(rank for rank in seats.vacant(table) if rank not in was)
        if not ranks:
            return
        worlds = self._plan.worlds_without(ranks) if self._plan is not None else ()
        what = f"no node for rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        if worlds:
            what += f": world{'s' if len(worlds) > 1 else ''} {', '.join(worlds)} cannot be whole"
        if self._spec.on_loss == "stop" and old is not None:
            self._emit(Stop(what))
        else:
            self._note(logging.WARNING, f"{what}; the rest goes on, and a node that comes gets the place")

    def _unseat(self, reason: str) -> None:
        """Give up the place, and try to get one again."""
        before, table = self._seating, self._table
        self._table = None
        self._lost.clear()
        if table is not None:
            self._bonds.update(replace(table, nodes=()))
        if before is not None and before.seat is not None:
            self._seating = replace(before, seat=None, base_rank=0, base_role_rank=0, role_world_size=0)
            self._emit(SeatTaken(time.time(), None, before.nodes))
            self._emit(Seated(self._seating, f"this node has lost its seat: {reason}"))
        self._lane.again()

    def _note(self, level: int, text: str) -> None:
        self._emit(Note(time.time(), level, text))

    def _emit(self, each: NodeEvent | Happening) -> None:
        self._ready.append(each)
        with contextlib.suppress(BlockingIOError, OSError):
            self._ringer.send(b"!")
