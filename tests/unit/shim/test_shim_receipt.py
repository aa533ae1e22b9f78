"""Receipts of patch files that m8d-post-setup did not write, or wrote for another torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from kits import shimkit

from multiworld.cli.exits import EXIT_CODES
from multiworld.cli.post_setup import main
from multiworld.errors import InstallError
from multiworld.shim.receipt import BACKUP_FOLDER, RECEIPT, backup_of, sha256_of
from multiworld.shim.torchsite import TorchSite

FAILED = EXIT_CODES[InstallError]
FILE = "torch/distributed/rendezvous.py"


@pytest.fixture
def site(tmp_path) -> TorchSite:
    return shimkit.make_site(tmp_path / "v/site-packages")


def run(capsys, *arguments) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def forge(
    site: TorchSite,
    path: str,
    original: bytes,
    *,
    after: bytes | None = None,
    wrong: dict[str, object] | None = None,
) -> None:
    """Write a receipt by which `path` is to get the content `original`, and the backup that it names."""
    backup = site.root / backup_of(path)
    backup.parent.mkdir(parents=True, exist_ok=True)
    backup.write_bytes(original)
    (site.root / BACKUP_FOLDER).mkdir(exist_ok=True)
    receipt = {
        "schema": 1,
        "state": "applying",
        "torch": shimkit.VERSION,
        "patch": {"name": "x.patch", "sha256": "0" * 64},
        "files": [
            {
                "path": path,
                "before": sha256_of(original),
                "after": sha256_of(after),
                "row": None,
                **(wrong or {}),
            }
        ],
    }
    (site.root / RECEIPT).write_text(json.dumps(receipt))


@pytest.mark.parametrize(
    "path",
    [
        "../escaped",
        "torch/../../escaped",
        "{}/escaped",
        "beside.py",
        "torch",
        "torch//x.py",
        "torch/./x.py",
        "torch/ü.py",
    ],
)
def test_a_receipt_that_names_a_file_outside_of_torch_is_damaged(site, tmp_path, capsys, path):
    forge(site, path.format(tmp_path), b"escaped\n")
    before = shimkit.tree(tmp_path)
    for command in ((), ("--check",), ("--uninstall",), ("--revert",)):
        code, _, said = run(capsys, "--torch", site.root, *command)
        assert code == FAILED
        assert "receipt.json is damaged" in said
    assert shimkit.tree(tmp_path) == before


@pytest.mark.parametrize("entry", [{"path": 5}, {"row": 5}, {"before": 5}, {"after": ["x"]}])
def test_a_receipt_with_a_value_of_another_type_is_damaged(site, capsys, entry):
    forge(site, FILE, b"", wrong=entry)
    code, _, said = run(capsys, "--torch", site.root)
    assert code == FAILED
    assert "receipt.json is damaged" in said


@pytest.mark.parametrize("linked", ["torch/distributed", f"{BACKUP_FOLDER}/torch"])
def test_a_receipt_does_not_lead_out_of_torch_by_a_symbolic_link(site, tmp_path, capsys, linked):
    forge(site, FILE, b"escaped\n", after=shimkit.RENDEZVOUS)
    (site.root / linked).rename(tmp_path / "elsewhere")
    (site.root / linked).symlink_to(tmp_path / "elsewhere")
    before = shimkit.tree(tmp_path)
    code, _, said = run(capsys, "--torch", site.root)
    assert code == FAILED
    assert "receipt.json is damaged" in said
    assert f"leads out of {site.torch}" in said
    assert shimkit.tree(tmp_path) == before


@pytest.mark.parametrize("command", [(), ("--check",), ("--uninstall",), ("--revert",)])
def test_a_backup_folder_that_is_a_symbolic_link_is_not_emptied(site, tmp_path, capsys, command):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("kept\n")
    (site.root / BACKUP_FOLDER).symlink_to(elsewhere)
    code, _, said = run(capsys, "--torch", site.root, *command)
    assert code == FAILED
    assert f"{BACKUP_FOLDER} is a symbolic link" in said
    assert (elsewhere / "file").read_text() == "kept\n"


def test_a_symbolic_link_where_a_file_is_written_aside_is_not_followed(site, tmp_path, capsys):
    victim = tmp_path / "victim"
    victim.write_text("kept\n")
    patch = tmp_path / "x-2.6.0.patch"
    patch.write_bytes(b"--- a/torch/new.py\n+++ b/torch/new.py\n@@ -1 +1 @@\n-a\n+b\n")
    (site.torch / "new.py").write_bytes(b"a\n")
    (site.torch / "new.py.m8d-new").symlink_to(victim)
    assert run(capsys, patch, "--torch", site.root)[0] == 0
    assert victim.read_text() == "kept\n"
    assert not (site.torch / "new.py").is_symlink()
    assert (site.torch / "new.py").read_bytes() == b"b\n"


# --- torch was replaced, or files were changed, since a patch was applied


PATCH = b"""\
--- a/torch/distributed/__init__.py
+++ b/torch/distributed/__init__.py
@@ -1,3 +1,3 @@
 a
