"""Capabilities of the installed torch, and the guards set before the first NCCL world.

The build itself is examined: the registered backends, the classes' methods and options, the headers that came
with the build, and the marker of a patched one. Version numbers are for people. Importing this module imports
no torch.
"""

from __future__ import annotations

import contextlib
import re
import threading
import warnings
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from multiworld import settings as _settings
from multiworld._c10d.backend_class import implementation_of
from multiworld._c10d.marker import Marker, read_marker
from multiworld._core.nccl_policy import (
    VARIABLES,
    Decision,
    Implementation,
    Mode,
    NcclFacts,
    decide,
)
from multiworld.errors import MarkerError, PatchRequiredError, ShimError

__all__ = [
    "NCCL_BACKENDS", "BackendAbility", "Build", "backend_abilities", "build", "decide_nccl",
    "marker_of_build", "nccl_facts", "nccl_name", "prepare_nccl",
]  # fmt: skip

NCCL_BACKENDS = ("nccl", "nccl2", "nccl-legacy", "nccl-lazy")
"""Names under which torch registers its own NCCL, in some version."""

_RECORDER = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
"""Makes torch record NCCL's last operations, for M8D_REPORTS; the number is torch's own default in 2.12."""
_RECORDER_NOW = "TORCH_FR_BUFFER_SIZE"
"""The variable's name from torch 2.9 on."""

_BUILTIN = ("gloo", *NCCL_BACKENDS, "mpi", "ucc", "xccl")
_HEADERS = "include/torch/csrc"


@dataclass(frozen=True)
class Build:
    """Identity of the installed torch.

    Attributes:
        version: "2.13.0+cpu".
        git: commit, 40 hex digits; empty where it says none.
        cuda: "12.4"; None for a build without.
        hip: None for a build without ROCm.
        nccl: NCCL's version, "2.21.5"; None for a build without.
        distributed: whether it has torch.distributed.
        folder: of the package.
    """

    version: str
    git: str
    cuda: str | None
    hip: str | None
    nccl: str | None
    distributed: bool
    folder: str


@dataclass(frozen=True)
class BackendAbility:
    """Capabilities of one backend in this build; None where unknown.

    Attributes:
        name: as given to ``join`` ("gloo").
        available: whether the build has it. That a GPU is there is not looked at.
        implementation: the class it builds ("ProcessGroupGloo"), empty where unknown.
        remote_error: whether a peer's failure comes as an error.
        abort: how pending operations are ended: the class's method ("abort", "_shutdown"), "sockets" where
            the runtime closes the backend's own connections, empty where nothing can.
        survive: whether this process outlives a peer's failure: "yes", "guarded" (with the guards in place,
            but for the defects that `decide_nccl` names), "no", or empty where the build does not tell.
        reconfigure: whether torch can rebuild a group of it without a new rendezvous.
        error_query: whether a group can be asked for its error (``get_error``).
        options: fields of its options that matter to a runtime, sorted.
    """

    name: str
    available: bool
    implementation: str = ""
    remote_error: bool | None = None
    abort: str = ""
    survive: str = ""
    reconfigure: bool | None = None
    error_query: bool = False
    options: tuple[str, ...] = ()


def build() -> Build:
    """Ask torch who it is.

    Raises:
        ShimError: torch is not installed, or cannot be imported.
    """
    torch = _torch()
    version = torch.version
    distributed = _distributed() is not None
    return Build(
        version=str(torch.__version__),
        git=getattr(version, "git_version", None) or "",
        cuda=getattr(version, "cuda", None),
        hip=getattr(version, "hip", None),
        nccl=_nccl_version(torch),
        distributed=distributed,
        folder=str(_folder()),
    )


def backend_abilities() -> tuple[BackendAbility, ...]:
    """Return the abilities of torch's and all registered backends; none without torch.distributed."""
    if _distributed() is None:
        return ()
    c10d = _c10d()
    known = (*_BUILTIN, *(name for name in c10d.Backend.backend_list if name != "undefined"))
    return tuple(_ability(name) for name in dict.fromkeys(str(name) for name in known))


def nccl_facts(backend: str = "nccl") -> NcclFacts:
    """Ask the build what decides about NCCL's error handling.

    Raises:
        ShimError: torch is not installed, or cannot be imported.
    """
    _torch()
    marker, problems = _marker()
    if _distributed() is None:
        return NcclFacts(backend, distributed=False, patched=marker is not None)
    return NcclFacts(
        backend=backend,
        implementation=_nccl_implementation(backend),
        distributed=True,
        remote_error=_knows_remote_error(),
        patched=marker is not None or bool(problems),
        topics=tuple(topic.name for topic in marker.topics) if marker else (),
        number=marker.number if marker else 0,
        disagreements=problems,
        groups=_nccl_groups(),
        thread_events=_keeps_events_by_thread(),
        recorder_names=_knows_recorder_names(),
        detail=_c10d().get_debug_level().name == "DETAIL",
    )


