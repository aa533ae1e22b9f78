import struct
import zipfile
from dataclasses import replace

import pytest
from kits.fakewheel import (
    COMMIT,
    DAMAGES,
    METADATA,
    NAME,
    VERSION,
    WHEEL,
    contents,
    damage,
    record_of,
    target_of,
    write_wheel,
)
from packaging.version import Version

from m8d_build.errors import WheelAlreadyPatched, WheelInvalid, WheelMismatch
from m8d_build.targets import Abi
from m8d_build.wheel.wheelfile import open_wheel

INFO = "torch-2.6.0.dist-info"


def test_a_good_wheel_tells_its_names(tmp_path):
    wheel = open_wheel(write_wheel(tmp_path))
    assert (wheel.name, wheel.version, wheel.dist_info) == ("torch", Version("2.6.0"), INFO)
    assert (wheel.python_tags, wheel.abi_tags, wheel.platforms) == (
        ("cp311",),
        ("cp311",),
        ("manylinux1_x86_64",),
    )
    assert wheel.version_file().local == "cu124"
    assert wheel.version_file().git_version == COMMIT
    assert not wheel.patched
    assert wheel.read("torch/version.py") == VERSION
    wheel.verify_record(deep=True)


@pytest.mark.parametrize(
    "name", ["torch.whl", "torch-2.6.0.zip", "torch-2.6.0-cp311.whl", "torch-x-py3-none-any.whl"]
)
def test_a_file_name_that_is_no_wheels_is_refused(tmp_path, name):
    with pytest.raises(WheelInvalid, match="no wheel's file name"):
        open_wheel(write_wheel(tmp_path, name=name))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(WheelInvalid, match="is not there"):
        open_wheel(tmp_path / NAME)


@pytest.mark.parametrize("part", [0.0, 0.01, 0.3, 0.7, 0.97, 0.9999])
def test_a_truncated_wheel_is_refused_at_any_length(tmp_path, part):
    path = write_wheel(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(WheelInvalid, match="no whole zip archive"):
        open_wheel(path)


def test_a_wheel_that_lost_bytes_in_the_middle_is_refused(tmp_path):
    path = write_wheel(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[:1000] + data[3000:])
    with pytest.raises(WheelInvalid):
        open_wheel(path).verify_record(deep=True)


def test_a_flipped_byte_in_an_entry_is_found_by_the_deep_check(tmp_path):
    path = write_wheel(tmp_path)
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("torch/lib/libtorch_cuda.so")
    data[info.header_offset + 30 + len(info.filename) + info.compress_size // 2] ^= 0x10
    path.write_bytes(data)
    wheel = open_wheel(path)
    wheel.verify_record()
    with pytest.raises(WheelInvalid, match=r"libtorch_cuda\.so is damaged"):
        wheel.verify_record(deep=True)


@pytest.mark.parametrize("how", DAMAGES)
def test_an_entry_damaged_in_any_way_is_refused(tmp_path, how):
    path = damage(write_wheel(tmp_path), "torch/version.py", how)
    with pytest.raises(WheelInvalid):
        open_wheel(path).verify_record(deep=True)


def test_an_entry_swapped_with_a_right_crc_is_found_by_the_deep_check(tmp_path):
    files = contents()
    record = record_of(files, INFO)
    swapped = {**files, "torch/__init__.py": files["torch/__init__.py"].replace(b"import", b"IMPORT")}
    wheel = open_wheel(write_wheel(tmp_path, swapped, record=record))
    with pytest.raises(WheelInvalid, match=r"torch/__init__\.py has another SHA-256"):
        wheel.verify_record(deep=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda text: text.replace(b"torch/version.py,sha256", b"torch/versions.py,sha256"),
            r"lacks torch/versions\.py",
        ),
        (lambda text: b"".join(text.splitlines(keepends=True)[1:]), "RECORD does not list it"),
        (lambda text: text.replace(b",4\n", b",5\n", 1), "RECORD says 5"),
        (lambda text: text + b"one,two\n", "line .* is 'one,two'"),
        (lambda text: text + text.splitlines(keepends=True)[0], "no path stands twice"),
        (lambda text: text.replace(b"sha256=", b"md5=", 1), "must be a sha256"),
        (lambda text: b"\xff\xfe" + text, "cannot be read"),
        (lambda text: text.replace(b",4\n", ",\u0664\n".encode(), 1), "line"),
    ],
    ids=["other name", "line missing", "size", "fields", "twice", "digest", "encoding", "foreign digit"],
)
def test_a_record_that_lies_is_refused(tmp_path, change, message):
    record = change(record_of(contents(), INFO))
    with pytest.raises(WheelInvalid, match=message):
        open_wheel(write_wheel(tmp_path, record=record))


