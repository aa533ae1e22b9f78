"""The traps of a toolchain that lives in a folder named build/; see docs and pyproject.toml."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import multiworld
from m8d_build.targets import tomllib

if TYPE_CHECKING:
    from email.message import Message

ROOT = Path(__file__).parents[3]
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
    assert "build/m8d_build/series/apply.py" in paths
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
        ROOT
        / PROJECT["tool"]["pytest"]["ini_options"]["testpaths"][0]
        / "unit"
        / "house"
        / Path(__file__).name
    ).exists()


def test_warnings_are_errors_and_mypy_is_strict():
    assert "error" in PROJECT["tool"]["pytest"]["ini_options"]["filterwarnings"]
    assert PROJECT["tool"]["mypy"]["strict"] is True
    assert {"multiworld", "build/m8d_build"} <= set(PROJECT["tool"]["mypy"]["files"])


def test_exceptions_from_rules_are_for_files_that_exist():
    """Each alternative of a pattern, too."""
    patterns = []
    for pattern in PROJECT["tool"]["ruff"]["lint"]["per-file-ignores"]:
        braces = re.search(r"\{(.*?)\}", pattern)
        names = braces[1].split(",") if braces else [""]
        patterns += [pattern.replace(braces[0], name) if braces else pattern for name in names]
    assert len(patterns) > 20
    assert [pattern for pattern in patterns if next(ROOT.glob(pattern), None) is None] == []


def test_the_package_itself_needs_nothing():
    # Python 3.11 and newer read TOML themselves.
    assert PROJECT["project"]["dependencies"] == ["tomli>=2.0; python_version < '3.11'"]
    assert PROJECT["project"]["requires-python"] == ">=3.10"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The folder of what is built from a copy; hatchling only, no network."""
    copy = tmp_path_factory.mktemp("house") / "copy"
    shutil.copytree(ROOT, copy, ignore=lambda _, names: HEAVY & set(names), symlinks=True)
    for arguments, project in ((["-d", "made"], copy), (["-t", "wheel", "-d", "../made"], copy / "alias")):
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", *arguments],
            cwd=project,
            check=True,
            capture_output=True,
            timeout=120,
        )
    return copy / "made"


@pytest.fixture(scope="module")
def built(made) -> tuple[set[str], set[str]]:
    """The names in the wheel and in the sdist."""
    (wheel,), (sdist,) = made.glob("m8d-*.whl"), made.glob("*.tar.gz")
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
    assert {name.split("/")[0].split("-")[0] for name in in_wheel} == {"multiworld", "m8d", "m8d.py"}
    assert not [name for name in in_wheel if "m8d_build" in name or "test" in name]


def test_the_sdist_has_the_toolchain_the_patches_and_the_tests(built):
    _, in_sdist = built
    toolchain = {str(path.relative_to(ROOT)) for path in (ROOT / "build" / "m8d_build").rglob("*.py")}
    assert toolchain <= in_sdist
    assert {f"patches/{name}" for name in patch_files()} <= in_sdist
    assert {
        "pyproject.toml",
        "alias/pyproject.toml",
        "m8d.py",
        "noxfile.py",
        "tests/unit/house/test_house.py",
        ".ci/run",
    } <= in_sdist
    assert not [name for name in in_sdist if "__pycache__" in name or name.endswith(".pyc")]


def metadata(wheel: Path) -> tuple[Message, list[str]]:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        return message_from_string(archive.read(name).decode()), names


def test_the_distribution_is_m8d_and_its_version_needs_no_pre(made):
    (wheel,) = made.glob("m8d-*.whl")
    said, _ = metadata(wheel)
    assert (said["Name"], said["Version"]) == ("m8d", multiworld.__version__)
    assert not Version(said["Version"]).is_prerelease
    assert Version(said["Version"]) > Version("0.2.3")
    assert said.get_all("Project-URL")
    assert all(len(url.partition(",")[0]) <= 32 for url in said.get_all("Project-URL"))  # indexes refuse more
    extras = ["etcd", "examples", "metrics", "otel", "ray", "secure", "sign", "ui", "web"]
    assert said.get_all("Provides-Extra") == extras
    pythons = {each.rpartition(":: ")[2] for each in said.get_all("Classifier") if "Python :: 3." in each}
    assert pythons == {"3.10", "3.11", "3.12", "3.13"}


def test_the_other_wheel_has_no_files_and_meets_what_others_require(made):
    (wheel,) = made.glob("multiworld-*.whl")
    said, names = metadata(wheel)
    assert (said["Name"], said["Version"]) == ("multiworld", multiworld.__version__)
    assert [name for name in names if ".dist-info/" not in name] == []
    (needed,) = (Requirement(text) for text in said.get_all("Requires-Dist") if "extra" not in text)
    assert needed.name == "m8d"
    assert needed.specifier.contains(multiworld.__version__)  # without pre-releases, as pip decides it
    assert Requirement("multiworld>=0.2.2").specifier.contains(said["Version"])


def test_pip_installs_both_for_who_requires_the_old_name(made, tmp_path):
    into = tmp_path / "site"
    subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", made, "--target", into,
            *(["--no-deps", "m8d"] if sys.version_info < (3, 11) else []), "multiworld>=0.2.2",
        ],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    code = f"import sys; sys.path.insert(0, {str(into)!r}); import multiworld; print(multiworld.__file__)"
    done = subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == str(into / "multiworld" / "__init__.py")
    assert {"m8d", "m8d-run", "m8d-post-setup"} <= {path.name for path in (into / "bin").iterdir()}


NAMED = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WRONG = re.compile(r"pip install [^\n`]*(?<![\w./-])multiworld(?![\w>.-])")


@pytest.mark.parametrize("page", NAMED, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_page_tells_to_install_the_other_package(page):
    said = [line for line in page.read_text().splitlines() if WRONG.search(line)]
    assert [line for line in said if "fetches Cisco's package" not in line] == []


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
