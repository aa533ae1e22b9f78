"""The overlay build: an official wheel becomes a patched one; only touched units are compiled.

Each step takes what the ones before it made; what a step decides is decided elsewhere (plan, graft, repack).
"""

from __future__ import annotations

import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from m8d_build import proc
from m8d_build.elf.read import read_library
from m8d_build.environments.download import WheelRequest, get_wheel, official_request
from m8d_build.errors import CheckFailed, DiskFull, PreflightFailed
from m8d_build.files.blobs import blob_id, file_sha256
from m8d_build.files.disk import needs_room, remove_tree
from m8d_build.files.lock import CACHE_OPTION, hold, using
from m8d_build.gitrepo.tree import is_git_tree, uncommitted
from m8d_build.overlay.compile import NO_FOREIGN_HEADERS, OLDEST_STD, compile_all, compiler_identity
from m8d_build.overlay.dropin import Candidate, check_headers, check_overlay
from m8d_build.overlay.graft import graft_edits
from m8d_build.overlay.headerguard import guarded_like
from m8d_build.overlay.link import link_overlay
from m8d_build.overlay.plan import (
    Layout,
    Step,
    compile_jobs,
    overlay_file_name,
    overlay_rpath,
    require_recipe,
)
from m8d_build.overlay.toolbox import extract, link_libraries, prepare_headers, required_packages
from m8d_build.overlay.write import GRAFTED, write_patched
from m8d_build.series.apply import patched_files, pristine_files
from m8d_build.series.read import load_series
from m8d_build.sources import fetch_source
from m8d_build.sources.identity import not_recorded
from m8d_build.wheel.changes import Put
from m8d_build.wheel.facts import pinned_requirements, read_facts
from m8d_build.wheel.inspect import inspect_wheel
from m8d_build.wheel.provenance import file_input, source_inputs
from m8d_build.wheel.repack import remove_leftovers
from m8d_build.wheel.wheelfile import open_wheel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from m8d_build.overlay.compile import Compiled
    from m8d_build.overlay.link import Linked
    from m8d_build.overlay.toolbox import Toolbox
    from m8d_build.progress import Reporter
    from m8d_build.series.read import Series
    from m8d_build.settings import Settings
    from m8d_build.targets import Target
    from m8d_build.wheel.facts import WheelFacts
    from m8d_build.wheel.wheelfile import WheelFile

__all__ = ["Built", "OverlayRequest", "build_overlay"]

NATIVE = Path(__file__).parent / "native" / "overlay.cpp"
# The official wheel's libraries unpacked (1.6 GB for 2.6.0) and downloads; the wheel itself goes to the
# output.
WORK_MB, OUT_MB = 2500, 900


@dataclass(frozen=True)
class OverlayRequest:
    """What to build.

    Attributes:
        target: the PyTorch version.
        python: Python tag of the wheel ("cp311").
        wheel: the official wheel; None downloads it.
        source: "auto", "git", "distro", "cache" or a folder.
        allow_unverified: accept sources and wheels whose digests are not on record.
        unproven: names of inputs of which the caller knows that they are not on record.
        sources_proven: the caller has shown that the whole source tree is the official wheel's, by its commit
            or as the distribution's archive; what it holds needs no blob id on record.
    """

    target: Target
    python: str
    wheel: Path | None = None
    source: str = "auto"
    allow_unverified: bool = False
    unproven: tuple[str, ...] = ()
    sources_proven: bool = False


@dataclass(frozen=True)
class Built:
    """A patched wheel.

    Attributes:
        path: the file.
        size: bytes.
        official_size: bytes of the wheel it was made from.
        sha256: 64 hex digits.
        version: "2.6.0+cu124.m8d2".
        topics: in the order of the series.
        cached_objects, objects: how many of the objects were reused.
        grafted_bytes: how many bytes of libtorch_cuda.so differ.
    """

    path: Path
    size: int
    official_size: int
    sha256: str
    version: str
    topics: tuple[str, ...]
    cached_objects: int
    objects: int
    grafted_bytes: int


