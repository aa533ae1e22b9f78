"""A process in a network namespace."""

from __future__ import annotations

import ctypes
import os

_NETWORK = 0x40000000  # CLONE_NEWNET of linux/sched.h


def enter(name: str) -> None:
    """Move this thread, and those it starts from now on, into the namespace `name` of ip-netns(8).

    Raises:
        OSError: there is none, or this process may not.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(f"/var/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(fd, _NETWORK):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), name)
    finally:
        os.close(fd)
