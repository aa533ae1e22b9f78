"""Checksums of the pieces of tensors, computed by threads while other pieces travel."""

from __future__ import annotations

import struct
import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from os import cpu_count
from typing import TYPE_CHECKING

from multiworld._c10d.lane import tensors

if TYPE_CHECKING:
    from torch import Tensor

    from multiworld._core.state_pieces import Piece

__all__ = ["Sums"]

_WORKERS = 4  # one does about 1 GB/s
_READ = 0x100  # PyBUF_READ


def _checksum(piece: Tensor) -> int:
    size = piece.nbytes
    return zlib.crc32(tensors.memory_view(piece.data_ptr(), size, _READ))


class Sums:
    """See the module; `close` it in the end. The checksum of a tensor is that of its pieces' checksums."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(min(_WORKERS, cpu_count() or 1), "m8d-state")
        self._of: dict[int, list[Future[int]]] = {}
        self._pending: deque[tuple[Future[int], int]] = deque()
        self._bytes = 0

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    def add(self, piece: Piece, data: Tensor) -> None:
        """Begin to sum a piece, whose bytes are `data`; they are held until that is done."""
        future = self._pool.submit(_checksum, data)
        self._of.setdefault(piece.tensor, []).append(future)
        self._pending.append((future, piece.size))
        self._bytes += piece.size

    def settle(self, most: int = 0) -> None:
        """Wait until at most so many bytes are still to be summed."""
        while self._bytes > most:
            future, size = self._pending.popleft()
            future.result()
            self._bytes -= size

    def of(self, tensor: int) -> list[int]:
        """Return the checksums of a tensor's pieces."""
        return [each.result() for each in self._of.get(tensor, ())]

    def whole(self, tensor: int) -> int:
        """Return the checksum of a tensor."""
        found = self.of(tensor)
        return zlib.crc32(struct.pack(f"<{len(found)}I", *found))
