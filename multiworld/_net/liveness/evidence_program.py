"""Helper program that reports, from the kernel's view, whether the process that started it runs.

A process whose threads all wait for the GIL sends no sign of life, and may be busy or deadlocked. The kernel
can tell. `multiworld._net.liveness.evidence` starts this program and sends it messages on descriptor 3
(SOCK_SEQPACKET):

    u, with a descriptor    a UDP socket at which to answer; one at the same address replaces it
    x HOST PORT             close the socket at that address
    + TOKEN, - TOKEN        16 bytes: accept, or refuse, questions authenticated with it

It ends with that process, or when descriptor 3 is closed. Questions without a valid proof are dropped. An
answer follows a sample of 0.1 s; `multiworld._core.liveness.evidence` defines both formats.

It imports very little (no `socket`, `hashlib`, `site`), because every member of a world runs one.
"""

from __future__ import annotations

import _socket
import os
import select
import sys
import time

try:
    from _blake2 import blake2b
except ImportError:  # a Python built without it has another
    from hashlib import blake2b

__all__ = ["Looker", "main"]

_LINE = 3
_WINDOW = 0.1  # seconds of a sample
_PARENT = 1.0  # seconds between two checks whether the process exists, where the kernel does not tell
_ASKED = b"m8dq"
_ANSWER = b"m8da"
_MOST = 256  # questions per sample

Threads = dict[bytes, tuple[bytes, int, int, int]]
"""Thread -> its state, nanoseconds in which it ran or waited for a core (-1: not known), CPU ticks, and how
often it went to sleep (only of one that runs; else -1)."""


class Looker:
    """Samples a process twice and reports the activity of its threads in between.

    Args:
        pid: of the process.
        proc: where proc(5) is mounted.
    """

    def __init__(self, pid: int, proc: str = "/proc") -> None:
        self._folder = f"{proc}/{pid}/task".encode()

    def threads(self) -> Threads | None:
        """Return the state of each thread; None where the process is not visible."""
        found: Threads = {}
        try:
            names = [each.name for each in os.scandir(self._folder)]
        except OSError:
            return None
        for name in names:
            try:
                stat = _read(b"%s/%s/stat" % (self._folder, name))
            except OSError:  # it has ended
                continue
            # After the command's name, which may contain any character: state, ..., utime and stime as 12th
            # and 13th.
            fields = stat[stat.rindex(b")") + 2 :].split()
            try:
                ran, waited = _read(b"%s/%s/schedstat" % (self._folder, name)).split()[:2]
                wanted = int(ran) + int(waited)
            except (OSError, ValueError):  # a kernel without it
                wanted = -1
            slept = self._slept(name) if fields[0] == b"R" else -1
            found[name] = fields[0], wanted, int(fields[11]) + int(fields[12]), slept
        return found

    def _slept(self, name: bytes) -> int:
        try:
            status = _read(b"%s/%s/status" % (self._folder, name))
        except OSError:  # it has ended
            return -1
        _, found, rest = status.partition(b"\nvoluntary_ctxt_switches:")
        return int(rest.split(None, 1)[0]) if found else -1

    @staticmethod
    def compare(before: Threads | None, after: Threads | None, seconds: float) -> tuple[bytes, int]:
        """Return a letter for the process, and the share of time its busiest thread was runnable, 0 to 1000.

        The letter is T (stopped), R (a thread is running or runnable) or S (all sleep); ``?`` for unknown.
        """
        if before is None or not after:
            return b"?", 0
        states = {each[0] for each in after.values()}
        if states <= {b"T", b"t"}:
            return b"T", 0
        most = 0
        for name, (state, wanted, ticks, slept) in after.items():
            was = before.get(name)
            if was is None:
                continue
            share = 0
            if wanted >= 0 and was[1] >= 0:
                share = int((wanted - was[1]) / seconds / 1e6)
            elif ticks - was[2] >= 2:
                share = 1000
            both = {was[0], state}
            # The kernel counts the wait for a core only once the thread gets it; but the thread did not
            # sleep. State D: it waits for a disk or for memory.
            if both <= {b"R", b"D"} and (both != {b"R"} or was[3] == slept):
                share = 1000
            most = max(most, min(share, 1000))
        return (b"R" if most >= 1 else b"S"), most


