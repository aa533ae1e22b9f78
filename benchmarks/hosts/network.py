"""Two network namespaces with a cable between them, whose rate can be bounded."""

from __future__ import annotations

import os

from benchmarks.measuring.namespaces import Namespaces, ip

DEVICE = "m8d0"
"""Of each end of the cable, in its namespace."""

_BURST = 1 << 20  # bytes that may go at once; less, and a timer's tick is what bounds 10 Gbit/s
_QUEUE = 8 << 20  # bytes that wait; more are dropped


class Cable(Namespaces):
    """Two hosts and the cable between them.

    Args:
        rate: as tc writes it, "10gbit", of each direction; "" leaves the cable as fast as it is.

    Attributes:
        hosts: names of the namespaces.
    """

    def __init__(self, rate: str) -> None:
        self.rate = rate
        self.hosts = [f"m8db-{os.getpid()}-{end}" for end in (1, 2)]
        super().__init__(self.hosts, ("ip", "tc"))

    @staticmethod
    def address(end: int) -> str:
        """The address of an end, 0 or 1."""
        return f"10.78.0.{end + 1}"

    def _make(self) -> None:
        first, second = self.hosts
        for host in self.hosts:
            ip("netns", "add", host)
        other_end = ("type", "veth", "peer", "name", DEVICE, "netns", second)
        ip("link", "add", DEVICE, "netns", first, *other_end)
        for end, host in enumerate(self.hosts):
            ip("-n", host, "address", "add", f"{self.address(end)}/24", "dev", DEVICE)
            for device in (DEVICE, "lo"):
                ip("-n", host, "link", "set", device, "up")
            if self.rate:
                bound = ("tbf", "rate", self.rate, "burst", str(_BURST), "limit", str(_QUEUE))
                ip("netns", "exec", host, "tc", "qdisc", "add", "dev", DEVICE, "root", *bound)
