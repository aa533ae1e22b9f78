"""An installed torch: its folder, its RECORD, and atomic changes to both.

New content is written to temporary files beside the targets first, so that errors occur before the first file
changes. Then the files are renamed, RECORD last. An interrupted run leaves files that the next run completes
or removes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from multiworld._c10d.marker import find_torch
from multiworld.errors import InstallError, MarkerError
from multiworld.shim.loader import LOADER_ENTRY
from multiworld.shim.record import Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = [
    "ASIDE",
    "FromSourceError",
    "TorchSite",
    "find_folder",
    "find_site",
    "is_there",
    "keep_to_own",
    "lies_outside",
    "remove_file",
    "unreadable",
    "unwritable",
]

ASIDE = ".m8d-new"
"""Ending of a file that was written aside and not yet moved to its place."""

_DIST_INFO = re.compile(r"torch-.*\.dist-info")
_VERSION = re.compile(r"^__version__\s*(?::[^=]*)?=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)


class FromSourceError(InstallError):
    """This torch was not installed from a wheel: it is a source tree, or an editable install."""


@dataclass(frozen=True)
class TorchSite:
    """Where a torch is installed.

    Attributes:
        root: the folder that holds ``torch`` (site-packages).
        dist_info: the distribution's folder in it.
    """

    root: Path
    dist_info: Path

    @property
    def torch(self) -> Path:
        """The package's folder."""
        return self.root / "torch"

    @property
    def record_path(self) -> Path:
        """The RECORD."""
        return self.dist_info / "RECORD"

    def version(self) -> str:
        """Return the version in torch/version.py ("2.13.0+cpu"), without importing it.

        Raises:
            InstallError: it has none.
        """
        path = self.torch / "version.py"
        try:
            found = _VERSION.search(path.read_text(encoding="utf-8"))
        except PermissionError as exc:
            raise unreadable(path, exc) from exc
        except (OSError, UnicodeDecodeError) as exc:
            raise InstallError(f"{path} cannot be read: {exc}", next_step="Install torch again") from exc
        if found is None:
            raise InstallError(f"{path} says no version", next_step="Install torch again")
        return found[1]

    @property
    def by_conda(self) -> bool:
        """Whether conda installed it: what conda removes is by a list of its own, not by RECORD."""
        try:
            return (self.dist_info / "INSTALLER").read_bytes().strip() == b"conda"
        except OSError:
            return False

    def record(self) -> Record:
        """Read the RECORD.

        Raises:
            InstallError: it cannot be read.
        """
        try:
            return Record(self.record_path.read_bytes(), str(self.record_path))
        except PermissionError as exc:
            raise unreadable(self.record_path, exc) from exc
        except OSError as exc:
            raise InstallError(
                f"{self.record_path} cannot be read: {exc.strerror}", next_step="Install torch again"
            ) from exc

    def read(self, path: str) -> bytes | None:
        """Return a file's bytes, by its path below `root`; None if it is not there.

        Raises:
            InstallError: it cannot be read.
        """
        try:
            return (self.root / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as exc:
            raise unreadable(self.root / path, exc) from exc

    def leads_out(self, path: str) -> bool:
        """Tell whether a symbolic link on the way to a file leads out of torch's folder.

        Args:
            path: below `root`. Links to single files, as uv makes them, are replaced and not followed.
        """
        place, torch = (Path(os.path.realpath(each)) for each in ((self.root / path).parent, self.torch))
        return not place.is_relative_to(torch)

    def _keep_inside(self, paths: Iterable[str]) -> None:
        for path in paths:
            if self.leads_out(path):
                raise _leading_out((self.root / path).parent, f"leads out of {self.torch}")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock this torch against other runs; a killed run leaves no lock.

        Raises:
            InstallError: another run is at work, or the folder cannot be opened or locked.
        """
        try:
            handle = os.open(self.dist_info, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as exc:
            raise unwritable(self.dist_info, exc) from exc
        try:
            self._lock(handle)
            yield
        finally:
            os.close(handle)

    def _lock(self, handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise InstallError(
                f"another m8d-post-setup is at work on {self.torch}",
                rule="one at a time",
                next_step="Wait for it, and run again",
            ) from exc
        except OSError as exc:
            raise InstallError(
                f"{self.dist_info} cannot be locked: {exc.strerror or exc}",
                rule="one run at a time, which a lock of the file system (flock) ensures",
                next_step="Turn locks on for that file system (on NFS its lock service), "
                "or install torch on another one",
            ) from exc

    def change(self, files: Mapping[str, bytes | None], record: Record) -> None:
        """Write and remove files, then RECORD.

        Args:
            files: content by path below `root`; None removes. Folders that become empty go too.
            record: the RECORD as it is to be.

        Raises:
            InstallError: something cannot be written, or leads out of torch's folder. Unless it says
                otherwise nothing was changed.
        """
        self._keep_inside(files)
        contents = {self.root / path: data for path, data in files.items()}
        written = {path: data for path, data in contents.items() if data is not None}
        changes_record = record.data != self.record_path.read_bytes()
        if changes_record:
            written[self.record_path] = record.data
        made: list[Path] = []
        try:
            for path, data in written.items():
                made += _make_folders(path.parent)
                _write_aside(path, data)
        except OSError as exc:
            for path in written:
                with contextlib.suppress(OSError):  # it may be this very folder that cannot be written
                    _aside(path).unlink(missing_ok=True)
            for folder in reversed(made):
                with contextlib.suppress(OSError):  # not empty any more
                    folder.rmdir()
            raise unwritable(Path(exc.filename or self.root), exc) from exc
        try:
            for path, content in contents.items():
                if content is None:
                    remove_file(path, self.root)
                else:
                    _aside(path).replace(path)
            if changes_record:
                _aside(self.record_path).replace(self.record_path)
        except OSError as exc:
            raise InstallError(
                f"{exc.filename or self.root} cannot be changed: {exc.strerror}",
                rule="some files were changed before",
                next_step=f"{'Make room there' if _is_full(exc) else 'Correct its permissions'} "
                "and run the same again: it goes on from there",
            ) from exc

    def clean(self, folder: str, files: Iterable[str] = ()) -> None:
        """Remove what ended runs wrote aside.

        Args:
            folder: below `root`, ours alone; in it folders that are empty go too.
            files: other files below `root` that such a run was about to write.

        Raises:
            InstallError: it cannot be read or removed, or leads out of torch's folder. A symbolic link in the
                folder's place is not followed, wherever it leads.
        """
        ours = self.root / folder
        self._keep_inside((folder, *files))
        try:
            if ours.is_symlink():
                raise _leading_out(ours, "is a symbolic link")
            aside = list(ours.rglob(f"*{ASIDE}"))
        except OSError as exc:
            raise unreadable(ours, exc) from exc
        left = [*aside, *(_aside(self.root / path) for path in files), _aside(self.record_path)]
        try:
            for path in left:
                if os.path.lexists(path):  # a file system that is read-only refuses also what is not there
                    path.unlink(missing_ok=True)
            for path in sorted((ours, *ours.rglob("*")), reverse=True):
                if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
                    path.rmdir()
        except OSError as exc:
            raise unwritable(Path(exc.filename or self.root), exc) from exc


def find_folder(torch_dir: Path | None = None) -> Path:
    """Return the folder of the package, whether or not a torch is in it. Arguments are find_site's.

    Raises:
        InstallError: this interpreter would import none, or the folder cannot be read.
    """
    if torch_dir is not None:
        if is_there(torch_dir / "version.py"):
            return torch_dir
        package = torch_dir.absolute()
        # Where torch was removed, the loader may be all that is left of the package.
        left = package.name == "torch" and is_there(package.parent / LOADER_ENTRY)
        return package if left else torch_dir / "torch"
    try:
        return find_torch()
    except MarkerError as exc:
        raise InstallError(exc.value, next_step="Install it, or name its folder with --torch") from exc


def find_site(torch_dir: Path | None = None) -> TorchSite:
    """Find an installed torch, without importing it.

    Args:
        torch_dir: the folder of the package, or the one that holds it; by default the torch that this
            interpreter would import.

    Raises:
        FromSourceError: it was not installed from a wheel.
        InstallError: there is none, or it cannot be read.
    """
    torch = find_folder(torch_dir)
    if not is_there(torch / "__init__.py"):
        raise InstallError(
            f"there is no torch in {torch_dir or torch}",
            rule="--torch names the folder of the package, or the site-packages that holds it",
            next_step="Name the folder that holds torch/__init__.py",
        )
    root = torch.absolute().parent
    try:
        inside = sorted(root.iterdir())  # `glob` finds nothing in a folder that cannot be read
    except OSError as exc:
        raise unreadable(root, exc) from exc
    found = [path for path in inside if _DIST_INFO.fullmatch(path.name) and _is_torch(path)]
    if not found:
        raise FromSourceError(
            f"{torch} belongs to no installed distribution: {root} has no torch-*.dist-info",
            rule="a torch installed from a wheel has one; a source tree or an editable install has not",
            next_step="Install torch from a wheel; from sources, build one first",
        )
    if len(found) > 1:
        raise InstallError(
            f"{root} has {' and '.join(path.name for path in found)}",
            rule="one torch is installed in one place",
            next_step="Uninstall torch until pip says that it is not installed, then install one",
        )
    if not is_there(found[0] / "RECORD"):
        raise InstallError(
            f"{found[0]} has no RECORD",
            rule="without it pip cannot uninstall torch, and what is added would stay behind",
            next_step="Install torch with pip; system packages of torch are left as they are",
        )
    return TorchSite(root, found[0])


def keep_to_own(torch: Path, *more: Path) -> None:
    """Refuse a torch that this virtual environment only sees: its parent's, one by PYTHONPATH or a link.

    Args:
        torch: its folder.
        more: other folders that would be changed.

    Raises:
        InstallError: one of them is not in the environment, and so others may use it; or a folder above it
            cannot be read.
    """
    for place in (torch, *more):
        if lies_outside(place, Path(sys.prefix), Path(sys.base_prefix)):
            raise InstallError(
                f"{place} is not in this virtual environment ({sys.prefix}), which only sees it",
                rule="m8d-post-setup changes a torch of its own environment: others may use that one",
                next_step="Install torch into this environment; or say that it is meant: "
                f"--torch {torch.absolute().parent}",
            )


def lies_outside(place: Path, prefix: Path, base: Path) -> bool:
    """Tell whether a folder is not in the virtual environment that runs this; links are followed.

    An environment that lies below it (``v/inner``) is another one.

    Args:
        place: the folder.
        prefix: ``sys.prefix``.
        base: ``sys.base_prefix``: the same outside of virtual environments, and nothing lies outside then.

    Raises:
        InstallError: a folder between them cannot be read.
    """
    place, prefix, base = (path.resolve() for path in (place, prefix, base))
    if prefix == base:
        return False
    if prefix not in place.parents:
        return True
    between = place.parents[: place.parents.index(prefix)]
    return any(is_there(folder / name) for folder in between for name in ("pyvenv.cfg", "conda-meta"))


def is_there(path: Path) -> bool:
    """Tell whether a file or folder exists.

    Raises:
        InstallError: the folder that holds it cannot be read.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as exc:
        raise unreadable(path, exc) from exc
    return True


def unreadable(path: Path, exc: OSError) -> InstallError:
    """Return the error for a place that cannot be read."""
    denied = isinstance(exc, PermissionError)
    return InstallError(
        f"{path} cannot be read: {exc.strerror or exc}",
        next_step="Run it as a user who may read it" if denied else "Look what is wrong with its file system",
    )


def unwritable(path: Path, exc: OSError) -> InstallError:
    """Return the error for a place that cannot be written."""
    return InstallError(
        f"{path} cannot be written: {exc.strerror or exc}",
        rule="m8d-post-setup adds a file to torch's folder and a line to its RECORD; nothing was changed",
        next_step="Make room there and run it again"
        if _is_full(exc)
        else "Run it as the user who owns that folder, or use a venv of your own with its own torch",
    )


def _leading_out(place: Path, what: str) -> InstallError:
    return InstallError(
        f"{place} {what}",
        rule="m8d-post-setup writes and removes files below torch's folder alone",
        next_step="Remove the symbolic link on the way there, or install torch again",
    )


def _is_full(exc: OSError) -> bool:
    return exc.errno in {errno.ENOSPC, errno.EDQUOT}


def _is_torch(dist_info: Path) -> bool:
    try:
        text = (dist_info / "METADATA").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as exc:
        raise unreadable(dist_info / "METADATA", exc) from exc
    return (
        re.search(r"^Name:\s*torch\s*$", text.partition("\n\n")[0], re.MULTILINE | re.IGNORECASE) is not None
    )


def _aside(path: Path) -> Path:
    return path.with_name(path.name + ASIDE)


def _make_folders(folder: Path) -> list[Path]:
    missing = [each for each in (folder, *folder.parents) if not each.exists()][::-1]
    for each in missing:
        each.mkdir(exist_ok=True)
        # As torch's own folders are: all who can read those can read this one, whatever the umask is.
        each.chmod(stat.S_IMODE(each.parent.stat().st_mode))
        if os.geteuid() == 0:
            owner = each.parent.stat()
            os.chown(each, owner.st_uid, owner.st_gid)
    return missing


def _write_aside(path: Path, data: bytes) -> None:
    aside = _aside(path)
    if aside.is_symlink():  # it is not ours, and would be followed
        aside.unlink()
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if path.exists():
        shutil.copymode(path, aside)
    else:
        aside.chmod(0o644)
    if os.geteuid() == 0:
        # Where root changes a user's environment, keep the owner, so that the user's pip can remove the file.
        owner = (path if path.exists() else path.parent).stat()
        os.chown(aside, owner.st_uid, owner.st_gid)


def remove_file(path: Path, root: Path) -> None:
    """Remove a file, its compiled files, and folders that are empty then.

    Args:
        path: the file.
        root: a folder above it, which stays, as those above it do.

    Raises:
        OSError: the file cannot be removed.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        path.unlink()
    cache = path.parent / "__pycache__"
    # What a symbolic link leads to is not ours.
    if path.suffix == ".py" and not cache.is_symlink():
        for compiled in cache.glob(f"{path.stem}.*.pyc"):
            compiled.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it has other compiled files, or does not exist
        cache.rmdir()
    with contextlib.suppress(OSError):  # not empty: this folder and all above stay
        for folder in path.parents[: path.parents.index(root)]:
            with contextlib.suppress(FileNotFoundError):  # those above it may be there
                folder.rmdir()
