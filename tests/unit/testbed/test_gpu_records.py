"""The file of what was run, how it is compared with the test bed, and the page made of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hardware.fidelity import Alike, as_on_the_bed, bed_rows
from hardware.records import Check, Figure, Records, read, write
from hardware.report import page
from hardware.verify import without_folders
from kits.gpukit import ALIVE_ROW, column, run
from kits.matrixkit import PATCHED, STOCK, row, seen, step
from matrix.results import Column, Results

DIED = row(seen(step("caller", "cut short"), end="SIGABRT", ended_ms=700), mode="unset")
BLOCKED = row(seen(step("caller", "blocked")))
FAILED = row(failure="rank 0 never started")
RIGHT = Check("every collective", "right", done=12, refused=3, defects=("a: x #1", "b: x #1"))
LOST = Check("worlds: killed", "['all_reduce' | 1]", done=2, ms=(40, 60, 50))
COST = Check(
    "times",
    "right",
    done=2,
    figures=(Figure("send, 4 B", "us", 1540, 1100.0), Figure("sum, 1 GB", "us", 2.5e6, 2e6)),
)
HELD = Check("memory", "right", figures=(Figure("1 world", "MiB", 512), Figure("30 worlds", "MiB", 5632)))
FACTS = {"torch": "2.6.0", "cuda": "12.4", "nccl": "2.21.5", "topics": ""}


def bed(*rows, target=STOCK) -> Results:
    return Results((Column(target, FACTS, "2001-01-01"),), rows)


def slower(given, ms, repeat=1):
    first, second, *rest = given.observer.steps
    return replace(
        given, repeat=repeat, seen=(replace(given.observer, steps=(first, replace(second, ms=ms), *rest)),)
    )


def test_a_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "hardware.json"
    made = Records(
        "2001-01-01",
        (
            run(ALIVE_ROW, DIED, checks=(RIGHT, LOST, COST, HELD), lacking=("x: 3 ranks",)),
            run(placement="gpus"),
        ),
    )
    write(path, made)
    assert read(path, today="2002-02-02") == made
    assert json.loads(path.read_text())["runs"][0]["checks"][1]["ms"] == [40, 60, 50]
    assert not list(tmp_path.glob("*.new"))


def test_no_file_begins_today_and_rubbish_is_an_error(tmp_path):
    path = tmp_path / "hardware.json"
    assert read(path, today="2001-01-01") == Records("2001-01-01")
    path.write_text('{"schema": 0}')
    assert read(path, today="2001-01-01") == Records("2001-01-01")
    path.write_text("{")
    with pytest.raises(ValueError, match="line 1"):
        read(path, today="2001-01-01")


def test_newer_results_replace_older_ones_of_the_same_machine_only():
    first = Records("x").merged([run(ALIVE_ROW, DIED, checks=(RIGHT, LOST))])
    later = run(slower(ALIVE_ROW, 900, repeat=0), checks=(replace(LOST, outcome="right"),), date="2001-03-03")
    again = first.merged([later])
    (only,) = again.runs
    assert only.column.date == "2001-03-03"
    assert [each.observer.unblocked_ms for each in only.rows if each.mode == "aeh2"] == [900]
    assert [each.mode for each in only.rows] == ["unset", "aeh2"]  # the catalogue's order
    assert [check.outcome for check in only.checks] == ["right", "right"]
    for other in (
        {"driver": "9"},
        {"gpu": "Other"},
        {"nccl": "2.99"},
        {"placement": "gpus"},
        {"target": PATCHED},
    ):
        assert len(first.merged([run(ALIVE_ROW, **other)]).runs) == 2


def test_a_row_of_a_scenario_that_is_no_more_falls_away():
    (only,) = Records("x").merged([run(row(seen(), scenario="gone"), ALIVE_ROW)]).runs
    assert [each.scenario for each in only.rows] == ["lost.all_reduce.wait"]


@pytest.mark.parametrize(
    ("mine", "theirs", "alike"),
    [
        ([ALIVE_ROW], [slower(ALIVE_ROW, 9000)], Alike.YES),
        ([ALIVE_ROW], [slower(ALIVE_ROW, 9000), BLOCKED], Alike.YES),
        ([ALIVE_ROW, DIED], [ALIVE_ROW], Alike.PARTLY),
        ([DIED], [ALIVE_ROW], Alike.NO),
        ([DIED], [], Alike.UNKNOWN),
        ([FAILED], [ALIVE_ROW], Alike.UNKNOWN),
        ([FAILED, ALIVE_ROW], [ALIVE_ROW], Alike.YES),
    ],
)
def test_as_on_the_bed(mine, theirs, alike):
    assert as_on_the_bed(mine, theirs).alike is alike


def test_the_beds_rows_are_found_whatever_the_build_is_called():
    mine = replace(STOCK, build="venv-of-somebody")
    assert bed_rows(bed(ALIVE_ROW, DIED, FAILED), mine) == {
        ("lost.all_reduce.wait", "aeh2"): [ALIVE_ROW], ("lost.all_reduce.wait", "unset"): [DIED],
    }  # fmt: skip
    assert bed_rows(bed(ALIVE_ROW), PATCHED) == {}
    assert bed_rows(bed(ALIVE_ROW), replace(mine, backend="nccl2")) == {}


def test_a_page_of_nothing_says_so_and_how_to_run_it():
    text = page(Records("2001-02-03"), Results())
    assert "## Nothing was run yet" in text
    assert "on 2001-02-03" in text
    assert "nox -s gpu -- --gpu" in text
    assert "`one-gpu-hosts`" in text
    assert "## What was run" not in text


def test_a_page_of_runs():
    rows = (ALIVE_ROW, slower(ALIVE_ROW, 800), DIED)
    records = Records("x", (run(*rows, checks=(RIGHT, LOST), lacking=("lost.three: 3 ranks",)),))
    text = page(records, bed(ALIVE_ROW, replace(ALIVE_ROW, mode="unset")))
    assert "Nothing was run yet" not in text
    head = "| stock-2.6.0 nccl | one-gpu | Toy GPU | 1.2.3 | 2.6.0+toy | 9.9 | 2.34.56 | - | 1 of 2, 18 not run | 2 of 134 cells, 3 runs | 1 of 2 | 2001-02-03 | not recorded | - |"
    assert head in text
    assert text.count("*unblocked* is") == 1
    assert "| every collective | right | 12, 3 refused, 2 wrong by x #1 | - |" in text
    assert "| worlds: killed | ['all_reduce' / 1] | 2 | 50 / 60 |" in text
    (alive,) = [line for line in text.splitlines() if "| aeh2 | 0.4-0.8 s: unblocked" in line]
    assert alive.endswith("| 600 / 800 | yes |")
    (died,) = [
        line
        for line in text.splitlines()
        if "| unset | **SIGABRT** after 0.7 s | 700 / 700 | **no** |" in line
    ]
    assert died.startswith("| `lost.all_reduce.wait`")
    assert "Not as on the bed" in text
    assert "for want of GPUs: lost.three: 3 ranks." in text
    assert "`TORCH_NCCL_ASYNC_ERROR_HANDLING=2`" in text


def test_figures_are_a_table_with_plain_torch_beside_where_it_has_them():
    text = page(Records("x", (run(checks=(COST, HELD)),)), Results())
    assert "| operation | world | plain torch | times |" in text
    assert "| send, 4 B | 1.54 ms | 1.1 ms | 1.40 |" in text
    assert "| sum, 1 GB | 2.5 s | 2 s | 1.25 |" in text
    assert "| 1 world | 512 MiB |" in text
    assert "| 30 worlds | 5.5 GiB |" in text


def test_modes_that_end_alike_share_a_line_and_every_table_is_one():
    rows = [replace(ALIVE_ROW, mode=mode) for mode in ("aeh1", "aeh2", "aeh3")]
    text = page(Records("x", (run(*rows, BLOCKED),)), Results())
    assert text.count("aeh1, aeh3") == 1
    widths = [line.count(" | ") for line in text.splitlines() if line.startswith("| `lost")]
    assert set(widths) == {4}


def test_a_column_in_which_nothing_could_be_learned():
    text = page(Records("x", (run(FAILED, driver="", nccl=""),)), Results())
    assert "| unknown |" in text
    assert "did not run: rank 0 never started | - | - |" in text
    assert column(driver="").key != column().key


def test_a_file_is_named_without_its_folder():
    told = 'rank 0 ended. / File "/a/b c/d.py", line 3 in f / File "<frozen runpy>", line 1 / in /pytorch/x.cpp:93'
    assert without_folders(told) == (
        'rank 0 ended. / File "d.py", line 3 in f / File "<frozen runpy>", line 1 / in /pytorch/x.cpp:93'
    )
