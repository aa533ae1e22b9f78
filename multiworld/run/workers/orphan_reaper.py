"""The orphan reaper, a small program that ends all workers after the launcher was killed, or stands still.

The launcher starts it (`multiworld.run.workers.reaper_client`) with three arguments, so that it has them from
its first moment on: the seconds between SIGTERM and SIGKILL, the folder of files to remove when all workers
have ended, in hexadecimal ("": none), and the seconds that the launcher may stand still ("inf": for ever). It
writes to its standard input, a line each:

    starting TOKEN        a process whose environment has M8D_START=TOKEN is about to be started
    unstarted TOKEN       it could not be started
    started TOKEN PID START GROUP   it runs; START: field 22 of /proc/PID/stat; GROUP 1: a group leader
    gone PID              it has ended, and was waited for
    alive                 the launcher does not stand still
    seatless              the node has lost its seat, and the launcher is late with the end of its workers
    renewed N             all workers told of before have ended; those that come now are the launcher's Nth
    free                  from now on the launcher may stand still: the run ends for all nodes
    bye                   the run is over: this program ends

When the launcher dies without a goodbye, each worker that is left gets SIGTERM, and SIGKILL after the grace
period; then the run's keys are removed. Where the launcher stands still while workers run, or is late, each
worker gets SIGKILL, and so does each that is told of until the next ``renewed``; before the first of them
this program writes ``ended N SECONDS`` to its standard output (N: of the last ``renewed``, else 0; SECONDS:
for which the launcher stood still, 0 after ``seatless``). It imports nothing but the standard library and
runs without site-packages: about 10 MB, up in 20 ms.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress

__all__ = ["DeadManSwitch", "OrphanReaper", "main", "start_time"]

_LOOK_FOR_STARTING = 3.0  # seconds: longer than any fork takes to reach its exec
_GIVE_UP = 10.0  # seconds after SIGKILL in which a process ends, unless it waits for a device in the kernel
_WAIT = 1.0  # seconds; for launchers whose forked workers hold the pipe open
WAIT_SWITCHED = 0.25
"""Seconds of one wait, where the launcher must not stand still."""

_COUNTS = 2 * WAIT_SWITCHED  # seconds, at most, of a wait that took longer


class DeadManSwitch:
    """Decides whether the launcher stands still. Pure.

    It adds up what this program itself has waited for a sign of life, and of each wait at most 0.5 s: after
    a suspended machine or a frozen container, which stopped both, the launcher has time for a sign first.

    Args:
        patience: seconds without a sign of life; infinity: the launcher may stand still.

    Attributes:
        waited: seconds since the last sign.
    """

    def __init__(self, patience: float = float("inf")) -> None:
        self._patience = patience
        self.waited = 0.0

    @property
    def on(self) -> bool:
        """Whether the launcher must not stand still."""
        return self._patience != float("inf")

    @property
    def due(self) -> bool:
        """Whether the launcher stands still."""
        return self.waited >= self._patience

    def off(self) -> None:
        """From now on the launcher may stand still."""
        self._patience = float("inf")

    def wait(self, seconds: float) -> None:
        """One wait is over, in which no sign came yet."""
        self.waited += min(seconds, _COUNTS)

    def sign(self) -> None:
        """The launcher lives."""
        self.waited = 0.0


class OrphanReaper:
    """The launcher's workers, from its messages.

    Args:
        grace: seconds between SIGTERM and SIGKILL.
        keys: folder of files that end with the run; "": there is none.
        patience: seconds that the launcher may stand still while workers run.

    Attributes:
        bye: whether the launcher has ended the run itself.
        starting: tokens of processes that may have been started since.
        workers: start time of each, and whether it leads its process group, by pid.
        switch: tells whether the launcher stands still.
    """

    def __init__(self, grace: float, keys: str = "", patience: float = float("inf")) -> None:
        self._grace, self._keys = grace, keys
        self.switch = DeadManSwitch(patience)
        self._late = False
        self._renewed = 0
        self._ending_since: float | None = None
        self.bye = False
        self.starting: set[str] = set()
        self.workers: dict[int, tuple[int, bool]] = {}
        self._handles: dict[int, int] = {}
        self._rest = b""

    def hear(self, data: bytes) -> None:
        """Parse data from the pipe, and follow the lines in it."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._heard(line.decode("utf-8", "replace").split())

    def _heard(self, words: list[str]) -> None:
        match words:
            case ["starting", token]:
                self.starting.add(token)
            case ["unstarted", token]:
                self.starting.discard(token)
            case ["started", token, pid, start, group]:
                self.starting.discard(token)
                self._add(int(pid), int(start), leads=group == "1")
            case ["gone", pid]:
                self.workers.pop(int(pid), None)
                handle = self._handles.pop(int(pid), None)
                if handle is not None:
                    os.close(handle)
            case ["alive"]:
                self.switch.sign()
            case ["seatless"]:
                self._late = True
            case ["renewed", number]:
                self._renewed, self._late, self._ending_since = int(number), False, None
                self.switch.sign()
            case ["free"]:
                self.switch.off()
            case ["bye"]:
                self.bye = True
            case _:
                pass  # a message of a newer launcher

    def _add(self, pid: int, start: int, *, leads: bool) -> None:
        if pid in self.workers:
            return
        self.workers[pid] = (start, leads)
        if hasattr(os, "pidfd_open") and not leads:
            with suppress(OSError):
                self._handles[pid] = os.pidfd_open(pid)

    # while the launcher lives

    def waited(self, seconds: float) -> None:
        """This program has waited for the launcher, which may stand still where it has no workers."""
        if self.workers or self.starting:
            self.switch.wait(seconds)
        else:
            self.switch.sign()

    def judge(self) -> str:
        """Decide whether all workers end at once; return what the launcher is told first, "": nothing."""
        if self._ending_since is not None or not (self._late or self.switch.due):
            return ""
        if not (self.starting or any(map(self._lives, self.workers))):
            return ""  # none runs that could be ended: the launcher finds by itself how they ended
        self._ending_since = time.monotonic()
        return f"ended {self._renewed} {0.0 if self._late else self.switch.waited:.1f}\n"

    def kill(self) -> None:
        """After `judge` has decided so: SIGKILL to all workers, and to those that come until ``renewed``."""
        if self._ending_since is None:
            return
        if self.starting and time.monotonic() < self._ending_since + _LOOK_FOR_STARTING:
            self._find_starting()
        for pid, (start, _) in self.workers.items():
            fields = _stat(pid, dead=True)  # one that has ended keeps its number: its group is still its own
            if fields and int(fields[19]) == start:
                self._send(pid, signal.SIGKILL)

    # after the launcher's death

    def end_all(self) -> None:
        """SIGTERM to all workers, SIGKILL to those that are left after the grace period."""
        now = time.monotonic()
        told: set[int] = set()
        kill_at, search_until = now + self._grace, now + _LOOK_FOR_STARTING
        while now < kill_at + _GIVE_UP:
            if self.starting and now < search_until:
                self._find_starting()
            alive = [pid for pid in self.workers if self._lives(pid)]
            searching = bool(self.starting) and now < search_until
            if not alive and not searching:
                break
            for pid in alive:
                if now >= kill_at:
                    self._send(pid, signal.SIGKILL)
                elif pid not in told:
                    told.add(pid)
                    self._send(pid, signal.SIGTERM)
            time.sleep(0.02)
            now = time.monotonic()
        for pid, (_, leads) in self.workers.items():
            if leads and not _stat(pid) and _has_members(pid):
                with suppress(OSError):  # processes that a worker started and left behind
                    os.killpg(pid, signal.SIGKILL)

    def remove_keys(self) -> None:
        """Remove the folder of keys: no process is left that reads them."""
        if not self._keys:
            return
        with suppress(OSError):  # it is gone: another launcher of this user has removed it
            for name in os.listdir(self._keys):  # noqa: PTH208  (pathlib needs too much memory)
                os.unlink(f"{self._keys}/{name}")  # noqa: PTH108  (pathlib needs too much memory)
            os.rmdir(self._keys)  # noqa: PTH106  (pathlib needs too much memory)

    def _lives(self, pid: int) -> bool:
        return start_time(pid) == self.workers[pid][0]

    def _send(self, pid: int, number: signal.Signals) -> None:
        leads = self.workers[pid][1]
        with suppress(OSError):
            if leads:
                os.killpg(pid, number)
            elif pid in self._handles:
                # Without pidfds the kernel sends SIGINT to such a worker when its parent dies, which torch
                # asks for.
                signal.pidfd_send_signal(self._handles[pid], number)

    def _find_starting(self) -> None:
        """Find processes started in the launcher's last moment, by the token in their environment."""
        for pid in _pids():
            if pid not in self.workers:
                token = _token(pid)
                if token in self.starting:
                    stat = _stat(pid)
                    if stat:
                        self._add(pid, int(stat[19]), leads=stat[2] == str(pid))
                        self.starting.discard(token)


