"""The provenance statement of a patched wheel, as data, and where it contradicts the wheel. Pure.

An in-toto statement (https://in-toto.io/Statement/v1) with SLSA's provenance
(https://slsa.dev/spec/v1.0/provenance): its subjects are the files that the build changed or added, its
resolved dependencies are the build's inputs. It does not depend on when, or in which folder, it was made.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from multiworld._c10d.marker import MARKER_NAME
from multiworld.errors import ProvenanceError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from multiworld._c10d.marker import Marker

__all__ = [
    "MARKER_ENTRY",
    "PAYLOAD_TYPE",
    "PORTED",
    "STATEMENT_NAME",
    "Resource",
    "Statement",
    "contradictions",
    "parse_statement",
    "ported_words",
    "statement_bytes",
]

STATEMENT_NAME = "m8d-provenance.json"
"""Name of the statement's file in the wheel's dist-info folder."""

PAYLOAD_TYPE = "application/vnd.in-toto+json"
"""What a signed envelope says of its payload."""

PORTED = "ported"
"""Among the statement's tools: the patches were made for another version."""

MARKER_ENTRY = f"torch/{MARKER_NAME}"

_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://slsa.dev/provenance/v1"
_HEX = re.compile(r"[0-9a-f]{40,64}")
_AGAIN = "Build the wheel again, or take it again from where it came from"


@dataclass(frozen=True)
class Resource:
    """One input of the build.

    Attributes:
        name: for people: a file's name, "name==version" of a package.
        digest: hexadecimal.
        algorithm: "sha256", "gitCommit" or "gitBlob".
        uri: where it can be had; "" if the name says it.
    """

    name: str
    digest: str
    algorithm: str = "sha256"
    uri: str = ""


@dataclass(frozen=True)
class Statement:
    """What was built, and from what.

    Attributes:
        subjects: SHA-256 of each file, by its name in the wheel; of the wheel itself by its file name.
        torch: version it was made from ("2.6.0").
        local: local version label ("cu124.m8d2").
        mode: "overlay" or "full".
        builder: version of the toolchain.
        inputs: in the order of their use.
        tools: what the tools say of themselves, by kind ("compiler", "zlib").
    """

    subjects: Mapping[str, str]
    torch: str
    local: str
    mode: str
    builder: str
    inputs: tuple[Resource, ...]
    tools: Mapping[str, str]


def ported_words(version: str) -> str:
    """Return what is said of a wheel whose patches were made for another version ("2.12.1")."""
    return f"from {version}'s series, not proven by hand"


def statement_bytes(statement: Statement) -> bytes:
    """Return the statement as JSON; the same statement gives the same bytes."""
    raw = {
        "_type": _STATEMENT,
        "subject": [
            {"name": name, "digest": {"sha256": digest}}
            for name, digest in sorted(statement.subjects.items())
        ],
        "predicateType": _PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": f"pkg:pypi/m8d#{statement.mode}",
                "externalParameters": {
                    "torch": statement.torch,
                    "local": statement.local,
                    "mode": statement.mode,
                },
                "internalParameters": dict(sorted(statement.tools.items())),
                "resolvedDependencies": [_resource(each) for each in statement.inputs],
            },
            "runDetails": {"builder": {"id": _builder(statement.builder)}},
        },
    }
    return (json.dumps(raw, indent=1) + "\n").encode()


def parse_statement(data: bytes, *, where: str) -> Statement:
    """Read a statement.

    Args:
        data: JSON.
        where: how errors name it.

    Raises:
        ProvenanceError: it is no statement of a build of ours.
    """
    try:
        statement = _parsed(json.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        what = f"no {exc}" if isinstance(exc, KeyError) else str(exc)
        raise ProvenanceError(
            f"{where} cannot be read: {what}",
            rule="it is an in-toto statement with SLSA provenance, as the toolchain writes it",
            next_step=_AGAIN,
        ) from exc
    return statement


def _parsed(raw: dict[str, Any]) -> Statement:
    if (raw["_type"], raw["predicateType"]) != (_STATEMENT, _PREDICATE):
        raise ValueError(f"its type is {raw['_type']!r}, its predicate {raw['predicateType']!r}")
    build = raw["predicate"]["buildDefinition"]
    asked = build["externalParameters"]
    statement = Statement(
        subjects=_subjects(raw["subject"]),
        torch=str(asked["torch"]),
        local=str(asked["local"]),
        mode=str(asked["mode"]),
        builder=str(raw["predicate"]["runDetails"]["builder"]["id"]).rpartition("@")[2],
        inputs=tuple(_input(each) for each in build["resolvedDependencies"]),
        tools={str(name): str(text) for name, text in build["internalParameters"].items()},
    )
    if json.loads(statement_bytes(statement)) != raw:
        raise ValueError("it says more than such a statement does")
    return statement


def contradictions(
    statement: Statement, marker: Marker | None, digests: Mapping[str, str]
) -> tuple[str, ...]:
    """Return where a statement and the wheel that it lies in differ, one sentence each.

    Args:
        statement: of the wheel.
        marker: the wheel's; None if it has none.
        digests: SHA-256 of the wheel's files, by name.
    """
    found = [
        f"{name} has SHA-256 {digests[name]}, was built with {digest}"
        if name in digests
        else f"{name} was built, and is not there"
        for name, digest in statement.subjects.items()
        if digests.get(name) != digest
    ]
    if marker is None:
        return (*found, f"there is no {MARKER_ENTRY}")
    needed = {MARKER_ENTRY, *([marker.overlay.file] if marker.overlay else [])}
    found += [f"the statement says nothing of {name}" for name in sorted(needed - statement.subjects.keys())]
    for what, said, marked in (
        ("torch", statement.torch, marker.torch),
        ("label", statement.local, marker.local),
        ("mode", statement.mode, marker.mode),
        ("toolchain", statement.builder, marker.builder),
        (
            PORTED,
            statement.tools.get(PORTED, "no"),
            ported_words(marker.ported_from) if marker.ported_from else "no",
        ),
    ):
        if said != marked:
            found.append(f"the statement says {what} {said}, {MARKER_ENTRY} says {marked}")
    inputs = {(each.algorithm, each.digest) for each in statement.inputs}
    if ("gitCommit", marker.commit) not in inputs:
        found.append(f"the statement does not name PyTorch's commit {marker.commit}")
    found += [
        f"the statement does not name the patch {topic.name} with SHA-256 {topic.sha256}"
        for topic in marker.topics
        if ("sha256", topic.sha256) not in inputs
    ]
    return tuple(found)


def _builder(version: str) -> str:
    return f"pkg:pypi/m8d@{version}"


def _resource(each: Resource) -> dict[str, Any]:
    said: dict[str, Any] = {"name": each.name, "digest": {each.algorithm: each.digest}}
    if each.uri:
        said["uri"] = each.uri
    return said


def _input(raw: dict[str, Any]) -> Resource:
    ((algorithm, digest),) = raw["digest"].items()
    return Resource(str(raw["name"]), _hex(digest), str(algorithm), str(raw.get("uri", "")))


def _subjects(raw: list[dict[str, Any]]) -> dict[str, str]:
    found = {str(each["name"]): _hex(each["digest"]["sha256"]) for each in raw}
    if len(found) != len(raw):
        raise ValueError("a subject is named twice")
    return found


def _hex(digest: object) -> str:
    if not isinstance(digest, str) or _HEX.fullmatch(digest) is None:
        raise ValueError(f"{digest!r} is no digest")
    return digest
