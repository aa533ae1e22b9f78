"""Wording of sources and pages: the subject first."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = sorted(
    path
    for room in ("multiworld", "build/m8d_build", "benchmarks", "examples")
    for path in (ROOT / room).rglob("*.py")
)
QUESTION = re.compile(r"(How|What|When|Where|Whether|Which|Who)\b")


def test_first_lines_of_modules_begin_with_their_subject():
    first = {path: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in SOURCES}
    assert len(first) > 300
    assert [f"{path.relative_to(ROOT)}: {text}" for path, text in first.items() if QUESTION.match(text)] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_pages_open_with_a_sentence(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    first = next(line for line in lines if line.strip() and not line.startswith("#"))
    assert not first.startswith(("```", "|", "- ")), first
    assert not re.match(r"\*[^*]", first), first  # a motto
    assert "?" not in first, first


def test_comments_say_their_reason_themselves():
    """Comments give their reason, and do not point to another comment as "(same)" and "as above" do."""
    elsewhere = re.compile(r"#.*(\(same\)|\b(as|see) above\b|\bas in (recv\b|`\w+`))")
    here = Path(__file__)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in [*SOURCES, *sorted((ROOT / "tests").rglob("*.py"))]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if elsewhere.search(line) and path != here
    ]
    assert found == []


@pytest.mark.parametrize("room", ["multiworld", "build/m8d_build", "benchmarks"])
def test_each_noqa_has_its_reason_beside_it(room):
    bare = re.compile(r"#\s*noqa(?!: [A-Z]+\d+(, [A-Z]+\d+)*  \(.+\))")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / room).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if bare.search(line)
    ]
    assert found == []
