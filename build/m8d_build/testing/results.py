"""Results of the contract tests on one torch: read from pytest's junit file, kept as JSON."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET  # our own pytest's file, not a stranger's

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "FAILED", "PASSED", "SKIPPED", "Case", "Outcome", "condensed", "from_json", "read_junit", "repeated",
    "to_json",
]  # fmt: skip

SCHEMA = 1
PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"
_ORDER = (PASSED, SKIPPED, FAILED)
_WHOLE = "the whole file"


@dataclass(frozen=True)
class Case:
    """One test, or several of one row that ended alike.

    Attributes:
        file: its file, below the folder of all tests and without its ending ("worlds/test_world"). Records of
            before there were rooms have the stem alone.
        name: pytest's name of it, or of the first ("test_values[3]").
        verdict: PASSED, SKIPPED or FAILED.
        reason: of a skip or a failure, one line; of a test that passed when it was run again, of its failure;
            "" for one that passed at first.
        count: of tests.
    """

    file: str
    name: str
    verdict: str
    reason: str = ""
    count: int = 1

    @property
    def stem(self) -> str:
        """Its file's name: unique among all tests, in whatever room it lies ("test_world")."""
        return self.file.rpartition("/")[2]

    @property
    def feature(self) -> str:
        """Its row: the function, or the last parameter of a test_..._feature_...[mode-feature]."""
        function, _, parameters = self.name.partition("[")
        row = function.removeprefix("test_")
        if parameters and "feature" in function:
            row = parameters.removesuffix("]").rpartition("-")[2]
        return row.replace("_", " ")


@dataclass(frozen=True)
class Outcome:
    """What came of one torch.

    Attributes:
        torch: the version ("2.6.0").
        date: day of the run, UTC ("2026-11-20").
        sources: digest of what was run: the package and its tests.
        build: what torch calls itself ("2.6.0+cu124"); "" if nothing could be asked.
        python: its Python ("3.11.7").
        cases: the tests, in the order they ran.
        trouble: why it was not run, or not to its end; "" if it was.
        seconds: the tests took.
    """

    torch: str
    date: str
    sources: str
    build: str = ""
    python: str = ""
    cases: tuple[Case, ...] = field(default=())
    trouble: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it ran to its end and no test failed."""
        return not self.trouble and not self.count(FAILED)

    def count(self, verdict: str) -> int:
        """Return how many tests ended so."""
        return sum(case.count for case in self.cases if case.verdict == verdict)

    @property
    def passed_again(self) -> int:
        """How many tests passed only when they were run again."""
        return sum(case.count for case in self.cases if case.verdict == PASSED and case.reason)

    def summary(self) -> str:
        """Return "12 passed, 1 failed, 2 skipped", or why there is nothing to count."""
        counted = ", ".join(f"{self.count(verdict)} {verdict}" for verdict in (PASSED, FAILED, SKIPPED))
        counted += f", {self.passed_again} of those passed when run again" if self.passed_again else ""
        return "; ".join(part for part in (counted if self.cases else "", self.trouble) if part)


def read_junit(text: str, folder: str) -> tuple[Case, ...]:
    """Read the junit file pytest writes; ``folder`` is the name of the one that has all tests ("contract").

    A test that is told of twice (it failed, and so did its teardown) counts once, with the worse verdict. A
    file that could not be collected, or was skipped as a whole, is one case.

    Raises:
        ValueError: it is none.
    """
    try:
        root = ET.fromstring(text)  # noqa: S314  (written by the pytest we ran)
    except ET.ParseError as exc:
        raise ValueError(f"no junit file: {exc}") from exc
    found: dict[tuple[str, str], Case] = {}
    for element in root.iter("testcase"):
        case = _case(element, folder)
        known = found.get((case.file, case.name))
        if known is None or _ORDER.index(case.verdict) > _ORDER.index(known.verdict):
            found[case.file, case.name] = case
    return tuple(found.values())


def repeated(outcome: Outcome, again: Iterable[Case]) -> Outcome:
    """Return it with those tests passed that failed in it, and passed when they were run again."""
    passed = {(case.file, case.name): case for case in again if case.verdict == PASSED}
    cases = []
    for case in outcome.cases:
        second = passed.get((case.file, case.name)) if case.verdict == FAILED else None
        cases.append(case if second is None else replace(second, reason=case.reason))
    return replace(outcome, cases=tuple(cases))


def condensed(outcome: Outcome) -> Outcome:
    """Return it with one case for all tests of a row that ended alike; the page shows no more."""
    rows: dict[tuple[str, str, str, str], Case] = {}
    for case in outcome.cases:
        row = case.file, case.feature, case.verdict, case.reason
        known = rows.get(row)
        rows[row] = case if known is None else replace(known, count=known.count + case.count)
    return replace(outcome, cases=tuple(rows.values()))


def to_json(outcome: Outcome) -> str:
    """Return an outcome as JSON."""
    return json.dumps({"schema": SCHEMA, **asdict(outcome)}, indent=1)


def from_json(text: str) -> Outcome | None:
    """Return an outcome from its JSON; None if it is something else, or of another schema."""
    try:
        data = json.loads(text)
        if data.pop("schema") != SCHEMA:
            return None
        return Outcome(**{**data, "cases": tuple(Case(**case) for case in data["cases"])})
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _case(element: ET.Element, folder: str) -> Case:
    module, name = element.get("classname", ""), element.get("name", "")
    if not module:
        module, name = name, _WHOLE
    verdict, reason = PASSED, ""
    for child in element:
        if child.tag in {"failure", "error"}:
            verdict, reason = FAILED, _said(child)
            break
        if child.tag == "skipped":
            verdict, reason = SKIPPED, _said(child)
            if child.get("type") == "pytest.xfail":
                reason = f"fails as known: {reason}"
    return Case(_file_of(module.split("."), folder), name, verdict, reason)


def _file_of(parts: list[str], folder: str) -> str:
    """Return the file below the folder: a class's name may come after it."""
    names = [number for number, part in enumerate(parts) if part.startswith("test_")]
    end = names[-1] if names else len(parts) - 1
    begin = parts.index(folder) + 1 if folder in parts[:end] else 0
    return "/".join(parts[begin : end + 1])


def _said(child: ET.Element) -> str:
    message, text = child.get("message", ""), child.text or ""
    if message == "collection skipped":  # the reason stands in the text: (file, line, 'Skipped: reason')
        message = _last_of_tuple(text).removeprefix("Skipped: ")
    elif message == "collection failure":
        message = _last(line for line in text.splitlines() if line.startswith("E ")).lstrip("E ") or message
    return re.sub(r"\s+", " ", message).strip()


def _last(lines: Iterable[str]) -> str:
    return ["", *lines][-1]


def _last_of_tuple(text: str) -> str:
    try:
        return str(ast.literal_eval(text.strip())[-1])
    except (ValueError, SyntaxError, TypeError, IndexError, KeyError):
        return text
