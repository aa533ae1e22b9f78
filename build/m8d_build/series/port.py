"""``port``: a series carried to another version, with its targets entry, or every conflict shown.

Nothing is written unless every hunk has exactly one place and the result passes ``verify``.
"""

from __future__ import annotations

import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
from packaging.version import InvalidVersion, Version

from m8d_build.errors import DirtyTree, PatchRejected, PortConflict, UnknownVersion, WrongTree
from m8d_build.files.blobs import blob_id
from m8d_build.gitrepo.tree import head_commit, is_git_tree, uncommitted
from m8d_build.series.apply import pristine_files, tree_version
from m8d_build.series.carrying import carry_series, counts, shown
from m8d_build.series.read import parse_series
from m8d_build.series.transaction import Change, locked, read_file, repair, swap
from m8d_build.series.verify import reject, verify
from m8d_build.targets import Status, load_targets

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from m8d_build.series.carrying import CarriedSeries, CarriedTopic
    from m8d_build.series.read import Patch, Series
    from m8d_build.targets import Target, Targets

__all__ = ["Ported", "port_series", "with_entry"]

TARGETS = "targets.toml"
HEADING = "[[target]]"


@dataclass(frozen=True)
class Ported:
    """A series that carried over.

    Attributes:
        target: the new target.
        series: the new series.
        topics: what became of each patch.
    """

    target: Target
    series: Series
    topics: tuple[CarriedTopic, ...]

    @property
    def exact(self) -> int:
        """Number of hunks that kept their place."""
        return counts(self.topics)[0]

    @property
    def moved(self) -> int:
        """Number of hunks that have another line number."""
        return counts(self.topics)[1]


def port_series(
    patches: Path,
    series: Series,
    to: str,
    tree: Path,
    *,
    from_tree: Path | None = None,
    drop: Sequence[str] = (),
    dry_run: bool = False,
    more: Mapping[str, Any] | None = None,
    tell: Callable[[Sequence[CarriedTopic]], object] = lambda _: None,
) -> Ported:
    """Carry a series to another version and write its folder and targets entry.

    Args:
        patches: the folder with targets.toml and the series.
        series: the series to carry.
        to: the version to carry it to.
        tree: that version's sources; they are only read.
        from_tree: the sources the series was made for, to tell equal places apart.
        drop: topics to leave out.
        dry_run: write nothing.
        more: further keys of the version's entry in targets.toml.
        tell: called with what became of each patch, before a conflict is raised.

    Raises:
        PortConflict: hunks have no place, or more than one; or the version has a series already.
        UnknownVersion: ``to`` is no version.
        WrongTree: a tree is of another version.
        DirtyTree: files the series touches have changes that are not committed.
        PatchRejected: the series itself, or the result, breaks a rule.
    """
    to = _version(to)
    targets = load_targets(patches)
    source = targets.get(series.version)
    reject(source.version, verify(source, series))
    unknown = [topic for topic in drop if topic not in series.topics]
    if unknown:
        raise PatchRejected(
            f"the series has no topic {', '.join(unknown)}", rule=f"its topics are {', '.join(series.topics)}"
        )
    for folder, version in ((tree, to), *([(from_tree, source.version)] if from_tree else [])):
        if (found := tree_version(folder)) != version:
            raise WrongTree(f"{folder} is PyTorch {found}", rule=f"the sources of {version} are needed")
    _refuse_existing(patches, to)
    before = _sources(tree, series.paths)
    kept = [patch for patch in series.patches if patch.topic not in drop]
    carried = carry_series(series, kept, to, before, _sources(from_tree, series.paths) if from_tree else None)
    tell(carried.topics)
    if any(topic.refused for topic in carried.topics):
        raise _conflict(series, to, carried)
    with locked(patches):
        if not dry_run:
            repair(patches)
        old = read_file(patches, TARGETS) or b""
        raw = _raw(old, source.version)
        entry = {**_entry(raw, source, kept, to, tree, topics=carried.topics), **(more or {})}
        text = with_entry(old.decode("utf-8"), entry)
        target = _read_back(text).get(to)
        contents = {name: _ends(data, target) for name, data in carried.contents.items()}
        result = parse_series(to, contents)
        reject(to, verify(target, result, before))
        if not dry_run:
            new = [Change(f"v{to}/{name}", None, data) for name, data in contents.items()]
            swap(patches, [*new, Change(TARGETS, old, text.encode())])
    return Ported(target, result, carried.topics)


def _version(text: str) -> str:
    try:
        return str(Version(text))
    except InvalidVersion as exc:
        raise UnknownVersion(f"{text!r} is no version", next_step="Name it as in 2.7.0") from exc


def _refuse_existing(patches: Path, to: str) -> None:
    folder = patches / f"v{to}"
    entry = next((target for target in load_targets(patches) if target.version == to), None)
    if folder.exists() or (entry is not None and entry.status is not Status.PLANNED):
        raise PortConflict(
            f"{to} has a {'series in ' + str(folder) if folder.exists() else 'target already'}",
            rule="port writes a new series, it replaces none",
            next_step=f"Remove {folder} and its entry in {TARGETS} first, if it is to be made anew",
        )


