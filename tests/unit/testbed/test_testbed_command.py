"""``m8d_build testbed``: which builds it makes, how it runs the tests, and what is left of both."""

from __future__ import annotations

import io
import json
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from kits.sourcekit import make_settings
from rich.console import Console

from m8d_build.cli import main
from m8d_build.environments.venvs import Environment
from m8d_build.errors import BehaviourFailed, WheelUnreachable
from m8d_build.progress import Silent
from m8d_build.testing import testbed
from m8d_build.testing.testbed import TESTS, Asked, command, run_testbed

PYTHON = Path(sys.executable)
CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--bed", action="append", default=[])
    parser.addoption("--bed-path", action="append", default=[])
"""
GOOD = """
def test_it(pytestconfig):
    (name,) = [each.partition("=")[0] for each in pytestconfig.getoption("--bed")]
    assert name in {names!r}
    assert pytestconfig.getoption("--bed-path") == {paths!r}
"""


@pytest.fixture
def tests(tmp_path) -> Path:
    folder = tmp_path / "toybed"
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_toy.py").write_text(GOOD.format(names=["mine"], paths=[]))
    return folder


@pytest.fixture
def makes(monkeypatch, tmp_path) -> list[str]:
    """What is made, instead of making it; the interpreter of every environment is this one."""
    made = []

    @contextmanager
    def environment(version, given, settings, report, *, log, added):
        assert given is None
        made.append(f"official {version}")
        added.append(tmp_path / f"env-{version}")
        yield Environment(f"torch-{version}", PYTHON, tmp_path)
        made.append(f"released {version}")

    @contextmanager
    def fresh(self, recipe, *, base, log):
        made.append(f"{recipe} on {base.name}")
        yield Environment("patched", PYTHON, tmp_path)
        made.append("removed the patched one")

    subject = SimpleNamespace(marker=SimpleNamespace(torch="2.6.0"), recipe="the wheel")
    monkeypatch.setattr(testbed, "environment", environment)
    monkeypatch.setattr(testbed, "ask_torch", lambda held, version: (version, "3", "cpython-3"))
    monkeypatch.setattr(testbed, "packages_for", lambda *_a, **_k: tmp_path / "packages")
    monkeypatch.setattr(testbed, "read_subject", lambda path: subject)
    monkeypatch.setattr(testbed.Environments, "fresh", fresh)
    monkeypatch.setattr(testbed, "remove_added", lambda added, *_: made.append(f"pruned {len(added)}"))
    return made


def test_named_builds_are_used_as_they_are(tests, tmp_path, makes):
    settings = make_settings(tmp_path)
    ran = run_testbed(Asked({"mine": PYTHON}, tests=tests), settings, Silent())
    assert (ran.summary(), ran.builds) == ("1 passed, 0 failed, 0 skipped", ("mine",))
    assert makes == []
    assert {path.name for path in (settings.out / "testbed").iterdir()} == {
        "testbed.log", "mine.log", "mine.xml",
    }  # fmt: skip


def test_each_build_has_a_process_of_its_own_and_they_run_side_by_side(tests, tmp_path, makes):
    """Each waits for the other one's word, which one after the other would never come."""
    (tests / "test_toy.py").write_text(f"""
import pathlib, time
def test_it(pytestconfig):
    (name,) = [each.partition("=")[0] for each in pytestconfig.getoption("--bed")]
    pathlib.Path({str(tmp_path)!r}, "here-" + name).touch()
    deadline = time.monotonic() + 60
    while len(list(pathlib.Path({str(tmp_path)!r}).glob("here-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
def test_no(pytestconfig):
    assert not pytestconfig.getoption("--bed")[0].startswith("b="), "no " + "b"
""")
    settings = make_settings(tmp_path)
    with pytest.raises(BehaviourFailed, match="3 passed, 1 failed") as caught:
        run_testbed(Asked({"a": PYTHON, "b": PYTHON}, tests=tests), settings, Silent())
    assert "no b" in caught.value.tail
    assert "a:" not in caught.value.tail.splitlines()
    log = (settings.out / "testbed" / "testbed.log").read_text()
    assert "--bed=a=" in log
    assert "--bed=b=" in log


