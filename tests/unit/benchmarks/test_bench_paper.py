"""The paper's tables: who shares a world with whom, what is made of rates and arrivals, and the page."""

from __future__ import annotations

import argparse
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.figures.records import KEPT, PartRun, Record, stored
from benchmarks.figures.sizes import KB
from benchmarks.measuring.part import Run
from benchmarks.page.write import chosen_of
from benchmarks.paper import layout, nccl, overtime, page, theirs
from benchmarks.paper.layout import FORMS, MULTI, PLAIN, PROCESS, SAME, SINGLE, THEIRS, WORLD
from benchmarks.paper.overtime import Trial
from benchmarks.paper.part import FEWEST, MOST, PART, messages_for
from benchmarks.paper.pictures import TITLES, draw_all
from benchmarks.paper.program import Program
from benchmarks.paper.told import fault_of, join_of, throughput_of

TRIAL = Trial(
    event=1.0, until=3.0, stays=tuple(0.01 * each for each in range(300)), other=(0.1, 0.2),
    error=(1.05, "BrokenWorldException", "w broken: lost"),
)  # fmt: skip


@pytest.mark.parametrize("senders", [1, 2, 3])
def test_every_link_is_in_a_world_that_both_its_ends_join(senders):
    worlds = layout.worlds_of(senders)
    assert worlds[SINGLE] == (0, *range(senders, 2 * senders))
    for topology in layout.TOPOLOGIES:
        for count in range(1, senders + 1):
            links = layout.links_of(topology, count, senders)
            assert [link.sender for link in links] == [*range(senders, senders + count)]
            for link in links:
                assert {link.receiver, link.sender} <= {*worlds[link.world]}
    assert {max(each) for each in worlds.values()} <= {*range(layout.size_of(senders))}


def test_multi_process_has_a_receiver_for_each_sender_and_multi_world_one():
    receivers = {
        topology: [link.receiver for link in layout.links_of(topology, 3, 3)]
        for topology in layout.TOPOLOGIES
    }
    assert receivers == {SINGLE: [0, 0, 0], MULTI: [0, 0, 0], PROCESS: [0, 1, 2]}
    assert len({link.world for link in layout.links_of(MULTI, 3, 3)}) == 3
    assert not [name for name in layout.worlds_of(3, processes=False) if name.startswith(PROCESS)]


@pytest.mark.parametrize(("topology", "count"), [("other", 1), (SINGLE, 0), (MULTI, 4)])
def test_no_links(topology, count):
    with pytest.raises(ValueError, match="senders"):
        layout.links_of(topology, count, 3)


def test_with_one_sender_multi_process_would_be_multi_world():
    assert {topology for _, topology in layout.cells_of(1)} == {SINGLE, MULTI}
    assert len(layout.cells_of(2)) == 3 * len(FORMS)


@given(st.integers(4, 1 << 30))
def test_a_round_has_some_messages_and_not_too_many(size):
    assert FEWEST <= messages_for(size) <= MOST
    assert messages_for(size) >= messages_for(size + 4)


@given(st.lists(st.floats(0, 3.99)))
def test_every_arrival_is_in_a_bar(at):
    assert sum(overtime.rates(at, 4.0)) * overtime.BUCKET == pytest.approx(len(at))
    assert len(overtime.rates(at, 4.0)) == 40


def test_rates_and_gaps_of_a_span():
    at = [0.0, 0.5, 1.0, 1.1]
    assert overtime.rate_between(at, 0.0, 1.0) == 2.0
    assert overtime.longest_gap(at, 0.0, 1.0) == 0.5
    assert overtime.longest_gap(at, 1.2, 3.0) == pytest.approx(1.8)
    with pytest.raises(ValueError, match="span"):
        overtime.rate_between(at, 1.0, 1.0)


def throughput(count=2, size=4 * KB, forms=FORMS):
    cells = [cell for cell in layout.cells_of(count) if cell[0] in forms]
    return [*throughput_of(count, size, {cell: [1000.0 + place, 1100.0] for place, cell in enumerate(cells)})]


def test_rates_are_over_torchs_single_world_and_over_ones_own():
    figures = {figure.name: figure for figure in throughput()}
    base = figures["throughput/2/4KB/single/torch"]
    assert (base.unit, base.value) == ("MB/s", pytest.approx(1050 * 4096 / 1e6))
    assert figures[f"throughput/2/4KB/multi/{WORLD}"].baseline == pytest.approx(base.value)
    kept = figures[f"kept/2/4KB/multi/{THEIRS}"]
    assert kept.baseline == figures[f"throughput/2/4KB/single/{THEIRS}"].absolute
    assert len(figures) == 12 + 8


