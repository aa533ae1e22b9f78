"""`nox -s gpu` without a GPU: what it says, how it ends, and what it leaves."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
from bed.errors import BedError
from hardware import risks, session
from hardware.__main__ import main
from hardware.costs import COSTS
from hardware.machine import Machine
from hardware.paper import PAPER
from hardware.placed import Placed
from hardware.placements import PLACEMENTS
from hardware.records import Check, read
from hardware.session import Asked, GaveUp
from kits.gpukit import ALIVE_ROW, NeverStarts, answering, column, run
from kits.matrixkit import PATCHED, row, seen, step

THREE = "another world's slowest operation during an abort"
DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture
def command(tmp_path, capsys):
    def run(*args: str):
        code = main(["--docs", str(tmp_path / "docs"), *args])
        return code, capsys.readouterr().out

    return run


def test_without_a_gpu_it_ends_with_one_and_writes_nothing(command, tmp_path):
    python = answering(tmp_path, gpus=[], why="no driver is loaded")
    code, said = command("--gpu", f"mine={python}")
    assert code == 1
    assert said.startswith("no GPU here: ")
    assert "no driver is loaded" in said
    assert not (tmp_path / "docs").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "there is no build to run"),
        (["--gpu", "mine"], "--gpu mine"),
        (["--gpu", "mine=/not/there"], "there is no such file"),
        (["--gpu", "mine=/bin/sh", "--repeat", "0"], "--repeat 0"),
        (["--gpu", "mine=/bin/sh", "--jobs", "-1"], "--jobs -1"),
    ],
)
def test_wrong_arguments(command, args, words):
    code, said = command(*args)
    assert code == 2
    assert words in said


def test_a_build_without_cuda_cannot_be_used(command, tmp_path):
    code, said = command("--gpu", f"mine={answering(tmp_path, cuda='')}")
    assert (code, "without CUDA" in said) == (2, True)


def test_the_scenarios_can_be_named(command):
    code, said = command("--list")
    assert code == 0
    assert "lost.all_reduce.wait: " in said
    assert "abort.fails" not in said


def test_the_page_of_nothing_is_the_one_that_is_there(command, tmp_path):
    code, _ = command("--page-only")
    assert code == 0
    assert read(tmp_path / "docs" / "hardware.json", today="").runs == ()
    assert "Nothing was run yet" in (tmp_path / "docs" / "hardware.md").read_text()


def test_the_page_that_is_committed_is_made_of_its_data(capsys, tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    for name in ("hardware.json", "nccl-defects.json"):
        if (DOCS / name).is_file():
            (docs / name).write_text((DOCS / name).read_text())
    assert main(["--docs", str(docs), "--page-only"]) == 0
    assert (docs / "hardware.md").read_text() == (DOCS / "hardware.md").read_text()


def test_ranks_that_never_start_end_it_soon_and_what_was_run_is_kept():
    placed = Placed(NeverStarts(), PLACEMENTS["one-gpu"])
    kept = []
    with pytest.raises(GaveUp, match=r"4 runs in a row came to nothing, the last: rank 0 never started"):
        session._run_column(
            placed, column(), Asked(jobs=1, checks=()), 1, Path(), kept.append, lambda _: None
        )  # fmt: skip
    (found,) = kept
    assert len(found.rows) == 4
    assert len(placed.launcher.asked) < 10  # cells that were queued start nothing any more


@pytest.mark.parametrize(
    ("args", "cells", "checks", "said"),
    [
        ((), ["*"], ["*"], []),
        (("--checks",), ["*"], [], ["--checks"]),
        (("--only", "lost.*", "--modes", "aeh2"), ["lost.*"], ["*"], ["--only lost.*", "--modes aeh2"]),
        (("--short", "costs"), ["-"], [*COSTS], ["--short costs"]),
        (("--short", "cells"), ["*"], [], ["--short cells"]),
        (("--short", "paper"), ["-"], [PAPER], ["--short paper"]),
        (("--short", "costs", "risks"), ["-"], [*COSTS, *risks.names()], ["--short costs risks"]),
    ],
)
def test_a_part_can_be_asked_for(monkeypatch, command, args, cells, checks, said):
    asked = []
    monkeypatch.setattr("hardware.__main__.run_build", lambda _name, _python, what, **_: asked.append(what))
    command("--gpu", "mine=/bin/sh", *args)
    (found,) = asked
    assert [*(found.only or ["*"])] == cells
    assert ([*found.checks], [*found.said]) == (checks, said)
    assert (found.repeat, [*found.modes]) == ((1, ["aeh2"]) if "--short" in args else (3, [*found.modes]))


def test_values_that_cannot_be_had_are_an_outcome_of_their_own(monkeypatch):
    monkeypatch.setattr(session, "paper", lambda *_: [])  # its processes are not the launcher's
    placed = Placed(NeverStarts("rank 1 ended by SIGSEGV"), PLACEMENTS["gpus"])
    kept = []
    session._run_column(placed, column(), Asked(only=["none"]), 2, Path(), kept.append, lambda _: None)
    (found,) = kept
    assert [check.name for check in found.checks] == [
        "every collective, 2 ranks", "worlds: every operation in every way, 2 members", "worlds: left and rejoined",
        *(name for name in risks.names(patched=False) if name != THREE), *COSTS,
    ]  # fmt: skip
    assert {check.outcome.rpartition("; ")[2] for check in found.checks} == {"rank 1 ended by SIGSEGV"}
    assert not any(check.right for check in found.checks)


class OldNccl:
    """A launcher whose NCCL knows nothing of several ranks on one GPU."""

    def __init__(self, *_: object, **__: object) -> None:
        self.tried: list[str] = []

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        pass

    python = Path("python")

    def start(self, program: str, world_size: int, **more: object) -> object:
        self.tried.append(more["rank_env"](0).get("NCCL_HOSTID", "none"))
        raise AssertionError(
            "trace\nDistBackendError: invalid usage\nDuplicate GPU detected : rank 0 and rank 1"
        )


def test_one_gpu_and_an_nccl_that_takes_it_only_once(monkeypatch, tmp_path):
    monkeypatch.setattr(
        session, "look", lambda *_, **__: Machine(("Toy GPU",), "1", "2.6.0", "12.4", "2.21.5")
    )
    monkeypatch.setattr(session, "Launcher", OldNccl)
    said: list[str] = []
    with pytest.raises(BedError, match=r"NCCL 2\.21\.5 takes no two ranks on Toy GPU in any way"):
        session.run_build(
            "mine", Path("python"), Asked(), scratch=tmp_path, today="x", keep=said.append, say=said.append
        )
    refused = [text for text in said if "is not accepted" in text]
    assert [text.partition(" ")[0] for text in refused] == ["one-gpu", "one-gpu-hosts"]
    assert all("Duplicate GPU detected" in text for text in refused)


def test_the_first_placement_that_is_accepted_is_taken(monkeypatch):
    class Older(OldNccl):
        def start(self, program, world_size, **more):
            if "NCCL_HOSTID" in more["rank_env"](0):
                return Sums()
            return super().start(program, world_size, **more)

    class Sums:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def wait(self, name):
            return [type("Event", (), {"fields": {"value": [3.0]}})] * 2

    shared = (PLACEMENTS["one-gpu"], PLACEMENTS["one-gpu-hosts"])
    assert session._accepted(Older(), shared, Asked(), lambda _: None) is shared[1]


def test_a_check_is_right_or_not():
    assert Check("x", "right").right
    assert not Check("x", "wrong").right


LATE = row(
    seen(
        step("caller", ms=0),
        step("read", ms=2500, result="new"),
        step("later", "DistBackendError", remote=True),
    ),
    target=PATCHED,
)


@pytest.mark.parametrize(
    ("found", "after", "code", "words"),
    [
        (run(ALIVE_ROW, checks=(Check("values", "right"),)), None, 0, "written"),
        (run(ALIVE_ROW), KeyboardInterrupt(), 130, "written"),
        (run(ALIVE_ROW), GaveUp("nothing comes"), 3, "nothing comes"),
        (run(row(failure="no")), None, 3, "1 runs came to nothing"),
        (run(checks=(Check("values", "7 instead of 8"),)), None, 4, "not right: values"),
        (run(LATE, target=PATCHED), None, 5, "unblocked only after 2500 ms"),
        (run(replace(LATE, mode="aeh1"), target=PATCHED), None, 0, "written"),
    ],
)
def test_what_was_run_is_written_and_judged(command, tmp_path, monkeypatch, found, after, code, words):
    def ran(name, python, asked, *, keep, **_):
        keep(found)
        if after is not None:
            raise after

    monkeypatch.setattr("hardware.__main__.run_build", ran)
    got, said = command("--gpu", "mine=/bin/sh")
    assert (got, words in said) == (code, True), said
    assert len(read(tmp_path / "docs" / "hardware.json", today="").runs) == 1
    assert "## What was run" in (tmp_path / "docs" / "hardware.md").read_text()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_cell_that_is_interrupted_ends_it_and_what_was_run_is_kept():
    class Interrupted(NeverStarts):
        def start(self, program, world_size, **more):
            if len(self.asked) == 2:
                raise KeyboardInterrupt
            return super().start(program, world_size, **more)

    kept = []
    placed = Placed(Interrupted(), PLACEMENTS["one-gpu"])
    with pytest.raises(KeyboardInterrupt):
        session._run_column(
            placed, column(), Asked(jobs=1, repeat=1, checks=(), only=["lost.three"]), 1, Path(), kept.append,
            lambda _: None,
        )  # fmt: skip
    assert len(kept[0].rows) == 2
