"""The contract battery on several torch versions, one after the other; a version that cannot be had is told, not skipped."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from m8d_build import proc
from m8d_build.errors import BuildError, CommandFailed, OutputUnwritable
from m8d_build.files.blobs import file_sha256
from m8d_build.settings import REPO_ROOT
from m8d_build.testing.environment import ask_torch, environment, packages_for, remove_added, requirements
from m8d_build.testing.results import FAILED, Outcome, from_json, read_junit, to_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from m8d_build.environments.venvs import Environment
    from m8d_build.progress import Reporter
    from m8d_build.settings import Settings

__all__ = [
    "LIMIT", "VERSIONS", "Asked", "earlier", "folder_of", "new_log", "resolve", "run_battery", "sources_digest",
    "told",
]  # fmt: skip

# Two numbers mean the newest release of that series.
VERSIONS = ("2.4.0", "2.6.0", "2.13.0", "2.14.1", "2.15")
NEWEST_KNOWN = {"2.15": "2.15.0"}  # where pip cannot list what there is
LIMIT = 2400.0  # seconds one version's tests may take
_POLL = 20.0  # seconds between two words on how far the tests are
_PERCENT = re.compile(r"\[ *(\d+)%\]")


@dataclass(frozen=True)
class Asked:
    """What to run.

    Attributes:
        versions: torch versions ("2.6.0"; "2.13.0+cpu" where an index has several builds).
        pythons: interpreters to use as they are, by version.
        match: pytest's -k; "" for all tests.
        limit: seconds one version's tests may take.
        keep: leave what this run downloads and installs in the cache.
        tests: the folder with the battery.
    """

    versions: tuple[str, ...]
    pythons: Mapping[str, Path] = field(default_factory=dict)
    match: str = ""
    limit: float = LIMIT
    keep: bool = True
    tests: Path = REPO_ROOT / "tests" / "contract"


def resolve(asked: Sequence[str], given: Sequence[str] = ()) -> tuple[str, ...]:
    """Return exact versions: "2.15" becomes the newest 2.15.x.

    Args:
        asked: versions, or series of two numbers.
        given: versions that settle a series without asking pip.
    """
    return tuple(dict.fromkeys(_exact(version, given) for version in asked))


def sources_digest(tests: Path) -> str:
    """Return a digest of what is tested and of the tests: results of other sources say nothing of these."""
    digest = hashlib.sha256()
    for folder in (REPO_ROOT / "multiworld", tests):
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder)}\0{file_sha256(path)}\n".encode())
    return digest.hexdigest()[:16]


def folder_of(settings: Settings) -> Path:
    """Return where logs, junit files and outcomes lie."""
    return settings.out / "battery"


def earlier(settings: Settings, sources: str) -> dict[str, Outcome]:
    """Return, by version, the outcomes that earlier runs left in the output folder, of the same sources."""
    found = {}
    for path in sorted(folder_of(settings).glob("torch-*.json")):
        outcome = from_json(path.read_text(encoding="utf-8"))
        if outcome is not None and outcome.sources == sources:
            found[outcome.torch] = outcome
    return found


def run_battery(asked: Asked, settings: Settings, report: Reporter, *, date: str) -> tuple[Outcome, ...]:
    """Run the battery on each version; that one cannot be had is an outcome as well.

    Writes ``torch-VERSION.log``, ``.xml`` and ``.json`` to the output folder; no JSON where only some of the tests
    were asked for.

    Args:
        asked: what to run.
        settings: cache and output folder.
        report: told of each step.
        date: today, UTC ("2026-11-20").

    Raises:
        OutputUnwritable: the output folder cannot be written.
    """
    sources = sources_digest(asked.tests)
    outcomes = []
    for version in asked.versions:
        log = new_log(folder_of(settings) / f"torch-{version}.log")
        blank = Outcome(version, date, sources)
        added: list[Path] = []
        try:
            outcome = _run_one(blank, asked, settings, report, log, added)
        except BuildError as exc:
            outcome = replace(blank, trouble=f"not run: {_why(exc)}")
        finally:
            if not asked.keep:
                remove_added(added, settings)
        report.note(f"torch {version}: {outcome.summary()}")
        if not asked.match:
            beside = log.with_suffix(".json.part")
            beside.write_text(to_json(outcome), encoding="utf-8")
            beside.replace(log.with_suffix(".json"))
        outcomes.append(outcome)
    return tuple(outcomes)


def _run_one(
    blank: Outcome, asked: Asked, settings: Settings, report: Reporter, log: Path, added: list[Path]
) -> Outcome:
    version = blank.torch
    with ExitStack() as stack:
        with report.step(f"torch {version}: environment"):
            given = asked.pythons.get(version)
            held = stack.enter_context(environment(version, given, settings, report, log=log, added=added))
            build, python, tag = ask_torch(held, version)
            needs = requirements(version, (REPO_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
            packages = packages_for(held, tag, needs, settings, log=log, added=added)
        with report.step(f"torch {version}: tests"), told(log, report):
            return _test(replace(blank, build=build, python=python), held, packages, asked, log)


def _test(blank: Outcome, held: Environment, packages: Path, asked: Asked, log: Path) -> Outcome:
    junit = log.with_suffix(".xml")
    junit.unlink(missing_ok=True)
    command: list[str | Path] = [
        held.python, "-m", "pytest", asked.tests, "-m", "not everyday", "-p", "no:cacheprovider", "--continue-on-collection-errors",
        f"--junitxml={junit}", *(["-k", asked.match] if asked.match else []),
    ]  # fmt: skip
    paths = (packages, REPO_ROOT / "build", REPO_ROOT)
    env = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONUNBUFFERED": "1"}
    began, failed = time.monotonic(), None
    try:
        proc.run(command, what="run the tests", log=log, cwd=REPO_ROOT, env=env, timeout=asked.limit)
    except CommandFailed as exc:  # the junit file says which tests failed, if that is all
        failed = exc
    outcome = replace(blank, seconds=time.monotonic() - began)
    try:
        outcome = replace(outcome, cases=read_junit(junit.read_text(encoding="utf-8")))
    except (OSError, ValueError) as exc:
        failed = failed or CommandFailed(f"pytest left no results: {exc}", log=log)
    if failed is not None and not outcome.count(FAILED):
        return replace(outcome, trouble=f"not to its end: {_why(failed)}")
    return outcome


@contextmanager
def told(log: Path, report: Reporter) -> Iterator[None]:
    """Say now and then how far the tests are."""
    ended = threading.Event()

    def tell() -> None:
        said = ""
        while not ended.wait(_POLL):
            found = _PERCENT.findall(proc.tail_of(log))
            if found and found[-1] != said:
                said = found[-1]
                report.note(f"{said} % of the tests")

    teller = threading.Thread(target=tell, name="m8d-battery-progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join(timeout=5.0)


def new_log(log: Path) -> Path:
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


def _exact(version: str, given: Sequence[str]) -> str:
    series = Version(version).release
    if len(series) > 2:
        return version
    settled = [v for v in given if Version(v).release[:2] == series]
    if settled:
        return max(settled, key=Version)
    # The Python that runs this: its pip lists what it could install.
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions", "torch"]
    try:
        listed = _listed(proc.run(command, what="list the versions of torch", timeout=120.0).stdout)
    except CommandFailed:
        listed = []
    of_series = [v for v in listed if v.release[:2] == series]
    return str(max(of_series)) if of_series else NEWEST_KNOWN.get(version, f"{version}.0")


def _listed(text: str) -> list[Version]:
    """Return the final releases pip listed, without those that have a local label."""
    line = next((line for line in text.splitlines() if line.startswith("Available versions:")), "")
    words = (word.strip() for word in line.partition(":")[2].split(","))
    return [v for v in map(_version, words) if v is not None and not v.is_prerelease and v.local is None]


def _version(word: str) -> Version | None:
    try:
        return Version(word)
    except InvalidVersion:
        return None


def _why(exc: BuildError) -> str:
    last = exc.tail.strip().splitlines()[-1:]
    return re.sub(r"\s+", " ", ": ".join([exc.value, *last])).strip()
