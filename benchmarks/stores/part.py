"""What joins notice of the loss of their store: ``python -m benchmarks.elastic.store_loss``.

A hundred worlds of two members are joined and left by four pairs of processes. In the middle the process is
killed that serves the store, a list of two addresses, or that leads a cluster of etcd of three. The figure is
the longest join of a round, less the median join of its undisturbed rest.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cli import run_alone
from benchmarks.figures.figure import Figure, Goal, distribution, quantile, summary
from benchmarks.measuring.part import Part, Run, Unavailable
from benchmarks.measuring.ranks import Ranks

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

_PAIRS, _WORLDS = 4, 25
"""Worlds are joined one after the other by each pair."""
_GOALS = {"tcp": Goal(at_most=1000.0), "etcd": Goal(at_most=2000.0)}
_NOTES = {
    "tcp": "store tcp:// with two addresses: its server is killed",
    "etcd": "store etcd:// with three members: the leader is killed",
}
_ETCD = tuple(f"127.0.0.{at}" for at in (71, 72, 73))
_STARTS = 60.0


class Cluster:
    """Three members of etcd on addresses of loopback; made by `cluster`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._members: dict[str, subprocess.Popen[bytes]] = {}
        self.address = f"etcd://{','.join(f'{host}:2379' for host in _ETCD)}/benchmark"

    def start(self) -> None:
        """Start all members that do not run; returns when there is a leader."""
        peers = ",".join(f"{host}=http://{host}:2380" for host in _ETCD)
        for host in _ETCD:
            if host in self._members and self._members[host].poll() is None:
                continue
            client, peer = f"http://{host}:2379", f"http://{host}:2380"
            self._members[host] = subprocess.Popen(
                [
                    "etcd", "--name", host, "--data-dir", str(self._folder / host),
                    "--listen-client-urls", client, "--advertise-client-urls", client,
                    "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                    "--initial-cluster", peers,
                ],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        deadline = time.monotonic() + _STARTS
        while not all(map(self._leader_of, _ETCD)):
            if time.monotonic() > deadline:
                raise Unavailable("three members of etcd do not find a leader here")
            time.sleep(0.1)

    def lose_leader(self) -> float:
        """Kill the leader; returns when."""
        leader = next(host for host in _ETCD if self._leader_of(host) == "itself")
        at = time.monotonic()
        self._members[leader].kill()
        self._members[leader].wait()
        return at

    def end(self) -> None:
        """Kill all."""
        for process in self._members.values():
            process.kill()
            process.wait()

    @staticmethod
    def _leader_of(host: str) -> str:
        """What a member says: that it leads "itself", the number of the leader, or "" for none."""
        url = f"http://{host}:2379/v3/maintenance/status"
        asked = urllib.request.Request(url, data=b"{}")
        with contextlib.suppress(OSError), urllib.request.urlopen(asked, timeout=5) as answer:  # noqa: S310
            said = json.load(answer)
            leader = str(said.get("leader", ""))
            return "itself" if leader == said["header"]["member_id"] else leader
        return ""


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """A cluster that is gone afterwards.

    Raises:
        Unavailable: there is no etcd here.
    """
    if shutil.which("etcd") is None:
        raise Unavailable("there is no etcd here (Debian: etcd-server)")
    with tempfile.TemporaryDirectory(prefix="m8d-etcd-") as folder:
        made = Cluster(Path(folder))
        try:
            made.start()
            yield made
        finally:
            made.end()


def measure(run: Run) -> Iterator[Figure]:
    """Each kind of store, again and again."""
    for kind in run.options.kinds or list(_NOTES):
        more, typical, failed = list[float](), list[float](), 0
        with contextlib.ExitStack() as stack:
            etcd = stack.enter_context(cluster()) if kind == "etcd" else None
            (rank,) = stack.enter_context(Ranks("benchmarks.elastic.store_rank:make", count=1))
            for number in range(run.options.rounds or run.pick(3, 10)):
                run.progress(f"{kind}, {number + 1}")
                if etcd is not None:
                    etcd.start()
                told = _round(rank, number, etcd)
                took = [each for line in told for each in line["took"]]
                typical.append(1e3 * quantile(took, 0.5))
                more.append(1e3 * max(took) - typical[-1])
                failed += sum(line["failed"] for line in told)
        if failed:
            run.remark(f"elastic/store/{kind}: {failed} joins failed")
        yield summary(
            "elastic", f"store/{kind}", more, "ms", goal=_GOALS[kind], quantiles=distribution(more),
            note=f"{_NOTES[kind]}; {failed} of {len(more) * _PAIRS * _WORLDS} joins failed, "
            f"an undisturbed one takes {quantile(typical, 0.5):.0f} ms",
            series={"ms": [round(each, 3) for each in more], "failed": failed},
        )  # fmt: skip


def _round(rank: Any, number: int, etcd: Cluster | None) -> list[dict[str, Any]]:
    store = rank.call("serve") if etcd is None else f"{etcd.address}{number}"
    rank.call("begin", timeout=120.0, store=store, pairs=_PAIRS, worlds=_WORLDS)
    if etcd is None:
        rank.call("lose_server")
    else:
        etcd.lose_leader()
    told: list[dict[str, Any]] = rank.call("results", timeout=150.0)
    return told


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kinds", nargs="+", choices=[*_NOTES], metavar="KIND", help=f"of {', '.join(_NOTES)}"
    )
    parser.add_argument("--rounds", type=int, help="kills of each kind (default: 3; 10 with --full)")


PART = Part(
    name="elastic",
    title="Elastic: the store is lost",
    description="A hundred worlds of two are joined and left while the process is killed that serves the "
    "store, or leads the cluster: the longest join of a round, less the median one. A join that fails is "
    "counted.",
    measure=measure,
    add_options=_options,
)

if __name__ == "__main__":
    raise SystemExit(run_alone(PART))
