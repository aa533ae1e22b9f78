"""Times the toolchain on the real PyTorch 2.6.0 and stores the figures as JSON.

Downloads are made before the clock starts. What is measured: an overlay build with nothing compiled yet, the same
build again, `verify` of every series, and `apply` and `revert` on the real tree.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "build"), str(ROOT)]

from m8d_build.apply import apply_series, revert_series  # noqa: E402  (found through the line above)
from m8d_build.rules import verify  # noqa: E402
from m8d_build.series import load_series  # noqa: E402
from m8d_build.settings import Settings  # noqa: E402
from m8d_build.sources import fetch_source  # noqa: E402
from m8d_build.targets import load_targets  # noqa: E402

GOALS = {
    "overlay_seconds": 240.0,
    "overlay_peak_gb": 2.5,
    "wheel_size_ratio": 1.01,
    "again_seconds": 60.0,
    "verify_seconds": 2.0,
    "apply_seconds": 1.0,
    "revert_seconds": 1.0,
}


def main() -> int:
    """Measure, print a table, store the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", default="2.6.0")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "benchmarks")
    parser.add_argument(
        "--rounds", type=int, default=5, help="of verify, apply and revert; the median counts"
    )
    args = parser.parse_args()
    settings = Settings.load()
    figures: dict[str, Any] = {}
    figures.update(_patches(args.torch, settings, args.rounds))
    figures.update(_overlay(args.torch, settings))
    record = {
        "what": "toolchain",
        "torch": args.torch,
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "system": platform.platform(),
        },
        "figures": figures,
        "goals": GOALS,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"toolchain-{record['when'].replace(':', '')}.json"
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"{'figure':24} {'measured':>10} {'goal':>8}")
    for name, value in figures.items():
        goal = GOALS.get(name)
        print(f"{name:24} {value:10.4g} {'' if goal is None else f'{goal:8.4g}'}")
    print(path)
    return 0


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _patches(version: str, settings: Settings, rounds: int) -> dict[str, float]:
    targets = load_targets(settings.patches)
    target = targets.get(version)
    source = fetch_source(target, settings)
    series = load_series(settings.patches, version)
    verified, applied, reverted = [], [], []
    with tempfile.TemporaryDirectory(prefix="m8d-bench-") as folder:
        tree = Path(folder, "pytorch")
        shutil.copytree(source.root, tree, symlinks=True)
        for _ in range(rounds):
            began = time.monotonic()
            for each in targets:
                own = load_series(settings.patches, each.version)
                files = {p: (tree / p).read_bytes() for p in own.paths} if each.version == version else None
                if verify(each, own, files):
                    raise SystemExit(f"the series of {each.version} has findings: run `verify`")
            verified.append(time.monotonic() - began)
            began = time.monotonic()
            apply_series(tree, target, series)
            applied.append(time.monotonic() - began)
            began = time.monotonic()
            revert_series(tree)
            reverted.append(time.monotonic() - began)
    return {
        "verify_seconds": _median(verified),
        "apply_seconds": _median(applied),
        "revert_seconds": _median(reverted),
    }


def _overlay(version: str, settings: Settings) -> dict[str, float]:
    """Build twice with an object cache of its own; downloads, sources and headers are shared with other runs."""
    with tempfile.TemporaryDirectory(prefix="m8d-bench-", dir=settings.cache) as folder:
        cache, out = Path(folder, "cache"), Path(folder, "out")
        cache.mkdir()
        for shared in ("wheels", "sources"):
            (settings.cache / shared).mkdir(parents=True, exist_ok=True)
            (cache / shared).symlink_to(settings.cache / shared)
        _download(version, settings)
        first, seconds, peak = _build(version, cache, out)
        again, seconds_again, _ = _build(version, cache, out)
    if again["sha256"] != first["sha256"]:
        raise SystemExit("two builds of the same inputs gave different wheels")
    return {
        "overlay_seconds": seconds,
        "overlay_peak_gb": peak,
        "wheel_size_ratio": first["size"] / first["official_size"],
        "again_seconds": seconds_again,
        "grafted_bytes": float(first["grafted_bytes"]),
        **{f"step {name}": took for name, took in first["seconds"].items()},
    }


def _download(version: str, settings: Settings) -> None:
    """Have every wheel in the cache before the clock starts."""
    from m8d_build.download import WheelRequest, get_wheel, official_request  # noqa: PLC0415
    from m8d_build.facts import pinned_requirements  # noqa: PLC0415
    from m8d_build.toolbox import required_packages  # noqa: PLC0415
    from m8d_build.wheelfile import open_wheel  # noqa: PLC0415

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
        raise SystemExit(f"the build failed with {process.returncode}")
    return json.loads(stdout), time.monotonic() - began, meter.peak / 1e9


class _Meter(threading.Thread):
    """Samples the memory of a process and its descendants ten times a second (PSS: shared pages count once)."""

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
    """Proportional set size without file-backed pages: what a process really takes from the machine, in bytes."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


if __name__ == "__main__":
    raise SystemExit(main())
