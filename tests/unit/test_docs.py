"""What the documents say of versions, exit codes, commands and modules is what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from m8d_build import errors
from m8d_build.cli import commands
from m8d_build.settings import REPO_ROOT
from m8d_build.targets import Target, load_targets

README = (REPO_ROOT / "README.md").read_text(encoding="utf-8")
PATCHING = (REPO_ROOT / "docs" / "patching.md").read_text(encoding="utf-8")
PAGES = sorted(p for pattern in ("*.md", "docs/**/*.md", "patches/**/*.md") for p in REPO_ROOT.glob(pattern))
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


def test_the_readmes_table_of_versions_is_that_of_targets_toml() -> None:
    shown = [row for row in rows(README) if re.fullmatch(r"\d+\.\d+\.\d+", row[0])]
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
def test_links_between_documents_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name}: {target}"
