"""Queries of a source tree through git: commits, changes, whether a patch applies, diffs, merges.

GitPython is imported when a tree turns out to need it, so that plain folders work on a machine without git.
"""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from m8d_build.errors import CommandFailed, PrerequisiteMissing

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

__all__ = [
    "changed_files", "check_applies", "diff_contents", "head_commit", "head_contents", "is_git_tree",
    "merge_contents", "uncommitted",
]  # fmt: skip

TIMEOUT = 300.0
# What a user's configuration must not change: line ends, white space, prefixes, colours, other diff programs.
PINNED = (
    "-c", "core.autocrlf=false", "-c", "core.safecrlf=false", "-c", "core.quotePath=true",
    "-c", "apply.whitespace=nowarn", "-c", "apply.ignoreWhitespace=no", "-c", "core.fsmonitor=false",
)  # fmt: skip
ALONE = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_ATTR_NOSYSTEM": "1",
    "LC_ALL": "C",
}
# Without the variables with which a hook, say, names another repository, and its index.
HERE = (
    "env", "-u", "GIT_DIR", "-u", "GIT_WORK_TREE", "-u", "GIT_INDEX_FILE", "-u", "GIT_OBJECT_DIRECTORY",
    "-u", "GIT_ALTERNATE_OBJECT_DIRECTORIES", "-u", "GIT_COMMON_DIR", "-u", "GIT_NAMESPACE",
    "-u", "GIT_PREFIX",
)  # fmt: skip
DIFF = (
    "diff-tree", "-r", "-p", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames",
    "--text",
    "--diff-algorithm=myers", "--indent-heuristic", "--inter-hunk-context=0", "--src-prefix=a/",
    "--dst-prefix=b/",
)  # fmt: skip


def is_git_tree(tree: Path) -> bool:
    """Return whether a folder is the root of a git work tree (a folder inside one is not)."""
    return (tree / ".git").exists()


def head_commit(tree: Path) -> str:
    """Return the commit a tree is at, "" before the first one.

    Raises:
        CommandFailed: git failed.
        PrerequisiteMissing: git is not there.
    """
    status, out, _ = _git(tree, "rev-parse", "--verify", "--quiet", "HEAD^{commit}", fine=(0, 1))
    return out.decode().strip() if status == 0 else ""


def head_contents(tree: Path, path: str) -> bytes | None:
    """Return a file as it is committed, None if it is not.

    Raises:
        CommandFailed: git failed.
        PrerequisiteMissing: git is not there.
    """
    blob = _committed(tree, [path]).get(path)
    return _git(tree, "cat-file", "blob", blob)[1] if blob else None


def uncommitted(tree: Path, blobs: Mapping[str, str]) -> tuple[str, ...]:
    """Return the paths whose committed, staged and present contents are not all the same.

    Args:
        tree: root of the work tree.
        blobs: by path, the blob id of what is there now; "" if nothing is.

    Raises:
        CommandFailed: git failed.
        PrerequisiteMissing: git is not there.
    """
    paths = list(blobs)
    head, staged = _committed(tree, paths), _staged(tree, paths)
    return tuple(p for p in paths if not head.get(p, "") == staged.get(p, "") == blobs[p])


def changed_files(tree: Path, *, submodules: bool = False) -> tuple[str, ...]:
    """Return the tracked files that differ from the commit, deleted ones included.

    Args:
        tree: root of the work tree.
        submodules: also those submodules in which such files are, whatever .gitmodules says of them.

    Raises:
        CommandFailed: git failed.
        PrerequisiteMissing: git is not there.
    """
    if not head_commit(tree):
        return ()
    more = ["--ignore-submodules=untracked"] if submodules else []
    _, out, _ = _git(tree, "diff", "--name-only", "--no-renames", "--no-ext-diff", "-z", *more, "HEAD", "--")
    return tuple(name for name in out.decode(errors="surrogateescape").split("\0") if name)


def check_applies(tree: Path, diffs: bytes) -> str:
    """Run ``git apply --check`` on diffs, all at once, and return its complaint ("" if it has none).

    Raises:
        CommandFailed: git could not run.
        PrerequisiteMissing: git is not there.
    """
    with _stdin(diffs) as file:
        status, _, err = _git(tree, "apply", "--check", "--unidiff-zero", "-", stdin=file, fine=(0, 1, 128))
    return "" if status == 0 else err.strip() or f"git apply --check ended with {status}"


