"""A cluster of etcd of three, whose leader is killed, or of which a member is cut off."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measuring.namespaces import Hosts, enter
from benchmarks.measuring.part import Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOOPBACK = tuple(f"127.0.0.{at}" for at in (71, 72, 73))
_STARTS = 60.0


class Cluster:
    """Three members of etcd, made by `cluster`: on addresses of loopback, or on hosts of their own.

    Args:
        folder: for their data.
        network: the hosts; None: loopback.
        election: see `cluster`.

    Attributes:
        address: of the store.
        netns: where members of worlds belong; None for this machine's network.
    """

    def __init__(self, folder: Path, network: Hosts | None, election: float) -> None:
        self._folder, self._network, self._election = folder, network, round(1000 * election)
        self._members: dict[str, subprocess.Popen[bytes]] = {}
        self._hosts = _LOOPBACK if network is None else tuple(map(network.address, range(len(_LOOPBACK))))
        self.address = f"etcd://{','.join(f'{host}:2379' for host in self._hosts)}/benchmark"
        self.netns = None if network is None else network.names[len(_LOOPBACK)]

    def start(self) -> None:
        """Start all members that do not run, and reach all; returns when there is a leader."""
        peers = ",".join(f"{host}=http://{host}:2380" for host in self._hosts)
        for number, host in enumerate(self._hosts):
            if self._network is not None:
                self._network.mend(number)
            if host in self._members and self._members[host].poll() is None:
                continue
            client, peer = f"http://{host}:2379", f"http://{host}:2380"
            within = [] if self._network is None else ["ip", "netns", "exec", self._network.names[number]]
            self._members[host] = subprocess.Popen(
                [
                    *within, "etcd", "--name", host, "--data-dir", str(self._folder / host),
                    "--listen-client-urls", client, "--advertise-client-urls", client,
                    "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                    "--initial-cluster", peers, "--election-timeout", str(self._election),
                    "--heartbeat-interval", str(self._election // 10),
                ],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        deadline = time.monotonic() + _STARTS
        while not all(map(self._leader_of, range(len(_LOOPBACK)))):
            if time.monotonic() > deadline:
                raise Unavailable("three members of etcd do not find a leader here")
            time.sleep(0.1)

    def lose(self, how: str) -> None:
        """Kill the leader, or cut a member off: the leader, or the first other one."""
        leads = [self._leader_of(number) == "itself" for number in range(len(_LOOPBACK))]
        if self._network is None:
            leader = self._members[self._hosts[leads.index(True)]]
            leader.kill()
            leader.wait()
        else:
            self._network.cut(leads.index("leader" in how))

    def end(self) -> None:
        """Kill all."""
        for process in self._members.values():
            process.kill()
            process.wait()

    def _leader_of(self, number: int) -> str:
        """What a member says: that it leads "itself", the number of the leader, or "" for none.

        It is asked on its host, so by a thread that goes there.
        """
        answers = list[str]()

        def ask() -> None:
            if self._network is not None:
                enter(self._network.names[number])
            url = f"http://{self._hosts[number]}:2379/v3/maintenance/status"
            asked = urllib.request.Request(url, data=b"{}")
            with contextlib.suppress(OSError), urllib.request.urlopen(asked, timeout=5) as answer:  # noqa: S310  (etcd's own address on this machine)
                said = json.load(answer)
                leader = str(said.get("leader", ""))
                answers.append("itself" if leader == said["header"]["member_id"] else leader)

        asking = threading.Thread(target=ask)
        asking.start()
        asking.join(_STARTS)
        return answers[0] if answers else ""


@contextlib.contextmanager
def cluster(*, hosts: bool, election: float) -> Iterator[Cluster]:
    """A cluster that is gone afterwards.

    Args:
        hosts: whether each member is on a host of its own.
        election: seconds, its ``--election-timeout``: after one to two of these another leader is looked for.
            The interval of the leader's signs of life is a tenth of it, as etcd's defaults are.

    Raises:
        Unavailable: there is no etcd here, or there can be no hosts.
    """
    if shutil.which("etcd") is None:
        raise Unavailable("there is no etcd here (Debian: etcd-server)")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="m8d-etcd-"))
        network = stack.enter_context(Hosts(len(_LOOPBACK) + 1)) if hosts else None
        made = Cluster(Path(folder), network, election)
        try:
            made.start()
            yield made
        finally:
            made.end()
