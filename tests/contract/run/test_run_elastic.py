"""m8d-run and worlds of a range: workers are started and retired while the world works, and one is lost."""

from __future__ import annotations

import os
import re
import shutil
import signal

import pytest
from kits.contract.nodekit import free_port
from kits.contract.runkit import launched

from multiworld.run.control import commands
from multiworld.run.control.sockets import sockets
from multiworld.run.view.status import ask_all

pytestmark = pytest.mark.timeout(300)

FILE = """
[roles]
trainer = "1:4"

[worlds.train]
members = ["trainer:*"]
last_call = 2
timeout = 120
hang_timeout = 30
"""

SCRIPT = """
import os
import torch, multiworld as mw

def said(name):
    return os.path.exists(os.environ["M8D_RUNKIT_TOLD"] + "." + name)

class Model:
    weight = torch.zeros(4)

    def state_dict(self):
        if said("slow") and os.environ["ROLE_RANK"] < "2":  # who was there before
            tell("asked")
            hold("on")
        return {"weight": self.weight}

    def load_state_dict(self, state):
        self.weight = state["weight"]

def work(world):
    known = 0
    while world.state is not mw.State.CLOSED:
        if known != world.generation:
            known = world.generation
            tell("in", size=world.world_size, seats=world.seats, step=world.step, weight=model.weight[0].item())
        try:
            ones = torch.tensor([1.0, said("go")])
            world.all_reduce(ones)
            assert int(ones[0]) == world.world_size
            if ones[1]:
                return "done"
            model.weight = model.weight + 1
            world.advance()
        except mw.BrokenWorldException as broken:
            tell("broken", cause=str(broken.cause))
            world.wait_active() if sys.argv[1:] else mw.join_all()
    return "left"

model = Model()
tell("began")
world = mw.join_all(**({} if sys.argv[1:] else {"state": {"train": model}}))["train"]
tell(work(world), retiring=mw.retiring())
"""


def started(folder, workers, *args, options=()):
    (folder / "worlds.toml").write_text(FILE)
    given = ["--worlds", str(folder / "worlds.toml"), "--nproc-per-node", str(workers), *options]
    return launched(folder, SCRIPT, *args, options=given)


def run_id(run):
    (line,) = run.wait_line("event=run-started")
    return re.search(r" run=(\S+)", line)[1]


def snapshot(run):
    found = [each.snapshot for each in ask_all(sockets(), 30) if each.snapshot is not None]
    return next(each for each in found if each["run_id"] == run_id(run))


def together(run, size, *ranks):
    """Wait until these ranks are in one generation of this size."""
    for rank in ranks:
        run.wait_for(lambda: last(run, rank).get("size") == size, f"{size} members at rank {rank}")  # noqa: B023
    assert {tuple(last(run, rank).seats) for rank in ranks} == {tuple(last(run, ranks[0]).seats)}
    return set(last(run, ranks[0]).seats)


def reported(run, size):
    """Wait until the launcher knows that so many workers are in the world: it retires those first that are not."""

    def states():
        return [each["state"] for world in snapshot(run)["worlds"] for each in world["members"]]

    run.wait_for(lambda: states() == ["active"] * size, f"{size} workers that have reported their world")


def last(run, rank):
    return next(iter(reversed(run.told("in", rank=rank))), {})


def test_workers_are_started_and_retired_while_the_world_works(tmp_path):
    with started(tmp_path, 2) as run:
        together(run, 2, 0, 1)
        assert commands.scale([run_id(run)[:13], "--world", "train", "--size", "3"]) == 0
        assert together(run, 3, 0, 1, 2) == {"trainer:0", "trainer:1", "trainer:2"}
        newcomer = run.told("in", rank=2)[0]
        assert (newcomer.step, newcomer.weight) > (0, 0)  # it has the others' state
        assert newcomer.weight == newcomer.step
        seen = snapshot(run)["worlds"][0]
        assert (seen["size"], seen["sizes"], seen["state"], seen["waiting"]) == (3, "1:4", "active", 0)
        assert commands.retire([run_id(run), "trainer:0"]) == 0
        assert run.wait_told("left")[0].rank == 0
        assert together(run, 2, 1, 2) == {"trainer:1", "trainer:2"}
        run.signal(signal.SIGUSR1)  # whom the run can do without: down to the smallest number
        run.wait_told("left", 2)
        assert together(run, 1, 1) == {"trainer:1"}
        assert commands.scale([run_id(run), "--workers", "0"]) == commands.REFUSED
        run.say()
        assert run.ended() == 0
        assert [(each.rank, each.retiring) for each in run.told("left")] == [(0, True), (2, True)]
        assert [(each.rank, each.retiring) for each in run.told("done")] == [(1, False)]
        assert run.told("broken") == []
        assert re.search("failures=0 restarts=0 worlds_broken=0", run.text("err"))
        assert run.leftovers() == []


