"""What the parts worlds, detection and rebuild make of what was measured."""

from __future__ import annotations

import argparse
import contextlib
from collections import defaultdict

import pytest

import multiworld as mw
from benchmarks.detection import part as detection
from benchmarks.detection.part import Times
from benchmarks.detection.session import HANG, Fault
from benchmarks.measuring.part import Run
from benchmarks.overheads import part as overheads
from benchmarks.rebuild import part as rebuild
from benchmarks.rebuild.part import Rebuilds
from benchmarks.stores import rank
from benchmarks.worlds import part as worlds


def fault(at, seen, *, ended=None, third=None, cause="crashed", error="BrokenWorldException"):
    told = [{"at": seen, "cause": cause, "ranks": [1], "error": error}]
    return Fault(at, told, None if third is None else {"at": third}, ended)


def test_times_of_faults():
    times = Times()
    times.add("recv", fault(10.0, 10.006, ended=10.004, third=10.008))
    times.add("told", fault(20.0, 20.005, error=""))
    times.add("aio", fault(30.0, 29.9, cause="hung"))
    assert times.every == pytest.approx([6, 5])
    assert (times.floor, times.beyond, times.third) == (
        pytest.approx([4]), pytest.approx([2]), pytest.approx([8]),
    )  # fmt: skip
    assert (times.early, dict(times.causes)) == (1, {"crashed": 2})


def test_another_error_than_a_break_is_no_time():
    with pytest.raises(RuntimeError, match="TypeError came where a member was lost"):
        Times().add("recv", fault(1.0, 1.1, error="TypeError"))


def found(kind, times):
    remarks = []
    figures = list(detection.figures(Run(remark=remarks.append), kind, 100, times))
    return {figure.name: figure for figure in figures}, remarks


def test_figures_of_crashes():
    times = Times()
    for number in range(100):
        times.add("recv", fault(0.0, 0.001 * (number + 1), ended=0.0005))
    figures, remarks = found("crash", times)
    assert remarks == []
    assert figures["crash/100/p50"].value == pytest.approx(50.5)
    assert figures["crash/100/p50"].met is False
    assert figures["crash/100/p99"].value == pytest.approx(99.01)
    assert (figures["crash/100/p99"].low, figures["crash/100/p99"].high) == pytest.approx((95.05, 100))
    assert figures["crash/100/beyond"].value == pytest.approx(50.0)
    assert "crash/100/aio" not in figures
    assert "crash/100/third" not in figures


def test_figures_of_stops_count_from_the_hang_timeout():
    times = Times()
    times.add("recv", fault(5.0, 5.0 + HANG + 0.02, cause="hung"))
    times.add("aio", fault(6.0, 6.0 + HANG - 0.01, cause="unreachable"))
    times.add("aio", fault(7.0, 6.0, cause="hung"))
    figures, (remark,) = found("stop", times)
    assert figures["stop/100/p50"].series["ms"] == pytest.approx([-10, 20])
    assert figures["stop/100/p50"].goal is None
    assert "stop/100/floor" not in figures
    assert "1 breaks before the signal" in remark
    assert "{'unreachable': 1}" in remark


def test_no_fault_gives_no_figure():
    times = Times()
    times.add("recv", fault(2.0, 1.0))
    figures, remarks = found("crash", times)
    assert figures == {}
    assert len(remarks) == 1


class Faults:
    """Stands in for a session: these faults, one after the other."""

    def __init__(self, *faults):
        self._faults = iter(faults)

    def fault(self, *_args, **_more):
        return next(self._faults)


def of_all(at, *seen, cause="crashed", error="BrokenWorldException"):
    return Fault(at, [{"at": each, "cause": cause, "ranks": [1], "error": error} for each in seen], None, at)


