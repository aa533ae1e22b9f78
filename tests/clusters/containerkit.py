"""Containers by a real OCI runtime (crun), without an image: the host's files, read-only, under a root of their own.

Nothing of the host can be written. Each has its own processes, mounts, name and `/etc/hosts`; its network is a
namespace that the test made, or none.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from kits.contract.runkit import PATIENCE, ROOT, Run

USER = 65532
TMP = "/tmp"  # noqa: S108  (the container's own)
PROFILE = Path("/usr/share/containers/seccomp.json")
"""The filter that podman and CRI-O have by default (Debian: golang-github-containers-common)."""
CAPABILITIES = [
    "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_NET_BIND_SERVICE", "CAP_SETFCAP",
    "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
]  # fmt: skip
"""What a runtime leaves to a container of which nothing is said."""
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
IMPORTED = "import torch.distributed.run, multiworld.run.launcher"

# crun 1.8 refuses hosts that have cgroups of both versions mounted; the container has none of its own.
_START = """\
umount -R -l /sys/fs/cgroup 2>/dev/null
mount -t cgroup2 none /sys/fs/cgroup || exit 97
exec crun --cgroup-manager=disabled --root "$1" run --bundle "$2" --pid-file "$2/pid" "$3"
"""


@dataclass
class Security:
    """What a container may.

    Attributes:
        user: and group.
        capabilities: that it keeps.
        read_only: whether its root is.
        seccomp: a profile as crun takes it; None: no filter.
    """

    user: int = USER
    capabilities: list[str] = field(default_factory=list)
    read_only: bool = True
    seccomp: dict | None = None


def refusing(*calls, errno=1):
    """A profile that refuses these system calls with EPERM, and allows all others."""
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [{"names": list(calls), "action": "SCMP_ACT_ERRNO", "errnoRet": errno}],
    }


def default_profile(*refused):
    """The filter of a runtime, for a container without capabilities; `refused` are refused as well."""
    if not PROFILE.exists():
        pytest.skip(f"there is no {PROFILE} here: apt-get install golang-github-containers-common")
    profile, machine = json.loads(PROFILE.read_text()), MACHINES.get(platform.machine(), "")
    rules = [{"names": list(refused), "action": "SCMP_ACT_ERRNO", "errnoRet": 1}] if refused else []
    for each in profile["syscalls"]:
        wanted, unwanted = each.get("includes") or {}, each.get("excludes") or {}
        if wanted.get("caps") or machine not in wanted.get("arches", [machine]):
            continue
        if machine in unwanted.get("arches", []):
            continue
        names = [name for name in each["names"] if name not in refused]
        rule = {"names": names, "action": each["action"], "args": each.get("args") or []}
        if each.get("errnoRet") is not None and each["action"] == "SCMP_ACT_ERRNO":
            rule["errnoRet"] = each["errnoRet"]
        rules.append(rule)
    return {
        "defaultAction": profile["defaultAction"], "defaultErrnoRet": profile["defaultErrnoRet"],
        "syscalls": [rule for rule in rules if rule["names"]],
    }  # fmt: skip


def bind(source, target=None):
    return {
        "source": str(source), "destination": str(target or source), "type": "bind",
        "options": ["rbind", "ro", "nosuid"],
    }  # fmt: skip


def scratch(target, mode="1777"):
    return {"source": "tmpfs", "destination": target, "type": "tmpfs", "options": ["nosuid", f"mode={mode}"]}


@functools.cache
def compile_packages():
    """Have Python keep what it compiles of the packages: a container cannot, and takes twice as long for `import torch`."""
    subprocess.run([sys.executable, "-c", IMPORTED], cwd=ROOT, check=False)


def _of_python():
    """The folders that this Python and its packages lie in, without those below another one or below /usr."""
    folders = {sys.prefix, sys.base_prefix, *(path for path in sys.path if "site-packages" in path)}
    found = sorted(str(Path(each).resolve()) for each in folders if Path(each).is_dir())
    return [each for each in found if not any(each.startswith(f"{other}/") for other in (*found, "/usr"))]


class Container(Run):
    """A started container, whose process 1 is the program.

    Args:
        folder: for what the runtime needs.
        arguments: of the program, whole.
        env: its variables.
        name: of its host.
        security: what it may.
        netns: name of a network namespace; "": one with nothing but a loopback.
        hosts: its ``/etc/hosts``.
        mounts: more of them, as `bind` and `scratch` make them.
    """

    def __init__(self, folder, arguments, env, *, name, security, netns="", hosts="", mounts=()):
        self.id = f"m8d-{uuid.uuid4().hex[:12]}"
        self.bundle = folder / self.id
        (self.bundle / "rootfs").mkdir(parents=True)
        self.hosts = self.bundle / "hosts"
        self.hosts.write_text(hosts or f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        (self.bundle / "resolv.conf").touch()  # there is no name server
        network = {"type": "network", **({"path": f"/run/netns/{netns}"} if netns else {})}
        rights = dict.fromkeys(
            ("bounding", "effective", "permitted"), security.capabilities if not security.user else []
        )
        rights["bounding"] = security.capabilities
        config = {
            "ociVersion": "1.0.0",
            "hostname": name,
            "root": {"path": "rootfs", "readonly": security.read_only},
            "process": {
                "args": [str(each) for each in arguments],
                "env": [
                    f"{key}={value}"
                    for key, value in {
                        "PATH": "/usr/bin:/bin", "HOME": TMP, "HOSTNAME": name, "PYTHONPATH": "/src",
                        "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", **env,
                    }.items()
                ],
                "cwd": TMP,
                "user": {"uid": security.user, "gid": security.user},
                "capabilities": rights,
                "noNewPrivileges": True,
            },
            "mounts": [
                {"source": "proc", "destination": "/proc", "type": "proc"},
                scratch("/dev", "755"),
                *(bind(path) for path in ("/usr", "/bin", "/lib", "/lib64", "/etc") if Path(path).exists()),
                bind(self.hosts, "/etc/hosts"),
                bind(self.bundle / "resolv.conf", "/etc/resolv.conf"),
                scratch(TMP),
                scratch("/dev/shm"),  # noqa: S108
                *(bind(path) for path in _of_python()),
                bind(ROOT, "/src"),
                *mounts,
            ],
            "linux": {
                "namespaces": [network, *({"type": kind} for kind in ("pid", "mount", "ipc", "uts"))],
                **({"seccomp": security.seccomp} if security.seccomp else {}),
            },
        }  # fmt: skip
        (self.bundle / "config.json").write_text(json.dumps(config))
        line = [
            "unshare",
            "--mount",
            "sh",
            "-c",
            _START,
            "sh",
            str(folder / "runtime"),
            str(self.bundle),
            self.id,
        ]
        super().__init__(folder, line, {}, None)

    @property
    def init(self):
        """Pid of process 1 on this host."""
        path = self.bundle / "pid"
        self.wait_for(lambda: path.exists() and path.read_text().strip(), "the container is made")
        return int(path.read_text())

    def inside(self, word):
        """Pids, on this host, of its processes whose command line has the word."""
        space, found = Path(f"/proc/{self.init}/ns/pid").readlink(), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    same = (entry / "ns" / "pid").readlink() == space
                    if same and word.encode() in (entry / "cmdline").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def tell(self, signum):
        """Send a signal to process 1, as a kubelet does."""
        os.kill(self.init, signum)

    def kill(self):
        """Take it away with all its processes, as a machine that fails."""
        self.tell(signal.SIGKILL)
        self.ended()

    def close(self):
        if self.process.poll() is None:
            end = time.monotonic() + PATIENCE
            while self.process.poll() is None and time.monotonic() < end:
                path = self.bundle / "pid"
                if path.exists() and path.read_text().strip():
                    with contextlib.suppress(ProcessLookupError):
                        self.tell(signal.SIGKILL)
                time.sleep(0.05)
        super().close()


def check(need):
    """Skip the test where containers cannot be made."""
    need("crun", "apt-get install crun")
    need("unshare", "apt-get install util-linux")
    if os.geteuid() != 0:
        pytest.skip("containers of these tests need root")
    made = subprocess.run(
        ["unshare", "--mount", "--uts", "--pid", "--fork", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"namespaces are not permitted here: {made.stderr.strip()}")
    compile_packages()
