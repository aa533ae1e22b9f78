"""The thread in which a node watches the others, in this process: one node, and a rendezvous of its own."""

from __future__ import annotations

import threading
import time
import types
from dataclasses import replace

import pytest
import torch.distributed as dist
from kits.meetkit import until

from multiworld.run.errors import RunError
from multiworld.run.events import EventBus, NodeJoined, Note
from multiworld.run.nodes import losses, rank_assignment, slots, votes
from multiworld.run.nodes.agreement import Agreement
from multiworld.run.nodes.applications import Applications
from multiworld.run.nodes.beginnings import SAID
from multiworld.run.nodes.interface import NodesSpec, Over, Reassigned, Stop
from multiworld.run.nodes.multi import MultiNode
from multiworld.run.nodes.peer_links import PeerLinks, PeerSignal
from multiworld.run.nodes.rendezvous_store import RendezvousStore, StoreSilentError

SPEC = NodesSpec(
    run_id="watch", endpoint="127.0.0.1:1", local_addr="127.0.0.1", min_nodes=1, max_nodes=2, capacity=1,
    hang_timeout=60.0,
)  # fmt: skip
TOKEN = "ab" * 16


class Handler:
    """A rendezvous handler of one node for which none waits."""

    backend = "c10d"

    def get_backend(self):
        return self.backend

    def num_nodes_waiting(self):
        return 0


@pytest.fixture
def store():
    return dist.HashStore()


@pytest.fixture
def bus():
    return EventBus()


class Signs:
    """Counts what a small program beside the launcher is told."""

    def __init__(self):
        self.alives = self.seatlesses = self.frees = 0

    def alive(self):
        self.alives += 1

    def seatless(self):
        self.seatlesses += 1

    def free(self):
        self.frees += 1


@pytest.fixture
def signs():
    return Signs()


@pytest.fixture
def nodes(store, bus, signs):
    made = MultiNode(SPEC, Handler(), bus, None, signs=signs)
    made.settle(types.SimpleNamespace(store=store, rank=0, world_size=1, bootstrap_store_info=None))
    yield made
    made.close()


def ends(nodes):
    """Wait for an event that ends the run; return it."""
    events = []
    until(lambda: events.extend(nodes.poll()) or events)
    return events[0]


@pytest.mark.parametrize("item", ["done", "turn"])
def test_an_error_in_the_watch_ends_the_run(nodes, monkeypatch, item):
    def fails(*_):
        raise RuntimeError("what is not thought of")

    monkeypatch.setattr(*{"done": (PeerLinks, "done"), "turn": (MultiNode, "_poll_store")}[item], fails)
    nodes.done()
    event = ends(nodes)
    assert isinstance(event, Stop)
    assert "what is not thought of" in event.reason
    assert event.alone


def test_a_moment_without_threads_when_a_node_comes_is_waited_for(nodes, store, monkeypatch):
    refused, begun, start = [1, 2], threading.Event(), threading.Thread.start

    def starts(thread):
        if thread.name == "m8d-nodes-link":
            if refused:
                raise RuntimeError(f"can't start new thread {refused.pop()}")
            begun.set()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts)
    apply(store, 1, "late")
    assert begun.wait(60)
    assert [each for each in nodes.poll() if isinstance(each, Stop)] == []


@pytest.fixture
def joined(bus, nodes, monkeypatch):
    """Return the hosts of the nodes that were admitted; there are no processes behind them to be linked with."""
    monkeypatch.setattr(PeerLinks, "update", lambda *_: None)
    hosts = []
    bus.subscribe(lambda event: hosts.append(event.node) if isinstance(event, NodeJoined) else None)

    def look():
        nodes.poll()
        return hosts

    return look


def notes(store):
    """The notes of the round, as another node reads and writes them."""
    found = RendezvousStore(store)
    assert found.follow()
    return found


def node_of(number, host, since=0):
    return slots.Node(
        id=f"{number:032x}", host=host, address="127.0.0.1", port=1, pid=1, capacity=1, role="", store="",
        since=since,
    )  # fmt: skip


