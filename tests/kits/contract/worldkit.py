"""Members of worlds as real processes, for tests that kill them.

A program is a module-level function ``program(me, **arguments)`` of a test module. `Cast.start` runs it in a
process of its own, forked from a server that has torch loaded (a start costs milliseconds, not seconds). It tells
the test what happens with ``me.emit(name, **data)``; times are CLOCK_MONOTONIC, which all processes share.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import multiprocessing
import os
import pkgutil
import random
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
PATIENCE = (
    60.0  # seconds; this machine is shared and noisy, and nothing here waits that long when all is well
)
HANG = 4.0
"""hang_timeout, seconds, where somebody hangs: a machine that stalls a healthy member for longer makes a hang of it."""
SOON = 15.0
"""Seconds, where something comes at once and not after an operation's `timeout`: far more than any stall."""

SHOW_STACKS = signal.SIGUSR2
"""A member that gets it writes where its threads are; it needs no GIL for that."""


# Programs and tools of their own: no member loads them.
NOT_PRELOADED = ("multiworld.__main__", "multiworld.cli", "multiworld.run", "multiworld.shim")


def preloaded() -> list[str]:
    """Modules that the server loads before it forks: each would cost every member its processor time again.

    The whole runtime takes 0.3 s, pytest, which test modules import, 0.1 s, torch's compiler, which the first
    optimizer imports, 1.5 s.
    """
    import multiworld

    names = [module.name for module in pkgutil.walk_packages(multiworld.__path__, "multiworld.")]
    runtime = [name for name in names if not name.startswith(NOT_PRELOADED)]
    return ["torch", "torch.distributed", "torch._dynamo", "pytest", "kits.contract.worldkit", *runtime]


@dataclass
class Seen:
    """Something a member told: when (monotonic seconds) and what."""

    name: str
    at: float
    data: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Me:
    """A program's link to its test."""

    def __init__(self, conn: Any, rank: int, store: str) -> None:
        self._conn = conn
        self._lock = threading.Lock()
        self.rank = rank
        self.store = store

    def emit(self, name: str, **data: Any) -> None:
        with self._lock:
            self._conn.send((name, time.monotonic(), data))

    def hear(self, timeout: float = PATIENCE) -> Any:
        """What the test says with `Actor.say`."""
        if not self._conn.poll(timeout):
            raise TimeoutError("the test said nothing")
        return self._conn.recv()


def _run(program: Callable[..., Any], conn: Any, rank: int, store: str, arguments: dict[str, Any]) -> None:
    faulthandler.register(SHOW_STACKS)
    me = Me(conn, rank, store)
    # What a close takes on a machine that stands still is no reason to give it up.
    os.environ.setdefault("M8D_CLOSE_TIMEOUT", str(PATIENCE / 2))
    try:
        program(me, **arguments)
        me.emit("end")
    except BaseException as exc:
        with contextlib.suppress(OSError):
            me.emit("error", kind=type(exc).__name__, text=str(exc), trace=traceback.format_exc())
        raise


@dataclass
class Actor:
    """One member's process, as its test sees it."""

    process: Any
    conn: Any
    rank: int
    heard: list[Seen] = field(default_factory=list)

    def expect(self, name: str, timeout: float = PATIENCE) -> Seen:
        """The next thing of that name the member tells; what it tells before is kept in `heard`."""
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not self.conn.poll(left):
                self.show_stacks()
                raise AssertionError(
                    f"rank {self.rank} did not tell {name!r} in {timeout} s; heard {self.heard}"
                )
            try:
                seen = Seen(*self.conn.recv())
            except EOFError:
                self.process.join(5)
                raise AssertionError(
                    f"rank {self.rank} ended ({self.process.exitcode}) before {name!r}; heard {self.heard}"
                ) from None
            self.heard.append(seen)
            if seen.name == name:
                return seen
            if seen.name == "error":
                raise AssertionError(f"rank {self.rank} failed before {name!r}:\n{seen.trace}")

    def say(self, what: Any) -> None:
        self.conn.send(what)

    def kill(self) -> float:
        """SIGKILL; returns when it was sent."""
        at = time.monotonic()
        os.kill(self.process.pid, signal.SIGKILL)
        return at

    def stop(self) -> float:
        """SIGSTOP; returns when it was sent."""
        at = time.monotonic()
        os.kill(self.process.pid, signal.SIGSTOP)
        return at

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def finish(self, timeout: float = PATIENCE) -> int:
        """Wait for the process's end; returns its exit code."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.show_stacks()
            raise AssertionError(f"rank {self.rank} did not end in {timeout} s; heard {self.heard}")
        return self.process.exitcode

    def show_stacks(self) -> None:
        """Let a member that is stuck write where its threads are to stderr, which pytest shows with the failure."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, SHOW_STACKS)
            self.process.join(1.0)  # time to write


