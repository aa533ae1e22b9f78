"""A shallow, sparse fetch of one tag; an interrupted one is resumed."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from m8d_build.errors import CommandFailed, PrerequisiteMissing
from m8d_build.files.disk import remove_tree
from m8d_build.proc import Unbroken

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from git.cmd import Git

__all__ = ["fetch_tag"]

GRACE = 5.0  # seconds between asking git to end and ending it
# Nothing of the user's configuration, no hooks, no background work, and no waiting on a line that has gone
# quiet.
OPTIONS = (
    "-c", "advice.detachedHead=false",
    "-c", "core.autocrlf=false",
    "-c", "core.hooksPath=/dev/null",
    "-c", "core.sparseCheckout=true",
    "-c", "core.sparseCheckoutCone=false",
    "-c", "gc.auto=0",
    "-c", "maintenance.auto=false",
    "-c", "http.lowSpeedLimit=1000",
    "-c", "http.lowSpeedTime=60",
)  # fmt: skip


def fetch_tag(url: str, tag: str, *, repo: Path, tree: Path, folders: Sequence[str], timeout: float) -> str:
    """Fetch a tag without history or unneeded contents, and check the wanted folders and top-level files out.

    What an earlier, stopped call left in ``repo`` is used again if it was for the same URL; if it turns out
    to be broken it is thrown away once and everything starts over.

    Args:
        url: where the repository is.
        tag: the tag's name.
        repo: git's own folder; kept by the caller for as long as resuming is of use.
        tree: where the files go; made if need be.
        folders: the folders wanted, relative to the repository's top.
        timeout: seconds for all of it.

    Returns:
        The commit the tag names, 40 hex digits.

    Raises:
        CommandFailed: git failed or ran out of time; its last lines are in ``tail``.
        PrerequisiteMissing: the git program is not there.
        OSError: a folder cannot be written.
    """
    deadline = time.monotonic() + timeout
    try:
        return _attempt(_Door(repo, tree, deadline), url, tag, folders)
    except _BrokenLeftover:
        remove_tree(repo)
        remove_tree(tree)
        return _attempt(_Door(repo, tree, deadline), url, tag, folders)


class _BrokenLeftover(Exception):
    """A resumed repository cannot be used."""


def _attempt(door: _Door, url: str, tag: str, folders: Sequence[str]) -> str:
    ref = f"refs/tags/{tag}"
    resumed = door.repo.is_dir()
    if resumed and not _usable(door, url):
        raise _BrokenLeftover
    try:
        if not resumed:
            _start(door, url)
        if not resumed or not _has(door, ref):
            door.run("fetch", "--depth=1", "--filter=blob:none", "--no-tags", "--no-recurse-submodules",
                     "origin", f"+{ref}:{ref}", what=f"fetch {tag}")  # fmt: skip
        _limit(door.repo, folders)
        door.run("checkout", "--force", "--detach", ref, what=f"check {tag} out")
        return door.run(
            "rev-parse", "--verify", f"{ref}^{{commit}}", what=f"read the commit of {tag}"
        ).strip()
    except CommandFailed as exc:
        if resumed and not door.expired() and not _sound(door):
            raise _BrokenLeftover from exc
        raise  # the network's fault, or the remote's: what is there stays for the next call


def _start(door: _Door, url: str) -> None:
    door.repo.parent.mkdir(parents=True, exist_ok=True)
    door.run("init", "--quiet", "--template=", what="start a repository")
    # Set as configuration, not given as an argument, so that no URL can be read as an option.
    door.run("config", "remote.origin.url", url, what="name the remote")


def _usable(door: _Door, url: str) -> bool:
    for lock in door.repo.rglob("*.lock"):  # left by a git that was killed; the caller holds this folder
        lock.unlink()
    try:
        return door.run("config", "--get", "remote.origin.url", what="read the remote").strip() == url
    except CommandFailed:
        return False


def _sound(door: _Door) -> bool:
    """Tell whether all that git has is whole; what it left at the remote on purpose does not count."""
    try:
        door.run("fsck", "--connectivity-only", "--no-dangling", "--no-progress", what="check what is there")
    except CommandFailed:
        return False
    return True


def _has(door: _Door, ref: str) -> bool:
    try:
        door.run("rev-parse", "--verify", "--quiet", f"{ref}^{{tree}}", what="look for the tag")
    except CommandFailed:
        return False
    return True


def _limit(repo: Path, folders: Sequence[str]) -> None:
    """Write the sparse-checkout file by hand: ``git sparse-checkout`` took other options before 2.35."""
    patterns = ["/*", "!/*/", *(f"/{folder}/" for folder in folders)]
    (repo / "info").mkdir(exist_ok=True)
    (repo / "info" / "sparse-checkout").write_text("\n".join(patterns) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class _Door:
    """Runs git on one repository until a deadline (monotonic seconds)."""

    repo: Path
    tree: Path
    deadline: float

    def expired(self) -> bool:
        return time.monotonic() >= self.deadline

    def run(self, *arguments: str, what: str) -> str:
        self.tree.mkdir(parents=True, exist_ok=True)
        watch: _Watch | None = None
        try:
            with Unbroken():
                _kept, process = self._start(arguments, what)
                watch = _Watch(process.pid, self.deadline)
            watch.start()
            out, err = process.communicate()
        except BaseException:  # Ctrl-C: git is in a session of its own and did not get it
            if watch is None:
                raise
            watch.stop.set()
            if watch.ident is None:  # no thread could be started
                watch.run()
            process.communicate()
            raise
        finally:
            if watch is not None:
                watch.finish()
        if watch.late:
            raise CommandFailed(f"could not {what} in time", tail=_text(err))
        if process.returncode != 0:
            raise CommandFailed(f"could not {what}: git exited with {process.returncode}", tail=_text(err))
        return _text(out)

    def _start(self, arguments: Sequence[str], what: str) -> tuple[object, Any]:
        """Start git; GitPython ends the process once its wrapper, which comes first, is gone."""
        git = _git_at(self.tree)
        wrapper = git.execute(
            [str(git.GIT_PYTHON_GIT_EXECUTABLE), *OPTIONS, *arguments],
            as_process=True,
            env=self._environment(),
            start_new_session=True,  # so that git's own children end with it
        )
        if wrapper.proc is None:
            raise CommandFailed(f"could not {what}: git did not start")
        return wrapper, wrapper.proc

    def _environment(self) -> dict[str, str]:
        # Every place git may have been told of by a caller's environment (a hook, say) is named anew.
        return {
            "LC_ALL": "C",
            "LANGUAGE": "C",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_CONFIG_COUNT": "0",
            "GIT_CONFIG_PARAMETERS": "",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ASKPASS": "",
            "GIT_ALLOW_PROTOCOL": "https:http:ssh:git:file",
            "GIT_DIR": str(self.repo),
            "GIT_WORK_TREE": str(self.tree),
            "GIT_INDEX_FILE": str(self.repo / "index"),
            "GIT_OBJECT_DIRECTORY": str(self.repo / "objects"),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": "",
        }


def _git_at(folder: Path) -> Git:
    try:
        from git.cmd import Git  # noqa: PLC0415  (GitPython looks for the program when it is imported)
    except ImportError as exc:
        raise PrerequisiteMissing(
            f"git cannot be used: {str(exc).strip().splitlines()[0]}",
            rule="it fetches PyTorch's sources",
            next_step="Install git, or give the sources with --source PATH",
        ) from exc
    return Git(str(folder))


class _Watch(threading.Thread):
    """Terminates git's process group at the deadline or on request, and kills it after a while."""

    def __init__(self, pid: int, deadline: float) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.deadline = deadline
        self.late = False
        self.stop = threading.Event()
        self.done = threading.Event()

    def run(self) -> None:
        told = self.stop.wait(max(self.deadline - time.monotonic(), 0.0))
        if self.done.is_set():
            return
        self.late = not told
        for sig in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.pid, sig)
            except ProcessLookupError:
                return
            if self.done.wait(GRACE):
                return

    def finish(self) -> None:
        """Say that git has ended, and wait for the thread."""
        self.done.set()
        self.stop.set()
        if self.ident is not None:
            self.join()


def _text(data: bytes | str | None) -> str:
    return data.decode(errors="replace") if isinstance(data, bytes) else data or ""
