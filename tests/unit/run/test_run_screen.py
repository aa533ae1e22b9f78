"""The live view: what it shows at which size, when it draws, and where workers' output goes meanwhile."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.runstatekit import ANYTHING, AT, begun, killed, run_of
from kits.terminalkit import CODES, on_a_terminal, text_of
from rich.cells import cell_len
from rich.console import Console

from multiworld.run import events as h
from multiworld.run.errors import RunError
from multiworld.run.view.layout import STYLES, layout, plain
from multiworld.run.view.screen import Screen, _Above, _Raw, coloured, open_screen
from multiworld.run.view.state import RunState


def shown(*told: h.RunEvent, width: int, height: int | None = None) -> list[str]:
    return plain(layout(run_of(*told, at=AT + 105).snapshot(), width, height)).split("\n")


def test_at_120_columns_everything_is_there():
    lines = shown(*begun(), *killed(3)[:4], width=120)
    assert lines[0] == "run job7 · node alpha · seat 0 of 1 · up 1 min · restart worker, 3 each"
    assert lines[1] == "9 workers: 8 up, 1 starting · 1 restart · 8 worlds: w2 broken 1, 7 active"
    assert lines[2] == "broken: w2"
    assert lines[4].split() == [
        "rank",
        "worker",
        "pid",
        "node",
        "state",
        "worlds",
        "restarts",
        "last",
        "event",
        "age",
    ]
    assert lines[5].split() == [
        "0", "hub:0", "4000", "alpha", "up", "w2", "broken", "1,", "7", "active", "0", "w2", "broken,", "generation",
        "1:", "rank", "1", "crashed:…", "1", "min",
    ]  # fmt: skip
    assert lines[8].split() == [
        "3", "worker:2", "4703", "alpha", "starting", "w2", "gone", "1", "1", "started", "again,", "pid", "4703", "4",
        "s",
    ]  # fmt: skip
    assert [line[10:] for line in lines[-4:]] == [
        "rank 3 (worker:2) failed: killed by SIGKILL",
        "rank 3 (worker:2) is started again at once, 2 restarts left",
        "rank 0 (hub:0) w2 broken, generation 1: rank 1 crashed: connection reset by peer",
        "rank 3 (worker:2) started again, pid 4703",
    ]


def test_at_80_columns_the_node_stands_in_the_header_alone():
    lines = shown(*begun(), *killed(3)[:4], width=80)
    assert lines[4].split() == [
        "rank",
        "worker",
        "pid",
        "state",
        "worlds",
        "restarts",
        "last",
        "event",
        "age",
    ]
    assert "alpha" in lines[0]
    assert all(len(line) <= 80 for line in lines)
    assert [line.split()[:3] for line in lines[5:14]] == [
        [str(rank), "hub:0" if rank == 0 else f"worker:{rank - 1}", "4703" if rank == 3 else str(4000 + rank)]
        for rank in range(9)
    ]


def test_sixty_four_workers_are_counted_and_those_in_trouble_shown():
    trouble = [*killed(60)[:4], h.WorkerFailed(AT + 104, 33, 4033, 0, 1, "ValueError: x")]
    lines = shown(*begun(64), *trouble, width=100, height=24)
    assert len(lines) <= 24
    rows = lines[5 : next(at for at, line in enumerate(lines) if line.startswith("and "))]
    ranks = [int(row.split()[0]) for row in rows]
    assert ranks == sorted(ranks)
    assert {0, 33, 60} <= set(ranks)  # the hub has a broken world
    assert f"and {65 - len(rows)} more: {65 - len(rows)} up" in lines
    assert "64 worlds: w32 broken 1, w59 broken 1, 62 act…" in lines[1]
    assert lines[-1].endswith("rank 33 (worker:32) failed: ValueError: x")


def test_every_broken_world_is_named_whatever_is_cut():
    """Two worlds of long names broken at once: the counts and the table's cells have no room for them."""
    told = begun(8)
    for at, each in enumerate(told):
        if isinstance(each, h.WorldChanged):
            told[at] = replace(each, world=f"pipeline-of-long-name-{each.world}")
    names = [f"pipeline-of-long-name-w{i}" for i in (2, 5)]
    told += [h.WorldChanged(AT + 100, 0, name, "broken", 1, "", "crashed") for name in names]
    lines = shown(*told, width=80)
    assert f"broken: {', '.join(names)}" in lines
    assert "+1 broken, 6 active" in shown(*told, width=160)[5]


def test_a_lost_node_a_spare_and_the_end_are_said():
    told = [*begun(1), h.NodeLost(AT, "beta", 1, "crashed", ("w0",)), h.RunEnded(AT, 7, "rank 3 failed")]
    lines = shown(*told, width=100)
    assert lines[2:4] == ["lost: beta; not whole: w0", "ended with exit code 7: rank 3 failed"]
    spare = shown(h.RunStarted(AT, "j", "group", 2, "x", "n"), h.SlotTaken(AT, None, 2), width=80)
    assert spare[0] == "run j · node n · spare · up 1 min · restart group, 2 in all"
    assert spare[3] == "no workers on this node"


@given(
    told=st.lists(ANYTHING, max_size=40), width=st.integers(40, 200), height=st.none() | st.integers(10, 60)
)
def test_whatever_happens_it_fits(told, width, height):
    lines = layout(run_of(*told, at=AT).snapshot(), width, height)
    assert all(cell_len(line) <= width for line in plain(lines).split("\n"))
    assert all(piece.text.isprintable() for line in lines for piece in line)
    if height is not None:
        assert len(lines) <= height
    for line in lines:
        for piece in line:
            Console().get_style(piece.style or "none")


