"""Client of the orphan reaper, in the launcher: starts the program and reports each worker to it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from multiworld.logs.source import logger
from multiworld.run.workers.orphan_reaper import start_time
from multiworld.settings import environment_with

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["START", "ReaperClient"]

START = "M8D_START"
"""Environment variable by which the orphan reaper finds a worker that the launcher started in its last
moment."""

_PROGRAM = Path(__file__).with_name("orphan_reaper.py")
_AGAIN = 1.0  # seconds between two starts
_log = logger(__name__)


class ReaperClient:
    """Ensures that no worker outlives the launcher, however the launcher ends.

    Args:
        grace: seconds that workers have between SIGTERM and SIGKILL.
        clock: monotonic seconds.
        keys: path of a folder of files that is removed after the workers; "": none.
        patience: seconds without `alive` after which the reaper ends the workers; infinity: it does not.
    """

    def __init__(
        self,
        grace: float,
        clock: Callable[[], float],
        keys: str = "",
        patience: float = float("inf"),
    ) -> None:
        self._grace = grace
        self._keys = keys
        self._clock = clock
        self._patience = patience
        self._lock = threading.Lock()  # guards the pipe, which other threads write to as well
        self._renewed = 0
        self._heard = b""
        self._run = uuid.uuid4().hex
        self._starts = 0
        self._starting: set[str] = set()
        self._workers: dict[int, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = float("-inf")
        self._exitcode = 0  # of the last one that has ended
        self._lasted = False  # a second, as far as was seen
        self._told = False  # that it ends sooner
        self._start()

    @property
    def pid(self) -> int | None:
        """Pid of the orphan reaper; None while it does not run."""
        return None if self._process is None else self._process.pid

    def fileno(self) -> int | None:
        """Return a descriptor that is readable when the reaper has died; None while it does not run."""
        return (
            None if self._process is None or self._process.stdout is None else self._process.stdout.fileno()
        )

    def _start(self) -> None:
        self._started_at = self._clock()
        self._process = subprocess.Popen(
            # By its bare name, and the folder in hexadecimal: a `pkill -f multiworld` or `-f m8d-run` must
            # miss it, so that it ends the workers of a killed launcher.
            [
                sys.executable, "-I", "-S", _PROGRAM.name, str(self._grace), os.fsencode(self._keys).hex(),
                str(self._patience),
            ],
            cwd=_PROGRAM.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            # The one variable that the interpreter itself may need.
            start_new_session=True, bufsize=0, env=environment_with("LD_LIBRARY_PATH"),
        )  # fmt: skip
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                os.set_blocking(stream.fileno(), False)
        renewed = [f"renewed {self._renewed}"] if self._renewed else []
        self._say(*renewed, *(f"starting {token}" for token in self._starting), *self._workers.values())

    def _say(self, *lines: str) -> None:
        with self._lock:
            if self._process is None or self._process.stdin is None:
                return
            data = "".join(line + "\n" for line in lines).encode()
            try:
                heard = os.write(self._process.stdin.fileno(), data) == len(data)
            except BlockingIOError:
                heard = False
            except OSError:
                return  # it has died: check() starts another one, which gets the full state
            if not heard:
                self._process.kill()  # it does not read: check() starts another one

    def token(self) -> str:
        """Announce a start; return the token that the process gets in its environment as `START`."""
        self._starts += 1
        token = f"{self._run}.{self._starts}"
        self._starting.add(token)
        self._say(f"starting {token}")
        return token

    def not_started(self, token: str) -> None:
        """Take `token` back: there is no process with it."""
        self._starting.discard(token)
        self._say(f"unstarted {token}")

    def started(self, token: str, pid: int, *, leads: bool) -> None:
        """Report a process that runs.

        Args:
            token: of `token`.
            pid: of the process.
            leads: whether it leads its process group: then signals go to the whole group.
        """
        self._starting.discard(token)
        line = f"started {token} {pid} {start_time(pid)} {int(leads)}"
        self._workers[pid] = line
        self._say(line)

    def gone(self, pid: int) -> None:
        """Report that a process ended: its pid may be another's soon."""
        if self._workers.pop(pid, None) is not None:
            self._say(f"gone {pid}")

    def alive(self) -> None:
        """Show that this launcher does not stand still. From any thread, at least every second."""
        self._say("alive")

    def seatless(self) -> None:
        """Have the workers ended, which the agent is late with. From any thread."""
        self._say("seatless")

    def free(self) -> None:
        """From now on this launcher may stand still: the run ends for all nodes. From any thread."""
        if self._patience != float("inf"):
            self._patience = float("inf")
            self._say("free")

    def ended_workers(self) -> float | None:
        """Tell whether the reaper has ended the workers since the last `renew`. It says so once.

        It is known before any of them has ended.

        Returns:
            Seconds for which this launcher had stood still at least, 0 after `seatless`; None: it has not.
        """
        self._hear(self._process)
        *lines, self._heard = self._heard.split(b"\n")
        found = None
        for line in lines:
            _, number, seconds = line.split()
            if int(number) == self._renewed:  # else it speaks of workers that were ended anyway
                found = float(seconds)
        return found

    def _hear(self, process: subprocess.Popen[bytes] | None) -> None:
        if process is not None and process.stdout is not None:
            with suppress(BlockingIOError):
                self._heard += os.read(process.stdout.fileno(), 4096)

    def renew(self) -> None:
        """All workers have ended: those that are started from now on may run."""
        self._renewed += 1
        self._say(f"renewed {self._renewed}")

    def check(self) -> str:
        """Start the orphan reaper again if it died, at most once a second.

        Returns:
            What people have to know of it; "": nothing new.
        """
        process, now = self._process, self._clock()
        if process is not None and process.poll() is not None:
            self._exitcode = int(process.returncode)
            self._drop()
        elif process is not None and now >= self._started_at + _AGAIN:
            self._lasted, self._told = True, False
        if self._process is not None or now < self._started_at + _AGAIN:
            return ""
        try:
            self._start()
        except OSError as error:  # no process or descriptor is left, perhaps for a moment
            _log.warning("the program that ends orphaned workers could not be started again: %s", error)
            return ""
        how = f"(exit code {self._exitcode})"
        if self._lasted:
            self._lasted = False
            return f"the program that ends orphaned workers had died {how} and was started again"
        if self._told:
            return ""
        self._told = True
        return (
            f"the program that ends orphaned workers ended soon after its start {how} and is started again: "
            "as long as it does not stay, workers outlive a launcher that is killed"
        )

    def close(self) -> None:
        """End the orphan reaper. Workers that a signal has cut off from the launcher it ends first."""
        if self._process is None:
            return
        if self._starting or self._workers:
            self._drop(kill=False)  # it does what it does when the launcher was killed
            return
        self._say("bye")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)
        self._drop()

    def _drop(self, *, kill: bool = True) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        if kill and process.poll() is None:
            process.kill()
            process.wait(10.0)
        self._hear(process)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
