"""The whole overlay build on a toy torch: what it makes, and what every kind of bad input gets."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import toytorch
from kits import fakewheel
from kits.unportedkit import commit_tag, git
from rich.console import Console
from toytorch import PYTHON, Toy

from m8d_build import errors
from m8d_build.cli import main
from m8d_build.files.blobs import blob_id
from m8d_build.files.lock import hold
from m8d_build.overlay import build as overlay
from m8d_build.overlay.build import OverlayRequest, build_overlay
from m8d_build.overlay.plan import Step
from m8d_build.progress import Silent
from m8d_build.series.read import load_series
from m8d_build.settings import Settings
from m8d_build.targets import load_targets
from multiworld.provenance.statement import Resource
from multiworld.provenance.wheel import verify_wheel
from multiworld.shim.loader import LOADER_ENTRY, loader_text
from multiworld.shim.marker import read_marker

pytestmark = [pytest.mark.compiler, pytest.mark.git]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return toytorch.make_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def toy(original: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    """The toy, with sources and patches of its own that a test may spoil."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(original.packages))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    shutil.copytree(original.tree, tmp_path / "pytorch")
    shutil.copytree(original.patches, tmp_path / "patches")
    return Toy(tmp_path / "pytorch", original.wheel, tmp_path / "patches", original.packages)


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache several tests share, so that most find their objects there; a comma in its path is no matter."""
    return tmp_path_factory.mktemp("a,cache")


def command(
    toy: Toy, tmp_path: Path, cache: Path, *more: str, wheel: Path | None = None, source: str = ""
) -> tuple[int, str]:
    said = io.StringIO()
    words = ["--patches", toy.patches, "--cache", cache, "overlay", "--torch", "2.6.0"]
    words += ["--source", source or toy.tree, "--wheel", wheel or toy.wheel, "--out", tmp_path / "out", *more]
    code = main([str(word) for word in words], console=Console(file=said, width=400))
    return code, said.getvalue()


def wheels_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.whl")) if folder.exists() else []


def leftovers(folder: Path) -> list[Path]:
    """What a stopped build might leave: parts and scratch folders."""
    if not folder.exists():
        return []
    return [
        p for p in folder.rglob("*") if p.name.endswith(".part") or p.name.startswith((".repack", ".part"))
    ]


def test_an_official_wheel_becomes_a_patched_one(toy: Toy, tmp_path: Path, shared_cache: Path) -> None:
    code, said = command(toy, tmp_path, shared_cache)
    assert code == 0, said
    (wheel,) = wheels_in(tmp_path / "out")
    assert wheel.name.startswith(f"torch-2.6.0+cu124.m8d1-{PYTHON}-{PYTHON}-manylinux_2_")
    for word in (str(wheel), "sha256:", "cleanup-only, marker", "python -m pip install"):
        assert word in said
    assert [line.split("]")[0] for line in said.splitlines() if line.startswith("[")] == [
        f"[{number}/{len(Step)}" for number in range(1, len(Step) + 1)
    ]


def test_other_patches_are_told_apart_by_the_version(toy: Toy, tmp_path: Path, shared_cache: Path) -> None:
    (patch,) = toy.patches.glob("v2.6.0/0001-*.patch")
    patch.write_text(patch.read_text().replace("Reason: ", "Reason: edited; ", 1))
    code, said = command(toy, tmp_path, shared_cache)
    assert code == 0, said
    (wheel,) = wheels_in(tmp_path / "out")
    digest = load_series(toy.patches, "2.6.0").digest
    assert wheel.name.startswith(f"torch-2.6.0+cu124.m8d1.edited{digest[:8]}-{PYTHON}-")


@pytest.fixture
def installed(toy: Toy, tmp_path: Path, shared_cache: Path) -> Path:
    code, said = command(toy, tmp_path, shared_cache)
    assert code == 0, said
    site = tmp_path / "site"
    with zipfile.ZipFile(wheels_in(tmp_path / "out")[0]) as archive:
        archive.extractall(site)
    with zipfile.ZipFile(next(toy.packages.glob("*.whl"))) as archive:
        archive.extractall(site)
    return site


def run_in(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    head = f"import ctypes\nlib = ctypes.CDLL({str(site / 'torch/lib/libtorch_cuda.so')!r})\n"
    return subprocess.run(
        [sys.executable, "-c", head + code], capture_output=True, text=True, check=False, timeout=60
    )


def test_code_of_the_official_library_runs_the_patched_units(installed: Path) -> None:
    done = run_in(installed, "print(lib.toy_answer(), lib.toy_name())")
    assert done.stdout.split() == ["42", "1"], done.stderr


def test_a_patched_python_file_is_in_the_wheel(installed: Path) -> None:
    assert (installed / "torch/distributed/distributed_c10d.py").read_text() == 'SAYS = "patched"\n'


def test_the_process_ends_well_although_both_libraries_hold_the_unit(installed: Path) -> None:
    """A variable with a destructor is destroyed once (shared by both copies, it would be destroyed twice)."""
    done = run_in(installed, "print(lib.toy_write())")
    assert (done.returncode, done.stdout.strip()) == (0, "59"), done.stderr


def test_what_a_unit_does_once_per_process_is_done_once(installed: Path) -> None:
    done = run_in(
        installed, f"print(ctypes.CDLL({str(installed / 'torch/lib/libtorch_cpu.so')!r}).toy_registered())"
    )
    assert done.stdout.strip() == "1", done.stderr


def test_without_the_overlay_nothing_loads(installed: Path) -> None:
    (installed / "torch/lib/nccl.so.2").unlink()
    done = run_in(installed, "print(lib.toy_answer())")
    assert done.returncode != 0
    assert "nccl.so.2" in done.stderr


def test_the_marker_and_the_library_say_the_same(installed: Path) -> None:
    marker = read_marker(installed / "torch")
    assert marker is not None
    assert [topic.name for topic in marker.topics] == ["cleanup-only", "marker"]
    assert (marker.local, marker.mode, marker.disagreements) == ("cu124.m8d1", "overlay", ())
    # In a process of its own: where a real torch is loaded, its libraries stand in for the toy's of the same name.
    ask = (
        "import ctypes, sys; library = ctypes.CDLL(sys.argv[1]); library.m8d_patch_info.restype = ctypes.c_char_p; "
        "print(library.m8d_patch_info().decode())"
    )
    said = subprocess.run(
        [sys.executable, "-c", ask, installed / "torch/lib/nccl.so.2"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert json.loads(said.stdout)["topics"] == ["cleanup-only", "marker"]


def test_the_loader_of_the_namespace_is_inside(installed: Path) -> None:
    assert (installed / LOADER_ENTRY).read_bytes() == loader_text()


def test_licence_and_notice_are_inside(toy: Toy, tmp_path: Path, shared_cache: Path) -> None:
    assert command(toy, tmp_path, shared_cache)[0] == 0
    with zipfile.ZipFile(wheels_in(tmp_path / "out")[0]) as archive:
        info = {name.partition("/")[2]: name for name in archive.namelist() if ".dist-info/" in name}
        assert "LICENSE" in info  # PyTorch's own stays
        assert b"Apache License" in archive.read(info["LICENSE.multiworld"])
        notice = archive.read(info["NOTICE.multiworld"]).decode()
    assert "torch/lib/nccl.so.2" in notice
    assert LOADER_ENTRY in notice
    assert "cleanup-only" in notice


def test_a_second_build_compiles_nothing_and_gives_the_same_wheel(toy: Toy, tmp_path: Path) -> None:
    first = command(toy, tmp_path, tmp_path / "cache", "--json")
    again = command(toy, tmp_path, tmp_path / "cache", "--json")
    one, two = json.loads(first[1]), json.loads(again[1])
    assert (one["cached_objects"], two["cached_objects"]) == (0, one["objects"])
    assert one["sha256"] == two["sha256"]


def test_the_plan_is_printed_and_nothing_is_done(toy: Toy, tmp_path: Path) -> None:
    code, said = command(toy, tmp_path, tmp_path / "cache", "--plan")
    assert code == 0
    assert "ProcessGroupNCCL.cpp" in said
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "cache").exists()


class Stopped(Silent):
    """A reporter that stops the build when a step begins, or when it ends."""

    def __init__(self, name: str, *, after: bool, error: BaseException) -> None:
        super().__init__()
        self._name, self._after, self._error = name, after, error

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        if name == self._name and not self._after:
            raise self._error
        yield
        if name == self._name and self._after:
            raise self._error


def request_of(toy: Toy) -> OverlayRequest:
    return OverlayRequest(
        load_targets(toy.patches).get("2.6.0"), PYTHON, wheel=toy.wheel, source=str(toy.tree)
    )


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", [step.title for step in Step])
def test_ctrl_c_at_any_step_leaves_nothing_half_made_and_the_next_run_finishes(
    toy: Toy, tmp_path: Path, shared_cache: Path, name: str, after: bool
) -> None:
    settings = Settings.load(cache=shared_cache, patches=toy.patches, out=tmp_path / "out", jobs=2)
    with pytest.raises(KeyboardInterrupt):
        build_overlay(request_of(toy), settings, Stopped(name, after=after, error=KeyboardInterrupt()))
    whole = name == "inspect" or (name == "repack" and after)
    assert len(wheels_in(tmp_path / "out")) == int(whole)
    assert not leftovers(tmp_path / "out")
    assert not (shared_cache / "work" / f"torch-2.6.0-{PYTHON}" / "build").exists()
    built = build_overlay(request_of(toy), settings, Silent())
    assert built.path.exists()


class Pruning(Silent):
    """A reporter that prunes the cache when the objects are there."""

    def __init__(self, cache: Path) -> None:
        super().__init__()
        self.cache, self.codes = cache, list[int]()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        if name == Step.LINK.title:
            self.codes.append(main(["--cache", str(self.cache), "cache", "--prune", "--days", "0"]))
        yield


def test_the_cache_is_not_pruned_while_a_build_works_with_it(toy: Toy, tmp_path: Path) -> None:
    settings = Settings.load(cache=tmp_path / "cache", patches=toy.patches, out=tmp_path / "out", jobs=2)
    reporter = Pruning(settings.cache)
    assert build_overlay(request_of(toy), settings, reporter).path.exists()
    assert reporter.codes == [errors.BuildBusy.exit_code]
    assert list((settings.cache / "objects").iterdir())


def test_ctrl_c_on_the_command_line_has_its_own_exit_code(
    toy: Toy, tmp_path: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(overlay, "compile_all", stop)
    code, said = command(toy, tmp_path, shared_cache)
    assert code == errors.Interrupted.exit_code == 130
    assert "goes on from" in said


def refused(outcome: tuple[int, str], error: type[errors.BuildError], *words: str) -> None:
    code, said = outcome
    assert code == error.exit_code, said
    for word in (error.__name__, *words):
        assert word in said


def test_an_unknown_version(toy: Toy, tmp_path: Path, shared_cache: Path) -> None:
    said = io.StringIO()
    words = ["--patches", str(toy.patches), "--cache", str(shared_cache), "overlay", "--torch", "9.9.9"]
    code = main(words, console=Console(file=said, width=400))
    refused((code, said.getvalue()), errors.UnknownVersion, "9.9.9", "2.6.0")


def test_no_source_reachable(
    toy: Toy, tmp_path: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("M8D_PYTORCH_GIT", (tmp_path / "no-repository").as_uri())
    refused(
        command(toy, tmp_path, shared_cache, source="git"),
        errors.SourceUnreachable,
        "no-repository",
        "--source",
    )
    refused(
        command(toy, tmp_path, shared_cache, source=str(tmp_path / "nowhere")),
        errors.SourceUnreachable,
        "nowhere",
    )


def test_a_blob_id_that_differs(toy: Toy, tmp_path: Path, shared_cache: Path) -> None:
    path = toy.tree / "torch/csrc/cuda/nccl.cpp"
    path.write_text(path.read_text() + "// somebody was here\n")
    refused(command(toy, tmp_path, shared_cache), errors.BlobMismatch, "nccl.cpp")


def test_near_sources_are_taken_if_asked_for_and_the_patches_still_apply_exactly(
    toy: Toy, tmp_path: Path, shared_cache: Path
) -> None:
    path = toy.tree / "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp"
    path.write_text(path.read_text() + "// somebody was here\n")
    code, said = command(toy, tmp_path, shared_cache, "--allow-unverified")
    assert code == 0, said
    (made,) = wheels_in(tmp_path / "out")
    assert made.name.startswith("torch-2.6.0+cu124.m8d1.unverified-")
    statement = verify_wheel(made).statement
    name = str(path.relative_to(toy.tree))
    assert statement.tools["unverified"] == name
    assert Resource(name, blob_id(path.read_bytes()), "gitBlob") in statement.inputs


HANDLERS = "torch/csrc/distributed/c10d/control_plane/Handlers.hpp"


def test_a_header_of_the_sources_that_is_not_on_record_is_refused_or_told(
    toy: Toy, tmp_path: Path, shared_cache: Path
) -> None:
    """The official wheel does not have it, so it is compiled from the source tree."""
    targets = toy.patches / "targets.toml"
    lines = targets.read_text().splitlines(keepends=True)
    targets.write_text("".join(line for line in lines if HANDLERS not in line))
    path = toy.tree / HANDLERS
    path.write_text(path.read_text() + "// changed\n")
    there = f'"{HANDLERS}" = "{blob_id(path.read_bytes())}"'
    for _ in ("compiled", "from the cache"):
        refused(command(toy, tmp_path, shared_cache), errors.BlobMismatch, there)
    assert not wheels_in(tmp_path / "out")
    code, said = command(toy, tmp_path, shared_cache, "--allow-unverified")
    assert code == 0, said
    (made,) = wheels_in(tmp_path / "out")
    assert made.name.startswith("torch-2.6.0+cu124.m8d1.unverified-")
    statement = verify_wheel(made).statement
    assert statement.tools["unverified"] == HANDLERS
    assert Resource(HANDLERS, blob_id(path.read_bytes()), "gitBlob") in statement.inputs


def test_such_a_header_is_seen_under_whatever_name_the_cache_has(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler writes the canonical path of a header of the source tree where that is the shorter one."""
    targets = toy.patches / "targets.toml"
    lines = targets.read_text().splitlines(keepends=True)
    targets.write_text("".join(line for line in lines if HANDLERS not in line))
    git(toy.tree, "init", "--quiet")
    commit_tag(toy.tree, "v2.6.0")
    monkeypatch.setenv("M8D_PYTORCH_GIT", toy.tree.as_uri())
    (tmp_path / "beside").mkdir()
    cache = tmp_path / "beside" / ".." / "cache"
    refused(command(toy, tmp_path, cache, source="git"), errors.BlobMismatch, HANDLERS)
    assert not wheels_in(tmp_path / "out")


