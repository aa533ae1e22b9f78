"""Worlds of a range at the launcher's store: the node that serves it leaves, and another one comes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from kits.contract.runkit import launched

pytestmark = pytest.mark.timeout(300)

FILE = """
[roles]
{roles}

[worlds.fleet]
members = ["worker:*"]
last_call = 2
timeout = {timeout}
hang_timeout = 30
"""

WORKERS, WITH_HUB = 'worker = "1:4"', 'hub = 1\nworker = "1:3"'
"""Roles: the node with the store has a worker of the world, or one that is in no world."""

SCRIPT = """
import os
import torch, multiworld as mw

class Count:
    steps = torch.zeros(1)

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]

def said(name):
    return os.path.exists(os.environ["M8D_RUNKIT_TOLD"] + "." + name)

def join():
    while True:
        try:
            return mw.join_all(state={"fleet": count})["fleet"]
        except mw.JoinTimeoutError as late:
            tell("late", text=str(late))

if os.environ["ROLE_NAME"] == "hub":
    tell("hub")
    hold("go")
    raise SystemExit
count, known = Count(), 0
world = join()
while world.state is not mw.State.CLOSED:
    if known != world.generation:
        known = world.generation
        tell("in", size=world.world_size, seats=world.seats, generation=known, steps=count.steps.item())
    try:
        ones = torch.tensor([1.0, said("go")])
        world.all_reduce(ones)
        assert int(ones[0]) == world.world_size
        if ones[1]:
            break
        count.steps = count.steps + 1
        if not sys.argv[1:] or said("on"):
            world.advance()
    except mw.BrokenWorldException as broken:
        tell("broken", cause=str(broken.cause))
        join()
    time.sleep(0.02)
tell("left" if world.state is mw.State.CLOSED else "done")
"""


class Nodes(contextlib.ExitStack):
    """Launchers of one run; their rendezvous is in this process, which none of them takes along."""

    def __init__(self, folder):
        super().__init__()
        self._folder = folder
        self.roles, self.file = WORKERS, FILE
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)

    def start(self, number, *args, timeout=120, script=SCRIPT):
        """Start the node at 127.0.0.`number`; of those that meet at first, the lowest has rank 0 and the store."""
        folder = self._folder / str(number)
        folder.mkdir()
        (folder / "worlds.toml").write_text(self.file.format(roles=self.roles, timeout=timeout))
        options = [
            "--worlds", str(folder / "worlds.toml"), "--nproc-per-node", "1", "--nnodes", "1:4", "--rdzv-id", "moved",
            "--rdzv-endpoint", f"127.0.0.1:{self._store.port}", "--rdzv-conf", "is_host=0,last_call_timeout=3",
            "--local-addr", f"127.0.0.{number}", "--node-hang-timeout", "30", "--drain", "60", "--max-restarts", "1",
        ]  # fmt: skip
        return self.enter_context(launched(folder, script, *args, options=options))


@pytest.fixture
def nodes(tmp_path):
    with Nodes(tmp_path) as every:
        yield every


def last(run):
    return next(iter(reversed(run.told("in"))), {})


def together(size, *runs):
    """Wait until these nodes' workers are in one generation of that size."""

    def there():
        found = [last(run) for run in runs]
        same = {(each.get("generation"), each.get("size"), tuple(each.get("seats", ()))) for each in found}
        return len(same) == 1 and found[0].get("size") == size

    runs[0].wait_for(there, f"{size} members; last seen: {[last(run) for run in runs]}")


def ended(*runs):
    for run in runs:
        run.say()
    for run in runs:
        run.ended()
        assert run.leftovers() == []


def by_sigterm(first):
    first.signal(signal.SIGTERM)
    assert first.ended() == 128 + signal.SIGTERM


def by_sigkill(first):
    first.signal(signal.SIGKILL)
    first.ended()


def in_two(nodes):
    """Two nodes, of which the first has the store and no worker of the world."""
    nodes.roles = WITH_HUB
    first, second = nodes.start(2), nodes.start(3, "quiet")
    first.wait_told("hub")
    together(1, second)
    return first, second


@pytest.mark.parametrize("leaves", [by_sigterm, by_sigkill])
def test_a_newcomer_comes_to_the_world_whose_store_has_left(nodes, leaves):
    first, second = nodes.start(2), nodes.start(3)
    together(2, first, second)
    leaves(first)
    third = nodes.start(4)
    together(2, second, third)
    assert third.told("in")[0].steps > 0
    assert third.told("in")[0].generation > 2
    assert len(second.told("broken")) == (leaves is by_sigkill)
    assert third.told("broken") == []
    ended(second, third)


def test_a_newcomer_has_the_seat_of_a_node_that_was_drained(nodes):
    """Its workers have retired, not finished: where all seats are taken the newcomer would be a spare for ever."""
    nodes.roles = 'worker = "1:2"'
    first, second = nodes.start(2), nodes.start(3)
    together(2, first, second)
    by_sigterm(second)
    third = nodes.start(4)
    together(2, first, third)
    assert first.told("broken") == []
    ended(first, third)


def test_a_newcomer_waits_for_members_that_have_not_told_the_new_store(nodes):
    first, second = in_two(nodes)
    by_sigterm(first)
    hub = nodes.start(4)
    hub.wait_told("hub")
    third = nodes.start(5, timeout=8)
    (late,) = third.wait_told("late")[:1]
    assert (
        "the world may work already, and its store is a new one: it waited for worker 1, a member of it"
        in late.text
    )
    third.wait_line("waits for worker 1, a member of it, to tell the run's new store of it")
    assert third.told("in") == []
    second.say("on")
    together(2, second, third)
    assert third.told("in")[0].steps > 0
    ended(hub, second, third)


def test_a_world_that_works_nowhere_begins_at_a_store_that_has_moved(nodes):
    first, second = in_two(nodes)
    by_sigterm(first)
    hub = nodes.start(4)
    hub.wait_told("hub")
    third = nodes.start(5)
    third.wait_line("waits for worker 1, a member of it")
    assert third.told("in") == []
    os.kill(last(second).pid, signal.SIGKILL)
    second.say("on")
    together(2, second, third)
    ended(hub, second, third)


ENDS_LATE = """
ended = []
def late(number, frame):
    tell("asked")
    hold("end")
    tell("ended")
    ended.append(number)
signal.signal(signal.SIGTERM, late)
tell("began")
while not ended and not _os.path.exists(_os.environ["M8D_RUNKIT_TOLD"] + ".go"):
    time.sleep(0.02)
"""


def test_a_node_leaves_once_its_workers_have_ended(nodes, tmp_path):
    """Until then its ranks are theirs: the spare's workers would be a second time in the run."""
    nodes.roles, nodes.file = "worker = 2", "[roles]\n{roles}\n"
    each = [nodes.start(number, script=ENDS_LATE) for number in (2, 3, 4)]
    each[0].wait_for(lambda: sum(bool(run.told("began")) for run in each) == 2, "two nodes with a worker")
    first, second = (run for run in each if run.told("began"))
    (spare,) = (run for run in each if run not in {first, second})
    second.signal(signal.SIGTERM)
    second.wait_told("asked")
    spare.wait_line("event=seat seat=-")
    time.sleep(3.0)  # a node that has left is replaced in a fraction of that
    assert spare.told("began") == []
    second.say("end")
    assert second.ended() == 128 + signal.SIGTERM
    (began,) = spare.wait_told("began")
    assert began.rank == second.told("began")[0].rank
    assert began.at > second.told("ended")[0].at
    ended(first, spare)
