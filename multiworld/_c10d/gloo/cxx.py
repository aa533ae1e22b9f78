"""C++ objects of torch's gloo without Python bindings: finding them, and ending waits in them.

Three facts are used, all of them part of an ABI and none of them guessed: a Python object of pybind11 holds
the address of its C++ object behind its header; a C++ object with virtual functions begins with the address
of its class's table; libtorch_cpu exports those tables and gloo's functions (seen in the official wheels of
torch 2.4, 2.13 and 2.15). An object is used only if its table is the expected one. Memory is read through
``/proc/self/mem``, where an address that is not mapped is an error and not the end of the process.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "BUFFER", "GROUP", "RECEIVE", "SEND", "Memory", "address_of", "buffer_at", "holders", "tell", "usable",
]  # fmt: skip

BUFFER = "_ZTVN4gloo9transport3tcp13UnboundBufferE"
GROUP = "_ZTVN4c10d16ProcessGroupGlooE"
SEND = "_ZTVN4c10d16ProcessGroupGloo8SendWorkE"
RECEIVE = "_ZTVN4c10d16ProcessGroupGloo8RecvWorkE"

# gloo::transport::tcp::UnboundBuffer::signalException(std::exception_ptr)
_TELL = "_ZN4gloo9transport3tcp13UnboundBuffer15signalExceptionENSt15__exception_ptr13exception_ptrE"
# std::exception_ptr::exception_ptr(void*), which counts a reference, and its destructor
_COUNT = "_ZNSt15__exception_ptr13exception_ptrC1EPv"
_UNCOUNT = "_ZNSt15__exception_ptr13exception_ptrD1Ev"
# std::runtime_error: its type, its constructor from a string, its destructor
_ERROR_TYPE, _ERROR, _ERROR_END = (
    "_ZTISt13runtime_error",
    "_ZNSt13runtime_errorC1EPKc",
    "_ZNSt13runtime_errorD1Ev",
)
_WORD = struct.Struct("=Q")
_TABLE_HEAD = 16
"""Bytes of a virtual table before the address that objects hold (Itanium C++ ABI, 2.5.2)."""

_RUNTIME_ERROR = 16
"""Bytes of a ``std::runtime_error`` (libstdc++): a table's address and a string's."""

WORK = 1024
"""Bytes at the beginning of a send's or a receive's work in which its buffer's address is looked for."""


class Memory:
    """This process's memory, to read.

    Raises:
        OSError: the system does not let a process read it.
    """

    def __init__(self) -> None:
        self._file = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._file)

    def words(self, address: int, size: int) -> list[int]:
        """Return the 8-byte words from `address` on, at most `size` bytes; none where nothing is mapped."""
        try:
            data = os.pread(self._file, size, address)
        except (OSError, OverflowError):
            return []
        return [word for (word,) in _WORD.iter_unpack(data[: len(data) // 8 * 8])]

    def is_a(self, address: int, table: str) -> bool:
        """Whether the C++ object at `address` is exactly of the class that has the virtual table `table`."""
        return self.words(address, 8) == [_table(table)]


@functools.cache
def _library() -> Any:
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    return ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)


@functools.cache
def _table(name: str) -> int:
    return ctypes.addressof(ctypes.c_char.in_dll(_library(), name)) + _TABLE_HEAD


@functools.cache
def usable() -> bool:
    """Whether this build exports what is needed, and the system lets a process read its own memory."""
    try:
        for name in (BUFFER, GROUP, SEND, RECEIVE):
            _table(name)
        _library()[_TELL]
        _error("")
        with closing(Memory()) as memory:
            return memory.is_a(_table(BUFFER) - _TABLE_HEAD, BUFFER) is False
    except (OSError, AttributeError, ValueError):
        return False


def address_of(instance: object) -> int:
    """Return where the C++ object of a pybind11 instance is; 0 where it has none any more."""
    return int(ctypes.c_void_p.from_address(id(instance) + object.__basicsize__).value or 0)


def holders(memory: Memory, instance: object) -> int:
    """Return how many hold the C++ object of a pybind11 instance, it among them; 0 where it has none.

    The object counts them itself (``c10::intrusive_ptr_target``), in the low half of the word behind the
    address of its table. The high half is empty or counts weak references, by torch's version.
    """
    address = address_of(instance)
    words = memory.words(address + 8, 8) if address else []
    return words[0] & 0xFFFFFFFF if words else 0


def buffer_at(memory: Memory, work: object) -> int:
    """Return the address of the buffer of a gloo send or receive; 0 where `work` is anything else.

    The buffer is the work's own: the first pointer to a buffer in a work is the one it owns.
    """
    address = address_of(work)
    words = memory.words(address, WORK) if address else []
    if not words or words[0] not in {_table(SEND), _table(RECEIVE)}:
        return 0
    for word in words[1:]:
        if word and word % 8 == 0 and memory.is_a(word, BUFFER):
            return word
    return 0


def tell(buffer: int, message: str) -> None:
    """Let each present and later wait for the gloo buffer at `buffer` raise a ``std::runtime_error``.

    It is what gloo itself does for the buffers of a connection that fails. The buffer must stay alive
    meanwhile: a thread waits in it, or its work is held.
    """
    library = _library()
    error = ctypes.c_void_p()
    # A C++ function takes an exception_ptr by the address of a temporary, which it empties.
    library[_COUNT](ctypes.byref(error), _error(message))
    try:
        library[_TELL](ctypes.c_void_p(buffer), ctypes.byref(error))
    finally:
        library[_UNCOUNT](ctypes.byref(error))


@functools.cache
def _error(message: str) -> Any:
    """Make a C++ exception that was not thrown yet, as ``std::make_exception_ptr`` does; never freed."""
    library = _library()
    allocate = library.__cxa_allocate_exception
    allocate.restype, allocate.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    prepare = library.__cxa_init_primary_exception
    prepare.restype, prepare.argtypes = ctypes.c_void_p, [ctypes.c_void_p] * 3
    kind = ctypes.addressof(ctypes.c_char.in_dll(library, _ERROR_TYPE))
    destroy = ctypes.cast(library[_ERROR_END], ctypes.c_void_p)
    made = ctypes.c_void_p(allocate(_RUNTIME_ERROR))
    prepare(made, kind, destroy)
    library[_ERROR](made, ctypes.c_char_p(message.encode()))
    # Counts one reference, which is never given back.
    library[_COUNT](ctypes.byref(ctypes.c_void_p()), made)
    return made
