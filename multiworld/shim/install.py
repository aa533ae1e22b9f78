"""Install, inspect and remove the loader in an installed torch. No file of torch is changed.

A patch file that an ended run left half applied is taken back first.
"""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from multiworld.errors import InstallError
from multiworld.shim.loader import LOADER_ENTRY, LOADER_FOLDER, LOADER_VERSION, loader_text, read_loader
from multiworld.shim.patchfile import recover
from multiworld.shim.torchsite import ASIDE, TorchSite, remove_file, unreadable, unwritable

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Inspection", "LoaderState", "inspect", "install", "remove_left", "uninstall"]


class LoaderState(str, enum.Enum):
    """What is at the loader's place.

    Attributes:
        ABSENT: nothing.
        CURRENT: this package's loader, in RECORD with the right hash.
        UNRECORDED: this package's loader, but RECORD does not say so: a run was ended, or torch was replaced.
        DANGLING: no loader, but RECORD names it.
        OUTDATED: a loader of another version of multiworld.
        CHANGED: a loader that was edited, or half written.
        FOREIGN: something that is not ours.
    """

    ABSENT = "absent"
    CURRENT = "current"
    UNRECORDED = "unrecorded"
    DANGLING = "dangling"
    OUTDATED = "outdated"
    CHANGED = "changed"
    FOREIGN = "foreign"

    __str__ = str.__str__


_SAYS = {
    LoaderState.ABSENT: (
        "torch.distributed.multiworld is not installed, or an upgrade of torch took it away",
        "Run m8d-post-setup to install it",
    ),
    LoaderState.CURRENT: ("torch.distributed.multiworld is installed", ""),
    LoaderState.UNRECORDED: (
        "the loader is there, but torch's RECORD does not have it",
        "Run m8d-post-setup again: it writes what is missing",
    ),
    LoaderState.DANGLING: (
        "torch's RECORD names the loader, but the file is gone",
        "Run m8d-post-setup again, or m8d-post-setup --uninstall",
    ),
    LoaderState.OUTDATED: (
        "the loader is of another version of multiworld",
        "Run m8d-post-setup again to replace it",
    ),
    LoaderState.CHANGED: (
        "the loader was changed after it was installed",
        "Run m8d-post-setup --force to replace it, or --uninstall --force to remove it",
    ),
    LoaderState.FOREIGN: (
        f"{LOADER_FOLDER} is there and not ours",
        "Find out what put it there; this torch may have a module of that name",
    ),
}


@dataclass(frozen=True)
class Inspection:
    """What was found in an installed torch.

    Attributes:
        torch: folder of the package.
        torch_version: "2.13.0+cpu".
        state: of the loader.
        loader_version: of the one that is there; None without one.
        expected_version: of the one this package writes.
        recorded: whether RECORD has it, with the right hash.
        says: one line for people.
        next_step: what to do; empty if all is well.
    """

    torch: str
    torch_version: str
    state: LoaderState
    loader_version: int | None
    expected_version: int
    recorded: bool
    says: str
    next_step: str

    @property
    def fine(self) -> bool:
        """Whether there is nothing to do."""
        return self.state is LoaderState.CURRENT

    def as_dict(self) -> dict[str, object]:
        """Return it as values that JSON knows."""
        return {**asdict(self), "state": str(self.state)}


def inspect(site: TorchSite) -> Inspection:
    """Look at the loader of an installed torch; changes nothing.

    Raises:
        InstallError: its files cannot be read.
    """
    data, record = site.read(LOADER_ENTRY), site.record()
    found = read_loader(data) if data is not None else None
    recorded = data is not None and record.says(LOADER_ENTRY, data)
    if data is None:
        state = _state_without_file(site, dangling=bool(record.below(LOADER_FOLDER)))
    elif found is None:
        state = LoaderState.FOREIGN
    elif not found.intact:
        state = LoaderState.CHANGED
    elif not found.current:
        state = LoaderState.OUTDATED
    else:
        state = LoaderState.CURRENT if recorded else LoaderState.UNRECORDED
    says, next_step = _SAYS[state]
    return Inspection(
        torch=str(site.torch),
        torch_version=site.version(),
        state=state,
        loader_version=found.version if found else None,
        expected_version=LOADER_VERSION,
        recorded=recorded,
        says=says,
        next_step=next_step,
    )


def install(site: TorchSite, *, force: bool = False) -> bool:
    """Put the loader into an installed torch.

    Args:
        site: where.
        force: replace a loader that was edited.

    Returns:
        False if everything was as it should be already.

    Raises:
        InstallError: it cannot be written, or something else is in its place; or a patch file is half applied
            and cannot be taken back. Nothing was changed then,
            unless the message says otherwise.
    """
    with site.locked():
        recover(site)
        site.clean(LOADER_FOLDER)
        found = inspect(site)
        if found.fine:
            return False
        _refuse(found, force=force)
        record, text = site.record(), loader_text()
        record.put(LOADER_ENTRY, text)
        site.change({LOADER_ENTRY: text}, record)
        return True


def uninstall(site: TorchSite, *, force: bool = False) -> bool:
    """Remove the loader, its compiled files and its lines in RECORD.

    Args:
        site: where.
        force: remove a loader that was edited.

    Returns:
        False if there was none.

    Raises:
        InstallError: it cannot be removed, or is not ours; or as for `install`.
    """
    with site.locked():
        recover(site)
        site.clean(LOADER_FOLDER)
        found = inspect(site)
        if found.state is LoaderState.ABSENT:
            return False
        _refuse(found, force=force)
        record = site.record()
        for path in record.below(LOADER_FOLDER):
            record.restore(path, None)
        site.change({LOADER_ENTRY: None}, record)
        return True


def remove_left(torch: Path) -> bool:
    """Remove the loader that is left where torch itself is gone: conda removes only what it installed.

    Args:
        torch: the folder that torch was in.

    Returns:
        False if there is no loader of ours as it was written; nothing was changed then.

    Raises:
        InstallError: it cannot be read or removed.
    """
    place = torch.parent / LOADER_ENTRY
    try:
        if not place.is_file() or TorchSite(torch.parent, torch.parent).leads_out(LOADER_ENTRY):
            return False
        found = read_loader(place.read_bytes())
        if found is None or not found.intact:
            return False
        remove_file(place, torch.parent)
    except OSError as exc:
        raise unwritable(place, exc) from exc
    return True


def _state_without_file(site: TorchSite, *, dangling: bool) -> LoaderState:
    if dangling:
        return LoaderState.DANGLING
    folder = site.root / LOADER_FOLDER
    try:
        foreign = folder.with_suffix(".py").exists() or any(
            path.name != "__pycache__" and path.suffix != ASIDE
            for path in (folder.iterdir() if folder.is_dir() else ())
        )
    except OSError as exc:
        raise unreadable(folder, exc) from exc
    return LoaderState.FOREIGN if foreign else LoaderState.ABSENT


def _refuse(found: Inspection, *, force: bool) -> None:
    if found.state is LoaderState.FOREIGN or (found.state is LoaderState.CHANGED and not force):
        raise InstallError(
            f"{found.torch}: {found.says}",
            rule="only what m8d-post-setup itself wrote is replaced or removed",
            next_step=found.next_step,
        )
