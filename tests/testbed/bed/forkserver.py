"""A process with torch imported and the double preloaded; every rank is forked from it, in milliseconds.

``python -m bed.forkserver FD SECONDS``, FD being a SOCK_SEQPACKET socket. It sends one message when it is ready
(or why it is not) and then takes requests: a JSON object, and with it one socket for reports and one for each rank.
It tells a request's report socket the pids, and later how each rank ended. When the control socket closes, or a
report socket does, the ranks behind it are killed: nothing outlives the test.

Nothing here starts a thread or touches CUDA, as neither survives a fork.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib.util
import json
import os
import pkgutil
import re
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bed.control import library_info
from bed.errors import BedError
from bed.lines import Wire
from bed.rank import Rank, run_program

__all__ = ["MOST_FDS", "REQUEST_LIMIT", "SHOW_STACKS", "cuda_in", "mismatch"]

REQUEST_LIMIT = 1 << 17  # bytes of a request
MOST_FDS = 250  # the kernel passes 253 at once
SHOW_STACKS = signal.SIGUSR2  # a rank that gets it writes where its threads are
_PR_SET_PDEATHSIG = 1
_NOT_LOADED = ("multiworld.__main__", "multiworld.cli", "multiworld.run", "multiworld.shim")
"""Of multiworld's modules: programs, and what tests load themselves, to see what it does then."""


def cuda_in(version_py: str) -> str:
    """Return the CUDA version that torch/version.py names, "" for a build without."""
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", version_py, re.MULTILINE)
    return found[1] if found else ""


def mismatch(cuda: str, info: dict[str, Any] | None, *, library: str) -> BedError | None:
    """Return what keeps a build of torch and a library apart, None if they fit.

    Args:
        cuda: of the build, "" for none.
        info: what the library says of itself; None: it is not loaded.
        library: the path that should be preloaded, "" for none.
    """
    if not library:
        return None
    if info is None:
        return BedError(
            f"{library} could not be preloaded",
            rule="it is a library for this machine that the loader accepts",
            next_step="Build it anew: python -m bed.build PYTHON",
        )
    if not cuda:
        return BedError(
            "this interpreter's torch is built without CUDA",
            rule="the test bed is for official CUDA builds",
            next_step="Name an interpreter that has one",
        )
    major = info["cuda"] // 1000
    if cuda.partition(".")[0] != str(major):
        return BedError(
            f"{library} is built for CUDA {major}, this torch for CUDA {cuda}",
            rule="the library and torch have the same CUDA major version",
            next_step="Build a library for this interpreter: python -m bed.build PYTHON",
        )
    return None


def prepare(library: str) -> dict[str, Any]:
    """Import torch and return what the launcher wants to know.

    Raises:
        BedError: this process cannot serve ranks.
    """
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        raise BedError(
            f"{sys.executable} has no torch",
            rule="ranks run in an interpreter that has it",
            next_step="Name another",
        )
    info = library_info()
    version_py = Path(found.submodule_search_locations[0], "version.py")
    if trouble := mismatch(cuda_in(version_py.read_text(encoding="utf-8")), info, library=library):
        raise trouble
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as exc:
        raise BedError(
            f"torch cannot be imported: {exc}", rule=f"it can with {library or 'nothing'} preloaded"
        ) from exc
    if library and not (dist.is_available() and dist.is_nccl_available()):
        raise BedError(
            f"torch {torch.__version__} has no NCCL",
            rule="the test bed is about ProcessGroupNCCL",
            next_step="Name an interpreter with an official CUDA build",
        )
    load_runtime()
    threads = len([*Path("/proc/self/task").iterdir()])
    if threads > 1:
        raise BedError(
            f"importing torch left {threads} threads",
            rule="ranks are forked, so there may be one",
            next_step="Look in the fork server's stderr",
        )
    return {"ready": True, "torch": torch.__version__, "cuda": torch.version.cuda or "", "info": info}


def load_runtime() -> None:
    """Import multiworld's modules, which each rank of a world would else do anew: 0.3 s of its processor time."""
    import multiworld

    for module in pkgutil.walk_packages(multiworld.__path__, "multiworld.", onerror=lambda _: None):
        if not module.name.startswith(_NOT_LOADED):
            with suppress(Exception):  # a rank that needs it says what it lacks
                importlib.import_module(module.name)


