"""PyTorch's own distributed suite on stock torch and in a world, side by side; prints where they differ."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from torchsuite.compare import Difference, compare, counted

MODES = ("stock", "world")
Ended = dict[str, tuple[str, str]]


def main() -> int:
    """Run it; 0 without a difference, 1 with one, 2 where it did not come to its end in time, or did not begin."""
    parser = argparse.ArgumentParser(prog="torchsuite", description=__doc__)
    parser.add_argument(
        "tests", nargs="*", metavar="TEST", help="names of tests, before the options (default: all)"
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[2, 3], metavar="N", help="ranks (default: 2 3)"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="for each size at most (default: 30)")
    args = parser.parse_args()
    worst = 0
    for size in args.sizes:
        with tempfile.TemporaryDirectory(prefix="m8d-suite-") as folder:
            ended, whole = run(args.tests, size, Path(folder), args.minutes * 60, both=True)
            found = compare(ended["stock"], ended["world"])
            if found and whole:
                # Some of its tests measure time, to 0.1 s, with two programs at work here.
                say(
                    f"{size} ranks: {len(found)} differ at first: {', '.join(each.test for each in found)}; again, alone"
                )
                again, whole = run(
                    [each.test for each in found], size, Path(folder) / "again", 600.0, both=False
                )
                for mode in MODES:
                    ended[mode] |= again[mode]
                found = compare(ended["stock"], ended["world"])
            report(size, ended, found, Path(folder))
        worst = max(worst, 2 if not (whole and any(ended.values())) else int(bool(found)))
    return worst


def run(
    tests: list[str], size: int, folder: Path, limit: float, *, both: bool
) -> tuple[dict[str, Ended], bool]:
    """Run them in both modes, at once (`both`) or one after the other; return how they ended, and whether all did."""
    deadline = time.monotonic() + limit
    outs = {mode: folder / f"{mode}.jsonl" for mode in MODES}
    whole = True
    for modes in [MODES] if both else [(mode,) for mode in MODES]:
        with contextlib.ExitStack() as stack:
            running = []
            for mode in modes:
                temp = folder / mode
                temp.mkdir(parents=True)
                log = stack.enter_context((folder / f"{mode}.log").open("wb"))
                running.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "torchsuite.case", mode, str(outs[mode]), *tests],
                        env={**os.environ, **environment(size, temp)},
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
            whole &= follow(running, size, [outs[mode] for mode in modes], deadline)
    return {mode: read(out) for mode, out in outs.items()}, whole


def environment(size: int, temp: Path) -> dict[str, str]:
    """What the suite reads."""
    return {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(size),
        "TEMP_DIR": str(temp),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def follow(running: list[subprocess.Popen[bytes]], size: int, outs: list[Path], deadline: float) -> bool:
    """Show progress until all have ended; end those that have not at the deadline."""
    shown = time.monotonic()
    while any(each.poll() is None for each in running):
        if time.monotonic() > deadline:
            for each in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(each.pid, 9)  # a session of its own, started above
                each.wait()
            say(f"{size} ranks: not at its end in time")
            return False
        time.sleep(0.2)
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            say(f"{size} ranks: {' and '.join(str(len(read(out))) for out in outs)} tests done")
    return all(each.returncode == 0 for each in running)


def read(out: Path) -> Ended:
    """What the suite has told so far."""
    if not out.exists():
        return {}
    lines = [
        json.loads(line)
        for line in out.read_text(encoding="utf-8").splitlines(keepends=True)
        if line.endswith("\n")
    ]
    return {line["test"]: (line["ended"], line["said"]) for line in lines}


def report(size: int, ended: dict[str, Ended], found: list[Difference], folder: Path) -> None:
    """Say how it was; where nothing ran, with the last line that the program has left in `folder`."""
    for mode in MODES:
        if ended[mode]:
            counts = counted(ended[mode])
            told = ", ".join(f"{number} {way}" for way, number in counts.items())
        else:
            lines = (folder / f"{mode}.log").read_text(encoding="utf-8", errors="replace").split("\n")
            told = "nothing ran: " + next(
                (line for line in reversed(lines) if line.strip()), "it said nothing"
            )
        say(f"{size} ranks, {mode}: {told}")
    if not any(ended.values()):
        return
    for each in found:
        say(f"  {each.test}: {each.stock} on stock torch, {each.world} in a world: {each.said}")
    say(f"{size} ranks: {len(found)} differences")


def say(text: str) -> None:
    """Print it now."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
