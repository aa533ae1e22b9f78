"""Wheels downloaded through the user's own pip, cached by file name and hash."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from packaging.tags import Tag, compatible_tags, cpython_tags, sys_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from m8d_build import proc
from m8d_build.errors import CommandFailed, PrerequisiteMissing, WheelInvalid, WheelMismatch, WheelUnreachable
from m8d_build.files.blobs import file_sha256
from m8d_build.files.cachedir import mark_used
from m8d_build.files.disk import needs_room
from m8d_build.files.lock import CACHE_OPTION, hold
from m8d_build.progress import Silent
from multiworld.provenance.wheel import BROKEN_ZIP, of_damage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from m8d_build.progress import Reporter
    from m8d_build.settings import Settings
    from m8d_build.targets import OfficialWheel, Target

__all__ = ["Pip", "Retry", "WheelRequest", "get_wheel", "official_request"]

WAIT = 1800.0  # seconds another run may take to download the same wheel
SHOWN = 6  # versions an index has, in a message
_VERSIONS = re.compile(r"\(from versions: ([^)]*)\)")


class Pip(Protocol):
    """What m8d_build.proc.run does; a test puts another in its place."""

    def __call__(
        self,
        command: Sequence[str | Path],
        *,
        what: str,
        env: Mapping[str, str] | None = None,
        timeout: float = ...,
    ) -> proc.Finished:
        """Run a program to its end."""


@dataclass(frozen=True)
class WheelRequest:
    """One wheel, exactly.

    Attributes:
        name: of the project.
        version: as in "name==version".
        python: Python tag it must run on ("cp311"); "" for the Python that runs this.
        platforms: platform tags that will do, best first; empty for those of this machine.
        filename: of the very file, if it is known.
        sha256: of the very file, 64 hex digits, if it is known.
    """

    name: str
    version: str
    python: str = ""
    platforms: tuple[str, ...] = ()
    filename: str = ""
    sha256: str = ""

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"

    def accepts(self, filename: str) -> bool:
        """Tell whether a file of this name is what is asked for."""
        if self.filename:
            return filename == self.filename
        try:
            name, version, _, tags = parse_wheel_filename(filename)
        except InvalidWheelFilename:
            return False
        return (
            name == canonicalize_name(self.name)
            and version == Version(self.version)
            and not tags.isdisjoint(self._tags())
        )

    def _tags(self) -> frozenset[Tag]:
        if not self.python and not self.platforms:
            return frozenset(sys_tags())
        python = self.python or f"cp{sys.version_info.major}{sys.version_info.minor}"
        version = (int(python[2]), int(python[3:]))
        platforms = self.platforms or tuple(
            dict.fromkeys(tag.platform for tag in sys_tags() if tag.platform != "any")
        )
        return frozenset(
            [*cpython_tags(version, [python], platforms), *compatible_tags(version, python, platforms)]
        )


@dataclass(frozen=True)
class Retry:
    """How often and how long a download is tried.

    Attributes:
        attempts: at most so many.
        pause: seconds before the second attempt; twice as long before each further one.
        within: seconds for everything, pauses included.
        sleep: waits so many seconds.
        clock: monotonic seconds.
    """

    attempts: int = 4
    pause: float = 2.0
    within: float = 1800.0
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic


def official_request(target: Target, python: str) -> WheelRequest:
    """Return the request for a target's official wheel.

    Args:
        target: names the wheels it was checked against.
        python: Python tag ("cp311").

    Raises:
        WheelMismatch: it names none for this Python.
    """
    wheel = next((w for w in target.wheels if _runs_on(w, python)), None)
    if wheel is None:
        known = ", ".join(sorted({w.filename.split("-")[2] for w in target.wheels})) or "no Python"
        raise WheelMismatch(
            f"torch {target.version} has no official wheel on record for {python}",
            rule=f"patches/targets.toml records it for {known}",
            next_step="Run with one of these Pythons, or name a wheel yourself",
        )
    return _request_of(wheel)


def get_wheel(
    request: WheelRequest,
    settings: Settings,
    *,
    local: Path | None = None,
    reporter: Reporter | None = None,
    retry: Retry | None = None,
    pip: Pip = proc.run,
) -> Path:
    """Return a wheel: the one the user gave, else the one kept, else download it with pip and keep it.

    pip is that of the running Python, with the user's configuration: indexes, find-links, proxies,
    certificates. A kept file is hashed before it is used; a cut or altered one is fetched again.

    Args:
        request: which wheel.
        settings: where the cache is.
        local: a file to use instead. Its hash is checked if its name is that of the file on record; any other
            name is the user's choice, and is checked when the wheel is read.
        reporter: told what is downloaded.
        retry: how often to try.
        pip: how to run pip.

    Raises:
        WheelUnreachable: it could not be had; the message lists what was tried.
        WheelInvalid: the local file is not the one on record, by its hash.
        PrerequisiteMissing: the running Python has no pip.
        BuildBusy: another run has been downloading for too long.
        DiskFull: there is no room.
        OutputUnwritable: the cache folder cannot be written.
    """
    if local is not None:
        return _given(request, local)
    reporter = reporter or Silent()
    folder = settings.cache / "wheels"
    with (
        hold(folder, what=f"download {request}", wait=WAIT, option=CACHE_OPTION),
        needs_room(folder, f"downloading {request}"),
    ):
        for left in folder.glob(".part-*"):  # by a run that was killed: the lock is ours
            shutil.rmtree(left, ignore_errors=True)
        kept = _kept(request, folder, reporter)
        if kept is not None:
            return kept
        reporter.note(f"downloading {request.filename or request}")
        return _download(request, folder, retry or Retry(), pip, reporter)


def _runs_on(wheel: OfficialWheel, python: str) -> bool:
    # Both tags: a free-threaded wheel is cp313-cp313t.
    return any(
        (tag.interpreter, tag.abi) == (python, python) for tag in parse_wheel_filename(wheel.filename)[3]
    )


def _request_of(wheel: OfficialWheel) -> WheelRequest:
    name, version, _, tags = parse_wheel_filename(wheel.filename)
    interpreters = sorted({tag.interpreter for tag in tags})
    platforms = tuple(sorted({tag.platform for tag in tags}))
    return WheelRequest(name, str(version), interpreters[0], platforms, wheel.filename, wheel.sha256)


def _given(request: WheelRequest, local: Path) -> Path:
    path = local.expanduser().absolute()
    if not path.is_file():
        raise WheelUnreachable(
            f"{local} is not there",
            rule="a wheel given by path must be a file",
            next_step="Correct the path, or leave it away",
        )
    if request.sha256 and path.name == request.filename:
        found = file_sha256(path)
        if found != request.sha256:
            raise WheelInvalid(
                f"{path} has SHA-256 {found}",
                rule=f"the official {request.filename} has {request.sha256}",
                next_step="Download it again; it is cut, or not the official file",
            )
    return path


def _kept(request: WheelRequest, folder: Path, reporter: Reporter) -> Path | None:
    for path in sorted(folder.glob("*.whl")):
        if not request.accepts(path.name):
            continue
        fault = _fault(path, request.sha256 or _recorded(path))
        if not fault:
            mark_used(path, _hash_file(path))
            return path
        reporter.note(f"{path.name} in the cache {fault}: fetching it again")
        path.unlink()
        _hash_file(path).unlink(missing_ok=True)
    return None


def _fault(path: Path, sha256: str) -> str:
    """Return what is wrong with a wheel, "" if nothing."""
    if sha256:
        found = file_sha256(path)
        return "" if found == sha256 else f"has SHA-256 {found}, expected {sha256}"
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except (*BROKEN_ZIP, OSError) as exc:
        if not of_damage(exc):
            raise
        return f"is no whole zip file ({exc})"
    return f"has a damaged member {broken}" if broken else ""


def _recorded(path: Path) -> str:
    """Return the hash recorded for a kept wheel, "" if there is none (the file was put there by hand)."""
    try:
        said = _hash_file(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return said if re.fullmatch(r"[0-9a-f]{64}", said) else ""


def _hash_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _download(request: WheelRequest, folder: Path, retry: Retry, pip: Pip, reporter: Reporter) -> Path:
    # Not importlib.util.find_spec: it also asks setuptools' import hook, which warns (an error under `-W
    # error`) where this process has imported distutils.
    if PathFinder.find_spec("pip") is None:
        raise PrerequisiteMissing(
            f"{sys.executable} has no pip",
            rule=f"pip downloads {request}",
            next_step=f"Run {sys.executable} -m ensurepip",
        )
    deadline = retry.clock() + retry.within
    tried: list[str] = []
    pause = retry.pause
    for attempt in range(1, retry.attempts + 1):
        with tempfile.TemporaryDirectory(prefix=".part-", dir=folder) as part:
            try:
                with needs_room(folder, f"downloading {request}"):
                    pip(
                        _command(request, Path(part)),
                        what=f"download {request}",
                        env={"TMPDIR": part},  # pip unpacks there; a full disk is then the cache's
                        timeout=max(deadline - retry.clock(), 1.0),
                    )
                got = _got(request, Path(part))
                if isinstance(got, Path):
                    return _keep(got, folder)
                tried.append(got)
                final = False
            except CommandFailed as exc:
                tried.append(_why(exc))
                final = _is_final(exc.tail)
        reporter.note(f"attempt {attempt}: {tried[-1]}")
        if final or attempt == retry.attempts or retry.clock() + pause >= deadline:
            break
        retry.sleep(pause)
        pause *= 2
    listed = "".join(f"\n  attempt {number}: {why}" for number, why in enumerate(tried, 1))
    raise WheelUnreachable(
        f"{request.filename or request} could not be downloaded with {sys.executable} -m pip:{listed}",
        next_step="Check the network and `pip config list`, or download it elsewhere and name the file",
    )


def _command(request: WheelRequest, into: Path) -> list[str | Path]:
    # "===" compares text: "==2.6.0" would also take, and prefer, 2.6.0+cu124 of another index.
    # The wheel is kept once, in our cache; pip's would hold the same 800 MB again.
    command: list[str | Path] = [
        sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check",
        "--progress-bar", "off",
        "--no-cache-dir", "--no-deps", "--only-binary=:all:", "--dest", into,
    ]  # fmt: skip
    if request.python:
        command += ["--implementation", "cp", "--python-version", f"{request.python[2]}.{request.python[3:]}"]
        command += ["--abi", request.python]
    for platform in request.platforms:
        command += ["--platform", platform]
    return [*command, f"{request.name}==={Version(request.version)}"]


def _got(request: WheelRequest, part: Path) -> Path | str:
    files = sorted(part.glob("*.whl"))
    if len(files) != 1:
        return f"pip brought {len(files)} wheels, not one"
    if not request.accepts(files[0].name):
        return f"pip brought {files[0].name}, not {request.filename or request}"
    fault = _fault(files[0], request.sha256)
    return f"{files[0].name} {fault}" if fault else files[0]


def _keep(got: Path, folder: Path) -> Path:
    """Move a checked wheel into the cache; its hash first, so that a kept wheel is never without."""
    final = folder / got.name
    beside = got.with_name("sha256")
    beside.write_text(file_sha256(got) + "\n", encoding="ascii")
    beside.replace(_hash_file(final))
    got.replace(final)
    return final


def _why(exc: CommandFailed) -> str:
    errors = [line.strip() for line in exc.tail.splitlines() if line.strip().startswith("ERROR")]
    said = _VERSIONS.sub(_newest, " / ".join(errors[:2]))
    return f"{exc.value}: {said}" if said else exc.value


def _newest(listed: re.Match[str]) -> str:
    """Shorten pip's list of every version there is to the newest ones."""
    versions = listed[1].split(", ")
    return listed[0] if len(versions) <= SHOWN else f"(from versions: ..., {', '.join(versions[-SHOWN:])})"


def _is_final(tail: str) -> bool:
    """Tell whether pip got an answer that another attempt will not change: an index listed other versions."""
    listed = _VERSIONS.search(tail)
    return listed is not None and listed[1].strip() not in {"", "none"} and "Retrying (" not in tail
