"""The scenarios."""

from __future__ import annotations

from typing import Any

from matrix.modes import CLEAN_UP, ENDINGS, MONITOR, WAITING
from matrix.scenario import KILL, NOTHING, STOP, Fault, Scenario

__all__ = ["ENQUEUED", "GROUPS", "SCENARIOS", "SILENT", "by_id"]

LOST = "A peer is killed"
SILENT = "A failure that NCCL does not report"
ERRORS = "NCCL reports another error"
ABORT = "ncclCommAbort misbehaves"
ENQUEUE = "A call into NCCL fails"
MAKING = "A communicator cannot be made"
OTHERS = "Other worlds"
LATER = "Later: heartbeat monitor and dump"
AGAIN = "Destroyed and made anew"
GROUPS = (LOST, SILENT, ERRORS, ABORT, ENQUEUE, MAKING, OTHERS, LATER, AGAIN)

_KILLED = Fault(KILL, 1)
_HANG = 8.0
"""Seconds that an ncclCommAbort hangs: longer than the heartbeat timeout of the modes that set one."""

_SAID = {
    "wait": "the caller in wait(), then reading the result",
    "synchronize": "the caller in synchronize(), then reading the result",
    "stream": "the caller in the stream's synchronize()",
    "poll": "the caller polls is_completed()",
    "future": "the caller in get_future().wait()",
}


def _lost(op: str, caller: str, *, everywhere: bool = False, modes: tuple[str, ...] = ENDINGS) -> Scenario:
    return Scenario(
        f"lost.{op}.{caller}",
        LOST,
        f"`{op}` pending, {_SAID[caller]}",
        "faults:peer_lost",
        shows=("D0", "D1", "N1", "N4"),
        config={"op": op, "caller": caller},
        fault=_KILLED,
        deadline=10.0,
        modes=modes,
        everywhere=everywhere,
    )


def _lost_scenarios() -> list[Scenario]:
    every = ENDINGS + WAITING
    found = [_lost("all_reduce", "wait", everywhere=True, modes=every)]
    found += [_lost("all_reduce", caller) for caller in ("synchronize", "stream", "poll", "future")]
    for op in ("recv", "send", "batch", "managed_all_reduce", "all_gather_into_tensor", "all_to_all_single"):
        found += [_lost(op, "wait", modes=(*ENDINGS, "aeh2-wait")), _lost(op, "stream")]
    found += [
        _lost("barrier", "wait"),
        Scenario(
            "lost.three",
            LOST,
            "three ranks, one is killed, both others in `all_reduce`",
            "faults:peer_lost",
            shows=("D0", "D1", "N1"),
            world_size=3,
            config={"op": "all_reduce", "caller": "wait"},
            fault=Fault(KILL, 2),
            observers=(0, 1),
        ),
    ]
    return found


def _silent_scenarios() -> list[Scenario]:
    common: dict[str, Any] = {"program": "faults:peer_lost", "modes": ENDINGS + WAITING, "deadline": 12.0}
    config = {"op": "all_reduce", "caller": "wait", "timeout": 3}
    return [
        Scenario(
            "silent.killed",
            SILENT,
            "the peer's death goes unseen: the operation's timeout, 3 s, ends it",
            config={**config, "knobs": {"NO_DETECT": 1}},
            fault=_KILLED,
            shows=("D1", "N1"),
            **common,
        ),
        Scenario(
            "silent.stopped",
            SILENT,
            "the peer is stopped: the operation's timeout, 3 s, ends it",
            config=config,
            fault=Fault(STOP, 1),
            shows=("D1", "N1"),
            **common,
        ),
        Scenario(
            "silent.stopped.recv",
            SILENT,
            "the peer is stopped, `recv` pending, timeout 3 s",
            config={**config, "op": "recv"},
            fault=Fault(STOP, 1),
            shows=("D1", "N1"),
            **{**common, "modes": ENDINGS},
        ),
        Scenario(
            "silent.ignored",
            SILENT,
            "the peer is killed and NCCL says so; timeout 6 s: is the error heeded before it?",
            config={**config, "timeout": 6},
            fault=_KILLED,
            shows=("N2",),
            **{**common, "modes": WAITING},
        ),
    ]


