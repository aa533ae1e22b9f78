"""What the documents say of versions, exit codes, commands and modules is what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from m8d_build import errors
from m8d_build.cli import commands
from m8d_build.settings import REPO_ROOT
from m8d_build.targets import Target, load_targets
from m8d_build.testing import versions

README = (REPO_ROOT / "README.md").read_text(encoding="utf-8")
WHEELS = (REPO_ROOT / "docs" / "patched-wheels.md").read_text(encoding="utf-8")
PATCHING = (REPO_ROOT / "docs" / "patching.md").read_text(encoding="utf-8")
PAGES = sorted(p for pattern in ("*.md", "docs/**/*.md", "patches/**/*.md") for p in REPO_ROOT.glob(pattern))
VERSIONS = (REPO_ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
INSTALL = (REPO_ROOT / "docs" / "install.md").read_text(encoding="utf-8")
CONTRIBUTING = (REPO_ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
TOOLCHAIN = (REPO_ROOT / "docs" / "toolchain.md").read_text(encoding="utf-8")


def rows(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]


def pythons(target: Target) -> str:
    minors = sorted(int(wheel.filename.split("-")[2][3:]) for wheel in target.wheels)
    return ", ".join(f"3.{minor}" for minor in minors) or "-"


def test_the_table_of_versions_is_that_of_targets_toml() -> None:
    shown = [row for row in rows(WHEELS) if re.fullmatch(r"\d+\.\d+\.\d+", row[0])]
    expected = [
        [
            t.version,
            t.status.value,
            pythons(t),
            ", ".join(t.topics) or "-",
            ", ".join(t.defects) or "not looked for",
        ]
        for t in reversed(load_targets(REPO_ROOT / "patches").entries)
    ]
    assert shown == expected


def test_the_table_of_defects_names_what_versions_have_and_the_patches_that_end_them() -> None:
    shown = {
        row[0]: set(re.findall(r"`([a-z-]+)`", row[2]))
        for row in rows(WHEELS)
        if re.fullmatch(r"D\d", row[0])
    }
    entries = load_targets(REPO_ROOT / "patches").entries
    assert set(shown) == {defect for t in entries for defect in t.defects}
    assert {topic for topics in shown.values() for topic in topics} <= {
        topic for t in entries for topic in t.topics
    }


def test_readme_has_each_half_of_the_project_in_one_command() -> None:
    prepared = "python3 -m venv .venv && .venv/bin/pip install nox && .venv/bin/nox -s "
    lines = README.splitlines()
    for session in ("demo", "tests", "build-torch"):
        assert prepared + session in lines, session
    assert ".venv/bin/nox -s build-torch" in WHEELS.splitlines()


def test_the_versions_policy_names_what_is_supported_and_tested() -> None:
    project = REPO_ROOT.joinpath("pyproject.toml").read_text(encoding="utf-8")
    supported = {row[0]: row[1:] for row in rows(VERSIONS)}
    minors = re.findall(r"Python :: (3\.\d+)", project)
    assert supported["Python"][0] == ", ".join(minors)
    (first, last) = re.findall(r"\d\.\d+", supported["torch"][0])
    for version in versions.VERSIONS:
        assert version in supported["torch"][1]
    assert (versions.VERSIONS[0].rpartition(".")[0], versions.VERSIONS[-1]) == (first, last)
    for page in (README, VERSIONS, INSTALL):
        assert f"{first} to {last}" in page
    for page in (CONTRIBUTING, README):
        assert "docs/versions.md" in page


def test_every_exit_code_is_documented_and_no_other() -> None:
    shown = {int(row[0]): row[1] for row in rows(PATCHING) if row[0].isdigit()}
    classes = {getattr(errors, name) for name in errors.__all__} - {errors.BuildError}
    assert {0, 1, 2} | {c.exit_code for c in classes} == set(shown)
    for each in classes:
        assert f"`{each.__name__}`" in shown[each.exit_code]


def test_every_command_is_named() -> None:
    for name in commands():
        assert f"`{name}`" in PATCHING


def test_every_module_has_its_line() -> None:
    folder = REPO_ROOT / "build" / "m8d_build"
    modules = {
        path.relative_to(folder).with_suffix("").as_posix()
        for path in folder.rglob("*.py")
        if not path.stem.startswith("_") and not {"probes", "cli"} & set(path.parts)
    }
    named, room = set(), ""
    for row in rows(TOOLCHAIN):
        room = row[0].strip("`") or room
        named |= {f"{'' if room == 'top' else room}{name}" for name in re.findall(r"`([a-z_]+)`", row[1])}
    assert named - {"cli/configure_parser", "cli/execute"} == modules


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(REPO_ROOT).as_posix())
def test_sentences_name_their_subject(page: Path) -> None:
    """Rows of results are names of tests, in their words."""
    text = page.read_text(encoding="utf-8").partition("<!-- results: begin")[0]
    if page.name != "CHANGELOG.md":
        assert re.findall(r"\b(?:nobody|whoever)\b", text, re.IGNORECASE) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(REPO_ROOT).as_posix())
def test_links_between_documents_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name}: {target}"