def _sources(tree: Path, paths: Sequence[str]) -> dict[str, bytes]:
    contents = pristine_files(tree, paths)
    if is_git_tree(tree):
        now = {path: read_file(tree, path) for path in contents}
        same = {path: blob_id(contents[path]) for path, data in now.items() if data == contents[path]}
        changed = uncommitted(tree, same)
        if changed:
            raise DirtyTree(
                f"not committed in {tree}: {', '.join(changed)}", next_step="Commit or undo these changes"
            )
    return contents


def _conflict(series: Series, to: str, carried: CarriedSeries) -> PortConflict:
    conflicts = [(topic.patch, conflict) for topic in carried.topics for conflict in topic.refused]
    return PortConflict(
        f"{len(conflicts)} hunk{'s' * (len(conflicts) > 1)} of {series.version}'s series "
        f"{'have' if len(conflicts) > 1 else 'has'} no one place in {to}",
        rule="a hunk is carried where its lines stand exactly once; nothing was written",
        next_step="Port these by hand (apply the rest, edit, `export`), or leave a topic out with --drop",
        tail="\n".join(shown(series.version, to, patch, conflict) for patch, conflict in conflicts),
    )


def _ends(data: bytes, target: Target) -> bytes:
    """Leave out of ``Ends:`` the defects the new version is known not to have."""

    def kept(match: re.Match[bytes]) -> bytes:
        words = [word for word in match[1].decode().split() if word in target.defects]
        return b"Ends: " + (" ".join(words) or "-").encode()

    head, separator, body = data.partition(b"\n---\n")
    return re.sub(rb"^Ends:((?: .*)(?:\n .*)*)", kept, head, flags=re.MULTILINE) + separator + body


def _raw(text: bytes, version: str) -> dict[str, Any]:
    """Return an entry as targets.toml has it, with the keys only other parts of the toolchain read."""
    entries: list[dict[str, Any]] = tomllib.loads(text.decode("utf-8"))["target"]
    return next(entry for entry in entries if str(Version(entry["version"])) == version)


def _read_back(text: str) -> Targets:
    """Read a targets.toml that is not in its place yet."""
    with tempfile.TemporaryDirectory(prefix="m8d-port-") as name:
        path = Path(name)
        (path / TARGETS).write_text(text, encoding="utf-8")
        return load_targets(path)


def _entry(
    raw: Mapping[str, Any],
    source: Target,
    kept: Sequence[Patch],
    to: str,
    tree: Path,
    *,
    topics: Sequence[CarriedTopic],
) -> dict[str, Any]:
    paths = dict.fromkeys(
        [*(file.path for file in source.files), *(p for patch in kept for p in patch.paths)]
    )
    seen = pristine_files(tree, list(paths))
    commit = head_commit(tree) if is_git_tree(tree) else ""
    exact, moved = counts(topics)
    at = f", git checkout at {commit[:12]}" if commit else ""
    return {
        "version": to,
        "tag": f"v{to}",
        "status": Status.APPLIES.value,
        "ported_from": source.version,
        "note": f"ported from {source.version}: {exact} hunks in place, {moved} moved{at}; not built, not "
        "tested; defects are those the patches end",
        "defects": sorted({defect for patch in kept for defect in patch.header.ends}),
        "topics": [patch.topic for patch in kept],
        "units": [unit for unit in raw.get("units", []) if (tree / unit["path"]).is_file()],
        "files": {path: blob_id(data) for path, data in seen.items()},
    }


def with_entry(text: str, entry: Mapping[str, Any]) -> str:
    """Return the text of targets.toml with an entry added at its end, every other byte kept.

    An entry of that version that is only planned gives way: it is rewritten in its place and keeps the keys
    the new one does not have, and what it says of the version's tag and defects.

    Raises:
        PatchRejected: the entry cannot be placed without changing another one.
    """
    before = tomllib.loads(text).get("target", [])
    old = next((e for e in before if str(e.get("version")) == entry["version"]), None)
    if old is None:
        new = text.rstrip("\n") + "\n\n" + _toml(entry)
    else:
        known = {key: old[key] for key in ("tag", "defects") if old.get(key)}
        start, end = _block(text, entry["version"])
        new = text[:start] + _toml({**old, **entry, **known}) + text[end:]
    after = tomllib.loads(new)["target"]
    others = [
        [e for e in entries if str(e.get("version")) != entry["version"]] for entries in (before, after)
    ]
    if others[0] != others[1] or len(after) != len(others[1]) + 1:
        raise PatchRejected(
            f"{TARGETS} cannot take an entry of {entry['version']} without changing another",
            next_step="Add it by hand",
        )
    return new


def _toml(entry: Mapping[str, Any]) -> str:
    # As one table of an array: written as a list, short entries would become one line.
    return tomli_w.dumps({"target": dict(entry)}).replace("[target]", HEADING, 1)


def _block(text: str, version: str) -> tuple[int, int]:
    """Return where a version's entry begins and ends, comments and empty lines after it not counted."""
    starts = [match.start() for match in re.finditer(rf"^{re.escape(HEADING)}", text, re.MULTILINE)]
    for start, end in zip(starts, [*starts[1:], len(text)], strict=False):
        block = text[start:end]
        if tomllib.loads(block)["target"][0]["version"] == version:
            lines = block.split("\n")
            while lines and (not lines[-1].strip() or lines[-1].startswith("#")):
                lines.pop()
            return start, start + len("\n".join(lines)) + 1
    raise PatchRejected(f"{TARGETS} has no separate entry of {version}", next_step="Add it by hand")
