"""Functions of NCCL and CUDA, as torch has loaded them, that torch does not hand on."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["group_end", "queries_beside_captures", "wait_for_cuda"]

_THREAD_LOCAL = 1
"""cudaStreamCaptureModeThreadLocal."""

_NO_TIMING = 2
"""cudaEventDisableTiming."""

_LOST = frozenset({214, 220, 700, 702, 710, 714, 715, 716, 717, 718, 719, 720, 721})
"""Errors of CUDA (cudaError_t) after which each call of the process fails until it ends; not those of a
capture, of a forked child, or of the program's end."""

_events: dict[torch.device, ctypes.c_void_p] = {}
"""An event of each GPU, which is only asked for."""


@functools.cache
def group_end() -> Any:
    """Return ``ncclGroupEnd`` (0: it closed a group); None where NCCL is a part of torch's own library."""
    for name, mode in ((None, ctypes.DEFAULT_MODE), ("libnccl.so.2", os.RTLD_NOLOAD)):
        with contextlib.suppress(OSError, AttributeError):
            return ctypes.CDLL(name, mode=mode).ncclGroupEnd
    return None


@functools.cache
def _exchange_mode() -> Any:
    with contextlib.suppress(OSError, AttributeError):
        return ctypes.CDLL(None).cudaThreadExchangeStreamCaptureMode
    return None


@contextlib.contextmanager
def queries_beside_captures() -> Iterator[None]:
    """Context of questions to CUDA in this thread that are no part of another thread's CUDA graph.

    In the default mode of ``torch.cuda.graph`` no thread of the process may ask whether an event has come:
    that fails, and the capture with it. Torch's watchdog asks in a context like this.
    """
    exchange, mode = _exchange_mode(), ctypes.c_int(_THREAD_LOCAL)
    if exchange is None or exchange(ctypes.byref(mode)):
        yield
        return
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@functools.cache
def _cuda() -> Any:
    with contextlib.suppress(OSError, AttributeError):
        cuda = ctypes.CDLL(None)
        cuda.cudaGetErrorString.restype = ctypes.c_char_p
        return cuda
    return None


def wait_for_cuda(device: torch.device) -> str | None:
    """Wait, without the GIL, as long as CUDA makes its callers wait, which an abort of NCCL does.

    Torch asks CUDA for an event with the GIL held: without this all threads of Python would wait with it.

    Returns:
        The error that has made the GPU useless to this process; None: it works, or CUDA cannot be asked.
    """
    cuda = _cuda()
    if cuda is None:
        return None
    event = _events.get(device)
    if event is not None:
        result = cuda.cudaEventQuery(event)  # it was never recorded: it has come
    else:
        event = ctypes.c_void_p()
        with torch.cuda.device(device):
            result = cuda.cudaEventCreateWithFlags(ctypes.byref(event), _NO_TIMING)
        if result == 0:
            _events[device] = event
    return cuda.cudaGetErrorString(result).decode() if result in _LOST else None
