"""NCCL of the test bed without torch: processes that call the C functions through ctypes, one step at a time.

The parent names a method of `RawRank` and its arguments, each process answers with the result. Tests of the double's
NCCL half use it (test_nccl_*.py), since what torch would make of an error is not their matter.
"""

from __future__ import annotations

import contextlib
import ctypes as c
import multiprocessing
import multiprocessing.connection
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

DTYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")
OPS = ("sum", "prod", "max", "min", "avg")
SUCCESS, UNHANDLED_CUDA, SYSTEM, INTERNAL = 0, 1, 2, 3
INVALID_ARGUMENT, INVALID_USAGE, REMOTE, IN_PROGRESS = 4, 5, 6, 7
ANSWER = 60.0  # seconds
MODELLED_SINCE = {"ncclCommShrink": 22700, "ncclCommRevoke": 23000}


def entries(folder):
    return len(list(Path(folder).iterdir()))


class UniqueId(c.Structure):
    _fields_ = [("internal", c.c_char * 128)]


class Config(c.Structure):
    """The part of ncclConfig_t that all versions share; the rest is left undefined by its size."""

    _fields_ = [
        ("size", c.c_size_t),
        ("magic", c.c_uint),
        ("version", c.c_uint),
        ("blocking", c.c_int),
        ("rest", c.c_char * 256),
    ]


