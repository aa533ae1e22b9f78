"""Classification of torch.distributed's exceptions: transport faults, or mistakes of the caller.

gloo, NCCL and TCPStore report nearly everything as RuntimeError with a text. The texts below are those of
torch 2.4 to 2.15; `tests/contract/faults/test_faults.py` provokes gloo's and TCPStore's on every version,
those of NCCL are read from ``NCCLUtils.hpp`` and ``ProcessGroupNCCL.cpp``, and provoked by
``tests/testbed/test_worlds_*.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch.distributed

dist: Any = torch.distributed  # it exports its errors without saying so to type checkers

__all__ = ["Fault", "classify"]


@dataclass(frozen=True)
class Fault:
    """A transport fault.

    Attributes:
        detail: the observation, in one line.
        timeout: whether it is a timeout.
        peer: "host:port" of the connection, where the text names it.
        rank: of the member that is the cause, where the text names exactly one.
        told: what an error of this package says, if the text is that of one: its world is over, and knows it.
    """

    detail: str
    timeout: bool = False
    peer: str | None = None
    rank: int | None = None
    told: str | None = None

    def may_be_of(self, world: str) -> bool:
        """Whether it may be of an operation in this world: an error of this package names its own."""
        told = self.told
        return told is None or told.startswith(f"{world} broken: ") or f"world {world!r}" in told


_MISTAKES = (
    # gloo: sizes or types that differ between members, and arguments it refuses. The pair may be gone too,
    # but no member is to blame for its connection.
    "enforce fail",
    "invalid argument",
    "invalid scalar type",
    "invalid tensor",
    "invalid root rank",
    "unsupported",
    "does not support",
    "not implemented",
    "mismatch",
    "must be",
    "expects ",
    "expected ",
    # NCCL: the caller's
    "ncclinvalidusage",
    "ncclinvalidargument",
    "invalid usage",
    "no backend type associated with device type",
    "tensors must",
)

_TIMEOUTS = (
    "timed out",
    "timeout",
    "time out",
    "failed to pass monitoredbarrier",
    "the store's server does not answer",
)

_TRANSPORT = (
    # gloo/transport/tcp/pair.cc, listener, loop
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection aborted",
    "broken pipe",
    "no route to host",
    "network is unreachable",
    "host is unreachable",
    "transport endpoint is not connected",
    "software caused connection abort",
    "application timeout caused pair closure",
    "socket closed",
    "socket is not connected",
    "bad file descriptor",
    "connectfullmesh failed",
    "pair is not connected",
    # NCCL
    "ncclremoteerror",
    "ncclsystemerror",
    "remote process exited or there was a network error",
    "nccl communicator was aborted",
    "communicator was aborted",
    "comm was aborted",
    "nccl communicator encountered error",
    "ncclinternalerror",
    "unhandled system error",
    "ncclunhandledcudaerror",
    "unhandled cuda error",
    "processgroupnccl::watchdog",
    "watchdog caught",
    "process group has been aborted",
    "process group is aborted",
    "cleanuponly: ",
    # nccl2, and the runtime where torch has no words
    "nccl operation failed",
    "nccl async error",
    # TCPStore
    "failed to recv, got 0 bytes",
    "connection was likely closed",
    "did the remote server shutdown",
    "the connection to the store is over",
    # ours
    "the groups of this world were aborted",
    "a part of the operations put together was posted",
)

# What C++ makes of the two, as of what the callback of a future raises (DDP's communication hooks).
_TOLD = re.compile(r"\b(?:BrokenWorldException|WorldClosedError): (.*)", re.DOTALL)
_PEER = re.compile(r"\[?((?:\d{1,3}(?:\.\d{1,3}){3})|(?:[0-9a-fA-F]*:[0-9a-fA-F:.]+))\]?:(\d{1,5})\b")
_RANKS = re.compile(
    r"(?:\branks? (?P<a>\d+) failed to pass|missing rank: (?P<b>\d+)"
    r"|remote rank:? (?P<c>\d+)|peer rank:? (?P<d>\d+))",
    re.IGNORECASE,
)
_ORIGIN = re.compile(r"^\[[^\[\]\s]+:\d+\]\s*")  # gloo's "[/pytorch/.../pair.cc:534] "


def classify(error: BaseException) -> Fault | None:
    """Return the transport fault that `error` is; None where it is anything else.

    Args:
        error: as raised by an operation, a store or the making of a group.
    """
    if not isinstance(error, (RuntimeError, OSError)) or isinstance(error, NotImplementedError):
        return None
    text = str(error)
    if (told := _TOLD.search(text)) is not None:
        return Fault(_sentence(text), told=told[1])
    low = text.lower()
    # Of torch's classes only these two suffice; every kind of NCCL error is a DistBackendError.
    network = isinstance(error, (OSError, dist.DistNetworkError, dist.DistStoreError))
    timeout = isinstance(error, TimeoutError) or any(each in low for each in _TIMEOUTS)
    transport = network or timeout or any(each in low for each in _TRANSPORT)
    if not transport or (not network and _is_mistake(low)):
        return None
    return Fault(
        detail=_sentence(text) or type(error).__name__, timeout=timeout, peer=_peer(text), rank=_rank(text)
    )


def _is_mistake(low: str) -> bool:
    """Whether the text tells of a mistake: in its first line, where no transport fault is named before it."""
    first = low.splitlines()[0] if low else ""
    mistake = min((first.find(each) for each in _MISTAKES if each in first), default=-1)
    fault = min((first.find(each) for each in (*_TRANSPORT, *_TIMEOUTS) if each in first), default=-1)
    return mistake >= 0 and (fault < 0 or mistake < fault)


def _sentence(text: str) -> str:
    line = next((each.strip() for each in text.splitlines() if each.strip()), "")
    return _ORIGIN.sub("", line)[:300]


def _peer(text: str) -> str | None:
    found = _PEER.search(text)
    if found is None:
        return None
    host, port = found.groups()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _rank(text: str) -> int | None:
    ranks = {int(each) for found in _RANKS.finditer(text) for each in found.groups() if each is not None}
    return ranks.pop() if len(ranks) == 1 else None
