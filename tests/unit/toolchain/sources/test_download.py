from __future__ import annotations

import errno
import os
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from kits.fakewheel import DAMAGES, damage

from m8d_build.environments import download
from m8d_build.environments.download import Retry, WheelRequest, get_wheel, official_request
from m8d_build.errors import (
    BuildBusy,
    CommandFailed,
    DiskFull,
    PrerequisiteMissing,
    WheelInvalid,
    WheelMismatch,
    WheelUnreachable,
)
from m8d_build.files.blobs import file_sha256
from m8d_build.files.lock import hold
from m8d_build.proc import Finished
from m8d_build.progress import Silent
from m8d_build.settings import Settings
from m8d_build.targets import load_targets

PURE = "demo-1.2-py3-none-any.whl"
DEMO = WheelRequest("demo", "1.2")
OFFLINE = "WARNING: Retrying (Retry(total=0)) after connection broken\nERROR: No matching distribution found"
OTHERS = "ERROR: Could not find a version that satisfies the requirement demo===1.2 (from versions: 1.0, 1.1)"


def write_wheel(path: Path, text: str = "x = 1\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        # Of a fixed time: a zip that is written a moment later would be another file.
        archive.writestr(zipfile.ZipInfo("demo.py", (2025, 1, 25, 1, 17, 20)), text * 50)
    return path


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


@dataclass
class FakePip:
    """Each call takes the next step of the script: a wheel to put down, or an exception."""

    script: list[object]
    commands: list[list[str]] = field(default_factory=list)

    def __call__(self, command, *, what, env=None, timeout=0.0):
        self.commands.append([str(part) for part in command])
        into = Path(command[command.index("--dest") + 1])
        assert env["TMPDIR"] == str(into), "the room that a download takes is the cache's alone"
        step = self.script.pop(0)
        if isinstance(step, BaseException):
            (into / "half.whl").write_bytes(b"PK")
            raise step
        if isinstance(step, str):
            write_wheel(into / step)
        elif step is not None:
            step(into)
        return Finished("", 0.1)


@dataclass
class Clock:
    now: float = 0.0
    pauses: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def retry(self, **more) -> Retry:
        return Retry(sleep=self.sleep, clock=lambda: self.now, **more)


def failed(tail: str) -> CommandFailed:
    return CommandFailed("could not download demo==1.2: python exited with 1", tail=tail)


TARGETS = """
schema = 1
[[target]]
version = "2.6.0"
tag = "v2.6.0"
status = "applies"
"""
WHEEL = """
[[target.wheels]]
filename = "torch-2.6.0-{tags}-manylinux1_x86_64.whl"
sha256 = "{sha256}"
local = "cu124"
git_version = ""
"""


@pytest.fixture
def settings(tmp_path):
    return Settings.load(cache=tmp_path / "cache", out=tmp_path / "out", environ={})


@pytest.fixture
def kept(settings):
    return settings.cache / "wheels"


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith(".m8d.lock"))


def test_a_wheel_is_downloaded_once_and_then_taken_from_the_cache(settings, kept):
    pip = FakePip([PURE])
    first = get_wheel(DEMO, settings, pip=pip)
    assert get_wheel(DEMO, settings, pip=pip) == first == kept / PURE
    assert len(pip.commands) == 1
    assert leftovers(kept) == [PURE, f"{PURE}.sha256"]


def test_a_kept_wheel_that_is_taken_is_in_use_whatever_the_file_system_notes(settings, kept):
    """One may note nothing when a file is read (noatime): what is used daily would be pruned."""
    pip = FakePip([PURE])
    get_wheel(DEMO, settings, pip=pip)
    files = [kept / PURE, kept / f"{PURE}.sha256"]
    for path in files:
        os.utime(path, (0, 0))
    get_wheel(DEMO, settings, pip=pip)
    assert all(path.stat().st_mtime > 0 for path in files)