class RawRank:
    """In the process of a rank."""

    def __init__(self, library: str) -> None:
        self.lib = c.CDLL(library)
        self.lib.m8d_bed_count.restype = c.c_long
        self.lib.ncclGetLastError.restype = c.c_char_p
        self.lib.ncclGetErrorString.restype = c.c_char_p
        self.comms: dict[str, c.c_void_p] = {}
        self.streams: dict[str, c.c_void_p] = {}
        self.buffers: list[tuple[np.ndarray, np.ndarray]] = []
        self.threads: dict[str, tuple[threading.Thread, list]] = {}
        self.rank = 0

    # -- the double itself

    def set(self, knob, value=""):
        assert self.lib.m8d_bed_set(knob.encode(), str(value).encode()) == 0, knob

    def count(self, name):
        return self.lib.m8d_bed_count(name.encode())

    def counts(self, name, wanted, seconds):
        """Whether a counter comes to so much, within some time."""
        deadline = time.monotonic() + seconds
        while self.count(name) != wanted:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def communicators(self):
        text = c.create_string_buffer(65536)
        assert self.lib.m8d_bed_nccl_communicators(text, 65536) >= 0
        return text.value.decode().splitlines()

    def held(self):
        """What a leak would show in: descriptors, threads, communicators, pending operations."""
        return {
            "fds": entries("/proc/self/fd"),
            "threads": entries("/proc/self/task"),
            "comms": self.count("comms"),
            "pending": self.count("ops_pending"),
        }

    def settles(self, wanted, seconds, *, threads=0):
        """Whether no more is held than then, within some time; so many threads more are allowed."""
        deadline = time.monotonic() + seconds
        while True:
            now = self.held()
            if all(now[what] <= wanted[what] + (threads if what == "threads" else 0) for what in wanted):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)

    def models(self, function):
        """Whether the double has more than a stub of a function (not every NCCL has every one)."""
        return function in MODELLED_SINCE and self.version() >= MODELLED_SINCE[function]

    def version(self):
        told = c.c_int()
        assert self.lib.ncclGetVersion(c.byref(told)) == 0
        return told.value

    def last_error(self):
        return self.lib.ncclGetLastError(None).decode()

    def words(self, result):
        return self.lib.ncclGetErrorString(result).decode()

    def abandon_group(self):
        return self.lib.m8d_bed_nccl_abandon_group()

    # -- communicators

    def unique_id(self):
        made = UniqueId()
        assert self.lib.ncclGetUniqueId(c.byref(made)) == 0
        return bytes(made)

    def config(self, blocking):
        undefined = bytes(3) + b"\x80"  # INT_MIN
        return Config(c.sizeof(Config), 0xCAFEBEEF, self.version(), int(blocking), undefined * 64)

    def init(self, uid, size, rank, *, blocking=True, name="comm"):
        comm = self.comms[name] = c.c_void_p()
        config = self.config(blocking)
        self.rank = rank
        return self.lib.ncclCommInitRankConfig(
            c.byref(comm), size, UniqueId.from_buffer_copy(uid), rank, c.byref(config)
        )

    def init_scalable(self, uids, size, rank, *, name="comm"):
        comm = self.comms[name] = c.c_void_p()
        identities = (UniqueId * len(uids))(*[UniqueId.from_buffer_copy(uid) for uid in uids])
        config = self.config(blocking=True)
        return self.lib.ncclCommInitRankScalable(
            c.byref(comm), size, rank, len(uids), identities, c.byref(config)
        )

    def init_all(self, size):
        made = (c.c_void_p * size)()
        result = self.lib.ncclCommInitAll(made, size, None)
        self.comms |= {f"all{i}": c.c_void_p(each) for i, each in enumerate(made)}
        return result

    def split(self, color, key, *, name="child", of="comm"):
        child = self.comms[name] = c.c_void_p()
        return self.lib.ncclCommSplit(self.comms[of], color, key, c.byref(child), None), bool(child)

    def shrink(self, excluded, *, name="child", of="comm", flags=0):
        child = self.comms[name] = c.c_void_p()
        ranks = (c.c_int * len(excluded))(*excluded)
        return self.lib.ncclCommShrink(self.comms[of], ranks, len(excluded), c.byref(child), None, flags)

    def grow(self, size, uid, rank, *, name="child", of="comm"):
        child = self.comms[name] = c.c_void_p()
        identity = c.byref(UniqueId.from_buffer_copy(uid)) if uid else None
        return self.lib.ncclCommGrow(self.comms.get(of), size, identity, rank, c.byref(child), None)

    def about(self, name="comm"):
        told = []
        for call in ("UserRank", "Count", "CuDevice"):
            value = c.c_int(-1)
            told.append((getattr(self.lib, f"ncclComm{call}")(self.comms[name], c.byref(value)), value.value))
        return told

    def error(self, name="comm"):
        value = c.c_int(-1)
        result = self.lib.ncclCommGetAsyncError(self.comms[name], c.byref(value))
        return value.value if result == 0 else -result

    def error_within(self, seconds, wanted, name="comm"):
        """Ask until the state is what is wanted; return the seconds it took, or None."""
        started = time.monotonic()
        while time.monotonic() < started + seconds:
            if self.error(name) == wanted:
                return time.monotonic() - started
            time.sleep(0.001)
        return None

    def call(self, function, name="comm", *more):
        """Abort, Destroy, Finalize, Revoke: the result and how long it took."""
        started = time.monotonic()
        result = getattr(self.lib, f"ncclComm{function}")(self.comms[name], *more)
        return result, time.monotonic() - started

    def premul(self, factor, dtype, name="comm"):
        value, op = np.array([factor], dtype), c.c_int()
        result = self.lib.ncclRedOpCreatePreMulSum(
            c.byref(op), c.c_void_p(value.ctypes.data), DTYPES.index(dtype), 1, self.comms[name]
        )
        assert result == 0
        return op.value

    def drop_op(self, op, name="comm"):
        return self.lib.ncclRedOpDestroy(op, self.comms[name])

    # -- operations

    def stream(self, name="main"):
        if name not in self.streams:
            made = self.streams[name] = c.c_void_p()
            assert self.lib.cudaStreamCreateWithFlags(c.byref(made), 1) == 0
        return self.streams[name]

    def group(self, call):
        return getattr(self.lib, f"ncclGroup{call}")()

    def begin(
        self,
        kind,
        send,
        receive_size,
        *,
        dtype,
        op="sum",
        root=0,
        name="comm",
        stream="main",
        inplace=False,
        count=None,
    ):
        """Queue one operation; the buffers are those of `received`. dtype: its name, or NCCL's number and bytes."""
        number = DTYPES.index(dtype) if isinstance(dtype, str) else dtype
        sent = np.array(send)
        received = np.full(receive_size, 99, sent.dtype)
        if inplace:  # the place of the send buffer in the receive buffer, or the other way round
            if inplace == "inside-receive":
                first = self.rank * sent.size
                received[first : first + sent.size] = sent
                sent = received[first : first + sent.size]
            elif inplace == "inside-send":
                received = sent[self.rank * receive_size : (self.rank + 1) * receive_size]
            else:
                received = sent
        self.buffers.append((sent, received))
        a, b = c.c_void_p(sent.ctypes.data), c.c_void_p(received.ctypes.data)
        comm, on = self.comms[name], self.stream(stream)
        n = c.c_size_t(self._elements(kind, sent, received, name) if count is None else count)
        how = OPS.index(op) if isinstance(op, str) else op
        function = getattr(self.lib, f"nccl{kind}")
        if kind == "Send":
            return function(a, n, number, root, comm, on)
        if kind == "Recv":
            return function(b, n, number, root, comm, on)
        if kind in ("AllReduce", "ReduceScatter"):
            return function(a, b, n, number, how, comm, on)
        if kind == "Reduce":
            return function(a, b, n, number, how, root, comm, on)
        if kind in ("AllGather", "AlltoAll"):
            return function(a, b, n, number, comm, on)
        return function(a, b, n, number, root, comm, on)

    def _elements(self, kind, sent, received, name):
        if kind in ("AlltoAll", "Scatter"):
            if kind == "Scatter":
                return received.size
            return sent.size // self.about(name)[1][1]
        return received.size if kind in ("ReduceScatter", "Recv") else sent.size

    def ready(self, seconds, stream="main"):
        """Whether all that was queued is done, within some time."""
        deadline = time.monotonic() + seconds
        while self.lib.cudaStreamQuery(self.stream(stream)) != 0:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)
        return True

    def rewrites(self, seconds):
        """Set the last receive buffer to 7: whether it is written over within some time."""
        _, received = self.buffers[-1]
        received.fill(7)
        deadline = time.monotonic() + seconds
        while (received == 7).all():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def received(self):
        """The receive buffers of all operations since the last time."""
        told = [received.copy() for _, received in self.buffers]
        self.buffers.clear()
        return told

    def run(self, *args, **more):
        """One operation, from its call to its result."""
        result = self.begin(*args, **more)
        assert result == 0, (args[0], result, self.last_error())
        assert self.ready(30), (args[0], self.last_error())
        return self.received()[-1]

    def big_sum(self, count):
        """An all-reduce of rank + 1, many times: the least and the largest value, and its seconds."""
        sent, received = np.full(count, self.rank + 1, "float32"), np.zeros(count, "float32")
        a, b = c.c_void_p(sent.ctypes.data), c.c_void_p(received.ctypes.data)
        started = time.monotonic()
        on = self.stream()
        number = DTYPES.index("float32")
        assert self.lib.ncclAllReduce(a, b, c.c_size_t(count), number, 0, self.comms["comm"], on) == 0
        assert self.lib.cudaStreamSynchronize(on) == 0
        seconds = time.monotonic() - started
        return float(received.min()), float(received.max()), seconds

    # -- in a thread of the process

    def steps(self, *steps):
        """Several methods, one after the other: what each gave."""
        return [getattr(self, method)(*args, **more) for method, args, more in steps]

    def start(self, label, method, *args, **more):
        results: list = []
        thread = threading.Thread(
            target=lambda: results.append(getattr(self, method)(*args, **more)), daemon=True
        )
        thread.start()
        self.threads[label] = (thread, results)

    def thread_ends(self, method, *args, **more):
        """What a thread gave that has ended, so that its memory is gone."""
        self.start("ends", method, *args, **more)
        told = self.finish("ends", ANSWER)
        task = Path(f"/proc/self/task/{self.threads['ends'][0].native_id}")
        deadline = time.monotonic() + ANSWER
        while task.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        return told

    def finish(self, label, seconds):
        """The result of a thread, or None if it is not there in time."""
        thread, results = self.threads[label]
        thread.join(seconds)
        return results[0] if results else None


