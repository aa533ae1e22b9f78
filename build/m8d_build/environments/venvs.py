"""Virtual environments with a torch wheel: created atomically, locked while in use, pruned.

Two kinds of making. A *whole* environment gets the wheel and everything it depends on (5 GB, a minute or
two); the official wheel's is kept in the cache. A *thin* one, for a wheel under test, holds that wheel alone
(1.6 GB, a quarter of a minute) and links to everything else in a whole one: torch's libraries find the nvidia
packages by paths relative to their own folder, and ``pip check`` sees every distribution. Nothing the wheel
itself brings is linked, so installing it cannot write into the environment it leans on.

A virtual environment cannot be moved, so it is made in its final place; its record is written last, and a
folder without one is rubbish.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from m8d_build import proc
from m8d_build.errors import BuildBusy, CommandFailed, DiskFull, WheelMismatch, WheelUnreachable
from m8d_build.files.cachedir import mark_used
from m8d_build.files.disk import needs_room, remove_tree
from m8d_build.files.lock import CACHE_OPTION, hold

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

__all__ = [
    "Environment",
    "Environments",
    "Recipe",
    "interpreter_for",
    "names_to_link",
    "pip_check",
    "surplus",
]

SCHEMA = 1
RECORD_NAME = "m8d-env.json"
_LOCKS = ".locks"
_WAIT = 900.0  # seconds for another run to finish with an environment
_PIP_TIMEOUT = 1800.0  # seconds; with nothing cached about 3 GB are downloaded
_PIP_ATTEMPTS = 3
_WHOLE_BYTES = 9 << 30  # 5.3 GB installed, and what pip unpacks and caches on the way
_THIN_BYTES = 2 << 30
_NETWORK = re.compile(
    r"No matching distribution|Could not find a version|Max retries "
    r"exceeded|NewConnectionError|ReadTimeoutError"
    r"|IncompleteRead|Connection (?:broken|aborted|reset)|Temporary failure in name "
    r"resolution|HTTPError|SSLError"
)
_TAG = re.compile(r"cp(\d)(\d+)")


@dataclass(frozen=True)
class Environment:
    """A Python with torch installed.

    Attributes:
        name: for people and for logs.
        python: its interpreter.
        site: the folder that holds ``torch``.
        root: its folder, where it is one of ours; None otherwise.
    """

    name: str
    python: Path
    site: Path
    root: Path | None = None

    @property
    def torch(self) -> Path:
        """The folder of the torch package."""
        return self.site / "torch"

    @classmethod
    def of(cls, python: Path) -> Environment:
        """Return the environment of an interpreter that was made by other means.

        Raises:
            CommandFailed: it cannot be run.
            WheelMismatch: it has no torch.
        """
        ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = Path(proc.run([python, "-I", "-c", ask], what=f"run {python}", timeout=60).stdout.strip())
        if not (site / "torch").is_dir():
            raise WheelMismatch(
                f"{python} has no torch in {site}",
                rule="a stock environment has the official wheel installed",
                next_step="Name another Python, or leave it to us with --stock auto",
            )
        return cls(str(python), python.absolute(), site)


@dataclass(frozen=True)
class Recipe:
    """What an environment is made from.

    Attributes:
        torch: version without a local label ("2.6.0").
        sha256: of the wheel, 64 hex digits.
        python_tag: "cp311".
        requirement: the wheel's path, or what pip is asked for ("torch==2.6.0").
        brings: top-level names the wheel puts into site-packages; only needed for a thin environment.
    """

    torch: str
    sha256: str
    python_tag: str
    requirement: str
    brings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The environment's folder name ("torch-2.6.0-7979834102cd-cp311")."""
        return f"torch-{self.torch}-{self.sha256[:12]}-{self.python_tag}"


@dataclass(frozen=True)
class _Record:
    schema: int
    torch: str
    sha256: str
    python_tag: str
    leans_on: str  # the whole environment a thin one links to; "" for a whole one


