import errno
import os
import shutil
import subprocess
import sys
import zipfile
from typing import NamedTuple

import pytest
from kits.fakewheel import NAME, big, contents, record_of, write_wheel
from test_rawzip import compressed

from m8d_build.errors import CheckFailed, DiskFull, OutputUnwritable, WheelInvalid
from m8d_build.wheel import repack as module
from m8d_build.wheel.rawzip import ZipWriter
from m8d_build.wheel.recordfile import RecordRow, format_record, parse_record, record_digest
from m8d_build.wheel.repack import Edit, Put, repack
from m8d_build.wheel.repack_plan import plan_entries
from m8d_build.wheel.wheelfile import open_wheel

LOCAL, PLATFORM = "cu124.m8d1", "manylinux_2_17_x86_64"
CUDA = "torch/lib/libtorch_cuda.so"
OLD, NEW = "torch-2.6.0.dist-info", "torch-2.6.0+cu124.m8d1.dist-info"
CHANGES = (
    Edit(CUDA, ((100, b"edited"), (250_000, b"twice"))),
    Put("torch/lib/nccl.so.2", b"\x7fELF overlay", executable=True),
    Put("torch/m8d.json", b"{}\n"),
)
NOTICES = {"NOTICE.multiworld": b"modified\n", "licenses/LICENSE.multiworld": b"Apache\n"}


def make(tmp_path, changes=CHANGES, out="out", files=None, source=None, **options):
    path = source or write_wheel(tmp_path / "official", files)
    given = {"local": LOCAL, "platform": PLATFORM, "notices": NOTICES, **options}
    return path, repack(open_wheel(path), tmp_path / out, changes, **given)


def test_everything_that_says_the_version_says_the_same(tmp_path):
    _, made = make(tmp_path)
    assert made.path.name == "torch-2.6.0+cu124.m8d1-cp311-cp311-manylinux_2_17_x86_64.whl"
    wheel = open_wheel(made.path)
    wheel.verify_record(deep=True)
    assert wheel.dist_info == NEW
    assert str(wheel.version) == wheel.headers("METADATA")["Version"] == "2.6.0+cu124.m8d1"
    assert wheel.version_file().version == "2.6.0+cu124.m8d1"
    assert wheel.headers("WHEEL").get_all("Tag") == ["cp311-cp311-manylinux_2_17_x86_64"]
    assert not [name for name in wheel.entries if name.startswith(OLD)]


def test_changes_are_in_and_all_else_is_as_it_was(tmp_path):
    files = contents(**{"torch/a,b.py": b"x", "torch/plain.stored": big(5000)})
    source, made = make(tmp_path, files=files)
    wheel = open_wheel(made.path)
    edited = bytearray(files[CUDA])
    edited[100:106], edited[250_000:250_005] = b"edited", b"twice"
    assert wheel.read(CUDA) == bytes(edited)
    assert wheel.read("torch/lib/nccl.so.2") == b"\x7fELF overlay"
    assert wheel.read(f"{NEW}/NOTICE.multiworld") == b"modified\n"
    untouched = files.keys() - {CUDA, "torch/version.py", f"{OLD}/METADATA", f"{OLD}/WHEEL"}
    assert len(untouched) == 6
    for name in untouched:
        now = name.replace(OLD, NEW)
        assert wheel.read(now) == files[name]
        assert compressed(made.path, now) == compressed(source, name)


def test_modes_and_dates_do_not_depend_on_this_machine(tmp_path):
    _, made = make(tmp_path)
    infos = open_wheel(made.path).entries
    assert infos[CUDA].external_attr >> 16 == 0o100755
    assert infos["torch/lib/nccl.so.2"].external_attr >> 16 == 0o100755
    assert infos["torch/m8d.json"].external_attr >> 16 == 0o100644
    assert {info.date_time for info in infos.values()} == {
        (2025, 1, 24, 23, 0, 0), (2025, 1, 25, 1, 17, 20), (2025, 1, 27, 14, 54, 12)
    }  # fmt: skip


def test_record_is_sorted_and_last(tmp_path):
    _, made = make(tmp_path)
    wheel = open_wheel(made.path)
    assert list(wheel.entries)[-1] == f"{NEW}/RECORD"
    paths = [row.path for row in wheel.record]
    assert paths[:-1] == sorted(paths[:-1])
    assert (wheel.record[-1].path, wheel.record[-1].digest, wheel.record[-1].size) == (
        f"{NEW}/RECORD",
        "",
        None,
    )
    assert set(paths) == {name for name in wheel.entries if not name.endswith("/")}


