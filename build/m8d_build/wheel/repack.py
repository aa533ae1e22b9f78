"""Repacking: untouched entries are copied compressed, changed ones compressed anew, RECORD rewritten.

``repack_plan`` decides what happens to each entry; here it is written, and read back. The same inputs and the
same zlib give the same bytes.
"""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING

from m8d_build.errors import CheckFailed, DiskFull, OutputUnwritable, WheelInvalid
from m8d_build.files.blobs import file_sha256
from m8d_build.files.disk import needs_room, remove_tree
from m8d_build.wheel.changes import BLOCK, Edit, Put, content
from m8d_build.wheel.deflate import ChunkCache, deflate
from m8d_build.wheel.rawzip import Member, ZipWriter, raw_offset
from m8d_build.wheel.recordfile import RecordRow, format_record, record_digest
from m8d_build.wheel.relabel import dist_info_name, wheel_name
from m8d_build.wheel.repack_plan import FILE_MODE, EntryPlan, plan_entries
from m8d_build.wheel.wheelfile import open_wheel

if TYPE_CHECKING:
    import zipfile
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from m8d_build.wheel.deflate import Deflated
    from m8d_build.wheel.wheelfile import WheelFile

__all__ = ["SCRATCH", "Edit", "Put", "Repacked", "remove_leftovers", "repack"]

SCRATCH = ".wheel-"
"""How the folders begin that are made in an output folder for unpacked libraries."""
_ROOM = 16 << 20  # RECORD, directory, and what the file system itself needs


@dataclass(frozen=True)
class Repacked:
    """The wheel that was made.

    Attributes:
        path: the file.
        size: in bytes.
        sha256: 64 hex digits.
        reused: uncompressed bytes whose compressed form came from the cache.
        beside: the files that say of it, in the same folder.
    """

    path: Path
    size: int
    sha256: str
    reused: int
    beside: tuple[Path, ...] = ()

    def remove(self) -> None:
        """Remove the wheel, then what lies beside it."""
        for path in (self.path, *self.beside):
            path.unlink(missing_ok=True)


def repack(
    wheel: WheelFile,
    out_dir: Path,
    changes: Sequence[Put | Edit],
    *,
    local: str,
    platform: str,
    notices: Mapping[str, bytes] | None = None,
    describe: Callable[[Mapping[str, str]], Mapping[str, bytes]] = lambda _: {},
    beside: Callable[[Path, str], Mapping[str, bytes]] = lambda _path, _sha256: {},
    jobs: int = 2,
    cache: Path | None = None,
) -> Repacked:
    """Write the patched wheel.

    Args:
        wheel: the official one.
        out_dir: where it goes; made if missing. A wheel of the same name there is replaced.
        changes: entries to replace, add or edit.
        local: local version label ("cu124.m8d2").
        platform: platform tag ("manylinux_2_34_x86_64"); several are joined by dots.
        notices: files for the dist-info folder (licence and notice of the modification).
        describe: called with the SHA-256 of each entry that was changed or added, by its new name; gives more
            files for the dist-info folder.
        beside: called with the finished wheel and its SHA-256; gives files that go beside it, by what
            their names have after its own. They are there before it is.
        jobs: compressors side by side.
        cache: folder for compressed chunks; None keeps none.

    Raises:
        OutputUnwritable: ``out_dir`` cannot be made or written.
        DiskFull: there is not enough room for it, or there was none while writing. Nothing is left behind.
        WheelInvalid: the source wheel turned out to be damaged.
        CheckFailed: what was written does not read back.
        ValueError: as in ``plan_entries`` and ``edit_blocks``; a file of ``describe`` is there already.
    """
    steps = plan_entries(wheel, changes, local=local, platform=platform, notices=notices or {})
    target = out_dir / wheel_name(wheel, local, platform)
    chunks = ChunkCache(cache) if cache is not None else None
    # A folder beside its place, because open_wheel reads from its name what a wheel is. The folder's own name
    # stays the same, so that what a killed run left goes away with the next one.
    temporary = out_dir / f".{target.stem}.part"
    try:
        remove_tree(temporary)
        _preflight(out_dir, _room_needed(wheel, steps))
        with needs_room(out_dir, f"writing {target.name}"):
            temporary.mkdir()
            part = temporary / target.name
            made = _write(wheel, part, steps, dist_info_name(wheel, local), describe, jobs, chunks)
            sha256 = _check(part, made)
            part.chmod(0o644)
            size = part.stat().st_size
            more = {part.with_name(part.name + end): data for end, data in beside(part, sha256).items()}
            for path, data in more.items():
                path.write_bytes(data)
            for path in (*more, part):
                path.replace(out_dir / path.name)
    except OSError as exc:
        if exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR):
            raise _unwritable(out_dir, exc) from exc
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if chunks is not None:
        chunks.prune()
    reused = sum(done.reused for done in made.values())
    return Repacked(target, size, sha256, reused, tuple(out_dir / path.name for path in more))


def remove_leftovers(out_dir: Path) -> None:
    """Remove what killed runs left half-made in an output folder, which the caller holds."""
    for left in (*out_dir.glob(".torch-*.part"), *out_dir.glob(f"{SCRATCH}*")):
        shutil.rmtree(left, ignore_errors=True)


