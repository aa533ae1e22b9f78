"""Runs of every kind as scenes: what they listen at, by kind, with two members of one world."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import shutil
import socket
import ssl
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kits import portkit
from kits.contract.launcherskit import nodes
from kits.contract.runkit import Run, launched, script
from kits.contract.worldkit import free_port
from kits.tlskit import Files, authority

WORLD = "confidential"


@dataclass
class Scene:
    """A run that stands.

    Attributes:
        runs: its processes' starters.
        known: what is where, by port.
        kinds: what must be there.
    """

    runs: list[Run]
    known: dict[int | str, str]
    kinds: set[str]

    @property
    def records(self) -> list[str]:
        """Keys of the world's record in a store."""
        runs = {each["run"] for run in self.runs for each in run.told("up") if "run" in each}
        return [f"m8d/{WORLD}/record", *(f"m8d/{run}@{WORLD}/record" for run in runs)]

    def listeners(self) -> dict[portkit.Listener, str]:
        pids = {pid for run in self.runs for top in (run.pid, *run.alive()) for pid in portkit.children(top)}
        return stores_named(
            portkit.named(portkit.listeners(pids), self.known), {run.pid for run in self.runs}
        )

    def names(self) -> list[str]:
        """What strangers must not read: the world, and its members' own names."""
        told = [each for run in self.runs for each in run.told() if "processes" in each]
        assert told
        return [WORLD, *told[0]["processes"]]

    def standing(self) -> dict[portkit.Listener, str]:
        """The listeners, once all kinds are there; helpers come a moment after a join."""
        deadline = time.monotonic() + 30
        while self.kinds - set((found := self.listeners()).values()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found


def stores_named(found: dict[portkit.Listener, str], launchers: set[int]) -> dict[portkit.Listener, str]:
    """Name launchers' stores: of torch's rendezvous, at every address, two at most; and one of worlds on each node."""
    named = dict(found)
    for each, kind in found.items():
        if (
            not kind
            and each.pids <= launchers
            and not isinstance(each.address, str)
            and answers_as_store(each)
        ):
            everywhere = ipaddress.ip_address(each.address[0]).is_unspecified
            named[each] = "rendezvous" if everywhere else "store"
    counts = Counter((each.pids, kind) for each, kind in named.items() if each.pids <= launchers)
    assert all(count <= {"rendezvous": 2}.get(kind, 1) for (_, kind), count in counts.items() if kind), counts
    return named


def answers_as_store(listener: portkit.Listener) -> bool:
    from multiworld._net.stores.tcp_client import TcpClient

    try:
        where = (listener.host, listener.port)
        family = socket.AF_INET6 if ":" in listener.host else socket.AF_INET
        TcpClient.connect(family, where, deadline=time.monotonic() + 10).close()
    except OSError:
        return False
    return True


# -- the ways to start

MEMBER = f"""
import os, sys, torch, multiworld as mw
from multiworld._c10d.gloo import listeners
serving = len(sys.argv) > 2 and _rank == 0
metrics = mw.serve_metrics() if serving else None
page = mw.serve_page("127.0.0.1:0") if serving else None
world = mw.join("{WORLD}", _rank, 2, store=sys.argv[1], timeout=60)
assert world.group is not None  # made now: gloo listens
world.all_reduce(torch.ones(1))
tell("up", gloo=[port for _, port in listeners._known], processes=[each.process for each in world.members],
     metrics=[metrics.port] if serving else [], page=[page.port] if serving else [])
hold()
"""

WORKER = """
import torch, multiworld as mw
from multiworld._c10d.gloo import listeners
secure = "M8D_TLS_CERT" in _os.environ
metrics = mw.serve_metrics() if secure and _rank == 0 else None
(world,) = mw.join_all().values()
assert secure or world.group is not None
world.all_reduce(torch.ones(1))
tell("up", gloo=[port for _, port in listeners._known], processes=[each.process for each in world.members],
     metrics=[metrics.port] if metrics else [], run=_os.environ["TORCHELASTIC_RUN_ID"], store=int(world._plan.store.rpartition(":")[2]))
hold()
"""

SECURE = f"""
import sys, torch, multiworld as mw
serving = len(sys.argv) > 2 and _rank == 0
metrics = mw.serve_metrics() if serving else None
page = mw.serve_page("127.0.0.1:0") if serving else None
world = mw.join("{WORLD}", _rank, 2, store=sys.argv[1], timeout=60)
world.all_reduce(torch.ones(1))
tell("up", processes=[each.process for each in world.members],
     metrics=[metrics.port] if serving else [], page=[page.port] if serving else [])
hold()
"""

LATE = f"""
import os, sys, torch, multiworld as mw
from multiworld._join import lane
meet = lane.meet
def later(*args, **kwargs):
    tell("meets", processes=[each.process for each in args[1].members])
    hold("meet")
    return meet(*args, **kwargs)
if _rank == 1:
    lane.meet = later
mw.join("{WORLD}", _rank, 2, store=sys.argv[1], timeout=120)
tell("up")
hold()
"""

WORLDS = f"""
[roles]
worker = 2

[worlds.{WORLD}]
members = ["worker:0", "worker:1"]
timeout = 60
"""


@contextlib.contextmanager
def scripts(
    folder: Path,
    text: str,
    store: str,
    *args: str,
    env: Mapping[str, str] = MappingProxyType({}),
    size: int = 2,
) -> Iterator[list[Run]]:
    """Members without a launcher."""
    with contextlib.ExitStack() as made:
        path = script(folder, text)
        runs = []
        for rank in range(size):
            line = [sys.executable, str(path), store, *args]
            more = {"RANK": str(rank), "M8D_HOST": "127.0.0.1", **env}
            runs.append(Run(folder, line, more, None))
            made.callback(runs[-1].close)
        yield runs


def told(runs: list[Run], *kinds: str) -> dict[int | str, str]:
    """What is where, as the members told it when they were up."""
    everyone = [each for run in runs for each in run.told("up")]
    return {port: kind for each in everyone for kind in kinds for port in each[kind]}


def up(runs: list[Run], name: str = "up") -> None:
    for run in runs:
        run.wait_for(
            lambda run=run: bool(run.told(name)) or run.process.poll() is not None, f"{name}", timeout=90
        )
        assert run.told(name), run.report()


@contextlib.contextmanager
def tcp(folder):
    port = free_port()
    with scripts(folder, MEMBER, f"tcp://127.0.0.1:{port}", "serving") as runs:
        up(runs)
        known = {port: "store", **told(runs, "gloo", "metrics", "page")}
        yield Scene(runs, known, {"store", "watchdog", "helper", "gloo", "metrics", "page"})


@contextlib.contextmanager
def tcp_list(folder):
    port = free_port(further=1)
    with scripts(folder, MEMBER, f"tcp://127.0.0.1:{port},127.0.0.1:{port + 1}") as runs:
        up(runs)
        known = {**dict.fromkeys((port, port + 1), "store of a list"), **told(runs, "gloo")}
        yield Scene(runs, known, {"store of a list", "watchdog", "helper", "gloo"})


@contextlib.contextmanager
def file(folder):
    with scripts(folder, MEMBER, f"file://{folder}/store") as runs:
        up(runs)
        yield Scene(runs, told(runs, "gloo"), {"watchdog", "helper", "gloo"})


@contextlib.contextmanager
def joining(folder, env=MappingProxyType({})):
    """While members connect their lanes; one of them comes late."""
    port = free_port()
    with scripts(folder, LATE, f"tcp://127.0.0.1:{port}", env=env) as runs:
        up(runs[1:], "meets")
        yield Scene(runs, {port: "store"}, {"store", "watchdog", "helper", "lane", "lane (unix)"})
        runs[1].say("meet")
        up(runs)


def certificate(folder: Path) -> dict[str, str]:
    """What puts members into secure mode."""
    return Files(folder / "tls", authority("job")).environment


@contextlib.contextmanager
def secure(folder):
    port = free_port()
    with scripts(folder, SECURE, f"tcp://127.0.0.1:{port}", "serving", env=certificate(folder)) as runs:
        up(runs)
        known = {port: "store", **told(runs, "metrics", "page")}
        yield Scene(runs, known, {"store", "watchdog", "helper", "metrics", "page"})


@contextlib.contextmanager
def secure_list(folder):
    port = free_port(further=1)
    env = certificate(folder)
    with scripts(folder, SECURE, f"tcp://127.0.0.1:{port},127.0.0.1:{port + 1}", env=env) as runs:
        up(runs)
        yield Scene(
            runs,
            dict.fromkeys((port, port + 1), "store of a list"),
            {"store of a list", "watchdog", "helper"},
        )


@contextlib.contextmanager
def secure_file(folder):
    with scripts(folder, SECURE, f"file://{folder}/store", env=certificate(folder)) as runs:
        up(runs)
        yield Scene(runs, {}, {"watchdog", "helper"})


def secure_joining(folder):
    return joining(folder, certificate(folder))


def with_tls(listener: portkit.Listener) -> socket.socket:
    """Connect as a stranger who speaks TLS, and has no certificate."""
    sock = portkit.plain(listener)
    if listener.type == socket.SOCK_DGRAM:
        return sock
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        return context.wrap_socket(sock)
    except OSError as error:
        sock.close()
        with warnings.catch_warnings():
            # Where the other end is gone already, Python (3.11) leaves its own object open, in a frame of the error.
            warnings.simplefilter("ignore", ResourceWarning)
            traceback.clear_frames(error.__traceback__)
        raise


def run_on_one_node(folder):
    return run_alone(folder, [], {"gloo", "rendezvous"})


def secure_run_on_one_node(folder):
    return run_alone(folder, ["--secure"], {"metrics"})


@contextlib.contextmanager
def run_alone(folder: Path, options: list[str], more: set[str]):
    (folder / "worlds.toml").write_text(WORLDS)
    home = tempfile.mkdtemp(prefix="m8dl")  # a unix socket's path is short
    options = [*options, "--web", "127.0.0.1:0", "--worlds", str(folder / "worlds.toml")]
    try:
        with launched(folder, WORKER, options=options, env={"XDG_RUNTIME_DIR": home}) as run:
            run.wait_told("up", 2, timeout=90)
            (line,) = run.wait_line("page: http")
            page = int(re.search(r":(\d+)/\?token", line)[1])
            known = {page: "page", run.told("up")[0].store: "store", **told([run], "gloo", "metrics")}
            yield Scene([run], known, {"store", "watchdog", "helper", "page", "control", *more})
    finally:
        shutil.rmtree(home)


@contextlib.contextmanager
def run_on_two_nodes(folder):
    (folder / "worlds.toml").write_text(WORLDS)
    path = script(folder, WORKER)
    options = ["--nproc-per-node", "1", "--worlds", str(folder / "worlds.toml")]
    with nodes(folder, 2, str(path), options=options) as runs:
        up(runs)
        known = {runs[0].told("up")[0].store: "store", **told(runs, "gloo")}
        yield Scene(runs, known, {"store", "watchdog", "helper", "gloo", "control", "rendezvous"})
