"""What an overlay build refuses before it does anything."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from m8d_build.errors import BuildBusy, CompilerMissing, DiskFull, PreflightFailed
from m8d_build.files.lock import hold
from m8d_build.overlay.build import OverlayRequest, build_overlay
from m8d_build.progress import Silent
from m8d_build.settings import REPO_ROOT, Settings
from m8d_build.targets import load_targets


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.load(cache=tmp_path / "cache", out=tmp_path / "out", environ={})


def request_of() -> OverlayRequest:
    # Where it goes on after all, it ends at once.
    missing = Path("no-such-folder", "official.whl")
    return OverlayRequest(load_targets(REPO_ROOT / "patches").get("2.6.0"), "cp311", wheel=missing)


@pytest.mark.parametrize(("system", "machine"), [("Linux", "aarch64"), ("Darwin", "x86_64")])
def test_another_machine_is_refused_before_anything_is_made(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, machine: str
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(PreflightFailed, match=f"this is {system} on {machine}"):
        build_overlay(request_of(), settings, Silent())
    assert list(tmp_path.iterdir()) == []


def test_a_build_beside_one_in_the_same_folder_writes_nothing_there(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both looked whether they could write, and one removed the other's file: it was told of no such file."""
    with hold(settings.out, what="build the first"):
        there = sorted(settings.out.iterdir())
        monkeypatch.setattr(Path, "write_bytes", lambda _path, _data: 0)  # and it is gone
        with pytest.raises(BuildBusy, match="build the first"):
            build_overlay(request_of(), settings, Silent())
        assert sorted(settings.out.iterdir()) == there


def test_room_that_a_killed_build_took_is_this_ones(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [
        settings.cache / "work" / "torch-2.6.0-cp311" / "build" / "torch",
        settings.out / ".torch-2.6.0+cu124.m8d1.edited12345678-cp311-cp311-manylinux_2_28_x86_64.part",
        settings.out / ".wheel-abcdefgh",
    ]
    for path in left:
        path.mkdir(parents=True)
    usage = shutil.disk_usage(settings.out)
    free = 10**12
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _path: usage._replace(free=0 if any(p.exists() for p in left) else free)
    )
    with pytest.raises(CompilerMissing, match="no-such-compiler"):  # it went on
        build_overlay(request_of(), replace(settings, compiler="no-such-compiler"), Silent())
    free = 0
    with pytest.raises(DiskFull):
        build_overlay(request_of(), settings, Silent())


def test_a_system_that_does_not_say_which_cores_may_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert Settings.load(environ={}).jobs == os.cpu_count()
