"""Launchers as real processes, for tests of ``python -m multiworld.run``.

A worker's script is text; `Run` writes it to a file with `PRELUDE` in front of it. With ``tell(name, **data)`` the
script appends one JSON line to a file that the test reads (`Run.wait_told`): rank, pid, attempt and CLOCK_MONOTONIC,
which all processes share, come along. No torch is needed for that: such a script starts in 50 ms.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kits.forkedkit import Forked

ROOT = Path(__file__).parents[3]
PATIENCE = 120.0
"""Seconds. This machine is shared and noisy, and nothing here waits that long when all is well."""
_MARK = "M8D_RUNKIT"
_TOLD = "M8D_RUNKIT_TOLD"

PRELUDE = '''
import atexit as _atexit, gc as _gc, json as _json, os as _os, signal, sys, time
_atexit.register(_gc.freeze)  # else the interpreter's end goes through all that torch has loaded: 0.3 s of processor
_rank = int(_os.environ.get("RANK", -1))
_attempt = int(_os.environ.get("TORCHELASTIC_RESTART_COUNT", -1))

def tell(name, **data):
    line = _json.dumps({"name": name, "rank": _rank, "pid": _os.getpid(), "attempt": _attempt,
                        "at": time.monotonic(), **data}) + "\\n"
    fd = _os.open(_os.environ["M8D_RUNKIT_TOLD"], _os.O_WRONLY | _os.O_APPEND | _os.O_CREAT, 0o600)
    try:
        _os.write(fd, line.encode())
    finally:
        _os.close(fd)

def hold(name="go", patience=600.0):
    """Wait until the test says it with Run.say(name); ends by itself when nobody ever does."""
    until = time.monotonic() + patience
    while not _os.path.exists(_os.environ["M8D_RUNKIT_TOLD"] + "." + name):
        if time.monotonic() > until:
            raise SystemExit(99)
        time.sleep(0.02)
'''


class Told(dict[str, Any]):
    """Something a worker told; its keys are attributes as well."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Run:
    """One started launcher. Use `launched` to make one.

    Attributes:
        process: the launcher itself.
        folder: where the script, what was told, and the logs lie.
        output: its lines so far, standard output and standard error together, as (stream, line).
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        env: dict[str, str],
        cwd: str | None,
        *,
        group: bool = False,
    ) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.told_file = folder / f"told-{self.mark[:8]}"
        self.output: list[tuple[str, str]] = []
        self._changed = threading.Condition()
        environ = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
        environ |= {
            "PYTHONPATH": os.pathsep.join([str(ROOT), environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "PYTHONUNBUFFERED": "1",
            "PET_VERBOSE": "1",  # tests look at every event
            _MARK: self.mark,
            _TOLD: str(self.told_file),
            **env,
        }
        self.process = Forked(
            list(command), cwd=cwd or folder, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=group,
        )  # fmt: skip
        self._readers = [
            threading.Thread(target=self._read, args=(name, stream), daemon=True)
            for name, stream in (("out", self.process.stdout), ("err", self.process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def _read(self, name: str, stream: Any) -> None:
        for line in stream:
            with self._changed:
                self.output.append((name, line.rstrip("\n")))
                self._changed.notify_all()
        stream.close()

    # what workers told

    def told(self, name: str | None = None, **match: Any) -> list[Told]:
        """Everything told so far with that name and those values."""
        try:
            lines = self.told_file.read_text().split("\n")[:-1]  # a long one may be there in part
        except FileNotFoundError:
            return []
        records = [Told(json.loads(line)) for line in lines]
        wanted = match if name is None else {"name": name, **match}
        return [r for r in records if all(r.get(key) == value for key, value in wanted.items())]

    def wait_told(self, name: str, count: int = 1, *, timeout: float = PATIENCE, **match: Any) -> list[Told]:
        """Wait until `count` such things were told; return all of them."""
        self.wait_for(
            lambda: len(self.told(name, **match)) >= count, f"{count} x {name!r} {match}", timeout=timeout
        )
        return self.told(name, **match)

    def say(self, name: str = "go") -> None:
        """Let the scripts that ``hold(name)`` go on."""
        Path(f"{self.told_file}.{name}").touch()

    # what the launcher wrote

    def lines(self, stream: str | None = None) -> list[str]:
        return [line for which, line in list(self.output) if stream in {None, which}]

    def text(self, stream: str | None = None) -> str:
        return "\n".join(self.lines(stream))

    def wait_line(
        self, pattern: str, *, stream: str | None = None, count: int = 1, timeout: float = PATIENCE
    ) -> list[str]:
        """Wait until `count` lines match the regular expression; return them."""

        def matching() -> list[str]:
            return [line for line in self.lines(stream) if re.search(pattern, line)]

        self.wait_for(lambda: len(matching()) >= count, f"{count} x /{pattern}/", timeout=timeout)
        return matching()

    # ends

    def wait_for(self, holds: Callable[[], bool], what: str, *, timeout: float = PATIENCE) -> None:
        """Wait until `holds()`; an AssertionError with all output after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not holds():
            if time.monotonic() > deadline:
                raise AssertionError(f"not in {timeout} s: {what}\n{self.report()}")
            time.sleep(0.01)

    def report(self) -> str:
        return "\n".join([
            f"exit code {self.process.poll()}", "told:", *(str(dict(t)) for t in self.told()), "output:",
            *(f"  {which}| {line}" for which, line in list(self.output)),
        ])  # fmt: skip

    def ended(self, timeout: float = PATIENCE) -> int:
        """Wait for the launcher's end and all its output; return its exit code (negative: a signal)."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the launcher did not end in {timeout} s\n{self.report()}") from None
        for reader in self._readers:
            reader.join(5)  # a worker that lives on may hold a pipe open: its test sees it in leftovers()
        return code

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def leftovers(self, timeout: float = PATIENCE) -> list[int]:
        """Processes of this run that are still there after `timeout` seconds; [] as soon as there are none."""
        deadline = time.monotonic() + timeout
        while (found := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def alive(self) -> list[int]:
        """Pids of all living processes of this run: the launcher, and all with a mark in their environment."""
        mark = f"{_MARK}={self.mark}".encode()
        own = {self.pid} if self.process.poll() is None else set()
        return [pid for pid in living() if pid in own or mark in _environ(pid)]

    def close(self) -> None:
        """End all of it, whatever state it is in."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
        for _ in range(100):
            found = self.alive()
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not found:
                break
            time.sleep(0.05)
        self.process.wait(30)
        for reader in self._readers:
            reader.join(5)