@pytest.mark.parametrize("recorded", [True, False])
def test_a_package_that_is_not_the_one_on_record_is_refused_or_told(
    toy: Toy, tmp_path: Path, shared_cache: Path, recorded: bool
) -> None:
    """Its headers are compiled in. Without a record there is nothing to refuse, and the wheel says so."""
    targets = toy.patches / "targets.toml"
    lines = targets.read_text().splitlines(keepends=True)
    other = f'"toy-nccl==1.0" = "{"0" * 64}"\n' if recorded else ""
    targets.write_text("".join(other if line.startswith('"toy-nccl==1.0"') else line for line in lines))
    if recorded:
        refused(command(toy, tmp_path, shared_cache), errors.WheelUnreachable, "expected " + "0" * 64)
        assert not wheels_in(tmp_path / "out")
    code, said = command(toy, tmp_path, shared_cache, *(("--allow-unverified",) if recorded else ()))
    assert code == 0, said
    assert ("no SHA-256 is recorded for toy-nccl==1.0" in said) != recorded
    (made,) = wheels_in(tmp_path / "out")
    assert made.name.startswith("torch-2.6.0+cu124.m8d1.unverified-")
    assert verify_wheel(made).statement.tools["unverified"] == "toy-nccl==1.0"


def test_what_the_caller_knows_not_to_be_proven_is_in_label_and_statement(
    toy: Toy, tmp_path: Path, shared_cache: Path
) -> None:
    settings = Settings.load(cache=shared_cache, patches=toy.patches, out=tmp_path / "out", jobs=2)
    built = build_overlay(replace(request_of(toy), unproven=("sources of v2.6.0",)), settings, Silent())
    assert built.version == "2.6.0+cu124.m8d1.unverified"
    assert verify_wheel(built.path).statement.tools["unverified"] == "sources of v2.6.0"