def test_every_state_has_a_style():
    assert {"starting", "up", "failed", "restarting", "ended", "stopped"} <= set(STYLES)
    assert {"joining", "active", "broken", "closed", "failed", "gone"} <= set(STYLES)


@pytest.mark.parametrize("width", [80, 120])
def test_rich_draws_the_same_text(width, monkeypatch):
    lines = layout(run_of(*begun(), *killed(3)).snapshot(), width)
    drawn = coloured(lines, width)
    assert [line.rstrip() for line in CODES.sub("", drawn).split("\n")] == plain(lines).split("\n")


class Clocked:
    """A state and a screen on it whose thread is not started: the test is the thread."""

    def __init__(self, width: int = 100, height: int = 30) -> None:
        from rich.live import Live

        self.now = AT + 100
        self.state = RunState(clock=lambda: self.now)
        self.out = io.StringIO()
        console = Console(
            file=self.out, force_terminal=True, width=width, height=height, color_system="standard"
        )
        self.screen = Screen(self.state, console=console)
        self.live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def tick(self) -> str:
        """One look; returns what was written."""
        before = len(self.out.getvalue())
        self.screen._tick(self.live)
        return self.out.getvalue()[before:]


def test_it_draws_only_when_what_it_shows_has_changed():
    bed = Clocked()
    for each in begun():
        bed.state.apply(each)
    with bed.live:
        assert "worker:7" in bed.tick()
        assert [bed.tick() for _ in range(40)] == [""] * 40  # ten seconds, in which no age has changed
        bed.now += 60
        assert "2 min" in "".join(bed.tick() for _ in range(4))
        bed.state.apply(h.WorkerFailed(bed.now, 3, 4003, 0, -9, "killed by SIGKILL"))
        assert "killed by SIGKILL" in bed.tick()
        assert bed.tick() == ""


def test_output_goes_above_the_picture_which_is_then_drawn_again():
    bed = Clocked()
    for each in begun(2):
        bed.state.apply(each)
    with bed.live:
        bed.tick()
        bed.screen._above.put("[worker0]:epoch 1\n[worker1]:epoch 1\nhalf")
        written = CODES.sub("", bed.tick())
        assert written.index("epoch 1") < written.index("run job7")
        assert "half" not in written
        bed.screen._above.put(" and half\n")
        assert "half and half" in bed.tick()


def test_a_line_without_an_end_is_shown_in_parts():
    above = _Above()
    for _ in range(35):
        assert above.put("." * 1000)
    assert [len(each) for each in above.take().splitlines()] == [11_000] * 3
    assert [len(each) for each in above._begun.values()] == [2000]


def test_lines_of_many_threads_are_not_mixed_and_a_flood_is_cut():
    import threading

    above = _Above()

    def write(name: str) -> None:
        for at in range(200):
            for part in (f"{name}", " says ", f"{at}\n"):
                assert above.put(part)

    threads = [threading.Thread(target=write, args=(f"t{at}",)) for at in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    lines = above.take().splitlines()
    assert sorted(lines) == sorted(f"t{name} says {at}" for name in range(4) for at in range(200))
    assert above.take() == ""
    above.put("half ")
    other = threading.Thread(target=above.put, args=("whole\n",))
    other.start()
    other.join(60)
    above.put("line\n")
    assert above.take() == "whole\nhalf line\n"
    for _ in range(3000):
        above.put("x" * 999 + "\n")
    kept = above.take().splitlines()
    assert kept[0] == "(2000 lines of output left out here: the log files have them)"
    assert len(kept) == 1001
    above.put("the last")
    above.end()
    assert above.take() == "the last\n"
    assert not above.put("later")


def test_output_keeps_its_colours_and_nothing_else_that_terminals_obey():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=40, color_system="standard")
    nasty = "a\x1b[2J\x1b[31mred\x1b[0m\x1b]0;title\x07\x1b[?25l\x1b[10;5H\r\x07b\tc" + "long " * 30
    console.print(_Raw(nasty + "\n"), soft_wrap=True)
    assert out.getvalue() == "a\x1b[31mred\x1b[0mb\tc" + "long " * 30 + "\n\x1b[0m"
    out = io.StringIO()
    Console(file=out, width=40).print(_Raw(nasty + "\n"), soft_wrap=True)
    assert out.getvalue() == "aredb\tc" + "long " * 30 + "\n"


def test_without_rich_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(RunError, match=r"rich, which is not installed.*pip install 'm8d\[ui\]'"):
        open_screen(RunState())


def test_without_a_terminal_there_is_no_view(monkeypatch):
    monkeypatch.setattr(os, "isatty", lambda fd: False)
    assert open_screen(RunState()) is None


def test_on_a_real_terminal(tmp_path):
    note = tmp_path / "note"
    code, told = on_a_terminal(
        sys.executable, str(Path(__file__).parents[2] / "kits" / "screenscript.py"), str(note)
    )
    assert code == 0, told
    lines = text_of(told)
    for at in range(20):
        assert f"[worker0]:OUT {at} red" in lines
    assert {"ERR line", "LOG line", "half a line", "AFTER the view", "LOG after"} <= set(lines)
    assert "\x1b[2J" not in told
    assert lines.index("half a line") < lines.index("AFTER the view")
    last = lines[len(lines) - 1 - lines[::-1].index("AFTER the view") :]
    assert "run job7" not in "".join(last)
    final = "\n".join(lines[: lines.index("AFTER the view")])
    assert "ended with exit code 0: all workers ended" in final
    assert told.rindex("\x1b[?25h") > told.rindex("\x1b[?25l")  # the cursor is back
    assert note.read_text() == "TextIOWrapper"