_DROPPED = (
    "PET_", "TORCHELASTIC_", "M8D_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "OMP_NUM_THREADS", "COV_",
)  # fmt: skip


def living() -> list[int]:
    """Pids of all processes that are no zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in {"Z", "X"}:
                    found.append(int(entry.name))
    return found


def is_living(pid: int) -> bool:
    return pid in living()


def _environ(pid: int) -> list[bytes]:
    """The variables of a process. One that is in the middle of its exec has none for a moment, nor arguments."""
    deadline = time.monotonic() + _EXEC
    while True:
        try:
            found = _read(pid, "environ")
            if not found and _read(pid, "cmdline"):  # its exec is over, perhaps since a moment ago
                return _read(pid, "environ").split(b"\0")
            if found:
                return found.split(b"\0")
            Path(f"/proc/{pid}/exe").readlink()  # a thread of the kernel and a zombie have none: OSError
        except OSError:
            return []
        if time.monotonic() > deadline:
            return []
        time.sleep(0.001)


def _read(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


_EXEC = 10.0  # seconds that an exec may take on a machine that stands still


def script(folder: Path, text: str, name: str = "worker.py", *, prelude: str = PRELUDE) -> Path:
    """Write a worker's script."""
    path = folder / name
    path.write_text(prelude + text)
    return path


@contextlib.contextmanager
def launched(
    folder: Path,
    text: str | Path,
    *args: str,
    options: Sequence[str] = (),
    env: dict[str, str] | None = None,
    module: str = "multiworld.run",
    command: Sequence[str] | None = None,
    group: bool = False,
) -> Iterator[Run]:
    """Start ``python -m multiworld.run OPTIONS SCRIPT ARGS``; end everything of it in the end.

    Args:
        folder: for the script and what comes of it (`tmp_path`).
        text: of the script, or the path of one that is there.
        args: for the script.
        options: for the launcher.
        env: more variables for it and its workers.
        module: "torch.distributed.run" starts torch's own launcher with the same script.
        command: the whole command line instead; "{script}" stands for the script's path.
        group: in a session (and process group) of its own.
    """
    path = text if isinstance(text, Path) else script(folder, text)
    line = (
        [part.replace("{script}", str(path)) for part in command]
        if command is not None
        else [sys.executable, "-m", module, *options, str(path), *args]
    )
    run = Run(folder, line, env or {}, None, group=group)
    try:
        yield run
    finally:
        run.close()
