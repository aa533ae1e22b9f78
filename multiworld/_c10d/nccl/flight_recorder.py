"""Records of torch's Flight Recorder of this process's NCCL operations, for reports of breakages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from multiworld._c10d.nccl.compiler_import import withheld

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["recorded"]


def recorded() -> bytes:
    """Return the record of all NCCL groups of this process, in the form that torch's analyser reads.

    The recorder keeps the last operations (TORCH_NCCL_TRACE_BUFFER_SIZE) of all groups together.

    Returns:
        A pickle of torch's; empty where this build has no recorder, or it recorded nothing.
    """
    dump: Callable[[], Any] | None = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    if dump is None:
        return b""
    with withheld():
        found = bytes(dump())
    return found if b"entries" in found else b""