def _error_scenarios() -> list[Scenario]:
    named = {1: "ncclUnhandledCudaError", 2: "ncclSystemError", 3: "ncclInternalError", 6: "ncclRemoteError"}
    return [
        Scenario(
            f"error.{name}",
            ERRORS,
            f"ncclCommGetAsyncError gives {name} while `all_reduce` is pending; the peer is well",
            "faults:peer_lost",
            shows=("D1", "N1"),
            config={"op": "all_reduce", "caller": "wait", "fault_knobs": {"ASYNC_ERROR": code}},
            fault=Fault(NOTHING),
        )
        for code, name in named.items()
    ]


def _abort_scenarios() -> list[Scenario]:
    modes = (*ENDINGS, "aeh2-wait", "aeh2-beat")
    hang = {"ABORT_HANG_MS": round(_HANG * 1000)}
    found = [
        Scenario(
            f"abort.hangs-{phase}",
            ABORT,
            f"ncclCommAbort hangs {_HANG:g} s {phase} it ends what is pending",
            "faults:peer_lost",
            shows=("D4", "N3") if phase == "after" else ("D4",),
            config={
                "op": "all_reduce",
                "caller": "wait",
                "knobs": {**hang, "ABORT_HANG_PHASE": phase},
                "linger": 3.0,
                "at_once": True,
            },
            fault=_KILLED,
            deadline=20.0,
            modes=modes,
        )
        for phase in ("before", "after")
    ]
    found.append(
        Scenario(
            "abort.fails",
            ABORT,
            "ncclCommAbort returns ncclInternalError",
            "faults:peer_lost",
            config={"op": "all_reduce", "caller": "wait", "knobs": {"ABORT_RESULT": 3}},
            fault=_KILLED,
        )
    )
    return found


ENQUEUED = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_uneven", "all_gather_into_tensor",
    "reduce_scatter_tensor", "barrier",
    "send", "recv", "batch", "gather", "scatter", "all_to_all", "all_to_all_single", "all_to_all_uneven",
    "all_reduce_coalesced", "managed_all_reduce", "managed_all_gather", "managed_reduce_scatter",
)  # fmt: skip
"""The kinds of operation whose enqueueing fails."""


def _enqueue_scenarios() -> list[Scenario]:
    def made(name: str, title: str, op: str, knobs: dict[str, int]) -> Scenario:
        return Scenario(
            name,
            ENQUEUE,
            title,
            "faults:enqueue_error",
            shows=("D5", "D6"),
            config={"op": op, "fault_knobs": knobs},
            fault=Fault(NOTHING),
            deadline=6.0,
        )

    found = [
        made(f"enqueue.{op}", f"`{op}`: NCCL returns ncclRemoteError", op, {"ENQUEUE_RESULT": 6})
        for op in ENQUEUED
    ]
    found += [
        made(f"group-end.{op}", f"`{op}`: ncclGroupEnd returns ncclRemoteError", op, {"GROUPEND_RESULT": 6})
        for op in ("send", "batch", "all_to_all", "managed_all_reduce")
    ]
    return found


def _making_scenarios() -> list[Scenario]:
    def made(name: str, title: str, config: dict[str, Any], fault: Fault, deadline: float) -> Scenario:
        return Scenario(
            name, MAKING, title, "faults:made_in_vain", config=config, fault=fault, deadline=deadline
        )

    return [
        made(
            "making.fails",
            "ncclCommInitRank returns ncclSystemError",
            {"knobs_of_0": {"INIT_RESULT": 2}},
            Fault(NOTHING),
            6.0,
        ),
        made(
            "making.slow",
            "ncclCommInitRank takes 5 s, the operation's timeout is 3 s",
            {"knobs_of_0": {"INIT_HANG_MS": 5000}, "timeout": 3},
            Fault(NOTHING),
            12.0,
        ),
        made(
            "making.peer-lost",
            "the peer is killed while the communicator is made; the operation's timeout is 3 s",
            {"knobs_of_1": {"INIT_HANG_MS": 60000}, "own_fault": False, "settle": 1.0, "timeout": 3},
            _KILLED,
            8.0,
        ),
    ]