def test_pip_is_the_running_pythons_and_asked_for_exactly_one_wheel(settings):
    pip = FakePip([PURE])
    get_wheel(DEMO, settings, pip=pip)
    command = pip.commands[0]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "--no-input"} <= set(command)
    assert command[-1] == "demo===1.2"
    assert not {"--python-version", "--platform", "--index-url", "--isolated"} & set(command)


def test_another_python_and_platform_are_passed_on(settings):
    name = "demo-1.2-cp312-cp312-manylinux1_x86_64.whl"
    pip = FakePip([name])
    request = WheelRequest("demo", "1.2", "cp312", ("manylinux1_x86_64",))
    assert get_wheel(request, settings, pip=pip).name == name
    command = pip.commands[0]
    assert command[command.index("--python-version") + 1] == "3.12"
    assert command[command.index("--abi") + 1] == "cp312"
    assert command[command.index("--platform") + 1] == "manylinux1_x86_64"


@pytest.mark.parametrize("tampered", [cut, lambda p: p.write_bytes(b""), lambda p: write_wheel(p, "y = 2\n")])
def test_a_kept_file_that_is_cut_or_altered_is_fetched_again(settings, kept, tampered):
    pip, reporter = FakePip([PURE, PURE]), Silent()
    good = file_sha256(get_wheel(DEMO, settings, pip=pip))
    tampered(kept / PURE)
    assert file_sha256(get_wheel(DEMO, settings, pip=pip, reporter=reporter)) == good
    assert len(pip.commands) == 2
    assert any("fetching it again" in note for note in reporter.notes)


def test_a_file_someone_put_into_the_cache_is_used_if_it_is_whole(settings, kept):
    write_wheel(kept / PURE)
    assert get_wheel(DEMO, settings, pip=FakePip([])) == kept / PURE
    cut(kept / PURE)
    pip = FakePip([PURE])
    get_wheel(DEMO, settings, pip=pip)
    assert len(pip.commands) == 1


def test_a_kept_file_without_the_recorded_hash_is_not_the_official_one(settings, kept, tmp_path):
    official = write_wheel(tmp_path / "official" / PURE, "official\n")
    write_wheel(kept / PURE, "someone else's\n")
    request = WheelRequest("demo", "1.2", filename=PURE, sha256=file_sha256(official))
    pip = FakePip([lambda into: (into / PURE).write_bytes(official.read_bytes())])
    assert file_sha256(get_wheel(request, settings, pip=pip)) == request.sha256
    assert len(pip.commands) == 1


def test_failures_are_retried_with_growing_pauses_and_each_is_told(settings, kept):
    clock, pip = Clock(), FakePip([failed(OFFLINE), failed(OFFLINE), failed(OFFLINE), failed(OFFLINE)])
    with pytest.raises(WheelUnreachable) as caught:
        get_wheel(DEMO, settings, pip=pip, retry=clock.retry(attempts=4, pause=2))
    assert clock.pauses == [2, 4, 8]
    assert [f"attempt {n}:" in str(caught.value) for n in (1, 2, 3, 4)] == [True] * 4
    assert "No matching distribution" in str(caught.value)
    assert caught.value.next_step
    assert leftovers(kept) == []


def test_a_later_attempt_succeeds(settings):
    clock = Clock()
    assert get_wheel(DEMO, settings, pip=FakePip([failed(OFFLINE), PURE]), retry=clock.retry()).name == PURE
    assert clock.pauses == [2]


def test_pauses_end_with_the_time_allowed(settings):
    clock, pip = Clock(), FakePip([failed(OFFLINE)] * 9)
    with pytest.raises(WheelUnreachable):
        get_wheel(DEMO, settings, pip=pip, retry=clock.retry(attempts=9, pause=10, within=35))
    assert clock.pauses == [10, 20]
    assert clock.now < 35


