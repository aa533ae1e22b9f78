"""What the logs of a run say when a worker is killed: members' lines as JSON, the launcher's parts as notes."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time

import torch
from kits.contract.runkit import launched
from kits.contract.worldkit import HANG, PATIENCE

import multiworld as mw

FILE = """
[roles]
worker = 3

[worlds.all]
members = ["worker:*"]
timeout = 120
hang_timeout = 30
"""

SCRIPT = """
import torch, multiworld as mw

world = mw.join_all()["all"]
tell("in", generation=world.generation)
going = torch.full((1,), float(world.world_size))
while going.item() == world.world_size:  # all stop in the same round
    going = torch.tensor([float(not os.path.exists(os.environ["M8D_RUNKIT_TOLD"] + ".go"))])
    try:
        world.all_reduce(going)
    except mw.BrokenWorldException:
        world.wait_active()
        tell("in", generation=world.generation)
        going = torch.full((1,), float(world.world_size))
    time.sleep(0.05)
"""


def test_each_member_says_what_happened_to_its_world(tmp_path):
    log = {"M8D_LOG_LEVEL": "INFO", "M8D_LOG_FORMAT": "json"}
    (tmp_path / "worlds.toml").write_text(FILE)
    options = ["--worlds", str(tmp_path / "worlds.toml"), "--max-restarts", "1"]
    with launched(tmp_path, "import os\n" + SCRIPT, options=options, env=log) as run:
        first = run.wait_told("in", 3)
        # A line is written by another thread, and goes with its process.
        run.wait_for(lambda: run.text("err").count("-> opening") == 3, "lines of three members")
        lost = next(each for each in first if each.rank == 1)
        os.kill(lost.pid, signal.SIGKILL)
        run.wait_for(lambda: sum(each.generation == 2 for each in run.told("in")) == 3, "three members again")
        run.say()
        run.ended()
        text = run.text("err")
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert {line["program"] for line in lines} == {"multiworld"}
    assert len({line["run"] for line in lines}) == 1
    broke = [line for line in lines if line["level"] == "warning" and "-> broken" in line["message"]]
    assert {(line["world"], line["generation"], line["rank"]) for line in broke} == {
        ("all", 1, 0),
        ("all", 1, 2),
    }
    assert all("rank 1" in line["message"] for line in broke)
    active = [line for line in lines if "-> opening" in line["message"]]
    assert sorted((line["generation"], line["rank"]) for line in active) == [
        (generation, rank) for generation in (1, 2) for rank in range(3)
    ]
    assert {line["pid"] for line in lines} == {each.pid for each in run.told("in")}


def in_two(me):
    """A member of two worlds whose log blocks at the breakage of the first."""

    class Blocking(logging.Handler):
        def emit(self, record):
            if "-> broken" in record.getMessage():
                threading.Event().wait(3 * PATIENCE)

    if me.rank == 0:
        logging.getLogger("multiworld").addHandler(Blocking())
    wide = mw.join("wide", me.rank, 3, store=me.store, timeout=PATIENCE, hang_timeout=HANG)
    if me.rank == 2:
        me.emit("in")
        me.hear()
    narrow = mw.join("narrow", me.rank, 2, store=me.store, timeout=PATIENCE, hang_timeout=HANG)
    me.emit("in")
    try:
        while True:
            wide.all_reduce(torch.ones(1))
    except mw.BrokenWorldException as broken:
        me.emit("broken", cause=broken.cause)
    end, over = time.monotonic() + 2 * HANG, torch.zeros(1)
    while not over.item():  # both stop in the same round
        over = torch.tensor([float(time.monotonic() >= end)])
        narrow.all_reduce(over)
        time.sleep(0.05)
    me.emit("whole", state=narrow.state)
    me.hear()


def test_a_member_whose_log_blocks_is_not_taken_for_hung(cast):
    members = [cast.start(in_two, rank) for rank in range(3)]
    for each in members:
        each.expect("in")
    members[2].kill()
    for each in members[:2]:
        assert each.expect("broken").cause == "crashed"
        assert each.expect("whole").state is mw.State.ACTIVE
