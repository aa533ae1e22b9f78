"""A process of MPI: `mpirun ... python -m benchmarks.limits.mpi_rank SOCKET`.

It asks at SOCKET, a Unix socket of the driver's, what to measure, so that it waits without using a core;
MPI's own waiting takes one. The end of the connection is its end.
"""

from __future__ import annotations

import array
import json
import socket
import sys
import time
from typing import Any

from benchmarks.measuring.timing import told, undisturbed

_clock = time.perf_counter_ns


class Member:
    """One process."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._comm = mpi.COMM_WORLD
        self.rank = int(self._comm.Get_rank())

    def rounds(self, op: str, size: int, rounds: int, repeat: int, warm_up: int) -> dict[str, Any]:
        """Some rounds; as `benchmarks.operations.rank.Member.rounds` tells of one form.

        Raises:
            AssertionError: something else came out than must.
        """
        tensor = array.array("f", [self.rank + 1.0]) * (size // 4)
        call, expected = (self._sum, 3.0) if op == "all_reduce" else (self._ping, 1.0)
        call(tensor, 1)
        if {tensor[0], tensor[-1]} != {expected}:
            raise AssertionError(f"{op} left {tensor[0]}, {tensor[-1]} in rank {self.rank}, not {expected}")
        zeros = array.array("f", [0.0]) * (size // 4)  # sums stay what they are
        share = 0.5 if op == "send_recv" else 1.0
        taken = []
        with undisturbed():
            for _ in range(rounds):
                call(zeros, warm_up)
                taken.append(call(zeros, repeat))
        return {
            "rounds": [told(each, share)["p50"] for each in taken],
            "chunk": told([each for one in taken for each in one], share),
        }

    def _ping(self, tensor: array.array[float], repeat: int) -> list[int]:
        comm, buffer, first, peer = self._comm, [tensor, self._mpi.FLOAT], self.rank == 0, 1 - self.rank
        taken = [0] * repeat
        for i in range(repeat):
            began = _clock()
            if first:
                comm.Send(buffer, peer)
                comm.Recv(buffer, peer)
            else:
                comm.Recv(buffer, peer)
                comm.Send(buffer, peer)
            taken[i] = _clock() - began
        return taken

    def _sum(self, tensor: array.array[float], repeat: int) -> list[int]:
        comm, buffer, in_place = self._comm, [tensor, self._mpi.FLOAT], self._mpi.IN_PLACE
        taken = [0] * repeat
        for i in range(repeat):
            began = _clock()
            comm.Allreduce(in_place, buffer)
            taken[i] = _clock() - began
        return taken


def main() -> None:
    """Answer until the driver has gone."""
    # To load it starts MPI.
    from mpi4py import MPI  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415  (to load it starts MPI)

    member = Member(MPI)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
        stream = connection.makefile("rwb")
        library = MPI.Get_library_version().split(",")[0].strip()
        _tell(stream, {"rank": member.rank, "library": library})
        for line in stream:
            _tell(stream, member.rounds(**json.loads(line)))


def _tell(stream: Any, answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer).encode() + b"\n")
    stream.flush()


if __name__ == "__main__":
    main()
