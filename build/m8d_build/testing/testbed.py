"""The test bed's tests, on the patched wheel last built and on official builds."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from packaging.version import Version

from m8d_build import proc
from m8d_build.check.subject import read_subject
from m8d_build.environments.venvs import Environments
from m8d_build.errors import BehaviourFailed, CommandFailed, OutputUnwritable
from m8d_build.settings import REPO_ROOT
from m8d_build.testing.environment import ask_torch, environment, packages_for, remove_added, requirements
from m8d_build.testing.results import FAILED, PASSED, SKIPPED, read_junit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from m8d_build.environments.venvs import Environment
    from m8d_build.progress import Reporter
    from m8d_build.settings import Settings
    from m8d_build.testing.results import Case

__all__ = [
    "LIMIT",
    "STEP_PATCHED",
    "STEP_TESTS",
    "TESTS",
    "VERSIONS",
    "Asked",
    "Ran",
    "run_testbed",
    "step_stock",
]

VERSIONS = ("2.14.1",)  # the newest whose `nccl` is the ProcessGroupNCCL that the patches are for
TESTS = REPO_ROOT / "tests" / "testbed"
GPU_TESTS = REPO_ROOT / "tests" / "gpu"  # of `nox -s gpu`; the test bed stands in for hardware
LIMIT = 3000.0  # seconds that the tests of a build may take; on two free cores it is an eighth of that
AT_ONCE = 2  # builds
STEP_PATCHED = "the patched wheel's environment"
STEP_TESTS = "tests"
_POLL = 20.0  # seconds between two words on how far the tests are
_PERCENT = re.compile(r"\[ *(\d+)%\]")


@dataclass(frozen=True)
class Asked:
    """What to run.

    Attributes:
        beds: interpreters to use as they are, by name; if there are some, nothing is made.
        wheel: the patched wheel, installed for this run alone; None for none.
        versions: official builds, whose environments are kept in the cache.
        match: pytest's -k; "" for all tests.
        limit: seconds that the tests of a build may take.
        keep: leave what this run downloads and installs in the cache.
        tests: the folder with the tests; with the test bed's own come those of `nox -s gpu`.
    """

    beds: Mapping[str, Path]
    wheel: Path | None = None
    versions: tuple[str, ...] = VERSIONS
    match: str = ""
    limit: float = LIMIT
    keep: bool = True
    tests: Path = TESTS


@dataclass(frozen=True)
class Ran:
    """What came of it.

    Attributes:
        builds: the names of the builds, in order.
        cases: each test.
        seconds: of the tests alone.
        log: what pytest said, of all builds.
    """

    builds: tuple[str, ...]
    cases: tuple[Case, ...]
    seconds: float
    log: Path

    def count(self, verdict: str) -> int:
        """Return how many tests had a verdict."""
        return sum(case.verdict == verdict for case in self.cases)

    def summary(self) -> str:
        """Return "12 passed, 0 failed, 3 skipped"."""
        return ", ".join(f"{self.count(verdict)} {verdict}" for verdict in (PASSED, FAILED, SKIPPED))


def step_stock(version: str) -> str:
    """Return what the step is called that makes an official build's environment."""
    return f"torch {version}: environment"


def run_testbed(asked: Asked, settings: Settings, report: Reporter) -> Ran:
    """Make the builds, run the tests on them, and leave the cache as it should be.

    Writes ``testbed/NAME.log`` and ``NAME.xml`` for each build, and ``testbed.log``, to the output folder.

    Raises:
        BehaviourFailed: a test failed, or the tests did not come to their end.
        BuildError: a build cannot be had; see ``get_wheel``, ``Environments.kept`` and ``read_subject``.
        OutputUnwritable: the output folder cannot be written.
    """
    log = _new_log(settings.out / "testbed" / "testbed.log")
    added: list[Path] = []
    try:
        with (
            _builds(asked, settings, report, log, added) as (beds, packages),
            report.step(STEP_TESTS),
        ):
            return _test(asked, beds, packages, log, report)
    finally:
        if not asked.keep:
            remove_added(added, settings, report)


