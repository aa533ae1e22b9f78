"""The places sources can come from, tried in order until one has the right files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from m8d_build.errors import DiskFull, SourceUnreachable
from m8d_build.files.disk import needs_room, remove_tree
from m8d_build.files.lock import CACHE_OPTION, hold
from m8d_build.progress import Silent
from m8d_build.sources.base import SPARSE, SourceTree, Unavailable
from m8d_build.sources.cache import CacheSource, keep
from m8d_build.sources.distro import DistroSource
from m8d_build.sources.git import GitSource
from m8d_build.sources.identity import differences, mismatch, unrecorded
from m8d_build.sources.path import PathSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from m8d_build.progress import Reporter
    from m8d_build.settings import Settings
    from m8d_build.sources.base import Source
    from m8d_build.targets import Target

__all__ = ["CHOICES", "fetch_source", "obtain", "sources_for"]

CHOICES = ("auto", "cache", "git", "distro")
WAIT = 1200.0  # seconds another run may take to fetch the same sources: longer than one fetch may


def sources_for(
    choice: str,
    target: Target,
    settings: Settings,
    *,
    path: Path | None = None,
    allow_unverified: bool = False,
) -> tuple[Source, ...]:
    """Return the places to ask, in order.

    Args:
        choice: "auto", "cache", "git", "distro", or a folder (write ./git for a folder of such a name).
            A tree that git or the distribution gave before is used again when that one is chosen.
        target: whose sources.
        settings: where the cache and the git repository are.
        path: a folder to ask first, with "auto".
        allow_unverified: see fetch_source.
    """
    folder = _folder(settings, target)
    git, distro = GitSource(settings.git_url), DistroSource()

    def cache(*kinds: str) -> CacheSource:
        return CacheSource(folder, kinds, allow_unverified)

    if choice == "auto":
        first = (PathSource(path),) if path else ()
        return (*first, cache("git", "distro"), git, distro)
    if choice == "cache":
        return (cache("git", "distro"),)
    if choice == "git":
        return (cache("git"), git)
    if choice == "distro":
        return (cache("distro"), distro)
    return (PathSource(Path(choice).expanduser()),)


def fetch_source(
    target: Target,
    settings: Settings,
    *,
    source: str = "auto",
    wanted: Sequence[str] = SPARSE,
    allow_unverified: bool = False,
    reporter: Reporter | None = None,
) -> SourceTree:
    """Get PyTorch's sources, from wherever they can be had, and check them.

    Args:
        target: whose sources.
        settings: where the cache and the git repository are.
        source: see sources_for.
        wanted: folders of PyTorch's repository that are needed; files at its top always come along.
        allow_unverified: accept files whose blob ids differ, with a note.
        reporter: told what is tried.

    Raises:
        SourceUnreachable: no place had them; the message lists each and why.
        BlobMismatch: a place had a tree with other files than the target names.
        WrongTree: the folder given holds another version, or no PyTorch.
        BuildBusy: another run has been fetching the same sources for too long.
        DiskFull: there is no room.
        OutputUnwritable: the cache folder cannot be written.
    """
    places = sources_for(source, target, settings, allow_unverified=allow_unverified)
    return obtain(
        target,
        places,
        settings,
        wanted=wanted,
        allow_unverified=allow_unverified,
        reporter=reporter or Silent(),
    )


def obtain(
    target: Target,
    places: Sequence[Source],
    settings: Settings,
    *,
    wanted: Sequence[str],
    allow_unverified: bool,
    reporter: Reporter,
) -> SourceTree:
    """Ask places in order; keep and return the first tree. Arguments and errors are fetch_source's."""
    if all(
        isinstance(place, PathSource) for place in places
    ):  # the cache is not needed, nor a place to write it
        return _first(target, places, settings, wanted, allow_unverified, reporter)
    folder = _folder(settings, target)
    with (
        hold(folder, what=f"fetch the sources of torch {target.version}", wait=WAIT, option=CACHE_OPTION),
        needs_room(folder, f"fetching the sources of torch {target.version}"),
    ):
        return _first(target, places, settings, wanted, allow_unverified, reporter)


def _first(
    target: Target,
    places: Sequence[Source],
    settings: Settings,
    wanted: Sequence[str],
    allow_unverified: bool,
    reporter: Reporter,
) -> SourceTree:
    tried: list[Unavailable] = []
    for place in places:
        answer = _ask(place, target, settings, wanted, allow_unverified)
        if isinstance(answer, SourceTree):
            for note in answer.notes:
                reporter.note(note)
            return answer
        tried.append(answer)
        reporter.note(f"{answer.place}: {answer.reason}")
    listed = "".join(f"\n  {one.place}: {one.reason}" for one in tried)
    raise SourceUnreachable(
        f"The sources of torch {target.version} could not be had; tried:{listed}",
        rule="--source takes auto, cache, git, distro or a folder",
        next_step=f"Get them where there is a network (git clone --depth 1 --branch {target.tag} "
        "https://github.com/pytorch/pytorch.git) and name the folder with --source PATH",
    )


def _ask(
    place: Source, target: Target, settings: Settings, wanted: Sequence[str], allow_unverified: bool
) -> SourceTree | Unavailable:
    folder = _folder(settings, target)
    into = folder / f".work-{place.name}"
    leave = False  # what is in `into` helps the next run
    try:
        if not place.resumable:
            remove_tree(into)
        if not isinstance(place, (PathSource, CacheSource)):
            into.mkdir(parents=True, exist_ok=True)
        leave = place.resumable
        answer = place.provide(target, wanted, into)
        if isinstance(answer, Unavailable):
            return answer
        leave = False
        differing = differences(answer.root, target)
        if differing and not allow_unverified:
            raise mismatch(answer.origin, differing, target)
        root = answer.root
        if not answer.in_place:
            root = keep(
                root, folder / place.name, origin=answer.origin, wanted=wanted, verified=not differing
            )
        notes = [f"unverified: {one}" for one in differing]
        notes += [f"no blob id is recorded for {path}: not checked" for path in unrecorded(target)]
        return SourceTree(root, answer.origin, target, verified=not differing, notes=tuple(notes))
    except DiskFull:  # what is there only takes the room that is missing
        leave = False
        raise
    finally:
        if not leave:
            remove_tree(into)


def _folder(settings: Settings, target: Target) -> Path:
    return settings.cache / "sources" / f"v{target.version}"
