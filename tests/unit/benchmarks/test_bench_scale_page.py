"""The page about scale: its rows, its record, and that it says what the record has."""

from __future__ import annotations

import pytest

from benchmarks.scale import curves, page, record


def test_losses_break_worlds_and_short_gaps_do_not():
    row = curves.losses(0.4, members=8, most=60.0, worlds=3)
    assert row["broken"] == 3
    assert row["rate"] > 1e-4
    assert curves.blackouts(1.0, 2, members=6) == {"seconds": 1.0, "broken": 0.0}
    assert curves.blackouts(6.0, 2, members=6)["broken"] == 1.0


def test_the_page_has_what_the_record_says():
    tables = record.load(record.RECORD)
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.with_tables(text, tables) == text, "python -m benchmarks.scale.page writes it"
    assert [row["members"] for row in tables["watching"]] == [*curves.WATCHED]


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, ""), (3.4e-4, "340 µs"), (0.0051, "5.1 ms"), (0.34, "0.34 s"), (30.0, "30 s"), (900.0, "15 min"),
     (9000.0, "2.5 h"), (2.6e6, "30 d"), (130.0, "2.2 min")],
)  # fmt: skip
def test_times_are_written_for_people(value, words):
    assert page.seconds(value) == words


def test_a_row_replaces_the_one_of_its_size(tmp_path):
    path = tmp_path / "scale.json"
    for size, value in ((16, 1.0), (4, 2.0), (16, 1 / 3)):
        record.put(path, "watching", {"members": size, "join": value})
    assert record.load(path) == {"watching": [{"members": 4, "join": 2.0}, {"members": 16, "join": 0.3333}]}
