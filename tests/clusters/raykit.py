"""A Ray cluster of this machine for tests: nodes at addresses of loopback, actors that are members of worlds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch

from multiworld import weights
from multiworld.errors import BrokenWorldException
from multiworld.integrations.ray import join

# Ray listens at all interfaces: only who has the token is answered. It is read when Ray is imported.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
ray = pytest.importorskip("ray", reason="there is no Ray here: pip install 'm8d[ray]'")

ROOT = Path(__file__).parents[2]
MARK = "M8D_TEST_RAY"
PATIENCE = 60.0  # seconds; workers load torch on a machine that may be busy
MIB = 1024 * 1024


class Member:
    """An actor in worlds: their ranks by name. Ray calls `__init__` again where it restarts the actor."""

    def __init__(self, store, ranks, **options):
        options = {"hang_timeout": 3, "timeout": 20, **options}
        self.worlds = {name: join(name, rank, 2, store, **options) for name, rank in ranks.items()}

    def where(self):
        return os.getpid(), ray.get_runtime_context().get_node_id()

    def state(self, name):
        world = self.worlds[name]
        return world.state.value, world.generation

    def add(self, name):
        """The sum of a one of each member, and the generation, as soon as the world is active."""
        world, one = self.worlds[name].wait_active(PATIENCE), torch.ones(1)
        world.all_reduce(one)
        return one.item(), world.generation

    def receive(self, name):
        """Wait for a message that does not come."""
        world = self.worlds[name]
        world.recv(torch.zeros(1), src=1 - world.rank)


class Async:
    """An async actor in a world of two."""

    async def join(self, store, name):
        self.world = await asyncio.to_thread(join, name, 1, 2, store)

    async def add(self):
        one = torch.ones(1)
        await self.world.aio.all_reduce(one)
        return one.item()


class Elastic:
    """A member of a world of one or two."""

    def __init__(self, store, seat):
        self.world = join("range", None, "1:2", store, seat=seat, last_call=20, hang_timeout=3)

    def members(self):
        world = self.world.wait_active(PATIENCE)
        return {member.seat: member.pid for member in world.members}

    def work(self, size):
        """Make steps until the world has so many members, and one with them; the sum of a one of each."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            world, one = self.world.wait_active(PATIENCE), torch.ones(1)
            if world.world_size == size:
                world.all_reduce(one)
                return one.item()
            world.advance()
            time.sleep(0.02)  # as long as a step lasts
        return None


class Engine:
    """An engine that takes weights."""

    def __init__(self, store):
        self.net = torch.nn.Linear(2, 1)
        self.engine = weights.Subscriber("policy", self.net, store.address, hang_timeout=3)

    def where(self):
        return os.getpid(), ray.get_runtime_context().get_node_id()

    def weights(self, version):
        until(lambda: self.engine.update(PATIENCE) or self.engine.version == version)
        return self.net.weight.tolist()


class Nodes:
    """The nodes of a Ray cluster, each at an address of its own."""

    def __init__(self, folder):
        from ray.cluster_utils import Cluster

        self._count = 0
        self.cluster = Cluster()
        self.head = {"num_cpus": 3, "include_dashboard": False, "temp_dir": f"{folder}/ray"}

    def add(self, **options):
        self._count += 1
        return self.cluster.add_node(
            node_ip_address=f"127.0.0.{self._count + 1}", object_store_memory=80 * MIB, **options
        )


@contextlib.contextmanager
def nodes():
    """A cluster with one node, which this process is connected to; nothing of it is left afterwards."""
    mark, folder = secrets.token_hex(8), tempfile.mkdtemp(prefix="m8d-ray-")
    before = dict(os.environ)
    os.environ.update(environment(mark, folder))
    made = Nodes(folder)
    try:
        made.add(**made.head)
        ray.init(
            address=made.cluster.address,
            _node_ip_address="127.0.0.2",
            log_to_driver=False,
            logging_level="ERROR",
        )
        yield made
    finally:
        ray.shutdown()
        made.cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)
        end(mark, folder)


def environment(mark, folder):
    """Variables of a Ray of its own, whose processes bear a mark; names of sockets have 107 characters at most."""
    (Path(folder) / "ray").mkdir(exist_ok=True)  # RAY_TMPDIR's default, where Ray writes its address
    path = [str(ROOT), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        MARK: mark,
        "PYTHONPATH": os.pathsep.join(path),
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
        # By default Ray's workers have 15, so beside other tests they get next to nothing.
        "RAY_worker_niceness": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def end(mark, folder):
    """All processes with the mark end by themselves: what does not is killed, and the test fails."""
    until(lambda: not processes(mark), 20)
    left = processes(mark)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"processes of Ray are left: {left}"


def processes(mark):
    """What was started for this cluster and runs, but this process: its command by pid."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if int(entry.name) == os.getpid():
                continue
            ours = f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
            if ours and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def until(condition, timeout=PATIENCE):
    """What `condition` returns as soon as it is true; what it returned last, at the timeout."""
    deadline = time.monotonic() + timeout
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def back(actor, pid):
    """Wait until Ray has restarted an actor whose process was `pid`; its new process and node."""

    def restarted():
        try:
            found = ray.get(actor.where.remote(), timeout=PATIENCE)
        except (ray.exceptions.ActorUnavailableError, ray.exceptions.ActorDiedError):
            return None
        return found if found[0] != pid else None

    found = until(restarted)
    assert found, "Ray has not restarted the actor"
    return found


def train_loop(config):
    """What a worker of Ray Train does: its default group, and a world of rank 0 with an actor outside of it."""
    import torch.distributed as dist

    def total():
        one = torch.ones(1)
        dist.all_reduce(one)
        return one.item()

    rank, outside = dist.get_rank(), config["outside"]
    assert (dist.get_backend(), total()) == ("gloo", 2)
    if rank == 0:
        member = Member(config["store"], {"train-0": 1})
        answer = outside.add.remote("train-0")
        assert member.add("train-0") == (2, 1) == ray.get(answer)
        pid, _ = ray.get(outside.where.remote())
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(BrokenWorldException):
            member.receive("train-0")
    assert (dist.get_rank(), dist.get_world_size(), total()) == (rank, 2, 2)
    if rank == 0:
        back(outside, pid)
        answer = outside.add.remote("train-0")
        assert member.add("train-0") == (2, 2) == ray.get(answer)
        member.worlds["train-0"].close()
    assert total() == 2


class Replica:
    """A replica of Ray Serve in a world of all replicas: its rank is Serve's."""

    def __init__(self, store):
        from ray import serve

        self.world = join("replicas", serve.get_replica_context().rank.rank, 2, store, hang_timeout=3)

    def __call__(self):
        return os.getpid(), self.world.rank, (self.world.state.value, self.world.generation)