def edit_patch(toy: Toy, old: bytes, new: bytes) -> None:
    path = toy.patches / "v2.6.0" / "0001-cleanup-only.patch"
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"-  return toy_nccl();", b"-  return toy_nccl( );"),  # would need fuzz
        (b"@@ -6,3 ", b"@@ -5,3 "),  # would need an offset
        (b"\n", b"\r\n"),
        (b"Reason: to see it done.\n", b""),
    ],
    ids=["fuzz", "offset", "crlf", "header"],
)
def test_a_patch_that_breaks_a_rule(
    toy: Toy, tmp_path: Path, shared_cache: Path, old: bytes, new: bytes
) -> None:
    edit_patch(toy, old, new)
    refused(command(toy, tmp_path, shared_cache), errors.PatchRejected, "verify")


def rebuilt(toy: Toy, tmp_path: Path, *, name: str = "", drop: str = "", **changes: bytes) -> Path:
    """The official wheel with entries changed (RECORD is right), or under another name."""
    with zipfile.ZipFile(toy.wheel) as archive:
        files = {n: archive.read(n) for n in archive.namelist() if not n.endswith(("/", "/RECORD"))}
    files = {n: d for n, d in files.items() if n != drop} | changes
    return fakewheel.write_wheel(tmp_path / "given", files, name=name or toy.wheel.name)


