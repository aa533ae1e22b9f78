"""``verify``: the rules of a patch series. Pure: findings are returned, nothing is printed or raised."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from m8d_build.errors import PatchRejected
from m8d_build.files.blobs import blob_id
from m8d_build.series.claims import claims_of
from m8d_build.series.diffs import ABSENT, fit
from m8d_build.series.findings import Finding, summary
from m8d_build.series.overlap import Sketch
from m8d_build.series.read import SERIES
from m8d_build.targets import Status

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from m8d_build.series.diffs import FilePatch
    from m8d_build.series.read import Patch, Series
    from m8d_build.targets import Target

__all__ = ["DEFECTS", "reject", "verify"]

# The defects of docs/patching.md; N are those of the nccl2 backend of torch 2.15.
DEFECTS = frozenset({*(f"D{n}" for n in range(9)), *(f"N{n}" for n in range(1, 5))})
LICENCE = "BSD-3-Clause"
TARGETS = "targets.toml"


def verify(target: Target, series: Series, files: Mapping[str, bytes] | None = None) -> list[Finding]:
    """Check a series against its target.

    Args:
        target: what is known of the version.
        series: its patches.
        files: the unpatched sources by path; without them everything but "applies to the sources" is checked.

    Returns:
        What was found, in the order of the files and lines; empty if all is well.
    """
    if target.status is Status.PLANNED and series.text is None and not series.present:
        return []
    found = [*series.faults, *_listing(target, series)]
    for patch in series.patches:
        found += _header(target, patch)
        found += _files(patch)
    found += _chain(target, series)
    found += _overlaps(series)
    found += _marker(target, series)
    if files is not None:
        found += _applies(series, files)
    place = {patch.name: number for number, patch in enumerate(series.patches, 1)}
    return sorted(
        dict.fromkeys(found), key=lambda f: (place.get(f.patch, 0), f.patch, f.line, f.code, f.message)
    )


def reject(version: str, findings: Sequence[Finding]) -> None:
    """Turn findings into an error.

    Raises:
        PatchRejected: there is at least one.
    """
    if findings:
        raise PatchRejected(
            f"the series of {version} breaks {len(findings)} rule{'s' * (len(findings) > 1)}",
            rule="a series is applied only when `verify` finds nothing",
            next_step=f"Correct patches/v{version}; `python -m m8d_build verify {version}` checks it",
            tail=summary(findings),
        )


def _listing(target: Target, series: Series) -> Iterator[Finding]:
    """The ``series`` file, the folder and the target's topics must agree."""
    if series.text is None:
        yield Finding(SERIES, 0, "series", f"patches/v{series.version} has no file named {SERIES}")
    names = [name for _, name in series.listed]
    for line, name in series.listed:
        if names.count(name) > 1:
            yield Finding(SERIES, line, "duplicate", f"{name} is listed {names.count(name)} times")
        if name not in series.present:
            yield Finding(SERIES, line, "missing", f"{name} is listed but not in the folder")
    for name in series.present:
        if name not in names:
            yield Finding(name, 0, "orphan", f"it is in the folder but not listed in {SERIES}")
    topics = series.topics
    for before, patch in zip(series.patches, series.patches[1:], strict=False):
        if patch.number <= before.number:
            yield Finding(
                SERIES, 0, "order", f"{patch.name} comes after {before.name}: the numbers must rise"
            )
        if topics.count(patch.topic) > 1:
            yield Finding(
                patch.name, 0, "duplicate", f"topic {patch.topic} has {topics.count(patch.topic)} patches"
            )
    if topics != target.topics and not series.faults:
        message = f"{target.version}: topics are {_list(target.topics)}, the series has {_list(topics)}"
        yield Finding(TARGETS, 0, "topics", message)


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _header(target: Target, patch: Patch) -> Iterator[Finding]:
    header, text = patch.header, patch.header_text

    def finding(field: str, message: str) -> Finding:
        match = re.search(rf"^{field}:", text, re.MULTILINE)
        return Finding(patch.name, text.count("\n", 0, match.start()) + 1 if match else 0, "header", message)

    if header.topic and header.topic != patch.topic:
        yield finding("Topic", f"Topic is {header.topic!r}, the file is named for {patch.topic!r}")
    if header.upstream and "https://" not in header.upstream and not header.upstream.startswith("not "):
        yield finding("Upstream", "Upstream names a link (https://...) or says 'not reported'")
    if header.licence and LICENCE not in header.licence:
        yield finding(
            "Licence", f"Licence must name PyTorch's licence, {LICENCE}: context lines are PyTorch's"
        )
    for defect in header.ends:
        if defect not in DEFECTS:
            yield finding("Ends", f"{defect!r} is no known defect (D0-D8, N1-N4; '-' for none)")
        elif target.defects and defect not in target.defects:
            yield finding("Ends", f"{target.version} does not have {defect}; it has {_list(target.defects)}")
    if len(set(header.ends)) != len(header.ends):
        yield finding("Ends", "a defect is named twice")


