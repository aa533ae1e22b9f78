"""Hosts made of network namespaces around a switch, whose cables can be pulled."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess

import pytest

_number = itertools.count()


def ip(*arguments, check=True):
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True, timeout=60)


class Network:
    """Hosts 10.79.0.1, .2, ..., each a namespace with the device m8d0 and a cable to a switch of their own.

    Attributes:
        hosts: names of the namespaces, for ``ip netns exec``.
    """

    def __init__(self, hosts):
        mark = f"m8dn-{os.getpid()}-{next(_number)}"
        self.switch = f"{mark}-s"
        self.hosts = [f"{mark}-{number}" for number in range(1, hosts + 1)]

    def __enter__(self):
        if shutil.which("ip") is None:
            pytest.skip("there is no ip(8) here")
        if os.geteuid() != 0:
            pytest.skip("network namespaces need root")
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name in (*self.hosts, self.switch):
            ip("netns", "delete", name, check=False)

    def _make(self):
        made = ip("netns", "add", self.switch, check=False)
        if made.returncode:
            pytest.skip(f"network namespaces are not permitted here: {made.stderr.strip()}")
        bridge = ip("-n", self.switch, "link", "add", "br0", "type", "bridge", check=False)
        if bridge.returncode:
            pytest.skip(f"bridges are not permitted here: {bridge.stderr.strip()}")
        ip("-n", self.switch, "link", "set", "br0", "up")
        for number, host in enumerate(self.hosts, 1):
            ip("netns", "add", host)
            cable = ip(
                "link", "add", "m8d0", "netns", host,
                "type", "veth", "peer", "name", f"port{number}", "netns", self.switch, check=False,
            )  # fmt: skip
            if cable.returncode:
                pytest.skip(f"veth pairs are not permitted here: {cable.stderr.strip()}")
            ip("-n", self.switch, "link", "set", f"port{number}", "master", "br0")
            ip("-n", self.switch, "link", "set", f"port{number}", "up")
            ip("-n", host, "address", "add", f"{self.address(number)}/24", "dev", "m8d0")
            ip("-n", host, "link", "set", "m8d0", "up")
            ip("-n", host, "link", "set", "lo", "up")

    def address(self, number):
        return f"10.79.0.{number}"

    def pull(self, number):
        """Take the cable of a host out, at the switch; its own link stays up."""
        ip("-n", self.switch, "link", "set", f"port{number}", "down")

    def plug(self, number):
        ip("-n", self.switch, "link", "set", f"port{number}", "up")

    def lose(self, number):
        """Let no packet of a host through, in either direction; the link stays up."""
        for netns, device in ((self.hosts[number - 1], "m8d0"), (self.switch, f"port{number}")):
            # netem where the kernel has it; a policer that lets nothing pass where it has not.
            add = ["netns", "exec", netns, "tc", "qdisc", "add", "dev", device, "root"]
            cut = ip(*add, "netem", "loss", "100%", check=False)
            if cut.returncode:
                cut = ip(*add, "tbf", "rate", "8bit", "burst", "1", "limit", "1", check=False)
            if cut.returncode:
                pytest.skip(f"this kernel drops no packets for tc: {cut.stderr.strip()}")
