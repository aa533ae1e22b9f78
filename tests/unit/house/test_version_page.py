"""What pytest's junit file says, and the page made from it."""

from __future__ import annotations

import re

import pytest
from packaging.version import Version

from m8d_build.settings import REPO_ROOT
from m8d_build.testing.page import BEGIN, END, put_into, render
from m8d_build.testing.results import (
    FAILED,
    PASSED,
    SKIPPED,
    Case,
    Outcome,
    condensed,
    from_json,
    read_junit,
    to_json,
)
from m8d_build.testing.versions import VERSIONS

JUNIT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites name="pytest tests"><testsuite name="pytest" errors="2" failures="2" skipped="3" tests="10">
<testcase classname="" name="tests.contract.test_gone" time="0.0"><error message="collection failure">ImportError while
E   ModuleNotFoundError: No module named 'gone'</error></testcase>
<testcase classname="" name="tests.contract.test_needy" time="0.0"><skipped message="collection skipped"
>('/x/test_needy.py', 2, "Skipped: could not import 'needed'")</skipped></testcase>
<testcase classname="tests.contract.worlds.test_world" name="test_values[2]" time="0.1"/>
<testcase classname="tests.contract.worlds.test_world" name="test_values[b-c]" time="0.1"><failure
 message="AssertionError: x | y&#10;assert 1">trace</failure></testcase>
<testcase classname="tests.contract.worlds.test_world.TestClose" name="test_twice"><skipped type="pytest.skip"
 message="no gpu">/x/test_world.py:6: no gpu</skipped></testcase>
