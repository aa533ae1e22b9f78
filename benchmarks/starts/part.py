"""Starts: of four workers, and of one again after a kill, with --preload and without."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from benchmarks.figures.figure import Goal, ratio
from benchmarks.measuring.part import Part, Run
from benchmarks.measuring.rounds import interleaved
from benchmarks.starts.launched import WORKERS, Launched

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.figures.figure import Figure

ANEW, FORKED = "anew", "preload"
OPTIONS = {ANEW: [], FORKED: ["--preload", "torch,multiworld"]}
_NOTES = {
    "start/whole": f"`m8d-run` to an operation of {WORKERS} workers",
    "start/memory": "all that `m8d-run` started; shared pages counted in parts",
    "restart/loaded": "a worker's kill to its replacement's first line after `import torch`",
    "restart/whole": f"a worker's kill to the next operation of all {WORKERS}, in the next generation",
    "restart/cpu": "CPU of the replacement until it has joined",
}
_UNITS = {"start/memory": "MB"}
_GOALS = {"restart/loaded": Goal(at_most=0.1), "restart/whole": Goal(at_most=0.25)}


def measure(run: Run) -> Iterator[Figure]:
    """Starts of whole runs in turns; then kills in both forms in turns."""
    found: dict[str, dict[str, list[float]]] = defaultdict(dict)

    def started(form: str) -> tuple[float, float]:
        run.progress(f"start, {form}")
        with Launched(OPTIONS[form]) as launched:
            lines = launched.whole()
            return 1e3 * (max(line["at"] for line in lines.values()) - launched.began), launched.memory()

    starts = interleaved([ANEW, FORKED], run.pick(3, 10), started, warm_up=1)
    for form, pairs in starts.items():
        found["start/whole"][form] = [took for took, _ in pairs]
        found["start/memory"][form] = [memory for _, memory in pairs]
    with Launched(OPTIONS[ANEW]) as anew, Launched(OPTIONS[FORKED]) as forked:
        runs = {ANEW: anew, FORKED: forked}
        for each in runs.values():
            each.whole()

        def restarted(form: str) -> tuple[float, float, float]:
            run.progress(f"kill, {form}")
            at = runs[form].kill(WORKERS - 1)
            lines = runs[form].whole()
            again = lines[WORKERS - 1]
            if sum("loaded" in line for line in lines.values()) != 1:
                raise RuntimeError(f"one worker was to start again: {lines}")
            last = max(line["at"] for line in lines.values())
            return 1e3 * (again["loaded"] - at), 1e3 * (last - at), 1e3 * again["cpu"]

        kills = interleaved([ANEW, FORKED], run.pick(6, 40), restarted)
    for index, name in enumerate(("restart/loaded", "restart/whole", "restart/cpu")):
        for form, triples in kills.items():
            found[name][form] = [triple[index] for triple in triples]
    for name, forms in found.items():
        yield ratio(
            "starts", name, forms[FORKED], forms[ANEW], goal=_GOALS.get(name), note=_NOTES[name],
            absolute_unit=_UNITS.get(name, "ms"),
        )  # fmt: skip


PART = Part(
    "starts",
    "Starts of workers",
    "m8d-run with four workers that import torch and join one world: as new programs, and forked of one "
    "process that has imported torch (--preload torch,multiworld). In turns; the second over the first.",
    measure,
)
