"""The program of a rank: `python -m benchmarks.measuring.rank MODULE:MAKE JSON`.

Commands come as JSON lines on standard input, answers go as JSON lines to the descriptor that JSON names (not
to standard output: libraries print there). A command is a method of what MAKE(rank, count, args) returned.
The end of the input is the end of the rank. Standard library only: the rank may run in any interpreter.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from typing import Any

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _answer(answers: int, **fields: Any) -> None:
    try:
        line = json.dumps(fields, allow_nan=False)
    except (TypeError, ValueError) as error:
        line = json.dumps({"error": f"an answer that JSON cannot hold: {error}", "traceback": ""})
    left = memoryview(line.encode() + b"\n")
    while left:
        left = left[os.write(answers, left) :]


def _failed(answers: int, error: Exception) -> None:
    _answer(answers, error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())


def _die_with(driver: int) -> None:
    """A driver that was killed leaves no ranks behind, not even one that is blocked in a call."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != driver:
        raise SystemExit(f"the driver {driver} was gone before the rank began")


def main() -> None:
    """Serve commands until the input ends."""
    made, options = sys.argv[1], json.loads(sys.argv[2])
    answers: int = options["answers"]
    _die_with(options["driver"])
    os.set_inheritable(answers, False)
    # On a timeout the driver asks for the stacks of all threads; they go to the rank's output.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    commands = os.fdopen(os.dup(0), "r", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    try:
        module, _, name = made.partition(":")
        served = getattr(importlib.import_module(module), name)(
            options["rank"], options["count"], options["args"]
        )
    except Exception as error:  # noqa: BLE001  (whatever it is, it is the answer)
        _failed(answers, error)
        return
    _answer(answers, value="ready")
    for line in commands:
        command = json.loads(line)
        try:
            value = getattr(served, command["name"])(**command["args"])
        except Exception as error:  # noqa: BLE001  (the same)
            _failed(answers, error)
        else:
            _answer(answers, value=value)
    # Not the interpreter's own end: it takes torch tenths of a second, and waits for threads that may be
    # blocked.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
