"""A real systemd as process 1 of namespaces: it sees this machine's files, and changes none of them.

It runs units of the test alone, none of the distribution's, and may not change the kernel's settings: /proc/sys and
/sys are read-only. /opt/m8d/venv is this Python, /opt/m8d/source this repository.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from waitkit import SOON, Waits

ROOT = Path(__file__).parents[2]
UNITS = {
    "basic.target": "[Unit]\nDefaultDependencies=no\nRequires=sysinit.target\nAfter=sysinit.target\n",
    "sysinit.target": "[Unit]\nDefaultDependencies=no\n",
    "shutdown.target": "[Unit]\nDefaultDependencies=no\n",
    "network-online.target": "[Unit]\n",
    "multi-user.target": "[Unit]\nRequires=basic.target\nAfter=basic.target\n",
}

INIT = """
set -e
cd "$1/root"
mount --make-rprivate /
mount -t tmpfs tmpfs "$1/rw"
mkdir "$1/rw/work"
cp -a "$1/files" "$1/rw/upper"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/rw/upper,workdir=$1/rw/work" "$1/root"
cd "$1/root"
mount --bind "$2" opt/m8d/venv
mount --bind "$3" opt/m8d/source
mount -t proc proc proc
mount --bind proc/sys proc/sys
mount -o remount,ro,bind proc/sys
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs tmpfs dev
for each in null zero full random urandom tty; do touch dev/$each; mount --bind /dev/$each dev/$each; done
ln -s /proc/self/fd dev/fd
ln -s pts/ptmx dev/ptmx
mkdir dev/shm
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t tmpfs tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
ip link set lo up
hostname m8d
mkdir -p run/old
pivot_root . run/old
umount -l /run/old
exec /lib/systemd/systemd --system --unit=multi-user.target --log-target=null --show-status=no
"""


class Systemd(Waits, contextlib.ExitStack):
    """A system with units.

    Args:
        folder: for all its files.
        units: of systemd, by name, as text; a name with a / is a drop-in.
        files: others, by path from /.
    """

    def __init__(self, folder, units, files):
        super().__init__()
        self.folder = Path(folder)
        self._units, self._files = units, files
        self._init = 0

    def __enter__(self):
        super().__enter__()
        if os.geteuid() != 0:
            pytest.skip("machines of namespaces need root")
        try:
            self._lay_out()
            self._boot()
        except BaseException:
            self.close()
            raise
        return self

    def _lay_out(self):
        for name in ("root", "rw", "files"):
            (self.folder / name).mkdir()
        upper = self.folder / "files"
        # The user of the services may read this Python, which may be in a home.
        base = Path(sys.base_prefix)
        for each in reversed([base, *base.parents][:-1]):
            made = upper / each.relative_to("/")
            made.mkdir()
            made.chmod(0o755)
        runs = '#!/bin/sh\nPYTHONPATH=/opt/m8d/source exec /opt/m8d/venv/bin/python -m multiworld.run "$@"\n'
        files = {
            **{f"/etc/m8d-units/{name}": text for name, text in {**UNITS, **self._units}.items()},
            "/etc/passwd": Path("/etc/passwd").read_text() + "m8d:x:7999:7999::/:/bin/sh\n",
            "/etc/group": Path("/etc/group").read_text() + "m8d:x:7999:\n",
            "/opt/m8d/bin/m8d-run": runs,
            **self._files,
        }
        for name, text in files.items():
            path = upper / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (upper / "opt/m8d/bin/m8d-run").chmod(0o755)
        for name in ("opt/m8d/venv", "opt/m8d/source"):
            (upper / name).mkdir(parents=True, exist_ok=True)

    def _boot(self):
        group = self._control_group()
        script = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        with (self.folder / "init").open("ab") as out:
            machine = subprocess.Popen(
                [
                    "setpriv", "--pdeathsig", "KILL", "sh", "-c", script, str(group),
                    "unshare", "--fork", "--kill-child", "--pid", "--mount", "--uts", "--net", "--ipc", "--cgroup",
                    "sh", "-c", INIT, "init", str(self.folder), sys.prefix, str(ROOT),
                ],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                env={
                    "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin", "container": "m8d",
                    "SYSTEMD_UNIT_PATH": "/etc/m8d-units",
                },
            )  # fmt: skip
        self.callback(self._off, machine)
        children = Path(f"/proc/{machine.pid}/task/{machine.pid}/children")

        def up():
            if machine.poll() is not None:
                pytest.skip(f"machines of namespaces are not permitted here: {self.report()}")
            self._init = int((children.read_text().split() or [0])[0])
            return self._init and self.ctl("is-system-running", check=False).strip() == "running"

        self.wait(up, "systemd is up")

    def _control_group(self):
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        for _, where, kind, options, *_ in mounts:
            if kind == "cgroup2" and "rw" in options.split(","):
                group = Path(where) / f"m8d-{os.getpid()}"
                with contextlib.suppress(OSError):
                    group.mkdir()
                    self.callback(self._remove, group)
                    return group
        pytest.skip("there is no writable cgroup2 here: systemd needs one")

    def _remove(self, group):
        """Remove a control group, when its processes have ended."""

        def removed():
            for each in sorted(group.rglob("*"), key=lambda path: -len(path.parts)):
                if each.is_dir():
                    with contextlib.suppress(OSError):
                        each.rmdir()
            with contextlib.suppress(OSError):
                group.rmdir()
            return not group.exists()

        self.wait(removed, f"{group} is empty")

    def _off(self, machine):
        machine.kill()
        machine.wait(SOON)

    # -- what its administrator does

    def ctl(self, *words, check=True):
        """Run systemctl; return what it printed."""
        return self.run("systemctl", *words, check=check)

    def run(self, *command, check=True):
        """Run a command beside the services; return what it printed."""
        done = subprocess.run(
            ["nsenter", "-t", str(self._init), "--all", *command],
            capture_output=True, text=True, timeout=SOON * 2, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.report()}"
        return done.stdout

    def path(self, path):
        """Where a file of the system is for this process."""
        return Path(f"/proc/{self._init}/root") / path.lstrip("/")

    def show(self, unit, name):
        """A property of a unit."""
        return self.ctl("show", "--value", "--property", name, unit).strip()

    def pids(self, unit):
        """The processes of a unit, without those of other pid namespaces."""
        group = self.show(unit, "ControlGroup")
        path = self.path(f"/sys/fs/cgroup{group}/cgroup.procs")
        return [int(each) for each in path.read_text().split()] if group and path.exists() else []

    def main(self, unit):
        """Number of the main process, in its own namespace."""
        return int(self.show(unit, "MainPID"))

    def report(self):
        """What was printed before systemd began, and its units that failed."""
        command = [
            "nsenter",
            "-t",
            str(self._init),
            "--all",
            "systemctl",
            "status",
            "--no-pager",
            "--state=failed,activating",
        ]
        done = (
            subprocess.run(command, capture_output=True, text=True, timeout=SOON, check=False)
            if self._init
            else None
        )
        return (self.folder / "init").read_text(errors="replace") + ("" if done is None else done.stdout)


def installed():
    """Whether there is a systemd to start."""
    return Path("/lib/systemd/systemd").exists() and shutil.which("systemctl") is not None
