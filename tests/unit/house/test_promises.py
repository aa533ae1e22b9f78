"""docs/promises.md: each promise of README and docs/faults.md is listed there, with tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
FAULTS = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
TABLES = [
    (README, "What happens on a fault"),
    (FAULTS, "What is detected"),
    (FAULTS, "Busy or hung"),
    (FAULTS, "Particular cases"),
]
LISTS = ["What is not detected", "Limits of the mechanism"]


def section(page: str, title: str) -> str:
    found = re.search(rf"^##+ {re.escape(title)}\n(.*?)(?=^##|\Z)", page, re.DOTALL | re.MULTILINE)
    assert found, title
    return found[1]


def rows(text: str) -> dict[str, str]:
    """Second cells of the text's tables by their first cells."""
    cells = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return {first.strip(): second.strip() for first, second, *_ in cells[1:]}


@cache
def functions(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_each_row_names_tests_that_exist_or_says_why_there_is_none():
    lines = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.endswith("| tests |")]
    assert len(lines) > 60
    for line in lines:
        cell = line.strip("|").split("|")[1].strip()
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", cell)
        assert named or re.match(r"no test: \w", cell), line
        assert [f"{path}::{name}" for path, name in named if name not in functions(path)] == [], line


@pytest.mark.parametrize(("page", "title"), TABLES, ids=[title for _, title in TABLES])
def test_each_row_of_the_pages_is_listed(page, title):
    assert list(rows(section(PAGE, title))) == list(rows(section(page, title)))


@pytest.mark.parametrize("title", LISTS)
def test_each_bullet_of_the_fault_model_is_listed(title):
    bullets = re.findall(r"^- (.*)", section(FAULTS, title), re.MULTILINE)
    listed = list(rows(section(PAGE, title)))
    assert len(listed) == len(bullets)
    for begins, bullet in zip(listed, bullets, strict=True):
        assert bullet.replace("*", "").startswith(begins)
