"""The version matrix: what is recorded of a run on a torch, and what tests need beside it. A small package plays torch."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from kits.sourcekit import make_settings
from packaging.requirements import Requirement

from m8d_build import proc
from m8d_build.environments.venvs import Environment
from m8d_build.errors import CommandFailed, WheelUnreachable
from m8d_build.files.lock import using
from m8d_build.progress import Silent
from m8d_build.settings import REPO_ROOT
from m8d_build.targets import tomllib
from m8d_build.testing import versions
from m8d_build.testing.environment import packages_for, remove_added, requirements
from m8d_build.testing.page import AGAIN
from m8d_build.testing.results import FAILED, PASSED, SKIPPED, Case, Outcome, condensed, from_json, to_json
from m8d_build.testing.versions import Run, check_page, columns, matches, sources_digest, write_page

PYPROJECT = (REPO_ROOT / "pyproject.toml").read_text(encoding="utf-8")
GOOD = "import torch\ndef test_it(): assert torch.__version__ == '9.8.7+toy'\n"


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """A Python that has torch 9.8.7+toy."""
    root = tmp_path_factory.mktemp("toy") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True, timeout=120)
    site = next(root.glob("lib/python3*/site-packages")) / "torch"
    site.mkdir()
    (site / "__init__.py").write_text("__version__ = '9.8.7+toy'\n")
    return root / "bin" / "python"


@pytest.fixture
def tests(tmp_path) -> Path:
    """A battery of its own, away from the project's settings of pytest."""
    folder = tmp_path / "battery"
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:randomly\n")
    (folder / "test_toy.py").write_text(GOOD)
    return folder


@pytest.fixture
def packages(tmp_path) -> Path:
    """The packages of the Python that runs this, but for its torch: nothing is downloaded."""
    folder = tmp_path / "packages"
    folder.mkdir()
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if not each.name.startswith(("torch", "functorch")):
            (folder / each.name).symlink_to(each)
    return folder


@pytest.fixture
def run(toy, tests, tmp_path, packages):
    """Run the tests as noxfile.py does; what came of it."""

    def once(*more: str, limit: int = versions.LIMIT, version: str = "9.8.7", again: bool = False):
        one = Run(version, tmp_path / "out", tests=tests, again=again)
        said = subprocess.run(
            [toy, "-I", "-c", versions.ASK], capture_output=True, text=True, check=True, timeout=60
        )
        began = time.monotonic()
        done = subprocess.run(
            [toy, *one.command(more, limit)], env={**os.environ, "PYTHONPATH": str(packages)}, cwd=tests,
            capture_output=True, check=False, timeout=240,
        )  # fmt: skip
        seconds = time.monotonic() - began
        return one.done(said.stdout, seconds, good=done.returncode == 0, whole=not more, limit=limit)

    return once


def kept(tmp_path, monkeypatch, *listed: str):
    monkeypatch.setattr(versions, "VERSIONS", listed)
    return columns(tmp_path / "out", tmp_path / "page.md")


def test_the_tests_run_on_the_named_torch(toy, tests, tmp_path, run, monkeypatch):
    before = sorted(toy.parents[1].rglob("*.dist-info"))
    outcome = run()
    assert (outcome.summary(), outcome.ok) == ("1 passed, 0 failed, 0 skipped", True)
    assert (outcome.torch, outcome.build) == ("9.8.7", "9.8.7+toy")
    assert sorted(toy.parents[1].rglob("*.dist-info")) == before
    assert kept(tmp_path, monkeypatch, "9.8.7") == [outcome]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"torch-9.8.7.xml", "torch-9.8.7.json"}


def test_a_failing_test_and_a_broken_file_are_told(tests, run):
    (tests / "test_bad.py").write_text("def test_no(): assert 1 == 2\n")
    (tests / "test_broken.py").write_text("import gone\n")
    outcome = run()
    assert outcome.summary() == "1 passed, 2 failed, 0 skipped"
    assert not outcome.trouble
    assert {case.reason for case in outcome.cases} >= {
        "assert 1 == 2",
        "ModuleNotFoundError: No module named 'gone'",
    }


