"""Git diffs as values: applied to bytes, written as text again (``diffparse`` reads them).

Nothing here tolerates fuzz or an offset: a hunk fits at the line it names, or it does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


__all__ = ["ABSENT", "FilePatch", "Hunk", "Line", "Misfit", "fit", "name_lines", "render", "split_lines"]

ABSENT = "0" * 40  # git's blob id of a file that is not there
NO_NEWLINE = "\\ No newline at end of file\n"


@dataclass(frozen=True)
class Line:
    """One line of a hunk.

    Attributes:
        tag: " " context, "-" removed, "+" added.
        text: its bytes with the newline; without one only where the file ends without one.
    """

    tag: str
    text: bytes


@dataclass(frozen=True)
class Hunk:
    """One changed place of a file; counts and starts as in the ``@@`` line, in lines from 1."""

    old_start: int
    old_count: int
    new_start: int
    new_count: int
    section: str
    lines: tuple[Line, ...]
    at: int = field(default=0, compare=False)  # line of the @@ in the patch file

    @property
    def old(self) -> tuple[bytes, ...]:
        """What must stand in the file before: context and removed lines."""
        return tuple(line.text for line in self.lines if line.tag != "+")

    @property
    def new(self) -> tuple[bytes, ...]:
        """What stands there after: context and added lines."""
        return tuple(line.text for line in self.lines if line.tag != "-")

    @property
    def old_index(self) -> int:
        """Lines of the file before this hunk (git counts from 1, except for an empty side)."""
        return self.old_start - 1 if self.old_count else self.old_start

    @property
    def new_index(self) -> int:
        """Lines of the changed file before this hunk."""
        return self.new_start - 1 if self.new_count else self.new_start

    @property
    def leading(self) -> int:
        """Context lines before the first change."""
        return next((i for i, line in enumerate(self.lines) if line.tag != " "), len(self.lines))

    @property
    def trailing(self) -> int:
        """Context lines after the last change."""
        return next((i for i, line in enumerate(reversed(self.lines)) if line.tag != " "), len(self.lines))


@dataclass(frozen=True)
class FilePatch:
    """All changes of one patch to one file.

    Attributes:
        path: relative to the root of the tree, with forward slashes.
        pre_blob: git blob id before, ``ABSENT`` for a new file.
        post_blob: git blob id after, ``ABSENT`` for a deleted file.
        mode: git's file mode ("100644" or "100755").
        hunks: in the order of the file.
    """

    path: str
    pre_blob: str
    post_blob: str
    mode: str
    hunks: tuple[Hunk, ...]
    at: int = field(default=0, compare=False)

    @property
    def created(self) -> bool:
        """Whether the patch makes this file."""
        return self.pre_blob == ABSENT

    @property
    def deleted(self) -> bool:
        """Whether the patch removes this file."""
        return self.post_blob == ABSENT

    @property
    def added(self) -> int:
        """Number of lines added."""
        return sum(line.tag == "+" for hunk in self.hunks for line in hunk.lines)

    @property
    def removed(self) -> int:
        """Number of lines removed."""
        return sum(line.tag == "-" for hunk in self.hunks for line in hunk.lines)


@dataclass(frozen=True)
class Misfit:
    """A hunk that does not fit exactly where it says.

    Attributes:
        hunk: which one; None where the file as a whole does not fit.
        reason: what is wrong, in words.
        found: the lines that stand there instead.
    """

    hunk: Hunk | None
    reason: str
    found: tuple[bytes, ...] = ()


def split_lines(data: bytes) -> list[bytes]:
    """Split at newlines (0x0A only, as git does), keeping them."""
    lines = [part + b"\n" for part in data.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def fit(file: FilePatch, content: bytes | None) -> tuple[bytes | None, tuple[Misfit, ...]]:
    """Apply one file's hunks exactly.

    Args:
        file: the changes.
        content: the file's bytes; None if it is not there.

    Returns:
        The bytes after (None: the file is gone) and what did not fit; the bytes mean nothing if something did
        not.
    """
    if file.created and content is not None:
        return content, (Misfit(None, f"{file.path} is there already; the patch makes it"),)
    if not file.created and content is None:
        return None, (Misfit(None, f"{file.path} is not there"),)
    lines = split_lines(content or b"")
    result: list[bytes] = []
    done = 0
    misfits: list[Misfit] = []
    for hunk in file.hunks:
        start, old = hunk.old_index, hunk.old
        found = tuple(lines[start : start + len(old)])
        if start < done or found != old:
            misfits.append(
                Misfit(hunk, f"line {hunk.old_start} of {file.path} is not what the patch expects", found)
            )
            continue
        result += lines[done:start]
        result += hunk.new
        done = start + len(old)
    result += lines[done:]
    if any(not line.endswith(b"\n") for line in result[:-1]):
        misfits.append(Misfit(None, f"{file.path}: a line without a newline that is not the last"))
    if file.deleted and result and not misfits:
        misfits.append(Misfit(None, f"{file.path}: the patch deletes it but does not remove every line"))
    return (None if file.deleted else b"".join(result)), tuple(misfits)


def name_lines(path: str, pre: str, post: str) -> str:
    """Return the --- and +++ lines of a file that goes from one blob id to another."""
    old = "/dev/null" if pre == ABSENT else f"a/{path}"
    new = "/dev/null" if post == ABSENT else f"b/{path}"
    return f"--- {old}\n+++ {new}\n"


def render(file: FilePatch) -> bytes:
    """Write one file's changes as git does (``git diff --full-index``)."""
    return b"".join(_rendered(file))


def _rendered(file: FilePatch) -> Iterator[bytes]:
    yield f"diff --git a/{file.path} b/{file.path}\n".encode()
    if file.created or file.deleted:
        yield f"{'new' if file.created else 'deleted'} file mode {file.mode}\n".encode()
        yield f"index {file.pre_blob}..{file.post_blob}\n".encode()
    else:
        yield f"index {file.pre_blob}..{file.post_blob} {file.mode}\n".encode()
    if file.hunks:
        yield name_lines(file.path, file.pre_blob, file.post_blob).encode()
    for hunk in file.hunks:
        old = f"{hunk.old_start}" + ("" if hunk.old_count == 1 else f",{hunk.old_count}")
        new = f"{hunk.new_start}" + ("" if hunk.new_count == 1 else f",{hunk.new_count}")
        yield f"@@ -{old} +{new} @@{' ' if hunk.section else ''}{hunk.section}\n".encode()
        for line in hunk.lines:
            yield line.tag.encode() + line.text
            if not line.text.endswith(b"\n"):
                yield b"\n" + NO_NEWLINE.encode()
