"""Stores: what joins notice of the loss of their store.

A hundred worlds of two members are joined and left by four pairs of processes. In the middle the process is
killed that serves the store, a list of two addresses, or that leads a cluster of etcd of three; or a host is
cut off that has a member of that cluster. The figure is the longest join of a round, less the median join of
its undisturbed rest.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from benchmarks.figures.figure import Figure, Goal, distribution, quantile, summary
from benchmarks.measuring.part import Part, Run
from benchmarks.measuring.ranks import Ranks
from benchmarks.stores.cluster import Cluster, cluster

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

_PAIRS, _WORLDS = 4, 25
"""Worlds are joined one after the other by each pair."""
_GOALS = {"tcp": Goal(at_most=1000.0), "etcd": Goal(at_most=2000.0)}
"""By the beginning of a kind's name."""
_NOTES = {
    "tcp": "store tcp:// with two addresses: its server is killed",
    "etcd": "store etcd:// with three members: the leader is killed",
    "etcd/leader_cut_off": "the same, each member on a host (network namespace): the leader is cut off",
    "etcd/follower_cut_off": "the same: another member is cut off",
    "etcd/soon": "etcd's --election-timeout=500 and --heartbeat-interval=50: the leader is killed",
    "etcd/soon/leader_cut_off": "the same, each member on a host: the leader is cut off",
}
_ELECTION, _SOON = 1.0, 0.5
"""Seconds of etcd's election timeout: its default, and half of it."""


def measure(run: Run) -> Iterator[Figure]:
    """Each kind of store, again and again."""
    for kind in run.options.kinds or list(_NOTES):
        more, typical, later = list[float](), list[float](), list[float]()
        speeds, failed = list[float](), list[str]()
        with contextlib.ExitStack() as stack:
            etcd = None
            if kind != "tcp":
                election = _SOON if "soon" in kind else _ELECTION
                etcd = stack.enter_context(cluster(hosts="cut" in kind, election=election))
            (rank,) = stack.enter_context(Ranks("benchmarks.stores.rank:make", count=1))
            for number in range(run.options.rounds or run.pick(3, 10)):
                run.progress(f"{kind}, {number + 1}")
                if etcd is not None:
                    etcd.start()
                told = _round(rank, number, etcd, kind)
                took = [each for line in told for each in line["took"]]
                typical.append(1e3 * quantile([each for line in told for each in line["calm"]], 0.5))
                later.append(1e3 * quantile(took, 0.5))
                lost = [each for line in told for each in line["failed"]]
                speeds.append((len(took) - len(lost)) / 2 / max(line["seconds"] for line in told))
                more.append(1e3 * max(took) - typical[-1])
                failed += lost
        for each in failed:
            run.remark(f"stores/{kind}: a join failed: {each}")
        yield summary(
            "stores", kind, more, "ms", goal=_GOALS[kind.partition("/")[0]],
            quantiles=distribution(more),
            note=f"{_NOTES[kind]}; {len(failed)} of {len(more) * 2 * _PAIRS * _WORLDS} joins failed, "
            f"one before takes {quantile(typical, 0.5):.0f} ms, one after {quantile(later, 0.5):.0f} ms "
            f"(medians); {quantile(speeds, 0.5):.0f} worlds are joined a second after",
            series={"ms": [round(each, 3) for each in more], "failed": len(failed)},
        )  # fmt: skip


def _round(rank: Any, number: int, etcd: Cluster | None, kind: str) -> list[dict[str, Any]]:
    store, netns = (rank.call("serve"), None) if etcd is None else (f"{etcd.address}{number}", etcd.netns)
    rank.call("begin", timeout=120.0, store=store, netns=netns, pairs=_PAIRS, worlds=_WORLDS)
    if etcd is None:
        rank.call("lose_server")
    else:
        etcd.lose(kind)
    told: list[dict[str, Any]] = rank.call("results", timeout=150.0)
    return told


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kinds", nargs="+", choices=[*_NOTES], metavar="KIND", help=f"of {', '.join(_NOTES)}"
    )
    parser.add_argument("--rounds", type=int, help="kills of each kind (default: 3; 10 with --full)")


PART = Part(
    name="stores",
    title="Stores",
    description="A hundred worlds of two are joined and left while the process is killed that serves the "
    "store, or leads the cluster of etcd, or a member of that is cut off: the longest join of a round after "
    "that, less the median one before. A join that fails is counted, and has its time among the others.",
    measure=measure,
    add_options=_options,
)
