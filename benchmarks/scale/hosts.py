"""One world of many processes on several hosts: ``python -m benchmarks.scale.hosts --members 64 --hosts 8``.

Hosts are network namespaces on one bridge of this machine, so all processes share its cores. The members have
process groups and operate all the time. One is killed, then the cable of a host is pulled: its members are
lost together. The others reform both times. Whether each sum is right is looked at. The row goes into
`docs/scale.json`.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from typing import TYPE_CHECKING, Any

import torch

# What a member needs is loaded before it is forked.
import torch.distributed
import torch.distributed.distributed_c10d

import multiworld as mw
import multiworld._c10d.groups
import multiworld._c10d.routing.router
import multiworld._join.join
import multiworld._net.stores.succession
from benchmarks.elastic.rank import operate
from benchmarks.measuring.forks import Forks, forever
from benchmarks.measuring.namespaces import Hosts, enter
from benchmarks.scale.record import RECORD, put
from multiworld._net.stores.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable

    Tell = Callable[..., None]

_PATIENCE = 180.0
_HANG = 20.0
"""Seconds: on two cores 64 processes that join are silent for long."""
_STEP = 0.02
"""Seconds between two operations."""
_PORT = 29500
_LOSSES = ("kill", "host")


def _keep(name: str, store: str, tell: Tell) -> None:
    """Serve the store, and be no member."""
    enter(name)
    open_store(store, world="none", serve=True, deadline=time.monotonic() + _PATIENCE)
    tell(ready=True)
    forever()


def _live(name: str, store: str, count: int, tell: Tell) -> None:
    """Join, and go on without those that are lost."""
    enter(name)
    torch.set_num_threads(1)
    began = time.monotonic()
    world = mw.join(
        "hosts", None, (2, count), store=store, timeout=_PATIENCE, hang_timeout=_HANG, last_call=_PATIENCE
    )
    joined = time.monotonic()
    operate(world)
    tell(began=began, joined=joined)
    for _ in _LOSSES:
        line = _lost(world)
        before = time.process_time()
        _whole(world, line)
        tell(**line, cpu=time.process_time() - before, size=world.world_size, generation=world.generation)
    forever()


def _lost(world: mw.World) -> dict[str, float]:
    """Operate until the world breaks; when it was known."""
    while True:
        try:
            operate(world)
        except mw.BrokenWorldException:
            return {"known": time.monotonic()}
        time.sleep(_STEP)


def _whole(world: mw.World, line: dict[str, float]) -> None:
    """From the breakage to the first operation without those that are lost."""
    while "first" not in line:
        try:
            world.reform()
            line["active"] = time.monotonic()
            operate(world)
            line["first"] = time.monotonic()
        except mw.BrokenWorldException:  # noqa: PERF203  (one more was lost, or is known to be only now)
            continue


def measure(members: int, hosts: int) -> dict[str, Any]:
    """The row of so many members, dealt to the hosts in turn; times are seconds, and of the last member.

    Raises:
        RuntimeError: the survivors of a loss are not all in one generation.
    """
    forks = Forks()
    with Hosts(hosts) as network:
        store = f"tcp://{network.address(0)}:{_PORT}"
        keeper = forks.start(lambda tell: _keep(network.names[0], store, tell))
        forks.hear(keeper, _PATIENCE)
        pids = [
            forks.start(lambda tell, name=network.names[number % hosts]: _live(name, store, members, tell))  # type: ignore[misc]
            for number in range(members)
        ]
        told = [forks.hear(pid, _PATIENCE) for pid in pids]
        row: dict[str, Any] = {"members": members, "hosts": hosts}
        row["join"] = max(each["joined"] for each in told) - min(each["began"] for each in told)
        time.sleep(2.0)
        for loss in _LOSSES:
            victim = members // 2 + 1
            at = forks.kill(pids.pop(victim)) if loss == "kill" else time.monotonic()
            if loss == "host":
                network.cut(hosts - 1)
                lost = [
                    pid for number, pid in enumerate(pids) if _host_of(number, victim, hosts) == hosts - 1
                ]
                pids = [pid for pid in pids if pid not in lost]
            told = [forks.hear(pid, _PATIENCE) for pid in pids]
            if {(each["size"], each["generation"]) for each in told} != {(len(pids), told[0]["generation"])}:
                raise RuntimeError(f"{len(pids)} survivors are not in one generation: {told}")
            for what in ("known", "active", "first"):
                row[f"{loss}_{what}"] = max(each[what] for each in told) - at
            row[f"{loss}_cpu"] = sum(each["cpu"] for each in told) / len(told)
            row[f"{loss}_left"] = len(pids)
            time.sleep(2.0)
        for pid in [*pids, *lost, keeper]:
            forks.kill(pid)
    row["load"] = os.getloadavg()[0]
    return row


def _host_of(number: int, killed: int, hosts: int) -> int:
    """The host of the member that has this place among those that are left."""
    return (number if number < killed else number + 1) % hosts


def main() -> None:
    """Measure, and put the row into the record of the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.hosts", description=__doc__)
    parser.add_argument("--members", type=int, default=64)
    parser.add_argument("--hosts", type=int, default=8)
    options = parser.parse_args()
    logging.getLogger("multiworld").setLevel(logging.ERROR)
    row = measure(options.members, options.hosts)
    put(RECORD, "hosts", row)
    print(row)


if __name__ == "__main__":
    main()
