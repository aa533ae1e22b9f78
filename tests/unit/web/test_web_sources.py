"""Where the page's data comes from: a run whose workers or launchers do not answer, and files of logs."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from unit.web.test_views import WAITS, hub, members, snapshot

from multiworld.errors import UnknownWorldError
from multiworld.run.control.client import LauncherSilentError
from multiworld.web import sources
from multiworld.web.sources import LaunchedRun, RunOverError, tail

PATIENCE = 60.0


class Launcher:
    """What a launcher and its workers answer."""

    def __init__(self, monkeypatch):
        self.snapshot = snapshot()
        self.told = [{"rank": 0, "attempt": 0, "status": hub(), "waits": {}}]
        self.others = []
        self.looked = []
        self.error = None
        self.slow = threading.Event()
        self.slow.set()
        for name in ("question", "look", "snapshots"):
            monkeypatch.setattr(sources, name, getattr(self, name))

    def question(self, path, message, timeout):
        if self.error is not None:
            raise self.error
        return None if self.snapshot is None else {"snapshot": self.snapshot}

    def look(self, path, worlds, timeout):
        self.looked.append(worlds)
        self.slow.wait(PATIENCE)
        return self.told

    def snapshots(self, path, timeout):
        return [self.snapshot, *self.others]


@pytest.fixture
def launcher(monkeypatch):
    return Launcher(monkeypatch)


@pytest.fixture
def run(launcher):
    return LaunchedRun(Path("/none"))


def until(run, holds):
    end = time.monotonic() + PATIENCE
    while not holds(found := run.view()):
        assert time.monotonic() < end, found
        time.sleep(0.01)
    return found


def test_the_first_view_has_what_the_workers_say(run):
    assert members(run.view(), "w0") == [(0, 1, "active"), (1, 0, "active")]


def test_a_worker_that_does_not_answer_holds_nothing_back(run, launcher, monkeypatch):
    run.view()
    launcher.slow.clear()
    until(run, lambda _: len(launcher.looked) > 1)
    monkeypatch.setattr(sources, "_OLD", PATIENCE)
    began = time.monotonic()
    for _ in range(20):
        assert members(run.view(), "w0") == [(0, 1, "active"), (1, 0, "active")]
    assert time.monotonic() - began < PATIENCE / 2
    asked = len(launcher.looked)
    assert asked <= 3, "one look at a time"
    launcher.slow.set()


def test_what_a_process_said_that_was_replaced_does_not_count(run, launcher):
    launcher.told = [{"rank": 0, "attempt": 7, "status": hub(), "waits": {"w0": WAITS}}]
    view = run.view()
    assert members(view, "w0")[0][0] == -1
    assert view["worlds"][0]["pending"] == []


def test_who_waits_is_asked_of_the_worlds_in_which_something_does(run, launcher):
    waiting = hub(waits=9.0)
    launcher.told = [{"rank": 0, "attempt": 0, "status": waiting, "waits": {"w1": WAITS}}]
    view = until(run, lambda _: {"0": ["w0", "w1"]} in launcher.looked)
    assert launcher.looked[0] == {}
    assert [len(each["pending"]) for each in view["worlds"]] == [0, 1]
    assert run.pending("w1") == WAITS["pending"]
    assert run.pending("w0") == []
    with pytest.raises(UnknownWorldError, match="'none' is not known here"):
        run.pending("none")


def test_a_launcher_that_ends_or_hangs_leaves_the_last_view_with_a_note(run, launcher):
    with_all = run.view()
    launcher.error = LauncherSilentError("no answer within 2 s")
    view = run.view()
    assert view["worlds"] == with_all["worlds"]
    assert "no answer within 2 s" in view["note"]
    assert not run.live().ok
    assert not run.ready(()).ok
    launcher.error, launcher.snapshot = None, None
    assert "has ended" in run.view()["note"]
    launcher.snapshot = snapshot()
    assert run.view()["note"] == ""
    assert run.live().ok


def test_a_run_that_was_never_there(launcher, run):
    launcher.snapshot = None
    with pytest.raises(RunOverError, match="has ended"):
        run.view()
    assert "has ended" in run.live().text
    assert not run.ready(["w0"]).ok


def test_ready_is_of_all_worlds_or_of_those_named(run):
    assert (run.ready(()).ok, run.ready(["w0"]).text) == (True, "ok")
    found = run.ready(["w0", "none"])
    assert (found.ok, found.text) == (False, "none: not known")


def test_other_nodes_are_in_it(run, launcher):
    launcher.others = [{**snapshot(), "node": "beta", "workers": [], "worlds": [], "started": 1.0}]
    view = until(run, lambda view: any(each["text"].startswith("beta: ") for each in view["events"]))
    assert len(view["worlds"]) == 2


def test_logs_are_those_of_the_snapshot(run, launcher, tmp_path):
    path = tmp_path / "out"
    path.write_bytes(b"one\ntwo\n")
    launcher.snapshot["workers"][1]["logs"] = {"stdout": str(path)}
    assert run.log("alpha/4001", "stdout", 100) == b"one\ntwo\n"
    for process, stream in (("alpha/4001", "stderr"), ("alpha/1", "stdout"), ("../etc/passwd", "stdout")):
        with pytest.raises(FileNotFoundError, match="has no log"):
            run.log(process, stream, 100)


def test_the_end_of_a_file(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(1000)))
    assert tail(path, 20) == b"line 998\nline 999\n"
    assert tail(path, 1 << 30).startswith(b"line 0\n")
    assert tail(path, 0) == b""
    path.write_bytes(b"x" * 100)
    assert tail(path, 10) == b"x" * 10
    path.write_bytes(b"")
    assert tail(path, 10) == b""
