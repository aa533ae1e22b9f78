"""The fast core of the defect matrix: a patched build keeps what it promises, a stock build shows its defects.

The cells of all tests that were chosen run side by side, from the first test on; each test judges its own.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from matrix.catalogue import SCENARIOS, by_id
from matrix.cells import LEGACY, NCCL2, Cell, Target, targets
from matrix.compare import compare
from matrix.defects import DEFECTS, Verdict, verdict
from matrix.modes import MODES
from matrix.outcome import Row
from matrix.promises import broken
from matrix.results import read
from matrix.runner import run_cell

JOBS = 4  # most of a cell is waiting
SLACK_MS = 6000  # the machine may be busy; how long it takes on a quiet one is on the page
STOCK = Path(__file__).parents[2] / "docs" / "nccl-defects.json"

PROMISED = [
    (scenario.id, mode, LEGACY)
    for scenario in SCENARIOS
    for mode in ("aeh2", "aeh2-wait", "aeh2-beat", "aeh2-dump")
    if mode in scenario.modes
    # Each in CleanUpOnly itself; in its variants where they matter.
    and (
        mode == "aeh2"
        or scenario.id.startswith(("lost.all_reduce", "lost.recv", "silent.ignored", "later", "others"))
    )
]
SHOWN = [
    ("D1", "lost.all_reduce.wait", "aeh2", LEGACY),
    ("D1", "lost.recv.stream", "aeh2", LEGACY),
    ("D1", "lost.three", "aeh2", LEGACY),
    ("D2", "later.dump-sleep", "aeh2-dump", LEGACY),
    ("D3", "later.cleaned-up", "aeh2-beat-dump", LEGACY),
    ("D4", "later.slow-abort", "aeh2-beat", LEGACY),
    ("D5", "enqueue.all_reduce_coalesced", "aeh2", LEGACY),
    *(
        ("D6", f"enqueue.{op}", "aeh2", LEGACY)
        for op in ("send", "recv", "batch", "gather", "scatter", "all_to_all", "managed_all_reduce")
    ),
    ("D7", "others.same-store", "aeh2-beat-dump", LEGACY),
    ("D8", "others.abort-hangs-after", "aeh2", LEGACY),
    ("N1", "lost.all_reduce.wait", "aeh2", NCCL2),
    ("N2", "silent.ignored", "aeh2-wait", NCCL2),
    ("N3", "abort.hangs-after", "aeh2", NCCL2),
    ("N4", "lost.all_reduce.wait", "aeh2", NCCL2),
]
UNCHANGED = [
    (name, mode, LEGACY)
    for name in ("lost.all_reduce.wait", "lost.recv.stream", "silent.killed", "enqueue.send", "abort.fails")
    for mode in ("unset", "aeh0", "aeh1", "aeh3")
] + [("enqueue.all_reduce_coalesced", "unset", LEGACY), ("others.same-store", "unset-beat-dump", LEGACY)]


class Filled:
    """The rows of one build, being filled in the background."""

    def __init__(self, launch, items, scratch) -> None:
        self._build = launch.build
        self._targets = {
            each.implementation: each
            for each in targets(
                launch.build.name,
                launch.build.torch,
                patched=launch.build.patched,
                backends=launch.build.backends,
                default=launch.build.nccl_default_is,
            )
        }
        self._pool = ThreadPoolExecutor(JOBS)
        self._rows: dict[tuple[str, str, str], Future[Row]] = {}
        for item in items:
            wanted = item.callspec.params["wanted"][-3:]
            if self._for_us(item) and wanted[2] in self._targets and wanted not in self._rows:
                scenario, mode, kind = wanted
                cell = Cell(by_id(scenario), MODES[mode], self._targets[kind])
                self._rows[wanted] = self._pool.submit(run_cell, launch.launcher, cell, scratch=scratch)

    def _for_us(self, item) -> bool:
        ours = "patched" if self._build.patched else "stock"
        return (
            item.callspec.params["bed_name"] == self._build.name and item.get_closest_marker(ours) is not None
        )

    def row(self, wanted: tuple[str, ...]) -> Row:
        if wanted[-1] not in self._targets:
            pytest.skip(f"{self._build.name} has no {wanted[-1]}")
        return self._rows[wanted[-3:]].result()

    def target(self, kind: str) -> Target:
        return self._targets[kind]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def filled(bed_name, launch, request, tmp_path_factory):
    items = [
        item
        for item in request.session.items
        if item.path == request.path and "wanted" in getattr(item, "callspec", request).params
    ]
    made = Filled(launch, items, tmp_path_factory.mktemp("matrix"))
    yield made
    made.close()


def wanted(cells):
    return pytest.mark.parametrize("wanted", cells, ids=["-".join(each) for each in cells])


@pytest.mark.patched
@wanted(PROMISED)
def test_a_patched_build_keeps_its_promises(wanted, filled) -> None:
    row = filled.row(wanted)
    assert broken(row, by_id(wanted[0]), slack_ms=SLACK_MS) == [], row.as_json()


@pytest.mark.stock
@wanted(SHOWN)
def test_a_stock_build_shows_the_defect(wanted, filled) -> None:
    row = filled.row(wanted)
    (defect,) = [each for each in DEFECTS if each.id == wanted[0]]
    assert verdict(defect, [row], wanted[-1]).verdict is Verdict.SHOWS, row.as_json()


@pytest.mark.patched
@wanted(UNCHANGED)
def test_outside_clean_up_only_a_patched_build_ends_as_the_stock_one_did(wanted, filled) -> None:
    row, ours = filled.row(wanted), filled.target(wanted[-1])
    known = read(STOCK)
    theirs = [each for each in known.targets if (each.torch, each.backend) == (ours.torch, ours.backend)]
    stock = [each for each in theirs if not each.patched]
    if not stock:
        pytest.skip(f"{STOCK.name} has no stock {ours.torch}: nox -s matrix")
    before = [each for each in known.of(stock[0]) if (each.scenario, each.mode) == wanted[:2]]
    found = compare(stock[0], ours, [*before, row])
    assert (found.same, found.differences) == (1, ()), row.as_json()
