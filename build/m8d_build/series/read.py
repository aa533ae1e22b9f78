"""The reader of a series: the ``series`` file, and each patch's header and diffs, as frozen values.

Parsing never raises: what is wrong becomes a finding, so that one run of ``verify`` shows everything.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from m8d_build.files.digests import patches_digest
from m8d_build.series.diffparse import parse_diff
from m8d_build.series.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from m8d_build.series.diffs import FilePatch

__all__ = ["FIELDS", "SERIES", "Header", "Patch", "Series", "load_series", "parse_patch", "parse_series"]

SERIES = "series"
SEPARATOR = "---\n"
# Field name in the patch -> attribute of Header, in the order they are written.
FIELDS = {
    "Topic": "topic",
    "Reason": "reason",
    "Upstream": "upstream",
    "Ends": "ends",
    "Drop-when": "drop_when",
    "Send": "send",
    "Licence": "licence",
}
_NAME = re.compile(r"(?P<number>\d{4})-(?P<topic>[a-z0-9]+(?:-[a-z0-9]+)*)\.patch")
_FIELD = re.compile(r"(?P<name>[A-Z][A-Za-z-]*):(?: (?P<value>.*))?")


@dataclass(frozen=True)
class Header:
    """What a patch says of itself; "" where a field is missing.

    Attributes:
        topic: kebab-case name, the same in the file's name.
        reason: why the patch exists.
        upstream: links, or "not ..." where there is none.
        ends: ids of the defects it ends ("D5"), empty for "-".
        drop_when: when it can be dropped.
        send: what to send upstream.
        licence: whose lines the context is.
    """

    topic: str = ""
    reason: str = ""
    upstream: str = ""
    ends: tuple[str, ...] = ()
    drop_when: str = ""
    send: str = ""
    licence: str = ""


@dataclass(frozen=True)
class Patch:
    """One patch file.

    Attributes:
        name: file name, "0001-group-guard.patch".
        number: the name's number.
        topic: the name's topic (the rules hold that the header says the same).
        header: its fields.
        header_text: everything up to and including the ``---`` line, as it stands in the file.
        files: what it changes.
        data: the whole file.
    """

    name: str
    number: int
    topic: str
    header: Header
    header_text: str
    files: tuple[FilePatch, ...]
    data: bytes

    @property
    def sha256(self) -> str:
        """SHA-256 of the patch file, 64 hex digits: what the marker names it by."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def paths(self) -> tuple[str, ...]:
        """The files it touches."""
        return tuple(file.path for file in self.files)


@dataclass(frozen=True)
class Series:
    """A version's patches in the order they are applied.

    Attributes:
        version: torch version ("2.6.0").
        patches: those that could be parsed, in the order of the ``series`` file.
        text: the ``series`` file; None if there is none.
        listed: (line, file name) as the ``series`` file has them.
        present: names of all other files in the folder, sorted.
        faults: what is wrong with the text of the files; ``rules.verify`` adds the rest.
    """

    version: str
    patches: tuple[Patch, ...]
    text: bytes | None
    listed: tuple[tuple[int, str], ...]
    present: tuple[str, ...]
    faults: tuple[Finding, ...]

    @property
    def topics(self) -> tuple[str, ...]:
        """Topics in order."""
        return tuple(patch.topic for patch in self.patches)

    @property
    def digest(self) -> str:
        """Digest of the patches, as `patches_digest`: 12 hex digits, "" without any."""
        return patches_digest((patch.topic, patch.sha256) for patch in self.patches)

    @property
    def paths(self) -> tuple[str, ...]:
        """Every file the series touches, in the order it is first touched."""
        return tuple(dict.fromkeys(path for patch in self.patches for path in patch.paths))

    def patch(self, topic: str) -> Patch | None:
        """Return the patch of a topic, None if the series has none."""
        return next((patch for patch in self.patches if patch.topic == topic), None)

    def contents(self) -> dict[str, bytes]:
        """Return the folder's files that belong to the series, by name."""
        listing = {SERIES: self.text} if self.text is not None else {}
        return {**listing, **{patch.name: patch.data for patch in self.patches}}


def load_series(patches: Path, version: str) -> Series:
    """Read the series of a version from ``patches/vX.Y.Z``; a missing folder gives an empty series.

    Raises:
        OSError: a file is there and cannot be read.
    """
    folder = patches / f"v{version}"
    contents: dict[str, bytes] = {}
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            contents[path.name] = path.read_bytes() if path.is_file() else b""
    return parse_series(version, contents)


