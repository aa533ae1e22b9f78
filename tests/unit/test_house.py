"""The traps of a toolchain that lives in a folder named build/; see docs and pyproject.toml."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from m8d_build.targets import tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEAVY = {".git", ".nox", ".venv", "out", "dist", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}


def test_gitignore_has_no_line_for_build():
    lines = (ROOT / ".gitignore").read_text().splitlines()
    rules = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    assert rules
    assert [rule for rule in rules if re.match(r"!?/?\**/?build\b", rule)] == []


def test_git_does_not_ignore_the_toolchain(tmp_path):
    """Asked of git itself, with the project's own rules and nobody else's."""
    shutil.copy(ROOT / ".gitignore", tmp_path)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    paths = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "build").rglob("*")
        if path.suffix in {".py", ".toml", ".txt", ".yml", ".yaml"}
    ]
    assert "build/m8d_build/apply.py" in paths
    asked = subprocess.run(
        ["git", "-c", "core.excludesFile=/dev/null", "check-ignore", "--no-index", "--", *paths],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (asked.returncode, asked.stdout) == (1, "")


def test_the_build_backend_is_hatchling():
    assert PROJECT["build-system"]["build-backend"] == "hatchling.build"
    assert not (ROOT / "setup.py").exists()
    assert not (ROOT / "setup.cfg").exists()


def test_build_is_a_plain_folder():
    assert not (ROOT / "build" / "__init__.py").exists()
    assert (ROOT / "build" / "m8d_build" / "__init__.py").is_file()


def test_no_tests_live_below_build():
    """Pytest does not look into folders named build: they would never run."""
    found = [
        path
        for path in (ROOT / "build").rglob("*.py")
        if path.name.startswith("test_") or path.name.endswith("_test.py")
    ]
    assert found == []
    assert not [
        path for path in (ROOT / "build").rglob("*") if path.is_dir() and path.name in {"test", "tests"}
    ]
    assert (
        ROOT / PROJECT["tool"]["pytest"]["ini_options"]["testpaths"][0] / "unit" / Path(__file__).name
    ).exists()


def test_warnings_are_errors_and_mypy_is_strict():
    assert "error" in PROJECT["tool"]["pytest"]["ini_options"]["filterwarnings"]
    assert PROJECT["tool"]["mypy"]["strict"] is True
    assert {"multiworld", "build/m8d_build"} <= set(PROJECT["tool"]["mypy"]["files"])


def test_the_package_itself_needs_nothing():
    # Python 3.11 and newer read TOML themselves.
    assert PROJECT["project"]["dependencies"] == ["tomli>=2.0; python_version < '3.11'"]
    assert PROJECT["project"]["requires-python"] == ">=3.10"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[set[str], set[str]]:
    """The names in the wheel and in the sdist, built from a copy; hatchling only, no network."""
    copy = tmp_path_factory.mktemp("house") / "copy"
    shutil.copytree(ROOT, copy, ignore=lambda _, names: HEAVY & set(names), symlinks=True)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", "made"],
        cwd=copy,
        check=True,
        capture_output=True,
        timeout=120,
    )
    (wheel,), (sdist,) = (copy / "made").glob("*.whl"), (copy / "made").glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    with tarfile.open(sdist) as tar:
        in_sdist = {name.partition("/")[2] for name in tar.getnames()}
    return in_wheel, in_sdist


def patch_files() -> set[str]:
    return {
        str(p.relative_to(ROOT / "patches"))
        for p in (ROOT / "patches").rglob("*")
        if p.suffix in {".patch", ".toml"} or p.name == "series"
    }


def test_the_wheel_has_the_package_and_the_patches(built):
    in_wheel, _ = built
    assert {"multiworld/__init__.py", "multiworld/py.typed", "multiworld/shim/marker.py"} <= in_wheel
    assert patch_files()
    assert {f"multiworld/_patches/{name}" for name in patch_files()} <= in_wheel
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in in_wheel)


def test_the_wheel_has_nothing_else(built):
    in_wheel, _ = built
    assert {name.split("/")[0].split("-")[0] for name in in_wheel} == {"multiworld"}
    assert not [name for name in in_wheel if "m8d_build" in name or "test" in name]


def test_the_sdist_has_the_toolchain_the_patches_and_the_tests(built):
    _, in_sdist = built
    toolchain = {str(path.relative_to(ROOT)) for path in (ROOT / "build" / "m8d_build").rglob("*.py")}
    assert toolchain <= in_sdist
    assert {f"patches/{name}" for name in patch_files()} <= in_sdist
    assert {"pyproject.toml", "noxfile.py", "tests/unit/test_house.py", ".ci/run"} <= in_sdist
    assert not [name for name in in_sdist if "__pycache__" in name or name.endswith(".pyc")]


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").iterdir()), ids=lambda path: path.name)
def test_scripts_are_thin_and_run(script):
    assert len(script.read_text().splitlines()) < 30
    done = subprocess.run(
        [script],
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "HOME": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "2.6.0: ok" in done.stdout