def apply(store, number, host, since=0, node=None):
    record = slots.NodeRecord(node_of(node or number, host, since))
    notes(store).write(f"apply/{number}", slots.to_json(record))


def test_a_node_whose_application_is_late_is_admitted(store, joined):
    apply(store, 2, "quick")
    until(lambda: joined() == ["quick"])
    apply(store, 1, "slow")
    until(lambda: joined() == ["quick", "slow"])


def test_a_node_is_admitted_after_the_store_was_silent_at_its_admission(store, joined, monkeypatch):
    add, calls = RendezvousStore.add, []

    def silent_once(self, *args):
        calls.append(args)
        if len(calls) == 1:
            raise StoreSilentError("asleep")
        return add(self, *args)

    monkeypatch.setattr(RendezvousStore, "add", silent_once)
    apply(store, 1, "quick")
    until(lambda: joined() == ["quick"])
    assert len(calls) == 2


def lose(nodes, number, epoch, cause="unreachable"):
    """Tell the watch that the link of that epoch with a node ended just now; see `apply` for its number."""
    nodes._inbox.put(PeerSignal(f"{number:032x}", epoch, "lost", cause, time.monotonic()))


@pytest.mark.parametrize("before", ["store", "rendezvous"])
def test_a_node_cut_off_after_the_store_was_lost_for_good_ends(store, nodes, joined, monkeypatch, before):
    apply(store, 1, "other")
    until(lambda: joined() == ["other"])

    def gone(*_):
        raise StoreSilentError("Broken pipe", gone=before == "store")

    monkeypatch.setattr(RendezvousStore, "newest", gone)
    if before == "rendezvous":
        nodes._inbox.put("gone")
    lose(nodes, 1, 2)
    events = []
    until(lambda: events.extend(nodes.poll()) or any(isinstance(each, Stop) for each in events))
    lost = next(each for each in events if isinstance(each, Reassigned))
    assert lost.assignment.slot is None
    assert "the rendezvous store is gone: it cannot get one" in events[-1].reason
    assert events[-1].alone


def test_a_node_cut_off_after_the_others_have_closed_the_rendezvous_is_done(
    store, nodes, joined, monkeypatch
):
    apply(store, 1, "other")
    until(lambda: joined() == ["other"])

    def silent(*_):
        raise StoreSilentError("asleep")

    monkeypatch.setattr(RendezvousStore, "newest", silent)
    nodes._inbox.put("closed")
    lose(nodes, 1, 2)
    events = []
    until(lambda: events.extend(nodes.poll()) or Over() in events)


def test_a_new_leader_admits_no_node_that_left_since_it_applied(store, nodes, joined):
    apply(store, 1, "other")
    until(lambda: joined() == ["other"])
    lose(nodes, 1, 2, "crashed")
    until(lambda: nodes.poll() is not None and nodes._standing.membership.epoch == 3)
    nodes._round.applications = Applications()  # as another node that begins to read them
    apply(store, 2, "late")
    until(lambda: "late" in joined())
    assert joined() == ["other", "late"]
    apply(store, 3, "back", since=4, node=1)
    until(lambda: joined() == ["other", "late", "back"])


def test_an_application_says_which_membership_has_not_its_node(store):
    """One that was listed before, and removed before it saw that, is not taken for one that came and left."""
    round_ = RendezvousStore(store)
    other = slots.NodeRecord(node_of(1, "other"))
    there = rank_assignment.form([other], counts=None, token=TOKEN)
    round_.add("membership", 0, slots.to_json(replace(there, epoch=4)))
    mine = slots.NodeRecord(node_of(2, "mine"))
    agreement = Agreement(round_, rank=1, size=2, record=mine, after=0, counts=None, token=TOKEN)
    with pytest.raises(RunError, match="have not let this one in yet"):
        agreement.membership(time.monotonic() + 60.0, lambda: round_.read("apply/1") is not None)
    assert slots.record_from(round_.read("apply/1")).node == node_of(2, "mine", since=4)


