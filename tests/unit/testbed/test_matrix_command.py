"""The command: what it refuses, and that it writes a page without running anything."""

from __future__ import annotations

import json

import pytest
from kits.matrixkit import PATCHED, STOCK, row, seen, step
from matrix import __main__ as command
from matrix.results import Column, Results, write


@pytest.fixture(autouse=True)
def _signals(monkeypatch):
    """The command's handler stays out of this process."""
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)


def filled(folder, *rows) -> None:
    columns = tuple(Column(target, {"torch": target.torch}, "2026-01-01") for target in (STOCK, PATCHED))
    write(folder / "nccl-defects.json", Results(columns, rows))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--bed", "nothing"], "NAME=PYTHON"),
        (["--bed", "a=/no/such/python"], "no such file"),
        (["--bed", "a=/bin/sh", "--builds", "b"], "there is no build b"),
    ],
)
def test_wrong_arguments_are_named(given, said, tmp_path, capsys) -> None:
    assert command.main([*given, "--docs", str(tmp_path)]) == command.WRONG
    assert said in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_results_that_are_rubbish_are_not_written_over(tmp_path, capsys) -> None:
    path = tmp_path / "nccl-defects.json"
    path.write_text("rubbish")
    assert command.main(["--page-only", "--docs", str(tmp_path)]) == command.WRONG
    assert path.read_text() == "rubbish"


def test_scenarios_are_listed(capsys) -> None:
    assert command.main(["--list"]) == 0
    assert "lost.all_reduce.wait: " in capsys.readouterr().out


def test_the_page_is_made_of_the_results_that_are_there(tmp_path) -> None:
    ended = seen(end="SIGABRT", ended_ms=100)
    filled(tmp_path, *(row(ended, target=target, mode="unset") for target in (STOCK, PATCHED)))
    assert command.main(["--page-only", "--docs", str(tmp_path)]) == 0
    assert "**1 of 1 cells end alike**" in (tmp_path / "nccl-defects.md").read_text()
    assert json.loads((tmp_path / "nccl-defects.json").read_text())["rows"]


def test_a_patched_build_that_ends_differently_or_breaks_a_promise_is_an_error(tmp_path, capsys) -> None:
    ended = seen(end="SIGABRT", ended_ms=100)
    filled(tmp_path, row(ended, mode="unset"), row(seen(step("caller")), target=PATCHED, mode="unset"))
    assert command.main(["--page-only", "--docs", str(tmp_path)]) == command.NOT_ALIKE
    assert "does not end as on stock" in capsys.readouterr().out
    filled(tmp_path, row(ended, target=PATCHED))
    assert command.main(["--page-only", "--docs", str(tmp_path)]) == command.NOT_KEPT
    assert "the process ended: SIGABRT" in capsys.readouterr().out


def test_cells_that_fit_no_pattern_are_an_error() -> None:
    args = command.parser().parse_args(["--only", "nothing.*"])
    with pytest.raises(command.BedError, match=r"nothing\.\*"):
        command._asked(args, [Column(STOCK, {}, "")], Results())


def test_a_twin_that_was_run_earlier_is_compared_with() -> None:
    args = command.parser().parse_args(["--only", "lost.barrier.wait"])
    earlier = Results((Column(STOCK, {}, ""),))
    alone = command._asked(args, [Column(PATCHED, {}, "")], Results())
    beside = command._asked(args, [Column(PATCHED, {}, "")], earlier)
    assert {cell.target for cell in beside} == {PATCHED}
    assert {cell.mode.id for cell in beside} - {cell.mode.id for cell in alone} == {"aeh0", "aeh1", "aeh3"}
