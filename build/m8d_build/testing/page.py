"""The compatibility page: its generated part, between two marks. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from m8d_build.testing.results import FAILED, PASSED, SKIPPED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from m8d_build.testing.results import Case, Outcome

__all__ = ["BEGIN", "END", "put_into", "render"]

BEGIN = "<!-- results: begin (written by nox -s tests-torch) -->"
END = "<!-- results: end -->"
NEW_PAGE = f"# Compatibility\n\n{BEGIN}\n{END}\n"
NOTHING = "-"
_VERDICTS = (PASSED, FAILED, SKIPPED)
HOW_TO_READ = "In a cell: how many tests passed; [n] leads to the reason below."
AGAIN = "Failed in the whole run, and passed when run again without the others"
LONGEST = 240  # characters of a reason
_FOLDERS = re.compile(r"(?<![\w:/.])/(?:[\w.+@-]+/)+(?=[\w.+@-])")


def render(outcomes: Sequence[Outcome], *, machine: str) -> str:
    """Return the generated part: totals, one table per test file, then why tests were skipped or failed.

    Args:
        outcomes: one column each.
        machine: what it ran on ("Linux x86_64, 2 cores, no GPU").
    """
    dates = sorted({outcome.date for outcome in outcomes})
    reasons = _Reasons()
    tables = [_table(file, outcomes, reasons) for file in sorted(_files(outcomes))]
    parts = [
        f"Run on {' and '.join(dates)} (UTC) on {machine}. {HOW_TO_READ}",
        _totals(outcomes),
        *tables,
        *reasons.lists(),
    ]
    return "\n\n".join(parts) + "\n"


def put_into(page: str | None, part: str) -> str:
    """Return a page with its generated part replaced; a new page where there is none.

    Raises:
        ValueError: the page does not have each mark once, in order.
    """
    text = NEW_PAGE if page is None else page
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the page must have {BEGIN} and {END}, once each and in this order")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    return f"{before}{BEGIN}\n\n{part.strip()}\n\n{END}{after}"


class _Reasons:
    """Reasons by number, and which tests of which versions gave them."""

    def __init__(self) -> None:
        self._skipped: dict[str, list[tuple[str, str]]] = {}
        self._failed: list[str] = []
        self._again: list[str] = []

    def skipped(self, case: Case, version: str) -> str:
        told = self._skipped.setdefault(_one_line(case.reason), [])
        told += [(version, case.file)] * case.count
        return f"[{list(self._skipped).index(_one_line(case.reason)) + 1}]"

    def failed(self, cases: Sequence[Case], version: str) -> None:
        self._failed.append(_told(cases, version))

    def passed_again(self, cases: Sequence[Case], version: str) -> None:
        self._again.append(_told(cases, version))

    def lists(self) -> list[str]:
        said = []
        if self._failed:
            said += ["### Failed", "\n".join(self._failed)]
        if self._again:
            said += [f"### {AGAIN}", "\n".join(self._again)]
        if self._skipped:
            lines = [
                f"{number}. {reason} ({_counted(told)})"
                for number, (reason, told) in enumerate(self._skipped.items(), 1)
            ]
            said += ["### Skipped, and why", "\n".join(lines)]
        return said


def _told(cases: Sequence[Case], version: str) -> str:
    first, more = cases[0], sum(case.count for case in cases) - 1
    others = f" (and {more} more of this row)" if more else ""
    return f"- torch {version}: `{first.file}.py::{first.name}`{others}: {_one_line(first.reason)}"


def _totals(outcomes: Sequence[Outcome]) -> str:
    rows = [
        ["build", *(outcome.build or NOTHING for outcome in outcomes)],
        ["Python", *(outcome.python or NOTHING for outcome in outcomes)],
        ["run on", *(outcome.date for outcome in outcomes)],
        ["sources", *(outcome.sources or NOTHING for outcome in outcomes)],
        ["to its end", *(_one_line(outcome.trouble) if outcome.trouble else "yes" for outcome in outcomes)],
        *(
            [f"**{verdict}**", *(str(outcome.count(verdict)) for outcome in outcomes)]
            for verdict in _VERDICTS
        ),
        ["passed when run again", *(str(outcome.passed_again) for outcome in outcomes)],
        ["seconds", *(f"{outcome.seconds:.0f}" for outcome in outcomes)],
    ]
    return _markdown("", outcomes, rows)


def _files(outcomes: Sequence[Outcome]) -> Iterable[str]:
    """Return where the tests' files lie, each once: one that has moved since, where it was last."""
    dated = sorted(outcomes, key=lambda outcome: outcome.date)
    return {case.stem: case.file for outcome in dated for case in outcome.cases}.values()


def _table(file: str, outcomes: Sequence[Outcome], reasons: _Reasons) -> str:
    stem = file.rpartition("/")[2]
    features = _unique(case.feature for outcome in outcomes for case in outcome.cases if case.stem == stem)
    rows = []
    for feature in features:
        cells = [
            _cell(
                [c for c in outcome.cases if (c.stem, c.feature) == (stem, feature)], outcome.torch, reasons
            )
            for outcome in outcomes
        ]
        rows.append([_text(feature), *cells])
    heading = stem.removeprefix("test_").replace("_", " ")
    return f"### {heading}\n\n" + _markdown(f"`tests/contract/{file}.py`", outcomes, rows)


def _cell(cases: Sequence[Case], version: str, reasons: _Reasons) -> str:
    if not cases:
        return NOTHING
    number = {verdict: sum(case.count for case in cases if case.verdict == verdict) for verdict in _VERDICTS}
    failed = [case for case in cases if case.verdict == FAILED]
    if failed:
        reasons.failed(failed, version)
    if again := [case for case in cases if case.verdict == PASSED and case.reason]:
        reasons.passed_again(again, version)
    why = _unique(reasons.skipped(case, version) for case in cases if case.verdict == SKIPPED)
    parts = [
        str(number[PASSED]) if number[PASSED] else "",
        f"**{number[FAILED]} failed**" if failed else "",
        f"{number[SKIPPED]} skipped {' '.join(why)}" if why else "",
    ]
    return ", ".join(part for part in parts if part)


def _markdown(first: str, outcomes: Sequence[Outcome], rows: Iterable[Sequence[str]]) -> str:
    head = [first, *(f"torch {outcome.torch}" for outcome in outcomes)]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _counted(told: Sequence[tuple[str, str]]) -> str:
    versions = _unique(version for version, _ in told)
    return ", ".join(f"torch {v}: {sum(version == v for version, _ in told)}" for v in versions)


def _unique(items: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(items))


def _text(text: str) -> str:
    """Return text that a Markdown table shows as it is."""
    return re.sub(r"([|\\<>*_`\[\]])", r"\\\1", text)


def _one_line(text: str) -> str:
    """Return a reason as the page shows it: one line, shortened, files by name without their folders."""
    flat = re.sub(r"\s+", " ", _FOLDERS.sub("", text)).strip() or "no reason given"
    return _text(flat if len(flat) <= LONGEST else flat[: LONGEST - 1] + "…")