def test_the_wheel_leans_on_its_official_build_and_all_are_held_while_the_tests_run(tests, tmp_path, makes):
    names = ["patched-2.6.0", "stock-2.14.1"]
    (tests / "test_toy.py").write_text(GOOD.format(names=names, paths=[str(tmp_path / "packages")]))
    asked = Asked({}, tmp_path / "torch.whl", ("2.14.1",), tests=tests)
    assert list(run_testbed(asked, make_settings(tmp_path), Silent()).builds) == names
    assert makes == [
        "official 2.6.0", "the wheel on torch-2.6.0", "official 2.14.1",
        "released 2.14.1", "removed the patched one", "released 2.6.0",
    ]  # fmt: skip


def test_what_was_added_goes_if_it_is_not_to_be_kept_even_after_a_failure(tests, tmp_path, makes):
    (tests / "test_toy.py").write_text("def test_no(): assert 1 == 2\n")
    asked = Asked({}, None, ("2.14.1",), tests=tests, keep=False)
    with pytest.raises(BehaviourFailed, match="0 passed, 1 failed") as caught:
        run_testbed(asked, make_settings(tmp_path), Silent())
    assert "assert 1 == 2" in caught.value.tail
    assert makes[-1] == "pruned 1"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            "import time\ndef test_long(): time.sleep(600)\n",
            "no good end: could not run the tests within 5 s",
        ),
        ("import os\nos._exit(3)\n", "no good end"),
    ],
)
def test_tests_that_do_not_end_well(tests, tmp_path, makes, body, says):
    (tests / "test_toy.py").write_text(body)
    with pytest.raises(BehaviourFailed, match=says):
        run_testbed(Asked({"mine": PYTHON}, tests=tests, limit=5.0), make_settings(tmp_path), Silent())


def test_the_command_line_of_pytest(tmp_path):
    asked = Asked({}, match="values")
    said = command(asked, "a", Path("/a/python"), tmp_path, tmp_path / "x.xml")
    assert said[:5] == [sys.executable, "-m", "pytest", TESTS, TESTS.with_name("gpu")]
    assert said[-4:] == ["--bed=a=/a/python", f"--bed-path={tmp_path}", "-k", "values"]


def call(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    return main(arguments, console=Console(file=out, width=200)), out.getvalue()


def test_arguments_that_exclude_each_other(tmp_path):
    assert call("testbed", "--wheel", "x.whl", "--bed", "a=/b")[0] == 2
    assert call("testbed", "--wheel", "x.whl", "--no-wheel")[0] == 2
    assert call("testbed", "--no-wheel", "--torch")[0] == 2
    assert call("testbed", "--bed", "nothing")[0] == 2


def test_no_wheel_was_built(tmp_path):
    assert call("testbed", "--out", str(tmp_path))[0] == WheelUnreachable.exit_code


def test_the_command_as_json(tests, tmp_path, makes, monkeypatch):
    asked = []

    def run(what, settings, report):
        asked.append(what)
        return testbed.Ran(tuple(what.beds), (), 1.25, tmp_path / "log")

    monkeypatch.setattr("m8d_build.cli.testbed.run_testbed", run)
    code, text = call("testbed", "--bed", f"mine={PYTHON}", "-k", "values", "--no-keep", "--json")
    assert code == 0
    assert json.loads(text) == {
        "builds": ["mine"], "summary": "0 passed, 0 failed, 0 skipped", "seconds": 1.2, "log": str(tmp_path / "log"),
    }  # fmt: skip
    assert asked == [Asked({"mine": PYTHON}, match="values", keep=False)]