def test_a_kill_is_told_as_the_others_rate_and_the_time_until_it_was_known():
    rate, noticed = fault_of(WORLD, "words", [TRIAL])
    assert rate.value == pytest.approx(1.0, abs=0.05)
    assert noticed.value == pytest.approx(50.0)
    assert rate.series["error"][1] == "BrokenWorldException"
    ended = Trial(event=1.0, until=3.0, stays=(0.4, 0.5, 0.9), other=(), stays_error=(1.0, "X", ""))
    assert [figure.value for figure in fault_of(PLAIN, "words", [ended])] == [0.0]


def test_a_join_is_told_as_its_time_and_what_the_first_worker_lost():
    trial = Trial(event=1.0, until=3.0, stays=TRIAL.stays, other=(2.0,), join=1.5)
    took, rate, gap = join_of(SAME, "words", [trial])
    assert (took.value, rate.value) == (pytest.approx(500.0), pytest.approx(1.0, abs=0.05))
    assert gap.value == pytest.approx(10.0)


def record(form="quick", when="2026-11-26T00:00:00+00:00"):
    figures = [*throughput(1), *throughput(2), *throughput(2, 400 * KB)]
    figures += [*fault_of(PLAIN, "words", [TRIAL]), *join_of(SAME, "words", [TRIAL, TRIAL])]
    machine = {
        "cpu": "Some CPU", "cores": 2, "memory_gb": 8.0, "kernel": "6.1", "python": "3.11.7", "torch": "2.13.0",
        "load_before": 1.0, "load_after": 2.0,
    }  # fmt: skip
    return Record(
        when, "1.2.3", "abc", machine, (), {"paper": PartRun(form, remarks=("a remark",))}, tuple(figures)
    )


def test_the_page_has_the_newest_full_record():
    found = [record(), record("full", "2026-11-25T00:00:00+00:00"), record(when="2026-11-27T00:00:00+00:00")]
    assert page.newest(found) is found[1]
    assert page.newest(found[::2]) is found[2]
    assert page.newest([]) is None


def test_the_page_of_speed_leaves_the_part_to_its_own():
    assert chosen_of([record()]) == {}


def test_every_table_is_written_twice_alike():
    text = "".join(f"<!-- table: {name} -->\nold\n<!-- end -->\n" for name in page.TABLES)
    once = page.with_tables(text, record())
    assert "old" not in once
    assert "| 4KB | multi | 4.31 (1) |" in once
    assert page.with_tables(once, record()) == once
    with pytest.raises(KeyError):
        page.with_tables("<!-- table: none -->\n<!-- end -->", record())


def test_every_picture_is_drawn(tmp_path):
    assert draw_all(record(), tmp_path) == [*TITLES]
    assert {path.stem for path in tmp_path.iterdir()} == {*TITLES}


def test_the_page_in_the_repository_is_of_the_kept_record():
    kept, _ = stored(KEPT)
    text = page.PAGE.read_text(encoding="utf-8")
    newest = page.newest(kept)
    assert newest is not None
    assert page.with_tables(text, newest) == text
    assert {*re.findall(r"\(paper/(\w+)\.svg\)", text)} == {*TITLES}
    assert {path.stem for path in (page.DOCS / "paper").glob("*.svg")} == {*TITLES}


def test_what_they_measured_has_a_time_for_each_size():
    assert all(
        len(each) == len(theirs.ELEMENTS) for both in theirs.SECONDS.values() for each in both.values()
    )
    assert theirs.mb_per_s(1, 10.0) == pytest.approx(0.04)
    assert theirs.lost(1.0, 2.0) == 50.0


@pytest.mark.parametrize(("gpus", "senders"), [(1, 1), (2, 1), (3, 2), (8, 3)])
def test_a_gpu_for_each_process_where_there_are_as_many(gpus, senders):
    assert nccl.senders_for(gpus) == senders


def test_without_a_gpu_nccl_is_not_run_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr(nccl, "gpus_here", lambda: (0, "torch sees no GPU"))
    assert nccl.main([]) == nccl.NOT_RUN
    assert "not run: torch sees no GPU" in capsys.readouterr().out


def test_the_options_have_defaults():
    parser = argparse.ArgumentParser()
    PART.add_options(parser)
    options = parser.parse_args([])
    assert (options.senders, options.size, options.sizes) == ([1, 2, 3], 400 * KB, None)
    assert Run(options=options).pick("quick", "full") == "quick"


@pytest.mark.parametrize("package", [PLAIN, SAME])
def test_two_processes_send_and_receive(package):
    forms = [PLAIN] if package == PLAIN else [SAME, WORLD]
    with Program(package, None, 1) as program:
        for form in forms:
            for topology in (SINGLE, MULTI):
                assert program.rate(form, topology, 1, 4 * KB, 5) > 0
