"""A node's workers as commands, the drain signal and losses change them; processes are stood in for."""

from __future__ import annotations

import signal
import time
from collections import deque
from types import SimpleNamespace

import pytest
from kits.runstatekit import run_of
from torch.distributed.elastic.multiprocessing import SignalException

from multiworld.run import events as h
from multiworld.run.events import EventBus, WorkerEnded, WorkerRetiring, WorkerStopped
from multiworld.run.signals import REPEATS
from multiworld.run.workers import scaler
from multiworld.run.workers.agent import WorkerAgent
from multiworld.run.workers.ranks import WorkerRank
from multiworld.run.workers.retirements import Retirements
from multiworld.run.workers.scaler import DRAIN_SIGNAL, Crew, Request, Scaler
from multiworld.run.worldsfile.parse import parse

PLAN = parse('[roles]\ntrainer = "1:4"\n[worlds.train]\nmembers = ["trainer:*"]\n', "plan.toml")
ENDED = SimpleNamespace(failure=None, exitcode=0)
KILLED = SimpleNamespace(failure=object(), exitcode=-15)


class Node:
    """A crew of two, with what was done to it."""

    def __init__(self, plan=PLAN):
        self.crew = Crew(Retirements(5.0))
        self.crew.places = {rank: WorkerRank(rank, rank, 4, "trainer", rank, 4) for rank in range(4)}
        self.crew.wanted = {0, 1}
        self.seen, self.told, self.signals = [], deque(maxlen=1), []
        bus = EventBus()
        bus.subscribe(self.seen.append)
        self.scaler = Scaler(self.crew, plan, bus, lambda ranks: self.told.append(tuple(ranks)), self.start)
        self.starts = 0
        for rank in (0, 1):
            self.start(rank)

    def start(self, rank):
        assert rank not in self.crew.processes
        self.starts += 1
        self.crew.processes[rank] = SimpleNamespace(
            rank=rank, pid=4000 + self.starts, started=float(self.starts), came_up=True,
            send=lambda number: self.signals.append((rank, number.name)),
        )  # fmt: skip

    def says(self, nodes=1, **said):
        answers = []
        self.scaler.obey(Request(said, answers.append), nodes)
        (answer,) = answers
        return answer.get("done") or answer.get("error", answer)

    def ends(self, rank, how=ENDED):
        process = self.crew.processes.pop(rank)
        assert rank in self.crew.retirements
        self.scaler.has_retired(process, how)


def test_a_request_whose_command_has_given_up_is_dropped():
    """The launcher waited for other nodes, and the command has said that there was no answer."""
    node = Node()
    answers = []
    node.scaler.obey(Request({"workers": 3}, answers.append, lambda: False), 1)
    assert (sorted(node.crew.processes), answers) == ([0, 1], [])


def test_more_and_fewer():
    node = Node()
    assert node.says(workers=3) == ["starts trainer:2 (rank 2)"]
    assert sorted(node.crew.processes) == [0, 1, 2]
    assert node.says(workers=1) == ["retires trainer:2 (rank 2)", "retires trainer:1 (rank 1)"]
    assert node.told.pop() == (2, 1)
    assert [type(event) for event in node.seen] == [WorkerRetiring, WorkerRetiring]
    node.ends(2)
    node.ends(1, KILLED)
    assert node.told.pop() == ()
    assert [type(event) for event in node.seen[2:]] == [WorkerEnded, WorkerStopped]
    assert (node.crew.wanted, node.crew.due, node.crew.over) == ({0}, {}, False)
    assert node.says(workers=2) == ["starts trainer:1 (rank 1)"]
    assert "This node may have 1 to 4" in node.says(workers=0)
    assert "this node has no workers" in node.says(0, workers=2)


def test_one_that_is_wanted_again_while_it_drains():
    node = Node()
    node.says(workers=1)
    assert node.says(workers=4) == [f"starts trainer:{rank} (rank {rank})" for rank in (1, 2, 3)]
    assert sorted(node.crew.processes) == [0, 1, 2, 3], "the process that drains has the place"
    node.ends(1)
    assert list(node.crew.due) == [1]