def decide_nccl(backend: str = "nccl", *, settings: _settings.Settings | None = None) -> Decision:
    """Return what would be done for a world of this backend; changes nothing.

    Raises:
        ShimError: torch is not installed, or cannot be imported.
    """
    chosen = _settings.load() if settings is None else settings
    ours = _Prepared.ours
    environ = {
        name: value
        for name in VARIABLES
        if (value := _settings.environment(name)) is not None and ours.get(name) != value
    }
    return decide(nccl_facts(backend), environ, shim=chosen.shim)


def prepare_nccl(
    world: str, backend: str = "nccl", *, settings: _settings.Settings | None = None
) -> Decision:
    """Set the guards before an NCCL world is built; call it as often as you like.

    What the user has set in the environment stays. In guarded mode the defects that remain are named in one
    RuntimeWarning per process.

    Args:
        world: name of the world that is about to be joined, for messages.
        backend: its backend's name, or one per device ("cpu:gloo,cuda:nccl"); where none is torch's NCCL,
            nothing is done and torch is not asked.
        settings: read from the environment if None.

    Returns:
        What was decided.

    Raises:
        PatchRequiredError: M8D_REQUIRE_PATCH=1, and the mode is guarded. Nothing was set.
        ShimError: M8D_SHIM=on, and nothing can be managed; or torch cannot be imported.
    """
    chosen = _settings.load() if settings is None else settings
    name = nccl_name(backend)
    if name is None:
        return Decision(Mode.OFF, f"the backend {backend!r} is not torch's NCCL")
    decision = decide_nccl(name, settings=chosen)
    if chosen.shim == "off":
        return decision
    if decision.mode is Mode.OFF and chosen.shim == "on":
        raise ShimError(
            f"World {world!r}: {decision.reason}",
            rule="M8D_SHIM=on asks for NCCL fault management",
            next_step=decision.next_step or "Unset M8D_SHIM",
        )
    if decision.mode is Mode.GUARDED and chosen.require_patch:
        raise PatchRequiredError(
            f"World {world!r}: {decision.reason}",
            rule="M8D_REQUIRE_PATCH=1 asks for a torch whose NCCL has no known defects",
            next_step=decision.next_step,
        )
    recorder = _RECORDER if chosen.reports and _settings.environment(_RECORDER_NOW) is None else {}
    _Prepared.ours |= _settings.set_default_environment({**recorder, **dict(decision.environment)})
    text = decision.warning()
    if text and _Prepared.first(text):
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return decision


def nccl_name(backend: str) -> str | None:
    """Return the NCCL part of a backend's name ("cpu:gloo,cuda:nccl": "nccl"); None without one."""
    parts = (part.rpartition(":")[2].strip().lower() for part in backend.split(","))
    return next((part for part in parts if part in NCCL_BACKENDS), None)


class _Prepared:
    """Environment variables set, and warnings shown, by this process."""

    ours: ClassVar[dict[str, str]] = {}
    _said: ClassVar[set[str]] = set()
    _lock = threading.Lock()

    @classmethod
    def first(cls, text: str) -> bool:
        """Return whether this is said for the first time."""
        head = text.partition("\n")[0]
        with cls._lock:
            fresh = head not in cls._said
            cls._said.add(head)
        return fresh


def _import(name: str) -> Any:
    try:
        return import_module(name)
    except Exception as exc:  # torch runs much code of its own and of numpy's, which may raise anything
        kind = "" if isinstance(exc, (ImportError, OSError)) else f"{type(exc).__name__}: "
        raise ShimError(
            f"{name} cannot be imported: {kind}{exc}", next_step="Install it, or correct the installation"
        ) from exc


def _torch() -> Any:
    torch = _import("torch")
    if not hasattr(torch, "version"):
        folder = next(iter(getattr(torch, "__path__", ())), torch)
        raise ShimError(
            f"{folder} holds no torch: importing it gives an empty module",
            next_step="Remove what is left there, and install torch",
        )
    return torch


def _distributed() -> Any:
    """Return torch.distributed; None for a build without."""
    dist = _import("torch.distributed")
    return dist if dist.is_available() else None


def _c10d() -> Any:
    return _import("torch.distributed.distributed_c10d")


def _folder() -> Path:
    return Path(next(iter(_torch().__path__)))


def _nccl_version(torch: Any) -> str | None:
    # torch.cuda.nccl.version() would do, but is not there in every build; the function behind it is.
    raw = getattr(torch._C, "_nccl_version", None)
    if raw is None:
        return None
    found = raw()
    if isinstance(found, tuple):
        return ".".join(str(part) for part in found)
    if found > 1 << 31:  # packed: major, 16 bits of minor, 16 bits of patch
        return f"{found >> 32}.{found >> 16 & 0xFFFF}.{found & 0xFFFF}"
    return str(found)


