"""NCCL policy: how this process manages NCCL's error handling, and which defects remain.

The defects are those of docs/patching.md (D0 to D8 in torch's older implementation, N1 to N4 in ``nccl2``).
What an environment variable does was read in PyTorch's sources from 2.4 to 2.12 and in the headers up to
2.15, and tried on 2.6, 2.14 and 2.15.

The guards rest on one rule: after a failure it matters which code aborts a communicator. An operation that is
waiting ends with the abort as if it had succeeded, so only the runtime may abort, which marks the world as
broken first. Torch itself is told to leave failures alone, unless it is patched: then it says of each
operation how it ended.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "CLEAN_UP_ONLY", "ENDED_BY", "HOW_TO_PATCH", "NO_HANDLING", "SURVIVABLE", "VARIABLES", "Decision",
    "Defect", "Implementation", "Mode", "NcclFacts", "Override", "decide",
]  # fmt: skip

CLEAN_UP_ONLY = "2"
"""Value of TORCH_NCCL_ASYNC_ERROR_HANDLING: abort the communicator, leave the process alone."""

TELLS_FROM = 4
"""Number of the first patched builds whose backends tell whether NCCL's abort goes on. Older ones, asked the
same, say for ever that it does."""

NO_HANDLING = "0"
"""Value of the same variable: note the failure and do nothing."""

SURVIVABLE = (NO_HANDLING, CLEAN_UP_ONLY)
"""Values with which torch does not end the process."""

HOW_TO_PATCH = (
    "Install a patched torch: `nox -s build-torch` in multiworld's sources makes one (docs/patching.md)"
)

ENDED_BY = {
    "D0": "remote-error",
    "D1": "cleanup-only",
    "D2": "cleanup-only",
    "D3": "cleanup-only",
    "D4": "cleanup-only",
    "D5": "group-guard",
    "D6": "group-guard",
    "D7": "world-scope",
    "D8": "abort-offload",
}
"""The patch topic that fixes each defect of the older implementation."""

_NEEDED = ("group-guard", "cleanup-only", "abort-offload")
"""Without one of them a fault still ends the process, corrupts data, or holds all its threads: while torch's
watchdog aborts, a question for an operation's state waits for the communicator's lock, and has the GIL."""

_TEXTS = {
    "D0": "ncclRemoteError cannot be converted: a remote failure comes as 'Unconvertible NCCL type'",
    "D1": "after an abort wait() returns as if all were well and the tensor is stale",
    "D2": "torch waits for a flight recorder dump before it aborts",
    "D3": "torch's heartbeat monitor ends the process after a successful clean-up",
    "D4": "a slow or hung ncclCommAbort counts as a stuck watchdog, which ends the process",
    "D5": "a failing call inside a coalesced operation that is made in C++ (functional collectives) "
    "ends the process",
    "D6": "a failing all_to_all that is made in C++ (functional collectives, in a backward pass) "
    "leaves its thread's NCCL group open: the next collective of a healthy world returns its own input",
    "D7": "the flight recorder's dump signal reaches processes of other groups on the same store server",
    "D8": "while ncclCommAbort hangs, operations of other groups may wait",
    "N1": "after an abort by torch, what was waited for in C++ (DDP, functional collectives) "
    "is stale (nccl2)",
    "N3": "who waits for the GPU itself (a stream, Tensor.cpu()) stays blocked "
    "while ncclCommAbort hangs (nccl2)",
}
"""As a program with worlds sees them. N2 and N4 are absent: the runtime compensates for them."""


class Mode(str, enum.Enum):
    """How far faults of NCCL worlds are managed.

    Attributes:
        ON: the build is patched, or its NCCL has no known defect.
        GUARDED: the build has known defects; the environment keeps the process alive.
        OFF: nothing is done.
    """

    ON = "on"
    GUARDED = "guarded"
    OFF = "off"

    __str__ = str.__str__


class Implementation(str, enum.Enum):
    """The class of process group that a backend's name builds.

    Attributes:
        LEGACY: torch's ProcessGroupNCCL.
        NCCL2: ProcessGroupNCCL2, or its lazy variant.
        OTHER: something that is not torch's NCCL.
        NONE: nothing: the build has no such backend.
    """

    LEGACY = "legacy"
    NCCL2 = "nccl2"
    OTHER = "other"
    NONE = "none"

    __str__ = str.__str__


@dataclass(frozen=True)
class NcclFacts:
    """Facts about the build that decide the policy.

    Attributes:
        backend: the name a world would be joined with ("nccl").
        implementation: what that name builds here.
        distributed: whether the build has torch.distributed.
        remote_error: whether the build knows ncclRemoteError; None where it could not be asked.
        patched: whether a marker was found.
        topics: of the patched build, in order; empty for an official one.
        number: of the patched build, which tells two of one version apart; 0: it has none.
        disagreements: where the marker and the library differ, or why the marker cannot be read.
        groups: how many NCCL groups this process has already; they keep the environment they were made in.
        thread_events: whether it keeps CUDA events of operations per thread, and uses them after the thread
            ended.
        recorder_names: whether it knows the names that torch 2.15 has for the flight recorder (TORCH_FR_...).
        detail: whether the debug level of torch.distributed is DETAIL, by the environment or by a call.
    """

    backend: str = "nccl"
    implementation: Implementation = Implementation.NONE
    distributed: bool = True
    remote_error: bool | None = None
    patched: bool = False
    topics: tuple[str, ...] = ()
    number: int = 0
    disagreements: tuple[str, ...] = ()
    groups: int = 0
    thread_events: bool = False
    recorder_names: bool = False
    detail: bool = False


@dataclass(frozen=True)
class Defect:
    """Something wrong that remains.

    Attributes:
        id: its number in docs/patching.md ("D1").
        text: one line.
    """

    id: str
    text: str


@dataclass(frozen=True)
class Override:
    """A variable the user has set to something else than the guard would.

    Attributes:
        name: of the variable that is set.
        value: the user's.
        wanted: the guard's.
        effect: what follows, one line.
    """

    name: str
    value: str
    wanted: str
    effect: str


@dataclass(frozen=True)
class Decision:
    """What is done, and why.

    Attributes:
        mode: on, guarded or off.
        reason: one line.
        environment: variables to set, as pairs, where the user has set none.
        overrides: what the user has set otherwise; it is respected.
        remaining: the defects that remain with the environment as it will be.
        notes: further lines for people.
        next_step: what would make it better; empty where nothing would.
        survives: whether torch leaves the process alone when a peer fails.
        fragile: whether a call that fails leaves the thread's NCCL group open or ends the process (D5, D6):
            the runtime then calls torch with care.
        torch_aborts: whether torch's watchdog may abort a communicator by itself.
        abort_returns: whether torch's abort may return before NCCL's is over; its backend then tells.
    """

    mode: Mode
    reason: str
    environment: tuple[tuple[str, str], ...] = ()
    overrides: tuple[Override, ...] = ()
    remaining: tuple[Defect, ...] = ()
    notes: tuple[str, ...] = ()
    next_step: str = ""
    survives: bool = False
    fragile: bool = True
    torch_aborts: bool = True
    abort_returns: bool = False

    def warning(self) -> str:
        """Return the warning before the first NCCL world; empty where there is no reason for one."""
        if self.mode is not Mode.GUARDED:
            return ""
        lines = [f"NCCL fault management is guarded: {self.reason}."]
        lines += [f"{each.name}={each.value} is set: {each.effect}." for each in self.overrides]
        lines += [f"{note}." for note in self.notes]
        lines += [f"{defect.id}: {defect.text}." for defect in self.remaining]
        lines += [f"{self.next_step}."] if self.next_step else []
        return "\n".join([*lines, "`python -m multiworld doctor` tells more."])


@dataclass(frozen=True)
class _Guard:
    """A variable, what it is set to, the names it also goes by, and what comes back without it.

    Torch takes the first of its names that is set: the newest one.
    """

    name: str
    value: str
    effect: str
    brings_back: tuple[str, ...] = ()
    newer: tuple[str, ...] = ()
    older: tuple[str, ...] = ()

    def found(self, environ: Mapping[str, str]) -> tuple[str, str] | None:
        """Return the name and value the user has set, if any."""
        for name in (*self.newer, self.name, *self.older):
            if name in environ:
                return name, environ[name]
        return None

    def known_to(self, facts: NcclFacts) -> _Guard:
        """Return the guard with the names that the build knows."""
        return self if facts.recorder_names else replace(self, newer=())


_HANDLING = _Guard(
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    NO_HANDLING,
    "only with 0 (nothing is done) and 2 (CleanUpOnly) torch leaves the process alone",
    older=("NCCL_ASYNC_ERROR_HANDLING",),
)
# The monitor only ever ends the process or dumps: the runtime's own watchdog sees hangs.
_MONITOR = _Guard(
    "TORCH_NCCL_ENABLE_MONITORING", "0", "torch's heartbeat monitor may end this process", ("D3", "D4")
)
_DUMP = _Guard(
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "0",
    "a failure asks every process on the same store server for a dump",
    ("D2", "D7"),
    ("TORCH_FR_DUMP_ON_TIMEOUT",),
)
# From 2.8 on the watchdog sleeps four times this before it aborts, also with dumps off. Zero is untried: one.
_DUMP_WAIT = _Guard(
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
    "1",
    "torch's watchdog may wait four times as long before it aborts",
    ("D2",),
    ("TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC",),
)
_RETHROW = _Guard(
    "TORCH_NCCL_RETHROW_CUDA_ERRORS", "0", "an error of CUDA seen by torch's NCCL watchdog ends this process"
)
# Torch 2.5 and 2.6 put an operation's events back into a cache of the thread that posted it, alive or not.
_EVENTS = _Guard(
    "TORCH_NCCL_CUDA_EVENT_CACHE",
    "0",
    "an operation that outlives the thread that posted it ends this process",
)
# A wait whose time is over aborts the communicator, also with 0: what else was pending is stale, not failed.
_BLOCKING = _Guard(
    "TORCH_NCCL_BLOCKING_WAIT",
    "0",
    "torch aborts a communicator by itself when a wait takes too long",
    older=("NCCL_BLOCKING_WAIT",),
)
_GUARDS = (_MONITOR, _DUMP, _DUMP_WAIT, _RETHROW)
# A patched build keeps dumps apart by world. What remains: with dumps on, the monitor asks the world's store
# each second, and a group is not destroyed before the store has answered.
_DUMP_PATCHED = replace(
    _DUMP, effect="a world whose store stands still is closed only when the store answers", brings_back=()
)
_ENDED_BY_GUARDS = frozenset(defect for guard in _GUARDS for defect in guard.brings_back)
_DESYNC = ("TORCH_NCCL_DESYNC_DEBUG", "NCCL_DESYNC_DEBUG")  # torch takes the first that is set
_DEBUGGING = ("TORCH_DISTRIBUTED_DEBUG", *_DESYNC)

VARIABLES = (
    *(
        name
        for guard in (_HANDLING, *_GUARDS, _BLOCKING, _EVENTS)
        for name in (*guard.newer, guard.name, *guard.older)
    ),
    *_DEBUGGING,
)
"""Every environment variable that `decide` looks at."""


def decide(facts: NcclFacts, environ: Mapping[str, str], *, shim: str = "auto") -> Decision:
    """Return what is done about NCCL's error handling.

    Args:
        facts: what the build says.
        environ: the variables of `VARIABLES` that the user has set.
        shim: "auto", "on" or "off" (``M8D_SHIM``); "on" is "auto" that is not content with `Mode.OFF`, which
            is for the caller to refuse.
    """
    off = _why_off(facts, shim)
    if off is not None:
        return off
    legacy = facts.implementation is Implementation.LEGACY
    # A build that contradicts itself is held unpatched, as is one with only a part of the patches.
    acting = facts.patched and not facts.disagreements and all(topic in facts.topics for topic in _NEEDED)
    handling = replace(_HANDLING, value=_handling(facts, environ, acting=acting))
    name, value = handling.found(environ) or (handling.name, handling.value)
    handled = value.strip()
    # The patches are of the older implementation only, and of one mode.
    topics = facts.topics if legacy and acting and handled == CLEAN_UP_ONLY else ()
    patched = all(topic in topics for topic in _NEEDED)
    guards = (
        handling,
        *(guard.known_to(facts) for guard in ((_DUMP_PATCHED,) if patched else _GUARDS) if legacy),
        *(() if patched else (_BLOCKING,)),
        *((_EVENTS,) if legacy and facts.thread_events and "event-cache" not in topics else ()),
    )
    environment = tuple((guard.name, guard.value) for guard in guards if guard.found(environ) is None)
    overrides = tuple(other for guard in guards if (other := _override(guard, environ)) is not None)
    survives = handled in SURVIVABLE
    remaining = (
        _legacy_defects(facts, topics, handled, {g.name for g in guards if _override(g, environ) is not None})
        if legacy
        else _nccl2_defects(handled)
    )
    on = survives and (patched or not remaining)
    return Decision(
        Mode.ON if on else Mode.GUARDED,
        _reason(facts, topics, patched=patched, survives=survives),
        environment,
        overrides,
        remaining,
        _notes(facts, environment),
        "" if on else _next_step(facts, acting=acting, handled=handled, name=name),
        survives=survives,
        fragile=legacy and "group-guard" not in topics,
        torch_aborts=handled != NO_HANDLING,
        abort_returns="abort-offload" in topics and not 0 < facts.number < TELLS_FROM,
    )


def _handling(facts: NcclFacts, environ: Mapping[str, str], *, acting: bool) -> str:
    debugging = facts.detail or environ.get("TORCH_DISTRIBUTED_DEBUG", "").strip().upper() == "DETAIL"
    asked = next((environ[name] for name in _DESYNC if name in environ), None)
    # The older NCCL refuses to do nothing where it is to find out which member is behind: the process ends.
    desync = debugging or (asked is not None and not _is_false(asked))
    desync = desync and facts.implementation is Implementation.LEGACY
    return CLEAN_UP_ONLY if acting or desync else NO_HANDLING


def _why_off(facts: NcclFacts, shim: str) -> Decision | None:
    if shim == "off":
        return Decision(Mode.OFF, "M8D_SHIM=off", next_step="Unset M8D_SHIM to have it")
    if not facts.distributed:
        return Decision(
            Mode.OFF, "this torch has no torch.distributed", next_step="Install a torch that has it"
        )
    if facts.implementation is Implementation.NONE:
        return Decision(
            Mode.OFF,
            f"this torch has no backend {facts.backend!r}",
            next_step="Install a CUDA build of torch, if this machine has a GPU",
        )
    if facts.implementation is Implementation.OTHER:
        return Decision(Mode.OFF, f"the backend {facts.backend!r} is not torch's NCCL")
    return None


def _override(guard: _Guard, environ: Mapping[str, str]) -> Override | None:
    found = guard.found(environ)
    if found is None or found[1].strip() == guard.value:
        return None
    if guard.name == _HANDLING.name:
        other = _OTHER_HANDLING.get((guard.value, found[1].strip()), guard.effect)
        return Override(*found, guard.value, other)
    if guard.value == "0" and _is_false(found[1]):
        return None
    return Override(*found, guard.value, guard.effect)


_OTHER_HANDLING = {
    (NO_HANDLING, CLEAN_UP_ONLY): "torch may abort a communicator before it is known that the world broke",
    (CLEAN_UP_ONLY, NO_HANDLING): "the patches act only with 2 (CleanUpOnly)",
}
"""What follows from a survivable value that is not the guard's."""