@pytest.mark.parametrize(
    ("backend", "cause"), [("c10d", "hung"), ("etcd-v2", "crashed"), ("etcd-v2", "hung")]
)
def test_a_seat_is_free_once_its_node_has_read_in_a_store_outside_that_it_was_removed(
    store, bus, monkeypatch, backend, cause
):
    monkeypatch.setattr(Handler, "backend", backend)
    monkeypatch.setattr(losses, "FENCE", 0.3)
    monkeypatch.setattr(PeerLinks, "update", lambda *_: None)
    nodes = MultiNode(SPEC, Handler(), bus, None)
    nodes.settle(types.SimpleNamespace(store=store, rank=0, world_size=1, bootstrap_store_info=None))
    try:
        lost, spare = node_of(1, "lost", since=2), node_of(2, "spare", since=2)
        first = nodes._standing.membership
        seats = (*first.slots, slots.Slot(1, "", lost.id, lost.id))
        second = replace(first, epoch=2, slots=seats, nodes=(*first.nodes, lost, spare))
        round_ = notes(store)
        round_.add("membership", 1, slots.to_json(second))
        until(lambda: nodes._standing.membership.epoch == 2)
        nodes._inbox.put(PeerSignal(lost.id, 2, "lost", cause, time.monotonic() - 3 * SPEC.hang_timeout))
        until(lambda: nodes._standing.membership.slot_of(spare.id) == 1)
        held = [
            slots.membership_from(round_.read(f"membership/{n}")) for n in range(2, nodes._round.number + 1)
        ]
    finally:
        nodes.close()
    fenced = (backend, cause) == ("etcd-v2", "hung")
    assert [each.slots[1].holder for each in held] == [lost.id, spare.id][not fenced :]
    assert all(each.node(lost.id) is None for each in held)


@pytest.mark.parametrize("least", [1, 2])
def test_the_log_says_that_the_node_of_a_store_that_is_gone_is_not_to_be_started(
    bus, nodes, monkeypatch, least
):
    """As that of a host that lost its power: it is silent, and gone once the host has started again."""
    nodes._spec = replace(SPEC, min_nodes=least)
    said = []
    bus.subscribe(lambda event: said.append(event.text) if isinstance(event, Note) else None)

    def silent(*_):
        raise StoreSilentError("no answer", gone=bool(said))

    monkeypatch.setattr(RendezvousStore, "newest", silent)
    until(lambda: nodes.poll() or len(said) == 2)
    lost = "rendezvous store lost (no answer): running workers go on, no other node can join"
    assert said[0] == f"{lost} until it answers again"
    warning = ". Do not start the endpoint's node again while this run goes on: it would begin a second run"
    assert said[1].removeprefix(lost).removesuffix(" with the same ranks") == (warning if least == 1 else "")


@pytest.fixture
def spare(store, nodes, monkeypatch):
    """Make this node a spare; two others have seats, two more do not. The rendezvous store is gone.

    Returns what the last two say of each other and of those with seats.
    """
    monkeypatch.setattr(PeerLinks, "update", lambda *_: None)
    first = nodes._standing.membership
    others = [node_of(number, f"other{number}", since=2) for number in range(1, 5)]
    seats = tuple(replace(first.slots[0], holder=each.id, last=each.id) for each in others[:2])
    second = replace(first, epoch=2, slots=seats, nodes=(*first.nodes, *others))
    said = [{"node": each.id, **votes.says(second, list)} for each in others[2:]]
    monkeypatch.setattr(nodes._verdicts.asking, "_told", lambda _: [{SAID: each} for each in said])
    notes(store).add("membership", 1, slots.to_json(second))
    until(lambda: nodes._standing.membership.epoch == 2)

    def gone(*_):
        raise StoreSilentError("Broken pipe", gone=True)

    monkeypatch.setattr(RendezvousStore, "newest", gone)
    return said