OTHER_PYTHON = "cp39"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("2.6.0", "2.5.0"),
        (PYTHON, OTHER_PYTHON),
        ("manylinux1_x86_64", "manylinux2014_aarch64"),
        ("torch-", "torchvision-"),
    ],
    ids=["version", "python", "platform", "project"],
)
def test_an_official_wheel_of_another_kind(
    toy: Toy, tmp_path: Path, shared_cache: Path, old: str, new: str
) -> None:
    given = rebuilt(toy, tmp_path, name=toy.wheel.name.replace(old, new))
    code, said = command(toy, tmp_path, shared_cache, "--allow-unverified", wheel=given)
    assert code in {errors.WheelMismatch.exit_code, errors.WheelInvalid.exit_code}, said
    assert new.rstrip("-") in said


def test_a_wheel_that_is_not_the_official_file(toy: Toy, tmp_path: Path, shared_cache: Path) -> None:
    given = rebuilt(
        toy,
        tmp_path,
        name=f"torch-2.6.0-1-{PYTHON}-{PYTHON}-manylinux1_x86_64.whl",
        **{"torch/new.py": b"1\n"},
    )
    refused(command(toy, tmp_path, shared_cache, wheel=given), errors.WheelMismatch)


def test_another_cuda_or_abi_than_on_record(toy: Toy, tmp_path: Path, shared_cache: Path) -> None:
    toytorch.write_target(toy, abi='{ cxx11_abi = true, abi_version = 11, std = "gnu++17", cuda = "12.4" }')
    refused(command(toy, tmp_path, shared_cache), errors.WheelMismatch, "cxx11_abi")