def test_sigterm_lets_workers_leave_first(tmp_path):
    with started(tmp_path, 3, options=["--drain", "60"]) as run:
        together(run, 3, 0, 1, 2)
        reported(run, 3)
        run.signal(signal.SIGTERM)
        run.wait_told("left", 2)
        assert run.ended() == 128 + signal.SIGTERM
        assert [(each.rank, each.retiring) for each in sorted(run.told("left"), key=lambda it: it.rank)] == [
            (1, True),
            (2, True),
        ]
        assert run.told("broken") == []
        assert "got SIGTERM: workers retire first, 2 of 3" in run.text("err")
        assert run.leftovers() == []


def test_the_run_goes_on_without_a_worker_that_was_killed(tmp_path):
    with started(tmp_path, 3, "plain") as run:
        together(run, 3, 0, 1, 2)
        os.kill(last(run, 1).pid, signal.SIGKILL)
        assert together(run, 2, 0, 2) == {"trainer:0", "trainer:2"}
        run.say()
        assert run.ended() == 0
        assert {each.rank for each in run.told("done")} == {0, 2}
        assert "the run goes on with 2 workers" in run.text("err")
        assert run.leftovers() == []


def test_a_newcomer_is_retired_while_it_gets_the_state(tmp_path):
    with started(tmp_path, 2) as run:
        together(run, 2, 0, 1)
        run.say("slow")
        assert commands.scale([run_id(run), "--workers", "3"]) == 0
        run.wait_told("asked")
        assert commands.retire([run_id(run), "trainer:2"]) == 0
        assert next(each for each in snapshot(run)["workers"] if each["rank"] == 2)["state"] == "retiring"
        run.say("on")
        assert run.wait_told("left")[0].rank == 2
        assert together(run, 2, 0, 1) == {"trainer:0", "trainer:1"}
        run.say()
        assert run.ended() == 0
        assert run.told("broken") == []
        assert run.leftovers() == []


def test_a_worker_that_does_not_end_is_ended(tmp_path):
    (tmp_path / "worlds.toml").write_text(FILE)
    text = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntell('began')\nhold()\n"
    options = ["--worlds", str(tmp_path / "worlds.toml"), "--nproc-per-node", "2", "--grace", "0.5"]
    with launched(tmp_path, text, options=options) as run:
        run.wait_told("began", 2)
        assert commands.retire([run_id(run), "1", "--drain", "0.2"]) == 0
        run.wait_line(r"rank 1 was retired and has not ended: it gets SIGTERM")
        run.wait_line(r"rank 1 was retired and has not ended: it gets SIGKILL")
        run.wait_line(r"worker=1 .*event=stopped exitcode=-9")
        assert commands.scale([run_id(run), "--workers", "2"]) == 0
        run.wait_told("began", 3)
        run.say()
        assert run.ended() == 0
        assert run.leftovers() == []


def test_workers_that_cannot_be_started_or_are_none_leave_the_others_as_they_are(tmp_path, capsys):
    (tmp_path / "worlds.toml").write_text(FILE)
    logs = tmp_path / "logs"
    options = ["--worlds", str(tmp_path / "worlds.toml"), "--nproc-per-node", "2", "--redirects", "3",
               "--log-dir", str(logs)]  # fmt: skip
    with launched(tmp_path, "tell('began')\nhold()\n", options=options) as run:
        first = {each.pid for each in run.wait_told("began", 2)}
        shutil.rmtree(logs)
        assert commands.scale([run_id(run), "--workers", "3"]) == commands.REFUSED
        assert "trainer:2 (rank 2) could not be started: FileNotFoundError" in capsys.readouterr().err
        for worker in ("trainer:0000000009", "trainer:0000000001"):
            assert commands.retire([run_id(run), worker]) == commands.REFUSED
        # Its next attempt has a folder of its own.
        assert commands.scale([run_id(run), "--workers", "3"]) == 0
        run.wait_told("began", 3)
        assert first <= set(run.alive())
        run.say()
        assert run.ended() == 0
        assert run.leftovers() == []


