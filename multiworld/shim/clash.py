"""Detection of other distributions with the import name ``multiworld``, such as Cisco's on PyPI.

Python has one folder for both, and whichever was installed last has its files there. Cisco's, when imported,
patches torch's files below site-packages and ends the process (its ``post_setup.py``, 0.2.3). This file needs
nothing of the package: ``m8d.py`` reads it by its path, before the package is imported.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Clash", "find", "notice"]

_PREFIX = "multiworld-"
_INFO = ".dist-info"
_PACKAGE = "multiworld/"


@dataclass(frozen=True)
class Clash:
    """A foreign distribution ``multiworld``.

    Attributes:
        version: of that distribution.
        folder: where it is installed (a site-packages).
        beside: whether that is the folder of this package, so that they share files.
        in_front: whether ``import multiworld`` there runs its ``__init__.py`` and not this package's.
        patched: whether it says that it has patched the torch in that folder.
    """

    version: str
    folder: str
    beside: bool
    in_front: bool
    patched: bool

    @property
    def says(self) -> str:
        """The problem, in one sentence."""
        value = f"the distribution 'multiworld' {self.version} is installed in {self.folder}"
        if self.in_front and self.beside:
            rule = "its files have overwritten those of this package, which the distribution 'm8d' installs"
        elif self.in_front:
            rule = "it is another package of this import name, and programs with that folder first get it"
        else:
            rule = (
                "it is another package of the same import name, and its files lie in the folder of this one"
            )
        return f"{value}: {rule}{'; it has patched the torch there' if self.patched else ''}"

    @property
    def next_step(self) -> str:
        """The fix, as commands."""
        steps = ["python -m pip uninstall multiworld"]
        if self.beside:
            steps.append("python -m pip install --force-reinstall --no-deps m8d")
        if self.patched:
            steps.append("install torch again (pip install --force-reinstall --no-deps torch==ITS.VERSION)")
        return f"Run {', then '.join(steps)}; docs/install.md says how to meet other packages' requirements"


def find(package: Path, folders: tuple[str, ...] = ()) -> Clash | None:
    """Return the most relevant foreign distribution, first the one beside the package; None without any.

    A distribution ``multiworld`` without files of that package, as `nox -s wheel` makes it, is not foreign.

    Args:
        package: the folder of this package.
        folders: others to look into, such as ``sys.path``.
    """
    own = package.resolve().parent
    for name in (str(own), *folders):
        try:
            folder = Path(name).resolve()
            infos = sorted(folder.glob(f"{_PREFIX}*{_INFO}"))
        except (OSError, RuntimeError, ValueError):
            # Python imports nothing from there: it cannot be read, is a loop of links, or no path at all.
            continue
        for info in infos:
            clash = _read(info, beside=folder == own)
            if clash is not None:
                return clash
    return None


def notice(package: Path) -> None:
    """Warn of a foreign distribution beside the package; called by importing ``multiworld``."""
    clash = find(package)
    if clash is not None:
        warnings.warn(f"{clash.says}. {clash.next_step}.", RuntimeWarning, stacklevel=4)


def _read(info: Path, *, beside: bool) -> Clash | None:
    try:
        with (info / "RECORD").open(encoding="utf-8", newline="") as file:
            hashes = {row[0]: row[1] for row in csv.reader(file) if len(row) > 1}
    except (OSError, ValueError, csv.Error):  # no RECORD: pip did not install it
        return None
    if not any(path.startswith(_PACKAGE) for path in hashes):
        return None
    init = f"{_PACKAGE}__init__.py"
    folder = info.parent
    return Clash(
        version=info.name[len(_PREFIX) : -len(_INFO)],
        folder=str(folder),
        beside=beside,
        in_front=hashes.get(init, "") == _hash(folder / init),
        patched=_text(folder / _PACKAGE / "init.txt") == "true",
    )


def _hash(path: Path) -> str | None:
    try:
        digest = hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return None
    return f"sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
