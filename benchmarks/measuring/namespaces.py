"""Network namespaces: a process in one, and hosts made of them around a switch."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from benchmarks.measuring.part import Unavailable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from typing_extensions import Self

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


class Namespaces:
    """A context manager: namespaces that are gone afterwards.

    Args:
        names: of all of them.
        programs: that `_make` calls.

    Raises:
        Unavailable: (on entering) the system does not let this process make them, or lacks a program.
    """

    def __init__(self, names: Sequence[str], programs: Sequence[str] = ("ip",)) -> None:
        self._namespaces, self._programs = names, programs

    def _make(self) -> None:
        """Make them, and what connects them."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        if os.geteuid() != 0 or any(shutil.which(each) is None for each in self._programs):
            raise Unavailable(f"hosts in network namespaces need root, and {' and '.join(self._programs)}")
        try:
            self._make()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for name in self._namespaces:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=60)


class Hosts(Namespaces):
    """Hosts, each a namespace with a cable to one switch.

    Args:
        count: how many.

    Attributes:
        names: of their namespaces.
    """

    def __init__(self, count: int) -> None:
        mark = f"m8dh-{os.getpid()}"
        self._switch = f"{mark}-s"
        self.names = [f"{mark}-{number}" for number in range(count)]
        super().__init__((*self.names, self._switch))

    @staticmethod
    def address(host: int) -> str:
        """The address of a host, from 0."""
        return f"10.80.0.{host + 1}"

    def cut(self, host: int) -> None:
        """Pull the host's cable at the switch: its own end stays up, and nothing is told to it."""
        ip("-n", self._switch, "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        """Plug the host's cable in again."""
        ip("-n", self._switch, "link", "set", f"port{host}", "up")

    def _make(self) -> None:
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        ip("-n", self._switch, "link", "set", "br0", "up")
        for number, name in enumerate(self.names):
            port = f"port{number}"
            ip("netns", "add", name)
            other_end = ("type", "veth", "peer", "name", port, "netns", self._switch)
            ip("link", "add", "m8d0", "netns", name, *other_end)
            ip("-n", self._switch, "link", "set", port, "master", "br0")
            ip("-n", self._switch, "link", "set", port, "up")
            ip("-n", name, "address", "add", f"{self.address(number)}/24", "dev", "m8d0")
            for device in ("m8d0", "lo"):
                ip("-n", name, "link", "set", device, "up")


def ip(*arguments: str) -> None:
    """Run the command of that name; raises `Unavailable` with what it said where it fails."""
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise Unavailable(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
