from __future__ import annotations

import errno
import io
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from m8d_build.cli import main
from m8d_build.errors import BuildBusy, OutputUnwritable
from m8d_build.files import cachedir, lock
from m8d_build.files.cachedir import KINDS, prune, survey, unused
from m8d_build.files.lock import LOCK_NAME, hold, pruning, using
from m8d_build.settings import REPO_ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

NOW = 1_000_000_000.0


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    made = tmp_path / "cache"
    for name, age in {
        "wheels/old.whl": 40,
        "wheels/new.whl": 1,
        "envs/torch-2.6.0/bin/python": 50,
        "objects/a.o": 0,
    }.items():
        path = made / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 5000)
        os.utime(path, (NOW - age * 86400, NOW - age * 86400))
    os.utime(made / "envs/torch-2.6.0/bin", (NOW - 50 * 86400,) * 2)
    os.utime(made / "envs/torch-2.6.0", (NOW - 50 * 86400,) * 2)
    (made / "envs/.locks").mkdir()
    return made


def test_entries_are_what_lies_directly_in_a_kinds_folder(cache: Path) -> None:
    found = {entry.path.relative_to(cache).as_posix(): entry for entry in survey(cache)}
    assert set(found) == {"wheels/old.whl", "wheels/new.whl", "envs/torch-2.6.0", "objects/a.o"}
    assert all(entry.size >= 5000 for entry in found.values())
    assert {entry.kind for entry in found.values()} <= set(KINDS)


def test_only_what_was_not_used_lately_goes(cache: Path) -> None:
    old = unused(survey(cache), 30, NOW)
    assert {entry.path.name for entry in old} == {"old.whl", "torch-2.6.0"}
    assert prune(old) >= 10_000
    assert {entry.path.name for entry in survey(cache)} == {"new.whl", "a.o"}
    assert (cache / "envs/.locks").is_dir()


def test_what_an_interrupted_run_leaves_is_no_entry_and_goes_with_the_next(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path) -> None:
        if path.exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cachedir, "remove_tree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prune([entry for entry in survey(cache) if entry.kind == "envs"])
    assert not (cache / "envs/torch-2.6.0").exists(), "a part would be taken for the whole"
    assert [entry.kind for entry in unused(survey(cache), 45, NOW)] == ["envs"]
    prune(unused(survey(cache), 45, NOW))
    assert [path.name for path in (cache / "envs").iterdir()] == [".locks"]


LEFT = ["work/torch-2.6.0-cp311/build", "wheels/.part-abc", "envs/.part-tests-cp311-0"]


def leave(cache: Path, *places: str) -> None:
    for place in places:
        (cache / place).mkdir(parents=True)
        (cache / place / "half").write_bytes(b"x" * 5000)


def test_what_a_killed_run_leaves_is_shown_and_goes(cache: Path) -> None:
    leave(cache, *LEFT)
    with hold(cache / "work/torch-2.6.0-cp311", what="build"):
        pass  # its lock stays, as that of a killed run does
    found = [entry for entry in survey(cache) if entry.path.relative_to(cache).as_posix() in LEFT]
    assert [entry.used for entry in found] == [0.0] * 3
    assert prune(unused(survey(cache), 45, NOW)) >= 4 * 5000
    assert not any((cache / place).exists() for place in LEFT)
    assert {entry.path.name for entry in survey(cache)} == {"old.whl", "new.whl", "a.o"}


@pytest.mark.parametrize(
    ("place", "lock"),
    [
        (LEFT[0], "work/torch-2.6.0-cp311"),
        (LEFT[1], "wheels"),
        (LEFT[2], "envs/.locks/tests-cp311-0"),
        ("envs/torch-2.6.0-abc-cp311", "envs/.locks/torch-2.6.0-abc-cp311"),
        ("envs/tests-cp311-0", "envs/.locks/tests-cp311-0"),
        ("sources/v2.6.0", "sources/v2.6.0"),
        ("wheels/torch.whl", "wheels"),
    ],
)
def test_what_a_run_works_on_stays(cache: Path, place: str, lock: str) -> None:
    leave(cache, place)
    with hold(cache / lock, what="build"):
        left = [entry for entry in survey(cache) if entry.path == cache / place]
        assert (len(left), prune(left)) == (1, 0)
    assert (cache / place / "half").exists()


