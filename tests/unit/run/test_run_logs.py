"""Log files of workers, whose number on a node can change."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the log files are torch's")

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

from multiworld.run.workers.logs import LoneLogs, RunLogs, remove_empty


def test_a_node_that_takes_a_larger_slot_than_its_first_one(tmp_path):
    logs = RunLogs(DefaultLogsSpecs(str(tmp_path), redirects=Std.ALL), ([], []), 3)
    logs.prepare({0: {}, 1: {}})
    first = Path(LoneLogs(logs.next_start(1)).reify({0: {}}).stdouts[0])
    first.write_text("said")
    logs.prepare({0: {}, 1: {}, 2: {}})
    env: dict[int, dict[str, str]] = {0: {}}
    assert Path(LoneLogs(logs.next_start(2)).reify(env).stdouts[0]).parts[-3:] == (
        "attempt_0",
        "2",
        "stdout.log",
    )
    assert Path(env[0]["TORCHELASTIC_ERROR_FILE"]).parent.is_dir()
    assert first.read_text() == "said"


def test_a_run_of_which_no_folder_was_named_leaves_files_only(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    specs = DefaultLogsSpecs(redirects=Std.ALL)
    dest = specs.reify({0: {}, 1: {}})
    Path(dest.error_files[1]).write_text("{}")
    remove_empty(specs)
    left = [path for path in tmp_path.rglob("*") if not path.is_dir()]
    assert left == [Path(dest.error_files[1])]
    assert not Path(dest.error_files[0]).parent.exists()
    left[0].unlink()
    remove_empty(specs)
    assert list(tmp_path.iterdir()) == []


def test_folders_of_another_kind_of_log_files_stay(tmp_path):
    """Its folder may be one that runs share."""

    class Shared(DefaultLogsSpecs):
        pass

    (tmp_path / "another-run" / "attempt_0").mkdir(parents=True)
    remove_empty(Shared(str(tmp_path)))
    assert (tmp_path / "another-run" / "attempt_0").is_dir()
