"""Wrong joins and wrong calls: the same kind of error on every member that took part, in time, and nothing left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import tempfile
import time
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch
from kits.contract.worldkit import SOON, left_over, threads_ended
from kits.meetkit import until_claimed

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
    assert threads_ended() == []  # its threads wait for seconds before they end
    me.emit("ready")
    me.hear()
    tell(
        me,
        lambda: mw.join("w1", **{"rank": me.rank, "store": me.store, "timeout": timeout, **how}),
        settle=True,
    )


def all_raise(members, kind, *words, meet=None):
    """All raise errors of the same kind, and none waits for a long timeout.

    `meet`: called when the first one was told to begin, and before the others are.
    """
    for member in members:
        member.expect("ready")
    for member in members:
        member.say("go")
        if meet is not None and member is members[0]:
            meet()
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


@pytest.mark.parametrize("rank", [-1, 2, 7])
def test_a_rank_outside_the_world(rank):
    """At once, without the store: nobody serves it."""
    began = time.monotonic()
    with pytest.raises(mw.InvalidJoinError, match=f"rank {rank}.* from 0 to 1"):
        mw.join("w1", rank, 2, store="tcp://127.0.0.1:1", timeout=4 * SOON)
    assert time.monotonic() - began < 0.5


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


@pytest.mark.parametrize("lacks", [0, 1])
def test_a_backend_that_one_member_does_not_have(cast, lacks):
    has = cast.start(joins, 1 - lacks, world_size=2, backend="gloo")
    lacking = cast.start(joins, lacks, world_size=2, backend="carrier-pigeon")
    # The one that lacks it has a second to tell those that wait for it.
    meet = partial(until_claimed, cast.server, {has.rank}, "w1")
    all_raise([has, lacking], "BackendError", "carrier-pigeon", "gloo", meet=meet)


def test_a_backend_that_is_not_there_is_told_before_the_others_come(cast):
    all_raise(
        [cast.start(joins, 0, world_size=2, backend="carrier-pigeon")], "BackendError", "can build: gloo"
    )
    with socket.socket() as free:  # bound and not listening
        free.bind(("127.0.0.1", 0))
        store = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        members = [cast.start(joins, 1, world_size=2, store=store, backend="carrier-pigeon")]
        all_raise(members, "BackendError", "can build: gloo")


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
        ({"world_size": 2, "timeout": 1e300}, "timeout 1e+300"),
        ({"world_size": 2, "timeout": True}, "timeout True"),
        ({"world_size": 2, "timeout": timedelta(0)}, "timeout datetime.timedelta(0)"),
        ({"world_size": 2, "hang_timeout": 1e300}, "hang_timeout 1e+300"),
        ({"world_size": 2, "rank": "0"}, "rank '0'"),
        ({"world_size": 1, "device": "meta"}, "no data"),
        ({"world_size": 1, "device": "cuda:99"}, "cuda:99"),
        ({"world_size": 1, "device": "mps"}, "cpu, cuda"),
        ({"world_size": 2, "store": "http://x"}, "http://x"),
        ({"world_size": 2, "backend": ""}, "backend ''"),
    ],
)
def test_arguments_that_no_world_can_have(cast, how, words):
    all_raise([cast.start(joins, 0, warm=False, how={"timeout": 3.0, **how})], "InvalidJoinError", words)


def test_arguments_that_are_called_otherwise():
    with pytest.raises(TypeError, match=r"'init_method'.*store='tcp://host:port'"):
        mw.join("w1", 0, 1, init_method="tcp://127.0.0.1:1")
    with pytest.raises(TypeError, match=r"'colour'$"):
        mw.join("w1", 0, 1, colour="red")


def test_a_backend_that_is_listed_and_not_there(tmp_path, monkeypatch):
    # Torch registers it when its compiler is loaded, as an earlier test may have done.
    plugins = {name: each for name, each in torch.distributed.Backend._plugins.items() if name != "FAKE"}
    monkeypatch.setattr(torch.distributed.Backend, "_plugins", plugins)
    with pytest.raises(mw.BackendError, match=r"'fake'.*can build: gloo"):
        mw.join("w1", 0, 1, store=f"file://{tmp_path}/store", backend="fake", timeout=SOON)


@pytest.fixture
def alone(tmp_path):
    with contextlib.closing(mw.join("w1", 0, 1, store=f"file://{tmp_path}/store", timeout=4 * SOON)) as world:
        yield world
        assert world.state is mw.State.ACTIVE


def test_times_as_timedelta(tmp_path):
    times = {"timeout": timedelta(seconds=9), "hang_timeout": timedelta(seconds=2)}
    w = mw.join("w1", 0, 1, f"file://{tmp_path}/store", **times)
    assert w._plan.timeout == 9.0
    assert w._plan.hang_timeout == 2.0
    assert w.close(timeout=timedelta(seconds=5))
    w.rejoin(timeout=timedelta(seconds=8)).wait_active(timeout=timedelta(seconds=1))
    w.close()


NO_TENSORS = [
    ("send", ("x", 0)), ("recv", ("x", 0)), ("isend", (None, 0)), ("irecv", (3, 0)), ("broadcast", ("x", 0)),
    ("all_reduce", (3,)), ("reduce", ([1], 0)), ("all_gather", ("x", "y")), ("gather", ("x",)), ("scatter", ("x",)),
    ("all_gather_into_tensor", ("x", "y")), ("reduce_scatter", ("x", [])), ("reduce_scatter_tensor", ("x", 3)),
    ("all_to_all", ("x", "y")), ("all_to_all_single", ("x", "y")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments"), NO_TENSORS)
def test_what_is_no_tensor(alone, name, arguments):
    with pytest.raises(TypeError, match=r"[Tt]ensor"):
        getattr(alone, name)(*arguments)
    with pytest.raises(TypeError, match=r"[Tt]ensor"):
        asyncio.run(getattr(alone.aio, name)(*arguments))


def test_numbers_of_numpy(alone):
    zero, ones, twos = np.int64(0), torch.ones(2), torch.full((2,), 2.0)
    room = torch.zeros(2)
    alone.gather(ones, [room], zero)
    assert room.equal(ones)
    alone.scatter(room, [twos], zero)
    assert room.equal(twos)
    alone.all_to_all_single(room, ones, [np.int64(2)], [np.int64(2)])
    assert room.equal(ones)
    with torch.profiler.profile():  # torch's own function
        alone.broadcast(ones, zero)
        alone.reduce(ones, zero)
    for name, arguments in (("all_reduce", ()), ("broadcast", (0,)), ("send", (0,)), ("irecv", (0,))):
        with pytest.raises(TypeError, match=r"[Tt]ensor"):
            getattr(alone, name)(np.ones(3), *arguments)


def odd_ranks(me, size):
    with contextlib.closing(mw.join("w1", me.rank, size, store=me.store, timeout=4 * SOON)) as w:
        for other in (torch.tensor(1 - me.rank), np.int64(1 - me.rank)):
            room = torch.zeros(1)
            work = w.irecv(room, other, tag=torch.tensor(3))
            w.send(torch.ones(1), other, tag=np.int64(3))
            work.wait()
            assert room.item() == 1
            assert w.recv(room, other) == 1 - me.rank if me.rank else w.send(room, other) is None
        for wrong in ((1 - me.rank) * 1.0, "0", None if me.rank else [1]):
            with pytest.raises(TypeError):
                w.send(torch.ones(1), wrong)
            with pytest.raises(TypeError):
                w.irecv(torch.ones(1), [] if wrong is None else wrong)
            with pytest.raises(TypeError):
                asyncio.run(w.aio.send(torch.ones(1), wrong))
        w.barrier()


def test_ranks_that_are_no_plain_ints(cast):
    assert [each.finish() for each in cast.all(odd_ranks, 2)] == [0, 0]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("send_object_list", ("x", 0)), ("recv_object_list", ("x",)), ("broadcast_object_list", (5,)),
        ("all_gather_object", ("x", 1)), ("gather_object", (1, "x")), ("scatter_object_list", ("x", ["y"])),
    ],
)  # fmt: skip
def test_what_is_no_list_of_objects(alone, name, arguments):
    with pytest.raises(TypeError, match="has to be a list"):
        getattr(alone, name)(*arguments)


@pytest.mark.parametrize("name", ["recv", "irecv"])
def test_nobody_sends_in_a_world_of_one(alone, name):
    for receive in (lambda: getattr(alone, name)(torch.ones(1)), lambda: alone.recv_object_list([None])):
        with pytest.raises(ValueError, match="is alone"):
            receive()


def test_what_cannot_be_called(alone):
    with pytest.raises(TypeError, match=r"on_break\(5\)"):
        alone.on_break(5)
    with pytest.raises(TypeError, match=r"subscribe\(5\)"):
        mw.events.subscribe(5)
    with pytest.raises(TypeError, match="subscribe"):
        mw.events.bus.subscribe(None)


@pytest.mark.parametrize("timeout", [float("nan"), "5"])
def test_what_is_no_time(alone, timeout):
    for waits in (alone.wait_active, alone.pending, alone.waited_for):
        with pytest.raises(TypeError, match=f"timeout={timeout!r}: it is a number of seconds"):
            waits(timeout)
    with tempfile.TemporaryDirectory() as folder, pytest.raises(mw.InvalidJoinError, match="timeout"):
        mw.join("w1", 0, 1, store=f"file://{folder}/store", timeout=timeout)


@pytest.mark.parametrize("timeout", [float("nan"), "5"])
def test_a_close_that_is_given_no_time_takes_the_default(caplog, monkeypatch, timeout):
    monkeypatch.setenv("M8D_CLOSE_TIMEOUT", "30")
    with tempfile.TemporaryDirectory() as folder:
        world = mw.join("w1", 0, 1, store=f"file://{folder}/store")
        assert world.close(timeout)
    assert world.state is mw.State.CLOSED
    assert f"timeout={timeout!r}" in caplog.text


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