-b
+B
 c
--- a/torch/distributed/two.py
+++ b/torch/distributed/two.py
@@ -1,3 +1,3 @@
 x
-y
+Y
 z
"""
MORE = {"torch/distributed/__init__.py": b"a\nb\nc\n", "torch/distributed/two.py": b"x\ny\nz\n"}
COMMANDS = ((), ("--uninstall",), ("--revert",))


@pytest.fixture
def patch(tmp_path) -> Path:
    path = tmp_path / "pv2.6.0.patch"
    path.write_bytes(PATCH)
    return path


def replaced(root: Path, patch: Path, more: dict[str, bytes], version: str = "2.7.0") -> TorchSite:
    """Return a torch that was installed over a patched 2.6.0, as by conda: RECORD is new, the backup stays."""
    old = shimkit.make_site(root, more=MORE)
    assert main([str(patch), "--torch", str(root)]) == 0
    backup = root.parent / "backup"
    (root / BACKUP_FOLDER).rename(backup)
    shutil.rmtree(root)
    text = f"__version__ = {version!r}\ngit_version = 'another'\n".encode()
    new = shimkit.make_site(root, more={**more, "torch/version.py": text})
    backup.rename(root / BACKUP_FOLDER)
    assert new == old
    return new


@pytest.mark.parametrize("version", ["2.7.0", shimkit.VERSION])
@pytest.mark.parametrize("one", [b"a\nb\nc\n", b"a\nB\nc\n", b"other\n"])
@pytest.mark.parametrize("two", [b"x\ny\nz\n", b"x\nY\nz\n"])
def test_a_backup_of_a_torch_that_was_replaced_is_discarded(tmp_path, patch, capsys, version, one, two):
    more = {"torch/distributed/__init__.py": one, "torch/distributed/two.py": two}
    for number, command in enumerate(COMMANDS):
        site = replaced(tmp_path / f"{number}/site", patch, more, version)
        capsys.readouterr()
        torch = {path: (site.root / path).read_bytes() for path in shimkit.tree(site.root) if path in more}
        code, said, _ = run(capsys, "--check", "--torch", site.root)
        assert (code, "its backup is of torch 2.6.0+cu124, which was replaced" in said) == (1, True)
        code, said, _ = run(capsys, "--torch", site.root, *command)
        assert code == 0
        assert "of torch 2.6.0+cu124, which was replaced; it is discarded" in said
        assert "no file of torch is changed" in said
        assert {path: (site.root / path).read_bytes() for path in torch} == torch
        assert not (site.root / BACKUP_FOLDER).exists()
        assert BACKUP_FOLDER.encode() not in site.record_path.read_bytes()


def test_a_patch_is_applied_over_the_backup_of_a_torch_that_was_replaced(tmp_path, patch, capsys):
    site = replaced(tmp_path / "site", patch, MORE)
    new = tmp_path / "pv2.7.0.patch"
    new.write_bytes(PATCH)
    before = shimkit.tree(site.root)
    assert "fits; nothing was changed" in run(capsys, new, "--dry-run", "--torch", site.root)[1]
    assert "would be discarded" in run(capsys, "--revert", "--dry-run", "--torch", site.root)[1]
    assert shimkit.tree(site.root) == before
    code, said, _ = run(capsys, new, "--torch", site.root)
    assert (code, "which was replaced; it is discarded" in said) == (0, True)
    assert (site.root / "torch/distributed/two.py").read_bytes() == b"x\nY\nz\n"
    assert run(capsys, "--revert", "--torch", site.root)[0] == 0
    assert (site.root / "torch/distributed/two.py").read_bytes() == b"x\ny\nz\n"


def test_a_patch_of_the_version_file_is_no_other_torch(site, tmp_path, capsys):
    patch = tmp_path / "version-2.6.0.patch"
    patch.write_bytes(
        b"--- a/torch/version.py\n+++ b/torch/version.py\n@@ -3 +3 @@\n"
        b"-__version__ = '2.6.0+cu124'\n+__version__ = '2.6.0+mine'\n"
    )
    before = shimkit.tree(site.root)
    assert run(capsys, patch, "--torch", site.root)[0] == 0
    assert "version-2.6.0.patch: applied" in run(capsys, "--check", "--torch", site.root)[1]
    assert run(capsys, "--revert", "--torch", site.root)[0] == 0
    assert shimkit.tree(site.root) == before


def applied(tmp_path, patch, capsys) -> tuple[TorchSite, dict[str, bytes | None], Any]:
    """Apply the patch to a torch; return that, what its tree was before, and the receipt."""
    site = shimkit.make_site(tmp_path / "site", more=MORE)
    before = shimkit.tree(site.root)
    assert run(capsys, patch, "--torch", site.root)[0] == 0
    return site, before, json.loads((site.root / RECEIPT).read_text())


def test_an_older_receipt_is_compared_by_its_version(tmp_path, patch, capsys):
    site, before, receipt = applied(tmp_path, patch, capsys)
    del receipt["version_file"]
    (site.root / RECEIPT).write_text(json.dumps(receipt))
    assert "pv2.6.0.patch: applied" in run(capsys, "--check", "--torch", site.root)[1]
    (site.root / RECEIPT).write_text(json.dumps({**receipt, "torch": "2.5.1"}))
    assert "is of torch 2.5.1" in run(capsys, "--check", "--torch", site.root)[1]
    (site.root / RECEIPT).write_text(json.dumps(receipt))
    assert run(capsys, "--revert", "--force", "--torch", site.root)[0] == 0
    assert shimkit.tree(site.root) == before, "what can be put back is put back"


@pytest.mark.parametrize("damage", ["edited", "backup", "receipt", "receipt nested too deeply"])
def test_a_backup_that_cannot_be_put_back_can_be_discarded(tmp_path, patch, capsys, damage):
    site = shimkit.make_site(tmp_path / "site", more=MORE)
    assert run(capsys, patch, "--torch", site.root)[0] == 0
    two = "torch/distributed/two.py"
    place = {"edited": two, "backup": backup_of(two)}.get(damage, RECEIPT)
    (site.root / place).write_bytes(b"[" * 200_000 + b"]" * 200_000 if "nested" in damage else b"edited\n")
    now = {path: (site.root / path).read_bytes() for path in MORE}
    code, _, said = run(capsys, "--revert", "--torch", site.root)
    assert (code, "m8d-post-setup --revert --force" in said) == (FAILED, True)
    before = shimkit.tree(site.root)
    code, said, _ = run(capsys, "--revert", "--force", "--dry-run", "--torch", site.root)
    assert (code, "would be discarded" in said) == (0, True)
    assert shimkit.tree(site.root) == before
    code, said, _ = run(capsys, "--revert", "--force", "--torch", site.root)
    assert code == 0
    assert "nothing is taken back" in said
    assert "Install torch again" in said
    assert {path: (site.root / path).read_bytes() for path in MORE} == now
    assert not (site.root / BACKUP_FOLDER).exists()
    record = site.record()
    assert not record.below(BACKUP_FOLDER)
    if place != RECEIPT:
        assert all(record.says(path, data) for path, data in now.items())
    assert run(capsys, "--torch", site.root)[0] == 0
    assert run(capsys, "--check", "--torch", site.root)[0] == 0


def test_a_patch_of_which_a_file_does_not_change_is_refused(tmp_path, patch, capsys):
    site = shimkit.make_site(tmp_path / "site", more=MORE)
    before = shimkit.tree(site.root)
    patch.write_bytes(PATCH.replace(b"+Y", b"+y"))
    code, _, said = run(capsys, patch, "--torch", site.root)
    assert (code, "torch/distributed/two.py is the same afterwards" in said) == (FAILED, True)
    assert shimkit.tree(site.root) == before


def test_a_file_that_an_older_m8d_did_not_change_is_not_half_done(tmp_path, patch, capsys):
    site, before, receipt = applied(tmp_path, patch, capsys)
    path = "torch/distributed/rendezvous.py"
    same, row = sha256_of(shimkit.RENDEZVOUS), site.record().line(path)
    receipt["files"].append({"path": path, "before": same, "after": same, "row": row})
    (site.root / RECEIPT).write_text(json.dumps(receipt))
    assert "pv2.6.0.patch: applied" in run(capsys, "--check", "--torch", site.root)[1]
    assert run(capsys, "--revert", "--torch", site.root)[0] == 0
    assert shimkit.tree(site.root) == before


def test_what_cannot_be_taken_back_is_not_announced_as_taken_back(tmp_path, patch, capsys):
    site = shimkit.make_site(tmp_path / "site", more=MORE)
    assert run(capsys, patch, "--torch", site.root)[0] == 0
    for path, data in (
        ("torch/distributed/two.py", b"edited\n"),
        ("torch/distributed/__init__.py", b"a\nb\nc\n"),
    ):
        (site.root / path).write_bytes(data)
    for command in ((), ("--uninstall",)):
        code, said, _ = run(capsys, "--torch", site.root, *command)
        assert (code, said) == (FAILED, "")


def test_a_forced_revert_without_a_backup_says_so(site, capsys):
    code, _, said = run(capsys, "--revert", "--force", "--torch", site.root)
    assert (code, "no patch file is applied" in said) == (FAILED, True)


def test_a_forced_revert_does_not_follow_a_link(site, tmp_path, capsys):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("kept\n")
    (site.root / BACKUP_FOLDER).symlink_to(elsewhere)
    assert run(capsys, "--revert", "--force", "--torch", site.root)[0] == FAILED
    assert (elsewhere / "file").read_text() == "kept\n"


def test_conda_leaves_the_backup_there_which_is_said(tmp_path, patch, capsys):
    site = shimkit.make_site(tmp_path / "site", more=MORE)
    (site.dist_info / "INSTALLER").write_text("conda\n")
    assert "--revert before conda removes or replaces torch" in run(capsys, patch, "--torch", site.root)[1]
