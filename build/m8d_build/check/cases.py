"""The cases of check-wheel: each with its probe, and the outcome expected of patched and of stock. Data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from multiworld.shim.marker import Marker

__all__ = ["ABORTED", "Case", "all_cases"]

ABORTED = "SIGABRT"
_MODE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_CLEAN_UP_ONLY = 2
_MODES = {0: "NoHandling", 1: "TearDown", 2: "CleanUpOnly", 3: "SkipCleanUp"}
_TERMINATE = "terminate called after throwing"
_MONITOR = "Terminating the process after attempting to dump debug info, due to "

# Seconds. The monitor looks every HEARTBEAT seconds (a dump request: every 0.1 s) and sleeps HEARTBEAT
# seconds more before it ends the process: stock ends 2 s after a dump request and 4 to 6 s after the watchdog
# got stuck.
_HEARTBEAT = 2
_WATCH = 12.0  # at least twice as long as stock takes
_LONG_WATCH = 60.0  # where an end is expected: on a busy machine it may come later
_IMPORT_TIMEOUT = 300.0  # importing torch takes 2 s, on a cold and busy machine a minute and more


@dataclass(frozen=True)
class Case:
    """One thing that is shown.

    Attributes:
        name: short, unique.
        shows: what a good outcome means, one sentence.
        programs: scripts of probes/ with their arguments, run at the same time. "{...}" stands for a path of
            the environment the probe runs in: {work}, {extension}, {official_extension}, {one_gpu},
            {exits}, {whole}, {bare}.
        patched: outcome expected of the patched wheel; None where there is nothing to run.
        stock: same of the stock wheel.
        env: variables of the probe.
        signs: (outcome, text): the outcome counts only if the text is in what the probe wrote, so that it
            came about for the reason the case is about.
        timeout: seconds.
    """

    name: str
    shows: str
    programs: tuple[tuple[str, ...], ...]
    patched: str | None
    stock: str | None
    env: Mapping[str, str] = field(default_factory=dict)
    signs: tuple[tuple[str, str], ...] = ()
    timeout: float = _IMPORT_TIMEOUT

    def expected(self, kind: str) -> str | None:
        """Return the outcome expected of "patched" or "stock"."""
        return self.patched if kind == "patched" else self.stock


def all_cases(marker: Marker) -> tuple[Case, ...]:
    """Return every case for a patched build, in the order they are shown.

    Args:
        marker: what the build says of itself.
    """
    return (
        _version(marker),
        Case("cpu", "CPU operations give known results", (("cpu_ops.py",),), "right", "right"),
        Case(
            "gloo",
            "a gloo group of two processes gives known results",
            tuple(("gloo.py", "{work}/rendezvous", rank, "2") for rank in ("0", "1")),
            "right",
            "right",
            env={"GLOO_SOCKET_IFNAME": "lo"},
        ),
        Case(
            "namespace",
            "torch.distributed.multiworld is there: it names the package it needs, and gives its objects",
            (("namespace.py", "{work}"),),
            "says what is missing, gives its objects",
            "no torch.distributed.multiworld",
        ),
        *_bindings(marker),
        *_groups(),
        *_heartbeats(),
        *_overlay(marker),
    )


def _version(marker: Marker) -> Case:
    topics = ", ".join(topic.name for topic in marker.topics)
    official = marker.local.rpartition(".")[0]
    return Case(
        "version",
        "torch.__version__, METADATA and m8d_patch_info() agree with torch/m8d.json",
        (("patch_info.py",),),
        f"{marker.torch}+{marker.local}, patch info {marker.torch}: {topics}",
        (f"{marker.torch}+{official}" if official else marker.torch) + ", no patch info",
    )


def _bindings(marker: Marker) -> tuple[Case, ...]:
    patched = marker.library.rpartition("/")[2] + ", patch info found"
    return tuple(
        Case(
            f"binding-{linked}-{order}",
            f"an extension linked against {against}, loaded {when} torch, binds to the patched code",
            (("group.py", extension, order, "m8d_bound_to"),),
            patched,
            stock,
        )
        for linked, against, extension, stock in (
            ("patched", "the patched wheel", "{extension}", "libtorch_cuda.so, no patch info"),
            ("official", "the official wheel", "{official_extension}", None),
        )
        for order, when in (("first", "before"), ("last", "after"))
    )


def _groups() -> tuple[Case, ...]:
    mode = {_MODE: str(_CLEAN_UP_ONLY)}
    unwind = [
        Case(
            f"group-unwind-{order}",
            f"CleanUpOnly, extension loaded {when} torch: an error inside an AutoNcclGroup reaches the "
            "caller",
            (("group.py", "{extension}", order, "m8d_unwind"),),
            "first error arrives, group closed",
            ABORTED,
            env=mode,
            signs=((ABORTED, _TERMINATE),),
        )
        for order, when in (("first", "before"), ("last", "after"))
    ]
    as_before = [
        Case(
            f"group-unwind-mode-{name}",
            f"{_MODES.get(value, 'mode not set')}: the same ends the process, as in stock",
            (("group.py", "{extension}", "last", "m8d_unwind"),),
            ABORTED,
            ABORTED,
            env={} if value < 0 else {_MODE: str(value)},
            signs=((ABORTED, _TERMINATE),),
        )
        for name, value in (("0", 0), ("1", 1), ("3", 3), ("unset", -1))
    ]
    quiet = [
        Case(
            f"group-{function}",
            f"CleanUpOnly: {shows}, as in stock",
            (("group.py", "{extension}", "last", f"m8d_{function}"),),
            outcome,
            outcome,
            env=mode,
        )
        for function, shows, outcome in (
            (
                "plain",
                "a group that fails at its end throws its own error",
                "its own error arrives, group closed",
            ),
            ("empty", "a group without an error ends without one", "no error arrives, group closed"),
        )
    ]
    return (*unwind, *as_before, *quiet)


def _heartbeats() -> tuple[Case, ...]:
    idle = _heartbeat("none", _CLEAN_UP_ONLY, "a group whose watchdog works goes on", "goes on", "")
    found = [idle]
    for trigger, what, goes_on, sign in (
        (
            "dump",
            "a peer's dump request",
            "goes on, dump written",
            "Received a dump signal due to a collective timeout",
        ),
        ("stuck", "a stuck watchdog", "goes on", "watchdog got stuck for"),
    ):
        for mode, name in _MODES.items():
            if mode == _CLEAN_UP_ONLY:
                found.append(
                    _heartbeat(trigger, mode, f"{what} is reported and the process goes on", goes_on, sign)
                )
            else:
                found.append(
                    _heartbeat(trigger, mode, f"{name}: {what} ends the process, as in stock", ABORTED, sign)
                )
    return tuple(found)


def _heartbeat(trigger: str, mode: int, shows: str, patched: str, sign: str) -> Case:
    stem = f"{{work}}/trace-{trigger}-{mode}-"
    # A stock process that does not end is watched as long as it takes; one that is to survive, long enough.
    watch = _LONG_WATCH if patched == ABORTED else _WATCH
    return Case(
        f"heartbeat-{trigger}-mode-{mode}",
        shows if patched == ABORTED else f"{_MODES[mode]}: {shows}",
        (("heartbeat.py", trigger, f"{watch:.0f}", stem),),
        patched,
        "goes on" if trigger == "none" else ABORTED,
        env={
            "LD_PRELOAD": "{one_gpu}",
            _MODE: str(mode),
            "TORCH_NCCL_COORD_CHECK_MILSEC": "100",
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": stem,
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1" if trigger == "dump" else "0",
            "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(_HEARTBEAT),
            "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "5000",
        },
        signs=((patched, sign), (ABORTED, sign), (ABORTED, _MONITOR)) if sign else (),
        timeout=_IMPORT_TIMEOUT + _LONG_WATCH,
    )


def _overlay(marker: Marker) -> tuple[Case, ...]:
    if marker.overlay is None:
        return ()
    name = marker.overlay.file.rpartition("/")[2]
    return (
        Case(
            "overlay-exit",
            f"no object of {name} is destroyed twice when the process ends",
            (("exits.py", name),),
            "each object once",
            None,
            env={"LD_PRELOAD": "{exits}"},
        ),
        Case(
            "overlay-whole",
            "torch can be imported through a tree of links (the next case's counterpart)",
            (("import_torch.py", "{whole}", name),),
            "imported",
            "imported",
        ),
        Case(
            "overlay-missing",
            f"without {name} torch refuses to be imported, instead of running the old code",
            (("import_torch.py", "{bare}", name),),
            f"refused, naming {name}",
            None,
        ),
    )
