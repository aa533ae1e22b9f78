"""What `nox -s mutants` mutates: every decision, by tests that there are."""

from __future__ import annotations

from pathlib import Path

import mutants

ROOT = Path(__file__).parents[3]


def test_every_decision_is_mutated():
    core = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "multiworld" / "_core").rglob("*.py")
        if path.name != "__init__.py"
    }
    assert core <= mutants.TESTS.keys()


def test_what_is_listed_is_there():
    for module, tests in mutants.TESTS.items():
        assert tests, module
        missing = [name for name in (module, *tests) if not (ROOT / name).is_file()]
        assert not missing
