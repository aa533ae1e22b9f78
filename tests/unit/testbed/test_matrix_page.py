"""The results' file and the page made of it."""

from __future__ import annotations

import re

import pytest
from kits.matrixkit import NEWER, PATCHED, STOCK, row, seen, step
from matrix.outcome import BLOCKED
from matrix.page import page
from matrix.results import Column, Results, read, write
from matrix.words import Said, seconds, together, words

ORDER = [("lost.all_reduce.wait", mode) for mode in ("unset", "aeh0", "aeh1", "aeh2", "aeh3")]
FACTS = {"torch": "2.6.0+cu124", "cuda": "12.4", "nccl": "2.21.5", "topics": "marker"}
SILENT = seen(step("caller", ms=0), step("read", ms=512, result="stale"), step("again"), step("later", "X"))
LOUD = seen(step("caller", "DistBackendError", remote=True), step("again", "DistBackendError", remote=True))
DIED = seen(end="SIGABRT", ended_ms=700)


def column(target, date: str = "2026-01-01") -> Column:
    return Column(target, dict(FACTS), date)


def results(*rows, columns=(STOCK, PATCHED)) -> Results:
    return Results().merged(map(column, columns), rows, order=ORDER)


def test_a_file_is_read_as_it_was_written(tmp_path) -> None:
    path = tmp_path / "a.json"
    made = results(row(SILENT), row(LOUD, target=PATCHED), row(DIED, mode="unset"))
    write(path, made)
    again = read(path)
    assert again.columns == made.columns
    assert [each.as_json() for each in again.rows] == [each.as_json() for each in made.rows]
    write(path, again)
    assert read(path) == again
    assert len(path.read_text().splitlines()) < 15  # a row a line


def test_no_file_and_a_file_of_another_schema_are_no_results_and_rubbish_is_an_error(tmp_path) -> None:
    path = tmp_path / "a.json"
    assert read(path) == Results()
    path.write_text('{"schema": 0}')
    assert read(path) == Results()
    path.write_text("rubbish")
    with pytest.raises(ValueError, match="Expecting"):
        read(path)


def test_newer_rows_replace_older_ones_and_what_was_not_run_stays() -> None:
    first = results(row(SILENT), row(DIED, target=PATCHED), row(DIED, mode="gone"))
    assert len(first.rows) == 2  # that cell is no more
    then = first.merged([column(PATCHED, "2026-02-02")], [row(LOUD, target=PATCHED)], order=ORDER)
    assert [each.observer for each in then.rows] == [SILENT, LOUD]
    assert [each.date for each in then.columns] == ["2026-01-01", "2026-02-02"]


def test_columns_are_in_the_order_of_versions_stock_first() -> None:
    found = results(row(SILENT, target=NEWER), columns=(NEWER, PATCHED, STOCK))
    assert found.targets == (STOCK, PATCHED, NEWER)


@pytest.mark.parametrize(
    ("observed", "said"),
    [
        (SILENT, "0.5 s: unblocked; **`wait()` returns over stale data**; later operation raises X"),
        (LOUD, "0.4 s: raises DistBackendError (ncclRemoteError); `wait()` raises DistBackendError (ncclRemoteError)"),
        (DIED, "**SIGABRT** after 0.7 s"),
        (seen(step("caller", BLOCKED)), "**blocked**"),
        (seen(step("caller"), step("depth", result=1), step("healthy", result="wrong: 1")),
         "0.4 s: returns; **NCCL group left open**; healthy group **wrong: 1**"),
        (seen(step("caller"), step("depth", result=0), step("healthy", result="right")),
         "0.4 s: returns; healthy group right"),
        (seen(step("caller"), step("destroy", BLOCKED)), "0.4 s: returns; **destroy: blocked**"),
        (seen(step("caller"), step("destroy", ms=1200), step("rebuilt", ms=90, result="right")),
         "0.4 s: returns; destroyed in 1.2 s; new group in 0.1 s"),
        (seen(step("caller"), step("other thread", result="right"), step("other thread's worst", result=8100)),
         "0.4 s: returns; other thread's right; **held up 8 s**"),
    ],
)  # fmt: skip
def test_what_was_seen_in_words(observed, said) -> None:
    assert together([words(row(observed))]) == said


def test_observers_are_told_one_by_one_and_times_as_a_range() -> None:
    two = row(seen(end="SIGABRT", ended_ms=700), seen(step("caller", ms=300), rank=1))
    other = row(seen(end="SIGABRT", ended_ms=2900), seen(step("caller", ms=310), rank=1))
    assert together([words(two), words(other)]) == (
        "rank 0: **SIGABRT** after 0.7-2.9 s<br>rank 1: 0.3 s: returns"
    )
    assert together([Said("a"), Said("b"), Said("a")]) == "a *or* b"
    assert seconds([-4]) == "0.0 s"
    assert together([words(row(failure="a | b"))]) == "did not run: a / b"


def test_the_page_says_which_build_has_which_defect() -> None:
    text = page(results(row(SILENT), row(LOUD, target=PATCHED)))
    (line,) = [line for line in text.splitlines() if line.startswith("| D1 |")]
    assert line.endswith("| **shows**, 1 of 1 | ended, 0 of 1 |")
    (line,) = [line for line in text.splitlines() if line.startswith("| D8 |")]
    assert line.endswith("| not run | not run |")


def test_the_page_says_whether_the_other_modes_are_as_on_stock() -> None:
    text = page(
        results(row(DIED, mode="unset"), row(DIED, target=PATCHED, mode="unset"), row(DIED, mode="aeh0"))
    )
    assert "**1 of 1 cells end alike**" in text
    assert "Not compared, as one of the two was not run: lost.all_reduce.wait (aeh0)" in text
    text = page(results(row(DIED, mode="unset"), row(LOUD, target=PATCHED, mode="unset")))
    assert "**0 of 1 cells end alike**" in text
    assert "| lost.all_reduce.wait | unset | rank 0 SIGABRT: " in text


def test_modes_that_end_alike_share_a_line() -> None:
    rows = [
        row(DIED, target=target, mode=mode)
        for target in (STOCK, PATCHED)
        for mode in ("unset", "aeh1", "aeh3")
    ]
    text = page(results(*rows, row(SILENT), row(LOUD, target=PATCHED)))
    lines = [line for line in text.splitlines() if line.startswith("| `lost.all_reduce.wait`")]
    told = [line for line in lines if "unset, aeh1, aeh3" in line]
    assert len(told) == 1
    assert told[0].count("**SIGABRT** after 0.7 s") == 2


def test_times_are_medians_and_maxima_under_clean_up_only() -> None:
    times = [seen(step("caller", ms=ms)) for ms in (300, 400, 1900)]
    rows = [row(each, repeat=number) for number, each in enumerate(times)]
    text = page(results(*rows, row(DIED, repeat=3), row(seen(step("caller", ms=9000)), mode="unset")))
    assert "| `lost.all_reduce.wait` | 0.40 / 1.90 |" in text


def test_every_table_is_whole_and_the_page_has_no_dead_text() -> None:
    text = page(
        results(
            row(SILENT), row(LOUD, target=PATCHED), row(LOUD, target=NEWER), columns=(STOCK, PATCHED, NEWER)
        )
    )
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        widths = {line.count(" | ") for line in block.splitlines()}
        assert len(widths) == 1, block
    assert "{time}" not in text
    assert "| None" not in text
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


def test_no_results_are_a_page_too() -> None:
    assert "## What was run" in page(Results())