def test_an_index_that_has_only_other_versions_is_not_asked_again(settings):
    clock, pip = Clock(), FakePip([failed(OTHERS)])
    with pytest.raises(WheelUnreachable, match=r"from versions: 1\.0, 1\.1"):
        get_wheel(DEMO, settings, pip=pip, retry=clock.retry())
    assert clock.pauses == []


def test_versions_listed_while_an_index_could_not_be_reached_are_not_the_last_word(settings):
    clock, pip = Clock(), FakePip([failed(f"{OFFLINE}\n{OTHERS}"), PURE])
    assert get_wheel(DEMO, settings, pip=pip, retry=clock.retry()).name == PURE


def test_a_damaged_kept_file_is_removed_even_if_no_other_can_be_had(settings, kept):
    get_wheel(DEMO, settings, pip=FakePip([PURE]))
    cut(kept / PURE)
    with pytest.raises(WheelUnreachable):
        get_wheel(DEMO, settings, pip=FakePip([failed(OFFLINE)]), retry=Clock().retry(attempts=1))
    assert leftovers(kept) == []


@pytest.mark.parametrize("how", DAMAGES)
def test_a_kept_file_without_a_hash_is_fetched_again_however_it_is_damaged(settings, kept, how):
    kept.mkdir(parents=True)
    with zipfile.ZipFile(kept / PURE, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("demo.py", "x = 1\n" * 50)
    damage(kept / PURE, "demo.py", how)
    pip = FakePip([PURE])
    assert get_wheel(DEMO, settings, pip=pip) == get_wheel(DEMO, settings, pip=pip) == kept / PURE
    assert len(pip.commands) == 1


def test_what_a_killed_download_left_is_removed(settings, kept):
    (kept / ".part-abc").mkdir(parents=True)
    (kept / ".part-abc" / PURE).write_bytes(b"half")
    get_wheel(DEMO, settings, pip=FakePip([PURE]))
    assert leftovers(kept) == [PURE, f"{PURE}.sha256"]


def test_a_long_list_of_versions_is_told_short(settings):
    many = ", ".join(f"1.{n}" for n in range(30, 90))
    with pytest.raises(WheelUnreachable) as caught:
        get_wheel(DEMO, settings, pip=FakePip([failed(OTHERS.replace("1.0, 1.1", many))]))
    assert "(from versions: ..., 1.84, 1.85, 1.86, 1.87, 1.88, 1.89)" in str(caught.value)


def test_a_download_with_another_hash_is_never_kept(settings, kept):
    request = WheelRequest("demo", "1.2", filename=PURE, sha256="0" * 64)
    with pytest.raises(WheelUnreachable, match="expected 0000"):
        get_wheel(request, settings, pip=FakePip([PURE, PURE]), retry=Clock().retry(attempts=2))
    assert leftovers(kept) == []


@pytest.mark.parametrize("brought", ["demo-1.2+cu124-py3-none-any.whl", "demo-1.3-py3-none-any.whl", None])
def test_another_file_than_the_one_asked_for_is_never_kept(settings, kept, brought):
    with pytest.raises(WheelUnreachable, match="pip brought"):
        get_wheel(DEMO, settings, pip=FakePip([brought]), retry=Clock().retry(attempts=1))
    assert leftovers(kept) == []


def test_a_cut_download_is_noticed_without_a_hash(settings, kept):
    def half(into):
        cut(write_wheel(into / PURE))

    clock = Clock()
    assert get_wheel(DEMO, settings, pip=FakePip([half, PURE]), retry=clock.retry()) == kept / PURE
    assert clock.pauses == [2]


def test_a_full_disk_is_told_as_such_and_leaves_nothing(settings, kept):
    tail = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    with pytest.raises(DiskFull):
        get_wheel(DEMO, settings, pip=FakePip([failed(tail)]))
    assert leftovers(kept) == []


def test_a_disk_that_fills_while_the_wheel_is_kept(settings, kept, monkeypatch):
    def full(got, folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    get_wheel(WheelRequest("first", "1"), settings, pip=FakePip(["first-1-py3-none-any.whl"]))
    before = leftovers(kept)
    with monkeypatch.context() as patched:
        patched.setattr(download, "_keep", full)
        with pytest.raises(DiskFull):
            get_wheel(DEMO, settings, pip=FakePip([PURE]))
    assert leftovers(kept) == before


def test_ctrl_c_leaves_nothing_half_made(settings, kept):
    with pytest.raises(KeyboardInterrupt):
        get_wheel(DEMO, settings, pip=FakePip([KeyboardInterrupt()]))
    assert leftovers(kept) == []
    assert get_wheel(DEMO, settings, pip=FakePip([PURE])) == kept / PURE


def test_the_users_file_wins_over_cache_and_network(settings, kept, tmp_path):
    write_wheel(kept / PURE)
    mine = write_wheel(tmp_path / "mine" / PURE, "mine\n")
    assert get_wheel(DEMO, settings, local=mine, pip=FakePip([])) == mine


def test_the_users_file_must_be_there(settings, tmp_path):
    with pytest.raises(WheelUnreachable, match=r"gone\.whl is not there"):
        get_wheel(DEMO, settings, local=tmp_path / "gone.whl", pip=FakePip([]))


def test_the_users_copy_of_the_official_file_must_have_its_hash(settings, tmp_path):
    mine = write_wheel(tmp_path / PURE)
    right = file_sha256(mine)
    request = WheelRequest("demo", "1.2", filename=PURE, sha256=right)
    assert get_wheel(request, settings, local=mine) == mine
    cut(mine)
    with pytest.raises(WheelInvalid, match=right):
        get_wheel(request, settings, local=mine)


def test_a_python_without_pip_is_told_how_to_get_it(settings, monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(PrerequisiteMissing, match="ensurepip"):
        get_wheel(DEMO, settings, pip=FakePip([]))


def test_an_import_hook_is_not_asked_for_pip(settings, monkeypatch):
    # setuptools' hook warns when it is asked for pip in a process that has imported distutils.
    class Hook:
        def find_spec(self, name, path=None, target=None):
            assert name != "pip"

    monkeypatch.setattr(sys, "meta_path", [Hook(), *sys.meta_path])
    get_wheel(DEMO, settings, pip=FakePip([PURE]))


def test_two_downloads_at_once_do_not_meet(settings, kept, monkeypatch):
    monkeypatch.setattr(download, "WAIT", 0)
    with (
        hold(kept, what="download something"),
        pytest.raises(BuildBusy, match=r"download something.*M8D_CACHE"),
    ):
        get_wheel(DEMO, settings, pip=FakePip([]))


def test_wheels_for_other_machines_in_the_cache_are_left_alone(settings, kept):
    other = write_wheel(kept / "demo-1.2-cp27-cp27m-win32.whl")
    assert get_wheel(DEMO, settings, pip=FakePip([PURE])) == kept / PURE
    assert other.exists()


def test_the_official_request_is_for_the_very_file_on_record(tmp_path):
    tags = ["cp311-cp311", "cp313-cp313t", "cp313-cp313"]  # the middle one is for a free-threaded Python
    wheels = [WHEEL.format(tags=tag, sha256=str(number) * 64) for number, tag in enumerate(tags)]
    (tmp_path / "targets.toml").write_text(TARGETS + "".join(wheels), encoding="utf-8")
    known = load_targets(tmp_path).get("2.6.0")
    assert official_request(known, "cp311") == WheelRequest(
        "torch",
        "2.6.0",
        "cp311",
        ("manylinux1_x86_64",),
        "torch-2.6.0-cp311-cp311-manylinux1_x86_64.whl",
        "0" * 64,
    )
    assert official_request(known, "cp313").sha256 == "2" * 64
    with pytest.raises(WheelMismatch, match="cp310"):
        official_request(known, "cp310")