class _Server:
    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._line = _socket.socket(fileno=_LINE)
        self._sockets: dict[int, _socket.socket] = {}
        self._tokens: dict[bytes, bytes] = {}
        self._looker = Looker(parent)
        self._waiting: dict[tuple[int, tuple[object, ...], bytes], bytes] = {}
        self._poll = select.poll()
        self._poll.register(_LINE, select.POLLIN)
        self._handle = -1
        try:
            self._handle = os.pidfd_open(parent)
            self._poll.register(self._handle, select.POLLIN)
        except (AttributeError, OSError):  # before Linux 5.3: polled every second
            self._handle = -1

    def run(self) -> None:
        before: Threads | None = None
        since = 0.0
        while os.getppid() == self._parent:
            if self._waiting and not since:
                before, since = self._looker.threads(), time.monotonic()
            timeout = None if self._handle >= 0 else _PARENT
            if since:
                timeout = max(0.0, since + _WINDOW - time.monotonic())
            for number, _ in self._poll.poll(None if timeout is None else timeout * 1000):
                if number == self._handle or (number == _LINE and not self._hear()):
                    return
                if number in self._sockets:
                    self._asked(number)
            now = time.monotonic()
            if since and now >= since + _WINDOW:
                self._answer(*Looker.compare(before, self._looker.threads(), now - since))
                since = 0.0

    def _hear(self) -> bool:
        data, ancillary, _, _ = self._line.recvmsg(512, _socket.CMSG_SPACE(4))
        if not data:
            return False
        kind, rest = data[:1], data[1:]
        for _, _, given in ancillary:
            number = int.from_bytes(given[:4], sys.byteorder)
            os.set_blocking(number, False)
            self._sockets[number] = _socket.socket(fileno=number)
            self._poll.register(number, select.POLLIN)
        if kind == b"+":
            self._tokens[blake2b(rest, digest_size=8).digest()] = rest
        elif kind == b"-":
            self._tokens.pop(blake2b(rest, digest_size=8).digest(), None)
        elif kind == b"x":
            host, port = rest.decode().split()
            for number, each in tuple(self._sockets.items()):
                if each.getsockname()[:2] == (host, int(port)):
                    self._poll.unregister(number)
                    self._sockets.pop(number).close()
        return True

    def _asked(self, number: int) -> None:
        for _ in range(_MOST):
            try:
                data, sender = self._sockets[number].recvfrom(64)
            except OSError:
                return
            if len(data) != 44 or data[:4] != _ASKED or len(self._waiting) >= _MOST:
                continue
            token = self._tokens.get(data[4:12])
            nonce, proof = data[12:28], data[28:44]
            if token is not None and blake2b(b"q" + nonce, key=token, digest_size=16).digest() == proof:
                self._waiting[number, sender, nonce] = token

    def _answer(self, state: bytes, share: int) -> None:
        said = state + share.to_bytes(2, "big")
        for (number, sender, nonce), token in self._waiting.items():
            proof = blake2b(b"a" + nonce + said, key=token, digest_size=16).digest()
            if number in self._sockets:
                try:
                    self._sockets[number].sendto(_ANSWER + nonce + said + proof, sender)
                except OSError:  # no route: the peer asks again
                    continue
        self._waiting.clear()


def _read(path: bytes) -> bytes:
    number = os.open(path, os.O_RDONLY)
    try:
        return os.read(number, 4096)
    finally:
        os.close(number)


def main() -> None:
    """Answer until the process that started this one ends, or closes descriptor 3."""
    os.closerange(_LINE + 1, 1 << 16)  # inherited descriptors would stay open after their owner's end
    _Server(os.getppid()).run()  # if the parent ended already, descriptor 3 is closed


if __name__ == "__main__":
    main()
