"""Parallel deflate: chunks compressed side by side, joined into one raw stream, cached by content.

Each chunk is primed with the 32 KiB before it and ends on a byte boundary (Z_SYNC_FLUSH), so the chunks'
bytes put one after the other are one valid raw deflate stream; an empty last block closes it. A chunk's bytes
depend on nothing but its content, the 32 KiB before it, the level and the zlib, so they can be kept under a
hash of these: a changed library finds all the chunks the change did not touch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from m8d_build.errors import CheckFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

__all__ = ["CHUNK", "LEVEL", "ChunkCache", "Deflated", "deflate"]

CHUNK = 4 << 20
LEVEL = 6
WINDOW = 32 << 10
LAST_BLOCK = b"\x03\x00"  # an empty block with the "last" bit set

_MAGIC = b"m8dz1\n"
_SUM = 4


@dataclass(frozen=True)
class Deflated:
    """What went through.

    Attributes:
        size: bytes before.
        compressed_size: bytes after.
        crc: CRC-32 of the bytes before.
        sha256: digest of the bytes before (32 bytes).
        compressed_crc: CRC-32 of the bytes after.
        reused: bytes before that were found compressed in the cache.
    """

    size: int
    compressed_size: int
    crc: int
    sha256: bytes
    compressed_crc: int
    reused: int


class ChunkCache:
    """Compressed chunks in a folder, by content. Safe to delete at any time; safe for threads.

    A file's own CRC is checked when it is read; a damaged one counts as missing. Failing to write one is no
    error: the cache only saves time.

    Args:
        folder: made when the first chunk is kept.
        limit: bytes the folder may hold after ``prune``.
    """

    def __init__(self, folder: Path, limit: int = 2 << 30) -> None:
        self._folder = folder
        self._limit = limit
        self._lock = threading.Lock()
        self._writable = True

    def get(self, key: str) -> bytes | None:
        """Return the chunk kept under a key, None if there is none that is whole."""
        path = self._folder / key
        try:
            data = path.read_bytes()
        except OSError:
            return None
        head = len(_MAGIC) + _SUM
        body = data[head:]
        if data[: len(_MAGIC)] != _MAGIC or zlib.crc32(body) != int.from_bytes(
            data[len(_MAGIC) : head], "big"
        ):
            return None
        with contextlib.suppress(OSError):  # another process prunes
            os.utime(path)  # its age decides what is pruned
        return body

    def put(self, key: str, body: bytes) -> None:
        """Keep a chunk. After the first failure (no room, no permission) nothing more is tried."""
        with self._lock:
            if not self._writable:
                return
        temporary = ""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(prefix=".part-", dir=self._folder)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_MAGIC + zlib.crc32(body).to_bytes(_SUM, "big") + body)
            Path(temporary).replace(self._folder / key)
        except OSError:
            with self._lock:
                self._writable = False
        finally:
            if temporary:
                Path(temporary).unlink(missing_ok=True)

    def prune(self) -> int:
        """Delete the least recently used chunks until the folder is within its limit; return bytes freed."""
        try:
            found = [(path.stat().st_mtime_ns, path.stat().st_size, path) for path in self._folder.iterdir()]
        except OSError:
            return 0
        excess = sum(size for _, size, _ in found) - self._limit
        freed = 0
        for _, size, path in sorted(found):
            if freed >= excess:
                break
            path.unlink(missing_ok=True)
            freed += size
        return freed


def deflate(
    blocks: Iterable[bytes],
    write: Callable[[bytes], object],
    *,
    jobs: int,
    level: int = LEVEL,
    cache: ChunkCache | None = None,
) -> Deflated:
    """Compress bytes into one raw deflate stream (no zlib or gzip header).

    Every chunk is inflated again and compared before it is used, in the threads that compress: after the fact
    that would take as long as all the rest, because inflating a whole stream has only one thread.

    Args:
        blocks: the bytes, in blocks of any size.
        write: takes the compressed bytes, in order, in this thread.
        jobs: how many chunks are compressed side by side; 2 * jobs + 2 chunks are held in memory at most.
        level: zlib's, 0 to 9.
        cache: where compressed chunks are looked up and kept.

    Raises:
        CheckFailed: zlib gave bytes that do not inflate to the chunk.
        Whatever ``blocks`` and ``write`` raise; the workers have ended then.
    """
    digest, crc, size = hashlib.sha256(), 0, 0
    compressed, compressed_crc, reused = 0, 0, 0
    waiting: deque[Future[tuple[bytes, int]]] = deque()
    pool = ThreadPoolExecutor(max_workers=max(1, jobs), thread_name_prefix="deflate")

    def take() -> None:
        nonlocal compressed, compressed_crc, reused
        body, known = waiting.popleft().result()
        reused += known
        compressed += len(body)
        compressed_crc = zlib.crc32(body, compressed_crc)
        write(body)

    try:
        before = b""
        for chunk in _rechunk(blocks):
            waiting.append(pool.submit(_compress, chunk, before, level, cache))
            digest.update(chunk)
            crc = zlib.crc32(chunk, crc)
            size += len(chunk)
            before = chunk[-WINDOW:]  # a chunk is longer than the window, except the last
            if len(waiting) > 2 * jobs:
                take()
        while waiting:
            take()
    finally:
        pool.shutdown(cancel_futures=True)
    write(LAST_BLOCK)
    compressed_crc = zlib.crc32(LAST_BLOCK, compressed_crc)
    return Deflated(size, compressed + len(LAST_BLOCK), crc, digest.digest(), compressed_crc, reused)


def _compress(chunk: bytes, before: bytes, level: int, cache: ChunkCache | None) -> tuple[bytes, int]:
    """Return a chunk's compressed bytes, and its size if they came from the cache (else 0)."""
    key = ""
    if cache is not None:
        naming = hashlib.sha256(f"{zlib.ZLIB_RUNTIME_VERSION} {level} {len(before)}\n".encode())
        naming.update(before)
        naming.update(chunk)
        key = naming.hexdigest()
        if (body := cache.get(key)) is not None and _holds(body, before, chunk):
            return body, len(chunk)
    engine = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS, zdict=before)
    body = engine.compress(chunk) + engine.flush(zlib.Z_SYNC_FLUSH)
    if not _holds(body, before, chunk):
        raise CheckFailed(
            "compressed bytes do not inflate to what they were made from",
            rule="deflate loses nothing",
            next_step="Run again; if it happens twice, check this machine's memory",
        )
    if cache is not None:
        cache.put(key, body)
    return body, 0


def _holds(body: bytes, before: bytes, chunk: bytes) -> bool:
    engine = zlib.decompressobj(-zlib.MAX_WBITS, zdict=before)
    try:
        return engine.decompress(body, len(chunk) + 1) == chunk
    except zlib.error:
        return False


def _rechunk(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in chunks of CHUNK; the last may be shorter."""
    held: list[bytes] = []
    have = 0
    for block in blocks:
        view = memoryview(block)
        while view:
            part = view[: CHUNK - have]
            held.append(bytes(part))
            have += len(part)
            view = view[len(part) :]
            if have == CHUNK:
                yield b"".join(held)
                held, have = [], 0
    if held:
        yield b"".join(held)
