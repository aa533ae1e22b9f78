from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from m8d_build.errors import BuildBusy, DiskFull, OutputUnwritable
from m8d_build.files import lock
from m8d_build.files.lock import CACHE_OPTION, HOLDER_NAME, hold, holder_of

BUILD = Path(lock.__file__).resolve().parents[1]
HOLDS_UNTIL_ENDED = """
import sys
from pathlib import Path
from m8d_build.files.lock import hold
with hold(Path(sys.argv[1]), what="build torch 2.6.0"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other_holder(tmp_path):
    environment = {**os.environ, "PYTHONPATH": f"{BUILD}{os.pathsep}{BUILD.parent}"}
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_UNTIL_ENDED, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_a_second_holder_is_told_who_holds_it_and_since_when(tmp_path, other_holder):
    since = holder_of(tmp_path).since
    with pytest.raises(BuildBusy) as caught, hold(tmp_path, what="another", clock=lambda: since + 75):
        pass
    text = str(caught.value)
    assert f"process {other_holder.pid} on " in text
    assert "build torch 2.6.0" in text
    assert "UTC, for 75 s" in text
    assert str(tmp_path) in text
    assert caught.value.next_step


def test_the_advice_is_the_option_that_names_the_folder(tmp_path, other_holder):
    with pytest.raises(BuildBusy, match="another folder with --out"), hold(tmp_path, what="another"):
        pass
    with (
        pytest.raises(BuildBusy, match="with --cache or M8D_CACHE"),
        hold(tmp_path, what="x", option=CACHE_OPTION),
    ):
        pass


def test_a_killed_holder_leaves_the_folder_free(tmp_path, other_holder):
    other_holder.send_signal(signal.SIGKILL)
    other_holder.wait(timeout=30)
    assert holder_of(tmp_path).pid == other_holder.pid  # its word stays behind, its lock does not
    with hold(tmp_path, what="the next") as holder:
        assert holder_of(tmp_path) == holder
        assert holder.pid == os.getpid()


def test_one_process_cannot_hold_a_folder_twice(tmp_path):
    with hold(tmp_path, what="outer"):
        with pytest.raises(BuildBusy, match="outer"), hold(tmp_path, what="inner"):
            pass
        assert holder_of(tmp_path).what == "outer"  # the failed one took nothing away


def test_it_is_free_again_after_an_error_inside(tmp_path):
    with pytest.raises(KeyboardInterrupt), hold(tmp_path, what="first"):
        raise KeyboardInterrupt
    with hold(tmp_path, what="second"):
        pass
    assert not (tmp_path / HOLDER_NAME).exists()


def test_two_folders_are_held_side_by_side(tmp_path):
    with hold(tmp_path / "a", what="one"), hold(tmp_path / "b" / "c", what="two"):
        assert holder_of(tmp_path / "b" / "c").what == "two"


def test_a_wait_ends_when_the_holder_ends(tmp_path, other_holder):
    ends_it = threading.Timer(0.2, other_holder.stdin.close)
    ends_it.start()
    with hold(tmp_path, what="patient", wait=30):
        assert holder_of(tmp_path).what == "patient"
    ends_it.join()


def test_a_holder_that_said_nothing_is_still_a_holder(tmp_path, other_holder):
    (tmp_path / HOLDER_NAME).write_text("{not json", encoding="utf-8")
    with pytest.raises(BuildBusy, match="did not say who it is"), hold(tmp_path, what="another"):
        pass


@pytest.mark.parametrize(("code", "error"), [(errno.EROFS, OutputUnwritable), (errno.ENOSPC, DiskFull)])
def test_a_folder_where_the_lock_file_is_and_nothing_can_be_written(tmp_path, monkeypatch, code, error):
    """As on a file system that was mounted read-only since."""
    with hold(tmp_path, what="the build before"):
        pass

    def refuse(*_args, **_more):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(error, match=str(tmp_path)), hold(tmp_path, what="x"):
        pytest.fail("it is held")
    monkeypatch.undo()
    with hold(tmp_path, what="the next build"):
        pass


def test_a_folder_that_cannot_be_made_is_unwritable(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(OutputUnwritable, match="file"), hold(tmp_path / "file" / "below", what="x"):
        pass


def test_a_full_disk_is_told_as_such_and_leaves_the_folder_free(tmp_path, monkeypatch):
    def full(folder, holder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(lock, "_tell", full)
        with pytest.raises(DiskFull), hold(tmp_path, what="x"):
            pytest.fail("must not get in")
    with hold(tmp_path, what="y"):
        pass


def test_programs_we_run_do_not_inherit_the_lock(tmp_path):
    with (
        hold(tmp_path, what="parent"),
        subprocess.Popen(
            [sys.executable, "-c", "import sys; print(1, flush=True); sys.stdin.read()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            close_fds=False,
        ) as child,
    ):
        child.stdout.readline()
        still_running = child.poll() is None
        child.stdin.close()
    assert still_running
    with hold(tmp_path, what="next"):
        pass


@pytest.mark.parametrize("locked", [lock.using, lock.pruning])
def test_a_cache_on_a_file_system_without_locks_is_told(tmp_path, monkeypatch, locked):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", no_locks)
    with (
        pytest.raises(OutputUnwritable, match=r"cannot be locked: No locks available.*M8D_CACHE"),
        locked(tmp_path),
    ):
        pass
