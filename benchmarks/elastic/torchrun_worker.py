"""A worker of plain torchrun: writes down when it did its first all_reduce, and goes on with them.

`torchrun ... torchrun_worker.py FOLDER`; the file FOLDER/ATTEMPT-RANK is there when all of it is.
"""

from __future__ import annotations

import time

BEGAN = time.monotonic()

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Operate until it is ended.

    Raises:
        RuntimeError: an all_reduce gave something else than the number of workers.
    """
    # A torchrun that was killed leaves no workers behind.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    active = time.monotonic()
    _operate()
    times = {"began": BEGAN, "active": active, "first": time.monotonic()}
    path = Path(sys.argv[1]) / f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}"
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"pid": os.getpid(), "times": times}), encoding="utf-8")
    part.rename(path)
    while True:
        _operate()


def _operate() -> None:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    if tensor.item() != dist.get_world_size():
        raise RuntimeError(f"all_reduce over {dist.get_world_size()} workers gave {tensor.item()}")


if __name__ == "__main__":
    main()