@dataclass
class _Crew:
    """The ranks of one request."""

    report: socket.socket
    pids: dict[int, int] = field(default_factory=dict)  # pid: rank
    abandoned: bool = False

    def tell(self, **message: Any) -> None:
        if not self.abandoned:
            with suppress(OSError):  # the test is gone: its ranks are killed when its socket is looked at
                self.report.sendall(json.dumps(message).encode() + b"\n")

    def abandon(self) -> None:
        self.abandoned = True
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        self.report.close()


class _Server:
    """The loop. In a forked rank `serve` returns what the rank has to do; in the server None, at its end."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._crews: list[_Crew] = []
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)

    def serve(self) -> tuple[dict[str, Any], socket.socket] | None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        while True:
            ready = self._wait()
            if self._woken.fileno() in ready:
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
                self._reap(os.WNOHANG)
            for crew in self._crews:
                if not crew.abandoned and crew.report.fileno() in ready:  # it never speaks: this is its end
                    crew.abandon()
            self._crews = [crew for crew in self._crews if crew.pids or not crew.abandoned]
            if self._control.fileno() not in ready:
                continue
            data, fds, _, _ = socket.recv_fds(self._control, REQUEST_LIMIT, MOST_FDS + 1)
            if not data:
                for crew in self._crews:
                    crew.abandon()
                self._reap(0)
                return None
            if (mine := self._start(json.loads(data), [socket.socket(fileno=fd) for fd in fds])) is not None:
                return mine

    def _wait(self) -> set[int]:
        poller = select.poll()
        for each in (
            self._control,
            self._woken,
            *(crew.report for crew in self._crews if not crew.abandoned),
        ):
            poller.register(each, select.POLLIN)
        return {fd for fd, _ in poller.poll()}

    def _start(self, asked: dict[str, Any], sockets: list[socket.socket]):
        report, *channels = sockets
        crew = _Crew(report)
        for mine, channel in zip(asked["ranks"], channels, strict=True):
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for other in (self._control, self._woken, self._wake, report, *channels):
                    if other is not channel:
                        other.close()
                for old in self._crews:
                    old.report.close()
                return {**asked, **mine}, channel
            crew.pids[pid] = mine["rank"]
        for channel in channels:
            channel.close()
        self._crews.append(crew)
        crew.tell(pids={rank: pid for pid, rank in crew.pids.items()})
        return None

    def _reap(self, flags: int) -> None:
        while any(crew.pids for crew in self._crews):
            pid, status = os.waitpid(-1, flags)
            if pid == 0:
                return
            now = time.monotonic()
            for crew in self._crews:
                if (rank := crew.pids.pop(pid, None)) is not None:
                    crew.tell(exit=rank, code=os.waitstatus_to_exitcode(status), at=now)


def be_rank(spec: dict[str, Any], channel: socket.socket, server: int) -> None:
    """Become a rank: signals, output and environment first, then its program. Does not return."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != server:
        os._exit(1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    out = os.open(spec["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, number in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(fd, number)
    os.close(nothing)
    os.close(out)
    for name, value in spec["env"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    rank = Rank(Wire(channel), spec["rank"], spec["world_size"], spec["config"], spec["stores"])
    run_program(spec["program"], rank)


def main() -> None:
    """Serve, or, in a fork, be a rank."""
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.alarm(int(sys.argv[2]))  # an import that hangs must not outlive a launcher that was killed
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    library = os.environ.get("LD_PRELOAD", "")
    try:
        ready = prepare(library)
    except BedError as exc:
        control.send(json.dumps({"value": exc.value, "rule": exc.rule, "next_step": exc.next_step}).encode())
        return
    signal.alarm(0)
    faulthandler.enable()
    faulthandler.register(SHOW_STACKS)
    control.send(json.dumps(ready).encode())
    gc.collect()
    gc.freeze()
    server = os.getpid()
    if (mine := _Server(control).serve()) is not None:
        be_rank(*mine, server)


if __name__ == "__main__":
    main()