def test_sources_that_were_held_go_and_their_lock_stays(cache: Path) -> None:
    """A run that waits for the lock goes on with it."""
    leave(cache, "sources/v2.6.0/git/tree", "sources/v2.6.0/.work-distro")
    with hold(cache / "sources/v2.6.0", what="fetch"):
        pass
    lock = (cache / "sources/v2.6.0" / LOCK_NAME).stat().st_ino
    assert prune([entry for entry in survey(cache) if entry.kind == "sources"]) >= 2 * 5000
    assert [path.name for path in (cache / "sources/v2.6.0").iterdir()] == [LOCK_NAME]
    assert (cache / "sources/v2.6.0" / LOCK_NAME).stat().st_ino == lock
    assert "sources" not in {entry.kind for entry in survey(cache)}


@pytest.mark.parametrize("place", ["objects/.part-abc", "headers/.torch-abc.xyz", "deflate/.part-abc"])
def test_unfinished_work_without_a_lock_goes_after_a_day(cache: Path, place: str) -> None:
    leave(cache, place)
    assert cache / place not in {entry.path for entry in survey(cache)}
    for path in (cache / place / "half", cache / place):
        os.utime(path, (NOW, NOW))
    assert cache / place in {entry.path for entry in unused(survey(cache), 30, NOW)}


@pytest.mark.parametrize("gone", ["objects/a/b", "objects/a", "work/torch-2.6.0/build", "work/torch-2.6.0"])
def test_a_folder_that_vanishes_meanwhile_is_no_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    """A build that runs moves and removes folders while the cache is shown."""
    leave(cache, "objects/a/b/c", "work/torch-2.6.0/build/parts")

    def vanishing(real: Callable[..., object]) -> Callable[..., object]:
        def listing(path: object) -> object:
            if isinstance(path, (str, Path)) and Path(path) == cache / gone:
                (cache / gone).rename(cache.parent / "elsewhere")
            return real(path)

        return listing

    monkeypatch.setattr(os, "scandir", vanishing(os.scandir))
    monkeypatch.setattr(Path, "iterdir", vanishing(Path.iterdir))
    assert "objects" in shown(cache)
    assert not (cache / gone).exists()


def test_a_folder_is_as_young_as_its_youngest_file(cache: Path) -> None:
    os.utime(cache / "envs/torch-2.6.0/bin/python", (NOW, NOW))
    assert {entry.path.name for entry in unused(survey(cache), 30, NOW)} == {"old.whl"}


def test_a_link_is_removed_and_not_what_it_leads_to(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    (cache / "sources").mkdir()
    (cache / "sources" / "v2.6.0").symlink_to(tmp_path / "mine")
    prune([entry for entry in survey(cache) if entry.kind == "sources"])
    assert (tmp_path / "mine" / "file").exists()
    assert not (cache / "sources" / "v2.6.0").is_symlink()


def shown(cache: Path, *words: str) -> str:
    text = io.StringIO()
    assert main(["--cache", str(cache), "cache", *words], console=Console(file=text, width=200)) == 0
    return text.getvalue()


def test_the_command_shows_and_prunes(cache: Path) -> None:
    assert json.loads(shown(cache, "--json"))["kinds"]["wheels"]["entries"] == 2
    assert "removed" in shown(cache, "--prune", "--days", "0")
    assert survey(cache) == ()


def test_nothing_is_pruned_while_runs_use_the_cache(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = survey(cache)
    with using(cache), using(cache):
        assert main(["--cache", str(cache), "cache", "--prune", "--days", "0"]) == BuildBusy.exit_code
    assert "in use by a build" in capsys.readouterr().err
    assert survey(cache) == before
    assert "removed" in shown(cache, "--prune", "--days", "0")


def test_a_run_waits_for_the_end_of_a_prune(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        stack.enter_context(pruning(cache))
        waited: list[float] = []

        def ended(seconds: float) -> None:
            waited.append(seconds)
            stack.close()

        monkeypatch.setattr(lock.time, "sleep", ended)
        with using(cache):
            assert len(waited) == 1


def test_a_prune_that_does_not_end_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_PRUNED", 0.0)
    with pruning(cache), pytest.raises(BuildBusy, match="is being pruned"), using(cache):
        pytest.fail("not reached")


def test_files_of_another_user_are_told_and_all_else_goes(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path) -> None:
        if path.name == ".pruned-torch-2.6.0" and path.exists():
            raise PermissionError(errno.EACCES, "Permission denied", str(path / "bin"))

    monkeypatch.setattr(cachedir, "remove_tree", refused)
    assert main(["--cache", str(cache), "cache", "--prune", "--days", "0"]) == OutputUnwritable.exit_code
    said = capsys.readouterr().err
    assert "torch-2.6.0 cannot be removed" in said
    assert "Permission denied" in said
    assert [entry.kind for entry in survey(cache)] == ["envs"]


def test_an_empty_cache_is_shown(tmp_path: Path) -> None:
    assert "wheels" in shown(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    assert REPO_ROOT not in (tmp_path / "nothing").parents
