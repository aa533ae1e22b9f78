"""check-wheel, run: environments made, probes compiled, the same cases in stock and patched, one report."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from m8d_build import proc
from m8d_build.blobs import file_sha256
from m8d_build.check.cases import all_cases
from m8d_build.check.jobs import Observed, observe, read_ends, supervisor_plan
from m8d_build.check.native import PROBES, build_extension, build_preload
from m8d_build.check.report import Report, Result, judge
from m8d_build.check.trees import link_torch
from m8d_build.compile import compiler_identity
from m8d_build.download import get_wheel, official_request
from m8d_build.envs import Environment, Environments, Recipe, pip_check
from m8d_build.errors import OutputUnwritable, WheelMismatch
from m8d_build.targets import load_targets
from m8d_build.versionfile import VERSION_ENTRY, parse_version_file
from m8d_build.wheelfile import MARKER_ENTRY, open_wheel
from multiworld.errors import MarkerError
from multiworld.shim.marker import parse_marker, read_marker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from m8d_build.check.cases import Case
    from m8d_build.progress import Reporter
    from m8d_build.settings import Settings
    from m8d_build.wheelfile import WheelFile
    from multiworld.shim.marker import Marker

__all__ = [
    "EXPECTED_SECONDS",
    "STOCK_AUTO",
    "STOCK_NONE",
    "Subject",
    "check_wheel",
    "read_subject",
    "run_cases",
]

STOCK_AUTO = "auto"
STOCK_NONE = "none"

STEP_STOCK = "stock environment"
STEP_INSTALL = "install the wheel"
STEP_COMPILE = "compile the probes"
STEP_RUN_STOCK = "probes on stock"
STEP_RUN_PATCHED = "probes on the patched wheel"

# (step, seconds) on two cores with the stock environment in the cache.
EXPECTED_SECONDS = (
    (STEP_STOCK, 1.0),
    (STEP_INSTALL, 20.0),
    (STEP_COMPILE, 5.0),
    (STEP_RUN_STOCK, 40.0),
    (STEP_RUN_PATCHED, 40.0),
)


@dataclass(frozen=True)
class Subject:
    """The wheel under test, read.

    Attributes:
        wheel: the file, validated.
        sha256: of the file.
        marker: what it says of itself.
        python_tag: the interpreter it is installed for ("cp311").
    """

    wheel: WheelFile
    sha256: str
    marker: Marker
    python_tag: str

    @property
    def recipe(self) -> Recipe:
        """What its environment is made from."""
        brings = tuple(sorted({name.split("/", 1)[0] for name in self.wheel.entries}))
        return Recipe(self.marker.torch, self.sha256, self.python_tag, str(self.wheel.path), brings)


@dataclass(frozen=True)
class _Bench:
    """Where probes run: shared by both environments of one check."""

    settings: Settings
    work: Path
    log: Path
    preloads: Mapping[str, Path]
    extensions: Mapping[str, Mapping[str, Path]]


def read_subject(path: Path) -> Subject:
    """Read the wheel under test.

    Raises:
        WheelInvalid: it is no whole wheel.
        WheelMismatch: it is not a patched wheel for one CPython.
        MarkerError: its marker breaks the schema.
    """
    wheel = open_wheel(path.absolute())
    if not wheel.patched:
        raise WheelMismatch(
            f"{path.name} carries no {MARKER_ENTRY}",
            rule="check-wheel is for patched wheels",
            next_step="Build one: nox -s build-torch",
        )
    if len(wheel.python_tags) != 1:
        raise WheelMismatch(
            f"{path.name} is for {', '.join(wheel.python_tags)}", rule="a torch wheel is for one Python"
        )
    return Subject(
        wheel, file_sha256(wheel.path), parse_marker(wheel.read(MARKER_ENTRY)), wheel.python_tags[0]
    )


def check_wheel(
    path: Path,
    settings: Settings,
    report: Reporter,
    *,
    log: Path,
    stock: str = STOCK_AUTO,
    official: Path | None = None,
    keep: bool = False,
) -> Report:
    """Install a patched wheel in a fresh environment and compare how it behaves with the stock wheel.

    Leaves behind one environment for this torch version, the stock one, and none with ``stock`` "none".

    Args:
        path: the patched wheel.
        settings: cache, output folder, compiler, jobs.
        report: told of each step.
        log: where pip, the compiler and every probe write.
        stock: "auto" (the cached environment of the official wheel), "none", or the path of a Python that has the
            official wheel installed.
        official: the official wheel, if it need not be downloaded.
        keep: leave the wheel's environment behind as well.

    Raises:
        WheelInvalid, WheelMismatch: the wheel, or the stock environment, is not what it has to be.
        WheelUnreachable: a package could not be downloaded.
        CompilerMissing: there is no compiler for the probes.
        CommandFailed, DiskFull, BuildBusy, OutputUnwritable: as they say.
    """
    began = time.monotonic()
    subject = read_subject(path)
    compiler_identity(settings.compiler)
    environments = Environments(settings.cache / "envs")
    kept = {subject.recipe.name} if keep else set()
    with ExitStack() as stack:
        with report.step(STEP_STOCK):
            base = _stock(
                stack, environments, subject, settings, report, log=log, stock=stock, official=official
            )
            if base is not None and base.root is not None:
                kept.add(base.name)
        with report.step(STEP_INSTALL):
            patched = stack.enter_context(environments.fresh(subject.recipe, base=base, log=log, keep=keep))
        results = _compare(stack, subject, base, patched, settings, report, log)
        removed = environments.prune(kept | {subject.recipe.name}, torch=subject.marker.torch)
        if removed:
            report.note(f"removed {', '.join(removed)}")
    return Report(
        wheel=subject.wheel.path,
        sha256=subject.sha256,
        version=f"{subject.marker.torch}+{subject.marker.local}",
        topics=tuple(topic.name for topic in subject.marker.topics),
        stock=base.name if base else "",
        results=results,
        seconds=time.monotonic() - began,
    )


def _stock(
    stack: ExitStack,
    environments: Environments,
    subject: Subject,
    settings: Settings,
    report: Reporter,
    *,
    log: Path,
    stock: str,
    official: Path | None,
) -> Environment | None:
    """Return the stock environment, held until the check ends; None if there is to be none."""
    if stock == STOCK_NONE:
        return None
    if stock != STOCK_AUTO:
        given = Environment.of(Path(stock).expanduser())
        _require_stock(given, subject)
        return given
    target = load_targets(settings.patches).get(subject.marker.torch)
    request = official_request(target, subject.python_tag)
    wheel = get_wheel(request, settings, local=official, reporter=report)
    sha256 = request.sha256 if wheel.name == request.filename else file_sha256(wheel)
    recipe = Recipe(subject.marker.torch, sha256, subject.python_tag, str(wheel))
    made = stack.enter_context(environments.kept(recipe, log=log))
    _require_stock(made, subject)
    return made


def _require_stock(environment: Environment, subject: Subject) -> None:
    next_step = "Give the official wheel's environment, or leave it to us with --stock auto"
    entry = environment.site / VERSION_ENTRY
    found = parse_version_file(entry.read_bytes(), where=str(entry))
    if read_marker(environment.torch, check_library=False) is not None:
        raise WheelMismatch(
            f"{environment.name} has a patched torch", rule="stock is unpatched", next_step=next_step
        )
    if found.git_version != subject.marker.commit:
        raise WheelMismatch(
            f"{environment.name} has torch {found.version} of commit {found.git_version}",
            rule=f"the wheel under test was made from {subject.marker.torch}, commit {subject.marker.commit}",
            next_step=next_step,
        )


def _compare(
    stack: ExitStack,
    subject: Subject,
    base: Environment | None,
    patched: Environment,
    settings: Settings,
    report: Reporter,
    log: Path,
) -> tuple[Result, ...]:
    cases = all_cases(subject.marker)
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
        # Not under /tmp, which may be mounted so that nothing in it can be loaded.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=".check-", dir=settings.out))
    except OSError as exc:
        raise OutputUnwritable(
            f"{settings.out} cannot be written: {exc.strerror}",
            rule="the probes are compiled there",
            next_step="Name another folder with --out",
        ) from exc
    work = Path(folder)
    with report.step(STEP_COMPILE):
        bench = _bench(work, settings, base, patched, log)
    seen_stock: Mapping[str, Observed] = {}
    if base is not None:
        with report.step(STEP_RUN_STOCK):
            seen_stock = run_cases(cases, "stock", base, bench, subject.marker)
    with report.step(STEP_RUN_PATCHED):
        runnable = [
            case for case in cases if base is not None or "{official_extension}" not in str(case.programs)
        ]
        seen_patched = run_cases(runnable, "patched", patched, bench, subject.marker)
    judged = tuple(judge(case, seen_stock.get(case.name), seen_patched.get(case.name)) for case in runnable)
    return (_pip_result(patched), _marker_result(subject, base, patched), *judged)


def _bench(
    work: Path, settings: Settings, base: Environment | None, patched: Environment, log: Path
) -> _Bench:
    preloads = {name: build_preload(settings.compiler, name, work, log) for name in ("one_gpu", "exits")}
    extensions: dict[str, dict[str, Path]] = {"stock": {}, "patched": {}}

    def extension(name: str, linked: Environment, run: Environment) -> Path:
        return build_extension(settings.compiler, work / name, linked=linked, run=run, log=log)

    extensions["patched"]["extension"] = extension("patched.so", patched, patched)
    if base is not None:
        extensions["patched"]["official_extension"] = extension("official.so", base, patched)
        extensions["stock"]["extension"] = extension("stock.so", base, base)
    return _Bench(settings, work, log, preloads, extensions)


def run_cases(
    cases: Sequence[Case], kind: str, environment: Environment, bench: _Bench, marker: Marker
) -> dict[str, Observed]:
    """Run every case that has something to run in a kind of environment.

    Args:
        cases: which.
        kind: "patched" or "stock".
        environment: where they run.
        bench: compiled probes and folders.
        marker: of the wheel under test.

    Returns:
        What was observed, by the case's name.

    Raises:
        CommandFailed: the supervisor itself failed.
        BehaviourFailed: its answer is unreadable.
    """
    work = bench.work / kind
    work.mkdir()
    paths = {
        "work": work,
        "whole": link_torch(environment.site, work / "whole"),
        **bench.preloads,
        **bench.extensions[kind],
    }
    if marker.overlay is not None and kind == "patched":
        name = marker.overlay.file.rpartition("/")[2]
        paths["bare"] = link_torch(environment.site, work / "bare", without=name)
    parallel = min(max(2 * bench.settings.jobs, 2), 8)  # most of a probe's time is waiting
    plan = supervisor_plan(
        cases,
        kind=kind,
        python=environment.python,
        probes=PROBES,
        paths={name: str(path) for name, path in paths.items()},
        bytecode=work / "pycache",
        parallel=parallel,
    )
    asked, answer = work / "plan.json", work / "result.json"
    asked.write_text(json.dumps(plan), encoding="utf-8")
    proc.run(
        [sys.executable, "-I", PROBES / "supervise.py", asked, answer],
        what=f"run the probes on {environment.name}",
        log=bench.log,
        timeout=sum(case.timeout for case in cases) / parallel + 300.0,
    )
    ends = read_ends(answer.read_text(encoding="utf-8"))
    seen = {case.name: observe(case, ends[case.name]) for case in cases if case.name in ends}
    _write_log(bench.log, environment, seen)
    return seen


def _write_log(log: Path, environment: Environment, seen: Mapping[str, Observed]) -> None:
    with log.open("a", encoding="utf-8") as file:
        for name, observed in seen.items():
            file.write(f"\n=== {name} on {environment.name}: {observed.outcome} ({observed.seconds:.1f} s)\n")
            file.write(observed.output + "\n")


def _pip_result(patched: Environment) -> Result:
    began = time.monotonic()
    said = pip_check(patched)
    took = time.monotonic() - began
    return Result(
        "pip-check", "pip finds every requirement met", None, None, "clean", said, patched_seconds=took
    )


def _marker_result(subject: Subject, base: Environment | None, patched: Environment) -> Result:
    stock = _marker_outcome(base, subject) if base is not None else None
    return Result(
        "marker",
        "torch/m8d.json and the library agree, read without importing torch",
        "no marker",
        stock,
        "agrees",
        _marker_outcome(patched, subject),
    )


def _marker_outcome(environment: Environment, subject: Subject) -> str:
    try:
        marker = read_marker(environment.torch)
    except MarkerError as exc:
        return str(exc)
    if marker is None:
        return "no marker"
    if not marker.agrees:
        return "; ".join(marker.disagreements)
    return "agrees" if marker == subject.marker else "not the marker in the wheel"