def test_places_that_no_node_has_are_not_counted():
    node = Node(parse('[roles]\ntrainer = "2:4"\n[worlds.train]\nmembers = ["trainer:*"]\n', "plan.toml"))
    del node.crew.places[2], node.crew.places[3]
    node.crew.vacant = (2, 3)
    assert "at least 2 workers" in node.says(2, workers=0)
    node.scaler.drain()
    assert not node.scaler.goes_on_without(1)
    assert node.crew.wanted == {0, 1}
    node.crew.vacant = ()
    assert node.scaler.goes_on_without(1)
    node.scaler.drain()
    assert node.crew.wanted == set()


def test_one_that_waits_for_its_restart_is_gone_at_once():
    node = Node()
    del node.crew.processes[1]
    node.crew.due[1] = 1e9
    assert node.says(workers=1) == ["retires trainer:1 (rank 1)"]
    assert (node.crew.due, 1 in node.crew.retirements) == ({}, False)
    state = run_of(
        h.WorkerStarted(1.0, 1, "trainer", 1, 1, 77, 0),
        h.WorkerFailed(2.0, 1, 77, 0, 1, "exit code 1"),
        h.WorkerRestarting(3.0, 1, 1, 30.0, 2),
        *node.seen,
    )
    assert state.snapshot()["workers"][0]["state"] == "stopped"


def test_signals_when_the_time_is_over():
    node = Node()
    node.says(worker="trainer:1", drain=0)
    node.scaler.press()
    node.scaler.press()
    assert node.signals == [(1, "SIGTERM")]


def test_the_drain_signal():
    node = Node()
    assert node.scaler.signals == (DRAIN_SIGNAL,)
    node.scaler.drain()
    assert (node.crew.wanted, node.told.pop()) == ({0}, (1,))
    for plan in (None, parse("[roles]\ntrainer = 4\n", "p")):
        other = Node(plan)
        assert other.scaler.signals == ()
        other.scaler.drain()
        assert other.crew.wanted == {0, 1}


def test_sigterm_retires_first_and_only_once():
    node = Node()
    assert not node.scaler.drains_first(signal.SIGINT, 9.0)
    assert not node.scaler.drains_first(signal.SIGTERM, 0.0), "without --drain all get it at once"
    assert not node.scaler.drained()
    assert node.scaler.drains_first(signal.SIGTERM, 9.0)
    assert node.told.pop() == (1,)
    assert [event.drain for event in node.seen if isinstance(event, WorkerRetiring)] == [9.0]
    assert 0 < node.scaler.drain_end - time.monotonic() <= 9.0
    assert not node.scaler.drained()
    assert node.scaler.drains_first(signal.SIGTERM, 9.0), "the same one again: GNU timeout sends two"
    assert not node.scaler.drains_first(signal.SIGINT, 9.0)
    node.scaler.drain_end -= REPEATS
    assert not node.scaler.drains_first(signal.SIGTERM, 9.0), "a second one ends the run"
    node.ends(1)
    assert node.scaler.drained()


def test_sigterm_does_not_wait_for_longer():
    node = Node()
    assert node.scaler.drains_first(signal.SIGTERM, 1e-9)
    assert node.scaler.drained()


@pytest.mark.parametrize("text", ["[roles]\ntrainer = 4\n", '[roles]\ntrainer = "2:4"\n'])
def test_sigterm_ends_workers_at_once_that_the_run_needs(text):
    node = Node(parse(text, "p"))
    assert not node.scaler.drains_first(signal.SIGTERM, 9.0)
    assert not node.scaler.drained()


def test_a_worker_that_is_lost_for_good():
    node = Node()
    del node.crew.processes[1]
    assert node.scaler.goes_on_without(1)
    assert node.crew.wanted == {0}
    del node.crew.processes[0]
    assert not node.scaler.goes_on_without(0)
    assert not Node(None).scaler.goes_on_without(0)


def test_all_that_are_ended_in_another_way():
    node = Node()
    node.says(workers=1)
    node.scaler.forget()
    assert (node.told.pop(), node.crew.retirements.ranks) == ((), ())


def test_the_end_of_a_node():
    node = Node()
    node.says(workers=1)
    node.crew.values[0] = None
    del node.crew.processes[0]
    assert not node.crew.over, "one drains"
    node.ends(1)
    assert node.crew.over
    assert not node.crew.idle


