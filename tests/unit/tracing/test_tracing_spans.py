"""Spans of joins, transfers of state and recoveries, and how members find each other's."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("opentelemetry.sdk", reason="spans are of the extra m8d[otel]")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import multiworld
from multiworld._core.membership.roster import Endpoint, Member, Roster
from multiworld._generation.break_report import generation_id
from multiworld.errors import JoinTimeoutError
from multiworld.events import (
    Breakage,
    Cause,
    WorldActive,
    WorldBroken,
    WorldClosed,
    WorldJoinFailed,
    WorldJoining,
    WorldReady,
    WorldStateReceived,
    WorldUnblocked,
    bus,
)
from multiworld.tracing import generation_ids, spans, trace_worlds

ROOT = Path(__file__).parents[3]


def roster(generation, rank=0, token=b"t" * 16, world="w"):
    members = tuple(
        Member(each, f"{each:032x}", Endpoint("127.0.0.1", 1), 100 + each, "host") for each in range(2)
    )
    return Roster(world, generation, rank, members, token, 5.0)


class FakeWorld:
    def __init__(self, found):
        self._gen, self.roster = self, found


class Traced:
    """One process's events and its spans."""

    def __init__(self, monkeypatch):
        self.known = {}
        monkeypatch.setattr(spans, "registry", self)
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.end = trace_worlds(provider)

    def worlds(self):
        return self.known

    def joins(self, generation, begin=10.0, end=12.0, **arguments):
        bus.publish(WorldJoining("w", 0, 0, begin))
        self.known["w"] = FakeWorld(roster(generation, **arguments))
        bus.publish(WorldActive("w", generation, 0, end, 2))

    def breaks(self, generation, at=20.0, cause=Cause.CRASHED):
        bus.publish(WorldBroken("w", generation, 0, at, Breakage(cause, (1,), "rank 1: gone", at)))

    def found(self):
        made = self.exporter.get_finished_spans()
        self.exporter.clear()
        return made


@pytest.fixture
def traced(monkeypatch):
    made = Traced(monkeypatch)
    yield made
    made.end()


def links(span):
    return [
        (link.context.trace_id, link.context.span_id, link.attributes["multiworld.generation"])
        for link in span.links
    ]


def shared(generation, **arguments):
    return (*generation_ids("w", generation, generation_id(roster(generation, **arguments))), generation)


def seconds(span):
    return (span.end_time - span.start_time) / 1e9


def test_a_join(traced):
    traced.joins(3)
    (span,) = traced.found()
    assert (span.name, seconds(span)) == ("multiworld.join", 2.0)
    assert dict(span.attributes) == {
        "multiworld.world": "w",
        "multiworld.generation": 3,
        "multiworld.rank": 0,
        "multiworld.world_size": 2,
        "multiworld.generation.id": generation_id(roster(3)),
    }
    assert links(span) == [shared(3)]
    assert span.status.is_ok
    assert span.links[0].context.is_remote
    assert span.instrumentation_scope.name == "multiworld"
    assert span.instrumentation_scope.version == multiworld.__version__


def test_times_are_those_of_the_world(traced):
    now = time.monotonic()
    traced.joins(1, begin=now - 5, end=now)
    (span,) = traced.found()
    assert span.end_time / 1e9 == pytest.approx(time.time(), abs=2)
    assert seconds(span) == pytest.approx(5)


def test_a_join_that_fails(traced):
    bus.publish(WorldJoining("w", 0, -1, 10.0))
    error = JoinTimeoutError("w", "rank 1 is missing")
    bus.publish(WorldJoinFailed("w", 0, -1, 40.0, error))
    (span,) = traced.found()
    assert (span.name, seconds(span)) == ("multiworld.join", 30.0)
    assert (span.status.status_code, span.status.description) == (trace.StatusCode.ERROR, str(error))
    assert span.events[0].attributes["exception.message"] == str(error)
    assert (span.links, "multiworld.generation.id" in span.attributes) == ((), False)
    bus.publish(WorldJoinFailed("w", 0, -1, 40.0, error))
    assert traced.found() == (), "no join was under way"


def test_members_find_each_other_by_one_context(traced):
    traced.joins(3)
    (mine,) = traced.found()
    traced.joins(3, rank=1)
    (theirs,) = traced.found()
    assert links(mine) == links(theirs)
    assert shared(3, token=b"u" * 16) != shared(3), "another run has one of that name and number, too"
    assert generation_ids("w", 3, "a") != generation_ids("w", 4, "a")
    assert generation_ids("w", 3, "a") != generation_ids("v", 3, "a")
    context = mine.links[0].context
    assert context.is_valid
    assert context.trace_flags.sampled


def test_the_ids_are_those_that_other_versions_make():
    """Members of one world may be traced by several releases."""
    assert generation_ids("w", 3, "0a1b2c3d") == (47736491848202202379707781649057024369, 3309983172071045049)


def test_a_recovery_links_both_generations(traced):
    traced.joins(1)
    traced.breaks(1)
    traced.joins(2, begin=21.0, end=24.5)
    _, join, recovery = traced.found()
    assert (join.name, links(join)) == ("multiworld.join", [shared(2)])
    assert (recovery.name, seconds(recovery)) == ("multiworld.recovery", 4.5)
    assert links(recovery) == [shared(1), shared(2)]
    assert recovery.status.is_ok
    found = recovery.attributes
    assert (found["multiworld.cause"], found["multiworld.ranks"]) == ("crashed", (1,))
    assert (found["multiworld.detail"], found["multiworld.broken_generation"]) == ("rank 1: gone", 1)
    assert found["multiworld.generation"] == 2
    traced.joins(3)
    assert [span.name for span in traced.found()] == ["multiworld.join"], "it is over"


