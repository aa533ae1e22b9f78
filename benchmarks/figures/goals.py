"""Goals, and the figures that answer to each; the page shows all, measured or not."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.figures.figure import Figure


@dataclass(frozen=True)
class Target:
    """A line of what is to be reached.

    Attributes:
        what: in words.
        limit: in words; "" where each of its figures has one of its own.
        keys: patterns of the figures that answer to it.
    """

    what: str
    limit: str
    keys: tuple[str, ...]

    def takes(self, figure: Figure) -> bool:
        """Whether a figure answers to it."""
        return any(fnmatchcase(figure.key, key) for key in self.keys)


TARGETS = (
    Target("`World.send`/`recv` at 4 B", "≤ 0.68 of stock", ("messages/send_recv/4B/2/world",)),
    Target("the same at 64 KB", "≤ 0.58 of stock", ("messages/send_recv/64KB/2/world",)),
    Target("both against a socket pair driven from Python", "≤ 1.15 of it", ("messages/*/world:floor",)),
    Target("`with w:` around each `dist.send`/`recv` at 4 B", "≤ 0.80 of stock", ("messages/*/4B/2/with",)),
    Target("`World.send`/`recv` of 1 to 16 MB within a host", "≤ 0.42 of stock", ("messages/*MB/2/world",)),
    Target("the same, no member's memory read", "≤ 0.95 of stock", ("messages/*/wire",)),
    Target("`World.aio` at 4 B, median", "≤ 0.90 of stock's blocking", ("messages/*/4B/2/aio",)),
    Target("the same, 99th percentile", "≤ 1.2 of stock's", ("messages/*/4B/2/aio/p99",)),
    Target("`World.aio` from 1 MB on", "≤ 0.48 of stock's blocking", ("messages/*MB/2/aio",)),
    Target(
        "fan-in of 16 worlds, awaited, 4 B and 4 KB", "≥ 1.4 of stock's best throughput",
        ("fanin/16/4B/aio", "fanin/16/4KB/aio"),
    ),
    Target("the same, 1 and 4 MB", "≥ 2.0 of stock's best throughput", ("fanin/16/*MB/aio",)),
    Target("fairness of 16 senders, awaited", "Jain's index ≥ 0.995", ("fanin/fairness/16/*/aio/jain",)),
    Target("pymultiworld, latency at 4 B and 64 KB", "≤ 0.09 of its", ("peers/latency/*/communicator",)),
    Target("pymultiworld, throughput at 4 MB", "≥ 3 of its", ("peers/throughput/*/communicator",)),
    Target(
        "barrier, `all_reduce`, `broadcast` up to 64 KB, 2 and 4 members, `World`'s and in `with w:`",
        "≤ 0.40 of stock",
        tuple(
            f"collectives/{op}/{size}/*/{form}"
            for op in ("barrier", "all_reduce", "broadcast") for size in ("4B", "64KB")
            for form in ("world", "with")
        ),
    ),
    Target(
        "`all_reduce`, `all_gather` of 4 to 64 MB within a host, 2 and 4 members", "≤ 0.60 of stock",
        ("collectives/all_reduce/*MB/*/world", "collectives/all_gather/*MB/*/world"),
    ),
    Target(
        "messages, and `all_reduce` up to 256 KiB, between two network namespaces", "≤ 1 of stock",
        ("hosts/*/world",),
    ),
    Target("secure mode, a join: what TLS adds", "≤ 5 ms", ("secure/join/*",)),
    Target("secure mode, a control message: to seal and open it", "≤ 25 µs", ("secure/control/*",)),
    Target(
        "secure mode, messages from 1 MB on: throughput", "≥ 0.5 of that without TLS",
        ("secure/lane/*", "secure/host/*"),
    ),
    Target("join of a two-member world, and its first collective", "≤ 5 ms", ("worlds/pair/used",)),
    Target("join of one that makes no collective", "≤ 3 ms", ("worlds/pair/joined",)),
    Target("100 worlds: to join each", "≤ 15 ms", ("worlds/join/100",)),
    Target("100 worlds: threads of each", "≤ 1.1", ("worlds/threads/100",)),
    Target("100 worlds: descriptors of each", "≤ 2", ("worlds/descriptors/100",)),
    Target("100 worlds: memory of each", "≤ 0.1 MB", ("worlds/memory/100",)),
    Target("100 worlds: CPU of the idle process", "≤ 0.6 % of a core", ("worlds/idle_cpu/100",)),
    Target("100 worlds: to close all", "≤ 2 s", ("worlds/close/100",)),
    Target("256 worlds: cost of each", "≤ 1.2 of that at 30", ("worlds/*/256:30",)),
    Target("a crash is detected, median", "≤ 3 ms, at 100 worlds too", ("detection/crash/*/p50",)),
    Target("a crash is detected, 99th percentile", "≤ 20 ms, at 100 worlds too", ("detection/crash/*/p99",)),
    Target("a 4-member world is whole again, its replacement waiting", "≤ 100 ms", ("rebuild/*",)),
    Target("4 members lose one, and the others operate again", "≤ 50 ms", ("elastic/4/*",)),
    Target("32 members lose one, and the others operate again", "≤ 250 ms", ("elastic/32/*",)),
    Target("`advance` where nothing is due", "≤ 2 µs", ("growth/advance/idle",)),
    Target("a member is held while others come and leave, 99th percentile", "≤ 10 ms", ("growth/*/held",)),
    Target("4 members with 100 MB of state lose one, and 4 operate again", "≤ 300 ms", ("growth/replace/*",)),
    Target("a training step with `elastic_group`", "≤ 1.02 of plain DDP", ("growth/step/ddp",)),
    Target("the store's server is killed: what the longest join takes more", "≤ 1 s", ("stores/tcp",)),
    Target("a member of etcd is killed or cut off: the same", "≤ 2 s", ("stores/etcd", "stores/etcd/*")),
    Target("half an hour with a fault every 2 s: steps", "≥ 0.95 of the calm", ("chaos/steps",)),
    Target("the same: healthy worlds that break", "0", ("chaos/healthy/*",)),
    Target("the same: descriptors that a member has more", "≤ 32", ("chaos/descriptors",)),
    Target(
        "a restart with `--preload torch`: first line of the new worker", "≤ 0.1 of that without",
        ("starts/restart/loaded",),
    ),
    Target("the same: next operation of all workers", "≤ 0.25 of that without", ("starts/restart/whole",)),
    Target(
        "the log of operations: a message of 4 B", "≤ 1.02 of one without", ("overheads/operations_log/4B",)
    ),
    Target("toolchain", "", ("toolchain/*",)),
)  # fmt: skip


def answers(figures: Iterable[Figure]) -> list[tuple[Target, list[Figure]]]:
    """Each target with the figures that answer to it; a figure answers to the first that takes it.

    Raises:
        ValueError: a figure has a goal and no target takes it: add it here.
    """
    found: list[tuple[Target, list[Figure]]] = [(target, []) for target in TARGETS]
    for figure in figures:
        if figure.goal is None:
            continue
        for target, taken in found:
            if target.takes(figure):
                taken.append(figure)
                break
        else:
            raise ValueError(
                f"{figure.key} has a goal, but no target of benchmarks/figures/goals.py takes it: add one"
            )
    return found
