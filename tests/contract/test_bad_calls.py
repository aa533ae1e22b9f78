"""Wrong joins and wrong calls: the same kind of error on every member that took part, in time, and nothing left."""

from __future__ import annotations

import gc
import socket
import tempfile
import time

import pytest
import torch
from meetkit import until_claimed
from worldkit import SOON, left_over

import multiworld as mw


def more(before, after):
    """Whether something was left behind."""
    return after["threads"] != before["threads"] or after["sockets"] > before["sockets"]


def tell(me, fn, *, settle=False, **data):
    before = left_over()
    began = time.monotonic()
    try:
        fn()
    except Exception as exc:  # noqa: BLE001  (whatever it is, the test wants to see it)
        error = exc
        took = time.monotonic() - began
        del exc
    else:
        me.emit("returned")
        return
    kinds = [kind.__name__ for kind in type(error).__mro__]
    text, error = str(error), None
    gc.collect()
    deadline = time.monotonic() + SOON
    while more(before, after := left_over()) and settle and time.monotonic() < deadline:
        time.sleep(0.02)  # threads that are ending
    me.emit(
        "raised",
        kinds=kinds,
        text=text,
        took=took,
        before=before,
        after=after,
        worlds=list(mw.worlds()),
        **data,
    )


def joins(me, timeout=60.0, warm=True, **arguments):
    how = arguments.pop("how", arguments)
    if warm:  # so that what torch makes once per process is not taken for something left behind
        with tempfile.TemporaryDirectory() as folder:
            mw.join("warm", 0, 1, store=f"file://{folder}/store").close()
    me.emit("ready")
    me.hear()
    tell(
        me,
        lambda: mw.join("w1", **{"rank": me.rank, "store": me.store, "timeout": timeout, **how}),
        settle=True,
    )


def all_raise(members, kind, *words, after_first=None):
    """All raise errors of the same kind, and none waits for a long timeout; `after_first`: what comes before the rest."""
    for member in members:
        member.expect("ready")
    for member in members:
        member.say("go")
        if after_first is not None:
            after_first()
            after_first = None
    for member in members:
        seen = member.expect("raised")
        assert kind in seen.kinds, seen
        assert "JoinError" in seen.kinds
        for word in words:
            assert word in seen.text, seen.text
        assert seen.took < 2 * SOON, seen.took
        assert seen.worlds == []
        assert not more(seen.before, seen.after), (seen.before, seen.after)
    assert [member.finish() for member in members] == [0] * len(members)


def test_a_rank_outside_the_world(cast):
    members = [cast.start(joins, 0, world_size=2), cast.start(joins, 2, world_size=2)]
    # Who is refused tells those who wait, for a second: the first one waits by then.
    first = lambda: until_claimed(cast.server, {0}, "w1")  # noqa: E731
    all_raise(members, "InvalidJoinError", "2", after_first=first)


def test_a_rank_taken_twice(cast):
    members = [cast.start(joins, 1, world_size=3, timeout=4.0) for _ in range(2)]
    all_raise(members, "RankTakenError", "1")


def test_different_sizes(cast):
    members = [cast.start(joins, 0, world_size=2), cast.start(joins, 1, world_size=3)]
    all_raise(members, "MismatchError", "2", "3")


def test_different_backends(cast):
    members = [cast.start(joins, 0, world_size=2), cast.start(joins, 1, world_size=2, backend="cpu:gloo")]
    all_raise(members, "MismatchError", "gloo", "cpu:gloo")


def test_a_backend_nobody_has(cast):
    members = [cast.start(joins, rank, world_size=2, backend="carrier-pigeon") for rank in range(2)]
    all_raise(members, "BackendError", "carrier-pigeon", "gloo")


def test_not_everyone_comes(cast):
    members = [cast.start(joins, rank, world_size=3, timeout=4.0) for rank in range(2)]
    all_raise(members, "JoinTimeoutError", "2")


def test_a_store_that_nobody_serves(cast):
    with socket.socket() as free:  # bound and not listening: nobody else gets the port
        free.bind(("127.0.0.1", 0))
        store = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        members = [cast.start(joins, 1, world_size=2, store=store, timeout=1.0)]
        all_raise(members, "StoreUnreachableError", store)


def test_a_store_that_cannot_be_bound(cast):
    store = "tcp://192.0.2.1:29500"  # an address of nobody (RFC 5737)
    all_raise([cast.start(joins, 0, world_size=2, store=store)], "StoreBindError", store)


def test_an_address_where_something_else_listens(cast):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(8)
        store = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        members = [cast.start(joins, 0, world_size=2, store=store)]
        all_raise(members, "StoreBindError", store)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"world_size": 0}, "world_size 0"),
        ({"world_size": 2, "timeout": -1}, "timeout -1"),
        ({"world_size": 2, "hang_timeout": 0.1}, "hang_timeout 0.1"),
        ({"world_size": 2, "rank": "0"}, "rank '0'"),
        ({"world_size": 2, "store": "http://x"}, "http://x"),
        ({"world_size": 2, "backend": ""}, "backend ''"),
    ],
)
def test_arguments_that_no_world_can_have(cast, how, words):
    all_raise([cast.start(joins, 0, warm=False, how={"timeout": 3.0, **how})], "InvalidJoinError", words)


def calls(me, size):
    w = mw.join("w1", me.rank, size, store=me.store, timeout=6)
    if me.rank == 0:
        tell(me, lambda: w.all_reduce(torch.ones(2, device="meta")))
        tell(me, lambda: w.send(torch.ones(2, device="meta"), 1))
        tell(me, lambda: w.send(torch.ones(1), 0))
        tell(me, lambda: w.recv(torch.ones(1), size))
        tell(me, lambda: mw.join("w1", 0, 2, store=me.store))
        tell(me, w.rejoin)
        assert w.state is mw.State.ACTIVE
        me.hear()
        w.send(torch.ones(1), 1)
        tell(me, lambda: w.recv(torch.ones(1), 1))
    else:
        me.hear()  # when the other one's wrong calls are over: a receive takes `timeout` at most
        w.recv(torch.ones(1), 0)
        tell(me, lambda: w.recv(torch.ones(1), 0), generation=w.generation)
    w.close()
    tell(me, w.barrier)


def test_wrong_calls_in_a_world(cast):
    leader, other = cast.all(calls, 2)
    expected = [
        "WrongDeviceError",
        "WrongDeviceError",
        "ValueError",
        "ValueError",
        "InvalidJoinError",
        "InvalidJoinError",
    ]
    for kind in expected:
        assert kind in leader.expect("raised").kinds
    for member in (leader, other):
        member.say("go on")
    # Two receives that nobody sends for: torch's own timeout ends them, and with them the world, on both.
    for member in (leader, other):
        seen = member.expect("raised")
        assert seen.kinds[0] == "BrokenWorldException", seen
        assert seen.took < 6 + SOON
        assert "WorldClosedError" in member.expect("raised").kinds
    assert [leader.finish(), other.finish()] == [0, 0]