def test_what_failed_is_run_again_and_what_passes_then_says_so(tests, tmp_path, run, monkeypatch):
    """`once` passes where a variable is set, `never` does not; the file lies in a room."""
    (tests / "room").mkdir()
    (tests / "room" / "test_odd.py").write_text(
        "import os, pytest\n"
        "quiet = 'M8D_TEST_QUIET' in os.environ\n"
        "@pytest.mark.parametrize('what', ['here', 'once', 'never'])\n"
        "def test_odd(what): assert what == 'here' or (what == 'once' and quiet)\n"
    )
    assert run().summary() == "2 passed, 2 failed, 0 skipped"
    monkeypatch.setenv("M8D_TEST_QUIET", "1")
    outcome = run(again=True)
    assert outcome.summary() == "3 passed, 1 failed, 0 skipped, 1 of those passed when run again"
    assert [case.name for case in outcome.cases if case.verdict == PASSED and case.reason] == [
        "test_odd[once]"
    ]
    assert kept(tmp_path, monkeypatch, "9.8.7") == [condensed(outcome)]
    assert Run("9.8.7", tmp_path / "out", tests=tests, again=True).failed == [
        f"{tests / 'room' / 'test_odd.py'}::test_odd[never]"
    ]
    write_page(tmp_path / "page.md", kept(tmp_path, monkeypatch, "9.8.7"))
    page = (tmp_path / "page.md").read_text()
    assert "| passed when run again | 1 |" in page
    assert page.count("test_odd.py::test") == 2
    assert (
        page.index("### Failed\n") < page.index("[never") < page.index(f"### {AGAIN}") < page.index("[once")
    )


def test_only_a_whole_run_of_the_same_code_is_repeated(tests, tmp_path, run):
    with pytest.raises(ValueError, match="no run to its end"):
        run(again=True)
    (tests / "test_bad.py").write_text("def test_no(): assert 1 == 2\n")
    first = run()
    missing = Run("9.8.7", tmp_path / "out", tests=tests, again=True).missing("no such wheel")
    assert (missing.ok, missing.trouble) == (False, "not run again: no such wheel")
    other = Run("9.8.7", tmp_path / "out", tests=tests, again=True).done(
        '["9.8.7+other", "3", "c"]', 1, good=True
    )
    assert other.trouble == "not run again: this is torch 9.8.7+other"
    assert from_json((tmp_path / "out" / "torch-9.8.7.json").read_text()) == first
    (tests / "test_bad.py").write_text("def test_no(): assert 1 == 1\n")
    with pytest.raises(ValueError, match="has changed since"):
        run(again=True)


@pytest.mark.parametrize("failing", [False, True])
def test_tests_past_their_time_are_ended_and_told(tests, run, failing):
    (tests / "test_toy.py").write_text(
        "import pytest, time\n@pytest.mark.parametrize('n', range(600))\ndef test_long(n): time.sleep(1)\n"
    )
    if failing:
        (tests / "test_a.py").write_text("def test_no(): assert 1 == 2\n")
    outcome = run(limit=2)
    assert outcome.trouble == "not to its end: cut off after 2 s"
    assert outcome.count(PASSED) < 60
    assert outcome.count(FAILED) == failing


def test_no_tests_at_all_are_no_success(tests, tmp_path, run, monkeypatch):
    assert run("-k", "nothing_of_this_name").trouble.startswith("not to its end")
    (other,) = kept(tmp_path, monkeypatch, "9.8.7")
    assert other.trouble == "not run: not asked for", "a part of the tests is not kept as a result"


def test_an_earlier_runs_results_do_not_count_for_a_run_that_died(tests, run):
    assert run().ok
    (tests / "conftest.py").write_text("import os\nos._exit(0)\n")
    outcome = run()
    assert (outcome.ok, outcome.cases) == (False, ())
    assert "no results" in outcome.trouble


def test_a_version_that_cannot_be_had_is_an_outcome_as_well(tests, tmp_path, run, monkeypatch):
    Run("9.0.0", tmp_path / "out", tests=tests).missing("no such wheel")
    good = run()
    first, second = kept(tmp_path, monkeypatch, "9.0.0", "9.8.7")
    assert (first.torch, first.trouble, first.ok) == ("9.0.0", "not run: no such wheel", False)
    assert second == good


@pytest.mark.parametrize(
    ("version", "build", "same"),
    [
        ("2.15", "2.15.10+cpu", True),
        ("2.15", "2.1.5", False),
        ("2.13.0", "2.13.0+cpu", True),
        ("2.13.0", "2.13.1", False),
    ],
)
def test_a_python_with_another_torch_is_noticed(version, build, same):
    assert matches(version, f'a warning\n["{build}", "3.11.7", "cpython-311"]\n') is same


def test_the_page_names_the_versions_that_were_not_asked_for(tests, tmp_path, run, monkeypatch):
    run()
    page = tmp_path / "page.md"
    write_page(page, kept(tmp_path, monkeypatch, "9.0", "9.8.7"))
    text = page.read_text()
    assert "|  | torch 9.0 | torch 9.8.7 |" in text
    assert text.count("not run: not asked for") == 1


