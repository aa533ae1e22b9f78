"""The version matrix: results per torch kept as JSON, and the page made from them.

``nox -s tests-torch`` runs the tests. It takes this module without the toolchain's packages: standard library
only.
"""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from m8d_build.files.blobs import file_sha256
from m8d_build.files.digests import ROOT
from m8d_build.testing.page import put_into, render
from m8d_build.testing.results import FAILED, Outcome, condensed, from_json, read_junit, repeated, to_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = [
    "ASK",
    "LIMIT",
    "TESTS",
    "VERSIONS",
    "Run",
    "check_page",
    "columns",
    "matches",
    "sources_digest",
    "write_page",
]

# Two numbers mean the newest release of that series.
VERSIONS = ("2.4.0", "2.6.0", "2.13.0", "2.14.1", "2.15")
TESTS = ROOT / "tests" / "contract"
KITS = ROOT / "tests" / "kits" / "contract"  # what those tests share
LIMIT = 7200  # seconds that the tests of a version may take; it was 2,800 beside those of another one
ASK = (
    "import json, platform, sys, torch; "
    "print(json.dumps([torch.__version__, platform.python_version(), sys.implementation.cache_tag]))"
)
"""A program that says which torch its Python has: [build, Python's version, Python's tag]."""


class Run:
    """The tests on one version. Whatever comes of it is an outcome, kept in ``folder`` as JSON.

    Args:
        version: one of `VERSIONS`.
        folder: where junit files and records lie; made if it is not there.
        tests: the folder with the tests.
        again: run only the tests that failed in the last run, and keep what passes now beside the rest of it.

    Attributes:
        failed: pytest's names of those tests.

    Raises:
        ValueError: there is nothing that could be run again.
    """

    def __init__(self, version: str, folder: Path, *, tests: Path = TESTS, again: bool = False) -> None:
        self.version = version
        self._tests = tests
        self._record = folder / f"torch-{version}.json"
        self._junit = folder / f"torch-{version}{'-again' if again else ''}.xml"
        self._blank = Outcome(version, today(), sources_digest(tests))
        self._first = self._whole() if again else None
        cases = self._first.cases if self._first else ()
        self.failed = [f"{tests / case.file}.py::{case.name}" for case in cases if case.verdict == FAILED]
        folder.mkdir(parents=True, exist_ok=True)
        self._junit.unlink(missing_ok=True)  # of an earlier run

    def _whole(self) -> Outcome:
        kept = from_json(self._record.read_text(encoding="utf-8")) if self._record.is_file() else None
        if kept is None or kept.trouble:
            raise ValueError(f"torch {self.version} has no run to its end here that could be repeated")
        if kept.sources != self._blank.sources:
            raise ValueError(f"what was run on torch {self.version} has changed since: run all of it")
        return kept

    def command(self, more: Sequence[str] = (), limit: int = LIMIT) -> list[str]:
        """Return what comes after the interpreter's name; ``more`` goes to pytest."""
        tests = [str(self._tests)] if self._first is None else self.failed
        return [
            "-m", "pytest", *tests, "-m", "not everyday", "-p", "no:cacheprovider",
            "--continue-on-collection-errors",
            f"--session-timeout={limit}", f"--junitxml={self._junit}", *more,
        ]  # fmt: skip

    def missing(self, why: str) -> Outcome:
        """Record that the tests were not run: this torch cannot be had."""
        if self._first is not None:
            return replace(self._first, trouble=f"not run again: {why}")
        return self._kept(replace(self._blank, trouble=f"not run: {why}"))

    def done(
        self, said: str, seconds: float, *, good: bool, whole: bool = True, limit: int = LIMIT
    ) -> Outcome:
        """Record what came of the tests.

        Args:
            said: what `ASK` printed.
            seconds: they took.
            good: pytest ended with 0.
            whole: all tests were asked for; an outcome of some of them is not kept.
            limit: what `command` was given.
        """
        build, python, _ = json.loads(said.splitlines()[-1])
        if self._first is not None and self._first.build != build:
            return replace(self._first, trouble=f"not run again: this is torch {build}")
        outcome = replace(
            self._blank, torch=build.partition("+")[0], build=build, python=python, seconds=seconds
        )
        try:
            outcome = replace(
                outcome, cases=read_junit(self._junit.read_text(encoding="utf-8"), self._tests.name)
            )
        except (OSError, ValueError) as exc:
            outcome = replace(outcome, trouble=f"not to its end: pytest left no results: {exc}")
        if self._first is not None:
            return self._kept(repeated(self._first, outcome.cases))
        if not good and not outcome.trouble:
            # pytest's code for tests that were cut off is that for tests that failed.
            if seconds >= limit:
                outcome = replace(outcome, trouble=f"not to its end: cut off after {limit} s")
            elif not outcome.count(FAILED):
                outcome = replace(outcome, trouble="not to its end: pytest failed, and none of its tests did")
        return self._kept(outcome) if whole else outcome

    def _kept(self, outcome: Outcome) -> Outcome:
        beside = self._record.with_suffix(".json.part")
        beside.write_text(to_json(outcome), encoding="utf-8")
        beside.replace(self._record)
        return outcome