def build_overlay(request: OverlayRequest, settings: Settings, report: Reporter) -> Built:
    """Run the build; a stopped one is gone on with by the next (downloads, headers and objects are kept).

    Raises:
        BuildError: one subclass per kind of failure; nothing half-made is left in the output folder.
    """
    target = request.target
    require_recipe(target)
    _require_machine()
    work = settings.cache / "work" / f"torch-{target.version}-{request.python}"
    what = f"build torch {target.version} for {request.python}"
    with (
        hold(settings.out, what=what),
        using(settings.cache),
        hold(work, what=what, option=CACHE_OPTION),
        needs_room(settings.cache, what),
    ):
        build = _Build(request, settings, report, work / "build")
        remove_tree(build.work)  # of a run that was killed; its room is there for this one
        remove_leftovers(settings.out)
        _room(settings.cache, WORK_MB)
        _room(settings.out, OUT_MB)
        build.work.mkdir(parents=True)
        build.logs.mkdir(parents=True, exist_ok=True)
        build.log.unlink(missing_ok=True)
        try:
            return build.run()
        finally:
            remove_tree(build.work)


@dataclass(frozen=True)
class _Build:
    """The steps of one build, and the folders they share."""

    request: OverlayRequest
    settings: Settings
    report: Reporter
    work: Path

    @property
    def logs(self) -> Path:
        return self.settings.out / "logs"

    @property
    def log(self) -> Path:
        return self.logs / f"overlay-{self.request.target.version}-{self.request.python}.log"

    def run(self) -> Built:
        step, target = self.steps(), self.request.target
        std = target.abi.std if target.abi else OLDEST_STD
        compiler = compiler_identity(self.settings.compiler, std, work=self.work)
        with step(Step.OFFICIAL_WHEEL):
            wheel, sha256, on_record = self.official_wheel()
        with step(Step.SOURCES):
            tree = fetch_source(
                target,
                self.settings,
                source=self.request.source,
                allow_unverified=self.request.allow_unverified,
                reporter=self.report,
            )
            self.report.note(tree.origin)
        with step(Step.PATCHES):
            series = load_series(self.settings.patches, target.version)
            # GCC names a header by its canonical path where that is shorter; so it begins with this one.
            layout = Layout(self.work / "stage", tree.root.resolve(), self.work)
            touched = self.stage(series, layout)
            read = pristine_files(tree.root, [file.path for file in target.files])
            unverified = [*self.request.unproven, *([] if on_record else [wheel.path.name])]
            unverified += [
                file.path
                for file in target.files
                if file.blob and (file.path not in read or blob_id(read[file.path]) != file.blob)
            ]
        with step(Step.HEADERS):
            toolbox, packages = self.headers(wheel)
            digests = {name: file_sha256(path) for name, path in packages.items()}
            unverified += [name for name, found in digests.items() if target.packages.get(name) != found]
        with step(Step.LIBRARIES):
            facts = self.libraries(wheel)
        with step(Step.COMPILE):
            compiled = self.compile(facts, toolbox, layout, compiler)
            beyond, doubtful = self.beyond_record(compiled, layout)
            read |= beyond
            unverified += doubtful
        with step(Step.LINK):
            linked = self.link(compiled, packages)
        with step(Step.CHECK):
            self.check(compiled, linked, touched, toolbox, layout, facts)
        with step(Step.GRAFT):
            grafted = graft_edits(self.work / GRAFTED, linked.path)
            self.report.note(
                f"{grafted.changed_bytes} bytes of {GRAFTED} change; {len(grafted.plan.hide)} symbols move"
            )
        with step(Step.REPACK):
            repacked = write_patched(
                wheel,
                sha256,
                facts,
                target,
                series,
                linked.path,
                grafted,
                self.settings,
                more=self.replaced(wheel, touched),
                inputs=(
                    *(file_input(name, digest) for name, digest in digests.items()),
                    file_input(f"native/{NATIVE.name}", file_sha256(NATIVE)),
                    *source_inputs(read),
                ),
                compiler=compiler,
                unverified=unverified,
            )
        with step(Step.INSPECT):
            # Without symbols: the graft has checked those, and repack that what it wrote reads back.
            found = inspect_wheel(repacked.path, self.settings.patches, symbols=False, scratch=self.work)
            if not found.consistent:
                repacked.remove()
                raise CheckFailed(
                    "the wheel that was made does not agree with itself: " + "; ".join(found.disagreements),
                    rule="marker, METADATA, RECORD, libraries and file name say the same",
                    next_step="Please report this; the log has the details",
                    log=self.log,
                )
        return Built(
            path=repacked.path,
            size=repacked.size,
            official_size=wheel.path.stat().st_size,
            sha256=repacked.sha256,
            version=found.version,
            topics=series.topics,
            cached_objects=sum(c.cached for c in compiled),
            objects=len(compiled),
            grafted_bytes=grafted.changed_bytes,
        )

    def steps(self) -> Callable[[Step], AbstractContextManager[None]]:
        """Return a function that opens the plan's next step and refuses any other."""
        plan = iter(Step)

        def step(wanted: Step) -> AbstractContextManager[None]:
            if (planned := next(plan, None)) is not wanted:
                raise AssertionError(f"{wanted} is run where the plan has {planned}")
            return self.report.step(wanted.title)

        return step

    def official_wheel(self) -> tuple[WheelFile, str, bool]:
        """Return it, its SHA-256, and whether that is on record."""
        request = self.request
        if request.wheel is not None:
            wanted = WheelRequest("torch", request.target.version, request.python)
        else:
            wanted = official_request(request.target, request.python)
        path = get_wheel(wanted, self.settings, local=request.wheel, reporter=self.report)
        sha256 = file_sha256(path)
        wheel = open_wheel(path)
        on_record = wheel.check_against(
            request.target, request.python, sha256=sha256, allow_unverified=request.allow_unverified
        )
        self.report.note(path.name)
        return wheel, sha256, on_record

    def stage(self, series: Series, layout: Layout) -> tuple[str, ...]:
        """Put the patched files where the compiler looks first; return their paths."""
        target = self.request.target
        made = patched_files(layout.source, target, series, allow_unverified=self.request.allow_unverified)
        for name, content in made.items():
            path = layout.stage / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        self.report.note(f"{', '.join(series.topics)}: {len(made)} files")
        return tuple(made)

    def headers(self, wheel: WheelFile) -> tuple[Toolbox, dict[str, Path]]:
        target = self.request.target
        required = required_packages(
            target.pinned_packages, target.build_packages, pinned_requirements(wheel)
        )
        packages: dict[str, Path] = {}
        for requirement in required:
            name, _, version = requirement.partition("==")
            recorded = target.packages.get(requirement, "")
            if not recorded:
                self.report.note(f"no SHA-256 is recorded for {requirement}: the wheel counts as unverified")
            wanted = "" if self.request.allow_unverified else recorded
            packages[requirement] = get_wheel(
                WheelRequest(name, version, self.request.python, sha256=wanted),
                self.settings,
                reporter=self.report,
            )
        return prepare_headers(wheel.path, packages, self.settings.cache), packages

    def libraries(self, wheel: WheelFile) -> WheelFacts:
        """Unpack the official wheel's libraries for this build, and read what they were built with."""
        extract(
            wheel.path,
            self.work,
            lambda name: name.startswith("torch/lib/") and ".so" in name,
            jobs=self.settings.jobs,
        )
        facts = read_facts(wheel, scratch=self.work, installed=self.work)
        facts.check_against(self.request.target)
        check_headers(self.request.target, wheel)
        return facts

    def compile(
        self, facts: WheelFacts, toolbox: Toolbox, layout: Layout, compiler: str
    ) -> tuple[Compiled, ...]:
        jobs = compile_jobs(self.request.target.units, NATIVE, facts.abi, toolbox, layout)
        return compile_all(
            jobs,
            layout,
            compiler=self.settings.compiler,
            identity=compiler,
            toolbox_identity=toolbox.identity,
            cache=self.settings.cache,
            log=self.log,
            workers=self.settings.jobs,
            budget_mb=self.settings.memory_mb,
            report=self.report,
        )

    def beyond_record(
        self, compiled: Sequence[Compiled], layout: Layout
    ) -> tuple[dict[str, bytes], tuple[str, ...]]:
        """Return what was compiled from the source tree and has no blob id on record, and its unproven part.

        Headers that neither the stage nor the wheel has are found there.

        Raises:
            BlobMismatch: there is an unproven file, and unverified ones are not accepted.
        """
        target, proven = self.request.target, self.request.sources_proven
        names = sorted({name for unit in compiled for name in unit.files})
        paths = [name.partition(":")[2] for name in names if name.startswith("source:")]
        found = {path: (layout.source / path).read_bytes() for path in paths if not target.blob(path)}
        doubtful = tuple(found)
        if found and proven:
            # A checkout at the right commit may hold files that are not of that commit.
            blobs = {path: blob_id(data) for path, data in found.items()}
            doubtful = uncommitted(layout.source, blobs) if is_git_tree(layout.source) else ()
        if doubtful and not self.request.allow_unverified:
            raise not_recorded({path: found[path] for path in doubtful}, target, proven=proven)
        return found, doubtful

    def link(self, compiled: Sequence[Compiled], packages: dict[str, Path]) -> Linked:
        official = read_library(self.work / GRAFTED)
        wanted = [n for n in official.needed if n.startswith(("libnccl.so", "libcudart.so"))]
        folder = self.work / "torch" / "lib"
        libraries = link_libraries(folder, packages.values(), wanted, self.work / "nvidia")
        self.report.note(f"against {', '.join(path.name for path in libraries)}")
        return link_overlay(
            [c.path for c in compiled],
            libraries,
            official,
            compiler=self.settings.compiler,
            file_name=overlay_file_name(official.needed),
            rpath=overlay_rpath(official.rpath or official.runpath),
            work=self.work,
            log=self.log,
        )

    def check(
        self,
        compiled: Sequence[Compiled],
        linked: Linked,
        touched: Sequence[str],
        toolbox: Toolbox,
        layout: Layout,
        facts: WheelFacts,
    ) -> None:
        library = self.work / GRAFTED
        candidate = Candidate(
            units=[c.path for c in compiled if not c.job.unit.startswith("native/")],
            overlay=linked.path,
            library=library,
            siblings=sorted(path for path in library.parent.glob("*.so*") if path != library),
            private=linked.private,
            accepted=self.request.target.accepted,
            patched_headers=[path for path in touched if path.endswith((".h", ".hpp"))],
            official_include=toolbox.torch_include,
            patched_include=layout.stage,
            compile_probe=self.prober(toolbox, layout, facts),
        )
        for line in check_overlay(candidate):
            self.report.note(line)

    def prober(self, toolbox: Toolbox, layout: Layout, facts: WheelFacts) -> Callable[[str, Path], Path]:
        """Return what compiles a probe of class layouts with a folder searched before all others."""

        def compile_probe(text: str, first: Path) -> Path:
            source = self.work / f"probe-{first.name}.cpp"
            source.write_text(text, encoding="utf-8")
            bare = Layout(first, layout.source, layout.work)
            (job,) = compile_jobs((), source, facts.abi, toolbox, bare)
            made = source.with_suffix(".o")
            proc.run(
                [self.settings.compiler, *job.flags, "-c", source, "-o", made],
                what="compile the probe of class layouts",
                log=self.log,
                env={**NO_FOREIGN_HEADERS, "TMPDIR": str(self.work)},
            )
            return made

        return compile_probe

    def replaced(self, wheel: WheelFile, touched: Sequence[str]) -> list[Put]:
        """Return the entries that patched headers and Python files replace or add."""
        stage, include = self.work / "stage", "torch/include/"
        headers = [path for path in touched if include + path in wheel.entries]
        return [
            *(
                Put(include + path, guarded_like(wheel.read(include + path), (stage / path).read_bytes()))
                for path in headers
            ),
            *(Put(path, stage / path) for path in touched if path.endswith(".py")),
        ]


def _require_machine() -> None:
    found = (platform.system(), platform.machine())
    if found != ("Linux", "x86_64"):
        raise PreflightFailed(
            f"this is {' on '.join(found)}",
            rule="an overlay build is for Linux on x86_64: it compiles and links for the machine it runs on",
            next_step="Use such a machine",
        )


def _room(folder: Path, megabytes: int) -> None:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free // 1_000_000
    if free < megabytes:
        raise DiskFull(
            f"{existing} has {free} MB free",
            rule=f"an overlay build needs about {megabytes} MB there while it runs",
            next_step="Free some space; M8D_CACHE and --out name other folders",
        )
