"""What CI may leave out and look at twice: the rules, and that they are about tests that there are."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import evidence
import pytest
from evidence import Record, Rules, SecondLook, Skip

ROOT = Path(__file__).parents[3]
RULES = evidence.load()
SKIP = Skip("tests/unit/test_a.py::test_*", "no [IPv6]*", "there is none", most=2)
LOOK = SecondLook("tests/contract/test_b.py::test_net", "it needs a mirror")
MADE = Rules({"unit": 3, "testbed *": 2}, (SKIP,), (LOOK,))


def node(name: str) -> str:
    return f"tests/unit/test_a.py::test_{name}"


def test_a_skip_that_is_not_listed_is_told():
    assert MADE.new_skips([(node("x[a]"), "no [IPv6] here"), (node("y"), "no [IPv6]")]) == []
    (line,) = MADE.new_skips([(node("x"), "no IPv6 here")])
    assert "does not allow it" in line
    (line,) = MADE.new_skips([("tests/unit/test_b.py::test_x", "no [IPv6]")])
    assert "tests/unit/test_b.py::test_x" in line


def test_and_one_too_many_of_those_that_are():
    (line,) = MADE.new_skips([(node(name), "no [IPv6]") for name in "xyzw"])
    assert "2 at most" in line


def test_only_listed_tests_are_looked_at_twice():
    assert MADE.second_look("tests/contract/test_b.py::test_net[1]") is LOOK
    assert MADE.second_look("tests/contract/test_b.py::test_net2") is None


def test_second_looks_of_a_pattern_are_counted():
    look = SecondLook("tests/contract/*", "a shared machine", 2)
    rules = Rules({}, (), (look,))
    nodes = [f"tests/contract/test_a.py::test_x[{n}]" for n in range(3)]
    assert rules.second_look(nodes[0]) is look
    assert rules.second_look("tests/unit/test_a.py::test_x") is None
    assert rules.too_many_looks(nodes[:2]) == []
    assert rules.too_many_looks(nodes) == ["tests/contract/*: 3 second looks, 2 may be an accident"]


@pytest.mark.parametrize(
    ("where", "beds", "part"),
    [
        ("tests/unit/test_a.py::test_x[a/b]", (), "unit"),
        ("tests/testbed/test_a.py::T::test_x", ("patched-2.6.0=/p",), "testbed patched"),
        ("tests/testbed/test_a.py::test_x", (), "testbed"),
        ("test_toy.py::test_x", (), "other"),
    ],
)
def test_parts_are_folders(where, beds, part):
    assert evidence.part_of(where, beds) == part


def test_what_is_shown_at_the_end(tmp_path):
    first = Record({"unit": ["a", "b"]}, [(node("x[1]"), "no [IPv6]"), (node("x[2]"), "no [IPv6]")], [])
    again = Record(
        {"unit": ["b", "c"]},
        [],
        [("tests/contract/test_b.py::test_net", "E  no mirror"), ("x::y", "E  late")],
        [("x::z", "E  wrong")],
        ["one too many"],
    )
    for record in (first, again):
        assert Record.read(record.write(tmp_path)) == record
    lines, wrong = evidence.summary([first, again], MADE)
    assert lines == [
        f"skipped: {node('x')}: no [IPv6] (there is none)",
        "passed in unit: 3",
        "second look: tests/contract/test_b.py::test_net (it needs a mirror):\nE  no mirror",
        "second look: x::y (not allowed):\nE  late",
        "failed: x::z:\nE  wrong",
    ]
    assert wrong == ["one too many", "too few tests: testbed *: 0 passed, 2 at least are expected"]
    assert evidence.main([str(tmp_path)]) == 1  # of this repository's own rules


def test_of_a_failure_the_errors_are_kept():
    report = "def test_x():\n    y = 1\n>   assert y == 2\nE   assert 1 == 2\nE   and more\n\ntest_x.py:3: AssertionError"
    assert evidence.seen(report, 2) == ">   assert y == 2\nE   assert 1 == 2"
    assert evidence.seen(report).endswith("E   and more\ntest_x.py:3: AssertionError")
    assert evidence.seen("") == ""


def test_of_a_stuck_process_each_threads_last_calls_are_shown():
    thread = "Thread 0x00007f01 (most recent call first):\n"
    calls = "".join(f'  File "a.py", line {line} in f\n' for line in range(9))
    written = f"a warning\n{thread}{calls}\n{thread}  <no Python frame>\nanother\n  with more\n"
    assert evidence.stacks(written, 2).splitlines() == [
        thread.strip(), '  File "a.py", line 0 in f', '  File "a.py", line 1 in f',
        thread.strip(), "  <no Python frame>",
    ]  # fmt: skip
    assert evidence.stacks("nothing of that\n") == ""


def test_too_few_tests_are_told():
    assert MADE.too_few({"unit": 2, "testbed a": 5, "testbed b": 1}) == [
        "unit: 2 passed, 3 at least are expected",
        "testbed b: 1 passed, 2 at least are expected",
    ]


def test_of_a_part_whose_files_were_left_out_none_are_asked():
    assert MADE.too_few({"testbed a": 2}, {"unit"}) == []
    assert MADE.too_few({"unit": 2, "testbed a": 2}, {"unit"}) == ["unit: 2 passed, 3 at least are expected"]
    whole = Record({"testbed a": ["x", "y"]}, [("tests/unit/test_a.py", "no browser")], [])
    assert evidence.summary([whole], MADE)[1] == []
    one = Record({"testbed a": ["x", "y"]}, [(node("x"), "no [IPv6]")], [])
    assert evidence.summary([one], MADE)[1] == ["too few tests: unit: 0 passed, 3 at least are expected"]


def test_every_folder_of_tests_must_have_some():
    folders = {each.parent.relative_to(ROOT / "tests").parts[0] for each in ROOT.glob("tests/*/**/test_*.py")}
    assert {part.partition(" ")[0] for part in RULES.parts} == folders


TOY = """
import pytest
def test_good(): pass
@pytest.mark.parametrize("n", range(7))
def test_left_out(n): pytest.skip("this torch has no NCCL")
"""
BAD = "\ndef test_bad(): assert 1 == 2\n"


def toy(tmp_path, text, *, ci):
    """What pytest prints of a test file, with this repository's conftest."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_toy.py").write_text(text)
    env = {name: value for name, value in os.environ.items() if not name.startswith("M8D_")}
    path = os.pathsep.join(str(ROOT / each) for each in ("build", ".", "tests", "tests/testbed"))
    record = {"M8D_CI_RECORD": str(tmp_path / "record"), "M8D_SECOND_LOOK": "1"} if ci else {}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        env={**env, "PYTHONPATH": path, **record}, cwd=tmp_path, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip


