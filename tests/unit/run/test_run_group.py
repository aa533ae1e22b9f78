"""``--restart group``: how the launcher's agent differs from torch's where a run ends."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="the launcher's agents are torch's")

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.events import Event, EventSource

from multiworld.run import launcher


@pytest.mark.parametrize(("state", "code"), [("SUCCEEDED", 0), ("UNHEALTHY", 1), ("FAILED", 1)])
def test_only_a_run_that_succeeded_ends_with_0(state, code):
    """UNHEALTHY is torch's state of a worker in uninterruptible sleep: it has no failures."""
    result = RunResult(WorkerState[state])
    agent = SimpleNamespace(run=lambda: result, get_event_succeeded=lambda: Event("run", EventSource.AGENT))
    run = SimpleNamespace(config=SimpleNamespace(), name="run")
    with contextlib.ExitStack() as leave:
        assert launcher._result_of(run, agent, leave).code == code
