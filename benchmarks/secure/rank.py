"""Processes of `secure`: members, one that others are forked from, and one that keeps a store."""

from __future__ import annotations

import itertools
import socket
import time
from typing import TYPE_CHECKING, Any

import torch

# What a member needs is loaded before it is forked.
import torch.distributed
import torch.distributed.distributed_c10d

import multiworld as mw
import multiworld._c10d.groups
import multiworld._c10d.routing.router
import multiworld._join.advancing
import multiworld._join.join
import multiworld._net.stores.succession
from benchmarks.measuring.forks import Zygote
from benchmarks.measuring.namespaces import enter
from benchmarks.measuring.timing import settle, told, undisturbed
from benchmarks.operations import variants
from benchmarks.operations.operation import Operation
from multiworld import settings
from multiworld._core.liveness.wire import Beat, Parser, encode
from multiworld._net.stores.servers import Server, serve
from multiworld._net.stores.tcp_client import TcpClient
from multiworld._net.tls.credentials import current
from multiworld._net.tls.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable

_TIMEOUT = 60.0
_LANE = "lane"

_clock = time.perf_counter_ns


def make(rank: int, count: int, args: dict[str, Any]) -> Any:
    """See `benchmarks.measuring.ranks`.

    `args` has "kind", of the processes ("member", "keeper" or "zygote"), and "namespaces": of the network, by
    rank; none: this process's own.
    """
    if args["namespaces"]:
        enter(args["namespaces"][rank])
        variants.never_read()  # which namespaces of the network do not forbid
    torch.set_num_threads(1)
    kinds: dict[str, Callable[[int], Any]] = {"member": Member, "keeper": Keeper, "zygote": Newcomers}
    return kinds[args["kind"]](rank)


class Keeper:
    """Keeps a store, over TLS in secure mode: a process of its own, as a launcher is."""

    def __init__(self, _rank: int) -> None:
        self._server: Server | None = None

    def serve(self, host: str) -> int:
        """Serve it; its port."""
        with socket.socket() as held:  # torch 2.6 has to know the number
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((host, 0))
            self._server = serve(socket.AF_INET, held.getsockname())
        return self._server.port


class Newcomers(Zygote):
    """Forks processes that join their first world."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def first(self, host: str, port: int, world: str, environment: dict[str, str]) -> list[float]:
        """Join it in a new process, and sum in it; ms until it was joined, and until the sum was there."""

        def run(tell: Callable[..., None]) -> None:
            settings.set_environment(environment)
            joined, took = _join(f"tcp://{host}:{port}", self._rank, world)
            tell(took=took)
            joined.close()
            tell(closed=True)

        pid = self._forks.start(run)
        took: list[float] = self._forks.hear(pid, _TIMEOUT)["took"]
        self._forks.hear(pid, _TIMEOUT)
        self._forks.kill(pid)
        return took


class Member:
    """Commands of a member of two-member worlds."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._store = ""
        self._world: mw.World
        self._operation: Operation
        self._client: TcpClient | None = None
        self._numbers = itertools.count()

    def meet(self, host: str, port: int) -> None:
        """Join the world whose messages are timed."""
        self._store = f"tcp://{host}:{port}"
        self._world, _ = _join(self._store, self._rank, _LANE)
        settle()

    def later(self, worlds: list[str]) -> list[list[float]]:
        """Join further worlds with the same member, one after the other; of each what `first` tells."""
        found = []
        for name in worlds:
            joined, took = _join(self._store, self._rank, name)
            found.append(took)
            joined.close()
        return found

    def asked(self, host: str, port: int, repeat: int) -> float:
        """Exchange a value in the store as often; µs, the median."""
        deadline = time.monotonic() + _TIMEOUT
        if self._client is None:
            self._client = TcpClient.connect(socket.AF_INET, (host, port), deadline=deadline)
        taken = []
        value = b""
        with undisturbed():
            for _ in range(repeat):
                began = _clock()
                new = b"%d" % next(self._numbers)
                found = self._client.compare_set("bench/secure", value, new, deadline=deadline)
                taken.append(_clock() - began)
                if found != new:
                    raise RuntimeError(f"the store has {found!r}, not {new!r}")
                value = new
        self._client.delete("bench/secure", deadline=deadline)
        return told(taken)["p50"]

    def sealed(self, repeat: int) -> float:
        """Seal a sign of life and open it again, as often, in this process; µs of each, the median.

        Raises:
            RuntimeError: something else came out.
        """
        credentials = current()
        if credentials is None:
            raise RuntimeError("this process is not in secure mode")
        dials, accepts = (Session(credentials, server=server) for server in (False, True))
        while dials.peer is None or accepts.peer is None:
            accepts.open(dials.seal(b""))
            dials.open(accepts.seal(b""))
        taken, frames, parser = [], [encode(Beat(number)) for number in range(repeat)], Parser()
        with undisturbed():
            for frame in frames:
                began = _clock()
                opened = accepts.open(dials.seal(frame))
                taken.append(_clock() - began)
                parser.feed(opened)
                if opened != frame:
                    raise RuntimeError(f"{frame!r} was sealed, and {opened!r} opened")
        return told(taken)["p50"]

    def prepare(self, op: str, size: int) -> None:
        """Make the operation's tensors, and see that it is right."""
        self._operation = Operation(op, size, self._rank, 2)
        self._operation.begin_check()
        self.run(1)
        self._operation.end_check()
        self._operation.fill(0.0)  # sums stay what they are

    def run(self, repeat: int) -> float:
        """Operate as often; µs, the median: half the way to and fro of a message."""
        operation, world, peer = self._operation, self._world, 1 - self._rank
        taken = []
        with undisturbed():
            for _ in range(repeat):
                began = _clock()
                if operation.name == "all_reduce":
                    world.all_reduce(operation.part)
                elif self._rank == 0:
                    world.send(operation.part, peer)
                    world.recv(operation.part, peer)
                else:
                    world.recv(operation.part, peer)
                    world.send(operation.part, peer)
                taken.append(_clock() - began)
        return told(taken, 0.5 if operation.name == "send_recv" else 1.0)["p50"]

    def leave(self) -> None:
        """Close what is open."""
        self._world.close()
        if self._client is not None:
            self._client.close()


def _join(store: str, rank: int, world: str) -> tuple[mw.World, list[float]]:
    tensor = torch.zeros(1)
    began = time.perf_counter()
    joined = mw.join(world, rank, 2, store=store, timeout=_TIMEOUT)
    done = time.perf_counter()
    joined.all_reduce(tensor)
    return joined, [1e3 * (done - began), 1e3 * (time.perf_counter() - began)]
