"""The contrast, without multiworld: plain torch.distributed, one world. One process dies, and everyone stops.

    python examples/single_world.py --worldsize 3
    python examples/single_world.py --worldsize 3 --multihost --addr 10.0.0.1 --rank 0    (and 1, 2: one each)

Left alone, rank 0 receives a number from each of the others every second, and after a minute (--count 60) all end with exit
code 0. End one of the processes with kill -9, and the others stop with an error; it cannot be started again and taken
back, as in multiworld_asyncio.py: torch's group is over, and the whole program has to start anew.
"""

from __future__ import annotations

import _ctrl_c  # first: Ctrl-C is quiet from here on

import argparse
import datetime as dt
import os
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist


def say(line: str) -> None:
    """Print a line in one write: print() makes two where PYTHONUNBUFFERED is set, and the processes' lines mix."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def run(args: argparse.Namespace, init_method: str) -> int:
    """Rank 0 receives from each of the others in turn."""
    if args.nccl_async_error_handle_cleanup:
        # "Clean up only": NCCL's watchdog shall not end the process. It must be set before the group is made.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
    device = torch.device(f"cuda:{args.rank}" if args.backend.startswith("nccl") else "cpu")
    dist.init_process_group(
        args.backend, init_method=init_method, rank=args.rank, world_size=args.worldsize,
        timeout=dt.timedelta(seconds=60),
    )  # fmt: skip
    say(f"rank {args.rank} of {args.worldsize}, pid {os.getpid()}")
    tensor = torch.zeros(1, device=device)
    try:
        for number in range(args.count):
            if args.rank == 0:
                for source in range(1, args.worldsize):
                    dist.recv(tensor, source)
                    say(f"rank 0 received {tensor.item():g} from rank {source}")
            else:
                dist.send(tensor.fill_(number), 0)
                time.sleep(args.pause)
        dist.barrier()
    except RuntimeError as error:
        # Nobody can say which of its members a group lost, or go on without it: the program is over.
        say(f"rank {args.rank} stops: {str(error).splitlines()[0]}")
        return 1
    dist.destroy_process_group()
    return 0


def run_all(args: argparse.Namespace) -> int:
    """Start every rank on this host."""
    with tempfile.TemporaryDirectory() as folder:
        common = [sys.executable, sys.argv[0], *sys.argv[1:], "--multihost", "--file", f"{folder}/store"]
        with _ctrl_c.kept_back():
            processes = [subprocess.Popen([*common, "--rank", str(rank)]) for rank in range(args.worldsize)]
        _ctrl_c.raises()
        try:
            codes = [process.wait() for process in processes]
        except KeyboardInterrupt:
            return 130
        finally:
            with _ctrl_c.kept_back():
                for process in processes:
                    process.kill()
                for process in processes:
                    process.wait()
            _ctrl_c.ends_at_once()
    say(f"exit codes: {codes}")
    return max(map(abs, codes))


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--worldsize", type=int, default=2)
    parser.add_argument(
        "--multihost", action="store_true", help="be one rank; else all ranks start on this host"
    )
    parser.add_argument("--addr", default="127.0.0.1", help="of rank 0")
    parser.add_argument("--port", type=int, default=29500)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--nccl_async_error_handle_cleanup", action="store_true")
    parser.add_argument("--count", type=int, default=60, help="how many tensors each rank sends")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between them")
    parser.add_argument("--file", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.multihost:
        return run_all(args)
    return run(args, f"file://{args.file}" if args.file else f"tcp://{args.addr}:{args.port}")


if __name__ == "__main__":
    sys.exit(main())
