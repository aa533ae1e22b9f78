"""Plan for a version without a series: whose series, which packages, which sources. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from packaging.version import Version

from m8d_build.errors import BlobMismatch, PrerequisiteMissing, UnknownVersion
from m8d_build.sources.distro import origin_of
from m8d_build.targets import Status, Target, Targets

if TYPE_CHECKING:
    from m8d_build.sources.base import SourceTree

__all__ = [
    "header_packages",
    "nearest_series",
    "needs_port",
    "not_proven",
    "proof",
    "recorded_packages",
    "unlisted",
]


def needs_port(target: Target) -> bool:
    """Return whether a version has no series of its own."""
    return target.status is Status.PLANNED and not target.topics


def unlisted(version: str) -> Target:
    """Return a target for a version that targets.toml does not have.

    Raises:
        UnknownVersion: it is no version of a release.
    """
    found = re.fullmatch(r"v?(\d+\.\d+\.\d+)(\+.*)?", version)
    if found is None:  # a candidate for a release ("2.8.0rc1") has other sources than the release
        raise UnknownVersion(f"{version!r} is no version of a release", next_step="Name it as in 2.7.0")
    name = found[1]
    return Target(
        version=name,
        tag=f"v{name}",
        commit="",
        status=Status.PLANNED,
        note="it is not in targets.toml",
        defects=(),
        topics=(),
        files=(),
        units=(),
        abi=None,
        wheels=(),
        distro_version="",
        pinned_packages=(),
        build_packages=(),
    )


def nearest_series(targets: Targets, version: str) -> Target:
    """Return the verified target whose series is ported to a version: the nearest, of two the newer.

    Raises:
        UnknownVersion: none is verified.
    """
    wanted = Version(version)

    def distance(target: Target) -> tuple[int, int]:
        other = Version(target.version)
        # Code changes from minor version to minor version.
        minors = abs((other.major - wanted.major) * 1000 + other.minor - wanted.minor)
        return minors, abs(other.micro - wanted.micro)

    verified = [target for target in reversed(targets.entries) if target.status is Status.VERIFIED]
    if not verified:
        raise UnknownVersion(
            f"torch {version} has no series, and no version has one that is verified",
            rule="a series is ported from a verified one",
            next_step="Restore patches/targets.toml from git",
        )
    return min(verified, key=distance)  # newest first: of two as near, the newer


def header_packages(target: Target, targets: Targets, cuda: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the packages with headers: names that the wheel pins, and "name==version" of the others.

    Args:
        target: the version that is built; what it names itself is taken.
        targets: the others: those of the nearest with the same CUDA are taken.
        cuda: of the official wheel ("12.8").

    Raises:
        PrerequisiteMissing: no version on record is built with this CUDA.
    """
    if target.pinned_packages or target.build_packages:
        return target.pinned_packages, target.build_packages
    alike = tuple(
        other for other in targets if other.status is Status.VERIFIED and other.abi and other.abi.cuda == cuda
    )
    if not alike:
        known = sorted({other.abi.cuda for other in targets if other.status is Status.VERIFIED and other.abi})
        raise PrerequisiteMissing(
            f"the official wheel of torch {target.version} is built with CUDA {cuda or 'none'}",
            rule=f"packages with headers are on record for CUDA {', '.join(known) or 'none'}",
            next_step=f"Write pinned_packages and build_packages into the entry of {target.version} in "
            "patches/targets.toml, as those of another version, or give a wheel of such a CUDA with --wheel",
        )
    other = nearest_series(Targets(alike), target.version)
    return other.pinned_packages, other.build_packages


def recorded_packages(target: Target, targets: Targets) -> dict[str, str]:
    """Return the SHA-256 of every package on record, by "name==version"; the target's own entry goes first.

    A key names one release of a package, so what one version has on record holds for every other.
    """
    merged: dict[str, str] = {}
    for entry in (*targets, target):
        merged |= entry.packages
    return merged


def proof(tree: SourceTree, target: Target, commit: str, head: str) -> str:
    """Return what shows that a tree has a version's sources, "" if nothing does.

    Args:
        tree: the sources.
        target: the version.
        commit: that the official wheel says it was built from.
        head: that the tree is at; "" if that is not known.
    """
    if commit and head == commit:
        return f"they are at commit {commit}, which the official wheel names"
    if target.distro_version and tree.origin == origin_of(target.distro_version):
        return f"they are the distribution's {target.distro_version}, which targets.toml names"
    return ""


def not_proven(tree: SourceTree, target: Target, commit: str, head: str) -> BlobMismatch:
    """Return the error for sources of which nothing shows that they are the version's."""
    return BlobMismatch(
        f"{tree.origin} is " + (f"at commit {head}" if head else "at no commit that is known"),
        rule=f"the official wheel of torch {target.version} was built from commit {commit}, and no blob ids "
        "are on record",
        next_step=f"Take --source git, or a checkout of {target.tag} without changes; or "
        "--allow-unverified, if you know what differs",
    )