def _ability(name: str) -> BackendAbility:
    dist, c10d = _distributed(), _c10d()
    made = implementation_of(name)
    cls = getattr(c10d, made, None) if made else None
    if cls is None:
        with contextlib.suppress(ValueError, RuntimeError, TypeError):  # an unknown name; a composite one
            return BackendAbility(name, available=bool(dist.is_backend_available(name)))
        return BackendAbility(name, available=False)
    nccl = made.startswith("ProcessGroupNCCL")
    options = getattr(cls, "Options", None) or getattr(cls, "_Options", None)
    fields = tuple(sorted(field for field in dir(options) if field in _TELLING)) if options else ()
    decision = decide_nccl(name) if nccl else None
    gloo = made == "ProcessGroupGloo"
    return BackendAbility(
        name=name,
        available=True,
        implementation=made,
        remote_error=_knows_remote_error() if nccl else True if gloo else None,
        # ProcessGroup.abort() does nothing for gloo: the runtime ends its connections instead.
        abort="sockets" if gloo else next((way for way in ("abort", "_shutdown") if hasattr(cls, way)), ""),
        survive=_survives(decision) if decision else "yes" if gloo else "",
        reconfigure=_reconfigures(cls, made),
        error_query=hasattr(cls, "get_error"),
        options=fields,
    )


def _survives(decision: Decision) -> str:
    ends = decision.mode is Mode.OFF or not decision.survives
    return "no" if ends else "yes" if decision.mode is Mode.ON else "guarded"


_TELLING = frozenset(
    {"enable_reconfigure", "lazy_init", "global_ranks_in_group", "group_name", "config", "split_from"}
)


def _nccl_implementation(backend: str) -> Implementation:
    dist = _distributed()
    made = implementation_of(backend)
    if backend.lower() in NCCL_BACKENDS and not dist.is_nccl_available():
        return Implementation.NONE
    if made == "ProcessGroupNCCL":
        return Implementation.LEGACY
    if made in {"ProcessGroupNCCL2", "ProcessGroupNCCLLazy"}:
        return Implementation.NCCL2
    registered = backend.lower() in {str(name) for name in _c10d().Backend.backend_list}
    return Implementation.OTHER if made or registered else Implementation.NONE


def _header(name: str) -> str | None:
    """Return a C++ header that came with the build; None where it is not there."""
    with contextlib.suppress(OSError):  # a build without headers: the question stays open
        return (_folder() / _HEADERS / name).read_text(encoding="utf-8", errors="replace")
    return None


@lru_cache(maxsize=1)
def _knows_remote_error() -> bool | None:
    text = _header("cuda/nccl.h")
    return None if text is None else re.search(r"^\s*RemoteError\s*=", text, re.MULTILINE) is not None


@lru_cache(maxsize=1)
def _keeps_events_by_thread() -> bool:
    # Later versions share the cache's ownership with the events.
    text = _header("distributed/c10d/ProcessGroupNCCL.hpp")
    return text is not None and re.search(r"class CUDAEventCache\s*\{", text) is not None


@lru_cache(maxsize=1)
def _knows_recorder_names() -> bool:
    return "TORCH_FR_DUMP_ON_TIMEOUT" in (_header("distributed/c10d/FlightRecorder.hpp") or "")


_RECONFIGURE_HEADERS = {
    "ProcessGroupGloo": "distributed/c10d/ProcessGroupGloo.hpp",
    "ProcessGroupNCCL": "distributed/c10d/ProcessGroupNCCL.hpp",
    "ProcessGroupNCCL2": "distributed/c10d/nccl2/ProcessGroupNCCL.hpp",
    "ProcessGroupNCCLLazy": "distributed/c10d/nccl2/ProcessGroupNCCLLazy.hpp",
}


def _reconfigures(cls: type, made: str) -> bool | None:
    """Say whether groups of a class can be rebuilt; only an instance knows, so its header is read."""
    if not hasattr(cls, "reconfigure"):
        return False
    text = _header(_RECONFIGURE_HEADERS[made]) if made in _RECONFIGURE_HEADERS else None
    if text is None:
        return None
    found = re.search(r"supportsReconfigure\(\)\s*const\s*override\s*\{(.*?)\}", text, re.DOTALL)
    return found is not None and "return true" in found[1]


def _nccl_groups() -> int:
    """Return how many NCCL groups torch keeps in this process, in the state that is selected now."""
    groups = getattr(getattr(_c10d(), "_world", None), "pg_map", {})
    return sum("nccl" in str(entry[0]).lower() for entry in list(groups.values()))


def marker_of_build() -> Marker | None:
    """Return the marker of the installed torch, compared with its library; None if it is not patched.

    Raises:
        MarkerError: it cannot be read, or torch is not installed.
    """
    return read_marker(_folder())


@lru_cache(maxsize=1)
def _marker() -> tuple[Marker | None, tuple[str, ...]]:
    """Return the marker and its problems. Read once: a process's libraries do not change."""
    try:
        marker = marker_of_build()
    except MarkerError as exc:
        return None, (str(exc),)
    return marker, marker.disagreements if marker else ()
