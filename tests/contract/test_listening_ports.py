"""Every socket at which any process of a run listens, in each way to start one, and what a stranger gets there.

A listener that the table does not know fails, and so does a kind that docs/security.md does not name. `MODES` has the
ways; a mode that promises more gets `Expected.strict`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import re
import shutil
import socket
import ssl
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pytest
from kits import portkit
from kits.strangerkit import Expected, judge, reads, visit_all
from kits.tlskit import Files, authority
from runkit import ROOT, Run, launched, script
from test_run_unequal import nodes
from worldkit import free_port

pytestmark = [pytest.mark.everyday, pytest.mark.timeout(300)]

log = logging.getLogger("measured")

WORLD = "confidential"
SLACK = 4.0 if "CI" in os.environ else 0.9
"""Seconds beyond each bound: CI's machine is shared and noisy."""

STORE = Expected("torch's TCPStore (`tcp://`)", (None, 2.0, None), readable=True)
TABLE = {
    "store": STORE,
    "store of a list": Expected("a `tcp://` list", STORE.most, readable=True),
    # Torch's own server, as torchrun starts it.
    "rendezvous": Expected("torch's rendezvous", (None, None, None), readable=True),
    "watchdog": Expected("the watchdog's connections", (1.0, 1.0, 1.0)),
    "lane": Expected("the connections for [messages]", (2.0, 2.0, 2.0)),
    "lane (unix)": Expected("the connections for [messages]", (2.0, 2.0, 2.0)),
    "helper": Expected("[helper]", (0.0, 0.0, 0.0)),
    "gloo": Expected("gloo's connections", (None, None, None)),
    "page": Expected("[the page]", (10.0, 10.0, 10.0)),
    "metrics": Expected("`/metrics` of [`serve_metrics`]", (5.0, 5.0, 10.0), readable=True),
    "control": Expected("`m8d-run`'s control socket", (10.0, 10.0, None), readable=True),
}
EVERYWHERE = {"rendezvous"}
"""Kinds that listen at every address of the host."""


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
(world,) = mw.join_all().values()
assert world.group is not None
world.all_reduce(torch.ones(1))
tell("up", gloo=[port for _, port in listeners._known], processes=[each.process for each in world.members],
     run=_os.environ["TORCHELASTIC_RUN_ID"], store=int(world._plan.store.rpartition(":")[2]))
hold()
"""

SECURE = f"""
import sys, torch, multiworld as mw
world = mw.join("{WORLD}", _rank, 2, store=sys.argv[1], timeout=60)
world.all_reduce(torch.ones(1))
tell("up", processes=[each.process for each in world.members])
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
    with scripts(folder, SECURE, f"tcp://127.0.0.1:{port}", env=certificate(folder)) as runs:
        up(runs)
        yield Scene(runs, {port: "store"}, {"store", "watchdog", "helper"})


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
    except OSError:
        sock.close()
        raise


@contextlib.contextmanager
def run_on_one_node(folder):
    (folder / "worlds.toml").write_text(WORLDS)
    home = tempfile.mkdtemp(prefix="m8dl")  # a unix socket's path is short
    options = ["--web", "127.0.0.1:0", "--worlds", str(folder / "worlds.toml")]
    try:
        with launched(folder, WORKER, options=options, env={"XDG_RUNTIME_DIR": home}) as run:
            run.wait_told("up", 2, timeout=90)
            (line,) = run.wait_line("page: http")
            page = int(re.search(r":(\d+)/\?token", line)[1])
            known = {page: "page", run.told("up")[0].store: "store", **told([run], "gloo")}
            yield Scene(
                [run], known, {"store", "watchdog", "helper", "gloo", "page", "control", "rendezvous"}
            )
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


@dataclass(frozen=True)
class Mode:
    """A way to start.

    Attributes:
        start: a context with the folder for its files, that gives the scene.
        expected: by kind.
        connect: how a stranger connects.
        reads: kinds of which a stranger can read names.
    """

    start: Callable[[Path], contextlib.AbstractContextManager[Scene]]
    reads: frozenset[str]
    expected: Callable[[str], Expected] = TABLE.__getitem__
    connect: portkit.Connect = portkit.plain


def strict(kind: str) -> Expected:
    """What secure mode says. Between processes of one host a lane has the handshake without TLS, and its 2 s."""
    return TABLE[kind] if kind == "lane (unix)" else TABLE[kind].strict()


MODES = {
    "a tcp:// store": Mode(tcp, frozenset({"store", "metrics"})),
    "a list of stores": Mode(tcp_list, frozenset({"store of a list"})),
    "a file store": Mode(file, frozenset()),
    "members that connect": Mode(joining, frozenset({"store"})),
    "m8d-run on one node": Mode(run_on_one_node, frozenset({"store", "control"})),
    "m8d-run on two nodes": Mode(run_on_two_nodes, frozenset({"store", "control"})),
    **{
        f"{name}, {how}": Mode(start, frozenset(), strict, connect)
        for name, start in (
            ("a secure store", secure),
            ("secure stores", secure_list),
            ("secure members that connect", secure_joining),
        )
        for how, connect in (("without TLS", portkit.plain), ("with TLS", with_tls))
    },
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_each_listener_is_known_and_gives_a_stranger_what_the_page_says(tmp_path, mode):
    with mode.start(tmp_path) as scene:
        found = scene.standing()
        for each, kind in found.items():
            log.info("%s: %s", kind or "UNKNOWN", each)
        assert [str(each) for each, kind in found.items() if not kind] == [], "unknown listeners"
        assert set(found.values()) >= scene.kinds
        assert elsewhere(found) == []
        names = scene.names()
        visits = visit_all(found.items(), mode.expected, scene.records, mode.connect)
        for each in visits:
            when = "stays" if each.dropped is None else f"dropped after {each.dropped:.2f} s"
            log.info("%s, %s: %s, %d bytes came", each.kind, each.manner, when, len(each.heard))
        wrong = [
            line
            for each in visits
            for line in judge(each, mode.expected(each.kind), names, slack=SLACK)
        ]  # fmt: skip
        assert wrong == []
        # A stranger who asks a store in its own words reads the record: the page says so.
        assert reads(visits, names) == mode.reads


def elsewhere(found: dict[portkit.Listener, str]) -> list[str]:
    """Listeners at another address than loopback, for which the page gives no reason."""
    return [
        f"{kind}: {each}"
        for each, kind in found.items()
        if not isinstance(each.address, str)
        and not ipaddress.ip_address(each.address[0]).is_loopback
        and kind not in EVERYWHERE
    ]


@pytest.mark.parametrize("kind", TABLE)
def test_the_page_names_each_kind_of_listener(kind):
    page = (ROOT / "docs" / "security.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    assert any(TABLE[kind].page in each for each in rows), f"docs/security.md has no row for {kind}"
