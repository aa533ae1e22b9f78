"""The plan of a repack: for each entry of the wheel, keep, replace, edit or add. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from m8d_build.wheel.changes import Edit, Put
from m8d_build.wheel.rawzip import Member, member_of
from m8d_build.wheel.relabel import (
    dist_info_name,
    patched_version,
    retag,
    set_metadata_version,
    set_module_version,
)
from m8d_build.wheel.versionfile import VERSION_ENTRY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from m8d_build.wheel.wheelfile import WheelFile

__all__ = ["FILE_MODE", "PROGRAM_MODE", "EntryPlan", "plan_entries"]

FILE_MODE = 0o100644
PROGRAM_MODE = 0o100755

_WRITTEN = ("METADATA", "WHEEL", "RECORD")
_UNCARRIED = (
    "RECORD",
    "RECORD.jws",
    "RECORD.p7s",
)  # written anew; a signature over the old one means nothing


@dataclass(frozen=True)
class EntryPlan:
    """What happens to one entry.

    Attributes:
        old: its name in the source wheel, "" for an added one.
        member: what it becomes; sizes and CRC are those of the source until it is written.
        change: None if its compressed bytes move over as they are.
    """

    old: str
    member: Member
    change: Put | Edit | None


def plan_entries(
    wheel: WheelFile,
    changes: Sequence[Put | Edit],
    *,
    local: str,
    platform: str,
    notices: Mapping[str, bytes],
) -> tuple[EntryPlan, ...]:
    """Decide what happens to every entry; RECORD, which needs the digests of the others, is not among them.

    The source's order is kept; added entries follow, sorted by name, with METADATA's date.

    Raises:
        ValueError: an entry is changed twice, an edited one does not exist, or a change touches the dist-info
            folder (its files follow from the arguments), or a notice takes the name of a file that is there.
        WheelInvalid: METADATA, WHEEL or torch/version.py lack the line to change.
    """
    version = patched_version(wheel, local)
    new_info = dist_info_name(wheel, local)
    tags = [f"{tag.interpreter}-{tag.abi}-{part}" for tag in wheel.tags for part in platform.split(".")]
    made: dict[str, Put | Edit] = {}
    for change in changes:
        if (
            change.name in made
            or change.name.startswith(f"{wheel.dist_info}/")
            or change.name == VERSION_ENTRY
        ):
            raise ValueError(f"{change.name} is changed twice, or is written by the repacker itself")
        if isinstance(change, Edit) and change.name not in wheel.entries:
            raise ValueError(f"{change.name} cannot be edited: {wheel.path.name} has no such entry")
        made[change.name] = change
    made[VERSION_ENTRY] = Put(VERSION_ENTRY, set_module_version(wheel.read(VERSION_ENTRY), version))
    made[f"{wheel.dist_info}/METADATA"] = Put("", set_metadata_version(wheel.metadata, version))
    made[f"{wheel.dist_info}/WHEEL"] = Put("", retag(wheel.wheel, set(tags)))
    for name, data in notices.items():
        if name in _WRITTEN or f"{wheel.dist_info}/{name}" in wheel.entries:
            raise ValueError(f"a notice cannot be named {name}: the wheel has a file of that name")
        made[f"{wheel.dist_info}/{name}"] = Put("", data)

    def renamed(name: str) -> str:
        inside = name.startswith(f"{wheel.dist_info}/")
        return new_info + name[len(wheel.dist_info) :] if inside else name

    steps = []
    unsigned = {f"{wheel.dist_info}/{name}" for name in _UNCARRIED}
    for name, info in wheel.entries.items():
        if name not in unsigned:
            steps.append(EntryPlan(name, member_of(info, renamed(name)), made.pop(name, None)))
    date = wheel.entries[f"{wheel.dist_info}/METADATA"].date_time
    for name, change in sorted(made.items()):
        program = isinstance(change, Put) and change.executable
        steps.append(
            EntryPlan("", Member(renamed(name), date, PROGRAM_MODE if program else FILE_MODE), change)
        )
    return tuple(steps)
