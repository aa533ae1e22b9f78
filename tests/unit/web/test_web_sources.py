"""Where the page's data comes from: a run whose workers or launchers do not answer, and files of logs."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from kits.runstatekit import AT, begun
from unit.web.test_views import WAITS, hub, members, snapshot

from multiworld.errors import UnknownWorldError
from multiworld.events import Breakage, Cause, WorldActive, WorldBroken, WorldJoining, bus
from multiworld.run import events
from multiworld.run.control import pending
from multiworld.run.control.client import LauncherSilentError
from multiworld.run.view.state import RunState
from multiworld.web import sources
from multiworld.web.process_view import EventTrack
from multiworld.web.sources import LaunchedRun, RunOverError, tail

PATIENCE = 60.0


class Launcher:
    """What a launcher and its workers answer."""

    def __init__(self, monkeypatch):
        self.snapshot = snapshot()
        self.told = [{"rank": 0, "attempt": 0, "status": hub(), "waits": {}}]
        self.others = []
        self.looked = []
        self.members = []
        self.after = []
        self.error = None
        self.slow = threading.Event()
        self.slow.set()
        for name in ("own_snapshot", "look", "snapshots"):
            monkeypatch.setattr(sources, name, getattr(self, name))
        monkeypatch.setattr(pending, "look", self.look)

    def own_snapshot(self, path, timeout, after):
        self.after.append(after)
        if self.error is not None:
            raise self.error
        return self.snapshot

    def look(self, path, worlds, timeout, members):
        self.looked.append(worlds)
        self.members.append(members)
        self.slow.wait(PATIENCE)
        return self.told

    def snapshots(self, path, timeout):
        return [self.snapshot, *self.others]


@pytest.fixture
def launcher(monkeypatch):
    monkeypatch.setattr(sources, "FRESH", 0.0)
    monkeypatch.setattr(sources, "_PATIENCE", 20.0)
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


def test_pending_is_asked_of_a_worker_that_is_in_the_world(run, launcher, monkeypatch):
    """One that was started anew waits to be let in, and one that stands still does not answer."""
    status = hub()
    apart = {**status, "worlds": [{**each, "state": "joining"} for each in status["worlds"]]}
    waiting = {**status, "worlds": [{**each, "waits": 3.0} for each in status["worlds"]]}
    rows = [(0, apart), (1, status), (2, waiting), (3, status)]
    launcher.told = [{"rank": rank, "attempt": 0, "status": each, "waits": {}} for rank, each in rows]
    run.view()
    until(run, lambda _: len(run._asked.workers) == 4)
    answers = {"1": {"w1": WAITS}}
    launcher.looked.clear()
    monkeypatch.setattr(run, "view", dict)

    def look(path, worlds, timeout, members):
        (rank,) = worlds
        launcher.looked.append(rank)
        return [{"rank": int(rank), "attempt": 0, "status": status, "waits": answers.get(rank, {})}]

    monkeypatch.setattr(sources, "look", look)
    assert run.pending("w1") == WAITS["pending"]
    assert launcher.looked == ["2", "1"]
    answers.clear()
    assert run.pending("w1") == []
    assert launcher.looked == ["2", "1", "2", "1", "3"]


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


def of_plan(*told):
    state = RunState(clock=lambda: AT + 200, planned={"w0": {0, 1}, "w1": {0, 2}, "far": {7, 8}})
    for each in told:
        state.apply(each)
    return state.snapshot()


def test_a_node_is_not_ready_before_its_workers_have_joined_what_is_planned(run, launcher):
    everything = begun(2)
    launcher.snapshot = of_plan(everything[0])
    assert run.ready(()).text == "it waits for the other nodes"
    launcher.snapshot = of_plan(*(each for each in everything if not isinstance(each, events.WorldChanged)))
    assert run.ready(()).text == "w0: not joined; w1: not joined"
    assert not run.ready(["w0"]).ok
    launcher.snapshot = of_plan(*(each for each in everything if getattr(each, "world", "") != "w1"))
    assert run.ready(()).text == "w1: not joined"
    assert run.ready(["w0"]).ok
    launcher.snapshot = of_plan(*everything)
    assert run.ready(()).ok
    spare = events.SlotTaken(AT, None, 2)
    launcher.snapshot = of_plan(everything[0], spare)
    assert run.ready(()).ok, "nothing is missing on a spare node"
    ended = [events.WorkerEnded(AT + 1, rank, 4000 + rank) for rank in range(3)]
    launcher.snapshot = of_plan(
        *everything[:2], *[each for each in everything if "Started" in str(each)], *ended
    )
    assert run.ready(()).ok, "a worker that has ended joins nothing any more"


def test_a_join_that_failed_counts_where_the_world_is_planned_or_was_joined_before(run, launcher):
    state = RunState(places={("w9", 1): 0})
    for each in begun(2):
        state.apply(each)
    for name, generation in (("req", 0), ("w0", 1), ("w9", 0)):
        state.apply(events.WorldChanged(AT + 2, 1, name, "failed", generation, "no store"))
    launcher.snapshot = state.snapshot()
    assert run.ready(()).text == "w0: failed; w9: failed"
    assert run.ready(["req"]).text == "req: failed"


def test_a_world_of_other_nodes_that_breaks_leaves_this_one_ready(run, launcher):
    launcher.snapshot["peers"] = [{"node": "beta", "seat": 1, "state": "seated", "since": 1.0}]
    far = {"name": "far", "state": "broken", "generation": 1, "members": [], "note": ""}
    launcher.others = [{**snapshot(), "node": "beta", "workers": [], "worlds": [far], "started": 1.0}]
    until(run, lambda view: any(each["name"] == "far" for each in view["worlds"]))
    assert run.ready(()).ok
    assert not run.ready(["far"]).ok


def test_a_world_that_this_node_has_closed_does_not_count_when_it_breaks_elsewhere(run, launcher):
    told = [*begun(2), events.NodeJoined(AT, "beta", 1)]
    told += [events.WorldChanged(AT + 2, rank, "w0", "closed", 1) for rank in (0, 1)]
    launcher.snapshot = of_plan(*told)
    far = RunState()
    for each in (
        events.RunStarted(AT, "job7", "worker", 3, "train.py", "beta"),
        events.SlotTaken(AT, 1, 2),
        events.WorkerStarted(AT, 3, "worker", 3, 0, 5000, 0),
        events.WorldChanged(AT + 1, 3, "w0", "active", 1),
        events.WorldChanged(AT + 3, 3, "w0", "broken", 1, "rank 0 left", "left"),
    ):
        far.apply(each)
    launcher.others = [far.snapshot()]
    until(run, lambda view: any(each["state"] == "broken" for each in view["worlds"]))
    assert run.ready(()).text == "ok"
    assert run.ready(["w0"]).text == "w0: broken"
    launcher.snapshot = of_plan(*told[:-1])
    assert run.ready(()).text == "w0: broken", "one of its workers is in it"


def test_other_nodes_are_in_it(run, launcher):
    launcher.snapshot["peers"] = [{"node": "beta", "seat": 1, "state": "seated", "since": 1.0}]
    launcher.others = [{**snapshot(), "node": "beta", "workers": [], "worlds": [], "started": 1.0}]
    view = until(run, lambda view: any(each["text"].startswith("beta: ") for each in view["events"]))
    assert len(view["worlds"]) == 2


def pending_seconds(run):
    lines = run.metrics("text/plain")[0].decode().splitlines()
    told = dict(line.split() for line in lines if line.startswith("multiworld_run_world_pending_seconds{"))
    return float(told['multiworld_run_world_pending_seconds{world="w0"}'])


def test_a_scrape_says_what_waits_now_and_not_at_the_last_scrape(launcher, monkeypatch):
    pytest.importorskip("prometheus_client", reason="numbers need prometheus_client")
    clock = Clock()
    run = LaunchedRun(Path("/none"), clock=clock)
    waits = []

    def look(path, worlds, timeout, members):
        told = {name: WAITS for name in worlds.get("0", ()) if waits}
        return [{"rank": 0, "attempt": 0, "status": hub(waits=9.0 * bool(waits)), "waits": told}]

    monkeypatch.setattr(sources, "look", look)
    monkeypatch.setattr(pending, "look", look)
    monkeypatch.setattr(sources, "_PATIENCE", 0.0)  # a silent worker keeps the page's own looks that long
    for stuck in (False, True, True, False, False):
        waits[:] = ["w0"] * stuck
        assert (pending_seconds(run) > 0) == stuck
        clock.now += 15


def test_a_launcher_is_asked_for_the_events_that_the_page_has_not(run, launcher):
    last = launcher.snapshot["last"][-1]["number"]
    for _ in range(2):
        run.view()
    assert launcher.after == [0, last]
    launcher.snapshot = {**snapshot(), "last": []}
    run.view()
    run.view()
    assert launcher.after[2:] == [last, last]
    launcher.snapshot = {**snapshot(), "last": [], "started": 1.0}
    run.view()
    run.view()
    assert launcher.after[-1] == 0, "another launcher counts anew"


def test_logs_are_those_of_the_snapshot(run, launcher, tmp_path):
    path = tmp_path / "out"
    path.write_bytes(b"one\ntwo\n")
    launcher.snapshot["workers"][1]["logs"] = {"stdout": str(path)}
    assert run.log("alpha/4001", "stdout", 100) == b"one\ntwo\n"
    for process, stream in (("alpha/4001", "stderr"), ("alpha/1", "stdout"), ("../etc/passwd", "stdout")):
        with pytest.raises(FileNotFoundError, match="has no log"):
            run.log(process, stream, 100)


def test_the_log_of_a_worker_that_was_started_again(run, launcher, tmp_path):
    run.view()
    (tmp_path / "new").write_bytes(b"new\n")
    worker = {**launcher.snapshot["workers"][1], "pid": 5001, "logs": {"stdout": str(tmp_path / "new")}}
    launcher.snapshot = {**launcher.snapshot, "workers": [launcher.snapshot["workers"][0], worker]}
    assert run.log("alpha/5001", "stdout", 100) == b"new\n"


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


def test_members_are_asked_for_at_first_and_where_they_are_not_known(run, launcher):
    until(run, lambda _: len(launcher.members) > 2)
    assert launcher.members[0] is None, "all"
    assert launcher.members[2] == {}
    again = hub(generation=2)
    launcher.told = [
        {
            "rank": 0,
            "attempt": 0,
            "status": {**again, "worlds": [{**each, "members": []} for each in again["worlds"]]},
            "waits": {},
        }
    ]
    until(run, lambda _: {"0": ["w0", "w1"]} in launcher.members)


def test_what_was_found_is_shared_by_those_that_ask_at_once(launcher, monkeypatch):
    monkeypatch.setattr(sources, "FRESH", PATIENCE)
    run = LaunchedRun(Path("/none"))
    first = run.view()
    launcher.error = LauncherSilentError("it hangs")
    assert run.view() is first
    silent = LaunchedRun(Path("/none"))
    for _ in range(3):
        with pytest.raises(LauncherSilentError):
            silent.view()
    launcher.error = None
    with pytest.raises(LauncherSilentError):
        silent.view()


def test_another_version_says_so(launcher, run):
    launcher.snapshot = {key: value for key, value in launcher.snapshot.items() if key != "totals"}
    with pytest.raises(LauncherSilentError, match="another version"):
        run.view()
    launcher.snapshot = snapshot()
    launcher.others = [{"node": "beta", "run_id": "job7"}]
    assert len(run.view()["worlds"]) == 2, "a peer of another version is left out"


def test_a_node_that_does_not_answer_is_shown_as_it_was_and_named(launcher, monkeypatch):
    clock = Clock()
    launcher.snapshot |= {
        "started": time.time() - 100,
        "peers": [{"node": "beta", "seat": 1, "state": "seated", "since": 1.0}],
    }
    launcher.others = [{**snapshot(), "node": "beta", "worlds": [], "started": 1.0}]
    run = LaunchedRun(Path("/none"), clock=clock)
    view = until(run, lambda view: len(view["processes"]) == 6)
    assert view["note"] == ""
    launcher.others = []
    until(run, lambda _: len(launcher.looked) > 3)
    clock.now += 10
    view = until(run, lambda view: view["note"])
    assert view["note"] == "the launcher on beta does not answer"
    assert run.live().ok
    assert run.ready(()).ok
    assert b"multiworld_run_launcher_answers 1.0" in run.metrics("text/plain")[0]
    assert len(view["processes"]) == 6
    launcher.snapshot["peers"][0]["state"] = "lost"
    view = run.view()
    assert (len(view["processes"]), view["note"]) == (3, "")


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_process_tells_events_by_the_hosts_present_clock(monkeypatch):
    ahead = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: 5.0, time=lambda: 5.0 + ahead[0])
    monkeypatch.setattr(sources, "time", clock)
    monkeypatch.setattr("multiworld.metrics.begin", lambda: None)  # the recorder is the process's
    source = sources.ThisProcess()
    try:
        bus.publish(WorldJoining("w", 0, 0, 5.0))
        ahead[0] = 4600.0  # the clock is set
        bus.publish(WorldBroken("w", 1, 0, 6.0, Breakage(Cause.CRASHED, (1,), "gone", 6.0)))
        found = source.view()
    finally:
        source.close()
    assert [each["at"] for each in found["events"]] == [1005.0, 4606.0]
    assert [each["at"] for each in found["faults"]] == [4606.0]


def test_a_process_hears_an_event_in_the_middle_of_another():
    """A signal's handler may join a world while its thread tells of another one."""
    track = EventTrack(lambda: 0.0)
    active = track._faults.active

    def interrupted(*args, **more):
        track.apply(WorldJoining("b", 0, 0, 6.0))
        return active(*args, **more)

    track._faults.active = interrupted
    thread = threading.Thread(target=track.apply, args=(WorldActive("a", 1, 0, 5.0, 2),), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert [each["world"] for each in track.told()[0]] == ["a", "b"]
