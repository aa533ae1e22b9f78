"""What `nox -s mutants` mutates: every decision, by tests that there are."""

from __future__ import annotations

import ast
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


def test_every_decision_of_the_launcher_is_mutated_or_left_out_for_a_reason():
    pure = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "multiworld" / "run").rglob("*.py")
        if "Pure." in (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")
    }
    assert pure - mutants.TESTS.keys() == mutants.LEFT_OUT.keys()
    # They decide, too, beside what they read or send.
    assert {"multiworld/run/nodes/agreement.py", "multiworld/run/signals.py"} <= mutants.TESTS.keys()
    assert all(len(why.split()) > 3 for why in mutants.LEFT_OUT.values())


def test_what_is_listed_is_there():
    for module, tests in mutants.TESTS.items():
        assert tests, module
        missing = [name for name in (module, *tests) if not (ROOT / name).is_file()]
        assert not missing
