"""Members that connect their lanes: in threads, in processes, and half ones that stop in the middle."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import secrets
import select
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kits.meetkit import PATIENCE, together
from kits.memorykit import ROOT, start
from multiworld._core.lane.greeting import NONCE_SIZE, Greeting
from multiworld._core.membership.roster import Endpoint, LaneAddress, Member, Roster
from multiworld._net import peer_user, procfs
from multiworld._net.lane.door import Door, unix_name
from multiworld._net.lane.meeting import meet
from multiworld._net.lane.memory import Proof
from multiworld._net.liveness.listeners import resolve

HOST = "127.0.0.1"
TOKEN = bytes(range(16))

MEMBER = """
import json, os, sys, time
from kits.doorkit import HOST, met_all, nothing, roster_of, soon
from multiworld._core.membership.roster import LaneAddress
from multiworld._net.lane.door import Door
from multiworld._net.lane.meeting import meet

rank, check = int(sys.argv[1]), nothing
door = Door(HOST, f"{rank:032x}")
print(json.dumps([door.address.version, door.address.place, door.address.port]), flush=True)
roster = roster_of([LaneAddress(*each) for each in json.loads(sys.stdin.readline())], rank)
began = time.perf_counter()
met = meet(door, roster, deadline=soon(), check=check)
seconds = time.perf_counter() - began
door.close()
print(json.dumps([met_all(met, rank), sorted(met.readers), seconds]), flush=True)
sys.stdin.read()
"""
"""A member. Argument: its rank. Prints its address, reads all, prints whom it met, whom it can read, seconds."""

FORKING = MEMBER.replace(
    "began =",
    """
check = iter([lambda: None, lambda: fork()] + 100000 * [lambda: None]).__next__
check = (lambda following: lambda: following()())(check)
here, there = os.pipe()

def fork():
    if os.fork():
        return os.close(here)
    os.close(there)
    if sys.argv[2] == "waits":
        print("forked", flush=True)
        os.read(here, 1)  # until its parent has ended
        os._exit(0)

def excepthook(kind, error, _):
    print(f"{kind.__name__}: {error}", flush=True)

sys.excepthook = excepthook
began =""",
    1,
)
"""A member that forks while it waits for others; the second argument is what its child does: waits, goes on."""


def soon() -> float:
    """Return a deadline that nothing misses."""
    return time.monotonic() + PATIENCE


def nothing() -> None:
    """What a member checks that goes on."""


def after(calls, do):
    """Return a check that does something at that call, counted from 1."""
    counted = iter(range(1, 1 << 30))

    def check():
        if next(counted) == calls:
            do()

    return check


def roster_of(addresses, rank, *, host=HOST, token=TOKEN, generation=1, endpoint=None):
    """Return the roster of members at these addresses; member `n` is of process `n`."""
    members = tuple(
        Member(each, f"{each:032x}", endpoint or Endpoint(host, 1), 100 + each, f"host{each}", address)
        for each, address in enumerate(addresses)
    )
    return Roster("w", generation, rank, members, token, 5.0)


@contextlib.contextmanager
def doors(size, host=HOST, places=None):
    """Open a door for each member; `places`: what their addresses say instead of the truth."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(Door(host, f"{rank:032x}")) for rank in range(size)]
        for each, place in zip(opened, places or [], strict=False):
            each.address = dataclasses.replace(each.address, place=place)
        yield opened


def join(opened, rank, *, deadline=None, check=nothing, **changes):
    """Let the member of one of these doors meet the others."""
    roster = roster_of([each.address for each in opened], rank, **changes)
    return meet(opened[rank], roster, deadline=deadline or soon(), check=check)


def join_all(opened, **changes):
    """Let all meet, each in a thread; returns what each has met, or raises what one raised."""
    results = together(*(lambda rank=rank: join(opened, rank, **changes) for rank in range(len(opened))))
    for each in results:
        if isinstance(each, BaseException):
            raise each
    return results


