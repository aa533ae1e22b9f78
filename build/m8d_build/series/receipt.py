"""The receipt that ``apply`` leaves in a source tree; ``revert`` and ``export`` need nothing else.

One file, ``.m8d/receipt.json``, put in place in one move: which patches (with their text), and for each
touched file the blob ids before and after and the bytes before.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from m8d_build.errors import NotApplied
from m8d_build.files.blobs import blob_id
from m8d_build.series.diffs import ABSENT
from m8d_build.series.paths import require_inside
from m8d_build.series.read import SERIES, Series, parse_series

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["RECEIPT", "Receipt", "Touched", "dump_receipt", "load_receipt", "pack", "unpack"]

RECEIPT = ".m8d/receipt.json"
SCHEMA = 1


@dataclass(frozen=True)
class Touched:
    """One file the series changed.

    Attributes:
        path: relative to the tree.
        pre: its bytes before, None if it was not there.
        post_blob: git blob id after, ``ABSENT`` if it was deleted.
        mode: permission bits.
    """

    path: str
    pre: bytes | None
    post_blob: str
    mode: int

    @property
    def pre_blob(self) -> str:
        """Git blob id before, ``ABSENT`` if the file was not there."""
        return ABSENT if self.pre is None else blob_id(self.pre)


@dataclass(frozen=True)
class Receipt:
    """What was applied to a tree.

    Attributes:
        version: torch version.
        verified: the sources had the blob ids the target records.
        series: the patches, as they were.
        files: every touched file.
        folders: folders that had to be made, outermost first.
    """

    version: str
    verified: bool
    series: Series
    files: tuple[Touched, ...]
    folders: tuple[str, ...] = ()

    @property
    def topics(self) -> tuple[str, ...]:
        """Topics in order."""
        return self.series.topics


def pack(data: bytes | None) -> str | None:
    """Return bytes as text for JSON: zlib, then base64."""
    return None if data is None else base64.b64encode(zlib.compress(data, 6)).decode()


def unpack(text: str | None) -> bytes | None:
    """Return what ``pack`` was given.

    Raises:
        ValueError: the text is damaged.
    """
    try:
        return None if text is None else zlib.decompress(base64.b64decode(text, validate=True))
    except zlib.error as exc:
        raise ValueError(str(exc)) from exc


def dump_receipt(receipt: Receipt) -> bytes:
    """Return the receipt as the bytes of its file."""
    series = receipt.series
    data = {
        "schema": SCHEMA,
        "torch": receipt.version,
        "verified": receipt.verified,
        "topics": list(receipt.topics),
        "series": (series.text or b"").decode(),
        "patches": [
            {"name": p.name, "topic": p.topic, "sha256": p.sha256, "text": p.data.decode()}
            for p in series.patches
        ],
        "files": [
            {
                "path": file.path,
                "mode": file.mode,
                "pre_blob": file.pre_blob,
                "post_blob": file.post_blob,
                "pre": pack(file.pre),
            }
            for file in receipt.files
        ],
        "folders": list(receipt.folders),
    }
    return json.dumps(data, indent=1).encode() + b"\n"


def load_receipt(tree: Path) -> Receipt | None:
    """Read a tree's receipt, None if it has none.

    Raises:
        NotApplied: there is one and it cannot be trusted: it is damaged, or names what is outside the tree.
    """
    path = tree / RECEIPT
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        receipt = _parse(json.loads(raw))
        require_inside(tree, [*receipt.series.paths, *(f.path for f in receipt.files), *receipt.folders])
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise NotApplied(
            f"{path} is damaged: {type(exc).__name__}: {exc}",
            rule="it says what was applied, and holds the files as they were before",
            next_step=f"Restore the sources (git checkout, or unpack them again) and delete {path.parent}",
        ) from exc
    return receipt


def _parse(data: dict[str, Any]) -> Receipt:
    if data["schema"] != SCHEMA:
        raise ValueError(f"schema is {data['schema']!r}, must be {SCHEMA}")
    contents = {SERIES: data["series"].encode(), **{p["name"]: p["text"].encode() for p in data["patches"]}}
    series = parse_series(data["torch"], contents)
    for patch, said in zip(series.patches, data["patches"], strict=True):
        if patch.sha256 != said["sha256"]:
            raise ValueError(f"the text of {patch.name} is not the one its sha256 names")
    files = tuple(
        Touched(f["path"], unpack(f["pre"]), f["post_blob"], int(f["mode"]) & 0o777) for f in data["files"]
    )
    for file, said in zip(files, data["files"], strict=True):
        if file.pre_blob != said["pre_blob"]:
            raise ValueError(f"the stored bytes of {file.path} are not those its blob id names")
    return Receipt(data["torch"], bool(data["verified"]), series, files, tuple(data["folders"]))
