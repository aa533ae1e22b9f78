"""Stock and patched beside each other where the patches change nothing."""

from __future__ import annotations

from kits.matrixkit import NEWER, PATCHED, STOCK, row, seen, step
from matrix.compare import compare, pairs
from matrix.outcome import BLOCKED, CUT


def both(stock, patched, *, mode: str = "unset"):
    rows = [row(stock, target=STOCK, mode=mode), row(patched, target=PATCHED, mode=mode)]
    return compare(STOCK, PATCHED, rows)


def test_the_pair_is_of_the_same_torch_and_backend() -> None:
    assert pairs([NEWER, PATCHED, STOCK]) == [(STOCK, PATCHED)]
    assert pairs([NEWER, STOCK]) == []


def test_times_do_not_matter_outcomes_do() -> None:
    assert both(seen(step("caller", ms=10)), seen(step("caller", ms=900))).same == 1
    found = both(seen(step("caller")), seen(step("caller", "RuntimeError")))
    assert found.same == 0
    (difference,) = found.differences
    assert (difference.scenario, difference.mode) == ("lost.all_reduce.wait", "unset")
    assert "caller returned" in difference.stock
    assert "caller RuntimeError" in difference.patched
    assert both(seen(step("read", result="stale")), seen(step("read", result="new"))).differences
    assert both(seen(step("caller", BLOCKED)), seen(step("caller"))).differences
    assert both(seen(end="SIGABRT"), seen(end="alive")).differences
    assert both(seen(step("later")), seen()).differences  # both lived: all steps were there to be taken


def test_how_far_a_dying_process_gets_is_chance() -> None:
    left = seen(step("caller"), step("read", CUT), end="SIGABRT")
    right = seen(step("caller"), step("read"), step("later"), end="SIGABRT")
    assert both(left, right).same == 1
    assert both(seen(step("caller"), end="SIGABRT"), seen(step("caller", "X"), end="SIGABRT")).differences


def test_clean_up_only_is_not_compared() -> None:
    found = both(seen(), seen(end="SIGABRT"), mode="aeh2-wait")
    assert (found.same, found.differences, found.lacking) == (0, (), ())


def test_how_long_a_thread_was_held_up_is_a_time() -> None:
    assert both(
        seen(step("other thread's worst", result=10)), seen(step("other thread's worst", result=99))
    ).same


def test_what_varies_on_both_is_no_difference() -> None:
    rows = [
        row(seen(step("caller")), target=STOCK, mode="aeh1"),
        row(seen(step("caller", "X")), target=STOCK, mode="aeh1", repeat=1),
        row(seen(step("caller", "X")), target=PATCHED, mode="aeh1"),
    ]
    assert compare(STOCK, PATCHED, rows).same == 1


def test_what_only_one_of_them_has_is_named() -> None:
    rows = [
        row(seen(), target=STOCK, mode="aeh0"),
        row(seen(), target=STOCK, mode="aeh1"),
        row(seen(), target=PATCHED, mode="aeh1", failure="no"),
    ]
    found = compare(STOCK, PATCHED, rows)
    assert found.lacking == ("lost.all_reduce.wait (aeh0)", "lost.all_reduce.wait (aeh1)")