def test_record_comes_back_as_it_was_written():
    data = record_of({"b": b"1", "a,c": b"", 'q"': b"2"}, "x.dist-info").replace(b'q",', b'"q""",')
    rows = parse_record(data, where="here")
    assert set(parse_record(format_record(rows), where="there")) == set(rows)


def test_a_digest_of_record_in_hexadecimal():
    import hashlib

    digest = hashlib.sha256(b"x")
    assert RecordRow("a", record_digest(digest.digest()), 1).sha256 == digest.hexdigest()
    for wrong in ("", "md5=AAAA", "sha256=A", "sha256=AAAA", "sha256=\u00e9"):
        assert RecordRow("a", wrong, 1).sha256 == ""


def test_the_same_inputs_give_the_same_bytes(tmp_path):
    source, first = make(tmp_path, out="one", jobs=1)
    os.utime(source)
    umask = os.umask(0o077)
    try:
        _, second = make(
            tmp_path, out="two", source=source, changes=CHANGES[::-1], jobs=3, cache=tmp_path / "cache"
        )
        _, third = make(tmp_path, out="three", source=source, cache=tmp_path / "cache")
    finally:
        os.umask(umask)
    assert first.path.read_bytes() == second.path.read_bytes() == third.path.read_bytes()
    assert first.sha256 == second.sha256 == third.sha256
    assert first.path.stat().st_mode == second.path.stat().st_mode


def test_the_result_says_size_and_digest(tmp_path):
    import hashlib

    _, made = make(tmp_path)
    data = made.path.read_bytes()
    assert (made.size, made.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_a_second_run_takes_large_entries_from_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 100_000)
    source, first = make(tmp_path, cache=tmp_path / "cache")
    _, second = make(tmp_path, source=source, cache=tmp_path / "cache")
    assert (first.reused, second.reused) == (0, 300_000)


def test_a_wheel_of_an_earlier_run_is_replaced(tmp_path):
    source, made = make(tmp_path)
    made.path.write_bytes(b"old")
    _, again = make(tmp_path, source=source)
    assert open_wheel(again.path)
    assert [p.name for p in again.path.parent.iterdir()] == [again.path.name]


def test_several_platforms_give_several_tags(tmp_path):
    _, made = make(tmp_path, platform="manylinux_2_17_x86_64.manylinux2014_x86_64")
    wheel = open_wheel(made.path)
    assert wheel.platforms == ("manylinux2014_x86_64", "manylinux_2_17_x86_64")
    assert len(wheel.headers("WHEEL").get_all("Tag")) == 2


def test_a_wheel_that_has_its_label_already_keeps_its_folder(tmp_path):
    files = {name.replace(OLD, NEW): data for name, data in contents().items()}
    files[f"{NEW}/METADATA"] = files[f"{NEW}/METADATA"].replace(
        b"Version: 2.6.0\n", b"Version: 2.6.0+cu124.m8d1\n"
    )
    source = write_wheel(tmp_path / "o", files, name=NAME.replace("2.6.0", "2.6.0+cu124.m8d1"))
    _, made = make(tmp_path, source=source)
    assert open_wheel(made.path).dist_info == NEW


def test_signatures_over_the_old_record_are_left_out(tmp_path):
    files = contents()
    source = write_wheel(tmp_path / "o", {**files, f"{OLD}/RECORD.jws": b"{}"}, record=record_of(files, OLD))
    _, made = make(tmp_path, source=source)
    assert f"{NEW}/RECORD.jws" not in open_wheel(made.path).entries


@pytest.mark.parametrize(
    "changes",
    [
        [Put("torch/m8d.json", b""), Put("torch/m8d.json", b"")],
        [Edit("torch/none.so", ())],
        [Put(f"{OLD}/METADATA", b"")],
        [Put("torch/version.py", b"")],
        [Edit(CUDA, ((10**9, b"x"),))],
    ],
    ids=["twice", "nothing to edit", "dist-info", "version", "outside"],
)
def test_changes_that_make_no_sense_are_refused_and_leave_nothing(tmp_path, changes):
    with pytest.raises(ValueError, match=r"torch|edit"):
        make(tmp_path, changes=changes)
    assert list((tmp_path / "out").glob("*")) + list((tmp_path / "out").glob(".*")) == []


@pytest.mark.parametrize("name", ["METADATA", "LICENSE", "RECORD"])
def test_a_notice_does_not_replace_the_wheels_own_files(tmp_path, name):
    wheel = open_wheel(write_wheel(tmp_path))
    with pytest.raises(ValueError, match=f"cannot be named {name}"):
        plan_entries(wheel, [], local=LOCAL, platform=PLATFORM, notices={name: b""})


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_too_little_room_is_found_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 1_000_000))
    with pytest.raises(DiskFull, match=r"has 1 MiB free.*needs about \d+ MiB"):
        make(tmp_path)
    assert list((tmp_path / "out").iterdir()) == []