def test_a_wheel_that_is_patched_already(toy: Toy, tmp_path: Path, shared_cache: Path) -> None:
    assert command(toy, tmp_path, shared_cache)[0] == 0
    (patched,) = wheels_in(tmp_path / "out")
    refused(command(toy, tmp_path, shared_cache, wheel=patched), errors.WheelAlreadyPatched)
    assert wheels_in(tmp_path / "out") == [patched]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_truncated_wheel(toy: Toy, tmp_path: Path, shared_cache: Path, share: float) -> None:
    given = tmp_path / "cut" / toy.wheel.name
    given.parent.mkdir()
    data = toy.wheel.read_bytes()
    given.write_bytes(data[: int(len(data) * share)])
    refused(command(toy, tmp_path, shared_cache, wheel=given), errors.WheelInvalid, given.name)


def test_a_truncated_library(toy: Toy, tmp_path: Path, shared_cache: Path) -> None:
    with zipfile.ZipFile(toy.wheel) as archive:
        library = archive.read("torch/lib/libtorch_cuda.so")
    given = rebuilt(toy, tmp_path, **{"torch/lib/libtorch_cuda.so": library[:5000]})
    code, said = command(
        toy,
        tmp_path,
        shared_cache,
        "--allow-unverified",
        wheel=given.rename(given.with_name(f"torch-2.6.0-1-{PYTHON}-{PYTHON}-manylinux1_x86_64.whl")),
    )
    refused((code, said), errors.ElfInvalid, "libtorch_cuda.so")


