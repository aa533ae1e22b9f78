"""The import name is also that of a package on PyPI: who finds it, and what is said."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from multiworld.cli import doctor
from multiworld.shim.clash import find

ROOT = Path(__file__).parents[3]
THEIRS = {
    "multiworld/__init__.py": "raise SystemExit('theirs was imported')\n",
    "multiworld/manager.py": "theirs = True\n",
    "multiworld/post_setup.py": "",
    "multiworld/init.txt": "false",
}


def install(site: Path, files: dict[str, str], version: str) -> None:
    """Put a distribution `multiworld` into a folder as pip does: last come, last written."""
    rows = []
    for name, text in files.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(text)}\n")
    info = site / f"multiworld-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: multiworld\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(rows) + f"{info.name}/RECORD,,\n")


def ours(site: Path) -> None:
    site.mkdir(exist_ok=True)
    shutil.copytree(
        ROOT / "multiworld",
        site / "multiworld",
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copy(ROOT / "m8d.py", site)


def python(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(site)!r})\n{arguments[0]}"
    return subprocess.run(
        [sys.executable, "-I", "-B", *arguments[1:], "-c", code],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


@pytest.fixture
def site(tmp_path):
    ours(tmp_path / "site")
    return tmp_path / "site"


def test_importing_says_nothing_where_there_is_nothing(site):
    done = python(site, "import multiworld; print(multiworld.__version__)", "-W", "error")
    assert (done.returncode, done.stderr) == (0, "")


def test_our_own_wheel_of_that_name_has_no_files_and_is_no_clash(site):
    install(site, {}, "1.0.0")
    assert python(site, "import multiworld", "-W", "error").returncode == 0
    assert find(site / "multiworld") is None


def test_importing_warns_of_theirs_installed_before(tmp_path):
    site = tmp_path / "site"
    install(site, THEIRS, "0.2.3")
    ours(site)
    done = python(site, "import multiworld; print(multiworld.__version__)")
    assert done.returncode == 0
    for text in (
        "RuntimeWarning", f"'multiworld' 0.2.3 is installed in {site}", "pip uninstall multiworld", "m8d",
        "<string>:2",
    ):  # fmt: skip
        assert text in done.stderr, text
    found = find(site / "multiworld")
    assert found is not None
    assert (found.beside, found.in_front, found.patched) == (True, False, False)


def test_a_torch_that_they_patched_is_said(site):
    install(site, {**THEIRS, "multiworld/init.txt": "true"}, "0.2.3")
    found = find(site / "multiworld")
    assert found is not None
    assert "patched the torch" in found.says
    assert "install torch again" in found.next_step


@pytest.mark.parametrize("command", ["main", "run", "post_setup"])
def test_the_commands_do_not_import_theirs_installed_after(site, command):
    install(site, THEIRS, "0.2.3")
    done = python(site, f"import m8d; sys.argv[1:] = ['--help']; sys.exit(m8d.{command}())")
    assert done.returncode == 9
    assert "have overwritten those of this package" in done.stderr
    assert "theirs was imported" not in done.stderr
    assert "pip install --force-reinstall --no-deps m8d" in done.stderr


def test_the_commands_tell_a_package_that_lost_its_files(site):
    (site / "multiworld/__init__.py").unlink()
    done = python(site, "import m8d; sys.exit(m8d.run())")
    assert done.returncode == 9
    assert "has no __init__.py" in done.stderr


def test_the_commands_run(site):
    done = python(site, "import m8d; sys.argv[1:] = ['--version']; sys.exit(m8d.main())")
    assert (done.returncode, done.stdout.split()[0]) == (0, "multiworld")


def test_one_in_another_folder_is_found_where_asked(site, tmp_path):
    install(tmp_path / "other", THEIRS, "0.2.3")
    assert find(site / "multiworld") is None
    found = find(site / "multiworld", (str(tmp_path / "other"), str(tmp_path / "gone")))
    assert found is not None
    assert (found.beside, found.in_front, found.version) == (False, True, "0.2.3")
    assert "--force-reinstall --no-deps m8d" not in found.next_step


def test_folders_that_cannot_be_looked_into_are_passed_over(site, tmp_path):
    loop, closed = tmp_path / "loop", tmp_path / "closed"
    loop.symlink_to(loop)
    (closed / "site").mkdir(parents=True)
    install(tmp_path / "other", THEIRS, "0.2.3")
    closed.chmod(0)
    try:
        for name in (str(loop), "x" * 300, "a\0b", str(closed / "site")):
            found = find(site / "multiworld", (name, str(tmp_path / "other")))
            assert found is not None
            assert found.version == "0.2.3"
    finally:
        closed.chmod(0o700)


@pytest.mark.parametrize("record", [None, "", 'a,"b\n', "\x00"])
def test_a_record_that_cannot_be_read_is_no_clash(site, record):
    info = site / "multiworld-0.1.dist-info"
    info.mkdir()
    if record is not None:
        (info / "RECORD").write_text(record)
    assert find(site / "multiworld") is None


def test_the_doctor_says_it_and_is_not_content(site, monkeypatch, capsys):
    from test_doctor import run, status_of

    install(site, THEIRS, "0.2.3")
    found = status_of()
    object.__setattr__(found, "clash", find(site / "multiworld"))
    code, said = run(monkeypatch, capsys, found)
    assert code == doctor.UNSOUND
    assert "CLASH" in said.out
    code, said = run(monkeypatch, capsys, found, "--json")
    assert json.loads(said.out)["clash"]["version"] == "0.2.3"