def leave(out):
    return [path.name for path in out.rglob("*")]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), DiskFull),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), DiskFull),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (PermissionError(errno.EACCES, "Permission denied"), OutputUnwritable),
    ],
    ids=["full", "quota", "ctrl-c", "permission"],
)
@pytest.mark.parametrize("after", [0, 3, 9])
def test_a_failure_while_writing_leaves_the_earlier_wheel_and_nothing_else(
    tmp_path, monkeypatch, error, expected, after
):
    source, made = make(tmp_path)
    before = made.path.read_bytes()
    calls = iter(range(1000))
    real = ZipWriter._start

    def failing(self, member, *, wide):
        if next(calls) == after:
            raise error
        real(self, member, wide=wide)

    monkeypatch.setattr(ZipWriter, "_start", failing)
    with pytest.raises(expected):
        make(tmp_path, source=source)
    assert leave(tmp_path / "out") == [made.path.name]
    assert made.path.read_bytes() == before


def test_what_a_killed_run_left_goes_away_before_the_room_is_measured(tmp_path, monkeypatch):
    source, made = make(tmp_path)
    stale = tmp_path / "out" / f".{made.path.stem}.part"
    stale.mkdir()
    (stale / "half.whl").write_bytes(b"half")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, 0 if stale.exists() else 10**9))
    make(tmp_path, source=source)
    assert leave(tmp_path / "out") == [made.path.name]


def test_an_output_folder_that_is_a_file_is_unwritable(tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(OutputUnwritable, match="cannot be written"):
        make(tmp_path)


def test_an_output_folder_without_permission_is_unwritable(tmp_path, monkeypatch):
    # access(2) is asked, because a mode of 0555 does not stop root.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(OutputUnwritable, match="permission denied"):
        make(tmp_path)


def test_a_damaged_entry_that_is_edited_is_found(tmp_path):
    source = write_wheel(tmp_path)
    with zipfile.ZipFile(source) as archive:
        info = archive.getinfo(CUDA)
    data = bytearray(source.read_bytes())
    data[info.header_offset + 30 + len(CUDA) + info.compress_size // 2] ^= 1
    source.write_bytes(data)
    with pytest.raises(WheelInvalid, match="is damaged"):
        make(tmp_path, source=source)
    assert leave(tmp_path / "out") == []


def test_bytes_that_change_on_their_way_to_the_disk_are_found(tmp_path, monkeypatch):
    real = module._check

    def spoiled(part, made):
        data = bytearray(part.read_bytes())
        with zipfile.ZipFile(part) as archive:
            at = archive.getinfo(CUDA).header_offset + 5000
        data[at] ^= 1
        part.write_bytes(data)
        return real(part, made)

    monkeypatch.setattr(module, "_check", spoiled)
    with pytest.raises(CheckFailed, match=r"libtorch_cuda\.so is not what was written"):
        make(tmp_path)
    assert leave(tmp_path / "out") == []


def test_pip_installs_it_and_finds_nothing_wrong(tmp_path):
    files = contents()
    lines = files[f"{OLD}/METADATA"].splitlines(keepends=True)
    files[f"{OLD}/METADATA"] = b"".join(line for line in lines if not line.startswith(b"Requires-Dist"))
    _, made = make(tmp_path, files=files)
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--isolated"]
    tag = f"--python-version=3.11 --implementation=cp --abi=cp311 --platform={PLATFORM} --only-binary=:all:".split()
    subprocess.run(
        [*pip, "install", "--no-index", "--no-deps", "--no-compile", *tag, "--target", site, made.path],
        check=True,
        capture_output=True,
    )
    check = (
        "import sys; sys.path.insert(0, sys.argv[1]); import importlib.metadata as m\n"
        "d = m.distribution('torch'); assert d.version == '2.6.0+cu124.m8d1', d.version\n"
        "missing = [f for f in d.files if not f.locate().exists()]; assert not missing, missing\n"
        "import torch; assert torch.__version__ == d.version"
    )
    subprocess.run([sys.executable, "-I", "-c", check, site], check=True)
    assert (site / "torch/lib/nccl.so.2").stat().st_mode & 0o111
    listed = subprocess.run(
        [*pip, "list", "--path", site, "--format=freeze"], check=True, capture_output=True, text=True
    ).stdout
    assert listed.split() == ["torch==2.6.0+cu124.m8d1"]
    result = subprocess.run(
        [*pip[:3], "check"],
        env={**os.environ, "PYTHONPATH": str(site)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert "torch" not in result.stdout, result.stdout
