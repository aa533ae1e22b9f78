"""Two environments with the same torch 2.4.0: one as it is, one with pymultiworld, which patches it.

The first is the environment that the cache keeps for the official wheel (the same as check-wheel's and
tests-torch's). The second leans on it: everything in it is a link, but for torch's Python files, which are
copies, because pymultiworld's first import runs `patch` on them, and pymultiworld itself, installed by pip.
Both lie in the cache's ``envs`` folder; the second one's record is written last, and a folder without one is
made anew.
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "build"), str(ROOT)]  # the toolchain is a plain folder

from m8d_build import proc  # noqa: E402  (found through the line above)
from m8d_build.environments.venvs import Environment  # noqa: E402
from m8d_build.errors import CommandFailed, WheelMismatch, WheelUnreachable  # noqa: E402
from m8d_build.files.blobs import file_sha256  # noqa: E402
from m8d_build.files.disk import needs_room, remove_tree  # noqa: E402
from m8d_build.files.lock import hold  # noqa: E402
from m8d_build.testing.environment import environment  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

    from m8d_build.progress import Reporter
    from m8d_build.settings import Settings

TORCH = "2.4.0"
"""What pymultiworld's only supported version is pinned to."""
PEER = "multiworld==0.2.3"
RECORD = "m8d-peer.txt"
_ATTEMPTS = 3
_WAIT = 1800.0  # seconds for another run to finish making it
_INSTALL = 300.0  # seconds; 60 kB, and torch's Python files compiled
_CONFIGURED = "from torch.distributed import _worlds; from multiworld.manager import WorldManager"


@dataclass(frozen=True)
class Pair:
    """The two.

    Attributes:
        ours: with plain torch; this package is found in the repository.
        theirs: with pymultiworld, and the torch that it patched.
    """

    ours: Environment
    theirs: Environment


def ready(settings: Settings) -> bool:
    """Whether a run would have to make nothing."""
    return any(
        (folder / RECORD).exists() and _base_of(folder).exists()
        for folder in (settings.cache / "envs").glob(f"pymultiworld-*-{_tag()}")
    )


@contextmanager
def pair(settings: Settings, report: Reporter, *, log: Path, given: Path | None = None) -> Iterator[Pair]:
    """Hold both, made if they are not there.

    Args:
        settings: where the cache is.
        report: told of downloads.
        log: where venv and pip write.
        given: a Python with torch 2.4.0 to lean on; None for one of ours.

    Raises:
        WheelUnreachable: pip could not get torch or pymultiworld.
        WheelMismatch: `given` has no torch, or another version; or pymultiworld does not run with it.
        BuildError: see `Environments.kept`.
    """
    with environment(TORCH, given, settings, report, log=log, added=[]) as ours:
        version = (ours.torch / "version.py").read_text(encoding="utf-8")
        if f"'{TORCH}" not in version:
            raise WheelMismatch(
                f"{ours.name}: {version.splitlines()[1] if version.count(chr(10)) > 1 else version!r}",
                rule=f"pymultiworld needs torch {TORCH}",
                next_step="Name another Python, or leave it to us",
            )
        name = (
            f"pymultiworld-{PEER.partition('==')[2]}-{file_sha256(ours.torch / 'version.py')[:12]}-{_tag()}"
        )
        folder = settings.cache / "envs" / name
        # The lock lies beside the environment, which may be removed while it is held.
        with hold(settings.cache / "envs" / ".locks" / name, what=f"use {name}", wait=_WAIT):
            if not (folder / RECORD).exists() or _base_of(folder) != ours.site:
                _make(folder, ours, log)
            yield Pair(ours, _environment(folder))


def _make(folder: Path, ours: Environment, log: Path) -> None:
    remove_tree(folder)
    with needs_room(folder, f"installing {PEER}"):
        try:
            proc.run(
                [ours.python, "-I", "-m", "venv", "--without-pip", folder],
                what="make a virtual environment",
                log=log,
                timeout=120,
            )
            theirs = _environment(folder)
            _lean(theirs.site, ours.site)
            _install(theirs, log)
            _configure(theirs, log)
            (folder / RECORD).write_text(f"{ours.site}\n", encoding="utf-8")
        except BaseException:
            remove_tree(folder)
            raise


def _lean(site: Path, base: Path) -> None:
    """Link to everything in `base`, but copy torch's Python files; pip is among the links."""
    for entry in sorted(base.iterdir()):
        if entry.name not in {"torch", "__pycache__"} and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    shutil.copytree(
        base / "torch", site / "torch", copy_function=_copy, ignore=shutil.ignore_patterns("__pycache__")
    )


def _copy(source: str, target: str) -> None:
    # The libraries are 1.6 GB, and found by each other through the folder they lie in, which a link has as
    # well.
    if source.endswith(".py"):
        shutil.copy2(source, target)
    else:
        Path(target).symlink_to(source)


def _install(theirs: Environment, log: Path) -> None:
    command: list[str | Path] = [
        theirs.python, "-I", "-m", "pip", "--disable-pip-version-check", "--no-input", "--retries", "5",
        "install", "--no-deps", "--progress-bar", "off", PEER,
    ]  # fmt: skip
    for _ in range(_ATTEMPTS):
        failed = _failure(command, f"install {PEER}", theirs, log)
        if failed is None:
            return
    raise WheelUnreachable(
        f"pip could not install {PEER}, in {_ATTEMPTS} attempts",
        next_step="Look at the log; check the network and pip's index settings, then run it again",
        log=log,
        tail=failed.tail if failed else "",
    ) from failed


def _configure(theirs: Environment, log: Path) -> None:
    """Import it: the first time it patches torch and ends the process with status 1, whatever came of it."""
    proc.which("patch", why="by pymultiworld's first import", next_step="Install GNU patch")
    command: list[str | Path] = [theirs.python, "-I", "-W", "ignore", "-c"]
    _failure([*command, "import multiworld"], "configure pymultiworld", theirs, log)
    failed = _failure([*command, _CONFIGURED], "import pymultiworld", theirs, log)
    if failed is not None:
        raise WheelMismatch(
            f"{PEER} cannot be imported with torch {TORCH}",
            rule="its first import patches torch, and the second one finds that",
            next_step=f"Look at the log {log}",
        ) from failed


def _failure(command: list[str | Path], what: str, theirs: Environment, log: Path) -> CommandFailed | None:
    try:
        proc.run(command, what=what, log=log, cwd=theirs.site, timeout=_INSTALL)
    except CommandFailed as exc:
        return exc
    return None


def _environment(folder: Path) -> Environment:
    site = next(iter(sorted(folder.glob("lib/python3*/site-packages"))), folder)
    return Environment(folder.name, folder / "bin" / "python", site, folder)


def _base_of(folder: Path) -> Path:
    try:
        return Path((folder / RECORD).read_text(encoding="utf-8").strip())
    except OSError:
        return Path(os.devnull)


def _tag() -> str:
    return f"cp{sys.version_info.major}{sys.version_info.minor}"