def test_results_of_earlier_runs_stay_until_the_version_is_run_to_its_end_again(tmp_path, monkeypatch):
    out = tmp_path / "out"
    old, new = (Case("test_a", f"test_b[{n}]", PASSED) for n in (1, 2))
    first = Outcome(
        "9.0.1",
        "2026-01-01",
        "old",
        "9.0.1+cpu",
        "3.11.7",
        (old, new, Case("test_c", "test_d", SKIPPED, "r")),
    )
    write_page(tmp_path / "page.md", [first, Outcome("9.8", "2026-01-01", "old", trouble="not run: no disk")])
    assert [each["torch"] for each in json.loads((tmp_path / "page.json").read_text())] == ["9.0.1"]
    out.mkdir()
    cut = Outcome("9.0", "2026-01-02", "new", trouble="not to its end: cut")
    (out / "torch-9.0.json").write_text(to_json(cut))
    other = Outcome(
        "9.8", "2026-01-02", "new", "9.8+cpu", "3.11.7", (Case("test_a", "test_b[1]", FAILED, "no"),)
    )
    (out / "torch-9.8.json").write_text(to_json(other))
    columns = kept(tmp_path, monkeypatch, "9.0", "9.8")
    assert columns == [condensed(first), other]
    write_page(tmp_path / "page.md", columns)
    assert "| sources | old | new |" in (tmp_path / "page.md").read_text()
    assert kept(tmp_path, monkeypatch, "9.0", "9.8") == columns
    (out / "torch-9.0.json").write_text(to_json(dataclasses.replace(first, sources="new")))
    assert [each.sources for each in kept(tmp_path, monkeypatch, "9.0", "9.8")] == ["new", "new"]


def test_an_older_record_does_not_replace_a_newer_column(tmp_path, monkeypatch):
    """The page was written elsewhere since."""
    newer = Outcome("9.0.1", "2026-01-02", "new", "9.0.1+cpu", "3.11.7", (Case("test_a", "test_b", PASSED),))
    write_page(tmp_path / "page.md", [newer])
    (tmp_path / "out").mkdir()
    record = tmp_path / "out" / "torch-9.0.json"
    record.write_text(to_json(dataclasses.replace(newer, date="2026-01-01", sources="old")))
    assert kept(tmp_path, monkeypatch, "9.0") == [newer]
    later = dataclasses.replace(newer, date="2026-01-03", sources="newest")
    record.write_text(to_json(later))
    assert kept(tmp_path, monkeypatch, "9.0") == [later]


def test_a_page_without_a_place_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Nothing here\n")
    with pytest.raises(ValueError, match="once each"):
        check_page(page)
    with pytest.raises(ValueError, match="once each"):
        write_page(page, [])
    assert page.read_text() == "# Nothing here\n"


def test_nox_runs_every_version_and_needs_no_package_for_it():
    """noxfile.py takes the module before anything is installed."""
    code = "import sys; sys.path.insert(0, 'build'); from m8d_build.testing import versions; print(versions.VERSIONS)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=REPO_ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == str(versions.VERSIONS)
    assert "for each in versions.VERSIONS" in (REPO_ROOT / "noxfile.py").read_text(encoding="utf-8")


def test_what_the_tests_need_has_the_projects_bounds_and_the_numpy_of_its_time():
    old, new = requirements("2.4.0", PYPROJECT), requirements("2.13.0+cpu", PYPROJECT)
    names = [word.partition(">")[0] for word in new]
    assert names == ["greenlet", "hypothesis", "pytest", "pytest-timeout", "numpy"]
    assert old[:-1] == new[:-1]
    assert (old[-1], new[-1]) == ("numpy>=1.26,<2", "numpy>=1.26")


def test_what_the_tests_of_an_environment_import_is_what_it_gets():
    """Those of the contract and of the test bed, and all modules of the tree that they load as they are collected."""
    needed = {Requirement(each).name.replace("-", "_") for each in requirements("2.13.0", PYPROJECT)}
    ini = tomllib.loads(PYPROJECT)["tool"]["pytest"]["ini_options"]
    folders = [REPO_ROOT / each for each in ini["pythonpath"]]
    tests = REPO_ROOT / "tests"
    battery = tests / "kits" / "contract" / "battery"  # a program: no test imports it
    waiting = [tests / "conftest.py", *(tests / "contract").rglob("*.py"), *battery.glob("*.py")]
    waiting += (tests / "testbed").glob("*.py")
    known = {*sys.stdlib_module_names, *needed, "torch"}
    seen, lacking = set(waiting), []
    while waiting:
        path = waiting.pop()
        text = path.read_text(encoding="utf-8")
        for name in imported_at_once(text):
            found = module_file(name, [path.parent, *folders])
            if found is not None and found not in seen:
                seen.add(found)
                waiting.append(found)
            top = name.partition(".")[0]
            ours = module_file(top, [path.parent, *folders])
            if ours is None and top not in known and f'importorskip("{top}"' not in text:
                lacking.append((path.name, name))
    assert len(seen) > 400
    assert lacking == []


