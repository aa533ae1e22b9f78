from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.sourcekit import (
    FILES,
    archive_of,
)

from m8d_build.errors import (
    WrongTree,
)
from m8d_build.sources import SPARSE
from m8d_build.sources import unpack as unpack_module
from m8d_build.sources.base import is_wanted
from m8d_build.sources.unpack import ARCHIVE_ERRORS, unpack


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    info.size = 1 if kind == tarfile.REGTYPE else 0
    return info


UNSAFE = [
    member("/etc/evil"),
    member("top/../../evil"),
    member("top/torch/csrc/../../../../evil"),
    member("../evil"),
    member("top/torch/csrc\\..\\evil"),
    member("top/torch/csrc/device", tarfile.CHRTYPE),
    member("top/torch/csrc/pipe", tarfile.FIFOTYPE),
    member("top/torch/csrc/hard", tarfile.LNKTYPE, "/etc/passwd"),
]


@pytest.fixture(params=["with tarfile's filter", "without it"])
def either_python(request, monkeypatch):
    if request.param == "without it":
        monkeypatch.delattr(unpack_module.tarfile, "data_filter", raising=False)


@pytest.mark.parametrize("unsafe", UNSAFE, ids=lambda info: info.name)
@pytest.mark.filterwarnings("ignore:Python 3.14 will:DeprecationWarning")
def test_an_unsafe_member_is_refused(tmp_path, unsafe, either_python):
    archive = tmp_path / "a.tar.xz"
    archive.write_bytes(archive_of({}, unsafe))
    into = tmp_path / "deep" / "into"
    into.mkdir(parents=True)
    with pytest.raises(WrongTree, match="plain files in folders"):
        unpack(archive, into, SPARSE)
    assert [p for p in tmp_path.rglob("*") if p.is_file() and p != archive] == []


@pytest.mark.filterwarnings("ignore:Python 3.14 will:DeprecationWarning")
def test_links_are_left_out_so_that_nothing_is_written_through_them(tmp_path, either_python):
    archive, into, outside = tmp_path / "a.tar.xz", tmp_path / "into", tmp_path / "outside"
    into.mkdir()
    outside.mkdir()
    links = [
        member(f"top/{name}", tarfile.SYMTYPE, str(outside)) for name in ("torch", "torch/csrc", "c10/sub")
    ]
    archive.write_bytes(archive_of({}, *links, member("top/torch/csrc/file.h"), member("top/c10/sub/file.h")))
    assert unpack(archive, into, SPARSE) == 2
    assert not any(path.is_symlink() for path in into.rglob("*"))
    assert list(outside.iterdir()) == []


@pytest.mark.filterwarnings("ignore:Python 3.14 will:DeprecationWarning")
def test_unpacked_files_have_plain_modes_and_our_owner(tmp_path, either_python):
    odd = member("top/run.sh")
    odd.mode, odd.uid, odd.gid, odd.uname = 0o6777, 12345, 12345, "daemon"
    archive = tmp_path / "a.tar.xz"
    archive.write_bytes(archive_of({"torch/csrc/a.h": b"a"}, odd, top="top/"))
    into = tmp_path / "into"
    into.mkdir()
    assert unpack(archive, into, SPARSE) == 2
    status = (into / "run.sh").stat()
    assert (status.st_mode & 0o7777, status.st_uid) == (0o755, os.getuid())


@pytest.mark.parametrize("compression", ["", "gz", "bz2", "xz"])
@pytest.mark.filterwarnings("ignore:Python 3.14 will:DeprecationWarning")
def test_an_archive_cut_anywhere_never_passes_for_a_whole_one(tmp_path, compression):
    whole, archive, into = archive_of(FILES, compression=compression), tmp_path / "a.tar", tmp_path / "into"
    into.mkdir()
    archive.write_bytes(whole)
    assert unpack(archive, into, SPARSE) == len(FILES)
    end = len(whole) if compression else 512 * (2 * len(FILES) + 1)
    for cut in {*range(0, end, max(end // 60, 1)), end - 1}:
        archive.write_bytes(whole[:cut])
        with pytest.raises(ARCHIVE_ERRORS):
            unpack(archive, into, SPARSE)


def test_a_damaged_header_does_not_pass_for_the_end(tmp_path):
    whole, archive, into = bytearray(archive_of(FILES, compression="")), tmp_path / "a.tar", tmp_path / "into"
    into.mkdir()
    whole[1024 + 10] ^= 1  # in the name of the second member
    archive.write_bytes(whole)
    with pytest.raises(ARCHIVE_ERRORS):
        unpack(archive, into, SPARSE)


@given(st.lists(st.sampled_from(["torch", "csrc", "csrc2", "c10", "x.h"]), min_size=1, max_size=4))
def test_wanted_is_the_top_and_what_lies_below_the_folders(parts):
    path = Path(*parts)
    below = any(str(parent) in {"torch/csrc", "c10"} for parent in path.parents)
    assert is_wanted("/".join(parts), ("torch/csrc", "c10")) == (below or len(parts) == 1)