def test_names_with_commas_stand_in_record(tmp_path):
    wheel = open_wheel(write_wheel(tmp_path, contents(**{"torch/a,b.py": b"x"})))
    assert "torch/a,b.py" in {row.path for row in wheel.record}


def test_the_deep_check_reads_the_directory_once(tmp_path, monkeypatch):
    # An official wheel has 11 000 entries; opening it for each took minutes.
    wheel = open_wheel(write_wheel(tmp_path))
    opened = []
    real = zipfile.ZipFile.__init__

    def counted(self, *args, **kwargs):
        opened.append(args)
        real(self, *args, **kwargs)

    monkeypatch.setattr(zipfile.ZipFile, "__init__", counted)
    wheel.verify_record(deep=True)
    assert len(opened) == 1


@pytest.mark.parametrize("missing", ["METADATA", "WHEEL"])
def test_a_missing_dist_info_file_is_refused(tmp_path, missing):
    files = contents()
    del files[f"{INFO}/{missing}"]
    with pytest.raises(WheelInvalid, match=f"has no {INFO}/{missing}"):
        open_wheel(write_wheel(tmp_path, files))


def test_metadata_of_another_version_is_refused(tmp_path):
    files = contents(**{f"{INFO}/METADATA": METADATA.replace(b"Version: 2.6.0", b"Version: 2.5.1")})
    with pytest.raises(WheelInvalid, match=r"METADATA Version 2\.5\.1"):
        open_wheel(write_wheel(tmp_path, files))


def test_a_wheel_format_of_the_future_is_refused(tmp_path):
    files = contents(**{f"{INFO}/WHEEL": WHEEL.replace(b"Wheel-Version: 1.0", b"Wheel-Version: 2.0")})
    with pytest.raises(WheelInvalid, match=r"Wheel-Version 2\.0"):
        open_wheel(write_wheel(tmp_path, files))


def test_two_dist_info_folders_are_refused(tmp_path):
    with pytest.raises(WheelInvalid, match="a wheel has one"):
        open_wheel(write_wheel(tmp_path, contents(**{"other-1.dist-info/x": b""})))


def test_a_dist_info_folder_of_another_version_is_refused(tmp_path):
    with pytest.raises(WheelInvalid, match="its file name says torch"):
        open_wheel(write_wheel(tmp_path, name=NAME.replace("2.6.0", "2.5.1")))


def test_entries_that_leave_the_installation_are_refused(tmp_path):
    with pytest.raises(WheelInvalid, match="bad entry"):
        open_wheel(write_wheel(tmp_path, contents(**{"torch/../../x": b""})))


def test_a_directory_that_points_outside_the_archive_is_refused(tmp_path):
    path = write_wheel(tmp_path)
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02")
    data[at + 42 : at + 46] = struct.pack("<I", len(data) + 5)
    path.write_bytes(data)
    with pytest.raises(WheelInvalid, match="outside the archive"):
        open_wheel(path)


def test_reading_an_entry_that_is_not_there_says_so(tmp_path):
    with pytest.raises(WheelInvalid, match=r"has no torch/none\.py"):
        open_wheel(write_wheel(tmp_path)).read("torch/none.py")


@pytest.mark.parametrize("text", [b"def", b"a = 1\n", b"__version__ = 1\ngit_version = 'x'\n", b"\0"])
def test_a_version_file_without_a_version_is_refused(tmp_path, text):
    with pytest.raises(WheelInvalid, match=r"torch/version\.py"):
        open_wheel(write_wheel(tmp_path, contents(**{"torch/version.py": text}))).version_file()


def test_the_version_file_is_not_run(tmp_path):
    touched = tmp_path / "touched"
    text = VERSION + f"open({str(touched)!r}, 'w')\n".encode()
    wheel = open_wheel(write_wheel(tmp_path, contents(**{"torch/version.py": text})))
    assert wheel.version_file().cuda == "12.4"
    assert not touched.exists()


