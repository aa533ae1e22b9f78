import io
import zipfile
from dataclasses import replace
from functools import partial

import pytest
from kits.fakewheel import big, write_wheel

from m8d_build.errors import WheelInvalid
from m8d_build.wheel import rawzip
from m8d_build.wheel.deflate import deflate
from m8d_build.wheel.rawzip import Member, ZipWriter, member_of, raw_offset

DATE = (2025, 1, 2, 3, 4, 6)


def adder(data):
    return partial(deflate, [data], jobs=1)


def compressed(path, name):
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        info = archive.getinfo(name)
        file.seek(raw_offset(file, info))
        return file.read(info.compress_size)


def copy_all(source, target, rename=lambda name: name):
    with zipfile.ZipFile(source) as archive, source.open("rb") as file, target.open("w+b") as out:
        writer = ZipWriter(out)
        for info in archive.infolist():
            writer.copy(member_of(info, rename(info.filename)), file, raw_offset(file, info))
        writer.close()


def test_copied_entries_keep_their_compressed_bytes_modes_and_dates(tmp_path):
    source, target = write_wheel(tmp_path), tmp_path / "copy.zip"
    copy_all(source, target)
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target) as new:
        assert new.testzip() is None
        for a, b in zip(old.infolist(), new.infolist(), strict=True):
            assert (a.filename, a.date_time, a.CRC, a.compress_type) == (
                b.filename,
                b.date_time,
                b.CRC,
                b.compress_type,
            )
            assert a.external_attr >> 16 == b.external_attr >> 16
            assert compressed(source, a.filename) == compressed(target, b.filename)


def test_an_entry_with_a_data_descriptor_loses_it(tmp_path):
    class Pipe(io.BytesIO):
        def seekable(self):
            return False

        def seek(self, *args):
            raise io.UnsupportedOperation

        def tell(self):
            raise io.UnsupportedOperation

    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", big(9000))
        archive.writestr("b", b"b")
    source, target = tmp_path / "a.zip", tmp_path / "b.zip"
    source.write_bytes(pipe.getvalue())
    with zipfile.ZipFile(source) as archive:
        assert archive.getinfo("a").flag_bits & 8
    copy_all(source, target)
    with zipfile.ZipFile(target) as archive:
        assert archive.testzip() is None
        assert archive.read("a") == big(9000)
        assert not archive.getinfo("a").flag_bits & 8


def test_names_may_have_any_letters(tmp_path):
    source, target = tmp_path / "a.zip", tmp_path / "b.zip"
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr("plain", b"1")
        archive.writestr("größe/日本.py", b"2")
    copy_all(source, target, lambda name: name.replace("plain", "ærø"))
    with zipfile.ZipFile(target) as archive:
        assert archive.namelist() == ["ærø", "größe/日本.py"]
        assert archive.read("größe/日本.py") == b"2"


def test_added_entries_read_back(tmp_path):
    target = tmp_path / "a.zip"
    with target.open("w+b") as out:
        writer = ZipWriter(out)
        for name, data in (("one", big(70_000)), ("empty", b""), ("dir/two", b"2")):
            writer.add(Member(name, DATE, 0o100755), len(data), adder(data))
        writer.close()
    with zipfile.ZipFile(target) as archive:
        assert archive.testzip() is None
        assert archive.read("one") == big(70_000)
        assert archive.read("empty") == b""
        assert {info.external_attr >> 16 for info in archive.infolist()} == {0o100755}
        assert archive.getinfo("dir/two").date_time == DATE


def test_numbers_past_the_limit_take_zip64(tmp_path, monkeypatch):
    # With the limit lowered, the same records are written that a 4 GiB file would need.
    limit = 5000
    monkeypatch.setattr(rawzip, "LIMIT32", limit)
    source, target = write_wheel(tmp_path), tmp_path / "a.zip"
    with zipfile.ZipFile(source) as archive, source.open("rb") as file, target.open("w+b") as out:
        writer = ZipWriter(out)
        for info in archive.infolist():
            writer.copy(member_of(info, info.filename), file, raw_offset(file, info))
        writer.add(Member("added", DATE, 0o100644), 40_000, adder(big(40_000)))
        writer.add(Member("last", DATE, 0o100644), 1, adder(b"1"))
        writer.close()
    with zipfile.ZipFile(target) as archive:
        assert archive.testzip() is None
        assert archive.read("added") == big(40_000)
        assert archive.getinfo("last").header_offset > limit
        assert archive.getinfo("torch/lib/libtorch_cuda.so").extract_version == 45
    assert b"PK\x06\x06" in target.read_bytes()


def test_more_entries_than_sixteen_bits_count(tmp_path):
    target = tmp_path / "a.zip"
    with target.open("w+b") as out:
        writer = ZipWriter(out)
        for number in range(65_536):
            writer.copy(Member(f"{number}/", DATE, 0o40755, zipfile.ZIP_STORED), io.BytesIO(), 0)
        writer.close()
    with zipfile.ZipFile(target) as archive:
        assert len(archive.namelist()) == 65_536
        assert archive.namelist()[-1] == "65535/"
    assert b"PK\x06\x06" in target.read_bytes()[-200:]  # Python's zipfile does without; others do not


def test_a_small_archive_has_no_zip64_records(tmp_path):
    target = tmp_path / "b.zip"
    copy_all(write_wheel(tmp_path), target)
    assert b"PK\x06\x06" not in target.read_bytes()


def test_an_entry_larger_than_it_was_said_to_be_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(rawzip, "LIMIT32", 10_000_000)
    monkeypatch.setattr(rawzip, "COPY", 1000)
    done = replace(deflate([b"x"], lambda data: None, jobs=1), size=20_000_000)
    with (tmp_path / "a").open("w+b") as out, pytest.raises(ValueError, match="was said to have 1 bytes"):
        ZipWriter(out).add(Member("a", DATE, 0), 1, lambda write: done)


def test_a_local_header_of_another_entry_is_refused(tmp_path):
    path = write_wheel(tmp_path)
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        info = archive.getinfo("torch/version.py")
        info.header_offset = archive.getinfo("torch/__init__.py").header_offset
        with pytest.raises(WheelInvalid, match="no entry of this name"):
            raw_offset(file, info)


def test_an_archive_that_ends_inside_an_entry_is_refused(tmp_path):
    with (tmp_path / "a").open("w+b") as out, pytest.raises(WheelInvalid, match="ends inside it"):
        ZipWriter(out).copy(Member("a", DATE, 0, compressed_size=10, size=10), io.BytesIO(b"123"), 0)
