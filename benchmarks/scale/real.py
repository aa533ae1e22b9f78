"""The same on this machine, to compare: real processes, ``python -m benchmarks.scale.real --members 4 16``.

They have the watchdog, or the rendezvous and torch's store, and no process group: so many processes of torch
would measure torch. They share this machine's cores, and the simulation beside them does so, too.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from torch.distributed import TCPStore  # type: ignore[attr-defined, unused-ignore]

from benchmarks.measuring.forks import Forks, forever
from benchmarks.measuring.store import Meeting
from benchmarks.scale.assumptions import Costs, Network
from benchmarks.scale.mesh import Mesh
from benchmarks.scale.record import RECORD, put
from benchmarks.scale.reforming import broken_world, reform, request
from benchmarks.scale.watching import TOKEN
from multiworld._core.membership import admission
from multiworld._core.membership.admission import Move
from multiworld._core.membership.roster import Endpoint, Member, Roster
from multiworld._net.stores.record import WorldRecord
from multiworld._net.stores.rendezvous import Rendezvous
from multiworld.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiworld._core.membership.ledger import Ledger
    from multiworld.events import Breakage

_PATIENCE = 120.0
_HANG = 30.0
"""Seconds: on shared cores many processes that begin at once are silent for long."""
_CALM = 3.0
"""Seconds for which nothing happens while the CPU time of the watchdogs is taken."""


class Members:
    """Forked processes, each with a pipe to it and one from it.

    Args:
        count: how many.
        live: what each does, with its number, what tells the driver something, and what hears from it.
    """

    def __init__(
        self,
        count: int,
        live: Callable[[int, Callable[..., None], Callable[[], Any]], None],
    ) -> None:
        self._forks = Forks()
        self.pids: list[int] = []
        self._down: list[int] = []
        for number in range(count):
            reading, writing = os.pipe()

            def run(tell: Callable[..., None], number: int = number, reading: int = reading) -> None:
                with os.fdopen(reading) as lines:
                    live(number, tell, lambda: json.loads(lines.readline()))

            self.pids.append(self._forks.start(run))
            os.close(reading)
            self._down.append(writing)

    def tell(self, number: int, what: Any) -> None:
        """Say something to one."""
        os.write(self._down[number], json.dumps(what).encode() + b"\n")

    def hear(self, number: int) -> dict[str, Any]:
        """The next thing that one said."""
        return self._forks.hear(self.pids[number], _PATIENCE)

    def kill(self, number: int) -> float:
        """Kill one; when."""
        return self._forks.kill(self.pids[number])

    def end(self, but: int) -> None:
        """Kill the others."""
        for number in range(len(self.pids)):
            os.close(self._down[number])
            if number != but:
                self._forks.kill(self.pids[number])


@dataclass(frozen=True)
class Watched:
    """A world that real watchdogs watch.

    Attributes:
        join: seconds from the first `attach` to the last one's end.
        cpu: of a watchdog's thread, share of a core, on average.
        crash: seconds from the kill of a member to the last verdict.
    """

    join: float
    cpu: float
    crash: float


def watch(count: int) -> Watched:
    """So many processes with a watchdog each; one is killed."""

    def live(number: int, tell: Callable[..., None], hear: Callable[[], Any]) -> None:
        watchdog = Watchdog()
        where = watchdog.endpoint("127.0.0.1")
        tell(process=watchdog.process, host=where.host, port=where.port)
        rows = hear()
        everyone = tuple(
            Member(rank, process, Endpoint(host, port), 0, "host")
            for rank, (process, host, port) in enumerate(rows)
        )
        broke: list[tuple[float, str]] = []
        known = threading.Event()

        def verdict(breakage: Breakage) -> None:
            broke.append((time.monotonic(), breakage.cause.value))
            known.set()

        began = time.monotonic()
        watchdog.attach(Roster("w", 1, number, everyone, TOKEN, _HANG), verdict, deadline=began + _PATIENCE)
        tell(began=began, ready=time.monotonic())
        hear()
        before = _cpu()
        time.sleep(_CALM)
        tell(cpu=(_cpu() - before) / _CALM)
        if known.wait(_PATIENCE):
            tell(at=broke[0][0], cause=broke[0][1])
        forever()

    group = Members(count, live)
    hellos = [group.hear(number) for number in range(count)]
    rows = [[each["process"], each["host"], each["port"]] for each in hellos]
    for number in range(count):
        group.tell(number, rows)
    attached = [group.hear(number) for number in range(count)]
    time.sleep(2.0)  # early-close connections are dialed
    for number in range(count):
        group.tell(number, None)
    cpu = [group.hear(number)["cpu"] for number in range(count)]
    victim = count // 2
    at = group.kill(victim)
    told = [group.hear(number) for number in range(count) if number != victim]
    group.end(victim)
    if {each["cause"] for each in told} != {"crashed"}:
        raise RuntimeError(f"a kill was taken for something else: {told}")
    return Watched(
        max(each["ready"] for each in attached) - min(each["began"] for each in attached),
        sum(cpu) / count,
        max(each["at"] for each in told) - at,
    )


@dataclass(frozen=True)
class Agreed:
    """A reform with a real store.

    Attributes:
        agreed: seconds until the last survivor had the roster.
        active: until all had said that they are ready.
    """

    agreed: float
    active: float


def reform_here(count: int) -> Agreed:
    """The last of so many members is lost, and the others, real processes, reform at torch's store."""
    server = Members(1, _serve)
    port = int(server.hear(0)["address"].rpartition(":")[2])
    name = f"w{count}"

    def live(number: int, tell: Callable[..., None], hear: Callable[[], Any]) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        tell(port=listener.getsockname()[1])
        threading.Thread(target=_accept, args=(listener,), daemon=True).start()
        ports = hear()
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        ledger = _with_ports(broken_world(count), ports)
        asked = replace(request(ledger, number, (count - 1,)), world=name)
        me = f"{number:016x}"
        record = WorldRecord(store, name, time.sleep)
        record.read()
        tell(here=True)
        hear()
        began = time.monotonic()
        record.apply(lambda ledger: Move(admission.over(ledger, 1, me)))
        way = Rendezvous(store, asked, deadline=began + 60.0)
        way.agree()
        agreed = time.monotonic()
        way.commit()
        tell(began=began, agreed=agreed, active=time.monotonic())
        forever()

    group = Members(count - 1, live)
    ports = [group.hear(number)["port"] for number in range(count - 1)]
    ports.append(9)  # the lost one
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    first = _with_ports(broken_world(count), ports)
    WorldRecord(store, name, time.sleep).apply(lambda ledger: Move(first if ledger != first else ledger))
    for number in range(count - 1):
        group.tell(number, ports)
        group.hear(number)
    for number in range(count - 1):
        group.tell(number, None)
    told = [group.hear(number) for number in range(count - 1)]
    group.end(-1)
    server.end(-1)
    began = min(each["began"] for each in told)
    return Agreed(max(each["agreed"] for each in told) - began, max(each["active"] for each in told) - began)