def test_a_failure_is_told_at_the_end(tmp_path, capsys):
    done = toy(tmp_path, BAD, ci=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert evidence.main([str(tmp_path / "record")]) == 1
    _, _, told = capsys.readouterr().out.partition("failed: test_toy.py::test_bad:\n")
    assert "assert 1 == 2" in told


@pytest.mark.parametrize(("ci", "code"), [(True, 1), (False, 0)])
def test_pytest_itself_fails_by_a_new_skip_in_ci_alone(tmp_path, ci, code):
    done = toy(tmp_path, TOY, ci=ci)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("does not allow it" in done.stdout) is ci
    assert len([*tmp_path.glob("record/*.json")]) == ci


# -- the lists themselves ------------------------------------------------------------------------------------------


def _functions(path: Path) -> set[str]:
    return {
        each.name
        for each in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize("entry", [*RULES.skips, *RULES.second_looks], ids=lambda each: each.test)
def test_each_entry_is_about_a_test_that_there_is_and_says_why(entry):
    file, _, name = entry.test.partition("::")
    path = ROOT / file
    assert path.exists() or [*ROOT.glob(file)], f"{file} is not there"
    if name and not re.search(r"[*?]", name):
        assert name.rpartition("::")[2].partition("[")[0] in _functions(path)
    why = entry.reason if isinstance(entry, SecondLook) else entry.why
    assert len(why.split()) >= 3, f"{entry.test}: say why in a sentence"


def test_the_parts_are_folders_that_there_are():
    assert all((ROOT / "tests" / part.partition(" ")[0]).is_dir() for part in RULES.parts)