def _write(
    wheel: WheelFile,
    part: Path,
    steps: tuple[EntryPlan, ...],
    dist_info: str,
    describe: Callable[[Mapping[str, str]], Mapping[str, bytes]],
    jobs: int,
    cache: ChunkCache | None,
) -> dict[str, Deflated]:
    """Write all entries and RECORD; return what was made anew, by its new name."""
    rows = {row.path: row for row in wheel.record}
    new_rows: list[RecordRow] = []
    made: dict[str, Deflated] = {}
    record, date = f"{dist_info}/RECORD", wheel.entries[f"{wheel.dist_info}/RECORD"].date_time
    with part.open("wb") as out, wheel.path.open("rb") as source:
        writer = ZipWriter(out)
        for step in steps:
            name = step.member.name
            if step.change is None:
                writer.copy(step.member, source, raw_offset(source, wheel.entries[step.old]))
                if step.old in rows:
                    new_rows.append(replace(rows[step.old], path=name))
                continue
            size, blocks = content(wheel, step.change)
            member = Member(name, step.member.date_time, step.member.mode)
            done = writer.add(member, size, _deflater(blocks, jobs, cache if size >= BLOCK else None))
            made[name] = done
            new_rows.append(RecordRow(name, record_digest(done.sha256), done.size))
        digests = {name: done.sha256.hex() for name, done in made.items()}
        for file_name, said in sorted(describe(digests).items()):
            name = f"{dist_info}/{file_name}"
            if name in made or name in {step.member.name for step in steps} or name == record:
                raise ValueError(f"the wheel has a file of the name {name}")
            done = writer.add(Member(name, date, FILE_MODE), len(said), _deflater([said], jobs, None))
            made[name] = done
            new_rows.append(RecordRow(name, record_digest(done.sha256), done.size))
        data = format_record([*new_rows, RecordRow(record, "", None)])
        made[record] = writer.add(Member(record, date, FILE_MODE), len(data), _deflater([data], jobs, None))
        writer.close()
        out.flush()
        os.fsync(out.fileno())
    return made


def _deflater(
    blocks: Iterable[bytes], jobs: int, cache: ChunkCache | None
) -> Callable[[Callable[[bytes], object]], Deflated]:
    return lambda write: deflate(blocks, write, jobs=jobs, cache=cache)


def _check(part: Path, made: Mapping[str, Deflated]) -> str:
    """Read the written wheel back (structure, RECORD, sizes, tags, contents) and return its SHA-256.

    ``deflate`` has shown already that what it gave inflates to what it was given: here it is enough that
    these bytes are in the file, under the right CRC and sizes.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        digest = pool.submit(file_sha256, part)
        try:
            written = open_wheel(part)
            with part.open("rb") as file:
                for name, done in made.items():
                    _check_entry(file, written.entries[name], done)
        except WheelInvalid as exc:
            raise _unsound(part, exc.value, exc.rule) from exc
        tags, stated = {str(tag) for tag in written.tags}, set(written.headers("WHEEL").get_all("Tag") or [])
        if tags != stated:
            raise _unsound(part, f"WHEEL says {sorted(stated)}", f"the file name says {sorted(tags)}")
        return digest.result()


def _check_entry(file: IO[bytes], info: zipfile.ZipInfo, done: Deflated) -> None:
    file.seek(raw_offset(file, info))
    crc, left = 0, info.compress_size
    while left and (block := file.read(min(left, BLOCK))):
        crc = zlib.crc32(block, crc)
        left -= len(block)
    found = (info.CRC, info.file_size, info.compress_size, crc)
    if left or found != (done.crc, done.size, done.compressed_size, done.compressed_crc):
        raise WheelInvalid(f"{info.filename} is not what was written")


def _unsound(part: Path, value: str, rule: str) -> CheckFailed:
    return CheckFailed(
        f"{part.name} does not read back: {value}",
        rule=rule,
        next_step="Run again; if it happens twice, check the disk",
    )


def _room_needed(wheel: WheelFile, steps: tuple[EntryPlan, ...]) -> int:
    """About the wheel's own size, and what is put in at its unpacked size."""
    added = sum(content(wheel, step.change)[0] for step in steps if isinstance(step.change, Put))
    return wheel.path.stat().st_size + added + _ROOM


def _preflight(out_dir: Path, needed: int) -> None:
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out_dir).free
    except OSError as exc:
        raise _unwritable(out_dir, exc) from exc
    if not os.access(out_dir, os.W_OK | os.X_OK):
        raise _unwritable(out_dir, PermissionError(errno.EACCES, "permission denied"))
    if free < needed:
        raise DiskFull(
            f"{out_dir} has {_mib(free)} MiB free",
            rule=f"the patched wheel needs about {_mib(needed)} MiB",
            next_step="Free some space, or name another folder with --out",
        )


def _unwritable(out_dir: Path, exc: OSError) -> OutputUnwritable:
    return OutputUnwritable(
        f"{out_dir} cannot be written: {exc.strerror}",
        rule="the wheel goes there",
        next_step="Correct its permissions, or name another folder with --out",
    )


def _mib(size: int) -> int:
    return -(-size // (1 << 20))
