"""A peer dies while a large message is half sent; the sender waits until its timeout."""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

SOUND, DEFECT, UNTOLD = 0, 1, 2
TIMEOUT = 12.0
SIZE = 256 << 20


def program(rank: int, port: int, results: mp.Queue[tuple[float, str]]) -> None:
    """Rank 0 sends to rank 1, which takes some of it and dies."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT))
    tensor = torch.ones(SIZE, dtype=torch.uint8)
    dist.barrier()
    if rank == 1:
        tensor.zero_()
        work = dist.irecv(tensor, 0)
        while tensor[1 << 20] == 0:  # its first megabyte is not there yet
            time.sleep(0)
        os.kill(os.getpid(), signal.SIGKILL)
        work.wait()
    began = time.monotonic()
    try:
        dist.send(tensor, 1)
        results.put((time.monotonic() - began, ""))
    except RuntimeError as error:
        results.put((time.monotonic() - began, str(error).splitlines()[0].rpartition("] ")[2]))


def main() -> int:
    """Return the exit status."""
    context = mp.get_context("spawn")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = context.Queue()
    ranks = [context.Process(target=program, args=(rank, server.port, results)) for rank in range(2)]
    for each in ranks:
        each.start()
    ranks[1].join(90)
    died = time.monotonic()
    try:
        took, text = results.get(timeout=90)
    except queue.Empty:
        for each in ranks:
            each.kill()
        sys.stdout.write(f"torch {torch.__version__}: cannot tell: rank 0 said nothing\n")
        return UNTOLD
    late = time.monotonic() - died
    for each in ranks:
        each.kill()
        each.join()
    what = f"a send of {SIZE} bytes with a timeout of {TIMEOUT:g} s"
    if not text:
        sys.stdout.write(f"torch {torch.__version__}: cannot tell: {what} was over before its peer died\n")
        return UNTOLD
    defect = late > TIMEOUT / 2
    sys.stdout.write(
        f"torch {torch.__version__}: {'DEFECT' if defect else 'sound'}: the peer died after {took - late:.1f} s; "
        f"{what} raised {late:.1f} s later: {text}\n"
    )
    return DEFECT if defect else SOUND


if __name__ == "__main__":
    sys.exit(main())
