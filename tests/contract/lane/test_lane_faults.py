"""A member dies, hangs, leaves or is interrupted in the middle of messages: every call that waits for it raises at once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time

import pytest
import torch
from kits.contract.waykit import RECEIVES, SENDS, forbid_memory, until_it_sleeps, world
from kits.contract.worldkit import HANG, PATIENCE, SOON, outcome

import multiworld as mw

KB, MB = 1 << 10, 1 << 20
TIMEOUT = 4 * PATIENCE
"""Seconds, of each operation: whatever ends before was ended by the verdict."""

# What is left waiting when a member is lost: (world, tensor, rank of the victim).
CALLS = {
    "send": SENDS["method"],
    "recv": RECEIVES["recv_method"],
    "recv of any": lambda w, t, _: w.recv(t),
    "awaited send": SENDS["awaited"],
    "awaited recv": RECEIVES["recv_awaited"],
    "awaited recv of any": lambda w, t, _: asyncio.run(w.aio.recv(t)),
    "block send": SENDS["block"],
    "block recv": RECEIVES["recv_block"],
    "block recv of any": RECEIVES["recv_block_any"],
    "work": RECEIVES["recv_work"],
    "block work": RECEIVES["recv_block_work"],
    "awaited work": RECEIVES["recv_awaited_work"],
    "batch": RECEIVES["recv_block_batch"],
}


FEW = {"recv", "awaited recv", "block recv of any", "send", "awaited send", "block send"}  # of what is large


def calls_of(nbytes, what):
    return [name for name in CALLS if ("send" in name) is (what == "sends") and (nbytes <= MB or name in FEW)]


def survivor(me, size, nbytes, what, memory, hang):
    """Exchange messages with the last member in all ways, a thread each, until it is lost."""
    torch.set_num_threads(1)
    if not memory:
        forbid_memory()
    victim = size - 1
    w = mw.join("w", me.rank, size, store=me.store, timeout=TIMEOUT, hang_timeout=hang)
    other = mw.join("other", me.rank, size - 1, store=me.store, timeout=TIMEOUT, hang_timeout=TIMEOUT)
    ended = {}

    def run(name):
        room = torch.ones(nbytes, dtype=torch.uint8)

        def again():
            while True:
                CALLS[name](w, room, victim)

        ended[name] = {**outcome(again), "at": time.monotonic()}

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in calls_of(nbytes, what)]
    w.barrier()
    for each in threads:
        each.start()
    me.emit("running")
    for each in threads:
        each.join(PATIENCE)
    late = {name: each["at"] - w.breakage.at for name, each in ended.items()}
    kinds = {name: each["kinds"][:1] for name, each in ended.items()}
    me.emit("ended", late=late, kinds=kinds, cause=w.breakage.cause.value)
    # The same processes' other world is as it was.
    room, mine = torch.zeros(MB // 4), torch.full((MB // 4,), float(me.rank + 1))
    work = other.isend(mine, 1 - me.rank)
    other.recv(room, 1 - me.rank)
    work.wait()
    assert (room == 2 - me.rank).all()
    assert (other.state.name, other.generation) == ("ACTIVE", 1)
    me.hear()
    w.rejoin(timeout=PATIENCE)
    for way, receive in (("method", "recv_method"), ("awaited", "recv_awaited"), ("block", "recv_block")):
        if me.rank == 0:
            SENDS[way](w, mine, 1)
        else:
            RECEIVES[receive](w, room.zero_(), 0)
            assert (room == 1).all()
    assert w.recv(room.zero_(), victim) == victim
    assert (room == 7).all()
    w.barrier()
    w.close()
    other.close()


def lost(me, size, nbytes, what, memory, hang):
    """In the middle of messages when it is lost: the test kills or stops it, or it leaves."""
    torch.set_num_threads(1)
    if not memory:
        forbid_memory()
    w = mw.join("w", me.rank, size, store=me.store, timeout=TIMEOUT, hang_timeout=hang)
    w.barrier()
    me.emit("running")
    tensor = torch.ones(nbytes, dtype=torch.uint8)
    leave = threading.Thread(target=lambda: (me.hear(TIMEOUT), w.close(5)), daemon=True)
    leave.start()

    def run():
        while True:
            for other in range(size - 1):
                if what == "receives":
                    w.send(tensor, other)
                else:
                    w.recv(tensor, other)

    seen = outcome(run)
    me.emit("ended", kinds=seen["kinds"][:1], cause=seen["cause"])
    leave.join()


def after(me, size):
    """The next one of that rank."""
    w = mw.join("w", me.rank, size, store=me.store, timeout=TIMEOUT)
    for other in range(size - 1):
        w.send(torch.full((MB // 4,), 7.0), other)
    w.barrier()
    w.close()


FAULTS = [
    ("kill", KB, "receives", True),
    ("kill", MB, "receives", False),
    ("kill", MB, "sends", True),
    ("kill", 256 * MB, "receives", True),
    ("kill", 256 * MB, "sends", False),
    ("stop", MB, "receives", True),
    ("stop", 64 * MB, "sends", False),
    ("leave", KB, "sends", True),
    ("leave", 64 * MB, "receives", True),
]
CAUSES = {"kill": {"crashed"}, "stop": {"hung"}, "leave": {"left"}}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("fault", "nbytes", "what", "memory"), FAULTS)
def test_who_waits_for_a_lost_member_hears_of_it(cast, fault, nbytes, what, memory):
    arguments = {
        "size": 3,
        "nbytes": nbytes,
        "what": what,
        "memory": memory,
        "hang": HANG if fault == "stop" else TIMEOUT,
    }
    members = [
        *(cast.start(survivor, rank, **arguments) for rank in range(2)),
        cast.start(lost, 2, **arguments),
    ]
    for each in members:
        each.expect("running")
    time.sleep(random.uniform(0.02, 0.3))  # noqa: S311  (somewhere in the middle)
    {"kill": members[2].kill, "stop": members[2].stop, "leave": lambda: members[2].say("go")}[fault]()
    for each in members[:2]:
        seen = each.expect("ended", PATIENCE + HANG)
        assert seen.cause in CAUSES[fault], seen
        assert seen.kinds == {name: ["BrokenWorldException"] for name in calls_of(nbytes, what)}, seen
        assert max(seen.late.values()) < SOON, seen
    if fault == "stop":
        members[2].go_on()
        assert members[2].expect("ended").kinds == ["BrokenWorldException"]
    following = cast.start(after, 2, size=3)
    for each in members[:2]:
        each.say("go")
    assert [each.finish() for each in (*members[:2], following)] == [0, 0, 0]


# -- what was sent before a close -------------------------------------------------------------------------------------

GIVEN = [*[4] * 300, *[5000] * 100, *[70 * KB] * 20, *[200 * KB] * 20, 3 * MB, 4, 0]


def leaver(me, size, way, memory):
    with world(me, size, memory=memory) as w:
        w.barrier()
        for number, nbytes in enumerate(GIVEN):
            tensor = torch.full((nbytes,), number % 251, dtype=torch.uint8)
            if way == "method" and nbytes < 64 * KB:
                w.send(tensor, 0)
            else:
                w.isend(tensor, 0)


def stayer(me, size, way, memory):
    with world(me, size, memory=memory) as w:
        w.barrier()
        for number, nbytes in enumerate(GIVEN):
            room = torch.zeros(nbytes, dtype=torch.uint8)
            RECEIVES["recv_block" if way == "method" else "recv_awaited"](w, room, 1)
            assert (room == number % 251).all()
        me.emit("all")
        with pytest.raises(mw.BrokenWorldException) as caught:
            w.recv(torch.zeros(1), 1)
        assert caught.value.cause == "left"


@pytest.mark.parametrize(("way", "memory"), [("method", False), ("work", True)])
def test_what_was_sent_before_a_close_arrives(cast, way, memory):
    members = [
        cast.start(each, rank, size=2, way=way, memory=memory) for rank, each in enumerate((stayer, leaver))
    ]
    members[0].expect("all")
    assert [each.finish() for each in members] == [0, 0]


# -- Ctrl-C -----------------------------------------------------------------------------------------------------------

WAITS = {
    "recv": lambda w, t: w.recv(t, 1),
    "recv of any": lambda w, t: w.recv(t),
    "awaited recv": lambda w, t: asyncio.run(w.aio.recv(t, 1)),
    "work": lambda w, t: w.irecv(t, 1).wait(),
    "block recv": lambda w, t: RECEIVES["recv_block"](w, t, 1),
    "block work": lambda w, t: RECEIVES["recv_block_work"](w, t, 1),
    "send": lambda w, _: w.send(torch.ones(8 * MB), 1, tag=5),
    "awaited send": lambda w, _: asyncio.run(w.aio.send(torch.ones(8 * MB), 1, tag=5)),
}
POSTED = {"work", "block recv", "block work"}
"""Torch's receives stay posted when their wait is interrupted, with torch alone too: the next message is theirs."""


