"""The programs on the pages do what the pages say, run as a reader runs them, but that torch is loaded already.

A sample is marked in the page: ``run: NAME ranks=N`` is started N times at once, with its rank as the argument;
``killed=R`` says that rank R is killed by a signal (its own); ``output: NAME rank=R`` before a text block is what
rank R prints, ``...`` standing for anything; ``sample: NAME`` is a part of a longer story, told by a test here (that of docs/ray.md: in tests/clusters/test_ray.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kits.contract.worldkit import Cast, Me
from kits.storekit import local_server

pytestmark = pytest.mark.everyday

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKED = re.compile(r"<!-- (run|sample|output): (\S+)(.*?) -->\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
PATIENCE = 120.0  # seconds


class Sample:
    """A marked block: its kind, name, options and text."""

    def __init__(self, kind: str, name: str, options: str, body: str) -> None:
        self.kind, self.name, self.body = kind, name, body
        self.options = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", options)}


SAMPLES = [Sample(*found) for page in PAGES for found in MARKED.findall(page.read_text(encoding="utf-8"))]
RUN = [each for each in SAMPLES if each.kind == "run"]
PARTS = {each.name: each for each in SAMPLES if each.kind == "sample"}
FROM_NOTHING = {"readme", "launch", "launch-parallel"}
"""These start as a reader starts them: the first that is read, and those that start processes of their own. The others
are forked from a server that has torch loaded, which else is most of what each of their processes does."""


class Stage:
    """Starts samples against a store of their own; whatever still runs in the end is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = local_server(seconds=30)
        self.started: list[subprocess.Popen[str]] = []

    def program(self, sample: Sample) -> Path:
        """Write a sample's file."""
        program = self.folder / f"{sample.name.replace('-', '_')}.py"
        body, times = re.subn(r"\b29500\b", str(self.server.port), sample.body)
        assert times, f"{sample.name} names no port to replace"
        # The pages' two seconds are short for a machine that others share: a stall of a healthy worker is a hang too.
        body = body.replace("hang_timeout=2)", "hang_timeout=5)")
        program.write_text(body)
        return program

    def start(self, sample: Sample, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, self.program(sample), *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate(timeout=PATIENCE)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with contextlib.closing(Stage(tmp_path)) as made:
        yield made


def like(shown: str) -> re.Pattern[str]:
    """A pattern for an output block: a line of dots is any lines or none, dots in a line anything in it."""
    parts = [
        r"(?:.*\n)*?" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + r"\n"
        for line in shown.splitlines()
    ]
    return re.compile("".join(parts))


def reads(me: Me, file: Path) -> None:
    """Be one process of a sample."""
    os.chdir(file.parent)
    for number, name in ((1, "out"), (2, "err")):
        to = os.open(f"{name}{me.rank}", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(to, number)
        os.close(to)
    os.environ["M8D_STUCK_AFTER"] = (
        "4"  # the pages' 10 s leave one that waits for 12 s little time on a busy machine
    )
    sys.argv = [str(file), str(me.rank)]
    sys.path.insert(0, str(file.parent))
    runpy.run_path(str(file), run_name="__main__")


def from_nothing(stage: Stage, sample: Sample) -> tuple[list[int], list[tuple[str, str]]]:
    """Exit codes of a sample's processes, and what each wrote to standard output and standard error."""
    processes = [stage.start(sample, str(rank)) for rank in range(sample.options["ranks"])]
    ended = [process.communicate(timeout=PATIENCE) for process in processes]
    return [process.returncode for process in processes], ended


def forked(stage: Stage, cast: Cast, sample: Sample) -> tuple[list[int], list[tuple[str, str]]]:
    """The same of processes that have torch loaded."""
    program = stage.program(sample)
    actors = [cast.start(reads, rank, file=program) for rank in range(sample.options["ranks"])]
    codes = [actor.finish(PATIENCE) for actor in actors]
    ended = [
        ((stage.folder / f"out{rank}").read_text(), (stage.folder / f"err{rank}").read_text())
        for rank in range(len(actors))
    ]
    return codes, ended


@pytest.mark.parametrize("sample", RUN, ids=lambda each: each.name)
def test_a_sample_does_what_its_page_says(stage: Stage, cast: Cast, sample: Sample) -> None:
    ranks = sample.options["ranks"]
    codes, ended = from_nothing(stage, sample) if sample.name in FROM_NOTHING else forked(stage, cast, sample)
    killed = sample.options.get("killed")
    assert codes == [-signal.SIGKILL if rank == killed else 0 for rank in range(ranks)], ended
    for each in SAMPLES:
        if each.kind == "output" and each.name == sample.name:
            printed = ended[each.options["rank"]][0]
            assert like(each.body).fullmatch(printed), (each.body, printed, ended)


def read_until(process: subprocess.Popen[str], wanted: str, *, never: str = "\0") -> list[str]:
    """Lines that `process` prints, up to the one that is `wanted`; the process is killed if it takes too long."""
    assert process.stdout is not None
    deadline = time.monotonic() + PATIENCE
    lines: list[str] = []
    while time.monotonic() < deadline:
        line = process.stdout.readline()
        if not line:
            break
        lines.append(line.rstrip("\n"))
        assert never not in line, lines
        if re.fullmatch(wanted, lines[-1]):
            return lines
    process.kill()
    raise AssertionError(f"{wanted!r} was not printed: {lines}, {process.communicate(timeout=PATIENCE)}")


@pytest.mark.timeout(600)
def test_the_tutorials_worlds_break_and_come_back(stage: Stage) -> None:
    """Kill a worker, stop a worker, end a worker; the leader prints what the page says, and the left world goes on."""
    leader = stage.start(PARTS["leader"])
    stage.start(PARTS["worker"], "left")
    right = stage.start(PARTS["worker"], "right")
    read_until(leader, r"right 3")

    for number, (means, seen) in enumerate(
        (
            (signal.SIGKILL, r"right is broken: crashed \(1,\)"),
            (signal.SIGSTOP, r"right is broken: hung \(1,\)"),
            (signal.SIGINT, r"right is broken: left \(1,\)"),
        )
    ):
        right.send_signal(means)
        read_until(leader, seen, never="left is broken")
        read_until(leader, r"left \d+")  # the other world goes on
        right.kill()
        right = stage.start(PARTS["worker"], "right")
        read_until(leader, rf"right is back: generation {number + 2}", never="left is broken")
        read_until(leader, r"right \d+", never="left is broken")
    assert leader.poll() is None


DIES_JOINING = """
import os, signal
from multiworld._c10d import groups
groups.build = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
"""
"""Before a program: it dies in its first join, when it has agreed on a generation with the other members."""


@pytest.mark.timeout(600)
def test_the_tutorials_leader_outlives_a_worker_that_dies_while_it_joins(stage: Stage) -> None:
    leader, worker = stage.start(PARTS["leader"]), PARTS["worker"]
    dying = Sample("sample", "dying", "", DIES_JOINING + worker.body)
    stage.start(worker, "left")
    read_until(leader, r"left 3")
    assert stage.start(dying, "right").wait(PATIENCE) == -signal.SIGKILL  # in the world's first join
    read_until(leader, r"right is not there: JoinAbandonedError", never="left is broken")
    right = stage.start(worker, "right")
    read_until(leader, r"right 3", never="left is broken")
    right.kill()
    read_until(leader, r"right is broken: crashed \(1,\)")
    assert stage.start(dying, "right").wait(PATIENCE) == -signal.SIGKILL
    read_until(leader, r"right is not there: JoinAbandonedError", never="left is broken")
    read_until(leader, r"left \d+", never="left is broken")  # the other world goes on
    stage.start(worker, "right")
    read_until(leader, r"right is back: generation \d+", never="left is broken")
    read_until(leader, r"right \d+", never="left is broken")


def test_every_part_of_a_story_is_told() -> None:
    assert set(PARTS) == {"leader", "worker", "ray"}
    assert len(RUN) > 4
    assert {each.name for each in RUN} > FROM_NOTHING
