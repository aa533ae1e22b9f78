"""The battery run: which versions, in which environments, and what is left of it. A small package plays torch."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from rich.console import Console
from sourcekit import make_settings

from m8d_build import proc
from m8d_build.cli import main
from m8d_build.environments.venvs import Environment
from m8d_build.errors import CommandFailed, WheelUnreachable
from m8d_build.progress import Silent
from m8d_build.settings import REPO_ROOT
from m8d_build.testing import environment as battery_env
from m8d_build.testing import versions as battery
from m8d_build.testing.environment import packages_for, remove_added, requirements
from m8d_build.testing.versions import Asked, earlier, folder_of, resolve, run_battery, sources_digest

PYPROJECT = (REPO_ROOT / "pyproject.toml").read_text(encoding="utf-8")
TODAY = "2026-11-20"
GOOD = "import torch\ndef test_it(): assert torch.__version__ == '9.8.7+toy'\n"
LISTED = "torch (2.15.2)\nAvailable versions: 2.16.0, 2.15.3rc1, 2.15.2, 2.15.10, 2.15.11+cpu, 2.15.0, odd!\n"


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
def own_packages(monkeypatch, tmp_path):
    """The tests' packages are those of the Python that runs this, but for its torch: nothing is downloaded."""
    folder = tmp_path / "packages"
    folder.mkdir()
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if not each.name.startswith(("torch", "functorch")):
            (folder / each.name).symlink_to(each)
    monkeypatch.setattr(battery, "packages_for", lambda *_a, **_k: folder)


def run(toy, tests, settings, **more):
    asked = Asked(("9.8.7",), {"9.8.7": toy}, tests=tests, **more)
    return run_battery(asked, settings, Silent(), date=TODAY)[0]


def test_the_tests_run_on_the_named_torch(toy, tests, tmp_path, own_packages):
    settings = make_settings(tmp_path)
    before = sorted(toy.parents[1].rglob("*.dist-info"))
    outcome = run(toy, tests, settings)
    assert (outcome.summary(), outcome.ok) == ("1 passed, 0 failed, 0 skipped", True)
    assert (outcome.build, outcome.date) == ("9.8.7+toy", TODAY)
    assert sorted(toy.parents[1].rglob("*.dist-info")) == before
    assert earlier(settings, outcome.sources) == {"9.8.7": outcome}
    assert earlier(settings, "of something else") == {}
    assert {path.name for path in folder_of(settings).iterdir()} == {
        f"torch-9.8.7.{kind}" for kind in ("log", "xml", "json")
    }


def test_a_failing_test_and_a_broken_file_are_told(toy, tests, tmp_path, own_packages):
    (tests / "test_bad.py").write_text("def test_no(): assert 1 == 2\n")
    (tests / "test_broken.py").write_text("import gone\n")
    outcome = run(toy, tests, make_settings(tmp_path))
    assert outcome.summary() == "1 passed, 2 failed, 0 skipped"
    assert not outcome.trouble
    assert {case.reason for case in outcome.cases} >= {
        "assert 1 == 2",
        "ModuleNotFoundError: No module named 'gone'",
    }


def test_tests_past_their_time_are_ended_and_told(toy, tests, tmp_path, own_packages):
    (tests / "test_toy.py").write_text("import time\ndef test_long(): time.sleep(600)\n")
    outcome = run(toy, tests, make_settings(tmp_path), limit=2.0)
    assert outcome.trouble.startswith("not to its end: could not run the tests within 2 s")
    assert outcome.seconds < 60


def test_no_tests_at_all_are_no_success(toy, tests, tmp_path, own_packages):
    settings = make_settings(tmp_path)
    outcome = run(toy, tests, settings, match="nothing_of_this_name")
    assert outcome.trouble.startswith("not to its end")
    assert earlier(settings, outcome.sources) == {}, "a part of the tests is not kept as a result"


def test_an_earlier_runs_results_do_not_count_for_a_run_that_died(toy, tests, tmp_path, own_packages):
    settings = make_settings(tmp_path)
    assert run(toy, tests, settings).ok
    (tests / "conftest.py").write_text("import os\nos._exit(0)\n")
    outcome = run(toy, tests, settings)
    assert (outcome.ok, outcome.cases) == (False, ())
    assert "no results" in outcome.trouble


def test_a_version_that_cannot_be_had_does_not_stop_the_others(
    toy, tests, tmp_path, own_packages, monkeypatch
):
    def unreachable(*_args, **_options):
        raise WheelUnreachable("torch==9.0.0 could not be downloaded:\n  attempt 1: no")

    monkeypatch.setattr(battery_env, "get_wheel", unreachable)
    monkeypatch.setattr(battery_env, "_request", lambda *_a: None)
    asked = Asked(("9.0.0", "9.8.7"), {"9.8.7": toy}, tests=tests)
    first, second = run_battery(asked, make_settings(tmp_path), Silent(), date=TODAY)
    assert first.trouble == "not run: torch==9.0.0 could not be downloaded: attempt 1: no"
    assert second.ok


def test_a_python_with_another_torch_is_refused(toy, tests, tmp_path):
    asked = Asked(("9.8.6",), {"9.8.6": toy}, tests=tests)
    (outcome,) = run_battery(asked, make_settings(tmp_path), Silent(), date=TODAY)
    assert "has torch 9.8.7+toy" in outcome.trouble


def test_a_series_means_its_newest_release(monkeypatch):
    monkeypatch.setattr(proc, "run", lambda *_a, **_k: proc.Finished(LISTED, 0.1))
    assert resolve(["2.4.0", "2.15", "2.15.10"]) == ("2.4.0", "2.15.10")
    assert resolve(["2.15"], ["2.15.1", "2.4.0"]) == ("2.15.1",)


