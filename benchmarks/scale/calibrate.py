"""Costs of the real code on this machine: ``python -m benchmarks.scale.calibrate`` prints the constants.

They stand in `benchmarks.scale.assumptions`, so that a simulation is the same everywhere; here they are
measured again. The processor's time is taken, and the best of several tries.
"""

from __future__ import annotations

import gc
import itertools
import socket
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.scale.mesh import Mesh
from benchmarks.scale.network import Wires
from benchmarks.scale.reforming import broken_world, request
from multiworld._core.liveness import wire
from multiworld._core.liveness.wire import Beat
from multiworld._core.membership import admission
from multiworld._core.membership.ledger import decode, encode
from multiworld._core.membership.roster import Endpoint
from multiworld._net.liveness.sockets import Received, Sockets
from multiworld._net.stores.probe import answers

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld._core.liveness.peers import Peers

PEERS = (100, 1000)
_TRIES = 7


def best(call: Callable[[], object], repeat: int = 1, before: Callable[[], object] = lambda: None) -> float:
    """CPU seconds of one call of many, which something precedes that does not count."""
    times = []
    for _ in range(_TRIES):
        before()
        began = time.thread_time()
        for _ in range(repeat):
            call()
        times.append((time.thread_time() - began) / repeat)
    return min(times)


def turn(peers: Peers, now: float) -> None:
    """What the watchdog's loop asks the protocol in a turn, of whatever was fed."""
    peers.suspects(now)
    peers.settle(now, {})
    peers.take()
    peers.wake()


def protocol(count: int) -> tuple[float, float, float, float]:
    """CPU seconds with so many peers: a turn in which nothing is due; a look at one; a beat; a proof."""
    mesh = Mesh(count, 1)
    mesh.join()
    mesh.loop.run(mesh.loop.now + 2.0)
    peers, now = mesh.processes[0].peers, mesh.processes[0].now
    trusted = list(peers._connections.trusted.values())  # noqa: SLF001  (it is what costs)
    place = (mesh.world, 0)

    def heard() -> None:
        for each in trusted:
            peers.received(each.channel, [Beat(0)], now)

    def look() -> None:
        for table in (peers._detector.silence_due, peers._connections.beats_due, peers.early_close.due):  # noqa: SLF001  (the tables that are timed)
            table.changed()
        peers.wake()

    proved = best(partial(trusted[0].offer, b"0" * 16, place), 100)
    looked = best(look, 20) / 3 / count
    return best(partial(turn, peers, now), 20), looked, best(heard) / count, proved


def sockets(count: int) -> tuple[float, float, float]:
    """CPU seconds of `Sockets`: a beat received, one sent, and a wait that finds nothing."""
    number = itertools.count(1).__next__
    own, far = Sockets(number), []
    channels = [number() for _ in range(count)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for channel in channels:
            own.dial(channel, Endpoint(*listener.getsockname()))
            far.append(listener.accept()[0])
    own.wait(0.1)

    def beat() -> None:
        for each in far:
            each.send(wire.encode(Beat(0)))

    def receive() -> None:
        if (came := sum(isinstance(each, Received) for each in own.wait(1.0))) != count:
            raise RuntimeError(f"{came} of {count} beats came")

    def send() -> None:
        for channel in channels:
            own.send(channel, Beat(0), droppable=True)

    found = best(receive, before=beat) / count, best(send) / count, best(partial(own.wait, 0.0), 50)
    own.shut_down()
    for each in far:
        each.close()
    return found


def memory() -> float:
    """Bytes of Python objects for each peer: what the protocol reaches, without the rosters' members."""
    sizes = []
    for count in PEERS:
        mesh = Mesh(count, 1)
        mesh.join()
        sizes.append(_reached(mesh.processes[0].peers, stop=(Wires, type(sys), type)))
    return (sizes[1] - sizes[0]) / (PEERS[1] - PEERS[0])


def _reached(first: Any, stop: tuple[type, ...]) -> int:
    seen, left, size = set[int](), [first], 0
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, stop):
            continue
        seen.add(id(each))
        size += sys.getsizeof(each)
        left += gc.get_referents(each)
    return size


def record(count: int) -> tuple[float, float, float, int]:
    """Of a record with one claim after a breakage: CPU seconds to read, to claim, to write it; its bytes."""
    broken, lost = broken_world(count), (count - 1,)
    first = admission.claim(broken, request(broken, 0, lost), "a" * 16, "b" * 32).ledger
    claims = partial(admission.claim, first, request(broken, 1, lost), "c" * 16, "b" * 32)
    text = encode(first)
    return best(partial(decode, text, "w")), best(claims), best(partial(encode, first)), len(text)


def probe() -> float:
    """CPU seconds to look whether one process is there, without what that costs the other."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        where = Endpoint(*listener.getsockname())
        return best(partial(answers, [where], 0.2), 5)


def main() -> None:
    """Measure and print."""
    for count in PEERS:
        still, look, heard, proved = (1e6 * each for each in protocol(count))
        print(
            f"{count} peers: a turn {still:.0f} us; a look at one {look:.2f} us; a beat {heard:.1f} us; "
            f"a proof {proved:.1f} us"
        )
    print("sockets, each beat: received {:.1f} us, sent {:.1f} us; a wait {:.1f} us".format(
        *(1e6 * each for each in sockets(PEERS[0]))
    ))  # fmt: skip
    print(f"memory for each peer: {memory():.0f} bytes")
    for count in PEERS:
        read, claim, write, size = record(count)
        print(
            f"record of {count} members: read {1e3 * read:.2f} ms, claimed in {1e3 * claim:.2f} ms, "
            f"written {1e3 * write:.2f} ms, {size} bytes"
        )
    print(f"a probe: {1e6 * probe():.0f} us")


if __name__ == "__main__":
    main()