def _is_false(text: str) -> bool:
    # What torch reads as false (Utils.hpp, getCvarBool).
    return text.strip().lower() in {"0", "n", "no", "false", "f"}


def _legacy_defects(
    facts: NcclFacts, topics: tuple[str, ...], handled: str, unguarded: set[str]
) -> tuple[Defect, ...]:
    back = {d for guard in _GUARDS if guard.name in unguarded for d in guard.brings_back}
    guarded = _ENDED_BY_GUARDS if not all(topic in topics for topic in _NEEDED) else frozenset()
    if handled == NO_HANDLING:
        guarded |= {"D1"}  # only the runtime aborts
    return tuple(
        Defect(name, _TEXTS[name])
        for name, topic in ENDED_BY.items()
        if topic not in topics
        and (name != "D0" or facts.remote_error is False)
        and (name not in guarded or name in back)
    )


def _nccl2_defects(handled: str) -> tuple[Defect, ...]:
    names = ("N3",) if handled == NO_HANDLING else ("N1", "N3")
    return tuple(Defect(name, _TEXTS[name]) for name in names)


def _reason(facts: NcclFacts, topics: tuple[str, ...], *, patched: bool, survives: bool) -> str:
    if not survives:
        return (
            f"the environment asks torch for another error handling than {' or '.join(SURVIVABLE)}, "
            "which ends the process after a failure"
        )
    if facts.implementation is Implementation.NCCL2:
        return f"the backend {facts.backend!r} is nccl2, which is not patched and has known defects"
    if facts.disagreements:
        why = "; ".join(facts.disagreements).rstrip(".")
        return f"this torch says it is patched, and contradicts itself: {why}"
    if patched:
        return f"this torch is patched ({', '.join(topics)})"
    if not facts.patched:
        return "this torch is not patched"
    if lacking := [topic for topic in _NEEDED if topic not in facts.topics]:
        return f"this torch is patched, without {', '.join(lacking)}"
    return f"this torch is patched, and the environment asks for another error handling than {CLEAN_UP_ONLY}"


def _notes(facts: NcclFacts, environment: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    if not facts.groups or not environment:
        return ()
    names = ", ".join(name for name, _ in environment)
    return (
        f"{facts.groups} NCCL group(s) of this process were made before {names} was set and go on without",
    )


def _next_step(facts: NcclFacts, *, acting: bool, handled: str, name: str) -> str:
    if handled not in SURVIVABLE or (acting and handled != CLEAN_UP_ONLY):
        wanted = CLEAN_UP_ONLY if acting else NO_HANDLING
        return f"Unset {name}, or set it to {wanted}"
    if facts.disagreements:
        return "Install the patched wheel again, or the official one"
    if facts.implementation is Implementation.NCCL2:
        return (
            "There are no patches for nccl2 yet; "
            "`nox -s build-torch` makes a torch with the older NCCL, patched"
        )
    return HOW_TO_PATCH