def met_all(met, rank):
    """Exchange ranks on all connections; returns the ranks that are there, if each is where it should be."""
    for each in met.connections.values():
        each.settimeout(PATIENCE)
        each.sendall(bytes([rank]))
    assert {peer: each.recv(100)[0] for peer, each in met.connections.items()} == {
        peer: peer for peer in met.connections
    }
    return sorted(met.connections)


def everyone(size):
    """Return whom each member has met if all have."""
    return [[peer for peer in range(size) if peer != rank] for rank in range(size)]


def exchanged(mets):
    """Return whom each member has met, once all have heard from all."""
    with ThreadPoolExecutor(len(mets)) as pool:
        return list(pool.map(met_all, mets, range(len(mets))))


def hang_up(*mets):
    """Close all connections, and let go of all readers."""
    for met in mets:
        met.readers.clear()
        for each in met.connections.values():
            each.close()


def call(address: LaneAddress, process: int, *, unix: bool = False, host: str = HOST) -> socket.socket:
    """Connect to a door as anyone could, again and again until it listens."""
    deadline = soon()
    while True:
        family, where = (socket.AF_UNIX, "") if unix else resolve(host, address.port)
        caller = socket.socket(family, socket.SOCK_STREAM)
        caller.settimeout(PATIENCE)
        try:
            caller.connect(unix_name(f"{process:032x}", address.port) if unix else where)
        except (ConnectionRefusedError, BlockingIOError):
            caller.close()
            assert time.monotonic() < deadline, "it never listened"
            time.sleep(0.001)
        except BaseException:
            caller.close()
            raise
        else:
            return caller


def answer(door: Door) -> socket.socket:
    """Accept a member that dials a door, in place of the door's own member."""
    door.listen(8)
    with select.epoll() as poll:
        for each in door.sockets:
            poll.register(each, select.EPOLLIN)
        ready = {fd for fd, _ in poll.poll(PATIENCE)}
    connection, _ = next(each for each in door.sockets if each.fileno() in ready).accept()
    connection.settimeout(PATIENCE)
    return connection


def ends(caller: socket.socket) -> bool:
    """Whether the other end closes the connection, before patience does; what it says first is read."""
    try:
        while caller.recv(4096):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


@contextlib.contextmanager
def all_closed():
    """Check that the block leaves no descriptor open."""
    gc.collect()
    before = set(procfs.names("/proc/self/fd"))
    yield
    gc.collect()
    left = set(procfs.names("/proc/self/fd")) - before
    assert {each: Path(f"/proc/self/fd/{each}").readlink() for each in left} == {}


class HalfMember:
    """A member's end of one handshake, which goes as far as a test says."""

    def __init__(self, connection: socket.socket, roster: Roster, peer: int | None = None) -> None:
        self.connection = connection
        self.proof = Proof(peer_user.pid_of(connection))
        self.greeting = Greeting(roster, self.proof, secrets.token_bytes(NONCE_SIZE), peer)

    def go_on(self, messages: int) -> None:
        """Say so many messages, and hear those between them and before."""
        while messages or not self.greeting.unsent:
            if unsent := self.greeting.unsent:
                self.connection.sendall(unsent)
                self.greeting.wrote(len(unsent))
                messages -= 1
            elif want := self.greeting.want():
                if not (count := self.connection.recv_into(want)):
                    raise ConnectionResetError
                self.greeting.got(count)
            else:
                return


@contextlib.contextmanager
def started(program, *arguments):
    """Run a member's program until the end of the block."""
    with start(f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r}){program}", *arguments) as process:
        try:
            yield process
        finally:
            process.kill()


def address_of(process):
    """Return the address that a member's program prints."""
    return LaneAddress(*json.loads(process.stdout.readline()))


def tell(process, addresses):
    """Tell a member's program where all members are."""
    print(json.dumps([dataclasses.astuple(each) for each in addresses]), file=process.stdin, flush=True)
