"""Launchers of several nodes that stand still: their workers have ended before other nodes have their ranks."""

from __future__ import annotations

import contextlib
import signal
from functools import partial

import pytest
from kits.contract.nodekit import free_port
from kits.contract.runkit import is_living, launched

pytestmark = [pytest.mark.everyday, pytest.mark.timeout(300)]

WORKER = """
tell("up")
hold()
tell("done")
"""


@pytest.fixture
def nodes(tmp_path):
    """Returns a function that starts launchers on loopback, a worker each; the first serves their store."""
    with contextlib.ExitStack() as runs:
        yield partial(start, runs, tmp_path)


def start(runs, folder, count, nnodes, hang):
    worlds = folder / "worlds.toml"
    worlds.write_text('[roles]\nworker = 2\n\n[worlds.all]\nmembers = ["worker:*"]\n')
    port, made = free_port(), []
    for number in range(count):
        place = folder / str(number)
        place.mkdir()
        options = [
            "--worlds", str(worlds), "--nproc-per-node", "1", "--nnodes", nnodes, "--max-restarts", "0",
            "--rdzv-id", "still", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1",
            "--rdzv-conf", f"is_host={int(number == 0)},last_call_timeout=3", "--node-hang-timeout", str(hang),
        ]  # fmt: skip
        made.append(runs.enter_context(launched(place, WORKER, options=options)))
    return made


def up(runs, count):
    """Wait until so many workers have come up; return them with their launchers."""
    runs[0].wait_for(lambda: sum(len(run.told("up")) for run in runs) >= count, f"{count} workers")
    return [(run, told) for run in runs for told in run.told("up")]


def stopped(runs, count=2):
    """Stop the launcher of a worker, not the one with the store, and wait until its worker has ended."""
    run, worker = next((run, told) for run, told in up(runs, count) if run is not runs[0])
    run.signal(signal.SIGSTOP)
    run.wait_for(lambda: not is_living(worker.pid), "the end of the stopped launcher's worker")
    return run, worker


def end(runs):
    for run in runs:
        run.say()
    for run in runs:
        assert run.ended() == 0, run.report()
        assert run.leftovers() == []


def test_a_rank_does_not_run_twice_while_its_launcher_is_stopped(nodes):
    runs = nodes(3, "2:3", hang=2)
    first, worker = stopped(runs)
    assert len(up(runs, 2)) == 2, "another node has started the rank already"
    run, again = next(
        each for each in up(runs, 3) if each[1].pid != worker.pid and each[1].rank == worker.rank
    )
    assert run is not first
    first.signal(signal.SIGCONT)
    first.wait_line("event=note .*this launcher stood still for 5 s or longer")
    first.wait_line("event=seat seat=-")
    first.wait_line(
        "event=node-joined", count=4
    )  # it sees both others for the second time: it is a spare now
    assert is_living(again.pid)
    assert first.told("done") == []
    end(runs)


def test_a_launcher_that_wakes_up_in_time_has_its_seat_again(nodes):
    """No restart is counted, of which there is none, and the other launchers run on."""
    runs = nodes(2, "2:2", hang=6)
    run, worker = stopped(runs)
    run.signal(signal.SIGCONT)
    run.wait_line("event=note .*this launcher stood still for 12 s or longer")
    again = up(runs, 3)[-1][1]
    assert (again.rank, again.attempt) == (worker.rank, 0)
    end(runs)
