"""What Prometheus reads of a process's worlds."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path

import pytest
from fakeworlds import collected, numbers
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics import exposition as openmetrics_exposition
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

from multiworld._core.operations.log import BEGAN, ENDED
from multiworld.events import Cause, State
from multiworld.metrics import collector, text
from multiworld.metrics.collector import OTHER, WorldsCollector
from multiworld.metrics.recorder import STATE_BYTES, STUCK

ROOT = Path(__file__).parents[3]


@pytest.fixture
def busy(process):
    """A process with something of everything."""
    w0, w1 = process.add("w0", number=3, size=4), process.add("w1", size=2)
    w0.busy = 2, 3
    w0.waits(9.0)
    w0.waits(70.0, ended=1.0)
    w0.log.totals.message("send", 1, 10)
    w0.log.totals.message("recv", 2, 5)
    w0.log.totals.collective("the comparison of calls (M8D_CHECK)", 1)
    w0.log.totals.collective("all_reduce", 64)
    w1.breaks(ago=7.0)
    process.names = "w1", "new"
    process.joins("w0", took=0.2)
    process.joins("w1", took=0.2)
    process.breaks("w1", at=w1.breakage.at)
    process.totals.reported(written=True)
    process.recorder._of("w0").counts.update({STUCK: 2, STATE_BYTES: 100})
    return process


def test_each_number_is_what_the_process_has(busy):
    with collected(busy) as made:
        found = numbers(made)
    assert found["multiworld_worlds", "joining"] == 1, "`new`; the other is a rejoin"
    assert found["multiworld_worlds", "active"] == found["multiworld_worlds", "broken"] == 1
    for name, value in {
        "world_active": 1, "world_ready": 1, "world_generation": 3, "world_members": 4, "world_busy_members": 2,
        "world_broken_seconds": 0, "stuck_operations_total": 2, "state_received_bytes_total": 100,
        "broken_seconds_total": 0,
    }.items():  # fmt: skip
        assert found[f"multiworld_{name}", "w0"] == value, name
    assert found["multiworld_world_pending_seconds", "w0"] == pytest.approx(9.0, abs=1)
    assert found["multiworld_world_pending_seconds", "w1"] == 0
    assert (found["multiworld_world_active", "w1"], found["multiworld_world_ready", "w1"]) == (0, 0)
    for name in ("world_broken_seconds", "broken_seconds_total"):
        assert found[f"multiworld_{name}", "w1"] == pytest.approx(7.0, abs=1)
    # Labels are sorted by their names: cause before world, direction before world.
    assert found["multiworld_breakages_total", "crashed", "w1"] == 1
    assert found["multiworld_breakages_total", "hung", "w1"] == 0
    assert found["multiworld_joins_total", "active", "w0"] == 1
    assert found["multiworld_joins_total", "failed", "w0"] == 0
    assert found["multiworld_operations_total", "send", "w0"] == 1
    assert found["multiworld_operations_total", "all_reduce", "w0"] == 1
    assert found["multiworld_operations_total", "check", "w0"] == 1
    assert found["multiworld_message_bytes_total", "sent", "w0"] == 10
    assert found["multiworld_message_bytes_total", "received", "w0"] == 5
    assert found["multiworld_collective_bytes_total", "all_reduce", "w0"] == 64
    assert found["multiworld_break_reports_total", "written"] == 1
    assert found["multiworld_break_reports_total", "failed"] == 0
    assert found[("multiworld_join_duration_seconds_count",)] == 2
    assert found["multiworld_join_duration_seconds_bucket", "0.1"] == 0
    assert found["multiworld_join_duration_seconds_bucket", "0.25"] == 2
    assert found[("multiworld_join_duration_seconds_sum",)] == pytest.approx(0.4)


def test_what_was_told_as_stuck_counts_as_long_as_it_waits(process, monkeypatch):
    for name in ("w0", "w1", "w2"):
        process.add(name).waits(90.0)  # for work
    process.known["w0"].waits(30.0)
    process.known["w2"].waits(20.0)

    def first_told(gen, waiting):
        return next((each for each in waiting if time.monotonic() - each[BEGAN] < 60), None)

    monkeypatch.setattr(collector.stuck_watch, "first_told", first_told)
    with collected(process, max_worlds=1) as made:
        found = numbers(made)
    assert found["multiworld_world_stuck_seconds", "w0"] == pytest.approx(30, abs=5)
    assert found["multiworld_world_stuck_seconds", OTHER] == pytest.approx(20, abs=5)
    process.known["w0"].log.entries[1][ENDED] = time.monotonic()
    with collected(process) as made:
        found = numbers(made)
    assert (found["multiworld_world_stuck_seconds", "w0"], found["multiworld_world_stuck_seconds", "w1"]) == (
        0,
        0,
    )


def test_a_world_that_is_joined_for_the_first_time_is_neither_active_nor_ready(process):
    process.add("w0")
    process.names = ("w0", "new")  # `new`: its event may come later
    for label, limit in (("new", 512), (OTHER, 0)):
        with collected(process, max_worlds=limit) as made:
            found = numbers(made)
        assert (found["multiworld_world_active", label], found["multiworld_world_ready", label]) == (0, 0)
        assert ("multiworld_world_generation", "new") not in found


def test_a_world_that_rejoins_is_broken_until_it_is_active(busy):
    busy.known["w1"].state = State.JOINING
    with collected(busy) as made:
        found = numbers(made)
    assert (found["multiworld_worlds", "joining"], found["multiworld_worlds", "broken"]) == (2, 0)
    assert found["multiworld_world_broken_seconds", "w1"] > 6


def test_a_world_that_a_member_left_in_good_order_is_not_said_to_be_unready(process):
    for name in ("w0", "w1", "w2"):
        process.joins(process.add(name).name)
    for name in ("w0", "w2"):
        process.known[name].breaks(Cause.LEFT, ago=9.0)
        process.breaks(name, Cause.LEFT)
    process.known["w2"].state = State.JOINING
    for labels in (512, 0):
        with collected(process, max_worlds=labels) as made:
            found = numbers(made)
        assert {key[1]: value for key, value in found.items() if key[0] == "multiworld_world_ready"} == {
            "w1" if labels else OTHER: 1
        }
    assert found["multiworld_world_active", OTHER] == found["multiworld_world_broken_seconds", OTHER] == 0


def test_worlds_beyond_the_limit_share_a_label_and_the_worst_is_shown(process):
    for number in range(4):
        world = process.add(f"w{number}", size=10)
        world.log.totals.message("send", 1, 1)
        process.joins(world.name)
    process.known["w2"].waits(5.0)
    process.known["w3"].busy = (1,)
    process.known["w3"].breaks(ago=9.0)
    process.breaks("w3", at=process.known["w3"].breakage.at)
    with collected(process, max_worlds=2) as made:
        found = numbers(made)
        assert {key[-1] for key in found if key[0] == "multiworld_world_active"} == {"w0", "w1", OTHER}
        assert found["multiworld_world_active", OTHER] == found["multiworld_world_ready", OTHER] == 0
        assert found["multiworld_world_members", OTHER] == 20
        assert found["multiworld_world_busy_members", OTHER] == 1
        assert found["multiworld_world_pending_seconds", OTHER] == pytest.approx(5, abs=1)
        assert found["multiworld_world_broken_seconds", OTHER] == pytest.approx(9, abs=1)
        assert ("multiworld_world_generation", OTHER) not in found
        assert found["multiworld_operations_total", "send", OTHER] == 2
        assert found["multiworld_joins_total", "active", OTHER] == 2
        assert found["multiworld_breakages_total", "crashed", OTHER] == 1


def rising(found):
    return {key: value for key, value in found.items() if key[0].endswith("_total")}


def test_counters_never_go_back_when_names_come_and_go(process, monkeypatch):
    from multiworld._generation import process_totals
    from multiworld.metrics import recorder

    monkeypatch.setattr(recorder, "KEPT", 2)
    monkeypatch.setattr(process_totals, "KEPT", 2)
    with collected(process, max_worlds=3) as made:
        before, seen = {}, set()
        for number in range(12):
            world = process.add(f"w{number}")
            process.joins(world.name)
            world.log.totals.message("send", 1, 8)
            found = rising(numbers(made))
            assert found["multiworld_operations_total", "send", world.name] == 1, (
                "who lives has a label first"
            )
            for key, value in before.items():
                if key[-1] == OTHER or key in found:
                    assert found[key] >= value, (number, key)
            labels = {key[-1] for key in found if key[0] == "multiworld_joins_total"}
            assert len(labels - {OTHER}) <= 3
            everything = sum(
                value for key, value in found.items() if key[:2] == ("multiworld_operations_total", "send")
            )
            assert everything == number + 1, "what is forgotten stays in the sum"
            before, seen = found, seen | labels
            process.closes(world.name)
            process.totals.end(world.name, world.log.totals)
        assert OTHER in seen


def test_a_world_keeps_its_label(process):
    process.add("w0")
    with collected(process, max_worlds=1) as made:
        assert ("multiworld_world_active", "w0") in numbers(made)
        process.known = {"w1": process.add("w1"), "w0": process.known["w0"]}
        found = numbers(made)
        assert ("multiworld_world_active", "w0") in found
        assert ("multiworld_world_active", "w1") not in found
        process.closes("w0")
        assert ("multiworld_world_active", OTHER) in numbers(made), "and does not get another: counters rise"


def test_a_world_of_the_name_of_the_others_is_one_of_them(process):
    process.add(OTHER)
    with collected(process) as made:
        assert ("multiworld_world_generation", OTHER) not in numbers(made)


def test_names_are_written_as_prometheus_reads_them(process):
    name = 'a"b\\c\nd é'
    process.add(name)
    with collected(process) as made:
        found = text.written(made.collect(), openmetrics=False).decode()
    labels = {
        s.labels["world"]
        for f in text_string_to_metric_families(found)
        for s in f.samples
        if "world" in s.labels
    }
    assert labels == {name}


def described(families):
    return {
        f.name: (f.documentation, f.type, [(s.name, s.labels, s.value) for s in f.samples]) for f in families
    }


@pytest.mark.parametrize("openmetrics", [False, True])
def test_both_formats_read_as_what_was_collected(busy, openmetrics):
    with collected(busy) as made:
        families = list(made.collect())
    found = text.written(families, openmetrics=openmetrics).decode()
    if openmetrics:
        read = described(openmetrics_parser.text_string_to_metric_families(found))
        assert read == described(families)
    else:
        # What prometheus_client itself writes reads the same.
        registry = CollectorRegistry(auto_describe=False)
        registry.register(type("Made", (), {"collect": lambda self: families})())
        from prometheus_client import generate_latest

        read = described(text_string_to_metric_families(found))
        assert read == described(text_string_to_metric_families(generate_latest(registry).decode()))
    assert len(read) == len(families) == 22


def test_the_format_is_chosen_by_the_header(busy, monkeypatch):
    monkeypatch.setattr(text, "_collector", WorldsCollector)
    body, kind = text.exposition()
    assert (kind, body.startswith(b"# HELP multiworld_info "), b"# EOF" in body) == (text.PLAIN, True, False)
    scraper = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
    body, kind = text.exposition(scraper)
    assert kind == text.OPENMETRICS
    assert body.endswith(b"# EOF\n")
    assert kind in {openmetrics_exposition.CONTENT_TYPE_LATEST, kind}


def test_names_units_and_help_follow_prometheus(busy):
    with collected(busy) as made:
        families = list(made.collect())
    for family in families:
        assert re.fullmatch(r"multiworld(_[a-z]+)*", family.name)
        assert not family.name.endswith(("_total", "_info", "_count", "_sum", "_bucket"))
        assert family.documentation.endswith(".") or "; 0: none." in family.documentation
        for sample in family.samples:
            assert set(sample.labels) <= {
                "version",
                "state",
                "world",
                "result",
                "cause",
                "kind",
                "direction",
                "le",
            }
            assert math.isfinite(sample.value)
    assert {cause.value for cause in Cause} == {
        s.labels["cause"] for f in families for s in f.samples if "cause" in s.labels
    }


def test_a_collector_can_be_registered_beside_others(busy):
    registry = CollectorRegistry()
    with collected(busy) as made:
        registry.register(made)
        assert registry.get_sample_value("multiworld_world_members", {"world": "w0"}) == 4


def test_256_worlds_are_collected_and_written_in_milliseconds(process, monkeypatch):
    """20 ms are promised, 12 measured; a machine that others share may take several times that."""
    made = WorldsCollector()
    monkeypatch.setattr(text, "_collector", lambda: made)
    for number in range(256):
        world = process.add(f"stage{number}")
        for _ in range(64):
            world.waits(1.0, ended=2.0)
        process.joins(world.name)
        for kind in ("send", "recv"):
            world.log.totals.message(kind, 1, 4)
        for kind in ("all_reduce", "barrier"):
            world.log.totals.collective(kind, 8)
    took = []
    for _ in range(15):
        began = time.thread_time()  # other programs may use the cores
        body, _ = text.exposition()
        took.append(time.thread_time() - began)
    assert body.count(b'world="stage255"') > 20
    assert min(took) < 0.1, took
