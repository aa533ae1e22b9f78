"""Strict unified diffs: hunks apply at their exact lines, or the diff is refused.

The parser is part of the package because the package depends only on the standard library, and because common
parsers accept what is refused here (fuzz, offsets, renames, binary parts, other paths). All data is bytes, so
line ends and encodings are preserved.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from multiworld.errors import InstallError

__all__ = ["FileDiff", "Hunk", "apply_diff", "parse_diff", "reversed_diff"]

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NULL = "/dev/null"
_REFUSED = (
    b"rename from ", b"rename to ", b"copy from ", b"copy to ", b"GIT binary patch", b"Binary files ",
    b"deleted file mode ", b"old mode ", b"new mode ", b"diff --cc ", b"diff --combined ",
)  # fmt: skip
_GIT = b"diff --git "
_NEW = b"new file mode "
# What git writes between the names of a file and its hunks, with the mode of the file.
_HEAD = re.compile(
    rb"(?:new file mode (\S+)|index [0-9a-f]+\.\.[0-9a-f]+(?: (\S+))?|(?:dis)?similarity index \S+)\s*"
)


@dataclass(frozen=True)
class Hunk:
    """One place of a file.

    Attributes:
        old_start, new_start: first line, from 1; 0 where the side has no line.
        old, new: the lines of each side, with their line ends.
    """

    old_start: int
    old: tuple[bytes, ...]
    new_start: int
    new: tuple[bytes, ...]


@dataclass(frozen=True)
class FileDiff:
    """What a patch does to one file.

    Attributes:
        path: below the folder that holds ``torch`` ("torch/distributed/distributed_c10d.py").
        creates: whether the file is new.
        removes: whether it is taken away (only a reversed diff does).
        hunks: in the order of the file; none of one that is empty.
    """

    path: str
    creates: bool
    removes: bool
    hunks: tuple[Hunk, ...]


def parse_diff(data: bytes) -> tuple[FileDiff, ...]:
    """Read a patch file.

    Raises:
        InstallError: it is no unified diff, or asks for something else than changed and new ``*.py`` files
            below torch/.
    """
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    found: list[FileDiff] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        _require_plain(line, at)
        if line.startswith(_GIT) or _has_names(lines, at):
            diff, at = (_git_file if line.startswith(_GIT) else _file)(lines, at)
            found.append(diff)
        elif line.startswith(b"@@ "):
            raise _refused(f"line {at + 1}: {_show(line)}", "a hunk stands below the names of its file")
        else:
            at += 1
    if not found:
        raise _refused("there is no unified diff in it", "a patch has lines with ---, +++ and @@")
    paths = [diff.path for diff in found]
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise _refused(f"{twice} is there twice", "each file is there once")
    return tuple(found)


def apply_diff(diff: FileDiff, before: bytes | None) -> bytes | None:
    """Return the file after the diff; None if it is taken away.

    Args:
        diff: what to do.
        before: the file; None if there is none.

    Raises:
        InstallError: a line is not the one the diff was made against, or the file is the same afterwards.
    """
    if diff.creates:
        if before is not None:
            raise _mismatch(diff.path, "the patch creates it, and it is there already")
    elif before is None:
        raise _mismatch(diff.path, "the patch changes it, and it is not there")
    lines = _split(before or b"")
    made: list[bytes] = []
    at = 0
    for hunk in diff.hunks:
        # A side without lines names the line after which it stands.
        start = hunk.old_start - 1 if hunk.old else hunk.old_start
        if start < at or start > len(lines):
            raise _mismatch(diff.path, f"a hunk at line {hunk.old_start} is out of order, or behind its end")
        made += lines[at:start]
        for offset, line in enumerate(hunk.old):
            there = lines[start + offset] if start + offset < len(lines) else None
            if there != line:
                raise _mismatch(
                    diff.path,
                    f"line {start + offset + 1} is "
                    f"{_show(there) if there is not None else 'behind its end'}, "
                    f"the patch was made against {_show(line)}",
                )
        at = start + len(hunk.old)
        if len(made) != (hunk.new_start - 1 if hunk.new else hunk.new_start):
            raise _mismatch(
                diff.path, f"the hunk at line {hunk.old_start} does not lead to line {hunk.new_start}"
            )
        made += hunk.new
    made += lines[at:]
    if diff.removes:
        if made:
            raise _mismatch(diff.path, "it has more lines than the patch gave it")
        return None
    after = b"".join(made)
    if after == before:
        raise _refused(f"{diff.path} is the same afterwards", "a file that is named is changed")
    return after


def reversed_diff(diff: FileDiff) -> FileDiff:
    """Return the diff that takes this one back."""
    return replace(
        diff,
        creates=diff.removes,
        removes=diff.creates,
        hunks=tuple(Hunk(h.new_start, h.new, h.old_start, h.old) for h in diff.hunks),
    )


def _split(data: bytes) -> list[bytes]:
    # Only \n ends a line: a lone \r stands inside one.
    lines = [line + b"\n" for line in data.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]


def _require_plain(line: bytes, at: int) -> None:
    if line.startswith(_REFUSED):
        raise _refused(f"line {at + 1}: {_show(line)}", "a patch changes files or adds them, nothing else")


def _has_names(lines: list[bytes], at: int) -> bool:
    return at + 1 < len(lines) and lines[at].startswith(b"--- ") and lines[at + 1].startswith(b"+++ ")


def _git_file(lines: list[bytes], at: int) -> tuple[FileDiff, int]:
    first, number, creates = lines[at], at + 1, False
    at += 1
    while at < len(lines) and (head := _HEAD.fullmatch(lines[at])) is not None:
        if (head[1] or head[2] or b"100644") not in {b"100644", b"100755"}:
            raise _refused(
                f"line {at + 1}: {_show(lines[at])}", "files are plain ones (mode 100644 or 100755)"
            )
        creates = creates or lines[at].startswith(_NEW)
        at += 1
    _require_plain(lines[at] if at < len(lines) else b"", at)
    diff = None
    if _has_names(lines, at):
        diff, at = _file(lines, at)
    if not creates:
        if diff is None:
            raise _refused(f"line {number}: {_show(first)}", "a file that is named is changed")
        return diff, at
    # git names a new file twice, and gives an empty one neither further names nor a hunk.
    names = first[len(_GIT) :].strip()
    half = len(names) // 2
    old, new = (_path(_name(b"+++ " + name, number), number) for name in (names[:half], names[half + 1 :]))
    if old != new or (diff is not None and (diff.path, diff.creates) != (new, True)):
        raise _refused(
            f"line {number}: {_show(first)}", "a new file has one name, and its old one is /dev/null"
        )
    return diff or FileDiff(new, creates=True, removes=False, hunks=()), at


def _file(lines: list[bytes], at: int) -> tuple[FileDiff, int]:
    old, new = (_name(lines[at + side], at + side + 1) for side in (0, 1))
    if new == _NULL:
        raise _refused(f"line {at + 2}: {old} is removed", "a patch changes files or adds them, nothing else")
    creates = old == _NULL
    path = _path(new, at + 2)
    if not creates and _path(old, at + 1) != path:
        raise _refused(f"line {at + 1}: {old} becomes {new}", "a patch does not rename files")
    at += 2
    hunks: list[Hunk] = []
    while at < len(lines) and lines[at].startswith(b"@@ "):
        hunk, at = _hunk(lines, at)
        hunks.append(hunk)
    if not hunks:
        raise _refused(f"line {at}: {path} has no hunk", "a file that is named is changed")
    if creates and (len(hunks) > 1 or hunks[0].old):
        raise _refused(f"{path} is new and has old lines", "a new file is one hunk of added lines")
    return FileDiff(path, creates, removes=False, hunks=tuple(hunks)), at


def _hunk(lines: list[bytes], at: int) -> tuple[Hunk, int]:
    found = _HUNK.match(lines[at])
    if found is None:
        raise _refused(
            f"line {at + 1}: {_show(lines[at])}", "a hunk begins with @@ -line,count +line,count @@"
        )
    old_start, old_count, new_start, new_count = (int(group or b"1") for group in found.groups())
    old: list[bytes] = []
    new: list[bytes] = []
    at += 1
    while len(old) < old_count or len(new) < new_count:
        line = lines[at] if at < len(lines) else b"?"
        sign, text = line[:1], line[1:] + b"\n"
        if sign not in {b" ", b"-", b"+"}:
            raise _refused(f"line {at + 1}: {_show(line)}", "a hunk has as many lines as its head says")
        if sign != b"+":
            old.append(text)
        if sign != b"-":
            new.append(text)
        at += 1
        if at < len(lines) and lines[at].startswith(b"\\"):  # "\ No newline at end of file"
            for side in (*((old,) if sign != b"+" else ()), *((new,) if sign != b"-" else ())):
                side[-1] = side[-1][:-1]
            at += 1
    if len(old) != old_count or len(new) != new_count or _goes_on(lines, at):
        raise _refused(f"line {at + 1}: a hunk's lines are not as many as its head says", "the counts agree")
    return Hunk(old_start, tuple(old), new_start, tuple(new)), at


def _goes_on(lines: list[bytes], at: int) -> bool:
    """Whether a line after a hunk looks like part of it, unlike a mail's signature ("-- ") or a next file."""
    line = lines[at] if at < len(lines) else b""
    return line[:1] in {b" ", b"+", b"-"} and not _has_names(lines, at) and line.rstrip() != b"--"


