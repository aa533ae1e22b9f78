"""A plain socket pair between two ranks, driven from Python: the floor of a message."""

from __future__ import annotations

import ctypes
import socket
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PATIENCE = 60
"""Seconds."""


class Floor:
    """One end of a Unix stream connection; `send` and `recv` as torch.distributed's, for one peer.

    Args:
        rank: 0 or 1, of this process.
        name: of the socket, in the abstract namespace; the same in both.
    """

    def __init__(self, rank: int, name: str) -> None:
        self._listener: socket.socket | None = None
        self._socket: socket.socket | None = None
        self._name = f"\0{name}"
        self._tensor: torch.Tensor | None = None
        self._view = memoryview(b"")
        if rank == 0:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.settimeout(PATIENCE)
            self._listener.bind(self._name)
            self._listener.listen(1)

    def connect(self) -> None:
        """Meet the other end; rank 0 was made before rank 1 calls this."""
        if self._listener is not None:
            self._socket, _ = self._listener.accept()
            self._listener.close()
        else:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.settimeout(PATIENCE)
            self._socket.connect(self._name)
        # The kernel's own deadline: one of Python's would cost a poll() before each call.
        self._socket.settimeout(None)
        deadline = struct.pack("ll", PATIENCE, 0)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, deadline)

    def send(self, tensor: torch.Tensor, _peer: int) -> None:
        """Send the tensor's bytes."""
        assert self._socket is not None  # noqa: S101  (for mypy; connected before)
        self._socket.sendall(self._bytes(tensor))

    def recv(self, tensor: torch.Tensor, _peer: int) -> None:
        """Receive into the tensor.

        Raises:
            EOFError: the other end is closed.
        """
        assert self._socket is not None  # noqa: S101  (for mypy; connected before)
        view = self._bytes(tensor)
        done = self._socket.recv_into(view)
        while done < len(view):
            count = self._socket.recv_into(view[done:])
            if not count:
                raise EOFError(f"{done} of {len(view)} bytes came")
            done += count

    def close(self) -> None:
        """Close it."""
        for each in (self._listener, self._socket):
            if each is not None:
                each.close()

    def _bytes(self, tensor: torch.Tensor) -> memoryview:
        """The tensor's memory; looked up once for each tensor."""
        if tensor is not self._tensor:
            size = tensor.numel() * tensor.element_size()
            self._tensor = tensor
            self._view = memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
        return self._view