def test_without_a_list_the_newest_known_release_is_taken(monkeypatch):
    def fail(*_args, **_options):
        raise CommandFailed("no index")

    monkeypatch.setattr(proc, "run", fail)
    assert resolve(battery.VERSIONS) == ("2.4.0", "2.6.0", "2.13.0", "2.14.1", "2.15.0")
    monkeypatch.setattr(proc, "run", lambda *_a, **_k: proc.Finished("nothing of use", 0.1))
    assert resolve(["2.15"]) == ("2.15.0",)


def test_what_the_tests_need_has_the_projects_bounds_and_the_numpy_of_its_time():
    old, new = requirements("2.4.0", PYPROJECT), requirements("2.13.0+cpu", PYPROJECT)
    assert [word.partition(">")[0] for word in new] == ["hypothesis", "pytest", "pytest-timeout", "numpy"]
    assert old[:-1] == new[:-1]
    assert (old[-1], new[-1]) == ("numpy>=1.26,<2", "numpy>=1.26")


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
    assert get_packages(settings, held) == (folder, [])
    assert len(pip[0]) == 1
    assert pip[0][0][0] == held.python
    pip[1].append(True)
    assert get_packages(settings, held, ("pytest", "numpy<2"))[0] != folder
    remove_added(added, settings)
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
    for name in ("envs/torch-2.6.0-aaa-cp311", "envs/torch-2.6.0-bbb-cp311", "envs/tests-x", "envs/.locks"):
        (settings.cache / name).mkdir(parents=True)
    wheel = settings.cache / "wheels" / "torch-2.6.0-x.whl"
    wheel.parent.mkdir()
    wheel.write_bytes(b"x")
    remove_added(
        [wheel, settings.cache / "wheels" / "gone.sha256", settings.cache / "envs/torch-2.6.0-bbb-cp311"],
        settings,
    )
    left = {path.relative_to(settings.cache).as_posix() for path in settings.cache.glob("*/[!.]*")}
    assert left == {"envs/torch-2.6.0-aaa-cp311", "envs/tests-x"}


def test_the_digest_follows_the_tests(tests):
    before = sources_digest(tests)
    assert sources_digest(tests) == before
    (tests / "test_toy.py").write_text(GOOD + "\n")
    assert sources_digest(tests) != before


def cli(tmp_path, *arguments):
    console = Console(file=io.StringIO(), width=160, highlight=False)
    common = ["--cache", str(tmp_path / "cache"), "battery", "--out", str(tmp_path / "out")]
    code = main([*common, *arguments], console=console)
    return code, console.file.getvalue()


@pytest.fixture
def played(monkeypatch):
    """What run_battery is asked for; it answers that all went well except on the versions in the list."""
    from m8d_build.cli import battery as command
    from m8d_build.testing.results import PASSED, Case, Outcome

    asked, bad = [], []

    def play(what, _settings, _report, *, date):
        asked.append(what)
        case = Case("test_toy", "test_it", PASSED)
        return tuple(
            Outcome(v, date, "s", trouble="not run: no such wheel")
            if v in bad
            else Outcome(v, date, "s", f"{v}+cpu", "3.11.7", (case,))
            for v in what.versions
        )

    monkeypatch.setattr(command, "run_battery", play)
    monkeypatch.setattr(battery.proc, "run", lambda *_a, **_k: proc.Finished(LISTED, 0.1))
    return asked, bad


def test_without_arguments_all_versions_are_run(tmp_path, played):
    code, text = cli(tmp_path)
    assert code == 0
    assert played[0][0].versions == ("2.4.0", "2.6.0", "2.13.0", "2.14.1", "2.15.10")
    assert played[0][0].keep
    assert "2.15.10" in text


def test_a_version_that_was_not_run_ends_with_a_status_of_its_own(tmp_path, played):
    played[1].append("2.6.0")
    code, text = cli(tmp_path, "--torch", "2.4.0", "2.6.0")
    assert code == 42
    assert "torch 2.6.0: not run: no such wheel" in text
    assert "BehaviourFailed: torch 2.6.0: not run." in text


def test_json_is_for_programs(tmp_path, played):
    code, text = cli(tmp_path, "--torch", "2.4.0", "--json")
    assert code == 0
    assert json.loads(text)[0]["passed"] == 1


def test_the_page_names_the_versions_that_were_not_asked_for(tmp_path, played):
    page = tmp_path / "page.md"
    code, _ = cli(tmp_path, "--torch", "2.6.0", "2.13.0+cpu", "--write", str(page))
    assert code == 0
    text = page.read_text()
    assert "|  | torch 2.4.0 | torch 2.6.0 | torch 2.13.0+cpu | torch 2.14.1 | torch 2.15.10 |" in text
    assert text.count("not run: not asked for") == 3


def test_a_page_without_a_place_is_refused_before_anything_runs(tmp_path, played):
    page = tmp_path / "page.md"
    page.write_text("# Nothing here\n")
    assert cli(tmp_path, "--write", str(page))[0] == 31
    assert played[0] == []
    assert page.read_text() == "# Nothing here\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--torch", "new"],
        ["--torch", "2"],
        ["--python", "2.6.0"],
        ["--python", "2.15=/bin/python"],
        ["--torch", "2.4.0", "--python", "2.6.0=/bin/python"],
        ["--write", "page.md", "-k", "x"],
    ],
    ids=" ".join,
)
def test_wrong_arguments_are_refused(tmp_path, played, arguments):
    assert cli(tmp_path, *arguments)[0] == 2
    assert played[0] == []
