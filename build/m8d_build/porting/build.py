"""An overlay build of a version without a series: its sources proven, the nearest series ported."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from m8d_build.environments.download import WheelRequest, get_wheel
from m8d_build.errors import BuildError, PortConflict, SourceUnreachable
from m8d_build.files.blobs import file_sha256
from m8d_build.files.disk import needs_room, remove_tree
from m8d_build.files.lock import hold, using
from m8d_build.gitrepo.tree import changed_files, head_commit, is_git_tree
from m8d_build.overlay.build import OverlayRequest, build_overlay
from m8d_build.overlay.plan import Step
from m8d_build.porting.decide import (
    header_packages,
    nearest_series,
    not_proven,
    proof,
    recorded_packages,
)
from m8d_build.porting.report import SUFFIX, PortReport, Recorder, write
from m8d_build.series.port import port_series
from m8d_build.series.read import load_series
from m8d_build.sources import fetch_source
from m8d_build.targets import load_targets
from m8d_build.wheel.wheelfile import open_wheel

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from m8d_build.overlay.build import Built
    from m8d_build.progress import Reporter
    from m8d_build.series.carrying import CarriedTopic
    from m8d_build.series.port import Ported
    from m8d_build.settings import Settings
    from m8d_build.sources import SourceTree
    from m8d_build.targets import Targets
    from m8d_build.wheel.wheelfile import WheelFile

__all__ = ["EXPECTED", "PortedBuild", "build_ported"]

OFFICIAL, SOURCES, PORT = "official wheel, to port", "sources, to port", "port"
EXPECTED = ((OFFICIAL, 15.0), (SOURCES, 30.0), (PORT, 1.0), *Step.expected())
TARGETS = "targets.toml"


@dataclass(frozen=True)
class PortedBuild:
    """A patched wheel whose patches were ported.

    Attributes:
        built: the wheel.
        ported_from: whose series.
        report: on the port, beside the wheel.
    """

    built: Built
    ported_from: str
    report: Path


def build_ported(request: OverlayRequest, settings: Settings, reporter: Reporter) -> PortedBuild:
    """Port the nearest series to a version that has none, and build it.

    The checkout's patches stay as they are: the ported series is written into the output folder, with the
    report, which is also there when the build fails.

    Raises:
        PortConflict: a hunk has no one place; nothing was built.
        BlobMismatch: nothing shows that the sources are those of the official wheel.
        PrerequisiteMissing: the packages with headers for the wheel's CUDA are not on record.
        BuildError: as ``build_overlay``.
    """
    version = request.target.version
    targets = load_targets(settings.patches)
    folder = settings.out / f"port-{version}-{request.python}"
    # Sources and wheels are looked at here, and used by the build: none may be pruned in between.
    with hold(folder, what=f"port the patches to torch {version}"), using(settings.cache):
        recorder = Recorder(reporter)
        report = PortReport(
            version, request.python, nearest_series(targets, version).version, folder / "patches"
        )
        path = folder / "report.json"
        port = _Port(request, settings, recorder, targets, report)
        try:
            built = port.run()
        except BuildError as exc:
            told = _refusal(report, path, exc) if any(t.refused for t in report.topics) else exc
            write(path, report.as_json(recorder, error=told))
            reporter.note(f"report: {path}")
            if told is exc:
                raise
            raise told from exc
        wheel = {"file": built.path.name, "version": built.version, "sha256": built.sha256}
        made = report.as_json(recorder, wheel=wheel)
        beside = built.path.with_name(built.path.name + SUFFIX)
        for place in (path, beside):
            write(place, made)
    return PortedBuild(built, report.ported_from, beside)


@dataclass(frozen=True)
class _Port:
    """The steps before the build, and what they share."""

    request: OverlayRequest
    settings: Settings
    reporter: Recorder
    targets: Targets
    report: PortReport

    def run(self) -> Built:
        with self.reporter.step(OFFICIAL):
            wheel, recipe = self.official()
        with self.reporter.step(SOURCES):
            tree, proven = self.sources(recipe["commit"])
            origin = self.origin()
        with self.reporter.step(PORT):
            ported = self.port(tree, origin, recipe)
        target = self.request.target
        unproven = [] if proven else [f"sources of {target.tag}"]
        unproven += [] if target.commit else [f"official wheel of {target.version}"]
        request = replace(
            self.request,
            target=ported.target,
            wheel=wheel.path,
            unproven=tuple(unproven),
            sources_proven=proven,
        )
        return build_overlay(request, replace(self.settings, patches=self.report.patches), self.reporter)

    def official(self) -> tuple[WheelFile, dict[str, Any]]:
        """Return the official wheel, and what it adds to the version's entry in targets.toml."""
        request, target = self.request, self.request.target
        wanted = WheelRequest("torch", target.version, request.python)
        path = get_wheel(wanted, self.settings, local=request.wheel, reporter=self.reporter)
        wheel, sha256 = open_wheel(path), file_sha256(path)
        # No hash of it is on record; the commit is, where the version is in targets.toml.
        wheel.check_against(target, request.python, sha256=sha256, allow_unverified=True)
        inside = wheel.version_file()
        pinned, others = header_packages(target, self.targets, inside.cuda or "")
        self.report.facts["official_wheel"] = (
            f"{path.name}, SHA-256 {sha256}, commit {inside.git_version}, CUDA {inside.cuda}"
        )
        self.reporter.note(f"{path.name}: commit {inside.git_version}")
        known = {
            "filename": path.name,
            "sha256": sha256,
            "local": inside.local,
            "git_version": inside.git_version,
        }
        return wheel, {
            "commit": inside.git_version,
            "pinned_packages": list(pinned),
            "build_packages": list(others),
            "packages": recorded_packages(target, self.targets),
            "accepted": dict(self.targets.get(self.report.ported_from).accepted),
            "wheels": [known],
        }

    def sources(self, commit: str) -> tuple[SourceTree, bool]:
        """Return the version's sources, and whether they are shown to be the official wheel's."""
        request, target = self.request, self.request.target
        tree = fetch_source(
            target,
            self.settings,
            source=request.source,
            allow_unverified=request.allow_unverified,
            reporter=self.reporter,
        )
        head = tree.commit
        if not head and is_git_tree(tree.root) and not changed_files(tree.root):
            head = head_commit(tree.root)
        shown = proof(tree, target, commit, head)
        if not shown and not request.allow_unverified:
            raise not_proven(tree, target, commit, head)
        said = shown or "NOTHING shows that they are those of the official wheel (--allow-unverified)"
        self.report.facts["sources"] = f"{tree.origin}: {said}"
        self.reporter.note(self.report.facts["sources"])
        return tree, bool(shown)

    def origin(self) -> Path | None:
        """Return the sources that the series was made for, None where they cannot be had."""
        source = self.targets.get(self.report.ported_from)
        try:
            tree = fetch_source(source, self.settings, reporter=self.reporter)
        except SourceUnreachable as exc:
            self.reporter.note(
                f"without the sources of {source.version} equal places are conflicts: {exc.value}"
            )
            self.report.facts["sources_of_series"] = "not to be had"
            return None
        self.report.facts["sources_of_series"] = tree.origin
        return tree.root

    def port(self, tree: SourceTree, origin: Path | None, recipe: dict[str, Any]) -> Ported:
        """Carry the series into a folder of patches of its own."""
        name, patches = self.report.ported_from, self.report.patches
        with needs_room(patches.parent, "porting the patches"):
            remove_tree(patches)
            patches.mkdir(parents=True)
            shutil.copyfile(self.settings.patches / TARGETS, patches / TARGETS)
            shutil.copytree(self.settings.patches / f"v{name}", patches / f"v{name}")

        def tell(topics: Sequence[CarriedTopic]) -> None:
            self.report.topics = tuple(topics)
            for topic in topics:
                self.reporter.note(f"{topic.topic}: {topic.state}: {topic.says}")

        return port_series(
            patches,
            load_series(patches, name),
            self.request.target.version,
            tree.root,
            from_tree=origin,
            more=recipe,
            tell=tell,
        )


def _refusal(report: PortReport, path: Path, error: BuildError) -> PortConflict:
    """Return the error that names each refused topic and its files."""
    refused = [topic for topic in report.topics if topic.refused]
    named = "; ".join(
        f"{topic.topic} in {', '.join(dict.fromkeys(conflict.path for conflict in topic.refused))}"
        for topic in refused
    )
    hunks = sum(len(topic.refused) for topic in refused)
    return PortConflict(
        f"{report.ported_from}'s series cannot be ported to torch {report.torch}: {hunks} "
        f"hunk{'s' * (hunks > 1)} with no one place there: {named}",
        rule="a hunk goes where its lines stand exactly once; nothing was built",
        next_step=f"Send {path} to the project, or build a version that has a series (`nox -s m8d -- "
        "targets`); docs/patching.md says how to port by hand",
        tail=error.tail,
    )
