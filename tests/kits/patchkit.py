"""What the tests of the patch algebra make their series, trees and targets with.

Lines carry an identity, so that diffs say exactly which lines were meant, however alike lines are.
"""

from __future__ import annotations

import difflib
import itertools
import subprocess
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from m8d_build.files.blobs import blob_id
from m8d_build.series.diffs import ABSENT, FilePatch, Hunk, Line, render
from m8d_build.series.read import load_series
from m8d_build.targets import load_targets

HEADER = """Topic: {topic}
Reason: a reason that goes
 over two lines.
Upstream: not reported
Ends: {ends}
Drop-when: upstream does it.
Send: as it is.
Licence: context lines are PyTorch's, BSD-3-Clause
---
"""
VERSION = "2.6.0"
NCCL = "torch/csrc/cuda/nccl.cpp"
GROUP = "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp"
NEW = "torch/csrc/distributed/c10d/extra/Marker.cpp"
TOPICS = ["first-topic", "second-topic", "third"]
_ids = itertools.count()


@dataclass(frozen=True)
class Text:
    """A file as (identity, bytes) lines."""

    lines: tuple[tuple[int, bytes], ...]

    @classmethod
    def of(cls, *lines: str) -> Text:
        return cls(tuple((next(_ids), line.encode() + b"\n") for line in lines))

    @property
    def data(self) -> bytes:
        return b"".join(line for _, line in self.lines)

    def replaced(self, start: int, end: int, *lines: str) -> Text:
        """Put new lines in the place of those from start up to end."""
        return Text(self.lines[:start] + Text.of(*lines).lines + self.lines[end:])

    def changed(self, old: str, *new: str) -> Text:
        """Put new lines in the place of the first line that reads ``old``."""
        at = next(i for i, (_, line) in enumerate(self.lines) if line == old.encode() + b"\n")
        return self.replaced(at, at + 1, *new)


def file_diff(path: str, pre: Text | None, post: Text | None, context: int = 1) -> bytes:
    """Return the git diff between two texts, b"" if they are the same."""
    if pre == post:
        return b""
    old, new = (text.lines if text else () for text in (pre, post))
    matcher = difflib.SequenceMatcher(None, [i for i, _ in old], [i for i, _ in new], autojunk=False)
    hunks = []
    for group in matcher.get_grouped_opcodes(context):
        lines = []
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                lines += [Line(" ", text) for _, text in old[i1:i2]]
            else:
                lines += [Line("-", text) for _, text in old[i1:i2]]
                lines += [Line("+", text) for _, text in new[j1:j2]]
        i1, i2, j1, j2 = group[0][1], group[-1][2], group[0][3], group[-1][4]
        starts = (i1 + 1 if i2 > i1 else i1), (j1 + 1 if j2 > j1 else j1)
        hunks.append(Hunk(starts[0], i2 - i1, starts[1], j2 - j1, "", tuple(lines)))
    blobs = [ABSENT if text is None else blob_id(text.data) for text in (pre, post)]
    return render(FilePatch(path, blobs[0], blobs[1], "100644", tuple(hunks)))


def patch_bytes(
    topic: str, pre: dict[str, Text | None], post: dict[str, Text | None], *, ends="D5", context=1
) -> bytes:
    diffs = b"".join(file_diff(p, pre.get(p), post.get(p), context) for p in sorted({*pre, *post}))
    return HEADER.format(topic=topic, ends=ends).encode() + diffs


def series_contents(
    states: list[dict[str, Text | None]], topics: list[str], context: int = 1
) -> dict[str, bytes]:
    """Return the files of a series that goes from each state to the next."""
    names = [f"{number:04}-{topic}.patch" for number, topic in enumerate(topics, 1)]
    contents = {"series": ("# the patches\n" + "".join(f"{name}\n" for name in names)).encode()}
    for name, topic, pre, post in zip(names, topics, states, states[1:], strict=False):
        contents[name] = patch_bytes(topic, pre, post, context=context)
    return contents


@dataclass
class Kit:
    """A patches folder, a tree its series applies to, and what the tree becomes."""

    patches: Path
    tree: Path
    states: list[dict[str, Text | None]]

    @property
    def target(self):
        return load_targets(self.patches).get(VERSION)

    @property
    def series(self):
        return load_series(self.patches, VERSION)

    @property
    def folder(self) -> Path:
        return self.patches / f"v{VERSION}"

    @property
    def final(self) -> dict[str, bytes]:
        return {path: text.data for path, text in self.states[-1].items() if text is not None}


def write_tree(tree: Path, files: dict[str, Text | None], version: str = VERSION) -> None:
    tree.mkdir(parents=True, exist_ok=True)
    (tree / "version.txt").write_text(f"{version}a0\n")
    for path, text in files.items():
        if text is not None:
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes(text.data)


def write_targets(patches: Path, files: dict[str, Text | None], topics: list[str], **extra) -> None:
    entry = {
        "version": VERSION,
        "tag": f"v{VERSION}",
        "status": "applies",
        "topics": topics,
        "defects": ["D5", "D6"],
        "files": {path: blob_id(text.data) for path, text in files.items() if text is not None},
        **extra,
    }
    patches.mkdir(parents=True, exist_ok=True)
    text = "# kept as it is\nschema = 1\n\n" + tomli_w.dumps({"target": [entry]})
    (patches / "targets.toml").write_text(text)


def make_kit(root: Path, states: list[dict[str, Text | None]], topics: list[str], context: int = 1) -> Kit:
    kit = Kit(root / "patches", root / "tree", states)
    write_targets(kit.patches, states[0], topics)
    kit.folder.mkdir()
    for name, data in series_contents(states, topics, context).items():
        (kit.folder / name).write_bytes(data)
    write_tree(kit.tree, states[0])
    return kit


def snapshot(root: Path) -> dict[str, tuple[bytes, int]]:
    """Return every file under a folder with its bytes and mode, .git left out."""
    return {
        path.relative_to(root).as_posix(): (path.read_bytes(), path.stat().st_mode)
        for path in sorted(root.rglob("*"))
        if path.is_file() and ".git" not in path.relative_to(root).parts
    }


def small_states() -> list[dict[str, Text | None]]:
    nccl = Text.of(*(f"nccl line {n}" for n in range(1, 41)))
    group = Text.of(*(f"group line {n}" for n in range(1, 61)))
    first = {
        NCCL: nccl.changed("nccl line 10", "nccl ten", "and more"),
        GROUP: group.changed("group line 5", "five"),
    }
    second = {**first, GROUP: first[GROUP].changed("group line 50", "fifty")}
    third = {
        **second,
        NEW: Text.of("// new", "int marker;"),
        NCCL: first[NCCL].changed("nccl line 40", "nccl line 40", "end"),
    }
    return [{NCCL: nccl, GROUP: group}, first, second, third]


def commit_all(tree, message: str = "sources") -> None:
    for command in (
        ["init", "--quiet"],
        ["add", "--all"],
        ["-c", "user.name=n", "-c", "user.email=e@example.com", "commit", "--quiet", "-m", message],
    ):
        subprocess.run(["git", *command], cwd=tree, check=True)