def test_a_full_disk(toy: Toy, tmp_path: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(overlay.shutil, "disk_usage", lambda path: usage._replace(free=10_000_000))
    refused(command(toy, tmp_path, shared_cache), errors.DiskFull, "10 MB free")
    assert not wheels_in(tmp_path / "out")


def test_the_systems_folder_for_temporary_files_is_not_used(
    toy: Toy, tmp_path: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be full; the room that is asked for beforehand is in the cache and in the output folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    code, said = command(toy, tmp_path, shared_cache)
    assert code == 0, said
    assert wheels_in(tmp_path / "out")


def test_a_disk_that_fills_up_while_the_wheel_is_written(
    toy: Toy, tmp_path: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("m8d_build.wheel.repack.ZipWriter", full)
    refused(command(toy, tmp_path, shared_cache), errors.DiskFull)
    assert not wheels_in(tmp_path / "out")
    assert not leftovers(tmp_path / "out")


def test_a_wheel_that_does_not_agree_with_itself_goes_with_what_lies_beside_it(
    toy: Toy, tmp_path: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = overlay.inspect_wheel

    def look(*args: object, **more: object) -> object:
        return replace(real(*args, **more), disagreements=("RECORD",))  # type: ignore[arg-type]

    monkeypatch.setattr(overlay, "inspect_wheel", look)
    refused(command(toy, tmp_path, shared_cache), errors.CheckFailed, "RECORD")
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith("torch")] == []


def test_an_output_folder_that_cannot_be_written(toy: Toy, tmp_path: Path, shared_cache: Path) -> None:
    (tmp_path / "out").write_text("a file stands here\n")
    refused(command(toy, tmp_path, shared_cache), errors.OutputUnwritable, "--out")


def test_two_builds_at_once_in_one_folder(toy: Toy, tmp_path: Path, shared_cache: Path) -> None:
    with hold(tmp_path / "out", what="build something else"):
        refused(command(toy, tmp_path, shared_cache), errors.BuildBusy, "build something else")
    with hold(shared_cache / "work" / f"torch-2.6.0-{PYTHON}", what="build it into another folder"):
        refused(command(toy, tmp_path, shared_cache), errors.BuildBusy, "with --cache or M8D_CACHE")
    assert command(toy, tmp_path, shared_cache)[0] == 0


def test_a_missing_compiler(
    toy: Toy, tmp_path: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("M8D_CXX", "no-such-compiler")
    refused(command(toy, tmp_path, shared_cache), errors.CompilerMissing, "no-such-compiler")


def test_a_package_that_cannot_be_had(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(
        "m8d_build.environments.download.Retry.__init__.__defaults__",
        (1, 0.0, 60.0, lambda s: None, lambda: 0.0),
        raising=False,
    )
    refused(command(toy, tmp_path, tmp_path / "cache"), errors.WheelUnreachable, "toy-nccl==1.0")


def repatch(toy: Toy, tmp_path: Path, old: str, new: str) -> None:
    """Replace the first patch's change of nccl.cpp by another one."""
    monkey = toytorch._clean_up

    def change(tree: Path) -> None:
        toytorch._replace(tree / "torch/csrc/cuda/nccl.cpp", old, new)

    toytorch._clean_up = change  # type: ignore[assignment]
    try:
        toytorch.write_patches(toy, tmp_path / "repatch")
    finally:
        toytorch._clean_up = monkey


def test_a_patch_that_does_not_compile(toy: Toy, tmp_path: Path, shared_cache: Path) -> None:
    repatch(toy, tmp_path, "return toy_nccl();", "return no_such_name();")
    code, said = command(toy, tmp_path, shared_cache)
    refused((code, said), errors.CommandFailed, "no_such_name", "Full log:")
    assert "no_such_name" in next((tmp_path / "out" / "logs").glob("*nccl.log")).read_text()


def test_a_patch_that_uses_what_is_nowhere(toy: Toy, tmp_path: Path, shared_cache: Path) -> None:
    repatch(toy, tmp_path, "return toy_nccl();", "extern int nowhere(); return nowhere();")
    refused(command(toy, tmp_path, shared_cache), errors.CommandFailed, "link the overlay", "nowhere")


def test_a_patch_that_takes_a_function_away(toy: Toy, tmp_path: Path, shared_cache: Path) -> None:
    repatch(toy, tmp_path, "AutoNcclGroup::~AutoNcclGroup() {}\n", "")
    code, said = command(toy, tmp_path, shared_cache)
    assert code in {errors.CheckFailed.exit_code, errors.CommandFailed.exit_code}
    assert "AutoNcclGroup" in said
    assert not wheels_in(tmp_path / "out")


def test_a_patch_that_adds_an_exported_function(toy: Toy, tmp_path: Path, shared_cache: Path) -> None:
    repatch(
        toy,
        tmp_path,
        "int answer() {",
        "TORCH_CUDA_CPP_API int more() { return 1; }\nint answer() {",
    )
    refused(command(toy, tmp_path, shared_cache), errors.CheckFailed, "more")
    assert not wheels_in(tmp_path / "out")


def test_headers_of_other_sources_than_the_wheels(toy: Toy, tmp_path: Path, shared_cache: Path) -> None:
    given = rebuilt(toy, tmp_path, **{"torch/include/torch/csrc/cuda/nccl.h": b"#pragma once\n"})
    given = given.rename(given.with_name(f"torch-2.6.0-1-{PYTHON}-{PYTHON}-manylinux1_x86_64.whl"))
    refused(
        command(toy, tmp_path, shared_cache, "--allow-unverified", wheel=given),
        errors.WheelMismatch,
        "nccl.h",
    )


def test_a_python_file_of_other_sources_than_the_wheels(toy: Toy, tmp_path: Path, shared_cache: Path) -> None:
    given = rebuilt(toy, tmp_path, **{"torch/distributed/distributed_c10d.py": b"SAYS = 1\n"})
    given = given.rename(given.with_name(f"torch-2.6.0-1-{PYTHON}-{PYTHON}-manylinux1_x86_64.whl"))
    refused(
        command(toy, tmp_path, shared_cache, "--allow-unverified", wheel=given),
        errors.WheelMismatch,
        "distributed_c10d.py",
    )


def test_a_target_without_a_recipe(toy: Toy, tmp_path: Path, shared_cache: Path) -> None:
    toytorch.write_target(toy, units="[]", status='"applies"')
    refused(command(toy, tmp_path, shared_cache), errors.UnknownVersion, "cannot be built yet", "targets")
    refused(command(toy, tmp_path, shared_cache, "--plan"), errors.UnknownVersion)


def test_a_target_that_is_not_verified_says_so_first(toy: Toy, tmp_path: Path, shared_cache: Path) -> None:
    toytorch.write_target(toy, status='"applies"', note='"near sources"')
    code, said = command(toy, tmp_path, shared_cache, "--plan")
    assert code == 0
    assert said.startswith("torch 2.6.0 is not verified (applies): near sources.")


@pytest.mark.parametrize("jobs", ["0", "-3", "two"])
def test_a_wrong_number_of_jobs(toy: Toy, tmp_path: Path, shared_cache: Path, jobs: str) -> None:
    assert command(toy, tmp_path, shared_cache, "--jobs", jobs)[0] == 2


@pytest.mark.parametrize("words", [("inspect",), ("check",)])
def test_a_wheel_that_is_not_there(tmp_path: Path, words: tuple[str, ...]) -> None:
    said = io.StringIO()
    code = main([*words, str(tmp_path / "no.whl")], console=Console(file=said, width=400))
    refused((code, said.getvalue()), errors.WheelUnreachable, "is not there")
