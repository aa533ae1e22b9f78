"""Strangers at every port of a member's process: 400 of them where it may have 256 descriptors, and every bad manner.

``--soak SECONDS`` makes the second form long (nox -s soak: 300 s).
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import resource
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
import torch
from kits.contract.worldkit import PATIENCE, SOON

import multiworld as mw
from multiworld._net.stores.server import StoreServer
from multiworld._net.stores.tcp_client import TcpClient

pytestmark = pytest.mark.everyday

LIMIT = 256  # descriptors of a member
CALLERS = 400
GAP = 10.0
"""Seconds between two operations, at most. On a quiet machine it is 0.2 s; this one is shared and noisy."""


def tables(pid):
    """The tables of descriptors of a process: a thread may have one of its own. As names to what they are."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        table = {}
        with contextlib.suppress(OSError):  # the thread has ended
            for each in (task / "fd").iterdir():
                with contextlib.suppress(OSError):
                    table[each.name] = str(each.readlink())
        if table and table not in found:
            found.append(table)
    return found


def listening(pid):
    """The ports of TCP at which a process listens, from /proc/net/tcp by inode."""
    inodes = {each for table in tables(pid) for each in table.values()}
    ports = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            ports.add(int(fields[1].partition(":")[2], 16))
    return ports


def sockets_of(pid):
    return sum(each.startswith("socket:") for table in tables(pid) for each in table.values())


def member(me, size, joins):
    """Works in one world all the time, and joins and leaves others meanwhile."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    w = mw.join("steady", me.rank, size, store=me.store, timeout=60, hang_timeout=30)
    assert w.group is not None  # made now: gloo's ports are there as well
    stop = threading.Event()
    slowest, rounds = [0.0], [0]

    def work():
        going = torch.ones(1)
        last = time.monotonic()
        while going.item():
            going[0] = float(not stop.is_set())
            w.all_reduce(going, torch.distributed.ReduceOp.MIN)
            now = time.monotonic()
            slowest[0], last = max(slowest[0], now - last), now
            rounds[0] += 1
            time.sleep(0.002)

    worker = threading.Thread(target=work)
    worker.start()
    me.emit("up", pid=os.getpid())
    joined = 0
    while (said := me.hear(3600)) != "stop":
        if said == "join":
            with mw.join(f"more{joined}", me.rank, size, store=me.store, timeout=60, hang_timeout=30) as more:
                assert more.group is not None
                t = torch.ones(1)
                more.all_reduce(t)
                assert t.item() == size
            more.close()
            joined += 1
        me.emit("looked", slowest=slowest[0], rounds=rounds[0], state=str(w.state), joined=joined)
    stop.set()
    worker.join(60)
    w.close()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def working(cast, size=2):
    """Members at work, rank 0 of which serves their store."""
    store = f"tcp://127.0.0.1:{free_port()}"
    members = cast.all(member, size, joins=0, store=store)
    pids = [each.expect("up").pid for each in members]
    yield members, pids
    for each in members:
        each.say("stop")
    assert [each.finish() for each in members] == [0] * size


def ask(members, what):
    for each in members:
        each.say(what)
    return [each.expect("looked") for each in members]


def settled(pids, before, patience=SOON):
    deadline = time.monotonic() + patience
    while (now := [sockets_of(pid) for pid in pids]) != before and time.monotonic() < deadline:
        time.sleep(0.1)
    return now


def steady(pids, seconds=4.0):
    """Sockets of members that have all they will have: early-close connections and helpers come a moment after a join."""
    now, since, deadline = [sockets_of(pid) for pid in pids], time.monotonic(), time.monotonic() + SOON
    while time.monotonic() < min(since + seconds, deadline):
        time.sleep(0.1)
        before, now = now, [sockets_of(pid) for pid in pids]
        since = since if now == before else time.monotonic()
    return now


def call(port, patience=0.05):
    sock = socket.socket()
    sock.settimeout(patience)
    try:
        sock.connect(("127.0.0.1", port))
    except OSError:
        sock.close()
        return None
    return sock


def test_four_hundred_idle_connections_leave_a_process_with_256_descriptors_alone(cast):
    with working(cast) as (members, pids):
        ask(members, "join")  # everything that a join leaves behind is there
        before = steady(pids)
        ports = sorted(port for pid in pids for port in listening(pid))
        assert len(ports) >= 5, "a store, two watchdogs, two devices"
        held = []
        try:
            for port in ports:
                held += [call(port, patience=0.02) for _ in range(CALLERS if call_is_heard(port) else 20)]
            looked = ask(members, "join")  # with all of them there
            assert [(each.state, each.joined) for each in looked] == [("active", 2)] * 2
            assert max(each.slowest for each in looked) < GAP
            for pid in pids:
                main = list(Path(f"/proc/{pid}/fd").iterdir())
                assert len(main) < LIMIT / 2, "what strangers have is bounded"
        finally:
            for each in held:
                if each is not None:
                    each.close()
        assert settled(pids, before) == before


def server(me):
    """Serves a store where it may have few descriptors."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    port = free_port()
    store = StoreServer(socket.AF_INET, ("127.0.0.1", port))
    me.emit("up", port=port)
    assert me.hear(3600) == "stop"
    began = time.monotonic()
    store.close()
    me.emit("closed", collects=gc.isenabled(), seconds=time.monotonic() - began)


