"""check-wheel, run: makes environments, compiles probes, runs the same cases in stock and patched."""

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
from m8d_build.check.cases import all_cases
from m8d_build.check.jobs import Observed, observe, read_ends, supervisor_plan
from m8d_build.check.native import PROBES, build_extension, build_preload, preloadable
from m8d_build.check.report import Report, Result, judge
from m8d_build.check.subject import NO_MARKER, marker_outcome, read_subject, require_stock
from m8d_build.check.trees import link_torch
from m8d_build.environments.download import WheelRequest, get_wheel, official_request
from m8d_build.environments.venvs import Environment, Environments, Recipe, pip_check
from m8d_build.errors import OutputUnwritable
from m8d_build.files.blobs import file_sha256
from m8d_build.files.lock import using
from m8d_build.overlay.compile import compiler_identity
from m8d_build.targets import load_targets
from multiworld.errors import ProvenanceError
from multiworld.provenance.wheel import verify_wheel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from m8d_build.check.cases import Case
    from m8d_build.check.subject import Subject
    from m8d_build.progress import Reporter
    from m8d_build.settings import Settings
    from multiworld.shim.marker import Marker

__all__ = ["EXPECTED_SECONDS", "STOCK_AUTO", "STOCK_NONE", "check_wheel", "run_cases"]

STOCK_AUTO = "auto"
STOCK_NONE = "none"

STEP_VERIFY = "verify the wheel"
STEP_STOCK = "stock environment"
STEP_INSTALL = "install the wheel"
STEP_COMPILE = "compile the probes"
STEP_RUN_STOCK = "probes on stock"
STEP_RUN_PATCHED = "probes on the patched wheel"

# (step, seconds) on two cores with the stock environment in the cache.
EXPECTED_SECONDS = (
    (STEP_VERIFY, 10.0),
    (STEP_STOCK, 2.0),
    (STEP_INSTALL, 15.0),
    (STEP_COMPILE, 3.0),
    (STEP_RUN_STOCK, 50.0),
    (STEP_RUN_PATCHED, 50.0),
)


@dataclass(frozen=True)
class _Bench:
    """Where probes run: shared by both environments of one check."""

    settings: Settings
    work: Path
    log: Path
    preloads: Mapping[str, Path]
    extensions: Mapping[str, Mapping[str, Path]]
    ours: bool  # no environment of the user's is involved, so Python may write its compiled files


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

    Leaves behind one environment for this torch version, the stock one; with ``stock`` other than "auto",
    none.

    Args:
        path: the patched wheel.
        settings: cache, output folder, compiler, jobs.
        report: told of each step.
        log: where pip, the compiler and every probe write.
        stock: "auto" (the cached environment of the official wheel), "none", or the path of a Python that has
            the official wheel installed.
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
    with ExitStack() as stack:
        stack.enter_context(using(settings.cache))
        with report.step(STEP_VERIFY):
            provenance = _provenance_result(subject)
        with report.step(STEP_STOCK):
            base = _stock(
                stack, environments, subject, settings, report, log=log, stock=stock, official=official
            )
        with report.step(STEP_INSTALL):
            patched = stack.enter_context(environments.fresh(subject.recipe, base=base, log=log, keep=keep))
        compared = _compare(stack, subject, base, patched, settings, report, log)
        if base is not None and base.root is not None:
            removed = environments.prune({base.name, subject.recipe.name}, torch=subject.marker.torch)
            for name in removed:
                report.note(f"removed the environment {name}")
    return Report(
        wheel=subject.wheel.path,
        sha256=subject.sha256,
        version=f"{subject.marker.torch}+{subject.marker.local}",
        topics=tuple(topic.name for topic in subject.marker.topics),
        stock=base.name if base else "",
        results=(provenance, *compared),
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
        require_stock(given, subject)
        return given
    if subject.marker.ported_from:  # no wheel of that version is on record: its commit is compared below
        request = WheelRequest("torch", subject.marker.torch, subject.python_tag)
    else:
        target = load_targets(settings.patches).get(subject.marker.torch)
        request = official_request(target, subject.python_tag)
    wheel = get_wheel(request, settings, local=official, reporter=report)
    sha256 = request.sha256 if wheel.name == request.filename else file_sha256(wheel)
    recipe = Recipe(subject.marker.torch, sha256, subject.python_tag, str(wheel))
    made = stack.enter_context(environments.kept(recipe, log=log))
    require_stock(made, subject)
    return made


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
        bench = _bench(stack, work, settings, base, patched, log)
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
    stack: ExitStack,
    work: Path,
    settings: Settings,
    base: Environment | None,
    patched: Environment,
    log: Path,
) -> _Bench:
    preloads = {
        name: stack.enter_context(preloadable(build_preload(settings.compiler, name, work, log)))
        for name in ("one_gpu", "exits")
    }
    extensions: dict[str, dict[str, Path]] = {"stock": {}, "patched": {}}

    def extension(name: str, linked: Environment, run: Environment) -> Path:
        return build_extension(settings.compiler, work / name, linked=linked, run=run, log=log)

    extensions["patched"]["extension"] = extension("patched.so", patched, patched)
    if base is not None:
        extensions["patched"]["official_extension"] = extension("official.so", base, patched)
        extensions["stock"]["extension"] = extension("stock.so", base, base)
    return _Bench(settings, work, log, preloads, extensions, ours=base is None or base.root is not None)


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
        bytecode=None if bench.ours else bench.work / "pycache",
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


def _provenance_result(subject: Subject) -> Result:
    try:
        verify_wheel(subject.wheel.path)
        found = "holds"
    except ProvenanceError as exc:
        found = str(exc)
    return Result(
        "provenance",
        "every file is as RECORD says, and as the statement of what it was made from",
        None,
        None,
        "holds",
        found,
    )


def _marker_result(subject: Subject, base: Environment | None, patched: Environment) -> Result:
    stock = marker_outcome(base, subject) if base is not None else None
    return Result(
        "marker",
        "torch/m8d.json and the library agree, read without importing torch",
        NO_MARKER,
        stock,
        "agrees",
        marker_outcome(patched, subject),
    )
