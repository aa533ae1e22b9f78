"""After which ends of its agent a launcher closes the rendezvous, in which then no node can come any more."""

from __future__ import annotations

import contextlib
import signal
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="the launcher's agents are torch's")

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from multiworld.run import launcher
from multiworld.run.errors import RunError

SUCCEEDED, FAILED = RunResult(WorkerState.SUCCEEDED), RunResult(WorkerState.FAILED)
SIGNALLED = SignalException("SIGTERM", signal.SIGTERM)


@pytest.mark.parametrize(
    ("restart", "alone", "end", "closes"),
    [
        ("worker", False, SUCCEEDED, True),
        ("worker", False, FAILED, True),
        ("worker", True, FAILED, False),
        ("worker", False, RunError("the nodes did not agree"), False),
        ("worker", False, OSError("a disk is full"), False),
        ("worker", False, SIGNALLED, False),
        ("worker", False, None, True),
        ("group", False, FAILED, True),
        ("group", False, OSError("a disk is full"), True),  # as torchrun
        ("group", False, SIGNALLED, False),
    ],
)
def test_the_rendezvous_is_closed_where_the_run_is_over_for_all_nodes(
    monkeypatch, restart, alone, end, closes
):
    def run():
        if isinstance(end, Exception):
            raise end
        return end

    monkeypatch.setattr(launcher.events, "record", lambda *_: None)
    agent = SimpleNamespace(
        run=run, alone=alone, get_event_failed=lambda: None, get_event_succeeded=lambda: None
    )
    asked = SimpleNamespace(
        config=SimpleNamespace(), options=SimpleNamespace(restart=restart), name="train.py"
    )
    closed = []
    with pytest.raises(type(end)) if isinstance(end, Exception) else contextlib.nullcontext():
        launcher._result_of(asked, agent, lambda: closed.append(True))
    assert closed == [True] * closes


@pytest.mark.parametrize("backend", ["etcd-v2", "c10d"])
def test_a_launcher_that_comes_when_the_run_is_over_says_so(monkeypatch, backend):
    def agent(*_):
        raise RendezvousClosedError

    monkeypatch.setattr(launcher, "_run_agent", agent)
    config = SimpleNamespace(run_id="train", rdzv_backend=backend, nproc_per_node=1, max_nodes=2)
    torch = SimpleNamespace(redirects="0", tee="0", local_ranks_filter="")
    asked = launcher._Run(SimpleNamespace(torch=torch), config, "train.py", [], None, None, 1.0)
    end = launcher._run_to_end(asked, None)
    assert (end.code, end.reason) == (
        1,
        "run 'train' is over, and its id stays closed in the rendezvous's store",
    )
    assert "Give another --rdzv-id" in end.report
    assert ("/v2/keys/torch/elastic/rendezvous/train" in end.report) == (backend == "etcd-v2")