def serve(library, link):
    """The process of a rank: until the parent hangs up."""
    rank = RawRank(library)
    with contextlib.suppress(EOFError, OSError):
        while True:
            method, args, more = link.recv()
            try:
                link.send((True, getattr(rank, method)(*args, **more)))
            except Exception as exc:  # noqa: BLE001 -- it goes to the parent
                link.send((False, f"{type(exc).__name__}: {exc}"))


class Member:
    """In the parent: one rank's process. ``member.METHOD(...)`` runs it there."""

    def __init__(self, library: Path, errors: Path, env: dict[str, str]) -> None:
        self.link, other = multiprocessing.Pipe()
        self.errors = errors
        with errors.open("wb") as stderr, other:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(library), str(other.fileno())],
                stderr=stderr,
                pass_fds=[other.fileno()],
                env={**os.environ, **env},
            )

    def ask(self, method, *args, **more):
        self.link.send((method, args, more))

    def answer(self, seconds=ANSWER):
        assert self.link.poll(seconds), f"no answer within {seconds} s:\n{self.stderr()}"
        well, told = self.link.recv()
        assert well, f"{told}\n{self.stderr()}"
        return told

    def __getattr__(self, method):
        def call(*args, **more):
            self.ask(method, *args, **more)
            return self.answer()

        return call

    def stderr(self):
        return self.errors.read_text()

    def dies(self, seconds, method, *args, **more):
        """Ask for what ends the process: the signal that ended it."""
        self.ask(method, *args, **more)
        return -self.process.wait(seconds)

    def kill(self):
        """kill -9, and wait until it is gone."""
        self.process.kill()
        self.process.wait(ANSWER)

    def close(self):
        self.link.close()
        self.process.kill()
        self.process.wait(ANSWER)


class Crew:
    """Ranks 0 … n-1, connected (unless told otherwise)."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members

    def __getitem__(self, rank):
        return self.members[rank]

    def each(self, method, *args, ranks=None, **more):
        """Run a method on all ranks at the same time; an argument that is a function gets the rank."""
        chosen = range(len(self.members)) if ranks is None else ranks
        for rank in chosen:
            value = [one(rank) if callable(one) else one for one in args]
            named = {key: one(rank) if callable(one) else one for key, one in more.items()}
            self.members[rank].ask(method, *value, **named)
        return [self.members[rank].answer() for rank in chosen]

    def connect(self, **more):
        uid = self.members[0].unique_id()
        return self.each("init", uid, len(self.members), lambda rank: rank, **more)


@contextlib.contextmanager
def crew(library: Path, folder: Path, size: int, *, connected: bool = True, **knobs: object):
    """Ranks for one test; knobs (in their environment) by their names."""
    env = {f"M8D_BED_{name}": str(value) for name, value in knobs.items()}
    made = Crew([])
    try:
        for rank in range(size):
            made.members.append(Member(library, folder / f"rank-{rank}.stderr", env))
        if connected:
            assert made.connect() == [0] * size
        yield made
    finally:
        for member in made.members:
            member.close()


if __name__ == "__main__":
    serve(sys.argv[1], multiprocessing.connection.Connection(int(sys.argv[2])))