def test_a_node_whose_workers_were_all_retired_is_not_done_and_starts_some_again():
    node, told = Node(), []
    agent = SimpleNamespace(_crew=node.crew, _done=False, _idle=False, _note=lambda *_: told.append("note"))
    nodes = SimpleNamespace(done=lambda: told.append("done"), idle=lambda *, yes: told.append(yes))
    agent._context = SimpleNamespace(nodes=nodes)

    def tells():
        told.clear()
        WorkerAgent._tell_ended(agent)
        return told

    del node.crew.places[2], node.crew.places[3]  # they are another node's
    node.says(nodes=2, workers=0)
    assert tells() == [], "they drain"
    node.ends(0)
    node.ends(1)
    assert (node.crew.over, node.crew.idle) == (False, True)
    assert tells() == [True, "note"]
    assert tells() == []
    node.says(nodes=2, workers=1)
    assert tells() == [False]
    del node.crew.processes[0]
    node.crew.values[0] = None
    assert tells() == ["done"]
    assert tells() == []
    agent._done, agent._idle = False, None  # another seat
    node.crew.places = {}
    node.crew.wanted = set()
    assert tells() == [False], "a spare is not idle: it has no seat"


def test_a_start_that_fails_is_answered_and_the_others_go_on():
    node = Node()

    def fails(rank):
        if rank == 2:
            raise OSError(f"no memory for {rank}")
        node.start(rank)

    node.scaler._start = fails
    why = "could not be started: OSError: no memory for 2"
    assert node.says(workers=4) == f"trainer:2 (rank 2) {why}; starts trainer:3 (rank 3)"
    assert (sorted(node.crew.processes), node.crew.wanted, node.crew.due) == ([0, 1, 3], {0, 1, 3}, {})
    assert [event.text for event in node.seen] == [f"rank 2 {why}"]
    node.scaler._start = node.start
    assert node.says(workers=4) == ["starts trainer:2 (rank 2)"]


def test_a_request_that_fails_for_a_reason_of_its_own_is_answered(monkeypatch):
    node = Node()
    monkeypatch.setattr(scaler.scaling, "changed", lambda *_, **__: 1 / 0)
    assert node.says(workers=4) == "ZeroDivisionError: division by zero"
    assert node.crew.wanted == {0, 1}


def test_one_that_had_ended_with_0_and_is_asked_for_again():
    node = Node()
    del node.crew.processes[1]
    node.crew.values[1] = None
    assert node.says(workers=2) == ["starts trainer:1 (rank 1)"]
    assert [each.rank for each in node.crew.going_on()] == [0, 1]
    assert node.starts == 3, "it runs already"


@pytest.mark.parametrize(
    ("fixed", "ended", "done"),
    [(True, (0, 1), 1), (True, (0,), 0), (True, (), 0), (False, (), 0)],
    ids=["all that are needed", "one of the range is needed and runs", "none", "no fixed role"],
)
def test_a_node_that_was_drained_keeps_the_ranks_of_a_fixed_role_whose_workers_have_ended(fixed, ended, done):
    roles = 'hub = 1\ntrainer = "1:3"' if fixed else 'trainer = "1:4"'
    node = Node(parse(f'[roles]\n{roles}\n[worlds.train]\nmembers = ["trainer:*"]\n', "plan.toml"))
    if fixed:
        node.crew.places[0] = WorkerRank(0, 0, 4, "hub", 0, 1)
        node.start(2)
        node.crew.wanted.add(2)
    assert node.scaler.drains_first(signal.SIGTERM, 9.0)
    for rank in ended:
        del node.crew.processes[rank]
        node.crew.values[rank] = None
    for rank in tuple(node.crew.retirements.ranks):
        node.ends(rank)
    told = []
    context = SimpleNamespace(
        wake=SimpleNamespace(signalled=lambda: None), nodes=SimpleNamespace(done=lambda: told.append(1))
    )
    agent = SimpleNamespace(
        _worker_group=None, _context=context, _scaler=node.scaler,
        _initialize_workers=lambda _: None, _step=lambda: None,
    )  # fmt: skip
    with pytest.raises(SignalException):
        WorkerAgent._invoke_run(agent)
    assert len(told) == done
