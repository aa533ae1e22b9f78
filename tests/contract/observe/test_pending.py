"""Who is missing: `World.pending`, and the event of an operation that waits for long."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
import statistics
import threading
import time

import pytest
import torch
import torch.distributed as dist
from kits.contract.gilkit import compute, sleeps
from kits.contract.worldkit import PATIENCE

import multiworld as mw
from multiworld._generation import operations as generation_operations
from multiworld._generation import stuck
from multiworld.registry import registry

log = logging.getLogger("measured")

AFTER = 4.0
"""Seconds of M8D_STUCK_AFTER: no member is as late as that on a machine that stalls."""
SECONDS = re.compile(r"\d+\.\d s")


def joins(me, size, after=60.0, name="w", **arguments):
    torch.set_num_threads(1)
    os.environ["M8D_STUCK_AFTER"] = str(after)
    return mw.join(name, me.rank, size, store=me.store, timeout=4 * PATIENCE, **arguments)


def said(found):
    """What was found, without the times."""
    return [SECONDS.sub("T", str(each)) for each in found]


def until(look, done, seconds=PATIENCE):
    """What `look` returns as soon as it is `done`."""
    end = time.monotonic() + seconds
    while not done(found := look()):
        assert time.monotonic() < end, said(found)
        time.sleep(0.02)
    return found


# -- what others wait for ------------------------------------------------------------------------------------


def in_group(w, tensor):
    with w:
        group = dist.new_group([0, 1, 2])
        if w.rank < 3:
            dist.broadcast(tensor, 1, group=group)


CALLS = {
    "method": (lambda w, t: w.all_reduce(t), "all_reduce #3"),
    "block": (lambda w, t: _inside(w, lambda: dist.all_reduce(t)), "all_reduce #3"),
    "posted": (lambda w, t: w.barrier(async_op=True).wait(), "barrier #3"),
    "awaited": (lambda w, t: asyncio.run(w.aio.all_gather([t.clone() for _ in range(w.world_size)], t)), "all_gather #3"),
    "objects": (lambda w, _: w.all_gather_object([None] * w.world_size, "x"), "all_gather #3"),
}  # fmt: skip


def _inside(w, call):
    with w:
        call()


def waits_for(me, size, how, lane=True):
    if not lane:
        os.environ["M8D_LANE"] = "0"
    w = joins(me, size)
    tensor = torch.ones(4)
    for _ in range(2):
        w.all_reduce(tensor)
    call = CALLS[how][0]
    if me.rank == 0:
        me.emit("looks")
        # Before, the others may still be in the operation that this one has left.
        found = until(
            lambda: w.pending(PATIENCE),
            lambda each: each and sorted(each[0].waiting) == [1, 2] and each[0].missing,
        )
        me.emit("found", said=said(found), sizes=[each.size for each in found], ranks=found[0].ranks)
    call(w, tensor)
    w.barrier()
    until(w.pending, lambda each: not each)
    me.emit("nothing")
    me.hear()
    w.close()


@pytest.mark.parametrize(
    ("how", "lane"),
    # No thread waits for gloo's collectives that are awaited.
    [*((how, True) for how in CALLS), *((how, False) for how in CALLS if how != "awaited")],
)
def test_the_missing_member_is_named_with_what_it_does(cast, how, lane):
    members = cast.all(waits_for, 3, how=how, lane=lane)
    found = members[0].expect("found")
    name = CALLS[how][1]
    idles = "in no operation of this world (its last: all_reduce #2, over since T)"
    assert found.said == [f"{name}: ranks 1 and 2 wait since T; rank 0 is at #2, {idles}"]
    assert found.ranks == (0, 1, 2)
    if how in {"method", "block", "awaited"}:
        assert found.sizes == [16]
    for each in members:
        each.expect("nothing")
    for each in members:
        each.say("end")
        assert each.finish() == 0


def waits_in_messages(me, size):
    w = joins(me, size)
    tensor = torch.ones(4)
    with w:
        group = dist.new_group([2, 0])
    if me.rank == 0:
        # A posted receive, and a collective of a group without this member's call.
        work = w.irecv(tensor, 1, tag=5)
        # A second later none of them counts as one that has just begun.
        found = until(lambda: w.pending(PATIENCE), lambda all_: len(all_) == 3 and all_[-1].seconds > 1.1)
        me.emit("found", said=sorted(said(found)), idle={each.kind: each.idle for each in found})
        w.send(torch.ones(4), 1)
        with w:
            dist.all_reduce(torch.ones(4), group=group)
        work.wait()
    elif me.rank == 1:
        w.recv(tensor)
        w.send(tensor, 0, tag=5)
    else:
        with w:
            dist.all_reduce(tensor, group=group)
    w.barrier()
    me.hear()
    w.close()


def test_messages_and_groups(cast):
    members = cast.all(waits_in_messages, 3)
    found = members[0].expect("found")
    one, two = "rank 0 is in recv from 1 (tag 5) since T", "rank 2 is in all_reduce #1 since T"
    at_group = "is at #0, in recv from 1 (tag 5) since T"
    assert found.said == sorted(
        [
            "recv from 1 (tag 5): rank 0 waits since T; rank 1 is in recv from any rank since T",
            f"recv from any rank: rank 1 waits since T; {one}; {two}",
            f"all_reduce #1: rank 2 waits since T; rank 0 {at_group}",
        ]
    )
    assert not any(found.idle.values())
    for each in members:
        each.say("end")
        assert each.finish() == 0


def test_a_world_of_one_and_one_that_is_over_have_nothing_pending(tmp_path):
    with mw.joined("alone", 0, 1, store=f"file://{tmp_path}/store") as w:
        w.barrier()
        assert w.pending() == ()
    assert w.pending() == ()


def is_slow(me, size):
    w = joins(me, size)
    for _ in range(10):
        if me.rank == 1:
            until(lambda: w.pending(PATIENCE), lambda each: each and sorted(each[0].waiting) == [0, 2])
            time.sleep(0.05)
        w.all_reduce(torch.ones(1))

    def is_plain(found):
        """A member's own answer is later than the others': they have waited less by that."""
        return found[1] > 0.5 and found[1] > sum(found.values()) / 2

    found = until(lambda: w.waited_for(PATIENCE), is_plain)
    me.emit("found", seconds=found)
    me.hear()
    w.close()
    assert w.waited_for() == {}


def test_the_slow_member_is_the_one_that_others_waited_for(cast):
    members = cast.all(is_slow, 3)
    for each in members:
        found = each.expect("found").seconds
        assert sorted(found) == [0, 1, 2]
        assert found[1] > 0.5, "ten times, two members waited for 50 ms"
    for each in members:
        each.say("end")
        assert each.finish() == 0


def asks_in_an_event(me, size):
    w = joins(me, size)
    w.barrier()
    if me.rank:
        w.close()
        return
    heard = []

    def ask(event):
        start = time.monotonic()
        try:
            w._gen.operations.reports(PATIENCE)
        except mw.MultiworldError as error:
            heard.append((str(error), time.monotonic() - start))

    mw.subscribe(lambda event: ask(event) if isinstance(event, mw.WorldBroken) else None)
    until(lambda: heard, bool)
    ((text, seconds),) = heard
    assert "in the watchdog's thread" in text
    assert seconds < PATIENCE / 4
    w.close()


def test_a_subscriber_cannot_ask_in_the_thread_that_answers(cast):
    for each in cast.all(asks_in_an_event, 2):
        assert each.finish() == 0


# -- members that do not answer ------------------------------------------------------------------------------


def looks_at_a_silent_one(me, size, hang, timeout, wanted, after=PATIENCE):
    heard = []
    mw.subscribe(lambda event: heard.append(event) if isinstance(event, mw.WorldStuck) else None)
    w = joins(me, size, hang_timeout=hang, after=after)
    w.barrier()
    me.emit("ready")
    me.hear()  # not before: a member that is to be stopped must not come
    thread = threading.Thread(target=lambda: _ignoring_breaks(w.barrier), daemon=True)
    thread.start()
    found = until(lambda: w.pending(timeout), lambda each: each and wanted in str(each[0]))
    me.emit("found", said=said(found))
    me.hear()
    events = until(lambda: heard, bool) if after < PATIENCE else heard
    me.emit("told", stacks=[each.operation.stacks for each in events])
    me.hear()
    w.close()


def _ignoring_breaks(call):
    try:
        call()
    except mw.WorldError:
        return


def holds_the_gil(me, size, hang, how, seconds):
    w = joins(me, size, hang_timeout=hang)
    w.barrier()
    until(lambda: registry.watchdog()._helper.pid, bool)
    time.sleep(1.0)  # its helper starts
    me.emit("holds")
    how(seconds)
    w.barrier()
    me.emit("through")
    me.hear()
    w.close()


def test_a_member_that_holds_the_gil_is_named_so(cast):
    hang = 8.0  # seconds: on a busy machine its helper, too, may be silent for more than one
    other = cast.start(looks_at_a_silent_one, 0, size=2, hang=hang, timeout=0.5, wanted="the GIL")
    holder = cast.start(holds_the_gil, 1, size=2, hang=hang, how=compute, seconds=2 * hang)
    holder.expect("holds")
    other.say("look")
    assert other.expect("found").said == [
        "barrier #2: rank 0 waits since T; rank 1 runs and does not answer: most likely it holds the GIL"
    ]
    other.say("go on")
    holder.expect("through")  # before the other one leaves
    for each in (other, holder):
        each.say("end")
        assert each.finish() == 0


def test_the_stack_of_a_member_that_holds_the_gil(cast):
    other = cast.start(
        looks_at_a_silent_one, 0, size=2, hang=PATIENCE, timeout=0.5, wanted="does not answer", after=2.0
    )
    holder = cast.start(holds_the_gil, 1, size=2, hang=PATIENCE, how=sleeps, seconds=20.0)
    holder.expect("holds")
    other.say("look")
    other.expect("found")
    other.say("go on")
    (stacks,) = other.expect("told").stacks
    assert list(stacks) == [1]
    assert "sleeps (" in stacks[1]
    assert "holds_the_gil (" in stacks[1]
    assert stacks[1].startswith("Thread ")
    holder.kill()
    other.say("end")
    assert other.finish() == 0


def test_a_stopped_member_does_not_answer_and_is_waited_for_no_longer_than_asked(cast):
    members = cast.all(looks_at_a_silent_one, 2, hang=PATIENCE, timeout=0.5, wanted="does not answer")
    for each in members:
        each.expect("ready")
    members[1].stop()
    members[0].say("look")
    assert members[0].expect("found").said == ["barrier #2: rank 0 waits since T; rank 1 does not answer"]
    members[1].kill()
    members[0].say("go on")
    assert members[0].expect("told").stacks == []
    members[0].say("end")
    assert members[0].finish() == 0


# -- operations that wait for long ---------------------------------------------------------------------------


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def here_it_stands(me):
    me.emit("stands")
    me.hear()


def gets_stuck(me, size):
    lines, heard = Lines(), []
    logging.getLogger("multiworld").addHandler(lines)
    mw.subscribe(lambda event: heard.append(event) if isinstance(event, mw.WorldStuck) else None)
    mw.subscribe(lambda event: me.emit("stuck") if isinstance(event, mw.WorldStuck) else None)
    stuck.ANSWERS = PATIENCE
    w = joins(me, size, after=AFTER)
    w.barrier()
    if me.rank == 2:
        here_it_stands(me)
    w.barrier()
    time.sleep(1.0)
    me.emit(
        "heard",
        events=[(SECONDS.sub("T", str(e.operation)), e.rank, e.operation.stacks) for e in heard],
        lines=lines.lines,
    )
    w.close()  # fmt: skip


def test_it_is_told_once_with_the_stack_of_the_missing_member(cast):
    members = cast.all(gets_stuck, 3)
    members[2].expect("stands")
    for each in members[:2]:
        each.expect("stuck")
    time.sleep(2.0)  # four looks: it must not be told again
    members[2].say("go on")
    seen = [each.expect("heard") for each in members]
    text = "barrier #2: ranks 0 and 1 wait since T; rank 2 is at #1, in no operation of this world (its last: barrier #1, over since T)"  # fmt: skip
    assert [[event[:2] for event in each.events] for each in seen] == [[(text, 0)], [(text, 1)], []]
    for each in seen[:2]:
        ((_, _, stacks),) = each.events
        assert list(stacks) == [2]
        assert f'File "{__file__}"' in stacks[2]
        assert stacks[2].index("in gets_stuck") < stacks[2].index("in here_it_stands")
    logged = ["\n".join(each.lines) for each in seen]
    assert text in SECONDS.sub("T", logged[0])
    assert "here_it_stands" in logged[0]
    assert "here_it_stands" not in logged[1], "the stack is logged by one of those that wait"
    assert not logged[2]
    for each in members:
        assert each.finish() == 0


def waits_idly(me, size):
    heard = []
    mw.subscribe(lambda event: heard.append(event) if isinstance(event, mw.WorldStuck) else None)
    stuck.ANSWERS = PATIENCE
    w = joins(me, size, after=AFTER)
    w.barrier()
    if me.rank == 0:
        me.hear()
    for source in range(me.rank):  # each waits for all before it
        w.recv(torch.ones(1), source)
    for target in range(me.rank + 1, size):
        w.send(torch.ones(1), target)
    w.broadcast(torch.ones(1), size - 1)
    me.emit("heard", events=[str(each.operation) for each in heard])
    w.close()


def test_receives_from_a_member_with_nothing_to_do_are_not_told(cast):
    members = cast.all(waits_idly, 3)
    time.sleep(1.5 * AFTER)
    members[0].say("go on")
    for each in members:
        assert each.expect("heard").events == []
        assert each.finish() == 0


def watches_nothing(me, size):
    w = joins(me, size, after=0)
    assert not any(thread.name == "m8d-stuck" for thread in threading.enumerate())
    w.barrier()
    w.close()


def watches(me, size):
    names = [f"w{n}" for n in range(3)]
    made = [joins(me, size, name=name) for name in names]
    for w in made:
        w.barrier()
    assert sum(thread.name == "m8d-stuck" for thread in threading.enumerate()) == 1
    for w in made:
        w.close()
    end = time.monotonic() + PATIENCE / 4
    while any(thread.name == "m8d-stuck" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("program", [watches, watches_nothing])
def test_one_thread_looks_after_all_worlds_as_long_as_there_are_some(cast, program):
    for each in cast.all(program, 2):
        assert each.finish() == 0


# -- deadlocks of all kinds ----------------------------------------------------------------------------------


def stuck_call(w, kind, odd, rank):
    """What a member calls of a deadlock; `odd` is the member that does otherwise."""
    tensor, size = torch.ones(64), w.world_size
    if kind == "missing":
        return None if rank == odd else w.all_reduce(tensor)
    if kind == "missing sub-group":
        with w:
            group = dist.new_group(list(range(size)))
            return None if rank == odd else dist.broadcast(tensor, odd, group=group)
    if kind == "one behind":
        if rank == odd:
            return w.recv(tensor, (odd + 1) % size, tag=3)
        return w.all_gather([torch.ones(64) for _ in range(size)], tensor)
    if kind == "another root":
        return w.reduce(tensor, odd if rank == odd else (odd + 1) % size)
    if kind == "circle":
        return w.recv(tensor, (rank + 1) % size)
    assert kind == "big sends"
    return w.send(torch.ones(1 << 20), (rank + 1) % size)


KINDS = ("missing", "missing sub-group", "one behind", "another root", "circle", "big sends")


def in_deadlocks(me, size, plans):
    stuck.ANSWERS = PATIENCE
    heard, named = {}, threading.Condition()

    def hears(event):
        if isinstance(event, mw.WorldStuck):
            with named:
                heard.setdefault(event.world, event.operation)
                named.notify_all()

    mw.subscribe(hears)
    for number, (kind, odd) in enumerate(plans):
        w = joins(me, size, after=AFTER, name=f"w{number}")
        w.barrier()
        thread = threading.Thread(
            target=lambda w=w, kind=kind, odd=odd: _ignoring_breaks(
                lambda: stuck_call(w, kind, odd, me.rank)
            ),
            daemon=True,
        )
        began = time.monotonic()
        thread.start()
        if not expected(kind, odd, me.rank, size):
            me.hear()  # the others have named a member
        else:
            with named:
                named.wait_for(lambda w=w: w.name in heard, PATIENCE)
        found, seconds = heard.get(w.name), time.monotonic() - began
        me.emit(
            "told", missing=None if found is None else sorted(found.missing), text=str(found), seconds=seconds
        )
        me.hear()
        w.close(2.0)  # big sends are waited for, for most of it
        thread.join(PATIENCE)
        me.emit("closed", alive=thread.is_alive())


def expected(kind, odd, rank, size):
    """Lists of ranks one of which the member's event has to name; none where it has no event."""
    if kind in {"circle", "big sends"}:
        return [[(rank + 1) % size]]
    if kind == "another root":
        # Either root waits, and the two calls are one disagreement: both are told the one that began first.
        # A member that has given its part is not waiting, and is in another call than `odd`.
        root = (odd + 1) % size
        return [] if rank not in {odd, root} else [[odd], sorted({0, 1, 2} - {odd})]
    if rank == odd:
        return [] if kind != "one behind" else [[(odd + 1) % size]]
    # A broadcast whose root is missing only waits to be given something.
    return [] if kind == "missing sub-group" else [[odd]]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_missing_member_of_random_deadlocks_is_named(cast, soak_seconds):
    rounds = 100 if soak_seconds > 60 else len(KINDS)
    size, chance = 3, random.Random()  # noqa: S311  (other ones each time)
    plans = [(KINDS[n % len(KINDS)], chance.randrange(size)) for n in range(rounds)]
    members = cast.all(in_deadlocks, size, plans=plans)
    wrong, took = [], []
    for kind, odd in plans:
        wanted = [expected(kind, odd, rank, size) for rank in range(size)]
        if not any(wanted):
            time.sleep(AFTER + 0.5)  # there is no event to wait for
        # Those that wait for another member, and then the others.
        for rank in sorted(range(size), key=lambda rank: not wanted[rank]):
            if not wanted[rank]:
                members[rank].say("tell")
            told = members[rank].expect("told")
            if told.missing not in (wanted[rank] or [None]):
                wrong.append((kind, odd, rank, told.missing, told.text))
            if wanted[rank]:
                took.append(told.seconds - AFTER)
        for each in members:
            each.say("close")
        for each in members:
            assert not each.expect("closed").alive
    assert not wrong, "\n".join(map(str, wrong))
    # docs/pending.md: named within 2 s after M8D_STUCK_AFTER.
    median = statistics.median(took)
    log.info("%d deadlocks: named after %.2f s in the median, %.2f s at most", rounds, median, max(took))
    assert median < 2.0
    for each in members:
        assert each.finish() == 0


