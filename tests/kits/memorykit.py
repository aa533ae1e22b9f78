"""Processes whose memory is read, and programs that read other processes' memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0  # seconds; nothing here takes that long when all is well, on a machine that runs

BUFFER = """
import ctypes, os, sys
kept = bytearray((bytes(range(251)) * (int(sys.argv[1]) // 251 + 1))[: int(sys.argv[1])])
address = ctypes.addressof(ctypes.c_char.from_buffer(kept)) if kept else 0
print(os.getpid(), address, flush=True)
sys.stdin.read()
"""
"""Holds as many bytes as its argument says (`content`)."""

PAGES = """
import ctypes, mmap, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
pages.write(b"x" * 2 * mmap.PAGESIZE)
address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
assert libc.munmap(address + mmap.PAGESIZE, mmap.PAGESIZE) == 0
print(os.getpid(), address, flush=True)
sys.stdin.read()
os._exit(0)  # the second page is not Python's to unmap any more
"""
"""Has two pages, of which the second is not mapped any more."""

OFFERER = """
import sys
from multiworld._net.lane.memory import Proof
proof = Proof(None)
print(proof.offer().hex(), flush=True)
print(proof.accepts(bytes.fromhex(sys.stdin.readline())), flush=True)
"""
"""Offers its memory, and says whether it accepts the answer."""

ANSWERER = """
import sys
from multiworld._net.lane.memory import Proof
offer = bytes.fromhex(sys.stdin.readline())
print(Proof(int.from_bytes(offer[:4], "little")).answer(offer).hex(), flush=True)
"""
"""Answers an offer."""

OTHER_USER = f"""
import os, subprocess, sys
from multiworld._net.lane.memory import Proof
user = int(sys.argv[1])
# Yama lets it read a child, whatever its user.
offerer = subprocess.Popen(
    [sys.executable, "-c", {OFFERER!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
)
offer = offerer.stdout.readline()
try:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
except OSError:
    offerer.kill()
    print("not allowed", flush=True)
    sys.exit()
print(offerer.communicate(Proof(offerer.pid).answer(bytes.fromhex(offer)).hex() + chr(10))[0], flush=True)
"""
"""Says whether the process of a user, its argument, may read one of root's, or that it cannot become that user."""

REUSED = """
import ctypes, os, signal, sys, time
from pathlib import Path
from multiworld._net.lane.memory import MemoryReader

def child():
    pid = os.fork()
    if not pid:
        signal.pause()
    return pid

if sys.argv[1] == "without":
    del os.pidfd_open
kept, into = bytearray(b"x" * 4096), bytearray(4096)
address = ctypes.addressof(ctypes.c_char.from_buffer(kept))
first = child()
reader = MemoryReader(first)
assert reader.read(address, memoryview(into))
os.kill(first, signal.SIGKILL)
os.waitpid(first, 0)
time.sleep(0.05)  # start times are in hundredths of a second
Path("/proc/sys/kernel/ns_last_pid").write_text(str(first - 1))
second = child()
print(first == second, reader.read(address, memoryview(into)), MemoryReader(second).read(address, memoryview(into)))
os.kill(second, signal.SIGKILL)
os.waitpid(second, 0)
"""
"""Says whether a child has the pid of one before, and whether readers of either read it. Argument: with, without pidfds."""


def content(size: int) -> bytes:
    """Return what a `BUFFER` of that size holds; shifted bytes differ, as 251 divides no size of a page."""
    return (bytes(range(251)) * (size // 251 + 1))[:size]


def start(program: str, *arguments: object, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start a program; `before`: the command that runs it."""
    return subprocess.Popen(
        [*before, sys.executable, "-c", program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def running(program: str, *arguments: object, before: tuple[str, ...] = ()):
    """Run a program until the end of the block."""
    with start(program, *arguments, before=before) as process:
        try:
            yield process
        finally:
            process.kill()


def buffer_of(process: subprocess.Popen[str]) -> tuple[int, int]:
    """Return the pid and the address that a `BUFFER` or `PAGES` prints."""
    pid, address = process.stdout.readline().split()
    return int(pid), int(address)


def refusal() -> str:
    """Return why this system lets no process read its children's memory; "" if it does. Asks the C library."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is None:
        return "this C library has no process_vm_readv"

    class Range(ctypes.Structure):
        _fields_ = (("start", ctypes.c_void_p), ("length", ctypes.c_size_t))

    with running(BUFFER, 8) as process:
        pid, address = buffer_of(process)
        into = ctypes.create_string_buffer(8)
        one = ctypes.c_ulong(1)
        here, there = Range(ctypes.addressof(into), 8), Range(address, 8)
        if call(pid, ctypes.byref(here), one, ctypes.byref(there), one, ctypes.c_ulong(0)) == 8:
            return ""
        return f"processes may not read each other's memory here: {os.strerror(ctypes.get_errno())}"
