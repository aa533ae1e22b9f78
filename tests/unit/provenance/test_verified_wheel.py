"""A patched wheel as the toolchain writes it, verified, and each way to change it seen."""

from __future__ import annotations

import json
import shutil
import zipfile

import pytest
from kits.fakewheel import DAMAGES, damage
from kits.provenancekit import DIST_INFO, OVERLAY, marker, patched_wheel, rewritten

from multiworld.cli.main import main
from multiworld.errors import ProvenanceError
from multiworld.provenance.installed import check_installed
from multiworld.provenance.statement import STATEMENT_NAME, parse_statement
from multiworld.provenance.wheel import verify_wheel
from multiworld.shim.loader import LOADER_ENTRY
from multiworld.shim.marker import parse_marker
from multiworld.shim.torchsite import TorchSite

STATEMENT = f"{DIST_INFO}/{STATEMENT_NAME}"


def flip(name):
    def change(files):
        files[name] = files[name][:-1] + bytes([files[name][-1] ^ 1])

    return change


def test_what_the_toolchain_writes_is_verified(tmp_path):
    made = patched_wheel(tmp_path)
    seen = []
    found = verify_wheel(made.path, lambda done, total: seen.append((done, total)))
    assert found.sha256 == made.sha256
    assert found.statement.subjects.keys() >= {"torch/m8d.json", OVERLAY, "torch/version.py", LOADER_ENTRY}
    assert STATEMENT not in found.statement.subjects
    assert [each.name for each in found.statement.inputs][-1] == "pytorch"
    assert found.statement.tools["compiler"] == "g++ 12.2.0"
    assert seen[-1][0] == seen[-1][1]


def test_a_wheel_of_ported_patches_says_so_wherever_it_is_looked_at(tmp_path, capsys):
    made = patched_wheel(tmp_path, local="cu124.m8d0.ported01234567", ported_from="2.5.1").path
    assert verify_wheel(made).statement.tools["ported"] == "from 2.5.1's series, not proven by hand"
    with zipfile.ZipFile(made) as archive:
        assert parse_marker(archive.read("torch/m8d.json")).ported_from == "2.5.1"
        (notice,) = (name for name in archive.namelist() if name.endswith("NOTICE.multiworld"))
        assert b"those of PyTorch 2.5.1, carried here and not proven by hand" in archive.read(notice)
    assert main(["verify", str(made)]) == 0
    assert "ported     from 2.5.1's series, not proven by hand" in capsys.readouterr().out
    own = patched_wheel(tmp_path / "own").path
    with zipfile.ZipFile(own) as archive:
        assert b"ported" not in archive.read("torch/m8d.json")
    assert "ported" not in verify_wheel(own).statement.tools


def test_the_statement_beside_it_names_the_wheel_too(tmp_path):
    made = patched_wheel(tmp_path)
    beside = made.path.with_name(made.path.name + ".provenance.json")
    statement = parse_statement(beside.read_bytes(), where="beside")
    inside = verify_wheel(made.path).statement
    assert statement.subjects == {**inside.subjects, made.path.name: made.sha256}
    assert statement.inputs == inside.inputs


@pytest.mark.parametrize("name", ["torch/__init__.py", OVERLAY, "torch/m8d.json", STATEMENT])
def test_a_changed_file_is_not_as_record_says(tmp_path, name):
    path = rewritten(patched_wheel(tmp_path).path, flip(name), record=False)
    with pytest.raises(ProvenanceError, match="does not agree with its RECORD"):
        verify_wheel(path)


def test_a_file_more_or_less_is_told(tmp_path):
    made = patched_wheel(tmp_path).path
    for change in (lambda files: files.pop("torch/__init__.py"), lambda files: files.update(x=b"")):
        with pytest.raises(ProvenanceError, match="does not agree with its RECORD"):
            verify_wheel(rewritten(made, change, record=False))