# -- reports of breakages --------------------------------------------------------------------------------------


def breaks(me, size, folder, rounds):
    os.environ["M8D_REPORTS"] = folder
    generation_operations._ANSWERS = PATIENCE
    for number in range(rounds):
        w = joins(me, size, name=f"w{number}")
        w.barrier()
        _ignoring_breaks(w.barrier)
        me.emit("broken", cause=w.breakage.cause)
        me.hear()  # as a program goes on that does not rejoin at once
        w.close()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_each_survivor_writes_what_all_of_them_did(cast, tmp_path, soak_seconds):
    rounds, size, took = (100 if soak_seconds > 60 else 5), 3, []
    survivors = [cast.start(breaks, rank, size=size, folder=str(tmp_path), rounds=rounds) for rank in (0, 1)]
    for number in range(rounds):
        lost = cast.start(breaks_once, size - 1, size=size, number=number)
        lost.expect("waits")
        at = lost.kill()
        for each in survivors:
            assert each.expect("broken").cause is mw.Cause.CRASHED
        while len(files := sorted(tmp_path.glob(f"w{number}.1.*.json"))) < 2:
            assert time.monotonic() - at < PATIENCE, sorted(tmp_path.iterdir())
            time.sleep(0.01)
        took.append(time.monotonic() - at)
        for file in files:
            found = json.loads(file.read_text())
            assert (found["cause"], found["ranks"]) == ("crashed", [2])
            told = [each["rank"] for each in found["reports"]]
            assert told == [0, 1], f"not complete after {took[-1]:.3f} s, in round {number}"
            assert said(found["pending"]) == [
                "barrier #2: ranks 0 and 1 wait since T; rank 2 does not answer"
            ]
        for each in survivors:
            each.say("go on")
    for each in survivors:
        assert each.finish() == 0
    median = statistics.median(took)
    log.info("%d kills: reports after %.3f s in the median, %.3f s at most", rounds, median, max(took))
    # docs/pending.md has what it is on a machine that has time for it.
    assert median < 5.0


def breaks_once(me, size, number):
    w = joins(me, size, name=f"w{number}")
    w.barrier()
    until(lambda: w.pending(PATIENCE), lambda each: each and sorted(each[0].waiting) == [0, 1])
    me.emit("waits")
    me.hear()