@contextmanager
def _builds(
    asked: Asked, settings: Settings, report: Reporter, log: Path, added: list[Path]
) -> Iterator[tuple[dict[str, Path], Path | None]]:
    """Hold the builds: their interpreters by name, and a folder with what ranks need beyond torch."""
    if asked.beds:
        yield dict(asked.beds), None
        return
    made: dict[str, Path] = {}
    packages = None
    with ExitStack() as stack:

        @cache
        def official(version: str) -> tuple[Environment, Path]:
            held = stack.enter_context(environment(version, None, settings, report, log=log, added=added))
            _, _, tag = ask_torch(held, version)
            needs = requirements(version, (REPO_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
            return held, packages_for(held, tag, needs, settings, log=log, added=added)

        if asked.wheel is not None:
            with report.step(STEP_PATCHED):
                subject = read_subject(asked.wheel)
                base, packages = official(Version(subject.marker.torch).public)
                fresh = Environments(settings.cache / "envs").fresh(subject.recipe, base=base, log=log)
                made[f"patched-{subject.marker.torch}"] = stack.enter_context(fresh).python
        for version in asked.versions:
            with report.step(step_stock(version)):
                held, packages = official(Version(version).public)
                made[f"stock-{Version(version).public}"] = held.python
        yield made, packages


def command(asked: Asked, name: str, python: Path, packages: Path | None, junit: Path) -> list[str | Path]:
    """Return how pytest is started for one build."""
    return [
        sys.executable, "-m", "pytest", asked.tests, *([GPU_TESTS] if asked.tests == TESTS else []),
        "-p", "no:cacheprovider",
        f"--junitxml={junit}",
        f"--bed={name}={python}", *([f"--bed-path={packages}"] if packages is not None else []),
        *(["-k", asked.match] if asked.match else []),
    ]  # fmt: skip


def _test(asked: Asked, beds: Mapping[str, Path], packages: Path | None, log: Path, report: Reporter) -> Ran:
    """Run the tests of each build in a process of its own, some side by side: most of a test is waiting."""
    began, cancel = time.monotonic(), threading.Event()
    logs = {name: _new_log(log.with_name(f"{name}.log")) for name in beds}
    with ExitStack() as stack:
        for each in logs.values():
            stack.enter_context(_told(each, report))
        pool = stack.enter_context(ThreadPoolExecutor(AT_ONCE))
        running = {
            name: pool.submit(_test_one, asked, name, python, packages, logs[name], cancel)
            for name, python in beds.items()
        }
        try:
            failed = {name: error for name, each in running.items() if (error := each.result()) is not None}
        except BaseException:
            cancel.set()
            pool.shutdown(cancel_futures=True)
            raise
    with log.open("ab") as whole:
        for each in logs.values():
            whole.write(each.read_bytes())
    cases = tuple(case for each in logs.values() for case in _cases(each.with_suffix(".xml")))
    ran = Ran(tuple(beds), cases, time.monotonic() - began, log)
    if failed:
        first = next(iter(failed.values()))
        raise BehaviourFailed(
            ran.summary() if ran.count(FAILED) else f"the tests came to no good end: {first.value}",
            rule="every test of the test bed passes, or is skipped for a reason, on every build",
            next_step="Look at the log",
            log=log,
            tail="\n".join(f"{name}:\n{error.tail}" for name, error in failed.items()),
        ) from first
    return ran


def _test_one(
    asked: Asked, name: str, python: Path, packages: Path | None, log: Path, cancel: threading.Event
) -> CommandFailed | None:
    junit = log.with_suffix(".xml")
    junit.unlink(missing_ok=True)
    env = {"PYTHONPATH": os.pathsep.join(map(str, (REPO_ROOT / "build", REPO_ROOT))), "PYTHONUNBUFFERED": "1"}
    try:
        proc.run(
            command(asked, name, python, packages, junit), what="run the tests", log=log, cwd=REPO_ROOT,
            env=env, timeout=asked.limit, cancel=cancel,
        )  # fmt: skip
    except CommandFailed as exc:
        return exc
    return None


def _cases(junit: Path) -> tuple[Case, ...]:
    try:
        cases: Sequence[Case] = read_junit(junit.read_text(encoding="utf-8"), "testbed")
    except (OSError, ValueError):
        return ()
    return tuple(cases)


@contextmanager
def _told(log: Path, report: Reporter) -> Iterator[None]:
    """Say now and then how far the tests are."""
    ended = threading.Event()

    def tell() -> None:
        said = ""
        while not ended.wait(_POLL):
            found = _PERCENT.findall(proc.tail_of(log))
            if found and found[-1] != said:
                said = found[-1]
                report.note(f"{said} % of the tests")

    teller = threading.Thread(target=tell, name="m8d-tests-progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join(timeout=5.0)


def _new_log(log: Path) -> Path:
    """Return a log's path, the file made and empty.

    Raises:
        OutputUnwritable: it cannot be.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")
    except OSError as exc:
        raise OutputUnwritable(
            f"{log} cannot be written: {exc.strerror}",
            rule="what the tests say is logged there",
            next_step="Name another folder with --out",
        ) from exc
    return log