def lost_long_ago(nodes, number, cause):
    nodes._inbox.put(PeerSignal(f"{number:032x}", 2, "lost", cause, time.monotonic() - 3 * SPEC.hang_timeout))


def test_without_a_store_a_spare_takes_a_silent_nodes_seat_when_a_majority_has_lost_it(nodes, spare):
    seen, me = spare[0]["sees"], nodes._links.me
    lost_long_ago(nodes, 1, "hung")
    until(lambda: nodes._verdicts.asking.again)  # the answer is there
    assert nodes._standing.membership.slot_of(me) is None, "only the link between the two is broken"
    spare[0]["sees"] = seen[:1] + seen[2:]
    asked = nodes._verdicts.asking.again
    until(lambda: nodes._verdicts.asking.again > asked)
    assert nodes._standing.membership.slot_of(me) is None, "two of five have lost it"
    spare[1]["sees"] = seen[:1] + seen[2:]
    until(lambda: nodes._standing.membership.slot_of(me) == 0)


def test_without_a_store_a_spare_takes_the_seat_of_a_node_that_is_gone(nodes, spare):
    """Also while it does not see another one that the others see."""
    lost_long_ago(nodes, 1, "hung")
    until(lambda: nodes._verdicts.asking.again)
    lost_long_ago(nodes, 2, "crashed")
    until(lambda: nodes._standing.membership.slot_of(nodes._links.me) == 1)
    assert nodes._standing.membership.slots[0].holder == f"{1:032x}"


def loses_its_seat(nodes, store):
    notes(store).add(
        "membership",
        1,
        slots.to_json(
            replace(nodes._standing.membership, nodes=(), epoch=nodes._standing.membership.epoch + 1)
        ),
    )
    until(lambda: nodes._standing.membership is None)


def test_a_seat_that_is_lost_while_the_agent_is_at_something_long(nodes, store, signs):
    until(lambda: signs.alives > 3)
    assert (signs.seatlesses, signs.frees) == (0, 0), "the agent has not polled, and need not"
    loses_its_seat(nodes, store)
    until(lambda: signs.seatlesses == 1)
    before = signs.alives
    until(lambda: signs.alives > before + 3)
    assert signs.seatlesses == 1
    nodes.close()
    assert signs.frees == 1


def test_an_agent_that_hears_of_the_loss_ends_the_workers_itself(nodes, store, signs):
    until(lambda: nodes.poll() or nodes._standing.membership is not None)
    loses_its_seat(nodes, store)
    before = signs.alives
    until(lambda: nodes.poll() or signs.alives > before + 5)
    assert signs.seatlesses == 0


def test_a_slow_store_is_no_dead_thread(nodes, signs):
    store, before = nodes._round.store, signs.alives
    store.read("nothing")  # in the time that it takes others
    assert signs.alives > before


def test_a_node_that_is_done_just_before_it_leaves_says_so(nodes, monkeypatch):
    """A drained one: its workers of a fixed role have ended with 0, and the others must not repeat them."""
    told, turning, go = [], threading.Event(), threading.Event()
    close, stop = PeerLinks.close, nodes._rendezvous.stop

    def turn(*_):
        turning.set()
        assert go.wait(60)

    monkeypatch.setattr(PeerLinks, "done", lambda _: told.append("done"))
    monkeypatch.setattr(PeerLinks, "close", lambda *args: told.append("left") or close(*args))
    # While it is at something, this node leaves.
    monkeypatch.setattr(nodes._rendezvous, "stop", lambda: go.set() or stop())
    monkeypatch.setattr(nodes, "_turn", turn)
    assert turning.wait(60)
    nodes.done()
    nodes.close()
    assert told == ["done", "left"]


def test_a_dead_thread_shows_no_life(nodes, signs, monkeypatch):
    def fails(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(MultiNode, "_turn", fails)
    assert isinstance(ends(nodes), Stop)
    before = signs.alives
    nodes._thread.join(60)
    assert signs.alives == before
