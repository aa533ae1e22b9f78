"""Status report: the installed torch, its abilities, and the fault management of NCCL worlds."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multiworld import __version__
from multiworld._c10d.capabilities import (
    BackendAbility,
    Build,
    backend_abilities,
    build,
    decide_nccl,
    marker_of_build,
)
from multiworld.errors import InstallError, MarkerError
from multiworld.provenance.installed import InstalledProvenance, check_installed
from multiworld.shim import switch
from multiworld.shim.clash import Clash, find
from multiworld.shim.install import Inspection, inspect
from multiworld.shim.torchsite import FromSourceError, find_site

if TYPE_CHECKING:
    from multiworld._c10d.marker import Marker
    from multiworld._core.nccl_policy import Decision

__all__ = ["Patched", "Status", "status"]


@dataclass(frozen=True)
class Patched:
    """Patches of a build, by its marker.

    Attributes:
        marked: whether there is a marker, readable or not.
        topics: in the order of the series.
        mode: "overlay" or "full"; empty for an official build.
        version: "2.6.0+cu124.m8d2"; empty for an official build.
        disagreements: where the marker, the library and the provenance statement differ, or why the marker
            cannot be read or the files cannot be compared.
        built_files: how many files are as the statement in the wheel says; None where it has no statement.
        ported_from: version whose series was carried to this one, not proven by hand; empty where it has its
            own.
    """

    marked: bool
    topics: tuple[str, ...] = ()
    mode: str = ""
    version: str = ""
    disagreements: tuple[str, ...] = ()
    built_files: int | None = None
    ported_from: str = ""


@dataclass(frozen=True)
class Status:
    """Result of `status`.

    Attributes:
        multiworld: version of this package.
        torch: the build.
        patched: what it says of patches.
        nccl: what is done about the backend ``nccl``, why, and what remains.
        backends: what each backend can do here.
        loader: whether ``torch.distributed.multiworld`` is installed; None where torch was not installed from
            a wheel, or that cannot be found out.
        loader_error: why it cannot.
        router: whether the router is on in this process.
        clash: another distribution that installs the import name ``multiworld``; None if there is none.
    """

    multiworld: str
    torch: Build
    patched: Patched
    nccl: Decision
    backends: tuple[BackendAbility, ...]
    loader: Inspection | None
    router: bool
    clash: Clash | None = None
    loader_error: str = ""

    @property
    def sound(self) -> bool:
        """Whether the installation does not contradict itself."""
        return not self.patched.disagreements and self.clash is None

    def as_dict(self) -> dict[str, Any]:
        """Return it as values that JSON knows."""
        found: dict[str, Any] = _plain(asdict(self))
        found["nccl"]["environment"] = dict(self.nccl.environment)
        return found


def status() -> Status:
    """Ask the installed torch what it can do. Loads torch; sets, registers and builds nothing.

    Raises:
        ShimError: torch is not installed, or cannot be imported.
        MultiworldError: an ``M8D_*`` variable has a value that breaks its rule.
    """
    torch = build()
    loader, loader_error = _loader()
    return Status(
        multiworld=__version__,
        torch=torch,
        patched=_patched(),
        nccl=decide_nccl(),
        backends=backend_abilities(),
        loader=loader,
        loader_error=loader_error,
        router=_router_is_on(distributed=torch.distributed),
        clash=find(Path(__file__).parents[1], tuple(sys.path)),
    )


def _patched() -> Patched:
    try:
        marker: Marker | None = marker_of_build()
    except MarkerError as exc:
        return Patched(marked=True, disagreements=(str(exc),))
    if marker is None:
        return Patched(marked=False)
    topics = tuple(topic.name for topic in marker.topics)
    provenance = _provenance(marker)
    return Patched(
        marked=True,
        topics=topics,
        mode=marker.mode,
        version=f"{marker.torch}+{marker.local}",
        disagreements=(*marker.disagreements, *(provenance.faults if provenance else ())),
        built_files=provenance.files if provenance else None,
        ported_from=marker.ported_from,
    )


def _provenance(marker: Marker) -> InstalledProvenance | None:
    try:
        return check_installed(find_site(), marker)
    except InstallError as exc:
        # A marker comes with a wheel: this is no source tree, but an installation that was damaged.
        return InstalledProvenance(0, (f"its files cannot be compared with those that were built: {exc}",))


def _loader() -> tuple[Inspection | None, str]:
    try:
        return inspect(find_site()), ""
    except FromSourceError:
        return None, ""  # nothing is installed into those
    except InstallError as exc:
        return None, str(exc)


def _router_is_on(*, distributed: bool) -> bool:
    if not distributed:
        return False
    return switch.enabled()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)