def diff_contents(
    pre: Mapping[str, bytes], post: Mapping[str, bytes], context: int, executable: Collection[str] = ()
) -> bytes:
    """Return the diff from one set of files to another, the same on every machine.

    Runs in a repository of its own with no configuration but ours.

    Args:
        pre: contents by path before; a path that is only in ``post`` is a new file.
        post: contents by path after; a path that is only in ``pre`` is a deleted file.
        context: lines of context.
        executable: the paths whose mode is 100755.

    Raises:
        CommandFailed: git failed.
        PrerequisiteMissing: git is not there.
    """
    with tempfile.TemporaryDirectory(prefix="m8d-diff-") as name:
        folder = Path(name)
        _git(folder, "init", "--quiet", env=ALONE)
        trees = []
        for contents in (pre, post):
            _git(folder, "read-tree", "--empty", env=ALONE)
            for path, data in contents.items():
                file = folder / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
                file.chmod(0o755 if path in executable else 0o644)
            if contents:
                _git(folder, "--literal-pathspecs", "add", "--force", "--", *contents, env=ALONE)
            trees.append(_git(folder, "write-tree", env=ALONE)[1].decode().strip())
        return _git(folder, *DIFF, f"-U{context}", *trees, env=ALONE)[1]


def merge_contents(base: bytes, ours: bytes, theirs: bytes) -> bytes | None:
    """Merge two changes of one file (``git merge-file``); None if they conflict.

    Raises:
        CommandFailed: git failed.
        PrerequisiteMissing: git is not there.
    """
    with tempfile.TemporaryDirectory(prefix="m8d-merge-") as name:
        folder = Path(name)
        for part, data in (("ours", ours), ("base", base), ("theirs", theirs)):
            (folder / part).write_bytes(data)
        command = ("merge-file", "-p", "--quiet", "ours", "base", "theirs")
        # Its status is the number of conflicts, 127 at most.
        status, out, _ = _git(folder, *command, env=ALONE, fine=tuple(range(128)))
    return out if status == 0 else None


def _committed(tree: Path, paths: Sequence[str]) -> dict[str, str]:
    if not head_commit(tree):
        return {}
    _, out, _ = _git(tree, "ls-tree", "-r", "-z", "--full-tree", "HEAD", "--", *paths)
    rows = (row.partition("\t") for row in out.decode(errors="surrogateescape").split("\0") if row)
    return {path: meta.split()[2] for meta, _, path in rows}


def _staged(tree: Path, paths: Sequence[str]) -> dict[str, str]:
    _, out, _ = _git(tree, "--literal-pathspecs", "ls-files", "--stage", "-z", "--", *paths)
    rows = (row.partition("\t") for row in out.decode(errors="surrogateescape").split("\0") if row)
    return {path: meta.split()[1] for meta, _, path in rows}


@contextmanager
def _stdin(data: bytes) -> Iterator[BinaryIO]:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        yield file


def _git(
    folder: Path,
    *arguments: str,
    stdin: BinaryIO | None = None,
    env: Mapping[str, str] | None = None,
    fine: tuple[int, ...] = (0,),
) -> tuple[int, bytes, str]:
    """Run git through GitPython and return status, output, messages.

    Raises:
        CommandFailed: it ended with a status not in ``fine``, or ran past its time.
        PrerequisiteMissing: git or GitPython is not there.
    """
    try:
        from git.cmd import Git  # noqa: PLC0415  (raises ImportError where there is no git program)
        from git.exc import GitCommandError, GitCommandNotFound  # noqa: PLC0415  (raises ImportError where there is no git program)
    except ImportError as exc:
        raise PrerequisiteMissing(
            f"git cannot be used: {str(exc).splitlines()[0]}",
            rule="a git work tree and export need the git program and GitPython",
            next_step="Install git, or use a plain source folder",
        ) from exc
    git = Git(str(folder))
    git.update_environment(**{"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", **(env or {})})
    try:
        ended = git.execute(
            [*HERE, "git", *PINNED, *arguments],
            istream=stdin,
            with_extended_output=True,
            with_exceptions=False,
            stdout_as_string=False,
            strip_newline_in_stdout=False,
            kill_after_timeout=TIMEOUT,
        )
    except (GitCommandNotFound, GitCommandError) as exc:
        raise CommandFailed(f"git {arguments[0]} in {folder} could not run: {exc}") from exc
    status, out, err = cast("tuple[int, bytes, str | bytes]", ended)  # what it returns for these arguments
    message = err.decode(errors="replace") if isinstance(err, bytes) else err
    if status not in fine:
        raise CommandFailed(
            f"git {arguments[0]} in {folder} exited with {status}",
            next_step="The lines below are git's own",
            tail=message.strip(),
        )
    return status, out, message