class Cast:
    """The processes of one test, and the store they meet at (served by the test itself)."""

    def __init__(self) -> None:
        from kits.storekit import local_server  # loads torch
        from multiworld._net.stores.tls_server import TlsStoreServer
        from multiworld._net.tls import credentials

        secure = credentials.current()
        self.server = (
            local_server(seconds=30)
            if secure is None
            else TlsStoreServer(socket.AF_INET, ("127.0.0.1", free_port()), credentials=secure)
        )
        self.store = f"tcp://127.0.0.1:{self.server.port}"
        self.actors: list[Actor] = []

    def start(self, program: Callable[..., Any], rank: int = 0, **arguments: Any) -> Actor:
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(
            target=_run,
            args=(program, theirs, rank, arguments.pop("store", self.store), arguments),
            daemon=True,
        )
        process.start()
        theirs.close()
        actor = Actor(process, ours, rank)
        self.actors.append(actor)
        return actor

    def all(self, program: Callable[..., Any], size: int, **arguments: Any) -> list[Actor]:
        """`size` members with ranks 0 to size - 1; each gets ``size=`` too."""
        return [self.start(program, rank, size=size, **arguments) for rank in range(size)]

    def close(self) -> None:
        for actor in self.actors:
            if actor.process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(actor.process.pid, signal.SIGCONT)
                actor.process.kill()
        for actor in self.actors:
            actor.process.join(PATIENCE)
            actor.conn.close()
            actor.process.close()
        # In this thread: a failed test's traceback would leave the server to the collector, which may run in a
        # thread with another descriptor table, and hang there.
        self.server = None


@contextlib.contextmanager
def cast() -> Iterator[Cast]:
    """A cast that is gone afterwards, whatever happened."""
    made = Cast()
    try:
        yield made
    finally:
        made.close()


def left_over() -> dict[str, Any]:
    """What a process holds: threads by name, sockets, open descriptors."""
    from multiworld._net.lane import wakes

    wakes.mine()  # the one descriptor that each thread keeps that has waited for a message
    sockets, descriptors = 0, list(Path("/proc/self/fd").iterdir())
    for each in descriptors:
        with contextlib.suppress(OSError):  # closed meanwhile
            sockets += str(each.readlink()).startswith("socket:")
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "tasks": len(list(Path("/proc/self/task").iterdir())),
        "sockets": sockets,
        "fds": len(descriptors),
    }


def threads_ended() -> list[str]:
    """Wait for the threads that are ending; returns those that stay beside the main one."""
    deadline = time.monotonic() + PATIENCE / 2
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    return sorted(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())


def outcome(call: Callable[[], Any]) -> dict[str, Any]:
    """What came of ``call()``, as data for `Me.emit`: of an exception its kinds, text, cause, ranks, generation."""
    try:
        call()
    except Exception as exc:  # noqa: BLE001  (whatever it is, the test wants to see it)
        return {
            "kinds": [kind.__name__ for kind in type(exc).__mro__],
            "text": str(exc),
            "cause": getattr(exc, "cause", None),
            "ranks": tuple(getattr(exc, "ranks", ())),
            "generation": getattr(exc, "generation", None),
        }
    return {"kinds": [], "text": "", "cause": None, "ranks": (), "generation": None}


def free_port(host: str = "127.0.0.1", *, further: int = 0) -> int:
    """A port that is free, with the `further` next ones, for a store that a member serves, dies with, serves again.

    It is none that the kernel gives to those who ask for any port: nobody comes between.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(200):
        port = random.randrange(15000, _EPHEMERAL - further)  # noqa: S311  (nothing secret)
        with contextlib.ExitStack() as stack:
            try:
                for each in range(port, port + further + 1):
                    stack.enter_context(socket.socket(family)).bind((host, each))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise  # the address is none of this host
                continue
            return port
    raise AssertionError("no free port")


_EPHEMERAL = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])


def enter_netns(name: str) -> None:
    """Move this thread, and those it starts from now on, into the network namespace `name` (of ip-netns)."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    try:
        if libc.setns(fd, 0x40000000):  # CLONE_NEWNET
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), name)
    finally:
        os.close(fd)
