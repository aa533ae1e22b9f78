"""A world that loses, stops, dismisses and takes in members at random: every sum is right, and it always goes on.

``--soak SECONDS`` makes it long (nox -s soak: 300 s); by default it takes a quarter of a minute.
"""

from __future__ import annotations

import contextlib
import random
import time

import pytest
import torch
from worldkit import HANG, PATIENCE, Seen, left_over

import multiworld as mw

pytestmark = [pytest.mark.everyday, pytest.mark.soak]

LEAST, MOST = 2, 8
EVERY = 1.0  # seconds between two faults
LONG = 10 * PATIENCE


def member(me):
    """Adds up in its world, for as long as it lives; says what it does once a second."""
    w = mw.join(
        "w", None, f"{LEAST}:{MOST}", store=me.store, seat=f"s{me.rank}", on_loss="shrink",
        timeout=LONG, hang_timeout=HANG, last_call=1.0,
    )  # fmt: skip
    steps, said, first = 0, 0.0, left_over()
    while True:
        try:
            t = torch.full((1000,), w.rank + 1.0)
            w.all_reduce(t)
            right = w.world_size * (w.world_size + 1) / 2
            if not bool((t == right).all()):
                me.emit("wrong", got=t[0].item(), right=right, generation=w.generation)
                return
            steps += 1
        except mw.BrokenWorldException:
            w.wait_active(LONG)
        except mw.WorldClosedError:
            me.emit("left")
            return
        if time.monotonic() - said > 1.0:
            said = time.monotonic()
            me.emit(
                "at", steps=steps, size=w.world_size, generation=w.generation, first=first, now=left_over()
            )
        if me._conn.poll(0) and me.hear() == "leave":
            w.close()


class Crowd:
    """The members of the test, and what happens to them."""

    def __init__(self, cast, chance: random.Random) -> None:
        self.cast, self.chance = cast, chance
        self.members, self.stopped, self.gone = [], [], []
        self.started = 0
        self.happened = []

    def start(self) -> None:
        self.members.append(self.cast.start(member, self.started))
        self.started += 1

    def fault(self) -> None:
        """One thing that happens."""
        choices = ["start"] * 3
        if len(self.members) > LEAST + 1:
            choices += ["kill", "kill", "leave", "stop"]
        choices += ["go on"] * len(self.stopped)
        what = self.chance.choice(choices)
        if what == "start" and len(self.members) + len(self.stopped) > MOST:
            what = "kill"
        self.happened.append(what)
        if what == "start":
            self.start()
        elif what == "go on":
            actor = self.stopped.pop(0)
            actor.go_on()
            self.members.append(actor)
        else:
            actor = self.members.pop(self.chance.randrange(len(self.members)))
            (self.stopped if what == "stop" else self.gone).append(actor)
            {"kill": actor.kill, "stop": actor.stop, "leave": lambda: actor.say("leave")}[what]()


def latest(actor):
    """What it told last of its work; None if nothing."""
    with contextlib.suppress(EOFError):  # it has left
        while actor.conn.poll(0):
            actor.heard.append(Seen(*actor.conn.recv()))
    assert not [each for each in actor.heard if each.name in {"wrong", "error"}]
    told = [each for each in actor.heard if each.name == "at"]
    return told[-1] if told else None


def test_a_world_that_changes_all_the_time(cast, request):
    seconds = request.config.getoption("--soak")
    crowd = Crowd(cast, random.Random(0))  # noqa: S311
    for _ in range(4):
        crowd.start()
    for actor in crowd.members:
        actor.expect("at")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(EVERY)
        crowd.fault()
        for actor in crowd.members:
            latest(actor)
    while crowd.stopped:
        crowd.members.append(crowd.stopped.pop())
        crowd.members[-1].go_on()
    # It is quiet now: the members work, and none of those that wait is let in before the next loss.
    deadline = time.monotonic() + PATIENCE
    while True:
        before = [latest(actor) for actor in crowd.members]
        time.sleep(2.5)
        now = [latest(actor) for actor in crowd.members]
        working = [
            late
            for early, late in zip(before, now, strict=True)
            if early is not None and late is not None and late.steps > early.steps
        ]
        if working and len(working) == working[0].size and len({each.generation for each in working}) == 1:
            break
        assert time.monotonic() < deadline, (crowd.happened, now)
    assert working[0].generation > 1
    for each in working:
        assert each.now["sockets"] <= each.first["sockets"] + 4 * MOST, each.data
        assert each.now["tasks"] <= each.first["tasks"] + 2 * MOST, each.data
