from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w
from kits.patchkit import VERSION

from m8d_build.errors import PatchRejected, UnknownVersion
from m8d_build.targets import Status, load_targets

REAL = Path(__file__).parents[4] / "patches"
ENTRY = {
    "version": VERSION,
    "tag": "v2.6.0",
    "status": "applies",
    "topics": ["a"],
    "files": {"x.cpp": "a" * 40},
}
WHEEL = {
    "filename": "torch-2.6.0-cp311-cp311-manylinux1_x86_64.whl",
    "sha256": "0" * 64,
    "local": "cu124",
    "git_version": "1" * 40,
}
VERIFIED = {
    **ENTRY,
    "status": "verified",
    "units": [{"path": "x.cpp", "defines": ["A=1"]}],
    "abi": {"cxx11_abi": False, "abi_version": 11, "std": "gnu++17", "cuda": "12.4"},
    "wheels": [WHEEL],
}


def write(folder: Path, *entries, schema=1) -> Path:
    (folder / "targets.toml").write_text(tomli_w.dumps({"schema": schema, "target": list(entries)}))
    return folder


def test_entries_are_read_and_sorted_by_version(tmp_path):
    targets = load_targets(
        write(tmp_path, {**ENTRY, "version": "2.10.0"}, ENTRY, {**ENTRY, "version": "2.9.1"})
    )
    assert [target.version for target in targets] == ["2.6.0", "2.9.1", "2.10.0"]
    target = targets.get(VERSION)
    assert (target.status, target.topics, target.blob("x.cpp"), target.blob("y.cpp")) == (
        Status.APPLIES,
        ("a",),
        "a" * 40,
        "",
    )
    assert target.folder(tmp_path) == tmp_path / "v2.6.0"


@pytest.mark.parametrize("asked", ["2.6.0", "v2.6.0", "2.6.0+cu124"])
def test_a_version_is_found_however_it_is_written(tmp_path, asked):
    assert load_targets(write(tmp_path, ENTRY)).get(asked).version == VERSION


def test_a_build_number_comes_with_the_digest_of_its_patches(tmp_path):
    target = load_targets(write(tmp_path, {**ENTRY, "build": 3, "series": "0123456789ab"})).get(VERSION)
    assert (target.build, target.series) == (3, "0123456789ab")
    assert load_targets(write(tmp_path, ENTRY)).get(VERSION).build == 0
    for wrong in (
        {"build": 3},
        {"series": "0123456789ab"},
        {"build": -1, "series": "x"},
        {"build": 1, "series": "a"},
    ):
        with pytest.raises(PatchRejected, match="needs build"):
            load_targets(write(tmp_path, {**ENTRY, **wrong}))


def test_an_unknown_version_names_the_known_ones(tmp_path):
    with pytest.raises(UnknownVersion, match=r"'1\.0\.0'.*2\.6\.0.*--torch"):
        load_targets(write(tmp_path, ENTRY)).get("1.0.0")


def test_the_newest_verified_target_is_that_of_the_python(tmp_path):
    newer = {
        **VERIFIED,
        "version": "2.7.0",
        "wheels": [{**WHEEL, "filename": "torch-2.7.0-cp312-cp312-x.whl"}],
    }
    targets = load_targets(write(tmp_path, VERIFIED, newer, {**ENTRY, "version": "2.8.0"}))
    assert targets.newest_verified("cp311").version == "2.6.0"
    assert targets.newest_verified("cp312").version == "2.7.0"
    with pytest.raises(UnknownVersion, match=r"cp310.*2\.6\.0 \(cp311\)"):
        targets.newest_verified("cp310")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({**ENTRY, "status": "perfect"}, "perfect"),
        ({key: value for key, value in ENTRY.items() if key != "tag"}, "tag"),
        ({**ENTRY, "version": "new"}, "new"),
        ({**ENTRY, "files": {"x.cpp": "abc"}}, "40 hex"),
        ({**VERIFIED, "wheels": [{**WHEEL, "sha256": "0"}]}, "64 hex"),
        ({**VERIFIED, "packages": {"nvidia-nccl-cu12==2.21.5": "0"}}, "sha256 of nvidia-nccl-cu12==2.21.5"),
        ({**VERIFIED, "wheels": []}, "verified, so it must name"),
        ({**VERIFIED, "topics": []}, "verified, so it must name"),
        ({**VERIFIED, "ported_from": "2.5.1"}, "verified, so it is not ported_from"),
    ],
)
def test_a_broken_entry_is_refused_by_name(tmp_path, entry, message):
    with pytest.raises(PatchRejected, match=message):
        load_targets(write(tmp_path, entry))


def test_one_version_twice_is_refused(tmp_path):
    with pytest.raises(PatchRejected, match="twice"):
        load_targets(write(tmp_path, ENTRY, ENTRY))


@pytest.mark.parametrize("text", [b"schema = 1\n[[target", b"\xff", b"schema = 2\n", None])
def test_an_unreadable_file_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / "targets.toml").write_bytes(text)
    with pytest.raises(PatchRejected, match=r"targets\.toml"):
        load_targets(tmp_path)


def test_the_shipped_targets_load_and_nothing_is_called_more_than_it_is():
    targets = load_targets(REAL)
    assert "2.6.0" in [target.version for target in targets]
    for target in targets:
        if target.status is Status.PLANNED:
            assert not (target.folder(REAL) / "series").exists(), target.version
        else:
            assert target.topics, target.version
            assert (target.folder(REAL) / "series").is_file(), target.version
            recorded = {requirement.partition("==")[0] for requirement in target.packages}
            assert set(target.build_packages) <= set(target.packages), target.version
            assert set(target.pinned_packages) <= recorded, target.version
