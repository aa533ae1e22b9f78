"""What the reproducers share: forked ranks, a pipe to each, a store that outlives them, and a deadline.

`one_file.py` puts this text into a reproducer, so that one file can be sent.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

SOUND, DEFECT, UNTOLD = 0, 1, 2
FAILED = 3
"""Exit code of a rank that could not do what it should show."""
FAULT_C = ""  # one_file.py puts the text of fault.c here
PATIENCE = 90.0
"""Seconds that anything may take which is not what a reproducer measures."""

ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # CleanUpOnly
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
    # No flight recorder: before the watchdog does anything about an error it resolves the stack that was recorded, 2.4 s
    # of processor time, which a busy machine makes longer than a heartbeat.
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
    # A killed peer is noticed where the transport is sockets; several ranks may share one GPU.
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
}


class Rank:
    """One rank, in its own process."""

    def __init__(self, number: int, size: int, port: int, backend: str, pipe: Any) -> None:
        self.number, self.size, self.backend = number, size, backend
        self._port, self._pipe = port, pipe

    def init(self, members: tuple[int, ...] = (), *, prefix: str = "world", seconds: float = 600.0) -> None:
        """Make the default group of some of the ranks (default: all)."""
        members = members or tuple(range(self.size))
        place = members.index(self.number)
        torch.cuda.set_device(place % torch.cuda.device_count())
        store = dist.TCPStore("127.0.0.1", self._port, is_master=False, timeout=timedelta(seconds=PATIENCE))
        dist.init_process_group(
            self.backend,
            store=dist.PrefixStore(prefix, store),
            rank=place,
            world_size=len(members),
            timeout=timedelta(seconds=seconds),
        )
        self.sum()  # makes the communicator

    def ones(self) -> torch.Tensor:
        """A tensor that no sum over two ranks leaves as it is."""
        return torch.ones(2).to("cuda")

    def sum(self, group: Any = None) -> float:
        """Sum over the ranks, and look at the result."""
        tensor = self.ones()
        dist.all_reduce(tensor, group=group)
        return tensor.cpu()[0].item()

    def tell(self, name: str, value: Any = None) -> None:
        """Tell the parent."""
        self._pipe.send((name, value))

    def stay(self) -> None:
        """Wait to be killed."""
        self.tell("ready")
        time.sleep(3600)


class Ranks:
    """The parent's side. It never uses the GPU, so that it may fork."""

    def __init__(
        self, program: Callable[[Rank], None], size: int, backend: str, env: dict[str, str] | None = None
    ) -> None:
        self._dumps = tempfile.TemporaryDirectory()
        wanted = {
            **ENVIRONMENT,
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{self._dumps.name}/dump_",
            **(env or {}),
        }
        for name, value in wanted.items():
            os.environ[name] = value
        self._pipes, self._processes = [], []
        for number in range(size):
            ours, theirs = mp.Pipe()
            process = mp.get_context("fork").Process(
                target=_in_rank, args=(program, number, size, backend, theirs), daemon=True
            )
            process.start()
            theirs.close()  # so that a rank's end is seen here
            self._pipes.append(ours)
            self._processes.append(process)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for pipe in self._pipes:
            pipe.send(self._store.port)

    def __enter__(self) -> Ranks:  # noqa: PYI034 -- typing.Self is not in Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._dumps.cleanup()

    def hear(self, rank: int, name: str, seconds: float = PATIENCE) -> Any:
        """Wait until a rank tells something, and return it.

        Raises:
            TimeoutError: it did not.
            EOFError: the rank ended.
        """
        until = time.monotonic() + seconds
        while self._pipes[rank].poll(max(0.0, until - time.monotonic())):
            told, value = self._pipes[rank].recv()
            if told == name:
                return value
        raise TimeoutError(f"rank {rank} did not tell {name!r} in {seconds:g} s")

    def lose(self, rank: int, *, when_ready: tuple[int, ...]) -> None:
        """Kill a rank, once it and those others are ready."""
        for each in (*when_ready, rank):
            self.hear(each, "ready")
        time.sleep(0.5)  # the others enter their calls
        self._processes[rank].kill()

    def fate_of(self, rank: int, seconds: float) -> tuple[bool, str]:
        """Whether a rank has ended within that time, and how: a signal's name or an exit code.

        Raises:
            EOFError: it could not do what it should show.
        """
        process, began = self._processes[rank], time.monotonic()
        process.join(seconds)
        code = process.exitcode
        if code is None:
            return False, f"lives after {seconds:g} s"
        if code == FAILED:
            raise EOFError(f"rank {rank} failed by itself: see its traceback")
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return True, f"was ended by {how} after {time.monotonic() - began:.1f} s"


def _in_rank(program: Callable[[Rank], None], number: int, size: int, backend: str, pipe: Any) -> None:
    code = FAILED
    try:
        program(Rank(number, size, pipe.recv(), backend, pipe))
        code = 0
    except BaseException:  # noqa: BLE001 -- shown
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # without destructors: they are not what is looked at


def attempt(call: Callable[[], Any]) -> str:
    """What a call returned or raised, in one line."""
    try:
        return f"returned {call()}"
    except Exception as exc:  # noqa: BLE001 -- whatever it is, is what is looked at
        return f"raised {type(exc).__name__}: {next(iter(str(exc).splitlines()), '')}"


def with_faults() -> None:
    """Compile fault.c and start this program again with it preloaded. Returns in that second life."""
    if aborts_begun() is not None:
        return
    source = FAULT_C or Path(__file__).with_name("fault.c").read_text()
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/fault.so"
        command = [os.environ.get("CC", "cc"), "-x", "c", "-", "-shared", "-fPIC", "-o", library, "-ldl"]
        try:
            subprocess.run(command, input=source.encode(), check=True)
        except (OSError, subprocess.CalledProcessError) as exc:
            sys.stdout.write(f"cannot tell: fault.c is not compiled: {exc}\n")
            sys.exit(UNTOLD)
        # The faults stand before whatever is preloaded already.
        env = {**os.environ, "LD_PRELOAD": f"{library} {os.environ.get('LD_PRELOAD', '')}"}
        code = subprocess.run([sys.executable, *sys.argv], env=env, check=False).returncode
    sys.exit(code)


def aborts_begun() -> int | None:
    """How often ncclCommAbort was called in this process; None without fault.c."""
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(None), "fault_aborts").value
    except ValueError:
        return None


def backend_of(text: str) -> str:
    """Read the command line of a reproducer."""
    parser = argparse.ArgumentParser(
        description=text, epilog="Exit code: 0 torch is sound, 1 the defect shows, 2 cannot tell."
    )
    parser.add_argument("--backend", default="nccl", help="nccl (default), nccl2, nccl-legacy, nccl-lazy")
    return parser.parse_args().backend


def judge(look: Callable[[], tuple[bool, str]]) -> None:
    """End the program with one line and the exit code that says it all."""
    try:
        shown, text = look()
        code = DEFECT if shown else SOUND
    except (TimeoutError, EOFError, OSError) as exc:
        code, text = UNTOLD, f"{exc}" or "a rank ended early"
    sys.stdout.write(f"torch {torch.__version__}: {('sound', 'DEFECT', 'cannot tell')[code]}: {text}\n")
    sys.exit(code)