def test_faults_of_many_worlds_at_once_are_looked_at_as_others():
    early, good = of_all(9.0, 8.0, 9.1), of_all(1.0, 1.02, 1.04)
    remarks = []
    told = [early, good, early, early]
    found = detection._at_once(Run(remark=remarks.append), Faults(*told), 2, 2)
    assert {figure.name: figure.value for figure in found} == pytest.approx(
        {
            "crash/at_once/2/recv/first": 20.0,
            "crash/at_once/2/recv/last": 40.0,
            "crash/at_once/2/recv/end_of_file": 0.0,
        }
    )
    said = "breaks before the signal (left out), causes other than 'crashed': none"
    assert remarks == [
        f"detection/crash/at_once/2/{way}: {count} {said}" for way, count in (("recv", 1), ("aio", 2))
    ]
    other = of_all(1.0, 1.1, error="TypeError")
    with pytest.raises(RuntimeError, match="TypeError came where a member was lost"):
        [*detection._at_once(Run(), Faults(other), 1, 1)]


def test_whole_processes_that_were_not_lost_by_a_crash_are_remarked(monkeypatch):
    victims = contextlib.nullcontext([None] * 3)
    monkeypatch.setattr(detection, "Ranks", lambda *_args, **_more: victims)
    seen = [fault(1.0, 1.1, ended=1.1), fault(2.0, 1.9), fault(3.0, 3.1, ended=3.1, cause="hung")]
    remarks = []
    found = [*detection._whole(Run(remark=remarks.append), Faults(*seen), 3)]
    assert [figure.samples for figure in found] == [2, 2, 2]
    said = "detection/crash/whole_process: 1 breaks before the signal (left out), causes other than"
    assert remarks == [f"{said} 'crashed': {{'hung': 1}}"]
    assert [*detection._whole(Run(), Faults(*[fault(2.0, 1.9)] * 3), 3)] == []


def line(noticed, active, first, generation=2, retries=0):
    times = {"noticed": noticed, "began": noticed, "active": active, "first": first}
    return {"times": times, "generation": generation, "retries": retries}


def test_a_rebuild_lasts_until_the_last_member():
    rebuilds = Rebuilds()
    newcomer = {"times": {"active": 1.04, "first": 1.05}, "generation": 2, "retries": 0}
    rebuilds.add(1.0, [line(1.01, 1.03, 1.06), line(1.02, 1.035, 1.045, retries=2), newcomer])
    assert rebuilds.took == pytest.approx([60])
    assert {phase: values[0] for phase, values in rebuilds.phases.items()} == pytest.approx(
        {"noticed": 20, "began": 20, "active": 40, "first": 60}
    )
    remarks = []
    figure = rebuild.figure(Run(remark=remarks.append), "crash/loop", rebuilds)
    assert "known after 20 ms, joining after 20, active after 40" in figure.note
    assert remarks == ["rebuild/crash/loop: 2 joins came to nothing and were made again"]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([line(1.1, 1.2, 1.3), line(1.1, 1.2, 1.3, generation=3)], "different generations"),
        ([line(1.1, 1.2, 1.3), line(0.5, 0.6, 0.9)], "0.100 s before the break"),
    ],
)
def test_what_is_no_rebuild(lines, said):
    with pytest.raises(RuntimeError, match=said):
        Rebuilds().add(1.0, lines)


def test_what_each_world_adds():
    before = {"threads": 5, "memory": 100.0}
    assert worlds.marginal(before, {"threads": 105, "memory": 110.0}, 100) == {"threads": 1.0, "memory": 0.1}
    assert worlds.names("w", 2, 4) == ["w2", "w3"]


def kinds(join, threads, descriptors=1.0):
    return {
        "join": join, "threads": threads, "descriptors": [descriptors], "memory": [0.1], "private_dirty": [0.1],
        "close": [1999.0],
    }  # fmt: skip


def test_figures_of_worlds():
    seen = {
        30: kinds([4.0, 6.0], [1.0]),
        100: kinds([14.0, 15.0, 30.0], [1.2]),
        256: kinds([6.1, 6.5], [1.2]),
    }
    plain = {
        "own store, own device": {"join": [8.0, 9.0], "threads": [4.0]},
        "shared store, own device": {"join": [2.0, 3.0], "close": [9.0], "threads": [3.0]},
    }
    figures = {figure.name: figure for figure in worlds.figures(seen, plain)}
    assert (figures["join/100"].met, figures["threads/100"].met, figures["close/100"].met) == (
        True,
        False,
        True,
    )
    assert (figures["join/100"].baseline, figures["join/100"].absolute) == (2.5, 15.0), "of new_group's form"
    assert figures["close/100"].baseline is None, "that of a plain group is of one, this is of all"
    assert figures["join/30"].goal is None
    assert figures["join/256:30"].value == pytest.approx(6.3 / 5.0)
    assert (figures["join/256:30"].met, figures["threads/256:30"].met) == (False, True)
    assert figures["plain/own_store+own_device/threads"].value == 4.0
    assert not [name for name in figures if "256:30" in name and name.startswith("close")]


