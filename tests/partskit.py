"""How long tests take, which are left to `nox -s tests-all`, and what is said of a run's progress.

``tests/seconds.json`` holds what each test function takes (mean of its cases with set-up, seconds, two quiet cores); it is
written by ``--record-seconds``. ``tests/long.txt`` lists what `nox -s tests` leaves out. Both are lists beside the tests,
so that a test that becomes slower is moved in one line.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

HERE = Path(__file__).parent
ROOT = HERE.parent
SECONDS = HERE / "seconds.json"
LONG = HERE / "long.txt"
UNKNOWN = 0.02
"""Seconds of a test that is not recorded: what takes less than `LEAST` is left out of the record."""
UNKNOWN_LONG = 5.0
"""The same of one that is listed as long."""
LEAST = 0.2
EVERY = 30.0
"""Seconds between two lines within a part."""
SETTLED = 20.0
"""Expected seconds of work after which the pace of this machine counts."""


def read_long(text: str) -> set[str]:
    """Paths of files, and ``path::function``, one on each line; what follows a # is a reason."""
    return {line.partition("#")[0].strip() for line in text.splitlines()} - {""}


def function_of(nodeid: str) -> str:
    """The test function of a test: its id without the case."""
    return nodeid.partition("[")[0]


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def is_long(nodeid: str, long: set[str]) -> bool:
    return _file(nodeid) in long or function_of(nodeid) in long


def share_of(seconds: dict[str, float], number: int, of: int) -> set[str]:
    """Which files belong to one of `of` shares that take about as long: the longest first, each to the shortest share.

    Args:
        seconds: what each file takes.
        number: of the share, from 1 on.
        of: how many there are.
    """
    shares: list[set[str]] = [set() for _ in range(of)]
    sums = [0.0] * of
    for file in sorted(seconds, key=lambda each: (-seconds[each], each)):
        least = sums.index(min(sums))
        shares[least].add(file)
        sums[least] += seconds[file]
    return shares[number - 1]


def read_share(text: str) -> tuple[int, int]:
    """Read a share: 1/2 is the first of two."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise pytest.UsageError(f"--share {text}: NUMBER/OF is wanted, as in 1/2")
    return int(number), int(of)


class Claims:
    """Which run of pytest has which file, of several that share a folder: the first that asks for it.

    Args:
        folder: of the claims; made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._asked: dict[str, bool] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def mine(self, file: str) -> bool:
        """Claim a file; returns False if another run has it."""
        if file not in self._asked:
            try:
                (self._folder / file.replace("/", "%")).touch(exist_ok=False)
                self._asked[file] = True
            except FileExistsError:
                self._asked[file] = False
        return self._asked[file]

    def others(self) -> set[str]:
        """Which files other runs have."""
        claimed = {each.name.replace("%", "/") for each in self._folder.iterdir()}
        return {file for file in claimed if not self._asked.get(file)}


class Progress:
    """Says where a run is: parts are the folders of tests, in the run's order. Time is an argument.

    Args:
        tests: (part, expected seconds) of each test, in the order in which they run.
        now: seconds of any clock.
        among: how many runs have these tests together.
    """

    def __init__(self, tests: list[tuple[str, float]], now: float, among: int = 1) -> None:
        self._tests = tests
        self._among = among
        self._parts = list(dict.fromkeys(part for part, _ in tests))
        self._sizes = Counter(part for part, _ in tests)
        self._began = self._said = now
        self._part = ""
        self._done = 0

    def starts(self, now: float) -> str:
        """A test is about to run; returns the line of a new part, or ""."""
        part = self._tests[self._done][0] if self._done < len(self._tests) else self._part
        if part == self._part:
            return ""
        self._part, self._said = part, now
        number = self._parts.index(part) + 1
        return (
            f"part {number} of {len(self._parts)}: {part}, {self._sizes[part]} tests, "
            f"{_span(self._left(now, part))}; to the end {_span(self._left(now))}"
        )

    def due(self, now: float) -> bool:
        """Whether there is something to be said when the next test ends."""
        return now - self._said >= EVERY

    def ends(self, now: float) -> str:
        """A test has ended; returns a line from time to time, or ""."""
        self._done += 1
        if not self.due(now) or self._done >= len(self._tests):
            return ""
        self._said = now
        done = sum(part == self._part for part, _ in self._tests[: self._done])
        return f"{self._part}: {done} of {self._sizes[self._part]} tests; to the end {_span(self._left(now))}"

    def elsewhere(self, count: int) -> None:
        """The next tests run elsewhere: their time is none of this run's."""
        until = min(self._done + count, len(self._tests))  # a second look counts as one more that has ended
        self._tests[self._done : until] = [(part, 0.0) for part, _ in self._tests[self._done : until]]
        self._done = max(self._done, until)

    def begun_elsewhere(self, numbers: Iterable[int]) -> None:
        """Other runs have begun these tests, by their place in the order."""
        for number in numbers:
            if number >= self._done:
                self._tests[number] = (self._tests[number][0], 0.0)

    def _left(self, now: float, part: str = "") -> float:
        """Expected seconds until the end (of a part), at the pace that was seen so far."""
        done = sum(seconds for _, seconds in self._tests[: self._done])
        pace = (now - self._began) / done if done > SETTLED else 1.0
        left = sum(seconds for each, seconds in self._tests[self._done :] if part in {"", each})
        return pace * left / self._among


def _span(seconds: float) -> str:
    if seconds < 90:
        return f"about {max(10, round(seconds / 10) * 10)} s"
    return f"about {round(seconds / 60)} min"


