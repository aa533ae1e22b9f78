from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from kits.provenancekit import patched_wheel

from m8d_build.errors import DiskFull, OutputUnwritable


def test_an_overlay_build_does_not_replace_a_full_one(tmp_path: Path) -> None:
    """Both have the same name; one takes minutes, the other one hours."""
    full = patched_wheel(tmp_path, mode="full", overlay=None).path
    before = full.read_bytes()
    with pytest.raises(OutputUnwritable, match="is a full build"):
        patched_wheel(tmp_path)
    assert full.read_bytes() == before
    assert patched_wheel(tmp_path, mode="full", overlay=None).path == full


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("there", [False, True])
def test_a_disk_that_fills_while_the_statement_is_written_leaves_all_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, there: bool
) -> None:
    """Else a wheel would be there, with no statement or that of another one beside it."""
    out = tmp_path / "out"
    before = {}
    if there:
        patched_wheel(tmp_path, builder="0.9")
        before = {path: path.read_bytes() for path in out.iterdir()}
    real = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if ".cdx.json" in path.name:
            raise OSError(code, os.strerror(code))
        return real(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(DiskFull, match="no room left"):
        patched_wheel(tmp_path)
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_the_wheel_comes_last_and_goes_with_what_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, came = Path.replace, []

    def seen(path: Path, target: Path) -> Path:
        came.append(target.suffix)
        return real(path, target)

    monkeypatch.setattr(Path, "replace", seen)
    made = patched_wheel(tmp_path)
    assert came[-3:] == [".json", ".json", ".whl"]
    assert {made.path, *made.beside} == set((tmp_path / "out").iterdir())
    made.remove()
    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_with_the_name_of_the_statement_is_told(tmp_path: Path) -> None:
    made = patched_wheel(tmp_path)
    for path in (made.path, *made.beside):
        path.unlink()
    made.beside[0].mkdir()
    with pytest.raises(OutputUnwritable, match="Is a directory"):
        patched_wheel(tmp_path)
    assert not made.path.exists()


@pytest.mark.parametrize("there", ["an overlay build", "a damaged wheel"])
def test_other_wheels_of_its_name_are_replaced(tmp_path: Path, there: str) -> None:
    made = patched_wheel(tmp_path)
    if there == "a damaged wheel":
        made.path.write_bytes(b"cut")
    assert patched_wheel(tmp_path) == made
