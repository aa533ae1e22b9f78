"""Targets: the record of each PyTorch version, read from patches/targets.toml."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from m8d_build.errors import PatchRejected, UnknownVersion

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = ["Abi", "OfficialWheel", "SourceFile", "Status", "Target", "Targets", "Unit", "load_targets"]

SCHEMA = 1
_BLOB = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DIGEST = re.compile(r"[0-9a-f]{12}")


class Status(str, Enum):
    """How far a target has come. Never more than was done."""

    VERIFIED = (
        "verified"  # exact sources seen, patches apply with no fuzz, wheel built and its behaviour tested
    )
    APPLIES = "applies"  # exact or near sources seen (the note says which), patches apply to them
    PLANNED = "planned"  # the version is known; its sources were not seen


@dataclass(frozen=True)
class SourceFile:
    """One upstream file a target touches or compiles.

    Attributes:
        path: relative to the root of PyTorch's repository.
        blob: git blob id (SHA-1 over ``blob <size>\\0<bytes>``), 40 hex digits; "" where it was not seen.
    """

    path: str
    blob: str


@dataclass(frozen=True)
class Unit:
    """One translation unit of the overlay.

    Attributes:
        path: source file relative to PyTorch's repository.
        defines: preprocessor definitions this unit alone gets.
        memory_mb: the compiler's largest resident set in MB, measured (g++ 12); 0 if not measured.
    """

    path: str
    defines: tuple[str, ...] = ()
    memory_mb: int = 0


@dataclass(frozen=True)
class OfficialWheel:
    """An official wheel the target was checked against.

    Attributes:
        filename: as published.
        sha256: of the whole file.
        local: local version label inside the wheel ("cu124").
        git_version: the commit the wheel says it was built from (torch.version.git_version).
    """

    filename: str
    sha256: str
    local: str
    git_version: str


@dataclass(frozen=True)
class Abi:
    """How the official wheel was compiled; compared with what the wheel itself says, never trusted alone."""

    cxx11_abi: bool
    abi_version: int  # -fabi-version; 0 means the compiler's own
    std: str  # gnu++17, gnu++20
    cuda: str  # 12.4


@dataclass(frozen=True)
class Target:
    """Everything the toolchain knows of one PyTorch version."""

    version: str
    tag: str
    commit: str
    status: Status
    note: str
    defects: tuple[str, ...]
    topics: tuple[str, ...]
    files: tuple[SourceFile, ...]
    units: tuple[Unit, ...]
    abi: Abi | None
    wheels: tuple[OfficialWheel, ...]
    distro_version: str  # the distribution's source package with these sources ("" if none)
    pinned_packages: tuple[str, ...]  # packages whose headers the units need, in the version the wheel pins
    build_packages: tuple[str, ...]  # further packages with headers, "name==version"
    # Old definitions that code outside the units goes on calling directly: mangled name to why that is
    # harmless.
    accepted: Mapping[str, str] = field(default_factory=dict)
    # SHA-256 of the source package's original archive: with it, the archive is taken from the distribution's
    # pool when no index names the version any more.
    distro_sha256: str = ""
    # The number in a patched wheel's version ("m8d2"), and the digest of the patches it stands for
    # (`Series.digest`); 0 and "" where it has no number yet.
    build: int = 0
    series: str = ""
    # SHA-256 of the wheels of packages with headers, by "name==version".
    packages: Mapping[str, str] = field(default_factory=dict)
    # The version whose series was carried to this one by `port`; "" where people made or proved the series.
    ported_from: str = ""

    def folder(self, patches: Path) -> Path:
        """Return where this target's series is."""
        return patches / f"v{self.version}"

    def blob(self, path: str) -> str:
        """Return the blob id of an upstream file, "" if it is not recorded."""
        return next((f.blob for f in self.files if f.path == path), "")


@dataclass(frozen=True)
class Targets:
    """All targets, oldest version first."""

    entries: tuple[Target, ...]

    def __iter__(self) -> Iterator[Target]:
        return iter(self.entries)

    def get(self, version: str) -> Target:
        """Return the target of a torch version ("2.6.0"; a leading v and a local label are ignored).

        Raises:
            UnknownVersion: no target has it.
        """
        wanted = version.removeprefix("v").split("+", 1)[0]
        for target in self.entries:
            if target.version == wanted:
                return target
        raise UnknownVersion(
            f"torch {version!r} has no target",
            rule=f"patches/targets.toml has {', '.join(t.version for t in self.entries) or 'none'}",
            next_step="Pick one of these with --torch, or add the version: `python -m m8d_build port --help`",
        )

    def newest_verified(self, python: str) -> Target:
        """Return the newest verified target with an official wheel for a Python tag ("cp311").

        Raises:
            UnknownVersion: none is verified for this Python.
        """
        for target in reversed(self.entries):
            if target.status is Status.VERIFIED and any(f"-{python}-" in w.filename for w in target.wheels):
                return target
        raise UnknownVersion(
            f"no verified target has an official wheel for {python}",
            rule="verified targets are " + (", ".join(self._verified()) or "none"),
            next_step="Name a version with --torch, or run nox with one of these Pythons",
        )

    def _verified(self) -> Iterator[str]:
        for target in self.entries:
            if target.status is Status.VERIFIED:
                tags = sorted({w.filename.split("-")[2] for w in target.wheels})
                yield f"{target.version} ({', '.join(tags)})"