def _other_scenarios() -> list[Scenario]:
    pending = {"op": "all_reduce", "caller": "stream"}
    return [
        Scenario(
            "others.same-process",
            OTHERS,
            "a process is in two worlds and one breaks: the other, on the same and on another thread",
            "faults:two_worlds",
            world_size=3,
            config={**pending, "destroy": True},
            fault=_KILLED,
            modes=(*ENDINGS, "aeh2-wait", "aeh2-beat-dump"),
            deadline=12.0,
        ),
        Scenario(
            "others.recv",
            OTHERS,
            "the same with `recv` pending on the broken one",
            "faults:two_worlds",
            world_size=3,
            config={**pending, "op": "recv"},
            fault=_KILLED,
            modes=("unset", "aeh2"),
            deadline=12.0,
        ),
        *(
            Scenario(
                f"others.abort-hangs-{phase}",
                OTHERS,
                f"the same while ncclCommAbort hangs {_HANG:g} s, {phase} it ends what is pending",
                "faults:two_worlds",
                shows=("D8",),
                world_size=3,
                config={
                    **pending,
                    "at_once": True,
                    "knobs": {"ABORT_HANG_MS": round(_HANG * 1000), "ABORT_HANG_PHASE": phase},
                },
                fault=_KILLED,
                modes=("unset", "aeh1", "aeh2"),
                deadline=20.0,
            )
            for phase in ("before", "after")
        ),
        Scenario(
            "others.same-store",
            OTHERS,
            "two worlds of other processes share a store server behind prefixes; the world that did not break",
            "faults:bystanders",
            shows=("D7",),
            world_size=4,
            config={**pending, "linger": 10.0},
            fault=_KILLED,
            observers=(0, 2, 3),
            modes=("unset", "aeh2", *MONITOR),
            deadline=18.0,
        ),
    ]


def _later_scenarios() -> list[Scenario]:
    config = {"op": "all_reduce", "caller": "stream", "linger": 9.0}
    slow = {**config, "knobs": {"ABORT_HANG_MS": round(_HANG * 1000), "ABORT_HANG_PHASE": "after"}}
    common: dict[str, Any] = {"program": "faults:peer_lost", "fault": _KILLED, "deadline": 22.0}
    return [
        Scenario(
            "later.cleaned-up",
            LATER,
            "9 s after a peer was killed; the heartbeat timeout is 4 s",
            shows=("D3",),
            config=config,
            modes=MONITOR,
            **common,
        ),
        Scenario(
            "later.slow-abort",
            LATER,
            f"ncclCommAbort takes {_HANG:g} s; the heartbeat timeout is 4 s",
            shows=("D4",),
            config=slow,
            modes=MONITOR,
            **common,
        ),
        Scenario(
            "later.dump-sleep",
            LATER,
            "the time for dumps is four times 1 s: is the caller kept waiting for it?",
            shows=("D2",),
            config={**config, "linger": 1.0},
            env={"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"},
            modes=("aeh2", "aeh2-dump", "aeh2-nodump", "unset-dump"),
            **common,
        ),
        Scenario(
            "later.dump-sleep-heartbeat",
            LATER,
            "the time for dumps is four times 1.5 s, the heartbeat timeout 4 s",
            shows=("D4",),
            config={**config, "linger": 6.0},
            env={"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1500"},
            modes=("aeh2-beat", "aeh2-beat-dump"),
            **common,
        ),
    ]


def _again_scenarios() -> list[Scenario]:
    config = {"op": "all_reduce", "caller": "wait"}
    return [
        Scenario(
            "again.destroyed",
            AGAIN,
            "the broken group is destroyed",
            "faults:peer_lost",
            config={**config, "destroy": True},
            fault=_KILLED,
            modes=(*ENDINGS, "aeh2-wait"),
            deadline=12.0,
        ),
        Scenario(
            "again.rebuilt",
            AGAIN,
            "it is destroyed, and a new one made under another prefix of the store, with another peer",
            "faults:rebuilt",
            world_size=3,
            config=config,
            fault=_KILLED,
            modes=(
                "unset",
                "aeh1",
                *(mode for mode in CLEAN_UP if mode in {"aeh2", "aeh2-wait", "aeh2-dump"}),
            ),
            deadline=14.0,
        ),
    ]


SCENARIOS: tuple[Scenario, ...] = tuple(
    _lost_scenarios() + _silent_scenarios() + _error_scenarios() + _abort_scenarios() + _enqueue_scenarios()
    + _making_scenarios() + _other_scenarios() + _later_scenarios() + _again_scenarios()
)  # fmt: skip


def by_id(name: str) -> Scenario:
    """Return a scenario.

    Raises:
        KeyError: there is none of that name.
    """
    return {scenario.id: scenario for scenario in SCENARIOS}[name]