def test_a_recovery_goes_on_over_joins_that_fail(traced):
    traced.joins(1)
    traced.breaks(1)
    bus.publish(WorldJoining("w", 0, 0, 21.0))
    bus.publish(WorldJoinFailed("w", 0, 0, 22.0, OSError("x")))
    traced.joins(2, begin=23.0, end=25.0)
    assert [span.name for span in traced.found()] == [
        "multiworld.join",
        "multiworld.join",
        "multiworld.join",
        "multiworld.recovery",
    ]


@pytest.mark.parametrize(("cause", "names"), [(Cause.HUNG, ["multiworld.recovery"]), (Cause.LEFT, [])])
def test_a_world_that_is_closed_has_not_recovered(traced, cause, names):
    traced.joins(1)
    traced.breaks(1, cause=cause)
    traced.found()
    del traced.known["w"]
    bus.publish(WorldClosed("w", 1, 0, 30.0))
    found = traced.found()
    assert [span.name for span in found] == names
    for span in found:
        assert not span.status.is_ok
        assert links(span) == [shared(1)]
        assert seconds(span) == 10.0
    traced.joins(1)
    assert [span.name for span in traced.found()] == ["multiworld.join"]


def test_a_join_that_a_close_gave_up_has_a_span(traced):
    traced.joins(1)
    traced.breaks(1)
    traced.found()
    bus.publish(WorldJoining("w", 1, 0, 22.0))
    del traced.known["w"]
    bus.publish(WorldClosed("w", 1, 0, 30.0))
    bus.publish(WorldJoinFailed("w", 1, 0, 30.5, OSError("closed")))
    recovery, join = traced.found()
    assert (recovery.name, join.name, seconds(join)) == ("multiworld.recovery", "multiworld.join", 8.5)
    assert not join.status.is_ok
    (subscriber,) = [each for each in bus._subscribers if "Spans.apply" in repr(each._fn)]
    assert subscriber._fn.__self__._worlds == {}


def test_an_advance_is_no_join(traced):
    traced.joins(1)
    traced.found()
    bus.publish(WorldActive("w", 2, 0, 30.0, 2))
    assert traced.found() == ()


def test_a_transfer_of_a_state(traced):
    traced.joins(2)
    traced.found()
    for received in (10, 80):
        bus.publish(WorldStateReceived("w", 2, 0, 13.0, 1, received, 80))
    bus.publish(WorldReady("w", 2, 0, 14.0, 1, 1.5))
    (span,) = traced.found()
    assert (span.name, seconds(span), links(span)) == ("multiworld.state_transfer", 1.5, [shared(2)])
    assert (span.attributes["multiworld.provider"], span.attributes["multiworld.state.bytes"]) == (1, 80)
    bus.publish(WorldReady("w", 2, 0, 14.0, -1, 1.5))
    assert traced.found() == (), "it had the state"


def test_a_generation_that_is_gone_has_no_link(traced):
    traced.joins(2)
    traced.found()
    bus.publish(WorldReady("w", 1, 0, 14.0, 1, 1.5))
    (span,) = traced.found()
    assert (span.links, "multiworld.generation.id" in span.attributes) == ((), False)


def test_the_lock_is_free_while_a_span_is_exported(traced, monkeypatch):
    """An exporter that blocks must not hold the watchdog's thread, which tells of breakages."""
    tracer = traced.exporter
    held = []
    (subscriber,) = [each for each in bus._subscribers if "Spans.apply" in repr(each._fn)]
    lock = subscriber._fn.__self__._lock

    def export(found):
        held.append(lock._is_owned())
        return InMemorySpanExporter.export(tracer, found)

    monkeypatch.setattr(tracer, "export", export)
    traced.joins(1)
    assert held == [False]


def test_it_ends(traced):
    traced.end()
    traced.end()
    traced.joins(1)
    assert traced.found() == ()


def test_worlds_that_are_gone_are_not_kept(traced):
    (subscriber,) = [each for each in bus._subscribers if "Spans.apply" in repr(each._fn)]
    kept = subscriber._fn.__self__._worlds
    bus.publish(WorldJoining("never", 0, 0, 1.0))
    bus.publish(WorldJoinFailed("never", 0, 0, 2.0, OSError()))
    traced.joins(1)
    assert list(kept) == ["w"]
    bus.publish(WorldClosed("w", 1, 0, 30.0))
    bus.publish(WorldUnblocked("w", 1, 0, 30.5, 2, 0.5))  # told late
    assert kept == {}


def test_a_forked_child_knows_nothing_of_its_parents_worlds(traced):
    traced.joins(1)
    traced.breaks(1)
    traced.found()
    pid = os.fork()
    if not pid:
        traced.joins(2)
        os._exit([span.name for span in traced.found()] != ["multiworld.join"])
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_without_the_extra_the_error_says_what_to_install():
    program = (
        "import sys; sys.modules['opentelemetry'] = None; import multiworld\n"
        "from multiworld.events import bus\n"
        "try:\n  multiworld.trace_worlds()\n"
        "except multiworld.MultiworldError as error:\n  print(error, len(bus._subscribers), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True, cwd="/",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout.strip().endswith("pip install 'm8d[otel]'. 0 False")


def test_spans_have_the_times_of_the_hosts_present_clock(traced, monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: 50.0, time=lambda: 3650.0)  # it was set after the begin
    monkeypatch.setattr(spans, "time", clock)
    traced.joins(1)
    (span,) = traced.found()
    assert (span.start_time, span.end_time) == (3610 * 10**9, 3612 * 10**9)