def load_targets(patches: Path) -> Targets:
    """Read patches/targets.toml.

    Raises:
        PatchRejected: the file is missing, is no TOML, or breaks the schema; the message names entry and key.
    """
    path = patches / "targets.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise PatchRejected(
            f"{path} cannot be read: {exc}", rule="it must be a TOML file", next_step="Restore it from git"
        ) from exc
    if data.get("schema") != SCHEMA:
        raise _bad(path, "schema", f"is {data.get('schema')!r}, must be {SCHEMA}")
    entries = [_target(path, entry) for entry in data.get("target", [])]
    versions = [t.version for t in entries]
    if len(set(versions)) != len(versions):
        raise _bad(path, "target", "has one version twice")
    return Targets(tuple(sorted(entries, key=lambda t: Version(t.version))))


def _target(path: Path, raw: Mapping[str, Any]) -> Target:
    where = f"target {raw.get('version', '?')}"
    try:
        abi = raw.get("abi")
        target = Target(
            version=str(Version(raw["version"])),
            tag=raw["tag"],
            commit=raw.get("commit", ""),
            status=Status(raw["status"]),
            note=raw.get("note", ""),
            defects=tuple(raw.get("defects", ())),
            topics=tuple(raw.get("topics", ())),
            files=tuple(SourceFile(p, b) for p, b in raw.get("files", {}).items()),
            units=tuple(
                Unit(u["path"], tuple(u.get("defines", ())), int(u.get("memory_mb", 0)))
                for u in raw.get("units", ())
            ),
            abi=Abi(abi["cxx11_abi"], abi["abi_version"], abi["std"], abi["cuda"]) if abi else None,
            wheels=tuple(
                OfficialWheel(w["filename"], w["sha256"], w["local"], w["git_version"])
                for w in raw.get("wheels", ())
            ),
            distro_version=raw.get("distro_version", ""),
            pinned_packages=tuple(raw.get("pinned_packages", ())),
            build_packages=tuple(raw.get("build_packages", ())),
            accepted=MappingProxyType(dict(raw.get("accepted", {}))),
            distro_sha256=raw.get("distro_sha256", ""),
            build=int(raw.get("build", 0)),
            series=raw.get("series", ""),
            packages=MappingProxyType(dict(raw.get("packages", {}))),
            ported_from=raw.get("ported_from", ""),
        )
    except (KeyError, ValueError, TypeError) as exc:
        raise _bad(path, where, f"breaks the schema: {type(exc).__name__}: {exc}") from exc
    for file in target.files:
        if file.blob and not _BLOB.fullmatch(file.blob):
            raise _bad(path, where, f"blob id of {file.path} is {file.blob!r}, must be 40 hex digits")
    if target.distro_sha256 and not _SHA256.fullmatch(target.distro_sha256):
        raise _bad(path, where, "distro_sha256 must be 64 hex digits")
    if target.build < 0 or bool(target.build) != bool(_DIGEST.fullmatch(target.series)):
        raise _bad(path, where, "needs build (1 or more) and series (12 hex digits), or neither")
    digests = {**target.packages, **{wheel.filename: wheel.sha256 for wheel in target.wheels}}
    for name, sha256 in digests.items():
        if not _SHA256.fullmatch(sha256):
            raise _bad(path, where, f"sha256 of {name} must be 64 hex digits")
    if target.status is Status.VERIFIED and not (
        target.wheels and target.units and target.abi and target.topics
    ):
        raise _bad(path, where, "is verified, so it must name topics, units, abi and wheels")
    if target.status is Status.VERIFIED and target.ported_from:
        raise _bad(path, where, "is verified, so it is not ported_from another any more: leave that key out")
    return target


def _bad(path: Path, where: str, what: str) -> PatchRejected:
    return PatchRejected(
        f"{path}: {where} {what}", next_step="Correct the entry; `git diff` shows what changed"
    )