<testcase classname="tests.contract.worlds.test_world" name="test_known"><skipped type="pytest.xfail" message="slow"/></testcase>
<testcase classname="tests.contract.worlds.test_world" name="test_messy"/>
<testcase classname="tests.contract.worlds.test_world" name="test_messy"><error message="failed on teardown"/></testcase>
<testcase classname="tests.contract.torch_itself.test_torch_features" name="test_feature_in_two_worlds[tasks-uneven_ddp]"/>
</testsuite></testsuites>"""


def outcome(version: str, *cases: Case, **more: object) -> Outcome:
    given = {"build": f"{version}+cpu", "python": "3.11.7", "cases": cases, **more}
    return Outcome(version, "2026-11-20", "0" * 16, **given)


def test_every_kind_of_test_case_is_read():
    assert read_junit(JUNIT, "contract") == (
        Case("test_gone", "the whole file", FAILED, "ModuleNotFoundError: No module named 'gone'"),
        Case("test_needy", "the whole file", SKIPPED, "could not import 'needed'"),
        Case("worlds/test_world", "test_values[2]", PASSED),
        Case("worlds/test_world", "test_values[b-c]", FAILED, "AssertionError: x | y assert 1"),
        Case("worlds/test_world", "test_twice", SKIPPED, "no gpu"),
        Case("worlds/test_world", "test_known", SKIPPED, "fails as known: slow"),
        Case("worlds/test_world", "test_messy", FAILED, "failed on teardown"),
        Case("torch_itself/test_torch_features", "test_feature_in_two_worlds[tasks-uneven_ddp]", PASSED),
    )


@pytest.mark.parametrize("text", ["", "<testsuites", "passed"])
def test_what_is_no_junit_file_is_refused(text):
    with pytest.raises(ValueError, match="no junit file"):
        read_junit(text, "contract")


def test_rows_are_functions_except_where_a_parameter_is_the_feature():
    assert Case("test_world", "test_it_breaks[recv-sync-2]", PASSED).feature == "it breaks"
    assert Case("test_t", "test_feature_in_two_worlds[tasks-uneven_ddp]", PASSED).feature == "uneven ddp"
    assert Case("test_t", "the whole file", FAILED).feature == "the whole file"


def test_an_outcome_survives_json():
    whole = outcome("2.6.0", *read_junit(JUNIT, "contract"), seconds=12.5)
    assert from_json(to_json(whole)) == whole
    assert from_json(to_json(whole).replace('"schema": 1', '"schema": 2')) is None
    assert from_json("[]") is None
    assert from_json("{") is None


def test_rows_that_are_condensed_give_the_same_page():
    whole = outcome(
        "2.6.0",
        *read_junit(JUNIT, "contract"),
        Case("worlds/test_world", "test_values[4]", PASSED),
        Case("worlds/test_world", "test_values[5]", FAILED, "AssertionError: x | y assert 1"),
        Case("test_needy", "the whole file", SKIPPED, "could not import 'needed'"),
    )
    small = condensed(whole)
    assert len(small.cases) == len(whole.cases) - 3
    assert condensed(small) == small
    assert render([small], machine="Linux") == render([whole], machine="Linux")


def test_an_outcome_is_good_when_it_ended_and_nothing_failed():
    assert outcome("2.6.0", Case("test_a", "test_b", PASSED)).ok
    assert outcome("2.6.0", Case("test_a", "test_b", SKIPPED, "r")).ok
    assert not outcome("2.6.0", Case("test_a", "test_b", FAILED, "r")).ok
    assert not outcome("2.6.0", trouble="not run: no disk").ok
    assert (
        outcome("2.6.0", *read_junit(JUNIT, "contract"), trouble="cut").summary()
        == "2 passed, 3 failed, 3 skipped; cut"
    )


def table_rows(page: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in page.splitlines()
        if line.startswith("|")
    ]


def test_the_page_shows_every_test_of_every_version_and_each_reason_once():
    new = outcome(
        "2.13.0",
        Case("test_world", "test_values[2]", PASSED),
        Case("test_world", "test_values[3]", SKIPPED, "too few\n cores"),
        Case("test_world", "test_new", PASSED),
    )
    old = outcome(
        "2.4.0",
        Case("test_world", "test_values[2]", FAILED, "a | b in /home/me/x/test_world.py"),
        Case("test_world", "test_values[4]", FAILED, "the same again"),
        Case("test_world", "test_values[3]", SKIPPED, "too few cores"),
    )
    missing = Outcome("2.15.0", "2026-11-21", "0" * 16, trouble="not run: no such wheel")
    page = render([old, new, missing], machine="Linux")
    rows = {row[0]: row[1:] for row in table_rows(page)}
    assert rows["build"] == ["2.4.0+cpu", "2.13.0+cpu", "-"]
    assert rows["to its end"] == ["yes", "yes", "not run: no such wheel"]
    assert rows["**failed**"] == ["2", "0", "0"]
    assert rows["values"] == ["**2 failed**, 1 skipped [1]", "1, 1 skipped [1]", "-"]
    assert rows["new"] == ["-", "1", "-"]
    assert "1. too few cores (torch 2.4.0: 1, torch 2.13.0: 1)" in page
    assert (
        r"- torch 2.4.0: `test_world.py::test_values[2]` (and 1 more of this row): a \| b in test\_world.py"
        in page
    )
    assert "2026-11-20 and 2026-11-21 (UTC) on Linux" in page


def test_a_file_that_has_moved_has_one_table_where_it_lies_now():
    old, new = (Case(f"{room}test_world", "test_values", PASSED) for room in ("", "worlds/"))
    earlier = Outcome("2.4.0", "2026-11-19", "0" * 16, "2.4.0+cpu", "3.11.7", (old,))
    for columns in ([earlier, outcome("2.13.0", new)], [outcome("2.13.0", new), earlier]):
        page = render(columns, machine="Linux")
        assert page.count("test_world.py`") == page.count("`tests/contract/worlds/test_world.py`") == 1
        assert page.count("### world\n") == 1
        assert ["values", "1", "1"] in table_rows(page)


def test_only_the_part_between_the_marks_is_replaced():
    page = f"# Title\n\n{BEGIN}\nold\n{END}\n\nafter\n"
    once = put_into(page, "new\n")
    assert once == f"# Title\n\n{BEGIN}\n\nnew\n\n{END}\n\nafter\n"
    assert put_into(once, "new\n") == once
    assert "new" in put_into(None, "new")


@pytest.mark.parametrize("page", ["", f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}"])
def test_a_page_without_a_place_is_refused(page):
    with pytest.raises(ValueError, match="once each"):
        put_into(page, "new")


def test_the_committed_page_parses_and_names_every_version():
    page = (REPO_ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    part = page.partition(BEGIN)[2].partition(END)[0]
    rows = table_rows(part)
    columns = [cell.removeprefix("torch ") for cell in rows[0][1:]]
    named = [
        ".".join(column.split(".")[: len(listed.split("."))])
        for column, listed in zip(columns, VERSIONS, strict=True)
    ]
    assert named == list(VERSIONS)
    assert columns == sorted(columns, key=Version)
    assert {len(row) for row in rows} == {len(VERSIONS) + 1}
    first = {row[0]: row[1:] for row in rows}
    for column, build, date, passed in zip(
        columns, first["build"], first["run on"], first["**passed**"], strict=True
    ):
        assert build == "-" or build.startswith(f"{column}+"), column
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
        assert (build == "-") == (passed == "0"), column
    told = {int(number) for number in re.findall(r"^(\d+)\. ", part, re.MULTILINE)}
    assert {int(n) for n in re.findall(r" \[(\d+)\]", part)} == told
    assert put_into(page, part) == page
