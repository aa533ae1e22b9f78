"""One shared library from the overlay's objects: what it exports is decided first, then the linker runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from m8d_build import proc
from m8d_build.elf.read import read_object
from m8d_build.graft import export_names, merge_definitions, version_script
from m8d_build.plan import link_command

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from m8d_build.elf.read import Library

__all__ = ["link_overlay"]

LINK_TIMEOUT = 300.0  # seconds; it takes less than one


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
) -> Path:
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

    Returns:
        The library, in ``work``.

    Raises:
        CommandFailed: the linker failed.
        ElfInvalid: an object is damaged.
    """
    names = export_names(
        merge_definitions(read_object(path).definitions for path in objects), official.exports
    )
    script = work / "exports.map"
    script.write_text(version_script(names))
    output = work / file_name
    proc.run(
        link_command(compiler, objects, libraries, script, file_name, rpath, output),
        what="link the overlay library",
        log=log,
        timeout=LINK_TIMEOUT,
        next_step="An undefined reference means that a unit of this target needs another unit: see its `units`",
    )
    return output