class FakeRank:
    """Stands in for a rank of the part worlds; `right` messages came to it as they were sent."""

    def __init__(self, right: int) -> None:
        self._answers = {
            "join": [0.1, 0.1],
            "held": {"threads": 1.0},
            "idle": 0.0,
            "use": right,
            "close": 0.0,
        }

    def call(self, name, **_args):
        return self._answers.get(name, "")

    def start(self, name, **_args):
        self._started = name

    def result(self):
        return self.call(self._started)


def test_worlds_in_which_a_message_is_lost_are_not_measured():
    run, found = Run(options=argparse.Namespace(idle=0.0)), {2: defaultdict(list)}
    worlds._one_by_one(run, worlds.Session([FakeRank(2), FakeRank(2)]), found, 1)
    assert found[2]["join"] == [100.0, 100.0]
    with pytest.raises(RuntimeError, match="1 of 2 messages arrived"):
        worlds._one_by_one(run, worlds.Session([FakeRank(1), FakeRank(2)]), found, 1)


@pytest.mark.parametrize(("own_stores", "threads"), [(True, 2.0), (False, 1.5)])
def test_a_shared_store_is_no_cost_of_a_plain_group(own_stores, threads):
    class Member(FakeRank):
        held = 0

        def call(self, name, **args):
            served = {"ports": [1] * args.get("count", 0), "took": [0.0] * args.get("count", 0)}
            self.held += {"plain_serve": 1, "plain_join": 3}.get(name, 0)
            answers = {"plain_serve": served, "plain_join": [0.1, 0.1], "held": {"threads": self.held}}
            return answers.get(name) or super().call(name, **args)

    session = worlds.Session([Member(0), Member(0)])
    session.both = lambda name, **args: (session.member.call(name, **args),) * 2
    session.member._answers["plain_close"] = 0.0
    found = worlds._plain_form(session, 2, own_stores=own_stores, shared_device=False)
    assert found["threads"] == [threads]


def test_worlds_that_cost_nothing_at_30_have_no_ratio_to_it():
    seen = {30: kinds([4.0], [1.0], descriptors=0.0), 256: kinds([4.0], [1.0])}
    names = [figure.name for figure in worlds.figures(seen, {})]
    assert "descriptors/256:30" not in names
    assert "threads/256:30" in names


def test_a_join_that_fails_has_its_time_among_the_others(monkeypatch):
    clock = iter(float(each) for each in range(1000))

    class Joined:
        def close(self):
            pass

    def join(name, *_args, **_more):
        if name == "pair3-7":
            next(clock), next(clock)
            raise mw.JoinError(name, "the store is lost")
        return Joined()

    monkeypatch.setattr(mw, "join", join)
    monkeypatch.setattr(rank, "operate", lambda _world: None)
    monkeypatch.setattr(rank, "forever", lambda: None)
    monkeypatch.setattr(rank, "time", argparse.Namespace(monotonic=lambda: next(clock)))
    told = []
    rank._Joining("tcp://here", None, 3, 0, 10)(lambda **fields: told.append(fields))
    begun, results = told
    assert begun == {"begun": True}
    assert results["took"] == [1.0, 1.0, 3.0, 1.0, 1.0]
    assert results["failed"] == ["JoinError: the store is lost."]


def test_imports_are_timed_in_a_fresh_interpreter():
    took, modules, torch = overheads._import(
        "import this_module", before="import sys; sys.modules['this_module'] = sys"
    )
    assert (modules, torch) == (0, False)
    assert 0 <= took < 1000
    slow, modules, _ = overheads._import("import multiworld; multiworld.subscribe")
    assert slow > took
    assert modules >= 2
    assert overheads._import("pass", before="sys.modules['torch'] = sys")[2] is True
    with pytest.raises(RuntimeError, match=r"(?s)failed in a fresh interpreter.*ModuleNotFoundError"):
        overheads._import("import no_such_module")
