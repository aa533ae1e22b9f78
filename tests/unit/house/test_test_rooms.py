"""Where tests lie, and what they take from each other: rooms as docs/development.md has them, and kits."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from m8d_build.targets import tomllib

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests"
FILES = sorted(TESTS.rglob("*.py"))
INI = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
SHARED = [ROOT / each for each in INI["pythonpath"]]


def imported(text: str) -> set[str]:
    """The first parts of the names of modules that a file imports, wherever it does."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def lent(text: str, folder: Path, loose: dict[str, set[Path]]) -> set[str]:
    """Modules without a package that a file of this folder imports from other folders."""
    return {
        name
        for name in imported(text) & set(loose)
        if folder not in loose[name] and not any((each / f"{name}.py").is_file() for each in SHARED)
    }


@pytest.fixture(scope="module")
def loose() -> dict[str, set[Path]]:
    """Modules that lie in no package, and their folders."""
    found: dict[str, set[Path]] = {}
    for path in FILES:
        if not (path.parent / "__init__.py").exists():
            found.setdefault(path.stem, set()).add(path.parent)
    return found


def test_what_several_rooms_use_is_a_kit(loose):
    """pytest puts the folder of each test that it collects on sys.path: alone, a test has its own one only."""
    taken = {path.relative_to(TESTS).as_posix(): lent(path.read_text(), path.parent, loose) for path in FILES}
    assert {path: names for path, names in taken.items() if names} == {}
    assert lent("def f():\n    from test_world import x\n", TESTS / "contract" / "run", loose) == {
        "test_world"
    }


def test_no_two_tests_have_one_name():
    """pytest imports them by it."""
    counts = Counter(path.stem for path in FILES if path.stem.startswith("test_"))
    assert [name for name, count in counts.items() if count > 1] == []
