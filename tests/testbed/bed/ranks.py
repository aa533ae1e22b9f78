"""Ranks as real processes: started together, killed, stopped and released, and what they told and how they ended.

A `Launcher` holds one build's fork server. `Launcher.start` gives a `Ranks`, used by one thread at a time; several
may be in use side by side, in a thread each.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bed.crew import Event, Exit, Ranks
from bed.errors import BedError
from bed.forkserver import MOST_FDS, REQUEST_LIMIT
from bed.lines import Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Event", "Exit", "Launcher", "Ranks"]

TESTBED = Path(__file__).resolve().parents[1]
ROOT = TESTBED.parents[1]
START = 120.0  # seconds for a fork server to import torch on a busy machine (3 to 6 are usual)
FORK = 30.0  # seconds for it to fork
_OURS = ("worlds", "risks")  # programs with worlds
FREE = 10.0  # seconds for the processes of an earlier run to be gone
PERTURBED = {"MALLOC_PERTURB_": "171"}  # freed memory is overwritten at once: whoever uses it is seen to
# A library that starts threads while it is imported would make the fork server useless.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class Launcher:
    """Starts ranks of one build. A context manager.

    Args:
        python: the build's interpreter.
        library: the double for it; None for none (a machine with a GPU, gloo).
        workdir: for the ranks' output; made if it is not there. One launcher at a time may use it.
        extra_path: further folders for the ranks' ``sys.path``.
        start_timeout: seconds until torch must be imported.

    Raises:
        BedError: no such interpreter, no torch in it, another CUDA than the library's, no NCCL, or the folder is
            in use by a run that has not ended.
    """

    def __init__(
        self,
        python: Path,
        library: Path | None,
        *,
        workdir: Path,
        extra_path: tuple[Path, ...] = (),
        start_timeout: float = START,
    ) -> None:
        self.python = python
        self.library = library
        self.workdir = workdir = workdir.absolute()
        self.official = (
            False  # torch as it is released, which may do by luck what nothing of this project may
        )
        self._lock = threading.Lock()  # of the control socket
        self._store_lock = threading.Lock()  # of the process that serves stores
        self._count = 0
        self._host: Ranks | None = None
        if library is not None and not library.is_file():
            raise BedError(
                f"{library} is not there",
                rule="the library is built before ranks are started",
                next_step="Build it: python -m bed.build PYTHON",
            )
        if library is not None and {" ", ":"} & set(str(library)):
            raise BedError(
                f"{library} cannot be preloaded",
                rule="in LD_PRELOAD a name ends at a space or a colon",
                next_step="Name a cache folder without them: M8D_CACHE",
            )
        workdir.mkdir(parents=True, exist_ok=True)
        self._claim = _claim(workdir / "in-use")
        self._output = workdir / "forkserver.txt"
        try:
            self._process, self._control = self._spawn([TESTBED, ROOT, *extra_path], start_timeout)
            self.facts = self._greeting(start_timeout)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Launcher:  # noqa: PYI034 -- typing.Self is not in Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(
        self,
        program: str,
        world_size: int,
        *,
        config: dict[str, Any] | None = None,
        env: Mapping[str, str | None] | None = None,
        rank_env: Callable[[int], Mapping[str, str | None]] | None = None,
        timeout: float = 120,
        allow_refused: bool = False,
    ) -> Ranks:
        """Start ranks.

        Args:
            program: ``module:function``, the module in ``programs`` or, if it has a dot, with its whole path. The
                function is called with a `bed.rank.Rank`.
            world_size: how many.
            config: for ``rank.config``, as JSON has it. ``stores``: how many store servers (1); ``store_port``: a
                port for the first instead of a free one; ``exit="hard"``: no destructors at the end.
            env: of all ranks, set before anything else happens in them; None removes a variable.
            rank_env: of one rank, on top.
            timeout: seconds for all waits together that name no time of their own.
            allow_refused: let stubs and refused kernels pass.

        Raises:
            BedError: the fork server is gone or does not answer, the request is too long, or the port is in use.
        """
        config = dict(config or {})
        stores = self._open_stores(config.get("stores", 1), config.get("store_port", 0))
        with self._lock:
            self._count += 1
            folder = self.workdir / f"{self._count:04d}-{program.replace(':', '.')}"
        folder.mkdir(exist_ok=True)
        return self._start(
            program, world_size, folder, config=config, stores=stores, timeout=timeout, allow_refused=allow_refused,
            env=[{**(env or {}), **(rank_env(rank) if rank_env else {})} for rank in range(world_size)],
            on_close=lambda: self._close_stores(stores),
        )  # fmt: skip

    def close(self) -> None:
        """End the fork server, the stores, and whatever rank is left."""
        with self._store_lock:
            host, self._host = self._host, None
        if host is not None:
            host.close()
        if process := getattr(self, "_process", None):
            self._control.close()
            try:
                process.wait(FREE)
            except subprocess.TimeoutExpired:
                process.kill()  # its ranks go with it: they asked the kernel for that
                process.wait()
        self._claim.close()

    # --- how it is done

    def _spawn(self, path: list[Path], timeout: float) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {
            key: value for key, value in os.environ.items() if not key.startswith(("LD_PRELOAD", "PYTHON"))
        }
        env = {**PERTURBED, **env, **ONE_THREAD}
        env |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONUNBUFFERED": "1"}
        if self.library is not None:
            env["LD_PRELOAD"] = str(self.library)
        command = [self.python, "-m", "bed.forkserver", str(theirs.fileno()), str(int(timeout) + 1)]
        try:
            with theirs, self._output.open("wb") as out:
                process = subprocess.Popen(
                    command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.workdir,
                    pass_fds=(theirs.fileno(), self._claim.fileno()), start_new_session=True,
                )  # fmt: skip
        except OSError as exc:
            ours.close()
            raise BedError(
                f"{self.python} cannot be started: {exc.strerror}",
                rule="ranks run in an interpreter with torch",
                next_step="Correct the path",
            ) from exc
        return process, ours

    def _greeting(self, timeout: float) -> dict[str, Any]:
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        poller.poll(timeout * 1000)
        self._control.setblocking(False)
        try:
            said = self._control.recv(REQUEST_LIMIT)
        except BlockingIOError:
            self._process.kill()
            raise BedError(
                f"{self.python} did not import torch within {timeout:g} s", rule="it takes a few seconds",
                next_step=f"Look at {self._output}",
            ) from None  # fmt: skip
        finally:
            self._control.setblocking(True)
        if not said:
            raise self._dead("before it was ready")
        facts: dict[str, Any] = json.loads(said)
        if "ready" not in facts:
            raise BedError(**facts)
        return facts

    def _start(
        self, program: str, world_size: int, folder: Path, *, config: dict[str, Any], stores: list[int],
        env: list[dict[str, str | None]], timeout: float, on_close: Callable[[], None], allow_refused: bool,
    ) -> Ranks:  # fmt: skip
        outputs = [folder / f"rank{rank}.txt" for rank in range(world_size)]
        each = [{"rank": rank, "env": env[rank], "output": str(outputs[rank])} for rank in range(world_size)]
        request = json.dumps(
            {"program": program, "world_size": world_size, "config": config, "stores": stores, "ranks": each}
        ).encode()
        if len(request) > REQUEST_LIMIT or world_size + 1 > MOST_FDS:
            raise BedError(
                f"{world_size} ranks and a configuration of {len(request)} bytes",
                rule=f"up to {MOST_FDS - 1} ranks and {REQUEST_LIMIT} bytes",
                next_step="Put long values into a file",
            )
        pairs = [socket.socketpair() for _ in range(world_size + 1)]
        ours, theirs = [Wire(a) for a, _ in pairs], [b for _, b in pairs]
        ranks = Ranks(
            ours[1:], ours[0], outputs, deadline=time.monotonic() + timeout, allow_refused=allow_refused,
            allow_luck=self.official and not program.startswith(_OURS), on_close=on_close,
        )  # fmt: skip
        try:
            with self._lock:
                socket.send_fds(self._control, [request], [each.fileno() for each in theirs])
        except OSError as exc:
            ranks.close()
            raise self._dead("when ranks were to be started") from exc
        finally:
            for end in theirs:
                end.close()
        if not ranks.started(FORK):
            ranks.close()
            if self._process.poll() is not None:
                raise self._dead("while it started ranks")
            raise BedError(
                f"the fork server {self._process.pid} started no rank within {FORK:g} s",
                rule="forking takes milliseconds",
                next_step=f"Look at {self._output}, and whether something stopped it",
            )
        return ranks

    def _dead(self, when: str) -> BedError:
        code = self._process.wait(FREE)
        ended = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        tail = "\n".join(self._output.read_text(errors="replace").splitlines()[-15:])
        return BedError(
            f"the fork server of {self.python} ended {ended} {when}", rule="it imports torch and serves",
            next_step=f"Its last words:\n{tail}",
        )  # fmt: skip

    def _open_stores(self, count: int, port: int) -> list[int]:
        if not count:
            return []
        with self._store_lock:
            if self._host is None:
                self._host = self._start(
                    "bed.store:serve", 1, self.workdir, config={"exit": "hard"}, stores=[], env=[{}],
                    timeout=FORK, on_close=lambda: None, allow_refused=False,
                )  # fmt: skip
            asked = len(self._host.events(0, "opened")) + 1
            self._host.tell("do", open=count, port=port)
            (told,) = self._host.wait("opened", count=asked, timeout=FORK)
        if told.fields["trouble"]:
            raise BedError(
                f"a store cannot listen on port {port}: {told.fields['trouble']}", rule="the port is free",
                next_step="Leave store_port out: a free one is taken",
            )  # fmt: skip
        return told.fields["ports"]

    def _close_stores(self, ports: list[int]) -> None:
        with self._store_lock:
            if self._host is not None and ports:
                self._host.tell("do", close=ports)


def _claim(path: Path) -> Any:
    """Return the open lock of a work folder; every process of the run holds it too, so that none is overlooked.

    Raises:
        BedError: processes of an earlier run still hold it.
    """
    lock = path.open("ab")
    deadline = time.monotonic() + FREE
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            lock.close()
            holders = _holders(path)
            raise BedError(
                f"{path.parent} is in use by {', '.join(holders) or 'a process that cannot be looked at'}",
                rule="a work folder belongs to one run, and what an earlier run left has ended",
                next_step=f"End it: kill -9 {' '.join(each.split()[1] for each in holders)}".rstrip()
                + ", or name another folder",
            ) from None
        return lock


def _holders(path: Path) -> list[str]:
    """Return "process PID (its name)" for every process that has a file open."""
    wanted, found = path.resolve(), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            held = any(link.readlink() == wanted for link in (process / "fd").iterdir())
            if held:
                found.append(f"process {process.name} ({(process / 'comm').read_text().strip()})")
        except OSError:  # noqa: PERF203 -- a few hundred, once, before an error
            continue  # gone meanwhile, or somebody else's
    return found