def test_a_store_whose_descriptors_strangers_have_taken_closes_them_and_keeps_its_values(cast):
    serving = cast.start(server)
    port = serving.expect("up").port
    client = TcpClient.connect(socket.AF_INET, ("127.0.0.1", port), deadline=time.monotonic() + PATIENCE)
    held = []
    try:
        client.set("a", b"1", deadline=time.monotonic() + PATIENCE)
        for _ in range(CALLERS):  # within the second between two looks
            if (sock := call(port, patience=0.5)) is None:
                break
            held.append(sock)
            with contextlib.suppress(OSError):  # closed at once: no descriptor was left
                drop_by_drop(sock, random.Random(1))  # noqa: S311
        for sock in held:
            sock.settimeout(PATIENCE)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
        assert client.get("a", deadline=time.monotonic() + PATIENCE) == b"1"
        newcomer = TcpClient.connect(
            socket.AF_INET, ("127.0.0.1", port), deadline=time.monotonic() + PATIENCE
        )
        assert newcomer.get("a", deadline=time.monotonic() + PATIENCE) == b"1"
        newcomer.close()
    finally:
        client.close()
        for sock in held:
            sock.close()
    serving.say("stop")
    closed = serving.expect("closed")
    assert closed.collects
    assert closed.seconds < GAP
    assert serving.finish() == 0


def call_is_heard(port):
    sock = call(port, patience=0.5)
    if sock is not None:
        sock.close()
    return sock is not None


def random_bytes(sock, dice):
    sock.sendall(dice.randbytes(dice.choice([1, 3, 8, 9, 100, 5000])))


def small_number(sock, dice):
    sock.sendall(struct.pack("=Q", dice.randrange(40)))  # as gloo's own callers begin


def half_open(sock, dice):
    sock.shutdown(socket.SHUT_WR)


def reset(sock, dice):
    random_bytes(sock, dice)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def store_greeting(sock, dice):
    sock.sendall(struct.pack("=BI", 0, 0x3C85F7CE)[: dice.randrange(1, 5)])


def drop_by_drop(sock, dice):
    sock.sendall(dice.randbytes(1))


def nothing(sock, dice):
    """Connect and say nothing."""


MANNERS = (random_bytes, small_number, half_open, reset, store_greeting, drop_by_drop, nothing)


def harass(pids, until, calls, seed):
    dice = random.Random(seed)  # noqa: S311  (the same at each run)
    held: list[socket.socket] = []
    while time.monotonic() < until:
        ports = [port for pid in pids for port in listening(pid)]
        for port in dice.sample(ports, len(ports)):
            for _ in range(dice.choice([1, 5, 40])):
                sock = call(port, patience=0.005)
                if sock is None:
                    break
                calls[0] += 1
                held.append(sock)
                with contextlib.suppress(OSError):
                    dice.choice(MANNERS)(sock, dice)
        while len(held) > dice.choice([0, 100, CALLERS]):
            each = held.pop(dice.randrange(len(held)))
            if dice.random() < 0.3:
                with contextlib.suppress(OSError):
                    drop_by_drop(each, dice)
            each.close()
        time.sleep(0.01)
    for each in held:
        each.close()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_every_bad_manner_at_every_port(cast, soak_seconds):
    seconds = soak_seconds
    with working(cast) as (members, pids):
        ask(members, "join")
        before = steady(pids)
        began, calls = time.monotonic(), [0]
        thread = threading.Thread(target=harass, args=(pids, began + seconds, calls, 1), daemon=True)
        thread.start()
        joins, slow = 1, 0.0
        while thread.is_alive():
            asked = time.monotonic()
            looked = ask(members, "join")
            joins += 1
            slow = max(slow, time.monotonic() - asked)
            assert [(each.state, each.joined) for each in looked] == [("active", joins)] * 2
            time.sleep(0.1)
        thread.join(PATIENCE)
        looked = ask(members, "look")
        worst = max(each.slowest for each in looked)
        print(  # noqa: T201  (what a soak measured)
            f"{seconds:.0f} s: {calls[0]} calls, {joins} joins (slowest {slow:.2f} s), {looked[0].rounds} operations,"
            f" longest gap {worst:.3f} s, sockets {before} -> {[sockets_of(pid) for pid in pids]}"
        )
        assert calls[0] > 50
        assert worst < GAP
        assert settled(pids, before) == before
