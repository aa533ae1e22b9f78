"""Claims of a patched library, read from the patch that adds ``m8d_patch_info``."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from m8d_build.series.diffs import FilePatch

__all__ = ["PREFIX", "Claims", "claims_of", "restate"]

PREFIX = "m8d-patch-info:"
_LITERALS = re.compile(r'(?:"(?:[^"\\\n]|\\.)*"\s*)+')
_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_TORCH = re.compile(rb'(\\"torch\\":\\")[^"\\]*(\\")')
_TOPICS = re.compile(rb'(\\"topics\\":\[)[^\]]*(\])')


@dataclass(frozen=True)
class Claims:
    """What the marker line says.

    Attributes:
        torch: the version.
        topics: in the order of the series.
    """

    torch: str
    topics: tuple[str, ...]


def claims_of(file: FilePatch) -> Claims | None:
    """Return what the lines a patch adds to a file claim, None if they claim nothing.

    C++ joins adjacent string literals, so the line of JSON may be spread over several.
    """
    added = b"".join(line.text for hunk in file.hunks for line in hunk.lines if line.tag == "+")
    for match in _LITERALS.finditer(added.decode(errors="replace")):
        if not match[0].startswith(f'"{PREFIX}'):
            continue
        try:
            # Of the escapes C++ has, the marker needs only those JSON has too.
            text = "".join(json.loads(literal) for literal in _LITERAL.findall(match[0])).removeprefix(PREFIX)
            if text:
                data = json.loads(text)
                return Claims(str(data["torch"]), tuple(str(topic) for topic in data["topics"]))
        except (ValueError, KeyError, TypeError):
            return Claims("(unreadable)", ())
    return None


def restate(file: FilePatch, claims: Claims) -> FilePatch:
    """Return the file's changes with the version and topics in the added lines replaced.

    Lines that hold neither stay as they are; the caller checks with ``claims_of`` that the result says what
    it should.
    """
    topics = ",".join(f'\\"{topic}\\"' for topic in claims.topics).encode()
    said = claims_of(file)
    dropped = [topic for topic in (said.topics if said else ()) if topic not in claims.topics]
    # A list over several lines keeps them: a topic that is left out goes from the line it stands on.
    left_out = re.compile(rb'\\"(?:' + "|".join(map(re.escape, dropped)).encode() + rb')\\",')

    def restated(text: bytes) -> bytes:
        text = _TORCH.sub(lambda m: m[1] + claims.torch.encode() + m[2], text)
        whole = _TOPICS.sub(lambda m: m[1] + topics + m[2], text)
        return left_out.sub(b"", whole) if dropped else whole

    return dataclasses.replace(
        file,
        hunks=tuple(
            dataclasses.replace(
                hunk,
                lines=tuple(
                    dataclasses.replace(line, text=restated(line.text)) if line.tag == "+" else line
                    for line in hunk.lines
                ),
            )
            for hunk in file.hunks
        ),
    )
