"""The launcher's agents: how they differ from torch's, where a run ends too, and which signals count."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="the launcher's agents are torch's")

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.multiprocessing import LogsDest, SignalException

from multiworld.run import launcher
from multiworld.run.signals import Arrivals, Wake
from multiworld.run.workers import agent as agent_module
from multiworld.run.workers.agent import WorkerAgent
from multiworld.run.workers.group_agent import GroupAgent
from multiworld.run.workers.process import ProcessExit, stop_all
from multiworld.run.workers.ranks import WorkerRank


@pytest.mark.parametrize(("state", "code"), [("SUCCEEDED", 0), ("UNHEALTHY", 1), ("FAILED", 1)])
def test_only_a_run_that_succeeded_ends_with_0(state, code):
    """UNHEALTHY is torch's state of a worker in uninterruptible sleep: it has no failures."""
    result = RunResult(WorkerState[state])
    agent = SimpleNamespace(run=lambda: result, get_event_succeeded=lambda: Event("run", EventSource.AGENT))
    run = SimpleNamespace(config=SimpleNamespace(), name="run")
    assert launcher._result_of(run, agent, lambda: None).code == code


def raises(number, frame):
    raise SignalException("as torch's handler", sigval=signal.Signals(number))


@pytest.fixture
def agent():
    """An agent that is about to end its workers, with torch's handler of SIGTERM."""
    before = signal.signal(signal.SIGTERM, raises)
    made = object.__new__(GroupAgent)
    made._arrivals, made._signals, made._running, made._stopping = Arrivals(), (signal.SIGTERM,), {}, False
    made._arrivals.open()
    yield made
    made._arrivals.close()
    signal.signal(signal.SIGTERM, before)


def swallowed():
    with contextlib.suppress(Exception):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("lost", [False, True], ids=["raised", "in an except Exception"])
def test_a_signal_while_workers_are_stopped_for_a_restart_ends_the_run(agent, monkeypatch, lost):
    sent = []

    def shutdown(self, death_sig=signal.SIGTERM, *more, **options):
        sent.append(death_sig)
        if len(sent) == 1:
            swallowed() if lost else os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(LocalElasticAgent, "_shutdown", shutdown)
    with pytest.raises(SignalException) as caught:
        agent._stop_workers(None)
    assert caught.value.sigval == signal.SIGTERM
    assert sent == [signal.SIGTERM], "they have their grace period"


class Stubborn:
    """A worker that goes on after SIGTERM; meanwhile the launcher gets a signal."""

    rank = 0
    descriptor = None

    def __init__(self, number):
        self.number, self.sent, self.looks = number, [], 0

    def send(self, number):
        self.sent.append(number)

    def ended(self):
        self.looks += 1
        if self.looks == 1:
            signal.raise_signal(self.number)
        return self.looks == 4

    def collect(self, *, stopped):
        assert stopped
        return ProcessExit(0, None)


@pytest.mark.parametrize(
    ("number", "sent"),
    [(signal.SIGUSR1, [signal.SIGTERM]), (signal.SIGHUP, [signal.SIGTERM, signal.SIGKILL])],
)
def test_only_a_signal_that_ends_the_run_ends_the_grace_period(number, sent):
    """SIGUSR1, which retires workers, asks gently."""
    wake = Wake()
    try:
        wake.listen((signal.SIGUSR1, signal.SIGHUP))
        worker = Stubborn(number)
        stop_all([worker], signal.SIGTERM, 60.0, wake, ends=(signal.SIGTERM, signal.SIGHUP))
    finally:
        wake.close()
    assert worker.sent == sent


def test_a_signal_that_comes_while_workers_are_killed_is_left_to_a_run_that_goes_on():
    wake = Wake()
    try:
        wake.listen((signal.SIGHUP,))
        stop_all([Stubborn(signal.SIGHUP)], signal.SIGKILL, 0.0, wake, ends=(signal.SIGHUP,))
        assert wake.came((signal.SIGHUP,))
    finally:
        wake.close()


