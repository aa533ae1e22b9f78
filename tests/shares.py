"""Run pytest in two processes at once, which share the tests: most of these wait, for processes, faults and timeouts.

    python tests/shares.py --parts -m "not long"

The arguments are pytest's. Lines of progress come at once, with the number of the process; what pytest says of
failures, and its sums, when both have ended. Of a process that ended before pytest could say that (a crash, a timeout,
an internal error), its last lines are shown.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import deque

OF = 2
NO_TESTS = 5
"""pytest's exit code where there was nothing to do: the other process has had it all."""
_ENDING = re.compile(
    r"=+ (FAILURES|ERRORS|warnings summary|short test summary info|.* in [\d.]+s.*) =+$|(\w+Error|ERROR)\b.*"
)
_FAILURES = re.compile(r"=+ (FAILURES|ERRORS) =+$")
_LAST = 1000
"""Lines of a process that are kept: a crash is told with the stacks of all threads."""


def main(arguments: list[str]) -> int:
    """Return the exit code: of the first process that did not end well."""
    with tempfile.TemporaryDirectory(prefix="m8d-shares-") as claims:
        environ = {**os.environ, "M8D_SHARE_CLAIMS": claims}
        runs = [
            subprocess.Popen(
                [sys.executable, "-m", "pytest", *arguments, "--share", f"{number}/{OF}"],
                env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            )
            for number in range(1, OF + 1)
        ]  # fmt: skip
        ends: list[list[str]] = [[] for _ in runs]
        readers = [
            threading.Thread(target=read, args=(number, run, end))
            for number, (run, end) in enumerate(zip(runs, ends, strict=True), 1)
        ]
        for reader in readers:
            reader.start()
        try:
            for reader in readers:
                reader.join()
        except KeyboardInterrupt:  # pytest has it, too, and says what was done so far
            for reader in readers:
                reader.join()
        codes = [run.wait() for run in runs]
    for number, (code, end) in enumerate(zip(codes, ends, strict=True), 1):
        say(f"-- process {number} of {OF}, exit code {code}:", *end)
    return next((code for code in codes if code not in {0, NO_TESTS}), 0)


def say(*lines: str) -> None:
    """Print lines, in one piece."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def read(number: int, run: subprocess.Popen[str], end: list[str]) -> None:
    """Show a process's lines of progress; put what it says in the end into `end`."""
    assert run.stdout is not None
    before = deque[str](maxlen=_LAST)
    for each in run.stdout:
        line = each.rstrip("\n")
        if line.startswith("-- "):
            say(f"{number}: {line[3:]}")
        elif end or _ENDING.match(line):
            end.append(line)
        else:
            before.append(line)
    if run.wait() not in {0, NO_TESTS} and not any(_FAILURES.match(line) for line in end):
        end[:0] = before


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