def _name(line: bytes, number: int) -> str:
    text = line[4:].split(b"\t")[0].strip()
    try:
        return text.decode("ascii")
    except UnicodeDecodeError as exc:
        raise _refused(f"line {number}: {_show(line)}", "names are ASCII") from exc


def _path(name: str, number: int) -> str:
    path = name[2:] if name.startswith(("a/", "b/")) else name
    parts = path.split("/")
    if parts[0] != "torch" or len(parts) < 2 or {"", ".", ".."} & set(parts) or "\\" in path or '"' in path:
        raise _refused(
            f"line {number}: {name!r}", "files are below torch/, as in a/torch/distributed/rendezvous.py"
        )
    if not path.endswith(".py"):
        raise _refused(
            f"line {number}: {path}",
            "only Python files (*.py) can be patched in an installed torch; C++ takes `nox -s build-torch`",
        )
    return path


def _show(line: bytes) -> str:
    text = line.decode("utf-8", errors="replace").rstrip("\r\n")
    return repr(text if len(text) < 100 else text[:97] + "...")


def _refused(value: str, rule: str) -> InstallError:
    return InstallError(f"the patch file: {value}", rule=rule, next_step="Correct the patch file")


def _mismatch(path: str, what: str) -> InstallError:
    return InstallError(
        f"{path}: {what}",
        rule="a patch is applied exactly, without fuzz; nothing was changed",
        next_step="Use a patch made for this version of torch, or install that version again",
    )