def of_two(endpoint, host, conf=""):
    """Options of one of up to two nodes; the rendezvous is at the host.

    Its last call takes some seconds: a node that waits looks whether there is a new round once a second.
    """
    return ["--nnodes", "1:2", "--rdzv-endpoint", endpoint, "--rdzv-id", "late", "--local-addr", "127.0.0.1",
            "--rdzv-conf", f"is_host={host},last_call_timeout=4{conf}", "--node-hang-timeout", "30"]  # fmt: skip


def test_workers_that_no_node_has_do_not_let_others_retire(tmp_path):
    endpoint = f"127.0.0.1:{free_port()}"
    (tmp_path / "worlds.toml").write_text(FILE)
    (tmp_path / "late").mkdir()
    text = "tell('began')\nhold()\n"
    options = ["--worlds", str(tmp_path / "worlds.toml"), "--nproc-per-node", "1"]
    with launched(tmp_path, text, options=[*options, *of_two(endpoint, 1)]) as first:
        first.wait_told("began")
        first.signal(signal.SIGUSR1)
        assert commands.scale([run_id(first), "--workers", "0"]) == commands.REFUSED
        assert "event=retiring" not in first.text()
        with launched(tmp_path / "late", text, options=[*options, *of_two(endpoint, 0)]) as second:
            second.wait_told("began")

            def retires():
                first.signal(signal.SIGUSR1)
                return "event=retiring" in first.text()

            first.wait_for(retires, "its worker retires, as the other node has one")
            first.say()
            second.say()
            assert [first.ended(), second.ended()] == [0, 0]
            assert first.leftovers() == second.leftovers() == []


def test_a_node_whose_workers_were_all_retired_keeps_its_seat_until_it_leaves(tmp_path):
    endpoint = f"127.0.0.1:{free_port()}"
    (tmp_path / "worlds.toml").write_text('[roles]\ntrainer = "1:2"\n')
    options = ["--worlds", str(tmp_path / "worlds.toml"), "--nproc-per-node", "1"]

    def node(name):
        (tmp_path / name).mkdir()
        # One that comes is let in once torch has dropped one that has left.
        of_node = of_two(endpoint, int(name == "first"), ",keep_alive_interval=2,keep_alive_max_attempt=5")
        return launched(tmp_path / name, "tell('began')\nhold()\n", options=[*options, *of_node])

    def kept(run):
        """Whether its last worker may not be retired; one that may goes on as well."""
        if commands.retire([str(run.pid), "0", "--drain", "600"]) == commands.REFUSED:
            return True
        assert commands.scale([str(run.pid), "--workers", "1"]) == 0
        return False

    with node("first") as first:
        first.wait_told("began")
        with node("second") as second:
            second.wait_told("began", rank=1)
            assert commands.retire([str(second.pid), "1", "--drain", "0"]) == 0
            second.wait_line("worker=1 .*event=stopped")
            assert commands.scale([str(second.pid), "--workers", "1"]) == 0
            second.wait_told("began", 2, rank=1)
            assert commands.scale([str(second.pid), "--workers", "0", "--drain", "0"]) == 0
            second.wait_line("worker=1 .*event=stopped", count=2)
            second.signal(signal.SIGTERM)
            assert second.ended() == 128 + signal.SIGTERM
        first.wait_for(lambda: kept(first), "seat 1 without a node: its ranks are not counted")
        with node("third") as third:
            third.wait_told("began", rank=1)
            first.say()
            third.say()
            assert [first.ended(), third.ended()] == [0, 0]
            assert first.leftovers() == third.leftovers() == []


def test_a_node_that_comes_later_brings_newcomers(tmp_path):
    endpoint = f"127.0.0.1:{free_port()}"
    (tmp_path / "late").mkdir()
    with started(tmp_path, 1, options=of_two(endpoint, 1)) as first:
        together(first, 1, 0)
        with started(tmp_path / "late", 1, options=of_two(endpoint, 0)) as second:
            together(second, 2, 1)
            assert together(first, 2, 0) == {"trainer:0", "trainer:1"}
            assert second.told("in")[0].weight == second.told("in")[0].step > 0
            first.say()
            assert [first.ended(), second.ended()] == [0, 0]
        assert first.told("broken") == second.told("broken") == []
