"""docs/development.md: the files that it names exist, and its ways are as short as they should be."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "development.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert found, title
    return found[1]


def paths(text: str) -> list[str]:
    return re.findall(r"`((?:multiworld|build|docs|tests)/[\w/.-]+\.\w+)`", text)


def test_the_files_that_are_named_exist():
    named = paths(PAGE)
    assert len(named) > 50
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_thirty_questions_are_answered_with_one_file_each():
    rows = [line for line in section("Where is it?").splitlines() if line.startswith("| ") and "?" in line]
    assert len(rows) >= 30
    for row in rows:
        question, answer, _also = row.strip("|").split("|")
        assert question.strip().endswith("?"), row
        assert re.fullmatch(r"`[\w/.-]+\.\w+`(?: \(`\w+`\))?", answer.strip()), row
        assert len(paths(answer)) == 1, row


def test_the_ways_cross_few_files():
    ways = re.findall(
        r"^A (fault|command line|patch), [^\n]*\((\d+) files\):\n\n(.*?)\n\n",
        section("Three ways through the code"),
        re.DOTALL | re.MULTILINE,
    )
    most = {"fault": 13, "command line": 8, "patch": 8}
    assert {name for name, _, _ in ways} == set(most)
    for name, said, table in ways:
        first = [paths(line)[0] for line in table.splitlines()[2:]]
        assert len(first) == len(set(first)) == int(said) <= most[name], name


def test_each_contract_test_lies_in_a_room_that_the_page_has():
    contract = ROOT / "tests" / "contract"
    named = re.findall(r"^\| `(\w+)/` \|", section("Tests"), re.MULTILINE)
    assert sorted(named) == sorted({path.parent.name for path in contract.glob("*/*.py")})
    assert [path.name for path in contract.glob("*.py")] == ["conftest.py"], (
        "a test belongs in a room, a kit in tests/kits"
    )
