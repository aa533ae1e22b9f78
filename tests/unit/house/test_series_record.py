"""When a series besides the default one is due in CI: unless it is on record for the code that there is now."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import series

from m8d_build.targets import Status, load_targets

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[3]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in (
        "multiworld/shim/loader.py", "multiworld/provenance/sbom.py", "multiworld/__init__.py",
        "multiworld/errors.py", "multiworld/world.py",
        "build/m8d_build/overlay/a.py", "build/m8d_build/notes.md", "build/m8d_build/full/e.py",
        "build/m8d_build/cli/full.py", "build/m8d_build/cli/fetch.py", "build/m8d_build/cli/overlay.py",
        "tests/testbed/bed/b.py",
        "tests/testbed/src/c.cpp", "tests/testbed/programs/d.py", "tests/testbed/conftest.py",
        "tests/testbed/pairkit.py", "tests/testbed/test_patches_ends.py", "tests/testbed/test_worlds.py",
        "patches/targets.toml", "patches/v2.6.0/series", "patches/v2.6.0/0001-a.patch", "patches/v2.9.1/series",
    ):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    return tmp_path


@pytest.fixture
def due(project: Path) -> Callable[[str], str]:
    return lambda version: series.due(version, project / "record.json", project)


def test_a_series_is_due_until_it_is_on_record(project, due):
    assert due("2.6.0") == due("2.9.1") == ""
    series.record("2.6.0", project / "record.json", project)
    assert re.fullmatch(r"series 2\.6\.0: built .* on 20\d\d-\d\d-\d\d \(nox -s series\)", due("2.6.0"))
    assert due("2.9.1") == ""
    series.record("2.9.1", project / "record.json", project)
    assert due("2.6.0")


@pytest.mark.parametrize(
    "name",
    [
        "build/m8d_build/overlay/a.py", "build/m8d_build/overlay/full.py", "build/m8d_build/cli/overlay.py",
        "tests/testbed/bed/b.py", "tests/testbed/src/c.cpp", "tests/testbed/programs/d.py", "tests/testbed/conftest.py", "tests/testbed/pairkit.py",
        "tests/testbed/test_patches_ends.py", "patches/targets.toml", "patches/v2.6.0/series",
        "patches/v2.6.0/0001-a.patch", "patches/v2.6.0/0002-b.patch", "multiworld/shim/loader.py",
        "multiworld/provenance/sbom.py", "multiworld/__init__.py", "multiworld/errors.py",
    ],
)  # fmt: skip
def test_it_is_due_again_after_a_change_of_what_it_is_made_from_or_shown_with(project, due, name):
    series.record("2.6.0", project / "record.json", project)
    (project / name).write_text("2")
    assert due("2.6.0") == ""


@pytest.mark.parametrize(
    "name",
    [
        "build/m8d_build/notes.md",
        "build/m8d_build/full/e.py",
        "build/m8d_build/full/new.py",
        "build/m8d_build/cli/full.py",
        "build/m8d_build/cli/fetch.py",
        "tests/testbed/test_worlds.py",
        "patches/v2.9.1/series",
        "multiworld/world.py",
    ],
)
def test_it_is_not_due_after_other_changes(project, due, name):
    series.record("2.6.0", project / "record.json", project)
    (project / name).write_text("2")
    assert due("2.6.0")


def test_what_the_toolchain_takes_from_the_package_counts():
    """It writes the loader, the marker and statements into wheels, and reads them."""
    found = set()
    for path in (ROOT / "build" / "m8d_build").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "multiworld":
                found.add(str(node.module))
            elif isinstance(node, ast.Import):
                found |= {each.name for each in node.names if each.name.split(".")[0] == "multiworld"}
    counted = ("multiworld.provenance", "multiworld.shim")
    assert {each for each in found if not each.startswith(counted)} <= {"multiworld", "multiworld.errors"}
    assert {"multiworld/provenance", "multiworld/shim"} <= {*series._FOLDERS}
    assert {"multiworld/__init__.py", "multiworld/errors.py"} <= {*series._FILES}


def test_what_does_not_count_is_there_and_nothing_that_counts_uses_it():
    left_out = {ROOT / name for name in series._LEFT_OUT}
    assert all(path.exists() for path in left_out)
    for path in (ROOT / "build" / "m8d_build").rglob("*.py"):
        if not left_out & {path, *path.parents}:
            assert not re.search(
                r"m8d_build\.((cli\.)?full|cli\.fetch)\b", path.read_text(encoding="utf-8")
            ), path


def test_ci_and_nox_have_all_series_but_the_default_one():
    targets = load_targets(ROOT / "patches")
    verified = {each.version for each in targets if each.status is Status.VERIFIED}
    assert {*series.OTHERS, targets.newest_verified("cp311").version} == verified
    assert f"others=({' '.join(series.OTHERS)})" in (ROOT / ".ci" / "run").read_text()
    listed = ", ".join(f'"{each}"' for each in series.OTHERS)
    assert f"session.posargs or [{listed}]" in (ROOT / "noxfile.py").read_text()


def test_the_command_says_what_is_not_due(capsys, monkeypatch):
    monkeypatch.setattr(series, "due", lambda version: f"series {version}: built" * (version == "2.6.0"))
    assert series.main(["due", "2.6.0"]) == series.NOT_DUE
    assert capsys.readouterr().out == "series 2.6.0: built\n"
    assert series.main(["due", "2.9.1"]) == 0
