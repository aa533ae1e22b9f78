"""Receipts of patch files that m8d-post-setup did not write, or wrote for another torch."""

from __future__ import annotations

import json

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
