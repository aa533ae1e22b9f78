from __future__ import annotations

import argparse
import errno
import io
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from kits.sourcekit import (
    CPP,
    ENOSPC,
    FILES,
    contents,
    make_settings,
    write_target,
    write_tree,
)

from m8d_build.cli import fetch as fetch_command
from m8d_build.errors import (
    BuildBusy,
    DiskFull,
    OutputUnwritable,
    WrongTree,
)
from m8d_build.files.disk import copy_sources
from m8d_build.files.lock import pruning
from m8d_build.progress import Console
from m8d_build.sources import SourceTree


@pytest.fixture
def target(tmp_path):
    return write_target(tmp_path / "patches")


@pytest.fixture
def settings(tmp_path):
    return make_settings(tmp_path)


def run_fetch(settings, *arguments):
    parser = argparse.ArgumentParser()
    fetch_command.configure_parser(parser)
    console = Console(file=io.StringIO(), width=60, highlight=False)
    code = fetch_command.execute(parser.parse_args(["--torch", "2.6.0", *arguments]), settings, console)
    return code, console.file.getvalue()


def test_the_command_prints_path_and_origin_unbroken(target, settings, tmp_path):
    root = write_tree(tmp_path / "a long name that a narrow terminal would break" / "[mine]", FILES)
    code, text = run_fetch(settings, "--source", str(root))
    assert code == 0
    assert f"torch 2.6.0: {root}\n" in text
    assert f"from folder {root} (blob ids checked)\n" in text


def test_the_command_prints_json(target, settings, tmp_path):
    root = write_tree(tmp_path / "mine", {**FILES, CPP: b"other\n"})
    code, text = run_fetch(settings, "--source", str(root), "--json", "--allow-unverified")
    said = json.loads(text)
    assert code == 0
    assert said["path"] == str(root)
    assert said["origin"] == f"folder {root}"
    assert said["torch"] == "2.6.0"
    assert said["verified"] is False
    assert CPP in said["notes"][0]


def test_the_command_copies_what_is_needed_into_a_new_folder(target, settings, tmp_path):
    root = write_tree(tmp_path / "mine", {**FILES, ".git/config": b"", "docs/x": b""})
    out = tmp_path / "new" / "copy"
    code, text = run_fetch(settings, "--source", str(root), "--out", str(out))
    assert code == 0
    assert f"torch 2.6.0: {out}\n" in text
    assert contents(out) == FILES
    assert [p.name for p in out.parent.iterdir()] == ["copy"]


def test_the_cache_is_not_pruned_while_the_command_copies_from_it(target, settings, tmp_path, monkeypatch):
    copied = []

    def copy(source, to):
        with pytest.raises(BuildBusy), pruning(settings.cache):
            pass
        copied.append(source)
        copy_sources(source, to)

    monkeypatch.setattr(fetch_command, "copy_sources", copy)
    kept = SourceTree(write_tree(settings.cache / "sources", FILES), "kept", target)
    monkeypatch.setattr(fetch_command, "fetch_source", lambda *_, **__: kept)
    assert run_fetch(settings, "--source", "cache", "--out", str(tmp_path / "copy"))[0] == 0
    assert copied


def test_a_folder_needs_no_cache(target, settings, tmp_path):
    root = write_tree(tmp_path / "mine", FILES)
    without = replace(settings, cache=Path("/proc/nowhere"))
    assert run_fetch(without, "--source", str(root))[0] == 0


def test_the_command_never_writes_into_a_used_folder(target, settings, tmp_path):
    root, out = write_tree(tmp_path / "mine", FILES), write_tree(tmp_path / "used", {"mine.txt": b"keep\n"})
    with pytest.raises(OutputUnwritable, match="something is there"):
        run_fetch(settings, "--source", str(root), "--out", str(out))
    with pytest.raises(OutputUnwritable):
        run_fetch(settings, "--source", str(root), "--out", str(out / "mine.txt"))
    assert contents(out) == {"mine.txt": b"keep\n"}


@pytest.mark.parametrize(("stop", "error"), [(ENOSPC, DiskFull), (KeyboardInterrupt(), KeyboardInterrupt)])
def test_a_stopped_copy_leaves_nothing(target, settings, tmp_path, monkeypatch, stop, error):
    root, out = write_tree(tmp_path / "mine", FILES), tmp_path / "new" / "copy"

    def stopped(*_):
        raise stop

    monkeypatch.setattr(shutil, "copy2", stopped)
    with pytest.raises(error):
        run_fetch(settings, "--source", str(root), "--out", str(out))
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "error", "says"),
    [
        (errno.ENOSPC, DiskFull, "no room left under {out}"),
        (errno.EDQUOT, DiskFull, "no room left under {out}"),
        (errno.EACCES, WrongTree, "could not be copied: [Errno 13]"),
    ],
)
def test_errors_that_a_copied_folder_has_collected_are_told(
    target, settings, tmp_path, monkeypatch, code, error, says
):
    """shutil goes on after each of them, and raises an error without a number at the end."""
    root, out = write_tree(tmp_path / "mine", FILES), tmp_path / "new" / "copy"

    def failing(source, to, **_):
        raise OSError(code, os.strerror(code), str(to))

    monkeypatch.setattr(shutil, "copyfile", failing)
    with pytest.raises(error) as caught:
        run_fetch(settings, "--source", str(root), "--out", str(out))
    assert says.format(out=out) in str(caught.value)
    assert list(out.parent.iterdir()) == []
