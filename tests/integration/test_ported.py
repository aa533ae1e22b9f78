"""A toy torch without a series of its own: the one of the version before is ported to it, built and checked."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import toytorch
from kits import fakewheel
from kits.unportedkit import commit_tag, git
from rich.console import Console
from toytorch import PYTHON, SOURCES, Toy

from m8d_build.cli import main
from m8d_build.errors import BlobMismatch, CommandFailed
from m8d_build.files.blobs import blob_id
from m8d_build.overlay.plan import Step
from multiworld.provenance.wheel import verify_wheel
from multiworld.shim.marker import parse_marker

pytestmark = [pytest.mark.compiler, pytest.mark.git]

UNIT = "torch/csrc/cuda/nccl.cpp"
HEADER = "torch/csrc/cuda/only_in_the_sources.h"
INCLUDING = f"#include <{HEADER}>\n" + SOURCES[UNIT]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return toytorch.make_toy(tmp_path_factory.mktemp("toy"))


def make(original: Toy, root: Path, unit: str, more: Mapping[str, str]) -> Toy:
    """Make 2.6.0 a version without a series, whose unit has other text; the toy's series is that of 2.5.0.

    ``more`` are further files of 2.6.0, which the wheel does not have.
    """
    repository, patches = root / "repository", root / "patches"
    for name, text in {**SOURCES, "version.txt": "2.5.0a0\n"}.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)
    git(repository, "init", "--quiet")
    commit_tag(repository, "v2.5.0")
    (repository / "version.txt").write_text(SOURCES["version.txt"])
    for name, text in {UNIT: unit, **more}.items():
        (repository / name).write_text(text)
    commit = commit_tag(repository, "v2.6.0")
    (patches / "v2.5.0").mkdir(parents=True)
    for path in (original.patches / "v2.6.0").iterdir():
        (patches / "v2.5.0" / path.name).write_text(path.read_text().replace("2.6.0", "2.5.0"))
    targets = (original.patches / "targets.toml").read_text().replace("2.6.0", "2.5.0")
    old, new = (blob_id(f"{version}a0\n".encode()) for version in ("2.6.0", "2.5.0"))
    assert old in targets
    planned = f'\n[[target]]\nversion = "2.6.0"\ntag = "v2.6.0"\nstatus = "planned"\ncommit = "{commit}"\n'
    (patches / "targets.toml").write_text(targets.replace(old, new) + planned)
    with zipfile.ZipFile(original.wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("torch/lib/")]
        libraries = {name.rpartition("/")[2]: archive.read(name) for name in names}
    version = fakewheel.VERSION.replace(fakewheel.COMMIT.encode(), commit.encode())
    wheel = toytorch.make_wheel(root / "official", libraries, **{"torch/version.py": version})
    return Toy(repository, wheel, patches, original.packages)


@pytest.fixture
def build(original: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Build 2.6.0, with that text of its unit; return exit code and what was said.

    ``more`` are further files of its commit; with ``untracked`` the sources are a checkout that has those, too.
    """
    for name, value in {
        "NO_INDEX": "1",
        "FIND_LINKS": str(original.packages),
        "CONFIG_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)

    def run(
        unit: str, more: Mapping[str, str] = {}, untracked: Mapping[str, str] = {}, *options: str
    ) -> tuple[int, str]:
        toy = make(original, tmp_path, unit, more)
        for name, text in untracked.items():
            (toy.tree / name).write_text(text)
        monkeypatch.setenv("M8D_PYTORCH_GIT", toy.tree.as_uri())
        said = io.StringIO()
        words = ["--patches", toy.patches, "--cache", tmp_path / "cache", "build", "--torch", "2.6.0"]
        words += ["--source", toy.tree if untracked else "git", "--wheel", toy.wheel]
        words += ["--out", tmp_path / "out", *options]
        return main([str(word) for word in words], console=Console(file=said, width=400)), said.getvalue()

    return run


def test_a_series_that_carries_over_is_built_checked_and_labelled(build, tmp_path: Path) -> None:
    code, said = build("// new in this version\n" + SOURCES[UNIT])
    assert code == 0, said
    (wheel,) = (tmp_path / "out").glob("*.whl")
    assert wheel.name.startswith("torch-2.6.0+cu124.m8d0.ported")
    assert "unverified" not in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        marker = parse_marker(archive.read("torch/m8d.json"))
    assert (marker.torch, marker.ported_from) == ("2.6.0", "2.5.0")
    assert verify_wheel(wheel).statement.tools["ported"] == "from 2.5.0's series, not proven by hand"
    report = json.loads(wheel.with_name(wheel.name + ".port.json").read_text())
    assert report["outcome"] == "built"
    assert [(t["topic"], t["state"]) for t in report["topics"]] == [
        ("cleanup-only", "moved"),
        ("marker", "adapted"),
    ]
    passed = [check["name"] for check in report["checks"] if check["result"] == "passed"]
    assert [name for name in passed if name in {step.title for step in Step}] == [step.title for step in Step]
    assert f"-{PYTHON}-" in report["wheel"]["file"]


def test_a_header_that_only_the_proven_sources_have_is_taken_and_recorded(build, tmp_path: Path) -> None:
    """No entry names it: the ported one names the files that the series it is made from had."""
    code, said = build(INCLUDING, {HEADER: "#pragma once\n"})
    assert code == 0, said
    (wheel,) = (tmp_path / "out").glob("*.whl")
    assert "unverified" not in wheel.name
    assert HEADER in {file.name for file in verify_wheel(wheel).statement.inputs}


def test_a_header_that_is_not_of_the_checkouts_commit_is_refused(build, tmp_path: Path) -> None:
    code, said = build(INCLUDING, untracked={HEADER: "#pragma once\n"})
    assert code == BlobMismatch.exit_code, said
    assert "1 of the files that were compiled are not committed in the checkout" in said
    assert HEADER in said
    assert "Remove them, or take --source git" in said
    assert not list((tmp_path / "out").glob("*.whl"))


def test_a_header_that_is_not_of_the_checkouts_commit_is_labelled_where_it_is_allowed(
    build, tmp_path: Path
) -> None:
    code, said = build(INCLUDING, {}, {HEADER: "#pragma once\n"}, "--allow-unverified")
    assert code == 0, said
    (wheel,) = (tmp_path / "out").glob("*.whl")
    assert ".unverified" in wheel.name


def test_a_series_that_carries_over_and_does_not_compile_is_reported(build, tmp_path: Path) -> None:
    """As where upstream has renamed what a patch calls: each hunk has its place, and that is all."""
    code, said = build(SOURCES[UNIT].replace("#include <nccl.h>\n", "int toy_nccl(int);\n"))
    assert code == CommandFailed.exit_code, said
    assert not list((tmp_path / "out").glob("*.whl"))
    (path,) = (tmp_path / "out").glob("port-*/report.json")
    report = json.loads(path.read_text())
    assert (report["outcome"], report["error"]["kind"]) == ("failed", "CommandFailed")
    assert report["checks"][-1]["name"] == Step.COMPILE.title
    assert str(path) in said
