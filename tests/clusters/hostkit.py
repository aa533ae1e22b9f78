"""Machines of a cluster, made of namespaces: each has processes, a name, an address and a /run of its own.

A machine that is lost (`Hosts.lose`) ends as one without power does: the kernel kills all its processes at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from kits.netkit import Network

SOON = 60.0
"""Seconds; a machine is there in a tenth of one."""

SPACES = ("--fork", "--kill-child", "--pid", "--mount-proc", "--mount", "--uts")
"""What a machine has of its own, beside the network."""

INIT = (
    'hostname "$0" && mount --bind "$1" /etc/hosts && mount -t tmpfs tmpfs /run && shift && { "$@" & wait; }'
)
"""Process 1 of a machine: it has one service, and reaps what that leaves behind."""


class Hosts(contextlib.ExitStack):
    """Machines that share this one's files, but for /run.

    Args:
        folder: for what they write.
        names: of the machines; each resolves all of them.
    """

    def __init__(self, folder, names):
        super().__init__()
        self.folder = Path(folder)
        self.names = list(names)
        self._network = Network(len(self.names))
        self._inits = {}

    def __enter__(self):
        super().__enter__()
        self.enter_context(self._network)
        try:
            self._try()
        except BaseException:
            self.close()
            raise
        lines = [f"{self.address(name)} {name}\n" for name in self.names]
        (self.folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))
        return self

    def _try(self):
        """Skip the test where machines cannot be made."""
        tried = subprocess.run(
            ["unshare", *SPACES, "mount", "-t", "tmpfs", "tmpfs", "/run"],
            capture_output=True, text=True, timeout=SOON, check=False,
        )  # fmt: skip
        if tried.returncode:
            pytest.skip(f"machines of namespaces are not permitted here: {tried.stderr.strip()}")

    def address(self, name):
        return self._network.address(self._number(name))

    def _number(self, name):
        return self.names.index(name) + 1

    def boot(self, name, *service, env):
        """Start a machine with its service; what it prints is in the folder, NAME.out."""
        with (self.folder / f"{name}.out").open("ab") as out:
            # Nothing of it outlives this process, however that ends.
            machine = subprocess.Popen(
                [
                    "setpriv", "--pdeathsig", "KILL",
                    "nsenter", f"--net=/run/netns/{self._network.hosts[self._number(name) - 1]}",
                    "unshare", *SPACES,
                    "sh", "-c", INIT, name, str(self.folder / "hosts"), *service,
                ],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, cwd=self.folder,
            )  # fmt: skip
        self.callback(self._off, machine)
        deadline = time.monotonic() + SOON
        children = Path(f"/proc/{machine.pid}/task/{machine.pid}/children")
        while not (found := children.read_text().split()):
            assert machine.poll() is None, self.output(name)
            assert time.monotonic() < deadline, f"{name} does not start: {self.output(name)}"
            time.sleep(0.01)
        self._inits[name] = int(found[0])

    def output(self, name):
        return (self.folder / f"{name}.out").read_text(errors="replace")

    def _off(self, machine):
        machine.kill()
        machine.wait(SOON)

    def on(self, name, *command):
        """The command line that runs a command on a machine, in the folder."""
        of = ("-t", str(self._inits[name]), "--mount", "--net", "--uts", "--pid", f"--wd={self.folder}")
        return ["nsenter", *of, *command]

    def pids(self, name, containing=""):
        """The processes of a machine whose command lines contain a text, but for the first, as this one sees them."""
        try:
            space = _space(self._inits[name])
        except FileNotFoundError:  # it is lost
            return []
        found = []
        for each in Path("/proc").iterdir():
            if not each.name.isdecimal() or int(each.name) == self._inits[name]:
                continue
            with contextlib.suppress(OSError):
                line = (each / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
                if _space(int(each.name)) == space and line and containing in line:
                    found.append(int(each.name))
        return found

    def lose(self, name):
        """Take a machine's power: all its processes end at once."""
        os.kill(self._inits[name], signal.SIGKILL)

    def pull(self, name):
        """Take a machine's cable out."""
        self._network.pull(self._number(name))


def _space(pid):
    return Path(f"/proc/{pid}/ns/pid").readlink()
