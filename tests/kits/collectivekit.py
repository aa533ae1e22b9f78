"""Two members of a group, in one process, whose collectives go over connected endpoints."""

from __future__ import annotations

import contextlib
import socket

from multiworld._c10d.lane.collective_dispatch import LIMITS, GroupCollectives
from multiworld._core.operations.log import OperationLog
from multiworld._net.lane.endpoint import Endpoint

PATIENCE = 120.0  # seconds; nothing takes that long when all is well


@contextlib.contextmanager
def pair(limits=LIMITS):
    """Yield the `GroupCollectives` of both."""
    one, other = socket.socketpair()
    ends = Endpoint({1: one}), Endpoint({0: other})
    try:
        yield [
            GroupCollectives(
                end,
                0,
                range(2),
                rank,
                PATIENCE,
                carried=True,
                near=True,
                alone=True,
                log=OperationLog(rank, 2),
                limits=limits,
            )
            for rank, end in enumerate(ends)
        ]
    finally:
        for end in ends:
            end.fail(ConnectionError("the test is over"))