def imported_at_once(text):
    """Names of modules, and of what may be a module in one, that a module's top level imports."""
    for each in ast.parse(text).body:
        if isinstance(each, ast.Import):
            yield from (alias.name for alias in each.names)
        elif isinstance(each, ast.ImportFrom) and not each.level:
            yield each.module
            yield from (f"{each.module}.{alias.name}" for alias in each.names)


def module_file(name, folders):
    for folder in folders:
        path = folder / name.replace(".", "/")
        for each in (path.with_suffix(".py"), path / "__init__.py"):
            if each.exists():
                return each
    return None


@pytest.fixture
def pip(monkeypatch):
    """Stands in for pip: each call takes the next answer, True for success."""
    calls, answers = [], [True]

    def answer(command, **_options):
        calls.append(command)
        into = Path(command[command.index("--target") + 1])
        into.mkdir(parents=True)
        (into / "pytest.py").write_text("")
        if not answers.pop(0):
            raise CommandFailed("no network", tail="ReadTimeoutError")
        return proc.Finished("", 0.1)

    monkeypatch.setattr(proc, "run", answer)
    return calls, answers


def get_packages(settings, held, needs=("pytest",)):
    added = []
    folder = packages_for(held, "cpython-311", needs, settings, log=settings.out / "log", added=added)
    return folder, added


def test_the_tests_packages_are_installed_once_beside_the_environment(tmp_path, pip):
    settings, held = make_settings(tmp_path), Environment("e", tmp_path / "python", tmp_path / "site")
    folder, added = get_packages(settings, held)
    assert (folder / "pytest.py").exists()
    assert folder.parent == settings.cache / "envs"
    assert added == [folder]
    os.utime(folder, (0, 0))
    assert get_packages(settings, held) == (folder, [])
    assert folder.stat().st_mtime > 0  # it is in use
    assert len(pip[0]) == 1
    assert pip[0][0][0] == held.python
    pip[1].append(True)
    assert get_packages(settings, held, ("pytest", "numpy<2"))[0] != folder
    remove_added(added, settings, Silent())
    assert not folder.exists()


def test_an_installation_is_tried_again_and_leaves_nothing_when_it_fails(tmp_path, pip):
    settings, held = make_settings(tmp_path), Environment("e", tmp_path / "python", tmp_path / "site")
    calls, answers = pip
    answers[:] = [False, False, False]
    with pytest.raises(WheelUnreachable, match="3 attempts"):
        get_packages(settings, held)
    assert [path.name for path in (settings.cache / "envs").iterdir()] == [".locks"]
    answers[:] = [False, True]
    folder, _ = get_packages(settings, held)
    assert folder.is_dir()
    assert len(calls) == 5


def test_what_a_run_added_goes_and_nothing_else(tmp_path):
    settings = make_settings(tmp_path)
    cache = settings.cache
    for name in ("envs/torch-2.6.0-aaa-cp311", "envs/torch-2.6.0-bbb-cp311", "envs/tests-x", "envs/.locks"):
        (settings.cache / name).mkdir(parents=True)
    wheel = settings.cache / "wheels" / "torch-2.6.0-x.whl"
    wheel.parent.mkdir()
    wheel.write_bytes(b"x")
    added = [wheel, cache / "wheels" / "gone.sha256", cache / "envs/torch-2.6.0-bbb-cp311"]
    report = Silent()
    with using(cache):
        remove_added(added, settings, report)
    assert "torch-2.6.0-x.whl, torch-2.6.0-bbb-cp311 stay" in report.notes[0]
    assert all(path.exists() for path in (wheel, added[2])), "another run uses the cache"
    remove_added(added, settings, Silent())
    left = {path.relative_to(settings.cache).as_posix() for path in settings.cache.glob("*/[!.]*")}
    assert left == {"envs/torch-2.6.0-aaa-cp311", "envs/tests-x"}


def test_the_digest_follows_the_tests(tests):
    before = sources_digest(tests)
    assert sources_digest(tests) == before
    (tests / "test_toy.py").write_text(GOOD + "\n")
    assert sources_digest(tests) != before