def matches(version: str, said: str) -> bool:
    """Return whether a torch that answered `ASK` is the version: "2.15" is every 2.15.x."""
    return _is_of(version, json.loads(said.splitlines()[-1])[0].partition("+")[0])


def _is_of(version: str, build: str) -> bool:
    return build.split(".")[: len(version.split("."))] == version.split(".")


def columns(folder: Path, page: Path) -> list[Outcome]:
    """Return the last run of each of `VERSIONS` that came to its end, condensed.

    Each column says of which sources it is: a run takes an hour, and not all versions are run at once.
    What the page has of a later day stays: it was run elsewhere.

    Args:
        folder: with the records of `Run`.
        page: the page on which results of earlier runs are; they are kept beside it.
    """
    before = _kept_beside(page)
    found = []
    for version in VERSIONS:
        path = folder / f"torch-{version}.json"
        new = from_json(path.read_text(encoding="utf-8")) if path.is_file() else None
        old = next((each for each in before if _is_of(version, each.torch)), None)
        if new is not None and (old is None or (not new.trouble and new.date >= old.date)):
            found.append(condensed(new))
        else:
            found.append(old or Outcome(version, today(), sources_digest(), trouble="not run: not asked for"))
    return found


def _kept_beside(page: Path) -> list[Outcome]:
    path = page.with_suffix(".json")
    if not path.is_file():
        return []
    found = (from_json(json.dumps(each)) for each in json.loads(path.read_text(encoding="utf-8")))
    return [each for each in found if each is not None]


def check_page(page: Path) -> None:
    """Check that results can be put into a page.

    Raises:
        ValueError: the page has no place for them.
    """
    put_into(page.read_text(encoding="utf-8") if page.exists() else None, "")


def write_page(page: Path, outcomes: Sequence[Outcome]) -> None:
    """Put the outcomes into a page, one column each; those of versions that were run are kept beside it.

    Raises:
        ValueError: the page has no place for them.
        OSError: it cannot be written.
    """
    before = page.read_text(encoding="utf-8") if page.exists() else None
    machine = f"{platform.system()} {platform.machine()}, CPU only (gloo)"
    text = put_into(before, render(outcomes, machine=machine))
    run = [json.dumps(json.loads(to_json(condensed(each)))) for each in outcomes if each.cases]
    kept = "[\n" + ",\n".join(run) + "\n]\n"  # a line for each version
    for path, content in ((page.with_suffix(".json"), kept), (page, text)):
        beside = path.with_name(f".{path.name}.part")
        beside.write_text(content, encoding="utf-8")
        beside.replace(path)


def sources_digest(tests: Path = TESTS) -> str:
    """Return a digest of what is tested and of the tests."""
    digest = hashlib.sha256()
    for folder in (ROOT / "multiworld", tests, KITS):
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder)}\0{file_sha256(path)}\n".encode())
    return digest.hexdigest()[:16]


def today() -> str:
    """Return the day, UTC ("2026-11-20")."""
    return datetime.now(timezone.utc).date().isoformat()
