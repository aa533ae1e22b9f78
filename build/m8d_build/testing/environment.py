"""Environments for tests: a torch from the cache, and beside it the packages that tests need.

The environment is the one kept in the cache for the official wheel (the same as check-wheel's), or a Python
the user names. What the tests need beyond torch lies in a folder of its own, put on PYTHONPATH: the
environment holds the wheel and what it depends on, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.version import Version

from m8d_build import proc
from m8d_build.environments.download import WheelRequest, get_wheel, official_request
from m8d_build.environments.venvs import Environment, Environments, Recipe
from m8d_build.errors import BuildBusy, CommandFailed, UnknownVersion, WheelMismatch, WheelUnreachable
from m8d_build.files.blobs import file_sha256
from m8d_build.files.cachedir import mark_used
from m8d_build.files.disk import move_into_place, needs_room, remove_tree
from m8d_build.files.lock import CACHE_OPTION, hold, pruning, using
from m8d_build.targets import load_targets
from m8d_build.testing.versions import ASK

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from m8d_build.progress import Reporter
    from m8d_build.settings import Settings

__all__ = ["ask_torch", "environment", "packages_for", "remove_added", "requirements"]

_NEEDED = ("pytest", "pytest-timeout", "hypothesis", "greenlet")
_ATTEMPTS = 3
_INSTALL = 600.0  # seconds; about 40 MB
_WAIT = 900.0  # seconds for another run to finish installing the same packages


@contextmanager
def environment(
    version: str,
    given: Path | None,
    settings: Settings,
    report: Reporter,
    *,
    log: Path,
    added: list[Path],
) -> Iterator[Environment]:
    """Hold an environment with a torch.

    Args:
        version: of torch ("2.6.0"; "2.13.0+cpu" where an index has several builds).
        given: an interpreter that has it; None for an environment of ours, made if it is not there.
        settings: where the cache is.
        report: told of downloads.
        log: where venv and pip write.
        added: gets what is in the cache now and was not before.

    Raises:
        BuildError: it cannot be had; see ``get_wheel`` and ``Environments.kept``.
    """
    if given is not None:
        yield Environment.of(given.expanduser())
        return
    wheels, root = settings.cache / "wheels", settings.cache / "envs"
    with using(settings.cache):
        before = frozenset(wheels.glob("*.whl"))
        tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
        wheel = get_wheel(_request(version, tag, settings), settings, reporter=report)
        if wheel not in before:
            added += [wheel, wheel.with_name(f"{wheel.name}.sha256")]
        recipe = Recipe(Version(version).public, file_sha256(wheel), tag, str(wheel))
        if not (root / recipe.name).exists():
            added.append(root / recipe.name)
        with Environments(root).kept(recipe, log=log) as made:
            yield made


def ask_torch(held: Environment, version: str) -> tuple[str, str, str]:
    """Return what torch calls itself, the Python's version, and the Python's tag ("cpython-311").

    Raises:
        CommandFailed: torch cannot be imported.
        WheelMismatch: it is another version.
    """
    said = proc.run(
        [held.python, "-I", "-W", "ignore", "-c", ASK], what=f"ask torch in {held.name}", timeout=120.0
    )
    build, python, tag = json.loads(said.stdout.splitlines()[-1])
    if Version(build).public != Version(version).public:
        raise WheelMismatch(
            f"{held.name} has torch {build}",
            rule=f"it was named for torch {version}",
            next_step="Correct --python VERSION=PATH",
        )
    return build, python, tag


def requirements(version: str, project: str) -> tuple[str, ...]:
    """Return what the tests need beyond torch, as pip takes it.

    Args:
        version: of torch; an old one gets the numpy of its time.
        project: text of pyproject.toml; the bounds are those of its ``test`` group.
    """
    group = tomllib.loads(project)["dependency-groups"]["test"]
    named = [entry for entry in group if isinstance(entry, str) and Requirement(entry).name in _NEEDED]
    return (*named, "numpy>=1.26,<2" if Version(version) < Version("2.5") else "numpy>=1.26")


def packages_for(
    held: Environment, tag: str, needs: Sequence[str], settings: Settings, *, log: Path, added: list[Path]
) -> Path:
    """Return a folder with what the tests need, installed if it is not there: whole or not at all.

    Args:
        held: the environment whose pip installs it; nothing is written into it.
        tag: of its Python; one folder serves all environments of one Python that need the same.
        needs: what is installed.
        settings: where the cache is.
        log: where pip writes.
        added: gets the folder if it was not there before.

    Raises:
        WheelUnreachable: pip could not install it.
        BuildBusy, DiskFull: as they say.
    """
    name = f"tests-{tag}-{hashlib.sha256(' '.join(needs).encode()).hexdigest()[:12]}"
    root = settings.cache / "envs"
    final, part = root / name, root / f".part-{name}"
    with hold(root / ".locks" / name, what=f"install {', '.join(needs)}", wait=_WAIT, option=CACHE_OPTION):
        if final.is_dir():
            mark_used(final)
            return final
        added.append(final)
        try:
            with needs_room(root, f"installing {', '.join(needs)}"):
                _install(held, needs, part, log)
                move_into_place(part, final)
        finally:
            remove_tree(part)
    return final


def remove_added(added: Sequence[Path], settings: Settings, report: Reporter) -> None:
    """Remove what a run added to the cache; while another run uses the cache, say that all of it stays."""
    if not added:
        return
    root = settings.cache / "envs"
    try:
        with pruning(settings.cache):
            for path in added:
                if path.parent == root and path.name.startswith("torch-"):
                    Environments(root).prune({other.name for other in root.iterdir()} - {path.name})
                else:
                    remove_tree(path)
    except BuildBusy:
        names = ", ".join(path.name for path in added if path.suffix != ".sha256")
        report.note(f"another run uses the cache: {names} stay, until `cache --prune` removes them")


def _request(version: str, tag: str, settings: Settings) -> WheelRequest:
    """Return the request for the wheel on record, or else for what this Python's index has."""
    try:
        return official_request(load_targets(settings.patches).get(version), tag)
    except (UnknownVersion, WheelMismatch):
        return WheelRequest("torch", version)


def _install(held: Environment, needs: Sequence[str], into: Path, log: Path) -> None:
    command: list[str | Path] = [
        held.python, "-I", "-m", "pip", "--disable-pip-version-check", "--no-input", "--retries", "5",
        "--timeout", "60",
        "install", "--no-compile", "--no-warn-script-location", "--progress-bar", "off", "--target", into,
        *needs,
    ]  # fmt: skip
    failed = None
    for _ in range(_ATTEMPTS):
        remove_tree(into)
        try:
            proc.run(command, what="install what the tests need", log=log, timeout=_INSTALL)
        except CommandFailed as exc:
            failed = exc
        else:
            return
    raise WheelUnreachable(
        f"pip could not install {', '.join(needs)}, in {_ATTEMPTS} attempts",
        next_step="Look at the log; check the network and pip's index settings, then run it again",
        log=log,
        tail=failed.tail if failed else "",
    ) from failed
