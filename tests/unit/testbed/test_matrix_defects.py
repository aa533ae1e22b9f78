"""What must be seen for a defect to be there, and what a build's column then says."""

from __future__ import annotations

import pytest
from kits.matrixkit import row, seen, step
from matrix.cells import LEGACY, NCCL2
from matrix.defects import DEFECTS, Verdict, verdict
from matrix.outcome import BLOCKED, Seen

BY_ID = {defect.id: defect for defect in DEFECTS}
QUIET = (step("caller", ms=0), step("read", ms=500, result="stale"), step("exception", result="NoneType"))
LOUD = (step("caller", "DistBackendError"), step("again", "DistBackendError"))


def at(defect: str, scenario: str, mode: str, *observers: Seen, implementation: str = LEGACY) -> Verdict:
    return verdict(BY_ID[defect], [row(*observers, scenario=scenario, mode=mode)], implementation).verdict


CASES = [
    ("D0", "lost.recv.wait", "aeh2", seen(step("caller", "X", text="Unconvertible NCCL type")), seen(*LOUD)),
    ("D1", "lost.send.wait", "aeh2", seen(*QUIET, step("again")), seen(*LOUD)),
    ("D1", "silent.stopped", "aeh2-wait", seen(*QUIET, step("again")), seen(*LOUD)),
    ("D2", "later.dump-sleep", "aeh2", seen(step("caller", ms=4300)), seen(step("caller", ms=900))),
    (
        "D3", "later.cleaned-up", "aeh2-beat",
        seen(step("caller"), end="SIGABRT", ended_ms=7000), seen(step("caller")),
    ),
    ("D4", "later.slow-abort", "aeh2-beat", seen(step("caller"), end="SIGABRT"), seen(step("caller"))),
    ("D5", "enqueue.batch", "aeh2", seen(end="SIGABRT"), seen(step("healthy", result="right"))),
    ("D6", "enqueue.send", "aeh2", seen(step("healthy", result="wrong: 1")), seen(step("healthy", result="right"))),
    (
        "D6", "enqueue.send", "aeh2",
        seen(step("depth", result=1), step("healthy", result="right")),
        seen(step("depth", result=0), step("healthy", result="right")),
    ),
    (
        "D7", "others.same-store", "aeh2-beat-dump",
        seen(rank=2, end="SIGABRT"), seen(step("healthy meanwhile", result="right"), rank=2),
    ),
    (
        "D8", "others.abort-hangs-after", "aeh2",
        seen(step("healthy"), step("other thread", result="right"), step("other thread's worst", result=7900)),
        seen(step("healthy"), step("other thread", result="right"), step("other thread's worst", result=90)),
    ),
    (
        "D8", "others.abort-hangs-before", "aeh2",
        seen(step("healthy"), step("at once", "X", ms=8000)),
        seen(step("healthy"), step("other thread", result="right"), step("other thread's worst", result=90)),
    ),
    ("N2", "silent.ignored", "aeh2-wait", seen(step("caller", "X", ms=6200)), seen(step("caller", "X", ms=300))),
    ("N3", "abort.hangs-after", "aeh2", seen(step("caller", ms=8100)), seen(step("caller", ms=300))),
]  # fmt: skip


@pytest.mark.parametrize(("defect", "scenario", "mode", "bad", "good"), CASES)
def test_a_defect_is_told_from_its_absence(defect, scenario, mode, bad, good) -> None:
    assert at(defect, scenario, mode, bad) is Verdict.SHOWS
    assert at(defect, scenario, mode, good) is Verdict.ENDED


def test_those_of_the_newer_implementation_are_asked_there_only() -> None:
    silent = seen(*QUIET, step("again"), step("later", "RuntimeError"))
    for name in ("N1", "N4"):
        assert at(name, "lost.all_reduce.wait", "aeh2", silent, implementation=NCCL2) is Verdict.SHOWS
        assert at(name, "lost.all_reduce.wait", "aeh2", silent) is Verdict.NOT_APPLICABLE
    assert at("D1", "lost.all_reduce.wait", "aeh2", silent, implementation=NCCL2) is Verdict.NOT_APPLICABLE
    loud = seen(*LOUD, step("later", "DistBackendError"))
    assert at("N4", "lost.all_reduce.wait", "aeh2", loud, implementation=NCCL2) is Verdict.ENDED


def test_rows_that_cannot_tell_are_no_evidence() -> None:
    silent = seen(*QUIET, step("again"))
    assert at("D1", "lost.all_reduce.wait", "unset", silent) is Verdict.NOT_RUN  # promised nothing
    assert at("D1", "again.rebuilt", "aeh2", silent) is Verdict.NOT_RUN
    assert at("D1", "lost.all_reduce.wait", "aeh2", seen(end="SIGABRT")) is Verdict.NOT_RUN
    assert at("D1", "lost.all_reduce.wait", "aeh2", seen(step("caller", BLOCKED))) is Verdict.NOT_RUN
    assert at("D3", "later.cleaned-up", "aeh2", seen(end="SIGABRT")) is Verdict.NOT_RUN  # no short timeout
    assert (
        at("D7", "others.same-store", "aeh2", seen(end="SIGABRT")) is Verdict.NOT_RUN
    )  # it was in the group
    broken = row(silent, failure="the double does not know this")
    assert verdict(BY_ID["D1"], [broken], LEGACY).verdict is Verdict.NOT_RUN


def test_one_run_of_several_is_enough_and_cells_are_counted_once() -> None:
    rows = [
        row(seen(*LOUD), repeat=0),
        row(seen(*QUIET, step("again")), repeat=1),
        row(seen(*LOUD), scenario="lost.recv.wait"),
    ]
    found = verdict(BY_ID["D1"], rows, LEGACY)
    assert (found.verdict, found.shown, found.told) == (Verdict.SHOWS, ("lost.all_reduce.wait (aeh2)",), 2)


def test_every_defect_the_runtime_names_is_looked_for() -> None:
    from multiworld._core import nccl_policy

    assert set(nccl_policy._TEXTS) <= set(BY_ID)
