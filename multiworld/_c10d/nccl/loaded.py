"""Functions of NCCL and CUDA, as torch has loaded them, that torch does not hand on."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["group_end", "queries_beside_captures"]

_THREAD_LOCAL = 1
"""cudaStreamCaptureModeThreadLocal."""


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