def say_that_it_waits(me, w, name):
    log = w._gen.operations.log
    if "awaited" in name:  # in its loop, which is in no call of the lane for long
        while not log.waiting(time.monotonic()):
            time.sleep(0.01)
    else:
        until_it_sleeps(w)
    me.emit("waits")


def interrupted(me, size, names):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with world(me, size, timeout=TIMEOUT) as w:
        for number, name in enumerate(names):
            room = torch.zeros(1)
            threading.Thread(target=say_that_it_waits, args=(me, w, name), daemon=True).start()
            try:
                WAITS[name](w, room)
            except KeyboardInterrupt:
                me.emit("raised", state=w.state.name)
            w.barrier()
            then = torch.zeros(1)
            w.recv(then, 1)
            if name in POSTED:
                # The message before went to what was posted.
                assert room.item() == number
            assert then.item() == (number + 0.5 if name in POSTED else number)
            w.barrier()


def peer_of_interrupted(me, size, names):
    with world(me, size, timeout=TIMEOUT) as w:
        for number, name in enumerate(names):
            w.barrier()
            if "send" in name:
                room = torch.zeros(8 * MB)
                w.recv(room, 0, tag=5)
                assert (room == 1).all()
            w.send(torch.full((1,), float(number)), 0)
            if name in POSTED:
                w.send(torch.full((1,), number + 0.5), 0)
            w.barrier()


def test_ctrl_c_is_heard_at_once_and_the_world_goes_on(cast):
    names = list(WAITS)
    members = [
        cast.start(each, rank, size=2, names=names)
        for rank, each in enumerate((interrupted, peer_of_interrupted))
    ]
    for name in names:
        members[0].expect("waits")
        at = time.monotonic()
        os.kill(members[0].process.pid, signal.SIGINT)
        seen = members[0].expect("raised")
        assert seen.at - at < SOON, name
        assert seen.state == "ACTIVE", name
    assert [each.finish() for each in members] == [0, 0]
