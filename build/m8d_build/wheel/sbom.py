"""The CycloneDX bill of materials of a patched wheel (PEP 770: in ``.dist-info/sboms``)."""

from __future__ import annotations

import uuid
from datetime import datetime, timezone
from importlib.metadata import version
from typing import TYPE_CHECKING

from cyclonedx.model import HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import (
    Commit,
    Component,
    ComponentType,
    Diff,
    Patch,
    PatchClassification,
    Pedigree,
)
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from multiworld.provenance.statement import statement_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from multiworld.provenance.statement import Resource, Statement

__all__ = ["SBOM_WRITER", "make_sbom"]

SBOM_WRITER = f"cyclonedx-python-lib {version('cyclonedx-python-lib')}"


def make_sbom(
    statement: Statement, requirements: Mapping[str, str], *, date: tuple[int, int, int, int, int, int]
) -> bytes:
    """Return the bill of materials; the same arguments give the same bytes.

    Args:
        statement: what was built, and from what.
        requirements: packages that the wheel pins, name to version.
        date: of the official wheel, as its own entries say it (UTC): the bill has no other date.
    """
    patched = f"{statement.torch}+{statement.local}"
    bom = Bom(
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, statement_bytes(statement).decode()),
    )
    bom.metadata.timestamp = datetime(*date, tzinfo=timezone.utc)
    maker = f"m8d@{statement.builder}"
    bom.metadata.tools.components.add(
        Component(name="m8d", version=statement.builder, type=ComponentType.APPLICATION, bom_ref=maker)
    )
    commits = [each for each in statement.inputs if each.algorithm == "gitCommit"]
    torch = bom.metadata.component = Component(
        name="torch",
        version=patched,
        type=ComponentType.LIBRARY,
        bom_ref=f"torch@{patched}",
        purl=PackageURL("pypi", name="torch", version=patched),
        components=[_file(name, digest) for name, digest in statement.subjects.items()],
        pedigree=Pedigree(
            ancestors=[_ancestor(each, statement) for each in statement.inputs if each.name.endswith(".whl")],
            commits=[Commit(uid=each.digest) for each in commits],
            patches=[_patch(each) for each in statement.inputs if each.name.endswith(".patch")],
            notes=f"Made by multiworld's toolchain ({statement.mode} build); not an official build.",
        ),
    )
    packages = [_package(name, pinned) for name, pinned in requirements.items()]
    bom.components.update(packages)
    bom.register_dependency(torch, packages)
    return (JsonV1Dot6(bom).output_as_string(indent=1) + "\n").encode()


def _ancestor(wheel: Resource, statement: Statement) -> Component:
    return Component(
        name="torch",
        version=statement.torch,
        type=ComponentType.LIBRARY,
        bom_ref=wheel.name,
        purl=PackageURL("pypi", name="torch", version=statement.torch, qualifiers={"file_name": wheel.name}),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=wheel.digest)],
    )


def _patch(patch: Resource) -> Patch:
    name = PackageURL("generic", name=patch.name, qualifiers={"checksum": f"sha256:{patch.digest}"})
    return Patch(type=PatchClassification.UNOFFICIAL, diff=Diff(url=XsUri(name.to_string())))


def _file(name: str, digest: str) -> Component:
    return Component(
        name=name,
        type=ComponentType.FILE,
        bom_ref=name,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
    )


def _package(name: str, pinned: str) -> Component:
    return Component(
        name=name,
        version=pinned,
        type=ComponentType.LIBRARY,
        bom_ref=f"{name}@{pinned}",
        purl=PackageURL("pypi", name=name, version=pinned),
    )