class Environments:
    """The environments under one folder.

    Args:
        root: the folder; made when it is needed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @contextmanager
    def kept(self, recipe: Recipe, *, log: Path) -> Iterator[Environment]:
        """Hold the whole environment of a wheel, made if it is not there.

        Raises:
            BuildBusy: another run uses it for too long.
            WheelUnreachable: something it needs could not be downloaded.
            CommandFailed: venv or pip failed otherwise.
            PrerequisiteMissing: there is no such Python.
            DiskFull: no room.
        """
        folder = self.root / recipe.name
        with self._held(recipe.name, wait=_WAIT):
            if _record_of(folder) is None or not _python_of(folder).exists():
                self._make(recipe, None, log)
            mark_used(folder)
            yield _environment(folder)

    @contextmanager
    def fresh(
        self, recipe: Recipe, *, base: Environment | None, log: Path, keep: bool = False
    ) -> Iterator[Environment]:
        """Hold a newly made environment for a wheel under test; it is removed at the end.

        Args:
            recipe: the wheel; an environment of the same name is made anew.
            base: the whole environment it leans on; None makes a whole one.
            log: where venv and pip write.
            keep: leave it behind.

        Raises:
            As ``kept``.
        """
        folder = self.root / recipe.name
        with self._held(recipe.name, wait=_WAIT):
            self._make(recipe, base, log)
            try:
                yield _environment(folder)
            finally:
                if not keep:
                    _remove(folder)

    def prune(self, keep: Collection[str], *, torch: str | None = None) -> tuple[str, ...]:
        """Remove environments, and what is left of unfinished ones; those in use stay.

        Args:
            keep: names that stay.
            torch: only environments of this version; None for all.

        Returns:
            The names of those removed.
        """
        removed = []
        for name in surplus(self._names(), keep, torch=torch):
            try:
                with self._held(name, wait=0):
                    _remove(self.root / name)
            except BuildBusy:
                continue  # in use: its user prunes after itself
            removed.append(name)
        return tuple(removed)

    def _names(self) -> tuple[str, ...]:
        if not self.root.is_dir():
            return ()
        return tuple(sorted(entry.name for entry in self.root.iterdir() if entry.name.startswith("torch-")))

    @contextmanager
    def _held(self, name: str, *, wait: float) -> Iterator[None]:
        # The lock lies beside the environment, which is removed while it is held.
        with hold(
            self.root / _LOCKS / name, what=f"use the environment {name}", wait=wait, option=CACHE_OPTION
        ):
            yield

    def _make(self, recipe: Recipe, base: Environment | None, log: Path) -> None:
        folder = self.root / recipe.name
        _remove(folder)
        need = _WHOLE_BYTES if base is None else _THIN_BYTES
        _require_room(self.root, need)
        try:
            with needs_room(folder, f"installing {recipe.requirement}"):
                if base is None:
                    _make_whole(folder, recipe, log)
                else:
                    _make_thin(folder, recipe, base, log)
                record = _Record(
                    SCHEMA, recipe.torch, recipe.sha256, recipe.python_tag, base.name if base else ""
                )
                beside = folder / f"{RECORD_NAME}.part"
                beside.write_text(json.dumps(asdict(record), indent=1), encoding="utf-8")
                beside.replace(folder / RECORD_NAME)
        except BaseException:
            _remove(folder)
            raise


def surplus(names: Iterable[str], keep: Collection[str], *, torch: str | None = None) -> tuple[str, ...]:
    """Return the environments to remove: those not kept, of one torch version if it is given."""
    prefix = "torch-" if torch is None else f"torch-{torch}-"
    return tuple(name for name in names if name.startswith(prefix) and name not in keep)


def names_to_link(present: Iterable[str], brings: Collection[str]) -> tuple[str, ...]:
    """Return the entries of a site-packages folder that a thin environment links to.

    Args:
        present: names in the whole environment's site-packages.
        brings: top-level names of the wheel under test. Neither these nor torch's dist-info are linked, so
            that pip writes new files instead of following a link.
    """
    return tuple(
        name
        for name in sorted(present)
        if name not in brings and name != "__pycache__" and not re.fullmatch(r"torch-[^/]*\.dist-info", name)
    )


def interpreter_for(python_tags: Collection[str]) -> Path:
    """Return a Python a wheel can be installed in: this one if it fits, else the one on PATH.

    Args:
        python_tags: of the wheel ("cp311").

    Raises:
        WheelMismatch: the wheel is not for CPython.
        PrerequisiteMissing: that Python is not on PATH.
    """
    if f"cp{sys.version_info.major}{sys.version_info.minor}" in python_tags:
        return Path(sys.executable)
    for tag in sorted(python_tags):
        if match := _TAG.fullmatch(tag):
            program = f"python{match[1]}.{match[2]}"
            why, next_step = f"to install a {tag} wheel", f"Install Python {match[1]}.{match[2]} with venv"
            return Path(proc.which(program, why=why, next_step=next_step))
    raise WheelMismatch(
        f"the wheel is for {', '.join(sorted(python_tags)) or 'no Python'}",
        rule="it must be for CPython (cp310, cp311, ...)",
        next_step="Name another wheel",
    )


def pip_check(environment: Environment) -> str:
    """Return what ``pip check`` says of an environment: "clean", or its complaints."""
    try:
        proc.run([environment.python, "-I", "-m", "pip", "check"], what="run pip check", timeout=120)
    except CommandFailed as exc:
        return exc.tail.strip() or exc.value
    return "clean"


def _make_whole(folder: Path, recipe: Recipe, log: Path) -> None:
    python = interpreter_for([recipe.python_tag])
    proc.run([python, "-I", "-m", "venv", folder], what="make a virtual environment", log=log, timeout=120)
    _pip_install(folder, recipe.requirement, [], log)


def _make_thin(folder: Path, recipe: Recipe, base: Environment, log: Path) -> None:
    # pip is among the links.
    command: list[str | Path] = [base.python, "-I", "-m", "venv", "--without-pip", folder]
    proc.run(command, what="make a virtual environment", log=log, timeout=120)
    site = _site_of(folder)
    if base.site.parent.name != site.parent.name:
        raise WheelMismatch(f"{base.name} has its packages in {base.site}, a new environment in {site}",
                            rule="they must be of one Python", next_step="Use --stock auto")  # fmt: skip
    for name in names_to_link((entry.name for entry in base.site.iterdir()), recipe.brings):
        (site / name).symlink_to(base.site / name)
    _pip_install(folder, recipe.requirement, ["--no-deps", "--no-index"], log)


def _pip_install(folder: Path, requirement: str, options: list[str], log: Path) -> None:
    command: list[str | Path] = [
        _python_of(folder), "-I", "-m", "pip", "--disable-pip-version-check", "--no-input", "--retries", "5",
        "--timeout", "60",
        "install", "--no-compile", "--no-warn-script-location", "--progress-bar", "off", *options,
        requirement,
    ]  # fmt: skip
    what = f"install {requirement}"
    # pip unpacks gigabytes there: a full disk is then that of the environment.
    scratch = folder / ".tmp"
    scratch.mkdir(parents=True, exist_ok=True)
    failed = _network_failure(command, what, log, scratch)
    for _ in range(1, _PIP_ATTEMPTS):
        if failed is None:
            break
        failed = _network_failure(command, what, log, scratch)
    remove_tree(scratch)
    if failed is not None:
        raise WheelUnreachable(
            f"pip could not get what {requirement} needs, in {_PIP_ATTEMPTS} attempts",
            next_step="Check the network and pip's index settings, then run it again",
            log=log,
            tail=failed.tail,
        ) from failed


def _network_failure(command: list[str | Path], what: str, log: Path, scratch: Path) -> CommandFailed | None:
    """Run pip; return its failure if the network was at fault, None if it succeeded, and raise any other."""
    try:
        proc.run(
            command,
            what=what,
            log=log,
            env={"TMPDIR": str(scratch)},
            timeout=_PIP_TIMEOUT,
            next_step="Look at the log",
        )
    except CommandFailed as exc:
        if _NETWORK.search(exc.tail):
            return exc
        raise
    return None


def _require_room(root: Path, need: int) -> None:
    place = next(p for p in (root, *root.parents) if p.exists())
    free = shutil.disk_usage(place).free
    if free < need:
        raise DiskFull(
            f"{free / 2**30:.1f} GiB free under {place}",
            rule=f"an environment needs {need / 2**30:.0f} GiB while it is made",
            next_step="Free some room, or set M8D_CACHE to a folder on a larger disk",
        )


def _environment(folder: Path) -> Environment:
    return Environment(folder.name, _python_of(folder), _site_of(folder), folder)


def _python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def _site_of(folder: Path) -> Path:
    return next(iter(sorted(folder.glob("lib/python3*/site-packages"))), folder / "lib" / "site-packages")


def _record_of(folder: Path) -> _Record | None:
    try:
        record = _Record(**json.loads((folder / RECORD_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return record if record.schema == SCHEMA else None


def _remove(folder: Path) -> None:
    """Remove an environment, its record first: half-removed it is rubbish, not an environment."""
    (folder / RECORD_NAME).unlink(missing_ok=True)
    remove_tree(folder)