def test_signals_are_heard_while_the_other_nodes_are_told_and_after_the_kill():
    class Pressed(Stubborn):
        """Gets a signal at each look but the last."""

        def ended(self):
            self.looks += 1
            if self.looks < 4:
                signal.raise_signal(self.number)
            return self.looks == 4

        def send(self, number):
            super().send(number)
            if number == signal.SIGKILL:
                killed.set()

    killed, told, wake = threading.Event(), [], Wake()
    try:
        wake.listen((signal.SIGHUP,))
        stop_all(
            [Pressed(signal.SIGHUP)], signal.SIGTERM, 60.0, wake, ends=(signal.SIGHUP,),
            meanwhile=lambda: told.append(killed.wait(20)),
        )  # fmt: skip
        assert told == [True], "killed while they were told, whose end was waited for"
        assert not wake.came((signal.SIGHUP,)), "one that waits lets no wait for the ends sleep"
    finally:
        wake.close()


@pytest.mark.parametrize("given", [None, "/run/timers"], ids=["torch's file", "a file that was given"])
def test_workers_of_a_seat_that_is_taken_again_have_the_file_of_torchs_timers(given, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    monkeypatch.delenv("TORCHELASTIC_TIMER_FILE", raising=False)
    if given is not None:
        monkeypatch.setenv("TORCHELASTIC_TIMER_FILE", given)
    served = []

    def server(file_path, **_):
        return SimpleNamespace(start=lambda: served.append(file_path))

    monkeypatch.setattr("torch.distributed.elastic.timer.FileTimerServer", server)
    agent = object.__new__(WorkerAgent)
    agent._worker_watchdog = None
    for size in (1, 2):
        envs = {rank: {"TORCHELASTIC_RUN_ID": "run"} for rank in range(size)}
        agent._setup_local_watchdog(envs)
        assert [each.get("TORCHELASTIC_TIMER_FILE") for each in envs.values()] == served * size
    assert len(served) == 1, "one server"
    assert given in {None, *served}


@pytest.mark.parametrize("fails", ["credentials", "folder", "context", "start", ""])
def test_a_start_that_failed_is_taken_back_at_the_orphan_reaper(fails, monkeypatch):
    announced, made = set(), object.__new__(WorkerAgent)

    def at(step):
        if step == fails:
            raise OSError(24, "Too many open files")

    class Context(SimpleNamespace):
        def __init__(self, *_, **__):
            at("context")

        def start(self):
            at("start")

        def close(self):
            pass

    def token():
        announced.add("t1")
        return "t1"

    reaper = SimpleNamespace(
        token=token, not_started=announced.discard, started=lambda token, *_, **__: announced.discard(token)
    )
    made._context = SimpleNamespace(
        restarts=SimpleNamespace(attempt=lambda _: 0), environment={}, reaper=reaper, forks=None,
        credentials=lambda *_: at("credentials") or {}, bus=SimpleNamespace(publish=lambda _: None),
    )  # fmt: skip
    made._envs, made._log_line_prefix_template, made._filters = {0: {}}, None, ([], [])
    made._logs = SimpleNamespace(
        next_start=lambda _: at("folder") or LogsDest(tee_stdouts={}, tee_stderrs={}), filtered=(None, None)
    )
    made._worker_group = SimpleNamespace(spec=SimpleNamespace(entrypoint="program", args=()))
    made._crew = SimpleNamespace(processes={})
    process = SimpleNamespace(pid=1, leads=True, descriptor=None)
    monkeypatch.setattr(agent_module, "ProgramContext", Context)
    monkeypatch.setattr(agent_module, "WorkerProcess", lambda *_: process)
    place = WorkerRank(0, 0, 1, "default", 0, 1)
    with pytest.raises(OSError, match="Too many") if fails else contextlib.nullcontext():
        made._start(place)
    assert announced == set()