def test_the_recorded_official_wheel_passes(tmp_path):
    path = write_wheel(tmp_path)
    open_wheel(path).check_against(target_of(path), "cp311")


def test_an_unrecorded_wheel_passes_only_when_allowed(tmp_path):
    path = write_wheel(tmp_path)
    other = write_wheel(tmp_path / "other", contents(**{"torch/more.py": b""}))
    with pytest.raises(WheelMismatch, match="has the SHA-256") as caught:
        open_wheel(other).check_against(target_of(path), "cp311")
    assert "--allow-unverified" in str(caught.value)
    open_wheel(other).check_against(target_of(path), "cp311", allow_unverified=True)


def test_an_unrecorded_wheel_that_is_damaged_is_refused_also_when_allowed(tmp_path):
    path = write_wheel(tmp_path)
    recorded = target_of(path)
    damage(path, "torch/__init__.py", "deflate")
    wheel = open_wheel(path)
    with pytest.raises(WheelInvalid, match=r"torch/__init__\.py"):
        wheel.check_against(recorded, "cp311", allow_unverified=True)


def test_a_given_digest_is_believed_instead_of_read(tmp_path):
    path = write_wheel(tmp_path)
    with pytest.raises(WheelMismatch, match="0000"):
        open_wheel(path).check_against(target_of(path), "cp311", sha256="0" * 64)


@pytest.mark.parametrize(
    ("changes", "python", "message"),
    [
        ({"version": "2.5.1"}, "cp311", r"torch version is 2\.6\.0.*target's is 2\.5\.1"),
        ({}, "cp312", r"Python is cp311.*target's is cp312"),
        ({"commit": "0" * 40}, "cp311", f"git_version is {COMMIT}"),
        ({"abi": Abi(False, 11, "gnu++17", "12.6")}, "cp311", r"CUDA is 12\.4.*target's is 12\.6"),
    ],
    ids=["version", "python", "commit", "cuda"],
)
def test_a_wheel_of_something_else_is_refused_even_when_unverified_ones_are_allowed(
    tmp_path, changes, python, message
):
    path = write_wheel(tmp_path)
    with pytest.raises(WheelMismatch, match=message):
        open_wheel(path).check_against(target_of(path, **changes), python, allow_unverified=True)


def test_a_wheel_with_another_local_label_is_refused(tmp_path):
    path = write_wheel(tmp_path)
    known = target_of(path)
    target = replace(known, wheels=(replace(known.wheels[0], local="cu118"),))
    with pytest.raises(WheelMismatch, match="local version label is cu124"):
        open_wheel(path).check_against(target, "cp311", allow_unverified=True)


def test_a_cpu_wheel_is_refused_for_a_cuda_target(tmp_path):
    text = VERSION.replace(b"= '12.4'", b"= None").replace(b"+cu124", b"")
    path = write_wheel(tmp_path, contents(**{"torch/version.py": text}))
    with pytest.raises(WheelMismatch, match="CUDA is none"):
        open_wheel(path).check_against(target_of(), "cp311", allow_unverified=True)


@pytest.mark.parametrize("platform", ["win_amd64", "manylinux2014_aarch64", "macosx_11_0_arm64"])
def test_a_wheel_of_another_platform_is_refused(tmp_path, platform):
    path = write_wheel(tmp_path, name=NAME.replace("manylinux1_x86_64", platform))
    with pytest.raises(WheelMismatch, match=f"platform is {platform}"):
        open_wheel(path).check_against(target_of(path), "cp311")


def test_another_project_is_refused(tmp_path):
    files = {name.replace("torch-2.6.0", "vision-2.6.0"): data for name, data in contents().items()}
    path = write_wheel(tmp_path, files, name=NAME.replace("torch", "vision"))
    with pytest.raises(WheelMismatch, match="project is vision"):
        open_wheel(path).check_against(target_of(), "cp311")


def test_a_patched_wheel_is_refused_before_anything_else(tmp_path):
    path = write_wheel(tmp_path, contents(**{"torch/m8d.json": b"{}"}))
    wheel = open_wheel(path)
    assert wheel.patched
    with pytest.raises(WheelAlreadyPatched, match=r"torch/m8d\.json"):
        wheel.check_against(target_of(version="2.5.1"), "cp312", allow_unverified=True)
