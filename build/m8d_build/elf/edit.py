"""The ELF editor: edits are recorded, conflicts refused, then written once. The layout never moves."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from m8d_build.elf.dynamic import DynamicTable, Tag
from m8d_build.elf.hashes import GnuHash, gnu_hash, unfindable_hash
from m8d_build.elf.image import DYN_SIZE
from m8d_build.errors import AlreadyGrafted, BuildError, ElfInvalid, OutputUnwritable
from m8d_build.files.disk import needs_room

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from m8d_build.elf.image import Image
    from m8d_build.elf.symbols import Symbol

__all__ = ["Edit", "Editor", "apply_to_file", "patched", "patched_chunks"]

OTHER_WHEEL = "This library is linked in a way the overlay build cannot graft; use --mode full"


@dataclass(frozen=True)
class Edit:
    """Bytes that take the place of as many others.

    Attributes:
        offset: where in the file.
        old: what is there now; writing refuses a file that has something else.
        new: what comes there.
    """

    offset: int
    old: bytes
    new: bytes

    @property
    def end(self) -> int:
        """Offset of the first byte after it."""
        return self.offset + len(self.old)


class Editor:
    """Records changes to one shared library.

    Args:
        image: the library; it is only read.

    Raises:
        ElfInvalid: it is no shared library, or damaged.
    """

    def __init__(self, image: Image) -> None:
        self.image = image
        self.table = DynamicTable(image)
        self._edits: dict[int, Edit] = {}
        self._added = 0

    @property
    def edits(self) -> tuple[Edit, ...]:
        """Everything recorded so far, by offset; no two overlap."""
        return tuple(self._edits[offset] for offset in sorted(self._edits))

    def replace(self, offset: int, new: bytes) -> None:
        """Record bytes to write at a file offset; the same change twice is one change.

        Raises:
            ElfInvalid: it reaches past the end of the file, or overlaps another change.
        """
        edit = Edit(offset, self.image.bytes_at(offset, len(new)), new)
        if self._edits.get(offset) == edit or edit.old == edit.new:
            return
        for other in self._edits.values():
            if other.offset < edit.end and offset < other.end:
                raise self.image.invalid(
                    f"is to get {new.hex()} at {offset:#x}, but {other.new.hex()} at {other.offset:#x}",
                    "no byte is changed twice",
                    "This is a fault of the toolchain; report it",
                )
        self._edits[offset] = edit

    def add_needed(self, name: str) -> None:
        """Make the library ask for another, as the last of those it asks for.

        A spare entry of .dynamic is used, and the name has to be the end of a string that .dynstr has
        already, so that nothing grows.

        Raises:
            AlreadyGrafted: it asks for it already.
            ElfInvalid: there is no spare entry, or no such string.
        """
        if name in self.table.texts(Tag.NEEDED):
            raise AlreadyGrafted(
                f"{self.image.name} asks for {name} already",
                rule="a library is grafted once",
                next_step="Start again from the official wheel's own file",
            )
        if self.table.spare <= self._added:
            raise self.image.invalid(
                "has no spare entry in .dynamic", "one is needed, and one must stay as the end", OTHER_WHEEL
            )
        at = self.table.strings.find(os.fsencode(name) + b"\0") if name else -1
        if at < 0:
            raise self.image.invalid(
                f"has no string in .dynstr that ends in {name!r}",
                "the overlay's name must be one's end",
                OTHER_WHEEL,
            )
        slot = self.table.offset + DYN_SIZE * (self.table.used + self._added)
        self.replace(slot, Tag.NEEDED.to_bytes(8, "little") + at.to_bytes(8, "little"))
        self._added += 1

    def hide_symbols(self, names: Collection[str]) -> None:
        """Make definitions unfindable: their words in .gnu.hash are changed, the symbols themselves stay.

        Raises:
            AlreadyGrafted: one of them is unfindable already.
            ElfInvalid: a name is not defined, or cannot be hidden soundly.
        """
        table = self._editable_hash()
        symbols = self.table.symbols
        all_names = [symbol.name for symbol in symbols]
        wanted = set(names)
        by_name: dict[str, list[Symbol]] = {}
        for symbol in symbols[table.symoffset :]:
            if symbol.name in wanted and symbol.defined:
                by_name.setdefault(symbol.name, []).append(symbol)
        missing = sorted(wanted - by_name.keys())
        if missing:
            raise self.image.invalid(
                f"does not define {', '.join(missing[:20])}",
                "only its own definitions can be hidden",
                OTHER_WHEEL,
            )
        for name in sorted(wanted):
            found = set(table.lookup(name, all_names))
            for symbol in by_name[name]:
                if symbol.number not in found:
                    raise AlreadyGrafted(
                        f"{self.image.name} hides {name} already",
                        rule="a library is grafted once",
                        next_step="Start again from the official wheel's own file",
                    )
                self._check_hideable(symbol)
                self._hide(table, symbol)

    def _hide(self, table: GnuHash, symbol: Symbol) -> None:
        index = symbol.number - table.symoffset
        own = gnu_hash(symbol.name.encode("utf-8", "surrogateescape"))
        word = unfindable_hash(table.chain[index], own, len(table.buckets))
        self.replace(table.chain_offset + 4 * index, word.to_bytes(4, "little"))

    def _editable_hash(self) -> GnuHash:
        table = self.table.hash
        if table is None or Tag.HASH in self.table:
            has = "both .gnu.hash and .hash" if table else "no .gnu.hash"
            raise self.image.invalid(f"has {has}", "a name can be hidden in .gnu.hash alone", OTHER_WHEEL)
        if self.table.symbolic:
            raise self.image.invalid(
                "was linked with -Bsymbolic", "its own callers would keep the old code", OTHER_WHEEL
            )
        if self.table.prelinked:
            raise self.image.invalid("was prelinked", "its callers are bound already", OTHER_WHEEL)
        return table

    def _check_hideable(self, symbol: Symbol) -> None:
        reason = ""
        if symbol.binding not in {"GLOBAL", "WEAK"}:
            # The dynamic linker keeps unique symbols in a table of its own, and local ones it does not look
            # up.
            reason = f"its binding is {symbol.binding}"
        elif symbol.visibility != "DEFAULT":
            reason = f"its visibility is {symbol.visibility}: the library's own callers do not look it up"
        elif symbol.version:
            reason = f"it has version {symbol.version}, which callers would want of the overlay too"
        if reason:
            raise self.image.invalid(
                f"has {symbol.name}, which cannot be hidden: {reason}", next_step=OTHER_WHEEL
            )


def patched(data: bytes, edits: Sequence[Edit]) -> bytes:
    """Return a copy of a file's bytes with the changes made.

    Raises:
        ElfInvalid: the bytes are not those the changes were recorded for.
    """
    return b"".join(patched_chunks((data,), edits))


def patched_chunks(chunks: Iterable[bytes], edits: Sequence[Edit]) -> Iterator[bytes]:
    """Make the changes while a file streams by; chunk boundaries may fall anywhere.

    Raises:
        ElfInvalid: the bytes are not those the changes were recorded for, or end before the last change.
    """
    waiting = sorted(edits, key=lambda edit: edit.offset)
    begin = 0
    for chunk in chunks:
        end = begin + len(chunk)
        if not waiting or waiting[0].offset >= end:
            begin = end
            yield chunk
            continue
        copy = bytearray(chunk)
        for edit in waiting:
            if edit.offset >= end:
                break
            low, high = max(edit.offset, begin), min(edit.end, end)
            inside, taken = slice(low - begin, high - begin), slice(low - edit.offset, high - edit.offset)
            if copy[inside] != edit.old[taken]:
                raise _changed(low, bytes(copy[inside]), edit.old[taken])
            copy[inside] = edit.new[taken]
        waiting = [edit for edit in waiting if edit.end > end]
        begin = end
        yield bytes(copy)
    if waiting:
        raise _changed(waiting[0].offset, b"", waiting[0].old)


def apply_to_file(source: Path, target: Path, edits: Sequence[Edit]) -> None:
    """Write a changed copy; ``target`` may be ``source``. It appears whole or not at all.

    Raises:
        ElfInvalid: the file is not the one the changes were recorded for.
        DiskFull: there is no room for the copy.
        OutputUnwritable: the copy cannot be written for another reason.
    """
    try:
        with needs_room(target.parent, f"writing {target.name}"):
            _write_copy(source, target, edits)
    except OSError as exc:
        raise OutputUnwritable(
            f"{target} cannot be written: {exc.strerror}", next_step="Name another folder with --out"
        ) from exc


def _write_copy(source: Path, target: Path, edits: Sequence[Edit]) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    os.close(handle)
    beside = Path(name)
    try:
        shutil.copyfile(
            source, beside
        )  # the kernel copies; a stream through Python takes three times as long
        shutil.copymode(source, beside)
        with beside.open("r+b") as file:
            for edit in edits:
                file.seek(edit.offset)
                _expect_old(edit, file.read(len(edit.old)))
                file.seek(edit.offset)
                file.write(edit.new)
        beside.replace(target)
    except BaseException:
        with suppress(FileNotFoundError):
            beside.unlink()
        raise


def _expect_old(edit: Edit, now: bytes) -> None:
    if now != edit.old:
        raise _changed(edit.offset, now, edit.old)


def _changed(offset: int, now: bytes, old: bytes) -> BuildError:
    return ElfInvalid(
        f"the library has {now.hex() or 'no bytes'} at {offset:#x}",
        rule=f"it had {old.hex()} there when the changes were recorded",
        next_step="Start again from the official wheel's own file",
    )