def _files(patch: Patch) -> Iterator[Finding]:
    seen: set[str] = set()
    for file in patch.files:
        if file.path in seen:
            yield Finding(
                patch.name, file.at, "duplicate", f"{file.path} is changed by two diffs of one patch"
            )
        seen.add(file.path)
        if file.created:  # then every line is in the patch, and the blob id can be checked here
            content, misfits = fit(file, None)
            if not misfits and content is not None and blob_id(content) != file.post_blob:
                yield Finding(
                    patch.name, file.at, "blob", f"{file.path}: the new file's blob id is {blob_id(content)}"
                )


def _chain(target: Target, series: Series) -> Iterator[Finding]:
    """Each patch begins where the one before it left the file; the first where upstream has it."""
    state: dict[str, tuple[str, str]] = {}
    for patch in series.patches:
        for file in patch.files:
            blob, owner = state.get(file.path, (target.blob(file.path), TARGETS))
            if not blob and owner == TARGETS:
                if target.status is Status.VERIFIED and not file.created:
                    message = f"{file.path}: {target.version} is verified, so its blob id must be recorded"
                    yield Finding(TARGETS, 0, "blob", message)
            elif file.pre_blob != blob:
                code = "blob" if owner == TARGETS else "chain"
                message = f"{file.path}: begins at blob {file.pre_blob[:12]}, {owner} has {blob[:12]}"
                yield Finding(patch.name, file.at, code, message)
            state[file.path] = (file.post_blob, patch.name)


def _overlaps(series: Series) -> Iterator[Finding]:
    sketches: dict[str, Sketch] = {}
    for patch in series.patches:
        for file in patch.files:
            for clash in sketches.setdefault(file.path, Sketch()).lay(patch.name, file):
                if clash.spoiled:
                    whose = f"{clash.owner} leaves" if clash.owner else "an earlier patch shows"
                    message = f"{file.path}: expects other lines here than {whose}"
                    yield Finding(patch.name, clash.hunk.at, "context", message)
                else:
                    message = (
                        f"{file.path}: changes lines of {clash.owner}; one of the two must hold both changes"
                    )
                    yield Finding(patch.name, clash.hunk.at, "overlap", message)


def _marker(target: Target, series: Series) -> Iterator[Finding]:
    """What the patched library will say of itself must be true."""
    for patch in series.patches:
        for file, claims in ((file, claims_of(file)) for file in patch.files):
            if claims is not None and (claims.torch != target.version or claims.topics != series.topics):
                said = f"torch {claims.torch} with {_list(claims.topics)}"
                message = (
                    f"m8d_patch_info would say {said}; it is {target.version} with {_list(series.topics)}"
                )
                yield Finding(patch.name, file.at, "marker", message)


def _applies(series: Series, files: Mapping[str, bytes]) -> Iterator[Finding]:
    """Apply everything in memory: no fuzz, no offset, and the blob ids the patches name."""
    state: dict[str, bytes | None] = dict(files)
    for patch in series.patches:
        for file in patch.files:
            if file.path not in state and not file.created:
                yield Finding(patch.name, file.at, "source", f"{file.path} is not among the sources")
                continue
            before = state.get(file.path)
            yield from _blob(patch, file, before, file.pre_blob, "is")
            after, misfits = fit(file, before)
            for misfit in misfits:
                at = misfit.hunk.at if misfit.hunk else file.at
                yield Finding(patch.name, at, "fuzz", misfit.reason)
            if misfits:
                after = before
            else:
                yield from _blob(patch, file, after, file.post_blob, "becomes")
            state[file.path] = after


def _blob(patch: Patch, file: FilePatch, content: bytes | None, wanted: str, verb: str) -> Iterator[Finding]:
    blob = ABSENT if content is None else blob_id(content)
    if blob != wanted:
        message = f"{file.path} {verb} blob {blob[:12]}, the patch says {wanted[:12]}"
        yield Finding(patch.name, file.at, "blob", message)
