"""What `nox -s lint` says of known vulnerabilities: failing, accepted, expired, not asked."""

from __future__ import annotations

import datetime as dt
import json
import sys

import pytest

from m8d_build import proc
from m8d_build.cli import audit as command
from m8d_build.cli import main
from m8d_build.errors import CheckFailed, CommandFailed
from m8d_build.settings import REPO_ROOT
from m8d_build.testing import audit
from m8d_build.testing.audit import Accepted

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TODAY = dt.date(2026, 6, 1)
PROJECT = {"build-system": {"requires": ["b>=1"]}, "project": {"dependencies": ["a>=1"]}}
VULN = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["1.1"], "description": ""}
SOUND = {"name": "good", "version": "2", "vulns": []}
BAD = {"name": "bad", "version": "1.0", "vulns": [VULN]}
UNKNOWN = {"name": "own", "skip_reason": "not found on PyPI"}


def judged(*packages, accepted=()):
    return audit.judge({"dependencies": packages}, accepted, TODAY)


def entry(until, name="CVE-1", package="bad"):
    return Accepted(name, package, "it is not reached", until)


def test_nothing_known_is_good():
    assert judged(SOUND) == audit.Verdict((), ())


def test_a_known_vulnerability_fails_and_says_what_mends_it():
    assert judged(SOUND, BAD).bad == ("bad 1.0: PYSEC-1, CVE-1 (fixed in 1.1)",)


def test_one_without_a_fix_fails_too():
    (line,) = judged({**BAD, "vulns": [{**VULN, "fix_versions": []}]}).bad
    assert "no release has a fix" in line


@pytest.mark.parametrize("name", ["PYSEC-1", "CVE-1"])
def test_an_accepted_one_is_a_note_until_its_last_day(name):
    found = judged(BAD, accepted=[entry(TODAY, name)])
    assert found.bad == ()
    assert "accepted until 2026-06-01 (it is not reached)" in found.notes[0]


def test_an_expired_one_fails():
    (line,) = judged(BAD, accepted=[entry(TODAY - dt.timedelta(1))]).bad
    assert "it was accepted until 2026-05-31" in line


def test_it_is_accepted_of_its_package_alone():
    assert judged(BAD, UNKNOWN, accepted=[entry(TODAY, package="good")]).bad


def test_an_entry_that_is_not_needed_any_more_fails():
    (line,) = judged(SOUND, accepted=[entry(TODAY)]).bad
    assert "remove it" in line
    assert judged(SOUND, UNKNOWN, accepted=[entry(TODAY)]).bad == (), "the service may not have been asked"


def test_what_the_service_does_not_know_is_said_and_fails_nothing():
    found = judged(SOUND, UNKNOWN)
    assert found.bad == ()
    assert found.notes == ("not audited: 1 of 2 packages the service does not know (own...)",)


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": "X"},
        {"id": "X", "package": "p", "reason": "", "until": TODAY},
        {"id": "X", "package": "p", "reason": "r", "until": "2026-01-01"},
        {"id": "X", "package": "p", "reason": "r", "until": dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)},
        {"id": "X", "package": "p", "reason": "r", "until": TODAY, "why": "more"},
    ],
)
def test_an_entry_has_all_four_and_nothing_else(wrong):
    with pytest.raises(CheckFailed, match="id, package, reason"):
        audit.accepted({"tool": {"m8d": {"audit": {"accepted": [wrong]}}}})


def test_this_repository_is_read():
    project = tomllib.loads((REPO_ROOT / "pyproject.toml").read_text())
    wanted = audit.requirements(project)
    for part in ("hatchling", "urllib3", "ray", "mypy", "mkdocs", "pip-audit", "playwright", "tomli"):
        assert any(each.startswith(part) for each in wanted), part
    assert all(each.reason for each in audit.accepted(project))


def test_local_versions_are_audited_as_their_release():
    report = {"install": [{"metadata": {"name": "torch", "version": "2.13.0+cpu"}}]}
    assert audit.pins(report) == ["torch==2.13.0"]


# -- the two programs


class Programs:
    """In the place of pip and pip-audit."""

    def __init__(self, pip="", asked="", answer=None):
        self.pip, self.asked, self.answer = pip, asked, answer

    def __call__(self, command, *, what, timeout):
        path = command[command.index("--report" if "pip" in command else "--output") + 1]
        if "pip" in command:
            if not self.pip:
                path.write_text(json.dumps({"install": [{"metadata": {"name": "bad", "version": "1.0"}}]}))
            failed = self.pip
        else:
            wanted = command[command.index("-r") + 1].read_text()
            assert wanted == "bad==1.0"
            if self.answer is not None:
                path.write_text(json.dumps(self.answer))
            failed = self.asked
        if failed:
            raise CommandFailed(f"{what} failed", tail=failed)
        return proc.Finished("", 0.0)


def audited(monkeypatch, **programs):
    monkeypatch.setattr(proc, "run", Programs(**programs))
    return audit.audit(PROJECT, TODAY)


def test_found_ones_are_read_although_the_program_fails_then(monkeypatch):
    assert audited(monkeypatch, asked="Found 1", answer={"dependencies": [BAD]}).bad


@pytest.mark.parametrize("failing", [{"pip": "x\nno route to host\n"}, {"asked": "x\nno route to host\n"}])
def test_without_a_network_it_says_so_and_fails_nothing(monkeypatch, failing):
    found = audited(monkeypatch, **failing)
    assert found == audit.Verdict((), ("not audited, as there is no answer: no route to host",))


def test_requirements_that_exclude_each_other_fail(monkeypatch):
    with pytest.raises(CheckFailed, match="excludes itself"):
        audited(monkeypatch, pip="ERROR: ResolutionImpossible: for help visit ...")


@pytest.mark.parametrize(
    ("verdict", "code", "said"),
    [
        (((), ()), 0, "audit: no known vulnerability"),
        (((), ("n",)), 0, "audit: n"),
        ((("b",), ()), CheckFailed.exit_code, "audit: b"),
    ],
)
def test_the_status_is_of_what_is_bad(monkeypatch, capsys, verdict, code, said):
    monkeypatch.setattr(command, "audit", lambda *_: audit.Verdict(*verdict))
    assert main(["audit"]) == code
    assert capsys.readouterr().out.strip() == said