@pytest.mark.parametrize("name", [OVERLAY, "torch/version.py", f"{DIST_INFO}/METADATA", LOADER_ENTRY])
def test_a_changed_file_with_a_new_record_is_not_what_was_built(tmp_path, name):
    path = rewritten(patched_wheel(tmp_path).path, flip(name))
    with pytest.raises(ProvenanceError, match="contradicts itself") as caught:
        verify_wheel(path)
    assert name in str(caught.value)


def test_a_wheel_without_a_statement_is_told(tmp_path):
    path = rewritten(patched_wheel(tmp_path).path, lambda files: files.pop(STATEMENT))
    with pytest.raises(ProvenanceError, match="says what it was made from"):
        verify_wheel(path)


def test_what_is_no_wheel_is_told(tmp_path):
    made = patched_wheel(tmp_path).path
    path = tmp_path / made.name
    path.write_bytes(made.read_bytes()[:-100])
    with pytest.raises(ProvenanceError, match="cannot be read"):
        verify_wheel(path)
    with pytest.raises(ProvenanceError, match="cannot be read"):
        verify_wheel(tmp_path / "none.whl")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", b"")
    with pytest.raises(ProvenanceError, match="has 0 files RECORD"):
        verify_wheel(path)


def test_a_dist_info_further_down_is_not_the_wheels(tmp_path):
    inner = "torch/_vendor/six-1.17.dist-info/RECORD"
    made = patched_wheel(tmp_path).path
    path = rewritten(made, lambda files: files.update({inner: b""}))
    assert verify_wheel(path).files == verify_wheel(made).files + 1
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"folder/{DIST_INFO}/RECORD", b"")
    with pytest.raises(ProvenanceError, match="has 0 files RECORD"):
        verify_wheel(path)


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_wheel_is_told(tmp_path, how):
    path = damage(patched_wheel(tmp_path).path, "torch/__init__.py", how)
    with pytest.raises(ProvenanceError, match="cannot be read"):
        verify_wheel(path)


@pytest.mark.parametrize("record", [b"\xff", b"a,b\n", b"torch/m8d.json,md5=x,1\n", b"a,sha256=?,1\n"])
def test_an_unreadable_record_is_told(tmp_path, record):
    made = patched_wheel(tmp_path).path
    with zipfile.ZipFile(made) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    files[f"{DIST_INFO}/RECORD"] = record
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    with pytest.raises(ProvenanceError, match="RECORD"):
        verify_wheel(tmp_path / "x.whl")


# -- installed


def installed(tmp_path):
    with zipfile.ZipFile(patched_wheel(tmp_path).path) as archive:
        archive.extractall(tmp_path / "site")
    return TorchSite(tmp_path / "site", tmp_path / "site" / DIST_INFO)


def test_an_installed_torch_is_as_it_was_built(tmp_path):
    site = installed(tmp_path)
    (site.root / LOADER_ENTRY).write_bytes(b"another loader")
    (site.dist_info / "METADATA").write_bytes(b"an installer may write it anew")
    found = check_installed(site, marker())
    assert found.faults == ()
    assert found.files >= 3


def test_a_changed_file_of_an_installed_torch_is_told(tmp_path):
    site = installed(tmp_path)
    (site.root / OVERLAY).write_bytes(b"another library")
    (site.root / "torch/version.py").unlink()
    faults = check_installed(site, marker()).faults
    assert any(each.startswith(f"{OVERLAY} has SHA-256") for each in faults)
    assert "torch/version.py was built, and is not there" in faults
    (site.dist_info / STATEMENT_NAME).write_bytes(b"{}")
    assert "cannot be read" in check_installed(site, marker()).faults[0]
    (site.dist_info / STATEMENT_NAME).unlink()
    assert check_installed(site, marker()) is None


def test_the_statement_is_json_that_others_can_read(tmp_path):
    site = installed(tmp_path)
    raw = json.loads((site.dist_info / STATEMENT_NAME).read_bytes())
    assert raw["predicate"]["buildDefinition"]["externalParameters"]["torch"] == "2.6.0"
    shutil.rmtree(site.root)
