"""The patch toolchain on the real PyTorch: `verify`, `apply`, `revert`, overlay builds (alone, or --full).

Downloads are made before the clock starts. The builds: one with nothing compiled yet, and the same again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figures.figure import Figure, Goal, summary
from benchmarks.measuring.part import Part, Run
from m8d_build.environments.download import WheelRequest, get_wheel, official_request
from m8d_build.errors import SourceUnreachable
from m8d_build.overlay.toolbox import required_packages
from m8d_build.series.apply import apply_series, revert_series
from m8d_build.series.read import load_series
from m8d_build.series.verify import verify
from m8d_build.settings import Settings
from m8d_build.sources import fetch_source
from m8d_build.targets import load_targets
from m8d_build.wheel.facts import pinned_requirements
from m8d_build.wheel.wheelfile import open_wheel

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from m8d_build.targets import Targets

ROOT = Path(__file__).resolve().parents[2]
NAME = "toolchain"
QUICK_ROUNDS, FULL_ROUNDS = 5, 15


def measure(run: Run) -> Iterator[Figure]:
    """What the patches cost; in the long form, and alone, what a build costs."""
    builds = run.full or run.alone
    settings = Settings.load()
    run.progress("verify, apply, revert")
    yield from _patches(run, settings, downloads=builds)
    if builds:
        run.progress("downloads")
        _download(run.options.torch, settings)
        yield from _overlay(run, settings)
    else:
        run.remark("no overlay build: with --full, or alone")


def _patches(run: Run, settings: Settings, *, downloads: bool) -> Iterator[Figure]:
    version = run.options.torch
    targets = load_targets(settings.patches)
    rounds = run.options.rounds or run.pick(QUICK_ROUNDS, FULL_ROUNDS)
    with tempfile.TemporaryDirectory(prefix="m8d-bench-") as folder:
        try:
            source = fetch_source(targets.get(version), settings, source="auto" if downloads else "cache")
        except SourceUnreachable:
            if downloads:
                raise
            run.remark(f"no apply and revert: the sources of torch {version} are not in the cache")
            verified = [_verify(targets, version, None) for _ in range(rounds)]
        else:
            tree = Path(folder, "pytorch")
            shutil.copytree(source.root, tree, symlinks=True)
            each = [_round(targets, version, settings, tree) for _ in range(rounds)]
            verified, applied, reverted = ([*column] for column in zip(*each, strict=True))
            yield summary(
                NAME, "apply", applied, "s", goal=Goal(at_most=1), note="the series, on the real tree"
            )
            yield summary(NAME, "revert", reverted, "s", goal=Goal(at_most=1), note="the same")
    yield summary(NAME, "verify", verified, "s", goal=Goal(at_most=2), note="every series of every version")


def _round(targets: Targets, version: str, settings: Settings, tree: Path) -> tuple[float, float, float]:
    """Seconds of verify, apply and revert."""
    verified = _verify(targets, version, tree)
    began = time.monotonic()
    apply_series(tree, targets.get(version), load_series(settings.patches, version))
    applied = time.monotonic()
    revert_series(tree)
    return verified, applied - began, time.monotonic() - applied


def _verify(targets: Targets, version: str, tree: Path | None) -> float:
    patches = Settings.load().patches
    began = time.monotonic()
    for each in targets:
        own = load_series(patches, each.version)
        real = tree is not None and each.version == version
        files = (
            {path: (tree / path).read_bytes() for path in own.paths} if tree is not None and real else None
        )
        if verify(each, own, files):
            raise RuntimeError(f"the series of {each.version} has findings: run `verify`")
    return time.monotonic() - began


def _overlay(run: Run, settings: Settings) -> Iterator[Figure]:
    """Build twice with an object cache of its own; downloads, sources and headers are shared."""
    version = run.options.torch
    with tempfile.TemporaryDirectory(prefix="m8d-bench-", dir=settings.cache) as folder:
        cache, out = Path(folder, "cache"), Path(folder, "out")
        cache.mkdir()
        for shared in ("wheels", "sources"):
            (settings.cache / shared).mkdir(parents=True, exist_ok=True)
            (cache / shared).symlink_to(settings.cache / shared)
        run.progress("overlay build, nothing compiled yet")
        first, seconds, peak = _build(version, cache, out)
        run.progress("the same build again")
        again, seconds_again, _ = _build(version, cache, out)
    if again["sha256"] != first["sha256"]:
        raise RuntimeError("two builds of the same inputs gave different wheels")
    size = first["size"] / first["official_size"]
    yield _once("overlay", seconds, "s", Goal(at_most=240), "official wheel in, patched wheel out")
    yield _once("overlay/peak", peak, "GB", Goal(at_most=2.5), "memory of all its processes together")
    yield _once("overlay/again", seconds_again, "s", Goal(at_most=60), "nothing has changed")
    yield _once("overlay/size", size, "ratio", Goal(at_most=1.01), "patched wheel / official wheel")
    yield _once("overlay/grafted", float(first["grafted_bytes"]), "B", None, "bytes changed in libraries")
    for name, took in first["seconds"].items():
        yield _once(f"overlay/step/{name.replace(' ', '_')}", took, "s", None, "")


def _once(name: str, value: float, unit: str, goal: Goal | None, note: str) -> Figure:
    return summary(NAME, name, [value], unit, goal=goal, note=note)


def _download(version: str, settings: Settings) -> None:
    """Have every wheel in the cache before the clock starts."""
    target = load_targets(settings.patches).get(version)
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    pinned = pinned_requirements(open_wheel(get_wheel(official_request(target, python), settings)))
    for requirement in required_packages(target.pinned_packages, target.build_packages, pinned):
        name, _, number = requirement.partition("==")
        get_wheel(WheelRequest(name, number, python), settings)


def _build(version: str, cache: Path, out: Path) -> tuple[dict[str, Any], float, float]:
    """Run one build; return its JSON, its seconds, and the peak of its whole process tree in GB."""
    command = [
        sys.executable,
        "-m",
        "m8d_build",
        "--cache",
        str(cache),
        "overlay",
        "--torch",
        version,
        "--out",
        str(out),
        "--json",
    ]
    began = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": f"{ROOT / 'build'}:{ROOT}"}
    ) as process:
        meter = _Meter(process.pid)
        meter.start()
        stdout, _ = process.communicate()
        meter.stop()
    if process.returncode:
        raise RuntimeError(f"the build failed with {process.returncode}")
    return json.loads(stdout), time.monotonic() - began, meter.peak / 1e9


class _Meter(threading.Thread):
    """Sampler of the memory of a process and its descendants, at 10 Hz (PSS: shared pages count once)."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid, self._stop_event, self.peak = pid, threading.Event(), 0

    def run(self) -> None:
        while not self._stop_event.wait(0.1):
            self.peak = max(self.peak, sum(_pss(pid) for pid in _tree(self._pid)))

    def stop(self) -> None:
        """End the sampling."""
        self._stop_event.set()
        self.join()


def _tree(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:
            continue
        for child in children:
            found += _tree(int(child))
    return found


def _pss(pid: int) -> int:
    """Proportional set size without file-backed pages, in bytes."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--torch", default="2.6.0", help="the version (default: %(default)s)")
    parser.add_argument("--rounds", type=int, help="of verify, apply and revert (default: 5; 15 with --full)")


PART = Part(
    name=NAME,
    title="Toolchain",
    description="verify of every patch series, apply and revert on the real tree; with --full, or alone, an "
    "overlay "
    "build with nothing compiled yet, its steps, its peak memory, and the same build again.",
    measure=measure,
    add_options=_options,
)
