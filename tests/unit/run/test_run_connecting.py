"""A worker's connection to its launcher: what keeps it from coming about, and that it is made again."""

from __future__ import annotations

import json
import logging
import socket
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from kits.meetkit import PATIENCE, until

from multiworld._net import launcher_connection
from multiworld._net.launcher_connection import ControlClient
from multiworld.errors import MultiworldError
from multiworld.events import (
    Breakage,
    Cause,
    MemberBusy,
    WorldActive,
    WorldBroken,
    WorldClosed,
    WorldJoining,
    WorldStateReceived,
    WorldUnblocked,
)
from multiworld.joinall.launcher_client import LauncherClient
from multiworld.launched import reports


def soon():
    return time.monotonic() + PATIENCE


class Launcher:
    """Listens at a control socket."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="m8d-test-")
        self.path = f"{self.folder.name}/s"
        self.listener = socket.socket(socket.AF_UNIX)
        self.accepted = []

    def listen(self, backlog=8):
        self.listener.bind(self.path)
        self.listener.listen(backlog)

    def accept(self):
        self.accepted.append(self.listener.accept()[0])
        return self.accepted[-1]

    def close(self):
        for each in (*self.accepted, self.listener):
            each.close()
        self.folder.cleanup()


@pytest.fixture
def launcher(monkeypatch):
    made = Launcher()
    monkeypatch.setenv("M8D_CONTROL", made.path)
    monkeypatch.setenv("RANK", "0")
    yield made
    made.close()


@pytest.fixture
def mine(monkeypatch):
    """The reports of a process that begins; `subscribed`: what is told of its events."""
    found = reports._Mine()
    found._reports = reports.LauncherReports()  # without a hook into forks, which would stay
    found.subscribed = []
    monkeypatch.setattr(reports, "bus", SimpleNamespace(subscribe=found.subscribed.append))
    yield found
    if found().client is not None:
        found().client.close()


@pytest.fixture
def full(launcher):
    """A launcher that has not accepted as many as may wait."""
    launcher.listen(0)
    while True:
        waiting = socket.socket(socket.AF_UNIX)
        waiting.setblocking(False)
        launcher.accepted.append(waiting)
        try:
            waiting.connect(launcher.path)
        except BlockingIOError:
            return launcher


def pausing(monkeypatch, pause):
    """Have `pause` done wherever the next try is waited for."""
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: pause())
    monkeypatch.setattr(launcher_connection, "time", clock)


def test_a_launcher_whose_queue_is_full_is_tried_again(monkeypatch, full):
    pausing(monkeypatch, full.accept)
    client = ControlClient(full.path, deadline=soon())
    assert client.alive
    client.close()


def test_it_is_tried_until_the_deadline(monkeypatch, full):
    pauses = []
    pausing(monkeypatch, lambda: pauses.append(time.sleep(0.01)))
    with pytest.raises(BlockingIOError):
        ControlClient(full.path, deadline=time.monotonic() + 0.2)
    assert pauses


def test_a_join_connects_where_an_earlier_one_could_not(launcher, mine):
    mine.connect_if_launched()
    assert mine().client is None
    launcher.listen()
    mine.connect_if_launched()
    client = mine().client
    assert client.alive
    mine.connect_if_launched()
    assert mine().client is client
    assert mine.subscribed == [mine().tell]


def test_a_join_goes_on_without_a_thread_for_the_connection(launcher, mine, monkeypatch, caplog):
    launcher.listen()
    caplog.set_level(logging.INFO, "multiworld")

    def refused(_):
        raise RuntimeError("can't start new thread")

    before = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        mine.connect_if_launched()
    assert mine().client is None
    assert "is not told of this process's worlds: " in caplog.text
    assert "can't start new thread" in caplog.text
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    mine.connect_if_launched()
    assert mine().client.alive


def test_a_connection_that_has_ended_is_made_again(launcher, mine):
    launcher.listen()
    mine.connect_if_launched()
    first = mine().client
    with launcher.accept() as theirs:
        theirs.sendall(b'{"store":"tcp://a:1"}\n')
        until(lambda: first.store == "tcp://a:1")
    until(lambda: not first.alive)
    mine.connect_if_launched()
    second = mine().client
    assert second is not first
    assert second.alive
    assert second.store == "tcp://a:1", "it is told anew only in a moment"
    assert b'"hello":"worker"' in launcher.accept().recv(1000)
    assert len(mine.subscribed) == 1


def heard(theirs, count):
    """What a launcher is told first: so many worlds, by name, and what each is said to be."""
    told = b""
    theirs.settimeout(PATIENCE)
    while told.count(b"\n") < 1 + count:
        told += theirs.recv(1 << 16)
    first, *rest = [json.loads(line) for line in told.splitlines()]
    assert first["hello"] == "worker"
    return {each["world"]: each for each in rest}


def test_a_connection_that_is_made_again_tells_how_all_worlds_stand(launcher, mine):
    """What they became while there was none would be told with their next event, or never."""
    launcher.listen()
    mine.connect_if_launched()
    tell = mine().tell
    for name in ("stays", "breaks", "closes", "closed"):
        tell(WorldActive(name, 3, 0, 1.0, 2))
    tell(WorldClosed("closed", 3, 0, 2.0))
    with launcher.accept() as theirs:
        assert set(heard(theirs, 5)) == {"stays", "breaks", "closes", "closed"}
    until(lambda: not mine().client.alive)
    tell(MemberBusy("stays", 3, 0, 3.0, (1,), True))
    breakage = Breakage(Cause.CRASHED, (1,), "it died", 3.0)
    tell(WorldBroken("breaks", 3, 0, 3.0, breakage))
    tell(WorldClosed("closes", 3, 0, 3.0))
    mine.connect_if_launched()
    told = heard(launcher.accept(), 3)
    assert {name: each["state"] for name, each in told.items()} == {
        "stays": "active", "breaks": "broken", "closes": "closed",
    }  # fmt: skip
    assert (told["stays"]["size"], told["stays"]["detail"]) == (2, "rank 1 busy: runs, but does not answer")
    assert (told["breaks"]["cause"], told["breaks"]["ranks"]) == ("crashed", [1])


def test_a_first_connection_tells_what_happened_while_it_could_not_be_made(launcher, mine):
    mine.connect_if_launched()
    (tell,) = mine.subscribed
    breakage = Breakage(Cause.CRASHED, (1,), "it died", 3.0)
    for name in ("stays", "breaks", "closes"):
        tell(WorldJoining(name, 0, 0, 0.5))
        tell(WorldActive(name, 1, 0, 1.0, 2))
    tell(WorldStateReceived("stays", 1, 0, 1.5, 1, 10, 100))
    tell(WorldBroken("breaks", 1, 0, 3.0, breakage))
    tell(WorldUnblocked("breaks", 1, 0, 3.0, 1, 0.001))
    tell(WorldClosed("closes", 1, 0, 3.0))
    launcher.listen()
    mine.connect_if_launched()
    told = heard(launcher.accept(), 3)
    assert {name: each["state"] for name, each in told.items()} == {
        "stays": "active", "breaks": "broken", "closes": "closed",
    }  # fmt: skip
    assert mine.subscribed == [tell]


def test_a_process_without_a_launcher_keeps_nothing_for_one(monkeypatch, launcher, mine):
    monkeypatch.delenv("M8D_CONTROL")
    mine.connect_if_launched()
    assert not mine.subscribed


def test_the_reports_that_are_kept_are_bounded(monkeypatch, launcher, mine):
    monkeypatch.setattr(reports, "_MOST", 2)
    launcher.listen()
    mine.connect_if_launched()
    for name in "abc":
        mine().tell(WorldActive(name, 1, 0, 1.0, 2))
    assert set(mine()._said) == {"b", "c"}
    mine().tell(WorldClosed("b", 1, 0, 2.0))
    assert set(mine()._said) == {"c"}


def test_a_process_without_a_launcher_looks_for_none_again(monkeypatch, launcher, mine):
    monkeypatch.delenv("RANK")
    mine.connect_if_launched()
    monkeypatch.setenv("RANK", "0")
    launcher.listen()
    mine.connect_if_launched()
    assert mine().client is None


def gone(_deadline):
    raise ConnectionRefusedError


def test_a_launcher_that_has_gone_leaves_its_last_answer():
    client = LauncherClient(SimpleNamespace(connect=gone))
    client._assigned = {"w": object()}
    assert client.ask(PATIENCE) == client._assigned


def test_a_launcher_whose_socket_is_gone_is_no_script_without_one(tmp_path, monkeypatch):
    """Its hint is not to run the script with m8d-run: that was done."""
    monkeypatch.setenv("M8D_CONTROL", str(tmp_path / "control.sock"))
    client = LauncherClient(SimpleNamespace(connect=gone))
    with pytest.raises(MultiworldError, match=r"cannot be reached at .*what removed its socket"):
        client.ask(PATIENCE)
