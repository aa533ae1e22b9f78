"""Ctrl-C ends an example: no traceback, nothing left, the exit code that a shell shows as 130.

Each way in which examples start processes, at one moment or two.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import time
from pathlib import Path

import pytest
from kits.contract.examplekit import EXAMPLES, PATIENCE, Program, examples, processes_with

pytestmark = [pytest.mark.everyday, pytest.mark.timeout(600)]

SOON = 120.0  # seconds; 5 on a machine of one's own
OWN = ("all_reduce", "asyncio", "pipeline")
"""At their start torch is loaded by the program itself; at that of the others by a process of it."""
LAUNCHED = (
    "-m",
    "multiworld.run",
    "--worlds",
    EXAMPLES / "elastic_pipeline/worlds.toml",
    "--max-restarts",
    100,
)
# What a line says in the middle, and near the end; and what the program needs beside torch. `llm_serving.py` has the cores
# to itself where it is tested (test_llm_serving).
PROGRAMS = {
    "all_reduce": (["all_reduce.py", "--rounds", 1000], "round 1", "", ""),
    "ddp": (["ddp_two_worlds.py", "--pause", 0.01], "sum step 0", "sum step 150", ""),
    "demo": (["demo.py", "--pause", 1, "--hang-timeout", 4], "w4 is active", "w2 is active, generation 2", ""),
    "elastic": (["elastic_training.py"], "kill -9 for process 1", "the same undisturbed", "sklearn"),
    "spawned": (["launch_subprocesses.py", "--steps", 100_000], "step 0", "", ""),
    "forked": (["launch_subprocesses.py", "--launch-method", "forkserver"], "step 0", "step 40", ""),
    "asyncio": (["multiworld_asyncio.py", "--rank", 0, "--port", 0], "pid", "", ""),
    "single": (["single_world.py", "--worldsize", 3, "--count", 5], "rank 0 received 1", "rank 0 received 4", ""),
    "resnet": (["resnet_serving.py"], "is here, generation 1", "is here, generation 2", ""),
    "rl_sync": (["rl_weight_sync.py"], "engines: .* steps/s", "generation 2", ""),
    "rl_weights": (["rl_weights.py", "--seconds", 4, "--rounds", 1], "undisturbed for", "[2-9] kills", "gymnasium"),
    "rl_plain": (["rl_weights.py", "--seconds", 4, "--plain"], "s undisturbed", "kill -9", "gymnasium"),
    "pipeline": ([*LAUNCHED, EXAMPLES / "elastic_pipeline/pipeline.py", "--seconds", 3], r"\d requests/s", "answered", ""),
}  # fmt: skip


START, MIDDLE, END = "the start", "the middle", "the end"
CASES = [
    ("all_reduce", START), ("all_reduce", MIDDLE), ("ddp", END), ("demo", MIDDLE), ("elastic", START), ("elastic", MIDDLE), ("spawned", MIDDLE),
    ("forked", START), ("asyncio", MIDDLE), ("single", END), ("resnet", START), ("rl_sync", START), ("rl_weights", START),
    ("rl_plain", MIDDLE), ("pipeline", START), ("pipeline", MIDDLE),
]  # fmt: skip


@pytest.mark.parametrize(("name", "moment"), CASES)
def test_ctrl_c(name, moment):
    words, middle, end, needed = PROGRAMS[name]
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"it needs {needed}")
    with examples() as start:
        program = start(*words, nice=5, forked=moment != START)
        if moment == START:
            loading(program, own=name in OWN)
        else:
            program.expect(middle if moment == MIDDLE else end)
        # It may have ended by itself, at its end.
        with contextlib.suppress(ProcessLookupError) if moment == END else contextlib.nullcontext():
            os.killpg(program.process.pid, signal.SIGINT)  # as a terminal does: to all of its processes
        sent = time.monotonic()
        code = program.finish(SOON)
        ended_by_itself = moment == END and code == 0
        assert ended_by_itself or code in {130, -signal.SIGINT}, program.text
        while left := processes_with(program.mark):
            assert time.monotonic() < sent + SOON, left
            time.sleep(0.05)
    assert not re.search("Traceback|KeyboardInterrupt|resource_tracker|leaked", program.text), program.text


def loading(program: Program, *, own: bool) -> None:
    """Wait until the program itself, or a process that it has started, maps torch's library: it is importing then."""
    deadline, first = time.monotonic() + PATIENCE, program.process.pid
    while time.monotonic() < deadline:
        for pid in [first] if own else [pid for pid in processes_with(program.mark) if pid != first]:
            with contextlib.suppress(OSError):
                if "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text():
                    return
        assert program.process.poll() is None, program.text
        time.sleep(0.01)
    raise AssertionError(f"torch is not loaded after {PATIENCE:.0f} s")


def test_each_program_makes_ctrl_c_quiet_first():
    for path in EXAMPLES.glob("[!_]*.py"):
        (first, *_) = re.findall(r"^(?:import|from) (?!__future__)(\w+)", path.read_text(), re.MULTILINE)
        assert first == "_ctrl_c", path
