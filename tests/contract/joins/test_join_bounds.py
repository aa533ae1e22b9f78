"""Joins end in time, whatever blocks them, and leave their name free."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from kits.contract.worldkit import SOON, enter_netns
from kits.netkit import Network

import multiworld as mw
from multiworld._join import threaded
from multiworld._net.stores import opening, torchstore
from multiworld._net.stores import store as stores

ROOT = Path(__file__).parents[3]


def refused(kinds, *words, **arguments):
    """Join in vain; returns the seconds that it took."""
    began = time.monotonic()
    with pytest.raises(kinds) as caught:
        mw.join("w1", **arguments)
    for word in words:
        assert word in str(caught.value)
    assert mw.worlds() == {}
    return time.monotonic() - began


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_that_cannot_be_made(rank):
    kind = mw.StoreUnreachableError if rank else mw.StoreBindError
    for _ in range(2):  # the name is free again
        where = {"rank": rank, "world_size": 2, "store": "file:///proc/x", "timeout": 2 * SOON}
        assert refused(kind, "/proc/x", **where) < SOON


@pytest.mark.parametrize(
    "part", ["watchdog.Watchdog.endpoint", "_join.steps.lane.open_door", "_join.steps.groups.build"]
)
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"), RuntimeError("can't start new thread"),
        mw.MultiworldError("the lane cannot be connected at 127.0.0.1: Too many open files"),
    ],
)  # fmt: skip
def test_a_host_that_has_nothing_left(monkeypatch, part, error):
    """Whatever step of a join finds that, it is an error of the join."""

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(f"multiworld.{part}", fails)
    with pytest.raises(mw.JoinAbandonedError, match="could not be joined") as caught:
        mw.join("w1", 0, 1, store=dist.HashStore(), timeout=SOON)
    assert str(error).rstrip(".") in str(caught.value)
    assert caught.value.__cause__ is error
    assert caught.value.next_step
    assert mw.worlds() == {}


def test_an_awaited_join_on_a_host_without_threads(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("can't start new thread")

    async def join():
        monkeypatch.setattr(threaded, "threading", SimpleNamespace(Thread=fails))
        await mw.join_async("w1", 0, 1, store=dist.HashStore(), timeout=SOON)

    with pytest.raises(mw.JoinAbandonedError, match="can't start new thread"):
        asyncio.run(join())


def without_network(me, netns):
    enter_netns(netns)
    store = "tcp://127.0.0.1:29500"
    for _ in range(2):
        took = refused(
            (mw.StoreBindError, mw.StoreUnreachableError), rank=0, world_size=2, store=store, timeout=1
        )
        me.emit("refused", took=took)


def test_a_network_that_is_down(cast):
    with Network(1) as network:
        subprocess.run(["ip", "-n", network.hosts[0], "link", "set", "lo", "down"], check=True, timeout=60)
        member = cast.start(without_network, netns=network.hosts[0])
        for _ in range(2):
            assert member.expect("refused").took < 10  # torch's server looks for itself for 30 s
        assert member.finish() == 0


LONE = """
import sys
import time
import multiworld as mw
assert "torch" not in sys.modules

now, took = time.monotonic, 0.0
time.monotonic = lambda: now() + took

class Slow:
    @staticmethod
    def find_spec(name, *_):
        global took
        if name in {"torch", "multiworld._generation.generation"}:
            took += 60.0  # seconds, by the clock alone

sys.meta_path.insert(0, Slow)
try:
    mw.join("w1", 0, 3, store=sys.argv[1], timeout=3)
except mw.JoinError as error:
    print(took, type(error).__name__, error)
"""


def test_loading_torch_is_no_part_of_the_timeout():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        store = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", LONE, store],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert run.stdout.startswith("120.0 JoinTimeoutError"), run
    assert "missing: ranks 1, 2" in run.stdout
    assert "within the 0.0 s" not in run.stdout


def test_rank_0_whose_time_is_over_before_its_store_is_open():
    """It says who is missing, nothing of its own store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        store = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    assert refused(mw.JoinTimeoutError, "rank 1", rank=0, world_size=2, store=store, timeout=1e-9) < SOON


class Stuck(dist.HashStore):
    """Answers no longer than it is allowed to."""

    def __init__(self, calls):
        super().__init__()
        self.left, self.free = calls, threading.Event()

    def check(self, keys):
        self.left -= 1
        if self.left < 0:
            self.free.wait(4 * SOON)
        return super().check(keys)


def test_a_store_that_blocks_while_the_group_is_built():
    store = Stuck(0)
    held = stores.StoreHandle(stores.Shared(None, store=store), store, "stuck", "127.0.0.1")
    call = opening.in_time_for(held, world="w1", deadline=time.monotonic() + 0.5, cancelled=lambda: False)
    began = time.monotonic()
    with pytest.raises(mw.StoreUnreachableError, match="no answer"):
        torchstore.PollingStore(held, call=call).wait(["a"])
    store.free.set()
    assert time.monotonic() - began < SOON


def cancelled_join(store, rank, after=0.5):
    async def main():
        joining = asyncio.create_task(mw.join_async("w1", rank, 2, store=store, timeout=60))
        await asyncio.sleep(after)
        began = time.monotonic()
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining
        return time.monotonic() - began

    return asyncio.run(main())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_cancelled_join_returns_at_once(rank):
    """Also where something listens at the store's address and says nothing."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        took = [cancelled_join(f"tcp://127.0.0.1:{silent.getsockname()[1]}", rank) for _ in range(3)]
    assert min(took) < 0.3, took


def test_a_name_that_a_resolver_holds_up(monkeypatch):
    """The host of a store object is looked up, and the resolver takes its time."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    let_go = threading.Event()
    monkeypatch.setattr(stores, "_host_of", lambda _: let_go.wait(4 * SOON) and "127.0.0.1")
    assert refused(mw.StoreUnreachableError, rank=0, world_size=1, store=server, timeout=0.5) < SOON
    let_go.set()


def test_who_is_missing_is_logged(caplog, monkeypatch):
    monkeypatch.setattr(stores, "_MISSED_AFTER", 0.3)
    with socket.socket() as free:  # bound and not listening
        free.bind(("127.0.0.1", 0))
        store = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        with caplog.at_level(logging.WARNING):
            refused(mw.StoreUnreachableError, rank=1, world_size=2, store=store, timeout=2)
    said = [each.getMessage() for each in caplog.records if each.name.startswith("multiworld")]
    assert said
    assert "waits for rank 0" in said[0]
    assert len(said) < 5
