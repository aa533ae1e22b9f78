"""The paper's throughput on NCCL: `python -m benchmarks.paper.nccl`, and a check of `nox -s gpu`.

torch's single world beside a world for each sender, on this interpreter's torch and this machine's GPUs, one
for each process. 0: it ran. 1: it was not run, and why is said. 2: it failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figures.figure import Figure, to_json
from benchmarks.figures.machine import describe
from benchmarks.figures.records import OUT
from benchmarks.figures.sizes import KB, MB, parse_size, size_name
from benchmarks.figures.table import measure as words
from benchmarks.measuring.ranks import RankError
from benchmarks.measuring.rounds import interleaved
from benchmarks.paper.layout import MULTI, PLAIN, SAME, SENDERS, SINGLE, WORLD, worlds_of
from benchmarks.paper.part import messages_for
from benchmarks.paper.program import PACKAGES, Program
from benchmarks.paper.told import throughput_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SIZES = (4 * KB, 40 * KB, 400 * KB, 4 * MB, 40 * MB)
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
"""For two processes on one GPU, which NCCL lets through when it takes them for processes of two hosts."""
RAN, NOT_RUN, FAILED = 0, 1, 2
CELLS = [(PLAIN, SINGLE), (PLAIN, MULTI), (SAME, SINGLE), (SAME, MULTI), (WORLD, SINGLE), (WORLD, MULTI)]


def gpus_here() -> tuple[int, str]:
    """How many GPUs this torch sees, and why none."""
    try:
        import torch  # noqa: PLC0415  (a driver without torch says so)
    except ImportError as error:
        return 0, f"{sys.executable} has no torch ({error})"
    if not torch.version.cuda:
        return 0, f"torch {torch.__version__} is a build without CUDA"
    found = torch.cuda.device_count()
    return found, "" if found else f"torch {torch.__version__} sees no GPU"


def senders_for(gpus: int) -> int:
    """A GPU for the leader and one for each sender; two processes share a single one. Pure."""
    return max(1, min(SENDERS, gpus - 1))


def figures(senders: int, sizes: Sequence[int], rounds: int, **how: Any) -> Iterator[Figure]:
    """Measure, with 1 sender and up to as many as that.

    Args:
        senders: at most.
        sizes: of messages, in bytes.
        rounds: of each rate.
        how: "python", "env" and "hosts" of `Program`.
    """
    worlds = worlds_of(senders, processes=False)
    with contextlib.ExitStack() as stack:
        programs = {
            package: stack.enter_context(
                Program(package, None, senders, worlds=worlds, backend="nccl", **how)
            )
            for package in (PLAIN, SAME)
        }

        for count in range(1, senders + 1):
            for size in sizes:

                def rate(cell: tuple[str, str], count: int = count, size: int = size) -> float:
                    form, topology = cell
                    return programs[PACKAGES[form]].rate(form, topology, count, size, messages_for(size))

                found = interleaved(CELLS, rounds, rate, warm_up=1)
                yield from throughput_of(count, size, found)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it, print the figures, and keep them in a file; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper.nccl", description=__doc__)
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=[*SIZES], metavar="SIZE")
    parser.add_argument("--rounds", type=int, default=7, help="of each rate (7)")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="where the JSON goes")
    args = parser.parse_args(argv)
    gpus, why = gpus_here()
    if why:
        print(f"The paper's throughput on NCCL: not run: {why}")
        return NOT_RUN
    found = []
    print(f"The paper's throughput on NCCL: {gpus} GPUs, {', '.join(size_name(size) for size in args.sizes)}")
    try:
        shared = {"env": SOCKETS, "hosts": True} if gpus == 1 else {}
        for figure in figures(senders_for(gpus), args.sizes, args.rounds, **shared):
            found.append(figure)
            print(f"{figure.name}: {words(figure.absolute or figure.value, 'MB/s')}", flush=True)
    except RankError as error:
        print(f"failed: {error}")
        return FAILED
    when = datetime.now(timezone.utc).isoformat(timespec="seconds")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"paper-nccl-{when[:19].replace(':', '')}.json"
    told = {"when": when, "machine": describe(), "gpus": gpus, "figures": [to_json(each) for each in found]}
    path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(path)
    return RAN


if __name__ == "__main__":
    sys.exit(main())
