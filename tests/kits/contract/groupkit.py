"""Processes that build process groups over one TCPStore: started from a server that has torch loaded already."""

import contextlib
import datetime as dt
import multiprocessing
import os
import signal
import threading
import time
import traceback
from pathlib import Path

import torch

from kits.storekit import local_server
from multiworld._c10d import groups, waiter_pool
from multiworld._c10d.group_spec import GroupSpec
from multiworld._c10d.routing import router
from multiworld._c10d.routing.state import WorldState
from multiworld._net.lane.background import background
from multiworld._net.stores.store import PollingStore, open_store

_context = multiprocessing.get_context("forkserver")


PATIENCE = 60.0  # seconds; nothing takes that long when all is well, on a machine that runs
SOON = 15.0  # seconds, where something comes at once and not after a timeout: far more than any stall


def soon(seconds=PATIENCE):
    return time.monotonic() + seconds


class Crew:
    """`size` processes, each running ``program(member, *args)``; always ended."""

    def __init__(self, size, program, *args, timeout=2 * PATIENCE):
        self.deadline = soon(timeout)
        self.server = local_server()
        self.members = []
        for rank in range(size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_child, args=(theirs, program, rank, size, self.server.port, args), daemon=True
            )
            process.start()
            theirs.close()
            self.members.append((process, ours))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process, pipe in self.members:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            process.join(PATIENCE)
            process.close()
            pipe.close()

    def pid(self, rank):
        return self.members[rank][0].pid

    def hear(self, rank):
        """Next thing that the member of this rank says."""
        pipe = self.members[rank][1]
        left = self.deadline - time.monotonic()
        assert pipe.poll(max(0.0, left)), f"rank {rank} said nothing"
        kind, value = pipe.recv()
        assert kind != "error", f"rank {rank}:\n{value}"
        return value

    def tell(self, rank, value):
        self.members[rank][1].send(value)

    def results(self):
        return [self.hear(rank) for rank in range(len(self.members))]


def run(size, program, *args, timeout=2 * PATIENCE):
    """What each member's program returned."""
    with Crew(size, program, *args, timeout=timeout) as crew:
        return crew.results()


class Member:
    """What a program gets: who it is, its store, and how to build groups."""

    def __init__(self, pipe, rank, size, port):
        self.pipe, self.rank, self.size = pipe, rank, size
        self.handle = open_store(f"tcp://127.0.0.1:{port}", world="test", serve=False, deadline=soon())
        self.store = self.handle.store
        self.start = time.monotonic()

    def say(self, value):
        self.pipe.send(("said", value))

    def ask(self):
        return self.pipe.recv()

    def meet(self, name):
        """Wait until everyone is here."""
        self.store.add(name, 1)
        end = soon()
        while int(self.store.add(name, 0)) < self.size:
            assert time.monotonic() < end, f"not everyone came to {name}"
            time.sleep(0.001)

    def spec(self, name="w", generation=1, **changes):
        store = PollingStore(self.handle, prefix=f"{name}/{generation}")
        values = {
            "world": name, "generation": generation, "rank": self.rank, "size": self.size, "backend": "gloo",
            "device": None, "timeout": PATIENCE, "store": store, "local_host": "127.0.0.1", "check_cancelled": _fine,
        }  # fmt: skip
        return GroupSpec(**{**values, **changes})

    def build(self, name="w", generation=1, **changes):
        router.install()
        state = WorldState(name=name, generation=generation)
        spec = self.spec(name, generation, **changes)
        groups.check_backend(name, spec.backend, spec.device)
        return groups.build(spec, state)


def _fine():
    """Nothing is wrong."""


def _child(pipe, program, rank, size, port, args):
    torch.set_num_threads(1)
    groups._SETTLE = PATIENCE  # gloo's threads may be late
    try:
        member = Member(pipe, rank, size, port)
        pipe.send(("result", program(member, *args)))
    except BaseException:  # noqa: BLE001  (reported)
        pipe.send(("error", traceback.format_exc()))
    # Stay until the parent has read: the kernel would close connections others still test.
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()


def sockets():
    """Inodes of this process's sockets."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            link = str(path.readlink())
            if link.startswith("socket:"):
                found.add(link)
    return found


def threads():
    """Names of this process's threads."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found.append((task / "comm").read_text().strip())
    return sorted(found)


def threads_left():
    """The same without idle ones that wait for works: the registry ends them with the last world; here it knows of none."""
    waiter_pool.pool.dismiss()
    waiter_pool.ending.dismiss()
    background.dismiss()
    return threads()


def settles(test, seconds=PATIENCE / 2):
    end = time.monotonic() + seconds
    while not test():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def blocked(*calls):
    """Run calls in threads; return a function that waits for what each raised and when."""
    out = [("still pending", "", float("inf"))] * len(calls)

    def go(number, call):
        try:
            call()
            out[number] = ("returned", "", time.monotonic())
        except BaseException as error:  # noqa: BLE001  (reported)
            out[number] = (type(error).__name__, str(error), time.monotonic())

    workers = [threading.Thread(target=go, args=(n, c), daemon=True) for n, c in enumerate(calls)]
    for worker in workers:
        worker.start()

    def wait(seconds=PATIENCE):
        end = soon(seconds)
        for worker in workers:
            worker.join(max(0.0, end - time.monotonic()))
        return out

    return wait


MINUTE = dt.timedelta(seconds=60)
