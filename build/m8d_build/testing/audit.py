"""Known vulnerabilities of what the extras and the groups of pyproject.toml resolve to: `nox -s lint`.

pip resolves, pip-audit asks PyPI's vulnerability service (or the one that PIP_AUDIT_VULNERABILITY_SERVICE and
PIP_AUDIT_OSV_URL name). A vulnerability fails, unless ``[tool.m8d.audit]`` accepts it with a reason and an
expiry. What cannot be asked, without a network for instance, is said and fails nothing.
"""

from __future__ import annotations

import datetime as dt
import json
import sys
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m8d_build import proc
from m8d_build.errors import BuildError, CheckFailed, CommandFailed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Accepted", "Known", "Verdict", "accepted", "audit", "judge", "pins", "requirements"]

LIMIT = 180.0
"""Seconds of each of the two programs; together they take 20."""


@dataclass(frozen=True)
class Accepted:
    """A vulnerability that is known and does no harm here.

    Attributes:
        id: as pip-audit names it, or one of its aliases ("PYSEC-2026-1", "CVE-2026-1", "GHSA-...").
        package: that has it.
        reason: why it does no harm.
        until: last day on which it is accepted; then it is looked at again.
    """

    id: str
    package: str
    reason: str
    until: dt.date


@dataclass(frozen=True)
class Known:
    """A vulnerability that the service knows.

    Attributes:
        package, version: that have it.
        ids: its names.
        fixed: versions without it.
    """

    package: str
    version: str
    ids: tuple[str, ...]
    fixed: tuple[str, ...]

    def __str__(self) -> str:
        mended = f"fixed in {', '.join(self.fixed)}" if self.fixed else "no release has a fix"
        return f"{self.package} {self.version}: {', '.join(self.ids)} ({mended})"


@dataclass(frozen=True)
class Verdict:
    """What an audit has found.

    Attributes:
        bad: lines, each a reason to fail.
        notes: lines about what was accepted, and what the service did not know.
    """

    bad: tuple[str, ...]
    notes: tuple[str, ...]


def requirements(project: Mapping[str, Any]) -> list[str]:
    """Return all that pyproject.toml asks for: the package, its extras, the groups, and what builds it."""
    table = project["project"]
    lists = [
        project["build-system"]["requires"],
        table.get("dependencies", []),
        *table.get("optional-dependencies", {}).values(),
        *project.get("dependency-groups", {}).values(),
    ]
    return sorted({each for some in lists for each in some if isinstance(each, str)})


def accepted(project: Mapping[str, Any]) -> list[Accepted]:
    """Read ``[[tool.m8d.audit.accepted]]``.

    Raises:
        CheckFailed: an entry lacks something, or has something else.
    """
    names = {each.name for each in fields(Accepted)}
    found = []
    for entry in project.get("tool", {}).get("m8d", {}).get("audit", {}).get("accepted", []):
        texts = {name: entry.get(name) for name in names - {"until"}}
        day = entry.get("until")
        if set(entry) != names or not all(isinstance(each, str) and each for each in texts.values()):
            raise _wrong(entry)
        if not isinstance(day, dt.date) or isinstance(day, dt.datetime):
            raise _wrong(entry)
        found.append(Accepted(**texts, until=day))
    return found


def _wrong(entry: object) -> BuildError:
    return CheckFailed(
        f"pyproject.toml accepts {entry!r}",
        rule="An accepted vulnerability has id, package, reason (texts) and until (a date, as in 2027-01-31)",
        next_step="Write all four",
    )


def pins(report: Mapping[str, Any]) -> list[str]:
    """Return the exact versions of pip's installation report; of local ones ("2.13.0+cpu") the release."""
    metadata = (each["metadata"] for each in report["install"])
    return sorted(f"{each['name']}=={each['version'].partition('+')[0]}" for each in metadata)


def judge(answer: Mapping[str, Any], excepted: Sequence[Accepted], today: dt.date) -> Verdict:
    """Judge pip-audit's answer, its form "json"."""
    bad, notes, unused = [], [], list(excepted)
    packages = answer["dependencies"]
    for known in (each for package in packages for each in _known(package)):
        entry = next(
            (each for each in excepted if each.id in known.ids and each.package == known.package), None
        )
        if entry in unused:
            unused.remove(entry)
        if entry is None:
            bad.append(str(known))
        elif entry.until < today:
            bad.append(f"{known}: it was accepted until {entry.until} ({entry.reason})")
        else:
            notes.append(f"{known}: accepted until {entry.until} ({entry.reason})")
    skipped = [each["name"] for each in packages if "skip_reason" in each]
    if skipped:
        some = ", ".join(sorted(skipped)[:5])
        notes.append(
            f"not audited: {len(skipped)} of {len(packages)} packages the service does not know ({some}...)"
        )
    else:  # else it may only not have been asked
        bad += [
            f"pyproject.toml accepts {each.id} of {each.package}, which is not found: remove it"
            for each in unused
        ]
    return Verdict(tuple(bad), tuple(notes))


def _known(package: Mapping[str, Any]) -> list[Known]:
    return [
        Known(
            package["name"],
            package["version"],
            (each["id"], *each.get("aliases", ())),
            tuple(each.get("fix_versions", ())),
        )
        for each in package.get("vulns", ())
    ]


def audit(project: Mapping[str, Any], today: dt.date) -> Verdict:
    """Resolve, ask, and judge.

    Raises:
        CheckFailed: the requirements exclude each other, or pyproject.toml accepts something in a wrong form.
    """
    excepted = accepted(project)
    with tempfile.TemporaryDirectory(prefix="m8d-audit-") as name:
        folder = Path(name)
        try:
            resolved = _resolve(requirements(project), folder)
            return judge(_ask(pins(resolved), folder), excepted, today)
        except CommandFailed as error:
            if "ResolutionImpossible" in error.tail:
                raise CheckFailed(
                    "what pyproject.toml asks for excludes itself",
                    rule="All extras and groups can be installed together",
                    next_step="See pip's last lines",
                    tail=error.tail,
                ) from error
            last = error.tail.strip().splitlines()[-1:] or [str(error)]
            return Verdict((), (f"not audited, as there is no answer: {last[0].strip()}",))


def _resolve(wanted: Sequence[str], folder: Path) -> dict[str, Any]:
    (folder / "wanted.txt").write_text("\n".join(wanted))
    command: list[str | Path] = [
        sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed",
        "--retries", "1", "--report", folder / "report.json", "-r", folder / "wanted.txt",
    ]  # fmt: skip
    proc.run(command, what="resolve what is audited", timeout=LIMIT)
    return _read(folder / "report.json")


def _ask(exact: Sequence[str], folder: Path) -> dict[str, Any]:
    (folder / "exact.txt").write_text("\n".join(exact))
    answer = folder / "answer.json"
    command: list[str | Path] = [
        sys.executable, "-m", "pip_audit", "--progress-spinner", "off", "--no-deps", "--disable-pip",
        "--format", "json", "--output", answer, "--aliases", "on", "-r", folder / "exact.txt",
    ]  # fmt: skip
    try:
        proc.run(command, what="ask for known vulnerabilities", timeout=LIMIT)
    except CommandFailed:  # 1 is also the status of one that has found some
        if not answer.exists() or not answer.stat().st_size:
            raise
    return _read(answer)


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))
