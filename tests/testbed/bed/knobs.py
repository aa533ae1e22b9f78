"""The knobs and counters of the double as data: names, what a value may be, how it is written.

The library says itself which knobs and counters it has (``m8d_bed_info``); a test holds both lists together.
"""

from __future__ import annotations

from dataclasses import dataclass

from bed.errors import BedError

__all__ = ["COUNTERS", "KINDS", "KNOBS", "PREFIX", "Knob", "environment", "knob", "written"]

PREFIX = "M8D_BED_"
# The kinds of operation an enqueue error can be restricted to; the name is that of the NCCL function.
KINDS = (
    "Send", "Recv", "AllReduce", "Broadcast", "AllGather", "Reduce", "ReduceScatter", "AlltoAll", "Gather",
    "Scatter",
)  # fmt: skip


@dataclass(frozen=True)
class Knob:
    """One thing about the double that can be set.

    Attributes:
        name: as the library knows it.
        meaning: what it does, in a line.
        values: the words it takes; () for a whole number from 0 up.
        text: it takes any text.
    """

    name: str
    meaning: str
    values: tuple[str, ...] = ()
    text: bool = False


_TABLE = (
    Knob("ABORT_HANG_MS", "ncclCommAbort takes that long, or until this is changed"),
    Knob("ABORT_HANG_PHASE", "whether it hangs before or after it ends what is pending", ("before", "after")),
    Knob("ABORT_LOCK_MS", "ncclCommAbort holds the lock of CUDA calls that long, or until this is changed"),
    Knob("ABORT_RESULT", "the ncclResult_t that ncclCommAbort returns"),
    Knob(
        "ABORT_WRITES",
        "an operation that is aborted writes over its output until ncclCommAbort returns",
    ),
    Knob("AFTER_END", "what becomes of a call with a communicator that was freed", ("nccl", "die", "say")),
    Knob("DESTROY_HANG_MS", "ncclCommDestroy takes that long, or until this is changed"),
    Knob("ENQUEUE_RESULT", "the ncclResult_t that an enqueue returns"),
    Knob("ENQUEUE_FAIL_FROM", "the first enqueue that fails, counted from the setting: 1 is the next"),
    Knob("ENQUEUE_FAIL_KIND", "only operations of this kind fail", KINDS),
    Knob("GROUPEND_RESULT", "the ncclResult_t that ncclGroupEnd returns"),
    Knob("INIT_RESULT", "the ncclResult_t that making a communicator returns"),
    Knob("INIT_HANG_MS", "making a communicator takes that long, or until this is changed"),
    Knob("ASYNC_ERROR", "what ncclCommGetAsyncError reports"),
    Knob("REMOTE_RESULT", "the code used when a peer dies (6, ncclRemoteError, if not set)"),
    Knob("GRAPHS_ALIVE", "ncclCommAbort and ncclCommDestroy wait until this is 0"),
    Knob("HANG_FROM_OP", "the first launch that hangs until abort, counted from the setting: 1 is the next"),
    Knob("LAUNCH_HANG_MS", "a call that launches takes that long afterwards, or until this is changed"),
    Knob("LAZY_CONNECT", "an operation's call waits until the peers that it needs have called theirs"),
    Knob("NO_DETECT", "the death of a peer is not noticed"),
    Knob("DETECT_DELAY_MS", "the death of a peer is noticed that much later"),
    Knob("NO_THREADS", "the process can start no thread"),
    Knob("NCCL_RULES", "whose rules of a communicator's lifetime, as 22105; the header's if not set"),
    Knob("COMM", "faults only in the communicators of this id (hexadecimal)", text=True),
    Knob("NONBLOCKING_MS", "a non-blocking communicator stays in progress that long"),
    Knob("DEVICES", "how many devices there are"),
    Knob("DEVICE_ERROR", "the cudaError_t that a launch ends with (710, cudaErrorAssert, if not set)"),
    Knob(
        "DEVICE_ERROR_FROM",
        "the launch that makes the device useless, counted from the setting: 1 is the next",
    ),
    Knob("MEM_MB", "how much memory a device has"),
    Knob("KERNELS", "what becomes of a kernel that is not modelled", ("error", "ignore")),
    Knob("WARN", "the double's warnings"),
    Knob("TRACE", "every call, on stderr"),
)
KNOBS = {each.name: each for each in _TABLE}

COUNTERS = (
    "launches", "enqueues", "group_depth", "comms", "comms_made", "aborts", "streams", "events", "allocations",
    "stubs", "kernels_refused", "kernels_filled", "ops_pending", "stream_workers", "stream_workers_started",
    "busy", "freed_uses", "introduced",
)  # fmt: skip


def knob(name: str) -> Knob:
    """Return the knob of a name, with or without the environment's prefix.

    Raises:
        BedError: there is none.
    """
    plain = name.removeprefix(PREFIX)
    if plain not in KNOBS:
        raise BedError(
            f"{name} is no knob of the test bed",
            rule=f"there are {', '.join(KNOBS)}",
            next_step="Correct the name",
        )
    return KNOBS[plain]


def written(name: str, value: object) -> str:
    """Return a knob's value as the library takes it; "" (None, False, 0) is off.

    Raises:
        BedError: there is no such knob, or it does not take this value.
    """
    known = knob(name)
    if value is None or value is False or value == "":
        return ""
    text = str(int(value)) if isinstance(value, bool) else str(value)
    if known.text or text in known.values or (not known.values and text.isdecimal()):
        return text
    rule = " or ".join(known.values) if known.values else "a whole number from 0 up"
    raise BedError(
        f"{known.name} was set to {value!r}", rule=f"it takes {rule}", next_step="Correct the value"
    )


def environment(**values: object) -> dict[str, str]:
    """Return knobs as environment variables: ``environment(ABORT_HANG_MS=500)``.

    Raises:
        BedError: see `written`.
    """
    return {f"{PREFIX}{name}": written(name, value) for name, value in values.items()}
