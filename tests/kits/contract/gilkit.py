"""Calls that hold the GIL."""

from __future__ import annotations

import ctypes
import time


def compute(seconds):
    """Hold the GIL in C: `sum` over a range never gives it back."""
    count = 10**6
    while True:
        start = time.thread_time()  # a core's own time: what others take of it must not shorten the call
        sum(range(count))
        if time.thread_time() - start > 0.2:
            break
        count *= 2
    each = (time.thread_time() - start) / count
    start = time.monotonic()
    sum(range(int(seconds / each)))
    return time.monotonic() - start


def sleeps(seconds):
    """Hold the GIL and do nothing, as in a deadlock: PyDLL does not give it back during a call."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
