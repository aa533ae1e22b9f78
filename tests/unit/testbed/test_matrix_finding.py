"""Which builds the matrix takes where none were named."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from bed.errors import BedError
from matrix import finding

from m8d_build.environments.venvs import Environment
from m8d_build.errors import WheelUnreachable


def subject(path: Path, torch: str, *, at: int):
    path.write_bytes(b"")
    os.utime(path, (at, at))
    return SimpleNamespace(
        wheel=SimpleNamespace(path=path), marker=SimpleNamespace(torch=torch), recipe=f"recipe of {path.name}"
    )


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Environments that are names, and a note of which are held."""
    held: list[str] = []
    out = tmp_path / "out"
    out.mkdir()
    subjects = {
        each.wheel.path.name: each
        for each in (
            subject(out / "torch-2.9.1+cu1.m8d1-x.whl", "2.9.1", at=1),
            subject(out / "torch-2.6.0+cu1.m8d1-x.whl", "2.6.0", at=3),
            subject(out / "torch-2.6.0+cu1.m8d2-x.whl", "2.6.0", at=2),
        )
    }

    @contextmanager
    def hold(name: str):
        held.append(name)
        yield Environment(name, Path(name), Path())
        held.remove(name)

    class Kept:
        def __init__(self, root) -> None:
            assert root == tmp_path / "envs"

        def fresh(self, recipe, *, base, log):
            return hold(f"{recipe} on {base.name}")

    monkeypatch.setattr(
        finding, "environment", lambda version, given, *_, log, added: hold(f"official {version}")
    )
    monkeypatch.setattr(finding, "read_subject", lambda path: subjects[path.name])
    monkeypatch.setattr(finding, "Environments", Kept)
    return SimpleNamespace(
        held=held, settings=SimpleNamespace(out=out, cache=tmp_path), monkeypatch=monkeypatch
    )


def test_official_builds_and_the_newest_patched_wheel_of_each_version(world) -> None:
    with finding.found(world.settings, None, versions=["2.6.0", "2.14.1"]) as pythons:
        assert {name: str(path) for name, path in pythons.items()} == {
            "stock-2.6.0": "official 2.6.0",
            "stock-2.14.1": "official 2.14.1",
            "stock-2.9.1": "official 2.9.1",  # what the patched one is compared with
            "patched-2.6.0": "recipe of torch-2.6.0+cu1.m8d1-x.whl on official 2.6.0",
            "patched-2.9.1": "recipe of torch-2.9.1+cu1.m8d1-x.whl on official 2.9.1",
        }
        assert len(world.held) == 5
    assert world.held == []


def test_what_cannot_be_had_is_told_and_nothing_is_held_on_to(world) -> None:
    def fails(version, *_, **__):
        raise WheelUnreachable("no way to the wheel", rule="r", next_step="n")

    world.monkeypatch.setattr(finding, "environment", fails)
    with pytest.raises(BedError, match="no way to the wheel"), finding.found(world.settings, None):
        pass
    assert world.held == []


def test_without_patched_wheels_there_are_official_ones(world) -> None:
    for wheel in world.settings.out.iterdir():
        if wheel.suffix == ".whl":
            wheel.unlink()
    with finding.found(world.settings, None) as pythons:
        assert [*pythons] == [f"stock-{version}" for version in finding.STOCK]