def parse_series(version: str, contents: Mapping[str, bytes]) -> Series:
    """Parse a series from its files' bytes, by file name."""
    text = contents.get(SERIES)
    faults: list[Finding] = []
    listed: list[tuple[int, str]] = []
    if text is not None:
        decoded = _decoded(SERIES, text, faults) or ""
        for number, line in enumerate(decoded.split("\n"), 1):
            if line and not line.startswith("#"):
                listed.append((number, line))
    parsed: dict[str, Patch] = {}
    for name in dict.fromkeys(name for _, name in listed):
        if name in contents:
            patch, found = parse_patch(name, contents[name])
            faults += found
            if patch is not None:
                parsed[name] = patch
    return Series(
        version=version,
        patches=tuple(parsed.values()),
        text=text,
        listed=tuple(listed),
        present=tuple(sorted(name for name in contents if name != SERIES)),
        faults=tuple(faults),
    )


def parse_patch(name: str, data: bytes) -> tuple[Patch | None, tuple[Finding, ...]]:
    """Parse one patch file.

    Returns:
        The patch, None where not even its parts could be told apart, and what is wrong with its text.
    """
    faults: list[Finding] = []
    match = _NAME.fullmatch(name)
    if match is None:
        faults.append(Finding(name, 0, "name", "a patch is named NNNN-topic.patch, the topic in kebab-case"))
        return None, tuple(faults)
    text = _decoded(name, data, faults)
    if text is None:
        return None, tuple(faults)
    head, separator, body = ("\n" + text).partition("\n" + SEPARATOR)
    if not separator:
        faults.append(Finding(name, 0, "header", "there is no line '---' between the header and the diffs"))
        return None, tuple(faults)
    header_text = head[1:] + separator
    header = Header(**dict(_fields(name, header_text, faults)))  # type: ignore[arg-type]  # names are FIELDS' values
    files, wrong = parse_diff(body, first_line=header_text.count("\n") + 1)
    faults += (Finding(name, fault.line, fault.code, fault.message) for fault in wrong)
    patch = Patch(name, int(match["number"]), match["topic"], header, header_text, files, data)
    return patch, tuple(faults)


def _decoded(name: str, data: bytes, faults: list[Finding]) -> str | None:
    """Return the text with LF only; every way it can fall short of that is a finding."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        faults.append(Finding(name, line, "utf8", f"byte 0x{data[exc.start]:02x} is not UTF-8"))
        return None
    if text.startswith("\ufeff"):
        faults.append(Finding(name, 1, "bom", "the file begins with a byte order mark"))
        text = text[1:]
    if "\r" in text:
        line = text.count("\n", 0, text.index("\r")) + 1
        faults.append(Finding(name, line, "crlf", "there are carriage returns; lines end with LF only"))
        text = text.replace("\r\n", "\n").replace("\r", "")
    if not text.endswith("\n"):
        faults.append(Finding(name, text.count("\n") + 1, "final-newline", "the last line has no newline"))
        text += "\n"
    return text


def _fields(name: str, text: str, faults: list[Finding]) -> Iterator[tuple[str, str | tuple[str, ...]]]:
    values: dict[str, list[str]] = {}
    lines: dict[str, int] = {}
    current = ""
    for number, line in enumerate(text.removesuffix(SEPARATOR).split("\n")[:-1], 1):
        if line.startswith(" ") and current:
            values[current].append(line.strip())
            continue
        match = _FIELD.fullmatch(line)
        current = match["name"] if match else ""
        if match is None or current not in FIELDS:
            known = ", ".join(FIELDS)
            faults.append(
                Finding(name, number, "header", f"{line[:50]!r} is no header field; those are {known}")
            )
            current = ""
        elif current in values:
            faults.append(Finding(name, number, "header", f"{current} is there twice"))
        else:
            values[current] = [(match["value"] or "").strip()]
            lines[current] = number
    for field, attribute in FIELDS.items():
        value = " ".join(part for part in values.get(field, ()) if part)
        if not value:
            faults.append(Finding(name, lines.get(field, 0), "header", f"{field} is missing or empty"))
        elif field == "Ends":
            yield attribute, () if value == "-" else tuple(value.split())
        else:
            yield attribute, value