def _serve(_number: int, tell: Callable[..., None], _hear: Callable[[], Any]) -> None:
    meeting = Meeting()
    tell(address=meeting.address())
    forever()


def _with_ports(ledger: Ledger, ports: Sequence[int]) -> Ledger:
    now = ledger.current
    if now is None:
        raise ValueError("a ledger without a generation has no members")
    claims = tuple(
        replace(each, member=replace(each.member, endpoint=Endpoint("127.0.0.1", port)))
        for each, port in zip(now.claims, ports, strict=True)
    )
    return replace(ledger, current=replace(now, claims=claims))


def _accept(listener: socket.socket) -> None:
    while True:
        listener.accept()[0].close()


def _cpu() -> float:
    """CPU seconds of this process's watchdog thread so far."""
    thread = next(each for each in threading.enumerate() if each.name == "m8d-watchdog")
    spent = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text(encoding="ascii")
    return int(spent.split()[0]) / 1e9


def compared(count: int, rounds: int) -> dict[str, Any]:
    """A size here, the median of the rounds, and in a simulation of a machine like this one."""
    cores = os.cpu_count() or 1
    watched = [watch(count) for _ in range(rounds)]
    agreed = [reform_here(count) for _ in range(rounds)]
    here = Network(per_host=count, remote=30e-6)
    mesh = Mesh(
        count, network=here, costs=replace(Costs(), cores=cores), hang_timeout=_HANG, early_close=True
    )
    join, steady, crash = mesh.join(), mesh.steady(_CALM), mesh.kill()
    there = reform(count, network=here, cores=cores)
    return {
        "members": count,
        "join": median(each.join for each in watched),
        "join_sim": join,
        "cpu": median(each.cpu for each in watched),
        "cpu_sim": steady.cpu,
        "crash": median(each.crash for each in watched),
        "crash_sim": max(crash.took),
        "agreed": median(each.agreed for each in agreed),
        "agreed_sim": there.agreed,
        "active": median(each.active for each in agreed),
        "active_sim": there.active,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Put what happened here beside what is simulated, into `docs/scale.json`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.real", description=__doc__)
    parser.add_argument("--members", nargs="+", type=int, default=[4, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    logging.getLogger("multiworld").setLevel(logging.ERROR)
    for count in options.members:
        row = compared(count, options.rounds)
        put(RECORD, "real", row)
        print(row, flush=True)


if __name__ == "__main__":
    main()
