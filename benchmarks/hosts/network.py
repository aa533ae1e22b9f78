"""Two network namespaces with a cable between them, whose rate can be bounded."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from benchmarks.measuring.part import Unavailable

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

DEVICE = "m8d0"
"""Of each end of the cable, in its namespace."""

_BURST = 1 << 20  # bytes that may go at once; less, and a timer's tick is what bounds 10 Gbit/s
_QUEUE = 8 << 20  # bytes that wait; more are dropped


class Cable:
    """A context manager.

    Args:
        rate: as tc writes it, "10gbit", of each direction; "" leaves the cable as fast as it is.

    Attributes:
        hosts: names of the namespaces.

    Raises:
        Unavailable: (on entering) the system does not let this process make it, or lacks what it takes.
    """

    def __init__(self, rate: str) -> None:
        self.rate = rate
        self.hosts = [f"m8db-{os.getpid()}-{end}" for end in (1, 2)]

    @staticmethod
    def address(end: int) -> str:
        """The address of an end, 0 or 1."""
        return f"10.78.0.{end + 1}"

    def __enter__(self) -> Self:
        if shutil.which("ip") is None or shutil.which("tc") is None or os.geteuid() != 0:
            raise Unavailable("namespaces for two hosts need ip(8), tc(8) and root")
        try:
            self._make()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for host in self.hosts:
            subprocess.run(["ip", "netns", "delete", host], check=False, capture_output=True, timeout=60)

    def _make(self) -> None:
        first, second = self.hosts
        for host in self.hosts:
            _run("ip", "netns", "add", host)
        other_end = ("type", "veth", "peer", "name", DEVICE, "netns", second)
        _run("ip", "link", "add", DEVICE, "netns", first, *other_end)
        for end, host in enumerate(self.hosts):
            _run("ip", "-n", host, "address", "add", f"{self.address(end)}/24", "dev", DEVICE)
            for device in (DEVICE, "lo"):
                _run("ip", "-n", host, "link", "set", device, "up")
            if self.rate:
                bound = ("tbf", "rate", self.rate, "burst", str(_BURST), "limit", str(_QUEUE))
                _run("ip", "netns", "exec", host, "tc", "qdisc", "add", "dev", DEVICE, "root", *bound)


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip()}")
