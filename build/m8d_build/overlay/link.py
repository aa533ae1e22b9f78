"""Linking of the overlay: exports are decided first (a version script), then the linker runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from m8d_build import proc
from m8d_build.elf.read import read_object
from m8d_build.elf.statics import constructed_at_load
from m8d_build.overlay.graft import export_names, merge_definitions, version_script
from m8d_build.overlay.plan import link_command

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from m8d_build.elf.read import Library

__all__ = ["Linked", "link_overlay"]

LINK_TIMEOUT = 300.0  # seconds; it takes less than one


@dataclass(frozen=True)
class Linked:
    """The overlay library.

    Attributes:
        path: in the work folder.
        private: variables the old library exports and this one keeps to itself.
    """

    path: Path
    private: frozenset[str]


def link_overlay(
    objects: Sequence[Path],
    libraries: Sequence[Path],
    official: Library,
    *,
    compiler: str,
    file_name: str,
    rpath: str,
    work: Path,
    log: Path,
) -> Linked:
    """Link the overlay; every symbol it uses must be found (``-z defs``).

    Args:
        objects: the compiled units.
        libraries: what they use.
        official: the library whose units they replace.
        compiler: drives the linker.
        file_name: of the overlay.
        rpath: where it looks for its neighbours.
        work: folder for it and the version script.
        log: where the linker writes.

    Raises:
        CommandFailed: the linker failed.
        ElfInvalid: an object is damaged.
    """
    constructed = frozenset[str]().union(*(constructed_at_load(path) for path in objects))
    definitions = merge_definitions(read_object(path).definitions for path in objects)
    names = export_names(definitions, official.exports, constructed)
    script = work / "exports.map"
    script.write_text(version_script(names))
    output = work / file_name
    proc.run(
        link_command(compiler, objects, libraries, script, file_name, rpath, output),
        what="link the overlay library",
        log=log,
        env={"TMPDIR": str(work)},
        timeout=LINK_TIMEOUT,
        next_step="An undefined reference means that a unit of this target needs another unit: see its "
        "`units`",
    )
    return Linked(output, frozenset(constructed & official.exports.keys()))
