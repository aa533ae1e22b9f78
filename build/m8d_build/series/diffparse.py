"""A strict reader of git diffs: unidiff parses, and every line must belong to a known construct."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from unidiff.errors import UnidiffParseError
from unidiff.patch import PatchSet

from m8d_build.series.diffs import ABSENT, FilePatch, Hunk, Line, name_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from unidiff.patch import Hunk as ParsedHunk

__all__ = ["Fault", "parse_diff"]

_FILE = re.compile(r"diff --git a/(?P<old>\S+) b/(?P<new>\S+)\n")
_INDEX = re.compile(r"index (?P<pre>[0-9a-f]+)\.\.(?P<post>[0-9a-f]+)(?: (?P<mode>\d+))?\n")
_MODE = re.compile(r"(?P<what>new|deleted) file mode (?P<mode>\d+)\n")
_HUNK = re.compile(r"@@ -\d+(?:,\d+)? \+\d+(?:,\d+)? @@(?: |\n)")
_PATH = re.compile(r"[A-Za-z0-9_.+@-]+(?:/[A-Za-z0-9_.+@-]+)*")
_MODES = ("100644", "100755")


@dataclass(frozen=True)
class Fault:
    """Something in the diff text that is not as it must be.

    Attributes:
        line: 1-based line of the text it was found in.
        code: the rule's short name.
        message: what is wrong.
    """

    line: int
    code: str
    message: str


def parse_diff(text: str, first_line: int = 1) -> tuple[tuple[FilePatch, ...], tuple[Fault, ...]]:
    """Parse plain git diffs.

    unidiff reads over what it does not know; here every line must belong to a file header or to a hunk.

    Args:
        text: one or more ``diff --git`` sections.
        first_line: the line number of the text's first line in the file it came from.

    Returns:
        The files and the faults; with faults, the files may be incomplete.
    """
    raw = [line + "\n" for line in text.split("\n")[:-1]]
    try:
        parsed = PatchSet(raw)
    except UnidiffParseError as exc:
        return (), (Fault(first_line, "hunk", f"the diff cannot be read: {exc}".rstrip(": \n")),)
    faults = [
        Fault(first_line + number, "hunk", "an empty line; an empty context line is written as one space")
        for number, line in enumerate(raw)
        if line in {"\n", "\r\n"}  # unidiff takes either for context
    ]
    files: list[FilePatch] = []
    number = 0
    for entry in parsed:
        head, number = _take_head(raw, number)
        file_at = first_line + number - len(head)
        made = _header("".join(head), [str(line) for line in entry.patch_info or ()], file_at, faults)
        hunks: list[Hunk] = []
        for parsed_hunk in entry:
            if number >= len(raw) or not _HUNK.match(raw[number]):
                break
            hunks.append(_hunk(parsed_hunk, first_line + number))
            number += 1 + len(parsed_hunk)
        if made is not None:
            files.append(FilePatch(*made, hunks=tuple(hunks), at=file_at))
            _check_counts(files[-1], faults)
    if number < len(raw) and not faults:
        faults.append(
            Fault(first_line + number, "hunk", f"this line belongs to no hunk: {raw[number].rstrip()!r}")
        )
    if not files and not faults:
        faults.append(Fault(first_line, "diff", "there is no diff"))
    return tuple(files), tuple(faults)


def _take_head(raw: Sequence[str], number: int) -> tuple[list[str], int]:
    head: list[str] = []
    while (
        number < len(raw)
        and not _HUNK.match(raw[number])
        and not (head and raw[number].startswith("diff --git "))
    ):
        head.append(raw[number])
        number += 1
    return head, number


def _header(head: str, info: Sequence[str], at: int, faults: list[Fault]) -> tuple[str, str, str, str] | None:
    """Read a file's header lines; every one of them must be known."""

    def fault(code: str, message: str) -> None:
        faults.append(Fault(at, code, message))

    first = _FILE.fullmatch(info[0]) if info else None
    if first is None:
        fault("diff", f"a file's diff must begin with 'diff --git a/PATH b/PATH', not {head[:60]!r}")
        return None
    path = first["new"]
    if first["old"] != path:
        fault("diff", f"{first['old']} becomes {path}: renames are written as a deleted and a new file")
    if not _PATH.fullmatch(path) or {"..", ".", ".git", ".m8d"} & set(PurePosixPath(path).parts):
        fault("path", f"{path!r} must be a plain path inside the tree, with no '..', '.git' or '.m8d'")
    index = mode = what = None
    for line in info[1:]:
        if match := _INDEX.fullmatch(line):
            index, mode = match, match["mode"] or mode
        elif match := _MODE.fullmatch(line):
            what, mode = match["what"], match["mode"]
        else:
            fault(
                "diff",
                f"{line.rstrip()!r} is not supported (only index, new file and deleted file lines are)",
            )
    if index is None or len(index["pre"]) != 40 or len(index["post"]) != 40:
        fault(
            "index", f"{path}: the line 'index <pre>..<post>' must name both blob ids in full, 40 hex digits"
        )
        return None
    pre, post = index["pre"], index["post"]
    if (pre == ABSENT) != (what == "new") or (post == ABSENT) != (what == "deleted"):
        fault(
            "index",
            f"{path}: a blob id of zeros goes with 'new file mode' or 'deleted file mode', and only so",
        )
    if mode not in _MODES:
        fault("diff", f"{path}: file mode {mode} must be one of {', '.join(_MODES)}")
    names = head.partition("\n--- ")
    if names[1] and names[1][1:] + names[2] != name_lines(path, pre, post):
        fault("diff", f"{path}: the --- and +++ lines must name this file (or /dev/null)")
    return path, pre, post, mode or ""


def _hunk(parsed: ParsedHunk, at: int) -> Hunk:
    lines: list[Line] = []
    for line in parsed:
        if line.line_type == "\\" and lines:
            last = lines.pop()
            lines.append(Line(last.tag, last.text.removesuffix(b"\n")))
        elif line.line_type in {" ", "+", "-"}:
            lines.append(Line(line.line_type, line.value.encode()))
    return Hunk(
        old_start=parsed.source_start,
        old_count=parsed.source_length,
        new_start=parsed.target_start,
        new_count=parsed.target_length,
        section=parsed.section_header.rstrip("\n"),
        lines=tuple(lines),
        at=at,
    )


def _check_counts(file: FilePatch, faults: list[Fault]) -> None:
    """Hunk headers must agree with the lines below them and with each other."""
    old_end = shift = 0
    for hunk in file.hunks:
        if (len(hunk.old), len(hunk.new)) != (hunk.old_count, hunk.new_count):
            faults.append(Fault(hunk.at, "hunk", "the @@ line's counts are not those of the lines below it"))
        if all(line.tag == " " for line in hunk.lines):
            faults.append(Fault(hunk.at, "hunk", "the hunk changes nothing"))
        if hunk.old_index < old_end:
            faults.append(Fault(hunk.at, "hunk", "the hunk overlaps the one before it, or is out of order"))
        if hunk.new_index != hunk.old_index + shift:
            faults.append(
                Fault(
                    hunk.at,
                    "hunk",
                    f"the @@ line says +{hunk.new_start}; with the hunks before it that is wrong",
                )
            )
        old_end = hunk.old_index + len(hunk.old)
        shift += len(hunk.new) - len(hunk.old)
    if not file.hunks and not (file.created or file.deleted):
        faults.append(Fault(file.at, "hunk", f"{file.path}: nothing is changed"))