def _pids() -> list[int]:
    # pathlib needs as much memory as the rest of this program.
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208  (pathlib needs too much memory)


def _stat(pid: int, *, dead: bool = False) -> list[str]:
    """Fields 3 and on of /proc/PID/stat; [] for no process, or (but for `dead`) a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123  (pathlib needs too much memory)
            fields = file.read().rpartition(b")")[2].decode().split()
    except OSError:
        return []
    return [] if fields[0] in {"Z", "X"} and not dead else fields


def start_time(pid: int) -> int:
    """Return the start time of a process in clock ticks, which differs for a reused pid; -1: it is gone."""
    fields = _stat(pid)
    return int(fields[19]) if fields else -1


def _has_members(group: int) -> bool:
    return any(_stat(pid)[2:3] == [str(group)] for pid in _pids())


def _token(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123  (pathlib needs too much memory)
            entries = file.read().split(b"\0")
    except OSError:
        return ""
    found = [entry for entry in entries if entry.startswith(b"M8D_START=")]
    return found[0].partition(b"=")[2].decode("utf-8", "replace") if found else ""


def main(arguments: list[str]) -> None:
    """Listen on standard input until the launcher says goodbye or dies.

    Args:
        arguments: of the command line: grace, keys and patience, see `OrphanReaper`.
    """
    for number in signal.valid_signals():
        if number not in {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
            # A closing terminal or a service manager signals the launcher as well; only after its death is
            # there anything to do here.
            with suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    reaper = OrphanReaper(float(arguments[0]), os.fsdecode(bytes.fromhex(arguments[1])), float(arguments[2]))
    launcher = os.getppid()
    poll = select.poll()
    poll.register(0, select.POLLIN)
    while True:
        began = time.monotonic()
        heard = poll.poll(1e3 * (WAIT_SWITCHED if reaper.switch.on else _WAIT))
        reaper.waited(time.monotonic() - began)
        if heard:
            data = os.read(0, 65536)
            reaper.hear(data)
            if reaper.bye:
                return
            if not data:
                break
        if os.getppid() != launcher:
            break
        if not poll.poll(0):  # it knows all that the launcher has told
            if said := reaper.judge():
                with suppress(OSError):  # the launcher has died just now
                    os.write(1, said.encode())
            reaper.kill()
    reaper.end_all()
    reaper.remove_keys()


if __name__ == "__main__":
    main(sys.argv[1:])