def _part(path: Path) -> str:
    """Return the folder below tests/ that a test is in; of one that is elsewhere its own folder."""
    return path.relative_to(HERE).parts[0] if path.is_relative_to(HERE) else path.parent.name


def lengthen(item: pytest.Item, soak: float, default: float) -> None:
    """Give a soak test the time that it lasts on top of its timeout, which is that of the rest.

    Args:
        item: the test.
        soak: seconds that it lasts.
        default: timeout of a test without one of its own.
    """
    own = item.get_closest_marker("timeout")
    seconds = default if own is None else own.args[0]
    item.add_marker(pytest.mark.timeout(seconds + soak), append=False)


class Parts:
    """The plugin."""

    def __init__(self, config: pytest.Config) -> None:
        self._shows = config.getoption("--parts")
        self._records = config.getoption("--record-seconds")
        share = config.getoption("--share")
        self._share = None if share is None else read_share(share)
        claims = os.environ.get("M8D_SHARE_CLAIMS", "")
        self._claims = Claims(Path(claims)) if claims and self._share is not None else None
        self._long = read_long(LONG.read_text(encoding="utf-8"))
        self._seconds: dict[str, float] = json.loads(SECONDS.read_text(encoding="utf-8"))
        self._progress: Progress | None = None
        self._files: list[str] = []
        self._plugins = config.pluginmanager
        self._took: dict[str, float] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        for item in items:
            if is_long(item.nodeid, self._long):
                item.add_marker(pytest.mark.long)
            if item.get_closest_marker("soak") is not None:
                lengthen(item, config.getoption("--soak"), float(config.getini("timeout")))
        if self._share is not None:
            seconds: dict[str, float] = {}
            for item in items:
                file = _file(item.nodeid)
                seconds[file] = seconds.get(file, 0.0) + self._expected(item.nodeid)
            mine = share_of(seconds, *self._share)
            others = [item for item in items if _file(item.nodeid) not in mine]
            items[:] = [item for item in items if _file(item.nodeid) in mine]
            if self._claims is None:
                config.hook.pytest_deselected(items=others)
            else:  # from the other end, where those whose share it is come last
                files = list(dict.fromkeys(_file(item.nodeid) for item in others))
                items += [item for file in reversed(files) for item in others if _file(item.nodeid) == file]

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """With claims: run what no other share has begun, instead of pytest's own loop.

        pytest tears down what the next test does not need. Which one is next must be known for that: the next file is
        claimed as the last test of a file begins.
        """
        tests = [(_part(item.path), self._expected(item.nodeid)) for item in session.items]
        if self._shows:
            self._files = [_file(item.nodeid) for item in session.items]
            among = 1 if self._claims is None or self._share is None else self._share[1]
            self._progress = Progress(tests, time.monotonic(), among)
        option = session.config.option
        if self._claims is None or option.collectonly:
            return None
        if session.testsfailed and not option.continue_on_collection_errors:
            return None  # pytest says so
        claimed = self._claimed(session.items)
        left_out, item = next(claimed, (0, None))
        while item is not None:
            if self._progress is not None:
                self._progress.elsewhere(left_out)
            left_out, after = next(claimed, (0, None))
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            item = after
        return True

    def _claimed(self, items: Iterable[pytest.Item]) -> Iterator[tuple[int, pytest.Item]]:
        """Yield the tests that no other share has begun, each with how many before it another one has."""
        assert self._claims is not None
        left_out = 0
        for item in items:
            if self._claims.mine(_file(item.nodeid)):
                yield left_out, item
                left_out = 0
            else:
                left_out += 1

    def _expected(self, nodeid: str) -> float:
        unknown = UNKNOWN_LONG if is_long(nodeid, self._long) else UNKNOWN
        return self._seconds.get(function_of(nodeid), unknown)

    def pytest_runtest_logstart(self) -> None:
        if self._progress is not None:
            self._say(self._progress.starts(time.monotonic()))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._took[report.nodeid] = self._took.get(report.nodeid, 0.0) + report.duration

    def pytest_runtest_logfinish(self) -> None:
        if self._progress is not None:
            if self._claims is not None and self._progress.due(time.monotonic()):
                others = self._claims.others()
                self._progress.begun_elsewhere(
                    number for number, file in enumerate(self._files) if file in others
                )
            self._say(self._progress.ends(time.monotonic()))

    def pytest_sessionfinish(self) -> None:
        if self._records:
            record(Path(self._records), self._took)

    def _say(self, line: str) -> None:
        reporter = self._plugins.get_plugin("terminalreporter")  # it is there later than this plugin
        if line and reporter is not None:
            reporter.ensure_newline()
            dots = "\n" if reporter.verbosity < 0 else ""  # of -q, which it knows nothing of
            reporter.write_line(f"{dots}-- {line}")


def record(path: Path, took: dict[str, float]) -> None:
    """Put what tests took into a record; what it knows of tests that did not run stays."""
    known: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    cases = Counter(function_of(nodeid) for nodeid in took)
    sums = dict.fromkeys(cases, 0.0)
    for nodeid, seconds in took.items():
        sums[function_of(nodeid)] += seconds
    means = {name: round(total / cases[name], 2) for name, total in sums.items()}
    kept = {name: seconds for name, seconds in known.items() if name not in means}
    kept |= {name: seconds for name, seconds in means.items() if seconds >= LEAST}
    path.write_text(json.dumps(dict(sorted(kept.items())), indent=0) + "\n", encoding="utf-8")
