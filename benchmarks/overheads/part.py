"""Overheads without communication: entering a world, asking for a rank, importing, events."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from benchmarks.figures.figure import Figure, Goal, quantile, ratio, summary
from benchmarks.measuring.part import Part, Run
from benchmarks.measuring.ranks import ROOT, Ranks
from benchmarks.measuring.rounds import interleaved

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

LOOPS = (
    "bare", "enter", "round/world",
    "get_rank/stock", "get_rank/routed", "get_rank/world",
    "get_world_size/stock", "get_world_size/routed", "get_world_size/world",
    "publish/0", "publish/10",
)  # fmt: skip
_SUBSCRIBERS = (0, 10)
_IMPORTS = {
    "nothing": "pass",
    "multiworld": "import multiworld",
    "join": "import multiworld; multiworld.join",
    "torch": "import torch.distributed",
}
"""In a fresh interpreter, without torch unless it says so."""
_AFTER_TORCH = {
    "multiworld_after_torch": "import multiworld",
    "join_after_torch": "import multiworld; multiworld.join; import multiworld._c10d.groups, "
    "multiworld._net.stores.store",
}
"""In a fresh interpreter that has loaded torch. The last is all that a first join loads."""
_NOTES = {
    "multiworld": "import multiworld, in a fresh interpreter",
    "join": "import multiworld and look up multiworld.join: no torch is loaded",
    "torch": "import torch.distributed, for orientation",
    "multiworld_after_torch": "import multiworld where torch is loaded",
    "join_after_torch": "everything that a first join imports, where torch is loaded",
}
_PROGRAM = """
import sys, time
{before}
modules = len(sys.modules)
began = time.perf_counter()
{what}
took = time.perf_counter() - began
modules = len(sys.modules) - modules
import json
print(json.dumps([1e3 * took, modules, "torch" in sys.modules]))
"""


def measure(run: Run) -> Iterator[Figure]:
    """Loops in a member of a world; joins of worlds; imports in fresh interpreters."""
    rounds = run.options.rounds or run.pick(12, 40)
    repeat = run.options.repeat or run.pick(20_000, 50_000)
    run.progress("starting processes")
    with Ranks("benchmarks.overheads.rank:make", count=2) as ranks:
        members = [ranks[0], ranks[1]]
        store = members[1].call("address")

        def both(name: str, **args: Any) -> float:
            for rank in members:
                rank.start(name, **args)
            value: float = members[0].result()
            members[1].result()
            return value

        both("join", store=store)
        run.progress("loops")
        loops = interleaved(LOOPS, rounds, lambda form: members[0].call("loop", form=form, repeat=repeat))
        yield from _loops(loops)
        run.progress("the log of operations")
        found = interleaved(
            ("messages", "log"),
            rounds,
            lambda form: (
                both(form, repeat=repeat // 20)
                if form == "messages"
                else members[0].call(form, repeat=repeat)
            ),
        )
        yield ratio(
            "overheads", "operations_log/4B",
            [message + log for message, log in zip(found["messages"], found["log"], strict=True)],
            found["messages"], absolute_unit="us", goal=Goal(at_most=1.02),
            note="World.send or recv of 4 bytes, and the log of operations once more, against the former",
        )  # fmt: skip
        run.progress("joins with subscribers")
        joins = interleaved(
            _SUBSCRIBERS,
            rounds,
            lambda count: both("join_and_close", subscribers=count, repeat=run.pick(5, 10)),
        )
        yield _ratio(
            "join_and_close/10_subscribers", joins[10], joins[0], "ms",
            "a two-member world, joined, used once and closed, with 10 subscribers against none",
        )  # fmt: skip
    yield from _imports(run)


def _loops(found: dict[str, list[float]]) -> Iterator[Figure]:
    yield summary("overheads", "with/world", found["enter"], "us", note="with world: pass")
    yield summary(
        "overheads", "with/bare", found["bare"], "us", note="the floor: a with that does nothing, in Python"
    )
    for what in ("get_rank", "get_world_size"):
        stock = found[f"{what}/stock"]
        yield _ratio(
            f"{what}/world",
            found[f"{what}/world"],
            stock,
            "us",
            f"dist.{what}() inside a world, against stock",
        )
        yield _ratio(
            f"{what}/routed", found[f"{what}/routed"], stock, "us",
            f"dist.{what}() outside of all worlds once one was joined, against stock",
        )  # fmt: skip
    yield _ratio(
        "round/world", found["round/world"], found["get_world_size/stock"], "us",
        "with world: dist.get_world_size(), against the call in stock",
    )  # fmt: skip
    for count in _SUBSCRIBERS:
        note = f"an event published on a bus with {count} subscribers"
        yield summary("overheads", f"publish/{count}", found[f"publish/{count}"], "us", note=note)


def _ratio(name: str, ours: list[float], stock: list[float], unit: str, note: str) -> Figure:
    return ratio("overheads", name, ours, stock, absolute_unit=unit, note=note)


def _imports(run: Run) -> Iterator[Figure]:
    light = ("nothing", "multiworld", "join")
    times = run.pick(8, 30) if run.options.imports is None else run.options.imports
    if not times:
        return
    run.progress("imports")
    # One warm-up round: it writes the bytecode, if it is not there yet.
    found = interleaved(light, times, lambda form: _import(_IMPORTS[form]), warm_up=1)
    fewer = max(1, times // 4)
    heavy = interleaved(("torch",), fewer, lambda form: _import(_IMPORTS[form]), warm_up=0)
    loaded = interleaved(
        tuple(_AFTER_TORCH), fewer,
        lambda form: _import(_AFTER_TORCH[form], before="import torch.distributed"),
        warm_up=0,
    )  # fmt: skip
    for name, values in {**found, **heavy, **loaded}.items():
        if name == "nothing":
            continue
        own, modules = [each[0] for each in values], [float(each[1]) for each in values]
        if name in light and any(each[2] for each in values):
            raise RuntimeError(f"{_IMPORTS[name]!r} has loaded torch")
        yield summary(
            "overheads",
            f"import/{name}",
            own,
            "ms",
            note=f"{_NOTES[name]}; {quantile(modules, 0.5):.0f} modules",
        )


def _import(what: str, before: str = "") -> tuple[float, int, bool]:
    """Import in a fresh interpreter: ms, number of modules loaded, whether torch is among them."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # what is measured is not how long compiling takes
    with tempfile.TemporaryDirectory(prefix="m8d-") as folder:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM.format(before=before, what=what)],
            env=env, cwd=folder, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{what!r} failed in a fresh interpreter:\n{done.stderr}")
    took, modules, torch = json.loads(done.stdout.splitlines()[-1])
    return took, modules, torch


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help="of loops and joins (default: 12; 40 with --full)")
    parser.add_argument(
        "--repeat", type=int, help="of each loop in a round (default: 20000; 50000 with --full)"
    )
    parser.add_argument(
        "--imports", type=int, help="fresh interpreters for each import (default: 8; 30 with --full)"
    )


PART = Part(
    name="overheads",
    title="Overheads",
    description="Entering and leaving a world, get_rank and get_world_size in it and outside of it, import "
    "time, the event "
    "bus with 0 and 10 subscribers. Stock: the same process with multiworld's router taken out.",
    measure=measure,
    add_options=_options,
)
