"""A real Slurm on machines made of namespaces: a controller, nodes, and munge between them."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
from pathlib import Path

from hostkit import Hosts
from waitkit import SOON, Waits

CONF = """
ClusterName=m8d
SlurmctldHost=ctl
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/ctl.log
SlurmctldPidFile={folder}/ctl.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
JobRequeue=1
SlurmdTimeout=8
MessageTimeout=5
KillWait={kill_wait}
MpiDefault=none
{more}
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
NodeName={nodes} CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
"""`SlurmdTimeout`: a node that does not answer is lost after so many seconds (300 by default), and a step that has
ended elsewhere waits for that. `cred_expire`: a job that is requeued waits that long (120 s by default)."""


class Slurm(Waits, contextlib.ExitStack):
    """A cluster of the machines ctl, n1, n2, ...

    Args:
        folder: for all its files.
        nodes: how many there are.
        kill_wait: seconds between a job's SIGTERM and its SIGKILL.
        more: lines of slurm.conf.
    """

    def __init__(self, folder, nodes=3, *, kill_wait=15, more=""):
        super().__init__()
        self.folder = Path(folder)
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self.hosts = Hosts(self.folder, ["ctl", *self.nodes])
        self.kill_wait = kill_wait
        self._more = more
        self.env = {
            **os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), "XDG_RUNTIME_DIR": "/run",
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
        }  # fmt: skip

    def __enter__(self):
        super().__enter__()
        try:
            self.enter_context(self.hosts)
            self._munge()
            (self.folder / "state").mkdir()
            nodes = f"n[1-{len(self.nodes)}]"
            conf = CONF.format(folder=self.folder, nodes=nodes, kill_wait=self.kill_wait, more=self._more)
            (self.folder / "slurm.conf").write_text(conf)
            # Not looked for: a machine's /sys is this one's, and no control group is made there.
            (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
            self.hosts.boot("ctl", shutil.which("slurmctld", path=self.env["PATH"]), "-D", env=self.env)
            for name in self.nodes:
                self.boot(name)
            self.idle()
        except BaseException:
            self.close()
            raise
        return self

    def idle(self):
        """Wait until all nodes are there, without a job."""
        self.wait(lambda: self.ask("sinfo", "-h", "-o", "%T").split() == ["idle"], "all nodes are idle")

    def boot(self, name):
        """Start a node, the first time or again."""
        self.hosts.boot(name, shutil.which("slurmd", path=self.env["PATH"]), "-D", env=self.env)

    def _munge(self):
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        made = {
            "--key-file": key, "--socket": self.folder / "munge.socket", "--pid-file": self.folder / "munge.pid",
            "--log-file": self.folder / "munge.log", "--seed-file": self.folder / "munge.seed",
        }  # fmt: skip
        with (self.folder / "munge.out").open("wb") as out:
            daemon = subprocess.Popen(
                [
                    "setpriv", "--pdeathsig", "KILL", shutil.which("munged", path=self.env["PATH"]),
                    # Forced: its files are below a temporary folder, which others may write to.
                    "--foreground", "--force", *(f"{name}={path}" for name, path in made.items()),
                ],
                stdout=out, stderr=out,
            )  # fmt: skip
        self.callback(daemon.wait, SOON)
        self.callback(daemon.terminate)
        socket = self.folder / "munge.socket"
        self.wait(socket.exists, f"munge: {(self.folder / 'munge.out').read_text()}")

    # -- what a user does

    def ask(self, *command, check=False, timeout=SOON, env=None):
        """Run a command of Slurm's on the controller; return what it printed."""
        done = subprocess.run(
            self.hosts.on("ctl", *command), env={**self.env, **(env or {})}, timeout=timeout,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *words, env):
        """Submit a job with sbatch; return its number."""
        return self.ask("sbatch", "--parsable", *map(str, words), check=True, env=env).strip()

    def job(self, number):
        """What `scontrol show job` says of a job, by its names."""
        text = self.ask("scontrol", "-o", "show", "job", number, check=True)
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def ended(self, number, timeout):
        """Wait until a job is over, and nothing of it is left on any node; return its state and exit code."""

        def over():
            job = self.job(number)
            return (
                job["JobState"] not in {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED"}
                and job
            )

        job = self.wait(over, f"job {number} is over", timeout)
        return job["JobState"], job["ExitCode"]

    def report(self):
        """The last lines of each daemon."""
        texts = [
            f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}"
            for path in self.folder.glob("*.out")
        ]
        return "\n".join(texts)
