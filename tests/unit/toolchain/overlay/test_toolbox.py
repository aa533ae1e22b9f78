from __future__ import annotations

import errno
import os
import zipfile
import zlib
from pathlib import Path

import pytest
from kits.fakewheel import DAMAGES, damage

from m8d_build.errors import DiskFull, PrerequisiteMissing, WheelInvalid
from m8d_build.overlay import toolbox
from m8d_build.overlay.toolbox import extract, link_libraries, prepare_headers, required_packages


def wheel(path: Path, members: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return path


@pytest.fixture
def torch(tmp_path: Path) -> Path:
    return wheel(
        tmp_path / "torch.whl",
        {
            "torch/include/a.h": "torch a",
            "torch/include/ATen/b.h": "b",
            "torch/lib/libc10.so": "so",
            "torch/x.py": "",
        },
    )


@pytest.fixture
def cuda(tmp_path: Path) -> Path:
    return wheel(
        tmp_path / "nvidia_cuda_runtime_cu12-12.4-py3-none-any.whl",
        {
            "nvidia/cuda_runtime/include/cuda.h": "cuda",
            "nvidia/cuda_runtime/include/sub/include/x.h": "x",
            "nvidia/cuda_runtime/lib/libcudart.so.12": "cudart",
        },
    )


def test_pinned_versions_come_from_the_wheel_and_the_others_from_the_target() -> None:
    found = required_packages(["nvidia-nccl-cu12"], ["nlohmann_json==3.12.0"], {"nvidia-nccl-cu12": "2.21.5"})
    assert found == ("nvidia-nccl-cu12==2.21.5", "nlohmann_json==3.12.0")
    with pytest.raises(PrerequisiteMissing, match="nvidia-nccl-cu13"):
        required_packages(["nvidia-nccl-cu13"], [], {"nvidia-nccl-cu12": "2.21.5"})


def test_only_headers_are_unpacked_and_only_once(tmp_path: Path, torch: Path, cuda: Path) -> None:
    made = prepare_headers(torch, {"nvidia-cuda-runtime-cu12==12.4": cuda}, tmp_path / "cache")
    assert (made.torch_include / "a.h").read_text() == "torch a"
    assert not (made.torch_include.parent / "lib").exists()
    (include,) = made.system_includes  # not the include folder inside it
    assert (include / "cuda.h").read_text() == "cuda"
    written = (made.torch_include / "a.h").stat().st_mtime_ns
    assert prepare_headers(torch, {"nvidia-cuda-runtime-cu12==12.4": cuda}, tmp_path / "cache") == made
    assert (made.torch_include / "a.h").stat().st_mtime_ns == written


def test_headers_that_are_taken_are_in_use(tmp_path: Path, torch: Path, cuda: Path) -> None:
    prepare_headers(torch, {"nvidia-cuda-runtime-cu12==12.4": cuda}, tmp_path / "cache")
    kept = list((tmp_path / "cache" / "headers").iterdir())
    for path in kept:
        os.utime(path, (0, 0))
    prepare_headers(torch, {"nvidia-cuda-runtime-cu12==12.4": cuda}, tmp_path / "cache")
    assert len(kept) == 2
    assert all(path.stat().st_mtime > 0 for path in kept)


def test_other_headers_have_another_identity_and_another_wheel_with_the_same_ones_has_not(
    tmp_path: Path, torch: Path, cuda: Path
) -> None:
    one = prepare_headers(torch, {"x==1": cuda}, tmp_path / "cache")
    without = prepare_headers(torch, {}, tmp_path / "cache")
    same = {"torch/include/a.h": "torch a", "torch/include/ATen/b.h": "b", "torch/for_another_python.so": "x"}
    sibling = prepare_headers(wheel(tmp_path / "t2.whl", same), {"x==1": cuda}, tmp_path / "cache")
    other = prepare_headers(
        wheel(tmp_path / "t3.whl", {**same, "torch/include/a.h": "torch A"}),
        {"x==1": cuda},
        tmp_path / "cache",
    )
    assert sibling == one
    assert len({one.identity, without.identity, other.identity}) == 3
    assert (other.torch_include / "a.h").read_text() == "torch A"


def test_a_packages_wheel_that_was_replaced_by_another_has_its_own_headers(
    tmp_path: Path, torch: Path, cuda: Path
) -> None:
    before = prepare_headers(torch, {"x==1": cuda}, tmp_path / "cache")
    wheel(cuda, {"nvidia/cuda_runtime/include/cuda.h": "CUDA"})
    after = prepare_headers(torch, {"x==1": cuda}, tmp_path / "cache")
    assert (after.system_includes[0] / "cuda.h").read_text() == "CUDA"
    assert after.identity != before.identity


@pytest.mark.parametrize("of", ["torch", "package"])
def test_headers_with_the_size_and_crc_of_others_are_not_taken_for_them(
    tmp_path: Path, torch: Path, cuda: Path, of: str
) -> None:
    """A file given once with --allow-unverified would be in later builds of the official one."""
    name = "torch/include/a.h" if of == "torch" else "nvidia/cuda_runtime/include/cuda.h"
    texts = [b"#define OFFICIAL 1\n//    \n", b"#define OFFICIAL 2\n//    \n"]
    texts[1] = with_crc(texts[1], zlib.crc32(texts[0]))
    assert (len(texts[0]), zlib.crc32(texts[0])) == (len(texts[1]), zlib.crc32(texts[1]))
    made = []
    for text in reversed(texts):
        with zipfile.ZipFile(torch if of == "torch" else cuda, "w") as archive:
            archive.writestr(name, text)
        found = prepare_headers(torch, {"x==1": cuda}, tmp_path / "cache")
        folder = found.torch_include if of == "torch" else found.system_includes[0]
        assert (folder / Path(name).name).read_bytes() == text
        made.append(found.identity)
    assert made[0] != made[1]


def with_crc(data: bytes, wanted: int) -> bytes:
    """Return data with other last four bytes, so that its CRC-32 is ``wanted``."""
    table = [zlib.crc32(bytes([i])) ^ zlib.crc32(b"\0") for i in range(256)]  # of the last byte alone
    register = wanted ^ 0xFFFFFFFF
    for _ in range(4):
        index = next(i for i in range(256) if table[i] >> 24 == register >> 24)
        register = ((register ^ table[index]) << 8) | index
    state = zlib.crc32(data[:-4]) ^ 0xFFFFFFFF
    return data[:-4] + (register ^ state).to_bytes(4, "little")


def test_a_package_without_headers_is_named(tmp_path: Path, torch: Path) -> None:
    bare = wheel(tmp_path / "bare-1-py3-none-any.whl", {"bare/__init__.py": ""})
    with pytest.raises(PrerequisiteMissing, match="bare==1"):
        prepare_headers(torch, {"bare==1": bare}, tmp_path / "cache")


def test_a_stop_while_unpacking_leaves_nothing_that_looks_finished(
    tmp_path: Path, torch: Path, cuda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(toolbox, "extract", stop)
    with pytest.raises(KeyboardInterrupt):
        prepare_headers(torch, {}, tmp_path / "cache")
    assert list((tmp_path / "cache" / "headers").iterdir()) == []
    monkeypatch.undo()
    assert (prepare_headers(torch, {}, tmp_path / "cache").torch_include / "a.h").exists()


def test_a_full_disk_is_said_and_leaves_no_part(
    tmp_path: Path, torch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(toolbox.shutil, "copyfileobj", full)
    with pytest.raises(DiskFull, match="no room left"):
        extract(torch, tmp_path / "into", lambda name: True)
    assert not [path for path in (tmp_path / "into").rglob("*") if path.is_file()]


@pytest.mark.parametrize("size", [0, 10, 200])
def test_a_cut_wheel_is_refused(tmp_path: Path, torch: Path, size: int) -> None:
    torch.write_bytes(torch.read_bytes()[:size])
    with pytest.raises(WheelInvalid, match=r"torch\.whl"):
        extract(torch, tmp_path / "into", lambda name: True)


def test_a_damaged_member_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "torch.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("torch/include/a.h", "x" * 100)
    path.write_bytes(path.read_bytes().replace(b"x" * 100, b"x" * 99 + b"y"))
    with pytest.raises(WheelInvalid, match="CRC"):
        extract(path, tmp_path / "into", lambda name: True)


@pytest.mark.parametrize("how", DAMAGES)
def test_a_member_damaged_in_any_way_is_refused(tmp_path: Path, torch: Path, how: str) -> None:
    damage(torch, "torch/include/a.h", how)
    with pytest.raises(WheelInvalid, match="cannot be read"):
        extract(torch, tmp_path / "into", lambda name: True)


@pytest.mark.parametrize("name", ["../outside.h", "/absolute.h", "torch/../../outside.h"])
def test_no_member_leaves_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(WheelInvalid, match="member"):
        extract(wheel(tmp_path / "evil.whl", {name: "x"}), tmp_path / "into", lambda member: True)
    assert not (tmp_path / "outside.h").exists()


def test_libraries_come_from_the_folder_and_the_packages(tmp_path: Path, cuda: Path) -> None:
    lib = tmp_path / "lib"
    lib.mkdir()
    for name in toolbox.TORCH_LIBRARIES:
        (lib / name).touch()
    found = link_libraries(lib, [cuda], ["libcudart.so.12"], tmp_path / "nvidia")
    assert [path.name for path in found] == [*toolbox.TORCH_LIBRARIES, "libcudart.so.12"]
    with pytest.raises(PrerequisiteMissing, match=r"libnccl\.so\.2"):
        link_libraries(lib, [cuda], ["libnccl.so.2"], tmp_path / "nvidia")
    (lib / "libtorch_cuda.so").unlink()
    with pytest.raises(WheelInvalid, match=r"libtorch_cuda\.so"):
        link_libraries(lib, [cuda], [], tmp_path / "nvidia")
